"""The kernels of gradients compile for every generation, with its matrix and copy instructions and without spills."""

from __future__ import annotations

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.kernels.triton import wgrad
from moe_ops.kernels.triton.collect import _collect_kernel, _expert_sums_kernel
from moe_ops.kernels.triton.launch import for_gluon, ragged_rows
from moe_ops.kernels.triton.rows import _glu_rows_backward_kernel
from moe_ops.kernels.triton.topk_backward import _topk_backward_kernel
from moe_ops.kernels.triton.wgrad import _wgrad_kernel, stages_of
from moe_ops.kernels.triton.wgrad_mm import GATHERERS, GRADS, HEIGHT, LEFT, ROWS, STEP, _wgrad_mm_kernel
from tests.crosscompile.compiling import CAPABILITIES, Compiled, compile_kernel
from tests.crosscompile.test_packed import descriptor

E, H, I = 128, 2048, 768


def compile_wgrad(block: tuple[int, int, int], *, capability: int = 90, descriptors: bool = True) -> Compiled:
    """gate|up of Qwen3-30B-A3B."""
    block_n, block_k, rows = block
    columns = block_k // 2 if block_k > 128 else block_k
    signature = {"grad": "*bf16:16", "x": "*bf16:16", "offsets": "*i32:16", "out": "*bf16:16"}
    constexprs = {"E": E, "N": 2 * I, "K": H, "STRIDES": (2 * I * H, H), "BLOCK": (*block, columns, E)}
    sizes = {"grad_desc": (1, 1, rows, block_n), "x_desc": (1, 1, rows, block_k), "out_desc": (1, block_n, columns)}
    for name, size in sizes.items():
        if descriptors:
            signature[name] = f"tensordesc<bf16[{', '.join(map(str, size))}]>"
        else:
            constexprs[name] = None
    stages = 4 if descriptors else 3
    return compile_kernel(_wgrad_kernel, signature, constexprs, capability=capability, num_warps=8, num_stages=stages)


@pytest.mark.parametrize("block", [(128, 256, 64), (128, 128, 64)], ids=str)
def test_weight_gradient_on_hopper(block: tuple[int, int, int]) -> None:
    """Operands by tensor map into wgmma, transposed there; a product is issued before the last one is waited for."""
    kernel = compile_wgrad(block)
    assert kernel.stack == 0 and kernel.shared <= 227 * 1024
    assert "HGMMA" in kernel.sass and "UTMALDG" in kernel.sass and "UTMASTG" in kernel.sass
    assert kernel.ptx_count(r"wgmma\.wait_group\.sync\.aligned 1") > 0
    assert kernel.ptx_count(r"cp\.async\.c[ag]") == 0


def compile_wgrad_mm(columns: int, gathered: str | None) -> Compiled:
    """gate|up of Qwen3-30B-A3B; `gathered`: which factor has tokens."""
    grad, x, out = (torch.empty(*sizes, dtype=torch.bfloat16) for sizes in ((256, 2 * I), (256, H), (2, 2 * I, H)))
    parts = (LEFT.value, columns - LEFT.value)
    made = {
        "grad_desc": ragged_rows(grad, STEP.value, HEIGHT.value),
        **{
            f"{side}_desc": ragged_rows(x, STEP.value, part)
            for side, part in zip(("left", "right"), parts, strict=True)
        },
        **{
            f"out_{side}": TensorDescriptor(out, list(out.shape), list(out.stride()), [1, HEIGHT.value, part])
            for side, part in zip(("left", "right"), parts, strict=True)
        },
    }
    signature = {name: descriptor(for_gluon(one)) for name, one in made.items()} | {"offsets": "*i32:16"}
    stages = stages_of(columns, 2)
    assert stages == {192: 7, 256: 6}[columns]
    constexprs = {"E": E, "N": 2 * I, "K": H, "STAGES": stages}
    if gathered is None:
        constexprs |= {"tokens": None, "row_to_pair": None, "GATHERED": 0, "OF_TOKENS": None}
    else:
        signature |= {"tokens": "*bf16:16", "row_to_pair": "*i32:16"}
        width = H if gathered == "rows" else 2 * I
        constexprs |= {"GATHERED": {"rows": ROWS, "grads": GRADS}[gathered].value, "OF_TOKENS": (8, width, width)}
    return compile_kernel(_wgrad_mm_kernel, signature, constexprs, num_warps=4)


@pytest.mark.parametrize(
    ("columns", "gathered"), [(192, "rows"), *((256, gathered) for gathered in (None, "rows", "grads"))], ids=str
)
def test_weight_gradient_by_groups_of_warps(columns: int, gathered: str | None) -> None:
    """Three groups multiply without waiting for one another's products, both factors transposed; nothing spills. Tokens
    are copied 16 bytes a thread by warps that do not wait for them; who multiplies fences them from the tensor core.
    """
    kernel = compile_wgrad_mm(columns, gathered)
    assert kernel.stack == 0 and kernel.shared <= 227 * 1024
    assert kernel.loops and not kernel.serialised and not kernel.overwritten
    assert "gdesc" in kernel.sass and ".tnspA.tnspB" in kernel.sass and "UTMASTG" in kernel.sass
    copies = {None: 0, "rows": 8 * columns // 64, "grads": 8 * 3}[gathered] * GATHERERS.value
    assert (
        kernel.ptx_count(r"cp\.async\.cg\.shared\.global .*, 0x10") == kernel.ptx_count(r"cp\.async\.c[ag]") == copies
    )
    assert kernel.ptx_count(r"cp\.async\.mbarrier\.arrive\.noinc") == (GATHERERS.value if copies else 0)
    assert kernel.ptx_count(r"cp\.async\.wait") == 0
    fenced = r"mbarrier\.try_wait(?:(?!wgmma)[\s\S])*fence\.proxy\.async(?:(?!mbarrier)[\s\S])*?wgmma\.mma_async"
    assert kernel.ptx_count(fenced) == (3 if copies else 0)


@pytest.mark.parametrize(
    ("rows", "columns", "hopper", "wanted"),
    [(16, 2880, True, True), (512, 2880, True, False), (16, 768, True, True), (1024, 768, True, True),
     (16, 768, False, False)],
    ids=["few_and_wide", "many_and_wide", "few_and_narrow", "many_and_narrow", "elsewhere"],
)  # fmt: skip
def test_which_weight_gradients_gather(
    rows: int, columns: int, hopper: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an expert; where their number is not known yet only narrow experts'."""
    monkeypatch.setattr(wgrad, "hopper_with_gluon", lambda device: hopper)
    tokens = torch.empty(4, 64, dtype=torch.bfloat16)
    assert wgrad.gathers(tokens, rows * E, E, columns) == wanted
    known = wgrad.gathers_any_number(tokens.device, tokens.dtype, columns)
    assert known == (hopper and columns <= 1536) and not wgrad.gathers_any_number(tokens.device, torch.float32, columns)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_weight_gradient_by_pointers(capability: int) -> None:
    kernel = compile_wgrad((128, 128, 64), capability=capability, descriptors=False)
    assert kernel.stack == 0 and kernel.loads_16_bytes


@pytest.mark.parametrize("interleaved", [False, True], ids=["concat", "interleaved"])
def test_activation_gradient(interleaved: bool) -> None:
    signature = dict.fromkeys(("grad", "gate", "up", "grad_gate", "grad_up", "value"), "*bf16:16")
    signature |= dict.fromkeys(("weights", "of_weights"), "*fp32:16") | {"R": "i32", "alpha": "fp32", "limit": "fp32"}
    signature |= dict.fromkeys(("row_to_pair", "pair_to_row", "offsets"), "*i32:16")
    constexprs = {
        "dots": None, "E": E, "I": I, "STRIDE": 2 * I, "ACTIVATION": "silu", "GATED": True,
        "INTERLEAVED": interleaved, "ROWS": 8, "COLUMNS": 256,
    }  # fmt: skip
    kernel = compile_kernel(_glu_rows_backward_kernel, signature, constexprs, num_warps=8)
    assert kernel.stack == 0 and kernel.loads_16_bytes and kernel.stores_16_bytes


def test_rows_to_tokens_and_back() -> None:
    signature = dict.fromkeys(("rows", "x", "grad", "grad_rows", "out"), "*bf16:16") | {"pair_to_row": "*i32:16"}
    signature |= {"H": "i32:16", "stride_x": "i32:16", "stride_grad": "i32:16"}
    constexprs = {"weights": None, "dots": None, "TOP_K": 8, "BLOCK_K": 8, "BLOCK_H": 1024, "COPY": True}
    kernel = compile_kernel(_collect_kernel, signature, constexprs, num_warps=4)
    assert kernel.stack == 0 and kernel.loads_16_bytes and kernel.stores_16_bytes


def test_sums_and_router() -> None:
    signature = {"rows": "*bf16:16", "offsets": "*i32:16", "row_to_pair": "*i32:16", "weights": "*fp32:16"}
    signature |= {"out": "*fp32:16", "stride": "i32:16"}
    constexprs = {"N": H, "TOP_K": 8, "ROWS": 64, "COLUMNS": 64}
    assert compile_kernel(_expert_sums_kernel, signature, constexprs, num_warps=4).stack == 0
    signature = {"grad": "*fp32:16", "logits": "*bf16:16", "ids": "*i32:16", "out": "*bf16:16"}
    signature |= {"stride_t": "i32:16", "stride_e": "i32", "renorm_eps": "fp32", "scale": "fp32"}
    constexprs = {
        "E": E, "TOP_K": 8, "SCORE": "softmax", "AFTER": "none", "RENORMALIZE": True, "BLOCK_K": 8, "BLOCK_E": E,
    }  # fmt: skip
    assert compile_kernel(_topk_backward_kernel, signature, constexprs, num_warps=1).stack == 0
