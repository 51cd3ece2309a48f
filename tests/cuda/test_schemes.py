"""Every scheme that the Triton backend serves, on a GPU: both formats, against float64 of its dequantised weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import moe_ops
from meta.schemes import SCHEMES
from moe_ops.backends import triton_plans
from moe_ops.backends.triton import SERVED_SCHEMES
from moe_ops.census import kernel_names
from moe_ops.testing import assert_cuda_graph_safe
from tests.ops.scheme_layers import FORMS, SchemeLayer, assert_contract, build, with_scales_far_apart

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]
SCHEMES_SERVED = sorted(SERVED_SCHEMES)
QUANTIZING = [name for name in SCHEMES_SERVED if SCHEMES[name].rows is not None]
DECODED = sorted(triton_plans.PACKED)
STATIC = [name for name in SCHEMES_SERVED if SCHEMES[name].static_rows is not None]
#: E, K, H, I: whole tiles of nothing, but of whole groups of every scheme.
SIZES = (8, 2, 640, 384)


def layer_of(scheme: str, T: int, **options: object) -> SchemeLayer:
    torch.manual_seed(0)
    return build(scheme, T=T, sizes=SIZES, device="cuda", **options)


def run(layer: SchemeLayer, format: str) -> torch.Tensor:
    return moe_ops.fused_experts(**layer.tensors, **layer.options, format=format, backend="triton")


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("T", [0, 1, 3, 17, 300])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", SCHEMES_SERVED)
def test_a_layer_is_as_near_to_float64_as_its_row_says(scheme, format, T, bias, gated):
    layer = layer_of(scheme, T, form="concat" if gated else "none", bias=bias)
    got = run(layer, format)
    assert got.shape == (T, SIZES[2])
    assert_contract(got, layer)


@pytest.mark.parametrize("T", [1, 17, 300, 4096])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", DECODED)
def test_fp16_activations_of_decoded_weights(scheme, format, T):
    """No bit less of them counts: of numbers whose last bits make the sum, both parts of each are multiplied."""
    layer = layer_of(scheme, T, bias=True, dtype=torch.float16)
    assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("scheme", DECODED)
def test_fp16_rows_of_results_in_bf16(scheme):
    torch.manual_seed(0)
    row, (E, N, K) = SCHEMES[scheme], (2, 256, 256)
    stored, scales = row.quantize(torch.randn(E, N, K))
    rows = torch.randn(512, K).half()
    offsets = torch.tensor([300, 512], dtype=torch.int32)
    wide = row.dequantize(stored, scales).double()
    expected = torch.cat([rows[:300].double() @ wide[0].T, rows[300:].double() @ wide[1].T])
    given = {"weight_scales": [scale.cuda() for scale in scales], "scheme": scheme, "out_dtype": torch.bfloat16}
    got = moe_ops.grouped_mm(rows.cuda(), stored.cuda(), offsets.cuda(), **given)
    assert got.dtype == torch.bfloat16
    assert (got.double().cpu() - expected).norm() <= 1.05 * (expected.bfloat16().double() - expected).norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [3, 300, 4096])
@pytest.mark.parametrize("scheme", SCHEMES_SERVED)
def test_every_form_of_the_first_weight(scheme, T, form):
    layer = layer_of(scheme, T, form=form, bias=True, expert_map=True)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("powers", [26, 27, 40])
@pytest.mark.parametrize("T", [3, 300, 4096])
def test_scales_that_no_number_of_eight_bits_holds_count(T, powers):
    layer = with_scales_far_apart(layer_of("mxfp4_a8", T), powers)
    for format in ("grouped", "batched"):
        assert_contract(run(layer, format), layer)


@pytest.mark.parametrize("T", [3, 300])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", [*QUANTIZING, "int4_w4a16", "nvfp4"])
def test_a_replay_with_changed_routing_has_the_bits_of_a_call(scheme, format, T):
    layer = layer_of(scheme, T)

    def layer_with(ids: torch.Tensor) -> torch.Tensor:
        given = {**layer.tensors, "topk_ids": ids}
        return moe_ops.fused_experts(**given, **layer.options, format=format, capacity=capacity, backend="triton")

    capacity = T if format == "batched" else None
    ids = layer.tensors["topk_ids"]
    torch.use_deterministic_algorithms(False)  # filling memory launches kernels of its own
    assert_cuda_graph_safe(layer_with, (ids,), changed=[((ids + 1) % SIZES[0],)], backend=None)


@pytest.mark.parametrize(("T", "most"), [(1, 6), (17, 6), (300, 6), (4096, 8)])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", STATIC)
def test_static_scales_of_activations(scheme, format, T, most):
    """Of each expert's own; rows are quantised once they are sorted, which is a kernel more."""
    layer = layer_of(scheme, T, static=True, bias=True)
    assert_contract(run(layer, format), layer)
    torch.use_deterministic_algorithms(False)
    names = kernel_names(partial(run, layer, format))
    assert len(names) <= most, names


@pytest.mark.parametrize(("T", "most"), [(1, 5), (64, 5), (300, 5), (4096, 7)])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", QUANTIZING)
def test_kernels_of_a_layer(scheme, format, T, most):
    """Sort and quantise, GEMM 1, quantise, GEMM 2, combine; sorting many pairs and copying them takes two more."""
    layer = layer_of(scheme, T)
    torch.use_deterministic_algorithms(False)
    names = kernel_names(partial(run, layer, format))
    assert len(names) <= most, names


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("scheme", DECODED)
def test_few_tokens_of_decoded_weights_take_two_kernels(scheme, T):
    """Whose numbers the test of the contract sees at these T."""
    layer = layer_of(scheme, T)
    torch.use_deterministic_algorithms(False)
    names = kernel_names(partial(run, layer, "grouped"))
    assert [name for name in names if "_small_" in name] == names and len(names) == 2, names


def every_code(scheme: str, E: int, N: int, K: int) -> tuple[dict[str, object], torch.Tensor]:
    """(weight [E, N, K] of every code with its scales, as operators take it; what it stands for, fp64 on the CPU): NaN
    included; scales of powers of two.
    """
    row = SCHEMES[scheme]
    stored, scales = row.quantize(torch.randn(E, N, K))
    stored = torch.randint(0, 256, stored.shape, dtype=torch.uint8).view(stored.dtype)
    if row.code.name == "e4m3":  # NaN takes its whole row
        stored[:, 8:] = torch.where(stored[:, 8:].float().isnan(), 0.0, stored[:, 8:].float()).to(stored.dtype)
    scales = tuple(s if s.dtype == torch.uint8 else s.float().log2().round().exp2().to(s.dtype) for s in scales)
    given = {"weight_scales": [scale.cuda() for scale in scales], "scheme": scheme}
    return {"weight": stored.cuda(), **given}, row.dequantize(stored, scales).double()


@pytest.mark.parametrize("C", [1, 16, 64, 256])
@pytest.mark.parametrize("scheme", DECODED)
def test_every_code_is_the_number_that_it_stands_for(scheme, C):
    """Of rows that each name a column, which leave nothing to round."""
    torch.manual_seed(0)
    given, wide = every_code(scheme, 2, 192, 256)
    rows = torch.eye(256)[torch.randperm(256)[:C]].bfloat16().expand(2, C, 256).contiguous()
    counts = torch.full((2,), C, dtype=torch.int32, device="cuda")
    got = moe_ops.batched_mm(rows.cuda(), expert_num_tokens=counts, **given)
    torch.testing.assert_close(got.double().cpu(), rows.double() @ wide.mT, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_rows_past_the_count_of_an_expert_change_nothing(scheme):
    """A batch with NaN behind its rows, by the stage operators."""
    layer = layer_of(scheme, 17)
    given, options = layer.tensors, layer.options
    (E, _, H, I), form = SIZES, SCHEMES[scheme].rows
    counts = torch.tensor([3, 0, 40, 1, 17, 0, 2, 9], dtype=torch.int32, device="cuda")
    batch = torch.randn(E, 40, H, device="cuda").bfloat16()
    used = torch.arange(40, device="cuda") < counts[:, None]
    results = []
    for poison in (0.0, float("nan")):
        batch[~used] = poison
        stored, scale = moe_ops.quantize_batched(batch, counts, scheme=scheme)
        h, h_scale = moe_ops.batched_mm_glu(
            stored, given["gate_up_proj"], counts, weight_scales=given["gate_up_scales"], batch_scale=scale,
            scheme=scheme, quantize_output=True,
        )  # fmt: skip
        assert h.dtype == form.dtype and h.shape == (E, 40, I)
        y = moe_ops.batched_mm(
            h, given["down_proj"], counts, weight_scales=given["down_scales"], batch_scale=h_scale, scheme=scheme
        )
        results.append(y[used])
    assert options["activation"] == "silu" and results[0].isfinite().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].make_scales is not None])
def test_quantising_in_a_graph_gives_the_bits_of_a_cpu(scheme):
    torch.manual_seed(0)
    weight = torch.randn(4, 256, 256, dtype=torch.bfloat16)

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return moe_ops.quantize_weight(weight, scheme=scheme)

    expected = [part.contiguous().view(torch.uint8) for part in quantise(weight)]
    torch.compiler.reset()
    for run in (quantise, torch.compile(quantise, fullgraph=True)):
        for part, wanted in zip(run(weight.cuda()), expected, strict=True):
            assert torch.equal(part.cpu().contiguous().view(torch.uint8), wanted)
