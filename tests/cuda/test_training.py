"""Gradients of a layer on a GPU: against float64, run to run, in a CUDA graph; its launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import moe_ops
from meta.activations import ACTIVATIONS
from meta.dims import RECOMPUTE
from moe_ops.kernels.triton import wgrad
from moe_ops.testing import kernel_names
from tests.ops.errors import assert_accurate
from tests.ops.layers import VARIANTS, Layer, Variant, dense_formula

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("poisoned_memory")]

NAMES = ("hidden_states", "gate_up_proj", "down_proj", "up_proj", "topk_weights", "gate_up_bias", "down_bias")
TRAINED = {name: variant for name, variant in VARIANTS.items() if variant.scheme is None and variant.T}


def _with(activation: str, glu: str) -> Variant:
    row = ACTIVATIONS[activation]
    own = [(name, value) for name, value in (("alpha", row.alpha), ("limit", row.limit)) if value is not None]
    return replace(VARIANTS["plain"], options=(("activation", activation), ("glu_layout", glu), *own))


FORMS = TRAINED | {
    f"{activation}_{glu}": _with(activation, glu) for activation in ACTIVATIONS for glu in ("concat", "interleaved")
}


def gradients(layer: Layer, run: Any, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    given = {
        name: value.detach().clone(memory_format=torch.preserve_format).requires_grad_() if name in NAMES else value
        for name, value in layer.tensors.items() if value is not None
    }  # fmt: skip
    run(Layer({**layer.tensors, **given}, layer.options)).backward(grad.to(given["hidden_states"].dtype))
    return {name: given[name].grad for name in NAMES if name in given}


def fused(layer: Layer) -> torch.Tensor:
    return torch.ops.moe_ops.fused_experts(**layer.tensors, **layer.options)


@pytest.mark.parametrize("T", [3, 70])
@pytest.mark.parametrize("name", FORMS)
def test_gradients(name: str, T: int) -> None:
    variant: Variant = replace(FORMS[name], T=T)
    layer = variant.build()
    if layer.tensors["hidden_states"].dtype == torch.float64:
        pytest.skip("no kernel for float64")
    grad = torch.randn(layer.tensors["hidden_states"].shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(layer.tensors["hidden_states"].dtype)
    exact, plain = gradients(layer.float64(), dense_formula, grad), gradients(layer, dense_formula, grad)
    on_gpu = Layer(tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), layer.tensors), layer.options)
    got = gradients(on_gpu, fused, grad.cuda())
    again = gradients(on_gpu, fused, grad.cuda())
    for key, value in exact.items():
        assert torch.equal(got[key], again[key]), f"{key} differs from run to run"
        assert_accurate(got[key].cpu(), value, plain[key], dtype=grad.dtype, what=key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("N", "K"), [(264, 520), (263, 519), (40, 24), (128, 1024)], ids=str)
def test_weight_gradient(N: int, K: int, dtype: torch.dtype) -> None:
    """Experts without rows have zeros, a NaN is in the sum of its own expert alone; by descriptors and by pointers."""
    R = 300
    offsets = torch.tensor([0, 7, 7, 100, 100, 131, 200, 200], device="cuda", dtype=torch.int32)
    torch.manual_seed(0)
    grad, x = (torch.randn(R, n, device="cuda").to(dtype) for n in (N, K))
    grad[200:], x[200:], grad[50] = float("nan"), float("nan"), float("nan")
    found = torch.ops.moe_ops.grouped_wgrad(grad, x, offsets)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        wanted = grad[start:end].double().T @ x[start:end].double()
        plain = wanted.to(dtype).nan_to_num(6e4)
        assert_accurate(found[expert].nan_to_num(6e4), wanted.nan_to_num(6e4), plain, dtype=dtype)
        start = end


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(264, 520), (192, 576), (40, 24), (1536, 2048)], ids=str)
def test_weight_gradient_of_many_rows(N: int, K: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By groups of warps, in tiles of 192 and of 256 columns: the bits of Triton's kernel, into a part of a tensor."""
    R = 700
    offsets = torch.tensor([0, 1, 1, 300, 300, 333, 600], device="cuda", dtype=torch.int32)
    torch.manual_seed(0)
    grad, x = (torch.randn(R, n, device="cuda").to(dtype) for n in (N, K))
    grad[600:], x[600:], grad[50] = float("nan"), float("nan"), float("nan")
    whole = torch.full((2, len(offsets), N, K + 8), float("nan"), device="cuda", dtype=dtype)
    found = []
    for specialised, out in zip((True, False), whole[..., :K], strict=True):
        monkeypatch.setattr(wgrad, "ROWS_FOR_GROUPS", 1 if specialised else 1 << 20)
        launched = kernel_names(lambda out=out: wgrad.grouped_wgrad(grad, x, offsets, out))
        assert launched == ["_wgrad_mm_kernel" if specialised else "_wgrad_kernel"]
        found.append(out.nan_to_num(6e4))
    assert whole[..., K:].isnan().all() and not (found[0][[0, 2, 4]]).any()
    assert torch.equal(*found)
    plain = (grad[300:333].T @ x[300:333]).double()
    assert_accurate(found[0][5], grad[300:333].double().T @ x[300:333].double(), plain, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(264, 520), (192, 576), (40, 24), (1536, 2048)], ids=str)
@pytest.mark.parametrize("factor", ["grad_rows", "rows"])
def test_weight_gradient_of_tokens(
    factor: str, N: int, K: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered by the product itself: the bits of copied rows, whatever other experts, dropped pairs and rows that do
    not exist hold.
    """
    monkeypatch.setattr(wgrad, "ROWS_FOR_GROUPS", 1)  # of the copies, whose bits are to be the same
    torch.manual_seed(0)
    T, top_k = 300, 3
    ids = torch.tensor([1, 2, 3, 5, 6, -1, 9], device="cuda", dtype=torch.int32)[
        torch.rand(T, 7, device="cuda").topk(top_k).indices
    ]
    offsets, *places = torch.ops.moe_ops.sort_pairs(ids, None, num_experts=7)
    of_tokens, of_rows = (N, K) if factor == "grad_rows" else (K, N)
    wide = torch.randn(T, of_tokens + 8, device="cuda").to(dtype)
    tokens, wide[7], wide[:, of_tokens:] = wide[:, :of_tokens], float("nan"), float("nan")
    rows = torch.randn(T * top_k, of_rows, device="cuda").to(dtype)
    rows[offsets[-1] :] = float("nan")
    copies = tokens[places[0].clamp(min=0).long() // top_k]
    given = {"grad_rows": copies, "rows": rows} if factor == "grad_rows" else {"grad_rows": rows, "rows": copies}
    wanted = wgrad.grouped_wgrad(**given, offsets=offsets)
    given[factor] = tokens

    def product() -> torch.Tensor:
        return torch.ops.moe_ops.grouped_wgrad(*given.values(), offsets, *places, tokens=factor)

    assert kernel_names(product) == ["_wgrad_mm_kernel"]
    found = product()
    assert torch.equal(found.nan_to_num(6e4), wanted.nan_to_num(6e4)) and not found[[0, 4]].any()
    of_nan = [expert in ids[7].tolist() for expert in range(7)]
    assert [bool(gradient.isnan().any()) for gradient in found] == of_nan


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", ["plain", "bf16", "gpt_oss", "separate", "batched", "expert_map_bias"])
def test_what_is_computed_again_has_the_same_bits(name: str, recompute: str) -> None:
    layer = replace(TRAINED[name], T=70).build()
    on_gpu = Layer(tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), layer.tensors), layer.options)
    grad = torch.randn_like(on_gpu.tensors["hidden_states"])
    wanted = gradients(on_gpu, fused, grad)
    got = gradients(Layer(on_gpu.tensors, {**on_gpu.options, "recompute": recompute}), fused, grad)
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("recompute", [None, *RECOMPUTE])
def test_no_tokens(recompute: str | None) -> None:
    layer = VARIANTS["no_tokens"].build()
    on_gpu = Layer(tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), layer.tensors), layer.options)
    grad = torch.empty_like(on_gpu.tensors["hidden_states"])
    for key, value in gradients(Layer(on_gpu.tensors, {**on_gpu.options, "recompute": recompute}), fused, grad).items():
        assert not value.any(), key


@pytest.mark.parametrize(("frozen", "most"), [(False, 7), (True, 5)], ids=["trained", "frozen"])
@pytest.mark.parametrize("T", [70, 4096])
def test_launches(T: int, frozen: bool, most: int) -> None:
    """Kernels of a backward, from the output's gradient to the router's logits, the hidden states and the weights."""
    E, K, H, I = 16, 4, 512, 256
    x, logits, grad = (torch.randn(T, n, device="cuda").bfloat16() for n in (H, E, H))
    w1, w2 = (torch.randn(E, *size, device="cuda").bfloat16() for size in ((2 * I, H), (H, I)))
    leaves = [t.requires_grad_() for t in ((x, logits) if frozen else (x, logits, w1, w2))]

    def forward() -> torch.Tensor:
        return moe_ops.fused_moe(x, logits, w1, w2, top_k=K)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, grad)

    torch.use_deterministic_algorithms(False)  # filling memory launches kernels of its own
    before, names = kernel_names(forward), kernel_names(step)
    assert len(names) - len(before) <= most, names


def test_a_training_step_in_a_graph() -> None:
    """Captured once, replayed with other routing, bit for bit the eager step."""
    torch.manual_seed(0)
    E, K, H, I, T = 16, 4, 256, 128, 300
    w1, w2 = ((torch.randn(E, *size, device="cuda") * 0.1).bfloat16().requires_grad_() for size in ((2 * I, H), (H, I)))
    batches = [[torch.randn(T, size, device="cuda").bfloat16() for size in (H, E)] for _ in range(2)]
    x, logits = (tensor.clone().requires_grad_() for tensor in batches[0])
    grad = torch.randn(T, H, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        out = moe_ops.fused_moe(x, logits, w1, w2, top_k=K)
        return torch.autograd.grad(out, [x, logits, w1, w2], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for batch in reversed(batches):
        with torch.no_grad():
            x.copy_(batch[0])
            logits.copy_(batch[1])
        graph.replay()
        for one, other in zip(captured, step(), strict=True):
            assert torch.equal(one, other)
