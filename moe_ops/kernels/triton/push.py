"""Write rows into the memory of other GPUs, wait for theirs, and bring them home: one kernel for an exchange.

Every rank has a buffer that the others can write to: flags, then two halves of a slot for each rank. Calls take the
halves by turns. A rank writes half p of call n + 2 when all its programs have passed call n + 1, so after every rank
has begun that call, and therefore has read half p of call n: one wait in a call is enough.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Programs of every call, whatever its size, since program b waits for programs b alone. All must run at once: one that
#: waits keeps its place.
#: us of one exchange between two H100s, rows of 4096 bytes, 64, 512 and 4096 of them on each: 7.6, 14.3, 79.6; 64
#: programs of blocks of 2048 words 7.1, 14.0, 92.2; 128 of 8192 8.7, 14.8, 77.9.
PROGRAMS = 128
BLOCK = 4096  # words of four bytes that a program moves at once
MOST = 4  # tensors of one call


@triton.jit
def _slot(peers, peer, half, sender, slot, FLAGS: tl.constexpr):
    """Where ``sender`` writes in the buffer of ``peer``."""
    base = tl.load(peers + peer).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(base, 16) + FLAGS + tl.multiple_of(half + sender * slot, 4)


@triton.jit
def _push(
    peers, src, out, n, half, slot, offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, FLAGS: tl.constexpr, GATHER: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's words of one tensor, to every rank; those for itself go to the result at once."""
    for start in range(tl.program_id(0) * BLOCK, n, STEP):
        at = start + tl.arange(0, BLOCK)
        own = tl.load(src + (0 if GATHER else RANK * tl.cast(n, tl.int64)) + at, mask=at < n)
        tl.store(out + RANK * tl.cast(n, tl.int64) + at, own, mask=at < n)
        for step in tl.static_range(1, SIZE):
            peer = (RANK + step) % SIZE
            words = own if GATHER else tl.load(src + peer * tl.cast(n, tl.int64) + at, mask=at < n)
            tl.store(_slot(peers, peer, half, RANK, slot, FLAGS) + offset + at, words, mask=at < n)


@triton.jit
def _bring(
    peers, out, n, half, slot, offset,
    RANK: tl.constexpr, SIZE: tl.constexpr, FLAGS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the other ranks' programs of this number wrote here; not from a cache of this multiprocessor."""
    for start in range(tl.program_id(0) * BLOCK, n, STEP):
        at = start + tl.arange(0, BLOCK)
        for step in tl.static_range(1, SIZE):
            sender = (RANK + step) % SIZE
            words = tl.load(
                _slot(peers, RANK, half, sender, slot, FLAGS) + offset + at, mask=at < n, cache_modifier=".cg"
            )
            tl.store(out + sender * tl.cast(n, tl.int64) + at, words, mask=at < n)


@triton.jit
def _exchange_kernel(
    peers, calls, half, slot,
    src0, out0, n0, src1, out1, n1, src2, out2, n2, src3, out3, n3,
    RANK: tl.constexpr, SIZE: tl.constexpr, FLAGS: tl.constexpr, GATHER: tl.constexpr, COUNT: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program exchanges blocks b, b + PROGRAMS, ... of every tensor with the programs b of all ranks.

    peers: int64 [SIZE], addresses of the ranks' buffers. calls: int32 [PROGRAMS], calls so far. half, slot: words of
    half a buffer, and of one rank's part of it. Tensor i: n_i words for a rank, at src_i, or SIZE times as many in rank
    order unless GATHER; out_i: SIZE times as many.
    Bytes over the links: (SIZE - 1) n, and as many read and written once more here.
    """
    b = tl.program_id(0)
    call = tl.load(calls + b) + 1
    half = (call & 1) * half
    o1 = (n0 + 3) // 4 * 4
    o2 = o1 + (n1 + 3) // 4 * 4
    o3 = o2 + (n2 + 3) // 4 * 4
    _push(peers, src0, out0, n0, half, slot, 0, RANK, SIZE, FLAGS, GATHER, STEP, BLOCK)
    if COUNT > 1:
        _push(peers, src1, out1, n1, half, slot, o1, RANK, SIZE, FLAGS, GATHER, STEP, BLOCK)
    if COUNT > 2:
        _push(peers, src2, out2, n2, half, slot, o2, RANK, SIZE, FLAGS, GATHER, STEP, BLOCK)
    if COUNT > 3:
        _push(peers, src3, out3, n3, half, slot, o3, RANK, SIZE, FLAGS, GATHER, STEP, BLOCK)
    tl.debug_barrier()
    # Whoever sees a flag sees what all threads of this program wrote before it.
    for step in tl.static_range(1, SIZE):
        flags = tl.load(peers + (RANK + step) % SIZE).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + b * SIZE + RANK, call, sem="release", scope="sys")
    here = tl.load(peers + RANK).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, SIZE):
        flag = here + b * SIZE + (RANK + step) % SIZE
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call < 0:
            pass
    tl.debug_barrier()
    _bring(peers, out0, n0, half, slot, 0, RANK, SIZE, FLAGS, STEP, BLOCK)
    if COUNT > 1:
        _bring(peers, out1, n1, half, slot, o1, RANK, SIZE, FLAGS, STEP, BLOCK)
    if COUNT > 2:
        _bring(peers, out2, n2, half, slot, o2, RANK, SIZE, FLAGS, STEP, BLOCK)
    if COUNT > 3:
        _bring(peers, out3, n3, half, slot, o3, RANK, SIZE, FLAGS, STEP, BLOCK)
    tl.store(calls + b, call)


def flag_words(size: int) -> int:
    """Words of flags at the front of a buffer, a multiple of 16 bytes."""
    return (PROGRAMS * size + 3) // 4 * 4


def exchange(
    peers: Tensor,
    calls: Tensor,
    half: int,
    slot: int,
    sent: list[Tensor],
    received: list[Tensor],
    rank: int,
    gather: bool,
) -> None:
    """Launch the kernel.

    Args:
        peers: int64 ``[W]``, addresses of the ranks' buffers.
        calls: int32 ``[PROGRAMS]``.
        half, slot: words of half a buffer, and of a rank's part of it.
        sent: int32, flat: as many words for every rank, or ``gather`` the same ones.
        received: int32, flat, W times what a rank sends one.
        rank: of this process.
        gather: every rank gets the same words.
    """
    size = peers.shape[0]
    tensors = []
    for source, out in zip(sent, received, strict=True):
        tensors += [source, out, out.shape[0] // size]
    tensors += [sent[0], received[0], 0] * (MOST - len(sent))
    _exchange_kernel[(PROGRAMS,)](
        peers, calls, half, slot, *tensors,
        RANK=rank, SIZE=size, FLAGS=flag_words(size), GATHER=gather, COUNT=len(sent), STEP=PROGRAMS * BLOCK,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
