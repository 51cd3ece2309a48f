"""prepare, experts, finalize: the layer in every form, its gradient, one graph, and rows that come from elsewhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.backends import cpu
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, dense_formula, relative_error
from tests.ops.test_autograd import TRAINABLE, check_gradients, gradients

EXPERTS = (
    "activation", "alpha", "limit", "glu_layout", "up_proj", "gate_up_bias", "down_bias", "scheme", "gate_up_scales",
    "down_scales",
)  # fmt: skip
FORWARD = [name for name, variant in VARIANTS.items() if not variant.stored_rows]
GRADIENT = [name for name in TRAINABLE if name in FORWARD]


def staged(layer: Layer) -> Tensor:
    """The layer in three steps."""
    given = {**layer.tensors, **layer.options}
    prepared = moe_ops.prepare(
        given["hidden_states"],
        given["topk_weights"],
        given["topk_ids"],
        given["expert_map"],
        num_experts=given["gate_up_proj"].shape[0],
        **{name: given[name] for name in ("weight_on_input", "scheme", "format", "capacity") if name in given},
    )
    options = {name: given[name] for name in EXPERTS if name in given}
    options["out_dtype"] = given["hidden_states"].dtype
    result = moe_ops.experts(prepared, given["gate_up_proj"], given["down_proj"], **options)
    return moe_ops.finalize(result, prepared)


@pytest.mark.parametrize("name", FORWARD)
def test_is_the_layer(name: str) -> None:
    layer = VARIANTS[name].build()
    whole = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)
    got = staged(layer)
    assert got.dtype == whole.dtype and got.shape == whole.shape
    # The whole keeps what lies between the products in fp32 on the CPU; the steps round it to the rows' dtype.
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float64: 1e-10}.get(got.dtype, 1e-5)
    assert relative_error(got, whole) <= (3e-2 if layer.tensors["gate_up_scales"] else tolerance)


@pytest.mark.parametrize("name", GRADIENT)
def test_gradients(name: str) -> None:
    check_gradients(VARIANTS[name].build(), staged)


COMPILED = ["gpt_oss", "weight_on_input", "batched_overflow", "separate_bias"]


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_compiled(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(staged, backend="aot_eager", fullgraph=True, dynamic=True)
    check_gradients(VARIANTS[name].build(), compiled)


def test_gradients_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    check_gradients(VARIANTS["bias"].build(), torch.compile(staged, fullgraph=True))


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_gradcheck(format: str) -> None:
    """Second-order differences in float64, an id of -1, a pair past its expert's capacity and what is added."""
    T, E, K, H, I = 5, 3, 2, 4, 3
    ids = torch.tensor([[0, 1], [0, 2], [0, -1], [1, 0], [2, 1]], dtype=torch.int32)
    options = {"capacity": 3} if format == "batched" else {}

    def function(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, weights: Tensor, added: Tensor) -> Tensor:
        prepared = moe_ops.prepare(x, weights, ids, num_experts=E, format=format, **options)
        result = moe_ops.experts(prepared, w1, w2, gate_up_bias=b1, down_bias=b2)
        return moe_ops.finalize(result, prepared, added=added)

    shapes = [(T, H), (E, 2 * I, H), (E, 2 * I), (E, H, I), (E, H), (T, K), (T, H)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", ["expert_map_bias", "weight_on_input", "batched_overflow", "minus_ids"])
def test_garbage_in_unused_rows_stays_out_of_the_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels leave rows that hold no pair uninitialised."""
    layer = VARIANTS[name].build()
    grad = torch.randn_like(layer.tensors["hidden_states"])
    wanted = gradients(layer, dense_formula, grad)

    def poison(rows: Tensor, extents: Tensor) -> Tensor:
        places = torch.arange(rows.shape[-2])
        used = places < (extents.unsqueeze(1) if rows.dim() == 3 else extents[-1])
        return torch.where(used.unsqueeze(-1), rows, float("nan"))

    for op in ("moe_permute", "batched_dispatch"):
        move = getattr(cpu, op)

        def dispatch(call: Any, move: Any = move) -> Any:
            rows, extents, places = move(call)
            return poison(rows, extents), extents, places

        monkeypatch.setattr(cpu, op, dispatch)
    for op in ("grouped_mm", "batched_mm"):
        mm = getattr(cpu, op)
        monkeypatch.setattr(cpu, op, lambda call, mm=mm: poison(mm(call), call.extents))
    got = gradients(layer, staged, grad)
    for leaf, value in wanted.items():
        assert relative_error(got[leaf], value) <= 1e-5, leaf


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_one_graph_for_every_number_of_tokens(format: str) -> None:
    """T = 1 is one graph, every other T another one."""
    torch._dynamo.reset()
    layer = VARIANTS["plain"].build()
    up, down = layer.tensors["gate_up_proj"], layer.tensors["down_proj"]
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def step(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = moe_ops.fused_topk(logits, top_k=2)
        prepared = moe_ops.prepare(x, weights, ids, num_experts=up.shape[0], format=format)
        return moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)

    for T in (4, 3, 16, 40, 1, 7, 1):
        x, logits = torch.randn(T, up.shape[2]), torch.randn(T, up.shape[0])
        torch.testing.assert_close(
            step(x, logits), moe_ops.fused_moe(x, logits, up, down, top_k=2), rtol=1e-4, atol=1e-4
        )
    assert len(graphs) <= 3  # the first T, every T, T = 1


def test_rows_from_elsewhere() -> None:
    """An exchange between the steps: twice as many rows as pairs, of which each expert uses what arrived for it."""
    layer = VARIANTS["plain"].build()
    x, up, down = (layer.tensors[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))
    weights, ids = layer.tensors["topk_weights"], layer.tensors["topk_ids"]
    prepared = moe_ops.prepare(x, weights, ids, num_experts=up.shape[0])
    received = torch.full((2 * prepared.rows.shape[0], x.shape[1]), float("nan"))
    received[: prepared.rows.shape[0]] = prepared.rows
    exchanged = prepared._replace(rows=received)
    result = moe_ops.experts(exchanged, up, down)
    assert result.shape == received.shape
    assert_accurate(
        moe_ops.finalize(result, exchanged), dense_formula(layer.float64()), dense_formula(layer), dtype=x.dtype
    )


def test_two_pairs_of_one_row() -> None:
    """A row that was computed once for two pairs gets both gradients."""
    rows = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    places, weights = torch.tensor([[0, 0], [1, -1]], dtype=torch.int32), torch.rand(2, 2, dtype=torch.float64)
    grad = torch.randn(2, 4, dtype=torch.float64)
    moe_ops.moe_unpermute(rows, places, weights).backward(grad)
    expected = torch.stack((grad[0] * weights[0].sum(), grad[1] * weights[1, 0]))
    torch.testing.assert_close(rows.grad, expected)


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_weights_on_the_input_are_exported_for_any_number_of_tokens(format: str) -> None:
    layer = VARIANTS["weight_on_input"].build()
    x, up, down, weights, ids = (layer.tensors[name] for name in (
        "hidden_states", "gate_up_proj", "down_proj", "topk_weights", "topk_ids"))  # fmt: skip

    class Steps(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            options = {"num_experts": up.shape[0], "weight_on_input": True, "format": format}
            prepared = moe_ops.prepare(x, weights, ids, **options)
            return moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)

    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Steps(), (x, weights, ids), dynamic_shapes=({0: tokens},) * 3).module()
    for count in (3, len(x)):
        given = (x[:count], weights[:count], ids[:count])
        torch.testing.assert_close(program(*given), Steps()(*given), rtol=0, atol=0)


@pytest.mark.parametrize("on_input", [False, True], ids=["on_output", "on_input"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_an_exported_program_takes_no_tokens(format: str, on_input: bool) -> None:
    """Without a capacity; one of 0 is refused, of no tokens as well."""
    x, up, down, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]

    class Steps(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            options = {"num_experts": up.shape[0], "weight_on_input": on_input, "format": format}
            prepared = moe_ops.prepare(x, weights, ids, **options)
            return moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)

    tokens = torch.export.Dim("tokens", min=0, max=64)
    program = torch.export.export(Steps(), (x, weights, ids), dynamic_shapes=({0: tokens},) * 3).module()
    for count in (0, 1, len(x)):
        given = (x[:count], weights[:count], ids[:count])
        torch.testing.assert_close(program(*given), Steps()(*given), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"prepare: capacity must be .* got 0"):
        moe_ops.prepare(x[:0], weights[:0], ids[:0], num_experts=up.shape[0], format=format, capacity=0)


@pytest.mark.parametrize("how", ["whole", "routed", "steps"])
def test_layers_are_traced_by_fx(how: str) -> None:
    """Step by step, as a node each."""
    x, up, down = (VARIANTS["plain"].build().tensors[name] for name in ("hidden_states", "gate_up_proj", "down_proj"))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Parameter(up), torch.nn.Parameter(down)

        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            if how == "whole":
                return moe_ops.fused_moe(x, logits, self.up, self.down, top_k=2)
            weights, ids = moe_ops.fused_topk(logits, top_k=2)
            if how == "routed":
                return moe_ops.fused_experts(x, self.up, self.down, weights, ids)
            prepared = moe_ops.prepare(x, weights, ids, num_experts=6, format="batched")
            return moe_ops.finalize(moe_ops.experts(prepared, self.up, self.down), prepared)

    block, logits = Block(), torch.randn(x.shape[0], 6)
    traced = torch.fx.symbolic_trace(block)
    torch.testing.assert_close(traced(x, logits), block(x, logits), rtol=0, atol=0)


def test_what_is_prepared_goes_through_a_file_of_a_program() -> None:
    x, _, _, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]

    class First(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> moe_ops.Prepared:
            return moe_ops.prepare(x, weights, ids, num_experts=6)

    file = io.BytesIO()
    torch.export.save(torch.export.export(First(), (x, weights, ids)), file)
    file.seek(0)
    found = torch.export.load(file).module()(x, weights, ids)
    assert type(found) is moe_ops.Prepared
    assert torch.equal(found.places, First()(x, weights, ids).places)


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_weights_on_the_input_of_no_tokens_have_a_gradient(format: str) -> None:
    x, up, down, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]
    weights = weights[:0].clone().requires_grad_()
    options = {"num_experts": up.shape[0], "weight_on_input": True, "format": format}
    prepared = moe_ops.prepare(x[:0], weights, ids[:0], **options)
    moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared).sum().backward()
    assert weights.grad.shape == weights.shape


@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
@pytest.mark.parametrize("change", ["fewer", "more"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_a_result_of_other_rows_is_refused(format: str, change: str, how: str) -> None:
    """Places of pairs name rows of what was prepared: any other result would be added up to wrong numbers."""
    x, up, down, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]

    class Steps(torch.nn.Module):
        def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            prepared = moe_ops.prepare(x, weights, ids, num_experts=up.shape[0], format=format)
            result = moe_ops.experts(prepared, up, down)
            result = result[..., :-1, :] if change == "fewer" else torch.cat((result, result), dim=-2)
            return moe_ops.finalize(result, prepared)

    rows = "E=6, C=" if format == "batched" else "R="
    message = rf"finalize: result must be \[{rows}\d+, H=48\], got .* made of this prepared"
    torch._dynamo.reset()
    run = torch.compile(Steps(), backend="eager", fullgraph=True) if how == "compiled" else Steps()
    with pytest.raises(ValueError if how != "compiled" else Exception, match=message):
        if how == "exported":
            tokens = torch.export.Dim("tokens", min=2, max=64)
            torch.export.export(run, (x, weights, ids), dynamic_shapes=({0: tokens},) * 3)
        run(x, weights, ids)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_rows_that_come_back_in_a_number_of_their_own_are_compiled() -> None:
    """Whether there are as many as went is not to be told before the graph runs."""
    x, up, _, weights, ids = list(VARIANTS["plain"].build().tensors.values())[:5]

    def steps(x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        prepared = moe_ops.prepare(x, weights, ids, num_experts=up.shape[0])
        came = prepared.rows[: counts.sum().item()]
        return moe_ops.finalize(came, prepared)

    torch._dynamo.reset()
    given = (x, weights, ids, torch.tensor([ids.numel() - 1, 1]))
    run = torch.compile(steps, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(run(*given), steps(*given), rtol=0, atol=0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "dense"}, "prepare: format must be one of"),
    "scheme": ({"scheme": "int3"}, "prepare: scheme must be one of"),
    "capacity": ({"capacity": 3}, "prepare: capacity must be None for format='grouped', got 3"),
    "slot_order": ({"format": "batched", "slot_order": "expert"}, "prepare: slot_order must be one of"),
    "slot_order_of_sorted": ({"slot_order": "choice"}, "prepare: slot_order must be 'token' for format='grouped'"),
    "weights": ({"topk_weights": torch.rand(7, 2)}, "prepare: topk_weights must be [T=7, K=3], got [7, 2]"),
    "ids": ({"topk_ids": torch.zeros(6, 3).int(), "topk_weights": torch.rand(6, 3)}, "prepare: topk_ids must be"),
    "type": ({"topk_ids": [[1]]}, "prepare: topk_ids must be a torch.Tensor"),
}


def test_errors_name_the_arguments_of_the_step() -> None:
    tensors = VARIANTS["plain"].build().tensors
    up, down = tensors["gate_up_proj"], tensors["down_proj"]
    prepared = moe_ops.prepare(
        tensors["hidden_states"], tensors["topk_weights"], tensors["topk_ids"], num_experts=up.shape[0]
    )
    with pytest.raises(ValueError, match=r"^experts: gate_up_proj must be \[E=6, N=48, H=48\]"):
        moe_ops.experts(prepared, up.transpose(1, 2), down)
    with pytest.raises(ValueError, match=r"^experts: down_proj must be \[E=6, H=48, I=40\]"):
        moe_ops.experts(prepared, up, down.transpose(1, 2))
    with pytest.raises(ValueError, match=r"^experts: down_proj must be of E=6 experts, as gate_up_proj, got 5"):
        moe_ops.experts(prepared, up, down[:5])
    with pytest.raises(
        ValueError, match=r"^experts: down_proj must be torch.float32, as gate_up_proj, got torch.float1"
    ):
        moe_ops.experts(prepared, up, down.half())
    with pytest.raises(ValueError, match=r"^experts: prepared.rows must be a torch.Tensor, got None"):
        moe_ops.experts(prepared._replace(rows=None), up, down)
    with pytest.raises(ValueError, match=r"^finalize: result must be \[R, H\]"):
        moe_ops.finalize(torch.randn(2, 3, 4), prepared)
    with pytest.raises(ValueError, match=r"^finalize: prepared must be a moe_ops.Prepared, got Tensor"):
        moe_ops.finalize(prepared.rows, prepared.rows)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str) -> None:
    changes, message = BAD[name]
    tensors = VARIANTS["plain"].build().tensors
    arguments = {key: tensors[key] for key in ("hidden_states", "topk_weights", "topk_ids")}
    with pytest.raises(ValueError) as caught:
        moe_ops.prepare(**{**arguments, "num_experts": 6, **changes})
    assert str(caught.value).startswith(message)


def _prepared() -> tuple[moe_ops.Prepared, Tensor, Tensor]:
    weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
    return moe_ops.prepare(torch.randn(4, 16), weights, ids, num_experts=8), torch.randn(8, 64, 16), weights


@pytest.mark.parametrize("shape", [(128,), (2, 2, 2, 16)], ids=["one", "four"])
def test_prepared_rows_of_other_dimensions_are_named(shape: tuple[int, ...]) -> None:
    prepared, _, _ = _prepared()
    with pytest.raises(ValueError, match=r"^finalize: prepared.rows must be \[R, H\], got \["):
        moe_ops.finalize(prepared.rows, prepared._replace(rows=torch.randn(shape)))


@pytest.mark.parametrize("on_input", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.to("meta"), "on cpu like hidden_states, got meta"),
        (Tensor.to_sparse, "a strided tensor"),
    ],
    ids=["elsewhere", "sparse"],
)
def test_routing_weights_that_cannot_be_used_are_named(change: Any, said: str, on_input: bool) -> None:
    _, _, weights = _prepared()
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^prepare: topk_weights must be {said}"):
        moe_ops.prepare(torch.randn(4, 16), change(weights), ids, num_experts=8, weight_on_input=on_input)


def test_errors_of_the_experts_have_their_words_all_through() -> None:
    prepared, gate_up, _ = _prepared()
    half, down = gate_up[:, :32].contiguous(), torch.randn(8, 16, 32)
    stored = [moe_ops.quantize_weight(weight, scheme="fp8_w8a16") for weight in (half, half, down)]
    gate, up, second = stored
    given = {"scheme": "fp8_w8a16", "down_scales": second[1:], "up_proj": up[0]}
    with pytest.raises(ValueError, match="as many tensors for up_proj as for gate_up_proj, after them"):
        moe_ops.experts(prepared, gate[0], second[0], gate_up_scales=gate[1:], **given)


#: What `experts` is told of packed weights, and what is wrong with that before any shape is.
MISTOLD: dict[str, tuple[dict[str, Any], str]] = {
    "no scheme": ({"scheme": None}, "scheme must be given for weights of dtype torch.uint8, got None. Pass one of ["),
    "plain scheme": ({"scheme": "bf16"}, "weights must be torch.bfloat16 for scheme='bf16', got torch.uint8."),
    "other scheme": ({"scheme": "mxfp8"}, "weights must be torch.float8_e4m3fn for scheme='mxfp8', got torch.uint8."),
    "layout": ({"glu_layout": "stacked"}, "glu_layout must be one of ["),
}


@pytest.mark.parametrize("name", MISTOLD)
def test_a_wrong_scheme_or_layout_is_not_called_a_wrong_shape(name: str) -> None:
    changes, message = MISTOLD[name]
    prepared, _, _ = _prepared()
    first, second = (moe_ops.quantize_weight(torch.randn(8, *size), scheme="mxfp4") for size in ((63, 16), (16, 32)))
    given = {"scheme": "mxfp4", "gate_up_scales": first[1:], "down_scales": second[1:]}
    with pytest.raises(ValueError) as caught:
        moe_ops.experts(prepared, first[0], second[0], **given | changes)
    assert str(caught.value).startswith(f"experts: {message}")


@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("on_input", [False, True], ids=["after", "before"])
def test_rows_that_are_quantised_with_a_gradient_are_called_as_they_were_given(on_input: bool, format: str) -> None:
    x, (weights, ids) = torch.randn(4, 16), moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
    given = {"num_experts": 8, "weight_on_input": on_input, "scheme": "fp8_channel", "format": format}
    source = "hidden_states * topk_weights" if on_input else "hidden_states"
    with pytest.raises(ValueError, match=f"^prepare: {re.escape(source)} must not require grad, got a tensor that"):
        moe_ops.prepare(x.requires_grad_(not on_input), weights.requires_grad_(on_input), ids, **given)


ODD: dict[str, Any] = {
    "weights": (lambda x, w, ids, n: moe_ops.prepare(x, w[:3], ids, num_experts=n), r"\[T=4, K=2\], got \[3, 2\]"),
    "dimensions": (lambda x, w, ids, n: moe_ops.prepare(x, w, ids[0], num_experts=n), r"\[T, K\], got \[2\]"),
    "a number": (
        lambda x, w, ids, n: moe_ops.prepare(x, w, ids, num_experts=8, weight_on_input=n),
        r"weight_on_input must be True or False, got 8 \(int\)",
    ),
    "one below 0": (
        lambda x, w, ids, n: moe_ops.prepare(x, w, ids, num_experts=8, capacity=-n), r"format='grouped', got -8"
    ),
    "a fraction": (
        lambda x, w, ids, n: moe_ops.prepare(x, w, ids, num_experts=8, format="batched", capacity=n / 16 + 1),
        r"capacity must be an int or None, got 1.5 \(float\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_errors_say_numbers_that_are_symbols(case: str) -> None:
    """Under torch.compile(dynamic=True) Dynamo holds sizes and numbers as symbols, of which it writes no text."""
    function, said = ODD[case]
    weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
    inputs = (torch.randn(4, 16), weights, ids, 8)
    with pytest.raises(ValueError, match=said):
        function(*inputs)
    torch.compiler.reset()
    with pytest.raises(Exception, match=said):
        torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(*inputs)
