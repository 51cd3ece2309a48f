"""Grouped-query attention that reads its key and value heads where they are, instead of repeated copies of them.

A decode step of an MoE model moves two things: expert weights and the key/value cache. Model code that passes a mask
repeats every key and value head once per query head before `scaled_dot_product_attention`, because not every kernel
of it takes fewer key than query heads; code that writes attention out, as gpt-oss does for its sinks, before each of
the two products. Under torch.compile that copy is written and read back at every step: with eight query heads per key
head, 17 times the bytes of the cache.

    unsqueeze -> expand -> reshape --+                          (also repeat_interleave)
    unsqueeze -> expand -> reshape --+--> scaled_dot_product_attention(q, k, v, mask)
    becomes
    scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    unsqueeze -> expand -> reshape -> [transpose] ---> matmul(q, repeated)
    becomes, of as many query heads as share a key head one matrix,
    matmul(q.unflatten(1, (-1, times)).flatten(2, 3), heads).unflatten(2, (times, -1)).flatten(1, 2)

Why the rewrites are legal. `enable_gqa=True` is defined as repeating each key and value head for its group of
consecutive query heads, which is what the matched nodes do; torch chooses the same kernel for both forms, so it neither
computes differently nor runs a slower one. A number of a product is the same sum of the same products, in the same
dtype. The cache is not overwritten between the repetition and its use. Left alone: inputs that require grad, but of
kernels that give shared heads their gradients themselves; calls of attention with one of the two repeated only, and
those for which the kernel would change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_passes.compat import fake_mode_of, sdpa_kernel
from compile_passes.match import Refusal, Weight, location
from compile_passes.patterns.contraction import peel_transpose
from compile_passes.reading import Reading
from compile_passes.recognise import closure
from compile_passes.rewrite import Rewriter
from compile_passes.safety import changed_memory, chooses_kernels, different_scope, unknown_tensors
from compile_passes.vocabulary import Call, equal_sizes, example, has_shape, rank, spell

log = logging.getLogger(__name__)

#: Kernels whose backward sums a shared head's gradient over its query heads.
_DIFFERENTIATE_SHARED = frozenset({"FLASH_ATTENTION", "FLASH_ATTENTION_FOR_CPU", "CUDNN_ATTENTION"})


@dataclass(frozen=True)
class Repeated:
    """``value`` [B, heads, S, D] repeats each head of ``source`` [B, heads / times, S, D] ``times`` times in a row."""

    value: fx.Node
    source: fx.Node
    times: int


@dataclass(frozen=True)
class SharedProduct:
    """``node``: the product of ``left`` [B, heads, T, X] with repeated heads [B, heads, X, S], transposed or not."""

    node: fx.Node
    left: fx.Node
    right: Repeated
    transposed: bool


@dataclass(frozen=True)
class SharedCall:
    """``node``: a call of attention with repeated keys and values."""

    node: fx.Node
    key: Repeated
    value: Repeated


def shareable(reading: Reading) -> list[SharedCall | SharedProduct]:
    """The calls of attention, and products, that need not repeat key and value heads."""
    found: list[SharedCall | SharedProduct] = []
    for node in reading.graph.nodes:
        change, reason = _call(reading, node) or _product(reading, node) or (None, None)
        if change is not None and reason is None:
            found.append(change)
        elif change is not None:
            log.info("key and value heads stay repeated at %s: %s", location(node), reason)
    return found


def share_heads(rewriter: Rewriter, found: list[SharedCall | SharedProduct]) -> int:
    """Let those of `shareable` read key and value heads without repeating them; returns how many there were."""
    for one in found:
        if isinstance(one, SharedCall):
            rewriter.apply_shared_heads(one.node, {"key": (1, one.key.source), "value": (2, one.value.source)})
        else:
            rewriter.apply_shared_product(one.node, one.left, one.right.source, one.right.times, one.transposed)
    return len(found)


def _call(reading: Reading, node: fx.Node) -> tuple[SharedCall, str | None] | None:
    """A call of attention that repeats heads, and why it has to stay as it is."""
    call = reading.read(node, "sdpa", "query key value attn_mask dropout_p is_causal scale")
    if call is None:
        return None
    key, value = repeated_heads(reading, call["key"]), repeated_heads(reading, call["value"])
    if key is None or value is None:
        return None
    return SharedCall(node, key, value), _refuses(reading, node, call, key, value)


def _product(reading: Reading, node: fx.Node) -> tuple[SharedProduct, str | None] | None:
    """The same of a product."""
    call = reading.read(node, "matmul", "x y")
    if call is None or rank(node) != 4:
        return None
    turned = peel_transpose(reading, Weight(call["y"], False))
    right = repeated_heads(reading, turned.node)
    if right is None:
        return None
    product = SharedProduct(node, call["x"], right, turned.transposed)
    left, wide, heads, result = map(example, (call["x"], call["y"], right.source, node))
    if left is None or wide is None or heads is None or result is None:
        return product, "the graph carries no shapes for it"
    if left.dim() != 4 or not all(map(equal_sizes, left.shape[:2], wide.shape[:2])):
        return product, "what is multiplied has not one head for each repeated one"
    if not left.dtype == heads.dtype == result.dtype:
        return product, "it is computed in another dtype"
    if left.requires_grad or heads.requires_grad:
        return product, "its inputs require grad"
    return product, _unsafe(reading, node, [right], closure(reading, call["y"], [right.source]))


def may_repeat_heads(node: fx.Node) -> bool:
    """Whether ``node`` may be what `repeated_heads` looks for, as far as it shows by itself."""
    dims = rank(node)
    call = spell(node) if dims in (4, 5) else None
    return call is not None and (call.name, dims) in (("repeat_interleave", 4), ("expand", 5))


def repeated_heads(reading: Reading, value: Any) -> Repeated | None:
    """How ``value`` repeats the heads of another tensor, or None."""
    call = reading.read(reading.strip(value), "expand repeat_interleave", "repeats dim")
    if call is None or not isinstance(value, fx.Node):
        return None
    source, times = _interleaved(call) if call.name == "repeat_interleave" else _expanded(reading, value, call)
    tensor = example(source)
    if source is None or tensor is None or tensor.dim() != 4 or type(times) is not int:
        return None
    batch, heads, length, width = tensor.shape
    return Repeated(value, source, times) if has_shape(value, batch, heads * times, length, width) else None


def _interleaved(call: Call) -> tuple[Any, Any]:
    """(source, times) of a `repeat_interleave` along the heads."""
    return (call["x"], call["repeats"]) if call["dim"] in (1, -3) else (None, None)


def _expanded(reading: Reading, value: fx.Node, call: Call) -> tuple[Any, Any]:
    """(source, times) of [B, heads, 1, S, D] expanded to [B, heads, times, S, D]."""
    narrow, wide = example(call["x"]), example(reading.strip(value))
    if narrow is None or wide is None or not narrow.dim() == wide.dim() == 5 or not equal_sizes(narrow.shape[2], 1):
        return None, None
    heads = narrow.shape[:2] + narrow.shape[3:]
    return next((x for x in reading.reshapes(call["x"]) if has_shape(x, *heads)), None), wide.shape[2]


def _refuses(reading: Reading, node: fx.Node, call: Call, key: Repeated, value: Repeated) -> str | None:
    """Why the call has to stay as it is, or None."""
    if key.times != value.times or call["enable_gqa"]:
        return "keys and values are repeated differently"
    between = closure(reading, key.value, [key.source]) | closure(reading, value.value, [value.source])
    reason = _unsafe(reading, node, [key, value], between)
    if reason is not None:
        return reason
    query, mask = example(call["query"]), example(call["attn_mask"])
    if query is None or (mask is None and call["attn_mask"] is not None):
        return "the graph carries no shapes for it"
    heads = example(key.value)
    if query.dim() != 4 or heads is None or not all(map(equal_sizes, query.shape[:2], heads.shape[:2])):
        return "the query has not one head for each repeated key head"
    repeated, shared = (
        (query, *map(example, heads), mask) for heads in ((key.value, value.value), (key.source, value.source))
    )
    if chooses_kernels(reading, node):
        return "the code chooses torch's kernel, which may not share heads"
    options = {name: call[name] for name in ("dropout_p", "is_causal") if call[name] is not None}
    if any(isinstance(option, fx.Node) for option in options.values()):
        return "one of its options is computed in the graph"
    before = sdpa_kernel(fake_mode_of(query), repeated, **options)
    after = sdpa_kernel(fake_mode_of(query), shared, **options, enable_gqa=True)
    if before is None or before != after:
        return f"torch would change from its kernel {before} to {after}"
    trained = any(tensor is not None and tensor.requires_grad for tensor in (*repeated, *shared))
    if trained and len({reading.grad_mode(site) for site in (node, *between)}) > 1:
        return "copies of its heads are made under another gradient mode"  # and may have no gradient, unlike the heads
    return "its inputs require grad" if trained and before not in _DIFFERENTIATE_SHARED else None


def _unsafe(reading: Reading, node: fx.Node, repeated: list[Repeated], between: set[fx.Node]) -> str | None:
    """Why ``node`` may not read the heads that are ``repeated`` by what is ``between``, or None."""
    region, sources = {node} | between, [one.source for one in repeated]
    problem = unknown_tensors(region, sources) or different_scope(reading, region)
    if problem is not None:
        return problem.reason
    changed = changed_memory(reading, region, sources, node, node)
    if isinstance(changed, Refusal) or changed:
        return changed.reason if isinstance(changed, Refusal) else "an input is overwritten that may be the cache"
    return None
