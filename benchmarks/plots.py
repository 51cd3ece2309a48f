"""Plots of a result file of layers by tokens: time, share of the roof, and our time over the best other's; one panel
for each shape and routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, numbers_of

PANELS_PER_LINE = 3
FORMATS = ("png", "svg")
Rows = list[dict[str, Any]]


def plots_of(document: dict[str, Any]) -> list[str]:
    """Names of the plots of a file: shares of a roof that it knows, ratios of others' layers timed in turn."""
    shares = any(row.get("roof_us") for row in document["rows"])
    return ["time", *(["share"] if shares else []), *(["ratio"] if best_peer(document["rows"]) else [])]


def plot_paths(document: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Files that `draw_layers` writes, plot by plot in each format."""
    return [folder / f"{stem}-{plot}.{suffix}" for plot in plots_of(document) for suffix in FORMATS]


def draw_layers(document: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw the plots of a document with kind "layers" into `folder`; returns the files written."""
    pyplot = drawing(stem)
    title = f"{document['device']}, {numbers_of(document)}, {document['date']}"
    drawings = {
        "time": (f"One MoE layer: {title}", "microseconds", _time_panel),
        "share": (f"Share of the roofline: {title}", "roof / time, %", _share_panel),
        "ratio": (f"Against the best other peer: {title}", f"{document.get('reference')} / best other", _ratio_panel),
    }
    for plot in plots_of(document):
        paths = [folder / f"{stem}-{plot}.{suffix}" for suffix in FORMATS]
        _draw(pyplot, document["rows"], *drawings[plot], paths)
    return plot_paths(document, folder, stem)


def draw_training(rows: Rows, before: Rows, label: str, title: str, salt: str, paths: list[Path]) -> list[Path]:
    """Draw ratios of training steps by tokens, a panel for each shape, a line for each mode; ``before``: ratios of what
    there was before, as crosses. Returns the files written.
    """

    def panel(axes: Any, of_shape: Rows) -> None:
        for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
            points = [row for row in of_shape if row["mode"] == mode]
            tokens, colour = [row["T"] for row in points], f"C{number}"
            lows, highs = ([row[f"ratio_{end}"] for row in points] for end in ("low", "high"))
            axes.fill_between(tokens, lows, highs, alpha=0.3, color=colour)
            axes.plot(tokens, [row["ratio"] for row in points], "o-", markersize=3, color=colour, label=mode)
            if before:
                old = [row for row in before if (row["shape"], row["mode"]) == (of_shape[0]["shape"], mode)]
                crosses = [row["T"] for row in old], [row["ratio"] for row in old]
                axes.plot(*crosses, "x", color=colour, label=f"{mode}, before")
        axes.axhline(1.0, linestyle="--", color="black", alpha=0.5)
        axes.set_ylim(bottom=0)

    _draw(drawing(salt), rows, title, label, panel, paths)
    return paths


def routings_of(rows: Rows) -> list[str]:
    """Routings of a file, in its order; older files say nothing of theirs, which was uniform."""
    return list(dict.fromkeys(row.get("routing", "uniform") for row in rows))


def best_peer(rows: Rows) -> dict[str, Any] | None:
    """The fastest row of another project's layer (products alone are none) that can be compared, or None."""
    others = [row for row in rows if row.get("ratio") and row["work"] != "gemms" and not row["peer"].startswith(OURS)]
    return min(others, key=lambda row: row["us"], default=None)


def drawing(salt: str) -> Any:
    """pyplot, without a screen. A fixed salt, and no date in `save`: drawing the same twice gives the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = salt
    from matplotlib import pyplot

    return pyplot


def save(pyplot: Any, figure: Any, paths: list[Path], dpi: int) -> list[Path]:
    """Write a figure to every path, and close it; returns the paths."""
    figure.set_layout_engine("constrained")
    for path in paths:
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def _draw(
    pyplot: Any, rows: Rows, title: str, label: str, panel: Callable[[Any, Rows], None], paths: list[Path]
) -> None:
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    columns = min(len(kinds), PANELS_PER_LINE)
    lines = math.ceil(len(kinds) / columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines + 0.8), squeeze=False)
    panels = list(grid.flat)
    for axes, kind in zip(panels, kinds, strict=False):
        panel(axes, [row for row in rows if _kind(row) == kind])
        axes.set_title(kind)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    for axes in panels[len(kinds) :]:
        axes.axis("off")
    panels[0].set_ylabel(label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(max(1, len(labels)), 6), frameon=False, fontsize="small"
    )
    figure.suptitle(title)
    save(pyplot, figure, paths, 110)


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


def _ratio_panel(axes: Any, rows: Rows) -> None:
    tokens = list(dict.fromkeys(row["T"] for row in rows))
    best = [row for T in tokens if (row := best_peer([row for row in rows if row["T"] == T]))]
    points = [row["T"] for row in best]
    axes.fill_between(points, [row["ratio_low"] for row in best], [row["ratio_high"] for row in best], alpha=0.3)
    axes.plot(points, [row["ratio"] for row in best], marker="o", markersize=3, label="median of the rounds, 95 %")
    axes.axhline(1.0, linestyle="--", color="black", alpha=0.5)
    axes.set_ylim(bottom=0)


def _kind(row: dict[str, Any]) -> str:
    """A panel's title."""
    routing = row.get("routing", "uniform")
    return row["shape"] if routing == "uniform" else f"{row['shape']}, {routing}"


def _series(rows: Rows) -> dict[str, Rows]:
    """Rows that have a time, by peer."""
    series: dict[str, Rows] = {}
    for row in rows:
        if row["us"] is not None:
            series.setdefault(row["peer"], []).append(row)
    return series


def _roof_name(row: dict[str, Any]) -> str:
    return f"roof ({row['roof_kind']})"
