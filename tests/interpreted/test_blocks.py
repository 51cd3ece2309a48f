"""Products of scaled blocks, as sm_100 has them, under the CPU interpreter: every form against float64 beside the
reference, which rounds where the rows of `meta.blocks` say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from meta import gemm_shapes, layer_shapes
from meta.blocks import BLOCKS, NvRows
from moe_ops import choice
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton import layer as triton_layer
from moe_ops.kernels.triton import permute, topk
from moe_ops.kernels.triton.act_quant import beside, quantize_batched, quantize_rows, quantize_sorted
from moe_ops.kernels.triton.batched_io import dispatch
from moe_ops.kernels.triton.config import SmallConfig
from tests.ops.errors import norm_error
from tests.ops.layers import factors_in_fp64
from tests.ops.scheme_layers import CONTRACT, FORMS, SchemeLayer, build

SIZES = (3, 2, 144, 80)  # ends in the middle of a block and of a tile
NAN, INF = float("nan"), float("inf")
SCHEMES_OF_BLOCKS = ("mxfp8", "mxfp4_a8", "nvfp4")
#: Every form of both schemes' own; what weights of four bits do with rows of eight beside them.
CASES = [
    *[(name, "grouped", form, form == "concat", form == "halves") for name in ("mxfp8", "nvfp4") for form in FORMS],
    *[(name, "batched", "concat", False, True) for name in ("mxfp8", "nvfp4")],
    ("mxfp4_a8", "grouped", "interleaved", False, False),
    ("mxfp4_a8", "batched", "none", True, False),
]


@pytest.fixture
def sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands for such a GPU, in the eyes of the rules, too."""
    monkeypatch.setattr(triton_layer, "INTERPRETED_CAPABILITY", 100)
    for rules in (gemm_shapes, layer_shapes):
        monkeypatch.setattr(rules, "device_arch", lambda device: "sm100")


def run(layer: SchemeLayer, backend: str, **options: Any) -> torch.Tensor:
    return moe_ops.fused_experts(**layer.tensors, **layer.options, **options, backend=backend)


def assert_as_the_reference(layer: SchemeLayer, **options: Any) -> None:
    got, want, exact = run(layer, "triton", **options), run(layer, "reference", **options), layer.float64()
    assert norm_error(got, exact) <= CONTRACT * norm_error(want, exact)
    # Far within its error, and far from what decoded weights give.
    assert norm_error(got, want) < 5e-3 < 0.2 * norm_error(layer.rounded(), want)


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_a_layer_of_fp16(scheme: str, format: str) -> None:
    assert_as_the_reference(build(scheme, T=5, sizes=SIZES, bias=True, dtype=torch.float16), format=format)


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize(("scheme", "format", "form", "bias", "expert_map"), CASES, ids=lambda v: str(v).lower())
def test_a_layer(scheme: str, format: str, form: str, bias: bool, expert_map: bool) -> None:
    assert_as_the_reference(build(scheme, T=5, sizes=SIZES, form=form, bias=bias, expert_map=expert_map), format=format)


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("form", ["halves", "separate", "separate, one in fp32"])
def test_factors_in_fp64(form: str) -> None:
    """Reciprocals of divisors; halves that are stored apart may differ."""
    layer = build("nvfp4", T=5, sizes=SIZES, form=form.removesuffix(", one in fp32"))
    factors_in_fp64(layer.tensors, all_but_one=form == "separate, one in fp32")
    assert_as_the_reference(layer)


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("scheme", SCHEMES_OF_BLOCKS)
def test_many_rows_come_by_descriptor(scheme: str) -> None:
    assert_as_the_reference(build(scheme, T=60, sizes=(1, 1, 256, 96)))


@pytest.mark.usefixtures("sm_100")
def test_the_small_kernels_never_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file of plans says."""
    few = triton_plans.plan("small", SmallConfig(1, 128, 4), SmallConfig(1, 128, 4))
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: few)
    assert_as_the_reference(build("mxfp8", T=1, sizes=SIZES))


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_weights_on_the_rows_and_no_rows(scheme: str) -> None:
    assert_as_the_reference(build(scheme, T=3, sizes=SIZES), weight_on_input=True)
    assert run(build(scheme, T=0, sizes=SIZES), "triton").shape == (0, SIZES[2])


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_calls_that_are_learnt_and_routed_give_the_same_bits(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    layer, logits = build(scheme, T=2, sizes=SIZES), torch.randn(2, SIZES[0])
    tensors = {k: v for k, v in layer.tensors.items() if not k.startswith("topk_")}
    hidden_states = tensors.pop("hidden_states")
    assert topk.is_few(2, 2, SIZES[0])
    got = moe_ops.fused_moe(hidden_states, logits, **tensors, **layer.options, top_k=2)
    weights, ids = moe_ops.fused_topk(logits, top_k=2)
    routed = {"hidden_states": hidden_states, "topk_weights": weights, "topk_ids": ids}
    for _ in range(3):
        assert torch.equal(got, moe_ops.fused_experts(**tensors, **routed, **layer.options))


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_a_token_of_nan_changes_no_other(scheme: str) -> None:
    layer = build(scheme, T=4, sizes=SIZES)
    plain = run(layer, "triton")
    layer.tensors["hidden_states"][1, 7], layer.tensors["hidden_states"][3, 100] = NAN, INF
    got = run(layer, "triton")
    assert got[[1, 3]].isnan().all() and torch.equal(got[[0, 2]], plain[[0, 2]])


@pytest.mark.usefixtures("sm_100")
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4"])
def test_stage_operators_quantise_their_rows(scheme: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    layer = build(scheme, T=4, sizes=SIZES)
    given, weights = layer.tensors, ("gate_up_proj", "down_proj")
    options = {"scheme": scheme, "gate_up_scales": given["gate_up_scales"], "down_scales": given["down_scales"]}
    places = {"num_experts": SIZES[0], "format": format, "scheme": scheme}
    prepared = moe_ops.prepare(*(given[n] for n in ("hidden_states", "topk_weights", "topk_ids")), **places)
    got = moe_ops.finalize(moe_ops.experts(prepared, *(given[n] for n in weights), **options), prepared)
    want = run(layer, "reference")
    assert norm_error(got, want) < 0.2 * norm_error(layer.rounded(), want)
    # What lies between the products is rounded to bf16 before it is quantised.
    assert norm_error(got, layer.float64()) < 1.2 * norm_error(want, layer.float64())


def test_other_gpus_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On them activations stay as they are."""
    layer = build("mxfp8", T=5, sizes=SIZES)
    monkeypatch.setattr(triton_layer, "INTERPRETED_CAPABILITY", 120)
    assert norm_error(run(layer, "triton"), layer.float64()) < 1.05 * norm_error(layer.rounded(), layer.float64())


# ---- how rows are quantised ----


def parts(form: Any, q: torch.Tensor, scale: torch.Tensor, K: int) -> tuple[torch.Tensor, ...]:
    """What is defined of the bytes."""
    scales = form.split(scale, K) if isinstance(form, NvRows) else (scale,)
    return q.view(torch.uint8), *(scale.view(torch.uint8) for scale in scales)


def assert_quantised(form: Any, got: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    q, (scale,) = form.quantize(rows)
    K = rows.shape[-1]
    assert got[0].dtype == q.dtype and got[0].shape == q.shape and got[1].shape == scale.shape
    for one, other in zip(parts(form, *got, K), parts(form, q, scale, K), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "K"), [("mxfp8", 128), ("mxfp8", 200), ("nvfp4", 200), ("nvfp4", 8), ("nvfp4", 5000)], ids=str
)
def test_rows_bit_for_bit(name: str, K: int) -> None:
    """Of more columns than a program holds, too."""
    rows = torch.randn(9, K) * torch.logspace(-13, 8, 9)[:, None]
    rows[4] = 0.0
    assert_quantised(BLOCKS[name], quantize_rows(rows, BLOCKS[name]), rows)


@pytest.mark.parametrize("name", BLOCKS)
def test_ties_go_to_even(name: str) -> None:
    """All multiples of a quarter of the least step, in units of the scale."""
    form = BLOCKS[name]
    step, most = (0.125, 6.0) if form.pack == 2 else (2.0**-11, 0.25)
    rows = torch.arange(-most, most + step, step)
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 15)).view(-1, 15)
    rows = torch.cat((rows, torch.full((len(rows), 1), most if form.pack == 2 else 448.0)), dim=1).repeat(1, 2)
    rows = rows * (448.0 if form.pack == 2 else 1.0)
    assert_quantised(form, quantize_rows(rows, form), rows)


@pytest.mark.parametrize("name", BLOCKS)
def test_only_rows_of_experts_are_touched(name: str, poisoned: Any) -> None:
    form, rows, batch = BLOCKS[name], torch.randn(9, 72), torch.randn(3, 4, 72)
    q, scale = quantize_sorted(rows, torch.tensor([2, 2, 5], dtype=torch.int32), form)
    assert_quantised(form, (q[:5], scale[:5]), rows[:5])
    assert poisoned(q[5:]).all() and poisoned(scale[5:]).all()
    q, scale = quantize_batched(batch, torch.tensor([2, 0, 9], dtype=torch.int32), form)
    for e, count in enumerate((2, 0, 4)):
        assert_quantised(form, (q[e, :count], scale[e, :count]), batch[e, :count])
        assert poisoned(q[e, count:]).all() and poisoned(scale[e, count:]).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_quantised_where_they_are_sorted_and_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the sort, in a kernel of its own, and in copies in one kernel or two; with weights in these."""
    form, x, ids, weights = BLOCKS[name], torch.randn(5, 200), torch.randint(-1, 4, (5, 2)), torch.rand(5, 2)
    for most in (permute.COUNT_ALL_PAIRS, 0):
        monkeypatch.setattr(permute, "COUNT_ALL_PAIRS", most)
        rows = beside(x, form)
        permute.sort_pairs(ids, 4, rows=rows)
        assert_quantised(form, (rows.quantized, rows.scale), x)
    for by_choice in (False, True):
        batch, scale, _, slots = dispatch(x, ids, 4, 3, None, weights, form=form, by_choice=by_choice)
        for pair in (slots.flatten() >= 0).nonzero().flatten().tolist():
            slot, row = slots.flatten()[pair], x[pair // 2] * weights.flatten()[pair]
            got = (batch.flatten(0, 1)[slot][None], scale.flatten(0, 1)[slot][None])
            assert_quantised(form, got, row[None])
