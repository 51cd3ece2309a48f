"""Eager torch against `torch.compile(backend="moe_ops_eager")`, seen from outside: outputs, written inputs, gradients.

Nothing here knows how the passes work. A program is right when the compiled function gives what the function gives,
NaN where it gives NaN, and raises nothing that it does not raise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

import compile_passes  # noqa: F401  (registers the backends)
from compile_passes.decide import Decision
from compile_passes.match import Refusal
from compile_passes.passes import Report, enter, run_all
from moe_ops.compat import captured_under
from moe_ops.logs import quiet

# Relative to the largest element of the expected tensor, or to this where all are smaller (a gradient that is zero).
SMALL = 1e-2
# The fused operators sum in another order than eager torch,
# and round where eager does not; a wrong rewrite is off by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Outcome:
    """What compiling a program came to.

    Attributes:
        fused, shared_heads: what the passes count.
        problem: how the compiled program differs from eager; None when it does not.
        crashed: whether the problem is an exception.
    """

    fused: int = 0
    shared_heads: int = 0
    problem: str | None = None
    crashed: bool = False


def difference(got: Any, expected: Any, tolerance: float | None = None) -> str | None:
    """How two results differ: in structure, shape, dtype, positions of NaN, or values; None when they agree."""
    left, right = (tree_leaves(tree_map(_state, tree)) for tree in (got, expected))
    if len(left) != len(right):
        return f"{len(left)} results instead of {len(right)}"
    for position, (one, other) in enumerate(zip(left, right, strict=True)):
        problem = _differs(one, other, tolerance)
        if problem is not None:
            return f"result {position}: {problem}"
    return None


def _state(value: Any) -> Any:
    return dict(value.state_dict()) if isinstance(value, torch.nn.Module) else value


def _differs(got: Any, expected: Any, tolerance: float | None) -> str | None:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = got is expected or (type(got) is type(expected) and got == expected)
        return None if same else f"{got!r} instead of {expected!r}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return None if torch.equal(got, expected) else "other numbers"
    bound = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    one, other = got.detach().double(), expected.detach().double()
    if not torch.equal(one.isnan(), other.isnan()):
        return f"{int(one.isnan().sum())} NaN instead of {int(other.isnan().sum())}, or at other places"
    finite = other.isfinite()
    if not torch.equal(one[~finite].nan_to_num(0.0), other[~finite].nan_to_num(0.0)):
        return "other infinities"
    if finite.any():
        scale = other[finite].abs().max().clamp(min=SMALL)
        error = ((one - other)[finite].abs().max() / scale).item()
        if not error <= bound:
            return f"off by {error:.1e} of the largest element"
    return None


def compiled(function: Callable[..., Any], backend: Any = "moe_ops_eager", **options: Any) -> Callable[..., Any]:
    """``function`` compiled afresh, with the counters at zero."""
    torch.compiler.reset()
    counters.clear()
    return torch.compile(function, backend=backend, **options)


def check(
    function: Callable[..., Any],
    *args: Any,
    tolerance: float | None = None,
    gradients: bool = False,
    backend: Any = "moe_ops_eager",
    **options: Any,
) -> Outcome:
    """Run ``function`` eagerly and compiled on equal arguments, and compare results and what became of the arguments.

    Arguments that share storage share it in both runs.

    Args:
        args: what ``function`` is called with; it is copied for each of the two runs.
        tolerance: bound relative to the largest element; by dtype when None.
        gradients: whether to train: the gradients of all floating point arguments are compared too.
        backend: what compiles; it runs our passes.
        options: of torch.compile.

    Raises:
        Exception: what ``function`` itself raises.
    """
    eager_args, own_args = copy.deepcopy(args), copy.deepcopy(args)
    with quiet(), torch.set_grad_enabled(gradients), torch._dynamo.config.patch(captured_under(function)):
        expected = _once(function, eager_args, gradients)
        try:
            got = _once(compiled(function, backend, **options), own_args, gradients)
        except torch._dynamo.exc.Unsupported as error:
            raise Undefined(f"Dynamo does not capture it, before any pass: {' '.join(str(error).split())}") from error
        except Exception as error:
            counts, problem = _counts(), f"{type(error).__name__}: {' '.join(str(error).split())}"
            if not _captured_by_torch(function, copy.deepcopy(args), gradients, options):
                raise Undefined(f"torch alone does not compile it: {problem}") from error
            return Outcome(*counts, problem=problem, crashed=True)
        problem = difference((got, own_args), (expected, eager_args), tolerance)
        if problem is not None and not _reproducible(function, args, gradients, expected, tolerance):
            raise Undefined("eager torch gives one thing and then another: it reads uninitialised memory")
        if (
            problem is not None
            and gradients
            and _no_further((got, own_args), (expected, eager_args), _exact(function, args))
        ):
            problem = None
    return Outcome(*_counts(), problem=problem)


class Undefined(RuntimeError):
    """There is no result to compare with."""


def _captured_by_torch(
    function: Callable[..., Any], args: tuple[Any, ...], gradients: bool, options: dict[str, Any]
) -> bool:
    """Whether torch.compile without any of our passes runs ``function``."""
    torch.compiler.reset()
    try:
        _once(torch.compile(function, backend="eager", **options), args, gradients)
    except Exception:
        return False
    return True


def _reproducible(
    function: Callable[..., Any], args: tuple[Any, ...], gradients: bool, expected: Any, tolerance: float | None
) -> bool:
    """Whether eager torch gives ``expected`` again, whatever the memory that it allocates held before.

    Rows past the last group of torch's grouped product are never written, for example.
    """
    for fill in (float("nan"), 1e30, 0.0):
        used = [torch.full((size,), fill) for size in (8, 16, 32, 64, 128, 256, 512, 1024, 4096) for _ in range(64)]
        del used
        again = _once(function, copy.deepcopy(args), gradients)
        if difference(again, expected, tolerance) is not None:
            return False
    return True


def _exact(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Results, gradients and what became of the arguments, in float64; None where ``function`` does not take it."""
    wide = tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        copy.deepcopy(args),
    )
    try:
        return _once(function, wide, gradients=True), wide
    except RuntimeError:
        return None


def _no_further(got: Any, expected: Any, exact: Any) -> bool:
    """Whether every tensor of ``got`` is as near to that of ``exact`` as eager torch's is, to a factor of 4: gradients
    whose terms cancel are noise in both.
    """
    left, right, reference = map(tree_leaves, (got, expected, exact))
    if not len(left) == len(right) == len(reference):
        return False
    for ours, eager, wanted in zip(left, right, reference, strict=True):
        if not (isinstance(wanted, Tensor) and wanted.is_floating_point()):
            if _differs(ours, eager, None) is not None:
                return False
            continue
        error, allowed = ((one.double() - wanted).abs().max() for one in (ours, eager))
        if not error <= 4 * allowed + torch.finfo(eager.dtype).eps * wanted.abs().max():
            return False
    return True


def _once(function: Callable[..., Any], args: tuple[Any, ...], gradients: bool) -> Any:
    torch.manual_seed(0)
    if not gradients:
        return function(*args)
    leaves = [
        leaf.requires_grad_() for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    results = function(*args)
    total = sum(
        (part * torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).view(part.shape)).sum()
        for part in tree_leaves(results)
        if isinstance(part, Tensor) and part.requires_grad
    )
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) else ()
    return results, grads


def _counts() -> tuple[int, int]:
    return counters["moe_ops"]["fused"], counters["moe_ops"]["shared_heads"]


def assert_same(function: Callable[..., Any], *args: Any, **options: Any) -> Outcome:
    """`check`, which must find nothing."""
    outcome = check(function, *args, **options)
    assert outcome.problem is None, f"{outcome.problem} (fused {outcome.fused})"
    return outcome


def _reported(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Outcome, list[Report]]:
    """`check`, and what the passes said of what was compiled for it."""
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        own = run_all(gm)
        reports.extend(own)
        return enter(gm.forward, own)

    return check(function, *args, backend=backend, **options), reports


def decisions(function: Callable[..., Any], *args: Any, **options: Any) -> list[Decision]:
    """The blocks that are fused in a program, which computes what it did."""
    outcome, reports = _reported(function, *args, **options)
    found = [decision for report in reports for decision in report.fused]
    assert (outcome.problem, outcome.fused) == (None, len(found))
    return found


def refusals(function: Callable[..., Any], *args: Any, **options: Any) -> list[Refusal]:
    """What the passes say of a program in which they must fuse nothing, and which computes what it did."""
    outcome, reports = _reported(function, *args, **options)
    assert (outcome.problem, outcome.fused) == (None, 0)
    return [refusal for report in reports for refusal in report.refused]


def settled(run: Callable[[Any], Outcome | None], case: Any) -> Outcome:
    """What ``run`` makes of a generated case, which has to be what eager torch makes of it; skips where that raises."""
    outcome = run(case)
    if outcome is None:
        pytest.skip("eager torch raises")
    assert outcome.problem is None, f"{outcome.problem}\n{case}"
    return outcome
