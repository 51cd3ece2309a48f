"""Every spelling of an operation is read as a call that means what torch computes: name, parameters and defaults.

Each case evaluates the canonical call by a formula of its own, taking the arguments from the call by their canonical
names, and compares with what torch returns for the spelling.
"""

from __future__ import annotations

import operator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compile_passes import vocabulary
from compile_passes.vocabulary import Call, example, has_shape, rank, same_shape, spell
from tests.passes.blocks import node_of

A = torch.ops.aten
_make = torch.Generator().manual_seed(0)
X, Y = torch.rand(4, 6, generator=_make) + 0.5, torch.rand(4, 6, generator=_make) + 0.5
Z, N = torch.randn(4, 6, generator=_make) * 20, torch.arange(24).view(4, 6)
M, ROW = X > 0.9, torch.tensor([2, 0, 3])
AT = torch.randint(4, (4, 6), generator=_make)
B3, C3 = torch.rand(2, 4, 6, generator=_make), torch.rand(2, 6, 3, generator=_make)
R16, W16 = X.repeat(2, 4).bfloat16()[:, :16], torch.rand(3, 16, 8, generator=_make).bfloat16()
OFFS, Q, MASK = torch.tensor([3, 3, 8], dtype=torch.int32), torch.rand(1, 2, 3, 8, generator=_make), X[:3, :3].log()
COUNTS = torch.tensor([3, 0, 3, 1, 0, 0, 3])


def _put(c):
    value = c["x"].clone()
    if c["accumulate"]:
        return value.index_put((c["index"],), c["src"], accumulate=True)
    value[c["index"]] = c["src"]
    return value


def _slice(c):
    cut = [slice(None)] * c["x"].dim()
    cut[c["dim"]] = slice(c["start"], c["end"], c["step"])
    return c["x"][tuple(cut)]


def _of_result(c):
    return c["x"].reshape(c.result.shape)


def _extreme(c):
    return c["x"].sort(c["dim"], descending=True)


def _kept(reduced, c):
    return reduced.unsqueeze(c["dim"]) if c["keepdim"] else reduced


def _typed(c):
    return c["x"].to(c["dtype"] or c["x"].dtype)


def _counted(c):
    edges = [c["min"] + i * (c["max"] - c["min"]) / c["bins"] for i in range(c["bins"] + 1)]
    pairs = pairwise(edges)
    return torch.stack([((c["x"] >= low) & (c["x"] < high)).sum() for low, high in pairs])


def _limited(c):
    low, high = (other if c[name] is None else c[name] for name, other in (("min", -1e9), ("max", 1e9)))
    return torch.where(c["x"] < low, low, torch.where(c["x"] > high, high, c["x"]))


def _softplus(c):
    soft = (c["x"].double() * c["beta"]).exp().log1p() / c["beta"]
    return torch.where(c["x"] * c["beta"] > c["threshold"], c["x"], soft)


def _parts(c):
    sizes = [c["size"]] * (4 // c["size"]) if c["sizes"] is None else c["sizes"]
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return tuple(c["x"][start:end] for start, end in pairwise(ends))


def _groups(c):
    starts = [0, *c["offs"].tolist()]
    parts = [c["x"][a:b].float() @ w.float() for a, b, w in zip(starts, starts[1:], c["weight"], strict=False)]
    return torch.cat(parts)


def _attention(c):
    key, value = c["key"], c["value"]
    if c["enable_gqa"]:
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    scores = c["query"] @ key.mT * (c["query"].shape[-1] ** -0.5 if c["scale"] is None else c["scale"])
    if c["is_causal"]:
        scores = scores.masked_fill(~torch.ones(3, 3).tril().bool(), float("-inf"))
    return (scores if c["attn_mask"] is None else scores + c["attn_mask"]).softmax(-1) @ value


#: canonical name -> (formula, [(target or method, positional, keyword), ...]).
MEANT = {
    "add": (lambda c: c["x"] + c["alpha"] * c["y"], [
        (torch.add, (X, Y), {"alpha": 2}), ("add", (X, Y), {}), ("add_", (X, Y), {"alpha": 3}),
        (operator.add, (X, Y), {}),
        (operator.iadd, (X, Y), {}), (A.add.Tensor, (X, Y), {}), (A.add_.Tensor, (X, Y), {"alpha": 2}),
        (torch.add, (X,), {"other": Y}), (A.add.Scalar, (X, 2, 3), {}),
    ]),
    "sub": (lambda c: c["x"] - c["alpha"] * c["y"], [
        (torch.sub, (X, Y), {"alpha": 2}), ("sub", (X, Y), {}), ("sub_", (X, Y), {}), (operator.sub, (X, Y), {}),
        (operator.isub, (X, Y), {}), (A.sub.Tensor, (X, Y), {}),
    ]),
    "mul": (lambda c: c["x"] * c["y"], [
        (torch.mul, (X, Y), {}), (torch.multiply, (X, Y), {}), ("mul", (X, 3), {}), ("multiply", (X,), {"other": Y}),
        ("mul_", (X, Y), {}), (operator.mul, (X, Y), {}), (operator.imul, (X, Y), {}), (A.mul.Tensor, (X, Y), {}),
    ]),
    "div": (lambda c: c["x"] / c["y"], [
        (torch.div, (X, Y), {}), (torch.divide, (X, Y), {}), (torch.true_divide, (X, Y), {}), ("div", (X, Y), {}),
        ("div_", (X, Y), {}), ("true_divide", (X, Y), {}), (operator.truediv, (X, Y), {}),
        (operator.itruediv, (X, Y), {}), (A.div.Tensor, (X, Y), {}), ("div", (X, Y), {"rounding_mode": None}),
    ]),
    "floordiv": (lambda c: (c["x"].double() / c["y"]).floor().to(c["x"].dtype), [
        (torch.floor_divide, (N, 5), {}), ("floor_divide", (N, 5), {}), (operator.floordiv, (N, 5), {}),
        (operator.ifloordiv, (N, 5), {}), (A.floor_divide.default, (N, Y), {}),
        (torch.div, (-N, 5), {"rounding_mode": "floor"}), ("div", (-N, 5), {"rounding_mode": "floor"}),
    ]),
    "truncdiv": (lambda c: (c["x"] / c["y"]).trunc().long(), [
        (torch.div, (-N, 5), {"rounding_mode": "trunc"}), ("div_", (-N, 5), {"rounding_mode": "trunc"}),
    ]),
    "mod": (lambda c: c["x"] - (c["x"] / c["y"]).floor().long() * c["y"], [
        (torch.remainder, (-N, 5), {}), ("remainder", (-N, 5), {}), (operator.mod, (-N, 5), {}),
        (operator.imod, (-N, 5), {}), (A.remainder.Scalar, (-N, 5), {}),
    ]),
    "addcmul": (lambda c: c["x"] + c["value"] * c["tensor1"] * c["tensor2"], [
        (torch.addcmul, (X, Y, Y), {"value": 2}), ("addcmul", (X, Y, Z), {}), (A.addcmul.default, (X, Y, Z), {}),
    ]),
    "pow": (lambda c: c["x"] ** c["y"], [
        (torch.pow, (X, 2), {}), ("pow", (X,), {"exponent": 3}), (operator.pow, (X, 2), {}),
        (operator.ipow, (X, 2), {}),
        (A.pow.Tensor_Scalar, (X, 2), {}),
    ]),
    "square": (lambda c: c["x"] * c["x"], [(torch.square, (Z,), {}), ("square", (Z,), {}),
    (A.square.default, (Z,), {})]),
    "neg": (lambda c: 0 - c["x"], [
        (torch.neg, (X,), {}), ("neg", (X,), {}), (operator.neg, (X,), {}), (A.neg.default, (X,), {}),
    ]),
    "relu": (lambda c: c["x"] * (c["x"] > 0), [
        (torch.relu, (Z,), {}), (F.relu, (Z,), {}), (F.relu, (Z, True), {}), ("relu", (Z,), {}), ("relu_", (Z,), {}),
        (A.relu.default, (Z,), {}),
    ]),
    "silu": (lambda c: c["x"] / (1 + (-c["x"]).exp()), [
        (F.silu, (X,), {}), (F.silu, (X,), {"inplace": True}), (A.silu.default, (X,), {}), (A.silu_.default, (X,), {}),
    ]),
    "gelu": (lambda c: F.gelu(c["x"], approximate=c["approximate"]), [
        (F.gelu, (X,), {}), (F.gelu, (X,), {"approximate": "tanh"}), (A.gelu.default, (X,), {}),
    ]),
    "sigmoid": (lambda c: 1 / (1 + (-c["x"]).exp()), [
        (torch.sigmoid, (X,), {}), (F.sigmoid, (X,), {}), ("sigmoid", (X,), {}), ("sigmoid_", (X,), {}),
        (A.sigmoid.default, (X,), {}),
    ]),
    "tanh": (lambda c: 1 - 2 / ((2 * c["x"]).exp() + 1), [
        (torch.tanh, (X,), {}), (F.tanh, (X,), {}), ("tanh", (X,), {}), (A.tanh.default, (X,), {}),
    ]),
    "sqrt": (lambda c: c["x"] ** 0.5, [(torch.sqrt, (X,), {}), ("sqrt", (X,), {}), (A.sqrt.default, (X,), {})]),
    "rsqrt": (lambda c: c["x"] ** -0.5, [(torch.rsqrt, (X,), {}), ("rsqrt", (X,), {}), (A.rsqrt.default, (X,), {})]),
    "softplus": (_softplus, [
        (F.softplus, (Z,), {}), (F.softplus, (Z, 2, 0.5), {}), (F.softplus, (Z,), {"beta": 3, "threshold": 1}),
        (A.softplus.default, (Z,), {}),
    ]),
    "clamp": (_limited, [
        (torch.clamp, (Z, -2.0, 3.0), {}), (torch.clip, (Z,), {"max": 3.0}), ("clamp", (Z, -2.0), {}),
        ("clip", (Z,), {"min": -1.0, "max": 1.0}), ("clamp_", (Z, None, 3.0), {}), (torch.clamp_min, (Z, 2.0), {}),
        ("clamp_min", (Z, 2.0), {}), (torch.clamp_max, (Z, 2.0), {}), ("clamp_max", (Z, 2.0), {}),
        (A.clamp.default, (Z, -2.0, 3.0), {}), (A.clamp_min.default, (Z, 2.0), {}), (A.clamp_max.default, (Z, 2.0), {}),
    ]),
    "masked_fill": (lambda c: torch.where(c["mask"], c["value"], c["x"]), [
        (torch.masked_fill, (X, M, 7.0), {}), ("masked_fill", (X, M, 7.0), {}),
        ("masked_fill_", (X,), {"mask": M, "value": 7.0}),
        (A.masked_fill.Scalar, (X, M, 7.0), {}),
    ]),
    "not": (lambda c: ~c["x"], [
        (torch.bitwise_not, (M,), {}), (torch.logical_not, (M,), {}), ("bitwise_not", (M,), {}),
        ("logical_not", (M,), {}),
        (operator.invert, (M,), {}), (A.bitwise_not.default, (M,), {}), (A.logical_not.default, (M,), {}),
    ]),
    "ge": (lambda c: ~(c["x"] < c["y"]), [
        (torch.ge, (N, 7), {}), (torch.greater_equal, (N, 7), {}), ("ge", (N, 7), {}), ("greater_equal", (N, 7), {}),
        (operator.ge, (N, 7), {}), (A.ge.Scalar, (N, 7), {}),
    ]),
    "gt": (lambda c: ~(c["x"] <= c["y"]), [
        (torch.gt, (N, 7), {}), (torch.greater, (N, 7), {}), ("gt", (N, 7), {}), ("greater", (N, 7), {}),
        (operator.gt, (N, 7), {}), (A.gt.Scalar, (N, 7), {}),
    ]),
    "view": (_of_result, [
        ("view", (X, 2, 12), {}), ("view", (X, (3, 8)), {}), ("view_as", (X, Y), {}), ("unflatten", (X, 1, (2, 3)), {}),
        (A._unsafe_view.default, (X, (6, 4)), {}), (torch.reshape, (X, (6, 4)), {}), ("reshape", (X, 24), {}),
        ("reshape_as", (X, X.view(3, 8)), {}), (torch.flatten, (X,), {}), ("flatten", (X, 0, 1), {}),
        (torch.ravel, (X,), {}), ("ravel", (X,), {}), (torch.unsqueeze, (X, 1), {}), ("unsqueeze", (X, -1), {}),
        ("unsqueeze_", (X, 0), {}), (torch.squeeze, (X.view(4, 1, 6), 1), {}), ("squeeze", (X.view(4, 1, 6),), {}),
        (torch.unflatten, (X, 0, (2, 2)), {}), ("contiguous", (X,), {}), (A.alias.default, (X,), {}),
        (A.view.default, (X, (24,)), {}), (operator.getitem, (X, (slice(None), None)), {}),
        (operator.getitem, (X, ...), {}),
    ]),
    "view_of_other_elements": (lambda c: c["x"].view(torch.int32), [
        ("view", (X, torch.int32), {}), (A.view.dtype, (X, torch.int32), {}), (A.view, (X, torch.int32), {}),
    ]),
    "clone": (lambda c: c["x"] + 0, [
        (torch.clone, (X,), {}), ("clone", (X,), {}),
        (A.clone.default, (X,), {"memory_format": torch.contiguous_format}),
    ]),
    "detach": (lambda c: c["x"] + 0, [("detach", (X,), {}), ("detach_", (X,), {}), (A.detach.default, (X,), {})]),
    "transpose": (lambda c: torch.einsum("abc->acb", c["x"]) if {c["dim0"] % 3, c["dim1"] % 3} == {1, 2} else None, [
        (torch.transpose, (B3, 1, 2), {}), ("transpose", (B3, -1, -2), {}), (torch.swapaxes, (B3, 1, 2), {}),
        ("swapaxes", (B3, 1, 2), {}), ("swapdims", (B3, 2, 1), {}), (A.transpose.int, (B3, 1, 2), {}),
        (torch.transpose, (B3,), {"dim0": 1, "dim1": 2}),
    ]),
    "mt": (lambda c: torch.einsum("...bc->...cb", c["x"]), [
        (getattr, (B3, "mT"), {}), (getattr, (X, "T"), {}), (getattr, (X, "mT"), {}),
        (A.numpy_T, (X,), {}), (A.mT, (X,), {}),
    ]),
    "permute": (lambda c: torch.einsum("abc->acb", c["x"]) if [*c["dims"]] == [0, 2, 1] else None, [
        (torch.permute, (B3, (0, 2, 1)), {}), ("permute", (B3, 0, 2, 1), {}), ("permute", (B3, [0, 2, 1]), {}),
        (A.permute.default, (B3, [0, 2, 1]), {}),
    ]),
    "expand": (lambda c: c["x"] + torch.zeros(c.result.shape), [
        ("expand", (X[:, :1], 4, 6), {}), (torch.broadcast_to, (X[:1], (4, 6)), {}),
        ("broadcast_to", (X[:1], (4, 6)), {}),
        ("expand_as", (X[:1], Y), {}), (A.expand.default, (X[:1], (4, 6)), {}),
    ]),
    "chunk": (lambda c: tuple(c["x"].movedim(c["dim"] or 0, 0).unflatten(0, (c["chunks"], -1)).unbind(0)), [
        (torch.chunk, (X, 2), {}), ("chunk", (X, 2, 0), {}), (A.chunk.default, (X, 2), {}),
    ]),
    "split": (_parts, [
        (torch.split, (X, 2), {}), ("split", (X, [1, 3], 0), {}), (torch.split, (X,), {"split_size_or_sections": 2}),
        ("split_with_sizes", (X, [1, 3]), {}), ("split", (X,), {"split_size": 2}),
        (A.split_with_sizes.default, (X,), {"split_sizes": [1, 3]}),
    ]),
    "slice": (_slice, [(A.slice.Tensor, (X, 1, 1, 5, 2), {}), (A.slice.Tensor, (X, 0, 1, 3), {})]),
    "narrow": (lambda c: c["x"].index_select(c["dim"], torch.arange(c["start"], c["start"] + c["length"])), [
        (torch.narrow, (X, 1, 2, 3), {}), ("narrow", (X,), {"dim": 0, "start": 1, "length": 2}),
    ]),
    "cast": (lambda c: torch.empty(c["x"].shape, dtype=c.result.dtype).copy_(c["x"]), [
        ("to", (Z, torch.bfloat16), {}), ("type", (Z, torch.int64), {}), ("type_as", (Z, N), {}), ("float", (N,), {}),
        ("half", (Z,), {}), ("bfloat16", (Z,), {}), ("double", (Z,), {}), ("int", (Z,), {}), ("long", (Z,), {}),
        ("bool", (Z,), {}), (A._to_copy.default, (Z,), {"dtype": torch.int64}),
    ]),
    "getslice": (lambda c: c["x"][c["index"]], [
        (operator.getitem, (X, (Ellipsis, slice(None, 3))), {}), (operator.getitem, (X, 1), {}),
        (operator.getitem, (X, (slice(None), 2)), {}), (operator.getitem, (X, slice(1, 3)), {}),
    ]),
    "index": (lambda c: torch.stack([c["x"][int(i)] for i in c["index"]]), [
        (operator.getitem, (X, ROW), {}), (A.index.Tensor, (X, [ROW]), {}), (torch.index_select, (X, 0, ROW), {}),
        ("index_select", (X, 0, ROW), {}), ("index_select", (X,), {"dim": 0, "index": ROW}),
    ]),
    "index_select": (lambda c: torch.stack([c["x"][:, int(i)] for i in c["index"]], 1) if c["dim"] == 1 else None, [
        (torch.index_select, (X, 1, ROW), {}), ("index_select", (X, 1, ROW), {}),
        (A.index_select.default, (X, 1, ROW), {}),
    ]),
    "fancy": (lambda c: c["x"][c["index"]], [
        (operator.getitem, (X, M), {}), (operator.getitem, (X, (ROW, ROW)), {}), (A.index.Tensor, (X, [ROW, ROW]), {}),
    ]),
    "index_put": (_put, [
        (torch.index_put, (X, (ROW,), Y[:3]), {}), ("index_put_", (X, (ROW,), Y[:3], True), {}),
        ("index_put", (X, [ROW], Y[:3]), {"accumulate": True}), (A.index_put.default, (X, [ROW], Y[:3]), {}),
    ]),
    "fancy_put": (_put, [("index_put", (X, (M,), torch.tensor(3.0)), {})]),
    "gather": (lambda c: c["x"].take_along_dim(c["index"], c["dim"]), [
        (torch.gather, (X, 0, AT), {}), ("gather", (X, 1, AT), {}), ("gather", (X,), {"dim": 0, "index": AT}),
        (A.gather.default, (X, 0, AT), {}),
    ]),
    "scatter": (lambda c: c["x"].clone().scatter_(c["dim"], c["index"], c["src"]), [
        (torch.scatter, (X, 1, AT, 7.0), {}), ("scatter", (X, 1, AT, 7.0), {}),
        ("scatter_", (X, 1, AT), {"value": 7.0}),
        ("scatter", (X,), {"dim": 1, "index": AT[:, :1], "src": Y}), (A.scatter.value, (X, 1, AT, 7.0), {}),
    ]),
    "index_add": (lambda c: c["x"] + torch.eye(4)[:, c["index"]] @ c["src"], [
        (torch.index_add, (X, 0, ROW, Y[:3]), {}), ("index_add_", (X, 0, ROW, Y[:3]), {}),
        ("index_add", (X,), {"dim": 0, "index": ROW, "source": Y[:3]}), (A.index_add.default, (X, 0, ROW, Y[:3]), {}),
    ]),
    "repeat_interleave": (lambda c: c["x"][torch.arange(8) // c["repeats"]] if c["dim"] == 0 else None, [
        (torch.repeat_interleave, (X, 2, 0), {}), ("repeat_interleave", (X, 2), {"dim": 0}),
        (A.repeat_interleave.self_int, (X, 2, 0), {}),
    ]),
    "sort": (lambda c: c["x"].topk(c["x"].shape[c["dim"]], c["dim"], c["descending"]), [
        (torch.sort, (X,), {}), ("sort", (X, 0), {}), ("sort", (X, 1, True), {}),
        (torch.sort, (X,), {"descending": True}),
        (A.sort.default, (X, 0), {}),
    ]),
    "argsort": (lambda c: c["x"].topk(c["x"].shape[c["dim"]], c["dim"], c["descending"]).indices, [
        (torch.argsort, (X,), {}), ("argsort", (X, 0), {}), ("argsort", (X, 1, True), {}),
        (A.argsort.default, (X,), {}),
    ]),
    "topk": (lambda c: [part.narrow(c["dim"], 0, c["k"]) for part in c["x"].sort(c["dim"], descending=c["largest"])], [
        (torch.topk, (X, 3), {}), ("topk", (X, 2, 0), {}), ("topk", (X, 2, -1, False), {}),
        (torch.topk, (X,), {"k": 2, "dim": 0}),
        (A.topk.default, (X, 3), {"largest": False}),
    ]),
    "max": (lambda c: [part.select(c["dim"], 0) for part in _extreme(c)], [
        (torch.max, (X, 1), {}), ("max", (X,), {"dim": 0}), (A.max.dim, (X, 1), {}),
    ]),
    "argmax": (lambda c: _extreme(c)[1].select(c["dim"], 0), [(torch.argmax, (X, 1), {}),
    ("argmax", (X,), {"dim": 0})]),
    "amax": (lambda c: _kept(_extreme(c)[0].select(c["dim"], 0), c), [
        (torch.amax, (X, 1), {}), ("amax", (X, 0, True), {}), (A.amax.default, (X, 1), {}),
    ]),
    "sum": (lambda c: _kept(_typed(c).movedim(c["dim"], -1) @ torch.ones(6 if c["dim"] else 4).to(_typed(c).dtype),
    c), [
        (torch.sum, (X, 0), {}), ("sum", (X, 1, True), {}), ("sum", (X,), {"dim": 1, "keepdim": True}),
        ("sum", (X,), {"axis": 1, "keepdims": True}), ("sum", (X, 1, True), {"dtype": torch.float64}),
    ]),
    "cumsum": (lambda c: torch.ones(4, 4).tril() @ c["x"] if c["dim"] == 0 else None, [
        (torch.cumsum, (X, 0), {}), ("cumsum", (X,), {"dim": 0}), ("cumsum_", (X, 0), {}),
        (A.cumsum.default, (X, 0), {}),
    ]),
    "histc": (_counted, [
        (torch.histc, (X, 4, 0, 2), {}), ("histc", (X,), {"bins": 3, "min": 0, "max": 3}),
        (A.histc.default, (X, 4, 0, 2), {}),
    ]),
    "bincount": (lambda c: F.one_hot(c["x"], max(4, c["minlength"])).sum(0), [
        (torch.bincount, (COUNTS,), {}), ("bincount", (COUNTS, None, 6), {}), ("bincount", (COUNTS,), {"minlength": 8}),
    ]),
    "softmax": (lambda c: (e := c["x"].to(c["dtype"] or torch.float32).exp()) / e.sum(c["dim"], keepdim=True), [
        (torch.softmax, (X, 0), {}), ("softmax", (X, -1), {}), (F.softmax, (X, 1), {}),
        (F.softmax, (X, 1, 3, torch.float64), {}),
        (torch.softmax, (X, 0, torch.float64), {}), ("softmax", (X,), {"dim": 0, "dtype": torch.float64}),
        (A._softmax.default, (X, 1, False), {}), (A.softmax.int, (X, 0), {}),
    ]),
    "arange": (lambda c: torch.tensor([*range(c["start"], c["end"], c["step"])]), [
        (torch.arange, (5,), {}), (torch.arange, (2, 7), {}), (torch.arange, (2, 9, 3), {}),
        (torch.arange, (), {"start": 1, "end": 4}), (torch.arange, (2,), {"end": 5}),
        (torch.arange, (3,), {"end": 9, "step": 2}), (A.arange.start, (2,), {"end": 5}),
        (A.arange.default, (5,), {}), (A.arange.start, (2, 5), {}), (A.arange.start_step, (9, 1, -2), {}),
    ]),
    "zeros_like": (lambda c: c["x"] * 0, [(torch.zeros_like, (X,), {}), (A.zeros_like.default, (X,), {})]),
    "zeros": (lambda c: torch.full(c.result.shape, 0.0), [
        (torch.zeros, (4, 6), {}), (A.zeros.default, ((4, 6),), {}), ("new_zeros", (X, 3, 2), {}),
        (A.new_zeros.default, (X, (2,)), {}),
    ]),
    "bmm": (lambda c: torch.einsum("ebc,ecd->ebd", c["x"], c["y"]), [
        (torch.bmm, (B3, C3), {}), ("bmm", (B3, C3), {}), ("bmm", (B3,), {"mat2": C3}), (torch.matmul, (B3, C3), {}),
        ("matmul", (B3, C3), {}), (operator.matmul, (B3, C3), {}), (A.bmm.default, (B3, C3), {}),
    ]),
    "matmul": (lambda c: torch.einsum("ab,bc->ac", c["x"], c["y"]), [
        (torch.matmul, (X, C3[0]), {}), ("matmul", (X, C3[1]), {}), (operator.matmul, (X,  C3[0]), {}),
    ]),
    "linear": (lambda c: torch.einsum("ab,cb->ac", c["x"], c["weight"]) + (0 if c["bias"] is None else c["bias"]), [
        (F.linear, (X, Y), {}), (F.linear, (X, Y, Y[:, 0]), {}), (A.linear.default, (X, Y), {}),
    ]),
    "grouped_mm": (_groups, [
        (torch._grouped_mm, (R16, W16), {"offs": OFFS}), (F.grouped_mm, (R16, W16), {"offs": OFFS}),
        (F.grouped_mm, (), {"mat_a": R16, "mat_b": W16, "offs": OFFS}), (A._grouped_mm.default, (R16, W16, OFFS), {}),
    ]),
    "sdpa": (_attention, [
        (F.scaled_dot_product_attention, (Q, Q, Q), {}),
        (F.scaled_dot_product_attention, (Q, Q, Q), {"attn_mask": MASK, "scale": 0.5}),
        (F.scaled_dot_product_attention, (Q, Q[:, :1], Q[:, 1:]), {"is_causal": True, "enable_gqa": True}),
        (A.scaled_dot_product_attention.default, (Q, Q, Q, MASK), {}),
        (F.scaled_dot_product_attention, (Q, Q, Q, None, 0.0, True), {}),
    ]),
}  # fmt: skip


class Meant:
    """The arguments of a call by canonical name, nodes as the tensors they stand for."""

    def __init__(self, call: Call, result: Tensor) -> None:
        self.call, self.result = call, result

    def __getitem__(self, name: str):
        return fx.map_arg(self.call[name], lambda node: node.meta["example_value"])


def copied(value):
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def evaluated(target, args, kwargs):
    """What torch returns for the call, on copies."""
    named = {key: copied(value) for key, value in kwargs.items()}
    if isinstance(target, str):
        first, *rest = copied(args)
        return getattr(first, target)(*rest, **named)
    return target(*copied(args), **named)


CASES = [(name, formula, *call) for name, (formula, calls) in MEANT.items() for call in calls]


def words(target) -> str:
    return target if isinstance(target, str) else getattr(target, "__module__", "aten") + "." + target.__name__


@pytest.mark.parametrize(
    ("name", "formula", "target", "args", "kwargs"),
    CASES,
    ids=[f"{i}-{c[0]}-{words(c[2])}" for i, c in enumerate(CASES)],
)
def test_means_what_torch_computes(name, formula, target, args, kwargs):
    node = node_of(target, *args, **kwargs)
    result = node.meta["example_value"] = evaluated(target, args, kwargs)
    call = spell(node)
    assert call.name == name
    meant = formula(Meant(call, result))
    pairs = [(meant, result)] if isinstance(result, Tensor) else list(zip(meant, result, strict=True))
    for one, other in pairs:
        tolerance = 1e-2 if other.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-6, check_dtype=False)
        assert name not in ("cast", "sum", "softmax") or one.dtype == other.dtype


@pytest.mark.parametrize("target", [
    torch.empty_like, A.empty_like.default, "new_empty", torch.empty,
    A.empty.memory_format,
], ids=words)  # fmt: skip
def test_memory_without_values_has_names_of_its_own(target):
    graph = fx.Graph()
    x = graph.placeholder("x")
    create = graph.call_method if isinstance(target, str) else graph.call_function
    args = ((3,),) if target in (torch.empty, A.empty.memory_format) else (x,) if "like" in words(target) else (x, (3,))
    assert spell(create(target, args)).name == ("empty_like" if "like" in words(target) else "empty")


def called(target, *args, example_value=None, **kwargs) -> Call:
    graph = fx.Graph()
    create = graph.call_method if isinstance(target, str) else graph.call_function
    node = create(target, (graph.placeholder("x"), *args), kwargs)
    if example_value is not None:
        node.meta["example_value"] = example_value
    return spell(node)


@pytest.mark.parametrize(("field", "place"), [("values", 0), ("indices", 1)])
def test_named_results_are_items(field, place):
    call = called(getattr, field)
    assert (call.name, call["index"]) == ("item", place)
    assert called(operator.getitem, place).name == "item"


@pytest.mark.parametrize("name", ["size", "dim", "numel", "stride", "is_contiguous", "storage_offset", "element_size"])
def test_metadata_of_a_tensor(name):
    assert called(name).name == "metadata"


@pytest.mark.parametrize("args", [(8, (3,)), (0, 8, (3,)), (2, 8, (3,))], ids=["high", "both", "low"])
def test_bounds_of_random_ids(args):
    call = spell(fx.Graph().call_function(torch.randint, args))
    assert (call.name, call["low"], call["high"]) == ("randint", 0 if len(args) == 2 else args[0], 8)


def test_bounds_of_random_ids_of_which_one_is_named():
    call = spell(fx.Graph().call_function(torch.randint, (-1,), {"high": 8, "size": (3,)}))
    assert (call["low"], call["high"], call["size"]) == (-1, 8, (3,))


@pytest.mark.parametrize(("target", "attribute"), [(A.numpy_T, "T"), (A.mH, "mH"), (A.matrix_H, "H")], ids=str)
def test_operators_of_attributes_are_those_attributes(target, attribute):
    """As Dynamo captures them since torch 2.14; of what is no matrix they are no transposition."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.empty(2, 3, 4)
    found, before = spell(graph.call_function(target, (x,))), spell(graph.call_function(getattr, (x, attribute)))
    assert (found.name, found.args) == (before.name, before.args) and found.name == "getattr"


@pytest.mark.parametrize("target", [F.rms_norm, torch.rms_norm, F.layer_norm, torch.layer_norm, A.rms_norm.default,
                                    A.layer_norm.default], ids=words)  # fmt: skip
def test_normalisations(target):
    assert called(target, (6,)).name == "norm"


def test_what_is_not_in_the_vocabulary_keeps_its_name():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert spell(x) is None and spell(graph.output(x)) is None
    assert called(torch.erfc).name == "erfc"
    assert called("erfc_", 3).args["arg1"] == 3
    other = called(A.erfc.default)
    assert other.name == "aten::erfc" and set(other.args) == {"self"}
    real = called(getattr, "real")
    assert real["index"] == "real" and real["x"].op == "placeholder"


#: Parameters whose default no matcher relies on.
NOT_READ = ("sorted", "stable", "reverse", "end", "dim", "bins")
#: How a schema's parameters are called in the vocabulary, where the name differs.
ALSO = {"self": "x", "input": "x", "other": "y", "mat2": "y", "exponent": "y"}


@pytest.mark.parametrize("name", ["add", "sub", "addcmul", "sum", "amax", "topk", "sort", "argsort", "index_put", "max",
    "_softmax", "gelu", "softplus", "slice", "bincount", "histc", "scaled_dot_product_attention", "arange",
    "scatter_reduce", "argmax"])  # fmt: skip
def test_defaults_are_those_of_the_schemas(name):
    """A call that passes a default is the call that passes nothing, and only that one."""
    packet = getattr(A, name)
    canonical = {"_softmax": "softmax", "scaled_dot_product_attention": "sdpa"}.get(name, name)
    for overload in (row for row in packet.overloads() if row not in ("int", "str", "float", "bool")):  # of lists
        for argument in getattr(packet, overload)._schema.arguments:
            default = argument.default_value
            if type(default) not in (bool, int, float, str) or argument.name in NOT_READ:
                continue
            key = ALSO.get(argument.name, argument.name)
            assert Call(canonical, {})[key] == default, (overload, argument.name)
            assert Call(canonical, {"x": None, key: default}).passes_only(("x",))
            other = (
                not default if isinstance(default, bool) else f"{default}!" if isinstance(default, str) else default + 1
            )
            assert not Call(canonical, {"x": None, key: other}).passes_only(("x",))


def test_dimension_of_a_selection_is_the_last_by_default():
    for target, last in ((torch.topk, -1), (torch.sort, -1), (torch.argsort, -1)):
        assert called(target)["dim"] == last
    assert called(torch.softmax)["dim"] is None


@pytest.mark.parametrize("name", ["sorted", "stable", "memory_format", "layout", "pin_memory", "device", "_stacklevel",
                                  "output_size"])  # fmt: skip
def test_arguments_that_change_no_number(name):
    assert Call("topk", {"x": None, name: 5}).passes_only(("x",))


@pytest.mark.parametrize(
    "name", ["view", "cast", "expand", "clone", "detach", "zeros", "zeros_like", "empty", "empty_like"]
)
def test_arguments_told_by_the_result(name):
    assert Call(name, {"x": None, "anything": 5}).passes_only(("x",))
    assert not Call("sum", {"x": None, "anything": 5}).passes_only(("x",))


def test_every_argument_must_be_named_or_default():
    call = Call("topk", {"x": None, "k": 2, "dim": -1, "largest": False})
    assert call.passes_only(("x", "k", "largest")) and not call.passes_only(("x", "k"))
    assert not Call("topk", {"k": torch.zeros(1)}).passes_only(("x",))
    assert Call("topk", {"k": None}).passes_only(())


def test_shapes_of_nodes():
    graph = fx.Graph()
    x, y, number = (graph.placeholder(name) for name in "xyn")
    x.meta["example_value"], y.meta["val"], number.meta["example_value"] = X, Y.view(24), 4
    assert example(x) is X and example(y).shape == (24,) and example(number) is None and example(4) is None
    assert (rank(x), rank(y), rank(number)) == (2, 1, None)
    assert has_shape(x, 4, 6) and has_shape(x, number, 6)
    assert not has_shape(x, 6, 4) and not has_shape(x, 4) and not has_shape(x, 4, 6, 1) and not has_shape(number)
    assert same_shape(x, x) and not same_shape(x, y) and not same_shape(number, number)


@pytest.mark.parametrize(("name", "says"), [("_assert_async", True), ("_assert_tensor_metadata", True),
("sym_constrain_range", True),
    ("_functional_assert_scalar", True), ("_functional_sym_constrain_range", True), ("assertion", False)])  # fmt: skip
def test_what_only_asserts(name, says):
    def target(x):
        return x

    target.__name__ = name
    graph = fx.Graph()
    assert vocabulary.is_assertion(graph.call_function(target, (graph.placeholder("x"),))) is says
    assert not vocabulary.is_assertion(graph.call_method(name, (graph.placeholder("x"),)))
