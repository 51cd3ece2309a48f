"""Row-wise code between the experts and the combine stays, and reads rows in the operators' order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.match import MoEMatch, Refusal
from compile_passes.passes import FUSE, run
from compile_passes.tiny import use_experts
from moe_ops.logs import quiet
from tests.corpus.families import available, build, result, tokens
from tests.passes.blocks import E, H, K, T, block, capture, found, grouped, match, refusal, silu_glu, weights
from tests.passes.compare import assert_same, difference


def batched_rows(x, ids, topk_weights, w1, w2, *, after):
    """Rows in pair order."""
    flat = ids.reshape(-1)
    h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
    out = after(torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1))
    return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)


def rms_by_hand(rows):
    wide = rows.float() * (1 + SCALE).float()
    wide = wide.type_as(rows).float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(rows)


def layer_norm_by_hand(rows):
    centred = rows - rows.mean(-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * SCALE.to(rows.dtype)


SCALE = torch.linspace(0.5, 1.5, H)
CODE = {
    "rms_norm": lambda rows: F.rms_norm(rows, (H,)),
    "rms_norm_with_weight": lambda rows: F.rms_norm(rows, (H,), SCALE.to(rows.dtype), 1e-5),
    "layer_norm": lambda rows: F.layer_norm(rows, (H,), SCALE.to(rows.dtype), SCALE.to(rows.dtype)),
    "rms_by_hand": rms_by_hand,
    "layer_norm_by_hand": layer_norm_by_hand,
    "scaled": lambda rows: rows * SCALE.to(rows.dtype),
    "scaled_by_a_table_of_one_row": lambda rows: rows * SCALE.to(rows.dtype)[None],
    "capped": lambda rows: 5 * torch.tanh(rows / 5),
    "gated_by_itself": lambda rows: rows * torch.sigmoid(rows.mean(-1, keepdim=True)),
    "by_heads": lambda rows: F.rms_norm(rows.view(rows.shape[0], 4, H // 4), (H // 4,)).reshape(rows.shape[0], H),
}  # fmt: skip
FORMS = {"grouped": (grouped, torch.bfloat16), "batched": (batched_rows, torch.float32)}


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("form", FORMS)
def test_staged_and_right(form: str, name: str) -> None:
    experts, dtype = FORMS[form]
    run = block(experts, after=CODE[name])
    row = match(run, **weights(dtype=dtype))
    assert row.combine.staged is not None and row.router.routing == "softmax"
    trained = form == "batched" and name in ("rms_by_hand", "layer_norm")
    outcome = assert_same(run, *weights(dtype=dtype).values(), gradients=trained)
    assert outcome.fused == 0 and counters["moe_ops"]["staged"] == 1


def test_what_the_graph_becomes() -> None:
    def names(graph):
        return [node.name for node in graph.nodes if node.op.startswith("call_")]

    gm = capture(block(grouped, after=rms_by_hand), **weights())
    before = names(gm.graph)
    report = run(FUSE, gm.graph)
    after = names(gm.graph)
    assert len(report.staged) == 1 and not report.fused
    order = ["fused_topk", "moe_permute", "grouped_mm_glu", "grouped_mm", "rsqrt", "moe_unpermute"]
    places = [after.index(name) for name in order]
    assert places == sorted(places)
    assert "sort" in before and not {"sort", "histc", "chunk", "silu", "sum_2"} & set(after)
    gm.graph.lint()


def test_any_number_of_tokens() -> None:
    run = block(batched_rows, after=rms_by_hand)
    inputs = weights(dtype=torch.float32)
    compiled = torch.compile(run, backend="moe_ops_eager", dynamic=True, fullgraph=True)
    torch.compiler.reset()
    with torch.no_grad(), quiet():
        compiled(**inputs)
        with torch.compiler.set_stance("fail_on_recompile"):
            for count in (2, 7, 33):
                given = {**inputs, "x": torch.randn(count, H)}
                assert difference(compiled(**given), run(**given)) is None


def test_results_by_token_and_slot_as_rows() -> None:
    """As the cure of a norm of [T, K, H] says."""

    def run(x, ids, topk_weights, w1, w2, rows):
        h = torch.einsum("th,tknh->tkn", x, w1[ids])
        out = torch.einsum("tki,tkhi->tkh", silu_glu(h), w2[ids])
        out = F.layer_norm(out.reshape(-1, H), (H,)).view(-1, K, H) if rows else F.layer_norm(out, (H,))
        return (out * topk_weights.unsqueeze(-1)).sum(1)

    inputs = weights(dtype=torch.float32)
    assert "rows.reshape(-1, hidden)" in refusal(block(run, rows=False), **inputs).cure
    assert match(block(run, rows=True), **inputs).combine.staged is not None
    assert_same(block(run, rows=True), *inputs.values(), gradients=True)
    assert counters["moe_ops"]["staged"] == 1


@pytest.mark.parametrize("training", [False, True])
def test_rows_of_one_expert_for_each_token(training) -> None:
    """[T, 1, H] is as many rows as [T, H]."""

    def run(x, gate, w1, w2):
        topk_weights, ids = F.linear(x, gate).softmax(-1).max(-1)
        h = torch.bmm(w1[ids], x.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[ids], silu_glu(h).unsqueeze(-1)).squeeze(-1)
        out = F.layer_norm(out.view(-1, 1, H), (H,))
        return (out * topk_weights.view(-1, 1, 1)).sum(1)

    assert_same(run, *weights(dtype=torch.float32).values(), gradients=training)
    assert counters["moe_ops"]["staged"] == 1


def test_rows_that_return_to_pair_order_first() -> None:
    def run(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        ordered, perm = torch.sort(flat)
        offsets = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        out = F.grouped_mm(silu_glu(F.grouped_mm(x[perm // K], w1.mT, offs=offsets)), w2.mT, offs=offsets)
        out = rms_by_hand(out[perm.argsort()])
        return (out.view(-1, K, H) * topk_weights.unsqueeze(-1)).sum(1).to(x.dtype)

    assert match(block(run)).combine.staged is not None
    assert_same(block(run), *weights().values())
    assert counters["moe_ops"]["staged"] == 1


def test_weights_that_are_made_behind_the_code() -> None:
    """Of a router that stays: the operators before the code need none of them."""

    def run(x, gate, w1, w2):
        values, ids = F.linear(x, gate).softmax(-1).topk(K, dim=-1)
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1)
        out = F.rms_norm(torch.bmm(w2[flat], silu_glu(h).unsqueeze(-1)).squeeze(-1), (H,))
        return (out * values.reshape(-1).clamp(0.1, 0.9).unsqueeze(-1)).view(-1, K, H).sum(1)

    assert_same(run, *weights(dtype=torch.float32).values(), gradients=True)
    assert counters["moe_ops"]["staged"] == 1 and not counters["moe_ops"]["errors"]


def test_biases_and_activations_go_to_the_stages() -> None:
    def run(x, gate, w1, w2, b1, b2):
        values, ids = F.linear(x, gate).float().softmax(-1).topk(K, dim=-1)
        flat = ids.reshape(-1)
        h = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1) + b1[flat]
        gate_half, up = h.chunk(2, -1)
        out = torch.bmm(w2[flat], (up * F.gelu(gate_half)).unsqueeze(-1)).squeeze(-1) + b2[flat]
        return (F.rms_norm(out, (H,)) * values.reshape(-1, 1)).view(-1, K, H).sum(1)

    inputs = weights(dtype=torch.float32)
    inputs |= {"b1": inputs["w1"][:, :, 0].clone(), "b2": inputs["w2"][:, :, 0].clone()}
    assert_same(run, *inputs.values(), gradients=True)
    assert counters["moe_ops"]["staged"] == 1


WRONG = {
    "norm_over_the_rows": lambda rows: rows * rows.pow(2).mean(0, keepdim=True).rsqrt(),
    "norm_over_everything": lambda rows: rows * rows.pow(2).mean().rsqrt(),
    "norm_of_the_whole_table": lambda rows: F.layer_norm(rows, tuple(rows.shape)),
    "softmax_over_the_rows": lambda rows: rows.softmax(0),
    "centred_over_the_rows": lambda rows: rows - rows.mean(0),
    "another_scale_for_each_row": lambda rows: rows * torch.linspace(0, 1, T * K, dtype=rows.dtype)[:, None],
    "cumulated": lambda rows: F.rms_norm(rows.cumsum(0), (H,)),
    "rolled": lambda rows: F.rms_norm(rows.roll(1, 0), (H,)),
    "flipped": lambda rows: F.rms_norm(rows.flip(0), (H,)),
    "reshaped_over_rows": lambda rows: F.rms_norm(rows.view(-1, 2 * H), (2 * H,)).view(-1, H),
    "transposed": lambda rows: F.rms_norm(rows.view(H, -1), (rows.shape[0],)).view(-1, H),
    "cut_to_integers": lambda rows: (rows * 8).int().to(rows.dtype),
    "rounded_to_float8": lambda rows: rows.to(torch.float8_e4m3fn).to(rows.dtype),
    "noisy": lambda rows: F.rms_norm(rows, (H,)) + torch.rand_like(rows),
    "in_place": lambda rows: F.rms_norm(rows, (H,)).mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_code_that_is_not_of_each_row_alone(name: str) -> None:
    assert refusal(block(batched_rows, after=WRONG[name]), **weights(dtype=torch.float32)).cure


def test_an_escaping_value_of_that_code_is_in_the_models_order() -> None:
    def run(x, gate, w1, w2):
        seen = []

        def after(rows):
            seen.append(rows * 2)
            return F.rms_norm(seen[0], (H,))

        return block(grouped, after=after)(x, gate, w1, w2), seen[0]

    assert isinstance(found(run)[0], Refusal)
    assert_same(run, *weights().values())


def test_ids_that_nobody_proves_are_refused() -> None:
    """Rows of id E are zeros in some models, and a norm with a bias makes something of them."""

    def run(x, ids, topk_weights, w1, w2):
        return batched_rows(x, ids, topk_weights, w1, w2, after=CODE["layer_norm"])

    inputs = weights(dtype=torch.float32)
    inputs.pop("gate")
    row = refusal(run, **inputs, ids=torch.randint(0, E, (T, K)), topk_weights=torch.rand(T, K))
    assert "cannot be proved to be in" in row.reason


def test_a_factor_of_the_experts_does_not_move_behind_the_code() -> None:
    """The norm of twice the rows is that of the rows; twice the norm is not."""

    def doubled(h):
        gate, up = h.chunk(2, dim=-1)
        return 2 * F.silu(gate) * up

    run = block(grouped, activation=doubled, after=CODE["rms_norm"])
    assert "multiplied by 2" in refusal(run).reason
    assert_same(run, *weights().values())


def test_weights_before_the_norm_are_refused() -> None:
    def run(x, ids, topk_weights, w1, w2):
        return batched_rows(
            x, ids, torch.ones_like(topk_weights), w1, w2,
            after=lambda rows: F.rms_norm(rows * topk_weights.reshape(-1, 1), (H,)),
        )  # fmt: skip

    assert isinstance(found(block(run), **weights(dtype=torch.float32))[0], Refusal)


class Block(nn.Module):
    """A block with a norm after each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterDict({name: nn.Parameter(value) for name, value in weights().items() if name != "x"})

    def forward(self, x):
        return block(grouped, after=rms_by_hand)(x, *(self.tensors[name] for name in ("gate", "w1", "w2")))


def test_explain_counts_it_apart() -> None:
    with torch.no_grad():
        report = moe_ops.explain(Block(), weights()["x"])
    assert not report.fused and not report.refused and len(report.staged) == 1
    assert report.staged[0].experts == "grouped_mm" and report.staged[0].K == K
    assert "0 MoE block(s) fused, 1 staged, 0 refused" in str(report) and "No MoE block" not in str(report)


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_muse_spark_is_no_less_accurate(form: str) -> None:
    """A whole model in fp32, against itself in float64."""
    if not available("muse_spark"):
        pytest.skip("transformers has no muse_spark")
    model, ids = build("muse_spark", torch.float32, form, num_hidden_layers=1, moe_hidden_size=64), tokens(4, 16)
    torch.compiler.reset()
    with torch.no_grad():
        exact = result(use_experts(copy.deepcopy(model).double(), "eager")(input_ids=ids))
        use_experts(model, form)
        plain = result(model(input_ids=ids)).double()
        staged = result(torch.compile(model, backend="moe_ops_eager", fullgraph=True)(input_ids=ids)).double()
    own, ours = ((value - exact).norm(dim=-1).median() for value in (plain, staged))
    assert ours <= 1.05 * own


def test_matches_say_what_stays() -> None:
    (row,) = found(block(grouped, after=CODE["capped"]))
    assert isinstance(row, MoEMatch)
    names = {node.name.rstrip("_0123456789") for node in row.combine.staged.nodes}
    assert names == {"truediv", "tanh", "out"} and row.combine.staged.beside == ()
