"""The private parts of torch.compile that the passes use. Importing this module does not import Inductor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import fx


def statically_known_true(condition: bool | torch.SymBool) -> bool:
    """Whether ``condition`` holds for every value of the symbols in it; adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def fake_mode_of(value: Any) -> Any:
    """The mode that a fake tensor was made under, or None. The tracing context has another one when passes run."""
    from torch._subclasses.fake_tensor import FakeTensor

    return value.fake_mode if isinstance(value, FakeTensor) else None


def sdpa_kernel(mode: Any, tensors: Sequence[torch.Tensor | None], **options: Any) -> str:
    """Which kernel `scaled_dot_product_attention` chooses for (query, key, value, attn_mask) and its options."""
    from torch.nn.attention import SDPBackend

    with mode or nullcontext(), torch.no_grad():
        return SDPBackend(torch._fused_sdp_choice(*tensors, **options)).name


def can_restart_with_constants(numbers: Sequence[torch.SymFloat]) -> bool:
    """Whether Dynamo is compiling and has not yet made these numbers constants."""
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import TracingContext

    names = _symbol_names(numbers)
    known = all(map(TensorifyState.should_specialize, names))
    return TracingContext.try_get() is not None and not known


def restart_with_constants(numbers: Sequence[torch.SymFloat]) -> NoReturn:
    """Make Dynamo trace again with these numbers as constants, guarded by their values.

    ``dynamic=True`` turns the float attributes of modules (a clamp limit, a routed scaling factor) into graph inputs.
    This is the mechanism by which Inductor itself gets rid of those that it cannot keep symbolic.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    for name in _symbol_names(numbers):
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


def _symbol_names(numbers: Sequence[torch.SymFloat]) -> list[str]:
    return sorted({str(symbol) for number in numbers for symbol in number.node._expr.free_symbols})


def counters() -> Any:
    """``torch._dynamo.utils.counters``: section -> name -> count."""
    from torch._dynamo.utils import counters as all_counters

    return all_counters


def is_tracing() -> bool:
    """Whether somebody collects the structured trace, so that the texts for it are worth making."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the structured trace (``TORCH_TRACE``), where tlparse shows it next to torch's own graphs."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=mode)`` stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of torch.compile as Inductor configuration entries.

    Raises:
        RuntimeError: an option that Inductor does not have, or of the wrong type.
    """
    wrapper = torch._TorchCompileInductorWrapper(None, options, None)
    return dict(wrapper.config)


def inductor_setting(name: str) -> Any:
    """Present value of an Inductor configuration entry."""
    from torch._inductor import config

    return getattr(config, name)


def patch_inductor(settings: dict[str, Any]) -> Any:
    """Context manager that changes Inductor's configuration inside it."""
    from torch._inductor import config

    return config.patch(settings)


def inductor(gm: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under ``settings``."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=settings)
    return compiled


def reset_cudagraphs() -> None:
    """What `torch.compiler.reset` has to do for compilations whose CUDA graphs Inductor manages."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def register_backend(function: Callable[..., Any], name: str) -> None:
    """Make ``torch.compile(backend=name)`` find ``function`` where no installed entry point already does.

    Dynamo registers what it loads from an entry point itself, and refuses a name that is registered already.
    """
    from torch._dynamo.backends import registry

    if name not in registry.list_backends(exclude_tags=()):
        registry.register_backend(function, name)


def break_reason(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph early and where (``file:line``), or None for a graph that returned."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = getattr(reason, "user_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown location"
    return str(reason.reason), where
