"""Layers over a group under torch.compile: one graph, eager's bits, and collectives that the passes leave alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.backend import moe_ops_eager
from compile_passes.passes import graph_modules
from moe_ops import ep
from moe_ops.testing import assert_no_recompiles
from tests.distributed.ranks import CROSSING, Check, E, H, K, Ranks, quantised, random

SIZES = (2, 7, 64)
OPTIONS = "transport=gather"  # of the operator under opcheck


class Block(nn.Module):
    """This rank's experts, as a model holds them."""

    def __init__(self, ranks: Ranks, transport: str, **options: Any) -> None:
        super().__init__()
        self.options = {"group": ranks.group, "transport": transport, **options}
        self.gate_up, self.down = (nn.Parameter(ranks.held(transport, each)) for each in random(0)[3:5])

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, self.gate_up, self.down, weights, ids, **self.options)


def _tokens(ranks: Ranks, transport: str, size: int) -> tuple[Tensor, ...]:
    return tuple(ranks.share(transport, tensor).clone() for tensor in random(ranks.size * size)[:3])


@torch.no_grad()
def automatic(transport: str, ranks: Ranks) -> None:
    """Inductor's code has eager's bits, and the second number of tokens is the last one that compiles."""
    torch.compiler.reset()
    counters.clear()
    run, graphs = Block(ranks, transport), []
    compiled = ranks.compiled(run, backend="inductor")
    for size in SIZES:
        inputs = _tokens(ranks, transport, size)
        ranks.same(compiled(*inputs), run(*inputs), f"T = {size}")
        graphs.append(counters["stats"]["unique_graphs"])
    wanted = [0, 0, 0] if compiled is run else [1, 2, 2]
    ranks.expect(graphs == wanted, f"graphs after each of {SIZES}: {graphs}")


def dynamic(transport: str, ranks: Ranks) -> None:
    """One graph for every number of tokens."""
    _one_graph(Block(ranks, transport), transport, ranks)


def capacity(ranks: Ranks) -> None:
    """The same with a capacity that does not follow from T."""
    _one_graph(Block(ranks, "all_to_all", rank_capacity=5), "all_to_all", ranks)


def _one_graph(run: Block, transport: str, ranks: Ranks) -> None:
    """Without breaks, of which `assert_no_recompiles` tells as well."""
    tokens = partial(_tokens, ranks, transport)
    if ranks.compiles():
        assert_no_recompiles(run, tokens, sizes=SIZES, backend="aot_eager")
        return
    with torch.no_grad():
        for size in SIZES:
            run(*tokens(size))


@torch.no_grad()
def numbers(ranks: Ranks) -> None:
    """A capacity that follows from T, and an activation's number, in one graph with eager's bits."""
    gate_up, down = (ranks.held("gather", each) for each in random(0)[3:5])

    def run(x: Tensor, weights: Tensor, ids: Tensor, alpha: float) -> Tensor:
        more = {"format": "batched", "capacity": x.shape[0], "activation": "swiglu_oai", "alpha": alpha}
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group, **more)

    for dynamic in (None, True):
        torch.compiler.reset()
        compiled = ranks.compiled(run, backend="aot_eager", dynamic=dynamic)
        for size in SIZES:
            inputs = (*_tokens(ranks, "gather", size), 1.5)
            ranks.same(compiled(*inputs), run(*inputs), f"T = {size}, dynamic={dynamic}")


@torch.no_grad()
def few_tokens(ranks: Ranks) -> None:
    """0 and 1, which have graphs of their own."""
    for transport, tokens in (("gather", 0), ("all_to_all", 0), ("all_to_all", 1)):
        torch.compiler.reset()
        run, inputs = Block(ranks, transport), _tokens(ranks, transport, tokens)
        compiled = ranks.compiled(run, backend="aot_eager")
        ranks.same(compiled(*inputs), run(*inputs), f"{transport}, T = {tokens}")


@torch.no_grad()
def quantised_experts(ranks: Ranks) -> None:
    """Rows and scales cross, in a graph, too."""
    torch.compiler.reset()
    layer = quantised(ranks.size * 3)
    compiled = ranks.compiled(partial(ranks.run, layer, "gather"), backend="aot_eager")
    ranks.same(compiled(), ranks.run(layer, "gather"), "gather")


@torch.no_grad()
def layers_alike(ranks: Ranks) -> None:
    """Nothing in a graph says which layer it is: what is compiled for one serves the next."""
    for transport in CROSSING:
        torch.compiler.reset()
        first, second = Block(ranks, transport), Block(ranks, transport)
        graphs: list[fx.Graph] = []

        def keep(gm: fx.GraphModule, inputs: Any, graphs: list[fx.Graph] = graphs) -> Callable[..., Any]:
            graphs.append(gm.graph)
            return gm.forward

        def model(x: Tensor, *routing: Tensor, layers: tuple[Block, ...] = (first, second)) -> Tensor:
            for layer in layers:
                x = layer(x, *routing)
            return x

        called = ranks.compiled(model, backend=keep, dynamic=False)
        called(*_tokens(ranks, transport, 4))
        if called is model:
            continue
        calls = [_described(node) for node in graphs[0].nodes if node.op not in ("placeholder", "output")]
        half = len(calls) // 2
        ranks.expect(half > 5 and calls[:half] == calls[half:], f"{transport}: {calls[:half]} and {calls[half:]}")


def _described(node: fx.Node) -> str:
    """The call and its constants, with a word in the place of what other nodes give."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: "another node")
    return f"{node.op} {'weights' if node.op == 'get_attr' else node.target} {args} {kwargs}"


def opcheck(ranks: Ranks) -> None:
    """torch's own checks of the operator: in a group of one rank, and among all of them."""
    ids = torch.randint(-1, E + 1, (5, K), generator=torch.Generator().manual_seed(0))
    options = {"num_experts": E, "options": OPTIONS}
    for group in (ranks.alone, ranks.group):
        options |= {"group": group.group_name, "rank": group.rank(), "size": group.size()}
        for given, capacity in ((ids, None), (ids.int(), 2)):
            named = {**options, "rank_capacity": capacity, "capacity": capacity}
            torch.library.opcheck(torch.ops.moe_ops.agreed_ids, (given, H), named)
    ranks.same(torch.ops.moe_ops.agreed_ids(ids, H, **options), ids.int(), "ids")


def _plain(ranks: Ranks, transport: str, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A block of operators of torch alone, but for what crosses."""
    weights, ids = F.linear(x, router).softmax(-1).topk(K, dim=-1)
    prepared = ep.prepare(x, weights, ids, num_experts=E, group=ranks.group, transport=transport)
    held = prepared.topk_ids >= 0
    flat = prepared.topk_ids.clamp(min=0).reshape(-1)
    rows = prepared.rows.repeat_interleave(K, 0).unsqueeze(-1)
    gate, up = torch.bmm(gate_up[flat], rows).squeeze(-1).chunk(2, dim=-1)
    out = torch.bmm(down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    scaled = out * torch.where(held, prepared.topk_weights, 0).reshape(-1, 1)
    return ep.finalize(scaled.view(-1, K, H).sum(1), prepared)


def _fused(ranks: Ranks, transport: str, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A router and a layer of ours, which without a group between them were one operator."""
    weights, ids = moe_ops.fused_topk(F.linear(x, router), top_k=K)
    return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group, transport=transport)


def _collectives(gm: fx.GraphModule) -> Counter[str]:
    nodes = (node for part in graph_modules(gm) for node in part.graph.nodes if node.op == "call_function")
    return Counter(name for node in nodes if "c10d" in (name := str(node.target)) or "agreed_ids" in name)


def passes(block: Callable[..., Tensor], ranks: Ranks) -> None:
    """Blocks with collectives in them, with gradients and without: ours fuse at most what lies between. Of each block
    every transport, and for each transport both kinds of graphs, those with gradients of one block or the other.
    """
    counters.clear()
    for transport in CROSSING:
        _passes(block, transport, (block is _plain) == (transport == "all_to_all"), ranks)
    ranks.expect(counters["moe_ops"]["errors"] == 0, "a pass failed")


def _passes(block: Callable[..., Tensor], transport: str, grad: bool, ranks: Ranks) -> None:
    torch.compiler.reset()
    counts: list[Counter[str]] = []

    def count(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        counts.append(_collectives(gm))
        run = moe_ops_eager(gm, inputs)
        counts.append(_collectives(gm))
        return run

    whole, what = random(ranks.size * 5), f"{transport}, gradients: {grad}"
    router = torch.randn(E, H, generator=torch.Generator().manual_seed(3))
    experts = [ranks.held(transport, each) for each in (whole.gate_up, whole.down)]
    x, plain = (ranks.share(transport, whole.x).clone().requires_grad_(grad) for _ in range(2))
    run = partial(block, ranks, transport)
    # what is asked between the halves is in a graph asked at their start: of halves, all ranks compile, or none
    halves = block is _plain
    called = torch.compile(run, backend=count, fullgraph=True) if halves else ranks.compiled(run, backend=count)
    got, want = called(x, router, *experts), run(plain, router, *experts)
    ranks.close(got.detach(), want.detach(), 1e-6, what)
    if called is not run:
        before, after = counts
        ranks.expect(before == after and before.total() > 2, f"{what}: {before} became {after}")
    if grad:
        got.square().sum().backward()
        want.square().sum().backward()
        ranks.close(x.grad, plain.grad, 2e-6, f"{what}, of x")


CHECKS = {
    **{f"compiled-{transport}": Check(partial(automatic, transport)) for transport in CROSSING},
    **{f"compiled-{transport}-dynamic": Check(partial(dynamic, transport)) for transport in CROSSING},
    "compiled-all_to_all-dynamic-capacity": Check(capacity),
    "compiled-numbers": Check(numbers),
    "compiled-few_tokens": Check(few_tokens),
    "compiled-fp8_block128": Check(quantised_experts),
    "compiled-layers_alike": Check(layers_alike),
    "opcheck-agreed_ids": Check(opcheck),
    "passes-plain_block": Check(partial(passes, _plain)),
    "passes-fused_block": Check(partial(passes, _fused)),
}
