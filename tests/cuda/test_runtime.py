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
from moe_ops import runtime
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


def chain(x: torch.Tensor, logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """Two layers, each of a site of its own, with work of Inductor's around them."""
    for top_k in (K, K - 1):
        x = moe_ops.fused_moe(x * 2, logits, top_k=top_k, **options)
    return x


@pytest.mark.parametrize("scheme", [None, "fp8_block128"], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_sites_of_one_graph(mode: str, scheme: str | None, launched: list[int], reasons: list[str | None]):
    """Of more than one number of tokens: the bits of eager calls, by records alone from the third on."""
    torch.compiler.reset()
    made = weights(scheme)
    compiled = torch.compile(lambda x, logits: chain(x, logits, **made), fullgraph=True, mode=mode)
    with torch.no_grad():
        for turn in range(16):
            x, logits = inputs((8, 33, 200, 9)[turn % 4])
            for tensor in (x, logits):
                torch._dynamo.mark_dynamic(tensor, 0)
            expected = chain(x, logits, **made)
            torch.compiler.cudagraph_mark_step_begin()
            launched.clear()
            assert torch.equal(compiled(x, logits), expected)
            assert turn < 12 or not launched
    assert reasons and set(reasons) == {None}


@pytest.mark.parametrize("T", [1, 8, 200])
def test_sites_forget(T: int, launched: list[int]):
    torch.compiler.reset()
    made = weights()
    compiled = torch.compile(lambda x, logits: chain(x, logits, **made), fullgraph=True, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(4):
                x, logits = inputs(T)
                launched.clear()
                found = compiled(x, logits)
                many = len(launched)
                assert torch.equal(found, chain(x, logits, **made))
            assert not many
            LAUNCHERS["fused_moe"].forget()
        launched.clear()
        compiled(*inputs(T))
    assert len(launched) == 2


@pytest.mark.parametrize("T", [1, 8, 200])
def test_misaligned_weights_of_a_compiled_graph(T: int, launched: list[int]):
    """A record of aligned ones is not fired for them: loads of 16 bytes would fail."""
    torch.compiler.reset()
    made = weights()
    compiled = torch.compile(lambda x, logits, **made: chain(x, logits, **made), fullgraph=True, dynamic=False)
    with torch.no_grad():
        for offset in (0, 0, 0, 0, 1, 1, 1, 0):
            x, logits = inputs(T)
            moved = {name: torch.cat([one.flatten()] * 2)[offset:][: one.numel()] for name, one in made.items()}
            moved = {name: one.view(made[name].shape) for name, one in moved.items()}
            if offset == 1:  # others, as the second copy begins one element later
                assert moved["down_proj"].data_ptr() % 16
            expected = chain(x, logits, **moved)
            launched.clear()
            torch.testing.assert_close(compiled(x, logits, **moved), expected, rtol=0.05, atol=0.05)
    assert not launched


@pytest.mark.parametrize("T", [1, 8, 200])
def test_halves_apart_of_a_compiled_graph(T: int):
    """Kernels are given the distance between halves: others are at another one."""
    torch.compiler.reset()
    made = weights()
    gate, up = (half.contiguous() for half in made.pop("gate_up_proj").chunk(2, dim=1))
    memory = torch.empty(4, *gate.shape, dtype=gate.dtype, device="cuda")
    options = {"glu_layout": "separate", "down_proj": made["down_proj"]}
    compiled = torch.compile(
        lambda x, logits, gate, up: chain(x, logits, gate_up_proj=gate, up_proj=up, **options),
        fullgraph=True,
        dynamic=False,
    )
    with torch.no_grad():
        x, logits = inputs(T)
        expected = chain(x, logits, gate_up_proj=gate, up_proj=up, **options)
        for first, second in ((0, 1), (0, 1), (0, 1), (0, 2), (0, 3), (1, 0), (2, 3), (0, 1)) * 2:
            memory.fill_(float("nan"))
            memory[first], memory[second] = gate, up
            torch.testing.assert_close(
                compiled(x, logits, memory[first], memory[second]), expected, rtol=0.05, atol=0.05
            )


def test_results_are_aligned():
    """Inductor's kernels load 16 bytes at a time from them."""
    memory = torch.empty(16, dtype=torch.int32, device="cuda")
    for first in (0, 4, 1):
        launcher = runtime.Launcher(lambda x: x, lambda call, made=memory[first:]: (lambda x: made, None), ())
        site = launcher.site((runtime.TENSOR,), ())
        if first == 1:
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
                site((), memory)
        else:
            assert site((), memory).data_ptr() == memory[first:].data_ptr()


def test_launch_hooks_are_told_of_compiled_code():
    import triton

    torch.compiler.reset()
    made, told = weights(), []
    compiled = torch.compile(lambda x, logits: chain(x, logits, **made), fullgraph=True, dynamic=False)
    hook = lambda metadata: told.append(metadata.get()["name"])  # noqa: E731
    with torch.no_grad():
        for _ in range(4):
            compiled(*inputs(64))
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            compiled(*inputs(64))
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert told.count("_expert_mm_kernel") >= 2


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_of_compiled_code():
    """Each has a graph, and sites, of its own."""
    torch.compiler.reset()
    made = {device: weights(device=device) for device in ("cuda:0", "cuda:1")}
    compiled = torch.compile(lambda x, logits, **made: chain(x, logits, **made), fullgraph=True, dynamic=False)
    with torch.no_grad():
        for turn in range(8):
            device = f"cuda:{turn % 2}"
            x, logits = inputs(8, device)
            found = compiled(x, logits, **made[device])
            assert found.device == x.device and torch.cuda.current_device() == 0
            assert torch.equal(found, chain(x, logits, **made[device]))
