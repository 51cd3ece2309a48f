"""Activations in blocks with scales: how near they are, and what is no number."""

from __future__ import annotations

import pytest
import torch

from meta.arch import ARCHS
from meta.blocks import BLOCKS, MX_BLOCK, NV_BLOCK, blocks_on
from meta.cost import roofline_us
from meta.dims import LayerProblem
from meta.schemes import SCHEMES

#: Half of a unit in the last place of the element's code, of numbers in its range.
HALF_UNIT = {"mxfp8": 2.0**-4, "nvfp4": 2.0**-2}
#: In the largest of a block: below it steps are no smaller. An e4m3 scale is up to 1/16 off.
FLOOR = {"mxfp8": 2.0**-13, "nvfp4": 1.07 / 6}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("K", [32, 300])
@pytest.mark.parametrize("name", BLOCKS)
def test_elements_are_rounded_to_nearest(name: str, K: int) -> None:
    form, rows = BLOCKS[name], torch.randn(2, 3, K) * torch.logspace(-6, 6, 3)[:, None]
    rows[0, 0] = 0.0
    stored, scales = form.quantize(rows)
    assert stored.shape == (2, 3, K // form.pack) and stored.dtype == form.dtype
    assert scales[0].shape == (2, 3, form.scale_width(K)) and scales[0].dtype == form.scale_dtype
    back = form.dequantize(stored, scales)
    size = MX_BLOCK if name == "mxfp8" else NV_BLOCK
    largest = torch.nn.functional.pad(rows, (0, -K % size)).unflatten(-1, (-1, size)).abs().amax(dim=-1)
    floor = FLOOR[name] * largest.repeat_interleave(size, dim=-1)[..., :K]
    assert ((back - rows).abs() <= HALF_UNIT[name] * rows.abs().maximum(floor)).all()


def test_a_power_of_two_is_the_least_that_cuts_nothing_off() -> None:
    rows = torch.zeros(4, 32)
    rows[:, 5] = torch.tensor([448.0, 449.0, 896.0, 1.75 * 2.0**-120])
    stored, (scale,) = BLOCKS["mxfp8"].quantize(rows)
    assert scale.flatten().tolist() == [127, 128, 128, 1]
    assert stored[:3, 5].tolist() == [448.0, 224.0, 448.0]


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_not_finite_is_nan_in_its_own_block_or_row(name: str) -> None:
    form, rows = BLOCKS[name], torch.randn(3, 64)
    plain = form.dequantize(*form.quantize(rows))
    rows[0, 40], rows[1, 3] = NAN, -INF
    back = form.dequantize(*form.quantize(rows))
    assert back[0, 40:].isnan().any() and back[1, :32].isnan().all() and torch.equal(back[2], plain[2])
    assert back.isnan().any(dim=1).tolist() == [True, True, False]


def test_only_tensor_cores_that_scale_blocks_take_them() -> None:
    for arch in ("cpu", "meta", "cuda", "sm80", "sm90", "sm110", "sm120"):
        assert blocks_on(SCHEMES["mxfp8"], arch) is None
    assert blocks_on(SCHEMES["mxfp8"], "sm100") is blocks_on(SCHEMES["mxfp4_a8"], "sm103") is BLOCKS["mxfp8"]
    assert blocks_on(SCHEMES["mxfp4"], "sm100") is None, "its activations are not quantised"


def test_the_roof_of_a_device_is_that_of_its_products() -> None:
    def compute_us(scheme: str, gpu: str) -> float:
        names = {"format": "grouped", "activation": "silu", "glu_layout": "concat", "weight_layout": "NK"}
        flags = dict.fromkeys(("has_bias", "has_expert_map", "weight_on_input"), False)
        sizes = {"T": 2**20, "E": 1, "K": 1, "H": 4096, "I": 4096, "C": None}
        return roofline_us(LayerProblem(torch.bfloat16, "cuda", "", scheme, **sizes, **names, **flags), ARCHS[gpu])

    assert compute_us("nvfp4", "H100") == compute_us("bf16", "H100")
    assert compute_us("bf16", "B200") / compute_us("nvfp4", "B200") == pytest.approx(4.0)
