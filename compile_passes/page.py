"""The report as HTML that needs nothing else: no script, no font, no picture from anywhere, light and dark.

What comes from the model (paths, source lines, messages) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING

from compile_passes.diagram import Diagram, Line, Operator, Stage
from compile_passes.style import STYLE

if TYPE_CHECKING:
    from compile_passes.report import Fused, Refused, Report

_STAGES = {
    "router": ("Router", "gives every expert a score for every token"),
    "top-k": ("Top-k", "keeps the best experts of each token, and their weights"),
    "dispatch": ("Dispatch", "brings the tokens to their experts"),
    "experts": ("Expert products", "each expert's matrix products, with the activation between them"),
    "combine": ("Combine", "weighs each token's results and adds them up"),
    "outside": ("Outside", "reads a value from inside of the block"),
}
_OPERATORS = {
    "fused_moe": "router, dispatch, both products and the sum in one call",
    "fused_experts": "dispatch, both products and the sum in one call",
    "fused_topk": "scores to expert ids and weights in one call",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>body{{margin:0}}.moe-ops{{padding:28px max(20px,calc(50vw - 560px));min-height:100vh}}{style}</style></head>
<body class="moe-ops">{body}</body></html>
"""


def whole(report: Report) -> str:
    """One page: the summary, every block before and after, and what stopped the capture."""
    blocks = "".join(_card(rows) for rows in _alike([*report.refused, *report.staged, *report.fused]))
    body = f"""<h1>MoE blocks under torch.compile</h1>
{_summary(report)}
<p class="soft">On the left, what the model's own code does, by source line, in the order in which it runs; a coloured
box is one step of a Mixture-of-Experts layer. On the right, what runs in its place.</p>
{blocks}{_around(report)}"""
    return _PAGE.format(title=escape(report.summary), style=STYLE, body=body)


def fragment(report: Report) -> str:
    """What a notebook shows: the summary, a table of blocks, and why some were refused."""
    lines = []
    for row, *others in _alike([*report.refused, *report.staged, *report.fused]):
        more = f"<div class='soft small'>and {len(others)} more, which are alike</div>" if others else ""
        lines.append(
            f"<tr><td><span class='chip {_look(row)}'>{_status(row)}</span></td><td><span class='mono'>"
            f"{escape(_title(row))}</span>{more}</td><td>{_facts_in_words(row)}</td></tr>"
        )
    table = f"<table>{''.join(lines)}</table>" if lines else ""
    return f"<style>{STYLE}</style><div class='moe-ops'>{_summary(report)}{table}{_around(report)}</div>"


def _summary(report: Report) -> str:
    chips = [
        _chip(f"<b>{len(report.fused)}</b> fused", "good" if report.fused else ""),
        *([_chip(f"<b>{len(report.staged)}</b> staged", "good")] if report.staged else []),
        _chip(f"<b>{len(report.refused)}</b> refused", "bad" if report.refused else ""),
        _chip(f"<b>{report.graphs}</b> graph(s)"),
        _chip(f"<b>{report.graph_breaks}</b> graph break(s)", "bad" if report.graph_breaks else ""),
    ]
    if report.causal_masks:
        chips.append(_chip(f"<b>{report.causal_masks}</b> attention call(s) are causal without reading a mask"))
    if report.shared_heads:
        chips.append(_chip(f"<b>{report.shared_heads}</b> attention call(s) or product(s) read shared heads in place"))
    if report.own_calls:
        chips.append(_chip(f"<b>{report.own_calls}</b> operator call(s) of the model's own"))
    if not report.fused and not report.staged and not report.refused and not report.own_calls:
        chips.append(_chip("no MoE block is in a captured graph"))
    return f"<div class='chips'>{''.join(chips)}</div>"


def _around(report: Report) -> str:
    """Breaks, functions left to Python and errors."""
    parts = (
        ("Graph breaks", report.graph_break_reasons),
        ("Functions left to Python", report.eager_frames),
        ("Errors in moe_ops", report.errors),
        ("The model raised", [report.error] if report.error else []),
    )
    return "".join(f"<h2>{title}</h2>{_list(lines)}" for title, lines in parts if lines)


def _alike(rows: Sequence[Fused | Refused]) -> list[list[Fused | Refused]]:
    """Blocks that differ in nothing but their module are shown once."""
    found: dict[object, list[Fused | Refused]] = {}
    for row in rows:
        facts = {**row.to_dict(), "module": None}
        drawn = None if row.diagram is None else (row.diagram.stages, row.diagram.after)
        found.setdefault((repr(facts), drawn), []).append(row)
    return list(found.values())


def _card(rows: Sequence[Fused | Refused]) -> str:
    row, others = rows[0], rows[1:]
    more = ""
    if others:
        names = _list(other.module or other.location for other in others)
        more = f"<details><summary>and {len(others)} more, which are alike</summary>{names}</details>"
    return (
        f"<div class='card'><span class='chip {_look(row)}'>{_status(row)}</span> "
        f"<span class='name mono'>{escape(_title(row))}</span>{_place(row.location) if row.module else ''}"
        f"{more}{_facts(row)}{_flow(row)}</div>"
    )


def _flow(row: Fused | Refused) -> str:
    diagram = row.diagram
    right = _refusal(row) if _status(row) == "refused" else _operators(diagram.after if diagram else (), row)
    if diagram is None:
        return f"<div style='margin-top:12px'>{right}</div>"
    down = "<div class='down'>&#8595;</div>"
    kept = getattr(row, "routing", "") == "kept"
    before = down.join(_stage(stage, kept) for stage in diagram.stages)
    count = len(diagram.operations)
    after = "after" if diagram.after else "why it stays as it is"
    arrow = "&#10142;" if diagram.after else "&#10005;"
    return (
        f"{_strip(diagram, kept)}"
        f"<div class='flow'><div><p class='head'>before: {count} operations</p>{before}</div>"
        f"<div class='big side'>{arrow}</div><div class='side'><p class='head'>{after}</p>{right}</div></div>"
        f"<details><summary>the {count} operations, as captured</summary>"
        f"<p class='mono'>{escape(chr(10).join(diagram.operations))}</p></details>"
    )


def _strip(diagram: Diagram, kept: bool) -> str:
    """The steps of a block in one row, and what takes their place."""
    steps = []
    for stage in diagram.stages:
        stopped = any(line.stopped for line in stage.lines)
        mark, look = (" &#10005;", " not") if stopped else (" stays", " kept") if _stays(stage, kept) else ("", "")
        steps.append(f"<span class='step{look}' style='{_hue(stage)}'>{_STAGES[stage.role][0]}{mark}</span>")
    made = [f"<span class='step new mono'>{escape(operator.name)}</span>" for operator in diagram.after]
    arrow = "<span class='soft'>&#8594;</span>"
    becomes = f"<span class='soft'>becomes</span>{arrow.join(made)}" if made else ""
    return f"<div class='strip'>{arrow.join(steps)}{becomes}</div>"


def _stays(stage: Stage, kept: bool) -> bool:
    return kept and stage.role in ("router", "top-k")


def _hue(stage: Stage) -> str:
    return f"--hue:var(--{stage.role.replace('-', '')})"


def _stage(stage: Stage, kept: bool) -> str:
    title, text = _STAGES[stage.role]
    text += "; stays as it is" if _stays(stage, kept) else ""
    lines = "".join(map(_line, stage.lines))
    return (
        f"<div class='stage' style='{_hue(stage)}'><span class='what'>{title}</span> "
        f"<span class='soft small'>{text}</span>{lines}</div>"
    )


def _line(line: Line) -> str:
    flag = "<div class='flag'>stopped here: the nearest miss</div>" if line.stopped else ""
    times = f" &#215; {line.times}" if line.times > 1 else ""
    return (
        f"<div class='row{' stop' if line.stopped else ''}'><div>{flag}<code>{escape(line.code)}</code>"
        f"<div class='soft small' title='{escape(line.location)}'>{escape(_short(line.location))} &#183; "
        f"{escape(', '.join(line.operations))}{times}</div></div>"
        f"<div class='shape mono'>{escape(line.shape)}</div></div>"
    )


def _operators(operators: Sequence[Operator], row: Fused | Refused) -> str:
    boxes = []
    for operator in operators:
        tensors = "".join(
            f"<tr><td class='mono'>{escape(name)}</td><td class='mono soft'>{escape(shape)}</td></tr>"
            for name, shape in operator.tensors
        )
        options = ", ".join(f"{name}={value}" for name, value in operator.options)
        boxes.append(
            f"<div class='op'><div class='title mono'>moe_ops.{escape(operator.name)}</div>"
            f"<p class='soft small'>{escape(_OPERATORS.get(operator.name, ''))}</p><table>{tensors}</table>"
            f"<p class='mono small'>{escape(options)}</p>"
            f"<p class='small soft'>gives <span class='mono'>{escape(operator.shape)}</span></p></div>"
        )
    notes = "".join(f"<p class='small soft'>{escape(note)}</p>" for note in getattr(row, "notes", ()))
    return "<div class='down'>&#8595;</div>".join(boxes) + notes


def _refusal(row: Fused | Refused) -> str:
    """Why, where and the cure, in words."""
    data = row.to_dict()
    line = f"<p><code>{escape(data['source'])}</code></p>" if data["source"] else ""
    return (
        f"<div class='no'><div class='title'>Not fused: the code runs as it is</div><p>{escape(data['reason'])}</p>"
        f"{line}{_place(row.location)}<p><b>Cure.</b> {escape(data['cure'])}</p></div>"
    )


def _facts(row: Fused | Refused) -> str:
    data = row.to_dict()
    if data["status"] == "refused":
        return ""
    sizes = data["sizes"]
    named = [
        ("routing", data["routing"]), ("form", data["experts"]), ("activation", data["activation"]),
        ("layout", data["glu_layout"]), ("weights", data["scheme"]), ("backend", data["backend"]),
        ("experts", sizes["E"]), ("of them for each token", sizes["K"]), ("hidden size", sizes["H"]),
        ("expert width", sizes["I"]),
    ]  # fmt: skip
    chips = "".join(_chip(f"{name} <b>{escape(str(value))}</b>") for name, value in named)
    return f"<div class='chips'>{chips}</div>"


def _facts_in_words(row: Fused | Refused) -> str:
    data = row.to_dict()
    if data["status"] == "refused":
        return f"{escape(data['reason'])} <b>Cure.</b> {escape(data['cure'])}{_place(row.location)}"
    sizes = data["sizes"]
    return escape(
        f"{data['routing']} routing, {sizes['K']} of {sizes['E']} experts, {data['activation']}, {data['scheme']}, "
        f"{data['backend']}"
    )


def _status(row: Fused | Refused) -> str:
    return escape(str(row.to_dict()["status"]))


def _look(row: Fused | Refused) -> str:
    return "bad" if _status(row) == "refused" else "good"


def _title(row: Fused | Refused) -> str:
    return row.module or _short(row.location)


def _place(location: str) -> str:
    return f"<div class='soft small' title='{escape(location)}'>{escape(_short(location))}</div>"


def _short(location: str) -> str:
    """A location without the folders of its file."""
    file, colon, rest = location.partition(":")
    return f"{PurePath(file).name}{colon}{rest}" if colon else location


def _chip(text: str, look: str = "") -> str:
    return f"<span class='chip {look}'>{text}</span>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li class=mono>{escape(line)}</li>' for line in lines)}</ul>"
