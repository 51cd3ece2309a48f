"""The graph before and after, the metadata of new nodes, gradients, and what must stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx

import moe_ops
from compile_passes.builder import operator_name
from compile_passes.passes import FUSE, JOIN, run
from tests.passes.blocks import E, H, K, batched, block, capture, softmax_router, weights


def text(graph: fx.Graph) -> str:
    """One line per call: name = target(arguments), those of our operators without the ones at their defaults."""
    lines = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
            args, kwargs = node.args, node.kwargs
            if operator_name(node):
                while args[-1] is None:
                    args = args[:-1]
                defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
                kwargs = {key: value for key, value in kwargs.items() if defaults.get(key, ...) != value}
            keywords = "".join(f", {key}={value}" for key, value in kwargs.items())
            lines.append(f"{node.name} = {target}({', '.join(map(str, args))}{keywords})")
    return "\n".join(lines)


def test_grouped_before_and_after():
    gm = capture(block(), **weights())
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
float_1 = float(linear)
softmax = softmax(float_1, -1)
topk = topk(softmax, 2, dim=-1)
values = getitem(topk, 0)
ids = getitem(topk, 1)
sum_1 = sum(values, -1, keepdim=True)
topk_weights = truediv(values, sum_1)
flat = reshape(ids, -1)
sort = sort(flat)
ordered = getitem(sort, 0)
perm = getitem(sort, 1)
floordiv = floordiv(perm, 2)
rows = getitem(l_x_, floordiv)
float_2 = float(ordered)
histc = histc(float_2, bins=8, min=0, max=7)
offsets = cumsum(histc, 0, dtype=torch.int32)
transpose = transpose(l_w1_, -2, -1)
h = _grouped_mm(rows, transpose, offs=offsets, bias=None, out_dtype=None)
chunk = chunk(h, 2, dim=-1)
gate = getitem(chunk, 0)
up = getitem(chunk, 1)
silu = silu(gate)
mul = mul(silu, up)
transpose_1 = transpose(l_w2_, -2, -1)
out = _grouped_mm(mul, transpose_1, offs=offsets, bias=None, out_dtype=None)
inverse = empty_like(perm)
arange = arange(24, device=cpu)
setitem = setitem(inverse, perm, arange)
out_1 = getitem(out, inverse)
view = view(out_1, -1, 2, 32)
unsqueeze = unsqueeze(topk_weights, -1)
mul_1 = mul(view, unsqueeze)
sum_2 = sum(mul_1, 1)
to = to(sum_2, torch.bfloat16)""",
    )
    run(FUSE, gm.graph)
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
fused_topk = moe_ops.fused_topk.default(linear, top_k=2)
topk_weights_1 = getitem(fused_topk, 0)
topk_ids = getitem(fused_topk, 1)
fused_experts = moe_ops.fused_experts.default(l_x_, l_w1_, l_w2_, topk_weights_1, topk_ids)""",
    )
    run(JOIN, gm.graph)
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
fused_moe = moe_ops.fused_moe.default(l_x_, linear, l_w1_, l_w2_, top_k=2)""",
    )


def test_batched_tail_with_a_router_that_stays():
    def router(x, gate):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        return values * torch.linspace(0.5, 1.5, E)[ids], ids

    gm = capture(block(batched, router=router), **weights())
    run(FUSE, gm.graph)
    run(JOIN, gm.graph)
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
float_1 = float(linear)
softmax = softmax(float_1, -1)
topk = topk(softmax, 2)
values = getitem(topk, 0)
ids = getitem(topk, 1)
linspace = linspace(0.5, 1.5, 8)
getitem_2 = getitem(linspace, ids)
topk_weights = mul(values, getitem_2)
fused_experts = moe_ops.fused_experts.default(l_x_, l_w1_, l_w2_, topk_weights, ids)""",
    )


def test_in_place_router_dies_with_its_writes():
    def router(x, gate):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K)
        values /= values.sum(-1, keepdim=True)
        return values, ids

    gm = capture(block(router=router), **weights())
    run(FUSE, gm.graph)
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
fused_topk = moe_ops.fused_topk.default(linear, top_k=2)
topk_weights = getitem(fused_topk, 0)
topk_ids = getitem(fused_topk, 1)
fused_experts = moe_ops.fused_experts.default(l_x_, l_w1_, l_w2_, topk_weights, topk_ids)""",
    )


def test_new_nodes_have_shapes_and_lines():
    gm = capture(block(), **weights(), dynamic=True)
    run(FUSE, gm.graph)
    (fused,) = (n for n in gm.graph.nodes if n.target is torch.ops.moe_ops.fused_experts.default)
    value = fused.meta["example_value"]
    assert value.dim() == 2 and value.shape[1] == H and value.dtype == torch.bfloat16
    assert isinstance(value.shape[0], torch.SymInt)
    assert "blocks.py" in fused.meta["stack_trace"]


def in_three(x, gate):
    """Logits [2, T / 2, E]."""
    values, ids = F.linear(x.view(2, -1, H), gate).softmax(-1).topk(K)
    return values.view(-1, K), ids.view(-1, K)


@pytest.mark.parametrize("router", [softmax_router, in_three])
def test_same_numbers(router):
    inputs = weights(dtype=torch.float32)
    gm = capture(block(batched, router), **inputs)
    run(FUSE, gm.graph)
    run(JOIN, gm.graph)
    gm.recompile()
    names = [n.target.removeprefix("L_").removesuffix("_") for n in gm.graph.nodes if n.op == "placeholder"]
    (output,) = gm(*(inputs[name] for name in names))
    torch.testing.assert_close(output, block(batched, router)(**inputs))


def test_gradients_flow_through_the_rewritten_graph():
    inputs = {name: value.requires_grad_() for name, value in weights(dtype=torch.float32).items()}
    expected = torch.autograd.grad(block(batched)(**inputs).square().sum(), list(inputs.values()))
    torch.compiler.reset()
    compiled = torch.compile(block(batched), backend="moe_ops_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(**inputs).square().sum(), list(inputs.values()))
    for name, one, other in zip(inputs, got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_autocast_rows_keep_their_dtype():
    """fp32 tokens, bf16 experts: rows are cast before the product, the sum is cast back."""

    def experts(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, dim=0).to(w1.dtype)
        gate, up = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)

    inputs = weights()
    inputs["x"], inputs["gate"] = inputs["x"].float(), inputs["gate"].float()
    gm = capture(block(experts), **inputs)
    report = run(FUSE, gm.graph)
    assert len(report.fused) == 1
    assert gm.graph.output_node().args[0][0].meta["example_value"].dtype == torch.float32


def test_fp16_of_autocast_is_not_the_bf16_of_the_weights():
    """Neither is the narrower one: what autocast rounds to is what is multiplied."""
    inputs = weights()
    inputs["x"], inputs["gate"] = inputs["x"].float(), inputs["gate"].float()
    gold = block(batched)(**{name: value.double() for name, value in inputs.items()})
    torch.compiler.reset()
    compiled = torch.compile(block(batched), backend="moe_ops_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        theirs, got = block(batched)(**inputs), compiled(**inputs)
    assert (got.double() - gold).norm() <= 1.1 * (theirs.double() - gold).norm()


def test_nothing_else_is_touched():
    def run_both(x, gate, w1, w2):
        scores = F.linear(x, gate).softmax(-1)
        buffer = torch.zeros(E)
        buffer.add_(scores.float().sum(0))
        return block()(x, gate, w1, w2), buffer

    gm = capture(run_both, **weights())
    run(FUSE, gm.graph)
    assert any(node.target == "add_" for node in gm.graph.nodes)


def test_inserted_calls_spell_out_every_argument():
    """AOTInductor counts the arguments of a schema, and knows no defaults."""
    gm = capture(block(), **weights())
    run(FUSE, gm.graph)
    calls = [node for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {operator_name(node) for node in calls} >= {"fused_topk", "fused_experts"}
    for node in calls:
        assert len(node.args) + len(node.kwargs) == len(node.target._schema.arguments), node


def test_router_of_the_models_own_call():
    """`experts_implementation="moe_ops"` calls the operator itself; its router is fused and joined all the same."""

    def experts(x, ids, topk_weights, w1, w2):
        return moe_ops.fused_experts(x, w1, w2, topk_weights, ids)

    gm = capture(block(experts), **weights())
    run(FUSE, gm.graph)
    run(JOIN, gm.graph)
    assert_expected_inline(
        text(gm.graph),
        """\
linear = linear(l_x_, l_gate_)
fused_moe = moe_ops.fused_moe.default(l_x_, linear, l_w1_, l_w2_, (), (), top_k=2)""",
    )
