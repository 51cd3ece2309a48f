"""Products of 16 bits in Gluon on a Hopper GPU, beside those of Triton's tile for the same rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product as every
from typing import Any

import pytest
import torch

import moe_ops
from meta.operands import Operand
from moe_ops.census import kernel_names
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.expert_mm import batched_mm, grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from tests.cuda.specialised import assert_any_number_of_rows, assert_replays, every_tile, forget, run
from tests.cuda.test_expert_mm import poison
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_hopper", "poisoned_memory")]
TILE = MMConfig(128, 256, 64, 4, 8, 4, a_tma=True, w_tma=True)
E, TOP_K, R = 6, 2, 1200
#: Ends of every height, experts without rows, rows that nobody has.
COUNTS = ([0, 300, 1, 128, 0, 77], [40, 0, 0, 0, 640, 129], [64, 65, 63, 192, 193, 256], [0] * 6, [R, 0, 0, 0, 0, 0])
#: Output columns, and columns: whole tiles and steps; neither; less than a tile; many steps. Of a single step the
#: compiler would have Triton's tile begin with the bias, where others end with it.
SIZES = {"whole": (256, 512), "odd": (200, 328), "less": (24, 72), "deep": (384, 1088)}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def projection(
    layout: str | None, size: str, dtype: torch.dtype, *, turned: bool = False, bias: bool = False
) -> ExpertMM:
    columns, depth = SIZES[size]
    width = columns if layout in (None, "none") else 2 * columns
    weight = torch.randn(E, width, depth, device="cuda") * depth**-0.5
    weight = weight.to(dtype)
    if turned:
        weight = weight.mT.contiguous().mT
    options: dict[str, Any] = {"glu_layout": layout, "activation": "silu"} if layout else {}
    shift = torch.randn(E, width, device="cuda").to(dtype) if bias else None
    return ExpertMM(Operand(weight, None), dtype, **options, bias=shift)


def kept_of(mm: ExpertMM) -> tuple[torch.Tensor, ...]:
    width = mm.out_features * (2 if mm.glu else 1)
    both = torch.full((R, width), float("nan"), device="cuda", dtype=mm.out_dtype)
    return both.chunk(2, 1) if mm.glu_layout == "concat" else (both,)


def by_both(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What a call returns by the kernel in Gluon, and by Triton's tile."""
    got = call()
    assert sum("_plain_mm" in name for name in kernel_names(call)) == 1
    with monkeypatch.context() as patched:
        patched.setattr(ExpertMM, "is_plain", lambda *of: False)
        return got, call()


def assert_same(got: torch.Tensor, expected: torch.Tensor, used: int) -> None:
    assert torch.equal(got[:used], expected[:used]), (got[:used] - expected[:used]).abs().max()
    assert got[used:].isnan().all(), "rows of no expert are not written"


@pytest.mark.parametrize("keeps", [False, True], ids=["leaves", "keeps"])
@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
@pytest.mark.parametrize("layout", ["concat", "interleaved", "none", None])
@pytest.mark.parametrize("size", SIZES)
@DTYPES
def test_has_the_bits_of_tritons_tile(dtype, size, layout, gathered, keeps, monkeypatch):
    """Which adds up the same columns in the same order; of weights in every order that it takes, with a bias."""
    torch.manual_seed(0)
    poison(monkeypatch)
    for turned, bias in every((False, True) if layout != "concat" else (False,), (False, True)):
        mm = projection(layout, size, dtype, turned=turned, bias=bias)
        a = torch.randn(R // TOP_K if gathered else R, mm.in_features, device="cuda").to(dtype)
        gather = {"row_to_pair": torch.randperm(R, device="cuda").int(), "top_k": TOP_K} if gathered else {}
        for counts in COUNTS:
            ends = torch.tensor(counts, device="cuda").cumsum(0).int()

            def call(mm=mm, a=a, gather=gather, ends=ends) -> tuple[torch.Tensor, ...]:
                kept = kept_of(mm) if keeps else ()
                return grouped_mm(a, mm, ends, TILE, num_rows=R, kept=kept, **gather)[0], *kept

            for got, expected in zip(*by_both(call, monkeypatch), strict=True):
                assert_same(got, expected, sum(counts))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("keeps", [False, True], ids=["leaves", "keeps"])
def test_halves_that_are_apart_may_lie_in_any_order(keeps, swapped, monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)
    room = (torch.randn(2, E, 200, 328, device="cuda") * 328**-0.5).bfloat16()
    gate, up = room.flip(0) if swapped else room
    bias = torch.randn(E, 400, device="cuda").bfloat16()
    mm = ExpertMM(
        Operand(gate, None), torch.bfloat16, up=Operand(up, None), glu_layout="concat", activation="silu", bias=bias
    )
    a, ends = torch.randn(R, 328, device="cuda").bfloat16(), torch.tensor(COUNTS[0], device="cuda").cumsum(0).int()

    def call() -> tuple[torch.Tensor, ...]:
        kept = [torch.full((R, 200), float("nan"), device="cuda").bfloat16() for _ in range(2)] if keeps else []
        return grouped_mm(a, mm, ends, TILE, num_rows=R, kept=tuple(kept))[0], *kept

    for got, expected in zip(*by_both(call, monkeypatch), strict=True):
        assert_same(got, expected, sum(COUNTS[0]))


@pytest.mark.parametrize("layout", ["concat", "interleaved", "none", None])
def test_batched_beside_rows_of_nan(layout, monkeypatch):
    torch.manual_seed(1)
    poison(monkeypatch)
    mm, C = projection(layout, "odd", torch.bfloat16, bias=True), 650
    for used in COUNTS[:4]:
        batch = torch.full((E, C, mm.in_features), float("nan"), device="cuda").bfloat16()
        for e, count in enumerate(used):
            batch[e, :count] = torch.randn(count, mm.in_features, device="cuda")
        counts = torch.tensor(used, device="cuda", dtype=torch.int32)
        got, expected = by_both(lambda batch=batch, counts=counts: batched_mm(batch, mm, counts, TILE)[0], monkeypatch)
        for e, count in enumerate(used):
            assert_same(got[e], expected[e], count)


@pytest.mark.parametrize("gathered", [False, True], ids=["sorted", "gathered"])
def test_columns_behind_the_last_are_no_numbers_of_a_neighbour(gathered, monkeypatch):
    """Rows of a wider tensor, whose other columns are NaN."""
    torch.manual_seed(0)
    poison(monkeypatch)
    mm = projection("concat", "odd", torch.bfloat16)
    wide = torch.full((R, 384), float("nan"), device="cuda").bfloat16()
    wide[:, :328] = torch.randn(R, 328, device="cuda")
    ends = torch.tensor(COUNTS[0], device="cuda").cumsum(0).int()
    gather = {"row_to_pair": torch.randint(0, R * TOP_K, (R,), device="cuda").int(), "top_k": TOP_K} if gathered else {}
    got, expected = by_both(lambda: grouped_mm(wide[:, :328], mm, ends, TILE, num_rows=R, **gather)[0], monkeypatch)
    assert_same(got, expected, sum(COUNTS[0]))


T = 4200
LAYERS = {"whole": (8, 2, 1024, 512), "odd": (6, 2, 1216, 648), "one": (1, 1, 256, 128)}


@pytest.fixture
def planned(monkeypatch):
    """Both products by its tile, whatever a plan would take."""
    with every_tile(TILE, monkeypatch):
        yield


def layer_of(size: str = "whole", **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build("bf16", T=T, sizes=LAYERS[size], device="cuda", bias=True, **options)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", LAYERS)
def test_a_layer_of_many_tokens_runs_by_it(size, form, format):
    """Both products, in five kernels and the batched format's copies: the sort makes the counters 0."""
    layer = layer_of(size, form=form)
    assert_contract(run(layer, format), layer)
    names = kernel_names(partial(run, layer, format))
    assert sum("_plain_mm" in name for name in names) == 2 and not any("_clear" in name for name in names), names
    assert len(names) <= (5 if format == "grouped" else 6), names


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("size", ["whole", "odd"])
def test_experts_of_any_number_of_rows(size):
    """Also a group of warps without rows."""
    assert_any_number_of_rows(layer_of(size), *LAYERS[size][:2])


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(format):
    assert_replays(layer_of(), format, LAYERS["whole"][0])


@pytest.mark.usefixtures("planned")
def test_a_token_that_is_no_number_stays_in_its_row():
    layer = layer_of("odd")
    x = layer.tensors["hidden_states"]
    here = torch.arange(T, device="cuda") == 7
    got, broken = run(layer, "grouped"), run(layer, "grouped", hidden_states=x.masked_fill(here[:, None], float("nan")))
    assert torch.equal(broken[~here], got[~here]) and broken[7].isnan().all()


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_gradients_of_many_tokens(layout, monkeypatch):
    """As those of Triton's tile, forward and backward, with what is kept."""
    torch.manual_seed(0)
    E, K, H, I = 8, 2, 512, 256
    x = torch.randn(T, H, device="cuda").bfloat16()
    weights = [(torch.randn(E, n, k, device="cuda") * k**-0.5).bfloat16() for n, k in ((2 * I, H), (H, I))]
    scores, ids = torch.randn(T, E, device="cuda").softmax(-1).topk(K)
    grad = torch.randn(T, H, device="cuda").bfloat16()

    def gradients() -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights, scores)]
        out = moe_ops.fused_experts(
            *leaves[:3], leaves[3], ids.int(), glu_layout=layout, activation="silu", backend="triton"
        )
        return [out, *torch.autograd.grad(out, leaves, grad)]

    got = gradients()
    assert any("_plain_mm" in name for name in kernel_names(gradients))
    with monkeypatch.context() as patched:
        patched.setattr(ExpertMM, "is_plain", lambda *of: False)
        forget()
        expected = gradients()
        forget()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()
