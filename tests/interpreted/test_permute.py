"""Sorting pairs by expert, batched slots, and the copies of tokens to their rows."""

import pytest
import torch

from meta.schemes import SCHEMES
from moe_ops.kernels.triton import batched_io, permute
from moe_ops.kernels.triton.batched_io import dispatch
from moe_ops.kernels.triton.permute import gather_rows, sort_pairs


def local_experts(ids, E, expert_map):
    """The flat expert of each pair, E when dropped."""
    expert = ids.flatten().long()
    if expert_map is not None:
        inside = (expert >= 0) & (expert < len(expert_map))
        expert = torch.where(inside, expert_map.long()[expert.clamp(0, len(expert_map) - 1)], -1)
    return torch.where((expert >= 0) & (expert < E), expert, E)


def places(ids, E, expert_map):
    """(expert, place among the expert's pairs, count of each expert), from a Python loop."""
    expert = local_experts(ids, E, expert_map).tolist()
    counts = [0] * (E + 1)
    place = []
    for e in expert:
        place.append(counts[e])
        counts[e] += 1
    return torch.tensor(expert), torch.tensor(place), torch.tensor(counts[:E])


def expected_sort(ids, E, expert_map=None):
    expert, place, counts = places(ids, E, expert_map)
    ends = counts.cumsum(0)
    starts = torch.cat((ends - counts, ends[-1:]))
    pair_to_row = torch.where(expert < E, starts[expert] + place, -1)
    row_to_pair = torch.full((ids.numel(),), -1)
    row_to_pair[pair_to_row[expert < E]] = torch.arange(ids.numel())[expert < E]
    return ends.int(), row_to_pair.int(), pair_to_row.int().view(ids.shape)


def expected_slots(ids, E, capacity, expert_map=None):
    expert, place, counts = places(ids, E, expert_map)
    kept = (expert < E) & (place < capacity)
    return counts.clamp(max=capacity).int(), torch.where(kept, expert * capacity + place, -1).int().view(ids.shape)


def routings(E, T, K):
    """Named id tensors that stress the sort."""
    return {
        "random": torch.randint(0, E, (T, K)),
        "one_expert": torch.full((T, K), E - 1),
        "dropped_some": torch.randint(-2, E + 2, (T, K)),
        "dropped_all": torch.full((T, K), -1),
        "skewed": (torch.rand(T, K) ** 4 * E).long(),
    }


@pytest.fixture(params=["with_the_copy", "one_kernel", "two_kernels"])
def path(request, monkeypatch):
    """Every way of placing pairs, whatever their number; the first is the batched format's alone."""
    monkeypatch.setattr(batched_io, "FEW_PAIRS", 1 << 20 if request.param == "with_the_copy" else 0)
    monkeypatch.setattr(permute, "COUNT_ALL_PAIRS", 0 if request.param == "two_kernels" else 1 << 20)


def assert_sorted(ids, E, expert_map=None):
    for result, expected in zip(sort_pairs(ids, E, expert_map), expected_sort(ids, E, expert_map), strict=True):
        assert result.dtype == torch.int32 and result.is_contiguous()
        assert torch.equal(result, expected)


@pytest.mark.parametrize("routing", routings(4, 1, 1))
@pytest.mark.parametrize("T, K, E", [(1, 8, 128), (5, 2, 8), (37, 3, 60), (1, 1, 1)])
def test_sort_is_stable_and_complete(T, K, E, routing, path, poisoned):
    assert_sorted(routings(E, T, K)[routing].int(), E)


def test_sort_over_many_blocks(path, poisoned):
    assert_sorted(routings(16, 200, 7)["dropped_some"], 16)


def test_sort_with_a_table_of_several_tiles(monkeypatch, poisoned):
    monkeypatch.setattr(permute, "COUNT_ALL_PAIRS", 0)
    assert_sorted(torch.randint(-1, 512, (1100, 8)), 512)


@pytest.mark.parametrize("words", [1, 2, 700])
def test_sort_makes_words_0(words, path, poisoned):
    """And none behind them: those that programs of the products tell one another, in both formats."""
    ids = torch.randint(-1, 16, (60, 7))
    for call in (
        lambda cleared: sort_pairs(ids, 16, cleared=cleared),
        lambda cleared: dispatch(torch.randn(60, 8), ids, 16, 30, cleared=cleared),
    ):
        room = torch.full((words + 1,), 77, dtype=torch.int32)
        call(room[:words])
        assert room.tolist() == [0] * words + [77]


def test_sort_takes_int64_ids_that_would_wrap(path):
    ids = torch.tensor([[0, 2**32 + 1], [2**33, 1], [-(2**32), 3]])
    assert_sorted(ids, 4)


def test_sort_takes_strided_ids(path):
    assert_sorted(torch.randint(0, 8, (4, 6)).t(), 8)
    assert_sorted(torch.randint(0, 8, (6, 8))[:, :3], 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_expert_map(path, dtype):
    expert_map = torch.full((24,), -1)
    expert_map[torch.randperm(24)[:6]] = torch.arange(6)
    expert_map[0] = 99  # outside the experts held here: dropped, not written out of bounds
    ids = torch.randint(-2, 27, (19, 4)).to(dtype)
    assert_sorted(ids, 6, expert_map.to(dtype))
    counts, slots = expected_slots(ids, 6, 4, expert_map)
    _, _, got_counts, got_slots = dispatch(torch.randn(19, 8), ids, 6, 4, expert_map.to(dtype))
    assert torch.equal(got_counts, counts) and torch.equal(got_slots, slots)


@pytest.mark.parametrize("E", [1, 40])
def test_no_tokens(E):
    offsets, row_to_pair, pair_to_row = sort_pairs(torch.empty(0, 4, dtype=torch.int64), E)
    assert torch.equal(offsets, torch.zeros(E, dtype=torch.int32))
    assert row_to_pair.shape == (0,) and pair_to_row.shape == (0, 4)
    batch, _, counts, slots = dispatch(torch.randn(0, 8), torch.empty(0, 4, dtype=torch.int32), E, 3)
    assert batch.shape == (E, 3, 8) and slots.shape == (0, 4)
    assert torch.equal(counts, torch.zeros(E, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("H", [16, 130, 700])
def test_gather_rows(H, weighted, dtype, poisoned):
    T, K, E = 6, 3, 4
    ids = torch.randint(-1, E, (T, K))
    wide = torch.randn(T, 2 * H).to(dtype)
    x, weights = wide[:, :H], torch.randn(T, K) if weighted else None
    _, row_to_pair, pair_to_row = sort_pairs(ids, E)
    rows = gather_rows(x, pair_to_row, weights)
    assert rows.dtype == dtype and rows.shape == (T * K, H) and rows.is_contiguous()
    for row, pair in enumerate(row_to_pair.tolist()):
        if pair < 0:
            assert poisoned(rows[row]).all()
        else:
            expected = x[pair // K].float() * (weights.flatten()[pair] if weighted else 1.0)
            assert torch.equal(rows[row], expected.to(dtype))


def test_gather_rows_of_a_transposed_input():
    x = torch.randn(8, 5).t()
    _, row_to_pair, pair_to_row = sort_pairs(torch.randint(0, 3, (5, 2)), 3)
    assert torch.equal(gather_rows(x, pair_to_row), x[row_to_pair.long() // 2])


@pytest.mark.parametrize("routing", routings(4, 1, 1))
@pytest.mark.parametrize("capacity", [1, 5, 64])
def test_dispatch_keeps_the_first_pairs_and_writes_nothing_else(capacity, routing, path, poisoned):
    T, K, E, H = 11, 3, 6, 24
    ids, x, weights = routings(E, T, K)[routing], torch.randn(T, H).bfloat16(), torch.rand(T, K)
    counts, slots = expected_slots(ids, E, capacity)
    for w in (None, weights):
        batch, _, got_counts, got_slots = dispatch(x, ids, E, capacity, None, w)
        assert torch.equal(got_counts, counts) and torch.equal(got_slots, slots)
        written = torch.zeros(E * capacity, dtype=torch.bool)
        for pair, slot in enumerate(slots.flatten().tolist()):
            if slot >= 0:
                written[slot] = True
                expected = x[pair // K].float() * (1.0 if w is None else w.flatten()[pair])
                assert torch.equal(batch.view(-1, H)[slot], expected.bfloat16())
        assert torch.equal(~poisoned(batch).all(-1).flatten(), written)
        assert torch.equal(written.view(E, capacity).sum(1).int(), counts)


@pytest.mark.parametrize("capacity", [8, 9, 10])
def test_capacity_one_short_exactly_full_and_with_room(capacity, path, poisoned):
    ids = torch.full((5, 3), 1)
    ids[:, 0], ids[0, 1] = 0, -1  # nine pairs of expert 1, five of expert 0
    counts, slots = expected_slots(ids, 3, capacity)
    assert counts.tolist() == [5, min(9, capacity), 0] and (slots[4, 2] < 0) == (capacity < 9)
    _, _, got_counts, got_slots = dispatch(torch.randn(5, 8), ids, 3, capacity)
    assert torch.equal(got_counts, counts) and torch.equal(got_slots, slots)


def test_dispatch_of_a_transposed_input_to_more_experts_than_one_program_counts(path, poisoned):
    E, x = 2 * batched_io.COUNT_BLOCK + 3, torch.randn(8, 6).t()
    ids = torch.randint(0, E, (6, 4))
    ids[5] = E - 1
    counts, slots = expected_slots(ids, E, 2)
    batch, _, got_counts, got_slots = dispatch(x, ids, E, 2)
    assert torch.equal(got_counts, counts) and torch.equal(got_slots, slots)
    kept = slots.flatten() >= 0
    assert torch.equal(batch.view(-1, 8)[slots.flatten()[kept]], x.repeat_interleave(4, dim=0)[kept])


@pytest.mark.parametrize("H", [128, 256, 200, 300])
def test_dispatch_quantises_as_the_scheme_does(H, path, poisoned):
    T, K, E, capacity = 9, 2, 4, 3
    ids, x, weights = torch.randint(-1, E, (T, K)), torch.randn(T, H).bfloat16(), torch.rand(T, K)
    scheme = SCHEMES["fp8_block128"]
    for w in (None, weights):
        batch, scale, counts, slots = dispatch(x, ids, E, capacity, None, w, form=scheme.rows)
        assert batch.dtype == scheme.rows.dtype and scale.shape == (E, capacity, -(-H // 128))
        plain, _, _, _ = dispatch(x, ids, E, capacity, None, w)
        for slot in slots[slots >= 0].tolist():
            want, (want_scale,) = scheme.rows.quantize(plain.view(-1, H)[slot : slot + 1])
            assert torch.equal(batch.view(-1, H)[slot].view(torch.uint8), want[0].view(torch.uint8))
            assert torch.equal(scale.view(E * capacity, -1)[slot], want_scale[0])
        assert int((~poisoned(scale).all(-1)).sum()) == int(counts.sum())
