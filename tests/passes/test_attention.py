"""Attention that repeats its key and value heads: which calls stop repeating them, and which are left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.fx.experimental import symbolic_shapes
from torch.nn.attention import SDPBackend, sdpa_kernel

from compile_passes import attention
from compile_passes.passes import SHARE, run
from tests.corpus.families import build, tokens

B, HEADS, KV_HEADS, S, D = 2, 8, 2, 24, 16
REPEATS = HEADS // KV_HEADS


def expanded(x, n=REPEATS):
    """As transformers repeats heads."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, length, width).reshape(batch, heads * n, length, width)


def unsqueezed(x):
    return x.unsqueeze(2).expand(-1, -1, REPEATS, -1, -1).contiguous().view(x.shape[0], HEADS, x.shape[2], x.shape[3])


def interleaved(x):
    """As gpt-fast repeats heads."""
    return x.repeat_interleave(REPEATS, dim=1)


def tiled(x):
    """The other order of heads: 0 1 0 1 ... instead of 0 0 ... 1 1 ..."""
    return x.repeat(1, REPEATS, 1, 1)


def tiled_by_expand(x):
    return x[:, None].expand(B, REPEATS, KV_HEADS, S, D).reshape(B, HEADS, S, D)


def inputs(length=1, **options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, s, D, **options) for n, s in ((HEADS, length), (KV_HEADS, S), (KV_HEADS, S)))
    return q, k, v, torch.rand(B, 1, length, S) < 0.8


def attend(repeat, repeat_value=None):
    def step(q, k, v, mask):
        return F.scaled_dot_product_attention(q, repeat(k), (repeat_value or repeat)(v), attn_mask=mask)

    return step


def captured(step, *arguments, dynamic=False, by=SHARE, prepare=None):
    """(graph after a pass for attention, how much it changed, the rewritten graph's result)."""
    found = []

    def backend(gm, example_inputs):
        if prepare is not None:
            prepare(gm.graph)
        report = run(by, gm.graph)
        found.append((gm.graph, report.shared_heads + report.causal_masks))
        gm.recompile()
        return gm.forward

    torch.compiler.reset()
    result = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)(*arguments)
    (graph, changed), = found  # fmt: skip
    return graph, changed, result


@pytest.mark.parametrize("length", [1, S], ids=["decode", "prefill"])
@pytest.mark.parametrize("repeat", [expanded, unsqueezed, interleaved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_repeated_heads_are_shared(repeat, length, dynamic):
    arguments = inputs(length)
    graph, changed, result = captured(attend(repeat), *arguments, dynamic=dynamic)
    assert changed == 1
    names = [str(node.target) for node in graph.nodes]
    assert not any(word in name for name in names for word in ("expand", "repeat_interleave", "reshape"))
    torch.testing.assert_close(result, attend(repeat)(*arguments), rtol=0, atol=0)


def test_no_mask_and_other_options_stay():
    def step(q, k, v, mask):
        return F.scaled_dot_product_attention(q, expanded(k), expanded(v), is_causal=True, scale=0.3)

    arguments = inputs(S)
    graph, changed, result = captured(step, *arguments)
    call = next(node for node in graph.nodes if node.target is F.scaled_dot_product_attention)
    assert changed == 1 and call.kwargs == {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    torch.testing.assert_close(result, step(*arguments), rtol=0, atol=0)


def is_one_number(size: torch.SymInt) -> bool:
    """Whether a guard already says what ``size`` is: the graph is for that size alone."""
    return size.node.shape_env.replace(size.node.expr).is_number


def written_out(repeat):
    """As transformers' eager attention, with gpt-oss's sinks."""

    def step(q, k, v, mask):
        scores = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.25
        scores = scores.masked_fill(~mask, float("-inf"))
        sinks = torch.ones(1, HEADS, 1, 1).expand(B, -1, q.shape[2], -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return weights @ repeat(v)

    return step


@pytest.mark.parametrize("length", [1, S], ids=["decode", "prefill"])
@pytest.mark.parametrize("repeat", [expanded, unsqueezed, interleaved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_products_of_repeated_heads_are_of_shared_ones(repeat, length, dynamic):
    arguments = inputs(length)
    graph, changed, result = captured(written_out(repeat), *arguments, dynamic=dynamic)
    assert changed == 2
    products = [node for node in graph.nodes if "matmul" in str(node.target)]
    shapes = [node.meta["example_value"].shape for node in products]
    symbols = dynamic and length > 1
    # Before they are compared with numbers, which makes one of them.
    assert all((symbolic_shapes.is_symbolic(shape[2]) and not is_one_number(shape[2])) == symbols for shape in shapes)
    assert [shape[1:3] for shape in shapes] == 2 * [(KV_HEADS, REPEATS * length)]
    assert not any("repeat_interleave" in str(node.target) for node in graph.nodes)
    exact = written_out(repeat)(*(x.double() for x in arguments[:3]), arguments[3])
    error, original = ((got - exact).norm() for got in (result, written_out(repeat)(*arguments)))
    assert error <= 1.2 * original  # one rounding of each sum: whichever order a product of this shape has


@pytest.mark.parametrize("repeat", [tiled, tiled_by_expand], ids=lambda f: f.__name__)
def test_products_with_another_order_of_heads_are_left_alone(repeat):
    arguments = inputs()
    _, changed, result = captured(written_out(repeat), *arguments)
    assert changed == 0
    torch.testing.assert_close(result, written_out(repeat)(*arguments), rtol=0, atol=0)


def broadcast(q, k, v, mask):
    """One query head for all: not one for each repeated head."""
    return q[:, :1] @ expanded(k).mT


def overwritten_before_its_product(q, k, v, mask):
    keys = expanded(k)
    k.mul_(2.0)
    return q @ keys.mT


def in_another_dtype(q, k, v, mask):
    with torch.autocast("cpu", torch.bfloat16):
        return q @ expanded(k).mT


def mapped(q, k, v, mask):
    return torch.vmap(lambda one, other: one @ expanded(other).mT)(torch.stack([q, q]), torch.stack([k, k]))


@pytest.mark.parametrize(
    "step", [broadcast, overwritten_before_its_product, in_another_dtype, mapped], ids=lambda f: f.__name__
)
def test_products_that_are_left_alone(step):
    q, k, v, mask = inputs()
    _, changed, result = captured(step, q, k.clone(), v, mask)
    assert changed == 0
    torch.testing.assert_close(result, step(q, k.clone(), v, mask), rtol=0, atol=0)


def test_a_product_of_fewer_dimensions_is_left_alone():
    """As many queries as there are heads, and as many heads as sequences: sizes alone would fit."""
    q, k = torch.randn(HEADS, HEADS, D), torch.randn(HEADS, KV_HEADS, S, D)

    def step(q, k):
        return q @ expanded(k).mT

    _, changed, result = captured(step, q, k)
    assert changed == 0
    torch.testing.assert_close(result, step(q, k), rtol=0, atol=0)


@pytest.mark.parametrize("trained", ["all", "query", "keys"])
def test_products_in_training_are_left_alone(trained):
    q, k, v, mask = inputs()
    for name, tensor in {"query": q, "keys": k, "values": v}.items():
        tensor.requires_grad_(trained in ("all", name))

    def scores(q, k, v, mask):
        return q @ expanded(k).mT

    _, changed, result = captured(written_out(expanded) if trained == "all" else scores, q, k, v, mask)
    assert changed == 0
    result.sum().backward()
    assert (q.grad is not None, k.grad is not None) == (trained != "keys", trained != "query")


def test_a_product_with_copies_that_have_no_gradient_is_left_alone():
    """Its heads have one, which it would get."""

    def step(q, k, v, mask):
        with torch.no_grad():
            keys = expanded(k)
        return q @ keys.mT

    q, k, v, mask = inputs()
    _, changed, result = captured(step, q, k.requires_grad_(), v, mask)
    assert changed == 0 and not result.requires_grad


@pytest.mark.parametrize("repeat", [tiled, tiled_by_expand], ids=lambda f: f.__name__)
def test_another_order_of_heads_is_left_alone(repeat):
    arguments = inputs()
    _, changed, result = captured(attend(repeat), *arguments)
    assert changed == 0
    torch.testing.assert_close(result, attend(repeat)(*arguments), rtol=0, atol=0)


def test_one_of_the_two_repeated_is_left_alone():
    q, k, _, mask = inputs()
    v = torch.randn(B, HEADS, S, D)
    step = attend(expanded, lambda x: x)
    _, changed, result = captured(step, q, k, v, mask)
    assert changed == 0
    torch.testing.assert_close(result, step(q, k, v, mask), rtol=0, atol=0)


@pytest.mark.parametrize("repeat", [expanded, interleaved], ids=lambda f: f.__name__)
def test_a_cache_overwritten_after_the_copy_is_left_alone(repeat):
    def overwritten(q, k, v, mask):
        keys, values = repeat(k), repeat(v)
        k.mul_(2.0)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    q, k, v, mask = inputs()
    _, changed, result = captured(overwritten, q, k.clone(), v, mask)
    assert changed == 0
    torch.testing.assert_close(result, overwritten(q, k.clone(), v, mask), rtol=0, atol=0)


def cached(q, k, v, mask, new):
    k.index_copy_(2, torch.tensor([3]), new)
    v.index_copy_(2, torch.tensor([3]), new)
    return attend(expanded)(q, k, v, mask)


def test_a_cache_overwritten_before_the_copy_is_read_after_the_write():
    q, k, v, mask = inputs()
    new = torch.randn(B, KV_HEADS, 1, D)
    _, changed, result = captured(cached, q, k.clone(), v.clone(), mask, new)
    assert changed == 1
    torch.testing.assert_close(result, cached(q, k.clone(), v.clone(), mask, new), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True], ids=["masked", "causal"])
def test_training_shares_heads_where_the_kernel_differentiates_them(causal):
    q, k, v, mask = inputs(S, requires_grad=True, dtype=torch.float64)
    options = {"is_causal": True} if causal else {"attn_mask": mask | torch.eye(S, dtype=torch.bool)}

    def step(q, k, v):
        return F.scaled_dot_product_attention(q, expanded(k), expanded(v), **options)

    _, changed, result = captured(step, q, k, v)
    assert changed == 1
    grad = torch.randn_like(result)
    found = torch.autograd.grad(result, (q, k, v), grad)
    torch.testing.assert_close(found, torch.autograd.grad(step(q, k, v), (q, k, v), grad), rtol=0, atol=1e-12)


def viewed_without_gradient(x):
    """The fake tensor of a view that is taken under no_grad says that it requires grad."""
    with torch.no_grad():
        narrow = x.unsqueeze(2)
    return narrow.expand(-1, -1, REPEATS, -1, -1).reshape(B, HEADS, S, D)


def copied_without_gradient(x):
    with torch.no_grad():
        return expanded(x)


@pytest.mark.parametrize("repeat", [viewed_without_gradient, copied_without_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("without", ["both", "keys", "values"])
def test_heads_whose_copies_have_no_gradient_stay_repeated(repeat, without):
    """They would get one."""

    def step(q, k, v):
        keys, values = (expanded if without == "values" else repeat)(k), (expanded if without == "keys" else repeat)(v)
        return F.scaled_dot_product_attention(q, keys, values)

    q, k, v, _ = inputs(S, requires_grad=True)
    _, changed, result = captured(step, q, k, v)
    assert changed == 0
    result.sum().backward()
    assert (k.grad is None, v.grad is None) == (without != "values", without != "keys")


def test_heads_are_shared_where_nothing_of_it_has_a_gradient():
    def step(q, k, v):
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, expanded(k), expanded(v))

    q, k, v, _ = inputs(S, requires_grad=True)
    _, changed, result = captured(step, q, k, v)
    assert changed == 1 and not result.requires_grad


def test_training_by_another_kernel_is_left_alone(monkeypatch):
    monkeypatch.setattr(attention, "sdpa_kernel", lambda mode, tensors, **options: "EFFICIENT_ATTENTION")
    assert captured(attend(expanded), *inputs())[1] == 1
    _, changed, result = captured(attend(expanded), *inputs(requires_grad=True))
    assert changed == 0 and result.requires_grad


@pytest.mark.parametrize(("before", "after"), [("FLASH_ATTENTION", "MATH"), (None, None)], ids=str)
def test_another_kernel_is_left_alone(before, after, monkeypatch):
    monkeypatch.setattr(
        attention, "sdpa_kernel", lambda mode, tensors, **options: after if options.get("enable_gqa") else before
    )
    assert captured(attend(expanded), *inputs())[1] == 0


def test_a_kernel_that_the_code_chooses_is_left_alone():
    """Memory-efficient attention does not share heads, and torch has nothing else to choose there."""

    def step(q, k, v, mask):
        with sdpa_kernel(SDPBackend.MATH):
            return attend(expanded)(q, k, v, mask)

    arguments = inputs()
    _, changed, result = captured(step, *arguments)
    assert changed == 0
    torch.testing.assert_close(result, step(*arguments), rtol=0, atol=0)


def test_copies_that_are_read_elsewhere_stay():
    def step(q, k, v, mask):
        keys = expanded(k)
        return F.scaled_dot_product_attention(q, keys, expanded(v), attn_mask=mask), keys.sum()

    arguments = inputs()
    _, changed, (result, total) = captured(step, *arguments)
    assert changed == 1
    want, want_total = step(*arguments)
    torch.testing.assert_close(result, want, rtol=0, atol=0)
    torch.testing.assert_close(total, want_total)


@pytest.mark.parametrize(("family", "changed"), [("qwen3_moe", 2), ("gpt_oss", 4)])
def test_a_transformers_model_shares_heads_in_every_layer(family, changed):
    """Of gpt-oss, which writes attention out, in both products. Through Inductor: `tests/infra/test_benchmarks.py`."""
    model, ids = build(family, torch.float32, "grouped_mm", num_hidden_layers=2), tokens(2, 8)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0  # a mask, which is why transformers repeats the heads
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        want = model(ids, attention_mask=padded).logits
        got = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(ids, attention_mask=padded).logits
    assert counters["moe_ops"]["shared_heads"] == changed
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
