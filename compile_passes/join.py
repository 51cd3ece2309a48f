"""Join operators that are one step of a larger one, in inference graphs.

    fused_topk -> fused_experts                                             =>  fused_moe
    moe_permute -> grouped_mm_glu -> grouped_mm -> moe_unpermute            =>  fused_experts (then fused_moe)
    batched_dispatch -> batched_mm_glu -> batched_mm -> batched_combine     =>  fused_experts(format="batched")

Why it is legal: the large operator is defined as the chain of the small ones, every value between them has no reader
outside of the chain (a value saved for backward has one, so training graphs are left as they are), and no input is
overwritten before the end of the chain. A chain may quantise its rows before the first product and between the two.
The large operator may keep in fp32 what the chain rounds.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_passes.canonical import Canonical, equal_sizes
from compile_passes.vocabulary import example

_OPS = torch.ops.moe_ops
_EXPERT_EXTRAS = ("bias", "scale", "global_scale", "zero_point")
# What Inductor recorded about the arguments of the call that is replaced.
_OF_THE_CALL = frozenset({"eager_input_vals", "arg_kwarg_vals"})
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
    if not any(operator_name(node) for node in graph.nodes):
        return 0
    joined = 0
    for chain in _CHAINS:
        canon = Canonical(graph)
        joined += sum(
            _join_chain(canon, chain, node) for node in list(graph.nodes) if operator_name(node) == chain.combine
        )
    canon = Canonical(graph)
    return joined + sum(_join_topk(canon, node) for node in list(graph.nodes) if operator_name(node) == "fused_experts")


def operator_name(node: Any) -> str | None:
    """Name of a ``moe_ops`` operator call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target = node.target
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if not isinstance(packet, torch._ops.OpOverloadPacket) or not packet._qualified_op_name.startswith("moe_ops::"):
        return None
    return packet._qualified_op_name.removeprefix("moe_ops::")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operator call by name, defaults included."""
    schema = getattr(_OPS, operator_name(node) or "").default._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    return {**values, **dict(zip(positional, node.args, strict=False)), **node.kwargs}


def _item(node: Any, name: str, index: int) -> fx.Node | None:
    """The call of operator ``name`` that ``node`` is element ``index`` of."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not operator.getitem:
        return None
    source, position = node.args
    return source if isinstance(source, fx.Node) and position == index and operator_name(source) == name else None


def _join_topk(canon: Canonical, experts: fx.Node) -> bool:
    """``fused_experts(.., *fused_topk(..))`` becomes ``fused_moe`` when nothing else reads the weights or the ids."""
    call = _arguments(experts)
    topk = _item(call["topk_weights"], "fused_topk", 0)
    if topk is None or _item(call["topk_ids"], "fused_topk", 1) is not topk:
        return False
    between = {call["topk_weights"], call["topk_ids"], topk}
    router = _arguments(topk)
    logits, bias = router.pop("router_logits"), router.pop("correction_bias")
    if not _closed(canon, between, experts, (logits, bias)):
        return False
    hidden, gate_up, down = (call.pop(name) for name in ("hidden_states", "gate_up_proj", "down_proj"))
    call.pop("topk_weights"), call.pop("topk_ids")
    _replace(experts, "fused_moe", {"hidden_states": hidden, "router_logits": logits, "gate_up_proj": gate_up,
                                    "down_proj": down, "correction_bias": bias, **call, **router}, between)  # fmt: skip
    return True


def _join_chain(canon: Canonical, chain: _Chain, combine: fx.Node) -> bool:
    """A user's own stages become ``fused_experts``."""
    end = _arguments(combine)
    second_node = end[chain.rows]
    if operator_name(second_node) != chain.second:
        return False
    second = _arguments(second_node)
    first_node = _item(second[chain.rows], chain.first, 0)
    if first_node is None:
        return False
    first = _arguments(first_node)
    between: set[fx.Node] = {second_node, second[chain.rows], first_node}
    unquantized = _before_quantize(chain, first, second, first_node, between)
    dispatch_node = _item(unquantized, chain.dispatch, 0)
    if dispatch_node is None:
        return False
    between.update(item for item in dispatch_node.users)
    between.add(dispatch_node)
    start = _arguments(dispatch_node)
    if not _consistent(chain, start, first, second, end, dispatch_node, combine):
        return False
    inputs = (start["hidden_states"], start["topk_ids"], start["expert_map"], *first.values(), *second.values())
    if not _closed(canon, between, combine, [v for v in inputs if isinstance(v, fx.Node) and v not in between]):
        return False
    values = {
        "hidden_states": start["hidden_states"], "gate_up_proj": first["weight"], "down_proj": second["weight"],
        "topk_weights": end["topk_weights"], "topk_ids": start["topk_ids"], "expert_map": start["expert_map"],
        **{name: first[name] for name in _BODY}, "format": chain.format, "capacity": start.get("capacity"),
    }  # fmt: skip
    for name in _EXPERT_EXTRAS:
        source = name if name == "bias" else f"weight_{name}"
        values[f"gate_up_{name}"], values[f"down_{name}"] = first[source], second[source]
    _replace(combine, "fused_experts", values, between)
    return True


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
    call = _arguments(quantize)
    if call["scheme"] != first["scheme"]:
        return None
    return call["rows" if chain.format == "grouped" else "batch"]


def _consistent(
    chain: _Chain, start: dict[str, Any], first: dict[str, Any], second: dict[str, Any], end: dict[str, Any],
    dispatch_node: fx.Node, combine: fx.Node,
) -> bool:  # fmt: skip
    """Whether both products and the combine use what this dispatch made, in one scheme and the hidden states' dtype."""
    counts = "offsets" if chain.format == "grouped" else "expert_num_tokens"
    if any(_item(product[counts], chain.dispatch, 1) is not dispatch_node for product in (first, second)):
        return False
    if _item(end[chain.places], chain.dispatch, 2) is not dispatch_node or first["scheme"] != second["scheme"]:
        return False
    hidden, result, weight = example(start["hidden_states"]), example(combine), example(first["weight"])
    if hidden is None or result is None or weight is None or hidden.dtype != result.dtype:
        return False
    return equal_sizes(weight.shape[0], start["num_experts"])


def _closed(canon: Canonical, between: set[fx.Node], end: fx.Node, inputs: Any) -> bool:
    """Whether only the chain reads its interior, and nothing overwrites its inputs before its end."""
    if any(user is not end and user not in between for node in between for user in node.users):
        return False
    return all(
        canon.written_between(value, end) is None
        for value in inputs
        if isinstance(value, fx.Node) and value in canon.order
    )


def _replace(end: fx.Node, name: str, values: dict[str, Any], between: set[fx.Node]) -> None:
    """Put operator ``name`` in the place of ``end`` and erase the chain before it."""
    overload = getattr(_OPS, name).default
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        value = values.get(argument.name, argument.default_value)
        if not argument.kwarg_only:
            args.append(value)
        elif not argument.has_default_value() or value != argument.default_value:
            kwargs[argument.name] = value
    while args[-1] is None:
        args.pop()
    with end.graph.inserting_before(end):
        node = end.graph.create_node("call_function", overload, tuple(args), kwargs, name=name)
    node.meta = {key: value for key, value in end.meta.items() if key not in _OF_THE_CALL}
    end.replace_all_uses_with(node)
    end.graph.erase_node(end)
    pending = set(between)
    while pending:
        dead = {n for n in pending if not n.users}
        for n in dead:
            n.graph.erase_node(n)
        pending -= dead
