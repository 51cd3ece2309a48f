"""The GPU that measures: its ceilings, measured hot before anything else, and its clock and power while it is busy."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from benchmarks.timing import Run, Thunk, in_turn, warm
from meta.arch import TYPICAL, Arch

SIDE = 8192  # of the square products
READ_BYTES = 8 * 2**30
CEILING_SECONDS = 2.0  # of warming: power is averaged over a second
CEILING_ROUNDS = 15
METHOD = (
    f"medians of {CEILING_ROUNDS} rounds in this process, hot, of torch's {SIDE}^3 products, and of the faster of two "
    f"torch.sum over {READ_BYTES / 2**30:.0f} GiB"
)


def ceilings() -> dict[str, float] | None:
    """Dense bf16 and fp8 TFLOP/s and GB/s read, as they are with a hot GPU; None without one. No fp8, no such entry."""
    if not torch.cuda.is_available():
        return None
    flops, rates = 2 * SIDE**3, {}
    products = {"bf16_tflops": _bf16_product(), "fp8_tflops": _fp8_product()}
    for name, us in _hot({name: call for name, call in products.items() if call is not None}).items():
        rates[name] = flops / us / 1e6
    rates["read_gbps"] = READ_BYTES / min(_hot(_reads()).values()) / 1e3
    torch.cuda.empty_cache()
    return {name: round(rate, 1) for name, rate in rates.items()}


def _hot(calls: dict[str, Thunk]) -> dict[str, float]:
    """Median microseconds by name; each warmed and timed on its own, as it would be the only thing that runs."""
    times = {}
    for name, call in calls.items():
        alone = {name: Run(call)}
        warm(alone, CEILING_SECONDS)
        times[name] = statistics.median(in_turn(alone, CEILING_ROUNDS)[name])
    return times


def _bf16_product() -> Thunk:
    left, right = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    return lambda: left @ right


def _reads() -> dict[str, Thunk]:
    buffer = torch.randn(READ_BYTES // 4, device="cuda")
    return {"whole": buffer.sum, "rows": lambda: buffer.view(-1, 2**16).sum(1)}


def _fp8_product() -> Thunk | None:
    left, right = (torch.randn(SIDE, SIDE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        product()
    except (RuntimeError, ValueError):
        return None
    return product


def measured_arch(rates: dict[str, float] | None) -> Arch | None:
    """What a roofline of this run is drawn with (meta/cost.py reads the rates alone); None without ceilings."""
    if rates is None:
        return None
    bf16 = rates["bf16_tflops"]
    peaks = {"bf16": bf16, "fp16": bf16, "tf32": bf16 / 2, "fp8": rates.get("fp8_tflops", bf16)}
    tbps = rates["read_gbps"] / 1e3
    return replace(TYPICAL, name="measured", peak_tflops=peaks, measured_tflops=None, measured_tbps=tbps)


def state_while(runs: Collection[Run]) -> dict[str, float | None]:
    """SM clock (MHz) and power (W) while ``runs`` keep the GPU busy; None each where they cannot be read."""
    if not torch.cuda.is_available():
        return {"sm_mhz": None, "watts": None}
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_clock_and_power)
        while not reading.done():
            for run in runs:
                run()
            torch.cuda.synchronize()
    clock, power = reading.result()
    return {"sm_mhz": clock, "watts": power}


def _clock_and_power() -> tuple[float | None, float | None]:
    time.sleep(0.02)  # the queue fills meanwhile
    try:
        return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
    except Exception:  # without pynvml, or where it does not know the device
        return _nvidia_smi()


def _nvidia_smi() -> tuple[float | None, float | None]:
    device = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
    query = ["nvidia-smi", device, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        clock, power = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split(",")
        return float(clock), float(power)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, None
