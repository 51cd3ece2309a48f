"""Expert weights that are DTensors: their local blocks, where these are what expert parallelism wants of a rank.

Rank r of W wants block r of the experts. ``distribute_tensor(weight, mesh, [Shard(0)])`` over the group's own ranks is
just that; gradients arrive in the parameter's ``.grad`` as it is, sharded. What is placed otherwise is refused: to
bring it here would be a collective that nobody asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meta.checks import fail
from moe_ops.agreement import refusing
from moe_ops.compat import constant_in_graphs
from moe_ops.groups import Group, process_group, resolve

_RULE = "plain, or a DTensor that is Shard(0) over the group's ranks"
_SHARD = 'Shard it with distribute_tensor(weight, mesh["ep"], [Shard(0)]), or pass this rank\'s block.'


def local(op: str, group: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors, and in place of every DTensor among them the block that this rank holds; differentiable.

    Args:
        op: for the message.
        group: over which the experts are spread, or None.
        tensors: name -> a tensor or a list of them, with a row for each expert; or None.

    Raises:
        ValueError: on every rank of the group, a DTensor without a group, or placed in another way than over its ranks.
    """
    if not any(_is_dtensor(each) for value in tensors.values() for each in _all(value)):
        return tensors
    if group is None:
        name = next(name for name, value in tensors.items() if any(map(_is_dtensor, _all(value))))
        cure = "Pass group=weight.device_mesh.get_group() to fused_experts, or weight.full_tensor()."
        raise fail(op, name, "a plain tensor without a group", "a DTensor", cure)
    members = resolve(op, group)
    return {name: refusing(members.name, _local, op, name, value, members) for name, value in tensors.items()}


def _all(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _is_dtensor(value: Any) -> bool:
    """By what it has: to import the class takes longer than most calls that have none."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _local(op: str, name: str, value: Any, group: Group) -> Any:
    if isinstance(value, list | tuple):
        return [_local(op, name, each, group) for each in value]
    if not _is_dtensor(value):
        return value
    mesh, placements = value.device_mesh, value.placements
    if mesh.ndim != 1:
        got = f"one over a mesh of {mesh.ndim} dimensions"
        raise fail(op, name, _RULE, got, "Shard it over the dimension of the experts alone, mesh['ep'].")
    if type(placements[0]).__name__ != "Shard" or placements[0].dim != 0:
        raise fail(op, name, _RULE, str(placements[0]), _SHARD)
    if not _have_the_same_ranks(mesh.get_group().group_name, group.name):
        raise fail(op, name, _RULE, "one over other ranks", "Pass group=weight.device_mesh.get_group().")
    (block,) = mesh.get_coordinate()
    if block != group.rank:
        got = f"block {block} on rank {group.rank} of the group"
        raise fail(op, name, _RULE, got, "Make the mesh of the group's ranks in their order.")
    if value.shape[0] % group.size:
        got = f"{value.shape[0]} experts for {group.size} ranks"
        raise fail(op, name, "evenly split over the group", got, "Every rank holds an equal block.")
    return value.to_local()


@constant_in_graphs
def _have_the_same_ranks(*names: str) -> bool:
    """Whether groups are of the same processes. One constant: Dynamo of torch 2.11 compares no tuples of constants."""
    return len({tuple(sorted(dist.get_process_group_ranks(process_group(name)))) for name in names}) == 1
