"""Models by name: a factory, a transformers model type, configuration or `config.json`, or the name of one on the hub.

Nothing is downloaded. Of a transformers model a tiny random one is made (:mod:`compile_passes.tiny`), whose code is the
same at any size. A name on the hub gives its family away: by the `config.json` in the local cache of Hugging Face if it
is there, else by a model type of transformers that the name begins with, or holds after a "-".
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compile_passes.tiny import EXPERT_COUNTS, model_of, said, tiny_model

EXPERTS = ("grouped_mm", "batched_mm", "eager")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_CURE = (
    'Give a transformers model type ("mixtral"), a configuration, a path to a config.json, or a function that returns '
    '(model, inputs) as "package.module:factory".'
)
# What names of Mixture-of-Experts models say: 8x7B, 128E, A3B (3 billion active parameters), MoE.
_MARK = re.compile(r"moe|(?<![a-z0-9])(\d+x[\d.]+b|\d+e|a[\d.]+[bm])(?![a-z0-9])")
_PIECES = re.compile(r"[a-z]+|\d+")
# Model, positional and keyword arguments.
Subject = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def is_named(what: Any) -> bool:
    """Whether ``what`` stands for a model and is none itself: a name, or a configuration of transformers."""
    return isinstance(what, str) or _configuration(what)


def subject(what: Any, **options: Any) -> Subject:
    """The model that ``what`` stands for, and inputs for it.

    Args:
        what: "package.module:factory", a function without arguments that returns (model, inputs), where inputs is a
            tensor, a tuple of positional arguments or a dict of keyword arguments; a transformers model type; a path to
            a config.json or its folder; the name of a model on the hub; a configuration class or object.
        options: experts ("grouped_mm", "batched_mm", "eager"), dtype (torch.bfloat16, or "bf16") and tokens (16) of a
            transformers model. A factory takes none.

    Raises:
        ValueError: no such model, or one that cannot be made small.
    """
    if isinstance(what, str) and ":" in what:
        if options:
            raise ValueError(
                f"explain: a factory takes no {', '.join(options)}: {what} makes the model and the inputs."
            )
        model, inputs = _made_by(what)
        if isinstance(inputs, dict):
            return model, (), inputs
        return model, inputs if isinstance(inputs, tuple) else (inputs,), {}
    unknown = set(options) - {"experts", "dtype", "tokens"}
    if unknown:
        raise ValueError(
            f"explain: a model by name must be given experts, dtype or tokens, got {', '.join(sorted(unknown))}. Give "
            "the model itself with its inputs."
        )
    experts, tokens = options.get("experts", EXPERTS[0]), options.get("tokens", 16)
    if experts not in EXPERTS:
        raise ValueError(f"explain: experts must be one of {', '.join(EXPERTS)}, got {experts!r}.")
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"explain: tokens must be at least 1, got {tokens}.")
    dtype = options.get("dtype", torch.bfloat16)
    dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"explain: dtype must be one of {', '.join(DTYPES)}, got {options['dtype']!r}.")
    family, given = _configuration_of(what) if isinstance(what, str) else _family_of(what)
    config, model_class = model_of(family, given)
    model = tiny_model(config, model_class, dtype=dtype, experts=experts)
    return model, (), _token_inputs(what, config, model, tokens)


def _made_by(spelling: str) -> tuple[Callable[..., Any], Any]:
    """(model, inputs) of ``module:factory``."""
    module_name, _, name = spelling.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{spelling!r} must be module:factory, got {type(error).__name__}: {error}.") from None
    if not callable(factory):
        raise ValueError(f"{spelling} must be a function, got {type(factory).__name__}.")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise ValueError(f"{spelling} must return (model, inputs), got {type(made).__name__}.")
    return made


def _token_inputs(what: Any, config: Any, model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Random token ids, for the decoder as well when there is one."""
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        raise ValueError(
            f"{what}: {type(model).__name__} takes no token ids. Give a function that returns the model and "
            "its inputs, as module:factory."
        )
    ids = torch.randint(3, 100, (1, tokens))
    both = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted
    return {"input_ids": ids, "decoder_input_ids": ids} if both else {"input_ids": ids}


def _configuration(what: Any) -> bool:
    """Whether ``what`` is a configuration of transformers, or a class of such; transformers is not imported for it."""
    configurations = sys.modules.get("transformers.configuration_utils")
    base = getattr(configurations, "PreTrainedConfig", None) or getattr(configurations, "PretrainedConfig", None)
    return base is not None and (isinstance(what, base) or (isinstance(what, type) and issubclass(what, base)))


def _family_of(config: Any) -> tuple[str, Any]:
    """(model type, the configuration) of a configuration object; of a class, its family alone."""
    kind = config if isinstance(config, type) else type(config)
    package = kind.__module__.split(".")
    if package[:2] != ["transformers", "models"]:
        raise ValueError(f"explain: {kind.__name__} must be a configuration that transformers ships. {_CURE}")
    return package[2], None if isinstance(config, type) else config


def _configuration_of(name: str) -> tuple[str, Any]:
    """(model type, the values of its config.json or None) of a name."""
    path = Path(name)
    if name and path.exists():
        return _read(path / "config.json" if path.is_dir() else path)
    if name in _families():
        return name, None
    cached = _cached(name)
    return _read(Path(cached)) if cached is not None else (_guess(name), None)


def _read(file: Path) -> tuple[str, Any]:
    try:
        values = json.loads(file.read_text())
        family = str(values["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"explain: {file} must be the config.json of a transformers model: {said(error)}") from None
    return family, values


def _cached(name: str) -> str | None:
    """The config.json of a model on the hub, if it was downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # ValueError: it cannot be a name on the hub
        return None
    return found if isinstance(found, str) else None


@cache
def _families() -> dict[str, bool]:
    """The model types of the installed transformers, and whether their configurations count experts."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ValueError("explain: a model by name needs transformers, got none. pip install 'moe-compile[hf]'")
    found = {}
    for folder in sorted((Path(spec.origin).parent / "models").iterdir()):
        file = folder / f"configuration_{folder.name}.py"
        if file.exists():
            text = file.read_text(encoding="utf-8")
            found[folder.name] = any(re.search(rf"\b{count}\b", text) for count in EXPERT_COUNTS)
    return found


def _guess(name: str) -> str:
    """The model type that a name on the hub is of.

    Raises:
        ValueError: none, or several that the name does not tell apart.
    """
    families = _families()
    label = name.rpartition("/")[2].lower()
    found = {family: length for family in families if (length := _matched(family, label))}
    marked = _MARK.search(label) is not None
    possible = [family for family in found if families[family] or not marked]
    best = [family for family in possible if found[family] == max(found[one] for one in possible)]
    if len(best) == 1:
        return best[0]
    if best:
        raise ValueError(
            f"explain: {name!r} must name one transformers model type, it may be any of {', '.join(sorted(best))}. "
            "Give the one that its config.json names."
        )
    raise ValueError(
        f"explain: {name!r} must be the name of a model of a known family, got none that transformers has"
        f"{_near(label, families)}. {_CURE}"
    )


def _matched(family: str, label: str) -> int:
    """How many letters of a model type stand in a name from the start of a word to the end of one; 0 when they do not.

    A name hardly says "moe" where a type does.
    """
    whole = re.sub(r"[^a-z0-9]", "", family)
    stems = {whole, whole.replace("moe", "")} - {""}
    pieces = _PIECES.findall(label)
    words = {"".join(pieces[first:last]) for last in range(len(pieces) + 1) for first in range(last)}
    return max((len(stem) for stem in stems & words), default=0)


def _near(label: str, families: dict[str, bool]) -> str:
    """The types that look most like a name, those with experts first."""
    word = re.match(r"[a-z]*", label)
    same = [family for family in families if word and len(word[0]) > 2 and family.startswith(word[0])]
    close = difflib.get_close_matches(re.sub(r"[^a-z0-9]+", "_", label), families, n=5, cutoff=0.6)
    near = sorted(dict.fromkeys([*close, *same]), key=lambda family: not families[family])[:5]
    return f" (near it: {', '.join(near)})" if near else ""
