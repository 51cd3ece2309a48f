"""Every way to alias or to write a tensor that torch's own operator schemas know, as calls that can be made.

A spelling takes a tensor and either returns something that shares its memory or writes into it. They come from the
schemas: each operator that returns a view, each that writes an argument (in place, `out=`, `_foreach_`), called as
an ATen overload and, where they exist, as a function of torch and as a method of Tensor. Arguments are found by trying
values that fit their types; what counts as an alias or a write is what the memory says afterwards.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Combinations of arguments that are tried for one shape, and seconds for one spelling.
ATTEMPTS, SECONDS = 150, 1.0
# Views of the memory of a tensor in which operators are tried: their shapes.
SHAPES = ((4, 4), (4,), (2, 4, 4), (1, 2, 4, 4), (), (1, 1, 4, 4, 4))
# Operators of other devices, layouts and libraries, that need state of their own, or that are no tensor computation:
# parts of their names. `left_out` names every schema that is not called for it.
_ELSEWHERE = (
    "cudnn", "miopen", "mkldnn", "mps", "cuda", "fbgemm", "sparse", "quantize", "q_", "nested", "coalesce", "vulkan",
    "record_stream", "pin_memory", "_test_", "xnnpack", "named", "rename", "_coo", "_csr", "crow", "ccol", "_indices",
    "_values", "_jagged", "_thnn", "_flash", "_efficient", "_fused_sdp", "_scaled_dot", "_cslt", "_sobol", "_debug",
    "_assert", "_backward_from", "sym_", "rnn", "lstm", "gru", "backward", "_native_batch_norm", "_batch_norm_with",
    "_cufft", "_spdiags", "to_dense", "choose_qparams", "int_repr", "_histogramdd", "_aminmax", "_ctc_loss", "nnpack",
    "_fused_ada", "_fused_sgd", "_cpu_fallback", "multi_head", "transformer_encoder", "_make_dual", "_unpack_dual",
)  # fmt: skip
# Operators that end the process when they are called with arguments that do not fit.
_FATAL = ("_transform_bias_rescale_qkv", "_trilinear", "mH", "_nnpack_spatial_convolution")
# Operators whose result is memory that nobody wrote: there is nothing to compare.
_UNDEFINED = ("resize",)


@dataclass(frozen=True)
class Spelling:
    """One operator in one way to call it.

    Attributes:
        name: qualified operator, overload, and the way to call it.
        kind: "view", "in place", "out" or "foreach", by the schema; "python" for what has none.
        make: finds the call and its effect; None when no arguments were found.
    """

    name: str
    kind: str
    make: Callable[[], Found | None]


def memory(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The first elements of ``x`` as a tensor of ``shape`` and ``dtype`` in the same storage."""
    flat = x.view(-1)
    if dtype != x.dtype:
        flat = flat.view(torch.uint8).view(dtype) if dtype == torch.bool else flat.view(dtype)
    count = 1
    for size in shape:
        count *= size
    return flat[:count].view(shape)


@dataclass(frozen=True)
class Effect:
    """What a call does to the memory of its argument.

    Attributes:
        changes: the call itself writes it.
        part: the result (its position in a list of results; -1 for the only one) that shares it, if any.
        floating: whether that result holds floating point or complex numbers.
    """

    changes: bool
    part: int | None = None
    floating: bool = True

    def write(self, result: Any) -> None:
        """Overwrite the result that shares the argument's memory, if the call did not write itself."""
        if self.changes or self.part is None:
            return
        view = result if self.part == -1 else result[self.part]
        if self.floating:
            view.add_(1.5)
        else:
            view.bitwise_not_()


def effect_of(call: Callable[[Tensor], Any]) -> Effect | None:
    """What ``call`` does to the memory of its argument; None when it raises, or aliases what cannot be written."""
    x = sample()
    flat = torch.as_strided(x, (x.numel(),), (1,))
    before = flat.clone()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")  # a result that is resized, an argument that is deprecated
            result = call(x)
            if not _equal_bits(before, flat):
                return Effect(changes=True)
            effect = _aliasing(result, flat)
            effect.write(result)
    except Exception:
        return None
    return effect if effect.part is None or not _equal_bits(before, flat) else None


def _aliasing(result: Any, flat: Tensor) -> Effect:
    parts = list(result) if isinstance(result, list | tuple) else [result]
    for position, part in enumerate(parts):
        dense = isinstance(part, Tensor) and part.layout == torch.strided and part.numel() > 0
        if dense and part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            floating = part.dtype.is_floating_point or part.dtype.is_complex
            return Effect(False, position if isinstance(result, list | tuple) else -1, floating)
    return Effect(False)


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


Call = Callable[[Tensor], Any]
Found = tuple[Call, Effect]


# ---- from schemas


def _kind(schema: Any) -> str | None:
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if schema.name.startswith("aten::_foreach_") and written:
        return "foreach" if not any(a.kwarg_only for a in written) else "out"
    if written:
        return "out" if any(a.kwarg_only for a in written) else "in place"
    returned = any(r.alias_info is not None for r in schema.returns)
    viewed = any(a.alias_info is not None and "Tensor" in str(a.type) for a in schema.arguments)
    return "view" if returned and viewed else None


@cache
def _by_name() -> dict[str, Any]:
    """All schemas of ATen that view or write, once each."""
    found: dict[str, Any] = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and _kind(schema) is not None and _is_operator(schema):
            found[f"{schema.name}.{schema.overload_name}".rstrip(".")] = schema
    return dict(sorted(found.items()))


def _is_left_out(schema: Any) -> bool:
    base = schema.name.removeprefix("aten::")
    return base in (*_FATAL, *_UNDEFINED) or any(part in base for part in _ELSEWHERE)


def left_out() -> list[str]:
    """The schemas that view or write and are not called, by name."""
    return [name for name, schema in _by_name().items() if _is_left_out(schema)]


def schemas() -> list[Any]:
    """The schemas that are called."""
    return [schema for schema in _by_name().values() if not _is_left_out(schema)]


def _is_operator(schema: Any) -> bool:
    """TorchScript's own functions on lists and strings are schemas too."""
    return any("Tensor" in str(a.type) for a in schema.arguments) and hasattr(
        torch.ops.aten, schema.name.split("::")[1]
    )


def _ways(schema: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name of the way, callable): the overload, the function of torch, the method."""
    base, overload = schema.name.split("::")[1], schema.overload_name or "default"
    packet = getattr(torch.ops.aten, base)
    if overload in packet.overloads():
        yield "aten", getattr(packet, overload)
    holders = (("torch", torch), ("F", F), ("torch._C._nn", torch._C._nn), ("linalg", torch.linalg),
               ("special", torch.special), ("fft", torch.fft))  # fmt: skip
    for name, holder in holders:
        short = base.removeprefix(f"{name}_")
        if callable(getattr(holder, short, None)):
            yield name, getattr(holder, short)
            break
    if callable(getattr(Tensor, base, None)) and _kind(schema) != "out":
        yield "method", getattr(Tensor, base)


def _tensors(shape: tuple[int, ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    square = shape if len(shape) > 1 else (4, 4)
    return [
        torch.rand(shape, generator=make) + 0.5, torch.ones(shape, dtype=torch.long), torch.ones(4),
        torch.zeros(4, dtype=torch.long), torch.ones(shape, dtype=torch.bool), torch.rand(square, generator=make) + 0.5,
        torch.rand(()), torch.ones(shape, dtype=torch.int32), torch.rand(2, 4, 4, generator=make),
        torch.zeros((), dtype=torch.long), torch.rand(1, 2, 4, 4, generator=make),
        torch.rand(shape, generator=make).to(torch.complex64),
    ]  # fmt: skip


_INT_LISTS = ([1, 0], [4, 4], [2, 2], [0], [1], [4], [1, 1], [16], [0, 0], [2], [2, 2, 2], [1, 1, 1], [0, 1, 2],
              [1, 2, 4, 4], [2, 1, 0], [4, 4, 4], [1, 1, 1, 1])  # fmt: skip
_NAMED_INTS = {"dim": (0, 1, -1), "dim0": (0,), "dim1": (1, 0), "dim2": (1,), "axis0": (0,), "axis1": (1, 0),
               "chunks": (2,), "sections": (2,), "split_size": (2,), "n": (2, 1), "k": (1, 2), "size": (2, 4),
               "dimension": (0,), "groups": (1, 2), "num_classes": (4,)}  # fmt: skip


def _values(argument: Any, shape: tuple[int, ...]) -> list[Any] | None:
    """Values of ``argument`` to try; None for a type that is not covered."""
    kind = (
        str(argument.type).replace("Optional[", "").replace("]", "")
        if "Optional[" in str(argument.type)
        else str(argument.type)
    )
    table: dict[str, Any] = {
        "Tensor": _tensors(shape),
        "int": list(_NAMED_INTS.get(argument.name, (1, 0, 2, 4))),
        "float": [0.5, 1.0],
        "number": [2, 0.5, 1],
        "bool": [True, False],
        "List[int]": list(_INT_LISTS),
        "List[float]": [[0.5, 0.5], [0.5]],
        "List[bool]": [[False, False]],
        "str": ["mean", "sum", "reflect", "constant", "ij,jk->ik", "amax", "none", "S"],
        "Generator": [None],
        "Layout": [None],
        "Device": [torch.device("cpu")],
        "MemoryFormat": [torch.contiguous_format],
        "ScalarType": [torch.float32, torch.int32],
        "complex": [1.0],
        "List[number]": [[2.0, 2.0], [2.0]],
        "List[Tensor]": [[t, t.clone()] for t in _tensors(shape)[:6]],
        "List[Tensor": [[t] for t in _tensors(shape)[:5]],
        "List[int": list(_INT_LISTS),
        "List[float": [[0.5, 0.5]],
    }
    return table.get(kind)


def _found(schema: Any, target: Callable[..., Any]) -> Found | None:
    """A call of ``target`` that has an effect on the memory of its argument, or failing that, one that runs."""
    runs: Found | None = None
    until = time.perf_counter() + SECONDS
    for dtype, shape in itertools.product((torch.float32, torch.int32, torch.bool, torch.complex64), SHAPES):
        for call in _calls(schema, target, shape, dtype):
            effect = None if call is None else effect_of(call)
            if effect is not None and (effect.changes or effect.part is not None):
                return call, effect
            if effect is not None and runs is None:
                runs = call, effect
            if time.perf_counter() > until:
                return runs
    return runs


def sample() -> Tensor:
    """A tensor as the hidden states of the block are one."""
    return torch.rand(12, 32, generator=torch.Generator().manual_seed(1)) - 0.25


def _calls(
    schema: Any, target: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Call | None]:
    kind = _kind(schema)
    mine = [a.name for a in schema.arguments if a.alias_info is not None and (kind == "view" or a.alias_info.is_write)]
    given = [a for a in schema.arguments if a.name not in mine and not a.has_default_value()]
    choices = [_values(argument, shape) for argument in given]
    if any(values is None for values in choices):
        return
    names = [argument.name for argument in schema.arguments]
    keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}
    for chosen in _combinations(choices):
        values = dict(zip((argument.name for argument in given), chosen, strict=True))
        if kind == "out":
            yield _with_out(schema, target, values, mine)
        else:
            yield _bound(target, names, keywords, values, dict.fromkeys(mine[:1], (shape, dtype)), mine[1:], schema)


def _combinations(choices: list[list[Any]]) -> list[tuple[Any, ...]]:
    """All combinations, or a fixed draw of them where they are many."""
    if math.prod(map(len, choices)) <= ATTEMPTS:
        return list(itertools.product(*choices))
    rng = random.Random(0)
    return [tuple(values[0] for values in choices), *(tuple(map(rng.choice, choices)) for _ in range(ATTEMPTS))]


def _bound(target, names, keywords, values, mine, others, schema) -> Callable[[Tensor], Any]:
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}

    def call(x: Tensor) -> Any:
        own = {name: memory(x, *where) for name, where in mine.items()}
        own |= {name: torch.ones(next(iter(mine.values()))[0]) for name in others}
        own = {name: [value] if kinds[name].startswith("List") else value for name, value in own.items()}
        every = {**values, **own}
        positional = [every[name] for name in names if name in every and name not in keywords]
        return target(*positional, **{name: every[name] for name in names if name in every and name in keywords})

    return call


def _with_out(schema, target, values, mine) -> Call | None:
    """`out=`: memory of the shape and dtype that the functional form returns."""
    packet = getattr(torch.ops.aten, schema.name.split("::")[1])
    names = [argument.name for argument in schema.arguments]
    keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}
    positional = [values[name] for name in names if name in values and name not in keywords]
    named = {name: values[name] for name in names if name in values and name in keywords}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = packet(*positional, **named)
    except Exception:
        return None
    parts = list(plain) if isinstance(plain, list | tuple) else [plain]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        return None
    if len(mine) == 1 and len(parts) > 1:
        groups: list[Any] = [parts]
    elif len(mine) == len(parts):
        groups = parts
    else:
        return None
    spelled_out = not isinstance(target, torch._ops.OpOverload)

    def call(x: Tensor) -> Any:
        first = True
        outs = []
        for group in groups:
            one = group if isinstance(group, list) else [group]
            room = [
                memory(x, tuple(part.shape), part.dtype) if first and position == 0 else torch.empty_like(part)
                for position, part in enumerate(one)
            ]
            first = False
            outs.append(room if isinstance(group, list) else room[0])
        if spelled_out:
            return target(*positional, **named, out=outs[0] if len(outs) == 1 else tuple(outs))
        return target(*positional, **named, **dict(zip(mine, outs, strict=True)))

    return call


# ---- what has no schema of its own


def _python() -> dict[str, Callable[[Tensor], Any]]:
    """Operators, item assignment, attributes, functions and modules of torch written in Python."""
    views: dict[str, Callable[[Tensor], Any]] = {
        f"attribute {name}": (lambda x, name=name: getattr(x, name)) for name in ("T", "mT", "H", "mH", "data", "real")
    }
    in_place = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
    writes: dict[str, Callable[[Tensor], Any]] = {
        f"operator {name}": (lambda x, name=name: getattr(operator, name)(x, 0.7)) for name in in_place
    }
    bits = ("iand", "ior", "ixor", "ilshift", "irshift")
    writes |= {
        f"operator {name}": (lambda x, name=name: getattr(operator, name)(x.view(torch.int32), 3)) for name in bits
    }
    writes |= {"operator imatmul": lambda x: operator.imatmul(x[:4, :4], torch.ones(4, 4))}
    indices = {
        "integer": 3,
        "slice": slice(1, 3),
        "ellipsis": Ellipsis,
        "pair": (2, slice(None)),
        "none": None,
        "list": [1, 2],
        "tensor": torch.tensor([1, 2]),
        "steps": (slice(None, None, 2), slice(1, 5)),
    }
    writes |= {
        f"setitem {name}": (lambda x, index=index: operator.setitem(x, index, 0.1)) for name, index in indices.items()
    }
    writes |= {"setitem mask": lambda x: operator.setitem(x, x > 0.5, 0.1)}
    writes |= {"setitem of data": lambda x: operator.setitem(x.data, slice(0, 2), 0.1)}
    views |= {
        f"getitem {name}": (lambda x, index=index: x[index])
        for name, index in indices.items()
        if name not in ("list", "tensor")
    }
    views |= {
        "iteration": lambda x: list(x)[2],
        "star": lambda x: [*x][3],
        "einsum": lambda x: torch.einsum("ij->ji", x),
        "einsum same": lambda x: torch.einsum("ij", x),
        "dropout eval": lambda x: F.dropout(x, 0.5, False),
        "alpha_dropout eval": lambda x: F.alpha_dropout(x, 0.5, False),
        "feature_dropout eval": lambda x: F.dropout1d(x, 0.5, False),
        "Dropout module eval": lambda x: nn.Dropout(0.5).eval()(x),
        "Identity module": lambda x: nn.Identity()(x),
        "Flatten module": lambda x: nn.Flatten()(x),
        "Unflatten module": lambda x: nn.Unflatten(1, (4, 8))(x),
        "Sequential of nothing": lambda x: nn.Sequential()(x),
        "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
        "broadcast_to": lambda x: torch.broadcast_to(x, (12, 32)),
        "atleast_1d": torch.atleast_1d,
        "atleast_2d": torch.atleast_2d,
        "atleast_3d": torch.atleast_3d,
        "atleast_1d of two": lambda x: torch.atleast_1d(x, torch.ones(2)),
        "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
        "chain_matmul": lambda x: torch.chain_matmul(x),
        "as_tensor": torch.as_tensor,
        "asarray": torch.asarray,
        "torch.split": lambda x: torch.split(x, 4),
        "ravel": lambda x: torch.ravel(x),
        "from_numpy": lambda x: torch.from_numpy(x.numpy()),
        "detach numpy": lambda x: torch.as_tensor(x.detach().numpy()),
        "reshape": lambda x: x.reshape(32, 12),
        "reshape_as": lambda x: x.reshape_as(torch.empty(32, 12)),
        "unbound view": lambda x: Tensor.view(x, 32, 12),
        "conj": torch.conj,
        "resolve_conj": torch.resolve_conj,
        "resolve_neg": torch.resolve_neg,
        "positive": lambda x: +x,
        "unflatten": lambda x: x.unflatten(1, (4, 8)),
        "from_dlpack": lambda x: torch.from_dlpack(x),
        "as_subclass": lambda x: x.as_subclass(Tensor),
        "requires_grad_": lambda x: x.requires_grad_(False),
        "contiguous": lambda x: x.contiguous(),
        "float": lambda x: x.float(),
        "to": lambda x: x.to(torch.float32),
        "type": lambda x: x.type(torch.float32),
        "cpu": lambda x: x.cpu(),
        "to cpu": lambda x: x.to("cpu"),
        "type_as": lambda x: x.type_as(torch.ones(1)),
        "pad with nothing": lambda x: F.pad(x, (0, 0)),
        "crop by pad": lambda x: F.pad(x, (-1, -1)),
        "pixel_shuffle of one": lambda x: F.pixel_shuffle(x.view(1, 1, 12, 32), 1),
        "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda v: v.view(-1), x, use_reentrant=False),
        "parameter data": lambda x: nn.Parameter(x, requires_grad=False).data,
        "tree_map": lambda x: torch.utils._pytree.tree_map(lambda v: v.t(), {"x": x})["x"],
        "view as complex": lambda x: torch.view_as_complex(x.view(12, 16, 2)),
        "real of complex": lambda x: torch.view_as_complex(x.view(12, 16, 2)).imag,
        "neg view": lambda x: torch._neg_view(x),
        "block of split": lambda x: torch.dsplit(x.view(2, 6, 32), 2)[1],
        "narrow with tensor": lambda x: torch.narrow(x, 0, torch.tensor(2), 3),
        "sum_to_size": lambda x: x.sum_to_size(12, 32),
        "expand_as": lambda x: x.expand_as(x),
        "view_as": lambda x: x.view_as(x),
    }
    flags = {
        "relu": F.relu,
        "relu6": F.relu6,
        "selu": F.selu,
        "silu": F.silu,
        "mish": F.mish,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
    }
    for name, function in flags.items():
        writes[f"F.{name} positional"] = lambda x, function=function: function(x, True)
        writes[f"F.{name} keyword"] = lambda x, function=function: function(x, inplace=True)
    low = {"elu": (F.elu, 1.0), "celu": (F.celu, 1.0), "leaky_relu": (F.leaky_relu, 0.1)}
    for name, (function, value) in low.items():
        writes[f"F.{name} positional"] = lambda x, function=function, value=value: function(x, value, True)
        writes[f"F.{name} keyword"] = lambda x, function=function: function(x, inplace=True)
    writes |= {
        "F.threshold positional": lambda x: F.threshold(x, 0.7, 0.1, True),
        "F.hardtanh positional": lambda x: F.hardtanh(x, -0.5, 0.5, True),
        "F.rrelu positional": lambda x: F.rrelu(x, 0.1, 0.3, False, True),
        "F.dropout positional": lambda x: F.dropout(x, 0.5, True, True),
        "F.dropout1d": lambda x: F.dropout1d(x, 0.9, True, True),
        "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True, True),
        "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True, True),
        "F.batch_norm running": lambda x: F.batch_norm(torch.rand(4, 32), x[0], torch.ones(32), training=True),
        "F.batch_norm variance": lambda x: F.batch_norm(torch.rand(4, 32), torch.ones(32), x[0], training=True),
        "torch.batch_norm": lambda x: torch.batch_norm(
            torch.rand(4, 32), None, None, x[0], x[1], True, 0.1, 1e-5, False
        ),
        "F.instance_norm running": lambda x: F.instance_norm(torch.rand(1, 32, 8), x[0], x[1], use_input_stats=True),
        "F.embedding max_norm": lambda x: F.embedding(torch.tensor([0, 1]), x, max_norm=0.1),
        "F.embedding_bag max_norm": lambda x: F.embedding_bag(torch.tensor([[0, 1]]), x, max_norm=0.1),
        "F.normalize out": lambda x: F.normalize(torch.ones(12, 32), out=x),
        "foreach clamp_max": lambda x: torch._foreach_clamp_max_([x], 0.3),
        "foreach of views": lambda x: torch._foreach_zero_(list(x[:3])),
        "foreach of a chunk": lambda x: torch._foreach_mul_(x.chunk(2), [1.5, 0.5]),
        "amp unscale": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
            [x], torch.zeros(()), torch.ones(()) * 2
        ),
        "copy into data": lambda x: x.data.copy_(torch.ones(12, 32)),
        "nn.init.zeros_": nn.init.zeros_,
        "nn.init.constant_": lambda x: nn.init.constant_(x, 0.3),
        "nn.init.uniform_": nn.init.uniform_,
        "nn.init.eye_": nn.init.eye_,
        "nn.init.xavier_uniform_": nn.init.xavier_uniform_,
        "swap data": lambda x: setattr(x, "data", torch.ones(12, 32)),
        "set_": lambda x: x.set_(torch.ones(12, 32)),
        "out of a pair": lambda x: torch.max(torch.rand(12, 5), 1, out=(x[:, 0], torch.empty(12, dtype=torch.long))),
        "out of a pair by name": lambda x: torch.sort(
            torch.rand(12, 32), out=(x, torch.empty(12, 32, dtype=torch.long))
        ),
        "iadd through numpy": lambda x: operator.iadd(x.numpy(), 1),
        "numpy fill": lambda x: x.numpy().fill(0.5),
        "random_ of ints": lambda x: x.view(torch.int32).random_(0, 5),
        "as_strided_": lambda x: x.as_strided_((32, 12), (1, 32)).add_(1),
        "t_": lambda x: x[0:4].t_().add_(1),
        "unsqueeze_": lambda x: x.view(-1).unsqueeze_(0).add_(1),
        "with out as list": lambda x: torch.split_copy(torch.rand(12, 32), 6, out=[x[:6], x[6:]]),
        "resize_": lambda x: x.resize_(12, 32).add_(1),
        "rows in a comprehension": lambda x: [row.add_(1) for row in x],
    }
    modules: dict[str, nn.Module] = {
        "ReLU": nn.ReLU(True),
        "ReLU6": nn.ReLU6(True),
        "LeakyReLU": nn.LeakyReLU(0.1, True),
        "ELU": nn.ELU(1.0, True),
        "CELU": nn.CELU(1.0, True),
        "SELU": nn.SELU(True),
        "SiLU": nn.SiLU(True),
        "Mish": nn.Mish(True),
        "Hardswish": nn.Hardswish(True),
        "Hardsigmoid": nn.Hardsigmoid(True),
        "Hardtanh": nn.Hardtanh(0.3, 0.6, True),
        "Threshold": nn.Threshold(0.7, 0.1, True),
        "RReLU": nn.RReLU(0.1, 0.3, True),
        "Dropout": nn.Dropout(0.5, True),
        "AlphaDropout": nn.AlphaDropout(0.5, True),
        "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5, True),
        "Dropout1d": nn.Dropout1d(0.9, True),
    }
    writes |= {f"nn.{name}(inplace)": module for name, module in modules.items()}
    return {
        **{f"python view {name}": call for name, call in views.items()},
        **{f"python write {name}": call for name, call in writes.items()},
    }


def _observed(call: Call) -> Found | None:
    effect = effect_of(call)
    return None if effect is None else (call, effect)


@cache
def spellings() -> tuple[Spelling, ...]:
    """All spellings; none is built yet."""
    found = [
        Spelling(
            f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'} as {way}",
            _kind(schema) or "",
            lambda schema=schema, target=target: _found(schema, target),
        )
        for schema in schemas()
        for way, target in _ways(schema)
    ]
    found += [Spelling(name, "python", lambda call=call: _observed(call)) for name, call in _python().items()]
    return tuple(found)
