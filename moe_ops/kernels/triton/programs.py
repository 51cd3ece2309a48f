"""How many programs of a kernel a multiprocessor holds beside each other, and what is done for more of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.tile_loads import CONCAT
from moe_ops.kernels.triton.util import INTERPRETED, cdiv


def most_registers(
    config: MMConfig, glu: int, *, scaled: bool, decoded: bool, in_two: bool, in_turns: bool = False
) -> int | None:
    """Registers that a thread may have, None for as many as the compiler likes.

    Programs of four warps fit beside each other three times with 168, four times with 128. With two accumulators of 16
    rows the compiler, left alone, takes 170 to 174; told not to, it spills nothing (us on an H200, fp8_block128,
    Qwen3-30B-A3B, T = 8: 80.6 and 74.5). Beside decoded weights it takes up to 167 and needs 128 (nvfp4,
    gpt-oss-120b's dimensions, T = 256: 770 and 711; int4_w4a16, T = 16: 221 and 207). Of eight warps and 128 rows two
    programs take turns at decoding and multiplying, and need 128, too. Both parts of fp16 rows need more (`in_two`);
    16 rows beside scales that may have turns of their own 168.
    """
    sums = config.block_m * config.block_n
    if decoded and config.num_warps == 8:
        return 128 if sums <= 128 * 128 else None
    if config.num_warps != 4:
        return None
    if decoded:
        most = 168 if in_turns else 128
        return most if sums <= 16 * 128 and not in_two else None
    two = glu == CONCAT.value and scaled
    return 168 if two and sums == 16 * 256 else None


INTERPRETED_PROGRAMS = 3  # so that under the interpreter, too, a program walks several tiles


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _fitting(device: int, registers: int, shared: int, warps: int) -> int:
    """Programs of a kernel that all multiprocessors of a GPU hold at once."""
    gpu = torch.cuda.get_device_properties(device)
    by_registers = gpu.regs_per_multiprocessor // (warps * cdiv(32 * registers, 256) * 256)
    by_shared = gpu.shared_memory_per_multiprocessor // (shared + 1024)
    by_threads = gpu.max_threads_per_multi_processor // (32 * warps)
    return gpu.multi_processor_count * max(1, min(by_registers, by_shared, by_threads))


_FITTING: dict[Any, int] = {}


def side_by_side(kernel: Any, key: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """How many programs of `kernel` run at once: what its registers and its shared memory leave room for.

    Known once the kernel is compiled; remembered under `key`, which names its constants, dtypes and device.
    """
    found = _FITTING.get(key)
    if found is None:
        device = arguments[0].device
        if INTERPRETED or device.type != "cuda":
            return INTERPRETED_PROGRAMS
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
        _ = compiled.run  # loads the machine code: before that, the number of its registers is not known
        registers = getattr(compiled, "n_regs", 255)  # of code that does not load, as the launch will say
        found = _FITTING[key] = _fitting(device.index, registers, compiled.metadata.shared, options["num_warps"])
    return found
