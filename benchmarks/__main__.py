"""Command line: `python -m benchmarks [layers]`, and `e2e`, `host` or `report` in its place."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import shapes as shape_table
from benchmarks.results import RESULTS, ResultFile, current_commit, new_path
from meta.checks import positive_integers

OUT = Path(__file__).parent / "out"
INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `layers` when none is named."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"layers": layers_command, "e2e": e2e_command, "host": host_command, "report": report_command}
    command = arguments.pop(0) if arguments and arguments[0] in commands else "layers"
    try:
        return commands[command](arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "benchmarks: interrupted.", file=sys.stderr)
        return INTERRUPTED


def layers_command(arguments: list[str]) -> int:
    """Time single layers."""
    from benchmarks import layers
    from benchmarks.peers import DEFAULT_PEERS, PEERS

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=layers.__doc__)
    parser.add_argument("--list", action="store_true", help="list shapes and peers, and which of them can run here")
    parser.add_argument("--shapes", default="all" if on_gpu else "tiny", help="comma-separated names, 'all' or 'tiny'")
    parser.add_argument("--tokens", help="comma-separated numbers of tokens")
    parser.add_argument("--peers", help="comma-separated names; 'optional' adds the optional ones")
    parser.add_argument("--scheme", default="bf16", choices=("bf16", "fp8_block128"), help="picks the default peers")
    parser.add_argument("--format", default="grouped", choices=("grouped", "batched"), help="picks the default peers")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of activations and unquantised weights")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    if options.list:
        print_lists()
        return 0
    chosen = shape_table.parse_shapes(options.shapes)
    default_tokens = shape_table.TINY_TOKENS if not on_gpu else shape_table.TOKENS
    tokens = positive_integers("benchmarks", "--tokens", options.tokens) if options.tokens else list(default_tokens)
    names = parse_names("--peers", options.peers, PEERS, DEFAULT_PEERS[options.scheme, options.format])
    path = new_path(options.json, OUT / f"layers-{options.scheme}-{options.format}.json")
    header = {"scheme": options.scheme, "format": options.format, "dtype": options.dtype, "commit": options.commit}
    results = ResultFile(path, "layers", layers.layer_method(options.replays), **header)
    peers = [PEERS[name] for name in names]
    with interruptible(results):
        layers.run(chosen, tokens, peers, results, dtype=DTYPES[options.dtype], replays=options.replays)
    print(f"{len(results.rows)} rows in {path}")
    return 0


def e2e_command(arguments: list[str]) -> int:
    """Time whole models."""
    from benchmarks import e2e

    parser = argparse.ArgumentParser(prog="python -m benchmarks e2e", description=e2e.__doc__)
    parser.add_argument("--list", action="store_true", help="list rows and variants")
    parser.add_argument("--rows", help="comma-separated batch x new tokens, such as 8x1,4x2048")
    parser.add_argument("--variants", help="comma-separated names")
    parser.add_argument("--model", default="qwen3-4l" if torch.cuda.is_available() else "tiny", choices=e2e.MODELS)
    parser.add_argument("--cache-length", type=int, help="positions of the static cache, all of them attended to")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per row")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    if options.list:
        for name, variant in e2e.VARIANTS.items():
            print(f"{name:<28} {variant.describe()}")
        return 0
    model = e2e.MODELS[options.model]
    rows = [e2e.parse_row(text) for text in options.rows.split(",")] if options.rows else list(model.rows)
    names = parse_names("--variants", options.variants, e2e.VARIANTS, tuple(e2e.VARIANTS))
    path = new_path(options.json, OUT / "e2e.json")
    length = options.cache_length or model.cache_length
    results = e2e.new_results(model, path, options.commit, length, options.steps)
    with interruptible(results):
        e2e.run(model, rows, names, results, length=length, steps=options.steps)
    print(f"{len(results.rows)} rows in {path}")
    return 0


def host_command(arguments: list[str]) -> int:
    """Time what a call costs the CPU."""
    from benchmarks import host

    shapes = shape_table.SHAPES | shape_table.TINY_SHAPES
    default = "qwen3-30b-a3b" if torch.cuda.is_available() else next(iter(shape_table.TINY_SHAPES))
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=host.__doc__)
    parser.add_argument("--shape", default=default, choices=shapes)
    parser.add_argument("--tokens", default="1,2,8,32", help="comma-separated numbers of tokens")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    results = ResultFile(new_path(options.json, OUT / "host.json"), "host", host.METHOD, commit=options.commit)
    with interruptible(results):
        host.run(shapes[options.shape], positive_integers("benchmarks", "--tokens", options.tokens), results)
    print(f"{len(results.rows)} rows in {results.path}")
    return 0


@contextmanager
def interruptible(results: ResultFile) -> Iterator[None]:
    """Ctrl-C inside says which rows are kept: a row is written when it is measured."""
    try:
        yield
    except KeyboardInterrupt:
        rows = len(results.rows)
        kept = f"{rows} rows are kept in {results.path}" if rows else "no row was measured"
        raise KeyboardInterrupt(f"benchmarks: interrupted, {kept}.") from None


def report_command(arguments: list[str]) -> int:
    """Draw the plots and write the README's generated sections."""
    from benchmarks import report

    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=report.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--readme", type=Path, default=RESULTS.parent.parent / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README is not up to date")
    options = parser.parse_args(arguments)
    return report.main(options.results, options.readme, check=options.check)


def print_lists() -> None:
    """Shapes, and peers with what they time and whether they can run here."""
    from benchmarks.peers import PEERS

    for shape in (shape_table.SHAPES | shape_table.TINY_SHAPES).values():
        print(f"{shape.name:<16} E={shape.E:<4} K={shape.K:<2} H={shape.H:<5} I={shape.I}")
    for peer in PEERS.values():
        print(f"{peer.name:<18} {peer.work:<8} {peer.missing() or 'available'}")


def parse_names(option: str, text: str | None, known: dict, default: tuple[str, ...]) -> list[str]:
    """Known names of a comma-separated list; "default" and "optional" stand for several."""
    from benchmarks.peers import OPTIONAL

    groups = {"default": list(default), "optional": [peer.name for peer in OPTIONAL if peer.name in known]}
    names: list[str] = []
    for name in (text or "default").split(","):
        if name not in known and name not in groups:
            raise ValueError(f"benchmarks: {option} must be among {', '.join([*known, *groups])}, got {name!r}.")
        names += [item for item in groups.get(name, [name]) if item not in names]
    return names


if __name__ == "__main__":
    sys.exit(main())
