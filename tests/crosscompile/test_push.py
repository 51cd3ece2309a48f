"""The exchange's kernel for GPUs that are not there: 16 bytes a thread, and flags that order what was written."""

from __future__ import annotations

import pytest

from moe_ops.kernels.triton.push import BLOCK, MOST, PROGRAMS, _exchange_kernel, flag_words
from tests.crosscompile.compiling import CAPABILITIES, compile_kernel


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("gather", [True, False], ids=["gather", "apart"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_moves_16_bytes_between_a_release_and_an_acquire(capability: int, gather: bool, size: int) -> None:
    signature = {"peers": "*i64:16", "calls": "*i32:16", "half": "i32:16", "slot": "i32:16"}
    for number in range(MOST):
        signature |= {f"src{number}": "*i32:16", f"out{number}": "*i32:16", f"n{number}": "i32:16"}
    constants = {"RANK": 1, "SIZE": size, "FLAGS": flag_words(size), "GATHER": gather, "COUNT": 1, "BLOCK": BLOCK}
    constants |= {"STEP": PROGRAMS * BLOCK}
    kernel = compile_kernel(_exchange_kernel, signature, constants, capability=capability, num_warps=16)
    assert kernel.stack == 0 and kernel.loads_16_bytes and kernel.stores_16_bytes
    assert kernel.ptx_count(r"atom\.global\.sys\.release\.exch") == size - 1
    assert kernel.ptx_count(r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire") == size - 1
