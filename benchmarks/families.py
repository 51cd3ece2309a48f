"""What becomes of the MoE blocks of every family in transformers: fused, staged or refused, and why, as a table.

Tiny models with random weights, made from configurations; nothing is downloaded. Families whose experts come in the
shared compiled forms are looked at in both of them, the others as `moe_ops.compile` prepares them.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import moe_ops
from compile_passes.report import Fused, Report
from compile_passes.tiny import FAMILIES, IN_FP32, text_classes, tiny_config, tiny_model
from moe_ops.logs import quiet

TABLE = Path(__file__).parent / "models.md"
FORMS = ("grouped_mm", "batched_mm")
OWN = "own"
# Families with experts code of their own, and what makes their layers MoE layers.
OWN_CODE: dict[str, dict[str, Any]] = {
    "dbrx": {},
    "doge": {"is_moe": True, "num_experts": 16, "num_attention_heads": 4},
    "jetmoe": {"num_key_value_heads": 4},
    "llama4": {"interleave_moe_layer_step": 1},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "head_dim": 8},
    "nllb_moe": {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
        "expert_capacity": 64,
    },
    "step3p7": {},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "d_kv": 16, "expert_capacity": 64},
}  # fmt: skip
# Classes that `text_classes` does not find, because the family is no decoder alone.
_CLASSES = {
    "nllb_moe": ("NllbMoeConfig", "NllbMoeModel"),
    "switch_transformers": ("SwitchTransformersConfig", "SwitchTransformersEncoderModel"),
}
_HEAD = ("family", "form", "blocks", "routing", "activation", "why")


@dataclass(frozen=True)
class Row:
    """The blocks of one family in one or several forms."""

    family: str
    form: str
    blocks: str
    routing: str
    activation: str
    why: str

    def __str__(self) -> str:
        return "| " + " | ".join((self.family, self.form, self.blocks, self.routing, self.activation, self.why)) + " |"


def families() -> list[str]:
    """The families of the installed transformers with MoE blocks, in alphabetical order."""
    import transformers.models

    found = [
        path.parent.name
        for root in transformers.models.__path__
        for path in Path(root).glob("*/modeling_*.py")
        if path.stem == f"modeling_{path.parent.name}" and "@use_experts_implementation" in path.read_text()
    ]
    known = [name for name in OWN_CODE if importlib.util.find_spec(f"transformers.models.{name}") is not None]
    return sorted({*found, *known})


def looked_at(family: str) -> list[Row]:
    """The rows of one family."""
    forms = (OWN,) if family in OWN_CODE else FORMS
    rows = [_row(family, form, _report(family, form)) for form in forms]
    same = len({(row.blocks, row.routing, row.activation, row.why) for row in rows}) == 1
    return [Row(family, ", ".join(forms), *_cells(rows[0]))] if same else rows


def _cells(row: Row) -> tuple[str, str, str, str]:
    return row.blocks, row.routing, row.activation, row.why


def _report(family: str, form: str) -> Report:
    package = f"transformers.models.{family}"
    configurations = importlib.import_module(f"{package}.configuration_{family}")
    modeling = importlib.import_module(f"{package}.modeling_{family}")
    if family in _CLASSES:
        config_name, model_name = _CLASSES[family]
        config_class, model_class = getattr(configurations, config_name), getattr(modeling, model_name)
    else:
        config_class, model_class = text_classes(configurations, modeling)
    settings = {**FAMILIES.get(family, {}), **OWN_CODE.get(family, {})}
    dtype = torch.float32 if family in IN_FP32 else torch.bfloat16
    model = tiny_model(
        tiny_config(config_class, settings), model_class, dtype=dtype, experts=None if form == OWN else form
    )
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "nllb_moe" else {})}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        if form == OWN:
            moe_ops.compile(model)  # prepares its experts; nothing is compiled before a call
        report = moe_ops.explain(model, **inputs)
    torch.compiler.reset()
    return report


def _row(family: str, form: str, report: Report) -> Row:
    counts = {"fused": len(report.fused), "staged": len(report.staged), "refused": len(report.refused)}
    blocks = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none found"
    done = [*report.fused, *report.staged]
    why = [row.router_note.removeprefix("The router stays in the graph: ") for row in done if row.router_note]
    why += [row.reason for row in report.refused] + ([report.error] if report.error else [])
    return Row(
        family, form, blocks, _each(row.routing for row in done), _each(map(_activation, done)),
        _each(text.rstrip(".").replace("|", "\\|") for text in why),
    )  # fmt: skip


def _activation(row: Fused) -> str:
    return row.activation if row.glu_layout == "concat" else f"{row.activation} ({row.glu_layout})"


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(_without_paths(text) for text in texts))


def _without_paths(text: str) -> str:
    """``text`` with the names of files instead of their paths."""
    return re.sub(r"/\S*/", "", text)


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of the file."""
    rows = list(rows)
    yield "# MoE families of transformers"
    yield ""
    yield f"Written by `python -m benchmarks models`, with transformers {_version()} and torch {torch.__version__}."
    yield from ("", summary(rows), "")
    yield from (f"| {' | '.join(_HEAD)} |", f"|{' --- |' * len(_HEAD)}")
    yield from map(str, rows)


def summary(rows: Iterable[Row]) -> str:
    """How many forms are fused, staged and refused."""
    shared: dict[str, int] = {}
    own: dict[str, int] = {}
    for row in rows:
        counted = own if row.form == OWN else shared
        counted[_outcome(row)] = counted.get(_outcome(row), 0) + len(row.form.split(", "))
    said = [
        f"{what}: " + ", ".join(f"{count} {name}" for name, count in counts.items())
        for what, counts in (("Forms of the shared experts", shared), ("Families with experts of their own", own))
        if counts
    ]
    return ". ".join(said) + "."


def _outcome(row: Row) -> str:
    if "refused" in row.blocks:
        return "fused in part" if "fused," in row.blocks else "refused"
    return row.blocks.split(" ", 1)[1] if row.blocks[0].isdigit() else "without a block"


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def write(path: Path = TABLE) -> None:
    """Look at every family and write the table.

    Raises:
        ImportError: transformers is missing.
    """
    rows: list[Row] = []
    with quiet():
        for family in families():
            rows += looked_at(family)
            print(rows[-1])
    path.write_text("\n".join(table(rows)) + "\n")
    print(summary(rows))
