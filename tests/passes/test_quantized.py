"""Quantised weights in models: every layer runs on its stored bytes, or is left as it is, with a reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.apart import overlap
from compile_passes.passes import FUSE, run
from meta import formats, schemes
from moe_ops import quantized
from moe_ops.integrations.containers import read
from moe_ops.quantized import QuantizedWeight
from tests.corpus.families import build, one_layer, result, tokens

SCHEMES = ("fp8_channel", "int4_w4a16", "mxfp4")
FAMILIES = ("qwen3_moe", "gpt_oss")
#: gpt-oss compiles slowly: in its own format.
MODELS = [
    *(("qwen3_moe", scheme) for scheme in SCHEMES), ("qwen3_moe", "fp8_channel static"), ("gpt_oss", "mxfp4"),
]  # fmt: skip
SIZES = (2, 7, 64)


def model(family: str, scheme: str, form: str = "grouped_mm", dtype: torch.dtype = torch.float32) -> nn.Module:
    """``scheme``, with static scales of its activations where " static" follows."""
    pytest.importorskip("moe_ops.integrations.transformers")
    made, (name, _, static) = build(family, dtype, form, **one_layer(family)).eval(), scheme.partition(" ")
    moe_ops.quantize_(made, name, inputs=[{"input_ids": tokens(2, 9, seed=3)}] if static else None)
    return made


def run_eagerly(module: nn.Module, size: int) -> Tensor:
    """The logits with our experts, which the same operators compute."""
    module.set_experts_implementation("moe_ops")
    with torch.no_grad():
        return result(module(input_ids=tokens(1, size)))


@pytest.mark.parametrize(("family", "scheme"), MODELS)
def test_a_model_runs_on_its_bytes(family: str, scheme: str) -> None:
    """One graph for all sizes, no node that holds dequantised experts, the bits of our experts called eagerly."""
    module = model(family, scheme)
    wanted = {size: run_eagerly(module, size) for size in SIZES}
    module.set_experts_implementation("grouped_mm")
    graphs: list[fx.Graph] = []
    torch.compiler.reset()
    counters.clear()
    options = {"pre_grad_custom_pass": graphs.append}
    with torch.no_grad():
        compiled = torch.compile(module, backend="moe_ops_eager", fullgraph=True, dynamic=True, options=options)
        for size in SIZES:
            assert torch.equal(result(compiled(input_ids=tokens(1, size))), wanted[size]), size
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["moe_ops"]["fused"] == 1 and not counters["moe_ops"]["refused"]
    (graph,) = graphs
    wrappers = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), QuantizedWeight)]
    assert len(wrappers) == 2 and all(node.op == "placeholder" for node in wrappers)
    assert {user.target for node in wrappers for user in node.users} == {getattr}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_implementation_takes_them(family: str) -> None:
    """Captured as it stands; no further from the float model's own code than the format is."""
    module = model(family, "mxfp4", "moe_ops")
    wanted = run_eagerly(module, 7)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend="moe_ops_eager", fullgraph=True)
        assert torch.equal(result(compiled(input_ids=tokens(1, 7))), wanted)
        module.set_experts_implementation("grouped_mm")
        own = result(module(input_ids=tokens(1, 7)))
    torch.testing.assert_close(wanted, own, rtol=1e-4, atol=1e-4)


@torch.library.custom_op("hub_of_the_test::w8a8_block_dynamic_fp8_matmul_grouped", mutates_args=())
def hub_product(
    rows: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, tokens_per_expert: Tensor, block_size: list[int]
) -> Tensor:
    """By the interface of the kernels that transformers calls for FP8 experts."""
    wide = (weight.float() * scale.repeat_interleave(64, 1).repeat_interleave(64, 2)).transpose(1, 2)
    return torch._grouped_mm(rows.bfloat16(), wide.bfloat16(), offs=offsets).to(rows.dtype)


@hub_product.register_fake
def _(rows: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


class Hub(nn.Module):
    """Sorted rows, products by the kernel library."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"w1": (8, 128, 64), "w2": (8, 64, 64)}
        for name, (E, N, K) in shapes.items():
            self.register_buffer(name, torch.randn(E, N, K, generator=generator).to(torch.float8_e4m3fn))
            self.register_buffer(f"{name}_scale", torch.rand(E, N // 64, K // 64, generator=generator) / 8)
        self.router = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        order = ids.flatten().argsort(stable=True)
        counts = F.one_hot(ids.flatten(), 8).sum(0).int()
        places = (counts.cumsum(0).int(), counts, [64, 64])
        gate, up = hub_product(x[order // 2], self.w1, self.w1_scale, *places).chunk(2, -1)
        rows = hub_product(F.silu(gate) * up, self.w2, self.w2_scale, *places) * weights.flatten()[order, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return rows[back].view(-1, 2, 64).sum(1)


def test_products_of_a_kernel_library_are_refused_by_name() -> None:
    module, x = Hub(), torch.randn(5, 64)
    (refused,) = moe_ops.explain(module, x).refused
    assert "hub_of_the_test::w8a8_block_dynamic_fp8_matmul_grouped of a kernel library" in refused.reason
    assert "set_experts_implementation('moe_ops')" in refused.cure
    assert "rows = hub_product" in refused.source
    with torch.no_grad():
        assert torch.equal(torch.compile(module, backend="moe_ops_eager", fullgraph=True)(x), module(x))


def quantised(values: Tensor, scheme: str = "mxfp4") -> nn.Parameter:
    stored, *scales = moe_ops.quantize_weight(values, scheme=scheme)
    return nn.Parameter(QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32), requires_grad=False)


class Experts(nn.Module):
    """Every expert for every token, weighed by scores."""

    def __init__(self, schemes: tuple[str, str, str] = ("mxfp4", "mxfp4", "mxfp4")) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((8, 96, 64), (8, 96, 64), (8, 64, 96))
        values = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
        self.w1, self.w3, self.w2 = (quantised(*pair) for pair in zip(values, schemes, strict=True))
        self.w13 = quantised(torch.cat(values[:2], 1), schemes[0])
        self.w2_transposed = quantised(values[2].transpose(1, 2))
        self.router = nn.Linear(64, 8, bias=False)
        self.router.weight.data.copy_(torch.randn(8, 64, generator=generator))

    def rows(self, x: Tensor) -> Tensor:
        gate, up = (torch.einsum("th,eih->tei", x, weight) for weight in (self.w1, self.w3))
        return torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        scores = torch.zeros(x.shape[0], 8).scatter(1, ids, weights)
        return torch.einsum("teh,te->th", self.rows(x), scores)


class UpFirst(Experts):
    def rows(self, x: Tensor) -> Tensor:
        up, gate = torch.einsum("th,eih->tei", x, self.w13).chunk(2, -1)
        return torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)


class Halves(Experts):
    def rows(self, x: Tensor) -> Tensor:
        gate, up = (torch.einsum("th,eih->tei", x, half) for half in self.w13.chunk(2, 1))
        return torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2)


class Across(Experts):
    def rows(self, x: Tensor) -> Tensor:
        gate, up = (torch.einsum("th,eih->tei", x, weight) for weight in (self.w1, self.w3))
        return torch.einsum("tei,eih->teh", F.silu(gate) * up, self.w2_transposed)


class Factors(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = (nn.Parameter(torch.full(shape, 0.01), False) for shape in ((8, 2, 96), (8, 64, 2)))

    def rows(self, x: Tensor) -> Tensor:
        gate, up = (torch.einsum("th,eih->tei", x, weight) for weight in (self.w1, self.w3))
        return torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w2 + self.B @ self.A)


class Normed(Experts):
    """A norm of every expert's result, of the experts that a token selected."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.w13[flat], x.repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        rows = F.rms_norm(torch.bmm(self.w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1), (64,))
        return (rows * weights.reshape(-1, 1)).view(-1, 2, 64).sum(1)


def compiled(module: nn.Module, grad: bool = False) -> tuple[Tensor, Tensor]:
    """What eager code gives, and the compiled module."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), requires_grad=grad)
    torch.compiler.reset()
    counters.clear()
    with torch.set_grad_enabled(grad):
        return module(x), torch.compile(module, backend="moe_ops_eager", fullgraph=True, dynamic=True)(x)


def test_gate_and_up_apart_are_fused() -> None:
    own, got = compiled(Experts())
    assert counters["moe_ops"]["fused"] == 1
    torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["mxfp4", "int4_w4a16", "nvfp4"])
def test_code_between_experts_and_combine_stays(scheme: str) -> None:
    module = Normed((scheme,) * 3)
    own, got = compiled(module)
    assert counters["moe_ops"]["staged"] == 1 and not counters["moe_ops"]["refused"]
    torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "scheme", [name for name, row in schemes.SCHEMES.items() if row.quantized and row.rows is not None]
)
def test_code_between_experts_that_quantise_activations_stays(scheme: str) -> None:
    """To the bit what the stage operators give, and near the weights' own forward, which has its activations whole."""
    module = Normed((scheme,) * 3)
    own, got = compiled(module)
    assert counters["moe_ops"]["staged"] == 1 and not counters["moe_ops"]["refused"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights, ids = module.router(x).softmax(-1).topk(2, -1)
        given = {"num_experts": 8, "scheme": scheme}
        prepared = moe_ops.prepare(x, torch.ones_like(weights), ids, **given)
        first, second = (read(weight) for weight in (module.w13, module.w2))
        (gate_up, *first_scales), (down, *second_scales) = (
            [part.of(weight) for part in (found.data, *found.scales)]
            for found, weight in ((first, module.w13), (second, module.w2))
        )
        result = moe_ops.experts(
            prepared, gate_up, down, scheme=scheme, gate_up_scales=first_scales, down_scales=second_scales,
            out_dtype=torch.float32,
        )  # fmt: skip
        rows = F.rms_norm(result, (64,))
        want = moe_ops.finalize(rows, prepared._replace(topk_weights=weights))
    assert torch.equal(got, want)
    assert (got - own).norm() < 0.1 * own.norm()


class Rescaled(Experts):
    """Writes a scale between the products and the combine."""

    def __init__(self) -> None:
        super().__init__(("fp8_channel",) * 3)

    def rows(self, x: Tensor) -> Tensor:
        rows = super().rows(x)
        self.w2.scale.mul_(2)
        return rows


def test_memory_of_a_wrapper_is_that_of_its_parts() -> None:
    weight, other = (quantised(torch.ones(2, 4, 8), "fp8_channel") for _ in range(2))
    assert overlap(weight, weight.scale[1:]) and overlap(weight.stored, weight.transpose(1, 2))
    assert not overlap(weight, other) and not overlap(weight.stored, weight.scale)


def test_a_scale_that_is_written_inside_is_seen() -> None:
    module = Rescaled()
    again, x = copy.deepcopy(module), torch.randn(5, 64)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        own, got = module(x), torch.compile(again, backend="moe_ops_eager", fullgraph=True)(x)
    assert torch.equal(got, own) and torch.equal(module.w2.scale, again.w2.scale)
    assert counters["moe_ops"]["refused"] == 1


class StaticNormed(Normed):
    """With scales of activations that were calibrated before."""

    def __init__(self) -> None:
        super().__init__(("fp8_channel",) * 3)
        for name in ("w13", "w2"):
            weight = getattr(self, name)
            scales = [weight.scale, torch.ones(8, 1, 1)]
            whole = QuantizedWeight(weight.stored, scales, scheme="fp8_channel", dtype=torch.float32)
            setattr(self, name, nn.Parameter(whole, requires_grad=False))


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "schemes": (lambda: Experts(("mxfp4", "mxfp4", "fp8_channel")), "in different schemes: fp8_channel, mxfp4"),
    "up_first": (UpFirst, "its up half stands where the operators expect the gate"),
    "halves_in_the_graph": (Halves, "the graph takes parts of what is quantised"),
    "across": (Across, "contracts the dimension along which each scale has its own row"),
    "static": (StaticNormed, "its activations have a static scale, and the model's own code stays between the experts"),
    "low_rank": (Factors, "in different schemes: mxfp4, no scheme"),
}


class Broken(Experts):
    """Its graph ends at every expert, so that the weights' operators run between graphs."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in range(8):
            if x.sum().item() < 1e9:
                x = x + F.silu(x @ self.w1[expert].T) @ self.w2[expert].T
        return x


def test_operators_between_graphs_run_as_they_are() -> None:
    module, x = Broken(), torch.randn(5, 64)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="eager")(x), module(x))


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_proved_is_left_as_it_is(case: str) -> None:
    make, reason = LEFT[case]
    own, got = compiled(make())
    assert torch.equal(got, own)
    assert counters["moe_ops"]["refused"] == 1 and not counters["moe_ops"]["errors"]
    assert re.search(re.escape(reason), _refusal(make()))


def _refusal(module: nn.Module) -> str:
    """Why the pass leaves the block."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend(run(FUSE, gm.graph).refused)
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(torch.randn(5, 64))
    return str(found[0])


def test_a_block_whose_gradient_is_recorded_is_left() -> None:
    """Its own code has one, the operators have none for quantised weights."""
    own, got = compiled(Experts(), grad=True)
    assert counters["moe_ops"]["refused"] == 1
    assert torch.equal(got, own) and got.requires_grad


@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
def test_under_autocast_rows_are_rounded_and_bytes_stay(form: str) -> None:
    module = model("qwen3_moe", "mxfp4", form)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = result(module(input_ids=tokens(1, 7)))
        got = result(torch.compile(module, backend="moe_ops_eager", fullgraph=True)(input_ids=tokens(1, 7)))
    assert counters["moe_ops"]["fused"] == 1
    torch.testing.assert_close(got, own, rtol=2e-2, atol=2e-2)


def test_inductor_gets_the_bytes() -> None:
    """The operator's operands are inputs of the compiled graph."""
    from torch._inductor import config

    graphs: list[fx.Graph] = []
    module = Experts(("fp8_channel",) * 3)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    with torch.no_grad(), config.patch(post_grad_custom_post_pass=graphs.append):
        got = torch.compile(module, backend="moe_ops", fullgraph=True)(x)
        torch.compiler.reset()
        wanted = torch.compile(module, backend="moe_ops_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    (call,) = [node for node in graphs[0].nodes if "moe_ops" in str(node.target)]
    weights = [node for node in call.all_input_nodes if node.meta["val"].dtype == torch.float8_e4m3fn]
    assert len(weights) == 3 and all(node.op == "placeholder" for node in weights)
    shapes = [tuple(node.meta["val"].shape) for node in graphs[0].nodes if isinstance(node.meta.get("val"), Tensor)]
    assert shapes.count((8, 96, 64)) == 2


#: Code that is not fused, of a weight ``[8, N, K]``.
UNFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda weight: weight.float(),
    "one": lambda weight: weight[3].float(),
    "gathered": lambda weight: weight[torch.tensor([[0, 3], [7, 7]])].float(),
}


#: Every use of every scheme, and either of them with both dtypes of its scales.
EXPONENTS = [
    (use, scheme, ("bytes", "e8m0")[(row + column) % 2])
    for row, use in enumerate(UNFUSED)
    for column, scheme in enumerate(("mxfp4", "mxfp4_a8", "mxfp8"))
]


@pytest.mark.parametrize(("use", "scheme", "scales"), EXPONENTS)
def test_inductor_decodes_exponents(use: str, scheme: str, scales: str) -> None:
    """It makes no tensor of e8m0 on a CPU, and views none."""
    dtype = torch.uint8 if scales == "bytes" else torch.float8_e8m0fnu
    stored, scale = moe_ops.quantize_weight(torch.randn(8, 96, 64), scheme=scheme)
    weight = QuantizedWeight(stored, [scale.view(dtype)], scheme=scheme, dtype=torch.float32)
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(UNFUSED[use], backend="inductor", fullgraph=True)(weight)
    assert torch.equal(got, UNFUSED[use](weight))


@pytest.mark.parametrize(("scheme", "N", "K"), [("fp8_block128", 128, 192), ("mxfp8", 64, 48)])
def test_inductor_decodes_a_last_group_that_is_cut_short(scheme: str, N: int, K: int) -> None:
    """On a CPU it leaves out what is behind the last whole group of an index that a group divides."""
    stored, *scales = moe_ops.quantize_weight(torch.randn(2, N, K), scheme=scheme)
    weight = QuantizedWeight(stored, scales, scheme=scheme, dtype=torch.float32)
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(lambda weight: weight * 2, backend="inductor", fullgraph=True)(weight)
    assert torch.equal(got, 2 * weight.dequantize())


def test_compiled_code_is_kept_for_the_sources_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's caches on disk ask a weight alone what code that was compiled around it depends on."""
    stored, scale = moe_ops.quantize_weight(torch.randn(2, 32, 64), scheme="mxfp4")
    weight = QuantizedWeight(stored, [scale], scheme="mxfp4")
    keys = {weight._stable_hash_for_caching()}
    for module in (schemes, formats, quantized):
        quantized._decoding.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", __file__)
            keys.add(weight._stable_hash_for_caching())
    quantized._decoding.cache_clear()
    assert len(keys) == 4 and weight._stable_hash_for_caching() in keys


def test_a_gathered_weight_is_trained_around() -> None:
    """The block is left, as its gradient is recorded; Inductor computes what eager code does."""
    module = Normed()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.compiler.reset()
    results = module(x), torch.compile(module, backend="moe_ops", fullgraph=True)(x)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
    scale = gradients[0].abs().max().item()  # 45: numbers that nearly cancel have the rounding of those that they sum
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * scale)


def test_wrappers_are_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by AOTAutograd at every call: it gets plain tensors, whose memory stays as a parameter's does."""
    from compile_passes import compat

    given: list[tuple[fx.GraphModule, Any]] = []
    inductor = compat.inductor
    monkeypatch.setattr(
        compat, "inductor", lambda gm, inputs, **more: given.append((gm, inputs)) or inductor(gm, inputs, **more)
    )
    module, x = Experts(("mxfp4",) * 3), torch.randn(5, 64)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(module, backend="moe_ops", fullgraph=True)(x)
    ((gm, inputs),) = given
    placeholders = gm.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(inputs) and not any(isinstance(tensor, QuantizedWeight) for tensor in inputs)
    parts = [node for node in placeholders if re.search(r"_w[123]__", node.name)]
    assert len(parts) == 6  # three weights' codes and scales
    assert all(node.meta["tensor_dict"].get("_dynamo_static_input_type") for node in parts)
    sources = [node._dynamo_source.name for node in placeholders]
    names = sources if isinstance(sources[0], str) else [node._dynamo_source.name() for node in placeholders]
    assert len(set(names)) == len(names)


WHOLE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "the_weight": (lambda x, weight: x @ weight, (8, 5, 96)),
    "an_attribute_that_is_no_part": (lambda x, weight: x @ weight.mT, (8, 5, 64)),
    "of_a_plain_tensor": (lambda x, weight: x.mT @ weight, (8, 96, 5)),
    "a_part_beside_the_weight": (lambda x, weight: x @ weight + weight.stored.float().sum(), (8, 5, 96)),
}


@pytest.mark.parametrize("read", WHOLE)
def test_wrappers_that_are_read_otherwise_stay_whole(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from compile_passes import compat

    given: list[Any] = []
    monkeypatch.setattr(compat, "inductor", lambda gm, inputs, **more: given.extend(inputs) or gm.forward)
    function, shape = WHOLE[read]
    weight, x = nn.Parameter(quantised(torch.randn(8, 96, 64), "mxfp4"), requires_grad=False), torch.randn(shape)
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(function, backend="moe_ops", fullgraph=True)(x, weight)
        torch.testing.assert_close(got, function(x, weight))
    assert sum(isinstance(tensor, QuantizedWeight) for tensor in given) == 1


class Beside(Experts):
    """One weight is read beside the block, too, so that its wrapper stays an input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.w2[0].sum()


@pytest.mark.parametrize("make", [Experts, Beside], ids=["in_parts", "one_whole"])
def test_a_model_that_ran_is_cast(make: type[Experts]) -> None:
    """Nothing that stays of the compilation holds a weak reference to a weight, with which torch casts none."""
    module, x = make(("fp8_channel",) * 3), torch.randn(5, 64)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(module, backend="moe_ops", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        module.bfloat16()
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert counters["moe_ops"]["fused"] == 1


def test_a_graph_that_is_not_dynamos_keeps_its_wrappers() -> None:
    """Nothing says where its inputs come from, so nothing could be said of parts of them."""
    from compile_passes.unwrap import in_parts

    graph, given = fx.Graph(), list[Any]()
    weight = graph.placeholder("weight")
    weight.meta["example_value"] = quantised(torch.randn(8, 96, 64), "mxfp4")
    graph.output(graph.call_function(getattr, (weight, "stored")))
    gm = fx.GraphModule(nn.Module(), graph)
    in_parts(gm, [weight.meta["example_value"]], lambda gm, inputs: given.extend(inputs) or gm.forward)
    assert [type(tensor) for tensor in given] == [QuantizedWeight]


class Added(Experts):
    """Reads a scale of a weight beside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.w2.scale.float().sum()


def test_a_part_that_the_program_reads_comes_in_once() -> None:
    module, x = Added(("fp8_channel",) * 3), torch.randn(5, 64)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        got = torch.compile(module, backend="moe_ops", fullgraph=True)(x)
        torch.compiler.reset()
        wanted = torch.compile(module, backend="moe_ops_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert counters["moe_ops"]["fused"] == 2  # once for each backend


def test_other_weights_in_their_place() -> None:
    """A parameter that is exchanged, or written, counts at the next call, and compiles nothing."""
    module, other, x = Experts(("mxfp4",) * 3), Experts(("mxfp4",) * 3), torch.randn(5, 64)
    for name in ("w1", "w2", "w3"):
        assert getattr(module, name).stored.data_ptr() != getattr(other, name).stored.data_ptr()
        getattr(other, name).stored.copy_(getattr(other, name).stored.flip(0))
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(module, backend="moe_ops", fullgraph=True)
    with torch.no_grad():
        before = compiled(x)
        module.w1, module.w3 = other.w1, other.w3
        module.w2.copy_(other.w2)
        after = compiled(x)
        torch.testing.assert_close(after, other(x), rtol=1e-4, atol=1e-4)
    assert not torch.equal(before, after) and counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_export_keeps_the_wrappers(scheme: str) -> None:
    module, x = Experts((scheme,) * 3), torch.randn(5, 64)
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        assert isinstance(program.state_dict["w1"], QuantizedWeight)
        assert torch.equal(program.module()(x), module(x))
        torch.testing.assert_close(program.run_decompositions().module()(x), module(x))


def test_transformers_saves_plain_tensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module, other = model("qwen3_moe", "mxfp4"), model("qwen3_moe", "mxfp4")
    for parameter in other.parameters():
        if not isinstance(parameter, QuantizedWeight):
            parameter.data.zero_()
        else:
            parameter.stored.zero_()
    module.save_pretrained(tmp_path, save_original_format=False)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), strict=False)
    assert torch.equal(run_eagerly(other, 7), run_eagerly(module, 7))
