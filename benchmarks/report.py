"""From committed result files to the README's generated sections and the plots; nothing here measures anything.

A section stands between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`; SECTIONS lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plots import draw_layers, plot_paths
from benchmarks.results import load_results
from meta.activations import ACTIVATIONS
from meta.routing import ROUTINGS
from meta.schemes import SCHEMES

NO_RESULTS = "No result file yet."
Documents = dict[str, dict[str, Any]]


def main(folder: Path, readme: Path, *, check: bool = False) -> int:
    """Rewrite the README and the plots; with `check`, only say whether that would change anything."""
    documents = load_results(folder)
    old = readme.read_text()
    new = render(old, documents)
    layers = {stem: document for stem, document in documents.items() if document["kind"] == "layers"}
    if check:
        missing = [path for stem in layers for path in plot_paths(folder, stem) if not path.exists()]
        stale = old != new
        if stale or missing:
            print(f"README or plots are not up to date ({', '.join(map(str, missing)) or readme}): make readme")
        return int(stale or bool(missing))
    readme.write_text(new)
    for stem, document in layers.items():
        for path in draw_layers(document, folder, stem):
            print(path)
    return 0


def render(text: str, documents: Documents) -> str:
    """The README with every generated section rewritten.

    Raises:
        ValueError: a section's markers are missing.
    """
    for name, section in SECTIONS.items():
        opening, closing = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        pattern = re.compile(re.escape(opening) + ".*?" + re.escape(closing), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"report: the README must hold {opening} and {closing}, got neither or one.")
        body = f"{opening}\n{section(documents).strip()}\n{closing}"
        text = pattern.sub(lambda _, body=body: body, text)
    return text


def layers_section(documents: Documents) -> str:
    """A table and two plots for every result file of single layers."""
    parts = []
    for stem, document in documents.items():
        if document["kind"] == "layers":
            time_plot, share_plot = (path.name for path in plot_paths(Path(), stem)[::2])
            parts.append(
                f"#### {document['scheme']}, {document['format']}: {source_line(stem, document)}\n\n"
                f"{layers_table(document)}\n\n"
                f"![time by tokens](benchmarks/results/{time_plot})\n\n"
                f"![share of the roofline by tokens](benchmarks/results/{share_plot})\n\n"
                f"Method: {document['method']}."
            )
    return "\n\n".join(parts) or NO_RESULTS


def layers_table(document: dict[str, Any]) -> str:
    """Microseconds by shape, tokens and peer; in parentheses the share of the peer's own roof."""
    rows = document["rows"]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    work = {row["peer"]: row["work"] for row in rows}
    by_key = {(row["shape"], row["T"], row["peer"]): row for row in rows}
    keys = list(dict.fromkeys((row["shape"], row["T"]) for row in rows))
    header = ["shape", "T", "roof", *(f"{peer} ({work[peer]})" for peer in peers)]
    body = []
    for shape, T in keys:
        cells = [by_key.get((shape, T, peer)) for peer in peers]
        roof = next((cell["roof_us"] for cell in cells if cell and cell.get("roof_us")), None)
        body.append([shape, str(T), format_us(roof), *(layer_cell(cell) for cell in cells)])
    return table(header, body)


def layer_cell(row: dict[str, Any] | None) -> str:
    """ "28.8 (61%)", or "-" where the peer did not run."""
    if row is None or row["us"] is None:
        return "-"
    share = f" ({row['roof_us'] / row['us']:.0%})" if row.get("roof_us") else ""
    return format_us(row["us"]) + share


def e2e_section(documents: Documents) -> str:
    """A table for every result file of whole models."""
    return _tables(documents, "e2e", e2e_table)


def _tables(documents: Documents, kind: str, draw: Callable[[dict[str, Any]], str]) -> str:
    parts = [
        f"#### {source_line(stem, document)}\n\n{draw(document)}\n\nMethod: {document['method']}."
        for stem, document in documents.items()
        if document["kind"] == kind
    ]
    return "\n\n".join(parts) or NO_RESULTS


def e2e_table(document: dict[str, Any]) -> str:
    """Milliseconds by batch x new tokens and variant; the last column compares transformers' best with ours."""
    rows = document["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    by_key = {(row["batch"], row["new_tokens"], row["variant"]): row for row in rows}
    keys = list(dict.fromkeys((row["batch"], row["new_tokens"]) for row in rows))
    body = []
    for batch, new in keys:
        times = {variant: by_key.get((batch, new, variant), {}).get("ms") for variant in variants}
        cells = [f"{ms:.3g}" if ms else "-" for ms in times.values()]
        body.append([f"{batch} x {new}", *cells, speedup(times)])
    return table(["batch x new tokens", *variants, "best of transformers / best of moe_ops"], body)


def speedup(times: dict[str, float | None]) -> str:
    """Best time without this project over the best time with all of it."""
    ours = [ms for variant, ms in times.items() if ms and variant.startswith("moe_ops")]
    theirs = [ms for variant, ms in times.items() if ms and variant.startswith(("grouped_mm", "batched_mm"))]
    return f"{min(theirs) / min(ours):.2f}x" if ours and theirs else "-"


def host_section(documents: Documents) -> str:
    """A table for every result file of host times."""
    return _tables(documents, "host", host_table)


def host_table(document: dict[str, Any]) -> str:
    """Microseconds, the share of the reference, and the way through the code, by shape, T and way to call."""
    body = [
        [
            row["shape"],
            str(row["T"]),
            row["peer"],
            format_us(row["host_us"]),
            f"{row['share']:.2f}",
            str(row["files"]),
            str(row["calls"]),
        ]
        for row in document["rows"]
    ]
    return table(["shape", "T", "call", "us", "share", "files", "calls"], body)


def schemes_section(_: Documents) -> str:
    """The table of schemes, from meta/schemes.py."""
    body = [
        [
            f"`{row.name}`",
            short_dtype(row.weight_dtype),
            ", ".join(f"one per {spec.group_n} x {spec.group_k}" for spec in row.scales) or "none",
            row.rows.name if row.rows is not None else "as given",
        ]
        for row in SCHEMES.values()
    ]
    return table(["scheme", "weights", "weight scales (N x K)", "activations"], body)


def routings_section(_: Documents) -> str:
    """The table of routings, from meta/routing.py."""
    body = [
        [f"`{row.name}`", row.score, row.group or "-", row.after, "yes" if row.supports_bias else "no"]
        for row in ROUTINGS.values()
    ]
    return table(["routing", "score of every expert", "groups ranked by", "applied to the K selected", "bias"], body)


def activations_section(_: Documents) -> str:
    """The names of activations, from meta/activations.py."""
    return ", ".join(f"`{name}`" for name in ACTIVATIONS) + "."


SECTIONS: dict[str, Callable[[Documents], str]] = {
    "schemes": schemes_section,
    "routings": routings_section,
    "activations": activations_section,
    "layers": layers_section,
    "e2e": e2e_section,
    "host": host_section,
}


def source_line(stem: str, document: dict[str, Any]) -> str:
    """Where a table's numbers come from."""
    versions = ", ".join(
        f"{name} {document['versions'][name]}" for name in ("torch", "triton") if name in document["versions"]
    )
    where = f"commit {document['commit']} (`benchmarks/results/{stem}.json`)"
    return f"{document['device']}, {versions}, {document['date']}, {where}"


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_us(us: float | None) -> str:
    """Three significant digits, without an exponent."""
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def short_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
