"""`generate()` of a transformers model compiles its decode steps by itself, from its own settings: they are set here.

`torch.compile(model)` compiles `model.forward`. `generate()` is a method of the model inside and calls that model,
which is not compiled; with a static cache it compiles decode steps on its own, by `generation_config.compile_config`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from types import MethodType
from typing import Any

from torch import nn

from compile_passes.compat import capturing
from moe_ops.compat import captured_under

log = logging.getLogger(__name__)

#: What a configuration made here may hold as backend: it may be replaced by a later call.
OUR_BACKENDS = ("moe_ops", "moe_ops_eager")


def prepare_generate(
    model: nn.Module, backend: Any, settings: dict[str, Any], *, fullgraph: bool = False, dynamic: bool | None = None
) -> None:
    """Let `generate(cache_implementation="static")` compile decode steps as `moe_ops.compile` compiles the model.

    Nothing happens to other models, and to a configuration that asks for a backend of somebody else's.

    Args:
        model: any module.
        backend: what torch.compile gets.
        settings: `mode` and `options` of torch.compile as they were given, absent where they were not; transformers'
            own choice of mode ("reduce-overhead") stands when both are.
    """
    config: Any = getattr(model, "generation_config", None)
    # Without transformers in the process no model is one of its, and what has no such class does not compile decoding.
    make = getattr(sys.modules.get("transformers"), "CompileConfig", None)
    if make is None or not hasattr(config, "compile_config") or backend not in OUR_BACKENDS:
        return
    owner = getattr(getattr(model, "get_compiled_call", None), "__self__", None)  # inside of a model of PEFT, too
    if owner is not None and captured_under(owner):
        vars(owner)["get_compiled_call"] = MethodType(get_compiled_call, owner)
    held = config.compile_config
    if held is not None and held.backend not in OUR_BACKENDS:
        _say(
            f"moe_ops.compile: generate() of {type(model).__name__} keeps its compile_config, which asks for the "
            f'backend {held.backend!r}. For this one set model.generation_config.compile_config.backend = "{backend}".'
        )
        return
    if not _is_json(settings.get("options")):
        _say(
            f"moe_ops.compile: generate() of {type(model).__name__} does not compile its decode steps with these "
            "options, because its generation_config could no longer be written as JSON. "
            f'Pass compile_config=CompileConfig(backend="{backend}", ...) to generate().'
        )
        return
    config.compile_config = make(backend=backend, fullgraph=fullgraph, dynamic=dynamic, **settings)
    if held is None:
        _say(
            f'moe_ops.compile: generate(cache_implementation="static") of {type(model).__name__} compiles its decode '
            f'steps with backend="{backend}" from here on; it is set in model.generation_config.compile_config. With '
            "another cache generate() runs uncompiled."
        )


def get_compiled_call(model: Any, compile_config: Any) -> Any:
    """In the place of transformers' method: what that compiles by a backend of ours, captured as the model is."""
    call = type(model).get_compiled_call(model, compile_config)
    if getattr(compile_config, "backend", None) in OUR_BACKENDS:
        capturing(call, captured_under(model), fullgraph=compile_config.fullgraph)
    return call


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _say(message: str) -> None:
    log.info(message)
    warnings.warn(message, stacklevel=4)
