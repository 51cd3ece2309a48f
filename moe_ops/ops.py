"""The operator table and the one loop that registers it.

Every operator is functional, and takes the same path: its rule in :mod:`meta.shapes` validates the arguments, the
rule's answer is also the fake implementation, :mod:`moe_ops.dispatch` picks the backend, and :mod:`moe_ops.debugging`
may check the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meta import cost
from meta.checks import Accepts, accepts, check_type
from meta.fakes import make_fake
from meta.shapes import RULES
from moe_ops import autograd, compat, debugging, dispatch, experts_backward

NAMESPACE = "moe_ops"

_ROUTING = (
    'int top_k, str routing="softmax", bool renormalize=True, float renorm_eps=0.0, int num_groups=1, '
    "int topk_groups=1, float scale=1.0"
)
_EXPERT_TENSORS = (
    "Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? expert_map=None, Tensor? gate_up_scale=None, "
    "Tensor? down_scale=None, Tensor? gate_up_global_scale=None, Tensor? down_global_scale=None, "
    "Tensor? gate_up_zero_point=None, Tensor? down_zero_point=None"
)
_GLU = 'str activation="silu", float? alpha=None, float? limit=None, str glu_layout="concat"'
_FORMAT = 'str format="grouped", SymInt? capacity=None'
_LAYER = f"{_GLU}, bool weight_on_input=False, str? scheme=None, {_FORMAT}, str? backend=None"
_WEIGHT_SCALES = "Tensor? weight_scale=None, Tensor? weight_global_scale=None, Tensor? weight_zero_point=None"


def _gemm(x: str, counts: str, options: str, result: str) -> str:
    tensors = f"Tensor {x}, Tensor weight, Tensor {counts}, Tensor? bias=None, Tensor? {x}_scale=None, {_WEIGHT_SCALES}"
    return f"({tensors}, *, {options}) -> {result}"


_GLU_OPTIONS = f"{_GLU}, str? scheme=None, bool quantize_output=False"
_PLAIN_OPTIONS = "str? scheme=None, ScalarType? out_dtype=None"

SCHEMAS: dict[str, str] = {
    "fused_topk": f"(Tensor router_logits, Tensor? correction_bias=None, *, {_ROUTING}) -> (Tensor, Tensor)",
    "moe_permute": "(Tensor hidden_states, Tensor topk_ids, Tensor? expert_map=None, *, SymInt num_experts)"
    " -> (Tensor, Tensor, Tensor)",
    "moe_unpermute": "(Tensor rows, Tensor pair_to_row, Tensor topk_weights) -> Tensor",
    "batched_dispatch": "(Tensor hidden_states, Tensor topk_ids, Tensor? expert_map=None, *, SymInt num_experts, "
    "SymInt capacity) -> (Tensor, Tensor, Tensor)",
    "batched_combine": "(Tensor batch, Tensor slots, Tensor topk_weights) -> Tensor",
    "quantize_rows": "(Tensor rows, *, str scheme) -> (Tensor, Tensor)",
    "quantize_batched": "(Tensor batch, Tensor expert_num_tokens, *, str scheme) -> (Tensor, Tensor)",
    "grouped_mm_glu": _gemm("rows", "offsets", _GLU_OPTIONS, "(Tensor, Tensor)"),
    "grouped_mm": _gemm("rows", "offsets", _PLAIN_OPTIONS, "Tensor"),
    "batched_mm_glu": _gemm("batch", "expert_num_tokens", _GLU_OPTIONS, "(Tensor, Tensor)"),
    "batched_mm": _gemm("batch", "expert_num_tokens", _PLAIN_OPTIONS, "Tensor"),
    "fused_experts": "(Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, "
    f"Tensor topk_ids, {_EXPERT_TENSORS}, *, {_LAYER}) -> Tensor",
    "fused_experts_backward": "(Tensor grad_output, Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj, "
    "Tensor topk_weights, Tensor topk_ids, Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? expert_map=None, "
    f"*, bool[] needs, {_GLU}, bool weight_on_input=False, {_FORMAT})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fused_moe": "(Tensor hidden_states, Tensor router_logits, Tensor gate_up_proj, Tensor down_proj, "
    f"Tensor? correction_bias=None, {_EXPERT_TENSORS}, *, {_ROUTING}, {_LAYER}) -> Tensor",
}

_STAGE_CURE = "Differentiate moe_ops.fused_experts or moe_ops.fused_moe instead, or call it under torch.no_grad()."
_BACKWARD_CURE = "Second derivatives are not implemented; do not pass create_graph=True."


@dataclass(frozen=True)
class Op:
    """One row of the operator table.

    Attributes:
        name: name in the ``moe_ops`` namespace.
        schema: argument and return types.
        real: implementation for CPU and CUDA tensors.
        fake: implementation for fake and meta tensors.
        formula: ``(backward, setup_context)``.
        flops: formula for :class:`torch.utils.flop_counter.FlopCounterMode`.
    """

    name: str
    schema: str
    real: Callable[..., Any]
    fake: Callable[..., Any]
    formula: autograd.Formula
    flops: Callable[..., int]


def _make_real(name: str) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        if debugging.active():
            debugging.check(name, by_name(name, args, kwargs))
        return dispatch.run(name, kwargs.get("backend"), args, kwargs)

    return real


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    RULES["fused_experts_backward"](*args, **kwargs)
    return experts_backward.fused_experts_backward(*args, **kwargs)


def by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    schema = getattr(torch.ops.moe_ops, name).default._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    return {**values, **dict(zip(positional, args, strict=False)), **kwargs}


def _row(name: str) -> Op:
    cure = _BACKWARD_CURE if name == "fused_experts_backward" else _STAGE_CURE
    return Op(
        name,
        SCHEMAS[name],
        _run_backward if name == "fused_experts_backward" else _make_real(name),
        make_fake(RULES[name]),
        autograd.FORMULAS.get(name) or autograd.no_formula(name, cure),
        cost.OP_FLOPS[name],
    )


OPS: tuple[Op, ...] = tuple(_row(name) for name in SCHEMAS)

_library = torch.library.Library(NAMESPACE, "DEF")


#: The layouts other than strided are registered for the rule's message, in place of the dispatcher's.
_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU")


def _register(op: Op) -> None:
    qualified = f"{NAMESPACE}::{op.name}"
    _library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in _KEYS:
        _library.impl(op.name, op.real, key)
    torch.library.register_fake(qualified, op.fake, lib=_library)
    backward, setup_context = op.formula
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op in OPS:
        register_flop_formula(getattr(torch.ops.moe_ops, op.name))(op.flops)


for _op in OPS:
    _register(_op)

#: What every argument of an operator may be: by name, in the order of its schema.
ARGUMENTS: dict[str, dict[str, Accepts]] = {
    name: {
        argument.name: accepts(str(argument.real_type))
        for argument in getattr(torch.ops.moe_ops, name).default._schema.arguments
    }
    for name in SCHEMAS
    if name != "fused_experts_backward"  # no public function calls it
}


def call(name: str, *args: Any, **options: Any) -> Any:
    """An operator for the public functions, which promise a ValueError with our words for an argument of a wrong type;
    torch would raise its own before our rule is asked.
    """
    rows = ARGUMENTS[name]
    for argument, value in (*zip(rows, args, strict=False), *options.items()):
        # The check of `check_type`, without the call: it is most of what a valid call pays here.
        types, is_number, _, _ = rows[argument]
        if not isinstance(value, types) or (is_number and isinstance(value, bool)):
            check_type(name, argument, value, rows[argument])
    return getattr(torch.ops.moe_ops, name)(*args, **options)


compat.when_imported("torch.utils.flop_counter", _register_flops)
