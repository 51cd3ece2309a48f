"""Expert tails: every spelling of activation, layout and combine is read as what it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.sorted_block import Steps, put_back
from compile_passes.match import Body, Refusal
from compile_passes.passes import FUSE, run
from compile_passes.patterns.experts import feeding_products, find_products
from compile_passes.reading import Reading
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
    grouped,
    match,
    refusal,
    silu_glu,
    weights,
)
from tests.passes.compare import assert_same, check


def halves(h):
    return h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]


def oai(h, alpha=1.702, limit=7.0):
    gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def oai_addcmul(h):
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=5.0), up.clamp(min=-5.0, max=5.0)
    glu = gate * torch.sigmoid(1.5 * gate)
    return torch.addcmul(glu, glu, up)


def in_fp32(h):
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(h.dtype)


def clamped(h):
    gate, up = torch.split(h, h.shape[-1] // 2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up.clamp(min=-10.0, max=10.0)


def sigmoid_times(h):
    gate, up = halves(h)
    return gate * torch.sigmoid(gate) * up


def gelu_tanh(h):
    return F.gelu(halves(h)[0], approximate="tanh") * halves(h)[1]


def relu_inplace(h):
    return F.relu(halves(h)[0].clone(), inplace=True) * halves(h)[1]


GATED = {
    "chunk": (lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], Body("silu", None, None, "concat")),
    "slices": (lambda h: F.silu(halves(h)[0]) * halves(h)[1], Body("silu", None, None, "concat")),
    "up_first_factor": (lambda h: halves(h)[1] * F.silu(halves(h)[0]), Body("silu", None, None, "concat")),
    "sigmoid_times": (sigmoid_times, Body("silu", None, None, "concat")),
    "interleaved": (lambda h: F.silu(h[:, ::2]) * h[:, 1::2], Body("silu", None, None, "interleaved")),
    "fp32": (in_fp32, Body("silu", None, None, "concat")),
    "gelu": (lambda h: F.gelu(halves(h)[0]) * halves(h)[1], Body("gelu", None, None, "concat")),
    "gelu_tanh": (gelu_tanh, Body("gelu_tanh", None, None, "concat")),
    "relu_inplace": (relu_inplace, Body("relu", None, None, "concat")),
    "swiglu_oai": (oai, Body("swiglu_oai", 1.702, 7.0, "interleaved")),
    "swiglu_oai_addcmul": (oai_addcmul, Body("swiglu_oai", 1.5, 5.0, "concat")),
    "silu_clamp": (clamped, Body("silu_clamp", None, 10.0, "concat")),
}  # fmt: skip
PLAIN = {
    "silu": (F.silu, Body("silu", None, None, "none")),
    "relu2_square": (lambda h: torch.square(F.relu(h)), Body("relu2", None, None, "none")),
    "relu2_pow": (lambda h: h.relu().pow(2), Body("relu2", None, None, "none")),
    "relu2_product": (lambda h: h.relu() * h.relu(), Body("relu2", None, None, "none")),
}


@pytest.mark.parametrize("form", [grouped, batched], ids=["grouped", "batched"])
@pytest.mark.parametrize("name", [*GATED, *PLAIN])
def test_activation(form, name):
    activation, body = {**GATED, **PLAIN}[name]
    inputs = weights(n=2 * I if name in GATED else I)
    assert match(block(form, activation=activation), **inputs).body == body


@pytest.mark.parametrize("combine", ["inverse", "argsort", "scatter", "index_add"])
def test_combine(combine):
    found = match(block(combine=combine))
    assert found.dispatch.form == "grouped_mm" and found.dispatch.top_k == K
    assert found.router.routing == "softmax" and found.router.renormalize


def test_roles_are_the_graphs_inputs():
    found = match(block(batched))
    assert (found.up.weight.node.target, found.down.weight.node.target) == ("L_w1_", "L_w2_")
    assert found.dispatch.hidden.target == "L_x_"
    assert not found.up.weight.transposed and found.up.bias is None


def test_transposed_weights():
    def run(x, gate, w1, w2):
        return block()(x, gate, w1.transpose(1, 2), w2.transpose(1, 2))

    inputs = weights()
    inputs.update(w1=inputs["w1"].transpose(1, 2).contiguous(), w2=inputs["w2"].transpose(1, 2).contiguous())
    found = match(run, **inputs)
    assert found.up.weight.transposed and found.down.weight.transposed


def sentinels(x, ids, topk_weights, w1, w2):
    """Rows of no expert, masked as transformers does when experts are spread over devices."""
    flat = ids.reshape(-1)
    ordered, perm = torch.sort(flat)
    rows = x[perm // K]
    offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    mask = (ordered >= E).unsqueeze(-1)
    ordered.clamp_(max=E - 1)
    rows.masked_fill_(mask, 0.0)
    h = F.grouped_mm(rows, w1.transpose(-2, -1), offs=offsets).masked_fill(mask, 0.0)
    gate, up = h.chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=offsets).masked_fill(mask, 0.0)
    weighted = out * topk_weights.reshape(-1)[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel())
    return weighted[inverse].view(T, K, H).sum(1).to(x.dtype)


def test_sentinel_masks_disappear():
    found = match(block(sentinels))
    assert len(found.up.masks) == 2 and found.router.routing == "softmax"


def test_clamped_ids_of_a_topk_are_the_ids():
    def run(x, ids, topk_weights, w1, w2):
        return batched(x, ids.reshape(-1).clamp(0, E - 1), topk_weights, w1, w2)

    assert match(block(run)).router.routing == "softmax"


def test_clamped_foreign_ids_stay_clamped():
    def run(x, ids, topk_weights, w1, w2):
        return batched(x, ids.clamp(0, E - 1), topk_weights, w1, w2)

    inputs = weights()
    inputs.pop("gate")
    found = match(run, **inputs, ids=torch.randint(0, E, (T, K)), topk_weights=torch.rand(T, K))
    assert found.dispatch.ids.target == "clamp"


def test_a_clamp_that_changes_ids_stays():
    def run(x, ids, topk_weights, w1, w2):
        return batched(x, ids.reshape(-1).clamp(1, E - 1), topk_weights, w1, w2)

    found = match(block(run))
    assert found.dispatch.ids.target == "clamp" and isinstance(found.router, Refusal)


def test_a_bias_of_clamped_ids_is_a_bias_where_the_clamp_changes_none():
    def run(low):
        def inner(x, ids, topk_weights, w1, w2):
            flat = ids.reshape(-1)
            ordered, perm = torch.sort(flat)
            offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
            h = F.grouped_mm(x[perm // K], w1.mT, offs=offsets) + w1[:, :, 0][ordered.clamp(low, E - 1)]
            gate, up = h.chunk(2, -1)
            out = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=offsets) * topk_weights.reshape(-1)[perm].unsqueeze(-1)
            return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

        return block(inner)

    assert match(run(0)).up.bias is not None
    assert "takes its bias by ids" in refusal(run(1)).reason


def test_a_cast_to_the_dtype_that_is_there_belongs_to_the_block():
    assert match(block(batched), **weights(dtype=torch.float32)).combine.output.target == "to"


def transposed_by(transpose):
    def run(x, gate, w1, w2):
        return block()(x, gate, transpose(w1), transpose(w2))

    inputs = weights()
    inputs.update(w1=inputs["w1"].transpose(1, 2).contiguous(), w2=inputs["w2"].transpose(1, 2).contiguous())
    return run, inputs


@pytest.mark.parametrize(
    "transpose",
    [lambda w: w.mT, lambda w: w.permute(0, 2, 1), lambda w: w.transpose(-1, -2), lambda w: w.swapaxes(2, 1),
     lambda w: torch.permute(w, (0, -1, 1))],
    ids=["mT", "permute", "negative_dims", "swapaxes", "permute_by_negative_dims"],
)  # fmt: skip
def test_spellings_of_transposed_weights(transpose):
    run, inputs = transposed_by(transpose)
    found = match(run, **inputs)
    assert found.up.weight.transposed and found.down.weight.transposed
    assert found.up.weight.node.target == "L_w1_"


def test_a_transposition_of_other_dimensions_is_no_transposed_weight():
    """[N, E, K] weights, experts second: the operators take what was permuted, not the parameter."""
    inputs = weights()
    inputs.update(w1=inputs["w1"].transpose(0, 1).contiguous())
    found = match(lambda x, gate, w1, w2: block()(x, gate, w1.transpose(0, 1), w2), **inputs)
    assert found.up.weight.node.target == "transpose" and not found.up.weight.transposed


SQUEEZED = {
    "squeeze": lambda h: h.squeeze(-1),
    "index": lambda h: h.view(h.shape[0], -1),
    "flatten": lambda h: h.flatten(1),
    "reshape": lambda h: torch.reshape(h, h.shape[:2]),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_spellings_of_a_batched_product_without_its_column(name):
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = SQUEEZED[name](torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)))
        gate, up = h.chunk(2, -1)
        out = SQUEEZED[name](torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)))
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    assert match(block(run)).dispatch.form == "batched_mm"


def test_rows_before_weights():
    """[R, 1, K] @ [R, K, N]."""

    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        h = torch.bmm(x.repeat_interleave(K, dim=0).unsqueeze(1), w1[flat].mT).squeeze(1)
        gate, up = h.chunk(2, -1)
        out = torch.bmm((F.silu(gate) * up).unsqueeze(1), w2[flat].mT).squeeze(1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    found = match(block(run))
    assert not found.up.weight.transposed and not found.down.weight.transposed


@pytest.mark.parametrize("form", [grouped, batched], ids=["grouped", "batched"])
def test_gathered_biases(form):
    def run(x, gate, w1, w2, b1, b2):
        def biased(product, bias, ids):
            return product + bias[ids] if bias is b1 else bias[ids] + product

        values, ids = F.linear(x, gate).float().softmax(-1).topk(K, dim=-1)
        flat = ids.reshape(-1)
        if form is batched:
            h = biased(torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1), b1, flat)
            gate_half, up = h.chunk(2, -1)
            out = biased(torch.bmm(w2[flat], (F.silu(gate_half) * up).unsqueeze(-1)).squeeze(-1), b2, flat)
            return (out * values.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)
        ordered, perm = torch.sort(flat)
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        h = biased(F.grouped_mm(x[perm // K], w1.mT, offs=offsets), b1, ordered)
        gate_half, up = h.chunk(2, -1)
        out = biased(F.grouped_mm(F.silu(gate_half) * up, w2.mT, offs=offsets), b2, flat[perm])
        out = out * values.reshape(-1)[perm].unsqueeze(-1)
        return out[perm.argsort()].view(-1, K, H).sum(1).to(x.dtype)

    inputs = weights()
    found = match(run, **inputs, b1=inputs["w1"][:, :, 0], b2=inputs["w2"][:, :, 0])
    assert (found.up.bias.target, found.down.bias.target) == ("L_b1_", "L_b2_")


def one_hot(flat, value=True, dtype=torch.bool, dim=1, fill=torch.zeros, columns=E):
    """Counts of the ids by a table [T, E] of what every token chose."""
    return fill(T, columns, dtype=dtype).scatter(dim, flat.view(T, K), value)


def ramp():
    return torch.arange(T * K)


#: As `NEAR_MISSES` of the benchmarks: one step of a sorted block computes something else, or what cannot be proved.
WRONGLY_GROUPED = {
    "argsort_descending": dict(sort=lambda flat: (flat, flat.argsort(descending=True))),
    "sort_of_rows": dict(sort=lambda flat: tuple(part.view(-1) for part in flat.view(T, K).sort())),
    "sorted_ids_for_the_permutation": dict(sort=lambda flat: flat.sort()[::-1]),
    "no_permutation": dict(sort=lambda flat: (flat, ramp())),
    "tokens_shifted": dict(tokens=lambda perm: (perm + 1) // K % T),
    "tokens_of_the_inverse": dict(tokens=lambda perm: perm.argsort() // K),
    "tokens_rounded_on_the_way": dict(tokens=lambda perm: perm.to(torch.int8).long() // K),
    "rows_of_another_tensor": dict(rows=lambda x, index: x.flip(0)[index] * 1),
    "rows_without_their_last_columns": dict(rows=lambda x, index: F.pad(x[index][:, : H - 8], (0, 8))),
    "counts_twice": dict(counts=lambda flat, ordered: one_hot(flat, 2, torch.long).sum(0)),
    "counts_of_the_others": dict(counts=lambda flat, ordered: one_hot(flat, False, fill=torch.ones).sum(0)),
    "counts_from_ones": dict(counts=lambda flat, ordered: one_hot(flat, 1, torch.long, fill=torch.ones).sum(0)),
    "counts_of_other_ids_in_a_table": dict(counts=lambda flat, ordered: one_hot(flat.flip(0)).sum(0)),
    "counts_along_the_tokens": dict(counts=lambda flat, ordered: one_hot(flat, dim=0).sum(0)),
    "counts_of_the_first_experts": dict(counts=lambda flat, ordered: one_hot(flat, columns=2 * E)[:, E:].sum(0)),
    "largest_in_a_table": dict(counts=lambda flat, ordered: one_hot(flat, 1, torch.long).amax(0)),
    "counts_of_repeated_ids": dict(counts=lambda flat, ordered: one_hot(flat % (E - 1)).sum(0)),
    "bins_from_one": dict(counts=lambda flat, ordered: torch.histc(ordered.float(), E, 1, E - 1)),
    "more_bins": dict(counts=lambda flat, ordered: torch.histc(ordered.float(), 2 * E, 0, E - 1)[:E]),
    "counts_in_few_bits": dict(counts=lambda flat, ordered: torch.histc((ordered * 64).float(), E, 0, E - 1)),
    "counts_of_the_positions": dict(counts=lambda flat, ordered: torch.histc(ordered.argsort().float(), E, 0, E - 1)),
    "counts_of_the_permutation": dict(counts=lambda flat, ordered: torch.histc(flat.sort()[1].float(), E, 0, E - 1)),
    "other_ids_in_the_same_order": dict(sort=lambda flat: (flat.flip(0)[flat.argsort()], flat.argsort())),
    "weighted_counts": dict(counts=lambda flat, ordered: torch.bincount(ordered, ordered + 1.0, minlength=E)),
    "offsets_of_counts": dict(offsets=lambda counts: counts.to(torch.int32)),
    "offsets_from_the_end": dict(offsets=lambda counts: counts.flip(0).cumsum(0, dtype=torch.int32)),
    "offsets_of_products": dict(offsets=lambda counts: counts.cumprod(0, dtype=torch.int32)),
    "offsets_less_one": dict(offsets=lambda counts: (counts.cumsum(0) - 1).to(torch.int32)),
    "offsets_of_a_row_each": dict(offsets=lambda counts: counts.view(E, 1).cumsum(1, dtype=torch.int32).view(-1)),
    "weights_of_the_tokens": dict(weigh=lambda out, w, perm: out * w[perm // K, :1]),
    "weights_added": dict(weigh=lambda out, w, perm: out + w.reshape(-1)[perm].unsqueeze(-1)),
    "weights_divide": dict(weigh=lambda out, w, perm: out / w.reshape(-1)[perm].unsqueeze(-1)),
    "weights_of_columns": dict(weigh=lambda out, w, perm: out * w.reshape(-1)[perm].repeat(2)[:H]),
    "weights_rounded": dict(weigh=lambda out, w, perm: out * w.to(torch.float8_e4m3fn).float().view(-1)[perm][:, None]),
    "weights_twice": dict(weigh=lambda out, w, perm: out * w.view(-1)[perm][:, None] * w.view(-1)[perm][:, None]),
    "undone_descending": dict(undo=lambda out, perm: out[perm.argsort(descending=True)]),
    "undone_twice": dict(undo=lambda out, perm: out[perm.argsort()][perm.argsort()]),
    "undone_by_another_shape": dict(undo=lambda out, perm: out[perm.view(T, K)].view(-1, H)),
    "undone_by_parts": dict(undo=lambda out, perm: out[perm.argsort()[: T * K - 1]].repeat(2, 1)[: T * K]),
    "scattered_by_the_inverse": dict(undo=lambda out, perm: out[
        torch.empty_like(perm).scatter(0, perm.argsort(), ramp())]),
    "scattered_backwards": dict(undo=lambda out, perm: out[torch.empty_like(perm).scatter(0, perm, ramp().flip(0))]),
    "scattered_from_two": dict(undo=lambda out, perm: out[
        torch.empty_like(perm).scatter(0, perm, torch.arange(2, T * K + 2)) % (T * K)]),
    "scattered_by_steps": dict(undo=lambda out, perm: out[
        torch.empty_like(perm).scatter(0, perm, torch.arange(0, 2 * T * K, 2)) // 2]),
    "scattered_into_more": dict(undo=lambda out, perm: out[
        perm.new_zeros(2 * T * K).scatter(0, perm, ramp())[: T * K]]),
    "scattered_and_added": dict(undo=lambda out, perm: out[
        torch.ones_like(perm).scatter_add(0, perm, ramp()).clamp(max=T * K - 1)]),
    "a_constant_scattered": dict(undo=lambda out, perm: out[torch.zeros_like(perm).scatter(0, perm, 3)]),
    "put_back_by_the_inverse": dict(undo=lambda out, perm: torch.zeros_like(out).index_put((perm.argsort(),), out)),
    "put_back_into_more": dict(undo=lambda out, perm: put_back(out.new_zeros(2 * T * K, H), perm, out)[: T * K]),
    "put_back_rounded": dict(undo=lambda out, perm: put_back(
        out.new_zeros(T * K, H, dtype=torch.float8_e4m3fn), perm, out.to(torch.float8_e4m3fn)).float()),
    "put_back_something_else": dict(undo=lambda out, perm: put_back(torch.zeros_like(out), perm, out + 1)),
    "sum_of_everything": dict(total=lambda out: out.view(T, K, H).sum((1, 2)).view(T, 1).expand(T, H)),
    "sum_over_the_columns": dict(total=lambda out: out.view(T, K, H).sum(-1).repeat(1, H // K)),
    "largest": dict(total=lambda out: out.view(T, K, H).amax(1)),
    "sum_of_halves": dict(total=lambda out: out.view(T, 2 * K, H // 2).sum(1).repeat(1, 2)),
    "sum_in_few_bits": dict(total=lambda out: out.view(T, K, H).sum(1, dtype=torch.float16)),
    "first_of_the_slots": dict(total=lambda out: out.view(T, K, H)[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONGLY_GROUPED)
def test_a_sorted_block_with_one_wrong_step(name):
    assert refusal(sorted_block(**WRONGLY_GROUPED[name])).cure


def test_sizes_of_what_is_computed_inside():
    """Sizes that only the block asks for go with it."""

    def undo(out, perm):
        return torch.zeros(out.shape[0], out.size(1), dtype=out.dtype).index_copy(0, perm, out)

    graph = capture(sorted_block(undo=undo), dynamic=True, **weights()).graph
    assert run(FUSE, graph).fused
    assert not [node for node in graph.nodes if node.target in (torch._grouped_mm, F.grouped_mm)]


def sorted_block(**steps):
    """A sorted block with some of its steps written otherwise."""
    return block(Steps(**steps))


#: As `WRONGLY_GROUPED`, for rows in the order of the tokens.
WRONGLY_BATCHED = {
    "tokens_one_after_the_other": dict(rows=lambda x: x.repeat(K, 1)),
    "tokens_of_a_ramp_by_remainder": dict(rows=lambda x: x[ramp() % T]),
    "tokens_of_another_ramp": dict(rows=lambda x: x[(T * K - 1 - ramp()) // K]),
    "tokens_of_a_ramp_from_two": dict(rows=lambda x: x[torch.arange(2, T * K + 2) // K % T]),
    "repeated_by_a_tensor": dict(rows=lambda x: x.repeat_interleave(torch.tensor([K - 1, K + 1] * (T // 2)), 0)),
    "repeated_columns": dict(rows=lambda x: x[:, : H // K].repeat_interleave(K, 1).repeat_interleave(K, 0) * 1),
    "repeated_after_a_change": dict(rows=lambda x: x.repeat_interleave(K, 0).flip(0)),
    "weights_of_other_ids": dict(first=lambda w, ids: w[ids.flip(0)]),
    "second_weights_of_other_ids": dict(second=lambda w, ids: w[ids.flip(0)]),
    "weights_by_a_slice": dict(first=lambda w, ids: w.repeat(K + 1, 1, 1)[: T * K]),
    "weights_changed": dict(second=lambda w, ids: w[ids] + 1),
    "weights_of_columns": dict(weigh=lambda out, w: out * w.reshape(-1).repeat(2)[:H]),
    "rows_turned": dict(weigh=lambda out, w: (out * w.reshape(-1, 1)).flip(0)),
    "sum_over_the_tokens": dict(total=lambda out: out.view(K, T, H).sum(0)),
    "sum_of_the_columns": dict(total=lambda out: out.view(T, K, H).sum(-1).repeat(1, H // K)),
    "sum_of_pairs_of_tokens": dict(total=lambda out: out.view(T // 2, 2 * K, H).sum(1).repeat(2, 1)),
    "added_to_the_tokens": dict(total=lambda out: out.new_zeros(T, H).index_add(0, ramp() % T, out)),
}  # fmt: skip


def batched_block(**steps):
    """A block of gathered weights with some of its steps spelled otherwise."""
    how = {
        "rows": lambda x: x.repeat_interleave(K, 0), "first": lambda w, ids: w[ids], "second": lambda w, ids: w[ids],
        "weigh": lambda out, w: out * w.reshape(-1, 1), "total": lambda out: out.view(-1, K, H).sum(1), **steps,
    }  # fmt: skip

    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        gate, up = torch.bmm(how["first"](w1, flat), how["rows"](x).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        out = torch.bmm(how["second"](w2, flat), (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return how["total"](how["weigh"](out, topk_weights)).to(x.dtype)

    return block(run)


BATCHED = {
    "as_it_is": {},
    "tokens_of_a_ramp": dict(rows=lambda x: x[ramp() // K]),
    "repeated_along_minus_two": dict(rows=lambda x: x.repeat_interleave(K, dim=-2)),
    "weights_first": dict(weigh=lambda out, w: w.reshape(-1, 1) * out),
    "weights_of_slots": dict(weigh=lambda out, w: out.view(T, K, H) * w.unsqueeze(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
def test_spellings_of_a_batched_block(name):
    found = match(batched_block(**BATCHED[name]))
    assert found.dispatch.form == "batched_mm" and found.dispatch.top_k == K and found.dispatch.perm is None


@pytest.mark.parametrize("name", WRONGLY_BATCHED)
def test_a_batched_block_with_one_wrong_step(name):
    rows = found(batched_block(**WRONGLY_BATCHED[name]))
    assert all(isinstance(row, Refusal) and row.cure for row in rows)


#: Ways between a block and the next one, at which the search for what feeds a product ends.
BARRIERS = {
    "index": lambda h, i: h[i], "index_select": lambda h, i: h.index_select(0, i),
    "repeat_interleave": lambda h, i: h.repeat_interleave(1, 0), "sort": lambda h, i: h.sort(0)[0],
    "gather": lambda h, i: h.gather(0, i[:, None].expand(-1, H)), "topk": lambda h, i: h.topk(T, 0)[0],
    "expand": lambda h, i: h.expand(T, H), "linear": lambda h, i: F.linear(h, h.new_ones(H, H)),
    "matmul": lambda h, i: h @ h.new_ones(H, H), "embedding": lambda h, i: F.embedding(i, h),
    "index_put": lambda h, i: torch.zeros_like(h).index_put((i,), h), "cat": lambda h, i: torch.cat([h, h])[:T],
    "scatter": lambda h, i: torch.zeros_like(h).scatter(0, i[:, None].expand(-1, H), h),
    "index_add": lambda h, i: torch.zeros_like(h).index_add(0, i, h),
    "scaled_dot_product_attention": lambda h, i: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
}  # fmt: skip


@pytest.mark.parametrize("name", [*BARRIERS, "none"])
def test_the_search_for_the_first_product_ends_at_another_gather(name):
    def run(x, w, i):
        offsets = torch.arange(1, E + 1, dtype=torch.int32)
        first = F.grouped_mm(x, w, offs=offsets)
        between = BARRIERS.get(name, lambda h, i: torch.tanh(h))(first, i)
        return F.grouped_mm(between, w, offs=offsets)

    rows, stacked = torch.randn(T, H).bfloat16(), torch.randn(E, H, H).bfloat16()
    reading = Reading(capture(run, rows, stacked, torch.arange(T)).graph)
    products = find_products(reading)
    first, second = products.values()
    assert feeding_products(reading, second, products) == ([first] if name == "none" else [])


def each(h):
    return h.chunk(2, -1)


MORE = {
    "narrow": (lambda h: F.silu(h.narrow(-1, 0, I)) * h.narrow(1, I, I), Body("silu", None, None, "concat")),
    "slice_operator": (lambda h: F.silu(torch.ops.aten.slice(h, 1, 0, I)) * torch.ops.aten.slice(h, -1, I, 2 * I),
                       Body("silu", None, None, "concat")),
    "slice_operator_with_a_step": (lambda h: F.silu(torch.ops.aten.slice(h, 1, 0, 2 * I, 2))
                                   * torch.ops.aten.slice(h, 1, 1, 2 * I, 2), Body("silu", None, None, "interleaved")),
    "even_and_odd": (lambda h: F.silu(h[..., 0 : 2 * I : 2]) * h[:, 1 : 2 * I : 2],
                     Body("silu", None, None, "interleaved")),
    "split_by_sizes": (lambda h: F.silu(h.split([I, I], -1)[0]) * h.split([I, I], -1)[1],
                       Body("silu", None, None, "concat")),
    "split_with_sizes": (lambda h: F.silu(h.split_with_sizes([I, I], -1)[0]) * h.split_with_sizes([I, I], -1)[1],
                         Body("silu", None, None, "concat")),
    "of_a_row_each": (lambda h: (F.silu(each(h.unsqueeze(1))[0]) * each(h.unsqueeze(1))[1]).squeeze(1),
                      Body("silu", None, None, "concat")),
    "of_one_table": (lambda h: (F.silu(each(h.view(1, T * K, 2 * I))[0]) * each(h[None])[1]).view(T * K, I),
                     Body("silu", None, None, "concat")),
    "times_one": (lambda h: 1.0 * F.silu(each(h)[0]) * each(h)[1] * 1, Body("silu", None, None, "concat")),
    "relu2_of_the_gate": (lambda h: F.relu(each(h)[0]).square() * each(h)[1], Body("relu2", None, None, "concat")),
    "exact_gelu": (lambda h: F.gelu(each(h)[0], approximate="none") * each(h)[1], Body("gelu", None, None, "concat")),
    "sigmoid_last": (lambda h: each(h)[1] * torch.sigmoid(each(h)[0]) * each(h)[0], Body("silu", None, None, "concat")),
    "oai_by_silu": (lambda h: F.silu(each(h)[0].clamp(max=3.0)) * (1 + each(h)[1].clamp(-3.0, 3.0)),
                    Body("swiglu_oai", 1.0, 3.0, "concat")),
}  # fmt: skip
ALMOST = {
    "gate_clamped_on_both_sides": lambda h: F.silu(each(h)[0].clamp(-3.0, 3.0)) * each(h)[1].clamp(-3.0, 3.0),
    "up_clamped_elsewhere": lambda h: F.silu(each(h)[0].clamp(max=3.0)) * each(h)[1].clamp(-4.0, 4.0),
    "up_clamped_on_one_side": lambda h: F.silu(each(h)[0].clamp(max=3.0)) * each(h)[1].clamp(max=3.0),
    "up_alone_clamped": lambda h: F.silu(each(h)[0]) * each(h)[1].clamp(-3.0, 3.0),
    "gate_alone_clamped": lambda h: F.silu(each(h)[0].clamp(max=3.0)) * each(h)[1],
    "gelu_clamped": lambda h: F.gelu(each(h)[0].clamp(max=3.0)) * each(h)[1].clamp(-3.0, 3.0),
    "plus_one_without_clamps": lambda h: F.silu(each(h)[0]) * (each(h)[1] + 1),
    "plus_two": lambda h: F.silu(each(h)[0].clamp(max=3.0)) * (each(h)[1].clamp(-3.0, 3.0) + 2),
    "clamped_twice": lambda h: F.silu(each(h)[0].clamp(max=3.0).clamp(max=2.0)) * each(h)[1].clamp(-3.0, 3.0),
    "sigmoid_of_the_other_half": lambda h: each(h)[0] * torch.sigmoid(each(h)[1]),
    "a_bare_sigmoid": lambda h: torch.sigmoid(each(h)[0]) * each(h)[1],
    "three_factors": lambda h: F.silu(each(h)[0]) * each(h)[1] * each(h)[1],
    "no_activation": lambda h: each(h)[0] * each(h)[1],
    "cubes": lambda h: F.relu(each(h)[0]).pow(3) * each(h)[1],
    "squares": lambda h: each(h)[0].square() * each(h)[1],
    "relus_of_both_halves": lambda h: F.relu(each(h)[0]) * F.relu(each(h)[1]),
    "the_gate_twice": lambda h: F.silu(each(h)[0]) * each(h)[0],
    "the_first_halves": lambda h: F.silu(h.chunk(4, -1)[0].repeat(1, 2)) * each(h)[1],
    "quarters": lambda h: (F.silu(h.split(I // 2, -1)[0]) * h.split(I // 2, -1)[1]).repeat(1, 2),
    "uneven_parts": lambda h: F.silu(h.split([I, 1, I - 1], -1)[0]) * h.split([1, I, I - 1], -1)[1],
    "halves_of_the_rows": lambda h: (F.silu(h.chunk(2, 0)[0]) * h.chunk(2, 0)[1]).view(-1, I),
    "a_shifted_slice": lambda h: F.silu(h[:, :I]) * h[:, I - 1 : -1],
    "every_third": lambda h: F.silu(h[:, ::2]) * h[:, 1::2].flip(1),
    "mixed_layouts": lambda h: F.silu(h[:, ::2]) * h[:, I:],
    "added": lambda h: F.silu(each(h)[0]) + each(h)[1],
    "multiplied_by_the_sum": lambda h: F.silu(each(h)[0]) * (each(h)[1] + each(h)[0]),
    "addcmul_of_another": lambda h: torch.addcmul(each(h)[1], F.silu(each(h)[0]), each(h)[1]),
    "addcmul_with_a_value": lambda h: torch.addcmul(g := F.silu(each(h)[0].clamp(max=3.)), g,
                                                    each(h)[1].clamp(-3., 3.), value=2),
    "rounded_on_the_way": lambda h: F.silu(each(h)[0].to(torch.float8_e4m3fn).to(h.dtype)) * each(h)[1],
    "other_gelu": lambda h: F.gelu(each(h)[0].bfloat16().int().bfloat16()) * each(h)[1],
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_more_spellings_of_activations(name):
    activation, body = MORE[name]
    assert match(block(batched, activation=activation)).body == body


@pytest.mark.parametrize("name", ALMOST)
def test_almost_an_activation(name):
    assert refusal(block(batched, activation=ALMOST[name])).cure


# Weights [..., K] and rows [..., K, H] of tokens with one dimension, or two, in a product that sums over the slots.
SUMMED = {
    "weights first": lambda w, rows: torch.matmul(w.unsqueeze(-2), rows).squeeze(-2),
    "weights first, by select": lambda w, rows: (w.unsqueeze(-2) @ rows)[..., 0, :],
    "rows turned": lambda w, rows: torch.matmul(rows.transpose(-1, -2), w.unsqueeze(-1)).squeeze(-1),
    "rows turned, mT": lambda w, rows: (rows.mT @ w[..., None])[..., 0],
}
NOT_SUMMED = {
    "weights of the first token": lambda w, rows: torch.matmul(w.reshape(-1, 1, K)[:1], rows).squeeze(-2),
    "rows turned and read again": lambda w, rows: (rows.mT @ w.unsqueeze(-1)).squeeze(-1) + 0 * rows[..., 0, :],
    "rows turned for all of a sequence": lambda w, rows: (rows.mT @ w[:, :1].unsqueeze(-1)).squeeze(-1),
    "two columns": lambda w, rows: (rows.mT @ torch.stack([w, w], -1)).sum(-1),
    "one column twice": lambda w, rows: (rows.mT @ w.unsqueeze(-1)).expand(*w.shape[:-1], H, 2).sum(-1),
}


def summed_by(finish, sequences):
    def run(x, gate, w1, w2):
        x = x.view(3, -1, H) if sequences else x
        topk_weights, ids = F.linear(x, gate).softmax(-1).topk(K)
        h = torch.einsum("...h,...knh->...kn", x, w1[ids])
        return finish(topk_weights, torch.einsum("...ki,...khi->...kh", silu_glu(h), w2[ids]))

    return run


@pytest.mark.parametrize("sequences", [False, True], ids=["tokens", "sequences"])
@pytest.mark.parametrize("name", SUMMED)
def test_slots_summed_by_a_product(name, sequences):
    inputs = weights(dtype=torch.float32).values()
    assert assert_same(summed_by(SUMMED[name], sequences), *inputs, gradients=sequences).fused == 1


@pytest.mark.parametrize("name", NOT_SUMMED)
def test_near_miss_of_slots_summed_by_a_product(name):
    outcome = check(summed_by(NOT_SUMMED[name], True), *weights(dtype=torch.float32).values())
    assert (outcome.problem, outcome.fused) == (None, 0)
