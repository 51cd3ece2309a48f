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
from moe_ops import compat, symmetric
from moe_ops.groups import Group
from moe_ops.runtime import refuse_second_derivatives

_C10D = torch.ops._c10d_functional


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, ``[..., bytes of the last dimension]`` uint8."""
    tensor, columns = tensor.detach(), tensor.shape[-1]
    # Views ask for a last stride of 1. Without elements, or of one column, tensors are contiguous with any.
    if tensor.numel() == 0:
        return tensor.new_empty((*tensor.shape[:-1], columns * tensor.element_size()), dtype=torch.uint8)
    if columns == 1:
        tensor = tensor.select(-1, 0).unsqueeze(-1)
    return tensor.contiguous().view(torch.uint8)


def _of_bytes(memory: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """What `as_bytes` gave the memory of."""
    if memory.numel() == 0:  # Inductor of torch 2.11 does not take such a view for one of stride 1
        return memory.new_empty(shape, dtype=dtype)
    return memory.view(dtype).view(shape)


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


def _wait(received: Tensor) -> Tensor:
    """What a collective was started for: of no rows none was."""
    waited: Tensor = received if received.shape[0] == 0 else _C10D.wait_tensor(received)
    return waited


def _differentiated_once(grad: Tensor, compiled: bool) -> Tensor:
    """A gradient that crosses as bytes, where autograd loses sight of it.

    ``compiled``: captured by Dynamo, whose backwards run under no_grad even where create_graph is True.
    """
    if not compat.is_fake(grad) and (torch.is_grad_enabled() or (compiled and grad.requires_grad)):
        refuse_second_derivatives("moe_ops.ep")
    return grad


#: An operator, so that graphs of Dynamo ask when they run; of those that AOTAutograd makes it is no part.
_library = torch.library.Library("moe_ops", "FRAGMENT")
_library.define("differentiated_once(Tensor(a) grad, bool compiled) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("differentiated_once", _differentiated_once, "CompositeImplicitAutograd")


def _once(grad: Tensor) -> Tensor:
    once: Tensor = torch.ops.moe_ops.differentiated_once(grad, torch.compiler.is_compiling())
    return once


def _all_to_all(grad: Tensor, group: Group) -> Tensor:
    grad = _once(grad)
    return _of_bytes(_wait(start_all_to_all(grad, group)), grad.dtype, grad.shape)


def sum_of_ranks(parts: Tensor, added: Tensor | None = None) -> Tensor:
    """``[W, ...]`` summed over its first dimension, in rank order and fp32 (fp64 for fp64), then ``added``."""
    wide = accumulation_dtype(parts.dtype)
    # Of one rank a copy: nobody may write to a view of what the nodes below return.
    total = parts[0].to(wide, copy=parts.shape[0] == 1)
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank].to(wide)
    if added is not None:
        total = total + added.to(wide)
    return total.to(parts.dtype)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _of_bytes(received, own.dtype, (group.size, *own.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, sum_of_ranks(_all_to_all(grads[0], ctx.group)), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _of_bytes(received, own.dtype, own.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _all_to_all(grads[0], ctx.group), None


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, own: Tensor, group: Group) -> Tensor:
        ctx.rank = group.rank
        return _of_bytes(_wait(received), own.dtype, (group.size, *own.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _once(grads[0])[ctx.rank], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group, grad = ctx.group, _once(grads[0])
        (received,) = start_all_gather([grad], group)
        return sum_of_ranks(_of_bytes(_wait(received), grad.dtype, (group.size, *grad.shape))), None


def wait_all_gather(
    received: list[Tensor], own: Sequence[Tensor], group: Group, *, direct: bool = False, after: Sequence[Tensor] = ()
) -> list[Tensor]:
    """``[W, T, ...]`` of what :func:`start_all_gather` started with ``own``; differentiable in it."""
    if own[0].shape[0] != 0 and direct:
        received = symmetric.wait(received[0], [as_bytes(tensor) for tensor in own], group, gather=True, after=after)
    else:
        received = [_wait(there) for there in received]
    return [_Gathered.apply(*pair, group) for pair in zip(received, own, strict=True)]  # type: ignore[no-untyped-call]


def wait_all_to_all(
    received: Tensor, own: Tensor, group: Group, *, direct: bool = False, after: Sequence[Tensor] = ()
) -> Tensor:
    """``[W, C, ...]`` of what :func:`start_all_to_all` started with ``own``; differentiable in it."""
    if own.shape[1] != 0 and direct:
        received = symmetric.wait(received, [as_bytes(own).flatten(0, 1)], group, gather=False, after=after)[0]
    else:
        received = _wait(received)
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
