"""From committed result files to the generated sections of pages and the plots; nothing here measures anything.

A section stands between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->`; SECTIONS lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ep_report import ep_section
from benchmarks.pictures import (
    BLOCK,
    RANKS,
    TOKENS,
    draw_block,
    draw_ranks,
    draw_tokens,
    model_of,
    of_the_first_page,
    paths_of,
    steps_of,
    title_of,
)  # fmt: skip
from benchmarks.plots import best_peer, draw_layers, plot_paths, routings_of
from benchmarks.results import load_results, numbers_of
from benchmarks.tables import (
    NO_RESULTS,
    Documents,
    conditions,
    format_us,
    interval,
    of_kind,
    short_dtype,
    source_line,
    table,
    tables,
)
from benchmarks.training_report import (
    BASELINE,
    draw_train,
    ratios,
    train_plot_paths,
    train_section,
    train_step_section,
)
from meta.activations import ACTIVATIONS
from meta.blocks import BLOCKS
from meta.routing import ROUTINGS
from meta.schemes import SCHEMES

CAPTIONS = {
    "time.png": "time by tokens",
    "share.png": "share of the roofline by tokens",
    "ratio.png": "our time over the best other's by tokens",
}


def main(folder: Path, pages: Sequence[Path], *, check: bool = False) -> int:
    """Rewrite the pages and the plots; with `check`, only say whether that would change anything."""
    documents = load_results(folder)
    old = {page: page.read_text() for page in pages}
    new = render(old, documents)
    layers, of_models = of_kind(documents, "layers"), of_kind(documents, "e2e")
    if check:
        drawn = [path for stem, document in layers.items() for path in plot_paths(document, folder, stem)]
        drawn += train_plot_paths(documents, folder)
        pictures = [BLOCK, RANKS] + ([TOKENS] if any(map(steps_of, of_models.values())) else [])
        drawn += [path for name in pictures for path in paths_of(name, folder)]
        missing = [path for path in drawn if not path.exists()]
        stale = [page for page in pages if old[page] != new[page]]
        if stale or missing:
            print(f"not up to date: {', '.join(map(str, [*stale, *missing]))}. Run make readme")
        return int(bool(stale or missing))
    for page, text in new.items():
        page.write_text(text)
    drawn = [path for stem, document in layers.items() for path in draw_layers(document, folder, stem)]
    drawn += draw_train(documents, folder) + draw_tokens(of_models, folder) + draw_block(folder) + draw_ranks(folder)
    print("\n".join(map(str, drawn)))
    return 0


def render(pages: Mapping[Path, str], documents: Documents) -> dict[Path, str]:
    """The pages with every generated section rewritten.

    Raises:
        ValueError: a section's markers are on none of them.
    """
    found = dict(pages)
    for name, section in SECTIONS.items():
        opening, closing = f"<!-- generated:{name} -->", f"<!-- /generated:{name} -->"
        pattern = re.compile(re.escape(opening) + ".*?" + re.escape(closing), re.DOTALL)
        page = next((page for page, text in found.items() if pattern.search(text)), None)
        if page is None:
            names = ", ".join(map(str, found))
            raise ValueError(f"report: one of {names} must hold {opening} and {closing}, got neither or one.")
        body = f"{opening}\n{section(documents).strip()}\n{closing}"
        found[page] = pattern.sub(lambda _, body=body: body, found[page])
    return found


def layers_section(documents: Documents) -> str:
    """Tables and plots for every result file of single layers."""
    parts = []
    for stem, document in documents.items():
        if document["kind"] == "layers":
            plots = [path.name for path in plot_paths(document, Path(), stem) if path.suffix == ".png"]
            parts += [
                f"### {numbers_of(document)}, {document['format']}: {source_line(stem, document)}",
                conditions(document),
                *(layers_table(document, routing) for routing in routings_of(document["rows"])),
                *(f"![{CAPTIONS[name.split('-')[-1]]}](results/{name})" for name in plots),
                f"Method: {document['method']}.",
            ]
    return "\n\n".join(filter(None, parts)) or NO_RESULTS


def layers_table(document: dict[str, Any], routing: str) -> str:
    """Microseconds by shape, tokens and peer, with the share of the peer's own roof; what is odd stands below."""
    rows = [row for row in document["rows"] if row.get("routing", "uniform") == routing]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    work = {row["peer"]: row["work"] for row in rows}
    by_key = {(row["shape"], row["T"], row["peer"]): row for row in rows}
    keys = list(dict.fromkeys((row["shape"], row["T"]) for row in rows))
    reference, comparable = document.get("reference"), best_peer(rows) is not None
    header = ["shape", "T", "roof", *(f"{peer} ({work[peer]})" for peer in peers)]
    body = []
    for shape, T in keys:
        cells = [by_key.get((shape, T, peer)) for peer in peers]
        roof = next((cell["roof_us"] for cell in cells if cell and cell.get("roof_us")), None)
        best = [best_peer_cell([cell for cell in cells if cell])] if comparable else []
        body.append([shape, str(T), format_us(roof), *(layer_cell(cell, reference) for cell in cells), *best])
    flags = [f"† {row['shape']}, {row['T']}: {row['flag']}." for row in rows if row.get("flag")]
    left_out = list(dict.fromkeys(f"{row['peer']}: {row['reason'].rstrip(':')}" for row in rows if row["us"] is None))
    flags += [f"Left out (`-`): {'; '.join(left_out)}."] if left_out else []
    head = [] if routing == "uniform" else [f"Routing `{routing}`:"]
    drawn = table([*header, *([f"{reference} / best of others"] if comparable else [])], body)
    return "\n\n".join([*head, drawn, *flags])


def layer_cell(row: dict[str, Any] | None, reference: str | None = None) -> str:
    """ "28.8 (61%) 0.79x", the last of which is the reference's time over the peer's; "-" where it did not run."""
    if row is None or row["us"] is None:
        return "-"
    share = f" ({row['roof_us'] / row['us']:.0%})" if row.get("roof_us") else ""
    ratio = f" {row['ratio']:.2f}x" if row.get("ratio") and row["peer"] != reference else ""
    return format_us(row["us"]) + share + ratio + ("†" if row.get("flag") else "")


def best_peer_cell(rows: list[dict[str, Any]]) -> str:
    """ "0.79 (0.78 to 0.80) hf_moe"."""
    best = best_peer(rows)
    return f"{interval(best)} {best['peer']}" if best else "-"


def e2e_section(documents: Documents) -> str:
    """A table for every result file of whole models."""
    return tables(documents, "e2e", e2e_table)


def e2e_table(document: dict[str, Any]) -> str:
    """Milliseconds by batch x new tokens and variant; the last column compares our best with transformers', or with our
    unquantised variant.
    """
    rows = document["rows"]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    by_key = {(row["batch"], row["new_tokens"], row["variant"]): row for row in rows}
    keys = list(dict.fromkeys((row["batch"], row["new_tokens"]) for row in rows))
    in_turn = any("ratio" in row for row in rows)
    body = []
    for batch, new in keys:
        of_key = [by_key.get((batch, new, variant), {}) for variant in variants]
        cells = [f"{row['ms']:.3g}" if row.get("ms") else "-" for row in of_key]
        times = {variant: row.get("ms") for variant, row in zip(variants, of_key, strict=True)}
        body.append([f"{batch} x {new}", *cells, gain(of_key) if in_turn else speedup(times)])
    last = "best of moe_ops / best of transformers" if in_turn else "best of transformers / best of moe_ops"
    references = {row["reference"] for row in rows if row.get("reference", "").startswith("moe_ops")}
    if references:
        last = f"best / {references.pop()}"
    return table(["batch x new tokens", *variants, last], body)


def gain(rows: list[dict[str, Any]]) -> str:
    """The ratio of our fastest variant, whose rounds were transformers' too."""
    ours = [row for row in rows if row.get("ratio") and row["variant"].startswith("moe_ops")]
    return interval(min(ours, key=lambda row: row["ms"])) if ours else "-"


def speedup(times: dict[str, float | None]) -> str:
    """Of files whose variants were timed one after the other: transformers' best time over ours."""
    ours = [ms for variant, ms in times.items() if ms and variant.startswith("moe_ops")]
    theirs = [ms for variant, ms in times.items() if ms and variant.startswith(("grouped_mm", "batched_mm"))]
    return f"{min(theirs) / min(ours):.2f}x" if ours and theirs else "-"


def host_section(documents: Documents) -> str:
    """A table for every result file of host times."""
    return tables(documents, "host", host_table)


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


def forms_section(documents: Documents) -> str:
    """A table for every result file of layers of other people's code."""
    return tables(documents, "forms", forms_table)


def forms_table(document: dict[str, Any]) -> str:
    """Microseconds of both ways, and how many times as fast ours is, by layer and T."""
    body = []
    for row in document["rows"]:
        cells = [row["form"], *(str(row[letter]) for letter in "EKHIT")]
        for kind in ("call", "graph"):
            ours, plain = (row.get(f"{name}_{kind}_us") for name in ("ours", "plain"))
            cells += [format_us(ours), format_us(plain), f"{plain / ours:.2f}x" if ours and plain else "-"]
        body.append(cells)
    head = [f"{kind}: {name}" for kind in ("call", "graph") for name in ("ours", "torch.compile", "gain")]
    return table(["layer", *"EKHIT", *head], body)


def load_section(documents: Documents) -> str:
    """A table for every result file of counting the experts' load."""
    return tables(documents, "load", load_table)


def load_table(document: dict[str, Any]) -> str:
    """Microseconds of a layer while nobody counts and while somebody does, by shape, T and layer."""
    body = [
        [row["shape"], str(row["T"]), row["peer"], format_us(row["off_us"]), format_us(row["on_us"]), interval(row)]
        for row in document["rows"]
    ]
    return table(["shape", "T", "layer", "off, us", "on, us", "on / off"], body)


def schemes_section(_: Documents) -> str:
    """The table of schemes, from meta/schemes.py."""
    body = [
        [
            f"`{row.name}`",
            short_dtype(row.weight_dtype),
            ", ".join(str(spec) for spec in row.scales) or "none",
            row.rows.name if row.rows is not None else "as given",
            BLOCKS[row.blocks].name if row.blocks is not None else "the same",
        ]
        for row in SCHEMES.values()
    ]
    return table(["scheme", "weights", "weight scales (N x K)", "activations", "activations on sm_100"], body)


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


def summary_section(documents: Documents) -> str:
    """How many times as fast blocks and models are, from their least gain to their largest, for the first page."""
    found: dict[tuple[str, str, str], tuple[list[str], list[float], list[str]]] = {}
    for stem, document in documents.items():
        kind, name = document["kind"], ""
        what: list[str] = []
        if kind == "forms":
            gains = [row["plain_call_us"] / row["ours_call_us"] for row in document["rows"]]
            what = [row["form"] for row in document["rows"]]
        elif kind == "train" and not stem.endswith(BASELINE):
            rows = ratios(document)
            what, gains = [row["shape"] for row in rows], [1 / row["ratio"] for row in rows]
        elif kind in ("e2e", "train-step"):
            name, published = model_of(document)
            what, name, gains = ([name], "", _step_gains(document)) if published else ([], name, _step_gains(document))
        else:
            continue
        if gains:
            names, all_gains, stems = found.setdefault((kind, name, document["device"]), ([], [], []))
            names += what
            all_gains += gains
            stems.append(f"`{stem}.json`")
    lines = []
    for (kind, name, device), (names, gains, stems) in found.items():
        names = list(dict.fromkeys(names))
        said = _SUMMARIES[kind].format(number=len(names), names=name or ", ".join(names))
        least, most = _factor(min(gains)), _factor(max(gains))
        lines.append([said, least if least == most else f"{least} to {most}", device, ", ".join(stems)])
    head = ["against the best of plain torch.compile", "times as fast", "on", "result files"]
    return table(head, lines) if lines else NO_RESULTS


_SUMMARIES = {
    "forms": "{number} layers of other people's code",
    "e2e": "steps of {names}",
    "train": "forward and backward of a layer of {number} models",
    "train-step": "training steps of {names}",
}


def _step_gains(document: dict[str, Any]) -> list[float]:
    """How many times as fast as transformers' best the best of ours is, for every step of a file of whole models."""
    steps: dict[tuple[Any, ...], list[float]] = {}
    for row in document["rows"]:
        ours = row["variant"].startswith("moe_ops") and not row.get("reference", "").startswith("moe_ops")
        if row.get("ratio") and ours:
            step = tuple(row.get(name) for name in ("batch", "new_tokens", "tokens", "checkpointing"))
            steps.setdefault(step, []).append(1 / row["ratio"])
    return [max(gains) for gains in steps.values()]


def _factor(gain: float) -> str:
    """Two digits behind the point below 1, where a gain is a loss."""
    return f"{gain:.2f}x" if gain < 1 else f"{gain:.1f}x"


def tokens_section(documents: Documents) -> str:
    """The picture of whole models' decode steps, and its conditions."""
    drawn = of_the_first_page(of_kind(documents, "e2e"))
    if not drawn:
        return NO_RESULTS
    parts = [f"{title_of(document)}: {source_line(stem, document)}" for stem, document in drawn.items()]
    return (
        "![tokens a second: eager, torch.compile, moe_ops](benchmarks/results/tokens.png)\n\n"
        "One new token for each sequence, bf16, random weights; each bar is the fastest variant of its kind "
        f"([all of them](benchmarks/README.md)). {'; '.join(parts)}."
    )


SECTIONS: dict[str, Callable[[Documents], str]] = {
    "tokens": tokens_section,
    "summary": summary_section,
    "ep": ep_section,
    "load": load_section,
    "schemes": schemes_section,
    "forms": forms_section,
    "routings": routings_section,
    "activations": activations_section,
    "layers": layers_section,
    "train": train_section,
    "train-step": train_step_section,
    "e2e": e2e_section,
    "host": host_section,
}
