"""Hand-written MoE blocks, one argument per thing to trip over, and their capture as Dynamo graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compile_passes.match import MoEMatch, Refusal
from compile_passes.reading import Reading
from compile_passes.recognise import recognise

T, E, K, H, I = 12, 8, 2, 32, 16
#: Experts where a loop over them is unrolled: every one is captured anew, and no test counts on the others.
FEW = 3


def weights(n: int = 2 * I, experts: int = E, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Hidden states, router weight and stacked expert weights."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=make) * 0.2).to(dtype)

    return {"x": normal(T, H) * 4, "gate": normal(experts, H), "w1": normal(experts, n, H), "w2": normal(experts, H, I)}


few_weights = partial(weights, experts=FEW)


def softmax_router(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the experts, top-k, renormalised."""
    values, ids = F.linear(x, gate).float().softmax(-1).topk(K, dim=-1)
    return values / values.sum(-1, keepdim=True), ids


def silu_glu(h: Tensor) -> Tensor:
    """The usual gated activation on concatenated halves."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)


def grouped(
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] = silu_glu,
    highest: int = E - 1,
    count: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] = lambda rows: rows,
    combine: str = "inverse",
    probe: Callable[[str, Tensor], None] = lambda name, value: None,
) -> Tensor:
    """Sorted rows through two grouped products, in the manner of transformers."""
    flat = ids.reshape(-1)
    ordered, perm = torch.sort(flat)
    rows = x[perm // K]
    counted = ordered if count is None else count(flat)
    offsets = torch.histc(counted.float(), bins=E, min=0, max=highest).cumsum(0, dtype=torch.int32)
    h = _product(rows, w1, offsets)
    probe("h", h)
    out = after(_product(activation(h), w2, offsets))
    if combine == "index_add":
        weighted = (out * topk_weights.reshape(-1)[perm].unsqueeze(-1)).to(x.dtype)
        return torch.zeros_like(x).index_add(0, perm // K, weighted)
    if combine == "argsort":
        out = out[perm.argsort()]
    elif combine == "scatter":
        blank = torch.empty_like(out)
        blank[perm] = out
        out = blank
    else:
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=perm.device)
        out = out[inverse]
    return (out.view(-1, K, H) * topk_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def batched(
    x: Tensor,
    ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] = silu_glu,
) -> Tensor:
    """Gathered weights and batched products, rows in token order."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(K, dim=0)
    h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
    out = torch.bmm(w2[flat], activation(h).unsqueeze(-1)).squeeze(-1)
    return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)


def block(
    experts: Callable[..., Tensor] = grouped, router: Callable[..., Any] = softmax_router, **options: Any
) -> Callable[..., Any]:
    """A function of (x, gate, w1, w2): router, then experts."""

    def run(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        topk_weights, ids = router(x, gate)
        return experts(x, ids, topk_weights, w1, w2, **options)

    return run


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> fx.GraphModule:
    """The one Dynamo graph of ``function``."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    assert len(graphs) == 1
    return graphs[0]


def found(function: Callable[..., Any], **inputs: Any) -> list[MoEMatch | Refusal]:
    """What the recognisers say about ``function``."""
    return recognise(Reading(capture(function, **(inputs or weights())).graph))


def match(function: Callable[..., Any], **inputs: Any) -> MoEMatch:
    """The one match of ``function``."""
    rows = found(function, **inputs)
    assert len(rows) == 1 and isinstance(rows[0], MoEMatch), "\n".join(map(str, rows))
    return rows[0]


def refusal(function: Callable[..., Any], **inputs: Any) -> Refusal:
    """The one refusal of ``function``."""
    rows = found(function, **inputs)
    assert len(rows) == 1 and isinstance(rows[0], Refusal), rows
    return rows[0]


def node_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """The node of a new graph that calls ``target`` (a method when it is a name); tensors become placeholders."""
    graph = fx.Graph()
    placeholders: dict[int, fx.Node] = {}

    def made(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in placeholders:
                placeholders[id(value)] = graph.placeholder(f"p{len(placeholders)}")
                placeholders[id(value)].meta["example_value"] = value
            return placeholders[id(value)]
        return type(value)(map(made, value)) if isinstance(value, list | tuple) else value

    create = graph.call_method if isinstance(target, str) else graph.call_function
    return create(target, made(args), {name: made(value) for name, value in kwargs.items()})


def counts(**some):
    """What the passes count: ``some``, and 0 of everything else."""
    names = "fused staged refused joined causal_masks shared_heads errors"
    return {**dict.fromkeys(names.split(), 0), **some}
