"""Every reason to leave a block as it is: one test each, with the node's line, a reason and a cure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import moe_ops
from compile_passes import compat
from compile_passes.decide import decide
from compile_passes.match import Refusal, source
from compile_passes.passes import _one_line, fuse_blocks, needs_gradient
from compile_passes.reading import Reading
from compile_passes.recognise import recognise
from tests.passes.blocks import (
    E,
    H,
    I,
    K,
    T,
    batched,
    block,
    capture,
    found,
    match,
    refusal,
    silu_glu,
    softmax_router,
    weights,
)  # fmt: skip


def says(row: Refusal, words: str) -> None:
    assert words in row.reason, row.reason
    assert row.cure
    assert __file__.rsplit("/", 1)[-1] in row.location or "blocks.py" in row.location, row.location


def test_interior_value_escapes():
    def run(x, gate, w1, w2):
        seen = []
        out = block(probe=lambda _, value: seen.append(value))(x, gate, w1, w2)
        return out, seen[0]

    says(refusal(run), "is also used by what the captured code returns")


def test_unknown_activation():
    says(refusal(block(activation=lambda h: torch.tanh(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])), "Unknown activation")


def test_rows_that_are_scaled_between_the_products():
    """By a number each, as routing weights are, which these are not."""
    found = refusal(block(activation=lambda h: silu_glu(h) * h.abs().amax(-1, keepdim=True)))
    says(found, "multiplied by a number for each of them")
    assert found.cure.startswith("Multiply them by topk_weights")


def test_sigmoid_of_the_up_half_is_no_silu():
    def crossed(h):
        gate, up = h.chunk(2, -1)
        return gate * torch.sigmoid(up) * gate

    says(refusal(block(activation=crossed)), "a bare sigmoid")


def clamped_before_the_halves(h):
    clamped = h.clamp(-1, 1)
    return silu_glu(clamped)


def activated_product(h):
    gate, up = h.chunk(2, -1)
    product = gate * up
    return F.silu(product)


def swish_of_a_tensor(h):
    gate, up = h.chunk(2, -1)
    scaled = h.new_full((), 1.5) * gate
    return gate * torch.sigmoid(scaled) * up


@pytest.mark.parametrize(
    ("activation", "made", "line"),
    [
        (clamped_before_the_halves, "clamp", "h.clamp(-1, 1)"),
        (activated_product, "mul", "gate * up"),
        (swish_of_a_tensor, "mul", "scaled = "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_changes_the_operand_of_an_activation_is_named(activation, made, line):
    """At its own line; how halves are taken is no cure of it, and another activation computes something else."""
    row = refusal(block(batched, activation=activation))
    says(row, f"but what {made} gives")
    assert line in source(row.node)
    assert "h.chunk(2" not in row.cure and "another function" in row.cure and "moe_ops.moe_permute" in row.cure


def by_slots(x, ids, topk_weights, w1, w2, *, rows=lambda x: x[:, None].expand(-1, K, -1), between=silu_glu,
             combine=lambda out, weights: (out * weights.unsqueeze(-1)).sum(1)):  # fmt: skip
    """Weights gathered for every token and slot."""
    h = torch.einsum("tkh,tknh->tkn", rows(x), w1[ids])
    return combine(torch.einsum("tki,tkhi->tkh", between(h), w2[ids]), topk_weights.to(x.dtype))


def test_experts_of_three_projections_are_one_refusal():
    def run(x, ids, topk_weights, w1, w2):
        middle = w2[:, :I]
        return by_slots(
            x,
            ids,
            topk_weights,
            w1,
            w2,
            between=lambda h: torch.einsum("tki,tkji->tkj", silu_glu(h), middle[ids]).relu(),
        )

    row = refusal(block(run))
    says(row, "more than two projections")
    assert "moe_ops.moe_permute" in row.cure


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"rows": lambda x: torch.stack([x, 2 * x], 1)}, "not tokens repeated top_k times"),
        ({"combine": lambda out, weights: (out * weights.unsqueeze(-1)).amax(1)}, "meets amax"),
        ({"combine": lambda out, weights: (out * weights.unsqueeze(-1)).flatten(1)}, "meets view"),
        ({"combine": lambda out, weights: ((out + 1) * weights.unsqueeze(-1)).sum(1)}, "meets add"),
    ],
    ids=["rows", "largest", "concatenated", "added"],
)
def test_a_cure_says_of_what_no_operator_computes_how_to_keep_it(other, words):
    row = refusal(block(by_slots, **other))
    says(row, words)
    assert "not fused" in row.cure and "To keep what is computed" in row.cure


def test_a_factor_that_no_routing_weight_can_take_over():
    """The second product adds a bias to its result, which the factor does not multiply."""

    def run(x, gate, w1, w2, b2):
        topk_weights, ids = softmax_router(x, gate)
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[flat], (2 * silu_glu(h)).unsqueeze(-1)).squeeze(-1) + b2[flat]
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    inputs = weights()
    says(refusal(run, **inputs, b2=inputs["w2"][:, :, 0]), "multiplied by 2.0, which the routing weights cannot")


def test_a_factor_beside_weights_on_the_input():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, dim=0) * topk_weights.to(x.dtype).reshape(-1, 1)
        h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(w2[flat], (2 * silu_glu(h)).unsqueeze(-1)).squeeze(-1).view(-1, K, H).sum(1)

    says(refusal(block(run)), "multiplied by 2.0, which the routing weights cannot")


def test_post_expert_norm_of_all_rows():
    says(refusal(block(after=lambda rows: rows * rows.pow(2).mean(0, True).rsqrt())), "normalisation follows")


def test_histogram_over_other_experts():
    says(refusal(block(highest=E + 1)), "8 bins from 0 to 9")


def test_counts_of_foreign_ids():
    says(refusal(block(count=lambda flat: flat.flip(0) * 1)), "counted by ids that cannot be proved")


def test_counts_of_clamped_ids():
    """Clamping before counting would give the last expert rows that the fused operator drops."""
    says(refusal(block(count=lambda flat: flat.clamp(max=E - 1))), "counted by ids that cannot be proved")


def test_weights_of_foreign_ids():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat.flip(0)], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    says(refusal(block(run)), "takes its weights by ids that cannot be proved")


def in_two_products(up_rows=lambda x: x, third=False, between=lambda gate, up, more: F.silu(gate) * up, before=False):
    """A sorted block whose gate and up are products of their own, perhaps with a third one beside them."""

    def run(x, ids, topk_weights, w1, w2):
        ordered, perm = torch.sort(ids.reshape(-1))
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        scores = topk_weights.reshape(-1)[perm].unsqueeze(-1)

        def rows(value):
            return (value[perm // K] * scores).to(x.dtype) if before else value[perm // K]

        gate = F.grouped_mm(rows(x), w1[:, :I].transpose(1, 2), offs=offsets)
        up = F.grouped_mm(rows(up_rows(x)), w1[:, I:].transpose(1, 2), offs=offsets)
        more = F.grouped_mm(rows(x), w1[:, I:].transpose(1, 2) * 2, offs=offsets) if third else None
        out = F.grouped_mm(between(gate, up, more), w2.transpose(1, 2), offs=offsets) * scores
        return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

    return block(run)


def test_gate_and_up_in_two_products():
    assert match(in_two_products()).up_half is not None


def test_three_products_before_the_last():
    says(refusal(in_two_products(third=True, between=lambda g, u, m: F.silu(g) * u * m)), "More than two factors")


def test_a_third_product_whose_numbers_nobody_reads():
    says(refusal(in_two_products(third=True, between=lambda g, u, m: F.silu(g) * u.type_as(m))), "More expert products")


def test_gate_and_up_of_other_rows():
    says(refusal(in_two_products(up_rows=lambda x: x.flip(0))), "of the same rows")


def test_weights_before_and_after_the_experts():
    says(refusal(in_two_products(before=True)), "experts' inputs and their results")


def test_a_bias_of_the_gate_alone():
    def run(x, gate, w1, w2, bias):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, 0).unsqueeze(-1)
        one = torch.bmm(w1[:, :I][flat], rows).squeeze(-1) + bias[flat]
        other = torch.bmm(w1[:, I:][flat], rows).squeeze(-1)
        out = torch.bmm(w2[flat], (F.silu(one) * other).unsqueeze(-1)).squeeze(-1)
        return (out * values.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    inputs = weights()
    graph = capture(run, **inputs, bias=inputs["w1"][:, :I, 0]).graph
    (row,) = fuse_blocks(graph).report.refused
    assert "only one has a bias" in row.reason


def test_weights_before_the_experts_in_another_dtype():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        rows = (x.repeat_interleave(K, dim=0) * topk_weights.reshape(-1, 1)).to(w1.dtype)
        h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        return out.view(-1, K, H).sum(1).to(x.dtype)

    def wide(x, gate, w1, w2):
        topk_weights, ids = softmax_router(x, gate)
        return run(x.float(), ids, topk_weights, w1, w2)

    assert match(block(run)).dispatch.weights is not None
    says(refusal(wide), "in another dtype than that of the experts")


#: Ways to count that raise on an id of no expert, or count it, which the operator leaves out.
RAISING = {
    "one_hot": lambda flat: F.one_hot(flat, E).sum(0),
    "whole_bins": lambda flat: torch.histc(flat.float(), bins=E, min=0, max=E),
    "scatter_add": lambda flat: torch.zeros(E, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat)),
    "index_add": lambda flat: torch.zeros(E).index_add(0, flat, torch.ones(flat.shape[0])),
    "index_put": lambda flat: torch.zeros(E).index_put((flat,), torch.ones(flat.shape[0]), accumulate=True),
}
LENIENT = {
    "histc": lambda flat: torch.histc(flat.float(), bins=E, min=0, max=E - 1),
    "equal": lambda flat: (flat[:, None] == torch.arange(E)).sum(0),
    "one_by_one": lambda flat: torch.stack([(flat == e).sum() for e in range(E)]),
}


def with_given_ids(count, tokens=T):
    """A sorted block whose ids come from outside: nobody knows whether they are ids of experts."""

    def run(x, topk_weights, ids, w1, w2):
        flat = ids.reshape(-1)
        perm = flat.argsort()
        offsets = count(flat).cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(silu_glu(F.grouped_mm(x[perm // K], w1.mT, offs=offsets)), w2.mT, offs=offsets)
        out = out * topk_weights.reshape(-1)[perm].unsqueeze(-1)
        return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

    made = weights()
    given = {"x": torch.randn(tokens, H).bfloat16(), "w1": made["w1"], "w2": made["w2"]}
    return run, {**given, "topk_weights": torch.rand(tokens, K), "ids": torch.rand(tokens, E).topk(K)[1]}


@pytest.mark.parametrize("name", RAISING)
def test_counts_that_raise_on_ids_nobody_proved(name):
    run, inputs = with_given_ids(RAISING[name])
    says(refusal(run, **inputs), "does not leave others out")


@pytest.mark.parametrize("name", LENIENT)
def test_counts_that_leave_ids_of_no_expert_out(name):
    run, inputs = with_given_ids(LENIENT[name])
    assert match(run, **inputs).dispatch.form == "grouped_mm"


def test_counts_in_a_dtype_that_cannot_hold_them():
    """bf16 counts to 256, one by one."""
    for tokens, fits in ((128, True), (129, False)):
        run, inputs = with_given_ids(
            lambda flat: (flat[:, None] == torch.arange(E)).to(torch.bfloat16).sum(0).float(), tokens
        )
        if fits:
            assert match(run, **inputs).dispatch.form == "grouped_mm"
        else:
            says(refusal(run, **inputs), "not a histogram")


def test_rows_of_any_origin_have_one_expert_each():
    """Gathered weights and rows that are nobody's copies: so many tokens with one expert; the sum stays outside."""

    def run(x, gate, w1, w2):
        values, ids = F.linear(x, gate).softmax(-1).topk(K)
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x[torch.arange(T * K) % T].unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        return (out * values.reshape(-1, 1)).view(-1, K, H).sum(1)

    assert match(run, **weights(dtype=torch.float32)).dispatch.top_k == 1


def test_rows_that_are_not_one_for_each_id():
    def run(x, gate, w1, w2):
        values, ids = F.linear(x, gate).softmax(-1).topk(K)
        h = torch.matmul(w1[ids], x.repeat(K, 1).view(T, K, H, 1)).squeeze(-1)
        out = torch.matmul(w2[ids], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        return (out * values.unsqueeze(-1)).sum(1)

    says(refusal(run, **weights(dtype=torch.float32)), "not tokens repeated top_k times")


def test_other_top_k_than_the_ids():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)[: 2 * T - 4]
        h = torch.bmm(w1[flat], x[2:].repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out.view(-1, 2, H)[:, 0] * topk_weights[2:, :1]).to(x.dtype)

    says(refusal(block(run)), "no known way to combine")


def test_unweighted_sum_behind_code_that_stays():
    """Weights in another order than the pairs' may be among that code."""

    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * out.pow(2).mean(-1, keepdim=True).rsqrt()).view(-1, K, H).sum(1)

    says(refusal(block(run)), "without routing weights")


def test_single_product():
    def run(x, gate, w1, w2):
        flat = F.linear(x, gate).topk(K)[1].reshape(-1)
        return torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)

    row = refusal(run)
    says(row, "no second one was found")
    assert "a loop over tokens" in row.cure


def test_a_second_product_that_sums_over_the_tokens_as_well():
    def run(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).sigmoid().topk(K)
        h = torch.einsum("th,tknh->tkn", x, w1[:, :I][ids]).relu() * topk_weights.unsqueeze(-1)
        return torch.einsum("tki,tkhi->kh", h, w2[ids])

    row = refusal(run)
    says(row, "one sum, over the width of the rows, for every pair")
    assert '"tki,tkhi->kh"' in row.reason


def test_sum_used_in_another_dtype():
    def kept_in_fp32(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    says(refusal(block(kept_in_fp32)), "another dtype")


def test_write_through_a_view():
    """The gate half is overwritten through the whole after it was split off."""

    def overwrite(h):
        gate, up = h.chunk(2, -1)
        h.mul_(2.0)
        return F.silu(gate) * up

    row = refusal(block(activation=overwrite))
    assert "overwrites memory" in row.reason or "used by" in row.reason
    assert row.cure


def test_input_overwritten_inside_the_block():
    def run(x, gate, w1, w2):
        x = x * 1
        return block(probe=lambda name, value: x.add_(1.0))(x, gate, w1, w2)

    says(refusal(run), "before the MoE block has finished")
    assert refusal(run).cure == "Use the out-of-place form of this operation, or move it after the block."


def test_an_input_that_is_kept_is_not_to_be_overwritten_later_either():
    def run(x, gate, w1, w2):
        x = x * 1
        result = block(batched)(x, gate, w1, w2)
        x.mul_(2)
        return result, x + 1

    trained = {name: value.requires_grad_() for name, value in weights(dtype=torch.float32).items()}
    (row,) = moe_ops.explain(run, **trained).refused
    assert "after the MoE block, which keeps it for the backward pass" in row.reason
    assert row.cure == "Use the out-of-place form of this operation."


def test_operators_refuse_what_they_cannot_run():
    """The recognisers' match passes the operators' own rule; what the rule says no to becomes a refusal."""
    (row,) = found(block(batched))
    wrong = replace(row, body=replace(row.body, limit=-1.0, activation="silu_clamp"))
    decided = decide(wrong)
    assert isinstance(decided, Refusal)
    assert "limit must be > 0" in decided.reason and "once the model has what this asks for" in decided.cure
    assert decided.node is row.down.anchor


def test_no_block_no_word():
    graph = capture(lambda x, w: F.linear(F.silu(x), w), torch.randn(3, 4), torch.randn(5, 4)).graph
    assert recognise(Reading(graph)) == []


def test_two_blocks_are_two_matches():
    def run(x, gate, w1, w2):
        once = block()(x, gate, w1, w2)
        return block(batched)(once, gate, w1, w2)

    rows = found(run)
    assert len(rows) == 2 and not any(isinstance(row, Refusal) for row in rows)
    assert rows[1].dispatch.hidden is rows[0].output


def test_halves_that_broadcast():
    """[R, 1, I] * [R, I] is [R, R, I]: every row's gate with every row's up half."""

    def crossed(h):
        gate, up = h.chunk(2, -1)
        return (F.silu(gate.unsqueeze(1)) * up).sum(0)

    def broadcast(h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate[:1]) * up

    for activation in (crossed, broadcast):
        rows = found(block(batched, activation=activation))
        assert all(isinstance(row, Refusal) for row in rows) and rows


def test_an_up_half_of_one_column_for_a_gate_of_two():
    inputs = weights(n=4)
    inputs["w2"] = inputs["w2"][:, :, :2].contiguous()
    assert found(block(batched, activation=lambda h: F.silu(h[:, ::2]) * h[:, 1::2]), **inputs)[0].body
    rows = found(block(batched, activation=lambda h: F.silu(h[:, ::2]) * h[:, 1:2:2]), **inputs)
    assert rows and all(isinstance(row, Refusal) for row in rows)


def test_two_activations():
    def doubled(h):
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * F.silu(up)

    says(refusal(block(activation=doubled)), "2 activations")


def test_the_node_that_cannot_combine_is_named():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return out.cumsum(0)

    says(refusal(block(run)), "meets cumsum")


def test_rows_that_leave_the_graph_are_named():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        return torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)

    says(refusal(block(run)), "meets the graph's output")


def test_a_gate_that_is_no_half_is_named():
    def shifted(h):
        return F.silu(h[..., 1 : I + 1]) * h[..., I:]

    says(refusal(block(activation=shifted)), "comes from getslice")


def test_grouped_ids_that_may_be_negative():
    """A negative id sorts first and is counted nowhere: every row would move to another expert."""

    def run(x, gate, w1, w2):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        return block(router=lambda *_: (values, ids - 1))(x, gate, w1, w2)

    says(refusal(run), "cannot be proved not to be negative")


def test_an_input_that_may_be_the_memory_of_another():
    """Without a check of the addresses in every call (fuse(), export) such a block stays; with one it is fused."""

    def run(x, gate, w1, w2, counter):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        counter.add_(1.0)
        return block(router=lambda *_: (values, ids))(x, gate, w1, w2)

    for checked, fused in ((False, 0), (True, 1)):
        graph = capture(run, **weights(), counter=torch.zeros(T, H, dtype=torch.bfloat16)).graph
        report = fuse_blocks(graph, checked).report
        assert len(report.fused) == fused and len(report.refused) == 1 - fused
        if not fused:
            assert "may be the memory of" in report.refused[0].reason and 'backend="moe_ops"' in report.refused[0].cure
            assert "grouped_mm" in str(report.refused[0].node.target), "the second product"


def test_a_grouped_product_of_two_matrices_is_no_expert():
    """[T, K] @ [K, N] in groups of the inner dimension: what the backward of a grouped product is."""

    def run(x, y, offsets):
        return F.silu(F.grouped_mm(x, y, offs=offsets)).sum()

    inputs = dict(x=torch.randn(H, 24).bfloat16(), y=torch.randn(24, H).bfloat16(),
                  offsets=torch.tensor([8, 16, 24], dtype=torch.int32))  # fmt: skip
    assert found(run, **inputs) == []


def test_integer_weights_are_no_routing_weights():
    def run(x, ids, topk_weights, w1, w2):
        return batched(x, ids, (topk_weights * 4).int(), w1, w2)

    says(refusal(block(run)), "meets mul")


@pytest.mark.parametrize("ahead_of_time", [False, True])
def test_nothing_needs_a_gradient_ahead_of_time(ahead_of_time, monkeypatch):
    graph = fx.Graph()
    node = graph.call_function(torch.neg, (graph.placeholder("x"),))
    node.meta["example_value"] = torch.zeros(3, requires_grad=True) * 1
    monkeypatch.setattr(compat, "is_ahead_of_time", lambda: ahead_of_time)
    assert needs_gradient([graph]) is not ahead_of_time


def test_an_error_is_told_in_one_line_without_a_full_stop():
    assert _one_line(ValueError("two\n  lines, and an end. ")) == "ValueError: two lines, and an end"
    assert len(_one_line(ValueError("x" * 1000))) == 300


def test_rows_put_at_places_of_a_buffer():
    def run(x, gate, w1, w2):
        scores, ids = F.linear(x, gate).softmax(-1).topk(K)
        flat, token = ids.flatten(), torch.arange(x.shape[0]).repeat_interleave(K)
        place = (F.one_hot(flat, E).cumsum(0) - 1).gather(1, flat[:, None])[:, 0]
        buffer = x.new_zeros(E, x.shape[0], H).index_put((flat, place), x[token])
        rows = torch.bmm(silu_glu(torch.bmm(buffer, w1.mT)), w2.mT)[flat, place]
        return torch.zeros_like(x).index_add(0, token, rows * scores.flatten()[:, None])

    row = refusal(run)
    says(row, "Rows are put at places of [experts, capacity, hidden], by `buffer = ")
    assert "moe_ops.batched_dispatch" in row.cure and "the id -1" in row.cure
