"""Process groups by name: what a layer over several ranks needs to know of one, and no more than a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import torch.distributed as dist

from meta.checks import describe_value, fail
from moe_ops.compat import constant_in_graphs

T = TypeVar("T")
#: What stands for a group in calls.
GroupLike: TypeAlias = "dist.ProcessGroup | dist.device_mesh.DeviceMesh | str"
_ALL_RANKS = "Pass torch.distributed.group.WORLD for all ranks; before init_process_group it is None."
_RULE = "a torch.distributed process group, its name, or a device mesh of one dimension"


class Group(NamedTuple):
    """A process group as this rank sees it.

    Attributes:
        name: by which functional collectives find it.
        rank: of this process in it.
        size: W, its ranks.
    """

    name: str
    rank: int
    size: int


def resolve(op: str, group: Any) -> Group:
    """The group that an argument stands for; every rank gives the same one.

    Raises:
        ValueError: no process group, one that this process is not in, or a mesh of several dimensions.
    """
    name = _name(op, group)
    found = _rank_and_size(name)
    if isinstance(found, str):
        raise fail(op, "group", *found.split("|"))
    return Group(name, *found)


def _name(op: str, group: Any) -> str:
    if isinstance(group, str):
        return group
    if not dist.is_available() or group is None:
        raise fail(op, "group", _RULE, describe_value(group), _ALL_RANKS)
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise fail(op, "group", _RULE, f"a mesh of {group.ndim}", "Name the dimension of the experts: mesh['ep'].")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise fail(op, "group", "one that this rank is in", "none", "Call it on the group's ranks alone.")
    name: str | None = getattr(group, "group_name", None)
    if name is None:
        raise fail(op, "group", _RULE, describe_value(group), _ALL_RANKS)
    return name


@constant_in_graphs
def _rank_and_size(name: str) -> tuple[int, int] | str:
    """(rank, size), or rule, what there is and cure, divided by bars: a graph takes either for a constant."""
    if not dist.is_available() or not dist.is_initialized():
        return f"of an initialised torch.distributed|{name!r}|Call torch.distributed.init_process_group() first."
    group = process_group(name)
    if group is None:
        return f"the name of a process group|{name!r}|Pass the group itself, or its .group_name."
    rank = dist.get_rank(group)
    if rank < 0:
        return f"one that this rank is in|{name!r}|Call it on the group's ranks alone."
    return rank, dist.get_world_size(group)


def process_group(name: str) -> Any:
    """The group of this name, or None."""
    return next((group for group, known in dist.distributed_c10d._world.pg_names.items() if known == name), None)


class PerGroup(Generic[T]):
    """What is kept for every process group, by its name, until another group has that name."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: dict[str, tuple[Callable[[], Any], T]] = {}

    def __getitem__(self, name: str) -> T:
        group = process_group(name)
        if name not in self._kept or self._kept[name][0]() is not group:
            self._kept[name] = (lambda: None) if group is None else ref(group), self._make()
        return self._kept[name][1]
