"""Gradients of tokens, routing weights, experts and biases are those of one process."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import moe_ops
from moe_ops import ep
from tests.distributed.equal import Wire
from tests.distributed.ranks import CROSSING, Check, E, H, I, Layer, Ranks, random, routed

#: Sums over tokens and ranks in another order, times the largest element.
WITHIN = 2e-6


def biased(tokens: int) -> Layer:
    layer, made = random(tokens), torch.Generator().manual_seed(2)
    biases = {"gate_up_bias": (E, 2 * I), "down_bias": (E, H)}
    return layer._replace(of_experts={name: torch.randn(shape, generator=made) for name, shape in biases.items()})


def wanted(layer: Layer, loss: Tensor) -> dict[str, Tensor]:
    """Gradients in one process, by name."""
    leaves = {**layer._asdict(), **layer.of_experts}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items() if _is_float(leaf)}
    of_experts = {name: leaves.pop(name) for name in layer.of_experts}
    (layer._replace(**leaves, of_experts=of_experts).alone() * loss).sum().backward()
    return {name: leaf.grad for name, leaf in {**leaves, **of_experts}.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def gradients(transport: str, compiled: bool, ranks: Ranks) -> None:
    """Of ``replicated`` every rank has the same loss; else each the part of its tokens.

    Inductor compiles one of the backwards, which differ in collectives alone; it takes ten times as long.
    """
    torch.compiler.reset()
    for tokens, routing in (
        ((5, "uniform"),) if compiled else ((5, "uniform"), (5, "holes"), (4, "one_rank"), (0, "uniform"))
    ):
        layer = routed(biased(ranks.size * tokens), routing, ranks.size)
        loss = torch.linspace(-1, 1, layer.x.numel()).view_as(layer.x)
        grads, of_tokens = wanted(layer, loss), ("x", "weights")
        parts = {name: ranks.share if name in of_tokens else ranks.held for name in grads}
        own = {**layer._asdict(), **layer.of_experts}
        own = {name: part(transport, own[name]).clone().requires_grad_() for name, part in parts.items()}
        ids, loss = ranks.share(transport, layer.ids), ranks.share(transport, loss)

        def run(own: dict[str, Tensor], ids: Tensor) -> Tensor:
            order = ("x", "gate_up", "down", "weights")
            biases = {name: leaf for name, leaf in own.items() if name not in order}
            return moe_ops.fused_experts(
                *(own[name] for name in order), ids, group=ranks.group, transport=transport, **biases
            )

        backend = "inductor" if transport == "all_to_all" else "aot_eager"
        called = ranks.compiled(run, dynamic=True, backend=backend) if compiled else run
        (called(own, ids) * loss).sum().backward()
        for name, leaf in own.items():
            ranks.close(leaf.grad, parts[name](transport, grads[name]), WITHIN, f"{name}, {routing}, T = {tokens}")


def halves(transport: str, ranks: Ranks) -> None:
    """Through the halves, a shared expert between them, that is added in finalize."""
    layer = random(ranks.size * 5)
    loss = torch.linspace(-1, 1, layer.x.numel()).view_as(layer.x)
    leaf = layer.x.clone().requires_grad_()
    ((layer._replace(x=leaf).alone() + leaf.square()) * loss).sum().backward()
    x, weights, ids, loss = (ranks.share(transport, each) for each in (layer.x, layer.weights, layer.ids, loss))
    x = x.clone().requires_grad_()
    preparing = ep.prepare_start(x, weights, ids, num_experts=E, group=ranks.group, transport=transport)
    added = x.square()
    prepared = ep.prepare_wait(preparing)
    result = ep.experts(prepared, *(ranks.held(transport, each) for each in (layer.gate_up, layer.down)))
    out = ep.finalize_wait(ep.finalize_start(result, prepared), added)
    (out * loss).sum().backward()
    ranks.close(x.grad, ranks.share(transport, leaf.grad), WITHIN, "x")


def of_a_sum(ranks: Ranks) -> None:
    """Its gradients are one number in memory, whatever their shape; of one column, and of no tokens, too."""
    for transport, tokens in product(CROSSING, (0, 2)):
        layer = random(ranks.size * tokens, width=1)
        layer = layer._replace(weights=layer.weights[:, :1], ids=layer.ids[:, :1])
        grads, own = wanted(layer, torch.ones_like(layer.x)), {}
        for name in ("x", "weights"):
            own[name] = ranks.share(transport, getattr(layer, name)).clone().requires_grad_()
        with Wire() as seen:
            held = [ranks.held(transport, each) for each in (layer.gate_up, layer.down)]
            options = {"group": ranks.group, "transport": transport}
            ids = ranks.share(transport, layer.ids)
            moe_ops.fused_experts(own["x"], *held, own["weights"], ids, **options).sum().backward()
        for name, leaf in own.items():
            want = ranks.share(transport, grads[name])
            ranks.close(leaf.grad, want, WITHIN, f"{name}, {transport}, T = {tokens}")
        ranks.expect(bool(seen.calls) == bool(tokens), f"{transport}, T = {tokens}: {seen.calls}")


def of_a_sum_compiled(ranks: Ranks) -> None:
    """The strides of its gradients are not those that a graph was captured with."""
    torch.compiler.reset()
    x, weights, ids = (each[:0, :columns].clone() for each, columns in zip(random(1)[:3], (H, 1, 1), strict=True))
    x.requires_grad_(), weights.requires_grad_()
    held = [ranks.held(None, each) for each in random(0)[3:5]]
    call = partial(moe_ops.fused_experts, group=ranks.group, transport="replicated")
    ranks.compiled(call, backend="aot_eager")(x, *held, weights, ids).sum().backward()
    ranks.expect((x.grad.shape, weights.grad.shape) == ((0, H), (0, 1)), "gradients of no tokens")


def dropped(ranks: Ranks) -> None:
    """A row that was dropped has no gradient, and nothing of it reaches the experts."""
    layer = routed(random(ranks.size * 4), "one_rank", ranks.size)
    kept = layer.ids.clone()
    for rows in kept.tensor_split(ranks.size):
        rows[2:] = -1
    grads = wanted(layer._replace(ids=kept), torch.ones_like(layer.x))
    x, gate_up = ranks.share(None, layer.x).clone(), ranks.held(None, layer.gate_up).clone()
    x.requires_grad_(), gate_up.requires_grad_()
    weights, ids = ranks.share(None, layer.weights), ranks.share(None, layer.ids)
    down = ranks.held(None, layer.down)
    moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group, rank_capacity=2).sum().backward()
    ranks.close(x.grad, ranks.share(None, grads["x"]), WITHIN, "x")
    ranks.close(gate_up.grad, ranks.held(None, grads["gate_up"]), WITHIN, "gate_up")


CHECKS = {
    **{
        f"gradients-{transport}-{'compiled' if compiled else 'eager'}": Check(
            partial(gradients, transport, compiled), (2,) if compiled else (2, 4)
        )
        for transport in CROSSING
        for compiled in (False, True)
    },
    **{f"gradients-{transport}-halves": Check(partial(halves, transport)) for transport in CROSSING},
    "gradients-of_a_sum-eager": Check(of_a_sum),
    "gradients-of_a_sum-compiled": Check(of_a_sum_compiled),
    "gradients-all_to_all-dropped": Check(dropped, (2, 4)),
}
