"""Argument checks shared by every shape rule. All raise ``ValueError: <op>: <argument> must be <rule>, got <x>.
<cure>``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from meta.calls import Sizes
from meta.dims import Dim, is_known
from meta.schemes import FLOAT_DTYPES

#: Raises ValueError; defers or specialises symbolic conditions as torch's own operators do.
_check_value: Callable[[Any, Callable[[], str]], None] = torch._check_value

INDEX_DTYPES = (torch.int32, torch.int64)


#: Type in an operator's schema -> the Python types that are it, the rule in words, and the cure.
_TYPES: dict[str, tuple[tuple[type, ...], str, str]] = {
    "Tensor": ((Tensor,), "a torch.Tensor", "Convert it with torch.as_tensor first."),
    "List[Tensor]": ((list, tuple), "a list or tuple of tensors", "Put it in a list, in the order of the scheme."),
    "int": ((int, torch.SymInt), "an int", "Pass a Python int."),
    "SymInt": ((int, torch.SymInt), "an int", "Pass a Python int."),
    "float": ((float, int, torch.SymFloat, torch.SymInt), "a number", "Pass a Python float."),
    "bool": ((bool,), "True or False", ""),
    "str": ((str,), "a string", ""),
    "ScalarType": ((torch.dtype,), "a torch.dtype", ""),
}


class Accepts(NamedTuple):
    """What one argument of a public function may be: an instance of ``types``, no bool where it is a number, nothing
    but tensors where it is a list.
    """

    types: tuple[type, ...]
    is_number: bool
    is_list: bool
    rule: str
    cure: str


def accepts(schema_type: str) -> Accepts:
    """The row of an argument of this type in a schema, such as ``"Optional[int]"``; a proxy of FX stands for any."""
    kind = schema_type.removeprefix("Optional[").removesuffix("]") if schema_type.startswith("Opt") else schema_type
    types, rule, cure = _TYPES[kind]
    # The public default of a list is an empty one.
    if kind != schema_type and list not in types:
        types, rule = (*types, NoneType), f"{rule} or None"
    return Accepts((*types, fx.Proxy), int in types, list in types, rule, cure)


def check_type(op: str, argument: str, value: object, row: Accepts) -> None:
    """``value`` is what ``row`` accepts; ``top_k=True`` is a slip, and refused."""
    types, is_number, is_list, rule, cure = row
    if not isinstance(value, types) or (is_number and isinstance(value, bool)):
        raise fail(op, argument, rule, describe_value(value), cure)
    if isinstance(value, Tensor):
        check_plain(op, argument, value)
    elif is_number and isinstance(value, int):
        bits = 1024 if float in types else 64  # the dispatcher would refuse it in words of C++
        if _is_beyond(value, 1 << bits - 1):
            raise fail(op, argument, f"of at most {bits} bits", "a larger number", "Pass a smaller one.")
    elif is_list and isinstance(value, list | tuple):
        for i, item in enumerate(value):
            if not isinstance(item, Tensor | fx.Proxy):
                raise fail(op, f"{argument}[{i}]", "a torch.Tensor", describe_value(item))
            if isinstance(item, Tensor):
                check_plain(op, f"{argument}[{i}]", item)


def _is_beyond(value: int, bound: int) -> bool:
    """Whether ``value`` is not in ``[-bound, bound)``; no where the data decides it: to Dynamo that is an int, too."""
    if torch.compiler.is_compiling():
        return is_known(value < -bound) or is_known(value >= bound)
    return not -bound <= value < bound


def check_plain(op: str, argument: str, tensor: Tensor) -> None:
    """``tensor`` is no container of others or of codes, of which the operators would have a dispatcher's error."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise fail(op, argument, "initialised", "an uninitialised parameter", "Run its module once first.")
    if tensor.is_nested:
        raise fail(op, argument, "a strided tensor", "a nested one", "Concatenate its parts: torch.cat(x.unbind()).")
    if tensor.is_quantized:
        raise fail(op, argument, "a tensor of numbers", f"one of {tensor.dtype}", "Call .dequantize() first.")


def check_module(op: str, model: object, cure: str = "") -> None:
    """``model`` is a module: what functions of whole models take."""
    if not isinstance(model, torch.nn.Module):
        raise fail(op, "model", "a torch.nn.Module", type(model).__name__, cure)


def describe_value(value: object) -> str:
    """A short value as it is written, with its type; of the others the type."""
    name = type(value).__name__
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float):
        return f"{number_text(value)} ({name})"
    return f"{value!r} ({name})" if isinstance(value, str) else name


def number_text(value: float) -> str:
    """``value`` as it is written; while code is captured a float with six decimals at most.

    To Dynamo it may be a symbol, which it can neither write nor put into a text that goes into another: the length of a
    range is a number that it knows.
    """
    if not torch.compiler.is_compiling():
        return str(value)
    if value < 0:
        return "-" + number_text(-value)
    if not value < (1 << 62 if isinstance(value, int) else 1e9):  # ranges have no more
        return "a number"
    if isinstance(value, int):
        return str(len(range(value)))
    millionths = len(range(math.floor(value * 1e6 + 0.5)))
    return f"{millionths // 10**6}." + (str(millionths % 10**6 + 10**6)[1:].rstrip("0") or "0")


def fail(op: str, argument: str, rule: str, got: object, cure: str = "") -> ValueError:
    """The one format of every message."""
    if isinstance(got, int) and not isinstance(got, bool):
        got = number_text(got)
    return ValueError(f"{op}: {argument} must be {rule}, got {got}.{' ' + cure if cure else ''}")


def positive_integers(op: str, argument: str, text: str) -> list[int]:
    """The numbers of a comma-separated list, for command lines."""
    numbers = text.split(",")
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise fail(op, argument, "positive integers separated by commas", repr(text))
    return [int(number) for number in numbers]


def check_name(op: str, argument: str, value: str, valid: Collection[str]) -> None:
    """``value`` is one of ``valid``."""
    if value not in valid:
        raise fail(op, argument, f"one of {sorted(valid)}", repr(value))


def check_shape(
    op: str, argument: str, tensor: Tensor, letters: str, sizes: Sizes, hint: bool = False, cure: str = ""
) -> None:
    """``tensor.shape == sizes``; ``letters`` names the dimensions ("E N K"), ``hint`` asks about a transposed weight.

    Symbolic sizes are compared by ``torch._check_value``, which specialises or defers exactly as torch's own operators
    do.
    """
    shape = tensor.shape
    if len(shape) != len(sizes):
        raise fail(op, argument, describe(letters, sizes), _show(shape), cure)
    for actual, wanted in zip(shape, sizes, strict=True):
        if actual is wanted:
            continue
        if type(actual) is not int or type(wanted) is not int:
            _check_value(actual == wanted, lambda: str(_wrong_shape(op, argument, shape, letters, sizes, hint, cure)))
        elif not torch.compiler.is_compiling():
            if actual != wanted:
                raise _wrong_shape(op, argument, shape, letters, sizes, hint, cure)
        elif not is_known(actual == wanted):  # to Dynamo symbols are numbers
            if is_known(actual != wanted):
                raise _wrong_shape(op, argument, shape, letters, sizes, hint, cure)
            torch._check_value(actual == wanted)  # graphs keep no message


def describe(letters: str, sizes: Sizes) -> str:
    """``"[E=8, H=4096]"`` from ``"E H"`` and ``(8, 4096)``."""
    return "[" + ", ".join(f"{letter}={_text(size)}" for letter, size in zip(letters.split(), sizes, strict=True)) + "]"


def _show(shape: torch.Size) -> str:
    return "[" + ", ".join(_text(size) for size in shape) + "]"


def _text(size: Dim) -> str:
    """A size for a message: the traced value of a symbol where there is one."""
    if isinstance(size, int):
        return number_text(size)
    hint = getattr(size.node, "hint", None)
    return str(size) if hint is None else str(hint)


def _wrong_shape(
    op: str, argument: str, shape: torch.Size, letters: str, sizes: Sizes, hint: bool, cure: str
) -> ValueError:
    transposed = hint and len(shape) == 3 and _text(shape[1]) == _text(sizes[2])
    return fail(
        op, argument, describe(letters, sizes), _show(shape), "Did you pass it transposed?" if transposed else cure
    )


def check_rank(op: str, argument: str, tensor: Tensor, letters: str) -> None:
    """``tensor`` has one dimension per letter."""
    if tensor.dim() != len(letters.split()):
        rule = "[" + ", ".join(letters.split()) + "]"
        raise fail(op, argument, rule, _show(tensor.shape), f"It has {len(letters.split())} dimensions.")


def check_at_most(op: str, argument: str, value: Dim, bound: Dim, rule: str, cure: str) -> None:
    """``value <= bound`` for sizes, symbolic ones included."""
    if type(value) is int and type(bound) is int:
        if value > bound:
            raise fail(op, argument, rule, value, cure)
    else:
        _check_value(value <= bound, lambda: str(fail(op, argument, rule, value, cure)))


def check_positive(op: str, argument: str, value: Dim) -> None:
    """``value >= 1``, symbolic sizes included."""
    if type(value) is int:
        if value < 1:
            raise fail(op, argument, ">= 1", value)
    else:
        _check_value(value >= 1, lambda: str(fail(op, argument, ">= 1", value)))


def check_float(op: str, argument: str, tensor: Tensor) -> None:
    """bf16, fp16, fp32 or fp64."""
    if tensor.dtype not in FLOAT_DTYPES:
        cure = "Cast it first." if tensor.dtype.itemsize > 1 else "Pass the scale of quantised rows, too, or cast."
        raise fail(op, argument, "bfloat16, float16, float32 or float64", tensor.dtype, cure)


def check_index(op: str, argument: str, tensor: Tensor) -> None:
    """int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES:
        raise fail(op, argument, "int32 or int64", tensor.dtype, "Cast it first.")


def check_dtype(op: str, argument: str, tensor: Tensor, dtype: torch.dtype, cure: str = "Cast it first.") -> None:
    """Exactly ``dtype``."""
    if tensor.dtype != dtype:
        raise fail(op, argument, str(dtype), tensor.dtype, cure)


def check_placement(op: str, tensors: dict[str, Tensor | None]) -> torch.device:
    """All given tensors are strided and on the device of the first, which is returned."""
    device: torch.device | None = None
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        check_plain(op, argument, tensor)
        if tensor.layout != torch.strided:
            raise fail(op, argument, "a strided tensor", tensor.layout, "Call .to_dense() first.")
        if device is None:
            first, device = argument, tensor.device
        elif tensor.device != device:
            raise fail(op, argument, f"on {device} like {first}", tensor.device, "Move it first.")
    if device is None:
        raise fail(op, "arguments", "tensors", "none")
    return device
