"""Sections and plots of training: steps of single layers, before and now, and of whole models.

A file NAME-baseline.json holds what there was before NAME.json: it is shown behind it, and its ratios beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.floors import Share, shares
from benchmarks.models import TRANSFORMERS
from benchmarks.plots import FORMATS, draw_training
from benchmarks.shapes import SHAPES, TINY_SHAPES
from benchmarks.tables import (
    NO_RESULTS,
    Documents,
    conditions,
    format_us,
    interval,
    of_kind,
    source_line,
    table,
    tables,
)
from benchmarks.train import THEIRS

BASELINE = "-baseline"
Row = dict[str, Any]
Key = tuple[str, int, str]


def train_section(documents: Documents) -> str:
    """Tables and plots for every result file of training steps of single layers; what was before goes last."""
    found = of_kind(documents, "train")
    parts = []
    for stem in sorted(found, key=lambda stem: stem.endswith(BASELINE)):
        document, old = found[stem], stem.endswith(BASELINE)
        before = found.get(stem + BASELINE)
        parts += [
            f"### {'Before: ' if old else ''}{source_line(stem, document)}",
            " ".join(filter(None, [conditions(document), resumed(document)])),
            train_table(document, before),
            _picture(stem) if _is_drawn(stem, document) else "",
            other_peers_table(document),
            floors_table(document),
            kernels_of_backwards(document),
            f"Method: {document['method']}.",
        ]
    return "\n\n".join(filter(None, parts)) or NO_RESULTS


def resumed(document: dict[str, Any]) -> str:
    """When a run was gone on with; "" of one in one piece."""
    dates = ", ".join(document.get("resumed", []))
    return f"Gone on with at {dates}; the rows of a case, and so its ratios, are of one process." if dates else ""


def _picture(stem: str) -> str:
    (name, *_) = _plot_names(stem)
    return f"![time of a training step over that of compiled transformers, by tokens](results/{name})"


def _plot_names(stem: str) -> list[str]:
    return [f"{stem}-ratio.{suffix}" for suffix in FORMATS]


def train_plot_paths(documents: Documents, folder: Path) -> list[Path]:
    """Files that `draw_train` writes."""
    found = of_kind(documents, "train")
    return [folder / name for stem in found if _is_drawn(stem, found[stem]) for name in _plot_names(stem)]


def _is_drawn(stem: str, document: dict[str, Any]) -> bool:
    """Whether a file has a line to draw: no baseline, and more than one number of tokens."""
    return not stem.endswith(BASELINE) and len({row["T"] for row in document["rows"]}) > 1


def draw_train(documents: Documents, folder: Path) -> list[Path]:
    """Ratios of every file of training steps that is no baseline; returns the files written."""
    found = of_kind(documents, "train")
    for stem, document in found.items():
        if _is_drawn(stem, document):
            paths = [folder / name for name in _plot_names(stem)]
            before = found.get(stem + BASELINE)
            both_ratios = ratios(document), ratios(before) if before else []
            draw_training(*both_ratios, f"{document['reference']} / {THEIRS}", _title(document), stem, paths)
    return train_plot_paths(documents, folder)


def _title(document: dict[str, Any]) -> str:
    return f"Forward and backward of one MoE layer: {document['device']}, bf16, {document['date']}"


def ratios(document: dict[str, Any]) -> list[Row]:
    """Rows of transformers' layer, which say how long ours takes beside it."""
    return [row for row in document["rows"] if row["peer"] == THEIRS and row.get("ratio")]


def _by_key(document: dict[str, Any] | None, peer: str) -> dict[Key, Row]:
    rows = document["rows"] if document else []
    return {(row["shape"], row["T"], row["mode"]): row for row in rows if row["peer"] == peer}


def train_table(document: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Times, memory, launches and errors of ours and of theirs, by shape, tokens and what is trained."""
    reference = document["reference"]
    ours, theirs, then = _by_key(document, reference), _by_key(document, THEIRS), _by_key(before, THEIRS)
    keys = list(dict.fromkeys((row["shape"], row["T"], row["mode"]) for row in document["rows"]))
    head = ["shape", "T", "experts", f"{reference}, us", f"{THEIRS}, us", f"{reference} / {THEIRS}"]
    head += ["before", "forward, us"] if before else ["forward, us"]
    body = []
    for key in keys:
        pair = ours.get(key, {}), theirs.get(key, {})
        line = [key[0], str(key[1]), key[2], *(format_us(row.get("us")) for row in pair), ratio_of(pair[1])]
        line += [ratio_of(then.get(key, {}), short=True)] if before else []
        line += [both(pair, "forward_us", format_us), both(pair, "peak_bytes", mib), both(pair, "saved_bytes", mib)]
        body.append([*line, " / ".join(map(launches_of, pair)), both(pair, "error", off)])
    notes = [f"`a / b`: {reference} / {THEIRS}."]
    rows = document["rows"]
    reasons = list(dict.fromkeys(f"{row['peer']}: {row['reason']}" for row in rows if row["us"] is None))
    notes += [f"Left out (`-`): {'; '.join(reasons)}."] if reasons else []
    last = ["peak, MiB", "kept, MiB", "launches, forward + backward", "error"]
    return "\n\n".join([table([*head, *last], body), " ".join(notes)])


def both(pair: tuple[Row, Row], name: str, text: Callable[[Any], str]) -> str:
    """Ours and theirs; "-" of what there is not."""
    values = [row.get(name) for row in pair]
    return " / ".join("-" if value is None else text(value) for value in values)


def ratio_of(row: Row, short: bool = False) -> str:
    """A ratio, with its interval unless ``short``; "-" where there is none."""
    if not row.get("ratio"):
        return "-"
    return f"{row['ratio']:.2f}" if short else interval(row)


def mib(size: float) -> str:
    """Whole mebibytes."""
    return f"{size / 2**20:.0f}"


def off(value: float) -> str:
    """ "3.8e-03"."""
    return f"{value:.1e}"


def launches_of(row: Row) -> str:
    """ "14 + 9"."""
    counts = (row.get("launches_forward"), row.get("launches_backward"))
    return "-" if None in counts else " + ".join(map(str, counts))


def other_peers_table(document: dict[str, Any]) -> str:
    """Ours under other options, and layers of other projects: time, memory and error; "" where there are none."""
    reference, body = document["reference"], []
    first, theirs = _by_key(document, reference), _by_key(document, THEIRS)
    for row in document["rows"]:
        if row["peer"] in (reference, THEIRS):
            continue
        key = (row["shape"], row["T"], row["mode"])
        sizes = [share_of(row, other.get(key, {}), "peak_bytes") for other in (first, theirs)]
        cells = [key[0], str(key[1]), key[2], row["peer"], format_us(row["us"]), ratio_of(row)]
        cells += [both((row, {}), name, mib).split(" / ")[0] for name in ("peak_bytes", "saved_bytes")]
        body.append([*cells, *sizes, launches_of(row), both((row, {}), "error", off).split(" / ")[0]])
    times, memory = f"{reference} / it", [f"its peak / {name}'s" for name in (reference, THEIRS)]
    head = ["shape", "T", "experts", "peer", "us", times, "peak, MiB", "kept, MiB", *memory, "launches", "error"]
    return table(head, body) if body else ""


def share_of(row: Row, other: Row, name: str) -> str:
    """ "0.52x"; "-" where one of them has no such number."""
    values = row.get(name), other.get(name)
    return "-" if None in values or not values[1] else f"{values[0] / values[1]:.2f}x"


def floors_table(document: dict[str, Any]) -> str:
    """Microseconds of our kernels by kind, with the share of each that its floor is; "" of a file without kernels or
    ceilings.
    """
    known, ceilings = SHAPES | TINY_SHAPES, document.get("ceilings")
    rows = [row for row in document["rows"] if row["peer"] == document["reference"] and row.get("kernels")]
    rows = [row for row in rows if row["shape"] in known]
    if not rows or not ceilings:
        return ""
    lines = [(row, *shares(row, known[row["shape"]], ceilings)) for row in rows]
    titles = list(dict.fromkeys(share.title for _, found, _ in lines for share in found))
    body = []
    for row, found, rest in lines:
        by_title = {share.title: share for share in found}
        total = sum(share.us for share in found) + rest
        floor = sum(share.floor_us for share in found)
        cells = [share_cell(by_title.get(title)) for title in titles]
        line = [row["shape"], str(row["T"]), row["mode"], *cells, format_us(rest)]
        body.append([*line, f"{format_us(total)} ({floor / total:.0%})"])
    names: dict[str, list[str]] = {}
    for _, found, _ in lines:
        for share in found:
            names.setdefault(share.title, []).extend(name for name in share.names)
    said = "; ".join(f"{title}: {', '.join(f'`{name}`' for name in dict.fromkeys(names[title]))}" for title in titles)
    return "\n\n".join(
        [
            f"Kernels of {document['reference']}, forward and backward together: microseconds, and in brackets the "
            "share of them that the kernels' bytes or arithmetic need at the ceilings of the run, the longer of both.",
            table(["shape", "T", "experts", *titles, "others", "all"], body),
            f"{said[:1].upper()}{said[1:]}.",
        ]
    )


def share_cell(share: Share | None) -> str:
    """ "1150 (83%)"."""
    return "-" if share is None else f"{format_us(share.us)} ({share.floor_us / share.us:.0%})"


def kernels_of_backwards(document: dict[str, Any]) -> str:
    """What the backward of ours launches, in the first case of either kind; "" of a file that does not know."""
    parts = []
    for mode in dict.fromkeys(row["mode"] for row in document["rows"]):
        rows = (row for row in document["rows"] if row["peer"] == document["reference"] and row["mode"] == mode)
        if row := next((row for row in rows if row.get("kernels_backward")), None):
            names = ", ".join(f"{count} x `{name}`" for name, count in row["kernels_backward"].items())
            parts.append(f"Backward of {row['shape']}, T={row['T']}, {mode}: {names}.")
    return " ".join(parts)


def train_step_section(documents: Documents) -> str:
    """A table for every result file of training steps of whole models."""
    return tables(documents, "train-step", train_step_table)


def train_step_table(document: dict[str, Any]) -> str:
    """Milliseconds and peak memory by row and variant; the last columns compare our best with transformers'."""
    rows = document["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    by_key = {(row["batch"], row["tokens"], row["checkpointing"], row["variant"]): row for row in rows}
    body = []
    for key in dict.fromkeys((row["batch"], row["tokens"], row["checkpointing"]) for row in rows):
        of_key = [by_key.get((*key, variant), {}) for variant in variants]
        timed = [row for row in of_key if row.get("ms")]
        theirs = [row for row in timed if row["variant"].startswith(TRANSFORMERS)]
        ours = [row for row in timed if row not in theirs]
        best: list[Row] = [min(group, key=lambda row: row["ms"], default={}) for group in (ours, theirs)]
        rates = " / ".join(f"{row['tokens_per_s']:.0f}" if row else "-" for row in best)
        head = [f"{key[0]} x {key[1]}", "on" if key[2] else "off"]
        body.append([*head, *map(step_cell, of_key), ratio_of(best[0]), rates])
    head = ["batch x tokens", "checkpointing", *(f"{variant}, ms (peak GiB)" for variant in variants)]
    drawn = table([*head, "best of moe_ops / best of transformers", "tokens a second: moe_ops / transformers"], body)
    reasons = list(dict.fromkeys(f"{row['variant']}: {row['reason']}" for row in rows if row["ms"] is None))
    return "\n\n".join([drawn, *([f"Left out (`-`): {'; '.join(reasons)}."] if reasons else [])])


def step_cell(row: Row) -> str:
    """ "25.1 (9.3)"; "-" where it did not run."""
    if not row.get("ms"):
        return "-"
    peak = row.get("peak_bytes")
    return f"{row['ms']:.3g}" + (f" ({peak / 2**30:.1f})" if peak is not None else "")
