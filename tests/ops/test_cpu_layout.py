"""Where the CPU backend puts rows: a padded block for every expert, and the rest sorted behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from meta.operands import Glu, Operand
from meta.schemes import SCHEMES
from moe_ops import reference
from moe_ops.backends import cpu
from moe_ops.kernels import cpu as kernels
from moe_ops.kernels import cpu_combine as sums
from moe_ops.kernels import cpu_costs
from moe_ops.kernels.cpu import lay_out, sort_pairs
from moe_ops.kernels.cpu_costs import Costs, Power, padded_length
from moe_ops.ops import parse
from tests.ops.errors import assert_accurate, assert_rounded
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula

COUNTS = {
    "even": [3, 3, 3, 3],
    "one is long": [1, 9, 0, 2],
    "two are long": [7, 0, 6, 1],
    "first and last": [5, 0, 0, 5],
    "none": [0, 0, 0, 0],
}


@pytest.mark.parametrize("length", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("name", COUNTS)
def test_every_pair_has_a_row_of_its_expert(name: str, length: int) -> None:
    counts = COUNTS[name]
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(4).repeat_interleave(torch.tensor(counts))
    ids = torch.cat((ids, torch.tensor([-1, 4])))[torch.randperm(sum(counts) + 2, generator=generator)]
    order, experts, found = sort_pairs(ids.view(-1, 1), None, 4, None)
    assert found == counts and torch.equal(ids[order], experts)
    row_of_sorted, rows, spans = lay_out(experts, counts, length)
    assert rows == 4 * length + sum(max(count - length, 0) for count in counts)
    row_of_pair = torch.full(ids.shape, rows).scatter_(0, order, row_of_sorted)
    expert_of_row = torch.cat((torch.arange(4).repeat_interleave(length), torch.full((rows - 4 * length,), -1)))
    for expert, start, end in spans:
        expert_of_row[4 * length + start : 4 * length + end] = expert
    for pair, expert in enumerate(ids.tolist()):
        row = int(row_of_pair[pair])
        if 0 <= expert < 4:
            assert expert_of_row[row] == expert
        else:
            assert row == rows
    assert len(row_of_sorted.unique()) == len(order)
    assert (expert_of_row >= 0).all()


@pytest.mark.parametrize("length", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("ids", ["random", "few", "minus"])
def test_the_length_of_the_padded_block_changes_no_result(ids, bias, length, monkeypatch) -> None:
    layer = Variant(ids=ids, bias=bias).build()
    monkeypatch.setattr(kernels, "padded_length", lambda counts, weight: length)
    assert_rounded(torch.ops.moe_ops.fused_experts(**layer.tensors, backend="cpu"), dense_formula(layer.float64()))


@pytest.mark.parametrize("length", [0, 3])
def test_a_bias_may_have_a_dtype_of_its_own(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in models that keep biases in fp32; with a padded block and without."""
    layer = Variant(T=24, bias=True, dtype=torch.bfloat16).build()
    for name in ("gate_up_bias", "down_bias"):
        layer.tensors[name] = layer.tensors[name].float()
    monkeypatch.setattr(kernels, "padded_length", lambda counts, weight: length)
    assert_right(layer)


def of_few_pairs(ids: list[list[int]], dtype: torch.dtype, bias: torch.dtype | None, **options: object) -> Layer:
    """A layer of 16 experts with these ids, and biases in a dtype of their own."""
    sizes = {"T": len(ids), "E": 16, "K": len(ids[0]), "H": 192, "I": 48}
    layer = Variant(**sizes, dtype=dtype, bias=bias is not None, options=tuple(options.items())).build()
    layer.tensors["topk_ids"] = torch.tensor(ids)
    for name in ("gate_up_bias", "down_bias") if bias is not None else ():
        layer.tensors[name] = layer.tensors[name].to(bias)
    return layer


def assert_right(layer: Layer, kept: list[list[int]] | None = None) -> None:
    """The operator against the formula, which ``kept`` tells which pairs a capacity leaves."""
    out = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)
    if kept is not None:
        layer.tensors["topk_ids"] = torch.tensor(kept)
    assert_accurate(out, dense_formula(layer.float64()), dense_formula(layer.wide(out.dtype)))


@pytest.mark.parametrize("ids", [[[3, 0]], [[15, 15]], [[7, 1], [1, 0]], [[5], [5]]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.float32, None), (torch.float32, torch.float32), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16),
     (torch.bfloat16, torch.float32), (torch.float16, None), (torch.float16, torch.float16)],
    ids=str,
)  # fmt: skip
def test_few_pairs_are_one_product_each(ids, dtype, bias, monkeypatch) -> None:
    layer = of_few_pairs(ids, dtype, bias)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "in_lots", None)  # nothing is sorted
        assert_right(layer)
    monkeypatch.setattr(cpu, "of_few", lambda ids, weight: None)
    assert_right(layer)


@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=["", "bias"])
@pytest.mark.parametrize(
    ("ids", "stored", "copied"),
    [
        ([[3, 0]], "contiguous", 2),
        ([[15, 15], [1, 0]], "contiguous", 2),
        ([[5]], "contiguous", 0),
        ([[3, 0]], "transposed", 0),
        ([[3, 0]], "behind_a_number", 0),
        ([[3, 0]], "large", 0),
    ],
    ids=["pair", "four", "one", "transposed", "odd_place", "large"],
)
def test_small_weights_of_single_rows_are_one_product(ids, stored, copied, bias, monkeypatch) -> None:
    """Of both projections, with the bits of a product each."""
    layer = of_few_pairs(ids, torch.bfloat16, bias)
    for name in ("gate_up_proj", "down_proj"):
        weight = layer.tensors[name]
        if stored == "transposed":
            layer.tensors[name] = weight.transpose(1, 2).contiguous().transpose(1, 2)
        elif stored == "behind_a_number":
            layer.tensors[name] = torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape)
    if stored == "large":
        monkeypatch.setattr(kernels, "_COPIED", 192 * 48 - 1)
    products: list[torch.Tensor] = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *of, **options: products.append(stack(*of, **options)) or products[-1])
    together = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)
    assert len(products) == copied
    monkeypatch.setattr(kernels, "_COPIED", 0)
    assert torch.equal(torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options), together)
    assert len(products) == copied
    assert_right(layer)


@pytest.mark.parametrize("stored", ["contiguous", "transposed"])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("vector", [True, False], ids=["faster", "slower"])
def test_a_row_alone_is_a_vector(length, bias, stored, vector, monkeypatch) -> None:
    """Where that is faster, of the weights as they are read fastest; more rows, or padded ones, are matrices."""
    layer = of_few_pairs([[0, 1, 2], [3, 2, 4], [5, 6, 2]], torch.bfloat16, bias)
    if stored == "transposed":
        for name in ("gate_up_proj", "down_proj"):
            layer.tensors[name] = layer.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    alone: list[int] = []
    one_row = kernels._one_row
    monkeypatch.setattr(kernels, "_one_row", lambda *of: alone.append(1) or one_row(*of))
    monkeypatch.setattr(kernels, "padded_length", lambda counts, weight: length)
    monkeypatch.setattr(cpu_costs, "costs", lambda dtype, threads: Costs(1.0, Power(1.0, 0.0), Power(1.0, 0.0), vector))
    assert_right(layer)
    expected = 0 if stored == "transposed" or bias == torch.float32 or length or not vector else 2 * 6
    assert len(alone) == expected


@pytest.mark.parametrize(
    ("ids", "options", "expert_map", "kept"),
    [
        ([[3, 0], [1, 2], [4, 5]] * (kernels._FEW // 6 + 1), {}, None, None),
        ([[3, -1]], {}, None, None),
        ([[16, 0]], {}, None, None),
        ([[7, 1], [1, 0]], {"format": "batched", "capacity": 1}, None, [[7, 1], [-1, 0]]),
        ([[3, 0]], {}, torch.arange(16).flip(0), None),
    ],
    ids=["more_pairs", "no_expert", "past_the_last", "capacity", "map"],
)
def test_other_pairs_are_sorted(ids, options, expert_map, kept, monkeypatch) -> None:
    laid: list[int] = []
    monkeypatch.setattr(kernels, "lay_out", lambda *arguments: laid.append(1) or lay_out(*arguments))
    layer = of_few_pairs(ids, torch.float32, None, **options)
    layer.tensors["expert_map"] = expert_map
    assert_right(layer, kept)
    assert laid == [1]


@pytest.mark.parametrize(
    ("dtype", "width", "most"),
    [(torch.float32, 1024, 16), (torch.float32, 1025, 8), (torch.bfloat16, 1024, 8)],
    ids=["small", "large", "bf16"],
)
def test_how_many_pairs_rarely_share_an_expert(dtype: torch.dtype, width: int, most: int) -> None:
    weight = torch.empty(16, 1024, width, dtype=dtype, device="meta")
    for pairs in (1, most, most + 1):
        layout = kernels.of_few(torch.zeros(pairs, 1, dtype=torch.int32), weight)
        in_order = [(0, pair, pair + 1) for pair in range(pairs)]
        assert (layout.row_of_pair is None and layout.lots[0].spans == in_order) == (pairs <= most)


@pytest.mark.parametrize("pairs", [0, kernels._FEW + 1], ids=["none", "many"])
def test_none_and_many_are_not_few(pairs: int) -> None:
    assert kernels.of_few(torch.zeros(pairs, 1, dtype=torch.int32), torch.empty(16, 64, 64, device="meta")) is None


@pytest.mark.parametrize("length", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_on_input": True}, {"format": "batched", "capacity": 64}], ids=str)
def test_few_pairs_are_laid_out_as_many_are(length, dtype, options, monkeypatch) -> None:
    """Those that share experts, some padded and some not."""
    ids = torch.randint(0, 5, (9, 3), generator=torch.Generator().manual_seed(length)).tolist()
    layer = of_few_pairs(ids, dtype, dtype, **options)
    monkeypatch.setattr(kernels, "padded_length", lambda counts, weight: length)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "in_lots", None)  # nothing is sorted
        few = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)
        assert_right(layer)
    monkeypatch.setattr(cpu, "of_few", lambda ids, weight: None)
    assert torch.equal(torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options), few)


def test_offsets_of_any_value_stay_within_the_rows() -> None:
    assert kernels.grouped_spans(torch.tensor([2, -3, 7, 50]), 9) == [(0, 0, 2), (2, 0, 7), (3, 7, 9)]


def test_few_pairs_of_a_capacity_that_holds_them_are_not_sorted(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "in_lots", None)
    assert_right(of_few_pairs([[7, 1], [1, 0]], torch.float32, None, format="batched", capacity=4))


LOTS = ("plain", "bias", "bf16", "weight_on_input", "expert_map", "separate_bias", "fp8_tensor_halves", "minus")


@pytest.mark.parametrize("name", LOTS)
@pytest.mark.parametrize("length", [0, 2], ids=["sorted", "padded"])
@pytest.mark.parametrize("in_a_lot", [1, 300], ids=["one_by_one", "some"])
def test_experts_in_lots_give_the_same(name: str, length: int, in_a_lot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = (VARIANTS[name] if name in VARIANTS else Variant(ids=name)).build()
    wanted = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    laid: list[int] = []
    monkeypatch.setattr(cpu, "of_few", lambda ids, weight: None)
    monkeypatch.setattr(kernels, "_IN_A_LOT", in_a_lot)
    monkeypatch.setattr(kernels, "padded_length", lambda counts, weight: 0 if layer.options.get("scheme") else length)
    monkeypatch.setattr(kernels, "lay_out", lambda *arguments: laid.append(1) or lay_out(*arguments))
    got = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    torch.testing.assert_close(got, wanted)
    assert len(laid) > 1 and got.any()


@pytest.mark.parametrize(
    ("counts", "columns", "wanted"),
    [
        ([5, 0, 1, 3, 1], 1, [(0, 5)]),
        ([5, 0, 1, 3, 1], 2, [(0, 1), (1, 5)]),
        ([5, 0, 1, 3, 1], 10, [(0, 1), (1, 3), (3, 4), (4, 5)]),
        ([0, 0, 9, 0], 10, [(0, 3), (3, 4)]),
        ([0, 0], 10, [(0, 2)]),
    ],
    ids=["all", "two", "most", "one_has_all", "none"],
)
def test_lots_are_of_neighbours_and_have_every_expert(counts, columns, wanted, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_IN_A_LOT", 10)
    assert [(lot.start, lot.stop) for lot in kernels.lots(counts, columns)] == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pieces_of_a_room_are_apart(dtype: torch.dtype) -> None:
    columns = [(3, torch.bfloat16), (5, torch.float32), (7, dtype)]
    room = kernels.Room(9, *columns)
    taken = [room.take(*wanted) for wanted in columns]
    assert not any(piece.data_ptr() % 64 for piece in taken)
    for number, piece in enumerate(taken):
        piece.fill_(number)
    assert [piece.unique().tolist() for piece in taken] == [[0], [1], [2]]
    assert [(tuple(piece.shape), piece.dtype) for piece in taken] == [((9, n), wanted) for n, wanted in columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "separate_bias", "minus"])
@pytest.mark.parametrize("room", [2**30, 0], ids=["apart", "one_piece"])
def test_an_activation_of_a_few_rows_at_a_time_has_the_same_bits(name, dtype, room, monkeypatch) -> None:
    variant = VARIANTS[name] if name in VARIANTS else Variant(ids=name)
    layer = replace(variant, T=40, dtype=dtype).build()
    monkeypatch.setattr(cpu, "_FEW_ELEMENTS", room)
    wanted = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    monkeypatch.setattr(kernels, "_WIDENED", 7 * layer.tensors["gate_up_proj"].shape[1])
    got = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    assert torch.equal(got, wanted) and got.any()


@pytest.mark.parametrize(("hidden", "wanted"), [(2048, 2048), (2064, 688), (2**17, 1024)])
def test_columns_that_are_widened_together(hidden: int, wanted: int) -> None:
    """In parts of about the same number: of 2^21 elements, or at most 2^22."""
    assert sums._columns_at_once(torch.empty(2048, hidden, dtype=torch.float16, device="meta")) == wanted


def at_costs(monkeypatch: pytest.MonkeyPatch, alone: float, one: float = 110.0, read: float = 20.0) -> None:
    """In rows, of a weight of 256 x 256, on a CPU that is not this one."""
    found = Costs(read, alone=Power(alone, -0.9), one=Power(one, -0.9), vector=False)
    monkeypatch.setattr(cpu_costs, "costs", lambda dtype, threads: found)


def test_the_length_follows_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    at_costs(monkeypatch, alone=110)
    weight = torch.empty(64, 512, 256, dtype=torch.bfloat16, device="meta")
    assert padded_length([8] * 64, weight) == 8
    assert padded_length([0] * 63 + [500], weight) == 0, "padding every expert to the longest would be all padding"
    assert padded_length([0] * 64, weight) == 0
    assert 0 < padded_length([8] * 60 + [3000] * 4, weight) < 300, "the long experts' rest is computed by itself"
    wide, counts = weight.new_empty((8, 1024, 256)), [49, 58, 60, 64, 66, 70, 70, 75]
    assert padded_length(counts, wide) == 75, "a sixth of padding costs less than eight products of their own"
    assert padded_length([8] * 64, weight.to(torch.float16)) == 0, "fp16 has no fast batched product"
    assert padded_length([2, 0, 0, 2, 0, 1, 0, 2], weight.new_empty((8, 1536, 2048))) == 0, "weights would be read"


@pytest.mark.parametrize(("alone", "wanted"), [(110, 0), (2000, 360)], ids=["spin", "sleep"])
def test_threads_that_sleep_are_not_woken_for_each_expert(alone, wanted, monkeypatch) -> None:
    at_costs(monkeypatch, alone)
    counts = [160, 200, 240, 280, 300, 320, 340, 360]
    assert padded_length(counts, torch.empty(8, 768, 768, dtype=torch.bfloat16, device="meta")) == wanted


@pytest.mark.parametrize(("one", "wanted"), [(5.0, 0), (60.0, 1)], ids=["cheap", "dear"])
def test_rows_alone_have_a_cost_of_their_own(one, wanted, monkeypatch) -> None:
    at_costs(monkeypatch, 110.0, one)
    assert padded_length([1, 1, 1, 0, 1, 1, 1, 0], torch.empty(8, 256, 256, device="meta")) == wanted


@pytest.mark.parametrize(("alone", "wanted"), [(2.0, 0), (4.0, 40)], ids=["little", "more"])
def test_a_batch_has_to_be_faster_by_some(alone: float, wanted: int, monkeypatch) -> None:
    at_costs(monkeypatch, alone, read=0.0)
    assert padded_length([40] * 8, torch.empty(8, 256, 256, device="meta")) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_costs_are_measured_once_and_unseen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that is on around the first call, as AOTAutograd's is in compiled code's, is not measured with it."""
    cpu_costs.costs.cache_clear()
    with FlopCounterMode(display=False) as counted:
        found = cpu_costs.costs(dtype, torch.get_num_threads())
    assert counted.get_total_flops() == 0
    assert found.read > 0 and all(power.rows >= 0.5 and -1 <= power.exponent <= 1 for power in found[1:3])
    monkeypatch.setattr(cpu_costs, "_least_seconds", lambda functions: pytest.fail("measured again"))
    assert cpu_costs.costs(dtype, torch.get_num_threads()) is found


def test_costs_are_in_rows_of_a_batch() -> None:
    """The batch of 8 experts takes 128 for 8 rows and 384 for 40 each: a row 1, an expert 8 more; alone 8 more yet."""
    assert cpu_costs._rows(few=128.0, more=384.0, one_by_one=192.0, vectors=96.0, matrices=88.0) == (1.0, 8.0, 2.0)
    assert Power.through(8.0, 8.0).of(768 * 768) == 8.0
    assert Power.through(9.0, 1.0).of(768 * 768) == pytest.approx(1.0), "the same time is fewer rows of more elements"
    assert Power.through(8.0, 0.001).exponent == -1.0, "no cost falls with the size"


@pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
def test_a_count_above_the_capacity_stops_at_it(backend) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, weight = (torch.randn(shape, generator=generator) for shape in ((3, 4, 8), (3, 6, 8)))
    over, full = (torch.tensor(counts, dtype=torch.int32) for counts in ([9, 2, 6], [4, 2, 4]))
    got, want = (backend.batched_mm(parse("batched_mm", batch, weight, counts, [])) for counts in (over, full))
    assert torch.equal(got, want)
    assert torch.equal(got[1, 2:], torch.zeros(2, 6)) and got[2, 3].any()


def test_rows_of_no_expert_are_zero_and_not_what_memory_held(monkeypatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    rows, weight, offsets = torch.randn(7, 8), torch.randn(2, 6, 8), torch.tensor([2, 5], dtype=torch.int32)
    out = cpu.grouped_mm(parse("grouped_mm", rows, weight, offsets, []))
    assert torch.equal(out[5:], torch.zeros(2, 6)) and out[:5].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize(
    "gathered, widened, of_bf16",
    [(2**16, 2**24, 0), (0, 2**24, 2**24), (0, 21 * 5, 2**24), (0, 2**24, 0)],
    ids=["gathered", "bags", "cut", "pieces"],
)
def test_combine_sums_in_fp32_and_rounds_once_either_way(
    gathered, widened, of_bf16, weighted, dtype, monkeypatch
) -> None:
    monkeypatch.setattr(sums, "_GATHERED_ELEMENTS", gathered)
    monkeypatch.setattr(sums, "_WIDENED", of_bf16)
    monkeypatch.setattr(sums, "_WIDENED_ELEMENTS", widened)
    rows, places = torch.randn(21, 16).to(dtype), torch.randperm(21).view(7, 3)
    weights, added = torch.rand(7, 3) if weighted else None, torch.randn(7, 16).to(dtype)
    exact = (rows.double()[places] * (1.0 if weights is None else weights.double().unsqueeze(2))).sum(1)
    for shared, wanted in ((None, exact), (added, exact + added.double())):
        assert_rounded(sums.combine(rows, places, weights, shared), wanted)


@pytest.mark.parametrize("widened", [2**24, 21 * 5], ids=["at_once", "in_parts"])
def test_bf16_is_widened_where_bags_round_products(widened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_GATHERED_ELEMENTS", 0)
    monkeypatch.setattr(sums, "_WIDENED_ELEMENTS", widened)
    monkeypatch.setattr(sums, "_WIDENED", 0)
    monkeypatch.setattr(sums, "_bags_of_bf16_are_exact", lambda: False)
    monkeypatch.setattr(sums, "_in_pieces", None)
    rows, places, weights = torch.randn(21, 16).bfloat16(), torch.randperm(21).view(7, 3), torch.rand(7, 3)
    assert_rounded(sums.combine(rows, places, weights), (rows.double()[places] * weights.double().unsqueeze(2)).sum(1))


def test_whether_bags_round_products_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sums._bags_of_bf16_are_exact.__wrapped__()
    bags = sums._bags
    monkeypatch.setattr(sums, "_bags", lambda rows, places, weights: (rows[places] * weights.unsqueeze(2)).sum(1))
    assert not sums._bags_of_bf16_are_exact.__wrapped__()
    monkeypatch.setattr(sums, "_bags", lambda *of: bags(of[0].float(), of[1], of[2].float()).bfloat16())
    assert sums._bags_of_bf16_are_exact.__wrapped__()


@pytest.mark.parametrize("weight", [0.5, -0.3, 0.0, torch.pi, torch.inf, -torch.inf, torch.nan, 1e-20], ids=str)
def test_a_row_that_is_not_finite_is_weighted_as_any(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of bf16 rows are two pieces, and an infinity less an infinity is none."""
    monkeypatch.setattr(sums, "_GATHERED_ELEMENTS", 0)
    monkeypatch.setattr(sums, "_WIDENED", 0)
    rows = torch.tensor([[torch.inf, -torch.inf, torch.nan, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, torch.inf]]).bfloat16()
    weights, places = torch.tensor([[weight, 0.25]]), torch.tensor([[0, 1]])
    want = (rows.float()[places] * weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(sums.combine(rows, places, weights).float(), want, equal_nan=True, rtol=2**-8, atol=0)


@pytest.mark.parametrize("gathered", [2**16, 0], ids=["gathered", "bags"])
@pytest.mark.parametrize("tokens, top_k", [(0, 2), (3, 0), (0, 0)], ids=str)
def test_combine_of_nothing_is_what_is_added(tokens, top_k, gathered, monkeypatch) -> None:
    monkeypatch.setattr(sums, "_GATHERED_ELEMENTS", gathered)
    places, added = torch.zeros((tokens, top_k), dtype=torch.int64), torch.randn(tokens, 4)
    rows = torch.randn(max(tokens * top_k, 1), 4)
    assert torch.equal(sums.combine(rows, places, None), torch.zeros(tokens, 4))
    assert torch.equal(sums.combine(rows, places, None, added), added)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_activation_is_computed_in_fp32(dtype) -> None:
    x, weight = (3 * torch.randn(9, 16)).to(dtype), torch.randn(1, 32, 16).to(dtype)
    operand, glu, spans = Operand(weight, SCHEMES["fp32"]), Glu("silu", 1.0, 0.0, "concat"), [(0, 0, 9)]
    got = kernels.first_projection(x, operand, None, None, glu, spans)
    gate, up = kernels.linear(x, operand, None, spans).float().chunk(2, dim=-1)
    assert torch.equal(got, (torch.nn.functional.silu(gate) * up).to(dtype))


EMPTY = {"experts": {"experts": 0}, "choices": {"top_k": 0}, "hidden": {"hidden": 0}, "between": {"between": 0}}


@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize(
    ("empty", "whole"),
    [(empty, whole) for empty in EMPTY for whole in (True, False) if whole or empty != "experts"],  # steps need one
)
def test_sizes_of_0(empty: str, whole: bool, format: str, trains: bool) -> None:
    sizes = {"experts": 4, "top_k": 2, "hidden": 8, "between": 6} | EMPTY[empty]
    E, K, H, I = sizes.values()
    given = (torch.randn(3, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I), torch.rand(3, K))
    x, up, down, weights = (tensor.requires_grad_(trains) for tensor in given)
    ids = torch.zeros(3, K, dtype=torch.int32) if E else torch.full((3, K), -1)
    if whole:
        out = moe_ops.fused_experts(x, up, down, weights, ids, format=format)
    else:
        prepared = moe_ops.prepare(x, weights, ids, num_experts=E, format=format)
        out = moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)
    assert out.shape == x.shape and not out.any()
    if trains:
        out.sum().backward()
        assert all(tensor.grad.shape == tensor.shape for tensor in (x, up, down, weights))


def test_a_map_of_no_experts_holds_none() -> None:
    ids, empty = torch.zeros(3, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    given = (torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4), torch.rand(3, 2), ids)
    assert not moe_ops.fused_experts(*given, expert_map=empty).any()


def test_one_row_of_an_odd_stride_is_read_as_it_is() -> None:
    """It is contiguous, as rows that are not there need not be next to each other, but no row of words."""
    x, weights, ids = torch.randn(2, 8).bfloat16(), torch.ones(2, 1), torch.tensor([[0], [1]], dtype=torch.int32)
    gate = torch.as_strided(torch.randn(64 * 8).bfloat16(), (64, 1, 8), (8, 1, 1))
    up, down = torch.randn(64, 1, 8).bfloat16(), torch.randn(64, 8, 1).bfloat16()
    got = moe_ops.fused_experts(x, gate, down, weights, ids, up_proj=up)
    packed = gate.new_empty(gate.shape).copy_(gate)
    assert torch.equal(got, moe_ops.fused_experts(x, packed, down, weights, ids, up_proj=up))
