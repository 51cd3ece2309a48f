"""Every kernel that counts the pairs of experts: the right numbers when asked, and no other memory touched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

import moe_ops
from meta.operands import Operand
from meta.routing import route as route_pairs
from moe_ops import counters, plans
from moe_ops.backends import triton_plans
from moe_ops.kernels.triton import batched_io, permute, route, small
from moe_ops.kernels.triton.config import MMConfig, SmallConfig
from moe_ops.kernels.triton.expert_mm import batched_mm, count_rows, grouped_mm
from moe_ops.kernels.triton.launch import ExpertMM
from tests.interpreted.test_permute import places

E, T, K, H, CAPACITY = 5, 9, 2, 32, 3
POISON = -77
ROUTING = {"routing": "softmax", "renormalize": True, "num_groups": 1, "topk_groups": 1}
TILE = MMConfig(16, 32, 32, 2, 4, 2, a_tma=True, w_tma=True)
Kernel = Callable[[torch.Tensor], torch.Tensor]


def pairs() -> torch.Tensor:
    """Ids with some to drop, most of them expert 1's."""
    ids = torch.randint(-1, E + 1, (T, K), dtype=torch.int32)
    ids[:4, 0] = 1
    return ids


def sort(load: torch.Tensor) -> torch.Tensor:
    ids = pairs()
    permute.sort_pairs(ids, E, load=load)
    return places(ids, E, None)[2]


def mapped(load: torch.Tensor) -> torch.Tensor:
    ids, expert_map = pairs(), torch.tensor([2, -1, 0, 1, -1])
    permute.sort_pairs(ids, 3, expert_map, load=load)
    return torch.cat((places(ids, 3, expert_map)[2], torch.zeros(2, dtype=torch.int64)))


def slots(load: torch.Tensor) -> torch.Tensor:
    ids = pairs()
    batched_io.dispatch(torch.randn(T, H), ids, E, CAPACITY, load=load)
    counts = places(ids, E, None)[2]
    assert counts.max() > CAPACITY
    return counts.clamp(max=CAPACITY)


def route_few(load: torch.Tensor, expert_map: torch.Tensor | None = None) -> torch.Tensor:
    held = E if expert_map is None else 3
    routed = route.route_few(
        torch.randn(3, H), torch.randn(3, E), None, held, expert_map,
        form=None, top_k=K, renorm_eps=0.0, scale=1.0, pdl=False, load=load, **ROUTING,
    )  # fmt: skip
    counts = places(routed.topk_ids, held, expert_map)[2]
    return torch.cat((counts, torch.zeros(E - held, dtype=torch.int64)))


def route_mapped(load: torch.Tensor) -> torch.Tensor:
    return route_few(load, torch.tensor([2, -1, 0, -1, -1]))


def small_experts(load: torch.Tensor) -> torch.Tensor:
    ids = torch.tensor([[1, -1], [4, 1]], dtype=torch.int32)
    up = ExpertMM(Operand(torch.randn(E, 2 * 40, H), None), torch.float32, glu_layout="concat", activation="silu")
    down = ExpertMM(Operand(torch.randn(E, H, 40), None), torch.float32)
    config = (SmallConfig(16, 32, 4), SmallConfig(16, 32, 4))  # three programs a pair
    options = {"expert_map": None, "weight_on_input": False, "load": load}
    small.small_experts(torch.randn(2, H), torch.rand(2, K), ids, up, down, config, **options)
    return torch.tensor([0, 2, 0, 0, 1])


def product() -> ExpertMM:
    return ExpertMM(Operand(torch.randn(E, 64, H), None), torch.float32, glu_layout="concat", activation="silu")


def rows(load: torch.Tensor) -> torch.Tensor:
    grouped_mm(torch.randn(7, H), product(), torch.tensor([0, 3, 3, 4, 6]).int(), TILE, num_rows=7, load=load)
    return torch.tensor([0, 3, 0, 1, 2])


def batches(load: torch.Tensor) -> torch.Tensor:
    batched_mm(torch.randn(E, CAPACITY, H), product(), torch.tensor([0, 3, 1, 9, 0]).int(), TILE, load=load)
    return torch.tensor([0, 3, 1, CAPACITY, 0])


def rows_alone(load: torch.Tensor) -> torch.Tensor:
    count_rows(load, torch.tensor([0, 3, 3, 4, 9]).int(), 7)  # no more than there are
    return torch.tensor([0, 3, 0, 1, 3])


def batches_alone(load: torch.Tensor) -> torch.Tensor:
    count_rows(load, torch.tensor([0, 3, 1, 9, 0]).int(), CAPACITY, batched=True)
    return torch.tensor([0, 3, 1, CAPACITY, 0])


def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_io, "FEW_PAIRS", 0)


def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_io, "FEW_PAIRS", 0)
    monkeypatch.setattr(permute, "COUNT_ALL_PAIRS", 0)
    monkeypatch.setattr(permute, "_block_of_pairs", lambda pairs: permute.CHUNK)


KERNELS: dict[str, tuple[Kernel, Callable[[pytest.MonkeyPatch], None] | None]] = {
    "sort": (sort, None),
    "sort_by_two_kernels": (sort, two_kernels),
    "sort_mapped": (mapped, None),
    "dispatch": (slots, None),
    "slots": (slots, one_kernel),
    "slots_by_two_kernels": (slots, two_kernels),
    "route": (route_few, None),
    "route_mapped": (route_mapped, None),
    "small": (small_experts, None),
    "grouped_mm": (rows, None),
    "batched_mm": (batches, None),
    "grouped_alone": (rows_alone, None),
    "batched_alone": (batches_alone, None),
}


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str, on: bool, monkeypatch: pytest.MonkeyPatch):
    kernel, prepare = KERNELS[name]
    if prepare is not None:
        prepare(monkeypatch)
    memory = torch.full((3, 16), POISON)
    memory[1, : 1 + E] = torch.tensor([int(on), 100, 200, 300, 400, 500])
    expected = memory.clone()
    counted = kernel(memory[1])
    if on:
        expected[1, 1 : 1 + E] += counted
    assert counted.any() and torch.equal(memory, expected)


def test_many_blocks_of_pairs_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    two_kernels(monkeypatch)
    ids, load = torch.randint(-1, E, (200, K)), torch.zeros(16, dtype=torch.int64)
    load[0] = 1
    permute.sort_pairs(ids, E, load=load)
    assert torch.equal(load[1 : 1 + E], places(ids, E, None)[2])


def holder(*weights: torch.Tensor) -> torch.nn.Module:
    """A model of layers with these weights."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in weights)
    for layer, weight in zip(model.layers, weights, strict=True):
        layer.down_proj = torch.nn.Parameter(weight, requires_grad=False)
    return model


SMALL = SmallConfig(16, 32, 4)
LAYERS: dict[str, tuple[plans.Plan, str, dict[str, Any]]] = {
    "small": (triton_plans.plan("small", SMALL, SMALL), "fused_moe", {"T": 1}),
    "routed": (triton_plans.plan("grouped", TILE, TILE), "fused_moe", {"T": 4}),
    "sorted": (triton_plans.plan("grouped", TILE, TILE), "fused_experts", {"T": 4}),
    "mapped": (triton_plans.plan("grouped", TILE, TILE), "fused_experts", {"T": 4, "expert_map": [1, 0, -1, 2]}),
    "batched": (triton_plans.plan("batched", TILE, TILE), "fused_moe", {"T": 4, "capacity": 1}),
}


def layer(op: str, T: int, expert_map: list[int] | None = None, capacity: int | None = None) -> dict[str, Any]:
    logits = torch.randn(T, E)
    made = {"hidden_states": torch.randn(T, H)}
    made |= {"gate_up_proj": torch.randn(E, 32, H), "down_proj": torch.randn(E, H, 16)}
    if op == "fused_moe":
        made |= {"router_logits": logits, "top_k": K}
    else:
        weights, ids = route_pairs(logits, None, top_k=K, renorm_eps=0.0, scale=1.0, **ROUTING)
        made |= {"topk_weights": weights, "topk_ids": ids}
    if expert_map is not None:
        made["expert_map"] = torch.tensor(expert_map)
    if capacity is not None:
        made |= {"format": "batched", "capacity": capacity}
    return made


def counts_of(made: dict[str, Any]) -> list[int]:
    """What a layer's experts compute."""
    ids = made.get("topk_ids")
    if ids is None:
        ids = route_pairs(made["router_logits"], None, top_k=K, renorm_eps=0.0, scale=1.0, **ROUTING)[1]
    return places(ids, E, made.get("expert_map"))[2].clamp(max=made.get("capacity", T * K)).tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch, reasons: list[str | None]):
    """Of a cold call, of the one that is recorded, and of calls fired from a record that nobody asked to count."""
    plan, op, options = LAYERS[name]
    monkeypatch.setattr(triton_plans, "plan_for", lambda *_: plan)
    layers = [layer(op, **options) for _ in range(2)]
    model = holder(*[made["down_proj"] for made in layers])
    found = []
    for made, asked in ((layers[0], True), (layers[0], False), (layers[0], True), (layers[1], True)):
        with moe_ops.load_statistics(model) if asked else nullcontext() as load:
            getattr(moe_ops, op)(**made, backend="triton")
        found.append(load and {name: counts.tolist() for name, counts in load.counts.items() if counts.any()})
    assert reasons == [None]
    first, second = map(counts_of, layers)
    cold, _, warm, other = found
    assert cold == warm == {"layers.0": first}
    assert other == {"layers.1": second}


@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_stages(format: str, monkeypatch: pytest.MonkeyPatch):
    from moe_ops import choice

    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    up, down, ids = torch.randn(E, 64, H), torch.randn(E, H, 32), pairs()
    for _ in range(3):
        with moe_ops.load_statistics(holder(up)) as load:
            prepared = moe_ops.prepare(torch.randn(T, H), torch.rand(T, K), ids, num_experts=E, format=format)
            moe_ops.finalize(moe_ops.experts(prepared, up, down), prepared)
        assert load.counts["layers.0"].tolist() == places(ids, E, None)[2].tolist()


def test_rows_are_aligned_and_apart():
    rows = counters.rows_of(torch.device("cpu"), 17)
    weights = [torch.randn(17, 1) for _ in range(3)]
    addresses = [counters.Row(weight).tensor().data_ptr() for weight in weights]
    assert addresses == [rows[weight.data_ptr()] for weight in weights]
    assert all(address % 16 == 0 for address in addresses)
    assert {b - a for a, b in pairwise(addresses)} == {8 * 32}
