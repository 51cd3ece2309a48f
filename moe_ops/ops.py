"""The operator table and the one loop that registers it.

Every operator is functional, and takes the same path: its rule in :mod:`meta.shapes` parses and validates the arguments
once, the rule's answer is also the fake implementation, :mod:`moe_ops.choice` picks the backend,
:mod:`moe_ops.debugging` may check the data, and :mod:`moe_ops.runtime` remembers all that for the next call like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from sys import intern
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from meta import cost
from meta.calls import BackwardCall, Call, FirstBackwardCall, SortCall
from meta.checks import Accepts, accepts, check_name, check_type, fail
from meta.fakes import allocate
from meta.shapes import RULES
from moe_ops import autograd, choice, compat, experts_backward
from moe_ops.backends import BACKENDS
from moe_ops.runtime import Chosen, Launcher, refuse_tangents, refuse_transforms

NAMESPACE = "moe_ops"

_ROUTING = (
    'int top_k, str routing="softmax", bool renormalize=True, float renorm_eps=0.0, int num_groups=1, '
    "int topk_groups=1, float scale=1.0"
)
_BIASES = "Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? expert_map=None"
_EXPERTS = f"Tensor? up_proj=None, {_BIASES}, Tensor? hidden_states_scale=None"
_GLU = 'str activation="silu", float? alpha=None, float? limit=None, str glu_layout="concat"'
_FORMAT = 'str format="grouped", SymInt? capacity=None'
_RECOMPUTE = "str? recompute=None"
_LAYER = f"{_GLU}, bool weight_on_input=False, str? scheme=None, {_FORMAT}, str? backend=None, {_RECOMPUTE}"
_SCALES = "Tensor[]? gate_up_scales=None, Tensor[]? down_scales=None"


def _gemm(x: str, counts: str, up: str, options: str, result: str) -> str:
    tensors = f"Tensor {x}, Tensor weight, Tensor {counts}, Tensor[]? weight_scales=None, {up}Tensor? bias=None"
    return f"({tensors}, Tensor? {x}_scale=None, *, {options}) -> {result}"


def _glu(x: str, counts: str) -> str:
    options = f"{_GLU}, str? scheme=None, bool quantize_output=False"
    return _gemm(x, counts, "Tensor? up_weight=None, ", options, "(Tensor, Tensor)")


def _plain(x: str, counts: str) -> str:
    return _gemm(x, counts, "", "str? scheme=None, ScalarType? out_dtype=None", "Tensor")


#: Lists are optional rather than empty by default: AOTInductor hands an empty one on as None, and neither autograd's
#: registration nor opcheck takes a list that is keyword-only or has another default.
SCHEMAS: dict[str, str] = {
    "fused_topk": f"(Tensor router_logits, Tensor? correction_bias=None, *, {_ROUTING}) -> (Tensor, Tensor)",
    "fused_topk_backward": f"(Tensor grad_weights, Tensor router_logits, Tensor topk_ids, *, {_ROUTING}) -> Tensor",
    "moe_permute": "(Tensor hidden_states, Tensor topk_ids, Tensor? expert_map=None, *, SymInt num_experts)"
    " -> (Tensor, Tensor, Tensor)",
    "moe_unpermute": "(Tensor rows, Tensor pair_to_row, Tensor topk_weights, Tensor? added=None) -> Tensor",
    "batched_dispatch": "(Tensor hidden_states, Tensor topk_ids, Tensor? expert_map=None, *, SymInt num_experts, "
    'SymInt? capacity=None, str slot_order="token") -> (Tensor, Tensor, Tensor)',
    "batched_combine": "(Tensor batch, Tensor slots, Tensor topk_weights, Tensor? added=None) -> Tensor",
    "quantize_rows": "(Tensor rows, *, str scheme) -> (Tensor, Tensor)",
    "quantize_batched": "(Tensor batch, Tensor expert_num_tokens, *, str scheme) -> (Tensor, Tensor)",
    "grouped_mm_glu": _glu("rows", "offsets"),
    "grouped_mm": _plain("rows", "offsets"),
    "batched_mm_glu": _glu("batch", "expert_num_tokens"),
    "batched_mm": _plain("batch", "expert_num_tokens"),
    "sort_pairs": "(Tensor topk_ids, Tensor? expert_map=None, *, SymInt num_experts, SymInt? capacity=None) "
    "-> (Tensor, Tensor, Tensor)",
    "gathered_mm": "(Tensor tokens, Tensor weight, Tensor offsets, Tensor row_to_pair, Tensor pair_to_row, "
    "Tensor? topk_weights=None, Tensor? bias=None, *, ScalarType? out_dtype=None) -> Tensor",
    "grouped_wgrad": "(Tensor grad_rows, Tensor rows, Tensor offsets, Tensor? row_to_pair=None, "
    'Tensor? pair_to_row=None, *, str tokens="grad_rows") -> Tensor',
    "expert_sums": "(Tensor rows, Tensor offsets, Tensor? row_to_pair=None, Tensor? pair_to_row=None, "
    "Tensor? topk_weights=None) -> Tensor",
    "fused_experts": "(Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, "
    f"Tensor topk_ids, {_SCALES}, {_EXPERTS}, *, {_LAYER}) -> Tensor",
    "fused_experts_saving": "(Tensor hidden_states, Tensor gate_up_proj, Tensor down_proj, Tensor topk_weights, "
    f"Tensor topk_ids, Tensor? up_proj=None, {_BIASES}, *, {_GLU}, bool weight_on_input=False, {_FORMAT}, "
    f"str? backend=None, {_RECOMPUTE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fused_experts_backward": "(Tensor grad_output, Tensor down_proj, Tensor topk_weights, Tensor gate_up, Tensor up, "
    "Tensor offsets, Tensor row_to_pair, Tensor pair_to_row, Tensor? down_bias=None, Tensor? hidden_states=None, "
    "Tensor? gate_up_proj=None, Tensor? up_proj=None, Tensor? gate_up_bias=None, *, bool value, "
    f"{_GLU}, bool weight_on_input=False) -> (Tensor, Tensor, Tensor, Tensor)",
    "fused_experts_backward_first": "(Tensor grad_gate_up, Tensor grad_up, Tensor hidden_states, Tensor gate_up_proj, "
    "Tensor topk_weights, Tensor offsets, Tensor row_to_pair, Tensor pair_to_row, Tensor? up_proj=None, "
    "Tensor? grad_output=None, *, bool[] needs, bool weight_on_input=False, bool sparing=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "fused_moe": "(Tensor hidden_states, Tensor router_logits, Tensor gate_up_proj, Tensor down_proj, "
    f"{_SCALES}, Tensor? correction_bias=None, {_EXPERTS}, *, {_ROUTING}, {_LAYER}) -> Tensor",
}

_QUANTIZE_CURE = "Quantised activations have no gradient; call it under torch.no_grad()."
_BACKWARD_CURE = "Second derivatives are not implemented; do not pass create_graph=True."
#: What formulas call, and no public function.
_OF_GRADIENTS = (
    "fused_experts_saving", "fused_experts_backward", "fused_experts_backward_first", "fused_topk_backward",
    "sort_pairs", "gathered_mm", "grouped_wgrad", "expert_sums",
)  # fmt: skip
#: Training takes no quantised weights.
_ABSENT: dict[str, dict[str, Any]] = {
    "fused_experts_saving": {"gate_up_scales": (), "down_scales": (), "hidden_states_scale": None, "scheme": None},
}


_REQUIRED = object()  # stands for the default of an argument that has none
#: The types of tensors that nobody wraps.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Signature:
    """The arguments of an operator's schema: how flat ones get their names."""

    def __init__(self, name: str) -> None:
        arguments = torch._C.parse_schema(f"{NAMESPACE}::{name}{SCHEMAS[name]}").arguments
        self.positional = tuple(argument.name for argument in arguments if not argument.kwarg_only)
        self.types = {argument.name: str(argument.real_type) for argument in arguments}
        self._defaults = {argument.name: argument.default_value for argument in arguments}
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        self._optional = {name: intern(value) if isinstance(value, str) else value for name, value in defaults.items()}
        self.lists = tuple(name for name, kind in self.types.items() if "List[Tensor]" in kind)
        self._kinds = tuple(
            "list" if name in self.lists else "optional" if name in defaults else "required" for name in self.positional
        )
        # Arguments from here on are tensors that may be None.
        self._absent = sum(argument not in defaults or argument in self.lists for argument in self.positional)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        return {**self._defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}

    def without_defaults(
        self, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without absent tensors at the end and options that are the schema's default, type and all."""
        end = len(args)
        while end > self._absent and args[end - 1] is None:
            end -= 1
        default_of, kept = self._optional.get, {}
        for argument, value in options.items():
            default = default_of(argument, _REQUIRED)
            # Most are the very object; `True` is no 1.
            if value is not default and (type(value) is not type(default) or value != default):
                kept[argument] = value
        return args[:end], kept

    def are_plain(self, args: tuple[Any, ...]) -> bool:
        """Whether all are what they should be, and tensors that nobody above or in autograd wants to know of."""
        differentiable = torch.is_grad_enabled()
        for kind, value in zip(self._kinds, args, strict=False):
            if value is None and kind == "optional":
                continue
            if kind == "list" and type(value) not in (list, tuple):
                return False
            for tensor in value if kind == "list" else (value,):
                if type(tensor) not in PLAIN or (differentiable and tensor.requires_grad):
                    return False
        return compat.dispatcher_is_undisturbed()


SIGNATURES: dict[str, Signature] = {name: Signature(name) for name in SCHEMAS}


def by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    return SIGNATURES[name].bind(args, kwargs)


def parse(name: str, *args: Any, **kwargs: Any) -> Call:
    """The rule's answer to a call of operator ``name``.

    Raises:
        ValueError: the rule refuses the arguments.
    """
    signature = SIGNATURES[name]
    flat = SimpleNamespace(**signature.bind(args, kwargs), **_ABSENT.get(name, {}))
    for lists in signature.lists:
        if getattr(flat, lists) is None:
            setattr(flat, lists, ())
    call = RULES[name](flat)
    if call.backend is not None:
        check_name(name, "backend", call.backend, BACKENDS)
    return call


@dataclass(frozen=True)
class Op:
    """One row of the operator table.

    Attributes:
        name: name in the ``moe_ops`` namespace.
        schema: argument and return types.
        real: implementation for CPU and CUDA tensors.
        fake: implementation for fake and meta tensors.
        formula: ``(backward, setup_context)``, or what stands in the operator's place where gradients are wanted.
        flops: formula for :class:`torch.utils.flop_counter.FlopCounterMode`.
    """

    name: str
    schema: str
    real: Callable[..., Any]
    fake: Callable[..., Any]
    formula: autograd.Formula | autograd.InTraining
    flops: Callable[..., int]


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operator below torch's dispatcher."""
    return LAUNCHERS[name](*args, **kwargs)


def _stage_of(module: ModuleType, name: str, *args: Any, **kwargs: Any) -> Any:
    """A stage by the backend that was asked for, where it has it."""
    stage = parse(name, *args, **kwargs)
    return choice.stage_of(module, stage)(stage)


def _chosen(call: Call) -> Chosen:
    if isinstance(call, BackwardCall | FirstBackwardCall | SortCall):
        kernels = choice.choose(call.problem, None, "grouped_wgrad")
        return partial(getattr(experts_backward, call.op), stage=run, kernels=kernels), None
    if call.op == "fused_experts_saving":
        kernels = choice.choose(call.problem, call.backend)
        stage = partial(_stage_of, kernels) if call.backend is not None else run
        return partial(experts_backward.fused_experts_saving, stage=stage, kernels=kernels), None
    return choice.chosen(call)


def _launcher(name: str) -> Launcher:
    names = SIGNATURES[name].positional
    apart = ("up_proj", "up_weight", "gate_up_proj", "weight", "gate_up_scales", "weight_scales")
    positions = tuple(names.index(half) for half in apart if half in names)
    return Launcher(
        partial(parse, name),
        _chosen,
        positions if {"up_proj", "up_weight"} & set(names) else (),
        names,
    )


LAUNCHERS: dict[str, Launcher] = {name: _launcher(name) for name in SCHEMAS}


def _row(name: str) -> Op:
    cure = _BACKWARD_CURE if name in _OF_GRADIENTS else _QUANTIZE_CURE

    def fake(*args: Any, **kwargs: Any) -> Any:
        refuse_tangents(name, args)
        return allocate(parse(name, *args, **kwargs))

    def flops(*shapes: Any, out_shape: Any = None, **options: Any) -> int:
        return cost.OP_FLOPS[name](SimpleNamespace(**by_name(name, shapes, options)))

    signature = SIGNATURES[name]
    formula = autograd.formula(name, signature.positional, signature.bind, partial(parse, name)) or autograd.no_formula(
        name, signature.positional, cure
    )
    return Op(name, SCHEMAS[name], LAUNCHERS[name], fake, formula, flops)


OPS: tuple[Op, ...] = tuple(_row(name) for name in SCHEMAS)


class _Library(torch.library.Library):
    """Of operators that say so themselves where torch.func differentiates one, also while a call of it is captured."""

    def impl(self, op_name: str, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register a kernel."""
        kernel = fn
        if dispatch_key == "Autograd":

            def kernel(*args: Any, **kwargs: Any) -> Any:
                refuse_transforms(op_name, args)
                return fn(*args, **kwargs)

        super().impl(op_name, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]


_library: Any = _Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


#: What is not strided, or quantised by torch, is registered for the rule's message, in place of the dispatcher's.
_KEYS = (
    "CPU", "CUDA", "MkldnnCPU", "SparseMeta", "SparseCsrMeta",
    *(kind + place for kind in ("Sparse", "SparseCsr", "NestedTensor", "Quantized") for place in ("CPU", "CUDA")),
)  # fmt: skip


#: Kernels are chosen by strides: compiled code passes those that the fake saw.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _under_vmap(name: str, *args: Any, **options: Any) -> Any:
    """A call under ``torch.vmap``, which makes one for each element, but takes no list of tensors apart."""
    for argument, value in zip(SIGNATURES[name].positional, args, strict=False):
        if isinstance(value, (list, tuple)) and any(map(compat.is_batched, value)):
            cure = "Call it once for each element."
            raise fail(name, argument, "the same for all elements of torch.vmap", "tensors of each element", cure)
    with compat.past_vmap():
        return getattr(torch.ops.moe_ops, name)(*args, **options)


def _register(op: Op) -> None:
    qualified = f"{NAMESPACE}::{op.name}"
    _library.define(f"{op.name}{op.schema}", tags=_TAGS)
    for key in _KEYS:
        _library.impl(op.name, op.real, key)
    torch.library.register_fake(qualified, op.fake, lib=_library)
    if isinstance(op.formula, autograd.InTraining):
        _library.impl(op.name, op.formula, "Autograd")
    else:
        backward, setup_context = op.formula
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    _library.impl(op.name, partial(_under_vmap, op.name), "FuncTorchVmapMode")


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op in OPS:
        register_flop_formula(getattr(torch.ops.moe_ops, op.name))(op.flops)


for _op in OPS:
    _register(_op)

#: What every argument of an operator may be: by name, in the order of its schema.
ARGUMENTS: dict[str, dict[str, Accepts]] = {
    name: {argument: accepts(kind) for argument, kind in SIGNATURES[name].types.items()}
    for name in SCHEMAS
    if name not in _OF_GRADIENTS
}


#: The default overloads: the search for one is not free.
_OVERLOADS: dict[str, Any] = {name: getattr(torch.ops.moe_ops, name).default for name in SCHEMAS}


def call(name: str, *args: Any, **options: Any) -> Any:
    """An operator for the public functions, which promise a ValueError with our words for an argument of a wrong type;
    torch would raise its own before our rule is asked.

    What the schema has as a default is not handed on: the dispatcher charges for each argument.
    """
    signature, undisturbed = SIGNATURES[name], False
    if not torch.compiler.is_compiling():
        args, options = signature.without_defaults(args, options)
        undisturbed = signature.are_plain(args)
        if not undisturbed:  # above the transforms of torch.func, which take tangents apart
            refuse_tangents(name, args)
    rows = ARGUMENTS[name]
    for argument, value in options.items() if undisturbed else (*zip(rows, args, strict=False), *options.items()):
        check_type(name, argument, value, rows[argument])
    if undisturbed:
        with compat.below_autograd():
            return _OVERLOADS[name](*args, **options)
    return getattr(torch.ops.moe_ops, name)(*args, **options)


compat.when_imported("torch.utils.flop_counter", _register_flops)
compat.when_imported(
    "torch._inductor.lowering",
    lambda: compat.lower_directly(
        SIGNATURES, "moe_ops_launchers", "from moe_ops.ops import LAUNCHERS as moe_ops_launchers"
    ),
)
