"""Weights in the keys that torchao's ``flatten_tensor_state_dict`` gives its tensors, as transformers saves them.

``experts.gate_up_proj`` is ``experts._gate_up_proj_qdata``, ``experts._gate_up_proj_scale`` and so on there, and the
metadata of the file says what they are the parts of: torchao makes it, :mod:`moe_ops.integrations.containers` reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meta.checks import fail
from meta.schemes import ceil_div
from moe_ops.checkpoint_parts import OP, Parts
from moe_ops.integrations.containers import Container, Unread, read


def read_torchao(parts: Parts) -> tuple[str, Tensor, tuple[Tensor, ...]]:
    """Scheme, bytes ``[.., N, K]`` and scales ``[.., N groups, K groups]`` of a weight.

    Raises:
        ValueError: the file does not say what it is, there is no torchao that makes it, or no scheme reads that.
    """
    described = _described(parts)
    names = {
        kind: [name for need in ("", "optional_") for name in getattr(described, f"{need}tensor_{kind}_names", ())]
        for kind in ("data", "attribute")
    }
    given: dict[str, Any] = {name: getattr(described, name, None) for name in names["attribute"]}
    for name in names["data"]:
        if getattr(described, name, None) is not None:
            tensor = parts.take(name)[1]
            given[name] = tensor if parts.stacked else tensor.unsqueeze(0)
    sizes = given.get("block_size")
    if isinstance(sizes, list | tuple) and len(sizes) > 1:
        rows, columns = reversed(sizes[-2:]) if "qdata" in parts.turned else sizes[-2:]
        given["block_size"] = [*(sizes[:-2] if parts.stacked else (1,)), rows, columns]
    made = type(described)(**given)
    found = read(made)
    if not isinstance(found, Container) or found.transposed:
        what, cure = f"{type(made).__name__} {list(made.shape)}", ""
        if isinstance(found, Unread):
            what, cure = found.what, found.cure
        raise fail(OP, parts.keys["qdata"], "of a tensor [.., N, K] that a scheme reads", what, cure)
    if not _counts(made.block_size, made.shape, made.scale.shape):
        rule = f"of blocks that scales {list(made.scale.shape)} are of, as its metadata say"
        raise fail(
            OP, parts.keys["qdata"], rule, f"{made.block_size} of {list(made.shape)}", "Save it anew by torchao."
        )
    data, *scales = (part.of(made).contiguous() for part in (found.data, *found.scales))
    if parts.stacked:
        return found.scheme, data, (*scales,)
    return found.scheme, data[0], tuple(scale[0] for scale in scales)


def _counts(sizes: Any, shape: Sequence[int], grid: Sequence[int]) -> bool:
    """Blocks of these sizes are as many as a grid has: torchao computes some numbers by them. None says nothing."""
    if sizes is None:
        return True
    if not isinstance(sizes, list | tuple) or len(sizes) != len(shape):
        return False
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    return known and [*map(ceil_div, shape, sizes)] == [*grid]


def _described(parts: Parts) -> Any:
    """torchao's tensor of these parts, on meta.

    Raises:
        ValueError: it cannot be made.
    """
    key = parts.keys["qdata"]
    name, stem = re.sub(r"_([^.]*)_qdata$", r"\1", key), key.removesuffix("qdata")
    note = parts.note("qdata", name)
    if note is None:
        rule = f"in a file whose metadata say what {name!r} is, as those of torchao's flatten_tensor_state_dict do"
        raise fail(OP, key, rule, "none", "Save it by transformers' save_pretrained, or with these metadata.")
    try:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    except ImportError as error:
        cure = "pip install torchao, the version that wrote it."
        raise fail(
            OP, "torchao", f"installed where it wrote {key!r}", f"{type(error).__name__}: {error}", cure
        ) from error
    held = {stem + part: parts.like(part) for part, stored in parts.keys.items() if stored == stem + part}
    try:
        return unflatten_tensor_state_dict(held, {name: note, "tensor_names": json.dumps([name])})[0][name]
    except Exception as error:  # of whatever kind: it parses what another version may have written
        cure = "Take the version of torchao that wrote it."
        raise fail(OP, key, "of a tensor that torchao makes", f"{type(error).__name__}: {error}", cure) from error
