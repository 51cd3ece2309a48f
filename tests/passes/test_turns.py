"""Loops over many experts are captured in three turns, which give the graph of all turns, or in full.

What a turn does that others do not has to come out as it does eagerly: attributes of one expert, set before the first
call or after it, hooks, counts of calls, numbers that grow in another way than the experts'.
"""

from __future__ import annotations

import ast
import copy
import io
import pickle
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import moe_ops
from compile_passes import passes, turns
from compile_passes.turns import NotAlike, write_out

E, H, K = 8, 16, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(H, 24), nn.Linear(24, H), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Twice(Expert):
    twice = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)
        self.register_parameter("factor", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for value in (self.scale, self.factor):
            y = y if value is None else y * value
        return y + y if self.twice or self.training else y


class Counting(Expert):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Hits(nn.Module):
    """The experts that were hit, added where their tokens are."""

    kind: type[nn.Module] = Expert

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(self.kind() for _ in range(E))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        return weights, ids, F.one_hot(ids, E).permute(2, 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out = torch.zeros_like(x)
        for e in mask.sum((1, 2)).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class HitsTwice(Hits):
    kind = Twice


class HitsCounting(Hits):
    kind = Counting


class HitsBeside(Hits):
    """Activations in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList(nn.SiLU() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out = torch.zeros_like(x)
        for e in mask.sum((1, 2)).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            y = self.experts[e].down(self.acts[e](self.experts[e].up(x[token])))
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


class Ordered(nn.ModuleList):
    """A list of experts that runs them, each on the rows of an id that is listed for it."""

    def __init__(self) -> None:
        super().__init__(Expert() for _ in range(E))
        self.ids = list(range(E))

    def forward(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            slot, token = torch.where(mask[self.ids[e]])
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self[e](x[token]) * weights[token, slot, None])
        return out


class HitsOrdered(Hits):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Ordered()

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        return self.experts(x, weights, mask)


class Config:
    """Somebody's settings."""

    def __init__(self) -> None:
        self.ids = list(range(E))


class HitsConfigured(Hits):
    """The ids of experts are in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out = torch.zeros_like(x)
        for e in range(E):
            slot, token = torch.where(mask[self.config.ids[e]])
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Listed(Hits):
    """Results in a list, of sorted rows that are cut by counts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids, _ = self.routed(x)
        counts = torch.bincount(ids.view(-1), minlength=E).cpu().numpy()
        order = ids.view(-1).argsort()
        rows, found, start = x[order // K], [], 0
        for e, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            found.append(self.experts[e](rows[start:end]))
            start = end
        out = torch.cat(found) if found else rows.new_empty(0)
        back = torch.empty_like(out)
        back[order] = out
        return (back.view(*ids.shape, -1) * weights[..., None]).sum(1)


@pytest.fixture(autouse=True)
def _apart() -> None:
    torch.compiler.reset()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every loop that was written out, how many turns it has."""
    found: list[int] = []
    write = turns._Loop.write

    def noted(self: Any) -> None:
        write(self)
        found.append(self.count)

    monkeypatch.setattr(turns._Loop, "write", noted)
    return found


def made(kind: Callable[[], nn.Module] = Hits) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind()).eval()


def rows(count: int = 12) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


def compiled(model: nn.Module, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = moe_ops.compile(model, **{"backend": "moe_ops_eager", "dynamic": True, **options})
    counters.clear()
    return function


def captured(kind: Callable[[], nn.Module], written: list[int], **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, a copy of what it was, and the compiled one; what its trial wrote out is forgotten."""
    model = made(kind)
    original = copy.deepcopy(model)
    function = compiled(model, **options)
    written.clear()
    return model, original, function


def check(function: Any, original: nn.Module, x: Tensor | None = None) -> None:
    x = rows() if x is None else x
    torch.testing.assert_close(function(x), original(x))


@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
@pytest.mark.parametrize("kind", [Hits, Listed, HitsTwice])
def test_three_turns_are_captured(kind: type[Hits], fullgraph: bool, written: list[int]) -> None:
    _, original, function = captured(kind, written, fullgraph=fullgraph)
    with torch.no_grad():
        check(function, original)
        assert written == [E]
        check(function, original, rows(3))
        assert written == [E]
        check(function, original, rows(1))
        assert written == [E, E]
    assert counters["moe_ops"]["fused"] == 2 and not counters["moe_ops"]["refused"]


def test_gradients_of_every_expert(written: list[int]) -> None:
    model, original, function = captured(Hits, written)
    function(rows(40)).square().sum().backward()
    original(rows(40)).square().sum().backward()
    assert written == [E]
    stacks = dict(model[0].experts.named_parameters(recurse=False))
    for e, expert in enumerate(original[0].experts):
        for name, weight in expert.named_parameters():
            stack = stacks[name.replace(".", "_")]
            torch.testing.assert_close(stack.grad[e], torch.zeros_like(weight) if weight.grad is None else weight.grad)


# ---- one expert is another one


def give(attribute: str, value: Any) -> Callable[[Any], None]:
    return lambda block: setattr(block.experts[6], attribute, value)


def inside(attribute: str, value: Any) -> Callable[[Any], None]:
    return lambda block: setattr(block.experts[6].act, attribute, value)


def replace(block: Any) -> None:
    torch.manual_seed(1)
    block.experts[6] = HitsTwice.kind()


def take_away(block: Any) -> None:
    del block.experts[6].act
    block.experts[6].act = nn.Tanh()


def swap(block: Any) -> None:
    experts = block.experts
    experts[5], experts[6] = experts[6], experts[5]


def begin_with_the_second(block: Any) -> None:
    first = block.experts.pop(0)
    block.experts.append(first)


def share_all_but_one(block: Any) -> None:
    """A buffer that nobody has at first: what is captured of those that share it is no other's."""
    shared = torch.tensor(3.0)
    for e, expert in enumerate(block.experts):
        expert.scale = shared if e != 6 else torch.tensor(2.0)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a_buffer": give("scale", torch.tensor(3.0)),
    "a_registered_buffer": lambda block: block.experts[6].register_buffer("scale", torch.tensor(3.0)),
    "a_parameter": give("factor", nn.Parameter(torch.tensor(3.0))),
    "a_registered_parameter": lambda block: block.experts[6].register_parameter(
        name="factor", param=nn.Parameter(torch.tensor(3.0))
    ),
    "a_buffer_of_all_others": share_all_but_one,
    "a_mode": lambda block: block.experts[6].train(),
    "swapped": swap,
    "rotated": begin_with_the_second,
    "one_twice": lambda block: block.experts.__setitem__(5, block.experts[6]),
    "another_activation": give("act", nn.ReLU()),
    "taken_away": take_away,
    "an_attribute": give("twice", True),
    "forward": lambda block: setattr(block.experts[6], "forward", lambda x: -Expert.forward(block.experts[6], x)),
    "another_expert": replace,
}


@pytest.mark.parametrize("called", [False, True], ids=["before_the_first_call", "after_it"])
@pytest.mark.parametrize("change", CHANGES)
def test_one_expert_becomes_another(change: str, called: bool, written: list[int]) -> None:
    model, original, function = captured(HitsTwice, written)
    with torch.no_grad():
        if called:
            check(function, original)
            assert written == [E]
        for one in (model, original):
            torch.manual_seed(2)
            CHANGES[change](one[0])
        check(function, original)
    assert written == [E] * called


@pytest.mark.parametrize("called", [False, True], ids=["before_the_first_call", "after_it"])
def test_experts_of_another_module(called: bool, written: list[int]) -> None:
    model, original, function = captured(Giving, written)
    with torch.no_grad():
        if called:
            check(function, original)
        for one in (model, original):
            one[0].experts[6].twice = True
        check(function, original)
    assert not written


@pytest.mark.parametrize("called", [False, True], ids=["before_the_first_call", "after_it"])
def test_something_beside_an_expert_becomes_another(called: bool, written: list[int]) -> None:
    model, original, function = captured(HitsBeside, written)
    with torch.no_grad():
        if called:
            check(function, original)
        for one in (model, original):
            one[0].acts[6] = nn.ReLU()
        check(function, original)
    assert not written


@pytest.mark.parametrize("kind", [HitsOrdered, HitsConfigured])
def test_lists_beside_the_experts(kind: type[Hits], written: list[int]) -> None:
    """Nobody is told of what is changed inside of one."""
    model, original, function = captured(kind, written)
    with torch.no_grad():
        check(function, original)
        for one in (model, original):
            (one[0].experts if kind is HitsOrdered else one[0].config).ids[6:] = [7, 6]
        check(function, original)
    assert not written


def test_all_experts_become_others(written: list[int]) -> None:
    """One recompilation, in full; the next moe_ops.compile asks anew whether they are alike."""
    model, original, function = captured(Hits, written)
    with torch.no_grad():
        check(function, original)
        for one in (model, original):
            for expert in one[0].experts:
                expert.act = nn.ReLU()
        check(function, original)
        assert written == [E]
        check(compiled(model), original)
        assert written == [E, E]


def test_modes_are_no_change(written: list[int]) -> None:
    model, original, function = captured(Hits, written)
    with torch.no_grad():
        for training in (True, False, True):
            model.train(training)
            check(function, original)
    assert set(written) == {E}


def test_hooks_of_before_the_first_call_are_called(written: list[int]) -> None:
    model, original, function = captured(Hits, written)
    for one in (model, original):
        one[0].experts[6].register_forward_hook(lambda module, given, out: out * 3)
    with torch.no_grad():
        check(function, original)
    assert not written


def test_calls_are_counted_as_they_were(written: list[int]) -> None:
    model, original, function = captured(HitsCounting, written)
    with torch.no_grad():
        for _ in range(3):
            check(function, original, rows(64))
    assert [expert.calls for expert in model[0].experts] == [expert.calls for expert in original[0].experts]


# ---- turns that are not alike


class Halves(Hits):
    """Only the first experts are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out = torch.zeros_like(x)
        for e in range(E):
            slot, token = torch.where(mask[e])
            y = self.experts[e](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y * 2 if e < 5 else y)
        return out


class Lengths(Hits):
    """Divided by how many turns there were, in Python."""

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out, turns = torch.zeros_like(x), 0
        for e in range(E):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            turns += 1
        return out / turns


class Caps(Hits):
    """A number for every expert, of which the first three grow alike."""

    def __init__(self) -> None:
        super().__init__()
        self.caps = [1, 2, 3, 4, 5, 6, 7, 9]

    def forward(self, x: Tensor) -> Tensor:
        weights, _, mask = self.routed(x)
        out = torch.zeros_like(x)
        for e in mask.sum((1, 2)).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * self.caps[e])
        return out


@pytest.mark.parametrize("kind", [Halves, Lengths, Caps])
def test_other_turns_are_as_they_were(kind: type[Hits], written: list[int]) -> None:
    _, original, function = captured(kind, written)
    with torch.no_grad():
        check(function, original, rows(40))


# ---- loops that are captured as they are


class Many(nn.Module):
    """A loop that asks the data for nothing but sizes; ``dense``: every expert gets every token."""

    def __init__(self, experts: int = 16, dense: bool = False) -> None:
        super().__init__()
        self.gate, self.dense = nn.Linear(H, experts), dense
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.dense:
                out = out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)
            else:
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Given(nn.Module):
    """Runs experts that another module holds."""

    def forward(self, experts: nn.ModuleList, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(experts)):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, experts[e](x[token]) * weights[token, slot, None])
        return out


class Giving(Hits):
    kind = Twice

    def __init__(self) -> None:
        super().__init__()
        self.expert_runner = Given()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids, _ = self.routed(x)
        return self.expert_runner(self.experts, x, weights, ids)


class Least(Many):
    """With fewer tokens than experts some turns are for one and the same id."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == min(e, len(x)))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Ticking(Many):
    """Turns are counted."""

    ticks = 0

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            self.ticks += 1
        return out


class Modes(Many):
    """Every second expert is given a number more in training."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        more = [1 + e % 2 if self.training else 1 for e in range(16)]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * more[e])
        return out


class Odd(Many):
    """Every second expert is given a number more."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * (1 + e % 2))
        return out


@pytest.mark.parametrize("dense", [False, True], ids=["rows", "dense"])
def test_many_experts_are_captured_in_few_turns(dense: bool, written: list[int]) -> None:
    model, original, function = captured(lambda: Many(dense=dense), written)
    with torch.no_grad():
        check(function, original)
        assert written == [16] and counters["moe_ops"]["fused"] == 1
        assert "forward" in vars(model[0])
        check(moe_ops.restore(model), original)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("kind", [lambda: Many(15), lambda: Odd(16)], ids=["few", "odd"])
def test_few_experts_and_other_turns_are_left_as_they_are(kind: Callable[[], nn.Module], written: list[int]) -> None:
    model, original, function = captured(kind, written)
    assert "forward" not in vars(model[0])
    with torch.no_grad():
        check(function, original)
    assert not written


def test_turns_that_few_tokens_tell_apart(written: list[int]) -> None:
    _, original, function = captured(Least, written, dynamic=False)
    with torch.no_grad():
        for count in (64, 4):
            check(function, original, rows(count))
    assert not written


def test_turns_that_training_tells_apart(written: list[int]) -> None:
    _, original, function = captured(Modes, written)
    with torch.no_grad():
        for training in (False, True):
            check(function.train(training), original.train(training))
    assert not written


def test_turns_are_counted_as_they_were(written: list[int]) -> None:
    model, original, function = captured(Ticking, written)
    with torch.no_grad():
        check(function, original)
    assert model[0].ticks == original[0].ticks == 16


def test_a_graph_that_is_not_that_of_all_turns_is_not_taken(
    written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(type("Fresh", (Hits,), {}))  # no trial has been made of it
    original = copy.deepcopy(model)
    with monkeypatch.context() as patched:
        patched.setattr(turns._Loop, "_taken", lambda loop, one, two: two)
        function = compiled(model)
        assert written, "in its trial"
    written.clear()
    with torch.no_grad():
        check(function, original)
    assert not written and counters["moe_ops"]["fused"] == 1


# ---- code

ALIKE_LOOPS = [
    "for e in range(n):\n y = x[e]",
    "for e in range(0, n):\n y = x[:, 2 * e + k]",
    "for e, f in enumerate(self.experts):\n y = f(x[ids == e])",
    "for f in self.experts:\n y = f(x)",
    "for e in range(n):\n y = x.select(0, e) + torch.roll(x, e)",
    "for e in range(n):\n y = self.experts[f'expert_{e}'](x) + self.others[str(e)](x)",
    "for e in range(n):\n y = x.permute(1, 0)[e] + F.relu(x)[e]",
    "for e in range(n):\n if self.bias is not None:\n  y = x[e] + self.bias[e]",
]
OTHER_LOOPS = {
    "other_start": "for e in range(1, n):\n y = x[e]",
    "steps": "for e in range(0, n, 2):\n y = x[e]",
    "numbers_from_1": "for e, f in enumerate(self.experts, 1):\n y = f(x)",
    "a_name": "for f in experts:\n y = f(x)",
    "a_call": "for f in self.chosen():\n y = f(x)",
    "of_a_part": "for f in self.lists[0].experts:\n y = f(x)",
    "else": "for e in range(n):\n y = x[e]\nelse:\n y = x",
    "break": "for e in range(n):\n y = x[e]\n if self.one:\n  break",
    "return": "for e in range(n):\n y = x[e]\n if self.one:\n  return y",
    "if": "for e in range(n):\n y = x[0]\n if e:\n  y = x[1]",
    "if_of_what_is_made": "for e in range(n):\n y = x[e]\n if y.any():\n  z = y",
    "expression": "for e in range(n):\n y = x[0] if e else x[1]",
    "and": "for e in range(n):\n y = e and x[0]",
    "assert": "for e in range(n):\n assert e < 9\n y = x[e]",
    "comprehension": "for e in range(n):\n y = [f for f in x if e]",
    "remainder": "for e in range(n):\n y = x[e % 2]",
    "quotient": "for e in range(n):\n y = x[e // 2]",
    "times_what_is_made": "for e in range(n):\n k = len(x)\n y = x[e * k]",
    "other_name": "for e in range(n):\n i = e\n y = x[i]",
    "assigned": "for e in range(n):\n e = 0\n y = x[e]",
    "least": "for e in range(n):\n y = x[min(e, 3)]",
    "floor": "for e in range(n):\n y = x[math.floor(e)]",
    "own_method": "for e in range(n):\n y = self.part_of(e)",
    "own_attribute": "for e in range(n):\n y = getattr(self, f'up_{e}')(x)",
    "text": "for e in range(n):\n y = named(str(e))",
    "list": "for e in range(n):\n y = [1, 2, 4][e]",
    "made_list": "for e in range(n):\n k = x.tolist()\n y = k[e]",
    "operand": "for e in range(n):\n y = (x + x)[e]",
}  # fmt: skip


def method(loop: str) -> ast.FunctionDef:
    found = ast.parse("def forward(self, x, ids, n, k):\n" + textwrap.indent(loop, "    ")).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize("loop", ALIKE_LOOPS)
def test_loops_of_turns(loop: str) -> None:
    assert len(turns.turned(method(loop))) == 1
    assert "_moe_ops_turn(0)" in ast.unparse(turns.in_turns(method(loop)))


@pytest.mark.parametrize("name", OTHER_LOOPS)
def test_loops_of_other_turns(name: str) -> None:
    tree = method(OTHER_LOOPS[name])
    assert not turns.turned(tree) and ast.dump(turns.in_turns(tree)) == ast.dump(tree)


# ---- who does not write them out


def test_other_backends_get_all_turns(written: list[int]) -> None:
    model, original, _ = captured(Hits, written)
    nodes: list[fx.Node] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(gm.graph.nodes)
        return gm.forward

    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(torch.compile(model, backend=backend, fullgraph=True), original)
        check(model, original)
        torch.testing.assert_close(torch.export.export(model, (rows(),)).module()(rows()), original(rows()))
    assert sum(node.target is torch.where for node in nodes) == E
    assert not written


def test_what_is_not_fused_is_captured_in_full(
    written: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, original, function = captured(Hits, written)
    monkeypatch.setattr(passes, "recognise", lambda reading: [])
    with torch.no_grad(), caplog.at_level("INFO", "compile_passes.compat"):
        check(function, original)
    assert written == [E] and not counters["moe_ops"]["fused"]
    assert "is captured in full: " in caplog.text and "of a turn of a loop is left" in caplog.text


def test_dense_turns_may_be_left(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes are those of all turns."""
    _, original, function = captured(lambda: Many(dense=True), written)
    monkeypatch.setattr(passes, "recognise", lambda reading: [])
    with torch.no_grad():
        check(function, original)
    assert written == [16] and not counters["moe_ops"]["fused"]


def test_explain_counts_what_is_captured_again_once(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = captured(Hits, written)
    assert len(moe_ops.explain(model, rows()).fused) == 1
    assert written == [E]
    monkeypatch.setattr("compile_passes.passes.recognise", lambda reading: [])
    report = moe_ops.explain(model, rows())
    assert written == [E, E] and (report.graphs, len(report.fused), report.error) == (1, 0, None)


# ---- classes that tell


def test_restore_gives_modules_their_classes_back() -> None:
    model = made()
    before = [type(module) for module in model.modules()]
    compiled(model)
    assert [type(module) for module in model.modules()] != before
    assert [isinstance(module, kind) for module, kind in zip(model.modules(), before, strict=True)] == [True] * len(
        before
    )
    moe_ops.restore(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_compute_the_same(way: str, written: list[int]) -> None:
    model, original, function = captured(Hits, written)
    with torch.no_grad():
        function(rows())
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    written.clear()
    with torch.no_grad():
        check(other, original)
        check(compiled(other), original)
    assert set(written) == {E}
    other[0].experts[6].act = nn.ReLU()
    with torch.no_grad():
        check(function, original)  # of another model


# ---- graphs


def graph_of(code: Callable[[fx.Graph, fx.Node], Any]) -> fx.Graph:
    """A graph whose node after its loop returns what ``code`` makes."""
    graph = fx.Graph()
    graph.output(code(graph, graph.placeholder("x")))
    return graph


def turn(graph: fx.Graph, count: int) -> None:
    graph.call_function(turns._TURN, (count,))


def ran(graph: fx.Graph, x: Tensor) -> Tensor:
    write_out(graph)
    graph.lint()
    return fx.GraphModule(nn.Module(), graph)(x)


def test_numbers_and_values_of_the_turn_before_go_on() -> None:
    def code(graph: fx.Graph, x: fx.Node) -> Any:
        total, found = x, []
        for e in range(3):
            turn(graph, 6)
            part = graph.call_function(torch.mul, (x, 2 * e + 1))
            found.append(part)
            total = graph.call_function(torch.add, (total, part))
        turn(graph, 0)
        return graph.call_function(torch.stack, ([x, *found, total],))

    x = torch.arange(3.0)
    parts = [x * (2 * e + 1) for e in range(6)]
    assert torch.equal(ran(graph_of(code), x), torch.stack([x, *parts, x + sum(parts)]))


def test_passes_make_the_code_of_what_they_wrote_out() -> None:
    def code(graph: fx.Graph, x: fx.Node) -> Any:
        for e in range(3):
            turn(graph, 6)
            x = graph.call_function(torch.add, (x, e))
        turn(graph, 0)
        return x

    gm = fx.GraphModule(nn.Module(), graph_of(code))
    passes.run_all(gm)
    assert torch.equal(gm(torch.zeros(2)), torch.full((2,), 15.0))


def _open(graph: fx.Graph, x: fx.Node) -> Any:
    for e in range(2):
        turn(graph, 6)
        x = graph.call_function(torch.mul, (x, e))
    return x


def _others(graph: fx.Graph, x: fx.Node) -> Any:
    for e in range(3):
        turn(graph, 6)
        x = graph.call_function(torch.mul if e < 2 else torch.add, (x, e))
    turn(graph, 0)
    return x


def _floats(graph: fx.Graph, x: fx.Node) -> Any:
    for e in range(3):
        turn(graph, 6)
        x = graph.call_function(torch.mul, (x, float(e)))
    turn(graph, 0)
    return x


def _texts(graph: fx.Graph, x: fx.Node) -> Any:
    for text in ("i->i", "i->i", "i->"):
        turn(graph, 6)
        x = graph.call_function(torch.einsum, (text, x))
    turn(graph, 0)
    return x


def _first_behind(graph: fx.Graph, x: fx.Node) -> Any:
    found = []
    for e in range(3):
        turn(graph, 6)
        found.append(graph.call_function(torch.mul, (x, e)))
    turn(graph, 0)
    return found[0]


def _longer(graph: fx.Graph, x: fx.Node) -> Any:
    found = [x]
    for _ in range(3):
        turn(graph, 6)
        found.append(graph.call_function(torch.cat, ([*found],)))
    turn(graph, 0)
    return found[-1]


def _inside(graph: fx.Graph, x: fx.Node) -> Any:
    for _ in range(3):
        turn(graph, 6)
        for e in range(3):
            turn(graph, 6)
            x = graph.call_function(torch.mul, (x, e))
        turn(graph, 0)
    turn(graph, 0)
    return x


@pytest.mark.parametrize("code", [_open, _others, _floats, _texts, _first_behind, _longer, _inside])
def test_turns_that_are_not_alike_are_not_written_out(code: Callable[[fx.Graph, fx.Node], Any]) -> None:
    with pytest.raises(NotAlike):
        write_out(graph_of(code))
