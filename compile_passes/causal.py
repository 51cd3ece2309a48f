"""Attention that is causal by construction says so, instead of reading a mask that says it.

Eagerly, model code that is given no padding passes no mask and `is_causal=True`. Under torch.compile it cannot look at
its inputs, so that transformers makes a mask [B, 1, T, T] of positions at every call, whose numbers no input changes.
Kernels of attention that read a mask compute what it hides, too, and the fastest of them read none: at 4096 tokens and
32 heads of 128, forward and backward took 3.4 ms of an H200 with the mask and 1.2 without.

    arange, compare, gather, and ---> scaled_dot_product_attention(q, k, v, attn_mask=mask)
    becomes
    scaled_dot_product_attention(q, k, v, is_causal=True)

Why that is legal. `is_causal` is defined as the mask `k <= q`; `coordinates` proves that this one is the same, for
every input and size: any further inequality has to hold wherever that one does (a window longer than the sequence).
Left alone: masks that depend on what the model is given, masks of numbers, which are added to the scores, fewer queries
than keys, dropout (which numbers are dropped depends on the kernel), and calls that torch would compute without a
kernel of its own. Kernels lay out their results differently, and code may take views of them: where the kernel changes,
the result is put in the old layout, which is a copy only where the new one differs. What is not finite at a place that
the mask hides is not read: 0 times that was NaN for kernels that compute all of it, eagerly it is not read either.

A mask may be made outside of what checkpointing runs again: what the outer graph knows goes with its operands, to
graphs that only this one calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import fx

from compile_passes.builder import Builder
from compile_passes.compat import fake_mode_of, sdpa_kernel, statically_known_true
from compile_passes.coordinates import Coordinates, Line, Where
from compile_passes.match import location
from compile_passes.reading import Reading
from compile_passes.recognise import closure
from compile_passes.rewrite import Rewriter
from compile_passes.safety import chooses_kernels, different_scope, unknown_tensors
from compile_passes.vocabulary import Call, equal_sizes, example, is_dense, target_name

log = logging.getLogger(__name__)

#: Operators whose first graph gets the operands behind it as they are.
_CALLS_OF_GRAPHS = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph"})


@dataclass(frozen=True)
class CausalCall:
    """``node``: a call of attention whose mask is causal; ``layout``: the order in memory of the dimensions of its
    result, where another kernel may have another one.
    """

    node: fx.Node
    layout: tuple[int, ...] | None


def may_be_causal(graph: fx.Graph) -> bool:
    """Whether there may be such a call in ``graph`` or in a graph that it calls, as far as it shows by itself."""
    return any("scaled_dot_product_attention" in target_name(node) or _body(node) is not None for node in graph.nodes)


def causal_calls(reading: Reading) -> list[CausalCall]:
    """The calls of attention whose mask is causal, whatever the input.

    What the operands of nested graphs hold is left with these graphs, which have to be read later.
    """
    coordinates = Coordinates(reading)
    found: list[CausalCall] = []
    for body in _called_elsewhere(reading.graph):
        coordinates.tell(body, repeat(None))
    if reading.reshaper is not None:
        return found
    for node in reading.graph.nodes:
        given = reading.call(node)
        called = None if given is None else _called(node, list(given.args.values()))
        if called is not None:
            body, operands = called
            coordinates.tell(body, repeat(None) if reading.is_stale(node) else operands)
        call = reading.read(node, "sdpa", "query key value attn_mask dropout_p is_causal scale enable_gqa")
        if call is None or not isinstance(call["attn_mask"], fx.Node):
            continue
        outcome = _decided(reading, coordinates, node, call)
        if isinstance(outcome, CausalCall):
            found.append(outcome)
        else:
            log.info("attention keeps its mask at %s: %s", location(node), outcome)
    return found


def drop_masks(rewriter: Rewriter, calls: list[CausalCall]) -> int:
    """Let the calls that `causal_calls` found say so; returns how many there were."""
    for call in calls:
        rewriter.apply_causal(call.node)
        if call.layout is not None:
            _lay_out(call.node, call.layout)
    return len(calls)


def _lay_out(node: fx.Node, layout: tuple[int, ...]) -> None:
    """Give every reader of ``node`` its value in an order of dimensions in memory that swaps two of them at most."""
    builder = Builder(node.graph, node)
    with node.graph.inserting_before(node.next):
        result = builder.laid_out(node, layout)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in builder.made)


def _layout(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    """The order in memory of the dimensions of a dense tensor: as they are, or the last two before the last swapped."""
    if tensor is None:
        return None
    rows = tuple(range(tensor.dim()))
    orders = (rows, (*rows[:-3], *rows[-2:-4:-1], *rows[-1:]))
    return next((order for order in orders if is_dense(tensor, order)), None)


def _body(node: fx.Node) -> fx.Graph | None:
    """The graph that ``node`` is the name of."""
    owner = node.graph.owning_module
    module = getattr(owner, str(node.target), None) if node.op == "get_attr" and owner is not None else None
    return module.graph if isinstance(module, fx.GraphModule) else None


def _called(node: fx.Node, args: Sequence[Any]) -> tuple[fx.Graph, list[Any]] | None:
    """(a graph that ``node`` calls, its operands), of a call that is given ``args``."""
    if node.op != "call_function" or target_name(node) not in _CALLS_OF_GRAPHS or not node.args:
        return None
    first, *operands = args[: len(node.args)]
    body = _body(first) if isinstance(first, fx.Node) else None
    operands = operands[1:] if operands and isinstance(operands[0], str) else operands  # invoke_subgraph's name
    return (body, operands) if body is not None and len(operands) == len(body.find_nodes(op="placeholder")) else None


def _called_elsewhere(graph: fx.Graph) -> Iterator[fx.Graph]:
    """The graphs below ``graph`` that several graphs call, or that are called in another way than `_called` reads."""
    callers: dict[fx.Graph, fx.Graph] = {}
    modules = () if graph.owning_module is None else graph.owning_module.modules()
    for caller in [module.graph for module in modules if isinstance(module, fx.GraphModule)]:
        for node in caller.find_nodes(op="get_attr"):
            body = _body(node)
            if body is None:
                continue
            known = all(_called(user, user.args) is not None for user in node.users)
            if callers.setdefault(body, caller) is not caller or not known:
                yield body


def _decided(reading: Reading, coordinates: Coordinates, node: fx.Node, call: Call) -> CausalCall | str:
    """The call, or why it has to keep its mask."""
    query, key, value, mask = (example(call[name]) for name in ("query", "key", "value", "attn_mask"))
    if query is None or key is None or value is None or mask is None or min(query.dim(), key.dim(), mask.dim()) < 2:
        return "the graph carries no shapes for it"
    if reading.is_stale(node):
        return "its operands were overwritten"
    if mask.dtype != torch.bool:
        return "its mask is added to the scores"
    if call["is_causal"] is not False or call["dropout_p"] != 0:
        return "it has dropout, or is causal besides its mask"
    if not _is_positive(call["scale"]):
        return "its scale is not known to be positive, and torch's kernels hide the others' scores before they scale"
    length = query.shape[-2]
    if not all(equal_sizes(size, length) for size in (key.shape[-2], *mask.shape[-2:])):
        return "it has not as many queries as keys"
    known = coordinates.value(call["attn_mask"])
    if not isinstance(known, Where) or not _is_causal(known, mask.shape):
        return "its mask is not known to be causal for every input"
    region = {node} | closure(reading, call["attn_mask"], [])
    problem = unknown_tensors([node], [call[name] for name in ("query", "key", "value")])
    problem = problem or different_scope(reading, region)
    if problem is not None:
        return problem.reason
    if chooses_kernels(reading, node):
        return "the code chooses torch's kernel"
    options = {"enable_gqa": True} if call["enable_gqa"] else {}
    mode = fake_mode_of(query)
    before = sdpa_kernel(mode, (query, key, value, mask), **options)
    after = sdpa_kernel(mode, (query, key, value, None), is_causal=True, **options)
    if before == after and after is not None:
        return CausalCall(node, None)
    if after in (None, "MATH"):
        return f"torch would change from its kernel {before} to {after}"
    if before == "MATH" and _may_be_overwritten(reading, node, [call[name] for name in ("query", "key", "value")]):
        return f"its operands or result may be overwritten, which torch's kernel {after} keeps for the backward pass"
    layout = _layout(example(node))
    return "its result has an unusual layout" if layout is None else CausalCall(node, layout)


def _may_be_overwritten(reading: Reading, node: fx.Node, operands: list[fx.Node]) -> bool:
    """Whether the result of ``node``, which has a gradient, or one of its operands is written in place after it, or
    handed out to code that may do so.

    torch's kernels save these for the backward pass; what is computed without one is of products, which save scaled or
    converted copies of the operands, and not the result.
    """
    result = example(node)
    if result is None or not result.requires_grad:
        return False
    memory = reading.memory
    return any(
        memory.written_between(saved, node, None) is not None
        or any(user.op == "output" for name in memory.names(saved) for user in name.users)
        for saved in (node, *operands)
    )


def _is_positive(scale: Any) -> bool:
    """Whether minus infinity is that after a scale, too: one that is a float32 more than zero, or none."""
    value = scale.meta.get("example_value") if isinstance(scale, fx.Node) else scale  # a symbol of a known value
    if scale is None or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return scale is None
    limits = torch.finfo(torch.float32)
    return statically_known_true(value >= limits.tiny) and statically_known_true(value < limits.max)


def _is_causal(mask: Where, shape: Any) -> bool:
    """Whether a mask of this shape is True just where the key's place is at most the query's."""
    others = (0,) * (len(shape) - 2)
    causal = Line(0, (*others, 1, -1))
    return causal in mask.lines and all(
        line.never_negative(shape) or line.plus(causal, -1).never_negative(shape) for line in mask.lines
    )
