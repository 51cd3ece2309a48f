"""The ways into the passes: two `torch.compile` backends, `moe_ops.compile`, and `moe_ops.fuse()`.

- `backend="moe_ops"`: our passes on the graph that Dynamo captured, then Inductor, with the user's own passes.
- `backend="moe_ops_eager"`: the same capture and passes; the rewritten graph runs as it is, without code generation.
- `moe_ops.compile(model, **torch_compile_arguments)`: the same, `mode` and `options` together, and loops over experts
  that cannot be captured are given a form that can be.
- `with moe_ops.fuse():` for code that calls torch.compile with the default backend, and for AOTInductor.

The first three count and log every compilation. `fuse()` can do so only when Inductor's caches have no entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from compile_passes import compat
from compile_passes.captures import writes_out
from compile_passes.generation import prepare_generate
from compile_passes.observe import default_compilations
from compile_passes.passes import PASSES, SAVE, MoEPass, enter, graph_modules, recompute_in, run_all, users_passes
from compile_passes.prepare import prepare
from compile_passes.unwrap import in_parts
from compile_passes.vocabulary import target_name
from meta.checks import fail
from meta.layer_shapes import check_recompute

# Inductor calls what is on the first hook; what is on the second is in the key of its caches, always. (A user's pass
# without an identity takes the first hook out of the key.)
_PASSES_HOOK, _KEY_HOOK = "pre_grad_custom_pass", "post_grad_custom_pre_pass"
_JOINT_HOOK = "joint_custom_pre_pass"  # forward and backward in one graph


@writes_out
def moe_ops(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend "moe_ops": Inductor, with MoE blocks fused. ``mode`` and ``options`` are torch.compile's, and one option
    more: ``"recompute"``, what layers compute again in the backward, as of :func:`moe_ops.fused_experts`.

    The user's own passes run where Inductor runs them, on the graph with our operators in it.

    Raises:
        RuntimeError: an option or mode that Inductor does not have.
        ValueError: an unknown name for ``"recompute"``.
    """
    recompute, others = _recompute(options)
    settings = {**compat.mode_options(mode, None), **compat.inductor_options(others)}
    with _counted_once():
        reports = run_all(gm)
        recompute_in(gm, recompute)
        settings |= _hooks((), settings)
        compiled = in_parts(gm, example_inputs, partial(compat.inductor, settings=settings))
        return enter(compiled, reports)


@writes_out
def moe_ops_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend "moe_ops_eager": the rewritten graph, run by the Python that FX generates; gradients flow through it.

    Of ``options``, `recompute` and the user's `pre_grad_custom_pass` are honoured (after ours, as in "moe_ops"); the
    rest, like ``mode``, concerns code generation alone.
    """
    recompute, others = _recompute(options)
    settings = compat.inductor_options(others)
    with _counted_once():
        reports = run_all(gm)
        recompute_in(gm, recompute)
    users = users_passes(_held(_PASSES_HOOK, settings))
    for part in graph_modules(gm):
        for own in users:
            own(part.graph)
        regions = [node for node in part.graph.nodes if target_name(node) == "tag_activation_checkpoint"]
        for node in regions:
            node.target = _checkpointed
        if users or regions:
            part.recompile()
    return enter(gm.forward, reports)


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint` of a region that Dynamo captured, for a graph that runs as it is. torch's own call of it
    leaves random numbers to what cuts graphs: dropout would have another mask in the backward than in the forward.
    """
    given = {**kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        given["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **given)


def _recompute(options: dict[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """Our own option, and Inductor's."""
    others = dict(options or {})
    recompute = others.pop("recompute", None)
    check_recompute("compile", recompute)
    return recompute, others


def _hooks(steps: Sequence[Any], settings: dict[str, Any]) -> dict[str, MoEPass]:
    """Our hooks, carrying the passes that the options or Inductor's configuration hold there.

    Without ``steps`` the first one is needed only to put out of action the passes of an enclosing `fuse()`.
    """
    held = _held(_PASSES_HOOK, settings)
    hooks = {_KEY_HOOK: MoEPass((), _held(_KEY_HOOK, settings))}
    hooks[_JOINT_HOOK] = MoEPass((SAVE,), _held(_JOINT_HOOK, settings))
    if steps or held is not None:
        hooks[_PASSES_HOOK] = MoEPass(steps, held)
    return hooks


def _held(hook: str, settings: dict[str, Any]) -> Any:
    return settings[hook] if hook in settings else compat.inductor_setting(hook)


@contextmanager
def _counted_once() -> Iterator[None]:
    """Take back what was counted inside when it ends in an exception.

    Dynamo may trace and compile again: our passes and Inductor ask it to, for floats that they cannot keep symbolic.
    """
    section = compat.counters()["moe_ops"]
    counts = dict(section)
    try:
        yield
    except BaseException:
        section.clear()
        section.update(counts)
        raise


def compile(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="moe_ops", **kwargs)``, with ``mode`` and ``options`` allowed together.

    A transformers model whose experts run as a Python loop, which no compiler can capture, is switched to
    ``experts_implementation="grouped_mm"`` first, with a warning. Another loop over the experts that were hit gets a
    static form, on the instance: a trial on a copy of one layer has to prove it equal, and it has to be fused. Lists of
    experts are stacked. PEFT's adapters of stacked weights (``target_parameters``) are captured as sums, which the
    passes take apart. transformers models that record router logits are prepared for the capture of that, and the graph
    of a model in DistributedDataParallel is not cut at its buckets. Warnings say what was done, what it cost, and what
    was left as it is and why; :func:`moe_ops.restore` undoes what was done to modules. Code that would raise for what
    Dynamo is set to capture for the experts is captured without that, with the graph breaks of plain torch.compile.
    It is set while this model is compiled, at whatever call: torch.compile of another model, or of this one by itself,
    goes by `torch._dynamo.config` as the user has it. (A torch that does not let that be done has it set for good.)

    ``generate(cache_implementation="static")`` of a transformers model compiles its decode steps by itself; its
    ``generation_config.compile_config`` is set to compile them in the same way, which a warning says.

    Args:
        model: module or function.
        kwargs: arguments of torch.compile. ``backend`` is "moe_ops" (default) or "moe_ops_eager": with others the model
            is prepared, and nothing is fused; of ``options``, "recompute" is "activation" or "all": what layers compute
            again in the backward instead of keeping it, see :func:`moe_ops.fused_experts`.

    Returns:
        The compiled model.

    Raises:
        ValueError: ``model`` is not callable, or an unknown name for "recompute".

    Example:
        >>> model = moe_ops.compile(model, mode="reduce-overhead", options={"max_autotune": True})
    """
    if not callable(model):
        raise fail("compile", "model", "a module or a function", type(model).__name__)
    mode, options = kwargs.pop("mode", None), kwargs.pop("options", None)
    _recompute(options)
    merged = {**compat.mode_options(mode, kwargs.get("dynamic")), **(options or {})}
    kwargs.setdefault("backend", "moe_ops")
    if merged:
        kwargs["options"] = merged
    if isinstance(model, torch.nn.Module):
        prepare(model)
        asked = {} if mode is None and options is None else {"mode": None, "options": merged or None}
        graph = {name: kwargs[name] for name in ("fullgraph", "dynamic") if name in kwargs}
        prepare_generate(model, kwargs["backend"], asked, **graph)
    compat.try_again(model)
    return compat.compiled(model, **kwargs)


@contextmanager
def fuse() -> Iterator[None]:
    """Compilations inside the block, by the default backend, fuse MoE blocks; the configuration is restored after it.

    torch.compile compiles at the first call: that call has to be inside. A warning says so where torch.compile was
    called inside and nothing was compiled; it says nothing of what had been compiled before. The same goes for
    AOTInductor, which compiles at once:

        with moe_ops.fuse():
            torch._inductor.aoti_compile_and_package(exported_program, package_path="model.pt2")

    Inductor calls passes when its caches have no entry: with a warm cache the fused code is used, but
    ``counters["moe_ops"]`` stays empty and nothing is logged. The backend "moe_ops" counts and logs every time.

    Example:
        >>> compiled = torch.compile(model)
        >>> with moe_ops.fuse():
        ...     compiled(tokens)
    """
    before = MoEPass.consultations
    with default_compilations() as calls, compat.patch_inductor(_hooks(PASSES, {})):
        yield
    if calls.made and MoEPass.consultations == before:
        warnings.warn(_NOTHING_COMPILED, stacklevel=3)


_NOTHING_COMPILED = (
    "torch.compile was called inside moe_ops.fuse(), but nothing was compiled there, so nothing is fused: "
    "torch.compile compiles at the first call of what it returns, and that call has to be inside too. "
    'torch.compile(model, backend="moe_ops") has no such condition.'
)


for _name, _function in (("moe_ops", moe_ops), ("moe_ops_eager", moe_ops_eager)):
    compat.register_backend(_function, _name)
compat.leave_sizes_of_einsum_open()
