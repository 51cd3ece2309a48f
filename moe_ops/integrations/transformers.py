"""``experts_implementation="moe_ops"`` for Hugging Face transformers, registered from outside by this module's import.

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_ops")

It is registered in both interfaces of transformers: for the experts of a model in its own dtype, and for those that the
fine-grained FP8 quantiser put in their place (block scales, the scheme "fp8_block128"). Where transformers knows expert
parallelism by name (5.23), ``DistributedConfig(ep_implementation="moe_ops")`` is registered too:
:mod:`moe_ops.integrations.transformers_ep`.
transformers stores experts as 3-D parameters and describes them by attributes (``has_gate``, ``has_bias``,
``is_transposed``); the activation is arbitrary code, ``_apply_gate``. It is recognised by what it computes: the
module's own function and every known activation are evaluated on the same numbers, once per module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meta.activations import ACTIVATIONS, resolve_activation, split_glu
from meta.schemes import SCHEMES, ceil_div
from moe_ops.api import fused_experts

NAME = "moe_ops"
FP8_SCHEME = "fp8_block128"

CURE = "Use experts_implementation='grouped_mm' for this model"

#: Attributes under which transformers modules keep the options of clamped activations.
_ALPHA_NAMES = ("alpha", "swiglu_alpha")
_LIMIT_NAMES = ("limit", "swiglu_limit")


class Gate(NamedTuple):
    """The activation of one experts module, in the words of :func:`moe_ops.fused_experts`."""

    activation: str
    alpha: float | None
    limit: float | None
    glu_layout: str


_recognised: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of a transformers experts module.

    Args:
        self: the module, decorated with transformers' ``use_experts_implementation``.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]`` expert ids; ids past the module's experts (expert parallelism) contribute nothing.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of hidden_states.

    Raises:
        ValueError: the module normalises every expert's output, or its activation is not one of ours.
    """
    return _forward(self, hidden_states, top_k_index, top_k_weights)


def fp8_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of the module that transformers' fine-grained FP8 quantiser makes; see :func:`experts_forward`.

    Raises:
        ValueError: weights, scales or sizes that the scheme "fp8_block128" does not serve, by name.
    """
    check_fp8(self)
    first = _first(self)
    scales = {"gate_up_scales": [getattr(self, f"{first}_scale_inv")], "down_scales": [self.down_proj_scale_inv]}
    return _forward(self, hidden_states, top_k_index, top_k_weights, scheme=FP8_SCHEME, **scales)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **quantised: Any) -> Tensor:
    gate = check_experts(self)
    first, down = getattr(self, _first(self)), self.down_proj
    if self.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    first_bias = down_bias = None
    if self.has_bias:
        first_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        down_bias = self.down_proj_bias
    output = fused_experts(
        hidden_states if quantised else hidden_states.to(first.dtype),
        first,
        down,
        top_k_weights,
        top_k_index,
        activation=gate.activation,
        alpha=gate.alpha,
        limit=gate.limit,
        glu_layout=gate.glu_layout,
        gate_up_bias=first_bias,
        down_bias=down_bias,
        **quantised,
    )
    return output.to(hidden_states.dtype)


def _first(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def check_experts(module: Any, cure: str = CURE) -> Gate:
    """Its activation, if the operator computes all that the module does.

    Raises:
        ValueError: it normalises every expert's output, or its activation is not one of ours.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise _refusal(module, "must have no norm after each expert", "has_post_expert_norm=True", cure)
    return recognise_gate(module, cure)


def check_fp8(module: Any, cure: str = CURE) -> None:
    """Weights, scales and sizes are those of the scheme. transformers' other forms: e2m1 pairs in int8, e8m0 exponents,
    static activation scales, other blocks.

    Raises:
        ValueError: they are not.
    """
    first = _first(module)
    row = SCHEMES[FP8_SCHEME]
    spec = row.scales[0]
    block = block_rows, _ = spec.forms[0]
    if module.activation_scheme != "dynamic":
        raise _refusal(module, "activation_scheme must be 'dynamic'", repr(module.activation_scheme), cure)
    if module.block_size is None or tuple(module.block_size) != block:
        raise _refusal(module, f"block_size must be {block}", module.block_size, cure)
    for name in (first, "down_proj"):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype != row.weight_dtype:
            raise _refusal(module, f"{name} must be {row.weight_dtype}", weight.dtype, cure)
        if scale.dtype not in spec.dtypes:
            dtypes = " or ".join(str(dtype) for dtype in spec.dtypes)
            raise _refusal(module, f"{name}_scale_inv must be {dtypes}", scale.dtype, cure)
    width = module.down_proj.shape[2]
    if module.has_gate and width % block_rows:
        # A checkpoint's blocks of the gate and of the up half are separate, the last ones cut short: none spans both.
        # As many rows as there are blocks that run on would not say which they are.
        rows, apart = getattr(module, f"{first}_scale_inv").shape[1], 2 * ceil_div(width, block_rows)
        if rows != apart or apart == ceil_div(2 * width, block_rows):
            rule = f"intermediate size must be a multiple of {block_rows}, or its scales start again with the up half"
            raise _refusal(module, rule, f"{width} with {rows} rows of scales", cure)


def _refusal(module: nn.Module, rule: str, got: object, cure: str) -> ValueError:
    return ValueError(f"transformers integration: {type(module).__name__} {rule}, got {got}. {cure}.")


def recognise_gate(module: nn.Module, cure: str = CURE) -> Gate:
    """Which activation a module applies, by evaluating it; remembered per module, a constant under torch.compile.

    Raises:
        ValueError: no known activation gives the module's numbers.
    """
    gate: Gate = _gate_at(id(module), cure)
    return gate


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gate_at(address: int, cure: str) -> Gate:
    """:func:`recognise_gate` of the module at ``address``: not every torch takes a module for a constant."""
    module: nn.Module = ctypes.cast(ctypes.c_void_p(address), ctypes.py_object).value
    gate = _recognised.get(module)
    if gate is None:
        gate = _recognised[module] = _probe(module, cure)
    return gate


def _options(module: nn.Module, names: tuple[str, ...], default: float | None) -> list[float | None]:
    """Values worth trying for an option: what the module holds, then the default."""
    if default is None:
        return [None]
    held = [getattr(module, name, None) for name in names]
    return [*dict.fromkeys(float(value) for value in held if isinstance(value, int | float)), default]


def _candidates(module: nn.Module) -> Iterator[Gate]:
    for layout in ("concat", "interleaved") if module.has_gate else ("none",):
        for row in ACTIVATIONS.values():
            for alpha in _options(module, _ALPHA_NAMES, row.alpha):
                for limit in _options(module, _LIMIT_NAMES, row.limit):
                    yield Gate(row.name, alpha, limit, layout)


def _probe_values(module: nn.Module) -> Tensor:
    """``[S, N]`` fp32: fine around zero, and past every limit the module may hold."""
    width = 64
    extent = 4 * max(value or 0.0 for value in (*_options(module, _LIMIT_NAMES, 7.0), 7.0))
    fine = torch.linspace(-5.0, 5.0, width)
    coarse = torch.linspace(-extent, extent, width)
    # Reversed and shifted copies pair every gate with a different up value.
    rows = (fine, coarse, coarse.flip(0), fine.roll(7), coarse.roll(19))
    first = torch.stack(rows)
    return torch.cat((first, first.roll(1, 0) + 0.37), dim=1) if module.has_gate else first


def _probe(module: nn.Module, cure: str) -> Gate:
    values = _probe_values(module)
    name = "_apply_gate" if module.has_gate else "act_fn"
    with torch.no_grad():
        try:
            wanted = getattr(module, name)(values.clone())
        except Exception as error:
            raise _unknown(module, f"a function that fails on cpu tensors ({error})", cure) from error
        for gate in _candidates(module):
            row, alpha, limit = resolve_activation("transformers integration", *gate[:3])
            got = row.eager(*split_glu(values, gate.glu_layout), alpha, limit)
            if got.shape == wanted.shape and torch.allclose(got, wanted.float(), rtol=1e-4, atol=1e-5):
                return gate
    raise _unknown(module, f"another function in {name}", cure)


def _unknown(module: nn.Module, got: str, cure: str) -> ValueError:
    return ValueError(
        f"transformers integration: the activation of {type(module).__name__} must be one of {sorted(ACTIVATIONS)}, "
        f"got {got}. {cure}, or add a row to meta/activations.py."
    )


def _register() -> None:
    """Enter what this release has an interface for under ``"moe_ops"``: experts, FP8 experts, expert parallelism.

    Raises:
        ImportError: transformers is missing, or has no experts interface.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "moe_ops.integrations.transformers: transformers with an experts interface (5.0 or later) must be "
            "installed. pip install -U transformers"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    interface = getattr(import_module("transformers.integrations.finegrained_fp8"), "ALL_FP8_EXPERTS_FUNCTIONS", None)
    if interface is not None:
        interface.register(NAME, fp8_experts_forward)
    if has_ep_interface():
        import_module("moe_ops.integrations.transformers_ep")


def has_ep_interface() -> bool:
    """Whether this transformers takes implementations of expert parallelism, and this torch has process groups."""
    try:
        module = import_module("transformers.distributed.expert_parallel")
    except ImportError:
        return False
    return hasattr(module, "EPImplementationInterface") and torch.distributed.is_available()


_register()
