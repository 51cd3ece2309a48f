"""The collectives of expert parallelism, functional, each in two halves: start it, wait for it.

Every tensor crosses as bytes, so that any dtype goes over any backend. A half that starts returns what is not there
yet; the half that waits is where autograd's node stands, whose backward runs the opposite collective:

| forward | backward |
| --- | --- |
| all-gather: ``[T, ...]`` to ``[W, T, ...]`` | all-to-all of the gradients, sum over ranks in rank order |
| all-to-all: ``[W, C, ...]`` to ``[W, C, ...]`` | all-to-all |
| parts of all ranks ``[W, T, H]`` of one batch that all share | each rank's own part of the gradient |
| one batch that all share, unchanged | sum over ranks in rank order |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meta.dims import accumulation_dtype
from moe_ops import symmetric
from moe_ops.groups import Group

_C10D = torch.ops._c10d_functional


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, ``[..., bytes of the last dimension]`` uint8."""
    return tensor.detach().contiguous().view(torch.uint8)


def start_all_gather(
    tensors: Sequence[Tensor], group: Group, *, direct: bool = False, apart: bool = False
) -> list[Tensor]:
    """Bytes of every rank's tensors, to be waited for; one collective for all of them, or ``direct`` one exchange, for
    which :func:`moe_ops.symmetric.start` has ``apart``.
    """
    if tensors[0].shape[0] == 0:
        return [as_bytes(tensor).repeat(group.size, *[1] * (tensor.dim() - 1)) for tensor in tensors]
    sent = [as_bytes(tensor) for tensor in tensors]
    if direct:
        return [symmetric.start(sent, group, gather=True, apart=apart)]
    received: list[Tensor] = _C10D.all_gather_into_tensor_coalesced(sent, group.size, group.name)
    return received


def start_all_to_all(tensor: Tensor, group: Group, *, direct: bool = False, apart: bool = False) -> Tensor:
    """Bytes of block r of every rank's ``[W, C, ...]``, on rank r, to be waited for."""
    sent = as_bytes(tensor).flatten(0, 1)
    if sent.shape[0] == 0:
        return sent.clone()
    if direct:
        return symmetric.start([sent], group, gather=False, apart=apart)
    rows = [tensor.shape[1]] * group.size
    received: Tensor = _C10D.all_to_all_single(sent, rows, rows, group.name)
    return received


def _wait(received: Tensor, dtype: torch.dtype) -> Tensor:
    waited: Tensor = _C10D.wait_tensor(received)
    return waited.view(dtype)


def _all_to_all(tensor: Tensor, group: Group) -> Tensor:
    return _wait(start_all_to_all(tensor, group), tensor.dtype).view(tensor.shape)


def sum_of_ranks(parts: Tensor, added: Tensor | None = None) -> Tensor:
    """``[W, ...]`` summed over its first dimension, in rank order and fp32 (fp64 for fp64), then ``added``."""
    wide = accumulation_dtype(parts.dtype)
    total = parts[0].to(wide)
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank].to(wide)
    if added is not None:
        total = total + added.to(wide)
    return total.to(parts.dtype)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return received.view(own.dtype).view(group.size, *own.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, sum_of_ranks(_all_to_all(grads[0], ctx.group)), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return received.view(own.dtype).view(own.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _all_to_all(grads[0], ctx.group), None


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.rank = group.rank
        return _wait(received, own.dtype).view(group.size, *own.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0][ctx.rank], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group = ctx.group
        (received,) = start_all_gather([grads[0]], group)
        return sum_of_ranks(_wait(received, grads[0].dtype).view(group.size, *grads[0].shape)), None


def wait_all_gather(
    received: list[Tensor], own: Sequence[Tensor], group: Group, *, direct: bool = False, after: Sequence[Tensor] = ()
) -> list[Tensor]:
    """``[W, T, ...]`` of what :func:`start_all_gather` started with ``own``; differentiable in it."""
    if own[0].shape[0] != 0 and direct:
        received = symmetric.wait(received[0], [as_bytes(tensor) for tensor in own], group, gather=True, after=after)
    elif own[0].shape[0] != 0:
        received = [_C10D.wait_tensor(there) for there in received]
    return [_Gathered.apply(*pair, group) for pair in zip(received, own, strict=True)]  # type: ignore[no-untyped-call]


def wait_all_to_all(
    received: Tensor, own: Tensor, group: Group, *, direct: bool = False, after: Sequence[Tensor] = ()
) -> Tensor:
    """``[W, C, ...]`` of what :func:`start_all_to_all` started with ``own``; differentiable in it."""
    if own.shape[1] != 0 and direct:
        received = symmetric.wait(received, [as_bytes(own).flatten(0, 1)], group, gather=False, after=after)[0]
    elif own.shape[1] != 0:
        received = _C10D.wait_tensor(received)
    exchanged: Tensor = _Exchanged.apply(received, own, group)  # type: ignore[no-untyped-call]
    return exchanged


def wait_parts(received: Tensor, own: Tensor, group: Group) -> Tensor:
    """As :func:`wait_all_gather`, for a sum over ranks that every rank makes: each has the gradient already."""
    parts: Tensor = _Parts.apply(received, own, group)  # type: ignore[no-untyped-call]
    return parts


def shared(own: Tensor, group: Group) -> Tensor:
    """The same tensor on every rank; its gradient is the sum of what the ranks made of it."""
    same: Tensor = _Shared.apply(own, group)  # type: ignore[no-untyped-call]
    return same
