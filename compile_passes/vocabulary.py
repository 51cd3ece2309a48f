"""One name for every spelling of an operation: torch functions, Tensor methods, Python operators, ATen overloads.

`F.softmax(x, -1)`, `torch.softmax(x, dim=-1)`, `x.softmax(-1)` and `aten.softmax.int(x, -1)` are all
`Call("softmax", {"x": x, "dim": -1})`. In-place forms (`x.add_(y)`, `x += y`, `aten.add_.Tensor`) get the name of the
functional form: what they write is `memory.written`'s business. Only names that a recogniser asks about are listed; any
other target keeps its own name with positional parameters, so that a refusal can still say what it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from compile_passes.compat import as_asserted, equal_by_a_guard, is_of_the_data, same_symbols, statically_known_true
from compile_passes.reached import of_torch

# name, parameters in order, spellings. A string spelling is a Tensor method AND the ATen operator of that name.
_TABLE: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    # elementwise
    ("add", "x y alpha", (torch.add, "add", operator.add)),
    ("sub", "x y alpha", (torch.sub, "sub", operator.sub)),
    ("mul", "x y", (torch.mul, torch.multiply, "mul", "multiply", operator.mul)),
    ("div", "x y rounding_mode", (torch.div, torch.divide, torch.true_divide, "div", "true_divide", operator.truediv)),
    ("floordiv", "x y", (torch.floor_divide, "floor_divide", operator.floordiv)),
    ("mod", "x y", (torch.remainder, "remainder", operator.mod)),
    ("addcmul", "x tensor1 tensor2 value", (torch.addcmul, "addcmul")),
    ("pow", "x y", (torch.pow, "pow", operator.pow)),
    ("square", "x", (torch.square, "square")),
    ("neg", "x", (torch.neg, "neg", operator.neg)),
    ("abs", "x", (torch.abs, "abs")),
    ("relu", "x inplace", (torch.relu, F.relu, "relu")),
    ("silu", "x inplace", (F.silu, torch.ops.aten.silu)),
    ("gelu", "x approximate", (F.gelu, torch.ops.aten.gelu)),
    ("sigmoid", "x", (torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid")),
    ("tanh", "x", (torch.tanh, F.tanh, "tanh")),
    ("exp", "x", (torch.exp, "exp")),
    ("erf", "x", (torch.erf, torch.special.erf, "erf")),
    ("reciprocal", "x", (torch.reciprocal, "reciprocal")),
    ("sqrt", "x", (torch.sqrt, "sqrt")),
    ("rsqrt", "x", (torch.rsqrt, "rsqrt")),
    ("softplus", "x beta threshold", (F.softplus, torch.ops.aten.softplus)),
    ("clamp", "x min max", (torch.clamp, torch.clip, "clamp", "clip")),
    ("clamp_min", "x min", (torch.clamp_min, "clamp_min")),
    ("clamp_max", "x max", (torch.clamp_max, "clamp_max")),
    ("masked_fill", "x mask value", (torch.masked_fill, "masked_fill")),
    ("where", "mask x y", (torch.where, "where")),
    ("and", "x y", (torch.bitwise_and, torch.logical_and, "bitwise_and", "logical_and", operator.and_)),
    ("not", "x", (torch.bitwise_not, torch.logical_not, "bitwise_not", "logical_not", operator.invert)),
    ("eq", "x y", (torch.eq, "eq", operator.eq)),
    ("ge", "x y", (torch.ge, torch.greater_equal, "ge", "greater_equal", operator.ge)),
    ("gt", "x y", (torch.gt, torch.greater, "gt", "greater", operator.gt)),
    ("le", "x y", (torch.le, torch.less_equal, "le", "less_equal", operator.le)),
    ("lt", "x y", (torch.lt, torch.less, "lt", "less", operator.lt)),
    ("ne", "x y", (torch.ne, torch.not_equal, "ne", "not_equal", operator.ne)),
    # the same values in the same order, in another shape
    ("view", "x", ("view", "_unsafe_view", "view_as", "unflatten")),
    ("view", "x", (torch.reshape, "reshape", "reshape_as", torch.flatten, "flatten", torch.ravel, "ravel")),
    ("view", "x", (torch.unsqueeze, "unsqueeze", torch.squeeze, "squeeze", torch.unflatten)),
    ("view", "x", ("contiguous", "alias")),
    ("clone", "x", (torch.clone, "clone")),
    ("dropout", "x y training inplace", (F.dropout, "dropout")),
    # other views
    ("transpose", "x dim0 dim1", (torch.transpose, "transpose", torch.swapaxes, "swapaxes", "swapdims")),
    ("mt", "x", ("mT",)),
    ("t", "x", (torch.t, "t")),
    ("einsum", "x", (torch.einsum, "einsum")),
    ("permute", "x dims", (torch.permute, "permute")),
    ("expand", "x", ("expand", torch.broadcast_to, "broadcast_to", "expand_as")),
    ("chunk", "x chunks dim", (torch.chunk, "chunk")),
    ("split", "x size dim", (torch.split, "split", "split_with_sizes")),
    ("tensor_split", "x size dim", (torch.tensor_split, "tensor_split")),
    ("unbind", "x dim", (torch.unbind, "unbind")),
    ("select", "x dim index", (torch.select, "select")),
    ("slice", "x dim start end step", (torch.ops.aten.slice,)),
    ("narrow", "x dim start length", (torch.narrow, "narrow")),
    ("stack", "x dim", (torch.stack, torch.ops.aten.stack)),
    ("cat", "x dim", (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat)),
    ("vstack", "x", (torch.vstack, torch.row_stack)),
    # casts (the result's dtype is read from its metadata)
    ("cast", "x", ("to", "type", "type_as", "_to_copy")),
    ("cast", "x", ("float", "half", "bfloat16", "double", "int", "long", "bool")),
    # indexing, sorting, counting
    ("getitem", "x index", (operator.getitem,)),
    ("index", "x index", (torch.ops.aten.index,)),
    ("index_select", "x dim index", (torch.index_select, "index_select")),
    ("setitem", "x index src", (operator.setitem,)),
    ("index_put", "x index src accumulate", (torch.index_put, "index_put")),
    ("gather", "x dim index", (torch.gather, "gather")),
    ("take_along_dim", "x index dim", (torch.take_along_dim, "take_along_dim")),
    ("scatter", "x dim index src", (torch.scatter, "scatter")),
    ("scatter_add", "x dim index src", (torch.scatter_add, "scatter_add")),
    ("scatter_reduce", "x dim index src reduce include_self", (torch.scatter_reduce, "scatter_reduce")),
    ("index_add", "x dim index src", (torch.index_add, "index_add")),
    ("index_copy", "x dim index src", (torch.index_copy, "index_copy")),
    ("repeat_interleave", "x repeats dim", (torch.repeat_interleave, "repeat_interleave")),
    ("sort", "x dim descending", (torch.sort, "sort")),
    ("argsort", "x dim descending", (torch.argsort, "argsort")),
    ("topk", "x k dim largest sorted", (torch.topk, "topk")),
    ("vector_norm", "x y dim keepdim", (torch.norm, torch.linalg.vector_norm, torch.linalg.norm, "norm")),
    ("vector_norm", "x y dim keepdim", ("linalg_vector_norm",)),
    ("max", "x dim keepdim", (torch.max, "max")),
    ("detach", "x", ("detach",)),
    ("amax", "x dim keepdim", (torch.amax, "amax")),
    ("any", "x dim keepdim", (torch.any, "any")),
    ("sum", "x dim keepdim dtype", (torch.sum, "sum")),
    ("mean", "x dim keepdim dtype", (torch.mean, "mean")),
    ("var", "x dim unbiased keepdim", (torch.var, "var")),
    ("cumsum", "x dim dtype", (torch.cumsum, "cumsum")),
    ("diff", "x n dim prepend append", (torch.diff, "diff")),
    ("tril", "x diagonal", (torch.tril, "tril")),
    ("triu", "x diagonal", (torch.triu, "triu")),
    ("pad", "x pad mode value", (F.pad, torch._C._nn.pad, torch.ops.aten.pad)),
    ("pad", "x pad value", (torch.ops.aten.constant_pad_nd,)),
    ("histc", "x bins min max", (torch.histc, "histc")),
    ("count_nonzero", "x dim", (torch.count_nonzero, "count_nonzero")),
    ("nonzero", "x", (torch.argwhere, "argwhere")),
    ("masked_select", "x mask", (torch.masked_select, "masked_select")),
    ("one_hot", "x num_classes", (F.one_hot, "one_hot")),
    ("searchsorted", "x y out_int32 right side", (torch.searchsorted, torch.ops.aten.searchsorted)),
    ("bucketize", "x y out_int32 right", (torch.bucketize, torch.ops.aten.bucketize)),
    ("bincount", "x weights minlength", (torch.bincount, "bincount")),
    ("softmax", "x dim dtype", (torch.softmax, "softmax")),
    ("softmax", "x dim _stacklevel dtype", (F.softmax,)),
    ("softmax", "x dim half_to_float", (torch.ops.aten._softmax,)),
    ("randint", "low high size", (torch.randint, torch.ops.aten.randint)),
    ("argmax", "x dim keepdim", (torch.argmax, "argmax")),
    # creation
    ("arange", "start end step", (torch.arange, torch.ops.aten.arange)),
    ("empty_like", "x", (torch.empty_like, torch.ops.aten.empty_like)),
    ("zeros_like", "x", (torch.zeros_like, torch.ops.aten.zeros_like)),
    ("ones_like", "x", (torch.ones_like, torch.ops.aten.ones_like)),
    ("ones", "size", (torch.ones, torch.ops.aten.ones)),
    ("ones", "x size", ("new_ones",)),
    ("zeros", "size", (torch.zeros, torch.ops.aten.zeros)),
    ("zeros", "x size", ("new_zeros",)),
    ("full", "size fill", (torch.full, torch.ops.aten.full)),
    ("full", "x fill", (torch.full_like, torch.ops.aten.full_like)),
    ("full", "x size fill", ("new_full",)),
    ("empty", "size", (torch.empty, torch.ops.aten.empty)),
    ("empty", "x size", ("new_empty",)),
    # products
    ("grouped_mm", "x weight offs bias out_dtype", ("_grouped_mm",)),
    ("bmm", "x y", (torch.bmm, "bmm")),
    ("baddbmm", "bias x y beta alpha", (torch.baddbmm, "baddbmm")),
    ("matmul", "x y", (torch.matmul, "matmul", operator.matmul, torch.mm, "mm")),
    ("addmm", "bias x y beta alpha", (torch.addmm, "addmm")),
    ("linear", "x weight bias", (F.linear, torch.ops.aten.linear)),
    (
        "sdpa",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention),
    ),
    # where the search for the first projection stops and what a normalisation looks like
    (
        "norm",
        "x",
        (
            F.rms_norm,
            torch.rms_norm,
            F.layer_norm,
            torch.layer_norm,
            torch.ops.aten.rms_norm,
            torch.ops.aten.layer_norm,
        ),
    ),
    ("embedding", "x", (F.embedding, torch.ops.aten.embedding)),
)
# `x += y` and its kin: Python's in-place operators, by the functional operator of each.
OPERATORS_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_,
    operator.ixor: operator.xor, operator.ilshift: operator.lshift, operator.irshift: operator.rshift,
    operator.imatmul: operator.matmul,
}  # fmt: skip
_METADATA = frozenset({"size", "dim", "numel", "stride", "element_size", "is_contiguous", "storage_offset"})
# Keyword spellings of the parameters above.
_KEYWORDS = {
    "tensors": "x",
    "input": "x", "self": "x", "other": "y", "mat2": "y", "exponent": "y", "keepdims": "keepdim", "mat1": "x",
    "mat_a": "x", "mat_b": "weight", "split_size": "size", "split_size_or_sections": "size", "split_sizes": "size",
    "offsets": "offs", "indices": "index", "axis": "dim", "value": "src", "values": "src", "source": "src",
    "sorted_sequence": "x", "boundaries": "y", "indices_or_sections": "size", "sections": "size",
    "fill_value": "fill", "condition": "mask", "p": "y", "ord": "y",
}  # fmt: skip
# Named results of sort, topk and max.
_FIELDS = {"values": 0, "indices": 1}
_TRANSFORMERS_GROUPED_MM = "transformers::grouped_mm_fallback"


# Python's operators as methods of Tensor, as some versions of Dynamo write them; those that swap their operands, and
# those in place, keep their names.
_DUNDER = {
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__add__": "add",
    "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__neg__": "neg",
    "__floordiv__": "floor_divide", "__mod__": "remainder", "__pow__": "pow", "__matmul__": "matmul", "__abs__": "abs",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not",
}  # fmt: skip


def method_name(target: str) -> str:
    """The Tensor method that ``target`` is, where it is an operator's."""
    return _DUNDER.get(target, target)


# Calls whose other arguments say what the result's metadata says too: its shape, dtype, device or memory format.
_TOLD_BY_RESULT = frozenset(
    {
        "view",
        "cast",
        "expand",
        "clone",
        "detach",
        "zeros",
        "zeros_like",
        "empty",
        "empty_like",
        "full",
        "ones",
        "ones_like",
        "metadata",
    }
)
# Arguments that change no number, or none that a recogniser relies on (the order of a topk's results, of equal keys).
_HARMLESS = frozenset(
    {"sorted", "stable", "memory_format", "layout", "pin_memory", "device", "_stacklevel", "output_size", "mode"}
)
# What an argument is when it is not passed; None for those not listed. By (call, argument) where calls differ.
_DEFAULTS: dict[str | tuple[str, str], Any] = {
    "alpha": 1, "keepdim": False, "largest": True, "descending": False, "accumulate": False, "half_to_float": False,
    "approximate": "none", "include_self": True, ("softplus", "threshold"): 20,
    ("addcmul", "value"): 1, ("arange", "start"): 0, ("arange", "step"): 1, ("slice", "step"): 1,
    ("topk", "dim"): -1, ("sort", "dim"): -1, ("argsort", "dim"): -1, ("bincount", "minlength"): 0,
    "beta": 1, "out_int32": False, "right": False, "num_classes": -1,
    ("unbind", "dim"): 0, ("split", "dim"): 0, ("stack", "dim"): 0, ("cat", "dim"): 0,
    "enable_gqa": False, "is_causal": False, "dropout_p": 0.0, ("histc", "min"): 0, ("histc", "max"): 0,
    ("randint", "low"): 0, ("tril", "diagonal"): 0, ("triu", "diagonal"): 0, ("diff", "n"): 1, ("diff", "dim"): -1,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A node in the common vocabulary.

    Attributes:
        name: canonical name, or the target's own name when it is not in the vocabulary.
        args: parameter -> value; tensors are graph nodes.
    """

    name: str
    args: dict[str, Any]

    def __getitem__(self, parameter: str) -> Any:
        """Value of ``parameter``; its default, or None, when the call does not pass it."""
        value = self.args.get(parameter)
        return self._default(parameter) if value is None else value

    def passes_only(self, parameters: Iterable[str]) -> bool:
        """Whether every argument that is not at its default is one of ``parameters``."""
        if self.name in _TOLD_BY_RESULT:
            return True
        return all(
            name in parameters or name in _HARMLESS or value is None or value == self._default(name)
            for name, value in self.args.items()
        )

    def _default(self, parameter: str) -> Any:
        return _DEFAULTS.get((self.name, parameter), _DEFAULTS.get(parameter))


def _index_table() -> tuple[dict[Any, tuple[str, tuple[str, ...]]], dict[str, tuple[str, tuple[str, ...]]]]:
    functions: dict[Any, tuple[str, tuple[str, ...]]] = {}
    names: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, parameters, spellings in _TABLE:
        row = (name, tuple(parameters.split()))
        for spelling in spellings:
            if isinstance(spelling, str):
                names.setdefault(spelling, row)
            elif isinstance(spelling, torch._ops.OpOverloadPacket):
                names.setdefault(str(spelling).removeprefix("aten."), row)
            else:
                functions.setdefault(spelling, row)
    grouped = names["_grouped_mm"]
    for holder, attribute in ((torch, "_grouped_mm"), (F, "grouped_mm")):
        if hasattr(holder, attribute):
            functions[getattr(holder, attribute)] = grouped
    names[_TRANSFORMERS_GROUPED_MM] = grouped
    return functions, names


_FUNCTIONS, _NAMES = _index_table()
#: Operators by which Dynamo captures attributes since torch 2.14; `mT` has a row.
_OF_ATTRIBUTES = {"numpy_T": "T", "matrix_H": "H", "mH": "mH"}


def spell(node: fx.Node) -> Call | None:
    """The canonical call of ``node``, or None for placeholders, attributes, outputs and submodules."""
    if node.op == "call_method":
        return _spell_name(node, str(node.target))
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _spell_operator(node, target)
    if target is getattr:
        return _spell_attribute(*node.args[:2])
    target = OPERATORS_IN_PLACE.get(target, target)  # type: ignore[arg-type]
    row = _FUNCTIONS.get(target)
    if row is not None:
        return _finish(node, *row)
    name = getattr(target, "__name__", str(target))
    if isinstance(target, FunctionType) and not of_torch(target.__module__):
        return _finish(node, f"{target.__module__}.{name}@{id(target):x}", ())  # whatever else has that name
    if name == "_get_data_attr":
        return Call("detach", {"x": node.args[0]})
    return _spell_name(node, name) if is_in_place_name(name) else _finish(node, name, ())


def is_in_place_name(name: str) -> bool:
    """Whether torch's naming says that the function or method ``name`` writes its tensor."""
    return name.endswith("_") and not name.endswith("__")


def _spell_attribute(source: Any, attribute: Any) -> Call:
    if attribute in _FIELDS and example(source) is None:
        return Call("item", {"x": source, "index": _FIELDS[str(attribute)]})
    if attribute == "mT" or (attribute == "T" and rank(source) == 2):
        return Call("mt", {"x": source})
    return Call("getattr", {"x": source, "index": attribute})


def _spell_name(node: fx.Node, name: str) -> Call:
    """A Tensor method, or a function named like one."""
    base = name[:-1] if is_in_place_name(name) else method_name(name)
    if base in _METADATA:
        return Call("metadata", {"x": node.args[0]})
    return _finish(node, *_NAMES.get(base, (base, ())))


def _spell_operator(node: fx.Node, target: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> Call:
    overload = target if isinstance(target, torch._ops.OpOverload) else _first_overload(target)
    qualified = overload._schema.name
    base = qualified.removeprefix("aten::").removeprefix("prims::")
    if base in _OF_ATTRIBUTES:
        return _spell_attribute(_bind(node, ("x",)).get("x"), _OF_ATTRIBUTES[base])
    row = _NAMES.get(base) or _NAMES.get(base.removesuffix("_"))
    if row is None:
        return Call(qualified, _bind(node, tuple(argument.name for argument in overload._schema.arguments)))
    return _finish(node, *row)


def _first_overload(packet: torch._ops.OpOverloadPacket) -> torch._ops.OpOverload:
    overload: torch._ops.OpOverload = getattr(packet, packet._overload_names[0] or "default")
    return overload


def _finish(node: fx.Node, name: str, parameters: tuple[str, ...]) -> Call:
    """Bind the arguments and fold variants of one operation into one name."""
    if name == "arange":  # arange(3) ends there, arange(3, end=8) starts there
        parameters = ("end",) if len(node.args) == 1 and "end" not in node.kwargs else parameters
    elif name == "where" and node.op == "call_method":
        parameters = ("x", "mask", "y")
    elif name == "randint":
        is_short = len(node.args) + ("size" in node.kwargs) < 3 and "high" not in node.kwargs
        parameters = ("high", "size") if is_short else parameters
    args = _bind(node, parameters)
    args.pop("inplace", None)
    args.pop("out", None)
    if name == "getitem":
        name = _classify_getitem(args)
    elif name == "index_select" and args.get("dim") == 0 and rank(args.get("index")) == 1:
        name, args = "index", {"x": args["x"], "index": args["index"]}
    elif name == "permute" and isinstance(args.get("dims"), int):  # x.permute(0, 2, 1)
        args = {"x": args["x"], "dims": [args[key] for key in args if key != "x"]}
    elif name in ("setitem", "index_put"):
        name, args["index"] = "index_put", single(args["index"])
    elif name == "index":
        args["index"] = single(args["index"])
    elif name == "scatter_reduce" and args.get("reduce") == "sum" and args.get("include_self", True) is True:
        name, args = "scatter_add", {key: args[key] for key in ("x", "dim", "index", "src")}
    elif name in ("clamp_min", "clamp_max"):
        name = "clamp"
    elif name == "div" and args.get("rounding_mode") in ("floor", "trunc"):
        name = {"floor": "floordiv", "trunc": "truncdiv"}[args.pop("rounding_mode")]
    elif name == "matmul" and all(rank(args.get(side)) == 3 for side in ("x", "y")):
        name = "bmm"
    elif name == "einsum" and isinstance(args.get("arg1"), list | tuple):  # aten's, and torch.einsum("...", [x, y])
        args |= {f"arg{place}": value for place, value in enumerate(args["arg1"], 1)}
    elif name in ("split", "tensor_split") and isinstance(args.get("size"), list | tuple):
        args["sizes"] = args.pop("size")
    if name in ("index", "index_put") and not _is_position(args.get("index")):
        name = "fancy" if name == "index" else "fancy_put"
    if name in ("getslice", "select", "slice", "narrow") and _keeps_all(node, args.get("x")):
        return Call("view", {"x": args["x"]})  # every element, in the same order
    if name == "item" and (whole := _only_part(node, args.get("x"))) is not None:
        return Call("view", {"x": whole})
    if name == "dropout" and (args.get("training") is False or args.get("y") == 0):
        return Call("view", {"x": args["x"]})  # drops nothing
    if name in ("view", "cast", "clone") and not _keeps_elements(node, name, args.get("x")):
        name = f"{name}_of_other_elements"
    return Call(name, args)


def _is_position(index: Any) -> bool:
    """Whether ``index`` is one tensor of positions (a mask, or one of uint8, selects instead)."""
    value = example(index)
    return isinstance(index, fx.Node) and (value is None or value.dtype in (torch.int32, torch.int64))


def _keeps_elements(node: fx.Node, name: str, source: Any) -> bool:
    """False for a reinterpretation of bytes, or of another number of elements, that is spelled like a reshape."""
    after, before = example(node), example(source)
    if after is None or before is None:
        return not any(isinstance(argument, torch.dtype) for argument in node.args) or node.target != "view"
    changed = name == "view" and after.dtype != before.dtype
    return not changed and same_count(after, before)


def _keeps_all(node: fx.Node, source: Any) -> bool:
    """Whether a slice takes every element; of no elements, whether it would of more.

    What torch asserts of a size that only the data knows is no answer: that ``h * w[:1]`` broadcasts nothing, say.
    """
    after, before = example(node), example(source)
    if after is None or before is None or not same_count(after, before):
        return False
    if any(map(is_of_the_data, before.shape)) and not _same_factors(after, before):
        return False
    empty = any(type(size) is int and size == 0 for size in before.shape)
    return not empty or equal_sizes(_extent(after), _extent(before))


def _extent(value: torch.Tensor) -> Any:
    """The product of the sizes that are not 0, which tells slices of no elements apart."""
    return math.prod(size for size in value.shape if type(size) is not int or size != 0)


def _only_part(node: fx.Node, source: Any) -> fx.Node | None:
    """What ``node`` is the one part of, of ``unbind`` and its like."""
    call = spell(source) if isinstance(source, fx.Node) else None
    whole = call["x"] if call is not None and call.name in ("unbind", "chunk", "split") else None
    return whole if isinstance(whole, fx.Node) and _keeps_all(node, whole) else None


def _classify_getitem(args: dict[str, Any]) -> str:
    """item: an element of a tuple result; index: rows by a tensor; slice: a strided view; fancy: anything else."""
    source, index = args["x"], args["index"] = args["x"], _without_the_rest(args["x"], args["index"])
    if type(index) is int and example(source) is None:
        return "item"
    if isinstance(index, fx.Node) and isinstance(example(index), torch.Tensor):
        return "index"
    parts = index if isinstance(index, tuple) else (index,)
    if all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts):
        if all(part is None or part is Ellipsis or part == slice(None) for part in parts):
            return "view"
        return "getslice"
    return "fancy"


def _without_the_rest(source: Any, index: Any) -> Any:
    """``[i, ...]`` and ``[i, :, :]`` are ``[i]``: what is said of the other dimensions takes them whole; ``v[i, None]``
    of a vector is ``v[i]`` in another shape.
    """
    parts = index if isinstance(index, tuple) else ()
    nodes = [part for part in parts if isinstance(part, fx.Node)]
    if rank(source) == 1 and len(nodes) == 1 and all(part in (None, Ellipsis) for part in parts if part not in nodes):
        return nodes[0]
    if not parts or not isinstance(parts[0], fx.Node):
        return index
    whole = all(part is Ellipsis or part == slice(None) for part in parts[1:] if not isinstance(part, fx.Node))
    return parts[0] if whole and not any(isinstance(part, fx.Node) for part in parts[1:]) else index


def single(value: Any) -> Any:
    """``[i]`` and ``(i,)`` are ``i``: an index of one tensor, or one dimension."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def is_zero(value: Any) -> bool:
    """Whether ``value`` is a number, and 0."""
    return type(value) in (int, float) and value == 0


def _bind(node: fx.Node, parameters: tuple[str, ...]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for position, value in enumerate(node.args):
        name = parameters[position] if position < len(parameters) else ("x" if position == 0 else f"arg{position}")
        args[name] = value
    for key, value in node.kwargs.items():
        args[key if key in parameters else _KEYWORDS.get(key, key)] = value
    return args


_LETTERS = "ABCDEFGH"  # for the dimensions of "..."


# An einsum of two operands: these, the letters of each, and those of the result.
Labelled = tuple[tuple[fx.Node, fx.Node], tuple[str, str], str]


def two_labelled(call: Call | None) -> Labelled | None:
    """`labelled` of two operands."""
    found = labelled(call, 2)
    if found is None:
        return None
    (one, other), (left, right), result = found
    return (one, other), (left, right), result


def labelled(call: Call | None, count: int) -> tuple[tuple[fx.Node, ...], tuple[str, ...], str] | None:
    """(operands, the letters of each, those of the result) of ``einsum("ti,toi->to", x, y)``; None where dimensions are
    left to torch, a letter stands twice, or for two sizes (einsum repeats an operand along a dimension of size 1).
    """
    text = call["x"].replace(" ", "") if call is not None and isinstance(call["x"], str) else ""
    inputs, arrow, result = text.partition("->")
    labels = tuple(inputs.split(","))
    bare = [part.replace("...", "") for part in (*labels, result)]
    if call is None or not arrow or len(labels) != count or any(len(set(part)) < len(part) for part in bare):
        return None
    given = [call[f"arg{place}"] for place in range(1, count + 1)]
    operands = tuple(operand for operand in given if isinstance(operand, fx.Node))
    if len(operands) != count:
        return None
    spelled = _spell_out(operands, labels, result) if "." in text else (labels, result)
    if spelled is None or not _agree(operands, spelled[0]):
        return None
    return (operands, *spelled)


def scored(call: Call | None) -> Iterator[tuple[tuple[fx.Node, str], Labelled]]:
    """The ways to take an einsum of three operands for scores, with their letters, times an einsum of two."""
    found = labelled(call, 3)
    if found is None:
        return
    operands, labels, result = found
    for scores, one, other in ((2, 0, 1), (1, 0, 2), (0, 1, 2)):
        two = (operands[one], operands[other]), (labels[one], labels[other]), result
        yield (operands[scores], labels[scores]), two


def _agree(operands: tuple[fx.Node, ...], labels: tuple[str, ...]) -> bool:
    """Whether letters that several operands have are of one size."""
    sizes: dict[str, Any] = {}
    for operand, label in zip(operands, labels, strict=True):
        tensor = example(operand)
        if tensor is None or tensor.dim() != len(label):
            return False
        if not all(equal_sizes(sizes.setdefault(at, size), size) for at, size in zip(label, tensor.shape, strict=True)):
            return False
    return True


def _spell_out(
    operands: tuple[fx.Node, ...], labels: tuple[str, ...], result: str
) -> tuple[tuple[str, ...], str] | None:  # fmt: skip
    """Labels with letters for "...", which has to stand for as many dimensions in each operand that has it."""
    counts = {(rank(operand) or 0) - len(label) + 3 for operand, label in zip(operands, labels, strict=True)
              if "..." in label}  # fmt: skip
    if len(counts) != 1 or not 0 <= (count := counts.pop()) <= len(_LETTERS) or set(_LETTERS) & set("".join(labels)):
        return None
    *spelled, summed = (label.replace("...", _LETTERS[:count]) for label in (*labels, result))
    return tuple(spelled), summed


def target_name(node: fx.Node) -> str:
    """What ``node`` calls, by name: a method, a function, or an operator of any overload (without its "aten::")."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::")
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def is_assertion(node: fx.Node) -> bool:
    """Whether ``node`` only checks a value (`_assert_tensor_metadata`, constraints on sizes) and computes none."""
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith(
        ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")
    )


def example(node: Any) -> torch.Tensor | None:
    """The fake tensor recorded for ``node`` by Dynamo (``example_value``) or AOTAutograd (``val``), if it is one."""
    if not isinstance(node, fx.Node):
        return None
    value = size_of(node)
    return value if isinstance(value, torch.Tensor) else None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors recorded for ``node``: one, or those of a tuple."""
    value = size_of(node)
    return [part for part in (value if isinstance(value, list | tuple) else (value,)) if isinstance(part, torch.Tensor)]


def rank(node: Any) -> int | None:
    """Number of dimensions of ``node``, when known."""
    value = example(node)
    return None if value is None else value.dim()


def equal_sizes(left: Any, right: Any) -> bool:
    """Whether two sizes (ints, SymInts, or the graph nodes that compute them) are equal for every input."""
    one, two = size_of(left), size_of(right)
    if one is None or two is None:
        return False
    if same_symbols(one, two) or statically_known_true(one == two):
        return True
    first, second = as_asserted(one), as_asserted(two)
    return (first is not one or second is not two) and statically_known_true(first == second)


def as_many_by_a_guard(tensor: torch.Tensor, count: Any) -> bool:
    """Whether ``tensor`` has ``count`` elements. Rows, ids and weights that are inputs of a graph, as behind a graph
    break at a router, have sizes of their own there, which indexing does not compare: a guard does that.
    """
    return equal_sizes(tensor.numel(), count) or equal_by_a_guard(tensor.numel(), count)


def same_count(one: torch.Tensor, other: torch.Tensor, times: int = 1) -> bool:
    """Whether ``other`` has ``times`` as many elements as ``one``, for every input."""
    # Torch takes much longer to multiply the symbols.
    return _same_factors(one, other, times) or equal_sizes(one.numel() * times, other.numel())


def _same_factors(one: torch.Tensor, other: torch.Tensor, times: int = 1) -> bool:
    """Whether the sizes of both are the same symbols and, multiplied by ``times``, numbers of one product."""
    (known, symbols), (others, more) = _factors(one.shape), _factors(other.shape)
    return known * times == others and len(symbols) == len(more) and all(map(same_symbols, symbols, more))


def _factors(sizes: Iterable[Any]) -> tuple[int, list[Any]]:
    """The product of the sizes that are numbers, and the other sizes."""
    known, symbols = 1, []
    for size in sizes:
        if type(size) is int:
            known *= size
        else:
            symbols.append(size)
    return known, symbols


def size_of(value: Any) -> Any:
    """The int or SymInt that ``value`` stands for."""
    if isinstance(value, fx.Node):
        return value.meta.get("example_value", value.meta.get("val"))
    return value


def has_shape(node: Any, *sizes: Any) -> bool:
    """Whether ``node`` is a tensor of exactly this shape, for every input."""
    value = example(node)
    return value is not None and value.dim() == len(sizes) and all(map(equal_sizes, value.shape, sizes))


def has_sizes(node: Any, sizes: Sequence[Any]) -> bool:
    """Whether ``node`` has these sizes, but for leading ones of 1: whether it meets such a tensor without a copy."""
    given = example(node)
    if given is None or given.dim() > len(sizes) or not has_shape(node, *sizes[len(sizes) - given.dim() :]):
        return False
    return equal_sizes(given.numel(), math.prod(sizes))


def is_dense(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the elements of ``tensor`` lie one after the other in memory, the last of these dimensions fastest."""
    step: Any = 1
    for d in reversed(order):
        if not equal_sizes(tensor.stride(d), step):
            return False
        step = step * tensor.shape[d]
    return True


def same_shape(left: Any, right: Any) -> bool:
    """Whether two tensors have one shape, for every input."""
    value = example(right)
    return value is not None and has_shape(left, *value.shape)
