"""What every one of several GPUs' processes checks of moe_ops.ep; `tests.distributed.processes` starts them.

python -m tests.cuda.expert_parallel --size 2 --rank 0 --port 29500 --out FILE
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ops
from moe_ops import census, ep, symmetric
from moe_ops.groups import resolve

E, K, H, I = 16, 4, 512, 256
TRANSPORTS = ("gather", "symm", "all_to_all", "replicated")
TOKENS = (0, 1, 3, 64, 300)  # of a rank
LARGE = 10007  # of a rank: rows that copy engines move, in fp8, too
Batch = tuple[Tensor, Tensor, Tensor]


class Layer:
    """A whole layer, and this rank's part of it."""

    def __init__(self, scheme: str | None = None) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        weights = [
            (torch.randn(E, n, k, device="cuda", generator=generator) * k**-0.5).bfloat16()
            for n, k in ((2 * I, H), (H, I))
        ]
        self.scheme, scales = scheme, [[], []]
        if scheme is not None:
            stored = [moe_ops.quantize_weight(weight, scheme=scheme) for weight in weights]
            weights, scales = [first for first, *_ in stored], [list(rest) for _, *rest in stored]
        self.weights, self.scales = weights, scales

    def whole(self, batch: Batch) -> Tensor:
        """All tokens through all experts, here."""
        return self._run(batch, slice(None))

    def spread(self, batch: Batch, transport: str) -> Tensor:
        """What this rank gets of it."""
        count = E // dist.get_world_size()
        own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
        return self._run(batch, own, group=dist.group.WORLD, transport=transport)

    def _run(self, batch: Batch, held: slice, **options: object) -> Tensor:
        x, weights, ids = batch
        gate_up, down = (weight[held] for weight in self.weights)
        if self.scheme is not None:
            gate_up_scales, down_scales = ([scale[held] for scale in scales] for scales in self.scales)
            options |= {"scheme": self.scheme, "gate_up_scales": gate_up_scales, "down_scales": down_scales}
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, **options)


def batch_of(tokens: int, seed: int, *, experts: int = E) -> Batch:
    """For all ranks together; only the first ``experts`` are chosen."""
    generator = torch.Generator("cuda").manual_seed(seed)
    number = tokens * dist.get_world_size()
    x = torch.randn(number, H, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(number, E, device="cuda", generator=generator)
    logits[:, experts:] = -30.0
    return x, *moe_ops.fused_topk(logits, top_k=K)


def seen(tensors: tuple[Tensor, ...], transport: str) -> tuple[Tensor, ...]:
    """This rank's part of tensors of all tokens."""
    if transport == "replicated":
        return tensors
    size = tensors[0].shape[0] // dist.get_world_size()
    return tuple(tensor[dist.get_rank() * size : (dist.get_rank() + 1) * size].contiguous() for tensor in tensors)


def compiled_first() -> None:
    """The first call of a process may be a compiled one, which tries and makes what the transport needs."""
    layer, batch = Layer(), seen(batch_of(LARGE, 5), "symm")
    with torch.no_grad():
        got = torch.compile(layer.spread, fullgraph=True, dynamic=False)(batch, None)
    assert torch.equal(got, layer.spread(batch, "symm"))


def equal_to_one(transport: str, scheme: str | None, sizes: Sequence[int] = TOKENS) -> None:
    """As one GPU, but for the rounding of partial results to bf16."""
    layer = Layer(scheme)
    for tokens in sizes:
        for experts in (E, E // dist.get_world_size()):
            batch = batch_of(tokens, tokens, experts=experts)
            (want,) = seen((layer.whole(batch),), transport)
            got = layer.spread(seen(batch, transport), transport)
            # Half an ulp of bf16 for every partial result and for their sum, of results that are at most 1.5 of the
            # largest in size. A rank's fewer experts may have another kernel, whose sums are of another order: a few
            # intermediate elements are then rounded to the neighbour in fp8.
            ulps = 3 if scheme is None else 6
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=ulps * 2**-8 * max_of(want))
            if tokens:
                assert float((got.float() - want.float()).square().mean().sqrt()) <= 2**-10 * max_of(want)


def max_of(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def replays(transport: str, compiled: bool, tokens: int = 64) -> None:
    """A captured graph, replayed back to back with changing tokens and routing: bits of eager calls."""
    layer, function = Layer(), Layer().spread
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=False)
    batches = [seen(batch_of(tokens, seed, experts=E - seed % 5), transport) for seed in range(10)]
    static = tuple(tensor.clone() for tensor in batches[0])
    graph, output = captured(lambda: function(static, transport))
    eager = [layer.spread(batch, transport) for batch in batches]
    kept = []
    for number in range(100):
        for there, tensor in zip(static, batches[number % 10], strict=True):
            there.copy_(tensor)
        graph.replay()
        kept.append(output.clone())
    for number, found in enumerate(kept):
        assert torch.equal(found, eager[number % 10]), f"replay {number}"


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = call()
    graph.instantiate()
    return graph, output


def kernels_alone(transport: str) -> None:
    """Nothing but kernels in the captured graph, and one exchange each way."""
    layer, batch = Layer(), seen(batch_of(64, 0), transport)
    graph, _ = captured(lambda: layer.spread(batch, transport))
    names = census.graph_kernel_names(graph)
    assert not {"memcpy", "memset"} & set(names), names
    exchanges = [name for name in names if "nccl" in name or name == "_exchange_kernel"]
    assert len(exchanges) == {"all_to_all": 4, "replicated": 1}.get(transport, 2), names


def copies_are_few() -> None:
    """A large batch's graph has the copies of its rows, one for each rank, and no other."""
    layer, batch = Layer(), seen(batch_of(LARGE, 0), "symm")
    graph, _ = captured(lambda: layer.spread(batch, "symm"))
    names = census.graph_kernel_names(graph)
    assert names.count("memcpy") == dist.get_world_size() and "memset" not in names, names


def steps_as_a_whole(scheme: str | None) -> None:
    """prepare, experts and finalize give the bits of the layer, with other exchanges between their halves, compiled."""
    layer, batch = Layer(scheme), seen(batch_of(LARGE, 2), "symm")
    count, group = E // dist.get_world_size(), dist.group.WORLD
    own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    weights = [weight[own] for weight in layer.weights]
    scales = [[scale[own] for scale in scales] for scales in layer.scales]
    options = {"scheme": scheme, "gate_up_scales": scales[0], "down_scales": scales[1]} if scheme else {}

    def steps(x: Tensor, topk_weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        prepare = {"num_experts": E, "group": group, "transport": "symm", "scheme": scheme}
        started = ep.prepare_start(x, topk_weights, ids, **prepare)
        other = ep.prepare_start(x.flip(0), topk_weights.flip(0), ids.flip(0), **prepare)
        results = []
        for each in (started, other):
            prepared = ep.prepare_wait(each)
            results.append(ep.finalize_start(ep.experts(prepared, *weights, **options), prepared))
        added = x.sin()
        return ep.finalize_wait(results[0]), ep.finalize_wait(results[1], added)

    with torch.no_grad():
        want = layer.spread(batch, "symm")
        for function in (steps, torch.compile(steps, fullgraph=True, dynamic=False)):
            got, flipped = function(*batch)
            assert torch.equal(got, want)
            atol = 2 * 2**-8 * (max_of(want) + 1)
            torch.testing.assert_close(
                flipped.float(), want.flip(0).float() + batch[0].float().sin(), rtol=0, atol=atol
            )


def reduce_overhead(transport: str) -> None:
    """Inductor's own CUDA graphs hold the collectives: none skipped, bits of eager calls, over two sizes."""
    from torch._dynamo.utils import counters

    layer = Layer()
    counters.clear()
    function = torch.compile(layer.spread, fullgraph=True, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for number in range(8):
            batch = seen(batch_of((8, 64)[number % 2], number), transport)
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(function(batch, transport), layer.spread(batch, transport)), f"call {number}"
    assert not counters["inductor"]["cudagraph_skips"]


def gradients(transport: str, tokens: int = 40) -> None:
    """Of tokens, routing weights and weights: those of one GPU."""
    x, weights, ids = batch_of(tokens, 3)
    layer = Layer()
    grad = torch.randn(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(9)).bfloat16()
    ones = [tensor.clone().requires_grad_() for tensor in (x, weights, *layer.weights)]
    layer.weights = ones[2:]
    wanted = torch.autograd.grad(layer.whole((ones[0], ones[1], ids)), ones, grad)
    own_x, own_weights, own_ids, own_grad = seen((x, weights, ids, grad), transport)
    leaves = [own_x.clone().requires_grad_(), own_weights.clone().requires_grad_(), *ones[2:]]
    found = torch.autograd.grad(layer.spread((leaves[0], leaves[1], own_ids), transport), leaves, own_grad)
    count = E // dist.get_world_size()
    own = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    pairs = [*zip(found[:2], seen(wanted[:2], transport), strict=True)]
    pairs += [(got[own], want[own]) for got, want in zip(found[2:], wanted[2:], strict=True)]
    for got, want in pairs:
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=4 * 2**-8 * max_of(want))


def larger_buffers() -> None:
    """A graph goes on with the buffers that it was captured with, when a larger call gets new ones."""
    layer = Layer()
    batch, large = (seen(batch_of(tokens, 1), "symm") for tokens in (16, 4096))
    graph, output = captured(lambda: layer.spread(batch, "symm"))
    want = layer.spread(batch, "symm")
    layer.spread(large, "symm")
    graph.replay()
    assert torch.equal(output, want)
    larger = seen(batch_of(1 << 16, 1), "symm")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            layer.spread(larger, "symm")
    except ValueError as error:
        assert "Run the layer once, with as many tokens, before the capture" in str(error), error
    else:
        raise AssertionError("no error, and no buffers")


def exchanges_of_any_size() -> None:
    """Calls one behind the other, of changing sizes, words that are not whole among them: every byte arrives."""
    group, size, rank = resolve("test", dist.group.WORLD), dist.get_world_size(), dist.get_rank()
    for number in range(200):
        generator = torch.Generator("cuda").manual_seed(number)
        rows = (1 + number * 7 % 69) * (1 if number % 5 else 40)
        for gather, widths in ((True, (4096, 32, 30)), (False, (4096,))):
            sent = rows if gather else size * rows
            tensors = [
                torch.randint(0, 256, (size, sent, width), device="cuda", generator=generator, dtype=torch.uint8)
                for width in widths
            ]
            own = [tensor[rank] for tensor in tensors]
            token = symmetric.start(own, group, gather=gather, apart=number % 2 == 0)
            received = symmetric.wait(token, own, group, gather=gather)
            for tensor, got in zip(tensors, received, strict=True):
                want = tensor if gather else tensor.view(size, size, rows, -1)[:, rank]
                assert torch.equal(got, want.reshape(got.shape)), f"call {number}, {rows} rows"


def many_under_way() -> None:
    """Exchanges that begin before earlier ones are waited for, which are waited for in another order."""
    group, size, rank = resolve("test", dist.group.WORLD), dist.get_world_size(), dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randint(0, 256, (size, rows, 4096), device="cuda", generator=generator, dtype=torch.uint8)
        for rows in (2048, 3, 1500, 4000, 7)
    ]
    tokens = [symmetric.start([tensor[rank]], group, gather=True, apart=True) for tensor in tensors]
    for number in (3, 0, 4, 2, 1):
        (got,) = symmetric.wait(tokens[number], [tensors[number][rank]], group, gather=True)
        assert torch.equal(got, tensors[number].flatten(0, 1)), f"exchange {number}"


def chosen_by_default() -> None:
    """symm, where GPUs can write to each other."""
    x, weights, ids = seen(batch_of(4, 0), "gather")
    prepared = ep.prepare(x, weights, ids, num_experts=E, group=dist.group.WORLD)
    assert prepared.transport == "symm", prepared.transport


def disagreement() -> None:
    """The first call of its kind asks; every rank gets the error."""
    layer = Layer()
    batch = tuple(tensor[: 5 + dist.get_rank()] for tensor in batch_of(64, 0))
    try:
        layer.spread(batch, "gather")
    except ValueError as error:
        assert "T must be the same on every rank of the group, got 5 on rank 0, 6 on rank 1" in str(error), error
    else:
        raise AssertionError("no error")


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and check, in the order in which all ranks run them."""
    yield "compiled first", compiled_first
    yield "default transport", chosen_by_default
    for transport in TRANSPORTS:
        for scheme in (None, "fp8_block128"):
            yield f"equal to one GPU [{transport}-{scheme or 'bf16'}]", lambda t=transport, s=scheme: equal_to_one(t, s)
        yield f"gradients [{transport}]", lambda t=transport: gradients(t)
        yield f"kernels alone [{transport}]", lambda t=transport: kernels_alone(t)
        for way in ("eager", "compiled"):
            yield f"replays [{transport}-{way}]", lambda t=transport, w=way: replays(t, w == "compiled")
    for transport in ("gather", "symm"):
        yield f"reduce-overhead [{transport}]", lambda t=transport: reduce_overhead(t)
    for scheme in (None, "fp8_block128"):
        name = scheme or "bf16"
        yield f"large batch, equal to one GPU [{name}]", lambda s=scheme: equal_to_one("symm", s, (4096, LARGE))
        yield f"large batch, steps as a whole [{name}]", lambda s=scheme: steps_as_a_whole(s)
    for way in ("eager", "compiled"):
        yield f"large batch, replays [{way}]", lambda w=way: replays("symm", w == "compiled", LARGE)
    yield "large batch, gradients", lambda: gradients("symm", LARGE)
    yield "large batch, copies are few", copies_are_few
    yield "larger buffers", larger_buffers
    yield "exchanges of any size", exchanges_of_any_size
    yield "many under way", many_under_way
    yield "unequal tokens", disagreement


def run(checks: Iterator[tuple[str, Callable[[], None]]]) -> None:
    """All checks as one rank, a line of a file each."""
    parser = argparse.ArgumentParser()
    for name in ("size", "rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.cuda.set_device(options.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank,
        world_size=options.size, timeout=timedelta(seconds=60), device_id=torch.device("cuda", options.rank),
    )  # fmt: skip
    for name, check in checks:
        try:
            check()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        torch.compiler.reset()
        print(name, wrong or "passed", flush=True)
        with options.out.open("a") as out:
            print(json.dumps([name, wrong]), file=out)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(checks())
