"""What becomes of MoE blocks as people write them: layers after public code, one block in many spellings, near misses.

Each is explained as it is; one that is not fused so is prepared by `moe_ops.compile`, and explained again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import moe_ops
from benchmarks import foreign, loops, tutorials
from benchmarks.sorted_block import NEAR_MISSES, SPELLINGS, CountedMoE, SortedMoE
from benchmarks.top_two import TopTwo
from compile_passes.report import Fused, Refused, Report
from moe_ops.logs import quiet

TABLE = Path(__file__).parent / "spellings.md"
FUSED, PREPARED, REFUSED, UNSEEN = "fused", "prepared", "refused", "no block found"
_HEAD = ("written as", "what becomes of it", "what explain says of it")
Make = Callable[[], nn.Module]

#: Layers after public code.
LAYERS: dict[str, Make] = {
    "loop with any() and masks (nanoGPT-like, makeMoE)": loops.MakeMoE,
    "the same with an expert capacity": loops.MakeMoECapacity,
    "all experts on all tokens, einsum with a dense mask": foreign.SparseByMask,
    "all experts on all tokens, in a loop": partial(foreign.ExpertLoop, "mask"),
    "ModuleList, results stacked and gathered": partial(foreign.ExpertLoop, "stack"),
    "gpt-fast": foreign.GptFast,
    "torchtitan": foreign.TorchTitanMoE,
    "torchtitan, without grouped_mm": partial(foreign.TorchTitanMoE, looped=True),
    "Granite 3 and JetMoE, transformers 4.x": foreign.GraniteMoe,
    "Llama 4, Meta": foreign.Llama4,
    "Llama 4, transformers": foreign.Llama4OfTransformers,
    "Mixtral, transformers 4.36: lists of positions": loops.MixtralLists,
    "Mixtral, transformers 4.53: torch.where for every expert": partial(foreign.ExpertLoop, "transformers"),
    "Mixtral, transformers 4.54: experts that were hit": loops.MixtralHits,
    "stacked experts, transformers 5, eager": loops.StackedExperts,
    "gpt-oss, transformers 4.55": loops.GptOssMLP,
    "mistral-inference": partial(foreign.ExpertLoop, "mistral"),
    "DeepSeek-V3, transformers 4.5x": loops.DeepseekV3,
    "DeepSeek-V3, its own inference code": loops.DeepseekReference,
    "DeepSeek, moe_infer of the hub": loops.MoeInfer,
    "DeepSeek-MoE and minimind, moe_infer": loops.MoeInferAdding,
    "a loop over ids.unique()": loops.Unique,
    "a loop over bincount().tolist()": loops.BesideCounts,
    "grouped_mm over sorted rows": partial(SortedMoE, SPELLINGS["as it is"]),
    "grouped_mm, counts by bincount": CountedMoE,
    "grouped_mm, counts that feed a load balancer": partial(CountedMoE, balanced=True),
    "gpt-oss, OpenAI's reference": foreign.GptOss,
    **tutorials.LAYERS,
    "GShard and DeepSpeed: top-2 gates with a capacity": foreign.DeepSpeed,
    **{
        f"lucidrains, second choices: {policy}": partial(TopTwo, second_policy_eval=policy)
        for policy in ("all", "threshold", "none", "random")
    },
}


def _in_steps(steps: dict[str, object]) -> dict[str, Make]:
    return {name: partial(SortedMoE, how) for name, how in steps.items()}


SECTIONS: dict[str, dict[str, Make]] = {
    "Layers after public code": LAYERS,
    "One block over sorted rows, one step written otherwise": _in_steps(SPELLINGS),
    "Near misses: one step computes something else": _in_steps(NEAR_MISSES),
}


@dataclass(frozen=True)
class Row:
    """What became of one program."""

    written: str
    outcome: str
    said: str

    def __str__(self) -> str:
        cells = (self.written, self.outcome, self.said)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def built(make: Make) -> nn.Module:
    """The layer in eval mode, with random weights that are the same every time."""
    torch.manual_seed(0)
    return make().eval()


def tokens(module: nn.Module) -> Tensor:
    """Hidden states that ``module`` takes."""
    weight = next(value for name, value in module.named_parameters() if name.startswith(("gate", "route", "w_", "wg")))
    width = weight.shape[0] if isinstance(module, foreign.Llama4 | TopTwo) else weight.shape[-1]
    return torch.randn(2, 6, width, generator=torch.Generator().manual_seed(1)).to(weight.dtype)


def looked_at(written: str, make: Make) -> Row:
    """The row of one program, as a process that has prepared nothing sees it."""
    report = _explained(built(make))
    if report.fused and not report.refused:
        return Row(written, FUSED, _each(map(_became, report.fused)))
    why = _each(map(_sentence, report.refused)) or (report.error or "")
    module = built(make)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        moe_ops.compile(module)  # nothing is compiled before a call
    prepared = _explained(module)
    if prepared.fused and not prepared.refused:
        return Row(written, PREPARED, f"{why} So prepared: {_each(map(_became, prepared.fused))}")
    left = (str(warning.message).partition("left as is. ")[2] for warning in heard)
    tried = "".join(f" Tried: {_without_places(text)}" for text in left if text)
    return Row(written, REFUSED if why else UNSEEN, why + tried)


def _explained(module: nn.Module) -> Report:
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return moe_ops.explain(module, tokens(module))


def _became(row: Fused) -> str:
    operators = row.to_dict()["operators"] or ["fused_experts"]
    activation = row.activation if row.glu_layout == "concat" else f"{row.activation} ({row.glu_layout})"
    text = f"`{'`, `'.join(dict.fromkeys(operators))}` from {row.experts}; routing {row.routing}, {activation}."
    return f"{text} {row.router_note}".strip()


def _sentence(row: Refused) -> str:
    line = f"At `{row.source.rstrip(',')}`: " if row.source else f"{row.location.rpartition(' in ')[2]}: "
    return f"{line}{row.reason} {row.cure}"


def _each(texts: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(map(_without_places, texts)))


def _without_places(text: str) -> str:
    """``text`` without the paths of files, and without numbers of lines."""
    return re.sub(r"(\w+\.py):\d+", r"\1", re.sub(r"(?<![\w/])(?:/[\w.\-]+)+/", "", text))


def table(sections: Iterable[tuple[str, Iterable[Row]]]) -> Iterator[str]:
    """The lines of the file."""
    yield "# MoE blocks as people write them"
    yield ""
    yield f"Written by `python -m benchmarks spellings`, with torch {torch.__version__}."
    for title, rows in sections:
        yield from ("", f"## {title}", "", summary(rows), "")
        yield from (f"| {' | '.join(_HEAD)} |", f"|{' --- |' * len(_HEAD)}")
        yield from map(str, rows)


def summary(rows: Iterable[Row]) -> str:
    """How many are fused, prepared and refused."""
    outcomes = [row.outcome for row in rows]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)) + "."


def write(path: Path = TABLE) -> None:
    """Look at every program and write the table."""
    sections: list[tuple[str, list[Row]]] = []
    with quiet():
        for title, programs in SECTIONS.items():
            rows = []
            for written, make in programs.items():
                rows.append(looked_at(written, make))
                print(rows[-1])
            sections.append((title, rows))
    path.write_text("\n".join(table(sections)) + "\n")
    for title, rows in sections:
        print(f"{title}: {summary(rows)}")
