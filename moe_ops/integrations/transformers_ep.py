"""``DistributedConfig(ep_implementation="moe_ops")``: :mod:`moe_ops.ep` for the experts of Hugging Face transformers.

    import moe_ops.integrations.transformers  # registers this, too
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="moe_ops")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

transformers shards the experts, hands their module the tokens of this rank, and makes the parameters local while it
runs; the model's code stays as it is. Sizes are read nowhere on the host, so that ``torch.compile(fullgraph=True)``
takes the whole model, forward and backward, which transformers' own exchange of tokens does not allow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from moe_ops import ep
from moe_ops.exchanges import shared, start_all_gather, wait_parts
from moe_ops.groups import Group, resolve
from moe_ops.integrations.transformers import (
    NAME,
    check_experts,
    check_fp8,
    experts_forward,
    fp8_experts_forward,
    has_ep_interface,
)

if not has_ep_interface():
    raise ImportError(
        "moe_ops.integrations.transformers_ep: transformers with an EPImplementationInterface (5.23 or later) and a "
        "torch with torch.distributed must be installed. pip install -U transformers"
    )

from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

_CURE = 'Use ep_implementation="auto" for this model'


class MoeOpsEP(EPImplementation):  # type: ignore[misc]
    """One experts module over the ranks of its expert-parallel group; transformers makes it.

    Ranks that share a batch run their experts on it and add up (transport "replicated"); others gather their tokens,
    whose number must be the same on all of them. Where some ranks share a batch, not all, each of these takes a slice
    of it, and they gather the results.

    Args:
        experts: the module, whose ``num_experts`` is that of this rank.
        ep_mesh: the ranks over which its experts are spread, in their order.
        tp_mesh: the ranks that share this rank's batch.

    Raises:
        ValueError: experts that the operator does not take.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        fp8 = isinstance(experts, getattr(import_module("transformers.integrations.finegrained_fp8"), "FP8Experts", ()))
        check_experts(experts, _CURE)
        if fp8:
            check_fp8(experts, _CURE)
        self.experts = experts
        self.run_experts = fp8_experts_forward if fp8 else experts_forward
        self.group = ep_mesh.get_group().group_name
        self.slices = tp_mesh.get_group().group_name if tp_mesh.size() > 1 and not self.shares_batch else None
        self.num_experts = ep_mesh.size() * self.num_local_experts
        self.transport = "replicated" if self.shares_batch else None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.slices is None:
            return self._run(hidden_states, top_k_index, top_k_weights)
        sharing, tokens = resolve("transformers integration", self.slices), hidden_states.shape[0]
        hidden_states, top_k_weights = shared(hidden_states, sharing), shared(top_k_weights, sharing)
        result = self._run(
            _slice(hidden_states, sharing, 0), _slice(top_k_index, sharing, -1), _slice(top_k_weights, sharing, 0)
        )
        (received,) = start_all_gather([result], sharing)
        return wait_parts(received, result, sharing).flatten(0, 1)[:tokens]

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts of all ranks on this rank's own tokens."""
        prepared = ep.prepare(
            hidden_states, top_k_weights, top_k_index, num_experts=self.num_experts, group=self.group,
            transport=self.transport,
        )  # fmt: skip
        result = self.run_experts(self.experts, prepared.rows, prepared.topk_ids, prepared.topk_weights)
        return ep.finalize(result, prepared)


def _slice(values: Tensor, group: Group, filler: int) -> Tensor:
    """This rank's of equal slices of the first dimension, the last ones filled up."""
    rows = -(-values.shape[0] // group.size)
    filled = nn.functional.pad(values, (0, 0, 0, rows * group.size - values.shape[0]), value=filler)
    return filled[group.rank * rows : (group.rank + 1) * rows]


EPImplementationInterface.register(NAME, MoeOpsEP)
