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

_RECOGNISERS = ("tests/passes/test_refusals.py tests/passes/test_experts.py tests/passes/test_routers.py "
                "tests/passes/test_ids.py")  # fmt: skip
#: Which tests a mutated file is run against: the first row whose pattern fits, the quickest tests first.
TESTS: tuple[tuple[str, str], ...] = (
    ("meta/routing.py", "tests/meta/test_routing.py tests/ops/test_autograd.py"),
    ("meta/activations.py", "tests/meta tests/ops/test_experts_numerics.py tests/ops/test_autograd.py"),
    ("meta/arch.py", "tests/meta/test_tables.py tests/ops/test_plans.py"),
    ("meta/cost.py", "tests/meta/test_tables.py tests/ops/test_flops.py"),
    ("meta/dims.py", "tests/meta tests/ops/test_choice.py tests/ops/test_validation.py"),
    ("meta/fakes.py", "tests/ops/test_opcheck.py"),
    ("meta/*shapes.py", "tests/meta tests/ops/test_validation.py tests/ops/test_experts_numerics.py "
                        "tests/ops/test_opcheck.py"),
    ("meta/*", "tests/meta tests/ops/test_validation.py tests/ops/test_experts_numerics.py"),
    ("moe_ops/backends/triton.py", "tests/interpreted/test_backend.py"),
    ("moe_ops/backends/triton_plans.py", "tests/ops/test_plans.py"),
    ("moe_ops/backends/cpu.py", "tests/ops/test_experts_numerics.py tests/ops/test_cpu_layout.py "
                                "tests/ops/test_opcheck.py"),
    ("moe_ops/backends/*", "tests/ops/test_experts_numerics.py tests/ops/test_choice.py tests/ops/test_opcheck.py"),
    ("moe_ops/reference.py", "tests/ops/test_experts_numerics.py tests/ops/test_opcheck.py"),
    ("moe_ops/api.py", "tests/ops/test_api.py tests/ops/test_docs.py"),
    ("moe_ops/siblings.py", "tests/infra/test_shadowed.py"),
    ("moe_ops/testing.py", "tests/infra/test_testing_kit.py tests/infra/test_broken_models.py"),
    ("moe_ops/graphs.py", "tests/infra/test_testing_kit.py tests/passes/test_page.py tests/passes/test_words.py"),
    ("moe_ops/tuning.py", "tests/ops/test_tune.py"),
    ("moe_ops/plans.py", "tests/ops/test_plans.py"),
    ("moe_ops/debugging.py", "tests/ops/test_debug.py"),
    ("moe_ops/integrations/*", "tests/ops/test_transformers_integration.py"),
    ("moe_ops/*autograd.py", "tests/ops/test_autograd.py"),
    ("moe_ops/*backward.py", "tests/ops/test_autograd.py"),
    *((f"moe_ops/{name}.py", "tests/distributed") for name in ("agreement", "ep", "exchanges", "groups")),
    ("moe_ops/pairs.py", "tests/ops/test_experts_numerics.py tests/ops/test_autograd.py"),
    ("moe_ops/*", "tests/ops/test_validation.py tests/ops/test_experts_numerics.py tests/ops/test_choice.py "
                  "tests/ops/test_flops.py tests/ops/test_docs.py"),
    *((f"compile_passes/patterns/{name}.py", "tests/passes/test_dense.py tests/passes/test_foreign.py")
      for name in ("contraction", "dense", "selection")),
    ("compile_passes/patterns/siblings.py", "tests/passes/test_unrolled.py"),
    ("compile_passes/patterns/f*.py", "tests/passes/test_forms.py tests/passes/test_flow.py"),
    ("compile_passes/patterns/*", f"{_RECOGNISERS} tests/passes/test_repros.py tests/passes/test_property.py"),
    ("compile_passes/vocabulary.py", f"tests/passes/test_vocabulary.py tests/passes/test_reading.py {_RECOGNISERS}"),
    ("compile_passes/apart.py", "tests/passes/test_apart.py tests/passes/test_repros.py"),
    ("compile_passes/generation.py", "tests/passes/test_generation.py"),
    ("compile_passes/siblings.py", "tests/infra/test_shadowed.py"),
    *((f"compile_passes/{name}.py", "tests/passes/test_stackable.py tests/passes/test_stacking.py")
      for name in ("asked", "reached", "stackable", "stack_slices", "stacking")),
    *((f"compile_passes/{name}.py", "tests/passes/test_static_loops.py") for name in ("effects", "rebind", "trial")),
    *((f"compile_passes/{name}.py", "tests/passes/test_page.py tests/passes/test_explain.py")
      for name in ("diagram", "page", "report")),
    ("compile_passes/named.py", "tests/passes/test_named.py tests/passes/test_explain.py"),
    *((f"compile_passes/{name}.py", "tests/passes/test_loops.py tests/passes/test_explain.py "
       "tests/passes/test_named.py") for name in ("explain", "uncaptured", "loops", "tiny", "__main__")),
    *((f"compile_passes/{name}.py", "tests/passes/test_compat.py tests/passes/test_fail_closed.py "
       "tests/passes/test_fuse_context.py tests/passes/test_refusals.py tests/passes/test_backend.py "
       "tests/passes/test_generation.py tests/passes/test_repros.py")
      for name in ("backend", "compat", "identity", "observe", "passes", "transaction")),
    ("compile_passes/match.py", "tests/passes/test_explain.py tests/passes/test_refusals.py "
                                "tests/passes/test_words.py"),
    *((f"compile_passes/{name}.py", "tests/passes/test_join.py tests/passes/test_attention.py "
       "tests/passes/test_rewrite.py tests/passes/test_refusals.py tests/passes/test_repros.py "
       "tests/passes/test_property.py")
      for name in ("rewrite", "join", "attention", "decide")),
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


#: Calls that take words for people.
_SPEAKERS = m.OneOf(*(m.Call(func=m.Name(name)) for name in ("Refusal", "kept", "_say", "print", "fail")),
                    *(m.Call(func=m.Attribute(value=m.Name(name))) for name in ("log", "warnings")))  # fmt: skip

#: `__all__`: names for readers and linters, which ruff checks.
_EXPORTED = m.Assign(targets=[m.AssignTarget(target=m.Name("__all__"))])


def messages(module: cst.Module) -> list[cst.CSTNode]:
    """Where words for people are written, and names for linters: the words of a refusal are not arithmetic."""
    raised = [node.exc for node in m.findall(module, m.Raise()) if node.exc is not None]
    return [*raised, *m.findall(module, _SPEAKERS), *m.findall(module, _EXPORTED)]


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its lines."""
    before = Path(path).read_text()
    operators = [*mutation_operators, (cst.If, check_never_fires), (cst.BooleanOperation, clause_dropped)]
    module = cst.parse_module(before)
    wrapper = cst.MetadataWrapper(module)
    visitor = file_mutation.MutationVisitor(operators, file_mutation.get_ignored_lines(path, before, wrapper))
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(cst.metadata.PositionProvider)
    said = [positions[node] for node in messages(module)]
    found = []
    for mutation in visitor.mutations:
        where = positions[mutation.original_node]
        is_text = isinstance(mutation.original_node, cst.BaseString)
        if is_text and any(span.start.line <= where.start.line <= span.end.line for span in said):
            continue  # only a test of the text could see it
        found.append(Mutant(path, where.start.line, module, mutation))
    return found


def mutated_files(patterns: list[str], without: list[str]) -> list[str]:
    """Files under the configured sources that fit a pattern; without patterns, all of them."""
    paths = [str(path) for source in config().source_paths for path in sorted(source.rglob("*.py"))]
    wanted = [path for path in paths if not patterns or any(fnmatch(path, pattern) for pattern in patterns)]
    left_alone = [*config().do_not_mutate, *without]
    return [path for path in wanted if not any(fnmatch(path, pattern) for pattern in left_alone)]


def tests_of(path: str) -> tuple[str, ...]:
    return next(tuple(tests.split()) for pattern, tests in TESTS if fnmatch(path, pattern))


def copy_tree() -> Path:
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def run_tests(copy: Path, tests: tuple[str, ...], log: Path) -> None:
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


def preload(tests: tuple[str, ...]) -> None:
    """Import, once, what every forked process inherits; nothing of ours, and no Triton where it must interpret."""
    import torch

    torch.set_num_threads(1)
    if not is_interpreted(tests):
        import torch._dynamo


def is_interpreted(tests: tuple[str, ...]) -> bool:
    return tests[0].startswith(INTERPRETED)


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


@dataclass
class Running:
    """A forked process that runs tests in a copy of the tree: for a mutant, or for the unchanged code."""

    process: int
    copy: Path
    tests: tuple[str, ...]
    mutant: Mutant | None
    began: float
    timeout: float

    def status(self) -> int | str | None:
        """Pytest's exit status, "timeout" after the process was killed, None while it runs."""
        done, status = os.waitpid(self.process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() < self.began + self.timeout:
            return None
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        return "timeout"


class Runner:
    """Tests mutants, `jobs` at a time, and counts what became of them."""

    def __init__(self, jobs: int, end: float) -> None:
        self.copies = [copy_tree() for _ in range(jobs)]
        self.end = end
        self.seconds: dict[tuple[str, ...], float] = {}
        self.survivors: list[Mutant] = []
        self.killed: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def run(self, chosen: list[Mutant]) -> None:
        """Test mutants until they or the time end; those that were begun are ended."""
        rows = list(dict.fromkeys(tests_of(mutant.path) for mutant in chosen))
        preload(rows[0])
        free, running = list(self.copies), list[Running]()
        waiting: list[tuple[tuple[str, ...], Mutant | None]] = [(tests, None) for tests in rows]
        while waiting or running:
            while free and waiting and (waiting[0][1] is None or time.monotonic() < self.end):
                running.append(self._start(free.pop(), *waiting.pop(0)))
            if not running:
                return
            time.sleep(0.05)
            for one in list(running):
                status = one.status()
                if status is not None:
                    running.remove(one)
                    free.append(one.copy)
                    self._record(one, status)
                    if one.mutant is None and status == 0:
                        waiting += [(one.tests, mutant) for mutant in chosen if tests_of(mutant.path) == one.tests]

    def _start(self, copy: Path, tests: tuple[str, ...], mutant: Mutant | None) -> Running:
        timeout = 1800.0
        if mutant is not None:
            (copy / mutant.path).write_text(mutant.after)
            timeout = 3 * self.seconds[tests] + 30
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            try:
                run_tests(copy, tests, copy / "pytest.log")
            finally:
                os._exit(70)
        return Running(process, copy, tests, mutant, time.monotonic(), timeout)

    def _record(self, one: Running, status: int | str) -> None:
        took, mutant = time.monotonic() - one.began, one.mutant
        if mutant is None:
            if status == 0:
                self.seconds[one.tests] = took
            else:  # they would kill every mutant
                print((one.copy / "pytest.log").read_text()[-2000:])
            print(f"{'red' if status else 'green'} in {took:.0f} s: {' '.join(one.tests)}", flush=True)
            return
        (one.copy / mutant.path).write_text(mutant.before)
        self.total[mutant.package] += 1
        survived = status == 0
        verdict = "survived" if survived else "timeout" if status == "timeout" else "killed"
        print(f"[{self.total.total()}] {verdict:8} {took:5.1f} s  {mutant.path}:{mutant.line}", flush=True)
        if survived:
            self.survivors.append(mutant)
            print(mutant.diff(), flush=True)
        else:
            self.killed[mutant.package] += 1

    def report(self, chosen: int) -> None:
        if self.total.total() < chosen:
            print(f"{chosen - self.total.total()} not tested: the time was over, or their tests red without a mutant")
        for package, number in self.total.items():
            print(f"{package}: {self.killed[package]} of {number} killed, {self.killed[package] / number:.0%}")

    def close(self) -> None:
        for copy in self.copies:
            shutil.rmtree(copy, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the packages.")
    parser.add_argument("paths", nargs="*", help="files, patterns or file:line (default: every source)")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN", help="leave these files out")
    parser.add_argument("--count", type=int, default=60, help="how many mutants to sample, 0 for all (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="another seed samples others (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many to test at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so long (default: all)")
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
    random.Random(options.seed).shuffle(chosen)
    runner = Runner(options.jobs, time.monotonic() + 60 * options.minutes)
    try:
        for interpreted in (True, False):  # Triton is imported once in a process, interpreting or not
            part = [mutant for mutant in chosen if is_interpreted(tests_of(mutant.path)) is interpreted]
            if part:
                runner.run(part)
        runner.report(len(chosen))
    finally:
        runner.close()
    return 1 if runner.survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
