"""The largest magnitudes of the activations that a model's stacked weights are multiplied with, over inputs of a user.

A dispatch mode watches the operators of the model's own forward: a product of a weight, of a view or of a copy of it
(experts that were gathered, another dtype) tells the rows. Whoever multiplies, and where in the model, does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from meta.checks import fail
from moe_ops import compat
from moe_ops.progress import progress

#: Products of two matrices that aten does not call "mm", and those that a third operand is added to, which comes first.
_PRODUCTS = ("linear", "matmul", "mv", "addmv")
_ADDING = ("addmm", "baddbmm", "addmv")


def largest_rows(op: str, model: nn.Module, weights: Mapping[str, Tensor], inputs: Iterable[Any]) -> dict[str, Tensor]:
    """Run a model on ``inputs``, and look at the rows that each of ``weights`` is multiplied with.

    Args:
        op: for messages.
        weights: parameters of the model, by their names.
        inputs: what the model is called with, one after the other: a tensor, a tuple of positional or a mapping of
            keyword arguments. Progress goes to stderr; the model is in eval mode meanwhile, and never compiled.

    Returns:
        ``max |x|`` over all rows, fp32 ``[]`` on the weight's device, by name.

    Raises:
        ValueError: no inputs, inputs of another type, a weight that no row met, or rows that are not finite or are all
            zero.
    """
    _check_inputs(op, inputs)
    for name, weight in weights.items():
        if weight.is_meta:
            raise fail(op, "inputs", f"None for {name}, which has no memory", "some", "Load the weights first.")
    observer = _Observer(op, weights)
    total = length_hint(inputs) or None  # of loaders that have a `len` which raises, none
    count = 0
    with progress() as bars, _as_it_infers(model):
        advance = bars.bar("calibrating", total)
        for count, given in enumerate(inputs, start=1):
            args, kwargs = _arguments(op, given, count - 1)
            try:
                with observer:
                    model(*args, **kwargs)
            except Exception as error:
                error.add_note(f"{op}: the model was called with inputs[{count - 1}].")
                raise
            advance()
    if not count:
        raise fail(op, "inputs", "at least one input of the model", "none")
    for name, amax in observer.amax.items():
        if not bool(amax.isfinite()):
            raise fail(op, "inputs", f"such that rows in front of {name} are finite", f"{float(amax)}")
        if not amax:
            cure = "A scale of them would make zeros of all rows: pass inputs as the model will get."
            raise fail(op, "inputs", f"such that rows in front of {name} are not all zero", "zeros", cure)
    for name in weights:
        if name not in observer.amax:
            cure = "Pass inputs that reach it, or leave its module out by the filter."
            raise fail(op, "inputs", f"such that rows are multiplied with {name}", "no product of it", cure)
    return observer.amax


def _check_inputs(op: str, inputs: Any) -> None:
    if isinstance(inputs, Tensor | Mapping | str | nn.Module) or not isinstance(inputs, Iterable):
        raise fail(op, "inputs", "an iterable of the model's inputs", type(inputs).__name__, "Pass a list of one.")


def _arguments(op: str, given: Any, at: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), given
    if isinstance(given, tuple | list):
        return given, {}
    raise fail(op, f"inputs[{at}]", "a tensor, a tuple or a mapping of arguments", type(given).__name__)


@contextmanager
def _as_it_infers(model: nn.Module) -> Iterator[None]:
    """Eagerly, in eval mode, without gradients: not by inference mode, where composite functions come as one."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


class _Observer(TorchDispatchMode):
    """Keeps the largest magnitude of the rows that each weight is multiplied with, in ``amax``, by its name."""

    def __init__(self, op: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.amax: dict[str, Tensor] = {}
        self._op = op
        self._names: dict[int, str] = {}
        for name, weight in weights.items():
            other = self._names.setdefault(weight.untyped_storage().data_ptr(), name)
            if other != name:
                cure = "Leave one out by the filter, or clone it."
                raise fail(op, "inputs", f"None for {name}", f"some, and {other} in the same memory", cure)
        self._copies: Any = WeakTensorKeyDictionary()

    def _name_of(self, value: Any) -> str | None:
        """The weight that ``value`` holds numbers of."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        found: str | None = self._copies.get(value)
        return found or self._names.get(value.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = {self._name_of(leaf) for leaf in given if leaf.is_floating_point()}
        if names <= {None}:
            return out
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "moe_ops":
            cure = 'Call model.set_experts_implementation("eager") for the calibration.'
            raise fail(self._op, "inputs", "None for a model whose experts are one operator", f"some, and {func}", cure)
        if None not in names and len(names) == 1:
            self._copies.update(dict.fromkeys(filter(torch.is_tensor, pytree.tree_leaves(out)), *names))
        elif "mm" in name or name in _PRODUCTS:
            ends = compat.named_arguments(func, args, kwargs).get("offs")
            self._see(args[1:3] if name in _ADDING else args[:2], ends)
        return out

    def _see(self, operands: Sequence[Any], ends: Tensor | None) -> None:
        """Rows and the weight, in either order; rows past the last of the experts' ends are multiplied with none, and
        a first product leaves there what memory held.
        """
        for rows, weight in (operands, operands[::-1]):
            name = self._name_of(weight)
            if name is None or self._name_of(rows) is not None:
                continue
            if ends is not None and rows.dim() == 2:
                rows = rows[: int(ends[-1])]
            if rows.numel():
                amax = rows.abs().amax().float()
                self.amax[name] = torch.maximum(self.amax.get(name, amax), amax)
