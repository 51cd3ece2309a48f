"""Train a Mixture-of-Experts model three ways and compare them: `python -m moe_ops.examples.finetune`.

The same training (weights, batches, optimizer) by eager transformers, under plain torch.compile and under
backend="moe_ops", and once more by eager code from weights that are moved by a rounding step: how far that curve gets
from the eager one says how far a right one may be. Steps are taken in turn, with --real one way after the other.

Real model classes with random weights; the text is docstrings of Python's standard library, a token is a byte, nothing
is downloaded.

Ends with 1 when a block was not fused, or when the fused curve leaves the eager one; with 130 after Ctrl-C, which keeps
what was measured so far.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moe_ops.examples import curves, text, training
from moe_ops.examples.families import FAMILIES, OLMOE
from moe_ops.examples.training import DTYPES, EAGER, FUSED, WARMUP_STEPS, Run, Settings, Way

TRAINED = {family.name: family for family in (*FAMILIES, OLMOE)}
INTERRUPTED = 130  # what shells give a program that Ctrl-C ended
# By device and --real. In bfloat16 alone, AdamW needs a quarter of the memory that it needs over float32 parameters.
DEFAULTS = {
    ("cpu", False): dict(steps=100, batch=8, length=128, layers=2, dtype="float32", rate=1e-3),
    ("cuda", False): dict(steps=300, batch=32, length=256, layers=2, dtype="bfloat16", rate=1e-3),
    ("cuda", True): dict(steps=100, batch=4, length=2048, layers=4, dtype="bfloat16", rate=3e-4),
}
console = Console(highlight=False, width=max(Console().width, 100))  # the closing table needs the width


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage: it names the option, and --help has the rest."""
        self.exit(2, f"finetune: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table and draw the picture; see the module for what is returned."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = _settings(options)
        texts = _texts(settings)
        if options.json is not None and options.json.exists():
            raise ValueError(f"--json must name a new file, got {options.json}, which is there. Name another one.")
        for path in (options.json, options.output):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{path} must be in a folder that is there, got none of the name {path.parent}.")
        if options.output is not None:
            curves.require_matplotlib()
    except ValueError as error:
        parser.error(str(error))
    warnings.filterwarnings("ignore")
    sizes = f"{settings.steps} steps of {settings.tokens} of {len(texts[0])} bytes of text"
    console.print(f"{title(settings)}; {sizes}\n", soft_wrap=True)
    runs: dict[str, Run] = {}
    try:
        stopped = _train_all(settings, texts, runs)
    except torch.OutOfMemoryError:
        if runs:
            console.print(summary(runs))
        _say("out of memory. Fewer --layers, smaller --batch or --length, --dtype bfloat16, --checkpointing need less.")
        return 1
    console.print(summary(runs))
    tolerated = None if stopped else training.tolerance(runs)
    if options.output is not None and runs:
        curves.draw(runs, title(settings), tolerated, options.output)
        console.print(f"The curves: {options.output}", soft_wrap=True)
    if options.json is not None and runs:
        options.json.write_text(json.dumps(document(settings, runs, tolerated), indent=1) + "\n")
    if tolerated is None:
        _say("stopped by Ctrl-C; above is what was measured so far.")
        return INTERRUPTED
    return _judge(settings, texts, runs, tolerated)


def title(settings: Settings) -> str:
    """The training in a line."""
    place = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    layers = f"{settings.layers} layer{'s' * (settings.layers > 1)}"
    parts = [f"{settings.family.name}, {'real' if settings.real else 'tiny'} dimensions, {layers}"]
    parts.append({"autocast": "bfloat16 autocast"}.get(settings.dtype, settings.dtype))
    parts += ["experts frozen"] * settings.freeze_experts + ["checkpointing"] * settings.checkpointing
    return ", ".join([*parts, place])


def summary(runs: dict[str, Run]) -> Table:
    """All runs as a table."""
    table = Table(
        title="The same training in four ways",
        caption=f"tokens/s, step: the median after {WARMUP_STEPS} steps. compile: what these took longer than two "
        "others; the second finds in Inductor's cache what the first one compiled. loss: mean of the last tenth of "
        "the steps, nats per byte. validation: on text that was not trained on. from eager: the furthest that the loss "
        "of a step is from eager code's. peak: memory, with parameters and optimizer. nudged: eager code, from weights "
        "moved by a rounding step.",
    )
    table.add_column("run")
    for name in ("tokens/s", "step, ms", "compile, s", "loss", "validation", "from eager", "peak, MiB"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        compiled = training.WAYS[name].backend is not None
        far = training.furthest(run, runs[EAGER]) if name != EAGER and run.losses else None
        table.add_row(
            name,
            _number(run.tokens_per_second, ",.0f"),
            _number(run.step_seconds and run.step_seconds * 1e3, ".1f"),
            _number(run.warmup_seconds if compiled else None, ".1f"),
            _number(run.last_loss, ".3f"),
            _number(run.validation, ".3f"),
            _number(far, ".1e"),
            _number(run.peak_bytes and run.peak_bytes / 2**20, ",.0f"),
        )
    return table


def document(settings: Settings, runs: dict[str, Run], tolerated: float | None) -> dict[str, Any]:
    """Everything that was measured, for JSON. Times in seconds, losses in nats a byte."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    kept = asdict(settings) | {"family": settings.family.name}
    return {
        "kind": "finetune",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else platform.processor() or "cpu",
        "versions": versions,
        "settings": kept,
        "tolerance": tolerated,
        "runs": [
            {
                "name": name,
                "step_seconds": run.step_seconds,
                "tokens_per_second": run.tokens_per_second,
                "warmup_seconds": run.warmup_seconds,
                "last_loss": run.last_loss,
                **asdict(run),
            }
            for name, run in runs.items()
        ],
    }


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m moe_ops.examples.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", default=FAMILIES[0].name, help=f"one of {', '.join(TRAINED)}")
    parser.add_argument("--real", action="store_true", help="the family's own dimensions, in fewer layers; on a GPU")
    parser.add_argument("--layers", type=int, help="2, or 4 with --real")
    parser.add_argument("--steps", type=int, help="of the optimizer; 100, on a GPU 300, with --real 100")
    parser.add_argument("--batch", type=int, help="sequences of a micro batch; 8, on a GPU 32, with --real 4")
    parser.add_argument("--length", type=int, help="bytes of a sequence; 128, on a GPU 256, with --real 2048")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro batches of a step; 1")
    parser.add_argument("--dtype", help=f"one of {', '.join(DTYPES)}; float32, on a GPU bfloat16")
    parser.add_argument("--rate", type=float, help="AdamW's learning rate; 1e-3, with --real 3e-4")
    parser.add_argument("--freeze-experts", action="store_true", help="train everything but the experts' weights")
    parser.add_argument("--checkpointing", action="store_true", help="compute each layer again in the backward")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--output", type=Path, default=Path("finetune.png"), metavar="PICTURE", help="finetune.png; written over"
    )
    picture.add_argument("--no-picture", dest="output", action="store_const", const=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a new file for all that was measured")
    return parser


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _settings(options: argparse.Namespace) -> Settings:
    """Raises:
    ValueError: an option's value.
    """
    device = _device()
    if (device, options.real) not in DEFAULTS:
        raise ValueError("--real must have a GPU, got a CPU. Without it, the model is small enough for one.")
    given = {name: value for name, value in vars(options).items() if value is not None}
    values = {**DEFAULTS[device, options.real], **given}
    for name, known in (("family", TRAINED), ("dtype", DTYPES)):
        if values[name] not in known:
            raise ValueError(f"--{name} must be one of {', '.join(known)}, got {values[name]}.")
    for name, least in (("layers", 1), ("steps", WARMUP_STEPS + 1), ("batch", 1), ("length", 2), ("accumulate", 1)):
        if values[name] < least:
            raise ValueError(f"--{name} must be at least {least}, got {values[name]}.")
    if not 0.0 < values["rate"] <= 1.0:
        raise ValueError(f"--rate must be above 0 and at most 1, got {values['rate']}. Usual is 1e-4 to 3e-3.")
    names = Settings.__dataclass_fields__.keys() - {"family", "device"}
    return Settings(family=TRAINED[values["family"]], device=device, **{name: values[name] for name in names})


def _texts(settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises:
    ValueError: there is less text than one sequence.
    """
    texts = text.split()
    most = min(map(len, texts))
    if settings.length > most:
        raise ValueError(f"--length must be at most {most}, the bytes of text to validate on, got {settings.length}.")
    return texts


def _train_all(settings: Settings, texts: tuple[torch.Tensor, torch.Tensor], runs: dict[str, Run]) -> bool:
    """Fill ``runs`` in the order of `training.WAYS`; whether Ctrl-C ended it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            # A process's first compilation looks for compilers and loads them, which is nobody's time.
            torch.compile(lambda x: x + 1)(torch.ones(8, device=settings.device))
            tasks = {name: progress.add_task(name, total=settings.steps) for name in training.WAYS}

            def tell(name: str, run: Run) -> None:
                last = f"{name}: loss {run.losses[-1]:.3f}"
                progress.update(tasks[name], completed=len(run.losses), description=last)

            for ways in _together(settings):
                training.train(settings, ways, texts, runs, tell)
    except KeyboardInterrupt:
        return True
    return False


def _together(settings: Settings) -> list[dict[str, Way]]:
    """Which ways take steps in turn: all, but of real dimensions one after the other, for memory."""
    return [{name: way} for name, way in training.WAYS.items()] if settings.real else [training.WAYS]


def _judge(settings: Settings, texts: tuple[torch.Tensor, torch.Tensor], runs: dict[str, Run], tolerated: float) -> int:
    """Say whether everything was fused and whether the curves lie on each other; the exit status."""
    run, apart = runs[FUSED], training.average(runs[FUSED], runs[EAGER])
    status = 0
    if run.fused < run.layers or run.refused or run.errors:
        console.print(settings.explained(settings.micro_batches(texts[0], 0)[0]), markup=False, soft_wrap=True)
        _say(f"{run.fused} of {run.layers} MoE layers were fused; above is why.")
        status = 1
    if not apart <= tolerated:  # (NaN is not)
        _say(f"the fused curve is {apart:.1e} from the eager one on average; at most {tolerated:.1e} is rounding.")
        status = 1
    if status == 0:
        console.print(
            f"MoE layers fused: {run.fused} of {run.layers}; graphs: {run.graphs}, breaks: {run.graph_breaks}. The "
            f"curve is {apart:.1e} from the eager one on average, at most {tolerated:.1e} is rounding.",
            soft_wrap=True,
        )
    return status


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(message: str) -> None:
    print(f"finetune: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
