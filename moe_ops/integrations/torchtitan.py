"""A token dispatcher for torchtitan's MoE layers: :mod:`moe_ops.ep` around its own experts.

    from moe_ops.integrations.torchtitan import TokenDispatcher
    config.token_dispatcher = TokenDispatcher.Config(num_experts=64, top_k=8)

Sizes are read nowhere on the host, so that a layer is one graph where torchtitan's all-to-all breaks it: a rank's
experts get room for every token of the group, rows sorted by expert come first, what is behind them no expert reads.
Written against torchtitan's ``models/common/token_dispatcher.py`` at 00f6ac2, which changes often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import ep, layer

try:
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
except ImportError as error:
    raise ImportError(
        "moe_ops.integrations.torchtitan: a torchtitan with models/common/token_dispatcher.py must be installed. "
        "Use moe_ops.ep in your own layer."
    ) from error


class TokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """Brings tokens to the ranks of ``ep_mesh`` that hold their experts, and results back; torchtitan makes it.

    Every rank of the mesh has as many tokens. ``transport`` is the default of :func:`moe_ops.ep.prepare`.
    """

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[ep.Prepared | None, layer.Prepared]]:
        """Rows of this rank's experts.

        Args:
            x_TD: ``[T, D]`` this rank's tokens.
            topk_scores_TK, topk_expert_ids_TK: ``[T, K]``, ids of all ranks' experts.
            num_local_tokens_per_expert_E: not needed.

        Returns:
            rows ``[R, D]`` sorted by expert, int64 ``[E / W]`` rows of each expert, and what :meth:`combine` needs. R
            is what the group can send at most; the rows behind the last expert's are uninitialised.
        """
        prepared, rows, weights, ids, held = None, x_TD, topk_scores_TK, topk_expert_ids_TK, self.num_experts
        if self.ep_mesh is not None:
            prepared = ep.prepare(rows, weights, ids, num_experts=self.num_experts, group=self.ep_mesh)
            rows, weights, ids, held = (
                prepared.rows,
                prepared.topk_weights,
                prepared.topk_ids,
                held // self.ep_mesh.size(),
            )
        by_expert = layer.prepare(rows, weights, ids, num_experts=held)
        ends = by_expert.extents.long()
        return by_expert.rows, torch.diff(ends, prepend=ends.new_zeros(1)), (prepared, by_expert)

    def combine(
        self,
        routed_output_RD: Tensor,
        metadata: tuple[ep.Prepared | None, layer.Prepared],
        x_TD: Tensor,
        **padding: Any,
    ) -> Tensor:
        """``[T, D]``: results times scores, summed in fp32 and rounded once on each rank, then once over the ranks.

        Args:
            routed_output_RD: of the experts.
            metadata: of :meth:`dispatch`.
            x_TD: this rank's tokens, for their dtype.
            padding: not needed.
        """
        prepared, by_expert = metadata
        result = layer.finalize(routed_output_RD, by_expert)
        return (result if prepared is None else ep.finalize(result, prepared)).to(x_TD.dtype)
