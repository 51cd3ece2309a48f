"""Programs in which one step of a proof has to look twice: at which values a sum is of, at what a name stands for, at
what a cast does to a number that nobody has bounded, at numbers that meet zeros, at how a result lies in memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (defines the operator)
from torch import Tensor

import moe_ops
from tests.passes.compare import check

T, E, K, H, I = 12, 8, 2, 32, 16
grouped_product = torch.ops.transformers.grouped_mm_fallback


def given(experts: int = E) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, the router's weight, and both stacked weights."""
    torch.manual_seed(0)
    shapes = ((T, H), (experts, H), (experts, 2 * I, H), (experts, H, I))
    x, *rest = (torch.randn(shape) for shape in shapes)
    return (x, *(0.3 * weight for weight in rest))


def glu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def routed(x: Tensor, gate: Tensor, of: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1)):
    return torch.topk(of(F.linear(x, gate)), K, -1)


def gathered(x: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor, act=glu, second: Tensor | None = None):
    """One product for every pair; ``second``: other ids for the second weight."""
    pairs, width = ids.reshape(-1), ids.shape[-1]
    hidden = torch.bmm(w1[pairs], x.repeat_interleave(width, 0).unsqueeze(-1)).squeeze(-1)
    other = pairs if second is None else second.reshape(-1)
    out = torch.bmm(w2[other], act(hidden).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return out.view(-1, width, x.shape[1]).sum(1)


def by_expert(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor, number=lambda ids: ids, weigh=lambda w: w):
    """Each expert's weighted results."""
    weights, ids = routed(x, gate)
    return [
        (weigh(weights) * (number(ids) == e)).sum(-1, keepdim=True) * (glu(x @ w1[e].t()) @ w2[e].t()) for e in range(E)
    ]


def doubled(*inputs: Tensor) -> Tensor:
    first, second, *rest = by_expert(*inputs)
    out = first + second
    out = out + out
    for part in rest:
        out = out + part
    return out


SUMS = {
    "the first twice": lambda *inputs: sum(parts := by_expert(*inputs), parts[0]),
    "one twice in a row": lambda *inputs: (lambda parts: sum(parts[1:], parts[0]) + parts[3])(by_expert(*inputs)),
    "a partial sum twice": doubled,
    "one in place of another": lambda *inputs: (lambda parts: sum([*parts[:-1], parts[0]]))(by_expert(*inputs)),
}


@pytest.mark.parametrize("form", SUMS)
def test_a_sum_that_has_an_expert_twice_is_not_the_layers(form):
    outcome = check(SUMS[form], *given(), gradients=True, fullgraph=True)
    assert outcome.problem is None


def test_a_sum_of_each_once_is():
    assert check(lambda *inputs: sum(by_expert(*inputs)), *given(), gradients=True, fullgraph=True).fused == 1


@torch._dynamo.allow_in_graph
def gelu(x):
    return x * torch.sigmoid(1.702 * x) + x


@torch._dynamo.allow_in_graph
def softmax(x, dim):
    return torch.softmax(x / 0.3, dim)


@torch._dynamo.allow_in_graph
def sigmoid(x):
    return torch.sigmoid(x) * 0.5 + 0.2


@torch._dynamo.allow_in_graph
def topk(x, k, dim):
    return torch.topk(-x, k, dim)


NAMED = {
    "gelu": lambda x, gate, w1, w2: gathered(x, *routed(x, gate), w1[:, :I], w2, act=gelu),
    "softmax": lambda x, gate, w1, w2: gathered(x, *routed(x, gate, lambda logits: softmax(logits, dim=-1)), w1, w2),
    "sigmoid": lambda x, gate, w1, w2: gathered(x, *routed(x, gate, sigmoid), w1, w2),
    "topk": lambda x, gate, w1, w2: gathered(x, *topk(F.linear(x, gate), K, -1), w1, w2),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_function_with_a_name_of_torchs_is_not_torchs(name):
    assert check(NAMED[name], *given(), fullgraph=True).problem is None


NUMBERS = {  # of one id for each token, the experts, and what is done to the number
    "bool": (torch.tensor([0, 1, 4, 2] * 3), 2, lambda ids: ids.bool().long()),
    "uint8": (torch.randint(0, 10**6, (T,)), 256, lambda ids: ids.to(torch.uint8).long()),
    "int8": (torch.arange(T) + 256 * torch.arange(T), 128, lambda ids: ids.to(torch.int8).long()),
    "int32": (torch.arange(T) % E + 2**32, E, lambda ids: ids.int()),
    "float": (torch.arange(T) % E / 2 + 1.25, E, lambda ids: ids.long()),
}


@pytest.mark.parametrize("cast", NUMBERS)
def test_a_cast_that_makes_other_numbers_is_not_looked_through(cast):
    numbers, experts, change = NUMBERS[cast]

    def program(x, numbers, w1, w2):
        return gathered(x, x[:, :1] * 1, change(numbers).unsqueeze(1), w1, w2)

    x, _, w1, w2 = given(experts)
    outcome = check(program, x, numbers, w1, w2, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


FRACTIONS = {"halves": lambda ids: ids / 2, "between": lambda ids: ids.float() - 0.5}


@pytest.mark.parametrize("form", FRACTIONS)
def test_fractions_are_no_ids(form):
    outcome = check(lambda *inputs: sum(by_expert(*inputs, number=FRACTIONS[form])), *given(), fullgraph=True)
    assert outcome.problem is None


def test_ids_as_floats_are_ids():
    outcome = check(lambda *inputs: sum(by_expert(*inputs, number=lambda ids: ids.float())), *given(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda logits: F.dropout(logits, 0.5),
    "alpha_dropout": lambda logits: F.alpha_dropout(logits, 0.5, training=True),
    "gumbel_softmax": lambda logits: F.gumbel_softmax(logits),
    "rand_like": lambda logits: logits + torch.rand_like(logits),
}


def drawn_twice(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    weights = routed(x, gate)[0]
    (_, first), (_, second) = routed(x, gate, draw), routed(x, gate, draw)
    return gathered(x, weights, first, w1, w2, second=second)


def run_alike(program: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Eagerly and compiled, from one state of the generator."""
    torch.compiler.reset()
    results = []
    for run in (program, torch.compile(program, backend="moe_ops_eager", fullgraph=True)):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(run(*inputs))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_twice_are_two_draws(draw):
    run_alike(lambda *inputs: drawn_twice(*inputs, draw=DRAWS[draw]), *given())


def test_weights_are_dropped_for_each_expert():
    run_alike(lambda *inputs: sum(by_expert(*inputs, weigh=lambda weights: F.dropout(weights, 0.5))), *given())


ALIKE = {
    "rms_norm and layer_norm": (
        lambda logits: torch.rms_norm(logits, (E,), torch.linspace(-1, 1, E)),
        lambda logits: torch.layer_norm(logits, (E,), torch.linspace(-1, 1, E)),
    ),
    "norms of a matrix and of its numbers": (
        lambda logits: logits + torch.linspace(-1, 1, E) * torch.linalg.norm(logits, 1),
        lambda logits: logits + torch.linspace(-1, 1, E) * torch.norm(logits, 1),
    ),
}


@pytest.mark.parametrize("pair", ALIKE)
def test_functions_with_one_word_for_them_are_not_one(pair):
    one, other = ALIKE[pair]

    def program(x, gate, w1, w2):
        weights = routed(x, gate)[0]
        return gathered(x, weights, routed(x, gate, one)[1], w1, w2, second=routed(x, gate, other)[1])

    assert check(program, *given(), fullgraph=True).problem is None


def sorted_rows(x, weights, ids, w1, w2, bias, masked):
    """transformers' form, with a bias that rows of no expert get as well."""
    flat = ids.reshape(-1)
    ordered, perm = flat.sort(stable=True)
    ends = torch.histc(flat.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    out = grouped_product(glu(grouped_product(x[perm // K], w1.mT, ends)), w2.mT, ends) + bias[ordered.clamp(0, E - 1)]
    if masked:
        out = out.masked_fill((ordered >= E).unsqueeze(-1), 0.0)
    return torch.zeros_like(x).index_add(0, perm // K, out * weights.reshape(-1)[perm].unsqueeze(-1))


@pytest.mark.parametrize("masked", [True, False], ids=["zeroed", "kept"])
def test_a_bias_of_rows_of_no_expert_counts_where_nothing_zeroes_them(masked):
    x, _, w1, w2 = given()
    ids = torch.randint(0, E, (T, K))
    ids[3, 1] = E
    inputs = (x, torch.rand(T, K), ids, w1, w2, torch.randn(E, H))
    outcome = check(lambda *inputs: sorted_rows(*inputs, masked=masked), *inputs, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, int(masked))


def added_into_zeros(x, gate, w1, w2):
    """The result lies in memory as ``x`` does."""
    weights, ids = routed(x, gate)
    rows = torch.arange(x.shape[0]).repeat_interleave(K)
    pairs = ids.reshape(-1)
    hidden = torch.bmm(w1[pairs], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[pairs], glu(hidden).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return torch.zeros_like(x).index_add_(0, rows, out)


AFTERWARDS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda out: out,
    "view of the transpose": lambda out: out.t().view(-1),
    "as_strided": lambda out: out.as_strided((4,), (1,)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("after", AFTERWARDS)
def test_a_result_lies_as_the_blocks_own(after, dynamic):
    x, gate, w1, w2 = given()
    x = x.t().contiguous().t()

    def program(*inputs):
        return AFTERWARDS[after](added_into_zeros(*inputs))

    torch.compiler.reset()
    with torch.no_grad():
        assert moe_ops.explain(program, x, gate, w1, w2).fused
        expected = program(x, gate, w1, w2)
        got = torch.compile(program, backend="moe_ops_eager", fullgraph=True, dynamic=dynamic)(x, gate, w1, w2)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def spread(x: Tensor, gate: Tensor) -> Tensor:
    weights, ids = routed(x, gate)
    return torch.zeros(x.shape[0], E).scatter(1, ids, weights)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by 0": lambda x, gate: spread(x, gate) / x[:, :1].relu(),
    "times infinity": lambda x, gate: spread(x, gate) * (x[:, :1] * 1e20).exp(),
    "times an infinite number": lambda x, gate: spread(x, gate) * float("inf"),
    "NaN where nothing was chosen": lambda x, gate: (spread(x, gate) > 0) * torch.sigmoid((x[:, :E] - 0.5).sqrt()),
    "times a number of the token": lambda x, gate: spread(x, gate) * torch.sigmoid(x[:, :1]),
    "chosen by what multiplies": lambda x, gate: (lambda scores: scores * torch.zeros_like(scores).scatter(
        1, scores.topk(K).indices, 1.0))(F.linear(x, gate).sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("form", SCORES)
def test_scores_that_are_not_finite_reach_experts_that_were_not_chosen(form):
    def program(x, gate, w1, w2):
        scores = SCORES[form](x, gate)
        hidden = glu(torch.bmm(x.expand(E, -1, -1), w1.mT))
        return (torch.bmm(hidden, w2.mT) * scores.t().unsqueeze(-1)).sum(0)

    outcome = check(program, *given(), fullgraph=True)
    assert outcome.problem is None
    if form in ("times a number of the token", "chosen by what multiplies"):
        assert outcome.fused == 1


def test_weights_divided_by_0():
    def program(x, gate, w1, w2):
        weights, ids = routed(x, gate)
        return gathered(x, weights / 0, ids, w1, w2)

    outcome = check(program, *given(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def by_slot(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor, combine: Callable[..., Tensor]) -> Tensor:
    """The second product's column is taken off by a view of its tokens and slots."""
    weights, ids = routed(x, gate)
    pairs = ids.reshape(-1)
    hidden = torch.bmm(w1[pairs], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[pairs], glu(hidden).unsqueeze(-1))
    return combine(out, weights)


VIEWED = {
    "token and slot": (lambda out, w: (out.view(-1, K, H) * w.unsqueeze(-1)).sum(1), 1),
    "by a product": (lambda out, w: torch.bmm(w.unsqueeze(1), out.view(-1, K, H)).squeeze(1), 1),
    "slot and token": (lambda out, w: (out.view(K, -1, H) * w.t().unsqueeze(-1)).sum(0), 0),
    "two tokens in one": (lambda out, w: (out.view(-1, 2 * K, H) * w.reshape(-1, 2 * K, 1)).sum(1), 0),
}


@pytest.mark.parametrize("view", VIEWED)
def test_a_column_taken_off_by_a_view(view):
    combine, fused = VIEWED[view]
    outcome = check(lambda *inputs: by_slot(*inputs, combine=combine), *given(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


ADDED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], int]] = {
    "columns": (lambda b, e, w, x: torch.baddbmm(b[e].unsqueeze(-1), w[e], x.unsqueeze(-1)).squeeze(-1), 1),
    "rows": (lambda b, e, w, x: torch.baddbmm(b[e][:, None], x[:, None], w[e].mT).squeeze(1), 1),
    "of other experts": (
        lambda b, e, w, x: torch.baddbmm(b[e.flip(0)].unsqueeze(-1), w[e], x.unsqueeze(-1)).squeeze(-1), 0
    ),
    "twice": (lambda b, e, w, x: torch.baddbmm(b[e].unsqueeze(-1), w[e], x.unsqueeze(-1)).squeeze(-1) + b[e], 0),
    "times two": (
        lambda b, e, w, x: torch.baddbmm(b[e].unsqueeze(-1), w[e], x.unsqueeze(-1), beta=2.0).squeeze(-1), 0
    ),
    "less a half": (
        lambda b, e, w, x: torch.baddbmm(b[e].unsqueeze(-1), w[e], x.unsqueeze(-1), alpha=0.5).squeeze(-1), 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ADDED)
def test_a_product_that_adds_the_experts_biases(form):
    add, fused = ADDED[form]

    def program(x, gate, w1, w2, bias):
        weights, ids = routed(x, gate)
        pairs = ids.reshape(-1)
        hidden = glu(add(bias, pairs, w1, x.repeat_interleave(K, 0)))
        out = torch.bmm(w2[pairs], hidden.unsqueeze(-1)).squeeze(-1)
        return (out.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)

    outcome = check(program, *given(), torch.randn(E, 2 * I), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


def every(x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """All experts on all tokens, weighted by ``scores`` [T, E]."""
    hidden = glu(torch.bmm(x.expand(w1.shape[0], -1, -1), w1.mT))
    return (torch.bmm(hidden, w2.mT) * scores.t().unsqueeze(-1)).sum(0)


def hot(x: Tensor, gate: Tensor, place: int) -> Tensor:
    """One expert for each token, of the first, the second or the third half of its features."""
    return F.one_hot(F.linear(x.roll(place * 7, -1), gate).argmax(-1), E).float()


def sums(x: Tensor, gate: Tensor, *factors: float) -> Tensor:
    return sum(x[:, place : place + 1] * factor * hot(x, gate, place) for place, factor in enumerate(factors))


def filled(number: float, dtype: torch.dtype, again: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """A number that its dtypes change, where an expert was chosen."""

    def scores(x, gate):
        ids = routed(x, gate)[1]
        ones = torch.full((T, K), number).to(dtype).to(again)
        return torch.zeros(T, E, dtype=again).scatter(1, ids, ones).float() * x[:, 5:6]

    return scores


DENSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by sums of other tokens": lambda x, gate: spread(x[:E], gate) / spread(x[:E], gate).sum(-1),
    "some terms of a sum, scaled": lambda x, gate: 2.5 * sums(x, gate, 1.0, 1.0) + x[:, 5:6] * hot(x, gate, 2),
    "a sum squared": lambda x, gate: (lambda s: s * s)(sums(x, gate, 1.0, 1.0)),
    "2 as a bool": filled(2.0, torch.bool, torch.float32),
    "1.5 as an integer": filled(1.5, torch.int64, torch.float32),
    "an integer that wraps": lambda x, gate: (
        torch.zeros(T, E, dtype=torch.int8).scatter(1, routed(x, gate)[1], 1) * 200
    ).float() * x[:, 5:6],
    "divided by nothing": lambda x, gate: spread(x, gate) / 0,
    "divided by a sum of 0": lambda x, gate: (lambda s: s / s.sum(-1, keepdim=True))(
        torch.zeros(T, E).scatter(1, routed(x, gate)[1], x[:, :1] * torch.tensor([1.0, -1.0]))
    ),
    "a softmax over the tokens": lambda x, gate: torch.zeros(T, E).scatter(1, routed(x, gate)[1], 1.0) * torch.where(
        torch.arange(T * E).view(T, E) == 3, torch.nan, F.linear(x, gate)).softmax(0),
    "the sorted": lambda x, gate: torch.zeros(T, E).scatter(1, routed(x, gate)[1], 1.0) * torch.where(
        torch.arange(T * E).view(T, E) == 3, torch.nan, F.linear(x, gate)).sigmoid().sort(-1)[0],
    "weights that are integers": lambda x, gate: torch.zeros(T, E, dtype=torch.int64).scatter(
        1, routed(x, gate)[1], routed(x, gate)[1] + 1),
}  # fmt: skip


@pytest.mark.parametrize("form", DENSE)
def test_scores_of_all_experts_are_what_they_are(form):
    def program(x, gate, w1, w2):
        scores = DENSE[form](x, gate)
        return every(x[: scores.shape[0]], scores.to(x.dtype), w1, w2)

    assert check(program, *given(), fullgraph=True).problem is None


def test_weighted_tokens_in_the_order_of_the_other_dimension():
    def program(x, gate, w1, w2):
        rows = torch.einsum("th,te->teh", x, spread(x, gate)).reshape(E, -1, H)
        return torch.bmm(glu(torch.bmm(rows, w1.mT)), w2.mT).sum(0)

    assert check(program, *given(), fullgraph=True).problem is None


def one_by_one(x, gate, w1, w2, mask, weigh):
    """An expert after another, on the tokens that a mask of the pairs lists."""
    weights, ids = routed(x, gate)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(mask(ids, e))
        rows = glu(x[token] @ w1[e].t()) @ w2[e].t()
        out = out.index_add(0, token, rows * weigh(weights)[token, slot, None])
    return out


LISTED = {
    "two tokens in a row": (lambda ids, e: (ids == e).view(T // 2, 2 * K), lambda w: w.view(T // 2, 2 * K)),
    "slots in the place of tokens": (lambda ids, e: (ids == e).reshape(K, T), lambda w: w.reshape(K, T)),
    "as they are": (lambda ids, e: ids == e, lambda w: w),
}


@pytest.mark.parametrize("form", LISTED)
def test_a_mask_that_is_viewed_lists_other_tokens(form):
    mask, weigh = LISTED[form]

    def program(*inputs):
        return one_by_one(*inputs, mask=mask, weigh=weigh)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outcome = check(program, *given(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, int(form == "as they are"))


@pytest.mark.parametrize(
    "of", [lambda marks, e: marks.select(2, e), lambda marks, e: marks.unbind(2)[e]], ids=["select", "unbind"]
)
def test_slots_are_no_experts_where_there_are_as_many(of):
    def program(x, gate, w1, w2):
        weights, ids = torch.topk(F.linear(x.view(3, T // 3, H), gate).softmax(-1), E, -1)
        out, marks = torch.zeros_like(x), F.one_hot(ids, E)
        for e in range(E):
            share = (weights * of(marks, e)).sum(-1).view(-1, 1)
            out = out + share * (glu(x @ w1[e].t()) @ w2[e].t())
        return out

    assert check(program, *given(), fullgraph=True).problem is None


STARTS = {
    "half": (lambda x: x.half(), 0), "bfloat16": (lambda x: x.bfloat16(), 0), "integers": (lambda x: x.int(), 0),
    "its own": (lambda x: x * 2, 1), "zeros of another": (lambda x: torch.zeros_like(x, dtype=torch.bfloat16), 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", STARTS)
def test_a_sum_begins_in_the_dtype_of_what_is_added(dtype):
    start, fused = STARTS[dtype]

    def program(x, *rest):
        out = start(x)
        for part in by_expert(x, *rest):
            out = out + part
        return out

    outcome = check(program, *given(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, fused)


def test_one_expert_under_autocast_is_not_all_of_them():
    def program(x, gate, w1, w2):
        weights, ids = routed(x, gate)
        out = torch.zeros_like(x)
        for e in range(E):
            with torch.autocast("cpu", torch.float16, enabled=e == 0):
                part = F.linear(glu(F.linear(x, w1[e])), w2[e])
            out = out + part.float() * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    x, gate, w1, w2 = given()
    w1[1:] *= 3000
    assert check(program, x, gate, w1, w2, fullgraph=True).problem is None
