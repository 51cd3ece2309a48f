"""The pictures of the first page: tokens a second of whole models, a block before and after the passes, and experts
spread over two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import MODELS, TRANSFORMERS, VARIANTS
from benchmarks.plots import FORMATS, drawing, save

if TYPE_CHECKING:
    from compile_passes.diagram import Diagram

Documents = Mapping[str, dict[str, Any]]
DPI = 130
TOKENS, BLOCK, RANKS = "tokens", "block", "ep"
BLOCK_OF = "Qwen/Qwen3-30B-A3B"
_WAYS = {"eager": "#b8bec9", "torch.compile": "#7d8ca6", "moe_ops": "#2f6fde"}
_STAGES = {
    "router": ("router", "#dbe7fb"),
    "top-k": ("top-k", "#e3dcf7"),
    "dispatch": ("dispatch", "#fbe9d0"),
    "experts": ("experts", "#d9f0dd"),
    "combine": ("combine", "#f8dde3"),
}
_SPELLED = {"getitem": "index", "setitem": "index", "_grouped_mm": "grouped_mm", "floordiv": "//"}
_PER_LINE = 6  # operations


@dataclass(frozen=True)
class Steps:
    """Decode steps of one model with one number of sequences: tokens a second by way, the best variant of each."""

    batch: int
    rates: dict[str, float]


def model_of(document: dict[str, Any]) -> tuple[str, bool]:
    """(the model of a file of whole models, whether it has all the layers of a published one)."""
    for name, model in MODELS.items():
        if model.config == document["config"]:
            return model.title or name, model.published
    return "a model", False


def title_of(document: dict[str, Any]) -> str:
    """The model of a file of whole models, and its cache."""
    return f"{model_of(document)[0]}, cache of {document['cache_length']}"


def of_the_first_page(documents: Documents) -> dict[str, dict[str, Any]]:
    """Files with decode steps: those of published models, or all where there is none of these."""
    found = {stem: document for stem, document in documents.items() if steps_of(document)}
    return {stem: document for stem, document in found.items() if model_of(document)[1]} or found


def steps_of(document: dict[str, Any]) -> list[Steps]:
    """The decode steps (one new token for each sequence) of a file of whole models that were timed every way."""
    found: dict[int, dict[str, float]] = {}
    for row in document["rows"]:
        way = _way(row["variant"])
        if row["new_tokens"] == 1 and row["ms"] and way is not None:
            rates = found.setdefault(row["batch"], {})
            rates[way] = max(rates.get(way, 0.0), row["batch"] * 1e3 / row["ms"])
    return [Steps(batch, rates) for batch, rates in sorted(found.items()) if set(rates) == set(_WAYS)]


def _way(name: str) -> str | None:
    """Which bar a variant belongs to: one with a part of this project's passes belongs to none."""
    variant = VARIANTS.get(name)
    if variant is None or variant.steps:
        return None
    if not name.startswith(TRANSFORMERS):
        return "moe_ops"
    return "eager" if variant.compile_options is None else "torch.compile"


def paths_of(name: str, folder: Path) -> list[Path]:
    """The files of one picture."""
    return [folder / f"{name}.{suffix}" for suffix in FORMATS]


def draw_tokens(documents: Documents, folder: Path) -> list[Path]:
    """Bars of tokens a second, a panel for every file of `of_the_first_page`; returns the files written."""
    panels = [(document, steps_of(document)) for document in of_the_first_page(documents).values()]
    if not panels:
        return []
    pyplot = drawing(TOKENS)
    figure, grid = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 3.2), squeeze=False)
    for axes, (document, steps) in zip(grid.flat, panels, strict=True):
        for place, (way, colour) in enumerate(_WAYS.items()):
            at = [group + (place - 1) * 0.27 for group in range(len(steps))]
            bars = axes.bar(at, [step.rates[way] for step in steps], 0.25, color=colour, label=way)
            axes.bar_label(bars, fmt=_short, fontsize=7, padding=1)
        axes.set_xticks(range(len(steps)), [f"batch {step.batch}" for step in steps])
        axes.set_title(f"{title_of(document)}\n{document['device']}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("tokens a second")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return save(pyplot, figure, paths_of(TOKENS, folder), DPI)


def _short(rate: float) -> str:
    """Three figures."""
    return f"{float(f'{rate:.3g}'):,.0f}"


def draw_block(folder: Path) -> list[Path]:
    """A block's operations by stage, and the one operator that they become; returns the files written."""
    import moe_ops

    report = moe_ops.explain(BLOCK_OF)
    diagram = report.fused[0].diagram
    if diagram is None:
        raise RuntimeError(f"report: explain drew no block of {BLOCK_OF}")
    return draw_diagram(diagram, folder)


def draw_diagram(diagram: Diagram, folder: Path) -> list[Path]:
    """The picture of one block; returns the files written."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    pyplot = drawing(BLOCK)
    figure, axes = pyplot.subplots(figsize=(9.2, 3.9))
    axes.set_xlim(0, 100)
    axes.axis("off")

    def box(x: float, top: float, width: float, height: float, colour: str, head: str, text: str) -> None:
        style = {"boxstyle": "round,pad=0,rounding_size=1", "facecolor": colour, "edgecolor": "#5b6472"}
        axes.add_patch(FancyBboxPatch((x, top - height), width, height, linewidth=0.8, **style))
        axes.text(x + 1.5, top - 1.2, head, va="top", fontsize=9, fontweight="bold")
        axes.text(x + 15 if width > 50 else x + 1.5, top - (1.2 if width > 50 else 5.5), text, va="top", fontsize=8.5)

    top = 0.0
    for stage in diagram.stages:
        if stage.role not in _STAGES:
            continue
        names = [_SPELLED.get(name, name) for line in stage.lines for name in line.operations]
        lines = [", ".join(names[at : at + _PER_LINE]) for at in range(0, len(names), _PER_LINE)]
        height = 2.3 * len(lines) + 2.7
        box(0, top, 56, height, _STAGES[stage.role][1], _STAGES[stage.role][0], "\n".join(lines))
        top -= height + 1.2
    (*_, after) = diagram.after
    tensors = [f"{name} {shape}" for name, shape in after.tensors]
    options = [", ".join(f"{name}={value}" for name, value in after.options)] if after.options else []
    height = 2.4 * (len(tensors) + len(options) + 1) + 7
    box(66, top / 2 + height / 2, 34, height, "#2f6fde22", f"moe_ops.{after.name}",
        "\n".join([*tensors, *options, f"gives {after.shape}"]))  # fmt: skip
    axes.add_patch(FancyArrowPatch((57, top / 2), (65, top / 2), arrowstyle="-|>", mutation_scale=16, color="#5b6472"))
    axes.set_ylim(top - 2, 7)
    axes.text(0, 2.2, f"{len(diagram.operations)} operations in the captured graph", fontsize=9.5)
    axes.text(66, 2.2, "afterwards: linear, and one operator", fontsize=9.5)
    return save(pyplot, figure, paths_of(BLOCK, folder), DPI)


#: A column of the picture of two ranks: what it is called in code, what happens, and its colour.
_STEPS = (
    ("rank {rank}'s tokens", "[T, H]\nids of all experts", "#dbe7fb"),
    ("prepare", "rows out,\nwith weights and ids", "#fbe9d0"),
    ("experts", "this rank's block:\n{first} to {last}", "#d9f0dd"),
    ("finalize", "partial results back", "#fbe9d0"),
    ("output", "their sum, in rank order\nand fp32: [T, H]", "#f8dde3"),
)
_EXCHANGES = (1, 3)  # columns in which the ranks send to one another


def draw_ranks(folder: Path) -> list[Path]:
    """A layer over two ranks: tokens, exchange, experts, exchange, sum; returns the files written."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    pyplot = drawing(RANKS)
    figure, axes = pyplot.subplots(figsize=(9.2, 2.9))
    width, height, step, drop = 16.0, 11.0, 21.0, 19.0
    axes.set_xlim(-1, step * (len(_STEPS) - 1) + width + 1)
    axes.set_ylim(-drop - height - 1, 5)
    axes.axis("off")

    def arrow(start: tuple[float, float], end: tuple[float, float], style: str = "-|>") -> None:
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color="#5b6472", shrinkA=0, shrinkB=0)
        )

    for rank in range(2):
        top = -rank * drop
        for column, (head, text, colour) in enumerate(_STEPS):
            x = column * step
            style = {"boxstyle": "round,pad=0,rounding_size=1", "facecolor": colour, "edgecolor": "#5b6472"}
            axes.add_patch(FancyBboxPatch((x, top - height), width, height, linewidth=0.8, **style))
            first, last = ("0", "E/2 - 1") if rank == 0 else ("E/2", "E - 1")
            axes.text(x + 1, top - 1.2, head.format(rank=rank), va="top", fontsize=9, fontweight="bold")
            axes.text(x + 1, top - 4.6, text.format(first=first, last=last), va="top", fontsize=7.5)
            if column:
                arrow((x - step + width, top - height / 2), (x, top - height / 2))
    for column in _EXCHANGES:
        middle = column * step + width / 2
        arrow((middle, -height), (middle, -drop), "<|-|>")
    for column, text in (
        (0.5, "prepare_start"),
        (1.5, "prepare_wait"),
        (2.5, "finalize_start"),
        (3.5, "finalize_wait"),
    ):
        axes.text(column * step + width / 2, 2.2, text, ha="center", fontsize=7.5, color="#5b6472", family="monospace")
    return save(pyplot, figure, paths_of(RANKS, folder), DPI)
