"""Whole models that train on a GPU: losses of steps as eager torch does them, and a whole step in CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.corpus.families import build, tokens
from tests.passes.loss_curves import curve, row

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    ("family", "program"),
    [
        *((family, program) for family in ("qwen3_moe", "gpt_oss") for program in ("autocast", "lora", "accumulation")),
        ("mixtral", "frozen_experts"),
        ("olmoe", "checkpointing"),
    ],
)
def test_losses_of_ten_steps(family: str, program: str) -> None:
    if program == "lora":
        pytest.importorskip("peft")
    case = curve(family, program, "moe_ops", 10, "cuda")
    assert case.good, row(case)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_whole_step_under_reduce_overhead(family: str) -> None:
    """Forward, backward and AdamW of batches that are routed differently, each against a plain step of a copy."""
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=2).cuda().train().requires_grad_(True)
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="moe_ops", mode="reduce-overhead", fullgraph=True)
    steps = [(compiled, model), (plain, plain)]
    optimizers = [torch.optim.AdamW(own.parameters(), lr=1e-3, fused=True) for _, own in steps]
    losses: list[list[float]] = [[], []]
    for seed in range(6):
        ids = tokens(2, 32, seed=seed).cuda()
        for (run, _), optimizer, found in zip(steps, optimizers, losses, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert counters["moe_ops"]["fused"] == 2 and counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    ids = tokens(2, 32, seed=6).cuda()
    torch.compiler.cudagraph_mark_step_begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert sum(event.name == "cudaGraphLaunch" for event in seen.events()) == 2  # forward, backward
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-4)
