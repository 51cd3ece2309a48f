"""Public functions: typed keyword options and documentation around one operator call each.

Letters are those of :data:`meta.dims.LETTERS`. Every function raises ``ValueError`` naming the operator, the argument,
the rule, what it got and the cure; the rules are in :mod:`meta.shapes`. All are functional and traceable with
``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from meta.checks import (
    accepts,
    check_float,
    check_name,
    check_placement,
    check_rank,
    check_type,
    describe_value,
    fail,
)
from meta.gemm_shapes import check_packed
from moe_ops import ep, sharded
from moe_ops.agreement import refusing
from moe_ops.groups import GroupLike, resolve
from moe_ops.integrations.containers import are_plain, unpacked_layer
from moe_ops.ops import call
from moe_ops.quantized import quantized_schemes


def fused_topk(
    router_logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Select ``top_k`` experts per token and weigh them; fp32 throughout, differentiable in ``router_logits``.

    Args:
        router_logits: ``[T, E]`` any float dtype.
        correction_bias: ``[E]`` added to the scores for the SELECTION only (no gradient), or None.
        top_k: K, experts per token.
        routing: a name of :data:`meta.routing.ROUTINGS`: score then top-k ("softmax", "sigmoid", "sqrtsoftplus"), top-k
            then score ("topk_softmax", "topk_sigmoid"), or group-limited ("softmax_group_max", "sigmoid_group_top2",
            ...).
        renormalize: divide the K weights by their sum plus ``renorm_eps``.
        num_groups, topk_groups: with a group-limited routing, experts come in ``num_groups`` equal groups and only the
            best ``topk_groups`` may be chosen from.
        scale: multiplies the weights at the end.

    Returns:
        topk_weights ``[T, K]`` fp32 and topk_ids ``[T, K]`` int32, best first, ties to the lower id. A NaN choice
        ranks first, as in ``torch.topk``, and weights are NaN where the formula gives NaN; ids never repeat.

    Raises:
        ValueError: see the module's docstring; in particular when K exceeds the experts that may be chosen from.

    Source: softmax routing of Mixtral (arXiv 2401.04088); group-limited routing of DeepSeek-V3 (arXiv 2412.19437,
        2.1.2).

    Example:
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> weights.shape, ids.dtype
        (torch.Size([4, 2]), torch.int32)
    """
    return call(
        "fused_topk",
        router_logits,
        correction_bias,
        top_k=top_k,
        routing=routing,
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scale=scale,
    )


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str | None = "concat",
    up_proj: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    scheme: str | None = None,
    gate_up_scales: Sequence[Tensor] = (),
    down_scales: Sequence[Tensor] = (),
    hidden_states_scale: Tensor | None = None,
    format: str = "grouped",
    capacity: int | None = None,
    backend: str | None = None,
    recompute: str | None = None,
    group: GroupLike | None = None,
    transport: str | None = None,
    rank_capacity: int | None = None,
) -> Tensor:
    """Run every token through its selected experts and sum the results.

    ``out[t] = sum over k of w[t, k] * (activation(x[t] @ W1[e].T + b1[e]) @ W2[e].T + b2[e])`` with ``e = topk_ids[t,
    k]``; with ``weight_on_input``, ``w[t, k]`` multiplies ``x[t]`` instead. fp32 accumulation, activation and combine,
    in the order of k; on a CPU products of bf16 weights are bf16, as torch's are. Differentiable in hidden_states, the
    projections, the biases and topk_weights unless quantised.

    Args:
        hidden_states: ``[T, H]`` bf16, fp16 or fp32 (fp64 on CPU), the dtype of unquantised weights.
        gate_up_proj: ``[E, 2I, H]``, any strides; ``[E, I, H]`` of the gate beside ``up_proj``, and of the only half
            when ``glu_layout`` is "none".
        down_proj: ``[E, H, I]``, any strides.
        topk_weights: ``[T, K]`` any float dtype.
        topk_ids: ``[T, K]`` int32 or int64; an id of -1 (or out of range) contributes exactly zero.
        activation: a name of :data:`meta.activations.ACTIVATIONS`; ``alpha`` and ``limit`` are options of some of them.
        glu_layout: "concat" ([gate; up] along N), "interleaved" (even rows gate, odd rows up), "separate" (what
            "concat" becomes beside ``up_proj``), "none" or None (no gate).
        up_proj: ``[E, I, H]``, the up half where it is a tensor of its own, or None.
        gate_up_bias, down_bias: ``[E, 2I]`` and ``[E, H]`` float, or None.
        expert_map: ``[E_global]`` int32 or int64, global id to local id or -1; ids then index this map.
        scheme: a name of :data:`meta.schemes.SCHEMES`; None means unquantised, by the weights' dtype, or what
            projections that are :class:`moe_ops.QuantizedWeight`, or torchao's tensors, say: they bring their scales,
            too. A row with an ``input_scale`` may have it left out.
        gate_up_scales, down_scales: what the scheme's row lists, in its order. "fp8_block128": one tensor ``[E,
            ceil(N/128), ceil(K/128)]`` fp32, bf16 or e8m0; blocks that start again with the up half are ``[E, 2,
            ceil(I/128), ceil(K/128)]``. Beside ``up_proj``: the gate's list, then the up half's.
        hidden_states_scale: fp32 ``[T, H groups]``, of :func:`moe_ops.quantize_rows`, for hidden_states that are in the
            scheme's format already: ``ceil(H / 128)`` groups for ``fp8_1x128``, 1 where rows are quantised as a whole.
        format: "grouped" (sorted rows) or "batched" (``[E, C, H]``).
        capacity: C, batched format only; pairs past the first C of an expert are dropped. None means T, with which
            none is where each token's experts are different places.
        backend: a name of :data:`moe_ops.backends.BACKENDS`, to insist on it; None chooses.
        recompute: what the backward computes again, to the same bits, instead of finding it kept. None: nothing that a
            product made; what stood before the activation, ``[T * K, 2I]``, is kept. "activation": that. "all": where
            the pairs are in sorted rows, too, so that nothing is kept but the arguments. Routing is never made again.
        group: of :func:`moe_ops.ep.prepare`, over which the experts are spread: the projections are those of this
            rank's block, ``topk_ids`` name the experts of all ranks. None: they are all here, and so it is read where
            `torch.distributed.group.WORLD` is passed before `init_process_group`, which makes it.
        transport, rank_capacity: of :func:`moe_ops.ep.prepare`, beside a group.

    Returns:
        ``[T, H]`` in the dtype of hidden_states (bf16 for quantised ones).

    Raises:
        ValueError: see the module's docstring.

    Source: Outrageously Large Neural Networks (arXiv 1701.06538); the grouped form follows MegaBlocks (arXiv
        2211.15841).

    Example:
        >>> x, gate_up, down = torch.randn(4, 16), torch.randn(8, 64, 16), torch.randn(8, 16, 32)
        >>> weights, ids = moe_ops.fused_topk(torch.randn(4, 8), top_k=2)
        >>> moe_ops.fused_experts(x, gate_up, down, weights, ids).shape
        torch.Size([4, 16])
    """
    if not are_plain(gate_up_proj, down_proj, up_proj):
        tensors = {"gate_up_proj": gate_up_proj, "down_proj": down_proj, "up_proj": up_proj,
                   "gate_up_bias": gate_up_bias, "down_bias": down_bias,
                   "gate_up_scales": gate_up_scales, "down_scales": down_scales}  # fmt: skip
        *weights, gate_up_bias, down_bias, gate_up_scales, down_scales = sharded.local(
            "fused_experts", group, tensors
        ).values()
        unpack = unpacked_layer
        if group is not None:  # what one rank holds may be refused there alone
            unpack = partial(refusing, resolve("fused_experts", group).name, unpacked_layer)
        gate_up_proj, down_proj, up_proj, scheme, gate_up_scales, down_scales = unpack(
            "fused_experts", weights, scheme, gate_up_scales, down_scales, static=True
        )
    if group is not None:
        return ep.layer(
            hidden_states, (gate_up_proj, down_proj), topk_weights, topk_ids, group=group, transport=transport,
            rank_capacity=rank_capacity, activation=activation, alpha=alpha, limit=limit,
            glu_layout="none" if glu_layout is None else glu_layout, up_proj=up_proj, gate_up_bias=gate_up_bias,
            down_bias=down_bias, expert_map=expert_map, weight_on_input=weight_on_input, scheme=scheme,
            gate_up_scales=gate_up_scales, down_scales=down_scales, hidden_states_scale=hidden_states_scale,
            format=format, capacity=capacity, backend=backend, recompute=recompute,
        )  # fmt: skip
    for name, value, kind in (("transport", transport, "str"), ("rank_capacity", rank_capacity, "int")):
        if value is not None:
            check_type("fused_experts", name, value, accepts(f"Optional[{kind}]"))
            cure = "Pass group=torch.distributed.group.WORLD."
            raise fail("fused_experts", name, "None without a group", describe_value(value), cure)
    return call(
        "fused_experts",
        hidden_states,
        gate_up_proj,
        down_proj,
        topk_weights,
        topk_ids,
        gate_up_scales,
        down_scales,
        up_proj,
        gate_up_bias,
        down_bias,
        expert_map,
        hidden_states_scale,
        activation=activation,
        alpha=alpha,
        limit=limit,
        glu_layout="none" if glu_layout is None else glu_layout,
        weight_on_input=weight_on_input,
        scheme=scheme,
        format=format,
        capacity=capacity,
        backend=backend,
        recompute=recompute,
    )


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    top_k: int,
    routing: str = "softmax",
    renormalize: bool = True,
    renorm_eps: float = 0.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    glu_layout: str | None = "concat",
    up_proj: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    weight_on_input: bool = False,
    scheme: str | None = None,
    gate_up_scales: Sequence[Tensor] = (),
    down_scales: Sequence[Tensor] = (),
    hidden_states_scale: Tensor | None = None,
    format: str = "grouped",
    capacity: int | None = None,
    backend: str | None = None,
    recompute: str | None = None,
) -> Tensor:
    """A whole MoE block behind its router product: :func:`fused_topk`, then :func:`fused_experts`.

    Args:
        hidden_states: ``[T, H]``.
        router_logits: ``[T, E]``, or ``[T, E_global]`` with an ``expert_map``; any float dtype.
        gate_up_proj, down_proj: ``[E, 2I, H]`` and ``[E, H, I]``, any strides, or both quantised.
        top_k, routing, renormalize, renorm_eps, num_groups, topk_groups, scale, correction_bias: of :func:`fused_topk`.
        activation, ..., recompute: of :func:`fused_experts`.

    Returns:
        ``[T, H]`` in the dtype of hidden_states.

    Raises:
        ValueError: see the module's docstring.

    Source: as :func:`fused_topk` and :func:`fused_experts`.

    Example:
        >>> x, gate_up, down = torch.randn(4, 16), torch.randn(8, 64, 16), torch.randn(8, 16, 32)
        >>> moe_ops.fused_moe(x, torch.randn(4, 8), gate_up, down, top_k=2).shape
        torch.Size([4, 16])
    """
    if not are_plain(gate_up_proj, down_proj, up_proj):
        weights = (gate_up_proj, down_proj, up_proj)
        sharded.local("fused_moe", None, dict(zip(("gate_up_proj", "down_proj", "up_proj"), weights, strict=True)))
        gate_up_proj, down_proj, up_proj, scheme, gate_up_scales, down_scales = unpacked_layer(
            "fused_moe", weights, scheme, gate_up_scales, down_scales, static=True
        )
    return call(
        "fused_moe",
        hidden_states,
        router_logits,
        gate_up_proj,
        down_proj,
        gate_up_scales,
        down_scales,
        correction_bias,
        up_proj,
        gate_up_bias,
        down_bias,
        expert_map,
        hidden_states_scale,
        top_k=top_k,
        routing=routing,
        renormalize=renormalize,
        renorm_eps=renorm_eps,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scale=scale,
        activation=activation,
        alpha=alpha,
        limit=limit,
        glu_layout="none" if glu_layout is None else glu_layout,
        weight_on_input=weight_on_input,
        scheme=scheme,
        format=format,
        capacity=capacity,
        backend=backend,
        recompute=recompute,
    )


def quantize_weight(weight: Tensor, *, scheme: str) -> tuple[Tensor, ...]:
    """Quantise expert weights, offline. In every scheme a number that is not finite makes NaN of all that share a scale
    with it.

    Args:
        weight: ``[E, N, K]`` float.
        scheme: a quantised name of :data:`meta.schemes.SCHEMES`.

    Returns:
        The stored weight and its scales: ``stored, *scales``, in the order that :func:`fused_experts` takes them. They
        have no gradient.

    Raises:
        ValueError: a weight of another rank or dtype, or whose columns do not fill the bytes; an unknown scheme, or one
            that does not quantise weights.

    Source: 128 x 128 blocks, DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Example:
        >>> stored, scale = moe_ops.quantize_weight(torch.randn(2, 256, 128), scheme="fp8_block128")
        >>> stored.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([2, 2, 1]))
    """
    check_type("quantize_weight", "weight", weight, accepts("Tensor"))
    check_type("quantize_weight", "scheme", scheme, accepts("str"))
    check_rank("quantize_weight", "weight", weight, "E N K")
    check_float("quantize_weight", "weight", weight)
    check_placement("quantize_weight", {"weight": weight})
    rows = quantized_schemes()
    check_name("quantize_weight", "scheme", scheme, rows)
    check_packed("quantize_weight", "weight", "K", weight.shape[2], rows[scheme])
    stored, scales = rows[scheme].quantize(weight.detach())
    return (stored, *scales)
