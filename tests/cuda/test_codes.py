"""Codes of weights as instructions decode them, on a GPU: every one is the number that it stands for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moe_ops.kernels.triton.codes import CODE_NUMBERS, codes_of_word, decode_wide

pytestmark = pytest.mark.cuda
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WIDTH = {"e2m1": 4, "int4": 4, "int8": 8}
ZEROS = {"int4": (0, 7, 8, 15), "int8": (-128, -1, 0, 127)}


@triton.jit
def _decode_kernel(words, zeros, out, CODE: tl.constexpr, COUNT: tl.constexpr):
    PER_WORD: tl.constexpr = codes_of_word(CODE)
    word = tl.arange(0, COUNT)[None, :]
    zero = None
    if zeros is not None:
        zero = tl.load(zeros + word)
    numbers = decode_wide(tl.load(words + word), zero, CODE).reshape(1, COUNT * PER_WORD)
    tl.store(out + tl.arange(0, COUNT * PER_WORD)[None, :], numbers)


@pytest.mark.parametrize(
    ("code", "zero"), [(code, zero) for code in WIDTH for zero in (None, *ZEROS.get(code, ()))], ids=str
)
def test_every_code_in_every_place_of_a_word(code: str, zero: int | None):
    width, count = WIDTH[code], 1 << WIDTH[code]
    # The place at hand has one code after another, the others have anything.
    stored = torch.randint(0, count, (32 // width, count, 32 // width), generator=torch.Generator().manual_seed(0))
    for place in range(32 // width):
        stored[place, :, place] = torch.arange(count)
    words = (stored << (width * torch.arange(32 // width))).sum(-1).flatten()
    words = (words & 0xFFFFFFFF).to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32).cuda()
    if code == "e2m1":
        expected = torch.tensor([*E2M1, *(-x for x in E2M1)])[stored.flatten()] * 2.0**-126
    elif code == "int4":
        expected = (stored.flatten() - (8 if zero is None else zero)).float()
    else:
        expected = (((stored.flatten() + 128) % 256) - 128 - (zero or 0)).float()
    zeros = None
    if zero is not None:
        zeros = torch.full((words.numel(),), zero, dtype=torch.int8, device="cuda")
    out = torch.empty(expected.numel(), device="cuda")
    _decode_kernel[(1,)](words, zeros, out, CODE_NUMBERS[code], words.numel())
    assert torch.equal(out.cpu(), expected)
