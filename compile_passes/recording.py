"""Router logits that a transformers model records: what has to be done before Dynamo can capture that.

transformers records what modules return (`output_router_logits=True`) by forward hooks, which append to a list of the
model's forward. The first forward that records installs them, under a lock, which Dynamo does not trace. Inside of a
checkpointed layer Dynamo does not append to a list outside, because eager torch would append again when it computes the
layer again. These hooks do not: by then nothing is being recorded.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

#: Lets Dynamo capture such appends, in the forward alone.
FORWARD_ALONE = "skip_fwd_side_effects_in_bwd_under_checkpoint"
_RECORDED, _ASKED, _INSTALLED = "router_logits", "output_router_logits", "_output_capturing_hooks_installed"
#: Of modules that had hooks installed here, or are marked as models that have them, these hooks.
_hooks: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()


def prepare_recording(model: nn.Module) -> str | None:
    """Install the hooks of models that record router logits, and allow their capture under gradient checkpointing.

    Nothing happens to other models, and to models whose configuration does not ask for router logits: where a graph is
    broken above the layers, each hook breaks it again, even one that records nothing. The hooks are those that the
    first recording forward would install.

    Returns:
        What to tell the user; None where nothing was done.
    """
    # Without transformers in the process no model is one of its.
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    found = [module for module in model.modules() if _records(module)] if install is not None else []
    if install is None or not found:
        return None
    before = [(module, getattr(module, _INSTALLED, False), set(module._forward_hooks)) for module in model.modules()]
    for module in found:
        install(module)
    changed = {
        module: [hook for hook in module._forward_hooks if hook not in hooks]
        for module, marked, hooks in before
        if len(module._forward_hooks) > len(hooks) or getattr(module, _INSTALLED, False) != marked
    }
    _hooks.update(changed)
    done = ["its hooks are installed, which moe_ops.restore takes off again"] if changed else []
    config = torch._dynamo.config
    if not getattr(config, FORWARD_ALONE, True):
        setattr(config, FORWARD_ALONE, True)
        done.append(
            f"for their capture in checkpointed layers torch._dynamo.config.{FORWARD_ALONE} is set: what checkpointed "
            "code writes to Python objects outside of it, compiled code writes once, in the forward"
        )
    return f"moe_ops.compile: {type(model).__name__} records router logits: {'; '.join(done)}." if done else None


def restore_recording(model: nn.Module) -> None:
    """Take off the hooks that :func:`prepare_recording` installed. The first forward that records installs others."""
    for module in model.modules():
        if module in _hooks:
            for hook in _hooks.pop(module):
                module._forward_hooks.pop(hook, None)
            if hasattr(module, _INSTALLED):
                setattr(module, _INSTALLED, False)


def _records(module: nn.Module) -> bool:
    """Whether a transformers model can record router logits, and is asked to."""
    known: Any = getattr(module, "_can_record_outputs", None) or {}
    return _RECORDED in known and bool(getattr(getattr(module, "config", None), _ASKED, False))
