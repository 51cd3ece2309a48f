"""The operators on a GPU: against float64, bit for bit under capture, and counted in kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

import moe_ops
from meta import cost
from meta.layers import MODEL_LAYERS
from meta.schemes import SCHEMES
from moe_ops.census import kernel_names
from moe_ops.testing import assert_cuda_graph_safe
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, dense_formula, plain_result

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]
TOKENS = (1, 2, 7, 16, 64, 300, 1024, 4096)
SHAPES = {"many_small": (64, 8, 512, 256), "few_large": (8, 2, 1024, 1536), "odd": (60, 4, 480, 176)}
FP8 = SCHEMES["fp8_block128"]


def weights(
    shape: str, *, dtype: torch.dtype = torch.bfloat16, glu: str = "concat", layout: str = "nk", bias: bool = False
) -> dict[str, Any]:
    E, _, H, I = SHAPES[shape]
    width = I if glu == "none" else 2 * I

    def matrix(n: int, k: int) -> torch.Tensor:
        if layout == "kn":
            return (torch.randn(E, k, n, device="cuda") * k**-0.5).to(dtype).transpose(1, 2)
        return (torch.randn(E, n, k, device="cuda") * k**-0.5).to(dtype)

    made = {"gate_up_proj": matrix(width, H), "down_proj": matrix(H, I)}
    if bias:
        made["gate_up_bias"] = torch.randn(E, width, device="cuda").to(dtype)
        made["down_bias"] = torch.randn(E, H, device="cuda").to(dtype)
    return made


def inputs(shape: str, T: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    E, K, H, _ = SHAPES[shape]
    x = torch.randn(T, H, device="cuda").to(dtype)
    return x, torch.rand(T, K, device="cuda"), torch.rand(T, E, device="cuda").topk(K).indices.int()


def per_expert(
    x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias=None, down_bias=None, *, glu="concat", staged=False
) -> torch.Tensor:
    """silu experts, expert by expert: in float64, or rounding every stage to the inputs' dtype (`staged`)."""
    out = x.new_zeros(x.shape[0], down_proj.shape[1], dtype=x.dtype if staged else torch.float64)
    kind = x.dtype if staged else torch.float64
    for e in range(gate_up_proj.shape[0]):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        h = x[token].to(kind) @ gate_up_proj[e].to(kind).T
        if gate_up_bias is not None:
            h = h + gate_up_bias[e].to(kind)
        if glu == "none":
            h = F.silu(h)
        else:
            gate, up = h.chunk(2, -1) if glu == "concat" else (h[:, ::2], h[:, 1::2])
            h = F.silu(gate) * up
        y = h @ down_proj[e].to(kind).T
        if down_bias is not None:
            y = y + down_bias[e].to(kind)
        out.index_add_(0, token, y * topk_weights[token, slot].to(kind)[:, None])
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def check(
    got: torch.Tensor, x: torch.Tensor, tw: torch.Tensor, ids: torch.Tensor, w: dict[str, Any], **glu: str
) -> None:
    """`got` is as near to float64 as rounding every stage to the dtype of `x` is."""
    staged = per_expert(x, topk_weights=tw, topk_ids=ids, staged=True, **w, **glu)
    assert_accurate(got, per_expert(x, topk_weights=tw, topk_ids=ids, **w, **glu), staged)


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_less_accurate_than_rounding_every_stage(shape, T, format):
    torch.manual_seed(T)
    w, (x, tw, ids) = weights(shape), inputs(shape, T)
    gold = per_expert(x, topk_weights=tw, topk_ids=ids, **w)
    staged = error(per_expert(x, topk_weights=tw.to(x.dtype), topk_ids=ids, staged=True, **w), gold)
    got = moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids, format=format)
    assert error(got, gold) <= staged


@pytest.mark.parametrize("T", [1, 16, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_other_dtypes(dtype, T, format):
    torch.manual_seed(0)
    w, (x, tw, ids) = weights("few_large", dtype=dtype), inputs("few_large", T, dtype)
    got = moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids, format=format)
    check(got, x, tw, ids, w)


@pytest.mark.parametrize("T", [1, 16, 300, 4096])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("glu", ["concat", "interleaved", "none"])
@pytest.mark.parametrize("shape", ["many_small", "odd"])
def test_layouts_with_bias(shape, glu, layout, T):
    torch.manual_seed(1)
    w, (x, tw, ids) = weights(shape, glu=glu, layout=layout, bias=True), inputs(shape, T)
    check(moe_ops.fused_experts(x, topk_weights=tw, topk_ids=ids, glu_layout=glu, **w), x, tw, ids, w, glu=glu)


@pytest.mark.parametrize("T", [1, 64, 4096])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_dropped_and_mapped_experts(T, format):
    torch.manual_seed(2)
    E, K, *_ = SHAPES["many_small"]
    w, (x, tw, _) = weights("many_small"), inputs("many_small", T)
    ids = torch.randint(-1, 2 * E + 1, (T, K), device="cuda")
    ids[0] = torch.arange(K)
    expert_map = torch.full((2 * E,), -1, device="cuda", dtype=torch.int32)
    expert_map[torch.randperm(2 * E, device="cuda")[:E]] = torch.arange(E, device="cuda", dtype=torch.int32)
    expert_map[:4] = torch.tensor([5, -1, 3, -1])
    local = torch.where((ids >= 0) & (ids < 2 * E), expert_map[ids.clamp(0, 2 * E - 1)].long(), -1)
    got = moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids, expert_map=expert_map, format=format)
    check(got, x, tw, local, w)


@pytest.mark.parametrize("T", [1, 64, 4096])
def test_weight_on_the_input(T):
    torch.manual_seed(3)
    w, (x, tw, ids) = weights("few_large"), inputs("few_large", T)

    def formula(staged: bool) -> torch.Tensor:
        out = torch.zeros(T, x.shape[1], device="cuda", dtype=x.dtype if staged else torch.float64)
        for k in range(ids.shape[1]):
            scaled = (x.float() * tw[:, k : k + 1]).to(x.dtype)
            one = {"topk_weights": torch.ones_like(tw[:, :1]), "topk_ids": ids[:, k : k + 1]}
            out += per_expert(scaled, staged=staged, **one, **w)
        return out

    got = moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids, weight_on_input=True)
    assert_accurate(got, formula(staged=False), formula(staged=True))


def fp8_layer(shape: str, T: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any], torch.Tensor]:
    """Arguments, options and the float64 product of the dequantised operands, with h rounded as the scheme says."""
    w, (x, tw, ids) = weights(shape), inputs(shape, T)
    (w1, s1), (w2, s2) = (FP8.quantize(w[n].float()) for n in ("gate_up_proj", "down_proj"))
    rounded = FP8.rows.dequantize(*FP8.rows.quantize(x)).double()
    d1, d2 = FP8.dequantize(w1, s1).double(), FP8.dequantize(w2, s2).double()
    gold = torch.zeros(T, x.shape[1], device="cuda", dtype=torch.float64)
    for e in range(w1.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token):
            gate, up = (rounded[token] @ d1[e].T).chunk(2, -1)
            h = FP8.rows.dequantize(*FP8.rows.quantize((F.silu(gate) * up).float())).double()
            gold.index_add_(0, token, (h @ d2[e].T) * tw[token, slot].double()[:, None])
    return (x, w1, w2, tw, ids), {"gate_up_scales": s1, "down_scales": s2, "scheme": "fp8_block128"}, gold


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("shape", ["many_small", "few_large"])
def test_fp8_block128_is_the_product_of_the_dequantised_operands(shape, T, format):
    torch.manual_seed(5)
    arguments, options, gold = fp8_layer(shape, T)
    got = moe_ops.fused_experts(*arguments, format=format, **options)
    # bf16 rounding of the result, plus an occasional e4m3 step where fp32 and fp64 round h to different sides. Tensor
    # cores keep some 14 bits of sums of e4m3 products: more steps, which in one token's result nothing evens out.
    assert error(got, gold) < (2e-2 if T == 1 else 6e-3)


@pytest.mark.parametrize("T", [1, 16, 300, 4096])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
def test_same_bits_eager_compiled_and_captured_with_changed_routing(scheme, format, T):
    torch.manual_seed(6)
    if scheme == "bf16":
        w, (x, tw, ids) = weights("many_small"), inputs("many_small", T)
        fixed, options = (w["gate_up_proj"], w["down_proj"]), {}
    else:
        (x, w1, w2, tw, ids), options, _ = fp8_layer("many_small", T)
        fixed = (w1, w2)

    def layer(x, tw, ids):
        return moe_ops.fused_experts(x, *fixed, tw, ids, format=format, **options)

    other = inputs("many_small", T)
    compiled = torch.compile(layer, fullgraph=True)
    for variant in ((x, tw, ids), other):
        assert torch.equal(layer(*variant), compiled(*variant))
        assert torch.equal(layer(*variant), layer(*variant))
    assert_cuda_graph_safe(layer, (x, tw, ids), changed=[other], backend=None)


@pytest.mark.parametrize(("T", "limit"), [(1, 4), (64, 7), (4096, 7)])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("shape", ["many_small", "few_large"])
def test_kernels_from_router_logits_to_output(shape, scheme, T, limit):
    E, K, *_ = SHAPES[shape]
    logits = torch.randn(T, E, device="cuda", dtype=torch.bfloat16)
    if scheme == "bf16":
        w, (x, *_) = weights(shape), inputs(shape, T)
        fixed, options = (w["gate_up_proj"], w["down_proj"]), {}
    else:
        (x, w1, w2, *_), options, _ = fp8_layer(shape, T)
        fixed = (w1, w2)
    torch.use_deterministic_algorithms(False)  # filling memory launches kernels of its own
    names = kernel_names(lambda: moe_ops.fused_moe(x, logits, *fixed, top_k=K, **options))
    assert len(names) <= limit, names


@pytest.mark.parametrize(("T", "limit"), [(1, 4), (4096, 7)])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("shape", MODEL_LAYERS)
def test_kernels_at_the_dimensions_of_real_models(shape, scheme, T, limit):
    E, K, H, I = MODEL_LAYERS[shape]
    row, options = SCHEMES[scheme], {}
    torch.use_deterministic_algorithms(False)
    w1, w2 = (torch.empty(E, n, k, device="cuda", dtype=row.weight_dtype) for n, k in ((2 * I, H), (H, I)))
    if row.quantized:
        sizes = ((2 * I, H), (H, I))
        scales = [[torch.ones(spec.shape(E, n, k), device="cuda") for spec in row.scales] for n, k in sizes]
        options = dict(zip(("gate_up_scales", "down_scales"), scales, strict=True)) | {"scheme": scheme}
    x, logits = (torch.randn(T, n, device="cuda", dtype=torch.bfloat16) for n in (H, E))
    names = kernel_names(lambda: moe_ops.fused_moe(x, logits, w1, w2, top_k=K, **options))
    assert len(names) <= limit, names


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128"])
@pytest.mark.parametrize("shape", ["many_small", "few_large"])
def test_fused_moe_is_topk_then_experts_to_the_bit_and_replays(shape, scheme, T):
    torch.manual_seed(10)
    E, K, *_ = SHAPES[shape]
    if scheme == "bf16":
        w, (x, *_), options = weights(shape), inputs(shape, T), {}
        fixed = (w["gate_up_proj"], w["down_proj"])
    else:
        (x, w1, w2, *_), options, _ = fp8_layer(shape, T)
        fixed = (w1, w2)

    def layer(x, logits):
        return moe_ops.fused_moe(x, logits, *fixed, top_k=K, **options)

    first, second = (torch.randn(T, E, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for logits in (first, second):
        routed = moe_ops.fused_topk(logits, top_k=K)
        assert torch.equal(layer(x, logits), moe_ops.fused_experts(x, *fixed, *routed, **options))
    torch.use_deterministic_algorithms(False)
    assert_cuda_graph_safe(layer, (x, first), changed=[(x, second)], backend=None)


@pytest.mark.parametrize("T", [2, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("glu", ["concat", "interleaved", "none"])
def test_gradients_against_float64(glu, dtype, T):
    torch.manual_seed(7)
    w, (x, tw, ids) = weights("many_small", dtype=dtype, glu=glu), inputs("many_small", T, dtype)
    grad = torch.randn_like(x)

    def gradients(wide: bool, function) -> list[torch.Tensor]:
        given = (x, w["gate_up_proj"], w["down_proj"], tw)
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in given]
        function(*leaves, ids).backward(grad.to(leaves[0].dtype))
        return [leaf.grad for leaf in leaves]

    got = gradients(False, lambda *leaves: moe_ops.fused_experts(*leaves, glu_layout=glu))
    exact = gradients(True, lambda *leaves: per_expert(*leaves, glu=glu))
    plain = gradients(False, lambda *leaves: per_expert(*leaves, glu=glu, staged=True))
    names = ("hidden_states", "gate_up_proj", "down_proj", "topk_weights")
    for name, *three in zip(names, got, exact, plain, strict=True):
        assert_accurate(*three, dtype=dtype, what=name)


FORMS = [name for name in VARIANTS if name.startswith(("separate", "fp8")) and not name.endswith("no_tokens")]


@pytest.mark.parametrize("T", [1, 16, 300])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_weight(name, T):
    """Halves in tensors of their own; scales in every spelling; rows quantised before."""
    layer = replace(VARIANTS[name], T=T).build()
    on_gpu = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), layer.tensors)
    run = partial(moe_ops.fused_experts, **on_gpu, **layer.options)
    got = run()
    assert got.dtype == layer.out_dtype
    if name.startswith("fp8"):
        assert error(got.cpu(), dense_formula(layer.float64())) < 6e-3  # as above
    else:
        assert_accurate(got.cpu(), dense_formula(layer.float64()), plain_result(layer))
    if T == 16:
        torch._dynamo.reset()
        assert torch.equal(torch.compile(run, fullgraph=True)(), got)


@pytest.mark.parametrize("T", [1, 16, 300, 4096])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_halves_apart_give_the_bits_of_the_stack(layout, T):
    torch.manual_seed(12)
    w, (x, tw, ids) = weights("many_small", layout=layout), inputs("many_small", T)
    wanted = moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids)
    halves = w["gate_up_proj"].chunk(2, dim=1)
    below, above = sorted((torch.empty_like(half) for half in halves), key=torch.Tensor.data_ptr)
    for gate, up in ((below, above), (above, below)):
        gate.copy_(halves[0])
        up.copy_(halves[1])
        got = moe_ops.fused_experts(x, gate, w["down_proj"], tw, ids, up_proj=up)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("op", ["moe_unpermute", "batched_combine"])
def test_a_shared_experts_output_joins_the_sum(op):
    torch.manual_seed(13)
    rows, added = torch.randn(24, 96, device="cuda").bfloat16(), torch.randn(8, 192, device="cuda").bfloat16()[:, ::2]
    places, weights = torch.randint(-1, 24, (8, 3), device="cuda").int(), torch.rand(8, 3, device="cuda")
    given = rows.view(4, 6, 96) if op == "batched_combine" else rows
    got = getattr(moe_ops, op)(given, places, weights, added=added)
    picked = torch.where((places >= 0).unsqueeze(2), rows.double()[places.clamp(min=0).long()], 0.0)
    wanted = (picked * weights.double().unsqueeze(2)).sum(1) + added.double()
    assert (got.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


@pytest.mark.parametrize("T", [3, 5000])
def test_slots_by_choice_are_those_of_the_cpu(T):
    ids, x = torch.randint(-1, 6, (T, 2)).int(), torch.randn(T, 16)
    options = {"num_experts": 6, "capacity": 2 + T // 8, "slot_order": "choice"}
    batch, counts, slots = moe_ops.batched_dispatch(x.cuda(), ids.cuda(), **options)
    wanted, counts_wanted, slots_wanted = moe_ops.batched_dispatch(x, ids, **options)
    assert torch.equal(counts.cpu(), counts_wanted) and torch.equal(slots.cpu(), slots_wanted)
    for e, count in enumerate(counts_wanted.tolist()):
        assert torch.equal(batch[e, :count].cpu(), wanted[e, :count])


@pytest.mark.parametrize("op", ["fused_topk", "fused_experts", "fused_experts_batched", "fused_moe", "moe_permute"])
def test_opcheck(op):
    torch.manual_seed(8)
    torch.use_deterministic_algorithms(False)
    w, (x, tw, ids) = weights("many_small", dtype=torch.float32), inputs("many_small", 9, torch.float32)
    logits = torch.randn(9, 64, device="cuda")
    fixed = (w["gate_up_proj"], w["down_proj"])
    arguments, options = {
        "fused_topk": ((logits.requires_grad_(),), {"top_k": 8}),
        "fused_experts": ((x.requires_grad_(), *fixed, tw, ids), {}),
        "fused_experts_batched": ((x, *fixed, tw, ids), {"format": "batched"}),
        "fused_moe": ((x, logits, *fixed), {"top_k": 8}),
        "moe_permute": ((x.detach(), ids), {"num_experts": 64}),
    }[op]
    torch.library.opcheck(getattr(torch.ops.moe_ops, op.removesuffix("_batched")).default, arguments, options)


def test_debug_reports_an_id_out_of_range():
    w, (x, tw, ids) = weights("few_large"), inputs("few_large", 4)
    ids[2, 1] = 99
    with moe_ops.debug(), pytest.raises(ValueError, match="99"):
        moe_ops.fused_experts(x, w["gate_up_proj"], w["down_proj"], tw, ids)


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("form", ["plain", "weight_on_input", "interleaved", "bias"])
def test_gradients_of_the_stages(form: str, format: str):
    """prepare, experts, finalize against float64, in memory that is NaN where nobody wrote."""
    shape, T = "odd", 70
    glu = "interleaved" if form == "interleaved" else "concat"
    made = weights(shape, bias=form == "bias", glu=glu)
    x, topk_weights, ids = inputs(shape, T)
    ids[::9, 0] = -1
    leaves = {"x": x, "topk_weights": topk_weights, **made}
    grad = torch.randn_like(x)

    def gradients(run: Any, kind: torch.dtype | None) -> dict[str, torch.Tensor]:
        given = {
            name: value.detach().clone().to(kind or value.dtype).requires_grad_() for name, value in leaves.items()
        }
        run(given).backward(grad.to(kind or grad.dtype))
        return {name: value.grad for name, value in given.items()}

    def staged(t: dict[str, torch.Tensor]) -> torch.Tensor:
        options = {"num_experts": SHAPES[shape][0], "weight_on_input": form == "weight_on_input", "format": format}
        prepared = moe_ops.prepare(t["x"], t["topk_weights"], ids, **options)
        biases = {name: t[name] for name in ("gate_up_bias", "down_bias") if name in t}
        result = moe_ops.experts(prepared, t["gate_up_proj"], t["down_proj"], glu_layout=glu, **biases)
        return moe_ops.finalize(result, prepared)

    def dense(t: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.zeros_like(t["x"])
        for k in range(ids.shape[1]):
            held, e = (ids[:, k] >= 0).unsqueeze(1), ids[:, k].clamp(min=0).long()
            weight = t["topk_weights"][:, k : k + 1].to(out.dtype)
            rows = t["x"] * weight if form == "weight_on_input" else t["x"]
            h = torch.einsum("tnh,th->tn", t["gate_up_proj"][e], rows)
            h = h + t["gate_up_bias"][e] if "gate_up_bias" in t else h
            gate, up = (h[:, ::2], h[:, 1::2]) if glu == "interleaved" else h.chunk(2, dim=1)
            y = torch.einsum("thi,ti->th", t["down_proj"][e], F.silu(gate) * up)
            y = y + t["down_bias"][e] if "down_bias" in t else y
            out = out + torch.where(held, y if form == "weight_on_input" else y * weight, 0)
        return out

    got, exact, plain = gradients(staged, None), gradients(dense, torch.float64), gradients(dense, None)
    for name, value in got.items():
        assert_accurate(value, exact[name], plain[name], dtype=x.dtype, what=name)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block128", "fp8_channel"])
def test_a_long_batch_in_passes(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """T = 65536 at Qwen3-30B-A3B's dimensions: within 1 GiB beyond inputs and outputs, the bits of one pass."""
    torch.use_deterministic_algorithms(False)  # poisoning would cost minutes
    E, K, H, I = MODEL_LAYERS["qwen3-30b-a3b"]
    T = 65536
    up = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) / H**0.5
    down = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) / I**0.5
    x, logits = torch.randn(T, H, device="cuda", dtype=torch.bfloat16), torch.randn(T, E, device="cuda")
    options = {"scheme": scheme}
    if SCHEMES[scheme].scales:
        up, options["gate_up_scales"] = SCHEMES[scheme].quantize(up)
        down, options["down_scales"] = SCHEMES[scheme].quantize(down)

    def run() -> tuple[torch.Tensor, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = moe_ops.fused_moe(x, logits, up, down, top_k=K, **options)
        return out, torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()

    found, beyond = run()
    assert beyond <= 2**30
    monkeypatch.setattr(cost, "PASS_BYTES", 2**40)
    whole, all_of_it = run()
    assert all_of_it > 2**31 and torch.equal(found, whole)
