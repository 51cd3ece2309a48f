"""The table of layers whose experts are spread over ranks, from `python -m benchmarks ep`."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Documents, format_us, table, tables


def ep_section(documents: Documents) -> str:
    """A table for every result file of layers over several ranks."""
    return tables(documents, "ep", ep_table)


def ep_table(document: dict[str, Any]) -> str:
    """Microseconds by shape and tokens of all ranks; in brackets, how many times as fast as one GPU."""
    names = list(dict.fromkeys(row["what"] for row in document["rows"]))
    by_key = {(row["shape"], row["tokens"], row["what"]): row for row in document["rows"]}
    keys = list(dict.fromkeys((row["shape"], row["tokens"], row["ranks"]) for row in document["rows"]))
    body = [
        [
            shape,
            str(ranks),
            str(tokens),
            *(_cell(by_key.get((shape, tokens, name)), name == names[0]) for name in names),
        ]
        for shape, tokens, ranks in keys
    ]
    return table(["shape", "ranks", "tokens", *names], body)


def _cell(row: dict[str, Any] | None, whole: bool) -> str:
    if row is None:
        return "-"
    of_layer = row["error"] is not None and not whole
    return format_us(row["us"]) + (f" ({row['ratio']:.2f}x)" if of_layer else "")
