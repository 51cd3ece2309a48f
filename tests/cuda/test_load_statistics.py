"""Load statistics on a GPU: graphs that were captured before anybody asked count, in every way a layer is run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops import counters
from moe_ops.ops import LAUNCHERS
from moe_ops.testing import assert_cuda_graph_safe

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]
E, K, H, I = 16, 4, 256, 128
TOKENS = (1, 8, 64, 1000)


class Layer(nn.Module):
    def __init__(self, scheme: str | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = {"scheme": scheme, **options}
        for name, (n, k) in {"gate_up": (2 * I, H), "down": (H, I)}.items():
            weight = (torch.randn(E, n, k, device="cuda") * k**-0.5).bfloat16()
            scale = None
            if scheme is not None:
                weight, scale = moe_ops.quantize_weight(weight, scheme=scheme)
            self.register_buffer(f"{name}_proj", weight)
            self.register_buffer(f"{name}_scale", scale)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scales = {} if self.down_scale is None else {f"{n}_scales": [getattr(self, f"{n}_scale")] for n in SCALED}
        return moe_ops.fused_moe(x, logits, self.gate_up_proj, self.down_proj, top_k=K, **scales, **self.options)


SCALED = ("gate_up", "down")
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "bf16": (None, {}),
    "batched": (None, {"format": "batched"}),
    "capacity": (None, {"format": "batched", "capacity": 3}),
    "fp8": ("fp8_block128", {}),
    "fp8_batched": ("fp8_block128", {"format": "batched"}),
}


class Model(nn.Module):
    """Two layers with logits of their own: no expert of one has as many tokens as of the other."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*CASES[case]) for _ in range(2))
        self.capacity = CASES[case][1].get("capacity", 10**6)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        for layer, of_layer in zip(self.layers, logits.unbind(0), strict=True):
            x = x + layer(x, of_layer).tanh()
        return x

    def expected(self, logits: torch.Tensor, times: int = 1) -> dict[str, list[int]]:
        found = {}
        for number, of_layer in enumerate(logits):
            counts = torch.bincount(moe_ops.fused_topk(of_layer, top_k=K)[1].flatten(), minlength=E)
            found[f"layers.{number}"] = (counts.clamp(max=self.capacity) * times).tolist()
        return found


def inputs(T: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, H, device="cuda").bfloat16(), torch.randn(2, T, E, device="cuda")


def lists(load: Any) -> dict[str, list[int]]:
    return {name: counts.tolist() for name, counts in load.counts.items() if counts.any()}


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("case", CASES)
def test_eager(case: str, T: int):
    """Cold calls, the one that is learnt from, and warm ones."""
    model = Model(case)
    for _ in range(4):
        arguments = inputs(T)
        with moe_ops.load_statistics(model) as load:
            model(*arguments)
        model(*arguments)
        assert lists(load) == model.expected(arguments[1])
        assert all(counts.is_cuda for counts in load.counts.values())


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("case", CASES)
def test_graph_captured_while_off(case: str, T: int):
    model, (x, logits) = Model(case), inputs(T)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x, logits)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, logits)
    graph.replay()
    expected = out.clone()
    with moe_ops.load_statistics(model) as load:
        graph.replay()
        assert torch.equal(out, expected)
        first = model.expected(logits)
        assert lists(load) == first
        logits.copy_(torch.randn_like(logits))
        load.reset()
        for _ in range(3):
            graph.replay()
    graph.replay()
    assert lists(load) == model.expected(logits, times=3)
    with moe_ops.load_statistics(model) as again:
        pass
    assert not lists(again)


@pytest.mark.parametrize("case", CASES)
def test_reduce_overhead(case: str):
    """CUDA graph trees, warmed up and recorded before anybody asked; nothing compiles again."""
    torch.compiler.reset()
    model = Model(case)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    with torch.no_grad(), torch._inductor.config.patch("triton.cudagraph_or_error", True):
        for T in TOKENS:
            arguments = inputs(T)
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*arguments)
        with torch.compiler.set_stance("fail_on_recompile"):
            for T in TOKENS:
                arguments = inputs(T)
                with moe_ops.load_statistics(compiled) as load:
                    for _ in range(2):
                        torch.compiler.cudagraph_mark_step_begin()
                        compiled(*arguments)
                assert lists(load) == model.expected(arguments[1], times=2)


@pytest.mark.parametrize("T", [*TOKENS, 5000])
@pytest.mark.parametrize("scheme", [None, "fp8_block128", "mxfp4"])
@pytest.mark.parametrize("format", ["grouped", "batched"])
def test_stages(format: str, scheme: str | None, T: int):
    """Rows of products that count none are counted before them."""
    layer = Layer(scheme, {})
    options = (
        {} if scheme is None else {"scheme": scheme, **{f"{n}_scales": [getattr(layer, f"{n}_scale")] for n in SCALED}}
    )
    for _ in range(3):
        x, (logits, _) = inputs(T)
        weights, ids = moe_ops.fused_topk(logits, top_k=K)
        with moe_ops.load_statistics(layer) as load:
            prepared = moe_ops.prepare(x, weights, ids, num_experts=E, format=format, scheme=scheme)
            moe_ops.finalize(moe_ops.experts(prepared, layer.gate_up_proj, layer.down_proj, **options), prepared)
        assert lists(load) == {"Layer": torch.bincount(ids.flatten(), minlength=E).tolist()}


def test_long_batches_in_passes(monkeypatch: pytest.MonkeyPatch):
    from moe_ops.kernels.triton import layer as layers

    monkeypatch.setattr(layers, "tokens_per_pass", lambda *_: 300)
    model, arguments = Model("bf16"), inputs(1000)
    with moe_ops.load_statistics(model) as load:
        model(*arguments)
    assert lists(load) == model.expected(arguments[1])


def test_graph_safe_while_counting():
    model = Model("bf16")
    with moe_ops.load_statistics(model):
        assert_cuda_graph_safe(model, inputs(8), changed=[inputs(8)])
    assert_cuda_graph_safe(model, inputs(8), changed=[inputs(8)])


def test_no_wait_for_the_device(monkeypatch: pytest.MonkeyPatch):
    """Neither at the start, nor in calls, nor in reading, nor at the end, once there are rows."""
    monkeypatch.setattr(counters, "_tables", {})  # of other tests' weights, which are no module's
    for launcher in LAUNCHERS.values():
        launcher.forget()
    model, arguments = Model("bf16"), inputs(8)
    for _ in range(3):
        model(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with moe_ops.load_statistics(model) as load:
            model(*arguments)
            counts = load.counts
            load.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts["layers.0"].tolist() == model.expected(arguments[1])["layers.0"]


def test_a_first_call_in_a_capture_is_said(monkeypatch: pytest.MonkeyPatch):
    """Of a process in which nothing ran before: its graph does not count, later calls do."""
    model, arguments = Model("bf16"), inputs(8)
    Layer(None, {})(arguments[0], arguments[1][0])  # compiles the kernels
    monkeypatch.setattr(counters, "_tables", {})
    for launcher in LAUNCHERS.values():
        launcher.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(*arguments)
    with moe_ops.load_statistics(model) as load:
        graph.replay()
        assert not lists(load)
        model(*arguments)
    assert lists(load) == model.expected(arguments[1])
    assert load.to_dict()["uncounted"] == ["layers.0", "layers.1"]


def test_capture_refuses_to_begin():
    model, graph = Model("bf16"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(1, device="cuda")
        with pytest.raises(ValueError, match=r"load_statistics: the block must begin outside"):
            with moe_ops.load_statistics(model):
                pass
        x += 1
    assert counters.active == 0


def test_streams_add_up():
    """Two threads on two streams, the same layers."""
    model, arguments = Model("bf16"), inputs(64)
    for _ in range(3):
        model(*arguments)
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                model(*arguments)
            torch.cuda.current_stream().synchronize()

    with moe_ops.load_statistics(model) as load:
        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert lists(load) == model.expected(arguments[1], times=100)
