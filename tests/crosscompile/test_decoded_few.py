"""Few rows times decoded weights in Gluon compile for Hopper: no warp waits for another, nothing spills in a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.backends.triton_plans import PACKED, tile_for
from moe_ops.kernels.triton import launch
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.kernels.triton.decoded_few_mm import _decoded_few_mm_kernel
from moe_ops.kernels.triton.launch import FEW_PROGRAMS, FEW_REGISTERS, ExpertMM
from moe_ops.plans import bucket
from tests.crosscompile.compiling import Compiled, compile_kernel
from tests.crosscompile.test_decoded import LAYOUTS
from tests.crosscompile.test_packed import E, H, I, K, common_arguments, descriptor, product

pytestmark = pytest.mark.usefixtures("on_hopper")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)


def compile_few(scheme: str, layout: str | None, tokens: int = 16, known: bool = True, **options: Any) -> Compiled:
    sizes = (2 * I, H) if layout else (H, I)
    tile = tile_for(scheme, E, bucket(tokens * K), *sizes, "NVIDIA H200", 90, "up")
    return compile_product(*product(scheme, tile, layout=layout, **options), known=known)


def compile_product(mm: ExpertMM, tile: MMConfig, rows: torch.Tensor, known: bool = True) -> Compiled:
    assert mm.takes_few(tile) and mm.specialises(tile)
    out, _ = mm.allocate((256,), rows)
    made = mm.prepare_decoded_few(rows, out, tile)
    arguments = common_arguments(mm) | {
        "a_desc": descriptor(made.a_desc), "w_desc": descriptor(made.w_desc), "out_desc": descriptor(made.out_desc),
    }  # fmt: skip
    del arguments["up_offset"]
    constants = {
        **{"E": E, "N": mm.out_features, "K": mm.in_features, "STRIDES": made.strides, "BLOCK": made.block},
        **{"GLU": mm.glu, "ACTIVATION": mm.activation, "SWAPPED": False, "SCHEME": mm.scheme, "BATCHED": False},
        **{"PDL": True, "KNOWN": known},
    }
    kernel = compile_kernel(
        _decoded_few_mm_kernel,
        {name: kind for name, kind in arguments.items() if kind is not None},
        {**constants, **{name: None for name, kind in arguments.items() if kind is None}},
        num_warps=tile.num_warps,
        launch_pdl=True,
        maxnreg=FEW_REGISTERS,
    )
    assert FEW_PROGRAMS * 8 * 32 * kernel.registers <= 65536 and FEW_PROGRAMS * (kernel.shared + 1024) <= 228 * 1024
    (loop,) = [body for body in kernel.loops if sum(name.startswith("HMMA") for _, name, _ in body) > 2][:1]
    assert not [name for _, name, _ in loop if name.startswith(("LDL", "STL", "STS", "HGMMA", "SHFL"))]
    return kernel


@LAYOUTS
@pytest.mark.parametrize("scheme", sorted(PACKED))
def test_compiles(scheme: str, layout: str | None) -> None:
    compile_few(scheme, layout)


@LAYOUTS
def test_compiles_with_a_bias(layout: str | None) -> None:
    compile_few("mxfp4", layout, bias=torch.empty(2, 2 * I if layout else H, dtype=torch.bfloat16))


@LAYOUTS
def test_compiles_behind_a_kernel_that_counts_rows(layout: str | None) -> None:
    compile_few("mxfp4", layout, known=False)
