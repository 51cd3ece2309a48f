"""The keys of a checkpoint's safetensors files, as the expert layers that they make up."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from meta.checks import fail
from moe_ops.checkpoint_layouts import OP, Parts, part_of

#: Other names of the three projections.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_KEY = re.compile(r"(.+?)\.(?:(\d+)\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w[123])((?:[._].+)?)")

#: (expert or None where all are stacked, projection) -> part -> key.
Layer = dict[tuple[int | None, str], dict[str, str]]
#: Of each expert (one entry where all are stacked) the parts of a weight: gate and up, or the one that there is.
Members = list[list[Parts]]


class Checkpoint:
    """The safetensors files of a folder, or one of them; files are opened when something in them is read.

    Args:
        path: a file, or a folder with ``*.safetensors``; its ``*.safetensors.index.json``, if any, says which key is
            in which.

    Raises:
        ValueError: nothing to read there, or safetensors is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise fail(OP, "checkpoint", "the path of a file or folder", type(path).__name__)
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise fail(OP, "safetensors", "installed", "none", "pip install 'moe-compile[hf]'") from error
        self._open = safe_open
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()
        self._where = dict(self._find())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _find(self) -> Iterable[tuple[str, Path]]:
        """Every key with its file."""
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if indices:
            for key, name in json.loads(indices[0].read_text())["weight_map"].items():
                yield key, self.path / name
            return
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            raise fail(OP, "checkpoint", "a safetensors file, or a folder with some", repr(str(self.path)))
        for path in files:
            for key in self._file(path).keys():
                yield key, path

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            if not path.is_file():
                raise fail(OP, "checkpoint", f"complete, with the file {path.name!r} of its index", "no such file")
            self._files[path] = self._stack.enter_context(self._open(path, framework="pt"))
        return self._files[path]

    def read(self, key: str) -> Tensor:
        """The tensor, on the CPU, in memory of its own.

        Raises:
            ValueError: the file does not hold what its index says, or not as safetensors writes it.
        """
        path = self._where[key]
        try:
            tensor: Tensor = self._file(path).get_tensor(key)
        except Exception as error:
            raise fail(OP, key, f"readable from {path.name!r}", f"{type(error).__name__}: {error}") from error
        return tensor

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Projections by what stands before them in their keys, those of dense layers included."""
        layers: dict[str, Layer] = defaultdict(lambda: defaultdict(dict))
        for key in self._where:
            match = _KEY.fullmatch(key)
            if match:
                prefix, expert, projection, suffix = match.groups()
                place = (None if expert is None else int(expert), _PROJECTIONS.get(projection, projection))
                layers[prefix][place][part_of(suffix)] = key
        return layers

    def prefix_of(self, name: str) -> str:
        """What keys of the module ``name`` begin with: its name, the only prefix that is its name but for what stands
        in front of one of them, or the only one of numbered experts with the numbers of its name in it.

        Raises:
            ValueError: there is none, or more than one.
        """
        if name in self.layers:
            return name
        ends = [prefix for prefix in self.layers if f".{prefix}".endswith(f".{name}") or name.endswith(f".{prefix}")]
        numbers = re.findall(r"\d+", name)
        same = [
            prefix
            for prefix, layer in self.layers.items()
            if re.findall(r"\d+", prefix) == numbers and any(expert is not None for expert, _ in layer)
        ]
        for found in (ends, same):
            if len(found) == 1:
                return found[0]
        raise fail(OP, "checkpoint", f"with the experts of {name!r}", sorted({*ends, *same}) or "no such keys")

    def members(self, prefix: str) -> dict[str, Members]:
        """The parts of each of the layer's weights, by the name of the parameter that it is.

        Raises:
            ValueError: an expert or a projection is missing; its key is named.
        """
        layer = self.layers.get(prefix, {})
        experts = sorted({expert for expert, _ in layer if expert is not None})
        names = {projection for _, projection in layer}
        stacked = not experts
        if "gate_up_proj" in names:
            weights = {"gate_up_proj": ["gate_up_proj"]}
        elif "gate_proj" in names:
            weights = {"gate_up_proj": ["gate_proj", "up_proj"]}
        else:
            weights = {"up_proj": ["up_proj"]}
        weights["down_proj"] = ["down_proj"]
        found: dict[str, Members] = {name: [] for name in weights}
        for expert in [None] if stacked else range(experts[-1] + 1):
            for name, projections in weights.items():
                found[name].append([self._parts(layer, prefix, expert, projection) for projection in projections])
        return found

    def _parts(self, layer: Layer, prefix: str, expert: int | None, projection: str) -> Parts:
        keys = layer.get((expert, projection))
        if not keys:
            key = ".".join([prefix, *([] if expert is None else [str(expert)]), projection])
            raise fail(OP, "checkpoint", f"complete, with {key!r}", "no key of it")
        return Parts(keys, self.read, stacked=expert is None)
