"""The transport ``symm``: operators that exchange rows by memory of every GPU that the others write to.

What they return are new tensors. The buffers behind them belong to the process group; they are made at the first call
on all ranks, and again for a larger one, which must not be in a CUDA graph's capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meta.checks import fail
from moe_ops import compat, slots
from moe_ops.groups import Group, PerGroup, resolve
from moe_ops.symmetric_memory import Shared, at_least, share

_OP = "ep.prepare"
_LEAST = 1 << 18  # words of a part: one megabyte
_WORTH_A_COPY = 1 << 20  # bytes of a tensor for one rank, beside others that copy engines move


@dataclass(frozen=True)
class _Buffers:
    """What a group's ranks share for exchanges by one kernel.

    Attributes:
        calls: int32, calls so far, by program.
        size: words for one rank.
    """

    shared: Shared
    calls: Tensor
    size: int


#: Of a group by device.
_held: PerGroup[dict[torch.device, list[_Buffers]]] = PerGroup(dict)


def _buffers(group: Group, words: int, device: torch.device) -> _Buffers:
    held = _held[group.name].setdefault(device, [])
    return at_least(_OP, "symm", held, max(words, _LEAST), lambda size: _make(group, size, device))


def _make(group: Group, size: int, device: torch.device) -> _Buffers:
    """A collective: every rank of the group comes here at the same call."""
    from moe_ops.kernels.triton.push import PROGRAMS, flag_words

    flags, end = flag_words(group.size), flag_words(group.size) + 2 * group.size * size
    shared = share(group, torch.zeros(flags, dtype=torch.int32), end + PROGRAMS, device)
    calls = shared.memory[end : end + PROGRAMS].zero_()
    return _Buffers(shared, calls, size)


def exchange(tensors: list[Tensor], group: Group, gather: bool) -> list[Tensor]:
    """As :func:`start`, by one kernel."""
    from moe_ops.kernels.triton import push

    size = group.size
    sent, received = [], []
    for tensor in tensors:
        flat = tensor.reshape(1 if gather else size, -1)
        if flat.shape[1] % 4:  # words of four bytes
            flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4))
        sent.append(flat.contiguous().view(torch.int32).view(-1))
        received.append(sent[-1].new_empty(sent[-1].shape[0] * (size if gather else 1)))
    words = sum((out.shape[0] // size + 3) // 4 * 4 for out in received)
    held = _buffers(group, words, tensors[0].device)
    push.exchange(held.shared.peers, held.calls, size * held.size, held.size, sent, received, group.rank, gather)
    return [_unpadded(out, tensor, size, gather) for out, tensor in zip(received, tensors, strict=True)]


def _unpadded(words: Tensor, tensor: Tensor, size: int, gather: bool) -> Tensor:
    """Bytes ``[W * T, ...]`` or ``[W * C, ...]`` of what was received, as ``tensor`` was sent."""
    one = tensor.numel() // (1 if gather else size)
    parts = words.view(torch.uint8).view(size, -1)
    parts = parts if parts.shape[1] == one else parts[:, :one].contiguous()
    return parts.view(-1, *tensor.shape[1:])


#: What was started and not waited for, by the address of its token: results, and what copy engines still read.
_pending: dict[int, tuple[list[Tensor], slots.Arriving | None]] = {}


def _symm_start(tensors: list[Tensor], *, group: str, gather: bool, apart: bool) -> Tensor:
    members = resolve(_OP, group)
    shares = 1 if gather else members.size
    large = [number for number, tensor in enumerate(tensors) if tensor.numel() // shares >= _WORTH_A_COPY]
    arriving = None
    if apart:
        arriving = slots.start(_OP, [tensors[number].view(-1) for number in large], members, gather=gather)
    received: dict[int, Tensor] = {}
    if arriving is None:
        large = []
    else:
        for number, out in zip(large, arriving.tensors, strict=True):
            received[number] = out.view(-1, *tensors[number].shape[1:])
    small = [number for number in range(len(tensors)) if number not in large]
    if small:
        received |= zip(small, exchange([tensors[number] for number in small], members, gather), strict=True)
    token = tensors[0].new_empty(1)
    _pending[token.data_ptr()] = [received[number] for number in range(len(tensors))], arriving
    return token


def _symm_start_fake(tensors: list[Tensor], *, group: str, gather: bool, apart: bool) -> Tensor:
    return tensors[0].new_empty(1)


def _symm_wait(token: Tensor, tensors: list[Tensor], after: list[Tensor], *, group: str, gather: bool) -> list[Tensor]:
    started = _pending.pop(token.data_ptr(), None)
    if started is None:
        raise fail(_OP, "the first half", "waited for once", "a second wait", "Start another exchange.")
    received, arriving = started
    if arriving is not None:
        torch.cuda.current_stream(token.device).wait_event(arriving.event)
    return received


def _symm_wait_fake(
    token: Tensor, tensors: list[Tensor], after: list[Tensor], *, group: str, gather: bool
) -> list[Tensor]:
    size = resolve(_OP, group).size if gather else 1
    return [tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:]) for tensor in tensors]


_library = torch.library.Library("moe_ops", "FRAGMENT")
_OPTIONS = "str group, bool gather"
#: The wait has the tensors, too: so that their memory is theirs until all of it has gone. And what is computed before.
for _schema in (
    f"symm_start(Tensor[] tensors, *, {_OPTIONS}, bool apart) -> Tensor",
    f"symm_wait(Tensor token, Tensor[] tensors, Tensor[] after, *, {_OPTIONS}) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("symm_start", _symm_start, "CUDA")
_library.impl("symm_wait", _symm_wait, "CUDA")
torch.library.register_fake("moe_ops::symm_start", _symm_start_fake, lib=_library)
torch.library.register_fake("moe_ops::symm_wait", _symm_wait_fake, lib=_library)
compat.when_imported("torch._inductor.lowering", lambda: compat.keep_between(torch.ops.moe_ops.symm_wait.default))


def start(tensors: list[Tensor], group: Group, *, gather: bool, apart: bool) -> Tensor:
    """Start to exchange bytes.

    Args:
        tensors: uint8, contiguous, not to be changed before :func:`wait`.
        gather: every rank gets the same; else blocks ``[W * C, ...]`` in rank order.
        apart: something stands between this and the wait: much is left to copy engines then, which take longer, but
            no multiprocessor.

    Returns:
        What :func:`wait` asks for, once.
    """
    token: Tensor = torch.ops.moe_ops.symm_start(tensors, group=group.name, gather=gather, apart=apart)
    return token


def wait(
    token: Tensor, tensors: list[Tensor], group: Group, *, gather: bool, after: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Bytes of every rank's ``tensors`` of :func:`start`, ``[W * T, ...]`` or ``[W * C, ...]`` in rank order.

    Args:
        after: computed between :func:`start` and this, by compiled code, too.
    """
    made = [tensor.detach() for tensor in after]
    received: list[Tensor] = torch.ops.moe_ops.symm_wait(token, tensors, made, group=group.name, gather=gather)
    return received
