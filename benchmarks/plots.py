"""Roofline plots of a result file of layers: time by tokens, and share of the roof by tokens, one panel per shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

PANELS_PER_LINE = 3
FORMATS = ("png", "svg")
Rows = list[dict[str, Any]]


def plot_paths(folder: Path, stem: str) -> list[Path]:
    """Files that `draw_layers` writes: the time plot in each format, then the share plot."""
    return [folder / f"{stem}-{plot}.{suffix}" for plot in ("time", "share") for suffix in FORMATS]


def draw_layers(document: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw both plots of a document with kind "layers" into `folder`; returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    # A fixed salt and no date: drawing the same file twice gives the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = stem
    title = f"{document['device']}, {document['scheme']}, {document['date']}"
    paths = plot_paths(folder, stem)
    _draw(document["rows"], f"One MoE layer: {title}", "microseconds", _time_panel, paths[:2])
    _draw(document["rows"], f"Share of the roofline: {title}", "roof / time, %", _share_panel, paths[2:])
    return paths


def _draw(rows: Rows, title: str, label: str, panel: Callable[[Any, Rows], None], paths: list[Path]) -> None:
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    columns = min(len(shapes), PANELS_PER_LINE)
    lines = math.ceil(len(shapes) / columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines + 0.8), squeeze=False)
    panels = list(grid.flat)
    for axes, shape in zip(panels, shapes, strict=False):
        panel(axes, [row for row in rows if row["shape"] == shape])
        axes.set_title(shape)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    for axes in panels[len(shapes) :]:
        axes.axis("off")
    panels[0].set_ylabel(label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(1, len(labels)), frameon=False, fontsize="small"
    )
    figure.suptitle(title)
    figure.set_layout_engine("constrained")
    for path in paths:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _time_panel(axes: Any, rows: Rows) -> None:
    for peer, points in _series(rows).items():
        axes.plot([row["T"] for row in points], [row["us"] for row in points], marker="o", markersize=3, label=peer)
    # Quantised and unquantised peers have different roofs: one line for each.
    roofs = sorted({(row["T"], row["roof_us"], _roof_name(row)) for row in rows if row.get("roof_us")})
    for name in sorted({name for _, _, name in roofs}):
        line = [(T, us) for T, us, kind in roofs if kind == name]
        axes.plot(*zip(*line, strict=True), "--", color="black", alpha=0.4 if "fp8" in name else 0.8, label=name)
    axes.set_yscale("log")


def _share_panel(axes: Any, rows: Rows) -> None:
    for peer, points in _series(rows).items():
        with_roof = [row for row in points if row.get("roof_us")]
        shares = [100 * row["roof_us"] / row["us"] for row in with_roof]
        axes.plot([row["T"] for row in with_roof], shares, marker="o", markersize=3, label=peer)
    axes.set_ylim(0, 105)


def _series(rows: Rows) -> dict[str, Rows]:
    """Rows that have a time, by peer."""
    series: dict[str, Rows] = {}
    for row in rows:
        if row["us"] is not None:
            series.setdefault(row["peer"], []).append(row)
    return series


def _roof_name(row: dict[str, Any]) -> str:
    return f"roof ({row['roof_kind']})"
