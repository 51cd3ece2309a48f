"""Router logits that a transformers model records: what has to be done before Dynamo can capture that.

transformers records what modules return (`output_router_logits=True`) by forward hooks, which append to a list of the
model's forward. The first forward that records installs them, under a lock, which Dynamo does not trace. Inside of a
checkpointed layer Dynamo does not append to a list outside, because eager torch would append again when it computes the
layer again. These hooks do not: by then nothing is being recorded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

#: Lets Dynamo capture such appends, in the forward alone.
FORWARD_ALONE = "skip_fwd_side_effects_in_bwd_under_checkpoint"
_RECORDED, _ASKED = "router_logits", "output_router_logits"


def prepare_recording(model: nn.Module) -> str | None:
    """Install the hooks of models that record router logits, and allow their capture under gradient checkpointing.

    Nothing happens to other models, and to models in eval mode whose configuration does not ask for router logits. The
    hooks are those that the first recording forward would install; they do nothing while nothing is recorded.

    Returns:
        What to tell the user; None where no setting of torch's was changed.
    """
    # Without transformers in the process no model is one of its.
    install = getattr(sys.modules.get("transformers.utils.output_capturing"), "maybe_install_capturing_hooks", None)
    found = [module for module in model.modules() if _records(module)] if install is not None else []
    if install is None or not found:
        return None
    for module in found:
        install(module)
    config = torch._dynamo.config
    wanted = any(_asks(module) or getattr(module, "is_gradient_checkpointing", False) for module in found)
    if not wanted or getattr(config, FORWARD_ALONE, True):
        return None
    setattr(config, FORWARD_ALONE, True)
    return (
        f"moe_ops.compile: {type(model).__name__} records router logits, for the capture of which in checkpointed "
        f"layers torch._dynamo.config.{FORWARD_ALONE} is set: what checkpointed code writes to Python objects outside "
        "of it, compiled code writes once, in the forward."
    )


def _records(module: nn.Module) -> bool:
    """Whether a transformers model can record router logits, and may be asked to."""
    known: Any = getattr(module, "_can_record_outputs", None) or {}
    return _RECORDED in known and (module.training or _asks(module))


def _asks(module: Any) -> bool:
    return bool(getattr(getattr(module, "config", None), _ASKED, False))
