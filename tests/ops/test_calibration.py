"""Static scales from inputs of the user: whoever multiplies the weights, wherever the model does it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import moe_ops
from moe_ops.quantized import QuantizedWeight

E, H, I, K = 4, 32, 16, 2
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]


def _loop(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """One expert after the other: ``x [R, .]``, ``ids [R]``."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert in ids.unique():
        out[ids == expert] = F.linear(x[ids == expert], weight[expert])
    return out


def _grouped(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort()
    ends = F.one_hot(ids, E).sum(0).cumsum(0).int()
    out = torch._grouped_mm(x[order].bfloat16(), weight.bfloat16().transpose(1, 2), offs=ends).float()
    return torch.empty_like(out).index_copy_(0, order, out)


def _padded(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Rows past the last expert's, which nobody multiplies and whose results are what memory held."""
    order = ids.argsort()
    ends = F.one_hot(ids, E).sum(0).cumsum(0).int()
    rows = F.pad(x[order], (0, 0, 0, 8), value=torch.inf).bfloat16()
    out = torch._grouped_mm(rows, weight.bfloat16().transpose(1, 2), offs=ends)[: len(x)].float()
    return torch.empty_like(out).index_copy_(0, order, out)


def _one_by_one(x: Tensor, weight: Sequence[Tensor] | Tensor, ids: Tensor) -> Tensor:
    return torch.stack([weight[expert] @ row for row, expert in zip(x, ids.tolist(), strict=True)])


#: Spellings of ``y[r] = W[ids[r]] x[r]``.
PRODUCTS: dict[str, Rows] = {
    "loop": _loop,
    "grouped_mm of casts": _grouped,
    "grouped_mm of more rows": _padded,
    "bmm of gathered weights": lambda x, w, ids: torch.bmm(w[ids], x.unsqueeze(2)).squeeze(2),
    "baddbmm": lambda x, w, ids: torch.baddbmm(
        torch.full((x.shape[0], 1, w.shape[1]), 1e3), x.unsqueeze(1), w.index_select(0, ids).transpose(1, 2)
    ).squeeze(1) - 1e3,
    "vectors": _one_by_one,
    "pieces of a copy": lambda x, w, ids: _one_by_one(x.double(), w.double().unbind(0), ids).float(),
    "einsum over all": lambda x, w, ids: torch.einsum("rk,enk->rne", x, w)[torch.arange(len(ids)), :, ids],
}  # fmt: skip


class Block(nn.Module):
    """A router, and experts whose weights a module of its own holds."""

    def __init__(self, product: str = "loop") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.product = PRODUCTS[product]
        self.experts, self.router = nn.Module(), nn.Linear(H, E, bias=False)
        self.router.weight.data.copy_(torch.randn(E, H, generator=generator))
        for name, shape in {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}.items():
            self.experts.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.dropout = nn.Dropout(0.5)
        self.seen: list[list[float]] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.dropout(x) * scale
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        rows = x.repeat_interleave(K, 0)
        gate, up = self.product(rows, self.experts.gate_up_proj, ids.flatten()).chunk(2, -1)
        h = F.silu(gate) * up
        self.seen.append([rows.abs().max().item(), h.abs().max().item()])
        y = self.product(h, self.experts.down_proj, ids.flatten())
        return (y.view(-1, K, H) * weights.unsqueeze(2)).sum(1)


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, H, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_scales_are_those_of_the_largest_row(product: str) -> None:
    block = Block(product).train()
    report = moe_ops.quantize_(block, "fp8_channel", inputs=batches())
    assert block.training and block.dropout.training and len(block.seen) == 3
    for at, (one, name) in enumerate(zip(report.parameters, ("gate_up_proj", "down_proj"), strict=True)):
        weight = getattr(block.experts, name)
        largest = max(seen[at] for seen in block.seen)
        assert weight.input_scale.shape == (E, 1, 1) and weight.input_scale.dtype == torch.float32
        torch.testing.assert_close(weight.input_scale.unique(), torch.tensor([largest / 448]), rtol=5e-3, atol=0)
        assert one.input_scale == weight.input_scale[0].item()
        assert f"activations in steps of {one.input_scale:.3g}" in str(report)


@pytest.mark.parametrize("product", PRODUCTS)
def test_inference_mode_hides_no_product(product: str) -> None:
    wanted = moe_ops.quantize_(Block(product), "fp8_channel", inputs=batches())
    with torch.inference_mode():
        got = moe_ops.quantize_(Block(product), "fp8_channel", inputs=batches())
    assert str(got) == str(wanted)


def test_inputs_of_every_kind() -> None:
    (x,), block = batches(1), Block()
    moe_ops.quantize_(block, "fp8_tensor", inputs=(given for given in [x, (x, 2.0), {"x": x, "scale": 3.0}, [x]]))
    assert len(block.seen) == 4
    wanted = 3 * x.abs().max() / 448
    torch.testing.assert_close(block.experts.gate_up_proj.input_scale[0, 0, 0], wanted)


def test_inputs_of_unknown_number() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from batches()

    block = Block()
    moe_ops.quantize_(block, "fp8_tensor", inputs=DataLoader(Stream(), batch_size=None))
    assert len(block.seen) == 3


def test_a_compiled_model_is_watched_eagerly() -> None:
    block = Block()
    moe_ops.quantize_(torch.compile(block, backend="moe_ops_eager"), "fp8_tensor", inputs=batches(1))
    assert len(block.seen) == 1 and block.experts.down_proj.input_scale is not None


@torch.no_grad()
def test_the_operators_use_them() -> None:
    block = Block().eval()
    moe_ops.quantize_(block, "fp8_channel", inputs=batches())
    x, weights = batches(1)[0], (block.experts.gate_up_proj, block.experts.down_proj)
    got = moe_ops.fused_moe(x, block.router(x), *weights, top_k=K, renormalize=False)
    own = block(x)
    dynamic = [QuantizedWeight(w.stored, [w.scale], scheme=w.scheme, dtype=w.dtype) for w in weights]
    other = moe_ops.fused_moe(x, block.router(x), *dynamic, top_k=K, renormalize=False)
    assert not torch.equal(got, other)
    for result in (got, other):
        assert (result - own).norm() < 0.06 * own.norm()


@pytest.mark.parametrize("way", ["torch", "safetensors", "assign"])
def test_a_calibrated_state_is_loaded_where_nothing_was_calibrated(way: str, tmp_path: Path) -> None:
    model, other = Block(), Block()
    moe_ops.quantize_(model, "fp8_tensor", inputs=batches())
    moe_ops.quantize_(other, "fp8_tensor")
    state = copy.deepcopy(model.state_dict())
    assert state["experts.down_proj_input_scale"].shape == (E, 1, 1)
    if way == "torch":
        torch.save(state, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
    elif way == "safetensors":
        files = pytest.importorskip("safetensors.torch")
        files.save_file(state, tmp_path / "model.safetensors")
        state = files.load_file(tmp_path / "model.safetensors")
    other.load_state_dict(state, assign=way == "assign")
    for name in ("gate_up_proj", "down_proj"):
        held, wanted = (getattr(made.experts, name) for made in (other, model))
        assert isinstance(held, nn.Parameter) and held.parts().keys() == wanted.parts().keys()
        assert torch.equal(held.input_scale, wanted.input_scale)
    x = batches(1)[0]
    assert torch.equal(copy.deepcopy(other).double().experts.down_proj.input_scale, other.experts.down_proj.input_scale)
    assert torch.equal(other.eval()(x), model.eval()(x))


class Apart(nn.Module):
    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, I, H)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, H, I))


class Beside(Block):
    """Holds experts that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Block()


class Operator(Block):
    def forward(self, x: Tensor) -> Tensor:
        weights = (self.experts.gate_up_proj, self.experts.down_proj)
        return moe_ops.fused_moe(x, self.router(x), *weights, top_k=K)


def quantize(model: nn.Module, inputs: Any, scheme: str = "fp8_tensor") -> None:
    moe_ops.quantize_(model, scheme, inputs=inputs)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "a scheme without": (
        lambda: quantize(Block(), batches(), "mxfp4"),
        "scheme must be one of ['fp8_channel', 'fp8_tensor'] where inputs are given, got 'mxfp4'. Leave inputs out.",
    ),
    "a tensor": (
        lambda: quantize(Block(), batches()[0]),
        "inputs must be an iterable of the model's inputs, got Tensor. Pass a list of one.",
    ),
    "a number among them": (
        lambda: quantize(Block(), [batches()[0], 3]),
        "inputs[1] must be a tensor, a tuple or a mapping of arguments, got int.",
    ),
    "none": (lambda: quantize(Block(), []), "inputs must be at least one input of the model, got none."),
    "no memory": (
        lambda: quantize(Block().to("meta"), batches()),
        "inputs must be None for experts.gate_up_proj, which has no memory, got some. Load the weights first.",
    ),
    "not finite": (
        lambda: quantize(Block(), [torch.full((2, H), torch.inf)]),
        "inputs must be such that rows in front of experts.gate_up_proj are finite, got",
    ),
    "zeros": (
        lambda: quantize(Block(), [torch.zeros(2, H)]),
        "inputs must be such that rows in front of experts.gate_up_proj are not all zero, got zeros. A scale of them",
    ),
    "not reached": (
        lambda: quantize(Beside(), batches()),
        "inputs must be such that rows are multiplied with other.experts.gate_up_proj, got no product of it. Pass",
    ),
    "gate and up apart": (
        lambda: quantize(Apart(), batches()),
        "model must be of two stacks where inputs are given, got ['w1', 'w3', 'w2']. Stack gate and up",
    ),
    "an operator": (
        lambda: quantize(Operator(), batches()),
        "inputs must be None for a model whose experts are one operator, got some, and moe_ops.fused_moe.default. Call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(f"quantize_: {message}")):
        call()


def test_the_models_own_error_says_which_input_it_was() -> None:
    block = Block().train()
    with pytest.raises(TypeError) as caught:
        quantize(block, [batches()[0], {"y": 1}])
    assert caught.value.__notes__ == ["quantize_: the model was called with inputs[1]."]
    assert block.training and type(block.experts.down_proj) is nn.Parameter
