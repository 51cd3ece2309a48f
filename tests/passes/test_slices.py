"""Sorted rows cut into a slice for each expert by counts that the host reads: jetmoe, Granite 3, torchtitan's loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters as dynamo

import moe_ops
from benchmarks.foreign import GraniteMoe, TorchTitanMoE
from benchmarks.loops import Block
from compile_passes.passes import FUSE, run
from moe_ops.compat import captured_under
from tests.passes import sliced
from tests.passes.blocks import FEW as E
from tests.passes.blocks import H, I, K, capture, silu_glu
from tests.passes.blocks import few_weights as weights
from tests.passes.compare import check, settled

TORCHTITAN = {"looped": True, "dim": H, "hidden": I, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def captured():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def route(x, gate):
    logits = F.linear(x, gate)
    values, ids = (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1).topk(K, dim=-1)
    return values / values.sum(-1, keepdim=True), ids


def counted(ids):
    return F.one_hot(ids.flatten(), E).sum(0)


def multiplied(parts, weight, order=range(E)):
    return torch.cat([F.linear(parts[e], weight[e]) for e in order])


def by_products(x, gate, w1, w2, *, sizes=lambda ids: counted(ids).tolist(), cut=lambda rows, sizes: rows.split(sizes),
                first=multiplied, second=multiplied):  # fmt: skip
    """A loop for each projection."""
    scores, ids = route(x, gate)
    perm = ids.flatten().argsort()
    numbers = sizes(ids)
    h = silu_glu(first(cut(x[perm // K], numbers), w1))
    out = second(cut(h, numbers), w2) * scores.flatten()[perm, None]
    return torch.zeros_like(x).index_add(0, perm // K, out.to(x.dtype))


def by_experts(x, gate, w1, w2, *, cut=lambda rows, sizes: rows.split(sizes), expert=None, joined=torch.cat,
               sizes=lambda ids: counted(ids).tolist()):  # fmt: skip
    """One loop, with the whole expert in it."""
    scores, ids = route(x, gate)
    perm = ids.flatten().argsort()
    if expert is None:
        expert = lambda rows, e: F.linear(silu_glu(F.linear(rows, w1[e])), w2[e])  # noqa: E731
    parts = cut(x[perm // K], sizes(ids))
    out = joined([expert(rows, e) for e, rows in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, perm // K, (out * scores.flatten()[perm, None]).to(x.dtype))


def with_bias(x, gate, w1, w2):
    b1, b2 = w1[..., 0] * 2, w2[..., 0] * 3
    return by_experts(
        x, gate, w1, w2, expert=lambda rows, e: F.linear(silu_glu(F.linear(rows, w1[e], b1[e])), w2[e]) + b2[e]
    )


def padded(results):
    out = torch.cat(results)
    return torch.vstack((out, out.new_zeros((12 * K - out.shape[0], H))))


def all_of(rows, sizes):
    return torch.split(rows[: sum(sizes)], sizes, dim=0)


def one_by_one(ids):
    counts = counted(ids)
    return [counts[e].item() for e in range(E)]


FORMS = {
    "products": by_products,
    "products_by_their_sum": lambda *given: by_products(*given, cut=all_of),
    "experts": by_experts,
    "experts_by_their_sum": lambda *given: by_experts(*given, cut=all_of),
    "experts_with_bias": with_bias,
    "padded": lambda *given: by_experts(*given, cut=all_of, joined=padded),
    "sizes_one_by_one": lambda *given: by_experts(*given, sizes=one_by_one),
    "split_with_sizes": lambda *given: by_products(*given, cut=lambda rows, sizes: rows.split_with_sizes(sizes)),
    "negative_dim": lambda *given: by_products(*given, cut=lambda rows, sizes: rows.split(sizes, dim=-2)),
    "results_along_dim_0": lambda *given: by_experts(*given, joined=lambda parts: torch.concat(parts, dim=-2)),
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, torch.float32) for form in FORMS]
    + [(form, torch.bfloat16) for form in ("products", "experts_with_bias", "padded")],
    ids=str,
)
def test_fused(form, dtype):
    """In bf16 those that differ in what is cast."""
    outcome = check(FORMS[form], *weights(dtype=dtype).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("form", ["products", "experts", "experts_with_bias"])
def test_gradients(form):
    outcome = check(FORMS[form], *weights(dtype=torch.float64).values(), gradients=True, fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


@pytest.mark.parametrize("form", ["products", "padded"])
def test_nothing_is_read_on_the_host(form):
    graph = capture(FORMS[form], *weights(dtype=torch.float32).values()).graph
    run(FUSE, graph)
    assert any("fused_" in str(node.target) for node in graph.nodes)
    assert not [node for node in graph.nodes if node.target in ("item", "split") or "_assert" in str(node.target)]


class Counting(nn.Module):
    """Counts that are read on the host for something else, too."""

    def forward(self, x, gate, w1, w2):
        found = []

        def sizes(ids):
            found.append(counted(ids).tolist())
            return found[0]

        out = by_products(x, gate, w1, w2, sizes=sizes)
        return out, x.new_zeros(found[0][0])


def test_counts_that_somebody_else_reads_stay():
    outcome = check(Counting(), *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 1)


# ---- near misses


def two_swapped(results):
    return torch.cat([results[1], results[0], *results[2:]])


def other_rows(rows, sizes):
    """As many rows for every expert, of other pairs."""
    return rows.flip(0).split(sizes)


def shifted(rows, sizes):
    return [*rows.split(sizes)[1:], rows.split(sizes)[0]]


MISSES = {
    "results_swapped": lambda *given: by_experts(*given, joined=two_swapped),
    "products_swapped": lambda *given: by_products(
        *given, second=lambda parts, w: torch.cat([F.linear(parts[e], w[e]) for e in (1, 0, *range(2, E))])
    ),
    "weights_of_the_next": lambda *given: by_products(
        *given, first=lambda parts, w: torch.cat([F.linear(parts[e], w[(e + 1) % E]) for e in range(E)])
    ),
    "slices_of_the_next_to_a_product": lambda *given: by_products(
        *given, first=lambda parts, w: torch.cat([F.linear(parts[(e + 1) % E], w[e]) for e in range(E)])
    ),
    "slices_swapped_before_the_second": lambda *given: by_products(
        *given, second=lambda parts, w: multiplied([parts[1], parts[0], *parts[2:]], w)
    ),
    "slices_of_the_next": lambda *given: by_experts(*given, cut=shifted, joined=lambda parts: torch.cat(parts)),
    "rows_flipped": lambda *given: by_experts(*given, cut=other_rows),
    "rows_flipped_before_the_second": lambda *given: by_products(
        *given, second=lambda parts, w: multiplied([part.flip(0) for part in parts], w)
    ),
    "counts_of_other_ids": lambda *given: by_experts(*given, sizes=lambda ids: counted((ids + 1) % E).tolist()),
    "counts_of_half_the_pairs": lambda *given: by_experts(
        *given, sizes=lambda ids: (F.one_hot(ids[:, 0], E).sum(0) * K).tolist()
    ),
    "sizes_backwards": lambda *given: by_experts(*given, sizes=lambda ids: counted(ids).tolist()[::-1]),
    "equal_sizes": lambda *given: by_experts(*given, sizes=lambda ids: [12 * K // E] * E),
    "bias_of_one_expert": lambda x, gate, w1, w2: by_experts(
        x, gate, w1, w2,
        expert=lambda rows, e: F.linear(silu_glu(F.linear(rows, w1[e], w1[e, :, 0] if e == E - 1 else None)), w2[e]),
    ),
    "another_activation_for_one": lambda x, gate, w1, w2: by_experts(
        x, gate, w1, w2,
        expert=lambda rows, e: F.linear(silu_glu(F.linear(rows, w1[e]) * (2 if e == 1 else 1)), w2[e]),
    ),
    "padded_with_ones": lambda *given: by_experts(
        *given, cut=all_of, joined=lambda parts: torch.cat(
            [torch.cat(parts)[: 12 * K - 1], torch.ones(1, H, dtype=parts[0].dtype)])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    outcome = check(MISSES[name], *weights(dtype=torch.float32).values(), fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


def test_ids_that_may_be_of_no_expert():
    """Rows behind those of the last expert would be cut off."""

    def program(x, ids, w1, w2):
        ids = ids * 1
        counts = (ids.flatten()[:, None] == torch.arange(E)).sum(0)
        perm = ids.flatten().argsort()
        rows = x[perm // K]
        rows = rows[: sum(counts.tolist())]
        out = multiplied(silu_glu(multiplied(rows.split(counts.tolist()), w1)).split(counts.tolist()), w2)
        return torch.zeros_like(x).index_add(0, perm[: out.shape[0]] // K, out)

    given = weights(dtype=torch.float32)
    ids = torch.randint(0, E + 2, (len(given["x"]), K))
    outcome = check(program, given["x"], ids, given["w1"], given["w2"], fullgraph=True)
    assert (outcome.problem, outcome.fused) == (None, 0)


# ---- modules


MODULES = {
    "granite": lambda: GraniteMoe(dim=H, hidden=I, dtype=torch.float32),
    "torchtitan_before": lambda: TorchTitanMoE(**TORCHTITAN),
    "torchtitan_after": lambda: TorchTitanMoE(**TORCHTITAN, score_before_experts=False, counting="scatter"),
}


class SlicesForAList(Block):
    """Every slice through a module of its own."""

    def forward(self, x):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        weights, ids = self.route(x)
        order = ids.flatten().argsort()
        counts = torch.histc(ids.flatten().float(), self.num_experts, 0, self.num_experts - 1).int().tolist()
        rows = [expert(part) for expert, part in zip(self.experts, x[order // self.top_k].split(counts))]  # noqa: B905
        out = torch.zeros(len(order), shape[-1]).index_copy(0, order, torch.cat(rows))
        return (out.view(-1, self.top_k, shape[-1]) * weights.unsqueeze(-1)).sum(1).view(shape)


LISTED = {**MODULES, "a list of modules": lambda: SlicesForAList(dim=H, hidden=I)}


@pytest.mark.parametrize("name", MODULES)
def test_compile_asks_for_weights_that_hold_numbers(name):
    model = nn.Sequential(MODULES[name]()).eval().to("meta")
    with pytest.warns(UserWarning, match=r"left as it is\. Its weights are on the meta device\. Call moe_ops\.compile"):
        moe_ops.compile(model)
    assert not captured_under(model)


@pytest.mark.parametrize("name", LISTED)
def test_compile_allows_the_capture(name):
    """`moe_ops.compile` tries a copy, has the model captured so, and says so; one graph for all numbers of tokens.

    Under Inductor one of them: the others are captured alike.
    """
    torch.manual_seed(0)
    model = nn.Sequential(LISTED[name]()).eval()
    torch.compiler.reset()
    dynamo.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        refused = moe_ops.explain(model, torch.randn(2, 3, H)).refused
        assert refused and all("moe_ops.compile(model)" in row.cure for row in refused)
        with pytest.warns(UserWarning, match="reads counts of rows on the host to cut the rows by them"):
            compiled = moe_ops.compile(model, backend="moe_ops" if name == "granite" else "moe_ops_eager")
        assert captured_under(model) == {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
        torch.compiler.reset()
        dynamo.clear()
        with torch.no_grad():
            for length in (3, 5, 2, 32):
                x = torch.randn(2, length, H)
                torch.testing.assert_close(compiled(x), model(x), atol=2e-2, rtol=2e-2)
            assert dynamo["stats"]["unique_graphs"] == 2 and not dynamo["graph_break"]
            assert dynamo["moe_ops"]["fused"] == 2


class Apart(GraniteMoe):
    """Reads another number on the host, of which nobody knows anything."""

    def forward(self, layer_input):
        out = super().forward(layer_input)
        return out if self.router.layer.weight.sum().item() > 0 else out * 2


def test_compile_leaves_alone_what_is_not_fused_then():
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        compiled = moe_ops.compile(nn.Sequential(Apart(dtype=torch.float32)).eval())
        assert not captured_under(compiled)


class AsksForNumbers(nn.Module):
    """Dynamo raises here once it captures the number."""

    def forward(self, x):
        return x + 1 if (x > 1).sum().item() else x


def test_numbers_beside_a_block_are_read_as_under_plain_compile():
    torch.manual_seed(0)
    model = nn.Sequential(AsksForNumbers(), MODULES["granite"]()).eval()
    torch.compiler.reset()
    dynamo.clear()
    x = torch.randn(2, 3, H)
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        with pytest.warns(UserWarning, match="reads counts of rows on the host to cut the rows by them"):
            compiled = moe_ops.compile(model, backend="moe_ops_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
    assert dynamo["moe_ops"]["fused"] == 1


# ---- generated


@pytest.mark.parametrize("seed", range(10))
def test_block(seed):
    settled(sliced.run, sliced.make(seed, misses=0))


@pytest.mark.parametrize("seed", range(100, 106))
def test_changed_block(seed):
    settled(sliced.run, sliced.make(seed, misses=1))
