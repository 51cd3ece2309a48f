"""Kernels of few tokens with quantised weights compile for Hopper: loads of 16 bytes a thread, and nothing spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from meta.operands import Operand
from meta.schemes import SCHEMES
from moe_ops.backends.triton_plans import DECODED, small_tiles
from moe_ops.kernels.triton import act_quant, small
from moe_ops.kernels.triton.launch import ExpertMM
from moe_ops.plans import LayerKey
from tests.crosscompile.compiling import Compiled, compile_kernel

TYPES = {torch.uint8: "u8", torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.bfloat16: "bf16"}
TYPES |= {torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
#: E, K, H, I, the activation and how its halves are stored.
MODELS: dict[str, tuple[int, int, int, int, str, str]] = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, "silu", "concat"),
    "gpt-oss-120b": (128, 4, 2880, 2880, "swiglu_oai", "interleaved"),
    "deepseek-v3": (256, 8, 7168, 2048, "silu", "concat"),
}


def kind(value: Any) -> str | None:
    """The type of an argument as the launcher would find it; None of a constant."""
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}:16"
    if isinstance(value, float):
        return "fp32"
    return None if value is None else "i32:16" if value % 16 == 0 else "i32"


def weight(scheme: str, E: int, n: int, k: int) -> Operand:
    """Of no memory: the layout of a few rows, for as many as there are; codes of four bits have zero points if they may
    have any.
    """
    few = 8
    stored, scales = SCHEMES[scheme].quantize(torch.zeros(1, few, k))
    if scheme == "int4_w4a16":
        scales = (*scales, scales[0].to(torch.uint8))

    def of_all(part: torch.Tensor) -> torch.Tensor:
        rows = n if part.shape[1] == few else part.shape[1]
        return torch.empty(E, rows, part.shape[2], dtype=part.dtype, device="meta")

    return Operand(of_all(stored), SCHEMES[scheme], tuple(map(of_all, scales)))


def compile_small(
    scheme: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tokens: int = 1,
    top_k: int | None = None,
    mapped: bool = False,
) -> list[Compiled]:
    """Both kernels of a layer, with the tiles that a plan has for so many tokens."""
    E, K, H, I, activation, layout = MODELS[model]
    K = K if top_k is None else top_k
    tiles = small_tiles(LayerKey(scheme, "grouped", E, K, H, I, True), tokens)
    bias = [
        torch.empty(E, n, dtype=torch.bfloat16, device="meta") if activation == "swiglu_oai" else None
        for n in (2 * I, H)
    ]
    glu = {"glu_layout": layout, "activation": activation, "alpha": 1.702, "limit": 7.0}
    form = SCHEMES[scheme].rows
    rows_scale = None if form is None else torch.empty(tokens, int(form.scale_width(H)), device="meta")
    quantised = {"rows_scale": rows_scale, "quantize_output": form is not None}
    up = ExpertMM(weight(scheme, E, 2 * I, H), torch.bfloat16, bias=bias[0], **glu, **quantised)
    down = ExpertMM(weight(scheme, E, H, I), torch.bfloat16, bias=bias[1])
    found = []
    monkeypatch.setattr(small, "launch", lambda kernel, grid, *args, **named: found.append((kernel, args, named)))
    monkeypatch.setattr(small, "quantize_rows", lambda rows, form, pdl: act_quant.room(rows.shape, form, rows.device))
    expert_map = torch.empty(2 * E, dtype=torch.int64, device="meta") if mapped else None
    load = torch.empty(1 + E, dtype=torch.int64, device="meta")
    options = {"expert_map": expert_map, "weight_on_input": False, "pdl": True, "load": load}
    x, weights, ids = (
        torch.empty(tokens, n, dtype=dtype, device="meta")
        for n, dtype in (
            (H, torch.bfloat16 if form is None else form.dtype),
            (K, torch.float32),
            (K, torch.int64 if mapped else torch.int32),
        )
    )
    small.small_experts(x, weights, ids, up, down, tiles, **options)
    made = []
    for kernel, args, named in found:
        given = dict(zip(kernel.arg_names, args, strict=True))
        constant = {kernel.arg_names[at] for at in kernel.constexprs}
        signature = {name: kind(value) for name, value in given.items() if name not in constant and value is not None}
        constants = {name: value for name, value in given.items() if name not in signature}
        made.append(compile_kernel(kernel, signature, constants, **named))
    return made


#: Every scheme, and of the other models one.
CASES = [(scheme, "qwen3-30b-a3b") for scheme in sorted({*DECODED, "int8_channel"})]
CASES += [("mxfp4", "gpt-oss-120b"), ("fp8_w8a16", "deepseek-v3"), ("mxfp4_a8", "gpt-oss-120b")]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("scheme", "model"), CASES)
def test_compiles(scheme: str, model: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in compile_small(scheme, model, monkeypatch, tokens=tokens):
        assert kernel.stack == 0, f"{kernel.name}: {kernel.stack} bytes of spills, {kernel.registers} registers"
        assert kernel.loads_16_bytes and not kernel.voted, kernel.name
        fused, others, of_words = (
            len(re.findall(rf"^ .*\b{name}\b", kernel.sass, re.M)) for name in ("FFMA", "FMUL", "IDP")
        )
        if scheme == "int8_channel":
            assert of_words >= 16 > fused, f"{kernel.name}: {of_words} instructions make four products, {fused} one"
            continue
        most = 3 if SCHEMES[scheme].rows is None else 2  # a group's sum has two scales
        assert fused > most * others, f"{kernel.name}: {fused} products are fused, {others} not"
        if SCHEMES[scheme].code.name == "e4m3":  # converted, not put together from bits
            bits = len(re.findall(r"^ .*\bLOP3\b", kernel.sass, re.M))
            assert bits < fused, f"{kernel.name}: {bits} instructions of bits for {fused} products"


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int4_w4a16", "int8_w8a16"])
def test_threads_load_the_rows_that_they_multiply(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From threads that load the first product's rows in another order these come through shared memory, in rounds."""
    _, down = compile_small(scheme, "qwen3-30b-a3b", monkeypatch)
    barriers = len(re.findall(r"\bBAR\.SYNC", down.sass))
    assert barriers <= 6, f"{barriers} barriers"


@pytest.mark.parametrize("top_k", [32, 64])
def test_many_experts_of_a_token_and_a_map_compile(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column a program, and ids of 64 bits: Triton lost the layout of a `where` of the experts."""
    assert len(compile_small("fp8_w8a16", "qwen3-30b-a3b", monkeypatch, top_k=top_k, mapped=True)) == 2
