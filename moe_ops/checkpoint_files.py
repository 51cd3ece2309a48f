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
from moe_ops.checkpoint_config import Config
from moe_ops.checkpoint_parts import OP, Parts, part_of

#: Other names of the three projections.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_KEY = re.compile(r"(?:(.+?)\.)?(?:(\d+)\.)?_?(gate_up_proj|gate_proj|up_proj|down_proj|w[123])((?:[._].+)?)")

#: What helps against a file that is not safetensors', by its suffix.
_OF_TORCH = "Convert it with safetensors.torch.save_file."
_INDEX = ".safetensors.index.json"
_CURES = {".json": "Pass the folder that it is in.", ".bin": _OF_TORCH, ".pt": _OF_TORCH, ".pth": _OF_TORCH}

#: (expert or None where all are stacked, projection) -> part -> its keys, of which there should be one.
Layer = dict[tuple[int | None, str], dict[str, list[str]]]
#: Of each expert (one entry where all are stacked) the parts of a weight: gate and up, or the one that there is.
Members = list[list[Parts]]


class Checkpoint:
    """The safetensors files of a folder, or one of them; files are opened when something in them is read.

    Args:
        path: a file, or a folder with ``*.safetensors``; its ``*.safetensors.index.json``, if any, says which key is
            in which. Of several, the one that is called ``model.safetensors.index.json`` counts; any can be the path.

    Raises:
        ValueError: nothing to read there, an index or a file that cannot be read, several indices, a key in two files
            without an index, or safetensors is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise fail(OP, "checkpoint", "the path of a file or folder", type(path).__name__)
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise fail(OP, "safetensors", "installed", "none", "pip install 'moe-compile[hf]'") from error
        self._open, self._errors = safe_open, (SafetensorError, OSError)
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._metadata: dict[Path, dict[str, str]] = {}
        self._stack = ExitStack()
        self._where: dict[str, Path] = {}
        for key, file in self._find():
            if key in self._where:
                both = f"{self._where[key].name!r} and {file.name!r}"
                cure = "Pass the path of one of them, or write an index that says which counts."
                raise fail(OP, key, "in one file where a folder has no index", both, cure)
            self._where[key] = file

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _find(self) -> Iterable[tuple[str, Path]]:
        """Every key with its file."""
        index = self.path if self.path.name.endswith(_INDEX) else self._index()
        if index is not None and index.is_file():
            for key, name in _weight_map(index).items():
                yield key, index.parent / name
            return
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            got = f"{str(self.path)!r}, which {'has none' if self.path.exists() else 'does not exist'}"
            cure = "huggingface_hub.snapshot_download makes a folder of a name; other formats have to be saved anew."
            raise fail(OP, "checkpoint", "a safetensors file, or a folder with some", got, cure)
        for path in files:
            for key in self._file(path).keys():
                yield key, path

    def _index(self) -> Path | None:
        """The index of a folder."""
        found = sorted(self.path.glob(f"*{_INDEX}"))
        usual = [index for index in found if index.name == f"model{_INDEX}"]
        if len(found) > 1 and not usual:
            got = ", ".join(repr(index.name) for index in found)
            raise fail(
                OP, "checkpoint", "of one index", f"{len(found)}: {got}", "Pass the path of the one that counts."
            )
        return next(iter(usual or found), None)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            if not path.is_file():
                raise fail(OP, "checkpoint", f"complete, with the file {path.name!r} of its index", "no such file")
            try:
                self._files[path] = self._stack.enter_context(self._open(path, framework="pt"))
            except self._errors as error:
                cure = _CURES.get(path.suffix, "Get it anew: it is cut short, or no such file.")
                rule = f"of files in safetensors' format, {path.name!r} too"
                raise fail(OP, "checkpoint", rule, f"{type(error).__name__}: {error}", cure) from error
        return self._files[path]

    def view(self, key: str) -> Tensor:
        """The tensor, on the CPU, in the memory of the file, which others may write; pages come when they are read.

        Raises:
            ValueError: the file does not hold what its index says, or not as safetensors writes it.
        """
        path = self._where[key]
        file = self._file(path)
        try:
            tensor: Tensor = file.get_tensor(key)
        except Exception as error:
            raise fail(OP, key, f"readable from {path.name!r}", f"{type(error).__name__}: {error}") from error
        return tensor

    def note(self, key: str, name: str) -> str | None:
        """What the metadata of the file that has a key say about a name."""
        path = self._where[key]
        if path not in self._metadata:
            self._metadata[path] = self._file(path).metadata() or {}
        return self._metadata[path].get(name)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Projections by what stands before them in their keys, those of dense layers included."""
        layers: dict[str, Layer] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for key in self._where:
            match = _KEY.fullmatch(key)
            if match:
                prefix, expert, projection, suffix = match.groups()
                place = (None if expert is None else int(expert), _PROJECTIONS.get(projection, projection))
                layers[prefix or ""][place][part_of(suffix)].append(key)
        return layers

    @cached_property
    def numbered(self) -> dict[str, bool]:
        """Whether there are numbered experts, by the keys of :attr:`layers`."""
        return {prefix: any(expert is not None for expert, _ in layer) for prefix, layer in self.layers.items()}

    @cached_property
    def _config(self) -> Config:
        """What is said beside it."""
        return Config((self.path.parent if self.path.is_file() else self.path) / "config.json")

    def members(self, prefix: str, *, apart: bool = False) -> dict[str, Members]:
        """The parts of each of the layer's weights, by the name of the parameter that it is.

        Args:
            apart: gates and ups that have keys of their own are parameters of their own, too.

        Raises:
            ValueError: an expert or a projection is missing, or something is there under two names or in two forms; the
                key is named.
        """
        layer = self.layers.get(prefix, {})
        experts = sorted({expert for expert, _ in layer if expert is not None})
        stacked = not experts
        names = {projection for expert, projection in layer if (expert is None) == stacked}
        if "gate_up_proj" in names:
            weights = {"gate_up_proj": ["gate_up_proj"]}
        elif "gate_proj" in names and apart:
            weights = {"gate_proj": ["gate_proj"], "up_proj": ["up_proj"]}
        elif "gate_proj" in names:
            weights = {"gate_up_proj": ["gate_proj", "up_proj"]}
        else:
            weights = {"up_proj": ["up_proj"]}
        weights["down_proj"] = ["down_proj"]
        found: dict[str, Members] = {name: [] for name in weights}
        numbers: list[int | None] = [None] if stacked else [*experts]
        read = [(expert, one) for expert in numbers for projections in weights.values() for one in projections]
        for place in sorted(layer.keys() - set(read), key=str):
            (key, *_), *_ = layer[place].values()
            beside = _joined(prefix, None if stacked else 0, read[0][1])
            raise fail(OP, key, f"absent beside {beside!r}", "it", "Take one of them out of the checkpoint.")
        for expected, number in enumerate(experts):
            if number != expected:
                self._parts(layer, prefix, expected, read[0][1])  # says that it is not there
        for expert in numbers:
            for name, projections in weights.items():
                found[name].append([self._parts(layer, prefix, expert, projection) for projection in projections])
        return found

    def _parts(self, layer: Layer, prefix: str, expert: int | None, projection: str) -> Parts:
        found = layer.get((expert, projection), {})
        name = _joined(prefix, expert, projection)
        if not found:
            raise fail(OP, "checkpoint", f"complete, with {name!r}", "no key of it")
        for key, *others in found.values():
            if others:
                rule = f"absent beside {key!r}, which is the same part of {name!r}"
                raise fail(OP, others[0], rule, "it", "Take one of them out of the checkpoint.")
        first = {part: keys[0] for part, keys in found.items()}
        config = self._config
        said = {"weights_alone": config.weights_alone(name), "has_zero_points": config.has_zero_points(name)}
        return Parts(first, self.view, self.note, name=name, stacked=expert is None, **said)


def _joined(prefix: str, expert: int | None, projection: str) -> str:
    """What the keys of a projection begin with; those of stacks that are the whole checkpoint have no prefix."""
    return ".".join([*filter(None, [prefix]), *([] if expert is None else [str(expert)]), projection])


def _weight_map(index: Path) -> dict[str, str]:
    """The file of every key, as an index says it.

    Raises:
        ValueError: it does not.
    """
    try:
        content, got = json.loads(index.read_text()), "JSON without that"
    except ValueError as error:
        content, got = None, f"{type(error).__name__}: {error}"
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        cure = "Get it anew, or remove it: the files of the folder are read then."
        raise fail(OP, "checkpoint", f"with the file of each key, as 'weight_map' in {index.name!r}", got, cure)
    return files
