"""Join operators that are one step of a larger one, in inference graphs.

    fused_topk -> fused_experts                                             =>  fused_moe
    moe_permute -> grouped_mm_glu -> grouped_mm -> moe_unpermute            =>  fused_experts (then fused_moe)
    batched_dispatch -> batched_mm_glu -> batched_mm -> batched_combine     =>  fused_experts(format="batched")

Why it is legal: the large operator is defined as the chain of the small ones, every value between them has no reader
outside of the chain (a value saved for backward has one, so training graphs are left as they are), and no input is
overwritten, nor may be, before the end of the chain. A chain may quantise its rows before the first product and between
the two.
The large operator may keep in fp32 what the chain rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from compile_passes.builder import arguments, operator_name
from compile_passes.match import Refusal
from compile_passes.reading import Reading
from compile_passes.rewrite import Rewriter
from compile_passes.safety import changed_memory
from compile_passes.vocabulary import equal_sizes, example

_BODY = ("activation", "alpha", "limit", "glu_layout", "scheme")


@dataclass(frozen=True)
class _Chain:
    """Names of one format's stages; ``places`` is the argument that returns rows to tokens."""

    format: str
    dispatch: str
    quantize: str
    first: str
    second: str
    combine: str
    rows: str
    places: str


_CHAINS = (
    _Chain(
        "grouped", "moe_permute", "quantize_rows", "grouped_mm_glu", "grouped_mm", "moe_unpermute",
        rows="rows", places="pair_to_row",
    ),
    _Chain(
        "batched", "batched_dispatch", "quantize_batched", "batched_mm_glu", "batched_mm", "batched_combine",
        rows="batch", places="slots",
    ),
)  # fmt: skip


def join(graph: fx.Graph) -> int:
    """Join what can be joined; returns the number of operators inserted."""
    steps: list[tuple[str, Callable[[Rewriter, fx.Node], bool]]]
    steps = [(chain.combine, partial(_join_chain, chain)) for chain in _CHAINS]
    joined = 0
    for name, step in (*steps, ("fused_experts", _join_topk)):
        ends = [node for node in graph.nodes if operator_name(node) == name]
        if ends:
            rewriter = Rewriter(Reading(graph))
            joined += sum(step(rewriter, node) for node in ends)
    return joined


def _item(node: Any, name: str, index: int) -> fx.Node | None:
    """The call of operator ``name`` that ``node`` is element ``index`` of."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not operator.getitem:
        return None
    source, position = node.args
    return source if isinstance(source, fx.Node) and position == index and operator_name(source) == name else None


def _join_topk(rewriter: Rewriter, experts: fx.Node) -> bool:
    """``fused_experts(.., *fused_topk(..))`` becomes ``fused_moe`` when nothing else reads the weights or the ids."""
    call = arguments(experts)
    topk = _item(call["topk_weights"], "fused_topk", 0)
    if topk is None or _item(call["topk_ids"], "fused_topk", 1) is not topk:
        return False
    between = {call["topk_weights"], call["topk_ids"], topk}
    router = arguments(topk)
    logits, bias = router.pop("router_logits"), router.pop("correction_bias")
    if not _closed(rewriter.reading, between, experts, (logits, bias)):
        return False
    values = {**call, **router, "router_logits": logits, "correction_bias": bias}
    rewriter.apply_operator(experts, "fused_moe", values, between)
    return True


def _join_chain(chain: _Chain, rewriter: Rewriter, combine: fx.Node) -> bool:
    """A user's own stages become ``fused_experts``."""
    end = arguments(combine)
    second_node = end[chain.rows]
    if operator_name(second_node) != chain.second:
        return False
    second = arguments(second_node)
    first_node = _item(second[chain.rows], chain.first, 0)
    if first_node is None:
        return False
    first = arguments(first_node)
    between: set[fx.Node] = {second_node, second[chain.rows], first_node}
    unquantized = _before_quantize(chain, first, second, first_node, between)
    dispatch_node = _item(unquantized, chain.dispatch, 0)
    if dispatch_node is None:
        return False
    between.update(item for item in dispatch_node.users)
    between.add(dispatch_node)
    start = arguments(dispatch_node)
    if not _consistent(chain, start, first, second, end, dispatch_node, combine):
        return False
    inputs = (start["hidden_states"], start["topk_ids"], start["expert_map"], *_nodes(first), *_nodes(second))
    if not _closed(
        rewriter.reading, between, combine, [v for v in inputs if isinstance(v, fx.Node) and v not in between]
    ):
        return False
    values = {
        "hidden_states": start["hidden_states"], "gate_up_proj": first["weight"], "down_proj": second["weight"],
        "topk_weights": end["topk_weights"], "topk_ids": start["topk_ids"], "expert_map": start["expert_map"],
        **{name: first[name] for name in _BODY}, "format": chain.format, "capacity": start.get("capacity"),
        "gate_up_scales": first["weight_scales"], "down_scales": second["weight_scales"], "up_proj": first["up_weight"],
        "gate_up_bias": first["bias"], "down_bias": second["bias"],
    }  # fmt: skip
    rewriter.apply_operator(combine, "fused_experts", values, between)
    return True


def _nodes(call: dict[str, Any]) -> list[Any]:
    """The values of a call, those in lists included."""
    return [item for value in call.values() for item in (value if isinstance(value, list | tuple) else [value])]


def _before_quantize(
    chain: _Chain, first: dict[str, Any], second: dict[str, Any], first_node: fx.Node, between: set[fx.Node]
) -> Any:
    """The rows as they were dispatched, or None when quantisation is not that of one scheme throughout."""
    scale = f"{chain.rows}_scale"
    rows = first[chain.rows]
    if first[scale] is None:
        return rows if second[scale] is None and not first["quantize_output"] else None
    quantize = _item(rows, chain.quantize, 0)
    if quantize is None or _item(first[scale], chain.quantize, 1) is not quantize:
        return None
    if _item(second[scale], chain.first, 1) is not first_node or not first["quantize_output"]:
        return None
    between.update({rows, first[scale], second[scale], quantize})
    call = arguments(quantize)
    if call["scheme"] != first["scheme"]:
        return None
    return call["rows" if chain.format == "grouped" else "batch"]


def _consistent(
    chain: _Chain, start: dict[str, Any], first: dict[str, Any], second: dict[str, Any], end: dict[str, Any],
    dispatch_node: fx.Node, combine: fx.Node,
) -> bool:  # fmt: skip
    """Whether both products and the combine use what this dispatch made, in one scheme and the hidden states' dtype."""
    if end["added"] is not None or start.get("slot_order", "token") != "token":
        return False
    counts = "offsets" if chain.format == "grouped" else "expert_num_tokens"
    if any(_item(product[counts], chain.dispatch, 1) is not dispatch_node for product in (first, second)):
        return False
    if _item(end[chain.places], chain.dispatch, 2) is not dispatch_node or first["scheme"] != second["scheme"]:
        return False
    hidden, result, weight = example(start["hidden_states"]), example(combine), example(first["weight"])
    if hidden is None or result is None or weight is None or hidden.dtype != result.dtype:
        return False
    return equal_sizes(weight.shape[0], start["num_experts"])


def _closed(reading: Reading, between: set[fx.Node], end: fx.Node, inputs: Iterable[Any]) -> bool:
    """Whether only the chain reads its interior, and nothing overwrites its inputs before its end."""
    if any(user is not end and user not in between for node in between for user in node.users):
        return False
    nodes = [value for value in inputs if isinstance(value, fx.Node)]
    changed = changed_memory(reading, {*between, end}, nodes, end, end)
    return not isinstance(changed, Refusal) and not changed
