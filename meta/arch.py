"""What is known about devices: DENSE peak throughput and bandwidth by product, features by compute capability. No other
file holds such a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Arch:
    """One device row.

    Attributes:
        name: product name used by :func:`lookup`.
        sm: ``"sm90"``-like compute capability, or ``"cpu"``.
        peak_tflops: dense peak by operand kind (``"bf16"``, ``"fp16"``, ``"tf32"``, ``"fp32"``, ``"fp8"``, ``"fp4"``),
            TFLOP/s.
        dram_tbps: datasheet memory bandwidth, TB/s.
        shared_kib: shared memory usable by one block, KiB.
        multiprocessors: how many there are.
        measured_tflops: highest bf16 rate seen from a dense product, TFLOP/s, None when never measured.
        measured_tbps: highest copy rate seen, TB/s, None when never measured.
    """

    name: str
    sm: str
    peak_tflops: dict[str, float]
    dram_tbps: float
    shared_kib: int
    multiprocessors: int
    measured_tflops: float | None = None
    measured_tbps: float | None = None

    def ceiling_tflops(self, kind: str) -> float:
        """Rate a roofline should use for operands of ``kind``: the measured bf16 ceiling scaled to ``kind``, or the
        peak.
        """
        peak = self.peak_tflops[kind]
        if self.measured_tflops is None:
            return peak
        return peak * self.measured_tflops / self.peak_tflops["bf16"]

    def ceiling_tbps(self) -> float:
        """Bandwidth a roofline should use: measured when known, else the datasheet's."""
        return self.dram_tbps if self.measured_tbps is None else self.measured_tbps


_HOPPER_PEAKS = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0, "fp8": 1979.0}

ARCHS: dict[str, Arch] = {
    row.name: row
    for row in (
        Arch("A100", "sm80", {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}, 2.039, 163, 108),
        Arch("H100", "sm90", _HOPPER_PEAKS, 3.35, 227, 132),
        # Ceilings: the best dense bf16 product and the best copy seen on this product.
        Arch("H200", "sm90", _HOPPER_PEAKS, 4.8, 227, 132, measured_tflops=790.0, measured_tbps=4.3),
        Arch(
            "B200",
            "sm100",
            {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 80.0, "fp8": 4500.0, "fp4": 9000.0},
            8.0,
            227,
            148,
        ),
        # Nominal figures of one server socket: the order of magnitude is all that is used.
        Arch("cpu", "cpu", {"bf16": 2.0, "fp16": 1.0, "tf32": 1.0, "fp32": 1.0, "fp8": 1.0}, 0.1, 0, 0),
    )
}


#: The device that launch heuristics have in mind which do not look at the one at hand.
TYPICAL = ARCHS["H200"]

#: The first compute capability that has a feature: what the Triton kernels need at all, products in fp8, bulk loads by
#: descriptor, launches that overlap the kernel before them, torch's grouped product.
HOPPER = 90  # whose tensor cores groups of four warps use together (wgmma); later ones have others
FIRST_CAPABILITY = {"kernels": 80, "fp8": 89, "tma": 90, "dependent_launch": 90}
#: Capabilities whose tensor cores multiply by the scales of blocks along K (tcgen05). Later ones have others for that,
#: or are not known to Triton 3.6.
SCALED_BLOCKS = range(100, 110)


def scales_blocks(arch: str) -> bool:
    """Whether a device of this architecture (as :func:`device_arch` names it) is of :data:`SCALED_BLOCKS`."""
    return arch.startswith("sm") and int(arch.removeprefix("sm")) in SCALED_BLOCKS


def lacks(arch: str, feature: str) -> str | None:
    """Why a device of this architecture (as :func:`device_arch` names it) does not have ``feature``, or None.

    Of a device without a compute capability, such as a fake one where there is no GPU, nothing is said.
    """
    first = FIRST_CAPABILITY[feature]
    if not arch.startswith("sm") or int(arch.removeprefix("sm")) >= first:
        return None
    return f"needs compute capability {first // 10}.{first % 10} or later, got {arch}"


def lookup(name: str) -> Arch:
    """Row whose name occurs in ``name`` (for example ``torch.cuda.get_device_name()``), case-insensitively.

    Raises:
        ValueError: no row matches.
    """
    if (row := _named(name)) is None:
        raise ValueError(f"lookup: name must contain one of {sorted(ARCHS)}, got {name!r}. Add a row to meta/arch.py.")
    return row


def lookup_gpu(name: str) -> Arch:
    """The same for launch heuristics, which must go on: :data:`TYPICAL` where no row of a GPU matches."""
    row = _named(name)
    return TYPICAL if row is None or not row.multiprocessors else row


def _named(name: str) -> Arch | None:
    return next((row for row in ARCHS.values() if row.name.lower() in name.lower()), None)


def device_arch(device: torch.device) -> str:
    """``"sm90"``-like capability of a CUDA device, or the device type (``"cpu"``, ``"meta"``, ``"cuda"`` without a
    GPU).
    """
    if device.type != "cuda":
        return device.type
    return _cuda_arch(device.index)


@cache
def _cuda_arch(index: int | None) -> str:
    if not torch.cuda.is_available():
        return "cuda"
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"
