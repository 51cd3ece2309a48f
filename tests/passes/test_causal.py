"""Attention with a mask: which calls say that they are causal instead, and which keep their masks."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.utils import counters
from torch.fx.experimental import symbolic_shapes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import compile_passes  # noqa: F401  (registers the backends)
from compile_passes import causal
from compile_passes.passes import CAUSAL, run
from tests.corpus.families import build, tokens
from tests.passes import test_attention
from tests.passes.test_attention import is_one_number

B, HEADS, KV_HEADS, T, D = 2, 4, 2, 12, 8
aten = torch.ops.aten


def inputs(length=T, keys=None, heads=HEADS, **options):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, **options}
    sizes = (HEADS, length), *2 * ((heads, length if keys is None else keys),)
    return tuple(torch.randn(B, n, size, D, **options) for n, size in sizes)


def lower(length, diagonal=0):
    return torch.ones(length, length, dtype=torch.bool).tril(diagonal)


def attend(mask, **options):
    """Attention with the mask that ``mask`` makes for a query, of what else it is given."""

    def step(q, k, v, *more):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, *more), **options)

    return step


captured = partial(test_attention.captured, by=CAUSAL)


def calls(graph):
    """The calls of attention."""
    return [node for node in graph.nodes if "scaled_dot_product_attention" in str(node.target)]


def close(result, want):
    torch.testing.assert_close(result, want, rtol=0, atol=1e-12)


def is_causal_without_a_mask(step, *arguments, dynamic=False):
    """Compile ``step``; nothing of a mask is left of it, and it gives what it gave. Returns the call."""
    graph, changed, result = captured(step, *arguments, dynamic=dynamic)
    assert changed == 1
    (call,) = calls(graph)
    assert call.kwargs["is_causal"] is True and len(call.args) <= 3 and "attn_mask" not in call.kwargs
    made = [node.meta.get("example_value") for node in graph.nodes if node.op.startswith("call_")]
    assert all(value.dtype == arguments[0].dtype for value in made if isinstance(value, torch.Tensor))
    length = call.meta["example_value"].shape[-2]
    assert (symbolic_shapes.is_symbolic(length) and not is_one_number(length)) == dynamic
    close(result, step(*arguments))
    return call


def keeps_its_mask(step, *arguments, **options):
    _, changed, result = captured(step, *arguments, **options)
    assert changed == 0
    torch.testing.assert_close(result, step(*arguments), rtol=0, atol=0)


# ---- masks that are causal


def transformers(q):
    """As `masking_utils.sdpa_mask` makes it where no mask is given: sequences may be packed, for all that it knows."""
    batch, length = q.shape[0], q.shape[2]
    positions = (torch.arange(length) + 0).unsqueeze(0).expand(batch, -1)
    packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batches, heads = torch.arange(batch)[:, None, None, None], torch.arange(1)[None, :, None, None]
    queries, keys = torch.arange(length)[None, None, :, None] + 0, torch.arange(length)[None, None, None, :] + 0
    result = queries.new_ones((), dtype=torch.bool)
    result = result & (keys <= queries).to(result.device)
    result = result & (packed[batches, queries] == packed[batches, keys])
    return (result & (heads >= 0)).expand(batch, -1, length, length)


def places(q):
    return torch.arange(q.shape[-2])


def subtracted(q):
    return torch.sub(places(q)[:, None], places(q), alpha=2) + places(q) >= 0


MASKS = {
    "transformers": transformers,
    "tril": lambda q: lower(q.shape[-2]),
    "tril_in_place": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril_(),
    "tril_of_floats": lambda q: torch.tril(torch.ones(q.shape[-2], q.shape[-2])).view(1, 1, q.shape[-2], -1) != 0,
    "tril_of_full": lambda q: torch.full((q.shape[-2], q.shape[-2]), True).tril(),
    "tril_cast": lambda q: torch.ones(q.shape[-2], q.shape[-2]).tril().bool(),
    "not_triu": lambda q: ~torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1),
    "triu_is_zero": lambda q: torch.triu(torch.ones(q.shape[-2], q.shape[-2]), diagonal=1) == 0,
    "triu_transposed": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu().mT,
    "triu_permuted": lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu().permute(1, 0),
    "at_least": lambda q: places(q)[:, None] >= places(q)[None, :],
    "at_most": lambda q: places(q) <= places(q).unsqueeze(-1),
    "above_what_is_before": lambda q: places(q)[:, None] > places(q) - 1,
    "not_below": lambda q: ~(places(q)[:, None] < places(q)),
    "difference": lambda q: places(q)[None] - places(q)[:, None] <= 0,
    "negated": lambda q: -places(q)[:, None] <= -places(q),
    "subtracted": subtracted,
    "int32": lambda q: places(q).int()[:, None] >= torch.arange(q.shape[-2], dtype=torch.int32),
    "one_offset_for_both": lambda q: (places(q) + 3)[:, None] >= torch.arange(3, q.shape[-2] + 3),
    "one_step_too_many": lambda q: (places(q) * 2 - places(q))[:, None] >= places(q),
    "counted": lambda q: torch.ones_like(places(q)).cumsum(0)[:, None] > places(q),
    "gathered": lambda q: places(q)[places(q)][:, None] >= places(q),
    "gathered_mask": lambda q: lower(q.shape[-2])[places(q)[:, None], places(q)],
    "part_of_a_larger_one": lambda q: lower(2 * q.shape[-2])[None, None, : q.shape[-2], : q.shape[-2]],
    "one_of_several": lambda q: torch.ones(3, q.shape[-2], q.shape[-2], dtype=torch.bool).tril()[1],
    "narrowed": lambda q: lower(q.shape[-2] + 4).narrow(0, 2, q.shape[-2]).narrow(1, 2, q.shape[-2]),
    "anded": lambda q: lower(q.shape[-2]) & (places(q) >= 0),
    "anded_logically": lambda q: torch.logical_and(lower(q.shape[-2]), lower(q.shape[-2], 2)),
    "multiplied": lambda q: lower(q.shape[-2]) * torch.ones(q.shape[-2], dtype=torch.bool),
    "of_each_sequence": lambda q: lower(q.shape[-2]).expand(q.shape[0], 1, -1, -1),
    "of_each_head": lambda q: lower(q.shape[-2]).expand(q.shape[0], q.shape[1], -1, -1).clone(),
    "of_some_sequences": lambda q: lower(q.shape[-2]) & (torch.arange(q.shape[0]) >= 0)[:, None, None, None],
    "aten": lambda q: aten.tril.default(aten.ones.default([q.shape[-2], q.shape[-2]], dtype=torch.bool)),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_causal_mask_is_dropped(mask, dynamic):
    is_causal_without_a_mask(attend(mask), *inputs(), dynamic=dynamic)


#: What has to hold beside `k <= q`, and does in a sequence of a length that is known.
WINDOWS = {
    "longer": lambda q: lower(T) & (places(q)[:, None] - places(q) < T + 5),
    "as_long": lambda q: lower(T) & (places(q)[:, None] - places(q) < T),
    "triu": lambda q: lower(T).triu(1 - T),
    "to_the_right": lambda q: lower(T) & (places(q)[None] - places(q)[:, None] <= 0),
    "last_of_a_larger_one": lambda q: lower(T + 3)[-T:, -T:],
}  # fmt: skip


@pytest.mark.parametrize("mask", WINDOWS.values(), ids=WINDOWS)
def test_a_causal_mask_of_a_known_length_is_dropped(mask):
    is_causal_without_a_mask(attend(mask), *inputs())


#: The ways to call it, with the names that it keeps.
CALLS = {
    "keyword": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), set()),
    "fourth": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), set()),
    "all_in_order": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.0, False), {"dropout_p"}),
    "all_by_name": (
        lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m, is_causal=False),
        {"query", "key", "value"},
    ),
    "dropout_by_name": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=0.0), {"dropout_p"}),
    "scale": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3), {"scale"}),
    "aten": (lambda q, k, v, m: aten.scaled_dot_product_attention.default(q, k, v, m), set()),
    "aten_in_order": (
        lambda q, k, v, m: aten.scaled_dot_product_attention.default(q, k, v, m, 0.0, False, scale=0.3),
        {"dropout_p", "scale"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kept"), CALLS.values(), ids=CALLS)
def test_other_arguments_stay(call, kept):
    made = is_causal_without_a_mask(lambda q, k, v: call(q, k, v, lower(q.shape[-2])), *inputs())
    assert set(made.kwargs) == {"is_causal", *kept}


@pytest.mark.parametrize("scale", [-0.3, 0.0, -0.0, 1e-320, float("inf")])
def test_a_scale_that_is_not_positive_keeps_its_mask(scale):
    """torch's kernels hide scores before they scale: minus infinity would become NaN, or infinity."""
    graph, changed, _ = captured(attend(MASKS["tril"], scale=scale), *inputs())
    assert changed == 0 and calls(graph)[0].kwargs["attn_mask"] is not None


def test_shared_heads_stay_shared():
    call = is_causal_without_a_mask(attend(MASKS["tril"], enable_gqa=True), *inputs(heads=KV_HEADS))
    assert call.kwargs == {"is_causal": True, "enable_gqa": True}


def test_sequences_of_no_batch():
    is_causal_without_a_mask(attend(MASKS["tril"]), *(x[0] for x in inputs()))


def test_two_calls_share_a_mask():
    def step(q, k, v):
        mask = transformers(q)
        return attend(lambda q: mask)(attend(lambda q: mask)(q, k, v), k, v)

    graph, changed, result = captured(step, *inputs())
    assert changed == 2 and not any("cumsum" in str(node.target) for node in graph.nodes)
    close(result, step(*inputs()))


def test_a_mask_that_is_read_elsewhere_stays():
    def step(q, k, v):
        mask = lower(q.shape[-2])
        return attend(lambda q: mask)(q, k, v), mask.sum()

    graph, changed, (result, total) = captured(step, *inputs())
    assert changed == 1 and any("tril" in str(node.target) for node in graph.nodes)
    close(result, step(*inputs())[0])
    assert total == T * (T + 1) // 2


def test_a_mask_that_is_made_in_place():
    """Every writer of it counts; they stay, for Inductor to drop."""

    def mask(q):
        made = torch.zeros(T, T, dtype=torch.bool)
        made.logical_not_()
        made.tril_()
        return made

    _, changed, result = captured(attend(mask), *inputs())
    assert changed == 1
    close(result, attend(mask)(*inputs()))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_views_of_the_result_are_of_the_old_layout(dynamic):
    """torch's kernel for a mask of three dimensions on the CPU lays it out in the order of its own sizes, and the one
    that is causal as the query is.
    """

    def step(q, k, v):
        return attend(lambda q: lower(q.shape[-2])[None])(q, k, v).view(q.shape[0] * HEADS, q.shape[2], D)

    arguments = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()]
    assert attend(lambda q: lower(T)[None])(*arguments).is_contiguous()
    assert not F.scaled_dot_product_attention(*arguments, is_causal=True).is_contiguous()
    is_causal_without_a_mask(step, *arguments, dynamic=dynamic)


LAYOUTS = {
    "rows": (torch.empty(2, 3, 4, 5), (0, 1, 2, 3)),
    "heads_of_each_token": (torch.empty(2, 4, 3, 5).transpose(1, 2), (0, 2, 1, 3)),
    "no_batch": (torch.empty(4, 3, 5).transpose(0, 1), (1, 0, 2)),
    "two": (torch.empty(4, 3), (0, 1)),
    "columns": (torch.empty(2, 3, 5, 4).mT, None),
    "part": (torch.empty(2, 3, 4, 6)[..., :5], None),
    "nothing": (None, None),
}  # fmt: skip


@pytest.mark.parametrize(("tensor", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(tensor, layout):
    assert causal._layout(tensor) == layout


def test_a_result_of_another_layout_is_left_alone(monkeypatch):
    monkeypatch.setattr(causal, "_layout", lambda tensor: None)
    assert captured(attend(transformers), *inputs())[1] == 1  # by the same kernel
    monkeypatch.setattr(
        causal, "sdpa_kernel", lambda mode, tensors, **options: "FLASH" if "is_causal" in options else "EFFICIENT"
    )
    keeps_its_mask(attend(transformers), *inputs())


# ---- training


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients_stay(dynamic):
    def step(q, k, v):
        return attend(transformers)(q, k, v).transpose(1, 2).flatten(2).square().sum(-1)

    arguments, others = inputs(requires_grad=True), inputs(requires_grad=True)
    _, changed, result = captured(step, *arguments, dynamic=dynamic)
    assert changed == 1
    result.sum().backward()
    step(*others).sum().backward()
    for got, want in zip(arguments, others, strict=True):
        close(got.grad, want.grad)


def written(q, k, v):
    result = attend(lambda q: lower(T)[None])(q, k, v)
    result[:, 0].mul_(3.0)
    return result * 2.0


def handed_out(q, k, v):
    return attend(lambda q: lower(T)[None])(q, k, v)[:, 1:]


def operand_written(q, k, v, place=0):
    operands = [q * 1.0, k * 1.0, v * 1.0]
    result = attend(lambda q: lower(T)[None])(*operands)
    operands[place].mul_(3.0)
    return result * 2.0


def operand_handed_out(q, k, v):
    k = k * 1.0
    return attend(lambda q: lower(T)[None])(q, k, v) * 2.0, k


@pytest.mark.parametrize(
    "step",
    [written, handed_out, operand_written, partial(operand_written, place=1), operand_handed_out],
    ids=["written", "handed_out", "queries_written", "keys_written", "keys_handed_out"],
)
def test_what_may_be_overwritten_is_no_kernels_own(step):
    """torch's kernel keeps its result and operands for the backward pass; products, as there are for this mask, keep
    no result, and scaled copies of queries and keys."""
    arguments, others = inputs(requires_grad=True), inputs(requires_grad=True)
    _, changed, result = captured(step, *arguments)
    assert changed == 0
    for outcome in (result, step(*others)):
        outcome, *rest = outcome if isinstance(outcome, tuple) else (outcome,)
        for other in rest:
            other.detach().mul_(2.0)
        outcome.mul_(2.0).sum().backward()
    for got, want in zip(arguments, others, strict=True):
        close(got.grad, want.grad)
    assert captured(step, *inputs())[1] == 1  # nothing is kept


def test_the_result_still_requires_grad():
    """As later passes see it."""
    graph, _, _ = captured(attend(MASKS["tril"]), *inputs(requires_grad=True))
    (result,) = graph.output_node().args[0]
    assert result.meta["example_value"].requires_grad


# ---- graphs that are called


def compiled(step, *arguments):
    """(result, masks dropped) of ``step`` and the graphs that it calls."""
    torch.compiler.reset()
    counters.clear()
    result = torch.compile(step, backend="moe_ops_eager", fullgraph=True)(*arguments)
    assert counters["moe_ops"]["errors"] == 0
    return result, counters["moe_ops"]["causal_masks"]


def given(q, k, v, mask):
    """A body, to which its mask is an operand."""
    return F.scaled_dot_product_attention(q.sin(), k, v, attn_mask=mask)


def checkpointed(make):
    def step(q, k, v):
        return checkpoint(given, q, k, v, make(q), use_reentrant=False).square()

    return step


def test_a_mask_from_outside_of_what_is_checkpointed():
    arguments, others = inputs(requires_grad=True), inputs(requires_grad=True)
    step = checkpointed(transformers)
    result, changed = compiled(step, *arguments)
    assert changed == 1
    want = step(*others)
    close(result, want)
    result.sum().backward()
    want.sum().backward()
    for got, other in zip(arguments, others, strict=True):
        close(got.grad, other.grad)


def with_an_entry_overwritten(q):
    mask = lower(q.shape[-2])
    mask[1:, 0] = False
    return mask


def with_a_row_overwritten(q):
    mask = lower(q.shape[-2])
    mask[0].fill_(True)
    return mask


def with_a_column_overwritten(q):
    mask = lower(q.shape[-2])
    mask.mT[0].copy_(torch.arange(q.shape[-2]) < 3)
    return mask


OVERWRITTEN = [with_an_entry_overwritten, with_a_row_overwritten, with_a_column_overwritten]


@pytest.mark.parametrize(
    "make", [*OVERWRITTEN, lambda q: lower(T, 1), lambda q: lower(T).double()], ids=[*(f.__name__ for f in OVERWRITTEN),
    "diagonal", "added"]
)  # fmt: skip
def test_what_is_checkpointed_keeps_another_mask(make):
    result, changed = compiled(checkpointed(make), *inputs())
    assert changed == 0
    torch.testing.assert_close(result, checkpointed(make)(*inputs()), rtol=0, atol=0)


region = torch.compiler.nested_compile_region(given)
outer_region = torch.compiler.nested_compile_region(lambda q, k, v: region(q.cos(), k, v, lower(q.shape[-2], 1)) * 2)


def called_with_one_mask(q, k, v):
    return region(q, k, v, lower(T)) + region(q.exp(), k, v, torch.arange(T)[:, None] >= torch.arange(T))


def called_with_two_masks(q, k, v):
    return region(q, k, v, lower(T)) + region(q.exp(), k, v, lower(T, 1))


def called_with_two_masks_otherwise(q, k, v):
    return region(q, k, v, lower(T, 1)) + region(q.exp(), k, v, lower(T))


def called_by_two_graphs(q, k, v):
    """Of which the inner one is read only after the body itself."""
    return region(q, k, v, lower(T)) + outer_region(q, k, v) + outer_region(q.exp(), k, v)


def called_by_a_branch(q, k, v):
    return torch.cond(q.sum() > 0, given, lambda q, k, v, mask: q * 2, (q, k, v, lower(T)))


def overwritten_in_the_body(q, k, v):
    def body(q, k, v, mask):
        mask[1:, 0] = False
        return given(q, k, v, mask)

    return checkpoint(body, q, k, v, lower(T), use_reentrant=False)


def test_a_body_that_is_called_with_one_mask():
    result, changed = compiled(called_with_one_mask, *inputs())
    assert changed == 1
    close(result, called_with_one_mask(*inputs()))


@pytest.mark.parametrize(
    "step",
    [called_with_two_masks, called_with_two_masks_otherwise, called_by_two_graphs, called_by_a_branch,
     overwritten_in_the_body],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_bodies_that_keep_their_mask(step):
    result, changed = compiled(step, *inputs())
    assert changed == 0
    torch.testing.assert_close(result, step(*inputs()), rtol=0, atol=0)


def test_a_body_that_is_called_in_a_way_that_is_not_known():
    """No program is known that has Dynamo do so."""
    found = []

    def backend(gm, example_inputs):
        (name,) = gm.graph.find_nodes(op="get_attr")
        found.append(list(causal._called_elsewhere(gm.graph)))
        with gm.graph.inserting_before(gm.graph.output_node()):
            other = gm.graph.call_function(torch.ops.higher_order.cond, (True, name, name, ()))
        found.append([body is getattr(gm, name.target).graph for body in causal._called_elsewhere(gm.graph)])
        gm.graph.erase_node(other)
        return gm.forward

    torch.compiler.reset()
    torch.compile(checkpointed(transformers), backend=backend, fullgraph=True)(*inputs())
    assert found == [[], [True]]


# ---- masks that are not, or not for certain


def window(q, size):
    return lower(q.shape[-2]) & (places(q)[:, None] - places(q) < size)


def of_mapped_places(q):
    """As transformers made masks before torch 2.6."""
    row = torch.vmap(lambda i, j: j <= i, in_dims=(None, 0))
    return torch.vmap(row, in_dims=(0, None))(places(q), places(q))


def different_heads(q):
    return lower(T) & (places(q)[:, None] - places(q) <= (torch.arange(HEADS) + 1)[:, None, None])


def different_sequences(q):
    return lower(T) & (places(q)[:, None] >= torch.arange(B)[:, None, None, None])


def at_other_places(order):
    return lambda q: torch.arange(T)[torch.tensor(order)][:, None] >= torch.arange(T)


NOT_CAUSAL = {
    **{f.__name__: f for f in OVERWRITTEN},
    "diagonal_above": lambda q: lower(T, 1),
    "strictly_below": lambda q: lower(T, -1),
    "above": lambda q: places(q)[None, :] >= places(q)[:, None],
    "everything": lambda q: torch.ones(T, T, dtype=torch.bool),
    "nothing_of_it": lambda q: lower(T) & torch.zeros(T, T, dtype=torch.bool),
    "a_window": lambda q: window(q, T - 1),
    "a_window_of_one": lambda q: window(q, 1),
    "a_block": lambda q: lower(T) & (places(q)[:, None] // 4 == places(q) // 4),
    "an_offset": lambda q: torch.arange(2, T + 2)[:, None] >= places(q),
    "an_offset_to_a_named_end": lambda q: torch.arange(2, end=T + 2)[:, None] >= places(q),
    "an_offset_gathered": lambda q: torch.arange(T + 2)[places(q) + 2][:, None] >= places(q),
    "a_permutation": at_other_places([*range(1, T), 0]),
    "the_other_way": lambda q: torch.arange(T - 1, -1, -1)[:, None] >= places(q),
    "from_the_end": lambda q: lower(T + 3)[-T:, :T],
    "a_step": lambda q: torch.arange(0, 2 * T, 2)[:, None] >= places(q),
    "a_step_of_slices": lambda q: lower(2 * T)[::2, :T],
    "different_heads": different_heads,
    "different_sequences": different_sequences,
    "multiplied_away": lambda q: (places(q) * places(q))[:, None] >= places(q) * 2,
    "compared_with_places": lambda q: lower(T).long() > places(q),
    "reshaped": lambda q: torch.ones(T // 2, 2 * T, dtype=torch.bool).tril().view(T, T),
    "gathered_from_the_end": lambda q: places(q)[places(q) - 1][:, None] >= places(q) - 1,
    "gathered_backwards": lambda q: -places(q)[-places(q)][:, None] >= places(q),
    "gathered_at_minus_one": lambda q: (places(q) - places(q)[torch.full((T,), -1)])[:, None] > places(q),
    "second_differences": lambda q: torch.diff(torch.arange(T + 2), n=2).cumsum(0)[:, None] > places(q),
    "appended": lambda q: torch.diff(places(q), append=places(q)[:1]).cumsum(0)[:, None] > places(q),
    "prepended": lambda q: torch.diff(places(q), prepend=places(q)[:1] + 5).cumsum(0)[:, None] > places(q),
    "prepended_twice": lambda q: (
        torch.diff(places(q)[1:], prepend=places(q)[:1].expand(2)).cumsum(0)[:, None] > places(q)
    ),
    "of_one_row": lambda q: lower(T)[-1:],
    "of_one_column": lambda q: lower(T)[:, :1],
}  # fmt: skip


@pytest.mark.parametrize("mask", NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_another_mask_stays(mask):
    q, k, v = inputs()
    assert not torch.equal(mask(q).expand(B, HEADS, T, T), lower(T).expand(B, HEADS, T, T))
    keeps_its_mask(attend(mask), q, k, v)


#: Causal, and not known to be.
UNKNOWN = {
    "floats": lambda q: torch.arange(T, dtype=torch.float32)[:, None] >= torch.arange(T, dtype=torch.float32),
    "bytes": lambda q: torch.arange(T, dtype=torch.uint8)[:, None] >= torch.arange(T, dtype=torch.uint8),
    "mapped": of_mapped_places,
    "one_step_for_both": lambda q: (places(q) * 2)[:, None] >= torch.arange(0, 2 * T, 2),
    "a_permutation_that_is_none": at_other_places(list(range(T))),
}  # fmt: skip


@pytest.mark.parametrize("mask", UNKNOWN.values(), ids=UNKNOWN)
def test_a_mask_that_is_not_understood_stays(mask):
    keeps_its_mask(attend(mask), *inputs())


PADDED = torch.arange(T) < torch.tensor([T, T - 3])[:, None]
#: Of an input.
GIVEN = {
    "padding": (lambda q, given: given[:, None, None, :], PADDED),
    "padding_too": (lambda q, given: lower(T) & given[:, None, None, :], PADDED),
    "padding_times": (lambda q, given: lower(T) * given[:, None, None, :], PADDED),
    "causal_this_time": (lambda q, given: given, lower(T)),
    "places": (lambda q, given: given[:, None] >= given, torch.arange(T)),
    "places_gathered": (lambda q, given: places(q)[given][:, None] >= places(q), torch.arange(T)),
    "places_packed": (lambda q, given: lower(T) & (given[:, None] == given), torch.arange(T) // 8),
    "a_row_overwritten": (lambda q, given: lower(T).index_copy_(0, torch.tensor([2]), given[:1]), PADDED),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "given"), GIVEN.values(), ids=GIVEN)
def test_a_mask_of_an_input_stays(mask, given):
    keeps_its_mask(attend(mask), *inputs(), given)


#: Causal up to some length, in the code as numbers: torch makes symbols of what is not.
UP_TO = {
    "window": lambda q: lower(q.shape[-2]) & (places(q)[:, None] - places(q) < 24),
    "triu": lambda q: lower(q.shape[-2]).triu(-24),
    "offset": lambda q: lower(q.shape[-2]) & (places(q) <= 24),
    "steep": lambda q: lower(q.shape[-2]) & (places(q)[:, None] * 2 - places(q) < 24),
}  # fmt: skip


@pytest.mark.parametrize("mask", UP_TO.values(), ids=UP_TO)
def test_a_window_is_shorter_than_a_length_that_is_not_known(mask):
    is_causal_without_a_mask(attend(mask), *inputs())
    keeps_its_mask(attend(mask), *inputs(), dynamic=True)


@pytest.mark.parametrize("keys", [T + 5, T - 5], ids=["more", "fewer"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_another_number_of_keys(keys, dynamic):
    def step(q, k, v):
        mask = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    keeps_its_mask(step, *inputs(keys=keys), dynamic=dynamic)


def test_a_query_after_its_keys():
    """A step with a cache: it sees all keys, the first row of a causal mask only one."""

    def step(q, k, v):
        mask = torch.arange(T, T + 1)[:, None] >= torch.arange(T + 1)
        return F.scaled_dot_product_attention(q, k, v, mask)

    keeps_its_mask(step, *inputs(1, T + 1))


ADDED = {
    "ones": lambda q: torch.ones(T, T, dtype=q.dtype).tril(),
    "cast": lambda q: lower(T).to(q.dtype),
    "infinities": lambda q: torch.full((T, T), float("-inf"), dtype=q.dtype).triu(1),
    "filled": lambda q: torch.zeros(T, T, dtype=q.dtype).masked_fill(~lower(T), float("-inf")),
}  # fmt: skip


@pytest.mark.parametrize("mask", ADDED.values(), ids=ADDED)
def test_a_mask_that_is_added_stays(mask):
    keeps_its_mask(attend(mask), *inputs())


def test_dropout_keeps_its_mask():
    assert captured(attend(transformers, dropout_p=0.5), *inputs())[1] == 0


def test_a_call_that_is_causal_besides_keeps_its_mask():
    """Some kernels of torch take both, and its rules for fake tensors do not."""

    def prepare(graph):
        (call,) = calls(graph)
        call.kwargs = {**call.kwargs, "is_causal": True}

    try:
        graph, changed, _ = captured(attend(transformers), *inputs(), prepare=prepare)
    except RuntimeError as error:
        if "Explicit attn_mask should not be set" not in str(error):
            raise
        pytest.skip("no kernel of this torch takes both")
    assert changed == 0 and calls(graph)[0].kwargs["attn_mask"] is not None


def queries_overwritten(q, k, v):
    mask = lower(T)
    q[:, :1].mul_(2.0)
    return F.scaled_dot_product_attention(q, k, v, mask)


def mask_transposed_in_place(q, k, v):
    mask = lower(T)
    mask.t_()
    return F.scaled_dot_product_attention(q, k, v, mask)


def mapped_queries(q, k, v):
    return torch.vmap(attend(lambda q: lower(T)), in_dims=(0, None, None))(torch.stack([q, q]), k, v)


def inside_of_a_map(q, k, v):
    return torch.vmap(lambda row: row.sum() + attend(lambda q: lower(T))(q, k, v).sum())(q[:, 0, 0])


def larger_mask_transposed_later(q, k, v):
    """What the graph knows of its shape is that after it."""
    larger = torch.ones(T + 3, T, dtype=torch.bool).tril()
    result = F.scaled_dot_product_attention(q, k, v, larger[-T:])
    larger.t_()
    return result


def of_a_chosen_kernel(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, lower(T))


def mask_of_another_mode(q, k, v):
    with torch.inference_mode():
        mask = lower(T)
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize(
    "step",
    [queries_overwritten, mask_transposed_in_place, larger_mask_transposed_later, mapped_queries, inside_of_a_map,
     mask_of_another_mode, of_a_chosen_kernel],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_calls_that_keep_their_mask(step):
    q, k, v = inputs()
    _, changed, result = captured(step, q.clone(), k, v)
    assert changed == 0
    torch.testing.assert_close(result, step(q.clone(), k, v), rtol=0, atol=0)


def test_tensors_of_another_type_keep_their_mask():
    q, k, v = (TwoTensor(x, x * 2) for x in inputs())
    _, changed, result = captured(attend(MASKS["tril"]), q, k, v)
    assert changed == 0
    close(result.b, attend(MASKS["tril"])(q, k, v).b)


@pytest.mark.parametrize("kernel", ["MATH", None])
def test_a_call_that_torch_has_no_kernel_for_keeps_its_mask(monkeypatch, kernel):
    monkeypatch.setattr(
        causal, "sdpa_kernel", lambda mode, tensors, **options: kernel if "is_causal" in options else "EFFICIENT"
    )
    keeps_its_mask(attend(transformers), *inputs())


def test_the_kernel_is_asked_for_what_will_be_called(monkeypatch):
    asked = []
    monkeypatch.setattr(
        causal, "sdpa_kernel", lambda mode, tensors, **options: asked.append((tensors[3], options)) or "FLASH_ATTENTION"
    )
    graph, changed, _ = captured(attend(transformers, enable_gqa=True), *inputs(heads=KV_HEADS))
    assert changed == 1 and [node.op for node in graph.nodes].count("call_function") == 1  # no layout to keep
    (mask, before), (without, after) = asked
    assert mask.dtype == torch.bool and without is None
    assert before == {"enable_gqa": True} and after == {"enable_gqa": True, "is_causal": True}


def test_a_graph_without_shapes_is_left_alone():
    gm = fx.symbolic_trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(3, 3).bool().tril()))
    assert run(CAUSAL, gm.graph).causal_masks == 0 and calls(gm.graph)[0].args[3] is not None


def test_graphs_without_attention_are_not_read(monkeypatch):
    monkeypatch.setattr("compile_passes.passes.Reading", None)
    gm = fx.symbolic_trace(lambda x: x.tril())
    report = run(CAUSAL, gm.graph)
    assert not report.errors and not report.changed


REASONS = {
    "window": (attend(lambda q: window(q, 3)), "its mask is not known to be causal for every input"),
    "added": (attend(ADDED["cast"]), "its mask is added to the scores"),
    "dropout": (attend(transformers, dropout_p=0.5), "it has dropout, or is causal besides its mask"),
    "keys": (lambda q, k, v: attend(lambda q: lower(T)[1:])(q[:, :, 1:], k, v), "it has not as many queries as keys"),
    "overwritten": (queries_overwritten, "its operands were overwritten"),
}  # fmt: skip


@pytest.mark.parametrize(("step", "reason"), REASONS.values(), ids=REASONS)
def test_the_log_says_why(step, reason, caplog):
    with caplog.at_level(logging.INFO, logger="compile_passes"):
        captured(step, *inputs())
    (line,) = [record.getMessage() for record in caplog.records if "keeps its mask" in record.getMessage()]
    assert line.endswith(f": {reason}") and "test_causal.py" in line


# ---- models


@pytest.mark.parametrize(
    ("family", "dynamic"),
    [("mixtral", False), ("olmoe", False), ("qwen3_moe", True)],
    ids=["mixtral-static", "olmoe-static", "qwen3_moe-dynamic"],
)
def test_a_transformers_model_reads_no_mask(family, dynamic):
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=2)
    ids = tokens(2, 8)  # as long as mixtral's window
    with torch.no_grad():
        want = model(ids).logits
        torch.compiler.reset()
        counters.clear()
        got = torch.compile(model, backend="moe_ops_eager", fullgraph=True, dynamic=dynamic)(ids).logits
    assert counters["moe_ops"]["causal_masks"] == 2 and counters["moe_ops"]["errors"] == 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_padded_batch_keeps_its_masks():
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm"), tokens(2, 8)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=padded).logits
        torch.compiler.reset()
        counters.clear()
        got = torch.compile(model, backend="moe_ops_eager", fullgraph=True)(ids, attention_mask=padded).logits
    assert counters["moe_ops"]["causal_masks"] == 0
    torch.testing.assert_close(got[padded.bool()], want[padded.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("again", [False, True], ids=["saved", "checkpointed"])
def test_a_transformers_model_learns_the_same(again):
    ids, found = tokens(2, 8), []
    for compiles in (False, True):
        model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=2).train().requires_grad_()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.compiler.reset()
        counters.clear()
        step = torch.compile(model, backend="moe_ops_eager") if compiles else model
        step(ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert counters["moe_ops"]["causal_masks"] == 2 and len(found[0]) > 10
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
