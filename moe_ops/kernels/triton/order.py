"""The order of columns in which rows lie for a product with weights of a few bits.

The tensor core gives each of four neighbouring threads columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of every 16. The sum does
not care for the order of columns, so that of both operands is one in which a thread's are side by side in the weight's
row: the q-th of four runs of codes, the halves of a word as neighbours. Weights are decoded into that order; rows get
it in the tile, or, where an expert has many, from the kernel that writes them.

An order is (columns, codes of a word): every so many columns are in it by themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_order(tile, COLUMNS: tl.constexpr, PER_WORD: tl.constexpr):
    """A tile [rows, n * COLUMNS], or the numbers of its words, with its columns in the order of the product."""
    ROWS: tl.constexpr = tile.shape[0] * (tile.shape[1] // COLUMNS)
    runs = tile.reshape(ROWS, 4, COLUMNS // PER_WORD // 4, 2, PER_WORD // 2).permute(0, 2, 4, 1, 3)
    return runs.reshape(tile.shape[0], tile.shape[1])


@triton.jit
def line_in_order(line, ORDER: tl.constexpr):
    """The columns [n] of a row, a multiple of the order's, in the order of the product; as they are for None."""
    if ORDER is not None:
        line = in_order(line[None, :], ORDER[0], ORDER[1]).reshape(line.shape[0])
    return line
