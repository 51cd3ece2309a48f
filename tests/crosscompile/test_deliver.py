"""Sums that go to other GPUs, for GPUs that are not there."""

from __future__ import annotations

import pytest

from moe_ops.kernels.triton.combine import register_limit
from moe_ops.kernels.triton.deliver import _deliver_kernel, _meet_kernel, _sum_kernel
from tests.crosscompile.compiling import CAPABILITIES, compile_kernel


@pytest.mark.parametrize("say", [True, False], ids=["say", "hear"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_meeting_orders_what_stands_around_it(capability: int, say: bool) -> None:
    signature = {"peers": "*i64:16", "at": "i32"}
    kernel = compile_kernel(
        _meet_kernel, signature, {"RANK": 1, "SIZE": 8, "SAY": say}, capability=capability, num_warps=1
    )
    assert kernel.ptx_count(r"atom\.global\.sys\.release\.exch") == (7 if say else 0)
    assert kernel.ptx_count(r"atom\.global\.acquire\.sys\.cas") == 7
    assert kernel.stack == 0


@pytest.mark.parametrize("top_k", [1, 8])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_move_16_bytes(capability: int, top_k: int) -> None:
    pairs = {"weights_ptr": "*fp32:16", "pair_to_row_ptr": "*i32:16"} if top_k > 1 else {}
    signature = {"rows_ptr": "*bf16:16", **pairs, "peers": "*i64:16", "R": "i32", "H": "i32:16", "stride_r": "i32:16"}
    signature |= {"tokens": "i32", "first": "i32", "number": "i32", "at": "i32:16"}
    constants = {"RANK": 1, "SIZE": 2, "TOP_K": top_k, "BLOCK_H": 1024}
    constants |= {} if pairs else {"weights_ptr": None, "pair_to_row_ptr": None}
    limit = {"num_warps": 4, "maxnreg": register_limit(top_k, True)}
    kernel = compile_kernel(_deliver_kernel, signature, constants, capability=capability, **limit)
    assert kernel.stack == 0 and kernel.loads_16_bytes and kernel.stores_16_bytes


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_parts_are_added_16_bytes_at_a_time(capability: int) -> None:
    signature = {"parts_ptr": "*bf16:16", "out_ptr": "*bf16:16", "T": "i32", "H": "i32:16"}
    kernel = compile_kernel(_sum_kernel, signature, {"SIZE": 2, "BLOCK": 2048}, capability=capability, num_warps=8)
    assert kernel.stack == 0 and kernel.loads_16_bytes and kernel.stores_16_bytes
