"""Static forms of loops, bound to the modules that have these loops once a trial has proved them equal.

One trial is made for each class, configuration and source: modules that agree in all three share its verdict.
"""

from __future__ import annotations

import ast
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from compile_passes.class_counts import without_class_counts
from compile_passes.conversions import without_conversions
from compile_passes.effects import Kept, Written
from compile_passes.explain import explained
from compile_passes.loops import ALIKE
from compile_passes.match import in_words
from compile_passes.patterns.ids import are_distinct, are_integers, are_not_negative
from compile_passes.reached import OF_TORCH
from compile_passes.reading import Reading
from compile_passes.report import Report
from compile_passes.source import NotStatic, held
from compile_passes.stack_slices import METHODS, STACKS
from compile_passes.stackable import expert_lists, why_not
from compile_passes.stacking import stack_list
from compile_passes.static_loops import StaticForm, static_form
from compile_passes.trial import (
    HOOKS,
    NotAlone,
    Trial,
    apart,
    bind_methods,
    bound,
    takes_hidden_states_alone,
    takes_more,
)
from compile_passes.turns import as_text, is_written
from compile_passes.vocabulary import example
from moe_ops.logs import quiet

# Modules around the one with the loop that are tried for a forward of hidden states alone.
_AROUND = 2


@dataclass(frozen=True)
class Verdict:
    """What a trial came to.

    Attributes:
        forms: static forms of modules, by their path inside the block, the one with the loop first; empty when there
            are none.
        block: path of the block in the model.
        reason: why there is none.
        training: the mode in which it was proved; None: both.
        narrower: how many times narrower than the block its copy was, for want of memory.
        seconds: what the trial cost.
        alone: whether the block runs on hidden states alone; where it does not, one around it may.
        few: whether the graph of a few turns of the loops says what all turns do; see `turns`.
    """

    forms: Mapping[str, StaticForm]
    block: str = ""
    reason: str = ""
    training: bool | None = None
    narrower: int = 1
    seconds: float = 0.0
    alone: bool = True
    few: bool = False


_VERDICTS: dict[Any, Verdict] = {}
_Judgement = TypeVar("_Judgement")


def verdict_of(
    model: nn.Module, path: str, form_of: Callable[[nn.Module], StaticForm] | None = static_form
) -> tuple[Verdict, bool]:
    """(the verdict on a module of ``model``, whether it is from an earlier trial).

    Args:
        form_of: what makes a form of the loops of the module; None: the verdict is on what else in it asks the data.
    """
    start = time.perf_counter()
    verdict = Verdict({}, reason="its forward takes more than hidden states, and so do the modules around it")
    around, key, known = "", None, False
    try:
        module = model.get_submodule(path)
        if form_of is not None:
            _check_hooks(module)
        own = None if form_of is None else form_of(module)
        for around in _blocks(model, path):
            key = None
            block = model.get_submodule(around)
            forms = {} if own is None else {path[len(around) :].lstrip("."): own}
            for inside, other in block.named_modules():
                more = None if inside in forms else without_class_counts(other) or without_conversions(other)
                if more is not None:
                    forms[inside] = more
            for inside in forms:
                _check_unbound(block.get_submodule(inside))
            if any(form.of_some_ids for form in forms.values()):
                _check_ids_are_its_own(model, around, path)
            source = [ast.dump(tree) for form in forms.values() for tree in form.trees()]
            key = (*forms, form_of, *source, *_facts(block))
            known = key in _VERDICTS
            if not known:
                _VERDICTS[key] = _tried(block, forms, start)
            verdict = _VERDICTS[key]
            if verdict.alone:
                break
    except Exception as error:  # of code that nobody has thought of, too: it runs as it is
        reason = str(error) if isinstance(error, NotStatic) else f"its trial ended in {type(error).__name__}: {error}"
        verdict, known = Verdict({}, reason=reason, seconds=time.perf_counter() - start), False
        if key is not None:
            _VERDICTS[key] = verdict
    return replace(verdict, block=around if verdict.forms else ""), known


def fused_as_written(model: nn.Module, path: str) -> bool:
    """Whether a block is fused once Dynamo captures the numbers that it reads on the host."""
    around = next(_blocks(model, path), None)
    if around is None:
        return False
    block, reason = model.get_submodule(around), ""
    key = ("as written", *_facts(block))
    if key not in _VERDICTS:
        try:
            _of_either_rank(block, lambda trial: _check_fused(trial, {}, block.training, capture_scalar_outputs=True))
        except NotStatic as error:
            reason = str(error)
    return not _VERDICTS.setdefault(key, Verdict({}, reason=reason)).reason


def bind(model: nn.Module, verdict: Verdict) -> None:
    """Put the static forms in the place of the methods of one block."""
    block = model.get_submodule(verdict.block)
    for path, form in verdict.forms.items():
        module = block.get_submodule(path)
        for converted, dtype in form.converts:
            held(module, converted).to(held(module, dtype))
        bind_methods(module, form.functions(training=verdict.training, few=verdict.few))


class _NotFused(NotStatic):
    """What was tried is right, and slow."""


def _of_either_rank(block: nn.Module, judged: Callable[[Trial], _Judgement]) -> _Judgement:
    """What comes of a trial, or of one on [tokens, hidden] where nothing is fused of [batch, length, hidden]: code that
    asks for no shape runs on both.
    """
    trial = Trial(block)
    try:
        return judged(trial)
    except _NotFused as error:
        if trial.flat:
            raise
        refused = error
    try:
        return judged(Trial(block, flat=True))
    except NotStatic:
        raise refused from None


def _tried(block: nn.Module, forms: Mapping[str, StaticForm], start: float) -> Verdict:
    try:
        verdict = _of_either_rank(block, partial(_judged, block, forms))
    except NotAlone as error:
        verdict = Verdict({}, reason=str(error), alone=False)
    return replace(verdict, seconds=time.perf_counter() - start)


def _judged(block: nn.Module, forms: Mapping[str, StaticForm], trial: Trial) -> Verdict:
    if all(form.as_written for form in forms.values()):
        if not _check_fused(trial, forms, block.training):
            raise NotStatic("its turns are not alike")
        mode = None if _is_few_in_the_other_mode(trial, forms) else block.training
        return Verdict(forms, training=mode, narrower=trial.narrowing.factor, few=True)
    methods = {path: form.functions() for path, form in forms.items()}
    trial.compare(methods, block.training)
    forms = {path: replace(form, converts=_converted(trial.copy.get_submodule(path), form))
             for path, form in forms.items()}  # fmt: skip
    training: bool | None = block.training
    drew = False
    try:
        drew = trial.compare(methods, not block.training)
        training = None
    except NotStatic:
        pass  # the other mode runs the original
    few = _check_fused(trial, forms, block.training)
    # With dropout in experts they are not fused; ids may be others.
    if training is None and (drew or any(form.of_some_ids for form in forms.values())):
        try:
            few &= _check_fused(trial, forms, not block.training)
        except NotStatic:
            training = block.training
    elif training is None and few:
        few = _is_few_in_the_other_mode(trial, forms)
    return Verdict(forms, training=training, narrower=trial.narrowing.factor, few=few)


def _is_few_in_the_other_mode(trial: Trial, forms: Mapping[str, StaticForm]) -> bool:
    """Whether a few turns are enough in the mode, too, that the block is not in; code that asks for no mode has one."""
    parts = (part for form in forms.values() for tree in form.trees() for part in ast.walk(tree))
    if not any(isinstance(part, ast.Attribute) and part.attr == "training" for part in parts):
        return True
    try:
        return _check_fused(trial, forms, not trial.block.training)
    except NotStatic:
        return False


def _holds_all(block: nn.Module, forms: Mapping[str, StaticForm]) -> bool:
    """Whether the modules with loops hold all experts of a block: what others hold, their loops may be given."""
    stacked = {module for module in block.modules() if STACKS in vars(module)}
    looping = [block.get_submodule(path) for path, form in forms.items() if form.has_turns]
    return bool(looping) and all(stacked <= {*module.modules()} for module in looping)


def _converted(module: nn.Module, form: StaticForm) -> tuple[tuple[ast.expr, ast.expr], ...]:
    """The conversions that a module which has run has made: those in a branch that did not run are nobody's wish."""
    return tuple(
        (converted, dtype) for converted, dtype in form.converts
        if all(weight.dtype == held(module, dtype) for weight in held(module, converted).parameters())
    )  # fmt: skip


def _check_fused(trial: Trial, forms: Mapping[str, StaticForm], training: bool, **allowed: Any) -> bool:
    """Raise _NotFused when the static form is not captured in one graph, or not fused: it would be slow.

    Args:
        allowed: what Dynamo is allowed to capture, beside sizes of the data.

    Returns:
        Whether a few turns of its loops, written out, are the same graph, and leave the same on the modules.
    """
    block = trial.copy.train(training)
    for found in expert_lists(block):
        if why_not(found, {}) is None:
            stack_list(found)
    kept = Kept(trial.effects, block)
    negative: list[str] = []
    repeated: list[str] = []
    graphs: list[Any] = []

    def watch(graph: fx.Graph) -> None:
        graphs.append(as_text(graph))
        if any(map(is_written, graph.nodes)):
            return
        reading = Reading(graph)
        compared = _compared(reading, graph)
        experts = 1 + max((number for *_, number in compared), default=0)
        for node, ids, _ in compared:
            if any(form.by_number for form in forms.values()) and not are_not_negative(reading, ids):
                negative.append(in_words(node))
            if any(form.once for form in forms.values()) and not _are_distinct(reading, ids, experts):
                repeated.append(in_words(node))

    def captured(few: bool) -> tuple[Report, Any]:
        methods = {path: form.functions(few=few) for path, form in forms.items()}
        try:  # what is refused in a trial is part of the verdict
            with apart(), bound(block, methods), torch.set_grad_enabled(training), quiet(logging.CRITICAL):
                with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, **allowed):
                    report = explained(block, (trial.tokens("many tokens"),), {}, watch)
            left = kept.left()
            return report, {name: None if isinstance(value, Written) else value for name, value in left.items()}
        finally:
            kept.put_back()

    report, left = captured(few=False)
    problem = _problem(report)
    if problem is not None:
        raise _NotFused(problem)
    if negative:
        raise NotStatic(
            f"its ids cannot be proved not to be negative, at {negative[0]}, and a negative one counts from the end "
            "there, or moves the rows of others"
        )
    if repeated:
        raise NotStatic(
            f"its ids cannot be proved to be a token's only once each, at {repeated[0]}, and an expert that it has "
            "twice is counted once there, which moves the rows of others"
        )
    in_full = list(graphs)
    graphs.clear()
    return _holds_all(block, forms) and captured(few=True)[1] == left and graphs == in_full


def _compared(reading: Reading, graph: fx.Graph) -> list[tuple[fx.Node, Any, int]]:
    """Where integers are compared with a number, as ids are with that of every expert: (comparison, ids, number)."""
    calls = [(node, reading.read(node, "eq", "y")) for node in graph.nodes]
    return [
        (node, call["x"], call["y"]) for node, call in calls
        if call is not None and type(call["y"]) is int and are_integers(reading, call["x"])
    ]  # fmt: skip


def _are_distinct(reading: Reading, ids: Any, experts: int) -> bool:
    """Whether no token has one of ``ids``, in whatever shape, twice."""
    chosen = example(reading.exact(ids, experts))
    return chosen is not None and chosen.dim() > 0 and are_distinct(reading, ids, experts, chosen.shape[-1])


def _problem(report: Report) -> str | None:
    stops = [*filter(None, [report.error]), *report.graph_break_reasons, *report.eager_frames]
    if stops:
        return f"the static form is not captured either: {stops[0]}"
    if report.refused or not report.fused:
        reason = report.refused[0].reason if report.refused else "no block is recognised."
        return f"the static form is captured but not fused: {reason}"
    return None


def _check_unbound(module: nn.Module) -> None:
    """Raise NotStatic where a module runs something else than its class already."""
    for name in vars(module):
        if name not in METHODS and callable(inspect.getattr_static(type(module), name, None)):
            raise NotStatic(f"its {name} is bound to the instance already")


def _check_hooks(module: nn.Module) -> None:
    """Raise NotStatic where somebody listens to the experts."""
    for path, inner in module.named_modules():
        if path and any(getattr(inner, name, None) for name in HOOKS):
            raise NotStatic(f"{path} has hooks, which would also be called for experts without tokens")


def _check_ids_are_its_own(model: nn.Module, around: str, path: str) -> None:
    """Raise NotStatic where the module with the loop, at ``path``, may get other ids than in a trial of the block."""
    while path != around:
        module = model.get_submodule(path)
        if sum(module in parent.children() for parent in model.modules()) > 1:
            raise NotStatic(f"its ids may be others where {path} is called from another module")
        path = path.rpartition(".")[0]
        if path == around and takes_more(model.get_submodule(path)):
            raise NotStatic(f"its ids may be others where {path or 'the model'} is given more than hidden states")


def _blocks(model: nn.Module, path: str) -> Iterator[str]:
    """The module with the loop, and those around it, whose forward takes hidden states alone, as far as it says."""
    tried = path
    for _ in range(_AROUND + 1):
        if takes_hidden_states_alone(model.get_submodule(tried)):
            yield tried
        if not tried:
            break
        tried = tried.rpartition(".")[0]


def _facts(block: nn.Module) -> Iterator[Any]:
    """What a trial's outcome depends on: classes, shapes, modes, and all that is set on the modules."""
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        yield name, tuple(tensor.shape), tensor.dtype, tensor.device.type
    for name, tensor in block.named_buffers():
        if tensor.numel() == 1 and not tensor.is_meta:
            yield name, repr(tensor.item())
    for path, module in block.named_modules():
        yield path, getattr(type(module), "_moe_ops_original", type(module)), module.training
        for name, value in sorted(vars(module).items()):
            if name[:1] == "_":
                if name not in OF_TORCH and name != ALIKE and isinstance(value, int | float | str | None):
                    yield name, repr(value)
            elif name not in METHODS:
                settings = getattr(value, "to_dict", None)
                yield name, _comparable(settings() if callable(settings) else value)


class _Itself:
    """An object that is equal to itself alone, kept so that no other one gets its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _comparable(value: Any) -> str | _Itself:
    plain = isinstance(value, int | float | str | bool | type(None) | tuple | list | dict | torch.dtype | torch.device)
    return repr(value) if plain else _Itself(value)
