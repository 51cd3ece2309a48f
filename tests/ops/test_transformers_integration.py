"""``experts_implementation="moe_ops"``: real transformers experts modules, equal to their own code; clear refusals."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.17")

from moe_ops.api import fused_experts, quantize_weight  # noqa: E402
from moe_ops.integrations.transformers import NAME, Gate, recognise_gate  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}

#: family -> (class prefix, name of the experts class, name of the number of experts, the gate it computes)
FAMILIES: dict[str, tuple[str, str, str, Gate]] = {
    "mixtral": ("Mixtral", "MixtralExperts", "num_local_experts", Gate("silu", None, None, "concat")),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeExperts", "num_experts", Gate("silu", None, None, "concat")),
    "olmoe": ("Olmoe", "OlmoeExperts", "num_experts", Gate("silu", None, None, "concat")),
    "gpt_oss": ("GptOss", "GptOssExperts", "num_local_experts", Gate("swiglu_oai", 1.702, 7.0, "interleaved")),
    "nemotron_h": ("NemotronH", "NemotronHExperts", "n_routed_experts", Gate("relu2", None, None, "none")),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3Experts", "num_local_experts", Gate("silu", None, None, "concat")),
}


def experts(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    prefix, name, count, _ = FAMILIES[family]
    package = f"transformers.models.{family}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{family}"), f"{prefix}Config")
    config = config_class(**SMALL, **{count: 6})
    config._experts_implementation = "grouped_mm"
    module = getattr(importlib.import_module(f"{package}.modeling_{family}"), name)(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return module.to(dtype).requires_grad_(False)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(5, 6).argsort(dim=1)[:, :2]
    return torch.randn(5, 32).to(dtype), ids, torch.rand(5, 2).to(dtype)


def run(module: nn.Module, name: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    module.config._experts_implementation = name
    return module(*arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_is_recognised(family: str) -> None:
    assert recognise_gate(experts(family)) == FAMILIES[family][3]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_equals_the_models_own(family: str) -> None:
    module, arguments = experts(family), inputs()
    wanted = run(module, "grouped_mm", arguments)
    torch.testing.assert_close(run(module, NAME, arguments), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled_in_one_graph(family: str) -> None:
    torch._dynamo.reset()
    module, arguments = experts(family, torch.bfloat16), inputs(torch.bfloat16)
    wanted = run(module, NAME, arguments)
    got = torch.compile(module, backend="eager", fullgraph=True)(*arguments)
    assert torch.equal(got, wanted)
    torch._dynamo.reset()
    fresh = experts(family, torch.bfloat16)  # recognised for the first time while being traced
    fresh.config._experts_implementation = NAME
    assert torch.equal(torch.compile(fresh, backend="eager", fullgraph=True)(*arguments), wanted)


def test_expert_parallel_sentinels_contribute_nothing() -> None:
    module, (x, ids, weights) = experts("qwen3_moe"), inputs()
    ids[:, 1] = 6
    halved = run(module, NAME, (x, ids[:, :1], weights[:, :1]))
    torch.testing.assert_close(run(module, NAME, (x, ids, weights)), halved)


def test_it_trains() -> None:
    module, arguments = experts("gpt_oss"), inputs()
    module.requires_grad_(True)
    grads = []
    for name in ("grouped_mm", NAME):
        module.zero_grad()
        run(module, name, arguments).square().sum().backward()
        grads.append({key: parameter.grad.clone() for key, parameter in module.named_parameters()})
    for key, wanted in grads[0].items():
        torch.testing.assert_close(grads[1][key], wanted, rtol=1e-4, atol=1e-4)


class Other(nn.Module):
    """An experts module with a gate of its own."""

    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__()
        self.has_gate = True
        self._apply_gate = function
        for name, value in attributes.items():
            setattr(self, name, value)


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.chunk(2, dim=-1)


GATES: dict[str, tuple[Other, Gate]] = {
    "swapped_operands": (
        Other(lambda v: halves(v)[1] * halves(v)[0].sigmoid() * halves(v)[0]),
        Gate("silu", None, None, "concat"),
    ),
    "clamped": (
        Other(
            lambda v: nn.functional.silu(halves(v)[0].clamp(max=3.0)) * halves(v)[1].clamp(-3.0, 3.0), swiglu_limit=3.0
        ),
        Gate("silu_clamp", None, 3.0, "concat"),
    ),
    "large_limit": (
        Other(lambda v: nn.functional.silu(halves(v)[0].clamp(max=50.0)) * halves(v)[1].clamp(-50.0, 50.0), limit=50.0),
        Gate("silu_clamp", None, 50.0, "concat"),
    ),
    "gelu_tanh": (
        Other(lambda v: nn.functional.gelu(halves(v)[0], approximate="tanh") * halves(v)[1]),
        Gate("gelu_tanh", None, None, "concat"),
    ),
    "gelu": (Other(lambda v: nn.functional.gelu(halves(v)[0]) * halves(v)[1]), Gate("gelu", None, None, "concat")),
    "computed_in_fp32": (
        Other(lambda v: (nn.functional.silu(halves(v)[0].float()) * halves(v)[1].float()).to(v.dtype)),
        Gate("silu", None, None, "concat"),
    ),
    "silu_then_clamp": (
        Other(lambda v: nn.functional.silu(halves(v)[0]).clamp(max=7.0) * halves(v)[1].clamp(-7.0, 7.0)),
        Gate("silu_then_clamp", None, 7.0, "concat"),
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gate_is_recognised_by_its_numbers(name: str) -> None:
    module, gate = GATES[name]
    assert recognise_gate(module) == gate


UNKNOWN = {
    "limit_held_nowhere": lambda v: nn.functional.silu(halves(v)[0].clamp(max=9.0)) * halves(v)[1],
    "up_first": lambda v: halves(v)[0] * nn.functional.silu(halves(v)[1]),
    "wrong_width": lambda v: v,
    "tanh": lambda v: halves(v)[0].tanh() * halves(v)[1],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_gate_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"the activation of Other must be one of .*got another function in _apply_gate"
    ):
        recognise_gate(Other(UNKNOWN[name]))


def test_gate_that_fails_is_refused_with_its_reason() -> None:
    def broken(values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        recognise_gate(Other(broken))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_norm_after_each_expert_is_refused(compiled: bool) -> None:
    torch._dynamo.reset()
    module = experts("qwen3_moe")
    module.has_post_expert_norm = True
    module.config._experts_implementation = NAME
    function = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with pytest.raises(Exception, match="Qwen3MoeExperts must have no norm after each expert"):
        function(*inputs())


def fp8_module(config_changes: dict[str, Any] | None = None, **changes: Any) -> nn.Module:
    """The experts that transformers' quantiser puts into a Qwen3-MoE model, with weights of our own quantisation."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip("this transformers has no interface for FP8 experts")
    from transformers import Qwen3MoeConfig
    from transformers.integrations.moe import use_experts_implementation

    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    missing = set(changes) - set(inspect.signature(fp8.FP8Experts.__init__).parameters)
    if missing:
        pytest.skip(f"this transformers has no {', '.join(missing)}")
    config = Qwen3MoeConfig(**{**sizes, **(config_changes or {})})
    config._experts_implementation = NAME
    # The quantiser decorates the class anew for every module; a subclass keeps transformers' own class as it is.
    experts_class = type("FP8Experts", (fp8.FP8Experts,), {})
    decorated = use_experts_implementation(experts_class, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    module = decorated(config, **{"block_size": (128, 128), **changes}).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32:
            stored, held = quantize_weight(torch.randn(weight.shape, generator=generator) / 8, scheme="fp8_block128")
            weight.data = stored
            if scale.shape == held.shape:
                scale.data = held
    return module


def fp8_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(5, 4, generator=generator).argsort(dim=1)[:, :2]
    return torch.randn(5, 128, generator=generator).bfloat16(), ids, torch.rand(5, 2, generator=generator)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp8_experts_run(compiled: bool) -> None:
    torch._dynamo.reset()
    module, (x, ids, weights) = fp8_module(), fp8_inputs()
    function = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    got = function(x, ids, weights)
    up, down = (
        getattr(module, name).double()
        * getattr(module, f"{name}_scale_inv").double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        for name in ("gate_up_proj", "down_proj")
    )
    wanted = fused_experts(x.double(), up, down, weights, ids)
    assert got.dtype == torch.bfloat16
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < 0.1, "the activations are rounded to e4m3, twice"


FP8_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "blocks": ({}, {"block_size": (64, 128)}, r"block_size must be \(128, 128\), got \(64, 128\)"),
    "per_tensor": ({}, {"block_size": None}, r"block_size must be \(128, 128\), got None"),
    "static": ({}, {"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
    "fp4": ({}, {"expert_dtype": "fp4"}, r"gate_up_proj must be torch\.float8_e4m3fn, got torch\.int8"),
    "width": (
        {"moe_intermediate_size": 192},
        {},
        "intermediate size must be a multiple of 128, or its scales start again with the up half, got 192 with 3 rows "
        "of scales",
    ),
}


@pytest.mark.parametrize("name", FP8_REFUSED)
def test_fp8_forms_that_the_scheme_does_not_serve_are_named(name: str) -> None:
    config_changes, changes, message = FP8_REFUSED[name]
    module = fp8_module(config_changes, **changes)
    with pytest.raises(ValueError, match=f"transformers integration: FP8Experts {message}. Use experts_implementation"):
        module(*fp8_inputs())


def test_importing_the_module_is_all_that_registers() -> None:
    program = (
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "import moe_ops\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS\n"
        "from transformers.integrations import finegrained_fp8\n"
        "both = (ALL_EXPERTS_FUNCTIONS, getattr(finegrained_fp8, 'ALL_FP8_EXPERTS_FUNCTIONS', ALL_EXPERTS_FUNCTIONS))\n"
        "print(*('moe_ops' in interface for interface in both))\n"
        "import moe_ops.integrations.transformers\n"
        "print(*('moe_ops' in interface for interface in both))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.stdout.split("\n")[:2] == ["False False", "True True"], result.stderr


def test_a_whole_model_runs_on_it() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, num_experts=6, head_dim=16, vocab_size=50)
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=NAME).eval()
    tokens = torch.randint(0, 50, (1, 5))
    with torch.no_grad():
        got = model(tokens).logits
        model.set_experts_implementation("grouped_mm")
        torch.testing.assert_close(got, model(tokens).logits, rtol=1e-4, atol=1e-4)
