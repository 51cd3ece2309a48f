"""Checks of what only the device knows, inside ``with moe_ops.debug():``. Nothing else in the package synchronises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meta.routing import route
from moe_ops.pairs import count_pairs, local_ids

_ROUTING_OPTIONS = ("top_k", "routing", "renormalize", "renorm_eps", "num_groups", "topk_groups", "scale")

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


def check(op: str, arguments: Mapping[str, Any]) -> None:
    """Run every check that applies to a call; ``arguments`` are the operator's, by name, defaults included."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{op}: moe_ops.debug() must be off during CUDA graph capture, got on. Capture outside of it.")
    for checker in _CHECKS.get(op, ()):
        checker(op, arguments)


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


def _logits(op: str, call: Mapping[str, Any]) -> None:
    logits = call["router_logits"]
    cure = "Look for the layer that produced NaN, or mask padding tokens."
    _report(op, "router_logits", "free of NaN", logits.isnan(), logits, cure)


def _ids(op: str, call: Mapping[str, Any]) -> None:
    ids, expert_map = call["topk_ids"], call["expert_map"]
    if expert_map is None:
        size, letter = _num_experts(call), "E"
    else:
        size, letter = expert_map.shape[0], "E_global"
    cure = "Use -1 for pairs to skip, and pass expert_map when ids are global."
    _report(op, "topk_ids", f"in [-1, {letter}={size})", (ids < -1) | (ids >= size), ids, cure)


def _expert_map(op: str, call: Mapping[str, Any]) -> None:
    expert_map, experts = call["expert_map"], _num_experts(call)
    if expert_map is not None:
        bad = (expert_map < -1) | (expert_map >= experts)
        _report(op, "expert_map", f"in [-1, E={experts})", bad, expert_map, "Map experts held elsewhere to -1.")


def _num_experts(call: Mapping[str, Any]) -> int:
    count = call.get("num_experts")
    return int(call["gate_up_proj"].shape[0] if count is None else count)


def _capacity(op: str, call: Mapping[str, Any]) -> None:
    capacity = call["capacity"]
    if capacity is None:
        return
    experts = _num_experts(call)
    counts = count_pairs(local_ids(call["topk_ids"], call["expert_map"], experts), experts)
    cure = f"The rows past capacity were dropped; pass capacity >= {int(counts.max()) if experts else 0}."
    _report(op, "rows per expert", f"<= capacity={capacity}", counts > capacity, counts, cure)


def _moe_capacity(op: str, call: Mapping[str, Any]) -> None:
    if call["capacity"] is not None:
        options = {name: call[name] for name in _ROUTING_OPTIONS}
        _, ids = route(call["router_logits"], call["correction_bias"], **options)
        _capacity(op, {**call, "topk_ids": ids})


def _offsets(op: str, call: Mapping[str, Any]) -> None:
    offsets, rows = call["offsets"], call["rows"].shape[0]
    before = torch.cat((offsets.new_zeros(1), offsets[:-1]))
    bad = (offsets < before) | (offsets > rows)
    _report(
        op,
        "offsets",
        f"non-decreasing and in [0, R={rows}]",
        bad,
        offsets,
        "Pass cumulative ENDS, as moe_permute returns.",
    )


def _counts(op: str, call: Mapping[str, Any]) -> None:
    counts, capacity = call["expert_num_tokens"], call["batch"].shape[1]
    bad = (counts < 0) | (counts > capacity)
    _report(op, "expert_num_tokens", f"in [0, C={capacity}]", bad, counts, "Clamp it to the batch's capacity.")


def _places(name: str, source: str) -> Callable[[str, Mapping[str, Any]], None]:
    def checker(op: str, call: Mapping[str, Any]) -> None:
        places, size = call[name], call[source].shape[:-1].numel()
        cure = "Pass it as the dispatch operator returned it."
        _report(op, name, f"in [-1, {size})", (places < -1) | (places >= size), places, cure)

    return checker


_CHECKS: dict[str, tuple[Callable[[str, Mapping[str, Any]], None], ...]] = {
    "fused_topk": (_logits,),
    "moe_permute": (_ids, _expert_map),
    "batched_dispatch": (_ids, _expert_map, _capacity),
    "moe_unpermute": (_places("pair_to_row", "rows"),),
    "batched_combine": (_places("slots", "batch"),),
    "grouped_mm_glu": (_offsets,),
    "grouped_mm": (_offsets,),
    "batched_mm_glu": (_counts,),
    "batched_mm": (_counts,),
    "quantize_batched": (_counts,),
    "fused_experts": (_ids, _expert_map, _capacity),
    "fused_moe": (_logits, _expert_map, _moe_capacity),
}
