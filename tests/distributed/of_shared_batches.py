"""``ep_implementation="moe_ops"`` over four processes, two of which share a batch: what one process gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

import moe_ops.integrations.transformers  # noqa: F401  (registers the implementation)
from tests.distributed.doors import Checks
from tests.distributed.of_transformers import NAMES, VOCABULARY, alone


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its experts over all ranks, of which those of a pair hold one batch."""
    experts = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    batches = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)
    return apply_expert_parallelism(model, experts["ep"], batches["tp"], plan, "moe_ops")


def tokens(pair: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + pair)
    return torch.randint(0, VOCABULARY, (1, length), generator=generator)


def logits(length: int, rank: int, folder: Path) -> None:
    """Of an even and of an odd number of tokens, eager; and in one graph, of the odd one, which has all of its code."""
    ids = tokens(rank // 2, length)
    model = spread(alone(NAMES[0]))
    with torch.no_grad():
        found = [model(ids).logits]
        if length % 2:
            found.append(torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits)
        wanted = alone(NAMES[0])(ids).logits
    for got in found:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def gradients(rank: int, folder: Path) -> None:
    """Of the tokens' embeddings: those of their batch; of the experts: those of both batches, each counted once."""
    model, one = spread(alone(NAMES[0])).train(), alone(NAMES[0]).train()
    model(tokens(rank // 2, 7)).logits.square().sum().backward()
    own = alone(NAMES[0]).train()
    own(tokens(rank // 2, 7)).logits.square().sum().backward()
    for pair in (0, 1):
        one(tokens(pair, 7)).logits.square().sum().backward()
    _close(model.model.embed_tokens.weight.grad, own.model.embed_tokens.weight.grad)
    got, want = (each.model.layers[0].mlp.experts.down_proj.grad for each in (model, one))
    _close(got.to_local(), want.chunk(4)[rank])


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


CHECKS: Checks = {
    "logits_of_8_tokens": partial(logits, 8),
    "logits_of_7_tokens": partial(logits, 7),
    "gradients_of_7_tokens": gradients,
}
