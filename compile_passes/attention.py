"""Grouped-query attention that reads its key and value heads where they are, instead of repeated copies of them.

A decode step of an MoE model moves two things: expert weights and the key/value cache. Model code that passes a mask
repeats every key and value head once per query head before `scaled_dot_product_attention`, because not every kernel
of it takes fewer key than query heads. Under torch.compile that copy is written and read back at every step: with
eight query heads per key head, 17 times the bytes of the cache.

    unsqueeze -> expand -> reshape --+                          (also repeat_interleave)
    unsqueeze -> expand -> reshape --+--> scaled_dot_product_attention(q, k, v, mask)
    becomes
    scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

Why the rewrite is legal. `enable_gqa=True` is defined as repeating each key and value head for its group of
consecutive query heads, which is what the matched nodes do; the cache is not overwritten between the repetition and
the attention; and torch chooses the same kernel for both forms, so it neither computes differently nor runs a slower
one. Left alone: calls whose inputs require grad, calls with one of the two repeated only, and calls for which the
kernel would change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_passes.canonical import Canonical, equal_sizes
from compile_passes.match import location
from compile_passes.rewrite import sweep
from compile_passes.vocabulary import Call, example
from moe_ops.compat_compile import fake_mode_of, sdpa_kernel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repeated:
    """``value`` [B, heads, S, D] repeats each head of ``source`` [B, heads / times, S, D] ``times`` times in a row."""

    value: fx.Node
    source: fx.Node
    times: int


def share_heads(graph: fx.Graph) -> list[fx.Node]:
    """Let attention read key and value heads without repeating them; returns the calls that were changed."""
    canon = Canonical(graph)
    changed = []
    for node in list(graph.nodes):
        call = canon.named(node, "sdpa")
        if call is None:
            continue
        key, value = repeated_heads(canon, call["key"]), repeated_heads(canon, call["value"])
        if key is None or value is None:
            continue
        reason = _refuses(canon, node, call, key, value)
        if reason is not None:
            log.info("key and value heads stay repeated at %s: %s", location(node), reason)
            continue
        for repeated in (key, value):
            node.replace_input_with(canon.operand(repeated.value), canon.operand(repeated.source))
        node.kwargs = {**node.kwargs, "enable_gqa": True}
        sweep(graph, canon, [key.value, value.value])
        changed.append(node)
    return changed


def repeated_heads(canon: Canonical, value: Any) -> Repeated | None:
    """How ``value`` repeats the heads of another tensor, or None."""
    call = canon.named(canon.strip(value), "expand", "repeat_interleave")
    if call is None or not isinstance(value, fx.Node):
        return None
    source, times = _interleaved(call) if call.name == "repeat_interleave" else _expanded(canon, value, call)
    tensor = example(source)
    if source is None or tensor is None or tensor.dim() != 4 or type(times) is not int:
        return None
    batch, heads, length, width = tensor.shape
    return Repeated(value, source, times) if _is_shape(value, (batch, heads * times, length, width)) else None


def _interleaved(call: Call) -> tuple[Any, Any]:
    """(source, times) of a `repeat_interleave` along the heads."""
    return (call["x"], call["repeats"]) if call["dim"] in (1, -3) else (None, None)


def _expanded(canon: Canonical, value: fx.Node, call: Call) -> tuple[Any, Any]:
    """(source, times) of [B, heads, 1, S, D] expanded to [B, heads, times, S, D]."""
    narrow, wide = example(call["x"]), example(canon.strip(value))
    if narrow is None or wide is None or not narrow.dim() == wide.dim() == 5 or not equal_sizes(narrow.shape[2], 1):
        return None, None
    heads = narrow.shape[:2] + narrow.shape[3:]
    return next((x for x in canon.reshapes(call["x"]) if _is_shape(x, heads)), None), wide.shape[2]


def _is_shape(value: Any, shape: Any) -> bool:
    tensor = example(value)
    return tensor is not None and tensor.dim() == len(shape) and all(map(equal_sizes, tensor.shape, shape))


def _refuses(canon: Canonical, node: fx.Node, call: Call, key: Repeated, value: Repeated) -> str | None:
    """Why the call has to stay as it is, or None."""
    if key.times != value.times or call["enable_gqa"]:
        return "keys and values are repeated differently"
    if not {canon.operand(repeated.value) for repeated in (key, value)} <= {*node.all_input_nodes}:
        return "it reads the heads under another name"
    if any(canon.written_between(repeated.source, node) for repeated in (key, value)):
        return "the cache is overwritten between the repetition and the attention"
    if any(reader in canon.hazards for reader in (node, key.value, value.value, key.source, value.source)):
        return "a view of the cache is read after it was overwritten through another name"
    query, mask = example(call["query"]), example(call["attn_mask"])
    if query is None or (mask is None and call["attn_mask"] is not None):
        return "the graph carries no shapes for it"
    repeated, shared = (
        (query, *map(example, heads), mask) for heads in ((key.value, value.value), (key.source, value.source))
    )
    if any(tensor is not None and tensor.requires_grad for tensor in (*repeated, *shared)):
        return "its inputs require grad"
    options = {name: call[name] for name in ("dropout_p", "is_causal") if call[name] is not None}
    if any(isinstance(option, fx.Node) for option in options.values()):
        return "one of its options is computed in the graph"
    before = sdpa_kernel(fake_mode_of(query), repeated, **options)
    after = sdpa_kernel(fake_mode_of(query), shared, **options, enable_gqa=True)
    return None if before == after else f"torch would change from its kernel {before} to {after}"
