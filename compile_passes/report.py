"""The report of `explain`: rows of fused and refused blocks, as text, as a dictionary for JSON, and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_passes import page
from compile_passes.diagram import Diagram

#: Version of what `Report.to_dict` returns: a key that is renamed or dropped raises it, a new one does not.
SCHEMA = 1


@dataclass(frozen=True)
class Fused:
    """A block that was replaced.

    Attributes:
        module: path of the experts' module, when the model is one of modules.
        location: source line of its second expert product.
        routing: routing of `fused_topk`, or "kept" when the router stays in the graph.
        router_note: why the router stays; empty when it does not.
        experts: spelling of the experts in the model: "grouped_mm" (rows sorted by expert), "batched_mm" (weights
            gathered by ids), "dense" (all experts for all tokens), "loop" (one expert after the other), "capacity"
            (rows moved to slots of their experts by a product with a one-hot).
        activation, glu_layout, scheme, backend: what the operator runs.
        E, K, H, I: experts, top-k, hidden and expert width.
        diagram: the block before and after.
        staged: whether code of the model stays between the experts and the combine.
        low_rank: the ranks of the factors that are added to the expert weights, and that rows go through beside them.
        merged_note: why the graph still adds such factors to a weight, and what to do about it; empty when it does not.
    """

    module: str
    location: str
    routing: str
    router_note: str
    experts: str
    activation: str
    glu_layout: str
    scheme: str
    backend: str
    E: Any
    K: Any
    H: Any
    I: Any
    diagram: Diagram | None = field(default=None, repr=False, compare=False)
    staged: bool = False
    low_rank: tuple[int, ...] = ()
    merged_note: str = ""

    @property
    def notes(self) -> list[str]:
        """What is not obvious about how it was replaced, one line each."""
        ranks = ", ".join(map(str, self.low_rank))
        factors = f"Low-rank factors (ranks {ranks}) are multiplied beside the expert weights." if ranks else ""
        return [note for note in (self.router_note, factors, self.merged_note) if note]

    @property
    def name(self) -> str:
        """Path of the module, or the source line where there is none."""
        return self.module or self.location.rsplit("/", 1)[-1]

    def to_dict(self) -> dict[str, Any]:
        """This row as one of the ``blocks`` of `Report.to_dict`."""
        found = self.diagram.after if self.diagram is not None else ()
        return _row(
            "staged" if self.staged else "fused", self, routing=self.routing, router_note=self.router_note,
            experts=self.experts, low_rank=list(self.low_rank), merged_note=self.merged_note,
            activation=self.activation, glu_layout=self.glu_layout, scheme=self.scheme, backend=self.backend,
            operators=[operator.name for operator in found],
            sizes={name: _number(getattr(self, name)) for name in "EKHI"},
        )  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """A block that was not replaced: where, why, and what can be done.

    Attributes:
        module: path of the experts' module, when the model is one of modules.
        location: the source line at which the recogniser stopped, which is the nearest miss.
        source: the text of that line; empty when it is not known.
        diagram: the code around that line; None for a block that no graph holds.
    """

    module: str
    location: str
    reason: str
    cure: str
    source: str = ""
    diagram: Diagram | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """This row as one of the ``blocks`` of `Report.to_dict`."""
        return _row("refused", self, reason=self.reason, cure=self.cure, source=self.source)

    def __str__(self) -> str:
        line = [f"  line: {self.source}"] if self.source else []
        where = f"{self.module} ({self.location})" if self.module else self.location
        return "\n".join([f"refused: {where}", *line, f"  why:  {self.reason}", f"  cure: {self.cure}"])


@dataclass
class Report:
    """Result of `explain`.

    Attributes:
        fused, refused: MoE blocks, in graph order.
        staged: blocks whose experts and combine are replaced, with code of the model (a norm) left between them.
        causal_masks: attention calls that say that they are causal in the place of a mask that does.
        shared_heads: attention calls, and products of written-out attention, that read heads without repeating them.
        own_calls: calls of `fused_experts` or `fused_moe` that the model makes itself; nothing is left to fuse.
        graphs: graphs captured.
        graph_break_reasons: "reason (file:line)" of every graph break.
        eager_frames: "function (file:line): reason (file:line)" of every function that Dynamo left to Python.
        errors: what went wrong in the passes themselves, one line each; the blocks concerned are among the refused.
        error: why the model did not run, or None.
    """

    fused: list[Fused] = field(default_factory=list)
    staged: list[Fused] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    causal_masks: int = 0
    shared_heads: int = 0
    own_calls: int = 0
    graphs: int = 0
    graph_break_reasons: list[str] = field(default_factory=list)
    eager_frames: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def graph_breaks(self) -> int:
        """Number of places at which capture stopped."""
        return len(self.graph_break_reasons)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON.

        Returns:
            schema: 1, the version of what follows.
            blocks: one dictionary for each block, those fused first. All have every key: module, location, status
                ("fused", "staged" or "refused"), and, null where the status has no such thing,
                for fused and staged ones routing, router_note, experts, activation, glu_layout, scheme, backend,
                low_rank (ranks of the factors beside expert weights), merged_note (why such factors are not beside
                them), operators (names of the calls that took its place), sizes (E experts, K top-k, H hidden, I expert
                width: numbers, or text where a size is symbolic);
                for refused ones reason, cure, source (the line at ``location``).
            graphs: number of graphs captured.
            graph_breaks, eager_frames, errors: lists of lines, as in the attributes of this class.
            causal_masks, shared_heads, own_calls: numbers, as in the attributes of this class.
            error: why the model did not run, or null.
        """
        rows: list[Fused | Refused] = [*self.fused, *self.staged, *self.refused]
        return {
            "schema": SCHEMA,
            "blocks": [row.to_dict() for row in rows],
            "graphs": self.graphs,
            "graph_breaks": list(self.graph_break_reasons),
            "eager_frames": list(self.eager_frames),
            "errors": list(self.errors),
            "causal_masks": self.causal_masks,
            "shared_heads": self.shared_heads,
            "own_calls": self.own_calls,
            "error": self.error,
        }

    def html(self) -> str:
        """One HTML page that needs nothing else: every block before and after, and what stopped the others."""
        return page.whole(self)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return page.fragment(self)

    @property
    def summary(self) -> str:
        """The report in one line."""
        staged = f"{len(self.staged)} staged, " if self.staged else ""
        return (
            f"{len(self.fused)} MoE block(s) fused, {staged}{len(self.refused)} refused; "
            f"{self.graphs} graph(s), {self.graph_breaks} graph break(s)"
        )

    def __str__(self) -> str:
        lines = [self.summary]
        if self.fused:
            lines += ["", *_table(_FUSED_HEAD, [_fused_row(row) for row in self.fused])]
            lines += [f"  {row.name}: {note}" for row in self.fused for note in row.notes]
        if self.staged:
            lines += ["", "staged: the model's own code stays between the experts and the combine"]
            lines += _table(_FUSED_HEAD, [_fused_row(row) for row in self.staged])
            lines += [f"  {row.name}: {note}" for row in self.staged for note in row.notes]
        for row in self.refused:
            lines += ["", str(row)]
        if self.causal_masks:
            lines += ["", f"{self.causal_masks} attention call(s) are causal without reading a mask"]
        if self.shared_heads:
            lines += ["", f"{self.shared_heads} attention call(s) or product(s) read heads without repeating them"]
        if self.own_calls:
            lines += ["", f"{self.own_calls} call(s) of moe_ops operators are the model's own"]
        elif not self.fused and not self.staged and not self.refused:
            lines += ["", "No MoE block is in a captured graph."]
            if self.graph_break_reasons or self.eager_frames:
                lines += ["What runs around a graph break, or in a function left to Python, is in no graph: see below."]
        if self.graph_break_reasons:
            lines += ["", "graph breaks:", *(f"  {reason}" for reason in self.graph_break_reasons)]
        if self.eager_frames:
            lines += ["", "functions left to Python:", *(f"  {frame}" for frame in self.eager_frames)]
        lines += [f"\nan error in moe_ops: {line}" for line in self.errors]
        if self.error:
            lines += ["", f"the model raised: {self.error}"]
        return "\n".join(lines)


_KEYS = (
    "module", "location", "status", "routing", "router_note", "experts", "activation", "glu_layout", "scheme",
    "backend", "low_rank", "merged_note", "operators", "sizes", "reason", "cure", "source",
)  # fmt: skip


def _row(status: str, row: Fused | Refused, **values: Any) -> dict[str, Any]:
    known = {"status": status, "module": row.module, "location": row.location, **values}
    return {key: known.get(key) for key in _KEYS}


def _number(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


_FUSED_HEAD = ("block", "routing", "experts", "activation", "scheme", "backend", "E", "K", "H", "I")


def _fused_row(row: Fused) -> tuple[str, ...]:
    activation = row.activation if row.glu_layout == "concat" else f"{row.activation} ({row.glu_layout})"
    sizes = (str(size) for size in (row.E, row.K, row.H, row.I))
    return (row.name, row.routing, row.experts, activation, row.scheme, row.backend, *sizes)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
