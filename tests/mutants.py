"""Mutation testing: change the code at one point, and see whether a test goes red. `make mutants ARGS="..."`.

    python tests/mutants.py --count 100                 a sample over every package, the same for the same --seed
    python tests/mutants.py --count 0 meta/routing.py   every mutant of one file
    python tests/mutants.py --count 0 meta/dims.py:105  those of one line, as a run prints its survivors
    python tests/mutants.py --list meta/routing.py      what they are, without running one

The mutations are mutmut's (its operators and what it leaves alone), and two of ours for code that says no: a check
that never fires, and a condition without one of its clauses. Mutmut's own runner does not fit: it keeps all mutants of
a function behind a wrapper that reads the environment, which torch.compile traces and refuses, and it never mutates
the tables at module level. So each mutant is written into a copy of the tree and tested in a process forked from
one that has torch imported already, by the test files that `TESTS` names for the mutated file, the first failure
ending it. The working tree is never touched. A surviving mutant is shown as a diff, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from mutmut.configuration import config
from mutmut.mutation import file_mutation
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("meta", "moe_ops", "compile_passes", "benchmarks", "tests", "pyproject.toml", "README.md", "Makefile")

_RECOGNISERS = "tests/passes/test_refusals.py tests/passes/test_experts.py tests/passes/test_routers.py"
#: Which tests a mutated file is run against: the first row whose pattern fits, the quickest tests first.
TESTS: tuple[tuple[str, str], ...] = (
    ("meta/routing.py", "tests/meta/test_routing.py tests/ops/test_autograd.py"),
    ("meta/activations.py", "tests/meta tests/ops/test_experts_numerics.py tests/ops/test_autograd.py"),
    ("meta/arch.py", "tests/meta/test_tables.py tests/ops/test_plans.py"),
    ("meta/cost.py", "tests/meta/test_tables.py tests/ops/test_flops.py"),
    ("meta/dims.py", "tests/meta tests/ops/test_dispatch.py tests/ops/test_validation.py"),
    ("meta/fakes.py", "tests/ops/test_opcheck.py"),
    ("meta/*shapes.py", "tests/meta tests/ops/test_validation.py tests/ops/test_experts_numerics.py "
                        "tests/ops/test_opcheck.py"),
    ("meta/*", "tests/meta tests/ops/test_validation.py tests/ops/test_experts_numerics.py"),
    ("moe_ops/backends/triton.py", "tests/interpreted/test_backend.py"),
    ("moe_ops/backends/torch_grouped.py", "tests/ops/test_dispatch.py tests/ops/test_validation.py"),
    ("moe_ops/backends/cpu.py", "tests/ops/test_experts_numerics.py tests/ops/test_cpu_layout.py "
                                "tests/ops/test_opcheck.py"),
    ("moe_ops/backends/*", "tests/ops/test_experts_numerics.py tests/ops/test_dispatch.py tests/ops/test_opcheck.py"),
    ("moe_ops/reference.py", "tests/ops/test_experts_numerics.py tests/ops/test_opcheck.py"),
    ("moe_ops/testing.py", "tests/infra/test_testing_kit.py"),
    ("moe_ops/plans.py", "tests/ops/test_plans.py"),
    ("moe_ops/debugging.py", "tests/ops/test_debug.py"),
    ("moe_ops/integrations/*", "tests/ops/test_transformers_integration.py"),
    ("moe_ops/*autograd.py", "tests/ops/test_autograd.py"),
    ("moe_ops/*backward.py", "tests/ops/test_autograd.py"),
    ("moe_ops/pairs.py", "tests/ops/test_experts_numerics.py tests/ops/test_autograd.py"),
    ("moe_ops/*", "tests/ops/test_validation.py tests/ops/test_experts_numerics.py tests/ops/test_dispatch.py "
                  "tests/ops/test_flops.py tests/ops/test_docs.py"),
    ("compile_passes/patterns/f*.py", "tests/passes/test_forms.py"),
    ("compile_passes/patterns/*", f"{_RECOGNISERS} tests/passes/test_repros.py tests/passes/test_property.py"),
    ("compile_passes/generation.py", "tests/passes/test_generation.py"),
    ("compile_passes/siblings.py", "tests/infra/test_shadowed.py"),
    *((f"compile_passes/{name}.py", "tests/passes/test_loops.py tests/passes/test_explain.py")
      for name in ("explain", "uncaptured", "loops", "tiny", "__main__")),
    *((f"compile_passes/{name}.py", "tests/passes/test_compat.py tests/passes/test_fail_closed.py "
       "tests/passes/test_fuse_context.py tests/passes/test_backend.py tests/passes/test_repros.py")
      for name in ("backend", "compat", "identity", "observe", "passes", "transaction", "apart")),
    *((f"compile_passes/{name}.py", "tests/passes/test_join.py tests/passes/test_attention.py "
       "tests/passes/test_rewrite.py tests/passes/test_repros.py tests/passes/test_property.py")
      for name in ("rewrite", "join", "attention", "decide", "match")),
    ("compile_passes/*", f"tests/passes/test_reading.py {_RECOGNISERS} tests/passes/test_rewrite.py "
                         "tests/passes/test_repros.py tests/passes/test_property.py "
                         "tests/passes/test_training_programs.py tests/passes/test_sweep.py"),
)  # fmt: skip
INTERPRETED = "tests/interpreted"


@dataclass(eq=False)
class Mutant:
    """One file with one change; its text is made when it is asked for, which takes as long as parsing the file."""

    path: str
    line: int
    module: cst.Module
    mutation: file_mutation.Mutation

    @property
    def before(self) -> str:
        return self.module.code

    @cached_property
    def after(self) -> str:
        changed = file_mutation.deep_replace(self.module, self.mutation.original_node, self.mutation.mutated_node)
        return changed.code

    @property
    def kind(self) -> tuple[str, str]:
        return self.path, type(self.mutation.original_node).__name__

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    def diff(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), self.path, "mutant", "", "", 1)
        return "\n".join("    " + line for line in lines if not line.startswith(("---", "+++")))


def check_never_fires(node: cst.If) -> Iterator[cst.If]:
    """A check that says no (its body ends in raise or return) is deleted."""
    if isinstance(node.body, cst.IndentedBlock):
        last = node.body.body[-1]
        if m.matches(last, m.SimpleStatementLine(body=[m.Raise() | m.Return()])):
            yield node.with_changes(test=cst.Name("False"))


def clause_dropped(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    """`a and b` becomes `a`, and `b`."""
    yield node.left
    yield node.right


def in_a_message(node: cst.CSTNode) -> bool:
    """A text, which only a test of that text could see: the words of an error are not arithmetic."""
    return isinstance(node, cst.BaseString)


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    before = Path(path).read_text()
    operators = [*mutation_operators, (cst.If, check_never_fires), (cst.BooleanOperation, clause_dropped)]
    module = cst.parse_module(before)
    wrapper = cst.MetadataWrapper(module)
    visitor = file_mutation.MutationVisitor(operators, file_mutation.get_ignored_lines(path, before, wrapper))
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(cst.metadata.PositionProvider)
    raised = [positions[node.exc] for node in m.findall(module, m.Raise()) if node.exc is not None]
    found = []
    for mutation in visitor.mutations:
        where = positions[mutation.original_node]
        if in_a_message(mutation.original_node) and any(
            span.start.line <= where.start.line <= span.end.line for span in raised
        ):
            continue
        found.append(Mutant(path, where.start.line, module, mutation))
    return found


def mutated_files(patterns: list[str], without: list[str]) -> list[str]:
    """Files under the configured sources that fit a pattern; without patterns, all of them."""
    paths = [str(path) for source in config().source_paths for path in sorted(source.rglob("*.py"))]
    wanted = [path for path in paths if not patterns or any(fnmatch(path, pattern) for pattern in patterns)]
    left_alone = [*config().do_not_mutate, *without]
    return [path for path in wanted if not any(fnmatch(path, pattern) for pattern in left_alone)]


def tests_of(path: str) -> list[str]:
    return next(tests.split() for pattern, tests in TESTS if fnmatch(path, pattern))


def copy_tree() -> Path:
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def run_tests(copy: Path, tests: list[str], log: Path) -> None:
    """The body of a forked process: pytest in the copy; the exit status is pytest's."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    if is_interpreted(tests):
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:] = [str(copy)] + [entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "tests"))]
    import pytest

    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    os._exit(int(pytest.main([*options, *tests])))


def preload(tests: list[str]) -> None:
    """Import, once, what every forked process inherits; nothing of ours, and no Triton where it must interpret."""
    import torch

    torch.set_num_threads(1)
    if not is_interpreted(tests):
        import torch._dynamo


def is_interpreted(tests: list[str]) -> bool:
    return tests[0].startswith(INTERPRETED)


def start(copy: Path, tests: list[str], log: Path) -> int:
    preload(tests)
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            run_tests(copy, tests, log)
        finally:
            os._exit(70)
    return process


def wait(process: int, timeout: float) -> int | None:
    """Exit status, or None after the timeout."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them. A kind of mutation in a file gets a share that grows with the root of its number, so that
    neither a large file nor the many arguments of calls leave out the rest.
    """
    if not count or count >= len(mutants):
        return mutants
    generator = random.Random(seed)
    of_kind = Counter(mutant.kind for mutant in mutants)
    keyed = [(generator.random() ** (of_kind[mutant.kind] ** 0.5), i) for i, mutant in enumerate(mutants)]
    return [mutants[i] for i in sorted(i for _, i in sorted(keyed, reverse=True)[:count])]


def seconds_when_green(copy: Path, tests: list[str], log: Path) -> float:
    """How long the tests take on unchanged code; if they are red there, they would kill everything."""
    began = time.monotonic()
    if wait(start(copy, tests, log), 1800) != 0:
        print(log.read_text()[-2000:])
        raise SystemExit(f"{' '.join(tests)}: red without a mutant")
    seconds = time.monotonic() - began
    print(f"green in {seconds:.0f} s: {' '.join(tests)}", flush=True)
    return seconds


def run(chosen: list[Mutant], copy: Path) -> list[Mutant]:
    """Test every mutant, the interpreted ones first; returns the survivors."""
    chosen = sorted(chosen, key=lambda mutant: is_interpreted(tests_of(mutant.path)), reverse=True)
    log = copy / "pytest.log"
    seconds: dict[tuple[str, ...], float] = {}
    survivors, killed, total = [], Counter(), Counter()
    for index, mutant in enumerate(chosen, 1):
        tests = tests_of(mutant.path)
        if tuple(tests) not in seconds:
            seconds[tuple(tests)] = seconds_when_green(copy, tests, log)
        (copy / mutant.path).write_text(mutant.after)
        began = time.monotonic()
        status = wait(start(copy, tests, log), 3 * seconds[tuple(tests)] + 30)
        (copy / mutant.path).write_text(mutant.before)
        total[mutant.package] += 1
        verdict = "timeout" if status is None else "survived" if status == 0 else "killed"
        if verdict == "survived":
            survivors.append(mutant)
        else:
            killed[mutant.package] += 1
        took = time.monotonic() - began
        print(f"[{index}/{len(chosen)}] {verdict:8} {took:5.1f} s  {mutant.path}:{mutant.line}", flush=True)
        if verdict == "survived":
            print(mutant.diff(), flush=True)
    for package, number in total.items():
        print(f"{package}: {killed[package]} of {number} killed, {killed[package] / number:.0%}")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the packages.")
    parser.add_argument("paths", nargs="*", help="files, patterns or file:line (default: every source)")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN", help="leave these files out")
    parser.add_argument("--count", type=int, default=60, help="how many mutants to sample, 0 for all (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="another seed samples others (default: 0)")
    parser.add_argument("--list", action="store_true", help="show the chosen mutants and stop")
    options = parser.parse_args()
    os.chdir(ROOT)  # mutmut reads pyproject.toml there
    lines = [name for name in options.paths if ":" in name]
    files = mutated_files([name.split(":")[0] for name in options.paths], options.without)
    everything = [mutant for path in files for mutant in mutants_of(path)]
    everything = [mutant for mutant in everything if not lines or f"{mutant.path}:{mutant.line}" in lines]
    chosen = sample(everything, options.count, options.seed)
    print(f"{len(chosen)} of {len(everything)} mutants")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.path}:{mutant.line}\n{mutant.diff()}")
        return 0
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    copy = copy_tree()
    try:
        survivors = run(chosen, copy)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
