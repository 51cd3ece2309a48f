"""Kernels of gradients under the interpreter: against plain tensor code, and whole layers against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from meta.activations import ACTIVATIONS
from meta.calls import RouterOptions
from meta.operands import Glu
from meta.routing import ROUTINGS, route
from moe_ops import choice, reference, router_gradient, rows
from moe_ops.backends import cpu, triton_plans
from moe_ops.backends import triton as backend
from moe_ops.experts_backward import first_product
from moe_ops.kernels.triton import collect, wgrad
from moe_ops.kernels.triton import rows as kernel_rows
from moe_ops.kernels.triton.config import MMConfig
from moe_ops.ops import LAUNCHERS, parse
from tests.ops.errors import assert_rounded

T, E, K, H = 7, 5, 2, 24


PLACES = ("offsets", "row_to_pair", "pair_to_row")


def places_of(call: Any) -> list[torch.Tensor]:
    return [getattr(call, name) for name in PLACES]


def places(dropped: bool) -> rows.Routed:
    """Of ids some of which may name no expert."""
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    if dropped:
        ids[1], ids[4, 0] = -1, E
    return rows.sort_pairs(ids, E, None, counted_for=None)


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weights_before"])
@pytest.mark.parametrize("copies", [False, True], ids=["frozen", "trained"])
def test_collect(weighted: bool, copies: bool) -> None:
    torch.manual_seed(0)
    _, row_to_pair, pair_to_row = places(dropped=True)
    kept = int((row_to_pair >= 0).sum())
    x, grad = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    weights = torch.rand(T, K) if weighted else None
    grad_rows = torch.randn(T * K, H).bfloat16()
    grad_rows[kept:] = float("nan")
    given = (pair_to_row, row_to_pair, x, weights, grad if copies else None)
    wanted = rows.collect(grad_rows.clone(), *given, rows=copies)
    found = collect.collect(grad_rows, *given, rows=copies)
    assert [part is None for part in found] == [part is None for part in wanted]
    for got, want, whole in zip(found, wanted, (True, False, False, True), strict=True):
        if want is not None:
            torch.testing.assert_close(got if whole else got[:kept], want if whole else want[:kept])


def plain_stage(name: str, *args: Any) -> Any:
    """A product that says nothing of the kernels under test."""
    return getattr(reference, name)(parse(name, *args))


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not_kept"])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("layout", ["concat", "interleaved", "none", "separate"])
def test_activated_rows(layout: str, many: bool, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for the activation and what stands before it: as the two steps in plain code, bias included."""
    torch.manual_seed(1)
    I, tokens = 40, 3 * T if many else T
    if many:
        short_ends = MMConfig(16, 64, 32, 8, 8, 2, a_tma=True, w_tma=True, tall_m=32, tall_stages=2)
        monkeypatch.setattr(triton_plans, "tile_for", lambda *key: short_ends)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)])
    ids[1], ids[:, 0] = -1, 2
    routed = rows.sort_pairs(ids, E, None, counted_for=None)
    width = 2 * I if layout in ("concat", "interleaved") else I
    given = dict(
        hidden_states=torch.randn(tokens, H).bfloat16(),
        gate_up_proj=torch.randn(E, width, H).bfloat16(),
        up_proj=torch.randn(E, I, H).bfloat16() if layout == "separate" else None,
        down_proj=torch.randn(E, H, I).bfloat16(),
        gate_up_bias=torch.randn(E, I if layout == "none" else 2 * I).bfloat16(),
        topk_weights=torch.rand(tokens, K),
        topk_ids=ids,
        glu_layout="concat" if layout == "separate" else layout,
    )
    call = parse("fused_experts_saving", **given)
    value, *halves = backend.activated_rows(call, routed, keep=keep)
    first = [part for part in (given["gate_up_proj"], given["up_proj"]) if part is not None]
    wanted = first_product(plain_stage, given["hidden_states"], first, given["gate_up_bias"], routed, None)
    kept = int((routed.row_to_pair >= 0).sum())
    assert len(halves) == (len(wanted) if keep else 0)
    for got, want in zip(halves, wanted, strict=False):
        torch.testing.assert_close(got[:kept], want[:kept])
    exact = [part.double() for part in wanted]
    glu = call.experts.glu
    result = rows.glu_rows(*exact, *[None] * (2 - len(exact)), glu, routed.offsets)
    torch.testing.assert_close(value[:kept].double(), result[:kept], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.limit])
def test_gradients_at_a_bound_are_those_of_plain_code(name: str, layout: str) -> None:
    """Where torch's clamp has none, as it is since 2.14, kernels have none."""
    routed, I = places(dropped=True), 8
    values = torch.tensor([-2.0, -1.5, -1.0, 0.5, 1.0, 1.5, 2.0, 1.25])  # -1.5 and 1.5: the bounds
    gate_up = values[torch.randint(8, (T * K, 2 * I))]
    glu = Glu(name, 1.702, 1.5, layout)
    given = (torch.randn(T * K, I), gate_up, None, None, (routed.row_to_pair, routed.pair_to_row), glu, routed.offsets)
    options: dict[str, Any] = dict(value=False, dots=None, in_place=False)
    wanted, got = (module.glu_rows_backward(*given, **options)[0] for module in (rows, kernel_rows))
    kept = int((routed.row_to_pair >= 0).sum())
    torch.testing.assert_close(got[:kept], wanted[:kept])


@pytest.mark.parametrize("tokens", ["grad_rows", "rows"])
def test_weight_gradient_of_tokens(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of some columns at a time, the last fewer."""
    torch.manual_seed(4)
    monkeypatch.setattr(wgrad, "PIECE", 16)
    given = {name: torch.randn(T if name == tokens else T * K, 40 if name == tokens else 16).bfloat16()
             for name in ("grad_rows", "rows")}  # fmt: skip
    call = parse("grouped_wgrad", **given, **dict(zip(PLACES, places(dropped=True), strict=True)), tokens=tokens)
    wide = {name: value.double() for name, value in given.items()}
    exact = parse("grouped_wgrad", **wide, **dict(zip(PLACES, places_of(call), strict=True)), tokens=tokens)
    assert_rounded(backend.grouped_wgrad(call), cpu.grouped_wgrad(exact))


@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_weight_gradient_of_nothing(tokens: bool) -> None:
    offsets = torch.zeros(E, dtype=torch.int32)
    nowhere = (torch.empty(0, dtype=torch.int32), torch.empty((0, K), dtype=torch.int32)) if tokens else ()
    call = parse("grouped_wgrad", torch.empty(0, 40).bfloat16(), torch.empty(0, 24).bfloat16(), offsets, *nowhere)
    assert torch.equal(backend.grouped_wgrad(call), torch.zeros(E, 40, 24).bfloat16())


@pytest.mark.parametrize("form", ["rows", "tokens", "weighted"])
def test_expert_sums(form: str) -> None:
    torch.manual_seed(1)
    offsets, row_to_pair, pair_to_row = places(dropped=True)
    arguments: dict[str, Any] = {"rows": torch.randn(T * K if form == "rows" else T, 70), "offsets": offsets}
    if form == "rows":
        arguments["rows"][offsets[-1] :] = float("nan")
    else:
        arguments |= {"row_to_pair": row_to_pair, "pair_to_row": pair_to_row}
    if form == "weighted":
        arguments["topk_weights"] = torch.rand(T, K)
    call = parse("expert_sums", **arguments)
    torch.testing.assert_close(backend.expert_sums(call), cpu.expert_sums(call))


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalised"])
@pytest.mark.parametrize("name", [name for name, row in ROUTINGS.items() if row.group is None])
def test_router(name: str, renormalize: bool) -> None:
    torch.manual_seed(2)
    options = RouterOptions(3, name, renormalize, 0.01, 1, 1, 2.5)
    logits = torch.randn(6, 12)
    logits[4] = float("nan")
    logits[5, 3] = -torch.inf
    ids = torch.stack([torch.randperm(12)[:3] for _ in range(6)]).int()
    arguments = (torch.randn(6, 3), logits, ids)
    call = parse("fused_topk_backward", *arguments, **options._asdict())
    wanted = router_gradient.fused_topk_backward(call)
    torch.testing.assert_close(backend.fused_topk_backward(call), wanted, equal_nan=True, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, row in ROUTINGS.items() if row.group is None])
@pytest.mark.parametrize("form", ["one", "one_and_eps", "renormalised", "raw"])
def test_router_that_is_sure(form: str, name: str) -> None:
    """One score is nearly all, or all are tiny: gradients of 1e-6 of the weights' have their digits nevertheless."""
    torch.manual_seed(3)
    top_k = 1 if form.startswith("one") else 3
    options = RouterOptions(top_k, name, form != "raw", 1e-7 if form == "one_and_eps" else 0.0, 1, 1, 1.0)
    logits = torch.randn(6, 12) - 15
    logits[:, 0] += 15
    ids = torch.stack([torch.randperm(11)[:top_k] + 1 for _ in range(6)]).int()
    ids[:3, 0] = 0
    grad, exact = torch.randn(6, top_k), logits.double().requires_grad_()
    for run in (backend.fused_topk_backward, router_gradient.fused_topk_backward):
        got = run(parse("fused_topk_backward", grad, logits, ids, **options._asdict()))
        exact.grad = None
        weights_of(exact, ids.long(), options).backward(grad.double())
        torch.testing.assert_close(got.double(), exact.grad, rtol=2e-5, atol=1e-13)


def weights_of(logits: torch.Tensor, ids: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """float64 weights of experts that are selected already: `route` selects them by a bias, which is in no weight."""
    found = []
    for of_token, chosen in zip(logits.split(1), ids, strict=True):
        bias = torch.zeros(logits.shape[1]).scatter(0, chosen, 1e4 * torch.arange(len(chosen), 0, -1))
        weights, selected = route(of_token, bias, **options._asdict(), dtype=torch.float64)
        assert torch.equal(selected[0].long(), chosen)
        found.append(weights)
    return torch.cat(found)


@pytest.mark.parametrize("recompute", [None, "all"], ids=["kept", "recomputed"])
def test_warm_calls(recompute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third call on launches are fired as they were noted: for other tensors and routing, the same bits."""
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")
    monkeypatch.setattr(wgrad, "PIECE", 16)
    torch.manual_seed(5)

    def case() -> dict[str, torch.Tensor]:
        sizes = {"hidden_states": (T, 40), "gate_up_proj": (E, 32, 40), "down_proj": (E, 40, 16)}
        made = {name: torch.randn(size).bfloat16() for name, size in sizes.items()}
        return made | {
            "topk_weights": torch.rand(T, K),
            "topk_ids": torch.randint(-1, E, (T, K)),
            "grad": torch.randn(T, 40),
        }

    def gradients(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = {name: given[name].clone().requires_grad_() for name in list(given)[:4]}
        moe_ops.fused_experts(**leaves, topk_ids=given["topk_ids"], recompute=recompute).backward(
            given["grad"].bfloat16()
        )
        return [leaf.grad for leaf in leaves.values()]

    for launcher in LAUNCHERS.values():
        launcher.forget()
    for _ in range(2):
        gradients(case())
    changed = case()
    warm = gradients(changed)
    for launcher in LAUNCHERS.values():
        launcher.forget()
    for found, wanted in zip(warm, gradients(changed), strict=True):
        assert torch.equal(found, wanted)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_before": {"weight_on_input": True},
    "interleaved": {"glu_layout": "interleaved"},
    "not_gated": {"glu_layout": "none", "activation": "relu2"},
    "separate": {},
    "bias": {},
    "bias_weight_before": {"weight_on_input": True},
    "recomputed": {"recompute": "all"},
    "recomputed_bias": {"recompute": "activation"},
    "recomputed_weight_before": {"recompute": "activation", "weight_on_input": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pairs dropped, an expert without rows."""
    torch.manual_seed(3)
    options, I = dict(LAYERS[name]), 16
    width = I if name in ("not_gated", "separate") else 2 * I
    leaves = {
        "hidden_states": torch.randn(T, H), "gate_up_proj": torch.randn(E, width, H) * 0.2,
        "down_proj": torch.randn(E, H, I) * 0.2, "topk_weights": torch.rand(T, K),
    }  # fmt: skip
    if name == "separate":
        leaves["up_proj"] = torch.randn(E, width, H) * 0.2
    if "bias" in name:
        leaves |= {"gate_up_bias": torch.randn(E, width), "down_bias": torch.randn(E, H)}
    ids = torch.randint(0, E - 1, (T, K))
    ids[1], ids[4, 0] = -1, E
    grad = torch.randn(T, H)

    def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        given = {key: value.to(dtype).requires_grad_() for key, value in leaves.items()}
        moe_ops.fused_experts(topk_ids=ids, **given, **options).backward(grad.to(dtype))
        return {key: value.grad for key, value in given.items()}

    wanted = gradients(torch.float64)
    monkeypatch.setattr(choice, "DEFAULT_BACKEND", "triton")  # a request by argument does not reach the backward
    found = gradients(torch.float32)
    for key, value in wanted.items():
        assert_rounded(found[key], value)
