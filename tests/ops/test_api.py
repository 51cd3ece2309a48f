"""The public functions hand every argument to the operator, each under its own name and with the operator's default."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import api, stages

LAYERS = (api.fused_topk, api.fused_experts, api.fused_moe)
STAGES = tuple(
    value
    for name, value in vars(stages).items()
    if getattr(value, "__module__", "") == stages.__name__ and name[0] != "_"
)
FUNCTIONS = (*LAYERS, *STAGES)


#: Arguments that choose how ranks share a call, which is several operators' then: tests/distributed.
OVER_RANKS = ("group", "transport", "rank_capacity")


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in OVER_RANKS}


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A public function's call as the operator gets it: its arguments by the schema's names."""

    def run(function: Any, **arguments: Any) -> dict[str, Any]:
        seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

        def call(name: str, *args: Any, **options: Any) -> tuple[None, None]:
            seen.append((name, args, options))
            return None, None

        for module in (api, stages):
            monkeypatch.setattr(module, "call", call)
        function(**{name: object() if p.default is p.empty else p.default for name, p in parameters(function).items()
                    if name not in arguments}, **arguments)  # fmt: skip
        ((name, args, options),) = seen
        assert name == function.__name__
        schema = getattr(torch.ops.moe_ops, name).default._schema
        return {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **options}

    return run


CASES = [(function, name) for function in FUNCTIONS for name in parameters(function)]


@pytest.mark.parametrize(("function", "name"), CASES, ids=[f"{f.__name__}-{name}" for f, name in CASES])
def test_every_argument_reaches_the_operator(function: Any, name: str, handed: Any) -> None:
    value = object()
    found = handed(function, **{name: value})
    assert found[name] is value
    assert [other for other, given in found.items() if given is value] == [name]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_defaults_are_the_operators(function: Any) -> None:
    schema = getattr(torch.ops.moe_ops, function.__name__).default._schema
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    # No list is an empty one, for people.
    defaults |= {a.name: () for a in schema.arguments if str(a.type) == "Optional[List[Tensor]]"}
    ours = {name: p.default for name, p in parameters(function).items() if p.default is not p.empty}
    assert ours == {name: defaults[name] for name in ours} and set(defaults) == set(ours)


def test_every_operator_of_the_stages_has_a_function() -> None:
    assert {function.__name__ for function in STAGES} >= {"moe_permute", "moe_unpermute", "batched_dispatch",
        "batched_combine", "quantize_rows", "quantize_batched", "grouped_mm_glu", "grouped_mm", "batched_mm_glu",
        "batched_mm"}  # fmt: skip


GATED = [function for function in FUNCTIONS if "glu_layout" in parameters(function)]


@pytest.mark.parametrize("function", GATED, ids=lambda function: function.__name__)
def test_no_layout_is_the_layout_of_experts_without_a_gate(function: Any, handed: Any) -> None:
    assert handed(function, glu_layout=None)["glu_layout"] == "none"


def test_quantised_weights_are_those_of_the_scheme() -> None:
    weight = torch.randn(2, 130, 70)
    stored, scale = moe_ops.quantize_weight(weight, scheme="fp8_block128")
    blocks = weight[1, 128:, :70].abs().amax() / 448
    torch.testing.assert_close(scale[1, 1, 0], blocks)
    assert stored.dtype == torch.float8_e4m3fn and scale.shape == (2, 2, 1)
    with pytest.raises(ValueError, match=r"quantize_weight: scheme must be one of .*'fp8_block128', .*, got 'bf16'"):
        moe_ops.quantize_weight(weight, scheme="bf16")
    with pytest.raises(ValueError, match="quantize_weight: weight must be"):
        moe_ops.quantize_weight(weight[0], scheme="fp8_block128")
    with pytest.raises(ValueError, match="quantize_weight: weight must be"):
        moe_ops.quantize_weight(weight.long(), scheme="fp8_block128")


@pytest.mark.parametrize("name", moe_ops._FROM_PASSES)
def test_names_of_the_compiler_side(name: str) -> None:
    import compile_passes

    assert getattr(moe_ops, name) is getattr(compile_passes, name)


@pytest.mark.parametrize("name", ["no_such_name", "backend", "PASSES"])
def test_a_name_that_is_not_public(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'moe_ops' has no attribute '{name}'"):
        getattr(moe_ops, name)


@pytest.mark.parametrize("name", ["cpu", "triton", "reference"])
def test_a_backend_answers_to_its_name(name: str) -> None:
    from moe_ops import backends

    assert backends.load(name).NAME == name
