"""Every spelling of an alias or a write, used inside an MoE block, compiled and compared with eager torch.

`python -m tests.passes.sweep` runs all of them on every target and prints how many were exercised, wrong and crashed,
and which could not be built or captured.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.compare import check
from tests.passes.spellings import Effect, Spelling, left_out, spellings

T, E, K, H, I = 12, 8, 2, 32, 16
# What is written: the hidden states after they were gathered, the first product before it is activated, the routing
# weights after the router, the second weight after it was gathered.
TARGETS = ("hidden", "product", "weights", "second")


@dataclass(frozen=True)
class Result:
    """``word`` is one of right, wrong, crashed, not built, no effect, not captured; ``detail`` says more."""

    word: str
    detail: str = ""
    fused: int = 0


def inputs(target: str) -> tuple[Tensor, ...]:
    """x, gate, w1, w2, such that what is written is [12, 32] whatever the target."""
    make = torch.Generator().manual_seed(0)
    x, gate, w1, w2 = (torch.rand(shape, generator=make) for shape in ((T, H), (E, H), (E, 2 * I, H), (E, H, I)))
    return (x[: T // K] if target == "product" else x) - 0.25, gate - 0.5, w1 * 0.3 - 0.1, w2 * 0.3 - 0.1


def used(call: Callable[[Tensor], Any], effect: Effect, target: str) -> Callable[..., Any]:
    """A block in which ``call`` aliases or writes ``target``; an alias is then written."""

    def act(value: Tensor) -> None:
        effect.write(call(value))

    def run(x, gate, w1, w2):
        x, w2 = x * 1, w2 * 1
        weights, ids = torch.topk(F.linear(x, gate).softmax(-1), K, -1)
        if target == "weights":  # at the front of a tensor as large as the hidden states
            room = torch.cat([weights.reshape(-1), weights.new_ones(T * H - weights.numel())]).view(T, H)
            weights = room.view(-1)[: weights.numel()].view(-1, K)
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, 0)
        if target == "hidden":
            act(x)
        h = torch.bmm(w1[flat], rows.unsqueeze(-1)).squeeze(-1)
        if target == "product":
            act(h)
        gate_half, up = h.chunk(2, -1)
        a = F.silu(gate_half) * up
        chosen = w2[flat]
        if target == "second":
            act(w2.view(-1)[: T * H].view(T, H))
        elif target == "weights":
            act(room)
        out = torch.bmm(chosen, a.unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    return run


def result(spelling: Spelling, target: str) -> Result:
    """What compiling a block with ``spelling`` on ``target`` comes to."""
    built = spelling.make()
    if built is None:
        return Result("not built")
    call, effect = built
    if not effect.changes and effect.part is None:
        return Result("no effect")
    function = used(call, effect, target)
    try:
        outcome = check(function, *inputs(target), fullgraph=True)
    except Exception as error:
        return Result("not built", f"in the block: {type(error).__name__}: {error}")
    if outcome.problem is None:
        return Result("right", fused=outcome.fused)
    if not _captured(function, target):
        return Result("not captured", outcome.problem)
    return Result("crashed" if outcome.crashed else "wrong", outcome.problem, outcome.fused)


def _captured(function: Callable[..., Any], target: str) -> bool:
    """Whether torch.compile alone gives eager's result; where it does not, nothing can be said about the passes."""
    torch.compiler.reset()
    given = inputs(target)
    torch.manual_seed(0)
    expected = function(*inputs(target))
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            got = torch.compile(function, backend="eager", fullgraph=True)(*given)
    except Exception:
        return False
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def apart(spelling: Spelling, targets: list[str]) -> list[tuple[str, Result]]:
    """The result of every target, from a process of its own: some operators of torch, called with anything, end it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = []
            for target in targets:
                found.append((target, result(spelling, target)))
                if found[-1][1].word in ("not built", "no effect"):
                    break  # the same for every target
            os.write(writing, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(told) if told else [(targets[0], Result("not built", "torch ended the process"))]


def main(arguments: list[str] | None = None) -> int:
    """Run the whole sweep with a progress line and print the counts and lists."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--match", default="", help="only spellings whose name has this in it")
    parser.add_argument("--from", dest="start", type=int, default=0, help="leave out so many at the start")
    parser.add_argument("--first", type=int, default=None, help="only so many")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth")
    options = parser.parse_args(arguments)
    chosen = [s for s in spellings() if options.match in s.name][options.start : options.first : options.every]
    seen: dict[str, list[str]] = defaultdict(list)
    total = len(chosen) * len(options.targets)
    for number, spelling in enumerate(chosen):
        for target, found in apart(spelling, options.targets):
            seen[found.word].append(
                f"{spelling.name} on {target}" + (f": {found.detail[:160]}" if found.detail else "")
            )
        done = (number + 1) * len(options.targets)
        if sys.stderr.isatty() or number % 100 == 99:
            counts = ", ".join(f"{word} {len(names)}" for word, names in sorted(seen.items()))
            print(f"\r{done}/{total}  {counts}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    for word in ("not built", "no effect", "not captured", "wrong", "crashed"):
        for name in seen[word]:
            print(f"{word}: {name}")
    print("left out:", *left_out())
    print(f"{len(left_out())} schemas left out")
    print(f"{len(chosen)} spellings;", ", ".join(f"{word} {len(names)}" for word, names in sorted(seen.items())))
    return 1 if seen["wrong"] or seen["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
