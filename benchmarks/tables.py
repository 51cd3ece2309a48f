"""What tables of the pages are made of: lines and cells, where numbers come from, and under what conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NO_RESULTS = "No result file yet."
Documents = dict[str, dict[str, Any]]


def of_kind(documents: Documents, kind: str) -> Documents:
    return {stem: document for stem, document in documents.items() if document["kind"] == kind}


def tables(documents: Documents, kind: str, draw: Callable[[dict[str, Any]], str]) -> str:
    """A table for every result file of a kind, under where it comes from, with its method below."""
    parts = [
        f"### {source_line(stem, document)}\n\n{draw(document)}\n\nMethod: {document['method']}."
        for stem, document in of_kind(documents, kind).items()
    ]
    return "\n\n".join(parts) or NO_RESULTS


def conditions(document: dict[str, Any]) -> str:
    """The ceilings that the run measured, and the state of the GPU over its cases; "" for a file without."""
    rates = document.get("ceilings")
    if not rates:
        return ""
    units = {"bf16_tflops": "bf16 {:.0f} TFLOP/s", "fp8_tflops": "fp8 {:.0f} TFLOP/s", "read_gbps": "read {:.0f} GB/s"}
    said = ", ".join(text.format(rates[name]) for name, text in units.items() if name in rates)
    for name, label in (("sm_mhz", "SM clock {:.0f} to {:.0f} MHz"), ("watts", "{:.0f} to {:.0f} W")):
        if seen := [row[name] for row in document["rows"] if row.get(name) is not None]:
            said += "; " + label.format(min(seen), max(seen))
    return f"Ceilings in the same run: {said}."


def interval(row: dict[str, Any]) -> str:
    """A ratio and where it lies with 95 %."""
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"


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
