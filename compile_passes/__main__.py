"""Fuse Mixture-of-Experts blocks under torch.compile: see what is fused, and tune it for a GPU.

`moe-ops`, `python -m moe_ops` and `python -m compile_passes` are the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compile_passes.explain import explain
from compile_passes.named import DTYPES, EXPERTS
from moe_ops import tuning

_WHAT = """What to explain:
  module:factory             a function without arguments that returns (model, inputs); inputs is a tensor,
                             a tuple of positional arguments or a dict of keyword arguments
  mixtral                    a transformers model type
  path/config.json           a transformers configuration (or the folder that holds it)
  Qwen/Qwen3-30B-A3B         the name of a model on the hub: its family is what the local cache, or the name, says

Of a transformers model a tiny random one is made, whose code is that of the real one; nothing is downloaded.

Exit status: 0 when every block that was found is fused, 1 when one was refused, or the model or a pass raised, 2
for a bad request.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="moe-ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "explain", help="print which MoE blocks are fused, which are refused, why, and the cure",
        description="Capture a model, fuse its MoE blocks, print what was fused, what was refused, why, and the cure.",
        epilog=_WHAT, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("what", help="module:factory, a model type, a config.json, or the name of a model on the hub")
    command.add_argument("--experts", choices=EXPERTS,
                         help=f"experts implementation of a transformers model (default: {EXPERTS[0]})")  # fmt: skip
    command.add_argument("--dtype", choices=tuple(DTYPES), help="weights of a transformers model (default: bf16)")
    command.add_argument("--tokens", type=int, help="length of its token sequence (default: 16)")
    command.add_argument("--json", action="store_true", help="print the report as JSON (its schema: Report.to_dict)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page that draws every block, too")
    command.set_defaults(command=_explain)
    tuning.add_command(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 for a bad request."""
    options = parser().parse_args(arguments)
    code: int = options.command(options)
    return code


def _explain(options: argparse.Namespace) -> int:
    """0 when everything found was fused, 1 when something was refused, 2 for a bad request."""
    given = {
        "experts": options.experts,
        "dtype": options.dtype,
        "tokens": options.tokens,
    }
    page = options.html
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        return _refuse(f"--html must be a file in a folder that exists, got {page}.")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a factory is where the user is, as under `python -m`
    try:
        with _quiet():
            report = explain(options.what, **{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        return _refuse(str(error).removeprefix("explain: "))
    finally:
        sys.path.remove(here)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    if page is not None:
        try:
            page.write_text(report.html(), encoding="utf-8")
        except OSError as error:
            return _refuse(f"--html must be a file that can be written, got {page} ({error.strerror}).")
    return 1 if report.refused or report.error or report.errors else 0


def _refuse(message: str) -> int:
    print(f"explain: {message}", file=sys.stderr)
    return 2


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


if __name__ == "__main__":
    sys.exit(main())
