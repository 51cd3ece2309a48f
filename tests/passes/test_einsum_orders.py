"""torch.einsum of several operands, whose order opt_einsum chooses: for all numbers of tokens one graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from compile_passes.compat import leave_sizes_of_einsum_open

opt_einsum = pytest.importorskip("opt_einsum")
WIDE, NARROW = torch.randn(24, 40), torch.randn(40, 3)


def product(x: Tensor) -> Tensor:
    return torch.einsum("td,dn,nm,m->t", x, WIDE, NARROW, NARROW[0])


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_numbers_of_tokens_share_a_graph(backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    function = torch.compile(product, backend=backend, fullgraph=True)
    for count in (3, 7, 64, 5, 300):
        x = torch.randn(count, 24)
        torch.testing.assert_close(function(x), product(x), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2, "torch makes the first number static"


def test_the_order_is_that_of_the_sizes_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[tuple[int, ...]]] = []

    def recorded(*args: object, **options: object) -> object:
        found = contract_path(*args, **options)
        orders.append(found[0])
        return found

    contract_path = opt_einsum.contract_path
    monkeypatch.setattr(opt_einsum, "contract_path", recorded)
    x = torch.randn(300, 24)
    product(x)
    torch.compiler.reset()
    torch.compile(product, backend="moe_ops_eager", fullgraph=True, dynamic=True)(x)
    best, *traced = orders
    assert traced and all(order == best for order in traced) and best != [(0, 1), (0, 2), (0, 1)]


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("operands", [3, 4, 5])
def test_numbers_that_the_data_knows_are_contracted_from_left_to_right(operands: int) -> None:
    letters = ["td", "dn", "nm", "mk", "k"][:operands]
    made = [torch.randn([{"t": 9, "d": 4, "n": 5, "m": 6, "k": 7}[letter] for letter in names]) for names in letters]
    equation = f"{','.join(letters)}->t{letters[-1][-1] if operands < 5 else ''}"

    def function(count: Tensor) -> Tensor:
        return torch.einsum(equation, made[0][: count.item()], *made[1:])

    torch.compiler.reset()
    compiled = torch.compile(function, backend="moe_ops_eager", fullgraph=True)
    for count in (4, 9):
        torch.testing.assert_close(compiled(torch.tensor(count)), function(torch.tensor(count)))


def test_the_package_is_asked_through_one_hand() -> None:
    asked = torch.backends.opt_einsum.get_opt_einsum()  # type: ignore[attr-defined]
    leave_sizes_of_einsum_open()
    assert torch.backends.opt_einsum.get_opt_einsum() is asked  # type: ignore[attr-defined]
    assert asked.contract is opt_einsum.contract
