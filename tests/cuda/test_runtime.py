"""Warm calls on a GPU: the bits of cold ones, whatever happened to weights, streams and processes in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.ops import LAUNCHERS

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]
E, K, H, I = 16, 4, 256, 128
TOKENS = (1, 2, 8, 33, 200, 1500)


def weights(scheme: str | None = None, device: str = "cuda") -> dict[str, Any]:
    made = {}
    for name, (n, k) in {"gate_up": (2 * I, H), "down": (H, I)}.items():
        weight = (torch.randn(E, n, k, device=device) * k**-0.5).bfloat16()
        if scheme is None:
            made[f"{name}_proj"] = weight
        else:
            made[f"{name}_proj"], *made[f"{name}_scales"] = moe_ops.quantize_weight(weight, scheme=scheme)
    return made if scheme is None else {**made, "scheme": scheme}


def inputs(T: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, H, device=device).bfloat16(), torch.randn(T, E, device=device)


def cold(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A first call, which leaves what is learnt alone."""
    launcher = LAUNCHERS["fused_moe"]
    known, launcher._warm = launcher._warm, {}
    try:
        return moe_ops.fused_moe(*args, **kwargs)
    finally:
        launcher._warm = known


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("format", ["grouped", "batched"])
@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
def test_warm_is_cold(scheme: str | None, format: str, T: int, reasons: list[str | None]):
    layers = [weights(scheme) for _ in range(2)]
    for turn in range(6):
        options = {"top_k": K, "format": format, **layers[turn % 2]}
        x, logits = inputs(T)
        warm = moe_ops.fused_moe(x, logits, **options)
        assert torch.equal(warm, cold(x, logits, **options))
    assert reasons == [None]


CHANGES = {
    "swapped": lambda made: made["gate_up_proj"].copy_(torch.randn_like(made["gate_up_proj"])),
    "moved": lambda made: made.update(gate_up_proj=made["gate_up_proj"].clone()),
    "resized": lambda made: made.update(
        gate_up_proj=torch.cat([made["gate_up_proj"]] * 2), down_proj=torch.cat([made["down_proj"]] * 2)
    ),
    "other_strides": lambda made: made.update(
        gate_up_proj=made["gate_up_proj"].transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "misaligned": lambda made: made.update(
        gate_up_proj=torch.cat([made["gate_up_proj"].flatten()] * 2)[1:][: E * 2 * I * H].view(E, 2 * I, H)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("T", [1, 8, 200])
def test_weights_change(T: int, change: str):
    made = weights()
    for _ in range(4):
        moe_ops.fused_moe(*inputs(T), **made, top_k=K)
    CHANGES[change](made)
    for _ in range(4):
        x, _ = inputs(T)
        logits = torch.randn(T, made["gate_up_proj"].shape[0], device="cuda")
        assert torch.equal(moe_ops.fused_moe(x, logits, **made, top_k=K), cold(x, logits, **made, top_k=K))


@pytest.mark.parametrize("T", [1, 8, 200])
def test_freed_weights_whose_address_others_take(T: int):
    addresses = set()
    for _ in range(6):
        made = weights()
        addresses.add(made["gate_up_proj"].data_ptr())
        x, logits = inputs(T)
        assert torch.equal(moe_ops.fused_moe(x, logits, **made, top_k=K), cold(x, logits, **made, top_k=K))
        del made
    assert len(addresses) < 6


def test_two_threads_on_two_streams():
    made = weights()
    cases = [inputs(T) for T in TOKENS]
    expected = [moe_ops.fused_moe(*case, **made, top_k=K) for case in cases]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(start: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(300):
                number = (start + turn) % len(cases)
                if not torch.equal(moe_ops.fused_moe(*cases[number], **made, top_k=K), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_does_not_grow():
    made = weights()
    cases = [inputs(T) for T in (8, 200)]
    for turn in range(1000):
        moe_ops.fused_moe(*cases[turn % 2], **made, top_k=K)
        if turn == 10:
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_cuda_graph_trees_alternate_two_batch_sizes():
    """1,000 replays, no memory growth: nothing of a recording's pool outlives it."""
    made = weights()
    block = torch.compile(
        lambda x, logits: moe_ops.fused_moe(x, logits, **made, top_k=K), mode="reduce-overhead", dynamic=False
    )
    cases = [inputs(T) for T in (8, 200)]
    with torch.no_grad(), torch._inductor.config.patch("triton.cudagraph_or_error", True):
        expected = [moe_ops.fused_moe(*case, **made, top_k=K) for case in cases]
        for turn in range(1000):
            torch.compiler.cudagraph_mark_step_begin()
            found = block(*cases[turn % 2])
            if turn % 100 < 4:
                assert torch.equal(found, expected[turn % 2])
            del found
            if turn == 20:
                before = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == before


def test_launch_hooks_are_told():
    """A profiler that asks Triton for every launch gets them from warm calls too."""
    import triton

    made, told = weights(), []
    for _ in range(3):
        moe_ops.fused_moe(*inputs(64), **made, top_k=K)
    hook = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        moe_ops.fused_moe(*inputs(64), **made, top_k=K)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert told.count("_expert_mm_kernel") == 2


PROCESS = """
import json, sys, torch, moe_ops
from torch._dynamo.utils import counters
torch.manual_seed(0)
made = [torch.randn(16, 256, 256, device="cuda").bfloat16() / 16, torch.randn(16, 256, 128, device="cuda").bfloat16()]
block = torch.compile(lambda x, logits: moe_ops.fused_moe(x * 2, logits, *made, top_k=4), fullgraph=True)
same = []
with torch.no_grad():
    for T in (8, 8, 8, 40, 40, 40):
        x, logits = torch.randn(T, 256, device="cuda").bfloat16(), torch.randn(T, 16, device="cuda")
        same.append(torch.equal(block(x, logits), moe_ops.fused_moe(x * 2, logits, *made, top_k=4)))
print(json.dumps({"same": same, "hits": counters["inductor"]["fxgraph_cache_hit"]}))
"""


def test_a_second_process_with_a_warm_cache(tmp_path: Path):
    """Emitted code holds nothing of the process that wrote it."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(answers[0]["same"]) and all(answers[1]["same"])
    assert answers[0]["hits"] == 0 and answers[1]["hits"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("T", [1, 8, 200])
def test_two_devices(T: int):
    """Whichever is current, a call runs where its tensors are."""
    made = {device: weights(device=device) for device in ("cuda:0", "cuda:1")}
    for turn in range(8):
        device = f"cuda:{turn % 2}"
        x, logits = inputs(T, device)
        warm = moe_ops.fused_moe(x, logits, **made[device], top_k=K)
        assert warm.device == x.device and torch.cuda.current_device() == 0
        assert torch.equal(warm, cold(x, logits, **made[device], top_k=K))
