"""Expert weights that are a stored weight plus low-rank factors: no sum is made, in whatever way it is spelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import moe_ops
from compile_passes.match import MoEMatch
from compile_passes.passes import FUSE, run, run_all
from moe_ops.logs import quiet
from tests.ops.errors import assert_accurate
from tests.passes.blocks import (
    E,
    H,
    I,
    K,
    T,
    batched,
    block,
    capture,
    grouped,
    match,
    silu_glu,
    softmax_router,
    weights,
)
from tests.passes.compare import assert_same, difference
from tests.passes.test_masked_pairs import two_slots_tokens_first
from tests.passes.test_staged import CODE, batched_rows

R = 2


def inputs(dtype: torch.dtype = torch.float32, rank: int = R) -> dict[str, Tensor]:
    """Those of `weights`, and the factors of both weights."""
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=make) * 0.3).to(dtype)

    own = weights(dtype=dtype)
    factors = {"b1": normal(E, 2 * I, rank), "a1": normal(E, rank, H)}
    return own | factors | {"b2": normal(E, H, rank), "a2": normal(E, rank, I)}


Merge = Callable[[Tensor, Tensor, Tensor], Tensor]


def lora(merge: Merge, experts: Callable[..., Tensor] = batched, *, second: Merge | None = None, **options):
    """A block whose weights are ``merge(w, b, a)``."""
    other = merge if second is None else second

    def run(x, gate, w1, w2, b1, a1, b2, a2):
        return block(experts, **options)(x, gate, merge(w1, b1, a1), other(w2, b2, a2))

    return run


def by_rank_and_expert(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Factors as PEFT stores them: [out, r * E] and [E * r, in]."""
    stored = b.permute(1, 2, 0).reshape(b.shape[1], -1), a.reshape(-1, a.shape[2])
    left = stored[0].reshape(b.shape[1], -1, E)
    return w + 1.5 * torch.einsum("o r e, e r i -> e o i", left, stored[1].reshape(E, -1, a.shape[2]))


SPELLINGS: dict[str, Merge] = {
    "baddbmm": lambda w, b, a: torch.baddbmm(w, b, a, alpha=0.5),
    "baddbmm_as_a_method": lambda w, b, a: w.baddbmm(b, a),
    "bmm": lambda w, b, a: w + 0.5 * torch.bmm(b, a),
    "matmul_first": lambda w, b, a: (b @ a) / 4 + w,
    "einsum": lambda w, b, a: w + 2 * torch.einsum("enr,erk->enk", b, a),
    "einsum_of_the_other_order": lambda w, b, a: w + torch.einsum("xab,xca->xcb", a, b),
    "factors_as_peft_stores_them": by_rank_and_expert,
    "alpha_of_add": lambda w, b, a: torch.add(w, b @ a, alpha=0.5),
    "subtracted": lambda w, b, a: w - 0.5 * (b @ a),
    "scaled_factor": lambda w, b, a: w + (b * 0.5) @ a,
    "stored_transposed": lambda w, b, a: (w.mT.contiguous() + 0.5 * a.mT @ b.mT).transpose(1, 2),
    "a_transposed_term": lambda w, b, a: w + 0.5 * (a.mT @ b.mT).permute(0, 2, 1),
    "two_terms": lambda w, b, a: w + 0.5 * (b @ a) - 2 * torch.bmm(b.flip(0), a.flip(0)),
    "summed_in_double": lambda w, b, a: (w.double() + 0.5 * (b.double() @ a.double())).float(),
    "copied": lambda w, b, a: (w + 0.5 * (b @ a)).contiguous().clone(),
}  # fmt: skip


def rewritten(function: Callable[..., Tensor], **given: Tensor) -> tuple[MoEMatch, fx.Graph]:
    """The one match of a function, which is fused, and the graph that becomes of it."""
    gm = capture(function, **given)
    with quiet():
        report = run(FUSE, gm.graph)
    gm.graph.lint()
    (decision,) = [*report.fused, *report.staged]
    assert not report.errors
    return decision.match, gm.graph


VIEWS = (
    "view",
    "transpose",
    "permute",
    "getattr",
    "mT",
    "detach",
    "alias",
    "t",
    "as_strided",
    "expand",
    "getitem",
    "to",
)


def made_as_large(graph: fx.Graph, size: int) -> list[str]:
    """Calls of a graph that make a tensor [E, ., .] of ``size`` elements and more."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        large = isinstance(value, Tensor) and value.dim() == 3 and value.numel() >= size
        if node.op.startswith("call_") and large and E in value.shape and name not in VIEWS:
            found.append(f"{node.name}: {name} {list(value.shape)}")
    return found


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelled(name: str) -> None:
    program = lora(SPELLINGS[name])
    row, graph = rewritten(program, **inputs())
    assert set(row.ranks) == {R} and row.merged is None
    assert not made_as_large(graph, E * H * I) or name == "stored_transposed"  # the copy is the program's own
    assert assert_same(program, *inputs().values(), gradients=True, fullgraph=True).fused == 1


def dense(x, ids, topk_weights, w1, w2):
    """Every token through every expert."""
    scores = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids, topk_weights.to(x.dtype))
    h = silu_glu(torch.einsum("th,enh->ten", x, w1))
    return torch.einsum("ten,te->tn", torch.einsum("tei,ehi->teh", h, w2), scores)


def one_by_one(x, ids, topk_weights, w1, w2):
    out = torch.zeros_like(x)
    for e in range(E):
        weight = torch.where(ids == e, topk_weights, 0.0).sum(-1, keepdim=True).to(x.dtype)
        out = out + weight * F.linear(silu_glu(F.linear(x, w1[e])), w2[e])
    return out


def weighted_before(x, ids, topk_weights, w1, w2):
    rows = (x.unsqueeze(1) * topk_weights.unsqueeze(-1).to(x.dtype)).reshape(-1, H)
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
    return torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1).view(-1, K, H).sum(1)


def gate_and_up(x, ids, topk_weights, w1, w2):
    """Two first weights."""
    flat, rows = ids.reshape(-1), x.repeat_interleave(K, dim=0).unsqueeze(-1)
    gate, up = (torch.bmm(w[flat], rows).squeeze(-1) for w in w1.chunk(2, 1))
    out = torch.bmm(w2[flat], (F.gelu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)


def wide_router(x, gate):
    return F.linear(x, gate).softmax(-1).topk(K, dim=-1)


def up_first(h: Tensor) -> Tensor:
    up, gate = h[..., ::2], h[..., 1::2]
    return (up.clamp(-7, 7) + 1) * (gate := gate.clamp(max=7)) * torch.sigmoid(1.702 * gate)


def not_gated(h: Tensor) -> Tensor:
    return F.relu(h).square()


ADD = SPELLINGS["bmm"]


def plain(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return w


FORMS: dict[str, tuple[Callable[..., Tensor], torch.dtype, int]] = {
    "grouped_bf16": (lora(ADD, grouped), torch.bfloat16, 2),
    "dense": (lora(ADD, dense), torch.float32, 2),
    "one_by_one": (lora(ADD, one_by_one), torch.float32, 2),
    "weighted_before": (lora(ADD, weighted_before), torch.float32, 2),
    "up_first_and_interleaved": (lora(ADD, activation=up_first), torch.float32, 2),
    "first_only": (lora(ADD, second=plain), torch.float32, 1),
    "second_only": (lora(plain, second=ADD), torch.float32, 1),
    "second_only_of_two_first_weights": (lora(plain, gate_and_up, second=ADD), torch.float32, 1),
    "staged": (lora(ADD, batched_rows, after=CODE["rms_norm"]), torch.float32, 2),
    "in_double": (lora(ADD, router=wide_router), torch.float64, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_in_every_form(name: str) -> None:
    program, dtype, count = FORMS[name]
    given = inputs(dtype)
    row, graph = rewritten(program, **given)
    assert row.ranks == (R,) * count and row.merged is None
    assert not [text for text in made_as_large(graph, E * H * I) if "chunk" not in text]
    outcome = assert_same(program, *given.values(), gradients=True, fullgraph=True)
    assert outcome.fused == 1 or name == "staged"


def test_separate_first_weights_with_biases_and_no_gate() -> None:
    def run(x, gate, w1, w2, b1, a1, b2, a2, bias1, bias2):
        topk_weights, ids = softmax_router(x, gate)
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, dim=0).unsqueeze(-1)
        halves = zip(w1.chunk(2, 1), b1.chunk(2, 1), bias1.chunk(2, 1), strict=True)
        first, up = (torch.bmm(ADD(w.clone(), b, a1)[flat], rows).squeeze(-1) + c[flat] for w, b, c in halves)
        out = torch.bmm(ADD(w2, b2, a2)[flat], (F.silu(first) * up).unsqueeze(-1)).squeeze(-1) + bias2[flat]
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    own = inputs()
    given = own | {"bias1": own["w1"][:, :, 0].clone(), "bias2": own["w2"][:, :, 0].clone()}
    assert match(run, **given).ranks == (R, R, R)
    assert assert_same(run, *given.values(), gradients=True, fullgraph=True).fused == 1


def test_an_activation_without_a_gate() -> None:
    program = lora(ADD, activation=not_gated)
    own = inputs()
    given = {**own, "w2": torch.cat((own["w2"], own["w2"]), 2), "a2": torch.cat((own["a2"], own["a2"]), 2)}
    assert match(program, **given).ranks == (R, R)
    assert assert_same(program, *given.values(), gradients=True).fused == 1


def test_any_number_of_tokens() -> None:
    program, given = lora(ADD), inputs()
    torch.compiler.reset()
    compiled = torch.compile(program, backend="moe_ops_eager", dynamic=True, fullgraph=True)
    with quiet(), torch.no_grad():
        compiled(**given)
        with torch.compiler.set_stance("fail_on_recompile"):
            for count in (2, 29):
                own = {**given, "x": torch.randn(count, H)}
                assert difference(compiled(**own), program(**own)) is None


def test_no_tokens_in_both_directions() -> None:
    """In the graph of any number of them, which Dynamo itself does not enter with none."""
    given = inputs()
    torch._dynamo.mark_dynamic(given["x"], 0)
    gm = capture(lora(ADD), **given)
    with quiet():
        assert run(FUSE, gm.graph).fused
    gm.recompile()
    none = {**{name: value.requires_grad_() for name, value in inputs().items()}, "x": torch.randn(0, H)}
    named = {f"L_{name}_": value for name, value in none.items()}
    (out,) = gm(*(named.get(node.target, 0) for node in gm.graph.find_nodes(op="placeholder")))
    out.sum().backward()
    assert out.shape == (0, H) and not none["a1"].grad.any() and not none["b2"].grad.any()


@pytest.mark.usefixtures("poisoned_memory")
def test_pairs_that_are_dropped() -> None:
    """Their rows are memory that nobody wrote, in both directions."""
    given = inputs()

    def program(x, gate, w1, w2, b1, a1, b2, a2):
        return two_slots_tokens_first(x, gate, ADD(w1, b1, a1), ADD(w2, b2, a2))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert match(program, **given).ranks == (R, R)
        outcome = assert_same(program, *given.values(), gradients=True)
    assert outcome.fused == 1


def half_of_the_graph_without_gradients(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
    with torch.no_grad():
        delta = b @ a
    return w + delta


def in_place(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return w.clone().add_(b @ a)


# What is added is no known product, or is no cheaper apart: the weight is made, and the block is fused as ever.
MERGED: dict[str, tuple[Merge, str]] = {
    "any_tensor": (lambda w, b, a: w + w.roll(1, 0), "not known to be a product"),
    "mean_over_the_experts": (lambda w, b, a: w + (b @ a).mean(0, keepdim=True), "not known to be a product"),
    "one_factor_for_all_experts": (lambda w, b, a: w + b @ a[0], "not known to be a product"),
    "one_expert_of_a_factor": (lambda w, b, a: w + b @ a[:1], "not known to be a product"),
    "one_expert_for_all": (lambda w, b, a: w + torch.bmm(b[:1], a[:1]), "not known to be a product"),
    "summed_over_the_experts": (lambda w, b, a: w + torch.einsum("enr,erk->nk", b, a), "not known to be a product"),
    "experts_of_the_other_factor": (lambda w, b, a: w + torch.einsum("enr,frk->enk", b, a), "not known to be"),
    "a_function_of_the_product": (lambda w, b, a: w + torch.tanh(b @ a), "not known to be a product"),
    "a_factor_that_is_a_tensor": (lambda w, b, a: w + (b @ a) * a.amax(), "not known to be a product"),
    "a_scaled_weight": (lambda w, b, a: torch.baddbmm(w, b, a, beta=0.5), "not known to be a product"),
    "without_gradients": (half_of_the_graph_without_gradients, "torch.no_grad()"),
    "a_high_rank": (lambda w, b, a: w + torch.cat([b] * 8, 2) @ torch.cat([a] * 8, 1), "too high"),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_what_is_no_low_rank_term_stays(name: str) -> None:
    merge, reason = MERGED[name]
    program, trains = lora(merge, second=plain), name == "without_gradients"
    outcome = assert_same(program, *inputs().values(), gradients=True, fullgraph=True)
    assert outcome.fused == 1
    given = {key: value.requires_grad_(trains) for key, value in inputs().items()}
    with torch.enable_grad() if trains else torch.no_grad(), quiet():
        report = moe_ops.explain(program, **given)
    (row,) = report.fused
    assert reason in row.merged_note and not row.low_rank and row.merged_note in str(report)


def test_a_product_of_the_wrong_order_of_experts_is_multiplied_in_that_order() -> None:
    program = lora(lambda w, b, a: w + b.flip(0) @ a)
    assert match(program, **inputs()).ranks == (R, R)
    assert assert_same(program, *inputs().values(), gradients=True).fused == 1


@pytest.mark.parametrize("what", ["sum", "term"])
def test_a_sum_that_is_read_elsewhere_is_made(what: str) -> None:
    def program(x, gate, w1, w2, b1, a1, b2, a2):
        term = b1 @ a1
        merged = w1 + term
        return block(batched)(x, gate, merged, w2 + b2 @ a2), (merged if what == "sum" else term).square().mean()

    row = match(program, **inputs())
    assert row.ranks == () and "is also used by" in row.merged.reason
    assert assert_same(program, *inputs().values(), gradients=True).fused == 1


def test_a_sum_of_which_parts_go_into_several_products_is_made() -> None:
    program = lora(ADD, gate_and_up)
    assert match(program, **inputs()).ranks == (R,)
    assert assert_same(program, *inputs().values(), gradients=True).fused == 1


def test_weights_and_factors_may_be_read_elsewhere() -> None:
    def program(x, gate, w1, w2, b1, a1, b2, a2):
        return lora(ADD)(x, gate, w1, w2, b1, a1, b2, a2), (w1 + b1.sum() * a2.mean()).square().mean()

    assert match(program, **inputs()).ranks == (R, R)
    assert assert_same(program, *inputs().values(), gradients=True).fused == 1


def test_a_factor_that_is_overwritten_later_is_not_kept_for_the_backward() -> None:
    def program(x, gate, w1, w2, b1, a1, b2, a2):
        factor = b1 * 1
        out = block(batched)(x, gate, w1 + factor @ a1, w2)
        factor.mul_(2)
        return out, factor.sum()

    assert_same(program, *inputs().values())


def test_factors_in_half_that_are_out_of_range_are_not_cast() -> None:
    def program(x, gate, w1, w2, b1, a1, b2, a2):
        wide = ((b1.float() * 1e6) @ (a1.float() * 1e-6)).half()
        return block(batched)(x, gate, w1 + wide, w2)

    given = inputs(torch.float16)
    assert "has numbers that" in match(program, **given).merged.reason
    assert assert_same(program, *given.values()).fused == 1


def kept(graphs: list[fx.Graph]) -> Callable[..., Callable[..., object]]:
    """A backend that keeps the forward and the backward graph of what our passes make."""

    def keep(gm: fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    inner = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def backend(gm: fx.GraphModule, given: list[Tensor]) -> Callable[..., object]:
        with quiet():
            run_all(gm)
        return inner(gm, given)

    return backend


def test_no_sum_and_no_gradient_of_one_in_either_direction() -> None:
    given, graphs = inputs(), list[fx.Graph]()
    for name in ("x", "gate", "a1", "b1", "a2", "b2"):
        given[name].requires_grad_()
    torch.compiler.reset()
    torch.compile(lora(SPELLINGS["baddbmm"]), backend=kept(graphs), fullgraph=True)(**given).sum().backward()
    assert len(graphs) == 2 and [made_as_large(graph, E * H * I) for graph in graphs] == [[], []]
    assert given["w1"].grad is None and given["a1"].grad.abs().sum() > 0


@pytest.mark.parametrize("factor", [0.1, 1.0], ids=["small_term", "large_term"])
def test_bf16_is_no_further_from_float64_than_the_sum(factor: float) -> None:
    """Results and gradients, against the program that rounds the sum; factors in fp32, as PEFT keeps them."""
    make = torch.Generator().manual_seed(3)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=make) * scale

    count, hidden, inner, rank = 256, 128, 64, 4
    x, weight = normal(count, hidden, scale=1), normal(count, hidden, scale=1).double()
    w1, w2 = normal(E, 2 * inner, hidden, scale=0.09), normal(E, hidden, inner, scale=0.12)
    factors = [normal(E, 2 * inner, rank, scale=factor), normal(E, rank, hidden, scale=0.05)]
    factors += [normal(E, hidden, rank, scale=factor), normal(E, rank, inner, scale=0.06)]
    ids, scores = torch.rand(count, E, generator=make).topk(K).indices, torch.rand(count, K, generator=make)
    x, w1, w2 = x.bfloat16(), w1.bfloat16(), w2.bfloat16()

    def program(x, scores, w1, w2, b1, a1, b2, a2):
        first, second = (torch.baddbmm(w, b.to(w.dtype), a.to(w.dtype)) for w, b, a in ((w1, b1, a1), (w2, b2, a2)))
        flat, rows = ids.reshape(-1), x.repeat_interleave(K, dim=0).unsqueeze(-1)
        out = torch.bmm(second[flat], silu_glu(torch.bmm(first[flat], rows).squeeze(-1)).unsqueeze(-1)).squeeze(-1)
        return (out * scores.reshape(-1, 1).to(out.dtype)).view(-1, K, hidden).sum(1)

    def outcome(run, convert):
        given = [convert(value).requires_grad_() for value in (x, scores, w1, w2, *factors)]
        for frozen in given[2:4]:
            frozen.requires_grad_(False)
        out = run(*given)
        (out.double() * weight).sum().backward()
        return [out.detach(), *(value.grad for value in (*given[:2], *given[4:]))]

    names = ("x", "scores", "w1", "w2", "b1", "a1", "b2", "a2")
    assert match(program, **dict(zip(names, (x, scores, w1, w2, *factors), strict=True))).ranks == (rank, rank)
    torch.compiler.reset()
    exact = outcome(program, lambda value: value.detach().double())
    plain = outcome(program, lambda value: value.detach().clone())
    with quiet():
        ours = outcome(torch.compile(program, backend="moe_ops_eager", fullgraph=True), lambda v: v.detach().clone())
    for name, *row in zip(("out", "x", "scores", "b1", "a1", "b2", "a2"), ours, exact, plain, strict=True):
        assert_accurate(*row, dtype=torch.bfloat16, what=name)
