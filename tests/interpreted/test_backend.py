"""Every operator through the Triton backend under the interpreter, against the reference: the dispatcher included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from meta.routing import route as route_pairs
from meta.schemes import SCHEMES
from moe_ops import plans, reference
from moe_ops.backends import triton as backend
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton import layer, permute, small, topk
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from moe_ops.ops import SIGNATURES, parse
from tests.ops.calls import CALLS
from tests.ops.errors import assert_accurate, assert_rounded, norm_error
from tests.ops.layers import VARIANTS, Layer, dense_formula, plain_result

E, H, I = 6, 96, 40
TILE = MMConfig(16, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)
FP8_TILE = MMConfig(16, 256, 128, 2, 4, 2, a_tma=True, w_tma=True)
SMALL = SmallConfig(16, 128, 4)
FP8_SMALL = SmallConfig(64, 128, 4)  # no more programs than edges need: the interpreter pays for each
PLANS = {
    "small": triton_plans.plan("small", SMALL, SMALL),
    "grouped": triton_plans.plan("grouped", TILE, TILE),
    "batched": triton_plans.plan("batched", TILE, TILE),
}


def case(
    T: int = 7, top_k: int = 3, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of fused_experts; ids include -1 and one past the end."""
    glu = options.get("glu_layout", "concat")
    width = I if glu == "none" else 2 * I
    ids = torch.rand(T, E).topk(top_k, dim=1).indices.int()
    if T > 2:
        ids[1, 0], ids[2, 1] = -1, E
    arguments = [torch.randn(T, H), torch.randn(E, width, H) * 0.1, torch.randn(E, H, I) * 0.1]
    arguments = [a.to(dtype) for a in arguments] + [torch.rand(T, top_k), ids]
    return arguments, options


def gold(arguments: list[Any], options: dict[str, Any]) -> torch.Tensor:
    """The reference on upcast inputs."""
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    return moe_ops.fused_experts(*wide, backend="reference", **options)


@pytest.fixture
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one path, whatever the rule would choose."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS[request.param])
    return request.param


every_path = pytest.mark.parametrize("plan", PLANS, indirect=True)


def run(plan: str, arguments: list[Any], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**options, "format": "batched" if plan == "batched" else "grouped"}
    return moe_ops.fused_experts(*arguments, backend="triton", **options), gold(arguments, options)


@every_path
@pytest.mark.parametrize("glu", ["concat", "interleaved", "none"])
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["weight_after", "weight_before"])
def test_fused_experts(plan, glu, weight_on_input):
    torch.manual_seed(0)
    assert_rounded(*run(plan, *case(glu_layout=glu, weight_on_input=weight_on_input)))


@every_path
def test_fused_experts_with_bias_and_a_clamped_activation(plan):
    torch.manual_seed(1)
    arguments, options = case(activation="swiglu_oai", glu_layout="interleaved")
    options |= {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)}
    assert_rounded(*run(plan, arguments, options))


@every_path
def test_fused_experts_with_an_expert_map(plan):
    torch.manual_seed(2)
    arguments, options = case()
    arguments[4] = torch.randint(-1, 10, (7, 3))
    expert_map = torch.tensor([-1, 2, 5, -1, 0, 1, 4, 3, -1])
    assert_rounded(*run(plan, arguments, {**options, "expert_map": expert_map}))


@every_path
def test_a_map_without_entries_holds_no_expert(plan):
    arguments, options = case()
    out, _ = run(plan, arguments, {**options, "expert_map": torch.empty(0, dtype=torch.int32)})
    assert not out.any()


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, others between them."""
    room = torch.stack((tensor.float(), torch.full(tensor.shape, 3.0)), dim=-1).to(tensor.dtype)
    return room[..., 0]


@every_path
def test_an_expert_map_may_be_a_column(plan):
    torch.manual_seed(2)
    arguments, options = case()
    arguments[4] = torch.randint(-1, 10, (7, 3))
    expert_map = spread(torch.tensor([-1, 2, 5, -1, 0, 1, 4, 3, -1]))
    assert_rounded(*run(plan, arguments, {**options, "expert_map": expert_map}))


SPREAD = [
    ("grouped_mm-plain", "offsets"), ("grouped_mm_glu-plain", "offsets"), ("grouped_mm_glu-fp8", "rows_scale"),
    ("grouped_mm-fp8", "rows_scale"), ("batched_mm-plain", "expert_num_tokens"),
    ("batched_mm_glu-plain", "expert_num_tokens"), ("batched_mm_glu-fp8", "batch_scale"),
    ("quantize_batched-fp32", "expert_num_tokens"), ("grouped_wgrad-plain", "offsets"),
    ("expert_sums-plain", "offsets"),
]  # fmt: skip


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "argument"), SPREAD)
def test_small_arguments_may_have_any_strides(name, argument):
    made = CALLS[name]
    place = SIGNATURES[made.op].positional.index(argument)
    given = list(made.args)
    given[place] = spread(given[place])
    assert not given[place].is_contiguous()
    wanted, got = (getattr(backend, made.op)(parse(made.op, *args, **made.kwargs)) for args in (made.args, given))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("empty", ["experts", "choices"])
def test_nothing_to_select_is_zero(empty):
    arguments, _ = case()
    if empty == "experts":
        arguments[1], arguments[2] = arguments[1][:0], arguments[2][:0]
    else:
        arguments[3], arguments[4] = arguments[3][:, :0], arguments[4][:, :0]
    assert not moe_ops.fused_experts(*arguments, backend="triton").any()


@every_path
@pytest.mark.parametrize("ids", ["all_to_one", "none_held", "one_token"])
def test_fused_experts_with_extreme_routing(plan, ids):
    torch.manual_seed(3)
    arguments, options = case(T=1 if ids == "one_token" else 7)
    if ids == "all_to_one":
        arguments[4] = torch.full((7, 3), 4, dtype=torch.int32)
    if ids == "none_held":
        arguments[4] = torch.full((7, 3), -1, dtype=torch.int32)
    got, want = run(plan, arguments, options)
    if ids == "none_held":
        assert torch.equal(got, torch.zeros_like(got))
    else:
        assert_rounded(got, want)


@every_path
def test_no_tokens(plan):
    arguments, options = case(T=0)
    assert run(plan, arguments, options)[0].shape == (0, H)


@every_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_at_least_as_accurate_as_rounding_every_stage(plan, dtype):
    torch.manual_seed(4)
    arguments, options = case(T=16, dtype=dtype)
    got, want = run(plan, arguments, options)
    x, w1, w2, weights, ids = arguments
    staged = torch.zeros(16, 3, H, dtype=dtype)
    for t in range(16):
        for k in range(3):
            e = int(ids[t, k])
            if 0 <= e < E:
                gate, up = (w1[e].float() @ x[t].float()).to(dtype).chunk(2)
                h = torch.nn.functional.silu(gate) * up
                staged[t, k] = (w2[e].float() @ h.float()).to(dtype) * weights[t, k].to(dtype)
    error = (got.double() - want).norm()
    staged_error = (staged.sum(1).double() - want).norm()
    assert error <= staged_error, f"{error:.2e} > {staged_error:.2e}"


@every_path
def test_transposed_weights(plan):
    torch.manual_seed(5)
    arguments, options = case()
    for i in (1, 2):
        arguments[i] = arguments[i].transpose(1, 2).contiguous().transpose(1, 2)
    assert_rounded(*run(plan, arguments, options))


@pytest.mark.parametrize("stored", ["rows", "columns", "columns of the second"])
def test_only_contiguous_rows_are_streamed(stored, monkeypatch):
    """Weights [E, K, N] take the products at a few tokens, too: rows in pieces are read at a fifth of the rate."""
    torch.manual_seed(5)
    arguments, options = case(T=1)
    for i in {"rows": (), "columns": (1, 2), "columns of the second": (2,)}[stored]:
        arguments[i] = arguments[i].transpose(1, 2).contiguous().transpose(1, 2)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["small"])
    ran, experts = [], small.small_experts
    monkeypatch.setattr(small, "small_experts", lambda *a, **named: ran.append(1) or experts(*a, **named))
    assert_rounded(*run("small", arguments, options))
    assert bool(ran) == (stored == "rows")


def test_batched_overflow_drops_the_same_pairs_as_the_reference(monkeypatch):
    torch.manual_seed(6)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["batched"])
    arguments, options = case(T=12)
    options |= {"format": "batched", "capacity": 3}
    assert_rounded(moe_ops.fused_experts(*arguments, backend="triton", **options), gold(arguments, options))


FP8_FORMS = {
    "small": triton_plans.plan("small", FP8_SMALL, FP8_SMALL._replace(block_n=128)),
    "grouped": triton_plans.plan("grouped", FP8_TILE, FP8_TILE._replace(block_n=64)),
    "batched": triton_plans.plan("batched", FP8_TILE, FP8_TILE._replace(block_n=64)),
}


@pytest.mark.parametrize("form", FP8_FORMS)
def test_fp8_block128(form, monkeypatch):
    torch.manual_seed(7)
    scheme, T, hidden, inter = SCHEMES["fp8_block128"], 5, 256, 192
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: FP8_FORMS[form])
    x = torch.randn(T, hidden, dtype=torch.bfloat16)
    w1, s1 = scheme.quantize(torch.randn(E, 2 * inter, hidden) * 0.1)
    w2, s2 = scheme.quantize(torch.randn(E, hidden, inter) * 0.1)
    ids = torch.rand(T, E).topk(2, dim=1).indices.int()
    tensors = {"hidden_states": x, "gate_up_proj": w1, "down_proj": w2, "topk_weights": torch.rand(T, 2)}
    tensors |= {"topk_ids": ids, "gate_up_scales": s1, "down_scales": s2}
    layer = Layer(tensors, {"scheme": "fp8_block128", "format": "batched" if form == "batched" else "grouped"})
    got = moe_ops.fused_experts(**layer.tensors, **layer.options, backend="triton")
    assert_rounded(got, dense_formula(layer.float64()))


@pytest.mark.parametrize("stored", [False, True], ids=["tokens", "stored_tokens"])
def test_quantised_rows_are_copied_for_descriptors_and_gathered_by_threads(stored, monkeypatch):
    """To the same numbers."""
    torch.manual_seed(15)
    copied, scatter, results = [], permute.scatter_rows, []
    monkeypatch.setattr(permute, "scatter_rows", lambda *a, **named: copied.append(1) or scatter(*a, **named))
    form = VARIANTS["fp8_rows" if stored else "fp8"].build()
    for a_tma in (True, False):
        plan = triton_plans.plan("grouped", FP8_TILE._replace(a_tma=a_tma), FP8_TILE._replace(block_n=64))
        monkeypatch.setattr(triton_plans, "plan_for", lambda *_, plan=plan: plan)
        results.append(moe_ops.fused_experts(**form.tensors, **form.options, backend="triton"))
        assert len(copied) == (2 if stored else 1)
    assert torch.equal(*results) and results[0].any()


@pytest.mark.parametrize(
    ("top_k", "hidden", "inter", "glu"),
    [(5, 480, 176, "concat"), (5, 480, 176, "none"), (2, 1152, 176, "concat"), (1, 1100, 144, "interleaved")],
    ids=str,
)  # fmt: skip
def test_fp8_of_few_tokens_at_sizes_that_fill_no_block(top_k, hidden, inter, glu, monkeypatch):
    """Router logits to output in the small kernels, with the tiles that plans have for them: scale groups that run on
    from the gate into the up half, groups and blocks that no size fills.
    """
    torch.manual_seed(14)
    key = plans.LayerKey("fp8_block128", "grouped", 8, top_k, hidden, inter, glu != "none")
    tokens = 1 if top_k > 1 else 2
    small_plan = triton_plans.plan("small", *triton_plans.small_tiles(key, tokens))
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: small_plan)
    ran, experts = [], small.small_experts
    monkeypatch.setattr(small, "small_experts", lambda *a, **named: ran.append(1) or experts(*a, **named))
    scheme = SCHEMES["fp8_block128"]
    w1, s1 = scheme.quantize(torch.randn(8, (1 if glu == "none" else 2) * inter, hidden) * hidden**-0.5)
    w2, s2 = scheme.quantize(torch.randn(8, hidden, inter) * inter**-0.5)
    x, logits = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, 8)
    options = {"scheme": "fp8_block128", "gate_up_scales": s1, "down_scales": s2, "top_k": top_k}
    options |= {"glu_layout": None, "activation": "relu2"} if glu == "none" else {"glu_layout": glu}
    got, want = (moe_ops.fused_moe(x, logits, w1, w2, backend=name, **options) for name in ("triton", "reference"))
    # A sum in another order may round an element to its other neighbour, but hardly any.
    assert ran and norm_error(got, want.double()) < 1.5e-3


FORMS = ["separate", "separate_bias", "separate_transposed", "separate_batched", "fp8_separate", "fp8_halves",
         "fp8_halves_4d", "fp8_bf16_scales", "fp8_e8m0_scales", "fp8_rows", "fp8_rows_batched"]  # fmt: skip


# The small kernels have no descriptors: there "descriptors" only turns the order of halves that lie apart.
WAYS = [
    (name, path, loads)
    for name in FORMS
    for path in ("small", "grouped")
    for loads in ("pointers", "descriptors")
    if path == "grouped" or loads == "pointers" or VARIANTS[name].separate
]


@pytest.mark.parametrize(("name", "path", "loads"), WAYS, ids=lambda value: value)
def test_every_form_of_a_weight(name, path, loads, monkeypatch):
    """Halves in tensors of their own, before or behind one another; scales in every spelling; rows quantised before."""
    layer = VARIANTS[name].build()
    tma = loads == "descriptors"
    if path == "small":
        tiles = FP8_FORMS["small"].configs
    else:
        tile = (FP8_TILE if name.startswith("fp8") else TILE)._replace(a_tma=tma, w_tma=tma)
        path, tiles = "batched" if layer.options.get("format") == "batched" else path, (tile, tile)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: triton_plans.plan(path, *tiles))
    t = layer.tensors
    if t["up_proj"] is not None and tma:
        t["gate_up_proj"] = t["gate_up_proj"].clone(memory_format=torch.preserve_format)  # may change which is lower
    got = moe_ops.fused_experts(**t, **layer.options, backend="triton")
    assert got.dtype == layer.out_dtype
    assert_accurate(got, dense_formula(layer.float64()), plain_result(layer))


HALVES = {
    "apart": lambda both: (both.flatten(0, 1)[:E], both.flatten(0, 1)[E:]),
    "stacked": lambda both: both.view(E, 2 * I, H).chunk(2, dim=1),
    "in_turn": lambda both: (both.view(E, 2 * I, H)[:, ::2], both.view(E, 2 * I, H)[:, 1::2]),
}


@pytest.mark.parametrize("loads", ["pointers", "descriptors"])
@pytest.mark.parametrize("name", HALVES)
def test_the_up_half_may_be_the_lower_one(name, loads, monkeypatch):
    """In memory of its own, in front of the gate, or in turn with it."""
    tma = loads == "descriptors"
    tile = TILE._replace(a_tma=tma, w_tma=tma)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: triton_plans.plan("grouped", tile, tile))
    torch.manual_seed(3)
    x, down, weights = torch.randn(5, H), torch.randn(E, H, I) * 0.1, torch.rand(5, 2)
    ids = torch.rand(5, E).topk(2, dim=1).indices.int()
    one, other = HALVES[name](torch.randn(2, E, I, H) * 0.1)
    for gate, up in ((one, other), (other, one)):
        got = moe_ops.fused_experts(x, gate, down, weights, ids, up_proj=up, backend="triton")
        assert_rounded(got, gold([x, torch.cat((gate, up), dim=1), down, weights, ids], {}))


def stage(op: str, *args: Any, **options: Any) -> Any:
    return getattr(backend, op)(parse(op, *args, **options))


@pytest.mark.parametrize("name", ["grouped", "batched"])
def test_stage_operators_chain_to_the_whole(name):
    torch.manual_seed(8)
    (x, w1, w2, weights, ids), _ = case()
    want = gold([x, w1, w2, weights, ids], {})
    if name == "grouped":
        rows, offsets, pair_to_row = stage("moe_permute", x, ids, num_experts=E)
        h, _ = stage("grouped_mm_glu", rows, w1, offsets, [])
        out = stage("moe_unpermute", stage("grouped_mm", h, w2, offsets, []), pair_to_row, weights)
    else:
        batch, counts, slots = stage("batched_dispatch", x, ids, num_experts=E, capacity=7)
        h, _ = stage("batched_mm_glu", batch, w1, counts, [])
        out = stage("batched_combine", stage("batched_mm", h, w2, counts, []), slots, weights)
    assert_rounded(out, want)


@pytest.mark.parametrize("few", [True, False], ids=["one_kernel", "two_kernels"])
def test_fused_moe_equals_topk_then_experts(few, monkeypatch):
    torch.manual_seed(9)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["grouped"])
    monkeypatch.setattr(topk, "is_few", lambda *_: few)
    (x, w1, w2, _, _), _ = case()
    logits = torch.randn(7, E)
    got = moe_ops.fused_moe(x, logits, w1, w2, top_k=2, backend="triton")
    weights, ids = route_pairs(logits.double(), top_k=2)
    assert_rounded(got, gold([x, w1, w2, weights, ids], {}))


@every_path
def test_few_tokens_with_the_weight_on_their_input(plan):
    """The kernel that routes a few tokens whole has no place for the weight before the experts."""
    torch.manual_seed(12)
    (x, w1, w2, _, _), _ = case(T=3)
    logits = torch.randn(3, E)
    assert topk.is_few(3, 2, E)
    options = {"weight_on_input": True, "format": "batched" if plan == "batched" else "grouped"}
    got = moe_ops.fused_moe(x, logits, w1, w2, top_k=2, backend="triton", **options)
    weights, ids = route_pairs(logits.double(), top_k=2)
    before, after = (gold([x, w1, w2, weights, ids], {"weight_on_input": value}) for value in (True, False))
    assert_rounded(got, before)
    assert norm_error(after, before) > 0.1


@pytest.mark.parametrize("capacity", [3, 4, 5])
def test_capacity_one_short_exactly_full_and_with_room(capacity, monkeypatch):
    torch.manual_seed(13)
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["batched"])
    arguments, _ = case(T=4)
    arguments[4] = torch.full((4, 3), -1, dtype=torch.int32)
    arguments[4][:, 1] = 2  # four pairs of one expert
    options = {"format": "batched", "capacity": capacity}
    got = moe_ops.fused_experts(*arguments, backend="triton", **options)
    assert_rounded(got, gold(arguments, options))
    assert got.any(1).tolist() == [True, True, True, capacity > 3]


@pytest.mark.parametrize("tokens", [1, 2])
def test_fused_moe_by_the_cheapest_plans(tokens):
    torch.manual_seed(12)
    (x, w1, w2, _, _), _ = case()
    logits = torch.randn(tokens, E)
    got = moe_ops.fused_moe(x[:tokens], logits, w1, w2, top_k=2, backend="triton")
    weights, ids = route_pairs(logits.double(), top_k=2)
    assert_rounded(got, gold([x[:tokens], w1, w2, weights, ids], {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wgrad_of_a_grouped_mm(dtype):
    torch.manual_seed(10)
    offsets = torch.tensor([3, 3, 80, 81, 95], dtype=torch.int32)
    grad, rows = torch.randn(100, 72).to(dtype), torch.randn(100, 40).to(dtype)
    grad[95:], rows[95:] = float("nan"), float("nan")
    want = reference.grouped_wgrad(parse("grouped_wgrad", grad[:95].double(), rows[:95].double(), offsets))
    assert_rounded(backend.grouped_wgrad(parse("grouped_wgrad", grad, rows, offsets)), want)


def test_an_explicit_request_never_falls_back():
    arguments, _ = case(dtype=torch.float64)
    listed = ", ".join(sorted(backend.SERVED_SCHEMES))
    with pytest.raises(ValueError, match=f"triton serves the schemes {listed}, got fp64"):
        moe_ops.fused_experts(*arguments, backend="triton")


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize(
    "scheme", ["bf16", "fp32", "fp8_block128", "fp8_channel", "int8_channel", "mxfp4_a8", "w4a8_fp8"]
)
def test_there_are_tiles_for_every_size(scheme, format, gated):
    """Whole scale groups wherever there are enough columns; and no tile that a Hopper could not hold."""
    for tokens in (1, 2, 16, 256, 4096, 65536):
        for sm in (80, 90, 100):
            plan = triton_plans.cheapest(plans.LayerKey(scheme, format, 64, 4, 2048, 1024, gated), tokens, "a GPU", sm)
            if plan.sequence == "small":
                continue
            element = SCHEMES[scheme].weight_dtype.itemsize
            for tile in plan.configs:
                assert (tile.block_m + tile.block_n) * tile.block_k * element * tile.num_stages < 227 * 1024
                assert sm >= 90 or not (tile.a_tma or tile.w_tma)
            if scheme.startswith("fp8") and tokens >= 256:
                assert plan.configs[0].block_n == (256 if gated else 128)


PASSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_on_input": {"weight_on_input": True},
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_of_a_long_batch_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    """Tokens in three passes, the last one shorter: the bits of one pass."""
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: PLANS["grouped"])
    arguments, options = case(14, dtype=torch.bfloat16, **PASSES[name])
    whole = moe_ops.fused_experts(*arguments, backend="triton", **options)
    monkeypatch.setattr(layer, "tokens_per_pass", lambda *_: 6)
    assert torch.equal(moe_ops.fused_experts(*arguments, backend="triton", **options), whole)


@pytest.mark.parametrize("stored", [False, True], ids=["tokens", "stored_tokens"])
def test_passes_of_a_long_fp8_batch_are_the_whole(stored: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        triton_plans, "plan_for", lambda *_: triton_plans.plan("grouped", FP8_TILE, FP8_TILE._replace(block_n=128))
    )
    arguments, options = case(14, dtype=torch.bfloat16)
    scheme = SCHEMES["fp8_block128"]
    for place, name in ((1, "gate_up_scales"), (2, "down_scales")):
        arguments[place], options[name] = scheme.quantize(arguments[place])
    if stored:
        arguments[0], (options["hidden_states_scale"],) = scheme.rows.quantize(arguments[0])
    whole = moe_ops.fused_experts(*arguments, backend="triton", scheme=scheme.name, **options)
    monkeypatch.setattr(layer, "tokens_per_pass", lambda *_: 6)
    assert torch.equal(moe_ops.fused_experts(*arguments, backend="triton", scheme=scheme.name, **options), whole)
