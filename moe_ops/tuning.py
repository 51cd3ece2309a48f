"""`moe-ops tune`: measure the launch parameters of a layer on this GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch

from meta.checks import positive_integers
from meta.dims import FORMATS
from meta.layers import MODEL_LAYERS
from meta.schemes import SCHEMES
from moe_ops import autotune, plans
from moe_ops.plans import LayerKey
from moe_ops.progress import progress

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
_WHAT = f"""What to tune:
  --model mixtral-8x7b      one of {", ".join(MODEL_LAYERS)}
  --model path/config.json  a transformers configuration, its folder, or the name of a model
  --shape 128,8,2048,768    E,K,H,I: experts, experts a token, hidden size, intermediate size

Plans go to the user's cache directory, from where every process reads them before the shipped ones. A run that was
stopped goes on where it ended; --again measures anew what is there.
"""
#: Names that transformers' configurations have for E, K, H and I.
_FIELDS = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    ("moe_hidden_size", "hidden_size"),
    ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
)


def add_command(commands: Any) -> None:
    """Add `tune` to the subcommands of a command line."""
    tune = commands.add_parser(
        "tune", help="measure launch parameters", description="Measure the launch parameters of a layer on this GPU.",
        epilog=_WHAT, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    tune.add_argument("--model", action="append", default=[], help="a model; may be given several times")
    tune.add_argument("--shape", action="append", default=[], help="E,K,H,I; may be given several times")
    tune.add_argument("--tokens", default=",".join(map(str, autotune.TOKENS)), help="default: %(default)s")
    tune.add_argument("--scheme", default="bf16", choices=sorted(SCHEMES))
    tune.add_argument("--format", default="grouped", choices=FORMATS)
    tune.add_argument("--not-gated", action="store_true", help="experts without a gate")
    tune.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="that compile (default: %(default)s)")
    tune.add_argument("--output", type=Path, help="a plan file in place of the user's")
    tune.add_argument("--again", action="store_true", help="measure what the file holds already, too")
    tune.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Run `tune`; 2 for a bad request."""
    try:
        tune(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tune: interrupted; what was measured is kept, and the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    return 0


def keys_of(options: argparse.Namespace) -> dict[str, LayerKey]:
    """The layers asked for, by the name they were asked for.

    Raises:
        ValueError: none, or one that cannot be read.
    """
    shapes = {text: _shape(text) for text in options.shape} | {name: _model(name) for name in options.model}
    if not shapes:
        raise ValueError("tune: --model or --shape must be given, got neither. See moe-ops tune --help.")
    return {
        name: LayerKey(options.scheme, options.format, E, K, H, I, not options.not_gated)
        for name, (E, K, H, I) in shapes.items()
    }


def _shape(text: str) -> tuple[int, int, int, int]:
    numbers = positive_integers("tune", "--shape", text)
    if len(numbers) != 4:
        raise ValueError(f"tune: --shape must be E,K,H,I, got {text!r}.")
    E, K, H, I = numbers
    if K > E:
        raise ValueError(f"tune: --shape must have K <= E, got E={E}, K={K}.")
    return E, K, H, I


def _model(name: str) -> tuple[int, int, int, int]:
    if name in MODEL_LAYERS:
        return MODEL_LAYERS[name]
    try:
        from transformers import AutoConfig
    except ImportError as error:
        known = ", ".join(MODEL_LAYERS)
        raise ValueError(f"tune: --model must be one of {known} without transformers, got {name!r}.") from error
    cure = "Pass --shape E,K,H,I."
    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        rule = f"one of {', '.join(MODEL_LAYERS)}, a config.json, its folder or a model's name"
        raise ValueError(f"tune: --model must be {rule}, got {name!r} ({error}). {cure}") from error
    sizes = [next((size for at in names if (size := getattr(config, at, None))), None) for names in _FIELDS]
    if None in sizes:
        raise ValueError(f"tune: --model must be a Mixture of Experts, got {name!r}. {cure}")
    for letter, size in zip("EKHI", sizes, strict=True):
        if not isinstance(size, int):
            raise ValueError(f"tune: --model must have one {letter}, got {size} in {name!r}. {cure}")
    E, K, H, I = cast(list[int], sizes)
    return E, K, H, I


def missing(
    stored: dict[str, Any], keys: dict[str, LayerKey], tokens: list[int]
) -> Iterator[tuple[str, LayerKey, int]]:
    """What a file of plans does not hold yet."""
    for name, key in keys.items():
        for count in tokens:
            if str(count) not in stored["plans"].get(str(key), {}):
                yield name, key, count


def tune(options: argparse.Namespace) -> None:
    """Measure, and write the file after every plan."""
    keys, tokens = keys_of(options), positive_integers("tune", "--tokens", options.tokens)
    if not torch.cuda.is_available():
        raise ValueError("tune: needs a CUDA device, got none.")
    gpu = torch.cuda.get_device_name()
    output = options.output or plans.user_directory() / plans.file_name(gpu)
    stored: dict[str, Any] = {"gpu": gpu, "plans": {}}
    if output.exists():
        try:
            stored, _ = plans.read(output)
        except ValueError as error:
            raise ValueError(f"tune: --output {error}") from error
    of = stored.get("gpu")
    if of != gpu:
        raise ValueError(f"tune: --output must hold plans of {gpu}, got those of {of}. Name another file.")
    todo = list(missing({"plans": {}} if options.again else stored, keys, tokens))
    with progress() as bars:
        compiling, measuring = bars.bar("compiling", None), bars.bar("tuning", len(todo))
        jobs = [job for _, key, count in todo for job in autotune.jobs_for(key, [count])]
        for done, total, reason in autotune.precompile(jobs, options.processes):
            compiling(completed=done, total=total)
            if reason:
                bars.say(f"does not compile: {reason}")
        output.parent.mkdir(parents=True, exist_ok=True)
        layer = None
        for name, key, count in todo:
            if layer is None or layer.key != key:
                layer = None  # its weights go before others come
                layer = autotune.TrialLayer(key, "cuda")
            plan = autotune.tune(layer, count)
            stored |= {"date": date.today().isoformat(), "torch": torch.__version__}
            stored["plans"].setdefault(str(key), {})[str(count)] = plan and plan.to_json()
            plans.write(stored, output)
            configs = " ".join(str(tuple(config)) for config in plan.configs) if plan else ""
            found = f"{plan.us:.1f} us {plan.backend} {plan.sequence} {configs}" if plan else "the plan by cost"
            bars.say(f"{name} {key.scheme} T={count}: {found}")
            measuring()
    print(f"{len(todo)} plans measured, {len(keys) * len(tokens) - len(todo)} were there, in {output}")
