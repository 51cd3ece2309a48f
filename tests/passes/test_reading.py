"""The canonical reading: one name per operation, values through in-place operations, and hazards through aliases."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from compile_passes import reading as readings
from compile_passes.equal import holds, no_narrower
from compile_passes.memory import written
from compile_passes.reading import Reading
from compile_passes.vocabulary import equal_sizes, spell
from tests.passes.blocks import capture, node_of

ATEN = torch.ops.aten


X, Y = torch.zeros(4, 6), torch.zeros(4, 6)
SPELLINGS = [
    (node_of(torch.softmax, X, -1), "softmax", {"dim": -1}),
    (node_of(F.softmax, X, dim=-1, dtype=torch.float32), "softmax", {"dim": -1, "dtype": torch.float32}),
    (node_of("softmax", X, -1), "softmax", {"dim": -1}),
    (node_of(ATEN.softmax.int, X, -1), "softmax", {"dim": -1}),
    (node_of(ATEN._softmax.default, X, -1, False), "softmax", {"dim": -1}),
    (node_of(operator.floordiv, X, 2), "floordiv", {"y": 2}),
    (node_of(torch.div, X, 2, rounding_mode="floor"), "floordiv", {"y": 2}),
    (node_of(ATEN.floor_divide.default, X, 2), "floordiv", {"y": 2}),
    (node_of("clamp_min", X, 0.5), "clamp", {"min": 0.5}),
    (node_of(ATEN.clamp_min.default, X, 0.5), "clamp", {"min": 0.5}),
    (node_of(operator.getitem, X, (Ellipsis, slice(None, 3))), "getslice", {}),
    (node_of(operator.getitem, X, (slice(None), None)), "view", {}),
    (node_of("type_as", X, Y), "cast", {}),
    (node_of("size", X, 0), "metadata", {}),
    (node_of(ATEN.mul, X, Y), "mul", {}),
    (node_of(ATEN.silu, X), "silu", {}),
    (node_of(ATEN.histc.default, X, 8, 0, 7), "histc", {"bins": 8, "min": 0, "max": 7}),
    (node_of(torch.topk, X, k=2, dim=-1, sorted=False), "topk", {"k": 2, "dim": -1, "sorted": False}),
]
IN_PLACE = [
    (node_of(operator.iadd, X, Y), "add"),
    (node_of("add_", X, Y), "add"),
    (node_of(ATEN.add_.Tensor, X, Y), "add"),
    (node_of(operator.itruediv, X, Y), "div"),
    (node_of("clamp_", X, max=1), "clamp"),
    (node_of(F.silu, X, inplace=True), "silu"),
    (node_of(operator.setitem, X, torch.zeros(4, dtype=torch.long), 1), "index_put"),
    (node_of("brand_new_", X), "brand_new"),
]


@pytest.mark.parametrize(("node", "name", "args"), SPELLINGS, ids=[f"{i}-{row[1]}" for i, row in enumerate(SPELLINGS)])
def test_one_name(node, name, args):
    call = spell(node)
    assert call.name == name and not written(node)
    assert {key: call.args[key] for key in args} == args


@pytest.mark.parametrize(("node", "name"), IN_PLACE, ids=[f"{i}-{row[1]}" for i, row in enumerate(IN_PLACE)])
def test_in_place_forms(node, name):
    assert spell(node).name == name and written(node) == (node.args[0],)


def reading(function, *args):
    graph = capture(function, *args).graph
    read = Reading(graph)
    return read, {node.name: node for node in graph.nodes}, graph.output_node()


def test_reader_after_a_write_reads_the_writer():
    def run(x, bias):
        out = x * 2
        before = out.sum()
        out.add_(bias)
        return out.relu(), before

    read, nodes, _ = reading(run, torch.randn(3), torch.randn(3))
    assert read.call(nodes["relu"])["x"] is nodes["add_"]
    assert read.call(nodes["before"])["x"] is nodes["out"]
    assert not read.hazards


def test_item_assignment_is_a_value():
    def run(perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(3)
        return inverse + 1

    read, nodes, _ = reading(run, torch.tensor([2, 0, 1]))
    put = read.named(read.call(nodes["add"])["x"], "index_put")
    assert put is not None and put["index"].op == "placeholder"
    assert read.operand(read.call(nodes["add"])["x"]) is nodes["inverse"]


def test_read_through_another_view_is_a_hazard():
    def run(x):
        x = x + 1
        half = x[:2]
        x.mul_(3)
        return half * 2

    read, _, _ = reading(run, torch.randn(4))
    (hazard,) = (h for h in read.hazards.values() if h.reader.op != "output")
    assert (hazard.operand.name, hazard.writer.name) == ("half", "mul_")


def test_write_through_a_view_spoils_the_base():
    def run(x):
        x = x + 1
        x[:2].mul_(3)
        return x * 2

    read, _, _ = reading(run, torch.randn(4))
    assert [hazard.writer.name for hazard in read.hazards.values()] == ["mul_"]


def test_view_taken_after_the_write_is_no_hazard():
    def run(x):
        x = x + 1
        x.mul_(3)
        return x[:2] * 2

    read, _, _ = reading(run, torch.randn(4))
    assert not read.hazards


def test_a_copy_is_no_alias():
    def run(x):
        x = x + 1
        kept = x.clone()
        x.mul_(3)
        return kept * 2 + x

    read, _, _ = reading(run, torch.randn(4))
    assert not read.hazards


def test_same_through_reshapes_and_equal_calls():
    def run(x):
        return x.view(-1).sort()[1] // 2, x.reshape(2, 6).flatten().sort()[1] // 2, x.view(-1).sort()[1] // 3

    read, _, output = reading(run, torch.randn(3, 4))
    one, two, three = output.args[0]
    assert read.same(one, two) and not read.same(one, three)


def test_written_between():
    def run(x):
        x = x + 1
        y = x * 2
        x.add_(1)
        return y.relu(), x

    read, nodes, _ = reading(run, torch.randn(4))
    assert read.memory.written_between(nodes["x"], nodes["x"], nodes["relu"]) is nodes["add_"]
    assert read.memory.written_between(nodes["x"], nodes["x"], nodes["y"]) is None


def test_symbolic_sizes():
    graph = capture(lambda x: x.view(-1, 2), torch.randn(6, 2), dynamic=True).graph
    value = next(n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.Tensor))
    size = value.meta["example_value"].shape[0]
    assert equal_sizes(size * 2, 2 * size) and not equal_sizes(size, size + 1) and equal_sizes(3, 3)


WRITERS = [
    (node_of(F.embedding, torch.zeros(3, dtype=torch.long), X, max_norm=1.0), 2),
    (node_of(F.embedding, torch.zeros(3, dtype=torch.long), X), 0),
    (node_of(F.batch_norm, X, torch.zeros(6), torch.ones(6), training=True), 3),
    (node_of(F.relu, X, inplace=True), 1),
    (node_of(F.leaky_relu, X, 0.1, True), 1),
    (node_of(F.relu, X), 0),
    (node_of("stride", X), 0),
    (node_of("view", X, 2, 12), 0),
    (node_of(torch.sort, X), 0),
    (node_of(lambda x: x, X), 1),
]


@pytest.mark.parametrize(
    ("node", "count"),
    WRITERS,
    ids=[f"{i}-{getattr(row[0].target, '__name__', row[0].target)}" for i, row in enumerate(WRITERS)],
)
def test_how_many_operands_are_written(node, count):
    assert len(written(node)) == count


@pytest.mark.parametrize(
    ("dtype", "count", "fits"),
    [
        (torch.bool, 2, True),
        (torch.bool, 3, False),
        (torch.int8, 128, True),
        (torch.int8, 129, False),
        (torch.uint8, 256, True),
        (torch.bfloat16, 257, True),
        (torch.bfloat16, 258, False),
        (torch.float32, 1 << 24, True),
        (torch.float32, (1 << 24) + 2, False),
        (torch.int64, 1 << 40, True),
    ],
    ids=str,
)
def test_a_dtype_that_holds_every_id(dtype, count, fits):
    assert holds(dtype, count) is fits


@pytest.mark.parametrize(
    ("dtype", "floor", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float8_e4m3fn, torch.float16, False),
        (torch.bfloat16, torch.float32, False),
    ],
    ids=str,
)
def test_a_cast_that_loses_nothing_of_the_hidden_states(dtype, floor, fits):
    assert no_narrower(dtype, floor) is fits


@pytest.mark.parametrize(
    "write", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.squeeze_()], ids=["t_", "unsqueeze_", "squeeze_"]
)
def test_a_changed_geometry_is_seen(write):
    def run(x):
        x = x + 1
        write(x)
        return x * 2

    assert reading(run, torch.randn(4, 6))[0].reshaper is not None
    assert reading(lambda x: (x + 1).add_(1), torch.randn(4, 6))[0].reshaper is None


SAME = {
    "reshapes": (lambda x, n: (x.view(-1), x.reshape(2, 6).flatten()), True),
    "noop_casts": (lambda x, n: (x.float(), x.to(torch.float32)), True),
    "equal_calls": (lambda x, n: (x.view(-1).sort()[1] // 2, x.reshape(12).sort()[1] // 2), True),
    "another_number": (lambda x, n: (n // 2, n // 3), False),
    "another_type_of_number": (lambda x, n: (n * 2, n * 2.0), False),
    "an_argument_more": (lambda x, n: (x.sum(), x.sum(dtype=torch.float32)), False),
    "lists": (lambda x, n: (torch.cat([x, x]), torch.cat([x, x])), True),
    "lists_of_other_tensors": (lambda x, n: (torch.cat([x, x * 2]), torch.cat([x * 2, x])), False),
    "longer_lists": (lambda x, n: (torch.cat([x, x]).sum(), torch.cat([x, x, x]).sum()), False),
    "casts_to_other_dtypes": (lambda x, n: (n.bool(), n.int()), False),
    "narrow_casts": (lambda x, n: (x.bfloat16(), x.half()), False),
    "calls_of_casts": (lambda x, n: (n.int().sum(), n.bool().sum()), False),
    "shape_of_an_operand": (lambda x, n: (x.view(2, 6).sort()[0].sum(0).sum(), x.sort()[0].sum(0).sum()), False),
    "order": (lambda x, n: (x - n, n - x), False),
    "random": (lambda x, n: (torch.rand_like(x), torch.rand_like(x)), False),
    "uninitialised": (lambda x, n: (torch.empty_like(x) * 1, torch.empty_like(x) * 1), False),
    "other_calls": (lambda x, n: (x.sigmoid(), x.tanh()), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_same(name):
    function, expected = SAME[name]
    read, _, output = reading(function, torch.randn(3, 4), torch.arange(12).view(3, 4))
    one, two = output.args[0]
    assert read.same(one, two) is expected and read.same(two, one) is expected


def test_same_after_a_write():
    def run(x):
        half = x[:2]
        before = half.exp()
        x.add_(1)
        return before, half.exp()

    read, _, output = reading(run, torch.randn(4))
    assert not read.same(*output.args[0])


def test_constants_are_the_same():
    read, nodes, _ = reading(lambda x: x + 1, torch.randn(3))
    assert read.same(2, 2) and not read.same(2, 3) and not read.same(2, 2.0) and not read.same(True, 1)
    assert not read.same(next(iter(nodes.values())), 2)


def test_how_deep_expressions_are_compared():
    def deep(steps):
        def run(x):
            one, two = x * 1, x * 1
            for _ in range(steps):
                one, two = one.exp(), two.exp()
            return one, two

        read, _, output = reading(run, torch.randn(3))
        return read.same(*output.args[0])

    assert deep(7) and not deep(8)


def test_unwrap_stops_at_another_shape():
    read, nodes, output = reading(lambda x: (x.exp().view(2, 6).view(3, 4).float(), x), torch.randn(3, 4))
    value = output.args[0][0]
    assert read.unwrap(value) is nodes["exp"] and read.strip(value) is nodes["exp"]
    read, nodes, output = reading(lambda x: (x.exp().view(2, 6), x), torch.randn(3, 4))
    value = output.args[0][0]
    assert read.unwrap(value) is value and read.strip(value) is nodes["exp"]


@pytest.mark.parametrize(
    ("cast", "passes"),
    [
        (lambda x: x.exp().double(), True),
        (lambda x: x.exp().view(4, 3).to(torch.float64).view(12), True),
        (lambda x: x.exp().half(), False),
        (lambda x: x.exp().int(), False),
        (lambda x: x.exp().int().float(), False),
    ],
    ids=["wider", "wider_and_reshaped", "narrower", "integer", "through_an_integer"],
)
def test_uncast(cast, passes):
    read, nodes, output = reading(lambda x: (cast(x), x), torch.randn(3, 4))
    value = output.args[0][0]
    assert (read.uncast(value, torch.float32) is nodes["exp"]) is passes
    assert read.uncast(value, torch.float32, stop=(value,)) is value


@pytest.mark.parametrize(
    ("dtype", "passes"), [(torch.int8, True), (torch.bool, False), (torch.bfloat16, True)], ids=str
)
def test_exact(dtype, passes):
    read, nodes, output = reading(lambda n: (n.neg().to(dtype).view(12), n), torch.arange(12).view(3, 4))
    assert (read.exact(output.args[0][0], 100) is nodes["neg"]) is passes


def test_a_reader_that_accounts_for_every_argument():
    read, nodes, _ = reading(lambda x: x.topk(2, largest=False)[0] + 1, torch.randn(3, 4))
    topk = next(node for node in nodes.values() if node.target == "topk")
    assert read.named(topk, "sort", "topk").name == "topk" and read.named(topk, "sort") is None
    assert read.read(topk, "topk", "k") is None and read.read(topk, "topk", "k largest")["k"] == 2
    assert read.named(3, "topk") is None and read.call(None) is None


def test_a_write_defines_every_name_of_the_same_elements():
    def run(x):
        x = x + 1
        name, part = x.view(4), x[1:]
        x.mul_(3)
        return name.exp(), part.tanh()

    read, nodes, _ = reading(run, torch.randn(4))
    assert read.call(nodes["exp"])["x"] is nodes["mul_"]
    assert [hazard.reader.name for hazard in read.hazards.values() if hazard.reader.op != "output"] == ["tanh"]
    assert read.hazards[nodes["tanh"]].writer is nodes["mul_"] and nodes["exp"] not in read.hazards


def test_turns_of_a_loop_are_not_all_compared_with_each_other(monkeypatch):
    """Sixty-four experts add to one tensor, under as many names: one comparison for each."""
    compared = []
    same = readings._is_same_tensor
    monkeypatch.setattr(readings, "_is_same_tensor", lambda *pair: compared.append(pair) or same(*pair))

    def run(x):
        out = torch.zeros_like(x)
        for e in range(64):
            out += x * e
        return out

    graph = capture(run, torch.ones(4, 4)).graph
    read = Reading(graph)
    last = [node for node in graph.nodes if node.target is operator.iadd][-1]
    assert read.call(last)["x"] in [node for node in graph.nodes if node.target is operator.iadd] and not read.hazards
    assert 0 < len(compared) <= 2 * 64


def test_a_writer_of_several_tensors_defines_none_of_them():
    def run(x, y):
        x, y = x + 1, y + 1
        torch._foreach_add_([x, y], 1.0)
        return x.exp(), y.tanh()

    read, _, _ = reading(run, torch.randn(4), torch.randn(4))
    assert {hazard.reader.name for hazard in read.hazards.values() if hazard.reader.op != "output"} == {"exp", "tanh"}


def test_a_value_written_again_is_no_hazard_any_more():
    def run(x):
        x = x + 1
        part = x[1:]
        part.mul_(3)
        x.zero_()
        return x.exp()

    read, nodes, _ = reading(run, torch.randn(4))
    assert nodes["exp"] not in read.hazards and read.call(nodes["exp"])["x"] is nodes["zero_"]


def test_later_reads_and_what_they_read():
    def run(x):
        out = x * 0
        out.add_(1)
        out.mul_(2)
        return out.exp()

    read, nodes, _ = reading(run, torch.randn(4))
    name = nodes["out"] if "out" in nodes else nodes["mul"]
    later = [user.name for user, _ in read.later_reads(nodes["add_"])]
    assert later == ["mul_", "exp"]
    assert read.reads_after(nodes["exp"], name, nodes["add_"]) and read.reads_after(nodes["mul_"], name, nodes["add_"])
    assert not read.reads_after(nodes["add_"], name, nodes["mul_"])
    assert not read.reads_after(nodes["exp"], nodes["exp"], nodes["add_"])
    assert read.is_writer(nodes["add_"]) and not read.is_writer(nodes["exp"])


def test_numbers_of_the_graph_are_computed():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = X
    low = graph.call_function(operator.neg, (3,))
    half = graph.call_function(operator.truediv, (low, 2))
    clamp = graph.call_method("clamp", (x, half))
    graph.output(graph.call_function(torch.cat, ([clamp, low],)))
    read = Reading(graph)
    assert read.call(clamp)["min"] == -1.5
    assert [read.call(node).args["x"] for node in graph.nodes if node.target is torch.cat] == [[clamp, -3]]


def scoped(name):
    def target(*args):
        return None

    target.__name__ = name
    return target


def test_scopes_nest():
    graph = fx.Graph()
    steps = ["_enter_inference_mode", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_exit_inference_mode",
             "set_something", "_enter_autocast", "_exit_autocast"]  # fmt: skip
    nodes = {name: graph.call_function(scoped(name)) for name in steps}
    end = graph.output(None)
    read = Reading(graph)
    outer, inner, mode = nodes[steps[0]], nodes[steps[1]], nodes[steps[4]]
    assert [read.scopes[node] for node in (*nodes.values(), end)] == [
        (), (outer,), (outer, inner), (outer,), (), (mode,), (mode,), (mode,),
    ]  # fmt: skip
    assert read.opens_transform(inner) and not read.opens_transform(outer) and not read.opens_transform(mode)


def test_gradient_modes():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(3, requires_grad=True)
    before = graph.call_function(torch.neg, (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    inside = graph.call_function(torch.neg, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    after = graph.call_function(torch.neg, (x,))
    graph.output((before, inside, after))
    read = Reading(graph)
    assert not read.grad_enabled(inside) and read.grad_enabled(after)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradient_mode_around_the_graph_shows_in_a_result(enabled):
    def run(x, w):
        return F.linear(x, w).exp()

    graphs = []
    with torch.set_grad_enabled(enabled):
        torch.compile(run, backend=lambda gm, _: graphs.append(gm.graph) or gm.forward, fullgraph=True)(
            torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
        )
    read = Reading(graphs[0])
    assert all(read.grad_enabled(node) is enabled for node in graphs[0].nodes if node.op == "call_method")


def _with_running_statistics():
    """Operators that update running statistics although their schema does not mark them as written."""
    for name in dir(ATEN):
        packet = getattr(ATEN, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            arguments = {argument.name: argument for argument in getattr(packet, overload)._schema.arguments}
            unmarked = "running_mean" in arguments and arguments["running_mean"].alias_info is None
            if unmarked and {"training", "use_input_stats", "momentum"} & arguments.keys() and overload == "default":
                yield name


@pytest.mark.parametrize("name", sorted(set(_with_running_statistics())))
def test_running_statistics_are_written_though_no_schema_says_so(name):
    """Those that return the new statistics instead are pure."""
    returns_them = any(part in name for part in ("functional", "no_training", "no_update"))
    for target in (getattr(ATEN, name), getattr(ATEN, name).default, getattr(torch, name, None)):
        if target is not None:
            assert (len(written(node_of(target, X, Y, Y, Y, Y, True, 0.1, 1e-5))) > 1) is not returns_them
