"""What all ranks of a group must say alike before they exchange anything: sizes, dtypes, options.

A collective among ranks that disagree waits for ever. So every rank writes what it is about to do into the store that
torch.distributed keeps on the host, and reads what the others wrote: no tensor moves, no stream is waited for. On the
CPU at every call; on a GPU at the first of its kind, since the host runs ahead there and later ones are captured.
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meta.checks import fail
from moe_ops import choice, compat, debugging
from moe_ops.groups import Group, PerGroup, process_group, resolve
from moe_ops.pairs import count_pairs, local_ids

T = TypeVar("T")
_REFUSED = "refused: "
_GAVE_UP = "gave up: "
_SEPARATOR = "\x1f"

#: Of a group: how many have had its name so far, and how many exchanges it has had; the same numbers on all ranks.
_counts: PerGroup[Counter[str]] = PerGroup(Counter)
#: What was agreed on once, where one time is enough.
_known: PerGroup[set[str]] = PerGroup(set)
#: The connection of a group to the store, at most one. A thread that waits on one keeps all others from it: with one
#: for all groups, two threads of a rank and two of another would each wait for what the other pair cannot send.
_stores: PerGroup[list[Any]] = PerGroup(list)


def _store(group: Group) -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    own = _stores[group.name]
    if not own:
        own.append(store.clone())
    own[0].set_timeout(store.timeout)  # as it is now
    ranks = dist.get_process_group_ranks(process_group(group.name))
    prefix = f"moe_ops.ep/{group.name}/{ranks[0]}/{group.size}"
    return torch._C._distributed_c10d.PrefixStore(prefix, own[0])


def _is_pretence(group: Group) -> bool:
    """One process that stands for many, torch's "fake" backend, has nobody to agree with."""
    return bool(dist.get_backend(process_group(group.name)) == "fake")


def _post(group: Group, text: str) -> tuple[Any, int]:
    store, counts = _store(group), _counts[group.name]
    if not counts:  # apart from what an earlier group of the name may have left in the store
        counts["groups"] = store.add(f"groups/{group.rank}", 1)
    store, number = torch._C._distributed_c10d.PrefixStore(str(counts["groups"]), store), counts["exchanges"]
    counts["exchanges"] += 1
    store.set(f"{number}/{group.rank}", text)
    return store, number


def exchange_texts(op: str, group: Group, text: str) -> list[str]:
    """What every rank wrote, in rank order."""
    store, number = _post(group, text)
    texts: list[str] = []
    for rank in range(group.size):
        try:
            texts.append(text if rank == group.rank else store.get(f"{number}/{rank}").decode())
        except RuntimeError as late:
            raise _given_up(
                store,
                f"{number}/{group.rank}",
                f"{op}: rank {rank} of group {group.name!r} did not call it within {store.timeout}. Every rank of the "
                "group must call it, as often and in the same order; look for an error of that rank.",
            ) from late
        if texts[-1].startswith(_GAVE_UP):
            raise _given_up(store, f"{number}/{group.rank}", texts[-1][len(_GAVE_UP) :])
    if number:  # whoever wrote this has read all that came before
        store.delete_key(f"{number - 1}/{group.rank}")
    return texts


def _given_up(store: Any, key: str, message: str) -> RuntimeError:
    """The error, left under ``key`` for ranks that come later: they would wait for this one's tensors."""
    with suppress(RuntimeError):  # the store itself may be gone
        store.set(key, _GAVE_UP + message)
    return RuntimeError(message)


def agree(op: str, group: Group, device: torch.device, facts: dict[str, Any]) -> None:
    """Returns if all ranks are about to do the same.

    Args:
        op: for the message.
        group: who must agree.
        device: where the tensors are.
        facts: name -> value; one that a rank does not name is None there.

    Raises:
        ValueError: on every rank, the same message: a rank has another value, or refused its arguments.
        RuntimeError: a rank did not come within the time that torch.distributed was initialised with; that rank raises
            it as well when it comes.
    """
    facts = {"call": op, "moe_ops.debug()": "on" if debugging.active() else "off", **facts}
    text = _SEPARATOR.join(f"{name}={value}" for name, value in facts.items())
    if group.size == 1 or _is_pretence(group) or (device.type != "cpu" and text in _known[group.name]):
        return
    texts = exchange_texts(op, group, text)
    for rank, other in enumerate(texts):
        if other.startswith(_REFUSED):
            raise ValueError(
                f"{op}: rank {rank} of group {group.name!r} refused its arguments: {other[len(_REFUSED) :]}"
            )
    said = [dict(fact.split("=", 1) for fact in other.split(_SEPARATOR)) for other in texts]
    for name in dict.fromkeys(name for other in said for name in other):
        values = [other.get(name, "None") for other in said]
        if len(set(values)) > 1:
            got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise fail(op, name, "the same on every rank of the group", got, _CURES.get(name, ""))
    _known[group.name].add(text)


_CURES = {
    "T": "Pad the shorter batches: ids of -1 contribute nothing.",
    "capacity": "Under moe_ops.debug() every rank judges the rows of all by its own.",
    "call": "Every rank makes the same calls in the same order.",
    "moe_ops.debug()": "Its checks ask all ranks: open it on every one, or on none.",
}


def refuse(name: str, message: str) -> None:
    """Tells the other ranks of group ``name`` that this one raises ``message`` in place of the next agreement: once, or
    it would be out of step with them.
    """
    group = resolve("refuse", name)
    if group.size > 1 and not _is_pretence(group):
        _post(group, _REFUSED + message)


def refusing(name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """What ``function`` returns; that it refuses its arguments is told to the other ranks of group ``name``, too."""
    try:
        return function(*args, **options)
    except (ValueError, TypeError, AttributeError) as error:  # not what torch raises to compile once more
        if torch.compiler.is_compiling():
            # What an operator raises ends the capture. What Python raises breaks the graph: eager code would run into
            # it again, and tell the others again.
            torch.ops.moe_ops.refused(group=name, message=str(error))
        else:
            refuse(name, str(error))
        raise


def _refused(*, group: str, message: str) -> None:
    refuse(group, message)
    raise ValueError(message)


def _check_data(
    op: str, group: Group, ids: Tensor, num_experts: int, rank_capacity: int | None, capacity: int | None, shared: bool
) -> None:
    """Under ``moe_ops.debug()``: what only the data knows, summed over the group first, so that all ranks raise.

    ``capacity``: of the ranks' layers, whose own checks know what is dropped on their rank alone; ``shared``: the ranks
    have the same ids.
    """
    debugging.refuse_capture(op)
    wrong = ((ids < -1) | (ids >= num_experts)).sum()
    dropped = torch.zeros_like(wrong)
    if rank_capacity is not None:
        dropped = (destinations(ids, num_experts, group.size).ge(0).sum(0) - rank_capacity).clamp(min=0).sum()
    found = torch.cat((torch.stack((wrong, dropped)), count_pairs(local_ids(ids, None, num_experts), num_experts)))
    dist.all_reduce(found, group=process_group(group.name))
    bad, rows = found[:2].tolist()
    if bad:
        rule = f"in [-1, E={num_experts})"
        raise fail(op, "topk_ids", rule, f"{bad} entries over all ranks that are not", "Use -1 for pairs to skip.")
    if rows:
        got = f"{rows} rows more over all ranks, which were dropped"
        raise fail(op, "rows for each rank", f"<= rank_capacity={rank_capacity}", got, "Pass a larger rank_capacity.")
    if capacity is not None:
        debugging.check_capacity("fused_experts", found[2:] // (group.size if shared else 1), capacity)


def destinations(topk_ids: Tensor, num_experts: int, size: int) -> Tensor:
    """``[T, W]``: w where a token has an expert on rank w, else -1; rank w holds the w-th of W equal blocks."""
    owner = topk_ids.div(max(num_experts // size, 1), rounding_mode="floor")
    ranks = torch.arange(size, device=topk_ids.device, dtype=topk_ids.dtype)
    return torch.where((owner.unsqueeze(-1) == ranks).any(1), ranks, -1)


def _agreed_ids(
    topk_ids: Tensor,
    width: int,
    *,
    num_experts: int,
    group: str,
    rank: int,
    size: int,
    options: str,
    rank_capacity: int | None = None,
    capacity: int | None = None,
) -> Tensor:
    op, members = "ep.prepare", resolve("ep.prepare", group)
    refusing(group, _check_members, op, members, Group(group, rank, size))
    facts: dict[str, Any] = {"T": topk_ids.shape[0], "K": topk_ids.shape[1], "num_experts": num_experts, "H": width}
    facts |= dict(option.split("=") for option in options.split(";")) | {"rank_capacity": rank_capacity}
    if debugging.active():
        facts["capacity"] = capacity
    agree(op, members, topk_ids.device, facts)
    if debugging.active():
        _check_data(op, members, topk_ids, num_experts, rank_capacity, capacity, facts["transport"] == "replicated")
    ids = topk_ids.clamp(-1, num_experts)  # a new tensor, whatever the dtype
    return ids.to(torch.int32)


def _check_members(op: str, now: Group, then: Group) -> None:
    """Code that was compiled for a group has its size and this rank as numbers, also if the name is another group's."""
    if now != then:
        rule = f"the one that this code was compiled for, in which this was rank {then.rank} of {then.size}"
        got = f"{now.name!r}, in which it is rank {now.rank} of {now.size}"
        raise fail(op, "group", rule, got, "Call torch.compiler.reset() after init_process_group().")


def _agreed_ids_fake(topk_ids: Tensor, width: int, **options: Any) -> Tensor:
    return topk_ids.new_empty(topk_ids.shape, dtype=torch.int32)


def check_while_compiling(name: str, arguments: dict[str, Any]) -> None:
    """The rule of ``fused_experts`` while code is captured, before that operator: what it raises there can be caught
    by nobody, and the other ranks of group ``name`` would wait.
    """
    if not torch.compiler.is_compiling():
        return
    tensors: list[Tensor] = []
    places: dict[str, int | list[int]] = {}
    for argument, value in arguments.items():
        if isinstance(value, Tensor):
            places[argument] = len(tensors)
            tensors.append(value.detach())
        elif isinstance(value, list | tuple):
            places[argument] = list(range(len(tensors), len(tensors) + len(value)))
            tensors += [tensor.detach() for tensor in value]
    plain = {argument: value for argument, value in arguments.items() if type(value) in (str, bool)}
    numbers = {argument: value for argument, value in arguments.items() if type(value) is int}
    floats = {argument: value for argument, value in arguments.items() if type(value) is float}
    options = repr((places, plain, tuple(numbers), tuple(floats)))
    torch.ops.moe_ops.checked_layer(tensors, list(numbers.values()), list(floats.values()), group=name, options=options)


def check_layer(op: str, *args: Any, **options: Any) -> None:
    """Raise where the layer's rule refuses the arguments, or no backend serves them."""
    from moe_ops.ops import parse

    call = parse(op, *args, **options)
    choice.choose(call.problem, call.backend)


def _checked_layer_fake(
    tensors: list[Tensor], numbers: list[Any], floats: list[float], *, group: str, options: str
) -> None:
    places, plain, of_numbers, of_floats = literal_eval(options)
    plain |= dict(zip((*of_numbers, *of_floats), (*numbers, *floats), strict=True))
    given = {
        name: [tensors[each] for each in place] if isinstance(place, list) else tensors[place]
        for name, place in places.items()
    }
    refusing(group, check_layer, "fused_experts", **given, **plain)


#: The ids as int32, those out of range just out of it, once the ranks agree. An operator, so that compiled code asks at
#: every run, as eager code does.
_SCHEMA = (
    "(Tensor topk_ids, SymInt width, *, SymInt num_experts, str group, int rank, int size, str options, "
    "SymInt? rank_capacity=None, SymInt? capacity=None) -> Tensor"
)
_library = torch.library.Library("moe_ops", "FRAGMENT")
_library.define(f"agreed_ids{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("agreed_ids", _agreed_ids, _key)
torch.library.register_fake("moe_ops::agreed_ids", _agreed_ids_fake, lib=_library)
# The others wait for this rank, though nothing depends on the ids of no tokens.
compat.keep_in_graphs(torch.ops.moe_ops.agreed_ids.default)
#: Its fake does the work, while code is captured; nothing of it is left in what runs.
_library.define("checked_layer(Tensor[] tensors, SymInt[] numbers, float[] floats, *, str group, str options) -> ()")
_library.impl("checked_layer", lambda tensors, numbers, floats, **options: None, "CompositeExplicitAutograd")
torch.library.register_fake("moe_ops::checked_layer", _checked_layer_fake, lib=_library)
_library.define("refused(*, str group, str message) -> ()")
_library.impl("refused", _refused, "CompositeExplicitAutograd")
torch.library.register_fake("moe_ops::refused", _refused, lib=_library)
