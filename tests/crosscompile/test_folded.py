"""Products of e2m1 codes and rows of e4m3, in Gluon, compile for Hopper: no sum spills, nothing waits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moe_ops.kernels.triton import expert_mm, launch
from moe_ops.kernels.triton.folded_mm import _folded_mm_kernel
from moe_ops.kernels.triton.layer import fit
from tests.crosscompile.test_decoded_fp8 import MANY, product
from tests.crosscompile.test_packed import halves_in_order, note_launch
from tests.crosscompile.test_promoted import compile_promoted


@pytest.mark.parametrize(("layout", "experts"), [("concat", 8), ("interleaved", 512), ("none", 8), (None, 8)], ids=str)
def test_compiles(layout: str | None, experts: int) -> None:
    """Both groups of warps take decoded numbers from shared memory; few of their values, none of their sums, leave
    registers.
    """
    kernel = compile_promoted(product("mxfp4_a8", layout, bias=layout == "concat"), experts=experts)
    assert set(re.findall(r"QGMMA\S+", kernel.sass)) == {"QGMMA.64x128x32.F32.E4M3.E5M2"}
    steps = [body for body in kernel.loops if sum("QGMMA" in line[1] for line in body) == 8]
    for body in sorted(steps, key=len)[:2]:
        assert len(body) < 270
        assert sum(line[1].startswith(("LDL", "STL")) for line in body) <= (9 if experts == 512 else 6)
    decoding = re.findall(r"PRMT R\d+, R\d+(?:\.reuse)?, 0x7362, R\d+", kernel.sass)
    assert len(decoding) == 2 * 2 * 16, "once where all scales are near, and once in turns"


@pytest.mark.parametrize("sizes", [(1184, 320), (1216, 320)], ids=["one_by_one", "in_pairs"])
def test_compiles_for_scales_that_no_wide_load_takes(sizes: tuple[int, int]) -> None:
    compile_promoted(product("mxfp4_a8", "concat", sizes=sizes))


@pytest.mark.parametrize("swapped", [False, True], ids=["gate_first", "up_first"])
def test_the_gate_comes_first_wherever_it_is(swapped: bool) -> None:
    """The descriptor begins with the half of the lower address; scales are looked up in the order of the halves."""
    halves = halves_in_order(compile_promoted(product("mxfp4_a8", "concat", bias=True), swapped=swapped))
    assert halves == (["1", "0"] if swapped else ["0", "1"]) * (len(halves) // 2)


def test_fp32_is_left_to_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory has no room for its tiles."""
    monkeypatch.setattr(launch, "hopper_with_gluon", lambda device: True)
    for layout, dtype, taken in (
        (None, torch.float32, False),
        (None, torch.float16, True),
        ("none", torch.float32, True),
    ):
        mm = replace(product("mxfp4_a8", layout), out_dtype=dtype)
        assert mm.specialises(fit(MANY, mm)) == taken and mm.specialises(MANY) == taken


@pytest.mark.parametrize("layout", ["concat", "interleaved", None], ids=str)
def test_every_argument_of_a_launch_has_its_place(layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = note_launch(monkeypatch)
    mm = product("mxfp4_a8", layout, bias=True)
    mm = replace(mm, rows_scale=torch.ones(400, mm.in_features // 128))
    rows, extents = torch.empty(400, mm.in_features, dtype=torch.float8_e4m3fn), torch.tensor([100, 400]).int()
    out, out_scale = expert_mm.grouped_mm(rows, mm, extents, MANY, num_rows=400, pdl=True)
    assert list(launched) == _folded_mm_kernel.arg_names
    scale = mm.decoding["groups"]
    same = {"a_scale": mm.rows_scale, "w_scale": scale.tensor, "bias": mm.bias, "extents": extents}
    for name, value in (same | {"out_scale": out_scale}).items():
        assert (launched[name].data_ptr(), launched[name].shape) == (value.data_ptr(), value.shape), name
    bases = {"a_desc": rows, "w_desc": mm.weight, "out_desc": out}
    assert all(launched[name].base.data_ptr() == tensor.data_ptr() for name, tensor in bases.items())
    assert (out.dtype, out_scale.numel() > 0) == ((torch.float8_e4m3fn, True) if layout else (torch.bfloat16, False))
    sizes = {"num_rows": 400, "E": 2, "N": mm.out_features, "K": mm.in_features, "GLU": mm.glu, "SWAPPED": False}
    sizes |= {"up_scale_offset": scale.up_offset, "PDL": True, "BATCHED": False}
    assert {name: launched[name] for name in sizes} == sizes
