"""MoE blocks in forms that are not fused are named, once each; what is no MoE block is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moe_ops
from compile_passes.patterns.forms import name_forms
from compile_passes.reading import Reading
from tests.passes.blocks import E, H, I, K, T, batched, block, capture, grouped, silu_glu, softmax_router, weights
from tests.passes.compare import check


def _define(name, arguments):
    """An operator of some other library; defined once, however often this file is imported in a process."""
    if not hasattr(torch.ops.forms_test, name):
        torch.library.define(f"forms_test::{name}", f"({arguments}) -> Tensor")
        torch.library.impl(f"forms_test::{name}", "CompositeExplicitAutograd")(lambda first, *rest: first.clone())
        torch.library.register_fake(f"forms_test::{name}")(lambda first, *rest: torch.empty_like(first))


_define("fused_moe", "Tensor x, Tensor w1, Tensor w2, Tensor ids")
_define("layer", "Tensor x, Tensor w1, Tensor w2, Tensor ids")
_define("attention", "Tensor q, Tensor k, Tensor v")


def named(function, *args, **kwargs):
    """The refusals of the last recogniser alone, with nothing reported before it."""
    reading = Reading(capture(function, *args, **kwargs).graph)
    return name_forms(reading, set())


# ---- forms


def gpt_fast(x, gate, w1, w2):
    """Gathered weights and einsum; w1 and w3 are halves of one weight here."""
    topk_weights, ids = softmax_router(x, gate)
    w1, w3 = w1.chunk(2, dim=1)
    h = F.silu(torch.einsum("ti,taoi->tao", x, w1[ids])) * torch.einsum("ti,taoi->tao", x, w3[ids])
    out = torch.einsum("tao,taio->tai", h, w2[ids])
    return torch.einsum("tai,ta->ti", out, topk_weights.to(out.dtype))


def gpt_oss_reference(x, gate, w1, w2):
    """Logits first, weights and biases gathered, einsum with the token as a batch."""
    top = torch.topk(F.linear(x, gate), K, dim=-1)
    scores = top.values.softmax(dim=1)
    h = torch.einsum("beck,bk->bec", w1[top.indices], x) + w1[top.indices, :, 0]
    h = h[..., ::2] * torch.sigmoid(1.702 * h[..., ::2]) * (h[..., 1::2].clamp(-7, 7) + 1)
    return torch.einsum("bec,be->bc", torch.einsum("beck,bek->bec", w2[top.indices], h), scores)


def gathered_matmul(x, gate, w1, w2):
    """The weights of every routed row in a product of four dimensions."""
    topk_weights, ids = softmax_router(x, gate)
    h = silu_glu(x[:, None, None, :] @ w1[ids].mT)
    return ((h @ w2[ids].mT).squeeze(2) * topk_weights.unsqueeze(-1)).sum(1)


def index_select_matmul(x, gate, w1, w2):
    """index_select by flattened ids."""
    topk_weights, ids = softmax_router(x, gate)
    gate_up = w1.index_select(0, ids.flatten()).unflatten(0, (-1, K))
    down = w2.index_select(0, ids.flatten()).unflatten(0, (-1, K))
    h = silu_glu(torch.matmul(gate_up, x[:, None, :, None]).squeeze(-1))
    return (torch.matmul(down, h.unsqueeze(-1)).squeeze(-1) * topk_weights.unsqueeze(-1)).sum(1)


def llama4(x, gate, w1, w2):
    """Every token to every expert; the weights, zero for most, multiply the input."""
    values, ids = torch.topk(F.linear(x, gate), K, dim=1)
    scores = torch.full((T, E), float("-inf"), dtype=x.dtype).scatter_(1, ids, values).transpose(0, 1).sigmoid()
    rows = (x.repeat(E, 1) * scores.reshape(-1, 1)).view(E, -1, H)
    out = torch.bmm(silu_glu(torch.bmm(rows, w1.transpose(1, 2))), w2.transpose(1, 2))
    return out.view(-1, H).reshape(E, -1, H).sum(dim=0)


def weights_first(x, gate, w1, w2):
    """Renormalised softmax weights multiply the input of every expert."""
    topk_weights, ids = softmax_router(x, gate)
    scores = torch.zeros(T, E).scatter(1, ids, topk_weights)
    rows = x.unsqueeze(1) * scores.unsqueeze(-1)
    return torch.einsum("ten,ehn->th", silu_glu(torch.einsum("teh,enh->ten", rows, w1)), w2)


def dense_einsum(x, gate, w1, w2):
    """Every expert on every token, combined by a [T, E] matrix of scores."""
    topk_weights, ids = softmax_router(x, gate)
    scores = torch.zeros(T, E).scatter(1, ids, topk_weights).to(x.dtype)
    h = silu_glu(torch.einsum("th,enh->ten", x, w1))
    return torch.einsum("te,teh->th", scores, torch.einsum("ten,ehn->teh", h, w2))


def dense_softmax(x, gate, w1, w2):
    """Soft mixture: all experts, weighted by the softmax over them."""
    scores = F.linear(x, gate).softmax(-1)
    out = silu_glu(x @ w1.mT) @ w2.mT
    return (out * scores.t().unsqueeze(-1)).sum(0)


def gshard_stacked(x, gate, w1, w2):
    """One-hot dispatch with a capacity, experts as one einsum."""
    dispatch, combine = _capacity_masks(x, gate)
    rows = torch.einsum("tec,th->ech", dispatch, x)
    out = torch.einsum("ecn,ehn->ech", silu_glu(torch.einsum("ech,enh->ecn", rows, w1)), w2)
    return torch.einsum("tec,ech->th", combine, out)


def gshard_chunks(x, gate, w1, w2):
    """One-hot dispatch with a capacity, one expert after the other."""
    dispatch, combine = _capacity_masks(x, gate)
    rows = torch.einsum("tec,th->ech", dispatch, x)
    outs = [F.linear(silu_glu(F.linear(rows[e], w1[e])), w2[e]) for e in range(E)]
    return torch.einsum("tec,ech->th", combine, torch.stack(outs))


def _capacity_masks(x, gate):
    capacity = 4
    scores = F.linear(x, gate).softmax(-1)
    mask = F.one_hot(scores.argmax(-1), E)
    place = mask.cumsum(0) * mask - 1
    keep = mask * (place < capacity)
    slots = F.one_hot((place * keep).sum(1).clamp(0), capacity)
    dispatch = (keep.unsqueeze(-1) * slots.unsqueeze(1)).to(x.dtype)
    return dispatch, dispatch * (scores * keep).sum(-1)[:, None, None]


def mixtral_v4(x, gate, w1, w2):
    """A static loop: one-hot mask, where, index_add."""
    topk_weights, ids = softmax_router(x, gate)
    mask = F.one_hot(ids, len(w1)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        slot, token = torch.where(mask[e])
        rows = F.linear(silu_glu(F.linear(x[None, token].reshape(-1, H), w1[e])), w2[e])
        out.index_add_(0, token, (rows * topk_weights[token, slot, None]).to(x.dtype))
    return out


def boolean_assignment(x, gate, w1, w2):
    """Rows chosen by a boolean mask, and assigned through it."""
    topk_weights, ids = softmax_router(x, gate)
    rows, flat = x.repeat_interleave(K, dim=0), ids.view(-1)
    out = torch.empty_like(rows)
    for e in range(len(w1)):
        out[flat == e] = F.linear(silu_glu(F.linear(rows[flat == e], w1[e])), w2[e])
    return (out.view(T, K, H) * topk_weights.unsqueeze(-1)).sum(1)


def masked_everywhere(x, gate, w1, w2):
    """Every expert on every token, the results multiplied by what the router gives for it."""
    topk_weights, ids = softmax_router(x, gate)
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        factor = (topk_weights * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
        out = out + factor * F.linear(silu_glu(F.linear(x, w1[e])), w2[e])
    return out


def selected_by_where(x, gate, w1, w2):
    """Top-1: every expert on every token, kept where the token is the expert's."""
    choice = F.linear(x, gate).argmax(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(E):
        out = torch.where(choice == e, F.linear(silu_glu(F.linear(x, w1[e])), w2[e]), out)
    return out


class Experts(nn.Module):
    """A list of experts with weights of their own."""

    def __init__(self, experts=E, forward="gather"):
        super().__init__()
        self.gate = nn.Linear(H, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(experts))
        self.how = forward

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if self.how == "soft":
            return sum(expert(x) * scores[:, e, None] for e, expert in enumerate(self.experts))
        topk_weights, ids = scores.topk(2)
        if self.how == "mask":
            pairs = [(topk_weights * (ids == e)).sum(-1, keepdim=True) for e in range(len(self.experts))]
            return sum(weight * expert(x) for weight, expert in zip(pairs, self.experts, strict=True))
        if self.how == "split":
            order = ids.flatten().argsort()
            sizes = F.one_hot(ids.flatten(), len(self.experts)).sum(0).tolist()
            rows = [expert(part) for expert, part in zip(self.experts, x[order // 2].split(sizes), strict=True)]
            return torch.zeros_like(x).index_add(0, order // 2, torch.cat(rows) * topk_weights.flatten()[order, None])
        outs = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, H))
        return (picked * topk_weights.unsqueeze(-1)).sum(1)


def opaque(x, gate, w1, w2):
    """An operator of another library, called like what it does."""
    return torch.ops.forms_test.fused_moe(x, w1, w2, softmax_router(x, gate)[1])


def opaque_without_a_telling_name(x, gate, w1, w2):
    """The same operator under a name that says nothing."""
    return torch.ops.forms_test.layer(x, w1, w2, softmax_router(x, gate)[1])


def written_weights(x, gate, w1, w2):
    """Every expert's slice of the first weight is scaled in place."""
    topk_weights, ids = softmax_router(x, gate)
    out = torch.zeros_like(x)
    for expert in range(E):
        weight = w1[expert].clone()
        weight.mul_(1.5)
        scale = (topk_weights * (ids == expert)).sum(-1, keepdim=True)
        out = out + scale * F.linear(silu_glu(F.linear(x, weight)), w2[expert])
    return out


FORMS = {
    gpt_fast: "gathered",
    gpt_oss_reference: "gathered",
    gathered_matmul: "gathered",
    index_select_matmul: "gathered",
    llama4: "they multiply the input",
    weights_first: "they multiply the input",
    dense_einsum: "all experts",
    dense_softmax: "all experts",
    gshard_stacked: "GShard",
    gshard_chunks: "GShard",
    mixtral_v4: f"{E} experts run one after the other",
    boolean_assignment: "that a mask, an index or a split selects",
    masked_everywhere: "on every token",
    selected_by_where: "on every token",
    written_weights: "on every token",
    opaque: "forms_test::fused_moe",
    opaque_without_a_telling_name: "forms_test::layer",
}


CALL = "Replace the loop by one call, moe_ops.fused_experts(hidden_states,"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_form(form):
    rows = named(form, **weights(dtype=torch.float32))
    assert len(rows) == 1, rows
    weighted = ", weight_on_input=True" if "multiply the input" in FORMS[form] else ""
    call = f"fused_experts(hidden_states, gate_up_proj, down_proj, topk_weights, topk_ids{weighted})"
    assert FORMS[form] in rows[0].reason and call in rows[0].cure
    assert "test_forms.py" in rows[0].location


@pytest.mark.parametrize("form", [gpt_fast, gathered_matmul, index_select_matmul], ids=lambda form: form.__name__)
def test_gathered_weights_are_read_in_place(form):
    """Gathered for every slot, and multiplied by einsum or in four dimensions: no form left for the last recogniser."""
    outcome = check(form, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_a_router_weight_that_is_written_in_place():
    def run(x, gate, w1, w2):
        scaled = gate.float()
        scaled.mul_(1.5)
        return block(batched, router=lambda x, gate: softmax_router(x.float(), scaled))(x, gate, w1, w2)

    outcome = check(run, *weights().values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


CHANGES = {
    "in place": lambda w: w.mul_(1.5),
    "out of place": lambda w: w * 1.5,
    "viewed after it": lambda w: (w * 1.5).view(T, K, -1).view(w.shape),
}


@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("how", CHANGES)
def test_gathered_weights_that_are_changed_are_named(how, which):
    def run(x, gate, w1, w2):
        topk_weights, ids = softmax_router(x, gate)
        up, down = w1[ids], w2[ids]
        if which != "second":
            up = CHANGES[how](up)
        if which != "first":
            down = CHANGES[how](down)
        h = silu_glu(torch.einsum("th,tknh->tkn", x, up))
        return (torch.einsum("tki,tkhi->tkh", h, down) * topk_weights.unsqueeze(-1)).sum(1)

    (row,) = moe_ops.explain(run, **weights(dtype=torch.float32)).refused
    assert "are changed, by `" in row.reason and "1.5" in row.reason, row.reason
    assert row.cure == "Change the stacked weights, before the gather."


def test_stacked_weights_that_are_changed_are_fused():
    outcome = check(lambda x, gate, w1, w2: gpt_fast(x, gate, w1 * 1.5, w2), *weights(dtype=torch.float32).values())
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize(("forward", "reason"), [("gather", "on every token"), ("split", "a split selects")])
def test_list_of_experts(forward, reason):
    rows = named(Experts(forward=forward), torch.randn(T, H))
    assert len(rows) == 1 and f"{E} experts" in rows[0].reason and reason in rows[0].reason
    assert "moe_ops.stack_experts_(model)" in rows[0].cure and "r" + CALL[1:] in rows[0].cure


def test_a_soft_mixture_is_not_told_to_stack():
    """Every expert counts for every token: stacked, too, there is nothing to leave out."""
    (row,) = named(Experts(forward="soft"), torch.randn(T, H))
    assert f"{E} experts" in row.reason and "a soft mixture" in row.reason and row.cure.startswith("Nothing to do")


def test_mixtures_of_all_tokens_are_no_dispatch_mask():
    def soft_moe(x, gate, w1, w2):
        logits = F.linear(x, gate)
        slots = torch.einsum("te,th->eh", logits.softmax(0), x)
        h = silu_glu(torch.einsum("eh,enh->en", slots, w1))
        return logits.softmax(-1) @ torch.einsum("ei,ehi->eh", h, w2)

    (row,) = named(soft_moe, **weights(dtype=torch.float32))
    assert "Soft MoE" in row.reason and row.cure.startswith("Nothing to do")


def test_stacked_loop_is_not_told_to_stack():
    assert named(mixtral_v4, **weights(dtype=torch.float32))[0].cure.startswith("Replace the loop")


def test_one_refusal_per_layer():
    """Two layers are two blocks, however many experts they have."""
    model = nn.Sequential(Experts(), nn.LayerNorm(H), Experts(experts=4))
    assert [row.reason[0] for row in named(model, torch.randn(T, H))] == ["8", "4"]


def test_layers_without_a_norm_between_them_have_a_refusal_each():
    """The scores of the first seem to weigh the rows of the second, too."""
    model = nn.Sequential(*(Experts(experts=experts, forward="mask") for experts in (8, 4, 4)))
    assert [row.reason[0] for row in named(model, torch.randn(T, H))] == ["8", "4", "4"]


def test_layers_without_a_norm_between_them_are_fused():
    """Nothing is said of the second product of one and the first one of the other."""

    def run(x, gate, w1, w2):
        for _ in range(2):
            topk_weights, ids = F.linear(x, gate).sigmoid().topk(K)
            h = F.silu(torch.einsum("th,tkih->tki", x, w1[ids]))
            x = x + torch.einsum("tki,tkhi,tk->th", h, w2[ids], topk_weights)
        return x

    report = moe_ops.explain(run, **weights(n=I, dtype=torch.float32))
    assert (len(report.fused), report.refused) == (2, [])


def test_stacked_layers_of_other_sizes_are_blocks_of_their_own():
    """A pair of products whose experts differ is none, and hides none that comes after it."""

    def run(x, gate, w1, w2, narrow):
        one = F.silu(torch.einsum("th,eih->eti", x, narrow))
        x = x + torch.einsum("eti,fhi->th", one, w2)
        return weights_of_the_inside(x, gate, w1, w2)

    inputs = weights(n=I, dtype=torch.float32)
    (row,) = named(run, **inputs, narrow=torch.randn(3, I, H))
    assert "all experts" in row.reason


def weights_of_the_inside(x, gate, w1, w2):
    """Every expert for every token, the routing weights on what is between the products."""
    scores = F.linear(x, gate).softmax(-1)
    inside = F.silu(torch.einsum("th,eih->eti", x, w1)) * scores.t().unsqueeze(-1)
    return torch.einsum("eti,ehi->th", inside, w2)


def test_weights_of_the_inside_are_not_said_to_multiply_the_input():
    (row,) = named(weights_of_the_inside, **weights(n=I, dtype=torch.float32))
    assert "pick from the results." in row.reason and "weight_on_input" not in row.cure


@pytest.mark.parametrize("experts", [grouped, batched])
def test_reported_blocks_are_left_out(experts):
    reading = Reading(capture(block(experts), **weights()).graph)
    products = {node for node in reading.graph.nodes if reading.named(node, "bmm", "grouped_mm")}
    assert len(products) == 2 and name_forms(reading, products) == []


# ---- no MoE


def attention_by_bmm(q, k, v):
    """Keys and values are stacked like experts, and a softmax is between the products."""
    return torch.bmm((q @ k.mT / 4).softmax(-1), v)


def attention_by_einsum(q, k, v):
    """As above, four dimensions."""
    q, k, v = (t.view(E, T, 4, H // 4) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores, v)


def multi_head_projections(x, wq, wo):
    """Projections with one stacked matrix per head, and attention between."""
    q = torch.einsum("th,nhd->ntd", x, wq)
    return torch.einsum("ntd,ndh->th", F.scaled_dot_product_attention(q, q, q), wo)


def per_head_mlp(x, w1, w2):
    """An MLP of its own in every head: nothing is routed."""
    return torch.einsum("ntd,ndh->th", F.gelu(torch.einsum("th,nhd->ntd", x, w1)), w2)


def ensemble(x, w1, w2):
    """Members of an ensemble, averaged, and the best class."""
    return torch.bmm(F.relu(torch.bmm(x.expand(E, T, H), w1)), w2).mean(0).softmax(-1).topk(3)


def linear_attention(q, k, v):
    """Feature maps instead of a softmax."""
    return F.elu(q) @ (F.elu(k).mT @ v)


def lora_by_adapter(x, a, b, ids):
    """Adapters gathered by the request's id."""
    return torch.bmm(b[ids], torch.bmm(a[ids], x.unsqueeze(-1))).squeeze(-1)


def product_keys(x, keys, down, up):
    """Vectors, not matrices, gathered by topk (PEER, doge)."""
    values, ids = (x @ keys.t()).topk(K)
    h = F.gelu(torch.einsum("th,tkh->tk", x, F.embedding(ids, down))) * values.softmax(-1)
    return torch.einsum("tk,tkh->th", h, F.embedding(ids, up))


def sparse_attention_indexer(x, k, wq, wo):
    """A topk over tokens selects the keys that are read."""
    ids = (F.linear(x, wq) @ k.t()).relu().topk(4).indices
    chosen = k[ids]
    scores = torch.einsum("th,tkh->tk", F.linear(x, wq), chosen).softmax(-1)
    return F.linear(torch.einsum("tk,tkh->th", scores, chosen), wo)


def mixture_of_depths(x, gate, w1, w2):
    """A topk over tokens: some go through the MLP, all of them through the same."""
    values, ids = F.linear(x, gate).squeeze(-1).topk(4)
    rows = F.linear(F.gelu(F.linear(x[ids], w1)), w2)
    return x.index_add(0, ids, rows * values.sigmoid().unsqueeze(-1))


def paged_cache(q, cache, table):
    """Blocks of a cache gathered by a table of integers."""
    keys = cache[table].flatten(0, 1)
    return torch.matmul((torch.matmul(q, keys.t())).softmax(-1), keys)


def gated_mlp(x, gate, w1, w2):
    """A shared expert under its own sigmoid."""
    return F.linear(gate, x).sigmoid().t() * F.linear(F.silu(F.linear(x, w1)), w2)


def squeeze_and_excite(x, w1, w2, w3, w4):
    """Two small MLPs end in a sigmoid that multiplies the features, one after the other."""
    x = x * F.linear(F.relu(F.linear(x, w1)), w2).sigmoid()
    return x * F.linear(F.relu(F.linear(x, w3)), w4).sigmoid()


def two_gated_branches(x, w1, w2, w3, w4):
    """Parallel branches, each multiplied by a sigmoid of the input."""
    gate = x.sigmoid()
    return gate * F.linear(F.gelu(F.linear(x, w1)), w2) + (1 - gate) * F.linear(F.gelu(F.linear(x, w3)), w4)


def hyper_connections(x, mix, w1, w2, w3, w4):
    """Four-fold residual streams under sigmoids, and as many small MLPs."""
    streams = x.unsqueeze(1) * F.linear(x, mix).sigmoid().unsqueeze(-1)
    x = x + F.rms_norm(streams, (H,)).mean(1)
    for _ in range(2):
        norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + norm * F.linear(F.silu(F.linear(norm, w1)), w2).sigmoid()
        norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + norm * F.linear(F.silu(F.linear(norm, w3)), w4).sigmoid()
    return x


def stacked_shared_experts(x, gate, w1, w2):
    """Two stacked shared experts, every token through both, weighted by the last two of the router's scores."""
    scores = F.linear(x, gate).sigmoid()
    ids = scores[:, :-2].topk(K).indices
    picked = torch.cat((scores.gather(1, ids), scores[:, -2:]), dim=1)
    gammas = (picked / picked.sum(-1, keepdim=True))[:, K:]
    out = torch.bmm(silu_glu(torch.bmm(x.expand(2, T, H), w1[:2].mT)), w2[:2].mT)
    return (out * gammas.t().unsqueeze(-1)).sum(0)


def our_operator(x, gate, w1, w2):
    """What a block is replaced by hides nothing."""
    topk_weights, ids = softmax_router(x, gate)
    return moe_ops.fused_experts(x, w1, w2, topk_weights, ids)


def attention_op(q, k, v):
    """An operator of another library that is no MoE."""
    return torch.ops.forms_test.attention(q, k, v).softmax(-1).topk(2)


def _shapes(*shapes):
    return [torch.randn(shape) for shape in shapes]


_QKV = _shapes((E, T, H), (E, T, H), (E, T, H))
OTHERS = {
    attention_by_bmm: _QKV,
    attention_by_einsum: _QKV,
    multi_head_projections: _shapes((T, H), (E, H, 4), (E, 4, H)),
    per_head_mlp: _shapes((T, H), (E, H, 4), (E, 4, H)),
    ensemble: _shapes((T, H), (E, H, I), (E, I, H)),
    linear_attention: _QKV,
    lora_by_adapter: [*_shapes((T, H), (E, 4, H), (E, H, 4)), torch.randint(0, E, (T,))],
    product_keys: _shapes((T, H), (E, H), (E, H), (E, H)),
    sparse_attention_indexer: _shapes((T, H), (T, H), (H, H), (H, H)),
    mixture_of_depths: _shapes((T, H), (1, H), (I, H), (H, I)),
    paged_cache: [*_shapes((T, H), (E, 4, H)), torch.randint(0, E, (3,))],
    gated_mlp: _shapes((T, H), (1, H), (I, H), (H, I)),
    squeeze_and_excite: _shapes((T, H), (I, H), (H, I), (I, H), (H, I)),
    two_gated_branches: _shapes((T, H), (I, H), (H, I), (I, H), (H, I)),
    hyper_connections: _shapes((T, H), (4, H), (I, H), (H, I), (I, H), (H, I)),
    stacked_shared_experts: _shapes((T, H), (E, H), (E, 2 * I, H), (E, H, I)),
    our_operator: _shapes((T, H), (E, H), (E, 2 * I, H), (E, H, I)),
    attention_op: _QKV,
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_no_moe(other):
    assert named(other, *OTHERS[other]) == []
