"""Expert tails: every spelling of activation, layout and combine is read as what it computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_passes.match import Body
from tests.passes.blocks import E, H, I, K, T, batched, block, grouped, match, weights


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
