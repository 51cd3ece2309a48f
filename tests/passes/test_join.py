"""Chains of our own operators become the larger operator, and only when nothing between them is seen by anyone else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from compile_passes.builder import arguments
from compile_passes.join import join
from tests.passes.blocks import E, H, I, K, capture, weights

C = 8


def grouped_stages(x, gate, w1, w2, **glu):
    topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
    rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
    h, _ = torch.ops.moe_ops.grouped_mm_glu(rows, w1, offsets, **glu)
    return moe_ops.moe_unpermute(torch.ops.moe_ops.grouped_mm(h, w2, offsets), places, topk_weights)


def batched_stages(x, gate, w1, w2):
    topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
    batch, counts, slots = moe_ops.batched_dispatch(x, ids, num_experts=E, capacity=C)
    h, _ = torch.ops.moe_ops.batched_mm_glu(batch, w1, counts)
    return moe_ops.batched_combine(torch.ops.moe_ops.batched_mm(h, w2, counts), slots, topk_weights)


def operators(graph):
    return [str(node.target) for node in graph.nodes if str(node.target).startswith("moe_ops.")]


def options(node):
    """The keyword arguments of an operator's call that are not at their defaults."""
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    return {name: value for name, value in node.kwargs.items() if defaults.get(name, ...) != value}


def joined(function, **inputs):
    gm = capture(function, **(inputs or weights()))
    count = join(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm, count


@pytest.mark.parametrize(
    ("stages", "keywords"),
    [(grouped_stages, {"top_k": K}), (batched_stages, {"top_k": K, "format": "batched", "capacity": C})],
    ids=["grouped", "batched"],
)
def test_users_stages_become_fused_moe(stages, keywords):
    inputs = weights(dtype=torch.float32)
    gm, count = joined(stages, **inputs)
    assert count == 2 and operators(gm.graph) == ["moe_ops.fused_moe.default"]
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe_ops.fused_moe.default)
    assert options(node) == keywords
    (output,) = gm(
        *(inputs[n.target.removeprefix("L_").removesuffix("_")] for n in gm.graph.nodes if n.op == "placeholder")
    )
    torch.testing.assert_close(output, stages(**inputs))


def test_options_of_the_products_are_kept():
    gm, _ = joined(lambda **inputs: grouped_stages(**inputs, activation="gelu", glu_layout="interleaved"))
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe_ops.fused_moe.default)
    assert options(node) == {"top_k": K, "activation": "gelu", "glu_layout": "interleaved"}


def test_foreign_ids_give_fused_experts():
    def run(x, ids, topk_weights, w1, w2):
        rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
        h, _ = torch.ops.moe_ops.grouped_mm_glu(rows, w1, offsets)
        return moe_ops.moe_unpermute(torch.ops.moe_ops.grouped_mm(h, w2, offsets), places, topk_weights)

    inputs = weights()
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    gm, count = joined(
        run, x=x, ids=torch.randint(-1, E, (len(x), K)), topk_weights=torch.rand(len(x), K), w1=w1, w2=w2
    )
    assert count == 1 and operators(gm.graph) == ["moe_ops.fused_experts.default"]


def quantised(x, ids, topk_weights, w1, s1, w2, s2):
    rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
    q, scale = moe_ops.quantize_rows(rows, scheme="fp8_block128")
    h, h_scale = torch.ops.moe_ops.grouped_mm_glu(
        q, w1, offsets, rows_scale=scale, weight_scales=[s1], quantize_output=True, scheme="fp8_block128"
    )
    out = torch.ops.moe_ops.grouped_mm(
        h, w2, offsets, rows_scale=h_scale, weight_scales=[s2], out_dtype=x.dtype, scheme="fp8_block128"
    )
    return moe_ops.moe_unpermute(out, places, topk_weights)


def quantised_inputs():
    (w1, s1), (w2, s2) = (moe_ops.quantize_weight(torch.randn(E, n, 128), scheme="fp8_block128") for n in (256, 128))
    return dict(x=torch.randn(6, 128).bfloat16(), ids=torch.randint(0, E, (6, K)), topk_weights=torch.rand(6, K),
                w1=w1, s1=s1, w2=w2, s2=s2)  # fmt: skip


def test_quantised_stages():
    gm, count = joined(quantised, **quantised_inputs())
    assert count == 1
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe_ops.fused_experts.default)
    assert options(node) == {"scheme": "fp8_block128"}


@pytest.mark.parametrize("seen", ["ids", "rows", "h"])
def test_a_value_that_is_seen_stays(seen):
    def run(x, gate, w1, w2):
        topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
        rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
        h, _ = torch.ops.moe_ops.grouped_mm_glu(rows, w1, offsets)
        out = moe_ops.moe_unpermute(torch.ops.moe_ops.grouped_mm(h, w2, offsets), places, topk_weights)
        return out, {"ids": ids, "rows": rows, "h": h}[seen]

    gm, count = joined(run)
    assert count == (1 if seen == "ids" else 0)
    assert "moe_ops.fused_moe.default" not in operators(gm.graph)


def test_an_input_overwritten_in_between_stays():
    def run(x, gate, w1, w2):
        logits = F.linear(x, gate)
        topk_weights, ids = moe_ops.fused_topk(logits, top_k=K)
        logits.mul_(0.0)
        return moe_ops.fused_experts(x, w1, w2, topk_weights, ids), logits

    assert joined(run)[1] == 0


def test_other_dtype_than_the_tokens_stays():
    def run(x, gate, w1, w2):
        topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
        rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
        h, _ = torch.ops.moe_ops.grouped_mm_glu(rows, w1, offsets)
        wide = torch.ops.moe_ops.grouped_mm(h, w2, offsets, out_dtype=torch.float32)
        return moe_ops.moe_unpermute(wide, places, topk_weights)

    assert joined(run)[1] == 0


def test_graph_without_our_operators_is_left_alone():
    assert joined(lambda x, w: F.silu(x) @ w, x=torch.randn(2, H), w=torch.randn(H, I))[1] == 0


def stages_with(change):
    """The grouped stages, each value as ``change`` (name, value, what a second dispatch made) returns it."""

    def run(x, gate, w1, w2):
        topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
        rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
        other = moe_ops.moe_permute(x, ids.flip(0), num_experts=E)
        h, _ = torch.ops.moe_ops.grouped_mm_glu(change("rows", rows, other), w1, change("first", offsets, other))
        out = torch.ops.moe_ops.grouped_mm(change("h", h, other), w2, change("second", offsets, other))
        return moe_ops.moe_unpermute(change("out", out, other), change("places", places, other), topk_weights)

    return run


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("rows", lambda value, other: value * 2),
        ("rows", lambda value, other: other[0]),
        ("first", lambda value, other: other[1]),
        ("first", lambda value, other: value + 0),
        ("h", lambda value, other: value * 2),
        ("second", lambda value, other: other[1]),
        ("out", lambda value, other: value * 2),
        ("places", lambda value, other: other[2]),
    ],
    ids=["rows_changed", "rows_of_another_dispatch", "first_offsets_of_another_dispatch", "first_offsets_copied",
         "h_changed", "second_offsets_of_another_dispatch", "out_changed", "places_of_another_dispatch"],
)  # fmt: skip
def test_stages_that_do_not_belong_together_stay(what, value):
    gm, count = joined(stages_with(lambda name, one, other: value(one, other) if name == what else one))
    assert count == 0 and "moe_ops.moe_unpermute" in operators(gm.graph)
    assert joined(stages_with(lambda name, one, other: one))[1] == 1


def test_weights_and_ids_of_two_routers_stay():
    def run(x, gate, w1, w2):
        topk_weights, _ = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
        _, ids = moe_ops.fused_topk(F.linear(x, gate) * 2, top_k=K)
        return moe_ops.fused_experts(x, w1, w2, topk_weights, ids)

    assert joined(run)[1] == 0


def test_ids_taken_for_weights_stay():
    def run(x, gate, w1, w2):
        topk_weights, ids = moe_ops.fused_topk(F.linear(x, gate), top_k=K)
        return moe_ops.fused_experts(x, w1, w2, ids.float(), ids), topk_weights

    assert joined(run)[1] == 0


def test_separate_halves_are_joined():
    def run(x, ids, topk_weights, w1, w3, w2):
        rows, offsets, places = moe_ops.moe_permute(x, ids, num_experts=E)
        h = moe_ops.grouped_mm_glu(rows, w1, offsets, up_weight=w3)
        return moe_ops.moe_unpermute(moe_ops.grouped_mm(h, w2, offsets), places, topk_weights)

    inputs = dict(x=torch.randn(6, 16), ids=torch.randint(0, E, (6, K)), topk_weights=torch.rand(6, K),
                  w1=torch.randn(E, 12, 16), w3=torch.randn(E, 12, 16), w2=torch.randn(E, 16, 12))  # fmt: skip
    gm, count = joined(run, **inputs)
    assert count == 1 and operators(gm.graph) == ["moe_ops.fused_experts.default"]
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe_ops.fused_experts.default)
    assert "w3" in str(arguments(node)["up_proj"]) and "w1" in str(arguments(node)["gate_up_proj"])


@pytest.mark.parametrize("what", ["added", "choice", "neither"])
def test_what_the_whole_layer_has_no_argument_for_stays(what):
    def run(x, ids, topk_weights, w1, w2):
        options = {"slot_order": "choice"} if what == "choice" else {}
        batch, counts, slots = moe_ops.batched_dispatch(x, ids, num_experts=E, capacity=2, **options)
        h = moe_ops.batched_mm_glu(batch, w1, counts)
        added = {"added": x} if what == "added" else {}
        return moe_ops.batched_combine(moe_ops.batched_mm(h, w2, counts), slots, topk_weights, **added)

    inputs = dict(x=torch.randn(6, 16), ids=torch.randint(0, E, (6, K)), topk_weights=torch.rand(6, K),
                  w1=torch.randn(E, 24, 16), w2=torch.randn(E, 16, 12))  # fmt: skip
    assert joined(run, **inputs)[1] == (what == "neither")


@pytest.mark.parametrize("target", ["quantize_rows", "grouped_mm_glu", "grouped_mm"])
def test_stages_of_two_schemes_stay(target):
    """No two schemes fit one graph yet: the graph is changed after it was captured."""
    graph = capture(quantised, **quantised_inputs()).graph
    (node,) = (node for node in graph.nodes if str(node.target) == f"moe_ops.{target}")
    place = [a.name for a in node.target.default._schema.arguments].index("scheme")
    if place < len(node.args):
        node.args = (*node.args[:place], "another", *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, "scheme": "another"}
    assert join(graph) == 0
