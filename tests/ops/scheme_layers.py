"""A layer of any scheme, its float64 result, and the result of rounding exactly where its row says.

Plain torch on any device: a product for each expert in float64, of the dequantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meta.activations import ACTIVATIONS, split_glu
from meta.arch import device_arch
from meta.blocks import blocks_on
from meta.schemes import SCHEMES

#: Error against float64 that is allowed, in those of the reference.
CONTRACT = 1.05
#: Of sums in fp32, over the size of the result: for schemes that round as little themselves.
SUMS = 16 * torch.finfo(torch.float32).eps
FORMS = ("concat", "halves", "separate", "interleaved", "none")


@dataclass(frozen=True)
class SchemeLayer:
    """Arguments of ``fused_experts`` by name, and its options."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    weights: tuple[Tensor, Tensor]  # float64 [E, N, H], [E, H, I]
    dtype: torch.dtype
    static: tuple[Tensor, Tensor] | None = None  # [E], scales of the rows of both products

    def float64(self) -> Tensor:
        """``[T, H]``, nothing rounded but the weights."""
        return self._result(lambda rows, product, expert: rows, lambda rows: rows)

    def rounded(self) -> Tensor:
        """``[T, H]``, activations rounded as the scheme stores them on this device, results as they are stored."""
        scheme = SCHEMES[self.options["scheme"]]
        form = blocks_on(scheme, device_arch(self.tensors["hidden_states"].device)) or scheme.rows

        def stored(rows: Tensor, product: int, expert: int) -> Tensor:
            if form is None:
                return self._cast(rows)
            static = None if self.static is None else self.static[product][expert]
            return form.dequantize(*form.quantize(rows.float(), static)).double()

        return self._cast(self._result(stored, self._cast))

    def _cast(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).double()

    def _result(self, stored: Any, cast: Any) -> Tensor:
        given, (first, second) = self.tensors, self.weights
        layout = self.options.get("glu_layout", "concat")
        row = ACTIVATIONS[self.options["activation"]]
        x = given["hidden_states"].double()
        out = torch.zeros_like(x)
        ids = given["topk_ids"]
        if (local := given["expert_map"]) is not None:
            ids = torch.where(ids >= 0, local[ids.long().clamp(min=0)], -1)
        for e in range(first.shape[0]):
            token, slot = (ids == e).nonzero(as_tuple=True)
            h = stored(x[token], 0, e) @ first[e].T
            h = h if given["gate_up_bias"] is None else h + given["gate_up_bias"][e].double()
            h = row.eager(*split_glu(h, layout), row.alpha, row.limit)
            y = stored(h, 1, e) @ second[e].T
            y = y if given["down_bias"] is None else y + given["down_bias"][e].double()
            out.index_add_(0, token, cast(y) * given["topk_weights"][token, slot].double()[:, None])
        return out


def build(
    scheme: str,
    *,
    T: int,
    sizes: tuple[int, int, int, int],
    form: str = "concat",
    bias: bool = False,
    expert_map: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    static: bool = False,
) -> SchemeLayer:
    """A random layer of T tokens.

    Args:
        sizes: E, K, H, I.
        form: of FORMS: where the gate and the up half are, and "halves", which have scales of their own.
        dtype: of the hidden states where the scheme leaves it open, by default bf16.
        static: each expert has scales for its activations, of which the largest magnitudes saturate.
    """
    (E, K, H, I), row = sizes, SCHEMES[scheme]
    dtype = row.float_dtype if not row.quantized else dtype or torch.bfloat16
    stacked = form not in ("none", "separate")

    def weight(n: int, k: int) -> tuple[Tensor, list[Tensor], Tensor]:
        wide = torch.randn(E, n, k, device=device) * k**-0.5
        # A row's own size: a scale in the place of another shows.
        wide *= 1 + torch.arange(E * n, device=device).view(E, n, 1) % 7
        if not row.quantized:
            stored = wide.to(dtype)
            return stored, [], stored.double()
        stored, scales = row.quantize(wide)
        return stored, list(scales), row.dequantize(stored, scales).double()

    def both(n: int, k: int) -> tuple[list[Tensor], list[list[Tensor]], Tensor]:
        parts = [weight(n, k) for _ in range(2)]
        stored, scales, wide = zip(*parts, strict=True)
        return list(stored), list(scales), torch.cat(wide, dim=1)

    up = None
    if form == "separate":
        (first, up), scales, wide = both(I, H)
        first_scales = scales[0] + scales[1]
    elif form == "halves" and row.quantized:
        stored, scales, wide = both(I, H)
        first = torch.cat(stored, dim=1)
        first_scales = [torch.stack(pair, dim=1) for pair in zip(*scales, strict=True)]
    else:
        first, first_scales, wide = weight(2 * I if stacked else I, H)
    second, second_scales, wide_second = weight(H, I)
    experts = 2 * E if expert_map else E
    ids = torch.rand(T, experts, device=device).topk(K, dim=1).indices.int()
    local = None
    if expert_map:
        local = torch.full((experts,), -1, dtype=torch.int32, device=device)
        local[torch.randperm(experts, device=device)[:E]] = torch.arange(E, dtype=torch.int32, device=device)
    fixed = None
    if static:
        fixed = tuple((0.5 + torch.rand(E, device=device)) * largest / 448 for largest in (3.0, 20.0))
        first_scales, second_scales = [*first_scales, fixed[0]], [*second_scales, fixed[1]]
    tensors = {
        "hidden_states": torch.randn(T, H, device=device).to(dtype),
        "gate_up_proj": first,
        "down_proj": second,
        "topk_weights": torch.rand(T, K, device=device),
        "topk_ids": ids,
        "gate_up_scales": first_scales,
        "down_scales": second_scales,
        "up_proj": up,
        "gate_up_bias": torch.randn(E, (1 if form == "none" else 2) * I, device=device) if bias else None,
        "down_bias": torch.randn(E, H, device=device) if bias else None,
        "expert_map": local,
    }
    options = {"scheme": scheme, "activation": "relu2" if form == "none" else "silu"}
    if form in ("none", "interleaved"):
        options["glu_layout"] = form
    return SchemeLayer(tensors, options, (wide, wide_second), dtype, fixed)


def in_groups(layer: SchemeLayer, columns: int, zeros: torch.dtype | None = None) -> SchemeLayer:
    """The layer with other scales, of groups of so many columns each, and zero points of a dtype if one is given."""
    row, given, weights = SCHEMES[layer.options["scheme"]], dict(layer.tensors), []
    for name in ("gate_up", "down"):
        stored, (scale, *others) = given[f"{name}_proj"], given[f"{name}_scales"]
        E, N, K = *stored.shape[:2], stored.shape[2] * row.pack
        values = scale.float().mean() * (0.25 + torch.rand(E, N, K // columns, device=stored.device) / 2)
        if zeros is not None:
            high = 16 if row.code.name == "int4" else 100
            low = 0 if zeros == torch.uint8 else -high
            others = [torch.randint(low, high, values.shape, device=stored.device).to(zeros)]
        given[f"{name}_scales"] = [values.to(scale.dtype), *others]
        weights.append(row.dequantize(stored, given[f"{name}_scales"]).double())
    return replace(layer, tensors=given, weights=tuple(weights))


def further(numbers: Tensor, elements: int) -> Tensor:
    """The same numbers, so many elements further in memory: at an address that no wide load may take."""
    room = torch.zeros((elements + numbers.numel()) * numbers.element_size(), dtype=torch.uint8, device=numbers.device)
    return room.view(numbers.dtype)[elements:].view(numbers.shape).copy_(numbers)


def with_scales_far_apart(layer: SchemeLayer, powers: int) -> SchemeLayer:
    """A layer of e8m0 scales, one of four of which in the first weight is larger by so many powers of two, where the
    tokens are 0: its result is that of the others.
    """
    row, (stored, (scale,)) = (
        SCHEMES[layer.options["scheme"]], (layer.tensors["gate_up_proj"], layer.tensors["gate_up_scales"])
    )  # fmt: skip
    exponents, x = scale.view(torch.uint8).clone(), layer.tensors["hidden_states"].clone()
    exponents[..., ::4] += powers
    x.view(x.shape[0], -1, 32)[:, ::4] = 0
    scales = [exponents.view(scale.dtype)]
    given = {**layer.tensors, "hidden_states": x, "gate_up_scales": scales}
    return replace(layer, tensors=given, weights=(row.dequantize(stored, scales).double(), layer.weights[1]))


def assert_contract(got: Tensor, layer: SchemeLayer, contract: float = CONTRACT) -> None:
    """`got` is as near to float64 as rounding exactly where the scheme's row says is."""
    assert got.dtype == layer.dtype
    exact = layer.float64()
    error, allowed = ((y.double() - exact).norm() for y in (got, layer.rounded()))
    bound = contract * allowed + SUMS * exact.norm()
    assert error <= bound, f"error {float(error):.3e}, of the reference {float(allowed):.3e}"
