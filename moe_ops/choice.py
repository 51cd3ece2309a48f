"""Which backend runs a problem, and the call of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from meta.calls import Call, ExpertsCall, GatheredCall, LayerCall
from meta.dims import Problem
from moe_ops import backends, plans
from moe_ops.rows import gather_rows
from moe_ops.runtime import Chosen

_VARIABLE = "MOE_OPS_BACKEND"
#: Operators that are compositions of others.
LAYERS = ("fused_experts", "fused_moe")


def _environment_backend() -> str | None:
    name = os.environ.get(_VARIABLE) or None
    if name is not None and name not in backends.BACKENDS:
        raise ValueError(
            f"moe_ops: {_VARIABLE} must be one of {sorted(backends.BACKENDS)}, got {name!r}. Unset it or fix it."
        )
    return name


#: Backend of every call that names none; read once, at import.
DEFAULT_BACKEND = _environment_backend()


def choose(
    problem: Problem, requested: str | None = None, op: str = "fused_experts", fastest: str | None = None
) -> ModuleType:
    """The backend module that runs ``op`` on ``problem``.

    Without a request the first backend that implements ``op`` and does not refuse: ``fastest``, if something measured
    that, then in the order of :data:`moe_ops.backends.BACKENDS`; with one, that backend or an error: a request never
    falls back. ``MOE_OPS_BACKEND`` is a request for every call that makes none, of the operators that the backend
    implements; the others are chosen for as if it were not set.

    Raises:
        ValueError: unknown name, or every candidate refused; the message lists each refusal.
    """
    by_variable = requested is None and DEFAULT_BACKEND is not None and _bound_by_variable(DEFAULT_BACKEND, op)
    if by_variable:
        requested = DEFAULT_BACKEND
    if problem.has_symbols:
        return _choose(problem, requested, op, by_variable, fastest)
    return _choose_cached(problem, requested, op, by_variable, fastest)


def _bound_by_variable(name: str, op: str) -> bool:
    """Whether the backend that the variable names implements ``op``; one that cannot be imported is asked, and says
    so.
    """
    module = backends.load(name)
    return isinstance(module, str) or hasattr(module, op)


def _choose(
    problem: Problem, requested: str | None, op: str, by_variable: bool = False, fastest: str | None = None
) -> ModuleType:
    if requested is not None and requested not in backends.BACKENDS:
        raise ValueError(f"{op}: backend must be one of {sorted(backends.BACKENDS)}, got {requested!r}.")
    refusals = []
    considered = [name for name, row in backends.BACKENDS.items() if row.device is not None]
    considered.sort(key=lambda name: name != fastest)
    for name in considered if requested is None else (requested,):
        reason = _refusal(name, problem, requested, op)
        if isinstance(reason, ModuleType):
            return reason
        refusals.append(f"{name} {reason}")
    asked = "any backend" if requested is None else f"backend={requested!r}"
    cure = ""
    if by_variable:
        other = ", or pass backend= to this call" if op in LAYERS else ""
        asked, cure = f"{_VARIABLE}={requested}", f" Unset {_VARIABLE}{other}."
    raise ValueError(
        f"{op}: {asked} must accept the problem, got refusals: {'; '.join(refusals)}. Problem: {problem}.{cure}"
    )


def _refusal(name: str, problem: Problem, requested: str | None, op: str) -> ModuleType | str:
    """The module when it accepts, else the reason."""
    if requested is None and backends.BACKENDS[name].device != problem.device_type:
        return f"does not serve {problem.device_type} tensors"
    module = backends.load(name)
    if isinstance(module, str):
        return module
    if not hasattr(module, op) and not (requested is not None and _has_parts(module, op, problem)):
        return f"does not implement {op}"
    # Routing and row movement have no scheme.
    if problem.scheme and problem.scheme not in module.SERVED_SCHEMES:
        return f"serves the schemes {', '.join(sorted(module.SERVED_SCHEMES))}, got {problem.scheme}"
    reason = module.refuses(problem)
    return module if reason is None else str(reason)


_choose_cached = lru_cache(maxsize=4096)(_choose)


def _has_parts(module: ModuleType, op: str, problem: Problem) -> bool:
    """Whether ``op`` is a layer that can be composed around the module's products."""
    prefix = getattr(problem, "format", "grouped")
    return op in LAYERS and any(hasattr(module, f"{prefix}_{product}") for product in ("mm", "mm_glu"))


def chosen(call: Call) -> Chosen:
    """The function of the backend that is chosen for a call, and the backend's way to record it, if it has one.

    A layer that a requested backend has only products of is composed: every stage by that backend if it has it and does
    not refuse, else by the one that is chosen without a request.
    """
    fastest = None
    if call.backend is None and isinstance(call, LayerCall):
        fastest = plans.fastest_backend(call.problem, call.device)
    module = choose(call.problem, call.backend, call.op, fastest)
    function = getattr(module, call.op, None)
    if function is not None:
        return function, getattr(module, "record", None)
    return partial(_composed, module=module), None


def between(call: ExpertsCall, arrive: Callable[[], None], deliver: Callable[..., None]) -> None:
    """A layer whose tokens come from other GPUs, and go back there.

    Args:
        arrive: to be called once; the stream waits for the tokens from there on, before it nothing may read them.
        deliver: takes, in the place of the sums over pairs, rows, the row of each pair of some tokens (None: rows are
            in the tokens' order), the weights, and as ``first`` the number of the first of these tokens.
    """
    module = choose(call.problem, call.backend, call.op)
    if hasattr(module, "fused_experts_between"):
        module.fused_experts_between(call, arrive, deliver)
    else:
        arrive()
        deliver(chosen(call)[0](call), None, None, first=0)


def _of_copies(call: GatheredCall, module: ModuleType) -> Any:
    rows = gather_rows(call.x.data, call.row_to_pair, call.pair_to_row, call.topk_weights)
    return module.grouped_mm(call.of_rows(rows))


def _composed(call: Any, module: ModuleType) -> Any:
    from moe_ops import layer  # (above this module: its public functions call the operators)

    return layer.composed(call, module)


def stage_of(module: ModuleType, call: Call) -> Callable[[Any], Any]:
    """The function of a stage: the module's own if it can run it."""
    function: Callable[[Any], Any] | None = getattr(module, call.op, None)
    if function is None and isinstance(call, GatheredCall) and hasattr(module, "grouped_mm"):
        function = partial(_of_copies, module=module)
    served = not call.problem.scheme or call.problem.scheme in module.SERVED_SCHEMES
    if function is not None and served and module.refuses(call.problem) is None:
        return function
    return chosen(call)[0]
