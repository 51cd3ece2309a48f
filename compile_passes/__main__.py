"""`python -m compile_passes explain WHAT`: what the passes do to a model, without writing a script."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from compile_passes.explain import Report, explain
from compile_passes.tiny import model_of, tiny_model

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_WHAT = """What to explain:
  module:factory     a function without arguments that returns (model, inputs); inputs is a tensor,
                     a tuple of positional arguments or a dict of keyword arguments
  mixtral            a transformers model type: a tiny random model of it is built, nothing is downloaded
  path/config.json   a transformers configuration (or the folder that holds it): likewise
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m compile_passes", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain", help="print which MoE blocks are fused, which are refused, why, and the cure",
        description="Capture a model, fuse its MoE blocks, print what was fused, what was refused, why, and the cure.",
        epilog=_WHAT, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("what", help="module:factory, a transformers model type, or a path to a config.json")
    command.add_argument("--experts", choices=("grouped_mm", "batched_mm", "eager"), default="grouped_mm",
                         help="experts implementation of a transformers model (default: %(default)s)")  # fmt: skip
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16", help="weights (default: %(default)s)")
    command.add_argument("--tokens", type=int, default=16, help="length of the token sequence (default: %(default)s)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when everything found was fused, 1 when something was refused, 2 for a bad request."""
    options = parser().parse_args(arguments)
    try:
        with _quiet():
            report = _explain(options)
    except ValueError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(report)
    return 1 if report.refused or report.error else 0


def _explain(options: argparse.Namespace) -> Report:
    if options.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {options.tokens}.")
    if ":" in options.what:
        model, inputs = _made_by(options.what)
    else:
        config, model_class = model_of(options.what)
        model = tiny_model(config, model_class, dtype=_DTYPES[options.dtype], experts=options.experts)
        inputs = _token_inputs(options, config, model)
    args = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        return explain(model, *args, **(inputs if isinstance(inputs, dict) else {}))


def _token_inputs(options: argparse.Namespace, config: Any, model: Any) -> dict[str, torch.Tensor]:
    """Random token ids, for the decoder as well when there is one."""
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        raise ValueError(
            f"{options.what}: {type(model).__name__} takes no token ids. Give a function that returns the model and "
            "its inputs, as module:factory."
        )
    ids = torch.randint(3, 100, (1, options.tokens))
    both = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted
    return {"input_ids": ids, "decoder_input_ids": ids} if both else {"input_ids": ids}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings away from the report, which says what those of torch.compile say; TORCH_LOGS brings them back."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _made_by(spelling: str) -> tuple[Callable[..., Any], Any]:
    """(model, inputs) of ``module:factory``."""
    module_name, _, name = spelling.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{spelling!r} must be module:factory, got {type(error).__name__}: {error}.") from None
    if not callable(factory):
        raise ValueError(f"{spelling} must be a function, got {type(factory).__name__}.")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise ValueError(f"{spelling} must return (model, inputs), got {type(made).__name__}.")
    return made


if __name__ == "__main__":
    sys.exit(main())
