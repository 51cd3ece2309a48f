"""Instructions that decode the codes of a word: every code, in every place, is the number that it stands for."""

from __future__ import annotations

import pytest
import torch

from meta.formats import CODES
from moe_ops.kernels.triton.codes import CODE_NUMBERS, E2M1_FACTOR, E2M1_UNIT, _instructions, _wide_instructions
from tests.crosscompile.ptx import run

#: What e2m1 is multiplied with.
E2M1_TIMES = 1 / (E2M1_FACTOR.value * E2M1_UNIT.value)


def words_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [words] that have every code in every place, beside any in the others, and fp32 [words, codes]."""
    bits = 4 if name in ("e2m1", "int4") else 8
    count, places = 1 << bits, 32 // bits
    stored = torch.randint(0, count, (places, count, places), generator=torch.Generator().manual_seed(0))
    for place in range(places):
        stored[place, :, place] = torch.arange(count)
    stored = stored.flatten(0, 1)
    words = (stored << (bits * torch.arange(places))).sum(-1)
    as_bytes = words.to(torch.uint32).view(torch.uint8)
    return words, CODES[name].decode(as_bytes.view(CODES[name].dtype)).float().reshape(-1, places)


def decoded(text: str, words: torch.Tensor, places: int, dtype: torch.dtype) -> torch.Tensor:
    """[words, codes] of what instructions write to their first operands, fp32."""
    made = []
    for word in words.tolist():
        registers = run(text, {f"${places}": word})
        made.append([registers[f"${place}"] for place in range(places)])
    of_bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    return torch.tensor(made).to(of_bits).view(dtype).float()


@pytest.mark.parametrize("name", ["e2m1", "int4", "int8"])
def test_to_fp32(name: str) -> None:
    words, expected = words_of(name)
    got = decoded(_wide_instructions(CODE_NUMBERS[name]), words, expected.shape[1], torch.float32)
    assert torch.equal(got, expected * (E2M1_TIMES if name == "e2m1" else 1.0))


@pytest.mark.parametrize(
    ("name", "bare", "times", "more"),
    [
        ("e2m1", False, E2M1_TIMES, 0.0),
        ("int4", False, 1.0, 136.0),
        ("int8", False, 1.0, 0.0),
        ("e4m3", False, 1.0, 0.0),
        ("e4m3", True, 2.0**-120, 0.0),
    ],
    ids=["e2m1", "int4", "int8", "e4m3", "e4m3_bare"],
)
def test_to_bf16(name: str, bare: bool, times: float, more: float) -> None:
    words, expected = words_of(name)
    got = decoded(_instructions(CODE_NUMBERS[name], bare), words, expected.shape[1], torch.bfloat16)
    assert torch.equal(got.nan_to_num(1e9), (expected * times + more).nan_to_num(1e9))
