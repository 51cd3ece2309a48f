"""The tables of layers whose experts are spread over ranks, from `python -m benchmarks ep`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.tables import Documents, format_us, table, tables
from meta.layers import MODEL_LAYERS

#: Ranks and tokens of a rank for which the exchange is reckoned from what two ranks measured.
RANKS, TOKENS = (4, 8), (64, 1024, 4096)
#: Rows that a rank leaves room for, of those that it is expected to send one: nothing is dropped nearly always.
ROOM = 1.1


def ep_section(documents: Documents) -> str:
    """Two tables for every result file of layers over several ranks."""
    return tables(documents, "ep", lambda document: f"{ep_table(document)}\n\n{more_ranks(document)}")


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


def more_ranks(document: dict[str, Any]) -> str:
    """What an exchange there and back would take among more ranks: a time that any takes, and bytes over a rate, by the
    line through two ranks' times. Every GPU has the same rate to all others together, as behind a switch.
    """
    lines = {name: _line(document, name) for name in ("gather", "symm", "all_to_all")}
    body = []
    for shape in dict.fromkeys(row["shape"] for row in document["rows"]):
        for ranks in RANKS:
            hit = 1 - (1 - 1 / ranks) ** MODEL_LAYERS[shape][1]  # a token has an expert on a given rank
            for tokens in TOKENS:
                sent = [tokens, tokens, tokens, min(round(ROOM * hit * tokens), tokens)]
                times = [
                    format_us(lines[name]((ranks - 1) * rows * _row_bytes(shape)))
                    for name, rows in zip((*lines, "all_to_all"), sent, strict=True)
                ]
                body.append([shape, str(ranks), str(tokens), *times])
    head = ["shape", "ranks", "tokens of a rank", *lines, f"all_to_all, room for {ROOM} of the rows expected"]
    said = "Exchanges of more ranks, us, reckoned from the table above and not run"
    return f"{said} (layers' times less those of the local experts):\n\n{table(head, body)}"


def _row_bytes(shape: str) -> int:
    """Of one token for one rank: its row there and back in bf16, K weights and ids."""
    _, K, H, _ = MODEL_LAYERS[shape]
    return 4 * H + 8 * K


def _line(document: dict[str, Any], transport: str) -> Callable[[float], float]:
    """Microseconds of an exchange by the bytes that a rank sends, through the times of two ranks."""
    times: dict[float, float] = {}
    us = {(row["shape"], row["tokens"], row["what"]): row["us"] for row in document["rows"]}
    for row in document["rows"]:
        key = (row["shape"], row["tokens"])
        sent = (row["ranks"] - 1) * row["tokens"] / row["ranks"] * _row_bytes(row["shape"])
        times[sent] = us[*key, transport] - us[*key, "local experts"]
    slope, least = statistics.linear_regression(list(times), list(times.values()))
    return lambda sent: least + slope * sent
