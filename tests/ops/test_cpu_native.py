"""What C++ computes between the products of a layer on a CPU, beside float64 and beside plain tensor code."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_ops
from meta.activations import ACTIVATIONS, resolve_activation, split_glu
from meta.operands import Glu
from meta.routing import ROUTINGS, first_k, route
from moe_ops import plans
from moe_ops.backends import cpu
from moe_ops.kernels import cpu_build, cpu_costs, cpu_library, cpu_native
from moe_ops.kernels.cpu import combine
from tests.ops.errors import assert_accurate, assert_rounded
from tests.ops.layers import VARIANTS, Variant, dense_formula

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-42, -1e-42, 88.5, 90.0, -88.5, -90.0, -103.0, -110.0, 3e38, -3e38)


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """With the C++, and where it cannot be built."""
    if not request.param:
        monkeypatch.setattr(cpu_native, "library", lambda: None)
    return request.param


# ---------------------------------------------------------------------------------------------------------- selection


def scores_of(kind: str, tokens: int, experts: int) -> torch.Tensor:
    """Scores of a kind that selecting must not confuse."""
    generator = torch.Generator().manual_seed(experts)
    scores = torch.randn(tokens, experts, generator=generator)
    if kind == "ties":
        return (2 * scores).round() / 2
    if kind == "zeros":
        return torch.where(torch.rand(scores.shape, generator=generator) < 0.5, -0.0, 0.0)
    if kind == "special":
        for value in SPECIAL[:7]:
            scores[torch.rand(scores.shape, generator=generator) < 0.15] = value
    return scores


@pytest.mark.parametrize("kind", ["distinct", "ties", "zeros", "special"])
@pytest.mark.parametrize("experts", [8, 100], ids=str)
def test_of_equal_scores_the_same_are_selected(kind: str, experts: int) -> None:
    """NaN first, of equals the one with the lowest id."""
    scores = scores_of(kind, 300, experts)
    for top_k in (1, 4, 8, experts):
        weights, ids = cpu_native.selected(scores, scores + 1, top_k, False)
        assert torch.equal(ids, first_k(scores.double(), top_k).int())
        assert torch.equal(weights.nan_to_num(), (scores + 1).gather(1, ids.long()).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [3, 1024], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routers_have_the_bits_of_plain_tensor_code(routing: str, tokens: int, dtype: torch.dtype) -> None:
    """So that a model's own router in eager code and the operator in compiled code agree."""
    logits = (3 * torch.randn(tokens, 8, generator=torch.Generator().manual_seed(3))).to(dtype)
    groups = {"num_groups": 4, "topk_groups": 2} if ROUTINGS[routing].group else {}
    for top_k in (1, 2, 3):
        weights, ids = moe_ops.fused_topk(logits, top_k=top_k, routing=routing, **groups)
        wanted = route(logits, top_k=top_k, routing=routing, **groups)
        assert torch.equal(weights, wanted[0]) and torch.equal(ids, wanted[1])


# --------------------------------------------------------------------------------------------------------- activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["concat", "interleaved", "none", "separate"])
@pytest.mark.parametrize("name", cpu_native._GATES)
def test_activations_are_those_of_float64(name: str, layout: str, dtype: torch.dtype) -> None:
    row, alpha, limit = resolve_activation("fused_experts", name, None, None)
    generator = torch.Generator().manual_seed(0)
    columns = 37  # no whole number of vectors
    widths = [columns] * 2 if layout == "separate" else [columns if layout == "none" else 2 * columns]
    results = [(6 * torch.randn(50, width, generator=generator)).to(dtype) for width in widths]
    if dtype not in cpu_library.DTYPES:
        pytest.skip("this compiler has no fp16")
    out = cpu_native.activate(results, Glu(name, alpha, limit, layout), torch.empty(50, columns, dtype=dtype))
    wide = [result.double() for result in results]
    exact = row.eager(*(wide if layout == "separate" else split_glu(wide[0], layout)), alpha, limit)
    plain = [result.float() for result in results]
    eager = row.eager(*(plain if layout == "separate" else split_glu(plain[0], layout)), alpha, limit).to(dtype)
    assert out is not None
    assert_accurate(out, exact, eager)


@pytest.mark.parametrize("name", cpu_native._GATES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "alone"])
def test_activations_of_what_is_not_finite_are_what_torch_gives(name: str, gated: bool) -> None:
    row, alpha, limit = resolve_activation("fused_experts", name, None, None)
    gate = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL)).view(1, -1)
    up = torch.tensor(SPECIAL).repeat(len(SPECIAL)).view(1, -1)
    results = [gate, up] if gated else [gate]
    layout = "separate" if gated else "none"
    out = cpu_native.activate(results, Glu(name, alpha, limit, layout), torch.empty_like(gate))
    if name == "gelu":  # torch's, on a CPU, is inf of 3e38 and NaN of inf
        wanted = 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * (up if gated else 1.0)
    else:
        wanted = row.eager(gate, up if gated else None, alpha, limit)
    torch.testing.assert_close(out, wanted, equal_nan=True, atol=1e-36, rtol=1e-6)


def test_gelu_is_exact_to_its_tail() -> None:
    """Where 1 + erf(x) would be what rounding leaves of it."""
    x = torch.linspace(-12, 12, 100_003).view(1, -1)
    out = cpu_native.activate([x], Glu("gelu", 1.0, INF, "none"), torch.empty_like(x))
    exact = 0.5 * x.double() * torch.special.erfc(-x.double() / 2**0.5)
    assert out is not None
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=0)
    torch.testing.assert_close(out[x > -2].double(), exact[x > -2], rtol=1e-6, atol=0)


def test_the_exponential_is_exact_to_two_units_of_the_last_place() -> None:
    x = torch.linspace(-87, 87, 1_000_003).view(1, -1)
    out = cpu_native.activate([x], Glu("silu", 1.0, INF, "none"), torch.empty_like(x))
    exact = x.double() / (1 + (-x.double()).exp())
    assert out is not None
    error = (out.double() - exact).abs() / torch.finfo(torch.float32).eps / exact.abs().clamp(min=1e-30)
    assert error.max() < 2.5


# -------------------------------------------------------------------------------------------------------- combination


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("hidden", [16, 1100], ids=["few", "many"])
def test_combine_sums_in_fp32_and_rounds_once(hidden: int, weighted: bool, dtype: torch.dtype, native: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(21, hidden, generator=generator).to(dtype)
    places = torch.randperm(21, generator=generator).view(7, 3)
    weights = torch.rand(7, 3, generator=generator) if weighted else None
    added = torch.randn(7, hidden, generator=generator)
    exact = (rows.double()[places] * (1.0 if weights is None else weights.double().unsqueeze(2))).sum(1)
    for shared in (None, added.to(dtype), added):
        wanted = exact if shared is None else exact + shared.double()
        assert_rounded(combine(rows, places, weights, shared), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [0.5, -0.3, 0.0, torch.pi, INF, -INF, NAN, 1e-20], ids=str)
def test_a_row_that_is_not_finite_is_weighted_as_any(weight: float, dtype: torch.dtype, native: bool) -> None:
    rows = torch.tensor([[INF, -INF, NAN, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, INF]]).to(dtype)
    weights, places = torch.tensor([[weight, 0.25]]), torch.tensor([[0, 1]])
    wanted = (rows.float()[places] * weights.unsqueeze(2)).sum(1).to(dtype)
    torch.testing.assert_close(combine(rows, places, weights), wanted, equal_nan=True, rtol=0, atol=0)


def test_nan_of_any_bits_stays_nan() -> None:
    """Rounding to bf16 adds to bits, of which those of a NaN may all be set."""
    weights = torch.tensor([[0x7FFFFFFF, -1]], dtype=torch.int32).view(torch.float32)
    assert combine(torch.ones(2, 40).bfloat16(), torch.tensor([[0, 1]]), weights).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropped_pairs_are_left_out_whatever_they_weigh(dtype: torch.dtype, native: bool) -> None:
    rows = torch.tensor([[1.0, 2.0], [NAN, NAN]]).to(dtype)
    places = torch.tensor([[0, -1], [2, 0], [-5, 7]])
    weights = torch.tensor([[0.5, NAN], [INF, 2.0], [1.0, 1.0]])
    assert combine(rows, places, weights).tolist() == [[0.5, 1.0], [2.0, 4.0], [0.0, 0.0]]


# -------------------------------------------------------------------------------------------------------------- layer


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.scheme is None])
def test_layers_without_a_compiler_are_as_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = VARIANTS[name].build()
    monkeypatch.setattr(cpu_native, "library", lambda: None)
    out = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    assert_accurate(out, dense_formula(layer.float64()), dense_formula(layer.wide(out.dtype)))


def test_layers_of_plain_weights_are_computed_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it goes through Python's products."""
    monkeypatch.setattr(cpu, "_rows", None)
    for name in ("plain", "bf16", "bias", "separate_bias", "weight_on_input", "expert_map", "batched"):
        layer = VARIANTS[name].build()
        out = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
        assert_accurate(out, dense_formula(layer.float64()), dense_formula(layer.wide(out.dtype)))


@pytest.mark.parametrize("rows", range(1, 10), ids=str)
@pytest.mark.parametrize("columns", [1, 15, 64, 200], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_few_rows_are_exact(dtype: torch.dtype, columns: int, rows: int) -> None:
    """With the same bits for a row, however many there are."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(3, n, columns, generator=generator).to(dtype) for n in (rows, 37))

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((*x.shape[:2], 37), NAN, dtype=dtype)
        places = weights.data_ptr(), x.data_ptr(), out.data_ptr()
        cpu_library.library().moe_few(cpu_library.DTYPES[dtype], *places, 3, x.shape[1], 37, columns, 2)
        return out

    out = product(x)
    exact = x.double() @ weights.double().transpose(1, 2)
    assert_accurate(out, exact, x @ weights.transpose(1, 2))
    for row in range(rows):
        assert torch.equal(product(x[:, row : row + 1].contiguous())[:, 0], out[:, row])


@pytest.mark.parametrize("name", ["plain", "bias", "bf16", "separate_bias", "expert_map", "weight_on_input", "batched"])
@pytest.mark.parametrize("few", [0, 1, 3, 100], ids=str)
def test_how_many_rows_are_few_changes_no_result(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native, "costs_of", lambda weight: cpu_costs.OfWeight(few, None))
    layer = VARIANTS[name].build()
    out = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    assert_accurate(out, dense_formula(layer.float64()), dense_formula(layer.wide(out.dtype)))


@pytest.mark.parametrize("stored", ["transposed", "every_other_expert", "behind_a_number", "expanded_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_may_lie_anywhere(stored: str, dtype: torch.dtype, native: bool) -> None:
    layer = Variant(bias=True, dtype=dtype).build()
    for name in ("gate_up_proj", "down_proj"):
        weight = layer.tensors[name]
        if stored == "transposed":
            layer.tensors[name] = weight.transpose(1, 2).contiguous().transpose(1, 2)
        elif stored == "every_other_expert":
            layer.tensors[name] = weight.repeat_interleave(2, dim=0)[::2]
        elif stored == "behind_a_number":
            layer.tensors[name] = torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape)
    if stored == "expanded_bias":
        for name in ("gate_up_bias", "down_bias"):
            layer.tensors[name] = layer.tensors[name][:1].expand_as(layer.tensors[name])
    out = torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu")
    assert_accurate(out, dense_formula(layer.float64()), dense_formula(layer.wide(dtype)))


def test_threads_change_no_bit() -> None:
    layer = Variant(T=700, H=256, I=96, dtype=torch.bfloat16).build()
    results = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results.append(torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options, backend="cpu"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# -------------------------------------------------------------------------------------------------------------- build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu_build, "user_directory", lambda: tmp_path)
    return tmp_path


def test_a_library_is_built_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = home / "source.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    assert cpu_build.built(source).answer() == 42
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: pytest.fail("compiled again"))
    assert cpu_build.built(source).answer() == 42
    assert [path.suffix for path in (home / "cpu").iterdir()] == [".so"]


def test_another_processor_has_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = home / "source.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    cpu_build.built(source)
    monkeypatch.setattr(cpu_build, "_processor", lambda: "flags: none")
    cpu_build.built(source)
    assert len(list((home / "cpu").iterdir())) == 2


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (None, "none of g\\+\\+, clang\\+\\+, c\\+\\+ is on PATH"),
        ("false", "false: exit status 1"),
        ("no-such-compiler", "no-such-compiler"),
    ],
    ids=["none", "fails", "missing"],
)
def test_why_there_is_no_library_is_said(compiler, words, home, monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if compiler is None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", compiler)
    cpu_library.library.cache_clear()
    layer = VARIANTS["plain"].build()
    try:
        with pytest.warns(UserWarning, match=f"C\\+\\+ cannot be built: .*{words}"):
            out = moe_ops.fused_experts(**layer.tensors)
    finally:
        cpu_library.library.cache_clear()
    assert_rounded(out, dense_formula(layer.float64()))


@pytest.mark.parametrize("compiler", ["env g++", "  ", ""], ids=["two_words", "blank", "empty"])
def test_a_compiler_may_be_several_words_or_none(compiler: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    source = home / "source.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    assert cpu_build.built(source).answer() == 42


def test_users_without_a_home_have_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(cpu_build.BuildError, match="home directory"):
        cpu_build.built(Path(cpu_native.__file__).with_name("cpu.cpp"))


def test_what_a_compiler_says_is_told(home: Path) -> None:
    source = home / "source.cpp"
    source.write_text("int answer() { return nothing; }")
    with pytest.raises(cpu_build.BuildError, match=r"error: .*nothing"):
        cpu_build.built(source)


def test_where_nothing_can_be_written_there_is_no_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "user_directory", lambda: home / "file" / "directory")
    (home / "file").write_text("")
    with pytest.raises(cpu_build.BuildError, match=f"{os.sep}file{os.sep}"):
        cpu_build.built(Path(cpu_native.__file__).with_name("cpu.cpp"))


def test_every_activation_of_a_table_is_one_of_the_others() -> None:
    assert set(cpu_native._GATES) < set(ACTIVATIONS)
    assert plans.user_directory() == cpu_build.user_directory()
