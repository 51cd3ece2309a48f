"""torchao's tensors in the place of stacked expert weights: their bytes, the layers on them, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
import moe_ops.integrations.transformers
from meta.schemes import SCHEMES
from moe_ops.integrations.containers import Container, Unread, read
from tests.corpus.families import build, result, tokens

torchao = pytest.importorskip("torchao.quantization")
workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
Float8, Int8, PerRow, PerTensor = torchao.Float8Tensor, torchao.Int8Tensor, torchao.PerRow, torchao.PerTensor
Blocks, Groups = torchao.PerBlock([1, 128, 128]), torchao.PerGroup(128)
Make = Callable[[Tensor], Tensor]
E, N, K = 4, 256, 256


def rows8(granularity: Any, **options: Any) -> Any:
    return workflows.QuantizeTensorToFloat8Kwargs(granularity=granularity, **options)


def rows_of_integers(**options: Any) -> Any:
    return workflows.QuantizeTensorToInt8Kwargs(granularity=PerRow(), **options)


def float8(granularity: Any, rows: Any = None, **options: Any) -> Make:
    return lambda w: Float8.from_hp(w, granularity=granularity, act_quant_kwargs=rows, **options)


def int8(granularity: Any, rows: Any = None, **options: Any) -> Make:
    return lambda w: Int8.from_hp(w, granularity=granularity, act_quant_kwargs=rows, **options)


def intx(**change: Any) -> Make:
    """Integers in groups of 64 columns, made with other attributes."""

    def make(w: Tensor) -> Tensor:
        made = workflows.IntxUnpackedToInt8Tensor.from_hp(w, [1, 1, 64], torch.int8)
        names = [*made.tensor_data_names, *made.tensor_attribute_names]
        given = {name: getattr(made, name) for name in names}
        return type(made)(**{name: change.get(name, lambda value: value)(value) for name, value in given.items()})

    return make


def scaled_in(dtype: torch.dtype) -> Make:
    """Rows in e4m3 whose scales have this dtype."""

    def make(w: Tensor) -> Tensor:
        made = float8(PerRow())(w)
        made.scale = made.scale.to(dtype)
        return made

    return make


asymmetric = {"mapping_type": torchao.quant_primitives.MappingType.ASYMMETRIC}
#: id -> (how it is made, the scheme that reads it, whether it shows itself as [E, K, N]).
READ: dict[str, tuple[Make, str, bool]] = {
    "row": (float8(PerRow()), "fp8_w8a16", False),
    "row of a transposed weight": (float8(PerRow(1)), "fp8_w8a16", True),
    "stack": (float8(PerTensor()), "fp8_w8a16", False),
    "expert": (lambda w: float8(torchao.PerBlock([1, *w.shape[1:]]))(w), "fp8_w8a16", False),
    "block": (float8(Blocks), "fp8_w8a16", False),
    "row, fp8 rows": (float8(PerRow(), rows8(PerRow())), "fp8_channel", False),
    "stack, fp8 rows": (float8(PerTensor(), rows8(PerTensor())), "fp8_tensor", False),
    "block, fp8 groups": (float8(Blocks, rows8(Groups)), "fp8_block128", False),
    "int8 row": (int8(PerRow()), "int8_w8a16", False),
    "int8 row, zero points": (int8(PerRow(), **asymmetric), "int8_w8a16", False),
    "int8 groups": (int8(Groups), "int8_w8a16", False),
    "int8 row, int8 rows": (int8(PerRow(), rows_of_integers()), "int8_channel", False),
    "intx groups": (intx(), "int8_w8a16", False),
}


def weight(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (E, N, K)) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (values * (1 + torch.arange(shape[0] * shape[1]).view(*shape[:2], 1) % 5)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", READ)
def test_bits_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    make, scheme, transposed = READ[name]
    made = make(weight(dtype, (E, K, 128) if transposed else (E, N, K)))
    found = read(made)
    assert isinstance(found, Container) and (found.scheme, found.transposed) == (scheme, transposed)
    parts = [part.of(made) for part in found.scales]
    dense = SCHEMES[scheme].dequantize(found.data.of(made), parts).to(dtype)
    wanted = made.dequantize()
    assert torch.equal(dense.transpose(1, 2) if transposed else dense, wanted)
    assert found.data.of(made).data_ptr() == made.qdata.data_ptr(), "no copy"


REFUSED: dict[str, tuple[Make, str]] = {
    "e5m2": (float8(PerRow(), float8_dtype=torch.float8_e5m2), "torchao's Float8Tensor of torch.float8_e5m2 with"),
    "blocks of 64": (float8(torchao.PerBlock([1, 64, 64])), "scales [4, 4, 4] of a weight [4, 256, 256]"),
    "bounds": (float8(PerRow(), rows8(PerRow(), hp_value_ub=1.0)), "bounds of its activations' scales, hp_value_ub"),
    "rows by row, groups of 64": (float8(PerRow(), rows8(torchao.PerGroup(64))), "and activations by PerGroup"),
    "int8, one for the stack": (int8(PerTensor()), "torchao's Int8Tensor of torch.int8 with scales [1, 1, 1]"),
    "int8, asymmetric rows": (
        int8(PerRow(), rows_of_integers(**asymmetric)), "Int8Tensor with activations by an asymmetric mapping",
    ),
    "int8, static rows": (
        int8(PerRow(), rows_of_integers(), act_quant_scale=torch.ones(1, 1)), "Int8Tensor with act_quant_scale",
    ),
    "intx, int8 rows": (
        intx(activation_quantization=lambda none: "int8_asym_per_token"),
        "IntxUnpackedToInt8Tensor with activation_quantization",
    ),
    "zero points in bf16": (
        intx(zero_point=Tensor.bfloat16), "IntxUnpackedToInt8Tensor with zero_point of torch.bfloat16",
    ),
    "scales in fp16": (scaled_in(torch.float16), "Float8Tensor with scale of torch.float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    made = make(weight())
    found = read(made)
    assert isinstance(found, Unread) and words in found.what and found.cure
    x, logits = torch.randn(3, K).bfloat16(), torch.randn(3, E)
    with pytest.raises(
        ValueError, match=re.escape(f"fused_moe: gate_up_proj must be stored in a scheme, got {found.what}")
    ):
        moe_ops.fused_moe(x, logits, made, made, top_k=2)


#: By operators: whatever torchao's own code runs on.
LAYERS = [name for name, (_, _, transposed) in READ.items() if not transposed]


@pytest.mark.parametrize("name", LAYERS)
def test_operators_take_them(name: str) -> None:
    make, scheme, _ = READ[name]
    first, second = make(weight(shape=(E, 2 * K, K))), make(weight(shape=(E, K, K)))
    x, logits = torch.randn(5, K).bfloat16(), torch.randn(5, E)
    lists = [[part.of(one) for part in read(one).scales] for one in (first, second)]
    scales = {"gate_up_scales": lists[0], "down_scales": lists[1]}
    got = moe_ops.fused_moe(x, logits, first, second, top_k=2)
    assert torch.equal(got, moe_ops.fused_moe(x, logits, first.qdata, second.qdata, top_k=2, scheme=scheme, **scales))
    dense = moe_ops.fused_moe(x, logits, first.dequantize(), second.dequantize(), top_k=2)
    assert (got - dense).norm() < 0.06 * dense.norm()


@pytest.mark.parametrize("name", LAYERS)
def test_stages_take_them(name: str) -> None:
    make, scheme, _ = READ[name]
    first, second = make(weight(shape=(E, 2 * K, K))), make(weight(shape=(E, K, K)))
    x, logits = torch.randn(5, K).bfloat16(), torch.randn(5, E)
    prepared = moe_ops.prepare(x, *moe_ops.fused_topk(logits, top_k=2), num_experts=E, scheme=scheme)
    lists = [[part.of(one) for part in read(one).scales] for one in (first, second)]
    scales = {"gate_up_scales": lists[0], "down_scales": lists[1]}
    wanted = moe_ops.experts(prepared, first.qdata, second.qdata, scheme=scheme, **scales)
    assert torch.equal(moe_ops.experts(prepared, first, second), wanted)
    rows = {"offsets": prepared.extents, "rows_scale": prepared.rows_scale}
    wanted = moe_ops.grouped_mm(prepared.rows, first.qdata, **rows, scheme=scheme, weight_scales=lists[0])
    assert torch.equal(moe_ops.grouped_mm(prepared.rows, first, **rows), wanted)


class Block(nn.Module):
    """Sorted rows, as transformers computes them."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(make(weight(shape=(E, 2 * K, K)) / 64), requires_grad=False)
        self.down = nn.Parameter(make(weight(shape=(E, K, K)) / 64), requires_grad=False)
        self.router = nn.Linear(K, E, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(2, -1)
        pairs = ids.flatten()
        order = pairs.argsort(stable=True)
        ends = F.one_hot(pairs, E).sum(0).cumsum(0).int()
        gate, up = torch._grouped_mm(x[order // 2], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        rows = rows * weights.flatten()[order, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return rows[back].view(-1, 2, K).sum(1).to(x.dtype)


@pytest.mark.parametrize("name", ["row", "stack", "block"])
def test_a_block_is_fused_on_its_bytes(name: str) -> None:
    torch.manual_seed(0)
    block = Block(READ[name][0])
    counters.clear()
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(block, backend="moe_ops_eager", fullgraph=True, dynamic=True)
        for size in (2, 7, 64):
            x = torch.randn(size, K).bfloat16()
            got, own = compiled(x), block(x)
            call = moe_ops.fused_moe(x, block.router(x), block.gate_up, block.down, top_k=2, renormalize=False)
            assert torch.equal(got, call)
            assert (got - own).norm() <= 0.01 * own.norm()
    assert counters["moe_ops"]["fused"] == 1 and counters["stats"]["unique_graphs"] == 1


def test_a_block_that_no_scheme_reads_is_left_as_it_is() -> None:
    block = Block(float8(torchao.PerBlock([1, 64, 64])))
    x = torch.randn(5, K).bfloat16()
    report = moe_ops.explain(block, x)
    (refused,) = report.refused
    assert "torchao's Float8Tensor of torch.float8_e4m3fn with scales [4, 8, 4]" in refused.reason
    assert "PerRow(), PerTensor() or PerBlock([1, 128, 128])" in refused.cure
    with torch.no_grad():
        assert torch.equal(torch.compile(block, backend="moe_ops_eager")(x), block(x))


def test_a_model_of_transformers() -> None:
    """In one graph for all sizes; in bf16, which torch's grouped product takes; the bits of our experts there."""
    module = build("qwen3_moe", torch.bfloat16, "grouped_mm").eval()
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            if parameter.dim() == 3:
                made = Float8.from_hp(parameter.detach(), granularity=PerRow())
                part.register_parameter(name, nn.Parameter(made, requires_grad=False))
    outputs = {}
    for form in ("grouped_mm", "moe_ops"):
        module.set_experts_implementation(form)
        torch.compiler.reset()
        counters.clear()
        with torch.no_grad():
            compiled = torch.compile(module, backend="moe_ops_eager", fullgraph=True, dynamic=True)
            outputs[form] = [result(compiled(input_ids=tokens(1, size))) for size in (2, 7, 64)]
        assert counters["moe_ops"]["fused"] == (2 if form == "grouped_mm" else 0)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert all(map(torch.equal, outputs["grouped_mm"], outputs["moe_ops"]))
