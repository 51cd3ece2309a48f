"""The implementations of the operators, in order of preference. Each is a module, imported when first considered.

A backend module has ``NAME``, ``SERVED_SCHEMES`` (names of :data:`meta.schemes.SCHEMES`; a problem with another one is
refused before the module is asked), ``refuses(problem) -> str | None`` (a reason, or None to accept) and functions
named like the operators it implements, of the operator's :class:`meta.calls.Call`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

#: Tried in this order when the caller names none; ``reference`` is reachable by name only.
BACKENDS = ("triton", "cpu")

_MODULES = {
    "triton": "moe_ops.backends.triton",
    "cpu": "moe_ops.backends.cpu",
    "reference": "moe_ops.reference",
}

#: Device types a backend can ever serve, so that a CPU-only process never imports a GPU compiler it cannot use.
_DEVICES = {"triton": "cuda", "cpu": "cpu"}


def serves(name: str, device_type: str) -> bool:
    """Whether backend ``name`` is worth importing for tensors on ``device_type``."""
    return _DEVICES[name] == device_type


@cache
def load(name: str) -> ModuleType | str:
    """The backend's module, or the reason why it cannot be imported."""
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        return f"cannot be imported: {error}"
