"""Checks of what only the device knows, inside ``with moe_ops.debug():``. Nothing else in the package synchronises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meta.calls import Call, CombineCall, DispatchCall, ExpertsCall, GemmCall, GluCall, MoeCall, QuantizeCall, RouteCall
from meta.routing import route
from moe_ops.pairs import count_pairs, local_ids

_depth = 0


def active() -> bool:
    """Whether a ``with moe_ops.debug():`` block is open in this process."""
    return _depth > 0


@contextmanager
def debug() -> Iterator[None]:
    """Check device-side facts around every operator call: ids in range, capacity, NaN logits, offsets and places.

    Every check copies a result to the host, so this is for finding a fault, not for production. Blocks nest, and the
    setting is process-wide: it reaches the operators inside compiled functions too.

    Raises:
        ValueError: from the offending operator; the message names the argument, how many entries offend, the first of
            them, and the cure. Also when an operator runs while a CUDA graph is being captured.

    Example:
        >>> import torch, moe_ops
        >>> with moe_ops.debug():
        ...     weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def refuse_capture(op: str) -> None:
    """Checks read results on the host, which no captured graph can."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{op}: moe_ops.debug() must be off during CUDA graph capture, got on. Capture outside of it.")


def check(call: Call) -> None:
    """Run every check that applies to a call."""
    refuse_capture(call.op)
    for checker in _CHECKS.get(type(call), ()):
        checker(call)


def _report(op: str, argument: str, rule: str, bad: Tensor, values: Tensor, cure: str) -> None:
    """Raise when any entry of the boolean ``bad`` is set."""
    count = int(bad.sum())
    if count:
        where = bad.reshape(-1).to(torch.uint8).argmax()
        index = [int(i) for i in torch.unravel_index(where, bad.shape)]
        first = values[tuple(index)].item()
        raise ValueError(
            f"{op}: {argument} must be {rule}, got {count} entries that are not, the first {first} at {index}. {cure}"
        )


def _logits(call: RouteCall | MoeCall) -> None:
    logits = (call.route if isinstance(call, MoeCall) else call).router_logits
    cure = "Look for the layer that produced NaN, or mask padding tokens."
    _report(call.op, "router_logits", "free of NaN", logits.isnan(), logits, cure)


def _ids(call: DispatchCall | ExpertsCall) -> None:
    ids, expert_map = call.topk_ids, call.expert_map
    if expert_map is None:
        size, letter = _num_experts(call), "E"
    else:
        size, letter = expert_map.shape[0], "E_global"
    cure = "Use -1 for pairs to skip, and pass expert_map when ids are global."
    _report(call.op, "topk_ids", f"in [-1, {letter}={size})", (ids < -1) | (ids >= size), ids, cure)


def _expert_map(call: DispatchCall | ExpertsCall | MoeCall) -> None:
    expert_map, experts = call.expert_map, _num_experts(call)
    if expert_map is not None:
        bad = (expert_map < -1) | (expert_map >= experts)
        _report(call.op, "expert_map", f"in [-1, E={experts})", bad, expert_map, "Map experts held elsewhere to -1.")


def _num_experts(call: DispatchCall | ExpertsCall | MoeCall) -> int:
    return int(call.num_experts if isinstance(call, DispatchCall) else call.experts.count)


def _capacity(call: DispatchCall | ExpertsCall) -> None:
    capacity, experts = call.capacity, _num_experts(call)
    if capacity is None:
        return
    check_capacity(call.op, count_pairs(local_ids(call.topk_ids, call.expert_map, experts), experts), capacity)


def check_capacity(op: str, counts: Tensor, capacity: int) -> None:
    """Raise when an expert has more rows, ``counts`` ``[E]``, than its batch."""
    cure = f"The rows past capacity were dropped; pass capacity >= {int(counts.max()) if counts.numel() else 0}."
    _report(op, "rows per expert", f"<= capacity={capacity}", counts > capacity, counts, cure)


def _moe_capacity(call: MoeCall) -> None:
    if call.capacity is not None:
        _capacity(
            call.routed(*route(call.route.router_logits, call.route.correction_bias, **call.route.options._asdict()))
        )


def _extents(call: GemmCall) -> None:
    if call.problem.format == "batched":
        _counts(call.op, call.extents, call.x.data)
        return
    offsets, rows = call.extents, call.x.data.shape[0]
    before = torch.cat((offsets.new_zeros(1), offsets[:-1]))
    rule, cure = f"non-decreasing and in [0, R={rows}]", "Pass cumulative ENDS, as moe_permute returns."
    _report(call.op, "offsets", rule, (offsets < before) | (offsets > rows), offsets, cure)


def _counts(op: str, counts: Tensor, batch: Tensor) -> None:
    capacity = batch.shape[1]
    cure = "Clamp it to the batch's capacity."
    _report(op, "expert_num_tokens", f"in [0, C={capacity}]", (counts < 0) | (counts > capacity), counts, cure)


def _quantized_counts(call: QuantizeCall) -> None:
    if call.expert_num_tokens is not None:
        _counts(call.op, call.expert_num_tokens, call.rows)


def _places(call: CombineCall) -> None:
    places, size = call.places, call.rows.shape[:-1].numel()
    name = "pair_to_row" if call.op == "moe_unpermute" else "slots"
    cure = "Pass it as the dispatch operator returned it."
    _report(call.op, name, f"in [-1, {size})", (places < -1) | (places >= size), places, cure)


_CHECKS: dict[type[Call], tuple[Callable[..., None], ...]] = {
    RouteCall: (_logits,),
    DispatchCall: (_ids, _expert_map, _capacity),
    CombineCall: (_places,),
    GemmCall: (_extents,),
    GluCall: (_extents,),
    QuantizeCall: (_quantized_counts,),
    ExpertsCall: (_ids, _expert_map, _capacity),
    MoeCall: (_logits, _expert_map, _moe_capacity),
}
