"""Where the CPU backend puts rows: in lots, a padded block for every expert, and the rest sorted behind it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_ops import reference
from moe_ops.backends import cpu
from moe_ops.kernels import cpu as kernels
from moe_ops.kernels import cpu_costs, cpu_library, cpu_native
from moe_ops.kernels.cpu import sort_pairs
from moe_ops.kernels.cpu_costs import Costs
from moe_ops.ops import parse
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula


class Laid(NamedTuple):
    """What C++ makes of ids: pairs by expert, how many each has, the ends of lots, and lengths of their batches."""

    order: list[int]
    counts: list[int]
    ends: list[int]
    lengths: list[int]


def laid(
    ids: torch.Tensor,
    experts: int,
    *,
    expert_map: torch.Tensor | None = None,
    capacity: int | None = None,
    in_a_lot: int = 2**40,
    costs: cpu_costs.OfWeight | None = None,
) -> Laid:
    order, counts, ends, lengths = (torch.zeros(n, dtype=torch.int64) for n in (ids.numel(), *[experts] * 3))
    layer = cpu_library.Layer(tokens=ids.numel(), selected=1)
    places = (tensor.data_ptr() for tensor in (ends, lengths, counts, order))
    lots = cpu_library.Lots(0, experts, 0 if costs is None else costs.few, *places)
    cpu_library.library().moe_lay_out(
        ctypes.byref(layer),
        ids.data_ptr(),
        ids.dtype == torch.int64,
        None if expert_map is None else expert_map.data_ptr(),
        -1 if expert_map is None else len(expert_map),
        ids.numel() if capacity is None else capacity,
        in_a_lot,
        None if costs is None else costs.of_rows,
        ctypes.byref(lots),
        (ctypes.c_int64 * 2)(),
    )
    kept = int(counts.sum())
    return Laid(order[:kept].tolist(), counts.tolist(), ends[: lots.number].tolist(), lengths[: lots.number].tolist())


def pairs_of(counts: list[int]) -> torch.Tensor:
    """Pairs of experts that have so many, shuffled."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("capacity", [None, 0, 2, 40], ids=str)
@pytest.mark.parametrize("mapped", [False, True], ids=["ids", "map"])
def test_pairs_are_sorted_as_torch_sorts_them(dtype: torch.dtype, capacity: int | None, mapped: bool) -> None:
    ids = torch.randint(-2, 9, (30, 2), generator=torch.Generator().manual_seed(1), dtype=dtype)
    expert_map = torch.tensor([3, -1, 0, 6, 5, 1, 2, 9, -7]) if mapped else None
    order, counts = sort_pairs(ids, expert_map, 7, capacity)
    found = laid(ids, 7, expert_map=expert_map, capacity=capacity)
    assert (found.order, found.counts) == (order.tolist(), counts)
    assert found.ends == [7] and found.lengths == [0]


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


def test_offsets_of_any_value_stay_within_the_rows() -> None:
    assert kernels.grouped_spans(torch.tensor([2, -3, 7, 50]), 9) == [(0, 0, 2), (2, 0, 7), (3, 7, 9)]


LOTS = ("plain", "bias", "bf16", "weight_on_input", "expert_map", "separate_bias", "minus", "batched")


@pytest.mark.parametrize("name", LOTS)
@pytest.mark.parametrize("alone", [0.0, 1e9], ids=["sorted", "padded"])
@pytest.mark.parametrize("in_a_lot", [1, 300, 2**40], ids=["one_by_one", "some", "one"])
def test_lots_and_padding_change_no_result(name: str, alone: float, in_a_lot: int, monkeypatch) -> None:
    layer = (VARIANTS[name] if name in VARIANTS else Variant(ids=name)).build()
    wanted = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    monkeypatch.setattr(cpu_native, "_IN_A_LOT", in_a_lot)
    at_costs(monkeypatch, alone, alone, read=0.0)
    got = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    torch.testing.assert_close(got, wanted)
    assert got.any()


@pytest.mark.parametrize("alone", [0.0, 1e9], ids=["sorted", "padded"])
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_may_have_a_dtype_of_its_own(bias: torch.dtype, alone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in models that keep biases in fp32."""
    at_costs(monkeypatch, alone)
    assert_right(of_few_pairs([[3, 0], [3, 1], [3, 2]], torch.bfloat16, bias))


@pytest.mark.parametrize(
    ("counts", "in_a_lot", "wanted"),
    [
        ([5, 0, 1, 3, 1], 10, [5]),
        ([5, 0, 1, 3, 1], 5, [1, 5]),
        ([5, 0, 1, 3, 1], 1, [1, 3, 4, 5]),
        ([0, 0, 9, 0], 1, [3, 4]),
        ([0, 0], 1, [2]),
    ],
    ids=["all", "two", "most", "one_has_all", "none"],
)
def test_lots_are_of_neighbours_and_have_every_expert(counts, in_a_lot, wanted) -> None:
    assert laid(pairs_of(counts), len(counts), in_a_lot=in_a_lot).ends == wanted


def at_costs(monkeypatch: pytest.MonkeyPatch, alone: float, one: float = 110.0, read: float = 20.0) -> None:
    """In rows, of a weight of 256 x 256, on a CPU that is not this one: the same time for larger ones."""
    batch, one_by_one = [], []
    for rows in cpu_costs.ROWS:
        more = one if rows == 1 else alone
        batch.append((read + rows,) * len(cpu_costs._SIZES))
        one_by_one.append(tuple(read + rows + more * 256**2 / size**2 for size in cpu_costs._SIZES))
    found = Costs(tuple(batch), tuple(one_by_one), tuple(one_by_one[: cpu_costs._FEW]))  # C++ is never faster
    monkeypatch.setattr(cpu_costs, "costs", lambda dtype, threads: found)


def padded_length(counts: list[int], weight: torch.Tensor) -> int:
    return laid(pairs_of(counts), len(counts), costs=cpu_costs.costs_of(weight)).lengths[0]


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
    monkeypatch.setattr(cpu_costs, "_least_seconds", lambda functions: pytest.fail("measured again"))
    assert cpu_costs.costs(dtype, torch.get_num_threads()) is found


def pretending(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Nothing is computed; what would be takes so long."""
    now = [0.0]

    def product() -> None:
        now[0] += seconds()

    monkeypatch.setattr(cpu_costs, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cpu_costs, "_products", lambda *of: [product] * (2 * len(cpu_costs.ROWS) + cpu_costs._FEW))
    monkeypatch.setattr(cpu_costs, "costs", cpu_costs.costs.__wrapped__)


@pytest.mark.parametrize("seconds", [0.25, 1e-5], ids=["too_long", "all_the_same"])
def test_where_nothing_can_be_measured_two_rows_are_few(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside processes that need all cores a product may take a quarter of a second: all of them are given up."""
    taken: list[float] = []
    pretending(monkeypatch, lambda: taken.append(seconds) or seconds)
    found = cpu_costs.costs_of(torch.empty(8, 256, 256, device="meta"))
    assert (found.few, found.of_rows) == (2, None)
    assert sum(taken) < 1.1


def test_costs_are_those_of_all_rounds_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 2 * len(cpu_costs.ROWS) + cpu_costs._FEW
    kinds = (1, 2, 4, 8, 40), (2, 3, 5, 9, 42), (1, 1, 2, 4)
    calls = iter(range(10**6))

    def seconds() -> float:
        call = next(calls)
        first_round, of_all = call < 3 * number * cpu_costs._TIMES, sum(kinds, ())
        return 1e-5 * (0.5 if first_round else of_all[call // cpu_costs._TIMES % number])

    pretending(monkeypatch, seconds)
    found = cpu_costs.costs(torch.float32, 1)
    assert found.batch == tuple((pytest.approx(rows),) * 3 for rows in kinds[0])
    assert found.alone == tuple((pytest.approx(rows),) * 3 for rows in kinds[1])
    assert found.few == tuple((pytest.approx(rows),) * 3 for rows in kinds[2])


def test_costs_are_in_rows_of_a_batch() -> None:
    """Batches take 128 with 8 rows and 384 with 40, so that a row takes 8."""
    taken = [72.0, 80.0, 96.0, 128.0, 384.0, 80.0, 96.0, 120.0, 168.0, 296.0, 8.0, 16.0, 32.0, 64.0]
    batch, alone, few = cpu_costs._in_rows(taken)
    assert batch == (9.0, 10.0, 12.0, 16.0, 48.0) and alone == (10.0, 12.0, 15.0, 21.0, 37.0)
    assert few == (1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("few", "wanted"),
    [((1.0, 2.0, 4.0, 8.0), 8), ((1.0, 2.0, 15.0, 8.0), 2), ((9.5, 2.0, 4.0, 8.0), 0)],
    ids=["all", "two", "none"],
)
def test_few_rows_are_those_that_are_faster(few: tuple[float, ...], wanted: int) -> None:
    """Up to the first number of rows that are not, and by more than a little."""
    kinds = (9.0, 10.0, 12.0, 16.0, 48.0), (10.0, 12.0, 15.0, 21.0, 53.0), few
    found = Costs(*(tuple((rows,) * len(cpu_costs._SIZES) for rows in kind) for kind in kinds)).of(512 * 512)
    assert found.few == wanted and list(found.of_rows) == pytest.approx([cost for kind in kinds for cost in kind])


def test_products_alone_may_be_faster_with_many_rows() -> None:
    """Where a batch of 8 experts leaves half of the threads without work."""
    kinds = (9.0, 10.0, 12.0, 16.0, 48.0), (20.0, 22.0, 25.0, 31.0, 47.0), (20.0, 22.0, 25.0, 31.0)
    costs = Costs(*(tuple((rows,) * len(cpu_costs._SIZES) for rows in kind) for kind in kinds)).of(512 * 512)
    lengths = [laid(pairs_of([rows] * 8), 8, costs=costs).lengths[0] for rows in (1, 3, 20, 200)]
    assert lengths == [1, 3, 20, 0]


@pytest.mark.parametrize(
    ("measured", "elements", "wanted"),
    [
        ([8.0, 8.0, 8.0], 2048 * 1536, 8.0),
        ([9.0, 1.0, 0.25], 512 * 512, 9.0 / 4),
        ([9.0, 1.0, 0.25], 3072 * 3072, 1.0 / 16),
        ([9.0, 1.0, 0.5], 1536 * 1536, 0.5),
        ([1.0, 9.0, 99.0], 3072 * 3072, 9.0),
        ([9.0, 0.0, -3.0], 768 * 768, 0.1),
    ],
    ids=["same_rows", "same_time", "larger", "measured", "never_more", "none"],
)
def test_costs_of_other_sizes_are_between_those_of_measured_ones(measured, elements, wanted) -> None:
    assert cpu_costs._between(measured, elements) == pytest.approx(wanted, rel=1e-6)


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
