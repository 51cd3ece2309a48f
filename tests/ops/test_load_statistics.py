"""What `moe_ops.load_statistics` counts on the CPU, under which names, and how it says so."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops import counters

E, K, H, I = 6, 2, 16, 8
NOBODY = f"(weights of no module, E={E})"


class Experts(nn.Module):
    """Routed as it is told, or by a router of its own."""

    def __init__(self, experts: int = E) -> None:
        super().__init__()
        self.gate = nn.Linear(H, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * I, H))
        self.down = nn.Parameter(torch.randn(experts, H, I))

    def route(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).softmax(-1).topk(K).indices

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        if ids is None:
            return moe_ops.fused_moe(x, self.gate(x), self.gate_up, self.down, top_k=K, **options)
        weights = torch.ones(ids.shape)
        return moe_ops.fused_experts(x, self.gate_up, self.down, weights, ids, **options)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": Experts()}) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["experts"](x).tanh()
        return x


def of_ids(ids: torch.Tensor, experts: int = E) -> list[int]:
    return torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts).tolist()


def routed(model: Model, x: torch.Tensor) -> dict[str, list[int]]:
    """What every layer's router sends to the experts."""
    found = {}
    for number, layer in enumerate(model.layers):
        found[f"layers.{number}.experts"] = of_ids(layer["experts"].route(x))
        x = x + layer["experts"](x).tanh()
    return found


def lists(load: Any) -> dict[str, list[int]]:
    """The layers that counted."""
    return {name: counts.tolist() for name, counts in load.counts.items() if counts.any()}


# ---- the numbers ----


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("T", [0, 1, 2, 40, 600])
def test_ids(T: int, backend: str) -> None:
    """Few pairs, and many; of a first call and of warm ones; what is dropped is not counted."""
    if backend == "reference" and T > 100:
        T = 100
    experts, ids = Experts(), torch.randint(-1, E + 1, (T, K))
    held = ids.clamp(0, E - 1)
    x = torch.randn(T, H)
    with torch.no_grad():
        for some in (ids, held, held, held):
            with moe_ops.load_statistics(experts) as load:
                experts(x, some, backend=backend)
            assert lists(load) == ({"Experts": of_ids(some)} if any(of_ids(some)) else {})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_experts_do_not_compute_is_not_counted(backend: str) -> None:
    experts, x = Experts(4), torch.randn(5, H)
    ids = torch.tensor([[0, 1], [0, 2], [0, 5], [0, 6], [-1, 3]])
    with torch.no_grad():
        with moe_ops.load_statistics(experts) as load:
            experts(x, ids, format="batched", capacity=3, backend=backend)
        assert lists(load) == {"Experts": [3, 1, 1, 1]}
        with moe_ops.load_statistics(experts) as load:
            experts(x, ids, expert_map=torch.tensor([-1, 3, -1, 0, -1, 1, -1]), backend=backend)
        assert lists(load) == {"Experts": [1, 1, 0, 1]}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_stages_count_at_the_first_product(format: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_ops import choice

    monkeypatch.setattr(choice, "DEFAULT_BACKEND", backend)
    experts, ids = Experts(), torch.randint(-1, E, (9, K))
    options = {"format": format} | ({"capacity": 2} if format == "batched" else {})
    with torch.no_grad(), moe_ops.load_statistics(experts) as load:
        prepared = moe_ops.prepare(torch.randn(9, H), torch.ones(9, K), ids, num_experts=E, **options)
        moe_ops.finalize(moe_ops.experts(prepared, experts.gate_up, experts.down), prepared)
    expected = [min(count, options.get("capacity", 9)) for count in of_ids(ids)]
    assert lists(load) == {"Experts": expected}


def test_forward_counts_once_and_backward_does_not() -> None:
    experts, x, ids = Experts(), torch.randn(9, H, requires_grad=True), torch.randint(0, E, (9, K))
    with moe_ops.load_statistics(experts) as load:
        experts(x, ids).sum().backward()
        prepared = moe_ops.prepare(x, torch.ones(9, K), ids, num_experts=E)
        moe_ops.finalize(moe_ops.experts(prepared, experts.gate_up.clone(), experts.down), prepared).sum().backward()
    assert lists(load) == {"Experts": of_ids(ids), NOBODY: of_ids(ids)}
    with moe_ops.load_statistics(experts) as load:
        checkpoint(experts, x, ids, use_reentrant=False).sum().backward()
    assert lists(load) == {"Experts": [2 * count for count in of_ids(ids)]}


# ---- compiled models ----


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "layer_by_layer"])
def test_compiled(regional: bool) -> None:
    """Nothing compiles again, and a graph that layers share counts for each of them."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    model = compiled = Model(3)
    plain = copy.deepcopy(model)
    if regional:
        for layer in model.layers:
            layer["experts"] = torch.compile(layer["experts"], backend="moe_ops_eager", dynamic=True)
    else:
        compiled = torch.compile(model, backend="moe_ops_eager", dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(5, H))
        assert graphs["unique_graphs"] == 1
        with torch.compiler.set_stance("fail_on_recompile"):
            for T in (3, 8):
                x = torch.randn(T, H)
                with moe_ops.load_statistics(compiled) as load:
                    compiled(x)
                compiled(x)
                assert lists(load) == routed(plain, x)


def test_inductor() -> None:
    """Code that Inductor emits, compiled before anybody asked."""
    experts = Experts()
    compiled = moe_ops.compile(experts)
    with torch.no_grad():
        for T in (4, 4, 4, 4):
            x = torch.randn(T, H)
            compiled(x)
            with moe_ops.load_statistics(compiled) as load:
                compiled(x)
            assert lists(load) == {"Experts": of_ids(experts.route(x))}


# ---- blocks ----


def test_nested_blocks_have_numbers_of_their_own() -> None:
    one, two = Model(1), Model(2)
    x, y = torch.randn(4, H), torch.randn(7, H)
    with torch.no_grad(), moe_ops.load_statistics(one) as outer:
        one(x)
        with moe_ops.load_statistics(two) as inner:
            two(y)
        first = lists(outer)
        one(x)
    assert lists(inner) == routed(two, y)
    (counts,) = routed(one, x).values()
    total = [sum(column) for column in zip(*routed(two, y).values(), strict=True)]
    assert first == {"layers.0.experts": counts, NOBODY: total}
    assert outer.counts["layers.0.experts"].tolist() == [2 * count for count in counts]


def test_reset_and_end() -> None:
    experts, ids = Experts(), torch.tensor([[0, 1]])
    x = torch.randn(1, H)
    with torch.no_grad(), moe_ops.load_statistics(experts) as load:
        experts(x, ids)
        load.reset()
        assert not lists(load)
        experts(x, ids)
        assert lists(load) == {"Experts": [1, 1, 0, 0, 0, 0]}
    assert counters.active == 0
    with torch.no_grad():
        experts(x, ids)
    assert lists(load) == {"Experts": [1, 1, 0, 0, 0, 0]}
    with pytest.raises(ValueError, match=r"load\.reset: must be called inside"):
        load.reset()


def test_an_error_inside_ends_the_block() -> None:
    with pytest.raises(RuntimeError, match="mine"), moe_ops.load_statistics(Experts()):
        raise RuntimeError("mine")
    assert counters.active == 0


def test_inference_mode() -> None:
    experts, ids = Experts(5), torch.tensor([[0, 1]])
    for _ in range(2):
        with torch.inference_mode(), moe_ops.load_statistics(experts) as load:
            experts(torch.randn(1, H), ids)
        assert lists(load) == {"Experts": [1, 1, 0, 0, 0]}
    experts(torch.randn(1, H, requires_grad=True), ids).sum().backward()


def test_off_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "count", lambda *_: pytest.fail("counted"))
    Experts()(torch.randn(3, H))


# ---- names ----


class Stacked(nn.Module):
    """All layers in one tensor for each projection."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        lead = (3 * E,) if flat else (3, E)
        self.gate_up, self.down = (nn.Parameter(torch.randn(*lead, *size)) for size in ((2 * I, H), (H, I)))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up.view(3, E, 2 * I, H), self.down.view(3, E, H, I)
        for number in (0, 2):
            x = moe_ops.fused_experts(x, gate_up[number], down[number], torch.ones(ids.shape), ids)
        return x


class Several(nn.Module):
    """One module with the weights of two layers, gate and up apart, the second projection stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.ParameterList(torch.randn(E, I, H) for _ in range(2)) for _ in range(2))
        self.w2 = nn.ParameterList(torch.randn(E, I, H) for _ in range(2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for w1, w2, w3 in zip(self.w1, self.w2, self.w3, strict=True):
            x = moe_ops.fused_experts(x, w1, w2.transpose(1, 2), torch.ones(ids.shape), ids, up_proj=w3)
        return x


class Converted(Experts):
    """Weights that are made in the forward."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(ids.shape)
        return moe_ops.fused_experts(x.bfloat16(), self.gate_up.bfloat16(), self.down.bfloat16(), weights, ids)


class Plain(nn.Module):
    """Weights that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)

    forward = Experts.forward


class Wrapped(Plain):
    """Weights inside of a subclass of tensors, as quantised ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn_like(self.down), self.down))
        self.down = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return moe_ops.fused_experts(x, self.gate_up, self.weight.b, torch.ones(ids.shape), ids)


def tied() -> nn.Module:
    """Two layers with the same weights."""
    model = nn.Sequential(Experts(), Experts())
    model[1].gate_up, model[1].down = model[0].gate_up, model[0].down
    return Each(model)


class Each(nn.Module):
    """Layers that take ids."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.children():
            x = layer(x, ids)
        return x


NAMES: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "stacked": (lambda: Stacked(flat=False), {"down[0]": 1, "down[2]": 1}),
    "stacked_flat": (lambda: Stacked(flat=True), {"down[0]": 1, "down[2]": 1}),
    "several": (Several, {"w2.0": 1, "w2.1": 1}),
    "converted": (Converted, {NOBODY: 1}),
    "plain": (Plain, {"Plain": 1}),
    "subclass": (Wrapped, {"Wrapped": 1}),
    "tied": (tied, {"layers.0": 2}),
    "buffers": (lambda: buffers(), {"layers.0": 1}),
    "compiled_layer": (lambda: Each(nn.Sequential(Wrapper(Experts()))), {"layers.0": 1}),
}


class Wrapper(nn.Module):
    """As `torch.compile` wraps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any) -> Any:
        return self._orig_mod(*args)


def buffers() -> nn.Module:
    experts = Experts()
    down = experts.down.detach()
    del experts.down
    experts.register_buffer("down", down)
    return Each(nn.Sequential(experts))


@pytest.mark.parametrize("case", NAMES)
def test_names(case: str) -> None:
    build, expected = NAMES[case]
    model, ids = build(), torch.tensor([[0, 3], [3, -1]])
    with torch.no_grad(), moe_ops.load_statistics(model) as load:
        model(torch.randn(2, H), ids)
    assert lists(load) == {name: [times, 0, 0, 2 * times, 0, 0] for name, times in expected.items()}


def test_copies_and_moves() -> None:
    """After warm-up, and inside the block: the old weights' memory may be anybody's."""
    experts, x, ids = Experts(), torch.randn(1, H), torch.tensor([[0, 1]])
    with torch.no_grad():
        experts(x, ids)
        copied = copy.deepcopy(experts)
        with moe_ops.load_statistics(copied) as load:
            copied(x, ids)
            experts(x, ids)
        assert lists(load) == {"Experts": [1, 1, 0, 0, 0, 0], NOBODY: [1, 1, 0, 0, 0, 0]}
        with moe_ops.load_statistics(experts) as load:
            experts(x, ids)
            experts.double()
            experts(x.double(), ids)
        assert lists(load) == {"Experts": [2, 2, 0, 0, 0, 0]}


def test_memory_of_weights_is_not_kept() -> None:
    experts = Experts()
    before = experts.down.untyped_storage()._weak_ref()
    with moe_ops.load_statistics(experts):
        experts.down = nn.Parameter(torch.randn(E, H, I))
        assert torch.UntypedStorage._expired(before)
    torch.UntypedStorage._free_weak_ref(before)


# ---- rows ----


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of this test alone, which grow soon."""
    monkeypatch.setattr(counters, "_tables", {})
    monkeypatch.setattr(counters, "ROWS", 4)


@pytest.mark.usefixtures("few_rows")
def test_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, ids = [Experts() for _ in range(11)], torch.tensor([[0, 1]])
    model = Each(nn.Sequential(*layers))
    with torch.no_grad(), moe_ops.load_statistics(model) as load:
        layers[0](torch.randn(1, H), ids)
        row = counters.Row(layers[0].down).tensor()
        where = row.data_ptr()
        model(torch.randn(1, H), ids)
        assert counters.Row(layers[0].down).tensor().data_ptr() == where
        (rows,) = counters.tables()
        assert all(block[:, 0].tolist() == [1] * 4 for block in rows.blocks)
    assert len(rows.blocks) > 2 and len(rows) == 11
    assert [sum(counts) for counts in lists(load).values()] == [4] + [2] * 10
    assert all(int(block[:, 0].sum()) == 0 for block in rows.blocks)


@pytest.mark.usefixtures("few_rows")
def test_rows_of_weights_that_are_gone() -> None:
    """Of another number of experts, where the memory is the model's now: not there, and not in the way."""
    experts, ids = Experts(8), torch.tensor([[0, 3]])
    flat = experts.down.detach().flatten()
    for other in (2, 4, 8):
        counters.count(flat[: other * 3].view(other, 3), [0] * other)
    with torch.no_grad(), moe_ops.load_statistics(experts) as load:
        experts(torch.randn(1, H), ids)
        assert {name: counts.tolist() for name, counts in load.counts.items()} == {"Experts": [1, 0, 0, 1, 0, 0, 0, 0]}
        counters.count(flat[:6].view(2, 3), [0, 5])
    assert lists(load) == {"Experts": [1, 0, 0, 1, 0, 0, 0, 0], "down[0]": [0, 5]}


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", ["gate.weight", "gate_up"])
def test_rows_of_weights_whose_memory_is_no_experts_any_more(name: str) -> None:
    """A layer that was freed before the block, where another tensor of the model begins now."""
    experts, ids = Experts(), torch.tensor([[-1, -1]])
    memory = experts.get_parameter(name).detach()
    with moe_ops.load_statistics(Each(nn.Sequential())):
        counters.count(memory, [1] * E)
    with torch.no_grad(), moe_ops.load_statistics(experts) as load:
        experts(torch.randn(1, H), ids)
        assert {name: counts.tolist() for name, counts in load.counts.items()} == {"Experts": [0] * E}
    assert load.pairs == {"Experts": 0}


@pytest.mark.usefixtures("few_rows")
def test_layers_that_did_not_run_are_not_there() -> None:
    model, x = Each(nn.Sequential(Experts(), Experts())), torch.randn(1, H)
    with torch.no_grad(), moe_ops.load_statistics(model) as load:
        model(x, torch.tensor([[0, 1]]))
        load.reset()
        assert load.counts == {}
        model.layers[1](x, torch.tensor([[-1, -1]]))
        assert load.pairs == {"layers.1": 0}


@pytest.mark.usefixtures("few_rows")
def test_a_capture_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For layers that nobody called before it: half a block is free after any other call."""
    weights = [torch.randn(E, 1) for _ in range(6)]
    for weight in weights[:4]:
        counters.Row(weight).tensor()
    monkeypatch.setattr(counters, "_capturing", lambda device: True)
    for weight in weights:
        counters.Row(weight).tensor()
    (rows,) = counters.tables()
    assert len(rows) == 6 and not rows.uncounted


@pytest.mark.usefixtures("few_rows")
def test_layers_past_the_last_row_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "MOST_ROWS", 2)
    layers, ids = [Experts() for _ in range(5)], torch.tensor([[0, 1]])
    model = Each(nn.Sequential(*layers))
    for _ in range(2):
        with torch.no_grad(), moe_ops.load_statistics(model) as load:
            model(torch.randn(1, H), ids)
        one, rest = [1, 1, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0]
        assert lists(load) == {"layers.0": one, "layers.1": one, NOBODY: rest}


@pytest.mark.usefixtures("few_rows")
def test_a_graph_that_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of layers that nobody called before cannot count if there was no other call: which, is said."""
    layers = [Experts() for _ in range(2)]
    model = Each(nn.Sequential(*layers))
    with monkeypatch.context() as patch:
        patch.setattr(counters, "_capturing", lambda device: True)
        lost = counters.Row(layers[0].down).tensor()
        assert counters.Row(layers[0].down).tensor() is lost
    kept = counters.Row(layers[1].down).tensor()
    with torch.no_grad(), moe_ops.load_statistics(model) as load:
        model(torch.randn(1, H), torch.tensor([[0, 1]]))
        assert int(lost[0]) == 0 and int(kept[0]) == 1
    assert load.to_dict()["uncounted"] == ["layers.0"]
    assert str(load).splitlines()[-1].endswith("captured before any other call: layers.0")


def test_weights_that_a_kernel_is_only_compiled_for_have_no_row() -> None:
    row = counters.Row(torch.empty(E, 2, 3, device="meta")).tensor()
    assert row.is_meta and row.shape == (1 + E,) and not any(rows.device.type == "meta" for rows in counters.tables())


# ---- reports ----


def loads(rows: list[list[list[int]]]) -> Any:
    """Of layers that were given these ids."""
    model = Each(nn.Sequential(*(Experts() for _ in rows)))
    with torch.no_grad(), moe_ops.load_statistics(model) as load:
        for layer, ids in zip(model.layers, rows, strict=True):
            layer(torch.randn(len(ids), H), torch.tensor(ids).view(-1, K))
    return load


def test_numbers() -> None:
    load = loads([[[0, 1], [0, 2]], [[5, 4]]])
    assert load.pairs == {"layers.0": 4, "layers.1": 2}
    assert load.shares["layers.0"].tolist() == [0.5, 0.25, 0.25, 0, 0, 0]
    assert load.imbalance == {"layers.0": 3.0, "layers.1": 3.0}
    found = json.loads(json.dumps(load.to_dict()))
    first = {"name": "layers.0", "experts": 6, "pairs": 4, "imbalance": 3.0, "counts": [2, 1, 1, 0, 0, 0]}
    assert found["layers"][0] == first and found["uncounted"] == []


def test_text() -> None:
    lines = str(loads([[[0, 1], [0, 2]], [[-1, -1]]])).splitlines()
    assert [line.split() for line in lines] == [
        ["layer", "experts", "pairs", "max/mean", "busiest", "idle"],
        ["layers.0", "6", "4", "3.00", "0", "(50.0", "%)", "3"],
        ["layers.1", "6", "0", "-", "-", "6"],
    ]


def test_nothing_ran() -> None:
    load = loads([])
    assert "no fused MoE block of the model has run" in str(load) and "moe_ops.explain" in str(load)
    assert load.counts == {} and load.to_dict() == {"layers": [], "uncounted": []}
    with pytest.raises(ValueError, match=r"load\.plot: no fused MoE block"):
        load.plot()


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    load = loads([[[0, 1], [0, 2]], [[5, 4]], [[-1, -1]]])
    for name in ("load.png", "load.svg"):
        figure = load.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[3.0, 1.5, 1.5, 0, 0, 0], [0, 0, 0, 0, 3.0, 3.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layers.0", "layers.1"]


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    load = loads([[[0, 1]]])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"load\.plot: draws with matplotlib, got none\. pip install matplotlib"):
        load.plot()


def test_no_module() -> None:
    with pytest.raises(ValueError, match=r"load_statistics: model must be a torch\.nn\.Module, got function"):
        with moe_ops.load_statistics(of_ids):  # type: ignore[arg-type]
            pass
