"""Activations by their formulas: every spelling that is read gives the numbers of the row that it is read as."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from compile_passes.explain import explain
from compile_passes.match import Body, Refusal
from compile_passes.patterns.activation import recognise_body
from compile_passes.reading import Reading
from meta.activations import resolve_activation, split_glu
from tests.passes.blocks import I, K, batched, block, capture, grouped, match, weights
from tests.passes.compare import assert_same

WIDTH = 6
CUBIC = math.sqrt(2 / math.pi)


def each(h):
    return h.chunk(2, -1)


def values() -> torch.Tensor:
    """Rows of gate and up, fine and coarse."""
    make = torch.Generator().manual_seed(0)
    return torch.randn(64, 2 * WIDTH, generator=make, dtype=torch.float64) * torch.logspace(-2, 1, 64)[:, None].double()


def read(activation, captured: bool = True) -> Body | Refusal:
    """What is recognised between a first product, ``values()``, and a second one."""
    h = values()
    graph = (capture(activation, h) if captured else make_fx(activation, tracing_mode="fake")(h)).graph
    source = next(iter(graph.find_nodes(op="placeholder")))
    rows = next(iter(graph.find_nodes(op="output"))).args[0]
    found = recognise_body(Reading(graph), rows[0] if isinstance(rows, tuple) else rows, [source], torch.float64)
    return found if isinstance(found, Refusal) else found.body


def numbers(body: Body, h: torch.Tensor) -> torch.Tensor:
    """What the operators make of ``h``."""
    row, alpha, limit = resolve_activation("test", body.activation, body.alpha, body.limit)
    gate, up = split_glu(h, body.glu_layout)
    return body.scale * (row.eager(up, gate, alpha, limit) if body.up_first else row.eager(gate, up, alpha, limit))


def gated(function):
    return lambda h: function(each(h)[0]) * each(h)[1]


def softcap(x, cap):
    return torch.tanh(x / cap) * cap


SPELLED = {
    "silu_by_exp": (gated(lambda g: g / (1 + torch.exp(-g))), "silu"),
    "silu_by_exp_and_reciprocal": (gated(lambda g: g * torch.reciprocal(torch.exp(-g) + 1.0)), "silu"),
    "silu_by_one_over": (gated(lambda g: g * (1 / (1 + (-g).exp()))), "silu"),
    "silu_by_tanh": (gated(lambda g: 0.5 * g * (1 + torch.tanh(0.5 * g))), "silu"),
    "silu_by_tanh_as_a_sum": (gated(lambda g: 0.5 * (g + g * torch.tanh(g / 2))), "silu"),
    "silu_by_the_other_side": (gated(lambda g: g * (1 - torch.sigmoid(-g))), "silu"),
    "silu_by_expit": (gated(lambda g: g * torch.special.expit(g)), "silu"),
    "silu_negated_twice": (gated(lambda g: -(g * -torch.sigmoid(g))), "silu"),
    "silu_clamped_at_infinity": (
        lambda h: F.silu(each(h)[0]).clamp(max=math.inf) * each(h)[1].clamp(-math.inf, math.inf), "silu"),
    "gelu_by_erf": (gated(lambda g: 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))), "gelu"),
    "gelu_by_erf_of_halves": (gated(lambda g: g * (0.5 + 0.5 * torch.erf(g * 0.7071067811865476))), "gelu"),
    "gelu_new": (gated(lambda g: 0.5 * g * (1 + torch.tanh(CUBIC * (g + 0.044715 * torch.pow(g, 3.0))))), "gelu_tanh"),
    "gelu_fast": (
        gated(lambda g: 0.5 * g * (1.0 + torch.tanh(g * 0.7978845608 * (1.0 + 0.044715 * g * g)))), "gelu_tanh"),
    "gelu_tanh_by_sigmoid": (gated(lambda g: g * torch.sigmoid(2 * CUBIC * (g + 0.044715 * g**3))), "gelu_tanh"),
    "relu_by_clamp": (gated(lambda g: g.clamp(min=0)), "relu"),
    "relu2_by_clamp": (lambda h: h.clamp(min=0) ** 2, "relu2"),
    "relu_of_a_multiple": (gated(lambda g: F.relu(3 * g)), "relu"),
    "quick_gelu": (gated(lambda g: g * torch.sigmoid(1.702 * g)), "quick_gelu"),
    "quick_gelu_by_exp": (gated(lambda g: g / (1 + torch.exp(-1.702 * g))), "quick_gelu"),
    "swish_of_a_multiple": (gated(lambda g: F.silu(1.5 * g) / 1.5), "quick_gelu"),
    "quick_gelu_without_a_gate": (lambda h: h * torch.sigmoid(h * 1.702), "quick_gelu"),
    "quick_gelu_by_tanh": (gated(lambda g: 0.5 * g * (1 + torch.tanh(g))), "quick_gelu"),
    "of_the_negative": (gated(lambda g: g / (1 + torch.exp(g))), "quick_gelu"),
    "gate_second": (lambda h: each(h)[0] * torch.sigmoid(each(h)[1]) * each(h)[1], "silu"),
    "twice_silu": (gated(lambda g: 2 * F.silu(g)), "silu"),
    "half_the_product": (lambda h: F.silu(each(h)[0]) * each(h)[1] / 2, "silu"),
    "minus_silu": (gated(lambda g: -F.silu(g)), "silu"),
    "soft_capped": (
        lambda h: softcap(each(h)[0], 4.0) * torch.sigmoid(each(h)[0]) * softcap(each(h)[1], 25.0), "silu_softcap"),
    "soft_capped_by_factors": (
        lambda h: torch.tanh(0.5 * each(h)[0]) * torch.sigmoid(each(h)[0]) * torch.tanh(each(h)[1] / 3) * 6.0,
        "silu_softcap"),
    "silu_then_clamp": (
        lambda h: F.silu(each(h)[0]).clamp(max=2.0) * each(h)[1].clamp(min=-2.0, max=2.0), "silu_then_clamp"),
    "oai_with_a_factor": (
        lambda h: 3 * (each(h)[1].clamp(-2, 2) + 1) * F.silu(each(h)[0].clamp(max=2.0)), "swiglu_oai"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_spelled_out(name: str) -> None:
    activation, row = SPELLED[name]
    body = read(activation)
    assert isinstance(body, Body), str(body)
    assert body.activation == row
    torch.testing.assert_close(numbers(body, values()), activation(values()), rtol=1e-5, atol=1e-8)


SCALES = {"twice_silu": 2.0, "half_the_product": 0.5, "minus_silu": -1.0, "relu_of_a_multiple": 3.0,
          "swish_of_a_multiple": 1.0, "soft_capped": 1.0, "soft_capped_by_factors": 1.0,
          "silu_by_tanh": 1.0}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_the_factor_that_is_left(name: str) -> None:
    assert read(SPELLED[name][0]).scale == SCALES[name]


WRONG = {
    "two_plus_exp": gated(lambda g: g / (2 + torch.exp(-g))),
    "a_power_of_two": gated(lambda g: g / (1 + torch.pow(2.0, -g))),
    "tanh_and_two": gated(lambda g: 0.5 * g * (2 + torch.tanh(0.5 * g))),
    "tanh_alone": gated(torch.tanh),
    "erf_of_all": gated(lambda g: 0.5 * g * (1 + torch.erf(g))),
    "erf_of_a_rough_root": gated(lambda g: 0.5 * g * (1 + torch.erf(g * 0.7072))),
    "gelu_with_another_cube": gated(lambda g: 0.5 * g * (1 + torch.tanh(CUBIC * (g + 0.0447 * g**3)))),
    "gelu_with_a_square": gated(lambda g: 0.5 * g * (1 + torch.tanh(CUBIC * (g + 0.044715 * g**2)))),
    "gelu_with_a_constant": gated(lambda g: 0.5 * g * (1 + torch.tanh(CUBIC * (g + 0.044715 * g**3 + 1)))),
    "gelu_of_a_multiple": gated(lambda g: F.gelu(2 * g)),
    "sigmoid_of_a_shifted_gate": gated(lambda g: g * torch.sigmoid(g + 1)),
    "relu_of_a_negative": gated(lambda g: F.relu(-g)),
    "relu_above_one": gated(lambda g: g.clamp(min=1)),
    "relu6": gated(lambda g: g.clamp(0, 6)),
    "one_cap": lambda h: softcap(each(h)[0], 4.0) * torch.sigmoid(each(h)[0]) * each(h)[1],
    "cap_of_the_up_half_alone": lambda h: F.silu(each(h)[0]) * softcap(each(h)[1], 4.0),
    "sigmoid_of_the_capped_gate": lambda h: F.silu(softcap(each(h)[0], 4.0)) * softcap(each(h)[1], 4.0),
    "negative_caps": lambda h: torch.tanh(-each(h)[0]) * torch.sigmoid(each(h)[0]) * torch.tanh(-each(h)[1]),
    "silu_clamped_below": lambda h: F.silu(each(h)[0]).clamp(min=-0.1) * each(h)[1],
    "silu_clamped_and_up_not": lambda h: F.silu(each(h)[0]).clamp(max=2.0) * each(h)[1],
    "silu_and_up_clamped_differently": lambda h: F.silu(each(h)[0]).clamp(max=2.0) * each(h)[1].clamp(-3.0, 3.0),
    "twice_silu_clamped": lambda h: (2 * F.silu(each(h)[0])).clamp(max=2.0) * each(h)[1].clamp(-2.0, 2.0),
    "gelu_clamped_after": lambda h: F.gelu(each(h)[0]).clamp(max=2.0) * each(h)[1].clamp(-2.0, 2.0),
    "times_zero": gated(lambda g: 0.0 * F.silu(g)),
    "cubed": lambda h: h.sigmoid() * h * h * h,
    "a_sum_of_both": lambda h: F.silu(each(h)[0]) * each(h)[1] + each(h)[1],
    "many_factors": gated(lambda g: F.silu(g) * g**3 * g**3),
    "a_tensor_factor": lambda h: F.silu(each(h)[0]) * each(h)[1] * torch.linspace(0, 1, WIDTH, dtype=h.dtype),
    "divided_by_up": lambda h: F.silu(each(h)[0]) / each(h)[1],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_nearly(name: str) -> None:
    found = read(WRONG[name])
    assert isinstance(found, Refusal) and found.cure, found


def test_squares_of_squares_are_read_once() -> None:
    """A formula that doubles at every step is not expanded."""

    def deep(h):
        x = h
        for _ in range(60):
            x = x * x
        return torch.sigmoid(x) * x

    assert isinstance(read(deep, captured=False), Refusal)


def _formula(rng: random.Random, depth: int):
    """A random function of (gate, up): pieces of real activations, mostly, put together at random."""
    numbers_ = (1, 1, 1, 2, -1, 0.5, 1.702, CUBIC, 0.044715, math.sqrt(0.5))
    if depth == 0 or rng.random() < 0.25:
        kind = rng.random()
        if kind < 0.2:
            number = rng.choice(numbers_)
            return lambda g, u: number
        return (lambda g, u: g) if kind < 0.7 else (lambda g, u: u)
    one, two = _formula(rng, depth - 1), _formula(rng, depth - 1)
    number = rng.choice(numbers_)
    functions = (F.silu, torch.sigmoid, torch.tanh, torch.erf, F.relu, F.gelu, torch.exp, torch.square)
    function = rng.choice(functions)
    return rng.choice((
        lambda g, u: one(g, u) * two(g, u),
        lambda g, u: one(g, u) * two(g, u),
        lambda g, u: function(torch.as_tensor(one(g, u))) if isinstance(one(g, u), torch.Tensor) else one(g, u),
        lambda g, u: number + one(g, u),
        lambda g, u: number * one(g, u),
        lambda g, u: one(g, u) - number,
        lambda g, u: g * torch.sigmoid(number * g) * one(g, u),
        lambda g, u: 0.5 * g * (1 + torch.tanh(number * g)) * one(g, u),
        lambda g, u: one(g, u) / (1 + torch.exp(-number * g)),
    ))  # fmt: skip


def _times_up(rng: random.Random, gate):
    return rng.choice((gate, lambda g, u: gate(g, u) * u, lambda g, u: u * gate(g, u), lambda g, u: gate(g, u) * 2 * u))


def _of_halves(formula):
    return lambda h: formula(*each(h))


# Of the first eight those of which most are read.
@pytest.mark.parametrize("seed", [0, 2, 4, 6])
def test_random_formulas_are_refused_or_right(seed: int) -> None:
    """Eighty formulas a case; a read one gives the numbers of its row."""
    rng, accepted = random.Random(seed), 0
    for _ in range(80):
        formula = _times_up(rng, _formula(rng, rng.choice((1, 2, 2, 3))))
        activation = _of_halves(formula)
        wanted = activation(values())
        if not isinstance(wanted, torch.Tensor):
            continue
        body = read(activation, captured=False)
        if isinstance(body, Body):
            accepted += 1
            torch.testing.assert_close(numbers(body, values()), wanted, rtol=1e-5, atol=1e-8, equal_nan=True)
    assert accepted


FORMS = {"grouped": (grouped, torch.bfloat16), "batched": (batched, torch.float32)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["twice_silu", "quick_gelu", "soft_capped", "silu_then_clamp", "gelu_new"])
def test_blocks_are_fused_and_right(form: str, name: str) -> None:
    experts, dtype = FORMS[form]
    run = block(experts, activation=SPELLED[name][0])
    outcome = assert_same(run, *weights(dtype=dtype).values(), gradients=form == "batched")
    assert outcome.fused == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_factor_goes_to_a_router_that_stays(dtype: torch.dtype) -> None:
    """Its weights stay in the hidden states' dtype, and are multiplied in fp32."""

    def routed(x, gate):
        values, ids = F.linear(x, gate).softmax(-1).topk(K, dim=-1)
        return values * torch.arange(8, device=x.device)[ids], ids

    run = block(batched, routed, activation=SPELLED["twice_silu"][0])
    assert assert_same(run, *weights(dtype=dtype).values()).fused == 1


def test_a_factor_is_the_routers_scale() -> None:
    found = match(block(grouped, activation=SPELLED["twice_silu"][0]))
    assert found.router.scale == 2.0 and found.body.scale == 2.0


@pytest.mark.parametrize(("bounded", "fused"), [(lambda h: h.clamp(min=0), 0), (F.relu, 1)], ids=["clamp", "relu"])
def test_a_clamp_at_0_has_another_derivative_than_relu(bounded, fused: int) -> None:
    """1 at 0, so that a first projection of zeros is trained."""
    run, given = block(batched, activation=bounded), weights(n=I, dtype=torch.float32)
    given["w1"].zero_()
    assert assert_same(run, *given.values(), gradients=True).fused == fused
    given["w1"].requires_grad_()
    assert ("clamp(min=0)" in str(explain(run, *given.values()))) == (fused == 0)
    with torch.no_grad():
        assert assert_same(run, *given.values()).fused == 1
