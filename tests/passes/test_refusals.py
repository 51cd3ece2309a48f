"""Every reason to leave a block as it is: one test each, with the node's line, a reason and a cure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_passes import compat
from compile_passes.decide import decide
from compile_passes.match import Refusal
from compile_passes.passes import _one_line, fuse_blocks, needs_gradient
from compile_passes.reading import Reading
from compile_passes.recognise import recognise
from tests.passes.blocks import E, H, I, K, T, batched, block, capture, found, refusal, weights


def says(row: Refusal, words: str) -> None:
    assert words in row.reason, row.reason
    assert row.cure
    assert __file__.rsplit("/", 1)[-1] in row.location or "blocks.py" in row.location, row.location


def test_interior_value_escapes():
    def run(x, gate, w1, w2):
        seen = []
        out = block(probe=lambda _, value: seen.append(value))(x, gate, w1, w2)
        return out, seen[0]

    says(refusal(run), "is also used by output")


def test_unknown_activation():
    says(refusal(block(activation=lambda h: torch.tanh(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])), "Unknown activation")


def test_quick_gelu_is_no_silu():
    def quick(h):
        gate, up = h.chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * up

    says(refusal(block(activation=quick)), "match no known activation")


def test_post_expert_norm():
    says(refusal(block(after=lambda rows: F.rms_norm(rows, (H,)))), "normalisation follows")


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


def test_three_products_before_the_last():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        ordered, perm = torch.sort(flat)
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        rows = x[perm // K]
        gate = F.grouped_mm(rows, w1[:, :I].transpose(1, 2), offs=offsets)
        up = F.grouped_mm(rows, w1[:, I:].transpose(1, 2), offs=offsets)
        more = F.grouped_mm(rows, w1[:, I:].transpose(1, 2) * 2, offs=offsets)
        out = F.grouped_mm(F.silu(gate) * up * more, w2.transpose(1, 2), offs=offsets)
        out = out * topk_weights.reshape(-1)[perm].unsqueeze(-1)
        return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

    says(refusal(block(run)), "More than two factors")


def test_gate_and_up_of_other_rows():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        ordered, perm = torch.sort(flat)
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        gate = F.grouped_mm(x[perm // K], w1[:, :I].transpose(1, 2), offs=offsets)
        up = F.grouped_mm(x.flip(0)[perm // K], w1[:, I:].transpose(1, 2), offs=offsets)
        out = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offsets)
        out = out * topk_weights.reshape(-1)[perm].unsqueeze(-1)
        return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

    says(refusal(block(run)), "of the same rows")


def test_other_top_k_than_the_ids():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)[: 2 * T - 4]
        h = torch.bmm(w1[flat], x[2:].repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out.view(-1, 2, H)[:, 0] * topk_weights[2:, :1]).to(x.dtype)

    says(refusal(block(run)), "no known way to combine")


def test_unweighted_sum():
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return out.view(-1, K, H).sum(1)

    says(refusal(block(run)), "without routing weights")


def test_single_product():
    def run(x, gate, w1, w2):
        flat = F.linear(x, gate).topk(K)[1].reshape(-1)
        return torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)

    says(refusal(run), "not followed or preceded")


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


def test_operators_refuse_what_they_cannot_run():
    """The recognisers' match passes the operators' own rule; what the rule says no to becomes a refusal."""
    (row,) = found(block(batched))
    wrong = replace(row, body=replace(row.body, limit=-1.0, activation="silu_clamp"))
    decided = decide(wrong)
    assert isinstance(decided, Refusal)
    assert "limit must be > 0" in decided.reason and decided.cure
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
