"""``experts_implementation="moe_ops"``: real transformers experts modules, equal to their own code; clear refusals."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.17")

from moe_ops.integrations.transformers import NAME, Gate, recognise_gate, register  # noqa: E402

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


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


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
}


@pytest.mark.parametrize("name", GATES)
def test_gate_is_recognised_by_its_numbers(name: str) -> None:
    module, gate = GATES[name]
    assert recognise_gate(module) == gate


UNKNOWN = {
    "silu_then_clamp": lambda v: nn.functional.silu(halves(v)[0]).clamp(max=7.0) * halves(v)[1].clamp(-7.0, 7.0),
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
