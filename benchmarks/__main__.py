"""Command line: `python -m benchmarks [layers]`.

Or `train`, `train-step`, `ep`, `e2e`, `host`, `load`, `forms`, `first-call`, `tiles`, `compare`, `carry`, `models`,
`spellings`, `report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import shapes as shape_table
from benchmarks.intervals import enough_rounds
from benchmarks.results import RESULTS, ResultFile, commit_of, current_commit, device_name, new_path
from benchmarks.timing import ROUNDS
from meta.checks import positive_integers
from meta.schemes import SCHEMES

if TYPE_CHECKING:
    from benchmarks.layers import Plan

OUT = Path(__file__).parent / "out"
INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
LAYER_OPTIONS = ("shapes", "tokens", "routing", "peers", "scheme", "format", "dtype", "rounds")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `layers` when none is named."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "layers"
    try:
        return COMMANDS[command](arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "benchmarks: interrupted.", file=sys.stderr)
        return INTERRUPTED


def layers_command(arguments: list[str]) -> int:
    """Time single layers."""
    from benchmarks import device, layers

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=layers.__doc__,
        epilog=f"These are the options of `layers`. Other commands, each with --help: {', '.join(list(COMMANDS)[1:])}.",
    )
    parser.add_argument("--list", action="store_true", help="list shapes and peers, and which of them can run here")
    add_layer_options(parser)
    parser.add_argument("--times-only", action="store_true", help="no ceilings of the GPU, and no times of kernels")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    if options.list:
        print_lists()
        return 0
    plan = layer_plan(options)
    path = new_path(options.json, OUT / f"layers-{options.scheme}-{options.format}.json")
    ceilings = None if options.times_only else device.ceilings()
    plan = replace(plan, roof=device.measured_arch(ceilings), kernels=not options.times_only)
    header = {"scheme": options.scheme, "format": options.format, "dtype": options.dtype, "commit": options.commit}
    header |= {"reference": plan.reference, "ceilings": ceilings}
    results = ResultFile(path, "layers", layers.layer_method(plan.rounds), **header)
    with interruptible(results):
        layers.run(plan, results)
    print(f"{len(results.rows)} rows in {path}")
    return 0


def ep_command(arguments: list[str]) -> int:
    """Time layers over the GPUs of one host; run by torchrun."""
    from benchmarks import expert_parallel as ep

    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks ep", description=ep.__doc__)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,deepseek-v3", help="comma-separated (default: %(default)s)")
    tokens = ",".join(map(str, ep.TOKENS))
    parser.add_argument(
        "--tokens", default=tokens, help="of all ranks together, comma-separated (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each, everything is timed once")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    shapes = shape_table.parse_shapes(options.shapes)
    tokens_of_all, rounds = positive_integers("benchmarks", "--tokens", options.tokens), enough_rounds(options.rounds)
    device = ep.start()
    path = new_path(options.json, OUT / "ep.json") if device.index == 0 else None
    devices = f"{torch.distributed.get_world_size()}x {device_name()}"
    results = ResultFile(path, "ep", ep.ep_method(rounds), commit=options.commit, device=devices)
    with interruptible(results):
        ep.run(shapes, tokens_of_all, results, rounds, device)
    return 0


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """What is timed by `layers` and by `compare`."""
    from benchmarks.routings import ROUTINGS

    default = "all" if torch.cuda.is_available() else "tiny"
    help = "comma-separated names, 'all', 'tiny', or ExKxHxI such as 16x1x5120x8192"
    parser.add_argument("--shapes", default=default, help=help)
    parser.add_argument("--tokens", help="comma-separated numbers of tokens")
    parser.add_argument("--routing", default="uniform", help=f"comma-separated, among {', '.join(ROUTINGS)}")
    parser.add_argument("--peers", help="comma-separated names; 'optional' adds those of other projects")
    parser.add_argument(
        "--scheme",
        default="bf16",
        choices=["bf16", *(name for name, row in SCHEMES.items() if row.quantized)],
        help="picks the default peers",
    )
    parser.add_argument("--format", default="grouped", choices=("grouped", "batched"), help="picks the default peers")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of activations and unquantised weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each, every peer is timed once")


def layer_plan(options: argparse.Namespace) -> Plan:
    """The options of `add_layer_options`, checked."""
    from benchmarks import layers
    from benchmarks.peers import DEFAULT_PEERS, PEERS
    from benchmarks.routings import ROUTINGS

    default_tokens = shape_table.TOKENS if torch.cuda.is_available() else shape_table.TINY_TOKENS
    names = parse_names("--peers", options.peers, PEERS, DEFAULT_PEERS[options.scheme, options.format], options.scheme)
    return layers.Plan(
        shapes=shape_table.parse_shapes(options.shapes),
        tokens=positive_integers("benchmarks", "--tokens", options.tokens) if options.tokens else default_tokens,
        peers=[PEERS[name] for name in names],
        routings=parse_names("--routing", options.routing, ROUTINGS, ("uniform",)),
        dtype=DTYPES[options.dtype],
        rounds=enough_rounds(options.rounds),
    )


def e2e_command(arguments: list[str]) -> int:
    """Time whole models."""
    from benchmarks import e2e
    from benchmarks.models import MODELS, VARIANTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks e2e", description=e2e.__doc__)
    parser.add_argument("--list", action="store_true", help="list rows and variants")
    parser.add_argument("--rows", help="comma-separated batch x new tokens, such as 8x1,4x2048")
    parser.add_argument("--variants", help="comma-separated names")
    parser.add_argument("--model", default="qwen3-4l" if torch.cuda.is_available() else "tiny", choices=MODELS)
    parser.add_argument("--cache-length", type=int, help="positions of the static cache, all of them attended to")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each, every variant is timed once")
    help = "timed at once, as a server issues them that waits for nothing (default: 1, of a device that idled)"
    parser.add_argument("--steps", type=int, default=1, help=help)
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    if options.list:
        for name, variant in VARIANTS.items():
            print(f"{name:<28} {variant.describe()}")
        return 0
    model = MODELS[options.model]
    rows = [e2e.parse_row(text) for text in options.rows.split(",")] if options.rows else list(model.rows)
    names = parse_names("--variants", options.variants, VARIANTS, tuple(VARIANTS))
    rounds = enough_rounds(options.rounds)
    path = new_path(options.json, OUT / "e2e.json")
    length = options.cache_length or model.cache_length
    if options.steps < 1:
        raise ValueError(f"benchmarks: --steps must be at least 1, got {options.steps}.")
    results = e2e.new_results(model, path, options.commit, length, rounds, options.steps)
    with interruptible(results):
        e2e.run(model, rows, names, results, length=length, rounds=rounds, steps=options.steps)
    print(f"{len(results.rows)} rows in {path}")
    return 0


def train_command(arguments: list[str]) -> int:
    """Time forward and backward of single layers."""
    from benchmarks import device, train

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks train", description=train.__doc__)
    parser.add_argument("--shapes", default="all" if gpu else "tiny", help="as `layers` takes them")
    tokens = ",".join(map(str, train.TOKENS if gpu else train.TINY_TOKENS))
    parser.add_argument("--tokens", default=tokens, help="comma-separated numbers of tokens (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(train.MODES), help="comma-separated (default: %(default)s)")
    help = "comma-separated; 'optional' adds those of other projects (default: %(default)s)"
    parser.add_argument("--peers", default=",".join(train.PEERS), help=help)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--times-only", action="store_true", help="no ceilings of the GPU, and no times of kernels")
    path = parser.add_mutually_exclusive_group()
    path.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    path.add_argument("--resume", type=Path, help="go on with the file of an interrupted run of the same commit")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    plan = train.Plan(
        shapes=shape_table.parse_shapes(options.shapes),
        tokens=positive_integers("benchmarks", "--tokens", options.tokens),
        modes=parse_names("--modes", options.modes, dict.fromkeys(train.MODES), train.MODES),
        peers=parse_names("--peers", options.peers, train.PEERS | train.OPTIONAL, tuple(train.PEERS)),
        rounds=enough_rounds(options.rounds),
        kernels=not options.times_only,
    )
    method, header = train.train_method(plan), {"reference": plan.reference, "commit": options.commit}
    if options.resume:
        results = ResultFile.resume(options.resume, "train", method, **header)
    else:
        new = new_path(options.json, OUT / "train.json")
        ceilings = None if options.times_only else device.ceilings()
        results = ResultFile(new, "train", method, **header, ceilings=ceilings)
    with interruptible(results):
        train.run(plan, results)
    print(f"{len(results.rows)} rows in {results.path}")
    return 0


def train_step_command(arguments: list[str]) -> int:
    """Time training steps of whole models."""
    from benchmarks import train_step
    from benchmarks.e2e import parse_row
    from benchmarks.models import MODELS, VARIANTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks train-step", description=train_step.__doc__)
    default = "qwen3-4l" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--model", default=default, choices=train_step.ROWS)
    parser.add_argument("--rows", help="comma-separated batch x tokens, such as 1x4096,4x4096")
    variants = ",".join(train_step.DEFAULT_VARIANTS)
    parser.add_argument("--variants", default=variants, help="comma-separated (default: %(default)s)")
    parser.add_argument("--checkpointing", default="off", help="of activations; 'off,on' for both (default: off)")
    parser.add_argument("--rounds", type=int, default=train_step.ROUNDS, help="in each, every variant makes one step")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    rows = [parse_row(text) for text in options.rows.split(",")] if options.rows else train_step.ROWS[options.model]
    names = parse_names("--variants", options.variants, VARIANTS, train_step.DEFAULT_VARIANTS)
    states = parse_names("--checkpointing", options.checkpointing, train_step.CHECKPOINTING, ("off",))
    rounds = enough_rounds(options.rounds)
    results = train_step.new_results(model, new_path(options.json, OUT / "train-step.json"), options.commit, rounds)
    with interruptible(results):
        checkpointing = [train_step.CHECKPOINTING[state] for state in states]
        train_step.run(model, rows, names, checkpointing, results, rounds=rounds)
    print(f"{len(results.rows)} rows in {results.path}")
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


def load_command(arguments: list[str]) -> int:
    """Time what counting the experts' load costs."""
    from benchmarks import load

    default = "qwen3-30b-a3b,mixtral-8x7b" if torch.cuda.is_available() else "tiny"
    parser = argparse.ArgumentParser(prog="python -m benchmarks load", description=load.__doc__)
    parser.add_argument("--shapes", default=default, help="as `layers` takes them (default: %(default)s)")
    parser.add_argument("--tokens", default="1,8,64,1024", help="comma-separated numbers of tokens")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    shapes = shape_table.parse_shapes(options.shapes)
    tokens, rounds = positive_integers("benchmarks", "--tokens", options.tokens), enough_rounds(options.rounds)
    path = new_path(options.json, OUT / "load.json")
    results = ResultFile(path, "load", load.load_method(rounds), commit=options.commit)
    with interruptible(results):
        load.run(shapes, tokens, results, rounds)
    print(f"{len(results.rows)} rows in {results.path}")
    return 0


def forms_command(arguments: list[str]) -> int:
    """Time layers of other people's code."""
    from benchmarks import forms

    parser = argparse.ArgumentParser(prog="python -m benchmarks forms", description=forms.__doc__)
    parser.add_argument("--forms", help=f"comma-separated, among {', '.join(forms.FORMS)} (all of them by default)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    names = parse_names("--forms", options.forms, forms.FORMS, tuple(forms.FORMS))
    rounds = enough_rounds(options.rounds)
    path = new_path(options.json, OUT / "forms.json")
    results = ResultFile(path, "forms", forms.METHOD.format(rounds=rounds), commit=options.commit)
    with interruptible(results):
        forms.run(names, results, rounds)
    print(f"{len(results.rows)} rows in {results.path}")
    return 0


def first_call_command(arguments: list[str]) -> int:
    """Time the first call of deep models, and the passes in it."""
    from benchmarks import first_call

    parser = argparse.ArgumentParser(prog="python -m benchmarks first-call", description=first_call.__doc__)
    parser.add_argument(
        "--models", help=f"comma-separated, among {', '.join(first_call.MODELS)} (default: all of them)"
    )
    parser.add_argument("--layers", default="48", help="at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    names = parse_names("--models", options.models, first_call.MODELS, tuple(first_call.MODELS))
    (layers,) = positive_integers("benchmarks", "--layers", options.layers)
    results = ResultFile(
        new_path(options.json, OUT / "first-call.json"), "first-call", first_call.METHOD, commit=options.commit
    )
    with interruptible(results):
        first_call.run(names, layers, results)
    print(f"{len(results.rows)} rows in {results.path}")
    return 0


def tiles_command(arguments: list[str]) -> int:
    """Time the tiles that plans by cost choose among, and fit what they cost."""
    from benchmarks import tiles

    names = f"comma-separated, among {', '.join(tiles.SHAPES)} (all of them by default), or as `layers` takes them"
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiles", description=tiles.__doc__)
    parser.add_argument("--fit", type=Path, help="time nothing, fit an older result file")
    parser.add_argument("--shapes", help=names)
    parser.add_argument("--tokens", default=",".join(map(str, tiles.TOKENS)), help="comma-separated numbers of tokens")
    parser.add_argument("--scheme", help=f"comma-separated, among {', '.join(tiles.KINDS)} (all of them by default)")
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    parser.add_argument("--commit", default=current_commit(), help="for the result file, where there is no checkout")
    options = parser.parse_args(arguments)
    document = tiles.load(options.fit) if options.fit else None
    if document is None:
        schemes = parse_names("--scheme", options.scheme, tiles.KINDS, tuple(tiles.KINDS))
        shapes, tokens = tiles.parse_layers(options.shapes), positive_integers("benchmarks", "--tokens", options.tokens)
        results = tiles.new_results(new_path(options.json, OUT / "tiles.json"), options.commit, shapes)
        with interruptible(results):
            tiles.run(shapes, tokens, schemes, results)
        print(f"{len(results.rows)} rows in {results.path}")
        document = results.document
    for line in tiles.report(document):
        print(line)
    return 0


def compare_command(arguments: list[str]) -> int:
    """Time our layers of two checkouts."""
    from benchmarks import compare

    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=compare.__doc__)
    parser.add_argument("--old", type=Path, required=True, help="folder of a checkout")
    parser.add_argument("--new", type=Path, required=True, help="folder of another one")
    parser.add_argument("--pairs", type=int, default=2, help="processes of each checkout")
    add_layer_options(parser)
    parser.add_argument("--json", type=Path, help=f"a new result file (default: in {OUT.name}/, numbered)")
    options = parser.parse_args(arguments)
    peers = layer_plan(options).peers  # every option is checked before a process starts
    checkouts = {"old": compare.checkout("--old", options.old), "new": compare.checkout("--new", options.new)}
    path = new_path(options.json, OUT / "comparison.json")
    layers = {name: str(value) for name, value in vars(options).items() if name in LAYER_OPTIONS and value is not None}
    layers["peers"] = compare.our_peers(peers)
    commits = {name: commit_of(folder) for name, folder in checkouts.items()}
    header = {"commit": commits["new"], "commits": commits, "options": layers}
    results = ResultFile(path, "comparison", compare.METHOD.format(pairs=options.pairs), **header)
    with interruptible(results):
        compare.run(checkouts, layers, options.pairs, results)
    print(f"{len(results.rows)} rows in {path}")
    return 0


def carry_command(arguments: list[str]) -> int:
    """Bring other projects' code."""
    from benchmarks import carry

    parser = argparse.ArgumentParser(prog="python -m benchmarks carry", description=carry.__doc__)
    parser.add_argument(
        "wheel", type=Path, help="from pip download --no-deps vllm==0.33, liger-kernel==0.8.5 or sonic-moe"
    )
    parser.add_argument("--to", type=Path, default=carry.PEERS, help="folder; peers look in the default one")
    options = parser.parse_args(arguments)
    files = carry.carry(options.wheel, options.to)
    print(f"{len(files)} files in {options.to}")
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
    """Draw the plots and write the generated sections of the pages."""
    from benchmarks import report

    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=report.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    root = RESULTS.parent.parent
    pages = [root / folder / "README.md" for folder in (".", "benchmarks", "moe_ops")]
    parser.add_argument("--pages", type=Path, nargs="+", default=pages, help="that have the sections between them")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page or plot is not up to date")
    options = parser.parse_args(arguments)
    return report.main(options.results, options.pages, check=options.check)


def models_command(arguments: list[str]) -> int:
    """Write the table of model families: fused, staged, refused, and why."""
    from benchmarks import families

    parser = argparse.ArgumentParser(prog="python -m benchmarks models", description=families.__doc__)
    parser.add_argument("--output", type=Path, default=families.TABLE, help="the file (default: %(default)s)")
    families.write(parser.parse_args(arguments).output)
    return 0


def spellings_command(arguments: list[str]) -> int:
    """Write the table of MoE blocks as people write them: fused, prepared, refused, and what explain says."""
    from benchmarks import spellings

    parser = argparse.ArgumentParser(prog="python -m benchmarks spellings", description=spellings.__doc__)
    parser.add_argument("--output", type=Path, default=spellings.TABLE, help="the file (default: %(default)s)")
    spellings.write(parser.parse_args(arguments).output)
    return 0


def print_lists() -> None:
    """Shapes, and peers with what they time and whether they can run here."""
    from benchmarks.peers import PEERS

    for shape in (shape_table.SHAPES | shape_table.TINY_SHAPES).values():
        print(f"{shape.name:<16} E={shape.E:<4} K={shape.K:<2} H={shape.H:<5} I={shape.I}")
    for peer in PEERS.values():
        print(f"{peer.name:<18} {peer.work:<8} {peer.missing() or 'available'}")


def parse_names(
    option: str, text: str | None, known: dict, default: tuple[str, ...], scheme: str | None = None
) -> list[str]:
    """Known names of a comma-separated list; "default" and "optional" stand for several, the latter for the optional
    peers that read weights as they are or in ``scheme``.
    """
    from benchmarks import peers, training_peers

    groups = {"default": list(default)}
    others = {*training_peers.OPTIONAL, *(peer.name for peer in peers.OPTIONAL if peer.scheme in (None, scheme))}
    if optional := [name for name in known if name in others]:
        groups["optional"] = optional
    names: list[str] = []
    for name in (text or "default").split(","):
        if name not in known and name not in groups:
            raise ValueError(f"benchmarks: {option} must be among {', '.join([*known, *groups])}, got {name!r}.")
        names += [item for item in groups.get(name, [name]) if item not in names]
    return names


COMMANDS = {
    "layers": layers_command,
    "train": train_command,
    "train-step": train_step_command,
    "ep": ep_command,
    "e2e": e2e_command,
    "host": host_command,
    "load": load_command,
    "forms": forms_command,
    "first-call": first_call_command,
    "tiles": tiles_command,
    "compare": compare_command,
    "carry": carry_command,
    "models": models_command,
    "spellings": spellings_command,
    "report": report_command,
}


if __name__ == "__main__":
    sys.exit(main())
