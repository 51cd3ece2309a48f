"""The result of several ranks is that of one process, for every transport, dtype, number of tokens and routing."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from threading import Thread

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import agreement, ep
from moe_ops.groups import PerGroup
from tests.distributed.ranks import (
    CROSSING,
    ROUTINGS,
    TRANSPORTS,
    WIDE,
    Check,
    E,
    H,
    K,
    Layer,
    Ranks,
    integers,
    quantised,
    random,
    routed,
)

TOKENS = (0, 1, 3, 17)
#: By dtype; integers are fp32 whose sums are exact.
LAYERS: dict[str, tuple[Callable[[int], Layer], ...]] = {
    "fp32": (integers, random),
    "bf16": (partial(random, dtype=torch.bfloat16),),
    "fp8_block128": (quantised,),
}


def _cases(dtype: str, routings: tuple[str, ...], size: int) -> Iterator[tuple[Layer, str]]:
    """Layers for every number of tokens, and what they are."""
    for routing in routings:
        for tokens in TOKENS:
            for make in LAYERS[dtype]:
                yield routed(make(size * tokens), routing, size), f"{routing}, T = {tokens}"


def owned(layer: Layer, rank: int, size: int) -> Tensor:
    """The ids, -1 for those whose experts another rank holds."""
    block = layer.gate_up.shape[0] // size
    return torch.where(layer.ids.div(block, rounding_mode="floor") == rank, layer.ids, -1)


def roundings(layer: Layer, size: int) -> Tensor:
    """How far the sum of rounded parts may be from the rounded sum, for each element.

    Every part is rounded by at most u = 2^-8 of itself, and so are both sums. A token with one part alone has room for
    none of it: its part is the sum, and rounding it again changes nothing.
    """
    parts = torch.stack([layer.alone(owned(layer, rank, size)) for rank in range(size)]).double().abs()
    several = (parts > 0).any(-1).sum(0, keepdim=True).T > 1
    return torch.where(several, 2**-8 * (parts.sum(0) + 2 * layer.alone().double().abs()) * 1.01, 0)


def equal(transport: str, dtype: str, routings: tuple[str, ...], ranks: Ranks) -> None:
    for layer, what in _cases(dtype, routings, ranks.size):
        want, got = ranks.share(transport, layer.alone()), ranks.run(layer, transport)
        if layer.options.get("activation") == "relu":
            ranks.same(got, want, f"integers, {what}")
        elif dtype == "fp32":
            ranks.close(got, want, 1e-6, what)
        else:
            ranks.close(got, want, ranks.share(transport, roundings(layer, ranks.size)), what)


def local(dtype: str, ranks: Ranks) -> None:
    """Every rank has all experts, and a batch of its own: the same call without a group, to the bit."""
    for layer, what in _cases(dtype, ROUTINGS, ranks.size):
        own = {name: ranks.share("local", getattr(layer, name)) for name in ("x", "weights", "ids")}
        ranks.same(ranks.run(layer, "local"), layer._replace(**own).alone(), what)


def default(ranks: Ranks) -> None:
    """The choice where no transport is named."""
    layer = integers(ranks.size * 3)
    ranks.same(ranks.run(layer, None), ranks.share(None, layer.alone()), "no name")
    x, weights, ids = (ranks.share(None, tensor) for tensor in layer[:3])
    for chosen, options in (("gather", {}), ("all_to_all", {"rank_capacity": 3}), ("local", {"group": ranks.alone})):
        prepared = ep.prepare(x, weights, ids, **{"num_experts": E, "group": ranks.group, **options})
        ranks.expect(prepared.transport == chosen, f"{prepared.transport} for {options}")


def part_of_the_world(ranks: Ranks) -> None:
    """Groups of two ranks that are not neighbours, whose ranks in them are others than in the world."""
    groups = [ranks.new_group([rank, rank + ranks.size // 2]) for rank in range(ranks.size // 2)]
    own = copy.copy(ranks)
    own.rank, own.size, own.group = 2 * ranks.rank // ranks.size, 2, groups[ranks.rank % (ranks.size // 2)]
    for transport in CROSSING:
        layer = integers(2 * 3, seed=ranks.rank % (ranks.size // 2))
        ranks.same(own.run(layer, transport), own.share(transport, layer.alone()), transport)


def made_again(ranks: Ranks) -> None:
    """A group of the name of one that is no more, in the same store, where that one's only exchange is left."""
    for tokens in (3, 5):
        layer = integers(ranks.size * tokens)
        time.sleep(0.05 * ranks.rank)  # the first rank finds nothing newer of the others
        ranks.same(ranks.run(layer, "gather"), ranks.share(None, layer.alone()), f"T = {tokens}")
        agreement._counts = PerGroup(Counter)  # nobody remembers the group


def threads(ranks: Ranks) -> None:
    """Two of a rank, each with a group of its own: the one that waits keeps nobody from what another rank waits for."""
    groups, found = [ranks.new_group() for _ in range(2)], dict[int, Tensor]()
    layer = integers(ranks.size * 3)

    def work(place: int) -> None:
        time.sleep(0.3 * (place ^ (ranks.rank % 2)))  # either is first on some ranks
        found[place] = ranks.run(layer, "gather", group=groups[place])

    started = [Thread(target=work, args=(place,)) for place in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    ranks.expect(len(found) == 2, f"only {list(found)} came to an end")
    for place, got in found.items():
        ranks.same(got, ranks.share("gather", layer.alone()), f"thread {place}")


class Wire(TorchDispatchMode):
    """Bytes that every collective was given, and names of all that was called of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("_c10d_functional."):
            self.calls.append(name)
        if name.startswith("_c10d_functional.all"):
            sent = args[0] if isinstance(args[0], list) else [args[0]]
            self.sent.append(sum(tensor.nbytes for tensor in sent))
        return function(*args, **(kwargs or {}))


def wire(ranks: Ranks) -> None:
    """What crosses, in bytes: rows in bf16 or in the scheme's format with two fp32 scales, K weights and ids."""
    tokens, pairs, back = 5, 8 * K, 2
    for layer, width, row in (
        (random(ranks.size * tokens, torch.bfloat16), H, 2 * H),
        (quantised(ranks.size * tokens), WIDE, WIDE + 2 * 4),
    ):
        for transport, rows in (("gather", tokens), ("all_to_all", ranks.size * 2), ("replicated", 0)):
            capacity = {"rank_capacity": 2} if transport == "all_to_all" else {}
            with Wire() as seen:
                ranks.run(layer, transport, **capacity)
            returned = ranks.size * (2 if capacity else tokens) * width * back
            ranks.expect(
                (sum(seen.sent[:-1]), seen.sent[-1]) == (rows * (row + pairs), returned),
                f"{transport}, {layer.options}: {seen.sent} bytes",
            )


def halves(transport: str, ranks: Ranks) -> None:
    """Code of the user between the halves, a shared expert among it, that is added before the sum is rounded."""
    layer = integers(ranks.size * 5)
    x, weights, ids = (ranks.share(transport, tensor) for tensor in layer[:3])
    gate_up, down = (ranks.held(transport, tensor) for tensor in (layer.gate_up, layer.down))
    preparing = ep.prepare_start(x, weights, ids, num_experts=E, group=ranks.group_of(transport), transport=transport)
    shared = x * 2
    prepared = ep.prepare_wait(preparing)
    result = ep.experts(prepared, gate_up, down, **layer.options)
    finalizing = ep.finalize_start(result, prepared)
    shared = shared + 1
    want = ranks.share(transport, layer.alone())
    ranks.same(ep.finalize_wait(finalizing, shared), want + 2 * x + 1, "added in the second half")
    ranks.same(ep.finalize(result, prepared, shared), want + 2 * x + 1, "added in finalize")
    ranks.same(ep.finalize(result, prepared), want, "nothing added")


def rounded_once(ranks: Ranks) -> None:
    """256 of one rank and 1 of the others, and 1 added: in bf16, only a sum that is rounded at its end has the ones."""
    x = torch.zeros(3, H, dtype=torch.bfloat16)
    ids = torch.arange(0, E, E // ranks.size).repeat(3, 1)  # an expert of every rank
    one, want = torch.ones_like(x), torch.full_like(x, 256 + ranks.size)
    for transport in CROSSING:
        prepared = ep.prepare(x, torch.ones(ids.shape), ids, num_experts=E, group=ranks.group, transport=transport)
        result = torch.full_like(prepared.rows, 1 if ranks.rank else 256)
        ranks.same(ep.finalize(result, prepared, one), want, transport)


def written(ranks: Ranks) -> None:
    """What a layer of one rank or of several returns is the caller's to write to, as what one process returns."""
    for group, transport in product((ranks.group, ranks.alone), CROSSING):
        x, weights, ids, gate_up, down = integers(3)[:5]
        if group is ranks.group:
            gate_up, down = (ranks.held(transport, each) for each in (gate_up, down))
        x = x.requires_grad_()
        options = {"activation": "relu", "glu_layout": "none", "group": group, "transport": transport}
        out = moe_ops.fused_experts(x, gate_up, down, weights, ids, **options)
        want = out.detach() + 1
        out += 1
        ranks.same(out.detach(), want, f"{transport}, a group of {group.size()}")


CHECKS = {
    **{
        f"{transport}-{dtype}-{routing}": Check(partial(equal, transport, dtype, (routing,)))
        for transport in CROSSING
        for dtype in LAYERS
        for routing in ROUTINGS
    },
    **{
        f"{transport}-{dtype}-all_routings": Check(partial(equal, transport, dtype, ROUTINGS), (4,))
        for transport in CROSSING
        for dtype in LAYERS
    },
    **{f"local-{dtype}-all_routings": Check(partial(local, dtype)) for dtype in LAYERS},
    "default_transport": Check(default, (2, 4)),
    "part_of_the_world": Check(part_of_the_world, (4,)),
    "made_again": Check(made_again),
    "threads": Check(threads),
    "bytes_on_the_wire": Check(wire, (2, 4)),
    "rounded_once": Check(rounded_once, (2, 4)),
    "written": Check(written),
    **{f"halves-{transport}": Check(partial(halves, transport)) for transport in TRANSPORTS},
}
