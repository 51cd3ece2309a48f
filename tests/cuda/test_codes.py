"""Codes of weights as instructions decode them, on a GPU: every one is the number that it stands for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from meta.formats import CODES
from moe_ops.kernels.triton.codes import CODE_NUMBERS, codes_of_word, decode_wide
from tests.crosscompile.test_codes import E2M1_TIMES, words_of

pytestmark = pytest.mark.cuda
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
    ("code", "zero"), [(code, zero) for code in ("e2m1", *ZEROS) for zero in (None, *ZEROS.get(code, ()))], ids=str
)
def test_every_code_in_every_place_of_a_word(code: str, zero: int | None):
    words, expected = words_of(code)
    if zero is not None:
        expected += CODES[code].zero - zero
    stored = words.where(words < 2**31, words - 2**32).to(torch.int32).cuda()
    zeros = None if zero is None else torch.full(stored.shape, zero, dtype=torch.int8, device="cuda")
    out = torch.empty(expected.numel(), device="cuda")
    _decode_kernel[(1,)](stored, zeros, out, CODE_NUMBERS[code], stored.numel())
    assert torch.equal(out.cpu(), expected.flatten() * (E2M1_TIMES if code == "e2m1" else 1.0))
