"""What the ``config.json`` beside a checkpoint says of how compressed-tensors quantised its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from meta.checks import fail
from moe_ops.checkpoint_parts import OP

#: What a target that is a regular expression begins with.
_EXPRESSION = "re:"
#: Of the modules that a projection of a numbered expert is for compressed-tensors.
_CLASS = "Linear"


class Config:
    """Groups of modules, each quantised in one way; none where another library wrote the file.

    Args:
        path: of the file, which need not be there.

    Raises:
        ValueError: it is no JSON, or has a regular expression that is none.
    """

    def __init__(self, path: Path) -> None:
        said = _content(path).get("quantization_config") if path.is_file() else None
        said = said if isinstance(said, dict) else {}
        groups = said.get("config_groups") if said.get("quant_method") == "compressed-tensors" else None
        ways = groups.values() if isinstance(groups, dict) else ()
        self._groups = [_Group(way) for way in ways if isinstance(way, dict)]

    def weights_alone(self, name: str) -> bool:
        """It says that the activations in front of a projection are not quantised."""
        ways = self._of(name)
        return bool(ways) and all(way.said.get("input_activations") is None for way in ways)

    def has_zero_points(self, name: str) -> bool:
        """It says that a projection has zero points."""
        weights = [way.said.get("weights") for way in self._of(name)]
        return bool(weights) and all(isinstance(one, dict) and one.get("symmetric") is False for one in weights)

    def _of(self, name: str) -> list[_Group]:
        """The groups that a projection may be of: those that name it, else those whose expressions match its name, else
        those of its class, or of all modules.
        """
        named = [group for group in self._groups if name in (group.names or ())]
        alike = [group for group in self._groups if any(one.match(name) for one in group.expressions)]
        return named or alike or [group for group in self._groups if group.names is None or _CLASS in group.names]


class _Group:
    """One way, and whose it is: names of modules or classes, and regular expressions; None where it does not say."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        targets = said.get("targets")
        self.names: list[str] | None = targets if isinstance(targets, list) else None
        self.expressions = [_compiled(one) for one in self.names or [] if str(one).startswith(_EXPRESSION)]


def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_EXPRESSION))
    except re.error as error:
        rule = f"with regular expressions behind {_EXPRESSION!r} in 'config.json'"
        raise fail(OP, "checkpoint", rule, f"{target!r}: {error}") from error


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise fail(OP, "checkpoint", f"with JSON in {path.name!r}", f"{type(error).__name__}: {error}") from error
    return content if isinstance(content, dict) else {}
