"""Expert parallelism: every rank of a process group holds a block of the experts, to which tokens go.

``finalize(experts(prepare(...), ...), ...)`` is ``moe_ops.fused_experts(..., group=...)``: functional collectives
around :func:`moe_ops.fused_experts`, one graph, nothing read on the host, differentiable. A rank is an expert of an
outer mixture: a token's row goes to a rank once, with its K weights and ids, that rank runs its whole local layer on
it, and the sender adds at most W partial results, in rank order and fp32.

What brings rows to ranks is the **transport**:

| transport | the ranks' tokens | on the wire, a rank and layer (row = H numbers, s = bytes of one) | drops |
| --- | --- | --- | --- |
| ``local`` | one rank | nothing | none |
| ``replicated`` | the same on all ranks | (W - 1) T H s of partial results | none |
| ``gather`` | as many on each, others | (W - 1) T (H s + 8 K) out, (W - 1) T H s back | none |
| ``symm`` | as ``gather``, GPUs of one host | as ``gather``, by kernels of ours and copy engines | none |
| ``all_to_all`` | as many on each, others | (W - 1) C (H s + 8 K) out, (W - 1) C H s back | rows past C for one rank |
| ``nvshmem`` | as many on each, others | the rows alone that a rank has an expert of; no gradients | none |

C is ``rank_capacity``; in a scheme that quantises activations, rows go out in its format. prepare and finalize have
halves, ``_start`` and ``_wait``: what stands between them overlaps with the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta.checks import (
    Accepts,
    accepts,
    check_float,
    check_index,
    check_name,
    check_placement,
    check_rank,
    check_shape,
    check_type,
    fail,
    number_text,
)
from meta.schemes import SCHEMES
from moe_ops import across, compat, nvshmem, sharded
from moe_ops.agreement import agree, check_layer, check_while_compiling, destinations, refusing
from moe_ops.autograd import wants_grad
from moe_ops.exchanges import (
    shared,
    start_all_gather,
    start_all_to_all,
    sum_of_ranks,
    wait_all_gather,
    wait_all_to_all,
    wait_parts,
)
from moe_ops.groups import Group, GroupLike, resolve
from moe_ops.ops import ARGUMENTS, call
from moe_ops.pairs import invert
from moe_ops.runtime import refuse_tangents
from moe_ops.symmetric_memory import available

#: Names of transports, and what each asks of the ranks' tokens.
TRANSPORTS = {
    "local": "a group of one rank",
    "replicated": "the same tokens on every rank",
    "gather": "as many tokens on every rank",
    "all_to_all": "as many tokens on every rank, and a capacity",
    "symm": "as many tokens on every rank, GPUs that write into each other's memory",
    "nvshmem": "as many tokens on every rank, and torch's symmetric memory over NVSHMEM",
}


class Prepared(NamedTuple):
    """Rows for this rank's experts, and the way back to their tokens; a pytree.

    Attributes:
        rows: ``[R, H]``, or what the scheme makes of them.
        rows_scale: of quantised rows, or None.
        topk_weights: ``[R, K]``.
        topk_ids: int32 ``[R, K]``, ids of this rank's experts; -1 = held elsewhere, or no token.
        slots: int32 ``[T, W]`` of ``all_to_all``, else None: place ``w * C + c`` of a token's row for rank w, or -1; of
            ``nvshmem`` its place among the results of this rank's tokens.
        splits: int64 ``[2, W]`` of ``nvshmem``, else None: how many rows came from every rank, and where they begin.
        group: name of the process group.
        transport: a name of :data:`TRANSPORTS`.
    """

    rows: Tensor
    rows_scale: Tensor | None
    topk_weights: Tensor
    topk_ids: Tensor
    slots: Tensor | None
    group: str
    transport: str
    splits: Tensor | None = None
    held: int | None = None


class Preparing(NamedTuple):
    """What :func:`prepare_start` began: hand it to :func:`prepare_wait`.

    Attributes:
        received: what is not there yet.
        sent: what this rank sent.
        slots, group, transport, num_experts: of :class:`Prepared` and :func:`prepare`.
        quantised: whether the second tensor holds the scales of the first.
        splits: of :class:`Prepared`.
    """

    received: list[Tensor]
    sent: list[Tensor]
    slots: Tensor | None
    group: str
    transport: str
    num_experts: int
    quantised: bool
    splits: Tensor | None


class Finalizing(NamedTuple):
    """What :func:`finalize_start` began: hand it to :func:`finalize_wait`."""

    received: list[Tensor]
    sent: Tensor
    prepared: Prepared


_ACCEPTS = {
    "hidden_states": accepts("Tensor"), "topk_weights": accepts("Tensor"), "topk_ids": accepts("Tensor"),
    "num_experts": accepts("int"), "transport": accepts("Optional[str]"), "scheme": accepts("Optional[str]"),
    "rank_capacity": accepts("Optional[int]"), "result": accepts("Tensor"), "added": accepts("Optional[Tensor]"),
    "prepared": Accepts((Prepared,), False, False, "a moe_ops.ep.Prepared", "Call moe_ops.ep.prepare first."),
    "after": accepts("List[Tensor]"),
    "preparing": Accepts((Preparing,), False, False, "of moe_ops.ep.prepare_start", "Call it first."),
    "finalizing": Accepts((Finalizing,), False, False, "of moe_ops.ep.finalize_start", "Call it first."),
}  # fmt: skip


_NO_GRADIENT = "Leave it out, or call it under torch.no_grad()."


def _check(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        check_type(op, name, value, _ACCEPTS[name])


def _transport(op: str, transport: str | None, group: Group, device: str, rank_capacity: Any) -> str:
    """The name asked for, or the choice among those that bring different tokens of all ranks to all experts."""
    if transport is None:
        transport = "local" if group.size == 1 else "all_to_all"
        if transport != "local" and rank_capacity is None:
            transport = "symm" if device == "cuda" and available(op, group.name) else "gather"
    check_name(op, "transport", transport, TRANSPORTS)
    if transport == "local" and group.size != 1:
        got = f"'local' for a group of {group.size}"
        raise fail(op, "transport", "one that crosses ranks", got, "Leave it out for the best one.")
    if transport == "symm" and not (device == "cuda" and available(op, group.name)):
        rule = "one for these tensors: symm is for GPUs of one host that write into each other's memory"
        raise fail(op, "transport", rule, f"'symm' for {device} tensors", "Leave it out for the best one.")
    if transport == "nvshmem" and not (device == "cuda" and nvshmem.available(group.name)):
        rule = "one that is there: nvshmem is for GPUs, where torch's symmetric memory is NVSHMEM's"
        cure = "Start the processes with TORCH_SYMMMEM=NVSHMEM, or leave it out for the best one."
        raise fail(op, "transport", rule, f"'nvshmem' for {device} tensors", cure)
    if transport == "nvshmem" and group.size > nvshmem.MOST_RANKS:
        rule = f"'nvshmem' for a group of at most {nvshmem.MOST_RANKS}, or another one"
        raise fail(op, "transport", rule, f"'nvshmem' for {group.size}", "Leave it out for the best one.")
    if rank_capacity is not None and transport not in ("all_to_all", "local"):
        raise fail(op, "rank_capacity", f"None for transport={transport!r}", rank_capacity, "Only all_to_all has it.")
    return transport


def wire_scheme(scheme: str | None, scales: int = 0, *, halves: int = 1, weight_on_input: bool = False) -> str | None:
    """The scheme in whose format rows can travel: one that quantises activations, by scales that are made here.

    Args:
        scheme: a name of :data:`meta.schemes.SCHEMES`, or None.
        scales: how many the first projection has, a static one for its activations among them or not.
        halves: 2 where gate and up are tensors of their own, each with scales.
        weight_on_input: rows are quantised after they are weighed, which their owner does.
    """
    if scheme is None or weight_on_input or scheme not in SCHEMES or SCHEMES[scheme].rows is None:
        return None
    return None if SCHEMES[scheme].has_static(scales // halves) else scheme


def prepare_start(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    group: GroupLike | None,
    transport: str | None = None,
    scheme: str | None = None,
    rank_capacity: int | None = None,
) -> Preparing:
    """The first half of :func:`prepare`: starts the exchange and returns. Until the second half its tensors must not
    be changed.
    """
    members = resolve("ep.prepare", group)
    wanted = _Wanted(hidden_states, topk_weights, topk_ids, num_experts, transport, scheme, rank_capacity)
    return _start(wanted, _agreed(wanted, members, "in halves"), apart=True)


class _Wanted(NamedTuple):
    """The arguments of :func:`prepare`, but for the group."""

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    num_experts: int
    transport: str | None
    scheme: str | None
    rank_capacity: int | None


class _Agreed(NamedTuple):
    """What all ranks are about to do: ids as int32, the transport and, of ``all_to_all``, the capacity."""

    ids: Tensor
    group: Group
    transport: str
    capacity: Any


def _agreed(wanted: _Wanted, group: Group, way: str, capacity: int | None = None, **layer: Any) -> _Agreed:
    """``way``: by what calls rows travel; ``capacity``: of the layer around it; ``layer``: what else ranks must say
    alike of that.
    """
    hidden_states, topk_weights, topk_ids, num_experts, _, scheme, rank_capacity = wanted
    chosen = refusing(group.name, _checked, "ep.prepare", wanted, group)
    for_rank = None
    if chosen == "all_to_all":
        for_rank = rank_capacity if rank_capacity is not None else max(topk_ids.shape[0], 1)
    said = {"transport": chosen, "scheme": scheme, "hidden_states": hidden_states.dtype, "weights": topk_weights.dtype}
    if chosen == "symm":
        said["exchange"] = way
    # A backward exchanges what is differentiated, and waits for ranks that differentiate less.
    trained = [name for name in ("hidden_states", "topk_weights") if _is_differentiated(getattr(wanted, name))]
    said |= {"gradients": "+".join(trained) or None, **layer}
    options = ";".join(f"{name}={value}" for name, value in said.items())
    ids = torch.ops.moe_ops.agreed_ids(
        topk_ids, hidden_states.shape[1], num_experts=num_experts, group=group.name, rank=group.rank, size=group.size,
        options=options, rank_capacity=for_rank, capacity=capacity,
    )  # fmt: skip
    return _Agreed(ids, group, chosen, for_rank)


def _start(wanted: _Wanted, agreed: _Agreed, *, apart: bool) -> Preparing:
    """``apart``: the other half does not follow at once."""
    hidden_states, topk_weights, _, num_experts, _, scheme, _ = wanted
    ids, members, chosen, capacity = agreed
    if chosen == "replicated":
        hidden_states, topk_weights = shared(hidden_states, members), shared(topk_weights, members)
    slots = splits = None
    if chosen == "nvshmem":
        sent, slots, splits = _sorted_by_rank(hidden_states, topk_weights, ids, num_experts, members, scheme)
    elif capacity is not None:
        sent, slots = _by_rank(hidden_states, topk_weights, ids, num_experts, members, capacity, scheme)
    elif scheme is not None:
        sent = [*call("quantize_rows", hidden_states, scheme=scheme), topk_weights, ids]
    else:
        sent = [hidden_states, topk_weights, ids]
    received: list[Tensor] = []
    if chosen in ("gather", "symm"):
        received = start_all_gather(sent, members, direct=chosen == "symm", apart=apart)
    elif chosen == "all_to_all":
        received = [start_all_to_all(tensor, members) for tensor in sent]
    elif splits is not None:
        received, splits = nvshmem.exchange(sent, splits, members)
    return Preparing(received, sent, slots, members.name, chosen, num_experts, scheme is not None, splits)


def _checked(op: str, wanted: _Wanted, group: Group) -> str:
    """The transport, if every argument is as it must be."""
    _check(op, **wanted._asdict())
    hidden_states, topk_weights, topk_ids, num_experts, transport, scheme, rank_capacity = wanted
    check_placement(op, {"hidden_states": hidden_states, "topk_weights": topk_weights, "topk_ids": topk_ids})
    check_rank(op, "hidden_states", hidden_states, "T H")
    check_rank(op, "topk_ids", topk_ids, "T K")
    check_index(op, "topk_ids", topk_ids)
    check_shape(op, "topk_weights", topk_weights, "T K", tuple(topk_ids.shape))
    check_float(op, "topk_weights", topk_weights)
    check_float(op, "hidden_states", hidden_states)
    check_shape(op, "topk_ids", topk_ids, "T K", (hidden_states.shape[0], topk_ids.shape[1]))
    if num_experts < 0:
        raise fail(op, "num_experts", ">= 0", num_experts)
    if num_experts % group.size:
        got = f"{number_text(num_experts)} for {group.size} ranks"
        raise fail(op, "num_experts", "a multiple of the group's size", got, "Every rank holds an equal block.")
    if rank_capacity is not None and not isinstance(rank_capacity, torch.SymInt) and rank_capacity < 1:
        raise fail(op, "rank_capacity", ">= 1", rank_capacity)
    if scheme is not None:
        check_name(op, "scheme", scheme, SCHEMES)
        if wire_scheme(scheme) is None:
            raise fail(
                op, "scheme", "one that quantises activations", repr(scheme), "Leave it out: rows go as they are."
            )
    chosen = _transport(op, transport, group, hidden_states.device.type, rank_capacity)
    if chosen == "nvshmem" and _is_differentiated(hidden_states, topk_weights):
        raise fail(op, "transport", "one with gradients", "'nvshmem'", _NO_GRADIENT)
    if chosen != "local":
        for name, columns in (("H of hidden_states", hidden_states.shape[1]), ("K of topk_ids", topk_ids.shape[1])):
            if columns == 0:  # backends of torch.distributed do not all send tensors without elements
                raise fail(op, name, ">= 1 where rows go to other ranks", 0, "Leave it out: all results are 0.")
        _refuse_transforms(op, group, hidden_states, topk_weights)
    return chosen


def _refuse_transforms(op: str, group: Group, *tensors: Tensor) -> None:
    """Rows that cross are differentiated by autograd, in reverse, alone."""
    if torch.compiler.is_compiling():
        return
    refuse_tangents(op, tensors)
    if compat.transform_is_on():
        cure = "Differentiate by backward() or torch.autograd.grad, and call it for each element of a batch."
        raise fail(op, "group", "of one rank inside a transform of torch.func (grad, vmap)", f"{group.size}", cure)


def _by_rank(
    hidden_states: Tensor, topk_weights: Tensor, ids: Tensor, num_experts: Any, group: Group, capacity: Any, scheme: Any
) -> tuple[list[Tensor], Tensor]:
    """A row for every token and rank that holds an expert of it: the ranks are experts of a batched dispatch.

    Returns:
        rows ``[W, C, H]`` (and scales ``[W, C, ...]``), weights and ids ``[W, C, K]``; and slots ``[T, W]``.
    """
    size = group.size
    if ids.shape[0] == 0:  # no rows for any rank, whatever the capacity
        rows = [hidden_states] if scheme is None else list(call("quantize_rows", hidden_states, scheme=scheme))
        return [values.expand(size, *values.shape) for values in (*rows, topk_weights, ids)], ids.new_empty(0, size)
    ranks = destinations(ids, num_experts, size)
    batch, counts, slots = call("batched_dispatch", hidden_states, ranks, None, num_experts=size, capacity=capacity)
    tokens = invert(slots, size * capacity) // size
    used = torch.arange(capacity, device=counts.device) < counts.unsqueeze(1)
    weights, of_place = (values.index_select(0, tokens).view(size, capacity, -1) for values in (topk_weights, ids))
    rows = [batch] if scheme is None else list(call("quantize_batched", batch, counts, scheme=scheme))
    return [*rows, weights, torch.where(used.unsqueeze(-1), of_place, -1)], slots


def _sorted_by_rank(
    hidden_states: Tensor, topk_weights: Tensor, ids: Tensor, num_experts: Any, group: Group, scheme: Any
) -> tuple[list[Tensor], Tensor, Tensor]:
    """As :func:`_by_rank`, rows one behind the other: ``[T W, ...]`` of which the first are used; their places
    ``[T, W]``; and how many go to every rank, and where they begin, ``[2, W]``.
    """
    size = group.size
    ranks = destinations(ids, num_experts, size)
    rows, ends, places = call("moe_permute", hidden_states, ranks, num_experts=size)
    tokens = invert(places, rows.shape[0]) // size
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    sent = [rows] if scheme is None else list(call("quantize_rows", rows, scheme=scheme))
    sent += [values.index_select(0, tokens) for values in (topk_weights, ids)]
    return sent, places, torch.stack((counts, ends - counts)).to(torch.int64)


def prepare_wait(preparing: Preparing, after: Sequence[Tensor] = ()) -> Prepared:
    """The second half of :func:`prepare`: the rows are there when it returns.

    Args:
        preparing: of :func:`prepare_start`.
        after: tensors that were computed between the halves. Compiled code moves computations about, past both halves
            where it is told nothing; these it leaves between them ("symm").
    """
    _check("ep.prepare", preparing=preparing, after=after)
    received, sent, slots, name, transport, num_experts, quantised, splits = preparing
    group = resolve("ep.prepare", name)
    if transport in ("gather", "symm"):
        there = wait_all_gather(received, sent, group, direct=transport == "symm", after=after)
        sent = [rows.flatten(0, 1) for rows in there]
    elif transport == "all_to_all":
        sent = [wait_all_to_all(*pair, group).flatten(0, 1) for pair in zip(received, sent, strict=True)]
    elif splits is not None:
        is_row = torch.arange(received[-1].shape[0], device=splits.device) < splits[0].sum()
        sent = [*received[:-1], torch.where(is_row.unsqueeze(-1), received[-1], -1)]
    rows, weights, ids = sent[0], sent[-2], sent[-1]
    scale = sent[1] if quantised else None
    held = num_experts // group.size
    ids = ids - group.rank * held
    ids = torch.where((ids >= 0) & (ids < held), ids, -1)
    return Prepared(rows, scale, weights, ids, slots, name, transport, splits, held)


def prepare(
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    group: GroupLike | None,
    transport: str | None = None,
    scheme: str | None = None,
    rank_capacity: int | None = None,
) -> Prepared:
    """Bring tokens to the ranks that hold their experts. Every rank of the group calls it.

    Rank r of W holds the experts from ``r * num_experts / W`` on. T, H, K, dtypes and options must be the same on all
    ranks; tokens to fill up a batch have ids of -1.

    Args:
        hidden_states: ``[T, H]`` float.
        topk_weights: ``[T, K]`` any float dtype.
        topk_ids: ``[T, K]`` int32 or int64, ids of all experts; -1 (or out of range) contributes nothing.
        num_experts: E of all ranks together, a multiple of W.
        group: a process group, its name, or a device mesh of one dimension.
        transport: a name of :data:`TRANSPORTS`; None is "local" for one rank, "all_to_all" with a ``rank_capacity``,
            else "symm" where it is possible, else "gather". "nvshmem" has no gradients, and starts and ends an exchange
            in its first half.
        scheme: a name of :data:`meta.schemes.SCHEMES` in whose format rows travel, and arrive; None keeps them.
        rank_capacity: C, rows that a rank sends to each rank, for "all_to_all"; those past it are dropped, and
            reported under :func:`moe_ops.debug`. None is T, which drops none.

    Returns:
        A :class:`Prepared`. R is T for "local" and "replicated", W * C for "all_to_all", else W * T.

    Raises:
        ValueError: a wrong argument, on every rank of the group; or what the ranks disagree about.

    Source: GShard (arXiv 2006.16668); one row per token and rank, DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> group = torch.distributed.group.WORLD
        >>> prepared = moe_ops.ep.prepare(torch.randn(4, 16), weights, ids, num_experts=8, group=group)
        >>> prepared.rows.shape, prepared.transport
        (torch.Size([4, 16]), 'local')
    """
    members = resolve("ep.prepare", group)
    wanted = _Wanted(hidden_states, topk_weights, topk_ids, num_experts, transport, scheme, rank_capacity)
    return prepare_wait(_start(wanted, _agreed(wanted, members, "at once"), apart=False))


def experts(prepared: Prepared, gate_up_proj: Tensor, down_proj: Tensor, **options: Any) -> Tensor:
    """This rank's layer on the rows that it was given.

    Args:
        prepared: of :func:`prepare`.
        gate_up_proj: ``[E / W, 2I, H]``, of this rank's experts; or all of them, a DTensor with ``Shard(0)`` over the
            group.
        down_proj: ``[E / W, H, I]``, or the same.
        options: the keyword arguments of :func:`moe_ops.fused_experts`.

    Returns:
        ``[R, H]``, every row's partial result.

    Raises:
        ValueError: of :func:`moe_ops.fused_experts`.

    Source: as :func:`moe_ops.fused_experts`.

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> group = torch.distributed.group.WORLD
        >>> prepared = moe_ops.ep.prepare(torch.randn(4, 16), weights, ids, num_experts=8, group=group)
        >>> moe_ops.ep.experts(prepared, torch.randn(8, 64, 16), torch.randn(8, 16, 32)).shape
        torch.Size([4, 16])
    """
    from moe_ops.api import fused_experts

    _check("ep.experts", prepared=prepared)
    if prepared.rows_scale is not None:
        options["hidden_states_scale"] = prepared.rows_scale
    weights = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    options = sharded.local("ep.experts", prepared.group, {**weights, **options})
    routing = {"topk_weights": prepared.topk_weights, "topk_ids": prepared.topk_ids}
    check_while_compiling(prepared.group, {"hidden_states": prepared.rows, **routing, **options})
    refusing(prepared.group, _check_held, "ep.experts", prepared.held, options)
    return refusing(prepared.group, fused_experts, prepared.rows, **routing, **options)


def _check_held(op: str, held: int | None, options: dict[str, Any]) -> None:
    """Ids of experts that the weights have not would contribute nothing; a map may leave some out."""
    if held is None or options.get("expert_map") is not None:
        return
    for name in ("gate_up_proj", "down_proj"):
        weight = options[name]
        check_type(op, name, weight, ARGUMENTS["fused_experts"][name])
        check_rank(op, name, weight, "E N K")
        cure = "Pass this rank's block, of as many experts as moe_ops.ep.prepare was told."
        check_shape(op, name, weight, "E N K", (held, *weight.shape[1:]), cure=cure)


def finalize_start(result: Tensor, prepared: Prepared) -> Finalizing:
    """The first half of :func:`finalize`: starts the exchange and returns. Until the second half ``result`` must not be
    changed.
    """
    return _finalize_start(result, prepared, apart=True)


def _finalize_start(result: Tensor, prepared: Prepared, *, apart: bool, agreed: bool = False) -> Finalizing:
    """``agreed``: the ranks have, on all of the layer; those that run compiled code have as well."""
    op = "ep.finalize"
    _check(op, prepared=prepared)
    group = resolve(op, prepared.group)
    refusing(group.name, _check_result, op, result, prepared)
    if prepared.transport == "local":
        return Finalizing([], result, prepared)
    refusing(group.name, _refuse_transforms, op, group, result)
    if not agreed and not torch.compiler.is_compiling():
        facts = {"R": result.shape[0], "H": result.shape[1], "dtype": result.dtype}
        agree(op, group, result.device, facts | {"gradient of the result": _is_differentiated(result)})
    if prepared.transport == "replicated":
        return Finalizing(start_all_gather([result], group), result, prepared)
    if prepared.splits is not None:
        return Finalizing(nvshmem.exchange([result], prepared.splits, group)[0], result, prepared)
    result = result.view(group.size, result.shape[0] // group.size, result.shape[1])
    direct = prepared.transport == "symm"
    return Finalizing([start_all_to_all(result, group, direct=direct, apart=apart)], result, prepared)


def _check_result(op: str, result: Tensor, prepared: Prepared) -> None:
    _check(op, result=result)
    check_placement(op, {"rows": prepared.rows, "result": result})
    check_float(op, "result", result)
    check_rank(op, "result", result, "R H")
    cure = "Pass what moe_ops.ep.experts made of this prepared, every row in its place."
    check_shape(op, "result", result, "R H", (prepared.rows.shape[0], result.shape[1]), cure=cure)
    if prepared.splits is not None and _is_differentiated(result):
        raise fail(op, "transport", "one with gradients", "'nvshmem'", _NO_GRADIENT)


def finalize_wait(finalizing: Finalizing, added: Tensor | None = None) -> Tensor:
    """The second half of :func:`finalize`; compiled code computes ``added`` between the halves ("symm")."""
    _check("ep.finalize", finalizing=finalizing, added=added)
    received, sent, prepared = finalizing
    if added is not None:
        check_placement("ep.finalize", {"result": sent, "added": added})
        check_float("ep.finalize", "added", added)
        T = sent.shape[-2] if prepared.slots is None else prepared.slots.shape[0]
        check_shape("ep.finalize", "added", added, "T H", (T, sent.shape[-1]))
    group = resolve("ep.finalize", prepared.group)
    if prepared.transport == "local":
        return sent if added is None else sum_of_ranks(sent.unsqueeze(0), added)
    if prepared.transport == "replicated":
        return sum_of_ranks(wait_parts(received[0], sent, group), added)
    tokens: Tensor
    if prepared.splits is not None and prepared.slots is not None:
        ones = torch.ones(prepared.slots.shape, device=sent.device)
        tokens = call("moe_unpermute", received[0], prepared.slots, ones, added)
        return tokens
    after = () if added is None else (added,)
    parts = wait_all_to_all(received[0], sent, group, direct=prepared.transport == "symm", after=after)
    if prepared.slots is None:
        return sum_of_ranks(parts, added)
    ones = torch.ones(prepared.slots.shape, device=parts.device)
    tokens = call("batched_combine", parts, prepared.slots, ones, added)
    return tokens


def finalize(result: Tensor, prepared: Prepared, added: Tensor | None = None) -> Tensor:
    """Bring the partial results back to their tokens: sums over ranks in fp32, in rank order, rounded once.

    Args:
        result: ``[R, H]`` of :func:`experts`.
        prepared: of :func:`prepare`.
        added: ``[T, H]`` any float dtype, a shared expert's output: added before the sum is rounded, or None.

    Returns:
        ``[T, H]`` in the dtype of the result.

    Raises:
        ValueError: a wrong shape, dtype or device; or what the ranks disagree about.

    Source: GShard (arXiv 2006.16668).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> group = torch.distributed.group.WORLD
        >>> prepared = moe_ops.ep.prepare(torch.randn(4, 16), weights, ids, num_experts=8, group=group)
        >>> result = moe_ops.ep.experts(prepared, torch.randn(8, 64, 16), torch.randn(8, 16, 32))
        >>> moe_ops.ep.finalize(result, prepared).shape
        torch.Size([4, 16])
    """
    return finalize_wait(_finalize_start(result, prepared, apart=False), added)


def layer(
    hidden_states: Tensor,
    weights: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    group: GroupLike | None,
    transport: str | None,
    rank_capacity: int | None,
    **options: Any,
) -> Tensor:
    """:func:`moe_ops.fused_experts` over a group; ``options`` are its own keyword arguments."""
    op = "fused_experts"
    members = resolve(op, group)
    refusing(members.name, _check_layer, op, hidden_states, weights, topk_weights, topk_ids, options)
    halves = 1 if options.get("up_proj") is None else 2
    scales, on_input = len(options.get("gate_up_scales") or ()), options.get("weight_on_input", False)
    scheme = wire_scheme(options.get("scheme"), scales, halves=halves, weight_on_input=on_input)
    num_experts = weights[0].shape[0] * members.size
    given = {"hidden_states": hidden_states, "gate_up_proj": weights[0], "down_proj": weights[1]}
    given |= {"topk_weights": topk_weights, "topk_ids": topk_ids} | options
    check_while_compiling(members.name, given)
    trained = _is_differentiated(*given.values())
    way = "at once" if trained else "by the layer"
    settings = {name: options[name] for name in _SETTINGS if type(options.get(name)) in (str, bool, int, float)}
    alike = {name: number_text(value) if type(value) in (int, float) else value for name, value in settings.items()}
    alike |= {name: options.get(name) is not None for name in _OPTIONAL}
    alike |= {"gradient of the result": trained, "call": op}
    wanted = _Wanted(hidden_states, topk_weights, topk_ids, num_experts, transport, scheme, rank_capacity)
    agreed = _agreed(wanted, members, way, options.get("capacity"), **alike)
    if agreed.transport == "symm" and not trained:
        return across.experts({**given, "topk_ids": agreed.ids}, members, scheme)
    prepared = prepare_wait(_start(wanted, agreed, apart=False))
    result = experts(prepared, *weights, **options)
    return finalize_wait(_finalize_start(result, prepared, apart=False, agreed=True))


#: Of a layer's options, what all ranks compute by, and which tensors all have or none.
_SETTINGS = ("activation", "glu_layout", "alpha", "limit", "weight_on_input")
_OPTIONAL = ("up_proj", "gate_up_bias", "down_bias")


def _is_differentiated(*values: Any) -> bool:
    return torch.is_grad_enabled() and wants_grad(values)


def _check_layer(
    op: str,
    hidden_states: Tensor,
    weights: tuple[Tensor, Tensor],
    topk_weights: Tensor,
    topk_ids: Tensor,
    options: dict[str, Any],
) -> None:
    """The whole layer by its own rule, before anything is sent; where a graph is captured, its operator does that."""
    if options.get("expert_map") is not None:
        raise fail(
            op, "expert_map", "None beside a group", "a tensor", "ids name the experts of all ranks, in rank order."
        )
    if options.get("hidden_states_scale") is not None:
        raise fail(op, "hidden_states_scale", "None beside a group", "a tensor", "Rows are quantised on their way.")
    given = {"hidden_states": hidden_states, **dict(zip(("gate_up_proj", "down_proj"), weights, strict=True))}
    given |= {"topk_weights": topk_weights, "topk_ids": topk_ids, **options}
    for name, value in given.items():
        check_type(op, name, value, ARGUMENTS[op][name])
    for name in ("gate_up_proj", "down_proj"):
        check_rank(op, name, given[name], "E N K")
    if not torch.compiler.is_compiling():
        refuse_tangents(op, list(given.values()))  # as the layer does, which one rank alone would tell too late
        check_layer(op, hidden_states, *weights, topk_weights, topk_ids, **options)
