"""The list of functions taken to write nothing, against what they do.

Every member is called on tensors, with each of its flags both ways, and no argument may change: neither its version
counter nor its bits. `inplace` and `out` are read from the call by the passes, and are not passed here. A member for
which no call is found fails: it does not belong on a list of functions that are known.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_passes.memory import PURE, PURE_METHODS

ATTEMPTS = 200
_IGNORED = ("inplace", "out", "_stacklevel")


def _float(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.25


def _candidates(name: str) -> list[Any]:
    """Arguments to try for a parameter, by its name."""
    sizes: list[Any] = [2, (2, 2), 1, (2, 2, 2), (4, 4)]
    named: dict[str, list[Any]] = {
        "kernel_size": sizes,
        "output_size": sizes,
        "output_ratio": [0.5, (0.5, 0.5)],
        "padding": sizes,
        "pad": [(1, 1)],
        "dim": [0, 1],
        "dims": [1],
        "p": [0.5, 2.0],
        "size": [(2, 2), (4, 4), (1, 1, 4, 4)],
        "eps": [1e-5],
        "size_average": [None],
        "normalized_shape": [(4,)],
        "num_groups": [2],
        "groups": [2],
        "norm_type": [2.0],
        "upscale_factor": [2],
        "downscale_factor": [2],
        "target": [_float(4, 4), torch.zeros(4, dtype=torch.long), torch.ones(4), torch.ones(4, 4, dtype=torch.long)],
        "equation": ["ij,jk->ik"],
        "num_heads": [2],
        "embed_dim_to_check": [4],
        "threshold": [0.5],
        "value": [0.1],
        "scale_factor": [2.0],
        "weight": [_float(4, 4), _float(4, 4, 3), _float(4, 4, 3, 3), _float(4, 4, 3, 3, 3), _float(4)],
        "split_size_or_sections": [2, [2, 2]],
        "num_classes": [4],
        "margin": [1.0],
        "var": [_float(4, 4)],
        "reduction": ["mean"],
        "n_fft": [4],
    }
    tensors = [
        _float(4, 4),
        torch.zeros(4, dtype=torch.long),
        _float(1, 4, 4),
        _float(1, 4, 4, 4),
        _float(1, 4, 4, 4, 4),
        torch.ones(4, 4, dtype=torch.long),
        _float(4),
        torch.ones(4, 4, dtype=torch.bool),
        torch.ones(1, 4, 4, dtype=torch.long),
        torch.zeros(1, 4, 4, 4, dtype=torch.long),
    ]
    return named.get(name, tensors) if name in named else tensors


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _writes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Whether the call changed an argument; None when it raised."""
    args, kwargs = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))
    tensors = _tensors((args, kwargs))
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            function(*args, **kwargs)
    except Exception:
        return None
    return any(
        tensor._version != version or not torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
        for tensor, (version, copy) in zip(tensors, before, strict=True)
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.name not in _IGNORED]


def _with_flags(function: Callable[..., Any], given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``given``, then with every flag turned, and every optional tensor and number passed."""
    yield given
    for parameter in _parameters(function):
        default = parameter.default
        if parameter.name in given or default is inspect.Parameter.empty:
            continue
        if isinstance(default, bool):
            yield {**given, parameter.name: not default}
        elif default is None:
            for value in (0.1, _float(4), _float(4, 4)):
                yield {**given, parameter.name: value}


def _calls(function: Callable[..., Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if function in CALLS:
        yield from ((args, {}) if isinstance(args, tuple) else ((), args) for args in CALLS[function])
        return
    required = [p for p in _parameters(function) if p.default is inspect.Parameter.empty]
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in required) and not positional:
        yield from (((_float(4, 4), _float(4, 4)), {}), ((_float(4, 4),), {}))
        return
    if any(p.kind is p.POSITIONAL_ONLY for p in positional):
        yield from (
            (args, {})
            for args in itertools.product(
                (_float(4, 4), torch.ones(4, 4, dtype=torch.long), 1, 0), repeat=len(positional)
            )
        )
        return
    choices = [_candidates(p.name) for p in positional]
    many = list(itertools.islice(itertools.product(*choices), 4 * ATTEMPTS))
    random.Random(0).shuffle(many)
    for values in many[:ATTEMPTS]:
        yield (), dict(zip((p.name for p in positional), values, strict=True))


X = _float(4, 4)
IMAGE, VOLUME = _float(1, 4, 4, 4), _float(1, 4, 4, 4, 4)
_POOLS = ((1, _float(1, 4, 8)), (2, _float(1, 4, 8, 8)), (3, _float(1, 4, 8, 8, 8)))
# Calls of functions whose arguments depend on one another: positional, or by name.
CALLS: dict[Any, list[Any]] = {
    operator.concat: [([X], [X])],
    operator.countOf: [([1, 2], 1)],
    operator.indexOf: [([1, 2], 1)],
    operator.attrgetter: [("T",)],
    operator.itemgetter: [(0,)],
    operator.methodcaller: [("t",)],
    getattr: [(X, "T"), (X, "data"), (X, "grad")],
    torch._C._autograd._get_data_attr: [(X,)],
    torch.functional.broadcast_shapes: [((4, 4), (4,))],
    torch.functional.cartesian_prod: [(X[0], X[1]), (X[0],)],
    torch.functional.einsum: [("ij,jk->ik", X, X), ("ij->ji", X)],
    torch.functional.meshgrid: [(X[0], X[1])],
    torch.functional.stft: [{"input": _float(16), "n_fft": 4, "return_complex": True}],
    torch.functional.unravel_index: [{"indices": torch.ones(4, dtype=torch.long), "shape": (4, 4)}],
    F.affine_grid: [{"theta": _float(1, 2, 3), "size": (1, 4, 4, 4)}],
    F.binary_cross_entropy: [{"input": X * 0.5, "target": X * 0.5}],
    F.ctc_loss: [
        {
            "log_probs": _float(4, 2, 4), "targets": torch.ones(2, 2, dtype=torch.long),
            "input_lengths": torch.tensor([4, 4]), "target_lengths": torch.tensor([2, 2]),
        }
    ],
    F.grid_sample: [{"input": IMAGE, "grid": _float(1, 4, 4, 2)}],
    F.interpolate: [{"input": IMAGE, "size": 2}, {"input": IMAGE, "scale_factor": 2.0}],
    F.upsample: [{"input": IMAGE, "size": 2}],
    F.upsample_bilinear: [{"input": IMAGE, "size": 2}],
    F.upsample_nearest: [{"input": IMAGE, "size": 2}],
    F.local_response_norm: [{"input": IMAGE, "size": 2}],
    F.max_unpool3d: [{"input": VOLUME, "indices": torch.arange(64 * 4).view(1, 4, 4, 4, 4) % 64, "kernel_size": 1}],
    F.fractional_max_pool2d_with_indices: [{"input": IMAGE, "kernel_size": 2, "output_size": 2}],
    F.fractional_max_pool3d_with_indices: [{"input": VOLUME, "kernel_size": 2, "output_size": 2}],
    F.fractional_max_pool2d: [(IMAGE, 2, 2)],
    F.fractional_max_pool3d: [(VOLUME, 2, 2)],
    F.multi_head_attention_forward: [
        (_float(3, 1, 4), _float(3, 1, 4), _float(3, 1, 4), 4, 2, _float(12, 4), _float(12), None, None, False, 0.5, X,
         _float(4)),
    ],
    torch.sym_float: [(1,)],
    torch.sym_int: [(1.0,)],
    torch.sym_ite: [(True, 1, 2)],
    torch.sym_max: [(1, 2)],
    torch.sym_min: [(1, 2)],
    torch.sym_not: [(True,)],
    **{getattr(F, f"max_pool{n}d"): [(value, 2)] for n, value in _POOLS},
    **{getattr(F, f"adaptive_max_pool{n}d"): [(value, 2)] for n, value in _POOLS},
}  # fmt: skip


def _name(member: Any) -> str:
    return f"{getattr(member, '__module__', '')}.{getattr(member, '__name__', str(member))}"


# Products that no CPU runs: the operator that does all their work, whose schema answers instead.
_BY_SCHEMA = {"scaled_mm": "_scaled_mm_v2", "scaled_grouped_mm": "_scaled_grouped_mm_v2"}


@pytest.mark.parametrize("function", sorted((f for f in PURE if f is not None), key=_name), ids=_name)
def test_function_writes_nothing(function):
    if _name(function).startswith("torch.nn.functional.scaled_"):
        schema = getattr(torch.ops.aten, _BY_SCHEMA[function.__name__]).default._schema
        assert not any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        return
    ran = 0
    for args, given in _calls(function):
        first = _writes(function, args, given)
        assert not first, f"writes when called with {args} {given}"
        if first is None:
            continue
        ran += 1
        for flags in _with_flags(function, given) if given else ():
            assert not _writes(function, args, flags), f"writes when called with {flags}"
        if ran == 3:
            break
    assert ran, "no call was found: say in CALLS how it is called"


METHOD_CALLS: dict[str, tuple[Any, ...]] = {
    "split": (2,), "index_select": (0, torch.tensor([0, 1])), "stft": (4,), "type": (torch.float64,), "istft": (4,),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PURE_METHODS))
def test_method_writes_nothing(name):
    if name == "cuda" and not torch.cuda.is_available():
        return
    operands = [
        _float(4, 4),
        _float(1),
        _float(16),
        torch.stft(_float(16), 4, window=torch.ones(4), return_complex=True),
    ]
    ran = 0
    for x in operands:
        ran += _method_runs(name, x)
    assert ran, "no call was found"


def _method_runs(name: str, x: Tensor) -> bool:
    if not hasattr(x, name):
        return False
    written = _writes(lambda value, *args: getattr(value, name)(*args), (x, *METHOD_CALLS.get(name, ())), {})
    assert not written
    return written is not None


def test_a_function_that_writes_is_seen():
    """The check itself: running statistics, renormalised rows and an in-place function are all noticed."""
    x, mean, var = _float(4, 4), torch.zeros(4), torch.ones(4)
    assert _writes(F.batch_norm, (x, mean, var), {"training": True})
    assert _writes(F.embedding, (torch.tensor([0]), x * 9), {"max_norm": 0.1})
    assert _writes(nn.init.zeros_, (x,), {})
    assert not _writes(F.silu, (x,), {})
