"""``QuantizedWeight``: expert weights as a scheme stores them, in the place of a float parameter.

It is a traceable wrapper: one tensor of the logical shape and of a nominal dtype to whoever holds it, the stored bytes
and their scales to the operators and to the compiler. Code that knows nothing of it computes with the dequantised
numbers: of the experts that it indexes, or of all. That does not round activations, which the schemes with a format
for rows do in the operators. Bytes are never changed by a cast, only the dtype of what they stand for.

What would write the weight is refused, assignments to elements and lists that it is in included. A write into what was
taken from it cannot be: where PyTorch gives a view (``weight[0]``, ``weight.chunk(2, 1)``, ``weight.view(-1)``), that
is a copy of dequantised numbers, which changes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meta import formats, schemes
from meta.checks import accepts, check_name, check_placement, check_rank, check_type, describe_value, fail
from meta.formats import E4M3, E8M0
from meta.gemm_shapes import by_place, weight_operand
from meta.schemes import FLOAT_DTYPES, SCHEMES, QuantScheme
from moe_ops import compat
from moe_ops.quantized_exchange import ExchangedTensor

_ATEN = torch.ops.aten
_OP = "QuantizedWeight"
_ACCEPTS = {
    "stored": accepts("Tensor"), "scales": accepts("List[Tensor]"), "scheme": accepts("str"),
    "dtype": accepts("ScalarType"), "transposed": accepts("bool"),
}  # fmt: skip
_CURE = "Change the float weights, then call moe_ops.quantize_."
#: That of every tensor.
_DATA: Any = Tensor.data


def quantized_schemes() -> dict[str, QuantScheme]:
    """The rows whose weights carry scales, by name."""
    return {name: row for name, row in SCHEMES.items() if row.quantized}


class QuantizedWeight(ExchangedTensor):
    """Expert weights ``[E, N, K]`` with their scales.

    Whoever shards or flattens parameters would do so with dequantised numbers: FSDP is refused where it can be seen;
    ``FullyShardedDataParallel(use_orig_params=False)`` and ``distribute_tensor`` cannot, and need it left out.

    Args:
        stored: ``[E, N, K / pack]`` in the dtype of the scheme's code. Alone, another one: the same as a parameter, as
            libraries make one by ``type(parameter)(data, requires_grad=False)``.
        scales: what the scheme's row lists, in its order; groups may start again with an up half. Each is an attribute
            under its name in the row, None where an optional one is left out.
        scheme: a quantised name of :data:`meta.schemes.SCHEMES`.
        dtype: nominal dtype: of dequantised numbers, and of the hidden states that blocks compute with; None is bf16.
        transposed: it is shown as ``[E, K, N]``, for code that stores experts so; ``stored`` is the same.
        requires_grad: False, as it has no gradient.

    Attributes:
        stored, scheme, transposed: as given.

    Raises:
        ValueError: an argument of another type, an unknown scheme, bytes or scales of other shapes or dtypes than its
            row's, or on different devices.

    Example:
        >>> stored, *scales = moe_ops.quantize_weight(torch.randn(2, 64, 128), scheme="mxfp4")
        >>> weight = moe_ops.QuantizedWeight(stored, scales, scheme="mxfp4")
        >>> weight.shape, weight.dtype, weight.stored.shape
        (torch.Size([2, 64, 128]), torch.bfloat16, torch.Size([2, 64, 64]))
    """

    stored: Tensor
    scheme: str
    transposed: bool
    _names: list[str]  # of the inner tensors
    _fields: tuple[str, torch.dtype, bool]

    __torch_function__ = compat.without_torch_function

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        stored: Tensor,
        scales: Sequence[Tensor] | None = None,
        *,
        scheme: str | None = None,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
        requires_grad: bool = False,
    ) -> QuantizedWeight:
        if requires_grad:
            raise fail(_OP, "requires_grad", "False", requires_grad, _CURE)
        if scales is None and scheme is None:
            return _again(stored)
        dtype = torch.bfloat16 if dtype is None else dtype
        given = {"stored": stored, "scales": scales, "scheme": scheme, "dtype": dtype, "transposed": transposed}
        for name, value in given.items():
            check_type(_OP, name, value, _ACCEPTS[name])
        scheme, scales, rows = cast(str, scheme), cast("Sequence[Tensor]", scales), quantized_schemes()
        check_name(_OP, "scheme", scheme, rows)
        if dtype not in FLOAT_DTYPES:
            raise fail(_OP, "dtype", "bfloat16, float16, float32 or float64", dtype)
        parts = checked_parts(_OP, rows[scheme], {"stored": stored, **by_place("scales", scales)})
        return assemble(parts, scheme, dtype, transposed)

    def _hold(self, parts: dict[str, Tensor], scheme: str, transposed: bool) -> None:
        self.stored, self.scheme, self.transposed = parts["stored"], scheme, transposed
        scales = [spec.name for spec in SCHEMES[scheme].scales]
        for name in scales:
            setattr(self, name, parts.get(name))
        # Compiled code asks for these twice in every call, to guard on them.
        self._names = ["stored", *(name for name in scales if parts.get(name) is not None)]
        self._fields = (scheme, self.dtype, transposed)

    @property  # type: ignore[override]
    def data(self) -> QuantizedWeight:
        """Itself, detached. Another one may be assigned, and then takes the place of its bytes and scales.

        Raises:
            ValueError: a tensor of another kind is assigned.
        """
        found: QuantizedWeight = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, QuantizedWeight):
            cure = "Make one by moe_ops.quantize_weight; leave this one out of what shards or flattens parameters."
            raise fail(_OP, "data", "a QuantizedWeight", type(value).__name__, cure)
        _DATA.__set__(self, value)
        self._hold(value.parts(), value.scheme, value.transposed)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _written("self", "__setitem__")  # aten would select elements first, and write that copy

    @property
    def row(self) -> QuantScheme:
        """The scheme's row."""
        return SCHEMES[self.scheme]

    @property
    def scales(self) -> list[Tensor]:
        """The list that operators take."""
        return [getattr(self, name) for name in self._names[1:]]

    def dequantize(self) -> Tensor:
        """The numbers, in the nominal dtype: ``[E, N, K]``, or ``[E, K, N]`` where ``transposed``."""
        wide = self.row.dequantize(self.stored, self.scales).to(self.dtype)
        return wide.transpose(1, 2) if self.transposed else wide

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored numbers and their scales."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """The inner tensors by name, the scales in the order of the row."""
        return {name: getattr(self, name) for name in self._names}

    def _with(self, change: Callable[[Tensor], Tensor], **fields: Any) -> QuantizedWeight:
        """Another one, ``change`` applied to the inner tensors."""
        parts = {name: change(part) for name, part in self.parts().items()}
        return assemble(parts, self.scheme, fields.get("dtype", self.dtype), fields.get("transposed", self.transposed))

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedWeight:
        """Itself: it has no gradient, whatever is asked of all parameters of a model."""
        return self

    def share_memory_(self) -> QuantizedWeight:
        """Move the bytes and scales to memory that processes share; itself."""
        for part in self.parts().values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether :meth:`share_memory_` was called."""
        return all(part.is_shared() for part in self.parts().values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = f"shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}"
        return f"QuantizedWeight(scheme={self.scheme!r}, {shape}{', transposed=True' if self.transposed else ''})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, bool]]:
        return [*self._names], self._fields

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], fields: tuple[str, torch.dtype, bool], size: Any, stride: Any
    ) -> QuantizedWeight:
        return assemble(parts, *fields)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, in words that are the same in every process: torch's key of its caches.

        They know nothing else of what dequantises.
        """
        parts = [
            (name, str(part.dtype), str(part.device), [*part.shape], [*part.stride()], part.storage_offset())
            for name, part in self.parts().items()
        ]
        return repr((_decoding(), self.scheme, str(self.dtype), self.transposed, self.requires_grad, parts))

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        # Not every pickler of torch's knows floats of 8 bits: these go as bytes, and say what they are.
        parts = {
            name: (part.view(torch.uint8), part.dtype) if part.dtype in (E4M3, E8M0) else part
            for name, part in self.parts().items()
        }
        return rebuild, (parts, self.scheme, self.dtype, self.transposed, is_parameter)

    @classmethod
    @compat.not_captured  # where a graph breaks, operators run while Dynamo looks for frames to capture
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and args and _is_view(func) and not args[0].is_inference():
            # torch refuses a view that is an inference tensor of what is none.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        # Where autograd is off altogether, composite functions come whole.
        result = _KNOWN.get(func, func.decompose)(*args, **kwargs)
        if result is not NotImplemented:
            return compat.with_aliases(func, args, kwargs, result) if func in _KEEPS else result
        _refuse_writes(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(QuantizedWeight, QuantizedWeight.dequantize, (args, kwargs))
        return func(*args, **kwargs)


@cache
def _decoding() -> str:
    """A digest of the sources that dequantise."""
    digest = hashlib.sha256()
    for source in (__file__, schemes.__file__, formats.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def rebuild(
    parts: dict[str, Tensor | tuple[Tensor, torch.dtype]],
    scheme: str,
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
) -> Tensor:
    """What was pickled, today or when all parts went as they are; its type has no place for anything but these."""
    whole = {name: part if isinstance(part, Tensor) else part[0].view(part[1]) for name, part in parts.items()}
    weight = assemble(whole, scheme, dtype, transposed)
    return torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight


def _again(given: Any) -> QuantizedWeight:
    """The parameter of what is a weight already."""
    if not isinstance(given, QuantizedWeight):
        cure = "Pass scales and scheme; hand libraries that offload parameters these, not a state dict."
        raise fail(_OP, "stored", "a QuantizedWeight where it is given alone", describe_value(given), cure)
    parameter: Any = torch.nn.Parameter(given, requires_grad=False)
    return cast(QuantizedWeight, parameter)


def checked_parts(op: str, row: QuantScheme, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inner tensors of a weight, detached, by their names.

    Args:
        op: whoever is called, for messages.
        given: the bytes and the scales in the order of the row, by what messages call each.

    Raises:
        ValueError: shapes or dtypes other than the row's, or different devices.
    """
    check_placement(op, {**given})
    (name, *names), (stored, *scales) = given, given.values()
    check_rank(op, name, stored, "E N K")
    if stored.dtype != row.weight_dtype:
        raise fail(op, name, f"{row.weight_dtype} for scheme {row.name!r}", stored.dtype)
    E, N, K = stored.shape
    operand = weight_operand(op, "scales", stored, row, scales, (E, N, K * row.pack), halves=True, names=names)
    return {
        "stored": stored.detach(),  # scales of a parameter would keep it alive by their graph
        **{spec.name: scale.detach() for spec, scale in zip(row.scales, operand.listed, strict=False)},
    }


def assemble(parts: dict[str, Tensor], scheme: str, dtype: torch.dtype, transposed: bool) -> QuantizedWeight:
    """One of parts that are known to fit."""
    stored, row = parts["stored"], SCHEMES[scheme]
    E, N, K = stored.shape[0], stored.shape[1], stored.shape[2] * row.pack
    size, stride = ((E, K, N), (N * K, 1, K)) if transposed else ((E, N, K), (N * K, K, 1))
    weight: QuantizedWeight = compat.wrapper_tensor(QuantizedWeight, size, stride, dtype, stored.device)
    weight._hold(parts, scheme, transposed)
    return weight


# ---- what is known of aten: `NotImplemented` means: dequantise


def _detach(weight: QuantizedWeight) -> Any:
    return weight._with(Tensor.detach)


def _clone(weight: QuantizedWeight, *, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.preserve_format) and weight.transposed:
        return NotImplemented
    return weight._with(torch.clone)


def _to_copy(weight: QuantizedWeight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """Another device for the bytes, another nominal dtype."""
    dtype = weight.dtype if dtype is None else dtype
    if dtype not in FLOAT_DTYPES:
        return NotImplemented
    blocking = {"non_blocking": options.get("non_blocking", False)}
    return weight._with(lambda part: part.to(device=device, copy=True, **blocking), dtype=dtype)


def _empty_like(weight: QuantizedWeight, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    dtype = weight.dtype if dtype is None else dtype
    if dtype not in FLOAT_DTYPES:
        return NotImplemented
    return weight._with(lambda part: torch.empty_like(part, device=device), dtype=dtype)


def _axis(dim: int) -> int:
    """Of three; what is out of range stays so, for torch to refuse."""
    return dim + 3 if -3 <= dim < 0 else dim


def _transpose(weight: QuantizedWeight, dim0: int, dim1: int) -> Any:
    if {_axis(dim0), _axis(dim1)} != {1, 2}:
        return NotImplemented
    return weight._with(_ATEN.alias.default, transposed=not weight.transposed)


def _permute(weight: QuantizedWeight, dims: Sequence[int]) -> Any:
    found = [_axis(dim) for dim in dims]
    return _transpose(weight, 1, 2) if found == [0, 2, 1] else NotImplemented


def _select(weight: Any, dim: int, index: Any) -> Any:
    """Entry ``index`` of the experts: that one is dequantised."""
    if not isinstance(weight, QuantizedWeight) or _axis(dim) != 0:
        return NotImplemented
    return weight._with(lambda part: part.select(0, index).unsqueeze(0)).dequantize().squeeze(0)


def _index(weight: Any, indices: Sequence[Any]) -> Any:
    """``weight[ids]``: the experts that are asked for."""
    if not isinstance(weight, QuantizedWeight) or len(indices) != 1:
        return NotImplemented
    (ids,) = indices
    if ids.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    flat = ids.reshape(-1)
    some = weight._with(lambda part: _of_bytes(part, lambda stored: stored[flat])).dequantize()
    return some.reshape(*ids.shape, *some.shape[1:])


def _index_select(weight: Any, dim: int, index: Tensor) -> Any:
    if not isinstance(weight, QuantizedWeight) or _axis(dim) != 0:
        return NotImplemented
    return weight._with(lambda part: _of_bytes(part, lambda stored: stored.index_select(0, index))).dequantize()


def _of_bytes(part: Tensor, take: Callable[[Tensor], Tensor]) -> Tensor:
    """``take(part)``, some of its experts; not every device indexes every dtype of 8 bits."""
    # Inductor leaves all operations with e8m0 on a CPU to aten, but views, which it has no code for.
    if part.dtype.itemsize == 1 and not (part.dtype == E8M0 and part.device.type == "cpu"):
        return take(part.view(torch.uint8)).view(part.dtype)
    return take(part)


def _copy(weight: Any, source: Any, non_blocking: bool = False) -> Any:
    """Bytes from another one of the same form; its own numbers change nothing."""
    if not isinstance(weight, QuantizedWeight):
        return NotImplemented
    rule = f"a QuantizedWeight of the form {form_of(weight)}"
    if not isinstance(source, QuantizedWeight):
        if isinstance(source, Tensor) and _stands_for(weight, source):
            return weight
        first = "Load the float weights first, then call moe_ops.quantize_"
        cure = f"{first}: the same in every process before DistributedDataParallel, which copies them."
        raise fail(f"{_OP}.copy_", "source", f"{rule}, or the numbers that it stands for", "other numbers", cure)
    if form_of(source) != form_of(weight):
        raise fail(f"{_OP}.copy_", "source", rule, str(form_of(source)), "Assign it to .data, which takes any form.")
    for name, part in weight.parts().items():
        part.copy_(getattr(source, name), non_blocking)
    return weight


def _stands_for(weight: QuantizedWeight, source: Tensor) -> bool:
    """Whether ``source`` is its numbers, as where these were sent around or averaged; one expert at a time."""
    alike = source.shape == weight.shape and source.dtype == weight.dtype
    if not alike or weight.is_meta or source.is_meta or compat.is_fake(weight) or compat.is_fake(source):
        return False
    pairs = ((_select(weight, 0, i), source[i].to(weight.device)) for i in range(weight.shape[0]))
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)


def form_of(weight: QuantizedWeight) -> tuple[Any, ...]:
    """All but the numbers and the nominal dtype."""
    sizes = {name: (part.dtype, list(part.shape)) for name, part in weight.parts().items()}
    return weight.scheme, weight.transposed, sizes


_KNOWN: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _detach,
    _ATEN.alias.default: _detach,
    _ATEN.clone.default: _clone,
    _ATEN._to_copy.default: _to_copy,
    _ATEN.empty_like.default: _empty_like,
    _ATEN.transpose.int: _transpose,
    _ATEN.permute.default: _permute,
    _ATEN.select.int: _select,
    _ATEN.index.Tensor: _index,
    _ATEN.index_select.default: _index_select,
    _ATEN.copy_.default: _copy,
}
#: Of these, the ones that return a weight of the same storage, or the one that they were given.
_KEEPS = frozenset({_ATEN.detach.default, _ATEN.alias.default, _ATEN.copy_.default})


def _is_view(func: Any) -> bool:
    """Whether the first argument is what results are views of."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write


def _refuse_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise ValueError where ``func`` would write a weight: it would write its dequantised copy."""
    named = compat.named_arguments(func, args, kwargs)
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and any(isinstance(leaf, QuantizedWeight) for leaf in pytree.tree_leaves(named.get(argument.name))):
            raise _written(str(argument.name), str(func))


def _written(argument: str, what: str) -> ValueError:
    return fail(_OP, argument, f"a float tensor for {what}, which writes it", "quantised bytes", _CURE)


torch.serialization.add_safe_globals([QuantizedWeight, rebuild])
