"""Chains of products with slices ``w[e]`` of one stacked weight, each one expert of an unrolled loop over e."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compile_passes.match import Product
from compile_passes.patterns.experts import feeding_products
from compile_passes.patterns.one_expert import product_of_one
from compile_passes.reading import Reading


@dataclass(frozen=True)
class Expert:
    """The chain of one expert: its first products, and its second one."""

    number: int
    ups: tuple[Product, ...]
    down: Product


def find_siblings(reading: Reading) -> list[list[list[Expert]]]:
    """The experts of unrolled loops over stacked weights, in the order of their numbers: for all weights the loops over
    these, of which there are several where a block runs its experts for one slot after the other, or is run again.
    """
    links = {node: link for node in reading.graph.nodes if (link := product_of_one(reading, node)) is not None}
    products = {node: link[0] for node, link in links.items()}
    groups: dict[Any, list[list[Expert]]] = {}
    for node, (down, number) in links.items():
        ups = feeding_products(reading, down, products)
        if not ups or any(links[up.anchor][1] != number for up in ups):
            continue
        ups.sort(key=lambda up: reading.order[up.anchor])
        runs = groups.setdefault((down.weight, tuple(up.weight for up in ups)), [[]])
        run = next((run for run in runs if all(expert.number != number for expert in run)), None)
        if run is None:
            runs.append(run := [])
        run.append(Expert(number, tuple(ups), products[node]))
    return [[sorted(run, key=lambda expert: expert.number) for run in runs] for runs in groups.values()]
