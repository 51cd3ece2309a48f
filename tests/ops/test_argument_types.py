"""Every argument of every public function, given what it cannot be: our ValueError, eager and compiled."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import moe_ops
from moe_ops.ops import ARGUMENTS
from tests.ops.valid import PUBLIC

PARAMETERS = [
    (name, parameter) for name in PUBLIC for parameter in inspect.signature(getattr(moe_ops, name)).parameters
]
WRONG: dict[str, Any] = {
    "none": None,
    "list": [[1.0, 2.0], [3.0, 4.0]],
    "array": np.ones((4, 8), dtype=np.float32),
    "float": 2.5,
    "str": "two",
    "bool": True,
    "numpy_int": np.int64(1),
    "tensor": torch.tensor(1),
}
#: Types of the wrong values that a parameter of this annotation may have; a value of them may still break a rule.
LEGAL = {
    "Tensor": {"tensor"},
    "int": set(),
    "float": {"float"},
    "bool": {"bool"},
    "str": {"str"},
    "torch.dtype": set(),
    "Sequence[Tensor]": set(),
    "GroupLike": {"str"},
    "Prepared": set(),
}


def legal(name: str, parameter: str) -> set[str]:
    """Which of the wrong values are of a type that the parameter takes."""
    kind, _, optional = inspect.signature(getattr(moe_ops, name)).parameters[parameter].annotation.partition(" | ")
    return LEGAL[kind] | ({"none"} if optional else set())


def call(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(moe_ops, name)(**arguments)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=lambda value: value)
def test_wrong_type(name: str, parameter: str, value: str) -> None:
    arguments = PUBLIC[name](**{parameter: WRONG[value]})
    if value in legal(name, parameter):
        try:
            call(name, arguments)
        except ValueError as error:
            assert str(error).startswith(f"{name}: ")
        return
    with pytest.raises(ValueError) as caught:
        call(name, arguments)
    given = WRONG[value]
    got = {"none": "None", "bool": "True", "float": "2.5 (float)", "str": "'two' (str)"}.get(
        value, type(given).__name__
    )
    # What is wrong with a list of tensors is one of them.
    place = f"{parameter}[0]" if value == "list" and parameter.endswith("_scales") else parameter
    assert str(caught.value).startswith(f"{name}: {place} must be ")
    assert f", got {got}." in str(caught.value)


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=lambda value: value)
def test_wrong_type_compiled(name: str, parameter: str) -> None:
    torch._dynamo.reset()
    value = "list" if parameter != "top_k" else "float"
    arguments = PUBLIC[name](**{parameter: WRONG[value]})
    compiled = torch.compile(lambda given: call(name, given), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"{name}: {parameter}(\[0\])? must be "):
        compiled(arguments)


NUMBERS = [(name, parameter) for name, parameter in PARAMETERS if not {"int", "float"}.isdisjoint(
    str(inspect.signature(getattr(moe_ops, name)).parameters[parameter].annotation).split(" | ")
)]  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1], ids=["large", "small"])
@pytest.mark.parametrize(("name", "parameter"), NUMBERS, ids=lambda value: value)
def test_a_number_that_the_dispatcher_cannot_pass(name: str, parameter: str, sign: int) -> None:
    is_int = "int" in str(inspect.signature(getattr(moe_ops, name)).parameters[parameter].annotation)
    most = 64 if is_int else 1024
    wanted = rf"^{name}: {parameter} must be of at most {most} bits, got a larger number. Pass a smaller one.$"
    with pytest.raises(ValueError, match=wanted):
        call(name, PUBLIC[name](**{parameter: sign * 2**most}))


def test_a_large_int_may_stand_for_a_float() -> None:
    assert moe_ops.fused_topk(torch.randn(4, 8), top_k=2, scale=2**70)[0].max() > 2.0**68


def test_a_number_that_the_dispatcher_cannot_pass_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: moe_ops.fused_topk(x, top_k=2**63), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="fused_topk: top_k must be of at most 64 bits"):
        compiled(torch.randn(4, 8))


@pytest.mark.parametrize(("name", "value", "rule"), [("top_k", -(2**63), ">= 1"), ("routing", 2**64, "a string")])
def test_a_number_that_no_range_has_is_refused_compiled(name: str, value: int, rule: str) -> None:
    torch._dynamo.reset()
    options = {"top_k": 2, name: value}
    compiled = torch.compile(lambda x: moe_ops.fused_topk(x, **options), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"fused_topk: {name} must be {rule}, got -?(a number|[0-9]+)"):
        compiled(torch.randn(4, 8))


CONTAINERS = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), "a strided tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        "a strided tensor",
    ),
    "quantised": (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), "a tensor of numbers"),
    "lazy": (torch.nn.UninitializedParameter, "initialised"),
}
TENSORS = [(name, parameter) for name, parameter in PARAMETERS if "tensor" in legal(name, parameter)]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(("name", "parameter"), TENSORS, ids=lambda value: value)
def test_a_tensor_without_numbers_of_its_own(name: str, parameter: str, kind: str) -> None:
    make, rule = CONTAINERS[kind]
    with pytest.raises(ValueError, match=f"^{name}: {parameter} must be {rule}, got "):
        call(name, PUBLIC[name](**{parameter: make()}))


@pytest.mark.parametrize("value", [value for value in WRONG if value != "tensor"])
def test_wrong_tensor_compiled(value: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: moe_ops.fused_topk(x, top_k=2), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"fused_topk: router_logits must be a torch\.Tensor, got "):
        compiled(WRONG[value])


def test_where_the_graph_may_break_the_error_is_the_eager_one() -> None:
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"^fused_topk: top_k must be an int, got 2.5 \(float\). Pass a Python int.$"):
        torch.compile(lambda x: moe_ops.fused_topk(x, top_k=2.5), backend="eager")(torch.randn(4, 8))


def test_the_valid_calls_are_valid_eager_and_compiled() -> None:
    for name, arguments in PUBLIC.items():
        torch._dynamo.reset()
        call(name, arguments())
        torch.compile(lambda given, name=name: call(name, given), backend="eager", fullgraph=True)(arguments())


def test_every_public_function_is_swept() -> None:
    others = {"debug", "load_experts_", "load_statistics", "quantize_", "Prepared", "QuantizedWeight"}
    not_operators = others | set(moe_ops._FROM_PASSES)
    assert set(PUBLIC) == set(moe_ops.__all__) - not_operators
    assert set(ARGUMENTS) == set(PUBLIC) - {"quantize_weight", "prepare", "experts", "finalize"}


def test_sizes_of_a_traced_graph_are_numbers() -> None:
    """A symbolic size is an int, and a proxy of FX stands for anything."""
    torch._dynamo.reset()

    def permute(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return moe_ops.batched_dispatch(x, ids, num_experts=3, capacity=x.shape[0])[0]

    compiled = torch.compile(permute, backend="eager", fullgraph=True, dynamic=True)
    assert compiled(torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.int32)).shape == (3, 5, 4)
    traced = torch.fx.symbolic_trace(lambda logits: moe_ops.fused_topk(logits, top_k=2))
    assert traced(torch.randn(3, 4))[0].shape == (3, 2)
