"""The ways into the passes: two `torch.compile` backends, `moe_ops.compile`, and `moe_ops.fuse()`.

- `backend="moe_ops"`: Inductor with our passes after the user's own.
- `backend="moe_ops_eager"`: the same capture and passes; the rewritten graph runs as it is, without code generation.
- `moe_ops.compile(model, **torch_compile_arguments)`: the same, `mode` and `options` together, and a transformers model
  on the eager expert loop is switched to a form that can be captured.
- `with moe_ops.fuse():` for code that calls torch.compile with the default backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from compile_passes.loops import prepare
from compile_passes.passes import JOIN, POST_GRAD, PRE_GRAD, MoEPass, graph_modules, run
from moe_ops import compat_compile as compat

_HOOKS = {"pre_grad_custom_pass": PRE_GRAD, "post_grad_custom_pre_pass": POST_GRAD}


def moe_ops(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend "moe_ops": Inductor, with MoE blocks fused. ``mode`` and ``options`` are torch.compile's.

    Raises:
        RuntimeError: an option or mode that Inductor does not have.
    """
    settings = {**compat.mode_options(mode, None), **compat.inductor_options(options or {})}
    counts = dict(compat.counters()["moe_ops"])
    try:
        return compat.inductor(gm, example_inputs, {**settings, **_with_our_passes(settings)})
    except BaseException:
        # Dynamo may trace and compile again (Inductor asks it to, for floats that it cannot keep symbolic): count once.
        compat.counters()["moe_ops"].clear()
        compat.counters()["moe_ops"].update(counts)
        raise


def moe_ops_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend "moe_ops_eager": the rewritten graph, run by the Python that FX generates; gradients flow through it.

    Of ``options``, the custom passes are honoured and the rest, like ``mode``, concerns code generation alone.
    """
    settings = compat.inductor_options(options or {})
    hooks = _with_our_passes(settings)
    for part in graph_modules(gm):
        hooks["pre_grad_custom_pass"](part.graph)
        if not _needs_grad(example_inputs):
            run(JOIN, part.graph)
        part.recompile()
    return gm.forward


def _with_our_passes(settings: dict[str, Any]) -> dict[str, MoEPass]:
    """Our passes for each hook, carrying the passes that the options or Inductor's configuration hold there."""
    hooks = {}
    for hook, steps in _HOOKS.items():
        users = settings[hook] if hook in settings else compat.inductor_setting(hook)
        hooks[hook] = MoEPass(steps, users)
    return hooks


def _needs_grad(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def compile(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="moe_ops", **kwargs)``, with ``mode`` and ``options`` allowed together.

    A transformers model whose experts run as a Python loop, which no compiler can capture, is switched to
    ``experts_implementation="grouped_mm"`` first, with a warning. Other loops over experts are left as they are; a
    warning says why.

    Args:
        model: module or function.
        kwargs: arguments of torch.compile. ``backend`` may be "moe_ops" (default) or "moe_ops_eager".

    Returns:
        The compiled model.

    Example:
        >>> model = moe_ops.compile(model, mode="reduce-overhead", options={"max_autotune": True})
    """
    if isinstance(model, torch.nn.Module):
        prepare(model)
    mode, options = kwargs.pop("mode", None), kwargs.pop("options", None)
    merged = {**compat.mode_options(mode, kwargs.get("dynamic")), **(options or {})}
    kwargs.setdefault("backend", "moe_ops")
    if merged:
        kwargs["options"] = merged
    compiled: Callable[..., Any] = torch.compile(model, **kwargs)
    return compiled


@contextmanager
def fuse() -> Iterator[None]:
    """Compilations inside the block, by the default backend, fuse MoE blocks; the configuration is restored after it.

    torch.compile compiles at the first call: that call has to be inside.

    Example:
        >>> compiled = torch.compile(model)
        >>> with moe_ops.fuse():
        ...     compiled(tokens)
    """
    with compat.patch_inductor(_with_our_passes({})):
        yield


for _name, _function in (("moe_ops", moe_ops), ("moe_ops_eager", moe_ops_eager)):
    compat.register_backend(_function, _name)
