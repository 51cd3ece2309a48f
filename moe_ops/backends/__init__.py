"""The implementations of the operators: one row each, in order of preference.

A backend is a module, imported when first considered. It has ``NAME``, ``SERVED_SCHEMES`` (names of
:data:`meta.schemes.SCHEMES`; a problem with another one is refused before the module is asked), ``refuses(problem) ->
str | None`` (a reason, or None to accept) and functions named like the operators it implements, of the operator's
:class:`meta.calls.Call`. Which operators those are is its own affair: every one is chosen for by itself, so that a
product from one module stands between the sort and the combination of another, and a layer that a requested backend
does not have is composed around what it has (:func:`moe_ops.layer.composed`). What its layers and its products with an
activation compute it counts itself (:mod:`moe_ops.counters`), or :func:`moe_ops.load_statistics` does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Backend:
    """One row.

    Attributes:
        name: what a call insists on it by.
        module: import path.
        device: type of the tensors that it is considered for, so that a process without a GPU imports no compiler for
            one; None for a backend that is reachable by name only.
        plans: import path of what its layers can be told: ``SEQUENCES`` (name -> types of the configs, named tuples),
            ``cheapest(key, tokens, gpu, sm) -> Plan`` where nothing was measured, and for the tuner ``candidates(key,
            tokens, sm)`` (sequence -> what to time for each config; its module then has ``run_plan``). None: nothing.
    """

    name: str
    module: str
    device: str | None
    plans: str | None = None


BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend("triton", "moe_ops.backends.triton", "cuda", plans="moe_ops.backends.triton_plans"),
        Backend("cpu", "moe_ops.backends.cpu", "cpu"),
        Backend("reference", "moe_ops.reference", None),
    )
}


@cache
def load(name: str) -> ModuleType | str:
    """The backend's module, or the reason why it cannot be imported."""
    try:
        return import_module(BACKENDS[name].module)
    except ImportError as error:
        return f"cannot be imported: {error}"


def sequences(name: str) -> Mapping[str, tuple[type[Any], ...]]:
    """The sequences that plans of a backend may name, with the types of their configs; empty if there is none such."""
    row = BACKENDS.get(name)
    return {} if row is None or row.plans is None else import_module(row.plans).SEQUENCES


def tunable() -> Iterator[tuple[str, ModuleType]]:
    """(name, module of the plans) of every backend for GPUs that can be tuned, in order of preference."""
    for row in BACKENDS.values():
        if row.device == "cuda" and row.plans is not None:
            yield row.name, import_module(row.plans)
