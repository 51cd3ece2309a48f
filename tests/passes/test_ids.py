"""What is proved about expert ids: that they are in [0, E), that they are not negative, that a token's are distinct."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from compile_passes.patterns.ids import are_distinct, are_in_range, are_not_negative
from compile_passes.patterns.rows import is_ramp
from compile_passes.reading import Reading
from compile_passes.vocabulary import example
from tests.passes.blocks import E, H, K, T, batched, capture, silu_glu, softmax_router, weights
from tests.passes.compare import check

_make = torch.Generator().manual_seed(0)
SCORES = torch.randn(T, E, generator=_make)
WIDE = torch.randn(T, E + 3, generator=_make)
GIVEN = torch.randint(E, (T, K), generator=_make)


def top(scores, **options):
    return scores.topk(K, **options)[1]


#: function of (scores [T, E], wide [T, E + 3], ids given to the graph) -> (in [0, E), not negative).
IDS = {
    "topk": (lambda s, w, g: top(s), True, True),
    "topk_named_result": (lambda s, w, g: s.topk(K).indices, True, True),
    "smallest": (lambda s, w, g: top(s, largest=False), True, True),
    "topk_of_the_other_dimension": (lambda s, w, g: top(s, dim=0), False, True),
    "topk_of_first_dimension_of_E": (lambda s, w, g: top(s.mT, dim=0), True, True),
    "topk_over_more_columns": (lambda s, w, g: top(w), False, True),
    "topk_values": (lambda s, w, g: g.topk(K)[0] * 1, False, False),
    "topk_values_of_ids": (lambda s, w, g: top(s).topk(1)[0], True, True),
    "sort": (lambda s, w, g: s.sort(-1, descending=True)[1][:, :K], True, True),
    "sorted_ids": (lambda s, w, g: top(s).sort(-1)[0], True, True),
    "argsort": (lambda s, w, g: s.argsort(-1)[:, :K], True, True),
    "argsort_over_the_tokens": (lambda s, w, g: s.argsort(0)[:, :K], False, True),
    "argmax": (lambda s, w, g: s.argmax(-1, keepdim=True), True, True),
    "argmax_of_everything": (lambda s, w, g: s.argmax(), False, True),
    "max": (lambda s, w, g: s.max(-1, keepdim=True)[1], True, True),
    "given": (lambda s, w, g: g * 1, False, False),
    "shifted": (lambda s, w, g: top(s) - 1, False, False),
    "negated": (lambda s, w, g: -top(s), False, False),
    "clamped": (lambda s, w, g: g.clamp(0, E - 1), True, True),
    "clamped_by_keyword": (lambda s, w, g: g.clamp(min=0, max=E - 1), True, True),
    "clamped_too_high": (lambda s, w, g: g.clamp(0, E), False, True),
    "clamped_too_low": (lambda s, w, g: g.clamp(-1, E - 1), False, False),
    "clamped_below_only": (lambda s, w, g: g.clamp(min=0), False, True),
    "clamped_above_only": (lambda s, w, g: g.clamp(max=E - 1), False, False),
    "clamped_from_two": (lambda s, w, g: g.clamp(2, E - 1), True, True),
    "remainder": (lambda s, w, g: g % E, True, True),
    "remainder_of_another_number": (lambda s, w, g: torch.remainder(g, E + 1), False, True),
    "remainder_of_a_negative_number": (lambda s, w, g: g % -E, False, False),
    "truncated_remainder": (lambda s, w, g: torch.fmod(g, E), False, False),
    "random": (lambda s, w, g: torch.randint(0, E, (T, K)), True, True),
    "random_below": (lambda s, w, g: torch.randint(E, (T, K)), True, True),
    "random_below_more": (lambda s, w, g: torch.randint(E + 1, (T, K)), False, True),
    "random_from_a_negative": (lambda s, w, g: torch.randint(-1, E, (T, K)), False, False),
    "random_to_a_named_bound": (lambda s, w, g: torch.randint(-1, high=E, size=(T, K)), False, False),
    "random_from_one": (lambda s, w, g: torch.randint(1, E, (T, K)), True, True),
    "shape_and_dtype": (lambda s, w, g: top(s).reshape(-1).to(torch.int32).view(T, K).long(), True, True),
    "a_dtype_that_holds_them": (lambda s, w, g: top(s).to(torch.int8).long(), True, True),
    "a_dtype_that_does_not": (lambda s, w, g: top(w.repeat(1, 20)).to(torch.int8).long(), False, False),
    "a_dtype_of_bits": (lambda s, w, g: top(s).bool().long(), False, False),
    "bits": (lambda s, w, g: (top(s) > 0).long(), True, True),
    "bits_as_bits": (lambda s, w, g: (top(s) > 0).long().bool().long(), True, True),
    "clamped_to_a_negative": (lambda s, w, g: g.clamp(0, -1), False, False),
    "clamped_scores": (lambda s, w, g: s[:, :K].clamp(0, E - 1).long(), False, False),  # NaN is a negative integer
    "remainders_of_scores": (lambda s, w, g: (s[:, :K] % E).long(), False, False),
    "topk_over_fewer_columns": (lambda s, w, g: top(s[:, 1:]), True, True),
    "behind_another": (lambda s, w, g: top(s[:, 1:]) + 1, True, True),
    "behind_two_others": (lambda s, w, g: 2 + top(s[:, 1:]), False, True),
    "before_another": (lambda s, w, g: top(s) - 1 + 1, True, True),
    "a_sum_that_wraps": (lambda s, w, g: (top(s).to(torch.int8) + 127 - 127).long(), False, False),
    "a_sum_times_a_number": (lambda s, w, g: torch.add(top(s[:, 1:]), 1, alpha=2), False, False),
    "a_constant": (lambda s, w, g: torch.full((T, 1), E - 1), True, True),
    "a_constant_of_more": (lambda s, w, g: torch.full((T, 1), E), False, True),
    "a_negative_constant": (lambda s, w, g: g.new_full((T, 1), -1), False, False),
    "constants": (lambda s, w, g: torch.tensor([0, E - 1]).expand(T, 2), True, True),
    "constants_of_more": (lambda s, w, g: torch.tensor([0, E]).expand(T, 2), False, True),
    "ones_times_a_number": (lambda s, w, g: torch.ones_like(g) * (E - 1), True, True),
    "counted_from": (lambda s, w, g: torch.arange(2, E).expand(T, -1), True, True),
    "counted_to_more": (lambda s, w, g: torch.arange(2, E + 1).expand(T, -1), False, True),
    "counted_in_steps": (lambda s, w, g: torch.arange(E - 1, -2, -1).expand(T, -1), False, False),
    "padded_with_an_id": (lambda s, w, g: F.pad(top(s), (0, 1), value=E - 1), True, True),
    "padded_with_more": (lambda s, w, g: F.pad(top(s), (0, 1), value=E), False, True),
    "padded_by_unknown": (lambda s, w, g: F.pad(g, (0, 1), value=E - 1), False, False),
    "picked": (lambda s, w, g: top(s)[:, :1], True, True),
    "picked_by_a_table": (lambda s, w, g: top(s).reshape(-1)[g], True, True),
    "gathered": (lambda s, w, g: top(s).gather(1, g * 0), True, True),
    "picked_by_index_select": (lambda s, w, g: top(s).index_select(1, g[0] * 0), True, True),
    "narrowed": (lambda s, w, g: top(s).narrow(1, 1, 1), True, True),
    "a_slice": (lambda s, w, g: torch.ops.aten.slice.Tensor(top(s), 1, 0, 1), True, True),
    "expanded": (lambda s, w, g: s.argmax(-1, keepdim=True).expand(-1, K), True, True),
    "permuted": (lambda s, w, g: top(s).permute(1, 0), True, True),
    "transposed_by_attribute": (lambda s, w, g: top(s).mT.contiguous(), True, True),
    "stacked": (lambda s, w, g: torch.stack([s.argmax(-1), s.argmin(-1) * 0], -1), False, False),
    "stacked_choices": (lambda s, w, g: torch.stack([s.argmax(-1), s.max(-1)[1]], -1), True, True),
    "second_of_a_split": (lambda s, w, g: top(s).split(1, -1)[1], True, True),
    "largest_given": (lambda s, w, g: g.max(-1)[0], False, False),
    "largest_id": (lambda s, w, g: top(s).max(-1)[0], True, True),
    "where_of_a_condition_alone": (lambda s, w, g: torch.where(g[0] > -1)[0], False, False),
    "times_one": (lambda s, w, g: top(s) * 2, False, False),
    "repeated": (lambda s, w, g: top(s).repeat_interleave(2, 0), True, True),
    "transposed": (lambda s, w, g: top(s).transpose(0, 1), True, True),
    "joined": (lambda s, w, g: torch.cat([top(s), s.argmax(-1, keepdim=True)], -1), True, True),
    "joined_with_unknown": (lambda s, w, g: torch.cat([top(s), g], -1), False, False),
    "part_of": (lambda s, w, g: top(s).chunk(2, -1)[0], True, True),
    "one_or_the_other": (lambda s, w, g: torch.where(g > 1, top(s), s.argsort(-1)[:, :K]), True, True),
    "one_or_unknown": (lambda s, w, g: torch.where(g > 1, top(s), g), False, False),
    "filled_with_an_id": (lambda s, w, g: top(s).masked_fill(g > 1, E - 1), True, True),
    "filled_with_no_id": (lambda s, w, g: top(s).masked_fill(g > 1, E), False, True),
    "filled_with_a_negative": (lambda s, w, g: top(s).masked_fill(g > 1, -1), False, False),
}  # fmt: skip


def reading(function):
    graph = capture(function, SCORES, WIDE, GIVEN).graph
    (value,) = graph.output_node().args[0]
    return Reading(graph), value


@pytest.mark.parametrize("name", IDS)
def test_bounds(name):
    function, in_range, not_negative = IDS[name]
    read, ids = reading(function)
    assert (are_in_range(read, ids, E), are_not_negative(read, ids)) == (in_range, not_negative)


def test_ids_given_to_the_graph_are_not_proved():
    read, _ = reading(lambda s, w, g: g * 1)
    given = [node for node in read.graph.nodes if node.op == "placeholder"]
    assert not any(are_in_range(read, node, E) or are_not_negative(read, node) for node in given)


@pytest.mark.parametrize(
    ("function", "distinct"),
    [
        (lambda s, w, g: top(s), True),
        (lambda s, w, g: top(s).to(torch.int32), True),
        (lambda s, w, g: s.topk(K + 1)[1], False),
        (lambda s, w, g: top(w), False),
        (lambda s, w, g: g * 1, False),
        (lambda s, w, g: top(s).clamp(0, E - 2), False),
        (lambda s, w, g: s.argmax(-1, keepdim=True).expand(-1, K), False),
        (lambda s, w, g: s.topk(K)[0], False),
        (lambda s, w, g: top(s.mT, dim=0), False),
    ],
    ids=["topk", "cast", "another_k", "more_columns", "given", "clamped", "repeated", "values", "other_dimension"],
)
def test_distinct(function, distinct):
    read, ids = reading(function)
    assert are_distinct(read, ids, E, K) is distinct


def beside(*columns):
    return torch.cat(columns, -1)


@pytest.mark.parametrize(
    ("function", "distinct"),
    [
        (lambda s, w, g: beside(top(s[:, 1:]), torch.full((T, 1), E - 1)), True),
        (lambda s, w, g: beside(torch.arange(2).expand(T, 2), top(s[:, 2:]) + 2), True),
        (lambda s, w, g: beside(top(s[:, 2:]), torch.arange(E - 2, E).repeat(T, 1)).to(torch.int32), True),
        (lambda s, w, g: beside(top(s), torch.full((T, 1), E - 1)), False),
        (lambda s, w, g: beside(torch.arange(2).expand(T, 2), top(s[:, 1:]) + 1), False),
        (lambda s, w, g: beside(top(s[:, 1:]), torch.full((T, 2), E - 1)), False),
        (lambda s, w, g: beside(g, torch.full((T, 1), E - 1)), False),
        (lambda s, w, g: beside(top(s[:, 1:]), torch.full((T, 1), E)), False),
        (lambda s, w, g: torch.cat((top(s[:, 2:]), torch.full((1, K), E - 1))), False),
        (lambda s, w, g: beside(top(s[:, 1:]), torch.full((T, 1), E - 1)).view(T // 2, -1), False),
        (lambda s, w, g: beside(top(s[:, 1:]), torch.full((T, 2), E - 1)).view(-1, 1).view(T, K + 2), False),
        (lambda s, w, g: torch.arange(2)[:, None].expand(2, K), False),
    ],
    ids=["constant", "shifted", "counted", "may_be_it", "shifted_by_less", "one_twice", "given", "out_of_range",
         "tokens", "two_as_one", "viewed", "counted_by_token"],
)  # fmt: skip
def test_distinct_beside_each_other(function, distinct):
    """Of experts that every token has, and experts that it chooses."""
    read, ids = reading(function)
    assert are_distinct(read, ids, E, example(ids).shape[-1]) is distinct


def first_written(ids, change):
    """``ids``, whose first row is written through another name."""
    change(ids[:1])
    return ids


def test_ids_written_through_a_view_are_not_those_of_topk():
    for shape in (lambda ids: torch.where(ids > 2, ids, 0), lambda ids: torch.where(ids > 2, ids.clone(), 0)):
        read, ids = reading(lambda s, w, g, shape=shape: shape(first_written(top(s), lambda row: row.sub_(1))))
        assert not are_in_range(read, ids, E) and not are_not_negative(read, ids)


def test_a_row_of_ids_that_is_written_counts_from_the_end():
    def run(x, gate, w1, w2):
        topk_weights, ids = softmax_router(x, gate)
        ids = first_written(ids, lambda row: row.fill_(-1))
        return batched(x, torch.where(topk_weights > 2, 0, ids), topk_weights, w1, w2)

    outcome = check(run, *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


def test_how_far_down_ids_are_looked_into():
    """Eight steps: not without an end, and more than any model has."""

    def deep(steps):
        def run(s, w, g):
            ids = top(s)
            for step in range(steps):
                ids = torch.where(g > step, ids, 0)
            return ids

        return reading(run)

    assert are_in_range(*deep(7), E) and not are_in_range(*deep(8), E)


def test_remainders_in_place_are_read_as_remainders():
    def run(s, w, g):
        ids = g * 1
        ids = operator.imod(ids, E)
        return F.relu(ids)

    read, value = reading(run)
    assert are_in_range(read, read.call(value)["x"], E)


@pytest.mark.parametrize("function, ramp", [
    (lambda s, w, g: torch.arange(7), True),
    (lambda s, w, g: torch.arange(7, dtype=torch.int32), True),
    (lambda s, w, g: torch.arange(0, 7), True),
    (lambda s, w, g: torch.arange(1, 8), False),
    (lambda s, w, g: torch.arange(7, dtype=torch.float32), False),
    (lambda s, w, g: torch.arange(7).long(), True),
    (lambda s, w, g: torch.arange(7).flip(0), False),
    (lambda s, w, g: torch.arange(8).view(2, 4), False),
    (lambda s, w, g: g.view(-1), False),
])  # fmt: skip
def test_ramp(function, ramp):
    assert is_ramp(*reading(lambda s, w, g: function(s, w, g).clone())) is ramp


def sorted_by(cast, count):
    """Rows sorted by a ``cast`` of the ids, and counted by ``count(ids, what sorts them)``."""

    def run(x, gate, w1, w2):
        topk_weights, ids = softmax_router(x, gate)
        key = cast(ids.reshape(-1))
        perm = key.argsort()
        offsets = count(ids, key).cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[perm // K].bfloat16(), w1.bfloat16().mT, offsets)
        out = torch._grouped_mm(silu_glu(h), w2.bfloat16().mT, offsets).to(x.dtype)
        index = (perm // K)[:, None].expand(-1, H)
        return torch.zeros_like(x).scatter_add(0, index, out * topk_weights.reshape(-1)[perm, None].to(x.dtype))

    return run


def histogram(ids):
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1)


#: what sorts the rows, how they are counted, and whether both hold the same ids.
SORTED = {
    "int32, histc of it (MegaBlocks)": (lambda flat: flat.int(), lambda ids, key: histogram(key), True),
    "int32, histc of the ids": (lambda flat: flat.int(), lambda ids, key: histogram(ids), True),
    "int32, a one-hot of it": (lambda flat: flat.int(), lambda ids, key: F.one_hot(key.long(), E).sum(0), True),
    "int32, compared": (lambda flat: flat.int(), lambda ids, key: (key[:, None] == torch.arange(E)).sum(0), True),
    "int32, ones added": (
        lambda flat: flat.int(), lambda ids, key: torch.zeros_like(key[:E]).index_add(0, key, torch.ones_like(key)),
        True,
    ),
    "int16": (lambda flat: flat.to(torch.int16), lambda ids, key: histogram(key), True),
    "float": (lambda flat: flat.float(), lambda ids, key: histogram(key), True),
    "bool holds two ids": (lambda flat: flat.bool(), lambda ids, key: histogram(ids), False),
    "counted in another order": (lambda flat: flat.int(), lambda ids, key: histogram(E - 1 - key), False),
    "counted without the last": (lambda flat: flat.int(), lambda ids, key: histogram(key.clamp(max=E - 2)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SORTED)
def test_rows_sorted_by_a_cast_of_the_ids(name):
    cast, count, same = SORTED[name]
    outcome = check(sorted_by(cast, count), *weights(dtype=torch.float32).values(), tolerance=3e-2, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, int(same))
