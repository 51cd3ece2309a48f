"""A layer over GPUs that write into each other's memory, as one operator where nobody differentiates.

It computes what :mod:`moe_ops.ep` composes for ``transport="symm"``, to the bit. In a CUDA graph a large batch is
sorted while its tokens are still on their way, by their ids, which come first; and sums over pairs are written straight
to the GPU that their token belongs to, while other programs of the same kernel sum the tokens of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meta import cost
from moe_ops import choice, compat, debugging, slots, symmetric
from moe_ops.exchanges import as_bytes
from moe_ops.groups import Group, resolve
from moe_ops.ops import SCHEMAS, SIGNATURES, by_name, call, parse, run

_OP = "fused_experts"


def experts(arguments: dict[str, Any], group: Group, wire_scheme: str | None) -> Tensor:
    """The layer.

    Args:
        arguments: of ``fused_experts``, by name; ids are int32 and name the experts of all ranks.
        wire_scheme: in whose format rows travel, or None.
    """
    tensors = [arguments.get(name) for name in SIGNATURES[_OP].positional]
    options = {name: value for name, value in arguments.items() if name not in SIGNATURES[_OP].positional}
    whole: Tensor = torch.ops.moe_ops.experts_across(*tensors, **options, group=group.name, wire_scheme=wire_scheme)
    return whole


def _experts_across(*args: Any, group: str, wire_scheme: str | None, **options: Any) -> Tensor:
    from moe_ops.kernels.triton.deliver import sum_parts

    members, given = resolve(_OP, group), SIGNATURES[_OP].bind(args, options)
    tokens, width = given["hidden_states"].shape
    if tokens == 0:  # an empty tensor of the right dtype
        return _experts_across_fake(*args, group=group, wire_scheme=wire_scheme, **options)
    rows = [given["hidden_states"]]
    if wire_scheme is not None:
        rows = list(run("quantize_rows", rows[0], scheme=wire_scheme))
    routing = [given["topk_weights"], given["topk_ids"]]
    sizes = [row.nbytes for row in rows]
    held = None
    if sum(sizes) >= slots.LARGE:
        needed = max(slots.slot_bytes(sizes, members), slots.slot_bytes([4 * tokens * width], members))  # fp32 at most
        held = slots.slots_for(_OP, members, needed, rows[0].device)
    # Copies, sorts and sums side by side are many calls for the host, which only a captured graph has for nothing.
    if held is not None and torch.cuda.is_current_stream_capturing():
        return _overlapped(held, given, rows, routing)
    received = symmetric.exchange([as_bytes(one) for one in (*rows, *routing)], members, True)
    given |= _named(_received(received, rows, routing), members, given["gate_up_proj"].shape[0])
    tensors = [given.pop(name) for name in SIGNATURES[_OP].positional]
    result = run(_OP, *tensors, **given)
    parts = symmetric.exchange([as_bytes(result)], members, False)[0].view(result.dtype)
    total: Tensor = sum_parts(parts.view(members.size, tokens, width))
    return total


def _overlapped(held: slots.Slots, given: dict[str, Any], rows: list[Tensor], routing: list[Tensor]) -> Tensor:
    """The same bits, by the copy engines' tokens and results that are delivered."""
    members, (tokens, width) = held.group, given["hidden_states"].shape
    arriving = held.start_tokens([as_bytes(row).view(-1) for row in rows])
    ids = symmetric.exchange([as_bytes(one) for one in routing], members, True)
    given |= _named(_received([*arriving.tensors, *ids], rows, routing), members, given["gate_up_proj"].shape[0])
    layer: Any = parse(_OP, **given)
    choice.between(layer, partial(held.arrive, arriving), partial(held.deliver, tokens=tokens))
    return held.results(tokens, width, layer.out_dtype)


def _received(tensors: Sequence[Tensor], rows: Sequence[Tensor], routing: Sequence[Tensor]) -> list[Tensor]:
    """Bytes of all ranks as the tensors that each sent."""
    sent = (*rows, *routing)
    return [there.view(-1).view(own.dtype).view(-1, *own.shape[1:]) for there, own in zip(tensors, sent, strict=True)]


def _named(received: Sequence[Tensor], group: Group, held: int) -> dict[str, Any]:
    """Arguments of the local layer: ids of experts held elsewhere are out of its range, where they are no pairs."""
    ids = received[-1].sub_(group.rank * held)
    if debugging.active():
        ids.masked_fill_((ids < 0) | (ids >= held), -1)
    named = {"hidden_states": received[0], "topk_weights": received[-2], "topk_ids": ids}
    return named if len(received) == 3 else named | {"hidden_states_scale": received[1]}


def _experts_across_fake(*args: Any, group: str, wire_scheme: str | None, **options: Any) -> Tensor:
    given = SIGNATURES[_OP].bind(args, options)
    shape = given["hidden_states"].shape
    if wire_scheme is not None:
        given["hidden_states"], given["hidden_states_scale"] = call(
            "quantize_rows", given["hidden_states"], scheme=wire_scheme
        )
    layer: Any = parse(_OP, **given)
    result: Tensor = given["hidden_states"].new_empty(shape, dtype=layer.out_dtype)
    return result


_SCHEMA = SCHEMAS[_OP].removesuffix(") -> Tensor") + ", str group, str? wire_scheme) -> Tensor"
_library = torch.library.Library("moe_ops", "FRAGMENT")
_library.define(f"experts_across{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
_library.impl("experts_across", _experts_across, "CUDA")
torch.library.register_fake("moe_ops::experts_across", _experts_across_fake, lib=_library)


def _flops(*shapes: Any, out_shape: Any = None, group: str, wire_scheme: str | None, **options: Any) -> int:
    """Of as many pairs as this rank's tokens have: what it computes if all experts are chosen alike."""
    return cost.OP_FLOPS[_OP](SimpleNamespace(**by_name(_OP, shapes, options)))


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.moe_ops.experts_across)(_flops)


compat.when_imported("torch.utils.flop_counter", _register_flops)
