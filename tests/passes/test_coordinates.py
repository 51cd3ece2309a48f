"""What `Coordinates` says of generated programs is what running them gives, at every node and coordinate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.exc import TorchDynamoException

from compile_passes.coordinates import Coordinates, Line, Value
from compile_passes.reading import Reading

STEPS, PROGRAMS, LARGEST = 16, 140, 400
SOURCES = (
    "torch.arange(T)", "torch.arange(S)", "torch.arange(2, T + 2)", "torch.arange(0, 3 * T, 3)",
    "torch.arange(T, dtype=torch.int32)", "torch.arange(4, -1, -1)", "torch.ones(T, S, dtype=torch.bool)",
    "torch.ones(T, T)", "torch.zeros(S, T, dtype=torch.int64)", "torch.full((T, S), 3)", "torch.full((T,), True)",
    "torch.arange(T, dtype=torch.float32)", "torch.ones(S, dtype=torch.int32)", "torch.arange(T, dtype=torch.uint8)",
    "x.long()", "torch.ones(S, T, dtype=torch.bool).tril()",
)  # fmt: skip
#: Of one tensor {a}: {n} and {m} are small numbers, {d} and {e} dimensions of it, {k} not negative and {s} a step.
UNARY = (
    "-{a}", "~{a}", "{a}.logical_not()", "{a}.unsqueeze({d})", "{a}[None]", "{a}[:, None]", "{a}[..., None]",
    "{a}.transpose({d}, {e})", "{a}.mT", "{a}.permute({order})", "{a}[{n}:]", "{a}[{n}:{m}:{s}]", "{a}[..., {n}:]",
    "{a}[:, ::{s}]", "{a}[{n}]", "{a}[..., {n}]", "{a}.select({d}, {n})", "{a}.narrow({d}, {k}, 1)",
    "torch.ops.aten.slice.Tensor({a}, {d}, {n}, 9, {s})", "{a}.cumsum({d})", "{a}.diff(dim={d})", "torch.diff({a})",
    "torch.diff({a}, prepend={a}[..., :1] - {n})", "torch.diff({a}, prepend={a}[..., :1])", "torch.diff({a}, n=2)",
    "torch.diff({a}, append={a}[..., :1])", "{a}.tril({n})", "{a}.triu({n})", "torch.tril({a})", "{a}.bool()",
    "{a}.int()", "{a}.long()", "{a}.float()", "{a}.to(torch.uint8)", "{a}.clone()", "{a}.detach()", "{a}.squeeze()",
    "{a}.reshape(1, {shape})", "{a}.flatten()", "{a}.expand(2, {shape})", "torch.ones_like({a})", "{a}.contiguous()",
    "{a} + {n}", "{a} - {n}", "{n} - {a}", "{a} * {n}", "torch.add({a}, {a}, alpha={n})", "{a} >= {n}", "{a} > {n}",
    "{a} <= {n}", "{a} < {n}", "{a} == {n}", "{a} != {n}", "{a} & True", "{a} + True", "{a} ** 2", "{a} // 2",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} & {b}", "{a}.logical_and({b})", "{a} >= {b}", "{a} > {b}",
    "{a} <= {b}", "{a} < {b}", "{a} == {b}", "{a} != {b}", "torch.sub({a}, {b}, alpha={n})", "{a} | {b}",
    "{a}[:, None] >= {b}", "{a}.unsqueeze(-1) > {b}", "{a}.expand_as({b})", "{a}[{b}]", "{a}[{b}, {b}]",
    "torch.diff({a}, prepend={b})", "{a}.type_as({b})", "{a}.index_select(0, {b})", "{a}.view_as({b})",
)  # fmt: skip
GATHERS = ("{a}[{b}, {c}]", "{a}[{b}[:, None], {c}]", "torch.ops.aten.index.Tensor({a}, [{b}, {c}])")
#: Statements: they overwrite {a}, and so what its views and the tensor that it is a view of hold.
WRITES = (
    "{a}.add_({n})", "{a}.mul_({n})", "{a}.logical_not_()", "{a}.tril_({n})", "{a}[{n}] = {m}", "{a}[..., 1:] = 0",
    "{a} &= {b}", "{a} -= {b}", "{a}.copy_({b})", "{a}[0].fill_(1)", "{a}.mT.tril_({n})",
)  # fmt: skip


class Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node gave, before anything overwrites it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.results: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.results[n] = result.detach().clone()
        return result


def evaluated(value: Value, shape: torch.Size) -> torch.Tensor:
    """What ``value`` says of a tensor of this shape."""
    grid = [torch.arange(size).view(-1, *(1 for _ in shape[d + 1 :])) for d, size in enumerate(shape)]

    def numbers(line: Line) -> torch.Tensor:
        assert len(line.slopes) == len(shape)
        total = torch.full(shape, line.constant)
        return total + sum(slope * place for slope, place in zip(line.slopes, grid, strict=True))

    if isinstance(value, Line):
        return numbers(value)
    holds = torch.ones(shape, dtype=torch.bool)
    for line in value.lines:
        holds &= numbers(line) >= 0
    return holds


@st.composite
def programs(draw):
    """(lines of a program that torch can run, sizes, whether they are symbols)."""
    sizes = draw(st.sampled_from([(5, 5), (6, 4), (2, 7), (1, 4), (4, 1)]))
    number, place = st.integers(-3, 3), st.integers(-2, 2)
    known = {"torch": torch, "T": sizes[0], "S": sizes[1], "x": torch.zeros(sizes[0]), "y": torch.zeros(sizes[1])}
    names, lines = [], []
    for step in range(STEPS):
        kinds = ["source"] if step < 3 else ["source", "unary", "unary", "unary", "binary", "binary", "gather", "write"]
        kind = draw(st.sampled_from(kinds))
        texts = {"source": SOURCES, "unary": UNARY, "binary": BINARY, "gather": GATHERS, "write": WRITES}[kind]
        text = draw(st.sampled_from(texts))
        if kind != "source":
            a, b, c = (draw(st.sampled_from(names)) for _ in range(3))
            shape = known[a].shape
            order = draw(st.permutations(range(len(shape))))
            values = {"n": draw(number), "m": draw(number), "d": draw(place), "e": draw(place),
                      "k": draw(st.integers(0, 2)), "s": draw(st.integers(1, 3)), "order": ", ".join(map(str, order)),
                      "shape": ", ".join("-1" if text.startswith("{a}.expand") else f"{a}.shape[{d}]"
                                         for d in range(len(shape)))}  # fmt: skip
            text = text.format(a=a, b=b, c=c, **values)
        name = f"v{step}"
        line = text if kind == "write" else f"{name} = {text}"
        try:
            exec(line, known)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue  # no program that torch can run
        if kind != "write":
            if known[name].numel() > LARGEST or known[name].dim() > 4:
                continue
            names.append(name)
        lines.append(line)
    return [*lines, f"return {', '.join(names)},"], sizes, draw(st.booleans())


def recorded(lines: list[str], sizes: tuple[int, int], dynamic: bool) -> tuple[fx.Graph, dict[fx.Node, torch.Tensor]]:
    """The graph that Dynamo makes of a program, and what each of its nodes gave."""
    body = "\n    ".join(["T, S = x.shape[0], y.shape[0]", *lines])
    space = {"torch": torch}
    exec(f"def program(x, y):\n    {body}", space)
    found = []

    def backend(gm, example_inputs):
        found.append(Recorder(gm))
        return found[-1].run

    torch.compiler.reset()
    torch.compile(space["program"], backend=backend, fullgraph=True, dynamic=dynamic)(*map(torch.zeros, sizes))
    (recorder,) = found
    return recorder.module.graph, recorder.results


def test_what_is_known_is_what_running_gives():
    counts = {False: [0, 0], True: [0, 0]}

    @settings(max_examples=PROGRAMS, deadline=None, derandomize=True, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip
    @given(programs())
    def check(program):
        lines, sizes, dynamic = program
        try:
            graph, results = recorded(lines, sizes, dynamic)
        except TorchDynamoException:
            reject()  # no graph of it: as many elements as a mask selects, rules that fake tensors lack
        coordinates = Coordinates(Reading(graph))
        for node, result in results.items():
            value = coordinates.value(node)
            if value is not None:
                expected = evaluated(value, result.shape)
                told = f"{node.format_node()} is {result}, not {value}, in\n" + "\n".join(lines)
                assert torch.equal(result.double(), expected.double()), told
        (values,) = graph.output_node().args
        known = [coordinates.value(node) is not None for node in values]
        counts[dynamic][0] += sum(known)
        counts[dynamic][1] += len(known)

    check()
    for known, total in counts.values():
        assert known > 0.4 * total > 100, f"{known} of {total}"


LARGE = {
    "factor": lambda x: x.int() * 2**13,
    "factors": lambda x: x.int() * 16 * 16,
    "constant": lambda x: torch.arange(x.shape[0], dtype=torch.int32) * 0 + 2**25,
    "product": lambda x: torch.full_like(x, 2**12, dtype=torch.int32) * 2**20,
    "start": lambda x: torch.arange(2**31 - x.shape[0], 2**31, dtype=torch.int32),
    "start_below": lambda x: torch.arange(-(2**31), x.shape[0] - 2**31, dtype=torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_numbers_that_might_not_fit_are_not_known(make):
    """What comes of them may be another number than that of the integers without an end."""
    found = []

    def backend(gm, example_inputs):
        (made,) = gm.graph.output_node().args[0]
        found.append(Coordinates(Reading(gm.graph)).value(made))
        return gm.forward

    torch.compiler.reset()
    torch.compile(lambda x: make(torch.arange(x.shape[0])), backend=backend, fullgraph=True)(torch.zeros(4))
    assert found == [None]
