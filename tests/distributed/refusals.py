"""What is refused: on every rank, by one error that names it, and the next call of the layer works.

Of what one rank alone is told, the others say what it refused, or what the ranks disagree about.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

import moe_ops
from moe_ops import ep
from tests.distributed.ranks import CROSSING, PATIENCE, Check, E, H, I, Layer, Ranks, integers, random, routed

T = 3


def refused(ranks: Ranks, call: Callable[[], Any], *words: str, error: type[Exception] = ValueError) -> None:
    """`call` raises an `error` with these words in it, and a good call after it works."""
    try:
        call()
    except error as raised:
        for word in words:
            ranks.expect(word in str(raised), f"{word!r} is not in {str(raised)!r}")
    except Exception:
        ranks.expect(False, f"not a {error.__name__}: {traceback.format_exc()}")
    else:
        ranks.expect(False, f"nothing was refused, expected {words}")
    layer = integers(ranks.size * T)
    ranks.same(ranks.run(layer, "gather"), ranks.share("gather", layer.alone()), "the next call")


def _prepare(ranks: Ranks, tokens: int = T, **more: Any) -> ep.Prepared:
    x, weights, ids = random(tokens)[:3]
    options = {"hidden_states": x, "topk_weights": weights, "topk_ids": ids, "num_experts": E, "group": ranks.group}
    return ep.prepare(**{**options, **more})


def _last(ranks: Ranks, value: Any, other: Any = None) -> Any:
    """`value` on the last rank, `other` on those before it."""
    return value if ranks.rank == ranks.size - 1 else other


def _of_every_rank(value: Any, last: Any, ranks: Ranks) -> str:
    return ", ".join(f"{last if rank == ranks.size - 1 else value} on rank {rank}" for rank in range(ranks.size))


def tokens(ranks: Ranks) -> None:
    said = f"ep.prepare: T must be the same on every rank of the group, got {_of_every_rank(3, 4, ranks)}. Pad the"
    refused(ranks, lambda: _prepare(ranks, _last(ranks, 4, 3)), said)
    refused(ranks, lambda: _prepare(ranks, _last(ranks, 0, 3)), _of_every_rank(3, 0, ranks))


def widths(ranks: Ranks) -> None:
    x = torch.randn(T, _last(ranks, H + 2, H))
    refused(ranks, lambda: _prepare(ranks, hidden_states=x), _of_every_rank(H, H + 2, ranks))
    weights, ids = torch.rand(T, _last(ranks, 2, 1)), torch.zeros(T, _last(ranks, 2, 1), dtype=torch.int64)
    refused(ranks, lambda: _prepare(ranks, topk_weights=weights, topk_ids=ids), "K must be the same", "2 on rank")


def dtypes(ranks: Ranks) -> None:
    for name, shape in (("hidden_states", (T, H)), ("topk_weights", (T, 3))):
        given = {name: torch.rand(shape).to(_last(ranks, torch.bfloat16, torch.float32))}
        said = _of_every_rank(torch.float32, torch.bfloat16, ranks)
        refused(ranks, lambda given=given: _prepare(ranks, **given), f"rank of the group, got {said}")


def options(ranks: Ranks) -> None:
    for name, value, other in (
        ("transport", "all_to_all", "gather"),
        ("transport", "replicated", "all_to_all"),
        ("scheme", "fp8_block128", None),
        ("rank_capacity", 2, 3),
        ("num_experts", 2 * E, E),
    ):
        given = {"transport": "all_to_all", name: _last(ranks, value, other)}
        said = f"{name} must be the same on every rank of the group, got {_of_every_rank(other, value, ranks)}"
        refused(ranks, lambda given=given: _prepare(ranks, **given), said)


def results(ranks: Ranks) -> None:
    """What `finalize` is given."""
    prepared = _prepare(ranks)
    rows = prepared.rows
    given = rows.to(_last(ranks, torch.bfloat16, torch.float32))
    refused(
        ranks, lambda: ep.finalize(given, prepared), "ep.finalize: dtype must be the same", "torch.bfloat16 on rank"
    )
    prepared = _prepare(ranks)
    shorter = rows[: _last(ranks, 1, rows.shape[0])]
    refused(ranks, lambda: ep.finalize(shorter, prepared), "ep.finalize", f"result must be [R={rows.shape[0]}, H={H}]")


def experts(ranks: Ranks) -> None:
    """A number that does not divide, everywhere, and on one rank; below 0; another one than the weights have."""
    said = f"num_experts must be a multiple of the group's size, got 7 for {ranks.size} ranks"
    refused(ranks, lambda: _prepare(ranks, num_experts=7), said)
    refused(ranks, lambda: _prepare(ranks, num_experts=_last(ranks, 7, E)), said, _last(ranks, "", _refused(ranks)))
    refused(ranks, lambda: _prepare(ranks, num_experts=-E), "ep.prepare: num_experts must be >= 0, got -8.")
    layer = random(T)
    held = [ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down)]
    more = _prepare(ranks, num_experts=2 * E)
    said = f"ep.experts: gate_up_proj must be [E={2 * E // ranks.size}, N={2 * I}, K={H}], got"
    refused(ranks, lambda: ep.experts(more, *held), said, "of as many experts as moe_ops.ep.prepare was told")
    expert_map = torch.arange(2 * E // ranks.size) % len(held[0])
    ranks.expect(ep.experts(more, *held, expert_map=expert_map).isfinite().all(), "a map")


def _refused(ranks: Ranks) -> str:
    return f"rank {ranks.size - 1} of group {ranks.group.group_name!r} refused its arguments: "


def transports(ranks: Ranks) -> None:
    refused(ranks, lambda: _prepare(ranks, transport="nccl"), "transport must be one of", "got 'nccl'")
    refused(ranks, lambda: _prepare(ranks, transport="symm"), "symm is for GPUs of one host", "'symm' for cpu tensors")
    refused(
        ranks, lambda: _prepare(ranks, transport="nvshmem"), "nvshmem is for GPUs", "'nvshmem' for cpu tensors",
        "TORCH_SYMMMEM=NVSHMEM",
    )  # fmt: skip
    refused(ranks, lambda: _prepare(ranks, transport="local"), f"got 'local' for a group of {ranks.size}")
    one = _last(ranks, "nccl", "gather")
    refused(ranks, lambda: _prepare(ranks, transport=one), "got 'nccl'", _last(ranks, "", _refused(ranks)))


def capacities(ranks: Ranks) -> None:
    for transport in ("gather", "replicated"):
        said = f"rank_capacity must be None for transport={transport!r}, got 2"
        refused(ranks, lambda transport=transport: _prepare(ranks, transport=transport, rank_capacity=2), said)
    refused(ranks, lambda: _prepare(ranks, transport="all_to_all", rank_capacity=0), "rank_capacity must be >= 1")

    def run() -> Tensor:
        with moe_ops.debug():
            return _layer(ranks, format="batched", capacity=_last(ranks, 1, 2 * T * ranks.size))

    said = f"capacity must be the same on every rank of the group, got {_of_every_rank(2 * T * ranks.size, 1, ranks)}"
    refused(ranks, run, said, "every rank judges the rows of all by its own")


def no_columns(ranks: Ranks) -> None:
    """What there is nothing of to send; alone, sums of nothing are 0."""
    x, weights, ids = random(T)[:3]
    for given, said in (
        ({"hidden_states": x[:, :0]}, "H of hidden_states must be >= 1 where rows go to other ranks, got 0. Leave it"),
        ({"topk_weights": weights[:, :0], "topk_ids": ids[:, :0]}, "K of topk_ids must be >= 1 where rows go to other"),
    ):
        for transport in CROSSING:
            refused(ranks, partial(_prepare, ranks, transport=transport, **given), f"ep.prepare: {said}")
        prepared = _prepare(ranks, group=ranks.alone, **given)
        layer = random(T)
        held = layer.gate_up[..., : prepared.rows.shape[1]], layer.down[:, : prepared.rows.shape[1]]
        result = ep.finalize(ep.experts(prepared, *held), prepared)
        ranks.same(result, torch.zeros_like(prepared.rows), "of one rank")


def arguments(ranks: Ranks) -> None:
    """Of the wrong type, rank or dtype, on every rank and on one."""
    for name, value in (("topk_ids", torch.rand(T, 3)), ("hidden_states", torch.rand(T, 1, H)), ("num_experts", "8")):
        refused(ranks, lambda given={name: value}: _prepare(ranks, **given), f"ep.prepare: {name} must be")
    prepared = _prepare(ranks)
    refused(ranks, lambda: ep.finalize(prepared.rows.long(), prepared), "ep.finalize: result must be bfloat16, float")
    x = random(T).x
    refused(ranks, lambda: _prepare(ranks, hidden_states=x.to_sparse()), "hidden_states must be a strided tensor")
    refused(ranks, lambda: _prepare(ranks, topk_weights=random(T).weights.to("meta")), "topk_weights must be on cpu")
    good = random(T).ids
    ids = _last(ranks, good.float(), good)
    refused(ranks, lambda: _prepare(ranks, topk_ids=ids), "topk_ids must be", _last(ranks, "", _refused(ranks)))


def _layer(ranks: Ranks, transport: str | None = None, *, held: Any = None, **more: Any) -> Tensor:
    layer = random(ranks.size * T)
    weights = held or [ranks.held(transport, tensor) for tensor in (layer.gate_up, layer.down)]
    x, routing, ids = (ranks.share(transport, tensor) for tensor in layer[:3])
    return moe_ops.fused_experts(x, *weights, routing, ids, **{"group": ranks.group, "transport": transport, **more})


def types(ranks: Ranks) -> None:
    """What no argument of the layer may be, on one rank."""
    scales = torch.ones(3)
    wrong = {"gate_up_scales": scales, "up_proj": "3", "down_bias": [1.0], "capacity": "3", "scheme": ["mxfp4"]}
    for name, value in wrong.items():
        given = {name: value} if ranks.rank == ranks.size - 1 else {}
        said = f"fused_experts: {name} must be", _last(ranks, "", _refused(ranks))
        refused(ranks, lambda given=given: _layer(ranks, **given), *said)


def quantised(ranks: Ranks) -> None:
    """Weights that bring their scales, of which one rank's do not go together."""
    held = [ranks.held(None, tensor) for tensor in random(ranks.size * T)[3:5]]

    def weight(tensor: Tensor, scheme: str) -> Tensor:
        data, *scales = moe_ops.quantize_weight(tensor, scheme=scheme)
        return moe_ops.QuantizedWeight(data, scales, scheme=scheme)

    gate_up, down = (weight(tensor, "int8_channel") for tensor in held)
    wrong = ([gate_up, held[1]], [gate_up, weight(held[1], "int8_w8a16")])  # one projection's, and of two schemes
    for last in wrong:
        said = "down_proj must be quantised as the other weights are", _last(ranks, "", _refused(ranks))
        refused(ranks, partial(_layer, ranks, held=_last(ranks, last, [gate_up, down])), *said)


def backends(ranks: Ranks) -> None:
    """One rank insists on a backend that does not serve these tensors."""
    said = "fused_experts: backend='triton' must accept the problem", _last(ranks, "", _refused(ranks))
    refused(ranks, lambda: _layer(ranks, backend=_last(ranks, "triton")), *said)


def arguments_in_a_graph(ranks: Ranks) -> None:
    """The same where sizes and numbers are symbols, of which Dynamo writes no text. The ranks that are told nothing
    wrong compile the shortest alone: `weights_in_a_graph` has a layer that all of them compile.
    """
    layer = random(T)
    given = [ranks.held(None, layer.gate_up), ranks.held(None, layer.down), *layer[:3]]

    def prepare(number: int) -> Tensor:
        return ep.prepare(*layer[:3], num_experts=number, group=ranks.group).rows * 1

    def whole(gate_up: Tensor, down: Tensor, x: Tensor, weights: Tensor, ids: Tensor, **more: Any) -> Tensor:
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group, **more)

    cases = {
        "num_experts must be a multiple of the group's size, got 7": (prepare, _last(ranks, [7], [E]), {}),
        "topk_weights must be [T=3, K=": (whole, [*given[:3], given[3][: _last(ranks, 2, 3)], given[4]], {}),
        "capacity must be": (whole, given, {"format": "batched", "capacity": _last(ranks, 0, 3)}),
        "weight_on_input must be True or False, got 1 (int)": (
            whole,
            given,
            {"weight_on_input": _last(ranks, 1, True)},
        ),
        "the same on every rank of the group, got 1.5": (
            whole,
            given,
            {"activation": "swiglu_oai", "alpha": _last(ranks, 1.25, 1.5)},
        ),
    }
    for said, (function, positional, named) in cases.items():
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        try:
            (compiled if function is prepare else _last(ranks, compiled, function))(*positional, **named)
        except Exception as raised:
            ranks.expect(said in str(raised), f"{said!r} is not in {str(raised)!r}")
        else:
            ranks.expect(False, f"nothing was refused, expected {said!r}")
    ranks.close(_layer(ranks), ranks.share(None, random(ranks.size * T).alone()), 1e-6, "the next call")


def arguments_beside_a_graph(ranks: Ranks) -> None:
    """What Python refuses while code is captured that may be in parts, as eager code would once more: told once."""
    torch.compiler.reset()
    layer = random(ranks.size * T)
    given = [ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down)]
    given = [ranks.share(None, layer.x), *given, *(ranks.share(None, tensor) for tensor in layer[1:3])]
    compiled = torch.compile(partial(moe_ops.fused_experts, group=ranks.group), backend="aot_eager")
    for name, wrong, said in (("rank_capacity", 0, "must be >= 1, got 0"), ("transport", "nccl", "got 'nccl'")):
        more = {name: wrong} if ranks.rank == ranks.size - 1 else {}
        try:
            compiled(*given, **more)
        except Exception as raised:
            ranks.expect(said in str(raised), f"{said!r} is not in {str(raised)!r}")
        else:
            ranks.expect(False, f"nothing was refused, expected {said!r}")
        ranks.close(compiled(*given), ranks.share(None, layer.alone()), 1e-6, f"{name}, the next call")


def trained_in_part(ranks: Ranks) -> None:
    """A backward exchanges gradients, and would wait for the ranks that have none."""
    layer = random(T)
    gate_up, down = (ranks.held(None, tensor).clone() for tensor in (layer.gate_up, layer.down))
    gate_up.requires_grad_(ranks.rank == ranks.size - 1)
    prepared = _prepare(ranks)
    said = (
        f"gradient of the result must be the same on every rank of the group, got {_of_every_rank(False, True, ranks)}"
    )
    refused(ranks, lambda: ep.finalize(ep.experts(prepared, gate_up, down), prepared), said)


def no_tensors(ranks: Ranks) -> None:
    """What is no tensor, on one rank."""
    layer = random(T)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))
    for name, wrong in (("hidden_states", None), ("topk_weights", None), ("topk_ids", layer.ids.tolist())):
        given = {"hidden_states": layer.x, "topk_weights": layer.weights, "topk_ids": layer.ids}
        given[name] = _last(ranks, wrong, given[name])
        refused(
            ranks, lambda given=given: moe_ops.fused_experts(**given, gate_up_proj=gate_up, down_proj=down,
            group=ranks.group), f"fused_experts: {name} must be a torch.Tensor", _last(ranks, "", _refused(ranks)),
        )  # fmt: skip


def layer_options(ranks: Ranks) -> None:
    """What every rank computes by; a number that the others leave to the activation, too."""
    for name, value, other in (
        ("activation", "gelu", "silu"),
        ("glu_layout", "interleaved", "concat"),
        ("weight_on_input", True, False),
        ("alpha", 1.5, None),
        ("limit", None, 2.0),
    ):
        said = f"{name} must be the same on every rank of the group, got {_of_every_rank(other, value, ranks)}"
        more = {"activation": "swiglu_oai", name: _last(ranks, value, other)}
        refused(ranks, partial(_layer, ranks, **more), said)
    bias = _last(ranks, ranks.held(None, torch.zeros(E, random(0).gate_up.shape[1])))
    refused(ranks, lambda: _layer(ranks, gate_up_bias=bias), "gate_up_bias must be the same")


def calls(ranks: Ranks) -> None:
    """A layer on one rank, a part of it on the others."""
    said = (
        f"call must be the same on every rank of the group, got {_of_every_rank('ep.prepare', 'fused_experts', ranks)}"
    )
    refused(ranks, _last(ranks, partial(_layer, ranks), partial(_prepare, ranks)), said, "Every rank makes the same")


def debug(ranks: Ranks) -> None:
    """On one rank, whose checks would wait for the others."""

    def run() -> Tensor:
        with _last(ranks, moe_ops.debug(), nullcontext()):
            return _layer(ranks)

    said = f"moe_ops.debug() must be the same on every rank of the group, got {_of_every_rank('off', 'on', ranks)}"
    refused(ranks, run, said, "open it on every one, or on none")


def second_derivatives(ranks: Ranks) -> None:
    """Gradients cross as bytes, behind which autograd sees nothing; through whatever stands between the halves."""

    def penalty(prepare: bool, transport: str, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        options = {"num_experts": E, "group": ranks.group, "transport": transport}
        prepared = ep.prepare(x if prepare else x.detach(), weights, ids, **options)
        rows = prepared.rows**3 if prepare else prepared.rows * x.sum()
        return (rows if prepare else ep.finalize(rows, prepared)).square().sum()

    for transport, prepare in product(CROSSING, (True, False)):
        torch.compiler.reset()
        compiled = [torch.compile(penalty, backend="eager", fullgraph=True)] if transport == "replicated" else []
        for call in (penalty, *compiled):
            x, weights, ids = random(T)[:3]
            x.requires_grad_()
            loss = call(prepare, transport, x, weights, ids)
            words = "moe_ops.ep: second derivatives are not implemented", "Leave create_graph out."
            refused(ranks, partial(torch.autograd.grad, loss, x, create_graph=True, retain_graph=True), *words)
            (first,) = torch.autograd.grad(loss, x)
            ranks.expect(first.isfinite().all(), "the first derivative, after it")


def transforms(ranks: Ranks) -> None:
    """What functional transforms and forward mode would take rows through, to the ranks and back."""
    x, weights, ids = random(T)[:3]
    prepared = _prepare(ranks)

    def prepare(x: Tensor) -> Tensor:
        return ep.prepare(x, weights, ids, num_experts=E, group=ranks.group).rows.sum()

    def finalize(rows: Tensor) -> Tensor:
        return ep.finalize(rows, prepared).sum()

    for function, given in ((prepare, x), (finalize, prepared.rows)):
        said = (
            f"ep.{function.__name__}: group must be of one rank inside a transform of torch.func",
            f"got {ranks.size}",
        )
        refused(ranks, partial(torch.func.grad(function), given), *said)
        refused(ranks, partial(torch.vmap(function), given.expand(2, *given.shape)), *said)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, torch.ones_like(given))
            refused(ranks, partial(function, dual), "must not carry a tangent")
    held = [ranks.held(None, tensor) for tensor in random(0)[3:5]]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(held[0], torch.ones_like(held[0]))
        said = "fused_experts: arguments must not carry a tangent", _last(ranks, "", _refused(ranks))
        refused(ranks, partial(_layer, ranks, held=[_last(ranks, dual, held[0]), held[1]]), *said)


def differentiated(ranks: Ranks) -> None:
    """A backward would wait for the ranks that have none."""
    x = torch.randn(T, H, requires_grad=bool(_last(ranks, True, False)))
    said = f"gradients must be the same on every rank of the group, got {_of_every_rank(None, 'hidden_states', ranks)}"
    refused(ranks, lambda: _prepare(ranks, hidden_states=x), said)
    layer = random(0)
    held = [ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down)]
    trained = [tensor.detach().requires_grad_(bool(_last(ranks, True, False))) for tensor in held]
    refused(ranks, lambda: _layer(ranks, held=trained), "gradient of the result must be the same")


def added(ranks: Ranks) -> None:
    """Of another shape than the tokens', which some transports would broadcast, or of integers."""
    for transport in ("gather", "replicated", "all_to_all"):
        for shape in ((H,), (1, H), (5, T, H)):
            prepared = _prepare(ranks, transport=transport)
            call = partial(ep.finalize, torch.zeros(prepared.rows.shape[0], H), prepared, torch.zeros(shape))
            refused(ranks, call, "ep.finalize: added must be [T=3")
        call = partial(ep.finalize, torch.zeros(prepared.rows.shape[0], H), prepared, torch.zeros(T, H).int())
        refused(ranks, call, "ep.finalize: added must be bfloat16, float16", "got torch.int32. Cast it first.")


def weights(ranks: Ranks) -> None:
    """A wrong shape on one rank alone: the others say which, and what."""
    layer = random(0)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))
    for wrong in ([gate_up, down[:, :-1]], [gate_up[:-1], down], [gate_up[0], down], [gate_up.bfloat16(), down]):
        held = _last(ranks, wrong, [gate_up, down])
        refused(
            ranks, lambda held=held: _layer(ranks, held=held), "fused_experts: ", " must be ",
            _last(ranks, "", _refused(ranks)),
        )  # fmt: skip


def weights_in_a_graph(ranks: Ranks) -> None:
    """The same while it compiles, where the rank itself gets torch's error around ours; in one graph or not."""
    layer = random(ranks.size * T)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))
    tokens = [ranks.share(None, tensor) for tensor in layer[:3]]

    def run(x: Tensor, weights: Tensor, ids: Tensor, down: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group)

    for fullgraph in (True, False):
        torch.compiler.reset()
        compiled = torch.compile(run, fullgraph=fullgraph, backend="aot_eager")
        try:
            compiled(*tokens, down[:, : _last(ranks, H - 1, H)])
        except Exception as raised:
            said = _last(ranks, "", _refused(ranks)) + "fused_experts: down_proj must be"
            ranks.expect(said in str(raised), f"fullgraph={fullgraph}: {said!r} is not in {str(raised)!r}")
            ranks.expect(isinstance(raised, ValueError | RuntimeError), f"{type(raised)}")
        else:
            ranks.expect(False, "nothing was refused")
        ranks.close(compiled(*tokens, down), ranks.share(None, layer.alone()), 1e-6, "the next call")


def weights_of_halves(ranks: Ranks) -> None:
    """The same where `experts` is called by itself: the others meet it in `finalize`."""
    layer = random(0)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))
    prepared = _prepare(ranks)
    wrong = down[:, : _last(ranks, H - 1, H)]
    said = _last(ranks, "down_proj must be", _refused(ranks))
    refused(ranks, lambda: ep.finalize(ep.experts(prepared, gate_up, wrong), prepared), said)


def weights_of_halves_in_a_graph(ranks: Ranks) -> None:
    """The same where all of it is compiled, or `experts` alone."""
    layer = random(ranks.size * T)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))
    tokens = [ranks.share(None, tensor) for tensor in layer[:3]]
    alone = torch.compile(ep.experts, fullgraph=True, backend="aot_eager")

    def run(function: Callable[..., Tensor], x: Tensor, weights: Tensor, ids: Tensor, down: Tensor) -> Tensor:
        prepared = ep.prepare(x, weights, ids, num_experts=E, group=ranks.group)
        return ep.finalize(function(prepared, gate_up, down), prepared)

    for name, call in {
        "all": torch.compile(partial(run, ep.experts), fullgraph=True, backend="aot_eager"),
        "experts": partial(run, alone),
    }.items():
        torch.compiler.reset()
        try:
            call(*tokens, down[:, : _last(ranks, H - 1, H)])
        except Exception as raised:
            said = _last(ranks, "", _refused(ranks)) + "fused_experts: down_proj must be"
            ranks.expect(said in str(raised), f"{name}: {said!r} is not in {str(raised)!r}")
        else:
            ranks.expect(False, f"{name}: nothing was refused")
        ranks.close(call(*tokens, down), ranks.share(None, layer.alone()), 1e-6, f"{name}, the next call")


def tokens_in_a_graph(ranks: Ranks) -> None:
    """Compiled ranks ask one another at every call, and the code that they have serves the next one."""
    torch.compiler.reset()
    layer = random(ranks.size * 2 * T)
    gate_up, down = (ranks.held(None, tensor).clone() for tensor in (layer.gate_up, layer.down))

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group)

    x, weights, ids = (ranks.share(None, tensor).clone() for tensor in layer[:3])
    want, size = ranks.share(None, layer.alone()), _last(ranks, 2 * T - 1, 2 * T)
    ranks.close(run(x, weights, ids), want, 1e-6, "before")
    said = f"T must be the same on every rank of the group, got {_of_every_rank(6, 5, ranks)}"
    refused(ranks, lambda: run(x[:size], weights[:size], ids[:size]), said)
    ranks.close(run(x, weights, ids), want, 1e-6, "after")


def no_tokens_in_a_graph(ranks: Ranks) -> None:
    """A rank without tokens asks the others, too, though nothing that its compiled code returns depends on it."""
    torch.compiler.reset()
    layer = random(T)
    gate_up, down = (ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down))

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe_ops.fused_experts(x, gate_up, down, weights, ids, group=ranks.group)

    call = _last(ranks, torch.compile(run, fullgraph=True), run)
    tokens = [tensor[: _last(ranks, 0, T)].clone() for tensor in layer[:3]]
    said = f"T must be the same on every rank of the group, got {_of_every_rank(3, 0, ranks)}"
    refused(ranks, lambda: call(*tokens), said)


def groups(ranks: Ranks) -> None:
    """What is no group, or not one of this process."""
    refused(ranks, lambda: _layer(ranks, group="nobody"), "group must be the name of a process group, got 'nobody'")
    refused(ranks, lambda: _layer(ranks, group=3), "group must be a torch.distributed process group", "got 3 (int)")
    part = ranks.new_group([0])  # of which the others have no object
    if ranks.rank:
        try:
            _layer(ranks, group=part)
        except ValueError as raised:
            said = "group must be one that this rank is in, got none. Call it on the group's ranks alone."
            ranks.expect(said in str(raised), f"{said!r} is not in {str(raised)!r}")
        else:
            ranks.expect(False, "a group that this rank is not in was accepted")


def meshes(ranks: Ranks) -> None:
    """A mesh of one dimension is a group; one of two is not."""
    mesh = init_device_mesh("cpu", (1, ranks.size), mesh_dim_names=("dp", "ep"))
    refused(ranks, lambda: _layer(ranks, group=mesh), "group must be", "a mesh of 2. Name the dimension", "mesh['ep']")
    layer = integers(ranks.size * T)
    ranks.same(ranks.run(layer, "gather", group=mesh["ep"]), ranks.share(None, layer.alone()), "mesh['ep']")
    name = ranks.group.group_name
    ranks.same(ranks.run(layer, "gather", group=name), ranks.share(None, layer.alone()), "the group's name")


def beside_a_group(ranks: Ranks) -> None:
    """Arguments that have no meaning with a group, on all ranks and on one; and those that have none without one."""
    expert_map, scale = torch.arange(E), torch.ones(T, 1)
    for name, value in (("expert_map", expert_map), ("hidden_states_scale", scale)):
        said = f"fused_experts: {name} must be None beside a group"
        refused(ranks, lambda given={name: value}: _layer(ranks, **given), said)
        one = {name: _last(ranks, value)}
        refused(ranks, lambda given=one: _layer(ranks, **given), said, _last(ranks, "", _refused(ranks)))
    for name, value in (("transport", "gather"), ("rank_capacity", 2)):
        said = f"fused_experts: {name} must be None without a group"
        refused(ranks, lambda given={name: value}: _layer(ranks, **{"group": None, **given}), said)


def _dropping(layer: Layer, capacity: int, size: int) -> Layer:
    """The layer without the pairs that a capacity drops: from every rank, the first rows for each rank go."""
    kept, block = layer.ids.clone(), E // size
    for rows in kept.tensor_split(size):
        sent = [0] * size
        for row in rows:
            owners = row.div(block, rounding_mode="floor")
            for rank in range(size):
                if (owners == rank).any():
                    sent[rank] += 1
                    if sent[rank] > capacity:
                        row[owners == rank] = -1
    return layer._replace(ids=kept)


def dropped_rows(ranks: Ranks) -> None:
    for routing in ("uniform", "one_rank", "holes"):
        for capacity in (1, 4, 7, 20):
            layer = routed(integers(ranks.size * 7), routing, ranks.size)
            kept, what = _dropping(layer, capacity, ranks.size), f"{routing}, {capacity} rows for a rank"
            want = ranks.share(None, kept.alone())
            ranks.same(ranks.run(layer, "all_to_all", rank_capacity=capacity), want, what)
            # of the two halves of a token on two ranks, one may be dropped alone
            alike = torch.equal(kept.ids, layer.ids)
            ranks.expect(alike == (capacity >= 7), f"{what}: the case drops {'nothing' if alike else 'rows'}")


def dropped_rows_reported(ranks: Ranks) -> None:
    """Under `moe_ops.debug()`, on every rank though only the tokens of the first have too many rows."""
    layer = routed(integers(ranks.size * 7), "one_rank", ranks.size)
    layer.ids[7:] = -1
    said = "rows for each rank must be <= rank_capacity=4, got 3 rows more over all ranks, which were dropped"
    with moe_ops.debug():
        refused(ranks, lambda: ranks.run(layer, "all_to_all", rank_capacity=4), said)
        ranks.same(ranks.run(layer, "all_to_all", rank_capacity=7), ranks.share(None, layer.alone()), "enough rows")


def dropped_pairs_reported(ranks: Ranks) -> None:
    """The same of an expert's batch, of which the rank that has the expert alone knows; in compiled code, too."""
    torch.compiler.reset()
    layer = integers(ranks.size * 3)
    layer.ids[:, 0], layer.ids[:, 1:] = 0, -1
    pairs = layer.ids.shape[0]
    said = f"fused_experts: rows per expert must be <= capacity=2, got 1 entries that are not, the first {pairs} at [0]"
    for transport in CROSSING:
        call = partial(ranks.run, layer, transport, format="batched")
        compiled = [torch.compile(call, backend="eager")] if transport == "gather" and ranks.size == 2 else []
        for run in (call, *compiled):
            with moe_ops.debug():
                refused(ranks, partial(run, capacity=2), said, f"pass capacity >= {pairs}.")
                want = ranks.share(transport, layer.alone())
                ranks.same(run(capacity=pairs), want, f"{transport}, enough rows")


def ids_out_of_range(ranks: Ranks) -> None:
    """On the last rank alone: all raise under `moe_ops.debug()`, else they contribute nothing."""
    for transport in ("gather", "all_to_all", "replicated"):
        layer = integers(ranks.size * T)
        layer.ids[-2, 0], layer.ids[-1, 1], layer.ids[-1, 2] = E, -2, 2**40
        valid = layer._replace(ids=torch.where((layer.ids < 0) | (layer.ids >= E), -1, layer.ids))
        ranks.same(ranks.run(layer, transport), ranks.share(transport, valid.alone()), transport)
        entries = 3 * (ranks.size if transport == "replicated" else 1)
        said = f"ep.prepare: topk_ids must be in [-1, E={E}), got {entries} entries over all ranks that are not"
        with moe_ops.debug():
            refused(ranks, lambda layer=layer, transport=transport: ranks.run(layer, transport), said)


def a_rank_that_comes_late(ranks: Ranks) -> None:
    """The last one: the others say so once torch.distributed's time is up, and so does it, in place of waiting for
    them; the next call works. Initialised again, it works again; code that was compiled before, for the same name, has
    the ranks' old numbers.
    """
    torch.compiler.reset()
    store, layer = dist.distributed_c10d._get_default_store(), random(ranks.size * T)
    held = [ranks.held(None, tensor) for tensor in (layer.gate_up, layer.down)]
    given = [ranks.share(None, layer.x), *held, *(ranks.share(None, tensor) for tensor in layer[1:3])]
    by_name = torch.compile(partial(moe_ops.fused_experts, group="0"), backend="eager", fullgraph=True)
    ranks.close(by_name(*given), ranks.share(None, layer.alone()), 1e-6, "compiled")
    said = f"ep.prepare: rank {ranks.size - 1} of group '0' did not call it within 0:00:02"
    is_late = ranks.rank == ranks.size - 1
    if is_late:
        dist.barrier()
    else:
        store.set_timeout(timedelta(seconds=2))
    try:
        _layer(ranks, group=dist.group.WORLD)
    except RuntimeError as late:
        ranks.expect(said in str(late), f"{said!r} is not in {str(late)!r}")
    else:
        ranks.expect(False, "nobody was missed")
    finally:
        store.set_timeout(timedelta(seconds=PATIENCE))
    if not is_late:
        dist.barrier()
    want = ranks.share(None, layer.alone())
    ranks.close(_layer(ranks, group=dist.group.WORLD), want, 1e-6, "the next call")
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    then, ranks.rank = ranks.rank, ranks.size - 1 - ranks.rank
    dist.init_process_group("gloo", store=again, rank=ranks.rank, world_size=ranks.size)
    for words in (f"compiled for, in which this was rank {then} of {ranks.size}", "Call torch.compiler.reset()"):
        try:
            by_name(*given)
        except ValueError as raised:
            ranks.expect(words in str(raised), f"{words!r} is not in {str(raised)!r}")
        else:
            ranks.expect(False, "code for other ranks was run")
    want = ranks.share(None, layer.alone())
    ranks.close(_layer(ranks, group=dist.group.WORLD), want, 1e-6, "initialised again")


_OF_TWO = (
    widths, dtypes, options, results, experts, transports, capacities, no_columns, arguments, weights_of_halves,
    beside_a_group,
    tokens_in_a_graph, weights_in_a_graph, weights_of_halves_in_a_graph,
    no_tensors, layer_options, differentiated, added, types, arguments_in_a_graph, arguments_beside_a_graph,
    trained_in_part,
    calls, debug, second_derivatives, transforms, quantised, backends,
    no_tokens_in_a_graph,
)  # fmt: skip
_OF_BOTH = (tokens, weights, groups, meshes, dropped_rows_reported, dropped_pairs_reported, ids_out_of_range)
CHECKS = {
    **{f"refused-{check.__name__}": Check(check) for check in _OF_TWO},
    **{f"refused-{check.__name__}": Check(check, (2, 4)) for check in _OF_BOTH},
    "dropped_rows": Check(dropped_rows, (2, 4)),
    "a_rank_that_comes_late": Check(a_rank_that_comes_late, (2, 4)),  # the last of all: groups are of no use after
}
