"""Which keys of a checkpoint are those of a module: names differ in front, and in what a layer calls its parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from meta.checks import fail
from moe_ops.checkpoint_parts import OP

_NUMBER = re.compile(r"\d+")
#: Words that tell stacks of layers of one model apart, which number their layers alike.
_STACKS = {
    *("encoder", "decoder", "mtp", "nextn", "draft", "eagle", "medusa", "predictor", "thinker", "talker"),
    *("vision", "visual", "image", "video", "audio", "speech"),
}
_CURE = "Pass the model that the checkpoint is of, not a part of it: its names tell layers apart."


def candidates(name: str, prefixes: Mapping[str, bool]) -> list[str]:
    """The prefixes that can be the module ``name``: its name, else those that are it but for what stands in front of
    one of them, else those of numbered experts with the numbers of its name, unless other layers are called as it is;
    all of the same stack of layers.

    Args:
        name: of the module.
        prefixes: whether experts are numbered behind each.
    """
    if name in prefixes:
        return [name]
    return _alike(name, {prefix: numbered for prefix, numbered in prefixes.items() if _stack(prefix) == _stack(name)})


def prefix_of(name: str, prefixes: Mapping[str, bool]) -> str:
    """The only one of :func:`candidates`.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = candidates(name, prefixes)
    if len(found) == 1:
        return found[0]
    owner = repr(name) if name else "the model, which is a module of experts itself"
    if found:
        raise fail(OP, "checkpoint", f"with one layer of experts that can be {owner}", sorted(found), _CURE)
    others = _alike(name, prefixes)
    got = f"those of another stack of layers, {sorted(others)}" if others else "no such keys"
    cure = "Pass the model that the checkpoint is of, or leave modules that it does not have out by the filter."
    raise fail(OP, "checkpoint", f"with the experts of {owner}", got, cure)


def check_prefixes(prefixes: Mapping[str, str], modules: Iterable[str]) -> None:
    """Every module has keys of its own, and modules whose names differ in numbers alone have keys that do, too.

    Args:
        prefixes: by the names of the modules that are filled.
        modules: the names of all modules of the model, filled or not.

    Raises:
        ValueError: naming modules and keys.
    """
    others = defaultdict(list)
    for module in modules:
        others[_numbers(module)].append(module)
    forms: dict[str, str] = {}
    for name, prefix in prefixes.items():
        rival = [other for other in others[_numbers(prefix)] if prefix != name and _may_own(other, name, prefix)]
        rival += [other for other, its in prefixes.items() if other != name and its == prefix]
        if rival:
            rule = "with keys of its own for each module of experts"
            raise fail(OP, "checkpoint", rule, dict.fromkeys((name, rival[0]), prefix), _CURE)
        first = forms.setdefault(_form(name), prefix)
        if _form(first) != _form(prefix):
            rule = f"with keys like {first!r} for {name!r}, too"
            raise fail(OP, "checkpoint", rule, repr(prefix), "Leave layers that it does not have out by the filter.")


def _may_own(other: str, name: str, prefix: str) -> bool:
    """``other``, which is neither around nor inside of the module ``name``, can be what keys with ``prefix`` are of."""
    if other == name or f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}."):
        return False
    return other == prefix or _end_alike(other, prefix)


def _alike(name: str, prefixes: Mapping[str, bool]) -> list[str]:
    ends = [prefix for prefix in prefixes if _end_alike(prefix, name)]
    if ends or any(_end_alike(_form(prefix), _form(name)) for prefix in prefixes):
        return ends  # where other layers have their names, one that has not is missing
    return [prefix for prefix, numbered in prefixes.items() if numbered and _numbers(prefix) == _numbers(name)]


def _end_alike(one: str, other: str) -> bool:
    return f".{one}".endswith(f".{other}") or other.endswith(f".{one}")


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))


def _form(name: str) -> str:
    """What the names of a stack's layers have in common."""
    return _NUMBER.sub("#", name)


def _stack(name: str) -> set[str]:
    return _STACKS & {*re.split(r"[._\d]+", name.lower())}
