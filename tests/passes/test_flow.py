"""What the last recogniser knows of every value: what carries a weight, an expert's inside, a routing value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_passes.patterns.flow import Flow
from compile_passes.reading import Reading
from tests.passes.blocks import E, H, I, K, T, capture

A = torch.ops.aten
X, W1, W2, GATE = torch.randn(T, H), torch.randn(I, H), torch.randn(H, I), torch.randn(E, H)
STACK, IDS = torch.randn(E, I, H), torch.randint(E, (T, K))


def flow_of(function, *args):
    """The walk over the graph of ``function``, and the node that it returns."""
    graph = capture(function, *args).graph
    flow = Flow(Reading(graph))
    for node in graph.nodes:
        flow.visit(node)
    return flow, graph.output_node().args[0][0]


# ---- weights

SAME_WEIGHT = {
    "view": lambda w: w.view(E, I * H),
    "reshape": lambda w: w.reshape(E * I, H),
    "clone": lambda w: w.clone(),
    "contiguous": lambda w: w.contiguous(),
    "cast": lambda w: w.bfloat16(),
    "transpose": lambda w: w.transpose(0, 1),
    "mT": lambda w: w.mT.clone(),
    "t": lambda w: A.t.default(w.view(E, I * H)),
    "permute": lambda w: w.permute(2, 0, 1),
    "movedim": lambda w: w.movedim(0, 2),
    "expand": lambda w: w[None].expand(2, E, I, H),
    "repeat": lambda w: w.repeat(2, 1, 1),
    "chunk": lambda w: w.chunk(2, 1)[0],
    "split": lambda w: w.split(I // 2, 1)[1],
    "tensor_split": lambda w: w.tensor_split(2, 1)[1],
    "unbind": lambda w: w.unbind(0)[2],
    "slice": lambda w: A.slice.Tensor(w, 0, 1, 3),
    "getslice": lambda w: w[1:3],
    "narrow": lambda w: w.narrow(0, 1, 2),
    "select": lambda w: w.select(0, 1),
    "item": lambda w: w[1],
    "detach": lambda w: w.detach(),
    "mul": lambda w, s: w * s,
    "stack": lambda w, s: torch.stack([w, s]),
    "cat": lambda w, s: torch.cat([w, s]),
}


@pytest.mark.parametrize("name", SAME_WEIGHT)
def test_stays_the_weight(name):
    function = SAME_WEIGHT[name]
    flow, result = flow_of(function, *[STACK, STACK.clone()][: function.__code__.co_argcount])
    assert flow.weight[result].op == "placeholder" and result not in flow.gathered


OTHER_WEIGHT = {
    "a function of it": lambda w, x: w.sin(),
    "a sum": lambda w, x: w.sum(0),
    "times a hidden state": lambda w, x: w * F.relu(x).sum(),
    "joined with a hidden state": lambda w, x: torch.cat([w, F.relu(x)[None, :1].expand(1, I, H)]),
    "gathered by a mask": lambda w, x: w[F.relu(x)[:E, 0] > 0],
}


@pytest.mark.parametrize("name", OTHER_WEIGHT)
def test_is_no_weight_any_more(name):
    flow, result = flow_of(OTHER_WEIGHT[name], STACK, X)
    assert result not in flow.weight


GATHERS = {
    "index": lambda w, i: w[i],
    "index_select": lambda w, i: w.index_select(0, i.view(-1)),
    "index_select of another dimension": lambda w, i: w.index_select(1, i.view(-1)),
    "gather": lambda w, i: w.view(E, -1).gather(0, i.view(-1, 1).expand(-1, I * H)),
    "fancy": lambda w, i: w[i, :, 0:4],
    "embedding": lambda w, i: F.embedding(i, w.view(E, -1)),
    "take_along_dim": lambda w, i: torch.take_along_dim(w, i.view(-1, 1, 1), 0),
    "repeat_interleave": lambda w, i: w.repeat_interleave(i.view(-1)[:E], 0),
    "a view of one": lambda w, i: w[i].transpose(-1, -2),
    "a product with a scale": lambda w, i: w[i] * w[i],
}


@pytest.mark.parametrize("name", GATHERS)
def test_is_gathered(name):
    flow, result = flow_of(GATHERS[name], STACK, IDS)
    ids, weight = sorted((node for node in result.graph.nodes if node.op == "placeholder"), key=str)
    assert flow.weight[result] is weight
    by = flow.gathered[result]
    while by is not ids and by.all_input_nodes:
        (by,) = by.all_input_nodes
    assert by is ids


# ---- the inside of an expert

PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w.mT,
    "mm": lambda x, w: torch.mm(x, w.t()),
    "bmm": lambda x, w: torch.bmm(x[None], w.mT[None]),
    "addmm": lambda x, w: torch.addmm(x[0, :1], x, w.mT),
    "baddbmm": lambda x, w: torch.baddbmm(x[:1, :1, None], x[None], w.mT[None]),
    "einsum": lambda x, w: torch.einsum("th,nh->tn", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=[[1], [1]]),
    "ATen": lambda x, w: A.mm.default(x, A.t.default(w)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_is_a_product(name):
    flow, result = flow_of(lambda x, w: PRODUCTS[name](x.sin(), w), X, W1)
    (weight,) = flow.products.values()
    assert list(flow.products) == [result] and flow.body[result] == ((result,), False)
    assert flow.weight[weight].name.endswith("w_")


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_two_hidden_states_is_none(name):
    flow, _ = flow_of(lambda x, w: PRODUCTS[name](x.sin(), w.sin()), X, W1)
    assert flow.products == {} and flow.body == {}


ACTIVATIONS = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "softplus": F.softplus, "clamp": lambda h: h.clamp(0, 6), "pow": lambda h: h.pow(2), "square": torch.square,
    "leaky_relu": F.leaky_relu, "elu": F.elu, "mish": F.mish, "relu6": F.relu6, "hardswish": F.hardswish,
    "hardtanh": F.hardtanh, "selu": F.selu, "celu": F.celu, "erf": torch.erf, "exp": torch.exp,
    "glu": lambda h: F.glu(h).repeat(1, 2), "softsign": F.softsign, "logsigmoid": F.logsigmoid,
    "prelu": lambda h: F.prelu(h, h.new_full((1,), 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_is_an_activation(name):
    flow, _ = flow_of(lambda x, w1, w2: F.linear(ACTIVATIONS[name](F.linear(x, w1)), w2), X, W1, W2)
    assert len(flow.pairs) == 1
    assert [flow.products[end].name for end in (flow.pairs[0].up, flow.pairs[0].down)] == ["l_w1_", "l_w2_"]


#: Between two products, these leave an inside the inside, and are no activation by themselves.
NEUTRAL = {
    "add": lambda h: h + 1, "sub": lambda h: 1 - h, "mul": lambda h: h * 2, "div": lambda h: h / 2,
    "addcmul": lambda h: torch.addcmul(h, h, h), "neg": lambda h: -h, "masked_fill": lambda h: h.masked_fill(h > 1, 0),
    "where": lambda h: torch.where(h > 1, h, 0), "dropout": lambda h: F.dropout(h, 0.1),
    "minimum": lambda h: torch.minimum(h, h + 1), "maximum": lambda h: torch.maximum(h, h + 1), "abs": torch.abs,
    "view": lambda h: h.view(-1, I), "cast": lambda h: h.double().float(), "slice": lambda h: h[:, :],
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_is_no_activation_and_lets_one_through(name):
    neutral = NEUTRAL[name]
    flow, _ = flow_of(lambda x, w1, w2: F.linear(neutral(F.linear(x, w1)), w2), X, W1, W2)
    assert len(flow.products) == 2 and flow.pairs == []
    flow, _ = flow_of(lambda x, w1, w2: F.linear(neutral(F.relu(F.linear(x, w1))), w2), X, W1, W2)
    assert len(flow.pairs) == 1
    flow, _ = flow_of(lambda x, w1, w2: F.linear(F.relu(neutral(F.linear(x, w1))), w2), X, W1, W2)
    assert len(flow.pairs) == 1


NORMS = {
    "rsqrt": lambda h: h * torch.rsqrt(h * h),
    "sqrt": lambda h: h / torch.sqrt(h * h),
    "mean": lambda h: h - h.mean(-1, keepdim=True),
    "var": lambda h: h / h.var(-1, keepdim=True),
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "softmax": lambda h: h.softmax(-1),
    "sum": lambda h: h / h.sum(-1, keepdim=True),
    "var_mean": lambda h: h - torch.var_mean(h, -1, keepdim=True)[1],
    "layer_norm": lambda h: A.native_layer_norm.default(h, [I], None, None, 1e-5)[0],
    "another function": lambda h: h.cumsum(-1),
}


@pytest.mark.parametrize("name", NORMS)
def test_ends_the_inside_of_an_expert(name):
    flow, _ = flow_of(lambda x, w1, w2: F.linear(NORMS[name](F.silu(F.linear(x, w1))) + 0, w2), X, W1, W2)
    assert len(flow.products) == 2 and flow.pairs == []


def test_too_many_products_are_no_inside():
    def run(x, w1, w2, count):
        inside = sum(F.linear(x + e, w1) for e in range(count))
        return F.linear(F.relu(inside), w2)

    assert len(flow_of(lambda *a: run(*a, 4), X, W1, W2)[0].pairs) == 4
    assert flow_of(lambda *a: run(*a, 5), X, W1, W2)[0].pairs == []


def test_of_two_weights_the_gathered_or_the_larger_one_is_the_products():
    def chosen(function, *args):
        flow, result = flow_of(function, *args)
        return flow.products[result]

    assert chosen(lambda x, w, i: torch.bmm(x, w[i]), torch.randn(3, T, I), STACK, IDS[:3, 0]).op == "call_function"
    assert chosen(lambda x, w, i: torch.bmm(w[i], x), torch.randn(3, H, T), STACK, IDS[:3, 0]).op == "call_function"
    assert chosen(lambda x, w: torch.matmul(x, w), X, STACK.mT.contiguous()).name == "l_w_"
    assert chosen(lambda w, x: torch.matmul(w, x), STACK, X.mT.contiguous()).name == "l_w_"
    assert chosen(lambda a, b: torch.mm(a, b), X, W1.t().contiguous()).name == "l_b_", "the second of two alike"
    learnt, inputs = torch.nn.Parameter(STACK.mT.contiguous()), torch.randn(2, E, H)
    assert chosen(lambda x, w, i: torch.bmm(x[i], w), inputs, learnt, IDS[:E, 0] % 2).name == "l_w_", "the parameter"


PRODUCTS_WITH_A_WEIGHT = {
    "linear": F.linear,
    "mm": lambda x, w: torch.mm(x, w.t()),
    "einsum": lambda x, w: torch.einsum("th,ih->ti", x, w),
}


@pytest.mark.parametrize("name", PRODUCTS_WITH_A_WEIGHT)
def test_a_weight_that_was_written_is_what_is_multiplied_with(name):
    def run(x, w):
        scaled = w.clone()
        scaled.mul_(2)
        return PRODUCTS_WITH_A_WEIGHT[name](x, scaled)

    flow, result = flow_of(run, X, W1)
    weight = flow.products[result]
    assert (weight.target == "mul_") == (name != "mm") and flow.weight[weight].name == "l_w_"


def test_what_was_written_is_followed():
    def run(x, g, w1, w2):
        h = F.linear(x, w1)
        h.relu_()
        out = F.linear(h, w2)
        out.mul_(2)
        return out * F.linear(x, g).softmax(-1)[:, :1]

    flow, _ = flow_of(run, X, GATE, W1, W2)
    (pair,) = flow.pairs
    (evidence,) = flow.evidence(pair)
    assert not evidence.before and evidence.by == "mul" and evidence.route.scored == E


# ---- routing

CHOICES = {
    "topk": (lambda s: s.topk(K)[1], K),
    "argmax": (lambda s: s.argmax(-1, keepdim=True), 1),
    "max": (lambda s: s.max(-1, keepdim=True)[1], 1),
    "sort": (lambda s: s.sort(-1, descending=True)[1], E),
    "argsort": (lambda s: s.argsort(-1), E),
    "multinomial": (lambda s: torch.multinomial(s.exp(), K), K),
}
SCORES = {
    "softmax": lambda s: s.softmax(-1), "sigmoid": torch.sigmoid, "log_softmax": lambda s: s.log_softmax(-1),
    "gumbel_softmax": lambda s: F.gumbel_softmax(s),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_is_a_choice(name):
    choose, width = CHOICES[name]
    flow, result = flow_of(lambda x, g: choose(F.linear(x, g)) + 0, X, GATE)
    route = flow.route[result]
    assert route.chosen and route.scored == E and route.width == width
    scores = flow_of(lambda x, g: choose(F.linear(x, g).softmax(-1)) + 0, X, GATE)
    assert scores[0].route[scores[1]].chosen and scores[0].route[scores[1]].width == width


@pytest.mark.parametrize("name", SCORES)
def test_is_a_score(name):
    score = SCORES[name]
    flow, result = flow_of(lambda x, g: score(F.linear(x, g).float() + 0) * 2, X, GATE)
    route = flow.route[result]
    assert not route.chosen and route.scored == route.width == E
    assert route.source in flow.products or score is F.gumbel_softmax


def test_a_one_hot_has_as_many_columns_as_experts():
    flow, result = flow_of(lambda i: F.one_hot(i, E) + 0, IDS)
    assert flow.route[result].chosen and flow.route[result].scored == E and flow.route[result].width == E


NO_ROUTE = {
    "a maximum of everything": lambda x: x.max() + 0,
    "the larger of two": lambda x: torch.max(x, x + 1) + 0,
    "a softmax of one number": lambda x: x.sum().softmax(0) + 0,
    "an activation": lambda x: x.tanh() + 0,
}


@pytest.mark.parametrize("name", NO_ROUTE)
def test_is_no_routing_value(name):
    flow, result = flow_of(NO_ROUTE[name], X)
    assert result not in flow.route


MEETS = {
    "mul": (lambda x, s: x * s[:, :1].view(T, 1), "mul"),
    "where": (lambda x, s: torch.where(s[:, :1] > 0.5, x, 0.0), "where"),
    "index": (lambda x, s: x[s.argmax(-1)], "gather"),
    "gather": (lambda x, s: x.gather(0, s.argmax(-1)[:, None].expand(-1, H)), "gather"),
    "index_select": (lambda x, s: x.index_select(0, s.argmax(-1)), "gather"),
    "mask": (lambda x, s: x.masked_fill(s[:, :1] > 0.5, 0), "masked_fill"),
    "a product": (lambda x, s: s.mT @ x, "product"),
    "an einsum": (lambda x, s: torch.einsum("te,th->eth", s, x), "product"),
}


@pytest.mark.parametrize("name", MEETS)
def test_meets_the_hidden_states(name):
    meet, by = MEETS[name]
    flow, result = flow_of(lambda x, g: meet(x.cos(), F.linear(x, g).softmax(-1)), X, GATE)
    evidence = flow.mixed[result]
    assert evidence.by == by and evidence.before and evidence.route.scored == E
    assert result not in flow.route


def test_a_projection_as_wide_as_there_are_experts_is_a_hidden_state():
    flow, result = flow_of(lambda x, g: F.linear(x.cos(), g) * F.linear(x, g).softmax(-1)[:, :1], X, GATE)
    assert flow.mixed[result].by == "mul"


APART = {
    "scores beside scores": lambda x, s: s * s.sum(-1, keepdim=True),
    "a bias of the scores": lambda x, s: s + s.new_zeros(1, E),
    "a constant": lambda x, s: s[:, :1] * torch.ones(T, H),
    "a bias that is an input": lambda x, s: s + x[:, :E],
    "a position": lambda x, s: s.argmax(-1) * torch.arange(T),
}


@pytest.mark.parametrize("name", APART)
def test_stays_a_routing_value(name):
    flow, result = flow_of(lambda x, g: APART[name](x, F.linear(x, g).softmax(-1)), X, GATE)
    assert result in flow.route and flow.mixed == {}


CARRIED = {**NEUTRAL, **{name: ACTIVATIONS[name] for name in ("relu", "tanh")},
           "stack": lambda h: torch.stack([h, h]), "cat": lambda h: torch.cat([h, h]),
           "gathered again": lambda h: h[h.new_zeros(3, dtype=torch.long)]}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED)
def test_chosen_rows_stay_chosen(name):
    def run(x, g):
        rows = x.cos()[F.linear(x, g).argmax(-1)].view(-1, I)
        return CARRIED[name](rows)

    flow, result = flow_of(run, X, GATE)
    assert flow.mixed[result].by == "gather"


@pytest.mark.parametrize("name", NORMS)
def test_chosen_rows_are_forgotten_after_a_norm(name):
    flow, result = flow_of(lambda x, g: NORMS[name](x.cos()[F.linear(x, g).argmax(-1)].view(-1, I)) + 0, X, GATE)
    assert result not in flow.mixed
