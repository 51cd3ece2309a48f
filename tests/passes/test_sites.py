"""Call sites in compiled code: as right as eager calls, and the launcher is asked only when something is new."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch._inductor.utils import run_and_get_code

import moe_ops
from moe_ops import runtime
from moe_ops.ops import LAUNCHERS

E, K, H, I = 4, 2, 16, 24
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    graphs = torch._inductor.config.patch(fx_graph_cache=False)  # what they have of C++ is compiled once
    with torch.no_grad(), graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2 * I, H) * 0.1, torch.randn(E, H, I) * 0.1


def inputs(T: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(T, H), torch.randn(T, E)


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def moe(x: Tensor, logits: Tensor, up: Tensor, down: Tensor, **options: Any) -> Tensor:
    return moe_ops.fused_moe(x, logits, up, down, **{"top_k": K, **options})


def test_two_batch_sizes_of_one_graph(launched: list[int]):
    up, down = weights()

    def block(x: Tensor, logits: Tensor) -> Tensor:
        return moe(torch.relu(moe(x * 2, logits, up, down)), logits, up, down)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for turn in range(12):
        x, logits = inputs((3, 5)[turn % 2])
        expected = block(x, logits)
        launched.clear()
        same(compiled(x, logits), expected)
        assert len(launched) == (2 if turn < 2 else 0)  # eager calls of this size were learnt from


def test_options_of_two_sites(launched: list[int]):
    """Of the same tensors, so that nothing else tells them apart."""
    up, down = weights()

    def block(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            moe(x, logits, up, down, top_k=top_k, scale=scale) for top_k, scale in ((1, 1.0), (2, 1.0), (2, 3.0))
        )

    compiled = torch.compile(block, fullgraph=True)
    for _ in range(5):
        x, logits = inputs()
        expected = block(x, logits)
        launched.clear()
        same(compiled(x, logits), expected)
    assert not launched


def test_an_option_that_varies(launched: list[int]):
    """Rows past a capacity are dropped: each call has its own."""
    up, down = weights()
    ids, chosen = torch.zeros(6, K, dtype=torch.int32), torch.rand(6, K)

    def block(x: Tensor, room: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, up, down, chosen, ids, format="batched", capacity=room.shape[0] + 1)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for turn in range(10):
        x, room = torch.randn(6, H), torch.empty(turn % 3 + 2)
        expected = block(x, room)
        launched.clear()
        same(compiled(x, room), expected)
    assert not launched


def test_a_stride_that_varies(launched: list[int]):
    """Of a view, by a symbol that no size has."""
    up, down = weights()
    compiled = torch.compile(lambda wide, logits: moe(wide[:, :H], logits, up, down), fullgraph=True)
    for width, many in ((24, 1), (24, 1), (24, 0), (40, 1), (40, 1), (40, 0), (24, 0)):
        wide, logits = torch.randn(3, width), torch.randn(3, E)
        torch._dynamo.mark_dynamic(wide, 1)
        expected = moe(wide[:, :H], logits, up, down, backend="reference")
        launched.clear()
        same(compiled(wide, logits), expected)
        assert len(launched) == many


def test_misaligned(launched: list[int]):
    """What was learnt for aligned addresses is not for others."""
    up, down = weights()
    compiled = torch.compile(moe, fullgraph=True)
    for offset in (0, 0, 0, 1, 1, 1, 0):
        x, logits = torch.randn(3 * H + 1)[offset:][: 3 * H].view(3, H), torch.randn(3, E)
        expected = moe(x, logits, up, down)
        launched.clear()
        same(compiled(x, logits, up, down), expected)
    assert not launched
    x = torch.randn(3 * H + 1)[1:].view(3, H)
    expected = moe(x, logits, up, down)
    launched.clear()
    same(compiled(x, logits, up, down), expected)
    assert len(launched) == 1


def test_forget(launched: list[int]):
    up, down = weights()
    compiled = torch.compile(moe, fullgraph=True)
    for _ in range(3):
        compiled(*inputs(), up, down)
    launched.clear()
    compiled(*inputs(), up, down)
    assert not launched
    LAUNCHERS["fused_moe"].forget()
    for many in (1, 2, 2):
        compiled(*inputs(), up, down)
        assert len(launched) == many


def test_debug_reaches_compiled_code():
    up, down = weights()
    compiled = torch.compile(lambda x, ids: moe_ops.fused_experts(x, up, down, torch.ones(3, K), ids), fullgraph=True)
    x, ids = torch.randn(3, H), torch.zeros(3, K, dtype=torch.int32)
    for _ in range(4):
        compiled(x, ids)
    with moe_ops.debug(), pytest.raises(ValueError, match="topk_ids must be in"):
        compiled(x, ids + E)


def test_memory_of_a_site_is_bounded(monkeypatch: pytest.MonkeyPatch, launched: list[int]):
    monkeypatch.setattr(runtime, "MOST_KEYS", 4)
    up, down = weights()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for T in range(2, 12):
        for _ in range(3):
            x, logits = inputs(T)
            expected = moe(x, logits, up, down)
            launched.clear()
            same(compiled(x, logits, up, down), expected)
        assert not launched
    gc.collect()
    assert max(len(site.known) for site in LAUNCHERS["fused_moe"]._sites) == 4


UP, DOWN = torch.randn(E, 2 * I, H) * 0.1, torch.randn(E, H, I) * 0.1


def cond(x: Tensor, logits: Tensor) -> Tensor:
    def first(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return moe(x * 2, logits, up, down)

    def second(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return moe(x - 1, logits, up, down, top_k=1)

    arguments = (x, logits, UP, DOWN)
    if torch.compiler.is_compiling():
        return torch.cond(x[1, 0] > 0, first, second, arguments) + moe(*arguments)
    return (first if x[1, 0] > 0 else second)(*arguments) + moe(*arguments)


def while_loop(x: Tensor, logits: Tensor) -> Tensor:
    def again(turn: Tensor, x: Tensor) -> Tensor:
        return turn < 3

    def body(turn: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return turn + 1, moe(x + 1, logits, UP, DOWN)

    if torch.compiler.is_compiling():
        return torch._higher_order_ops.while_loop(again, body, (torch.zeros((), dtype=torch.int64), x))[1]
    for turn in range(3):
        _, x = body(torch.tensor(turn), x)
    return x


def layer(x: Tensor, logits: Tensor) -> Tensor:
    return moe(x + 1, logits, UP, DOWN)


region = torch.compiler.nested_compile_region(layer)


def repeated(x: Tensor, logits: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return region(region(x, logits), logits)
    return layer(layer(x, logits), logits)


def unbacked(x: Tensor, logits: Tensor) -> Tensor:
    some = torch.nonzero(x[:, 0] > -1)[:, 0]
    return moe(x[some], logits[some], UP, DOWN).sum(0)


PROGRAMS = {one.__name__: one for one in (cond, while_loop, repeated, unbacked)}


def is_apart(scheduler: Any, node: Any, *_: Any, **__: Any) -> Any:
    """Of `Scheduler.should_partition`: what cudagraphs have it say on a GPU."""
    return getattr(node.node, "unbacked_bindings", None) or None


# With symbols, which have to be in scope, in every function and part; without them where nothing else is new.
ASKED = [(name, "dynamic", parts) for name in PROGRAMS for parts in ("whole", "partitioned")]
ASKED += [("repeated", "static", "whole"), ("unbacked", "static", "partitioned")]


@pytest.mark.parametrize(("name", "sizes", "parts"), ASKED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_functions_of_a_graph(name: str, sizes: str, parts: str, monkeypatch: pytest.MonkeyPatch, launched: list[int]):
    """Symbols are in scope in the functions that bodies and parts of a graph become."""
    dynamic, partitioned = sizes == "dynamic", parts == "partitioned"
    if partitioned:
        from torch._inductor.scheduler import Scheduler

        monkeypatch.setattr(Scheduler, "should_partition", is_apart)
    program = PROGRAMS[name]
    compiled = torch.compile(program, fullgraph=True)
    codes: list[str] = []
    for turn in range(12):
        x, logits = inputs((4, 7)[turn % 2] if dynamic else 4)
        x[0, 0], x[1:, 0] = 1.0, (turn // 2 % 2) * 4.0 - 2  # all rows or one
        expected = program(x, logits)
        launched.clear()
        for tensor in (x, logits) if dynamic else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        found, new = run_and_get_code(compiled, x, logits) if turn == 0 else (compiled(x, logits), [])
        codes += new
        same(found, expected)
        assert turn < 8 or not launched, (turn, len(launched))
    code = "\n".join(codes)
    assert not re.search(r"= torch\.ops\.moe_ops", code)
    assert ("def partition_0(args)" in code) is partitioned
