"""What `moe_ops.compile` does to a model before it is captured, and how that is undone.

Experts of transformers on the eager loop are switched to a form in one graph, loops over the experts that were hit get
a static form, as do one-hots whose classes the data counts, lists of experts are stacked, PEFT's adapters of stacked
weights are captured without its parametrizations, and router logits can be recorded. A warning says what was done, and
what was left alone and why.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from compile_passes.adapters import Adapted, adapt, find_adapters, restore_adapters
from compile_passes.adapters import why_not as why_not_adapted
from compile_passes.class_counts import FIX_CLASSES, without_class_counts
from compile_passes.compat import NUMBERS, SIZES
from compile_passes.generation import get_compiled_call
from compile_passes.loops import (
    ALIKE,
    CAPTURABLE,
    LEFT,
    SETTING,
    ExpertLoop,
    cure,
    cuts_by_numbers,
    find_blocks,
    find_loops,
    find_sizes_of_the_data,
    is_static,
    loops_over_data,
    loops_over_many,
)
from compile_passes.rebind import Verdict, bind, fused_as_written, verdict_of
from compile_passes.recording import prepare_recording, restore_recording
from compile_passes.stack_slices import STACKS
from compile_passes.stackable import ExpertList, expert_lists, taken_elsewhere, why_not
from compile_passes.stacking import stack_list, unstack, watch
from compile_passes.static_loops import in_few_turns
from compile_passes.trial import ON_META, rely_anew, unbind
from meta.checks import check_module
from moe_ops.compat import CAPTURED_UNDER, captured_under

log = logging.getLogger(__name__)

_AGAIN = "Call moe_ops.compile(model) again when they are loaded."


def prepare(model: nn.Module) -> None:
    """Make the experts of ``model`` capturable; warn of what was and was not done."""
    unbind(module for module in model.modules() if not is_static(module))
    for module in model.modules():
        if is_static(module) and not vars(module)[ALIKE]:
            rely_anew(module)
        if STACKS in vars(module):
            watch(module)
    loops = find_loops(model)
    switched = _switch(model, [loop for loop in loops if loop.switchable])
    cut = _allow_numbers(model)
    inside = tuple(f"{name}." if name else "" for name in cut)
    own = [loop for loop in loops if loop not in switched and not f"{loop.name}.".startswith(inside)]
    _make_static(model, own)
    _fix_class_counts(model)
    _capture_few_turns(model, inside)
    _stack_lists(model)
    _capture_adapters(model)
    _allow_sizes(model)
    said = prepare_recording(model)
    if said is not None:
        _say(said)
    _keep_whole(model)


def _switch(model: nn.Module, loops: list[ExpertLoop]) -> list[ExpertLoop]:
    """Let transformers run the experts of ``loops`` in one graph; returns the loops that it does that for."""
    switch = getattr(model, "set_experts_implementation", None)
    if not loops or switch is None:
        return []
    switch(CAPTURABLE)
    for loop in loops:
        setattr(loop.module.config, SETTING, CAPTURABLE)
    _say(
        f'moe_ops.compile: switched the experts of {type(model).__name__} from the "eager" loop, which cannot be '
        f'captured, to experts_implementation="{CAPTURABLE}".'
    )
    return loops


def restore(model: nn.Module) -> nn.Module:
    """Undo what `moe_ops.compile` and `stack_experts_` did to the modules of a model.

    Loops run as their class writes them again, every expert has its own parameters, with the present values, PEFT
    runs its adapters in its own way, and hooks that record router logits are taken off. What was set in the model's
    configurations stays: `experts_implementation`, and the `compile_config` of `generate`.

    Args:
        model: a module, some of whose loops may have a static form and some of whose lists may be stacked.

    Returns:
        ``model``.

    Raises:
        ValueError: it is no module.
    """
    check_module("restore", model)
    unbind(model.modules())
    restore_adapters(model)
    restore_recording(model)
    for module in model.modules():
        vars(module).pop(CAPTURED_UNDER, None)
        if getattr(vars(module).get("get_compiled_call"), "__func__", None) is get_compiled_call:
            del vars(module)["get_compiled_call"]
    return unstack(model)


@dataclass
class _Alike:
    """The modules of one class, by their names in the model, that share a verdict."""

    kind: type[nn.Module]
    verdict: Verdict
    names: list[str] = field(default_factory=list)

    @property
    def called(self) -> str:
        """How they are called, the model itself by its class."""
        return _and_more([name or self.kind.__name__ for name in self.names])


def _bind_alike(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]], judged: Callable[[str, nn.Module], Verdict]
) -> dict[tuple[type, str], _Alike]:
    """Bind what the verdicts on modules of a model say; these by class and reason."""
    kinds: dict[tuple[type, str], _Alike] = {}
    for name, module in modules:
        verdict = judged(name, module)
        if verdict.forms:
            bind(model, verdict)
        kinds.setdefault((type(module), verdict.reason), _Alike(type(module), verdict)).names.append(name)
    return kinds


def _make_static(model: nn.Module, loops: list[ExpertLoop]) -> None:
    """Bind the static form of every loop that has one, and say what became of each kind of loop."""
    lists = expert_lists(model) if loops else []
    taken = taken_elsewhere(model, lists) if loops else {}
    own = {loop.name: loop for loop in loops}

    def judged(name: str, module: nn.Module) -> Verdict:
        verdict = _unstackable(lists, name, module, taken) or verdict_of(model, name)[0]
        if verdict.forms:
            _allow([module], SIZES)
        else:
            LEFT[module] = _sentence(verdict.reason)
        return verdict

    kinds = _bind_alike(model, ((loop.name, loop.module) for loop in loops), judged)
    for (kind, reason), alike in kinds.items():
        called, verdict = f"{alike.called} ({kind.__name__})", alike.verdict
        if not verdict.forms:
            mend = _AGAIN if verdict.reason == ON_META else cure(own[alike.names[-1]], tried=True)
            _say(
                f"moe_ops.compile: {called} run their experts in a Python loop, which cannot be captured; they are "
                f"left as is. {_sentence(reason)} {mend}"
            )
            continue
        _say(
            f"moe_ops.compile: {called} run their experts in a loop over those that were hit, which cannot be "
            f"captured: {_proved(verdict)} The gradient of an expert without tokens is 0 in place of None: weight "
            "decay and momentum go on for it. Hooks that are put on experts from now on are called for it, too, with "
            "no rows."
        )


def _allow_numbers(model: nn.Module) -> list[str]:
    """Allow the capture of counts by which blocks cut their rows, where these blocks are fused then; which they are."""
    blocks = dict(find_blocks(model, cuts_by_numbers))
    bare = [name for name, block in blocks.items() if any(weight.is_meta for weight in block.parameters())]
    if bare:
        _say(
            f"moe_ops.compile: {_and_more(bare)} reads counts of rows on the host, and is left as it is. "
            f"{_sentence(ON_META)} {_AGAIN}"
        )
    found = [name for name in blocks if name not in bare and fused_as_written(model, name)]
    if found:
        _allow(map(model.get_submodule, found), SIZES, NUMBERS)
        called = [name or type(model).__name__ for name in found]
        _say(
            f"moe_ops.compile: {_and_more(called)} reads counts of rows on the host to cut the rows by them, for the "
            f"capture of which torch._dynamo.config.{NUMBERS} is set while this model is compiled."
        )
    return found


def _fix_class_counts(model: nn.Module) -> None:
    """Bind code with fixed numbers of classes where a one-hot asks the data for their number."""
    asking = find_blocks(model, _asks_for_classes)
    kinds = _bind_alike(model, asking, lambda name, module: verdict_of(model, name, None)[0])
    for (kind, reason), alike in kinds.items():
        asked = (
            f"moe_ops.compile: {alike.called} ({kind.__name__}) ask the data for the number of classes of a "
            "one-hot, which cannot be captured"
        )
        if alike.verdict.forms:
            _say(f"{asked}: {_proved(alike.verdict)}")
        else:
            mend = _AGAIN if reason == ON_META else FIX_CLASSES
            _say(f"{asked}; they are left as is. {_sentence(reason)} {mend}")


def _capture_few_turns(model: nn.Module, inside: tuple[str, ...]) -> None:
    """Have loops over many experts, which can be captured as they are, captured in few turns; not those ``inside``."""
    found = [(name, module) for name, module in find_blocks(model, loops_over_many)
             if not f"{name}.".startswith(inside)]  # fmt: skip
    lists = expert_lists(model) if found else []
    taken = taken_elsewhere(model, lists) if found else {}

    def judged(name: str, module: nn.Module) -> Verdict:
        return _unstackable(lists, name, module, taken) or verdict_of(model, name, in_few_turns)[0]

    for (kind, reason), alike in _bind_alike(model, found, judged).items():
        called = f"{alike.called} ({kind.__name__})"
        if alike.verdict.forms:
            said = "; ".join(line for form in alike.verdict.forms.values() for line in form.said)
            _say(
                f"moe_ops.compile: {called} run many experts one after the other, of which three are captured, and the "
                f"others made in the graph as these are: {said}. That it is the graph of all was seen on a copy of one "
                f"layer, in {alike.verdict.seconds:.1f} s; moe_ops.restore(model) undoes it."
            )
        else:
            log.info("%s are captured in all turns: %s", called, reason)


def _asks_for_classes(module: nn.Module) -> bool:
    """Whether code of a module, or of one inside of it, asks the data for the number of classes of a one-hot."""
    return any(not is_static(inside) and without_class_counts(inside) is not None for inside in module.modules())


def _proved(verdict: Verdict) -> str:
    """What was written otherwise, and what proved it."""
    said = "; ".join(line for form in verdict.forms.values() for line in form.said)
    mode = {None: "", True: " In eval mode the original runs.", False: " In training the original runs."}
    narrowed = f", {verdict.narrower} times narrower for want of memory, and on the layer itself, outputs"
    return (
        f"{said}. The static form was proved equal on a copy of one layer, outputs and gradients"
        f"{narrowed if verdict.narrower > 1 else ''}, in {verdict.seconds:.1f} s; moe_ops.restore(model) undoes "
        f"it.{mode[verdict.training]}"
    )


def _unstackable(lists: list[ExpertList], name: str, module: nn.Module, taken: dict[int, str]) -> Verdict | None:
    """A verdict against a loop over a list that cannot be stacked: its static form would not be fused."""
    for found in lists:
        if found.module is module or found.path.startswith(f"{name}." if name else ""):
            problem = why_not(found, taken)
            if problem is not None:
                problem = problem.removeprefix(f"{name}.")
                return Verdict({}, reason=f"its list of experts stays a list: {problem}")
    return None


def _stack_lists(model: nn.Module) -> None:
    """Stack the lists of experts that a capturable loop runs over."""
    lists = [found for found in expert_lists(model) if not _loops(model, found.path)]
    taken = taken_elsewhere(model, lists) if lists else {}
    done, left = [], []
    problems = [why_not(found, taken) for found in lists]
    # Of lists of parameters side by side, some alone would be slower, and not fused.
    stuck = [found.owner for found, problem in zip(lists, problems, strict=True) if problem and not found.keys]
    for found, problem in zip(lists, problems, strict=True):
        if problem is None and (found.keys or found.owner not in stuck):
            stack_list(found)
            done.append(found.name)
        elif problem is not None:
            left.append(problem)
    if done:
        _say(
            f"moe_ops.compile: stacked the experts of {_and_more(done)}: one parameter for all experts in place of one "
            "for each, so make optimizers after this. The state dict keeps its keys; moe_ops.restore(model) undoes it."
        )
    if left:
        _say(f"moe_ops.compile: a list of experts stays a list, which is not fused: {_and_more(left)}.")


def _capture_adapters(model: nn.Module) -> None:
    """Let Dynamo capture adapters of stacked weights as sums, and say which and why not others."""
    done: list[str] = []
    left: dict[tuple[str, str], list[str]] = {}
    for adapted in find_adapters(model):
        problem = why_not_adapted(adapted)
        if problem is None:
            adapt(adapted)
            done.append(_called(adapted))
        else:
            left.setdefault(problem, []).append(_called(adapted))
    if done:
        _say(
            f"moe_ops.compile: PEFT's adapters of {_and_more(done)} are captured as sums of the weight and two "
            "factors, in place of a parametrization at every call, which cannot be captured. Eager calls are PEFT's "
            "own; moe_ops.restore(model) undoes it."
        )
    for (reason, mend), names in left.items():
        _say(
            f"moe_ops.compile: PEFT's adapters of {_and_more(names)} stay a parametrization at every call, which "
            f"cannot be captured: {reason}. {mend}"
        )


def _called(adapted: Adapted) -> str:
    return adapted.path or type(adapted.experts).__name__


def _allow_sizes(model: nn.Module) -> None:
    """Allow the capture of results at the experts whose sizes only the data knows."""
    found = [] if SIZES in captured_under(model) else find_sizes_of_the_data(model)
    if found:
        _allow(map(model.get_submodule, found), SIZES)
        called = [name or type(model).__name__ for name in found]
        _say(
            f"moe_ops.compile: {_and_more(called)} has results of sizes that only the data knows (bincount, nonzero, "
            f"where, masks), for the capture of which torch._dynamo.config.{SIZES} is set while this model is compiled."
        )


def _allow(modules: Iterable[nn.Module], *names: str) -> None:
    """Have models with these modules captured under settings of `torch._dynamo.config`: a copy of one is, too."""
    for module in modules:
        vars(module)[CAPTURED_UNDER] = tuple({*vars(module).get(CAPTURED_UNDER, ()), *names})


def _keep_whole(model: nn.Module) -> None:
    """Have Dynamo leave the graph of a model under DistributedDataParallel in one piece.

    It would cut it at the bounds of the buckets, to send their gradients while the backward goes on, and stacked
    experts fill a bucket each: most cuts are inside of blocks.
    """
    parallel = getattr(nn.parallel, "DistributedDataParallel", None)
    config = torch._dynamo.config
    if parallel is not None and isinstance(model, parallel) and getattr(config, "optimize_ddp", False):
        config.optimize_ddp = False
        _say(
            "moe_ops.compile: torch._dynamo.config.optimize_ddp is set to False, because Dynamo would cut MoE blocks "
            "at the bounds of DistributedDataParallel's buckets. Gradients are sent when the backward has ended."
        )


def _loops(model: nn.Module, path: str) -> bool:
    """Whether a list is run by a loop that was left as it is: `_make_static` has said so. One that is captured with the
    counts that it reads is none.
    """
    modules = [model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])]
    left = [one for one in modules if not is_static(one) and NUMBERS not in vars(one).get(CAPTURED_UNDER, ())]
    return any(loops_over_data(type(module)) for module in left)


def _sentence(reason: str) -> str:
    return f"{reason[:1].upper()}{reason[1:].rstrip('.')}."


def _and_more(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _say(message: str) -> None:
    log.info(message)
    warnings.warn(message, stacklevel=5)  # the line of the user that calls moe_ops.compile
