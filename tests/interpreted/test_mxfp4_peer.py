"""The activation that a peer of the benchmarks hands to triton_kernels."""

import torch
import triton
import triton.language as tl

from benchmarks.mxfp4_peer import gated_silu


@triton.jit
def _activation_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, 2 * N)[None, :]
    tl.store(y_ptr + m * N + n, gated_silu(tl.load(x_ptr + m * 2 * N + column)))


def test_gate_and_up_are_columns_in_turn():
    x, y = 8 * torch.randn(16, 64), torch.full((16, 32), float("nan"))
    _activation_kernel[(1,)](x, y, M=16, N=32)
    gate, up = x.double()[:, 0::2], x.double()[:, 1::2]
    torch.testing.assert_close(y.double(), torch.nn.functional.silu(gate) * up, rtol=3e-6, atol=1e-6)
