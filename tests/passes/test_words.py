"""What refusals call the values of a graph: by source line, for somebody who knows the model and not the graph."""

from __future__ import annotations

import re

import torch

from compile_passes.match import in_words, source
from compile_passes.passes import fuse_blocks
from tests.passes.blocks import H, I, K, batched, block, capture, refusal, weights


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.router(x).relu()


def test_words_for_every_kind_of_node():
    nodes = {node.name: node for node in capture(Gated(), torch.ones(2, 4)).graph.nodes}
    said = {name: in_words(node) for name, node in nodes.items()}
    assert "the input self.router.weight" in said.values() and "the input x" in said.values()
    assert said["output"] == "what the captured code returns"
    (relu,) = (text for name, text in said.items() if name.startswith("relu"))
    assert relu.startswith("`return self.router(x).relu()` (test_words.py:")


def test_a_node_without_a_line():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    assert in_words(node) == "the operation relu" and source(node) == ""


def overwrites_the_hidden_states(x, gate, w1, w2):
    def after_the_first_product(h):
        x.mul_(2)
        return torch.nn.functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]

    return block(batched, activation=after_the_first_product)(x, gate, w1, w2)


def writes_a_buffer(x, gate, w1, w2, buffer):
    values, ids = torch.nn.functional.linear(x, gate).float().softmax(-1).topk(K)
    h = torch.bmm(w1[ids.reshape(-1)], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1)
    inside = (torch.nn.functional.silu(h[:, :I]) * h[:, I:]).unsqueeze(-1)
    torch.bmm(w2[ids.reshape(-1)], inside, out=buffer)
    return (buffer.squeeze(-1) * values.reshape(-1, 1)).view(-1, K, H).sum(1).to(x.dtype)


def test_a_write_is_named_by_its_line():
    row = refusal(overwrites_the_hidden_states)
    assert "`x.mul_(2)` (test_words.py:" in row.reason and "the input x" in row.reason, row.reason


def test_a_write_of_the_block_is_named_by_its_line():
    inputs = {**weights(), "buffer": torch.zeros(12 * K, H, 1, dtype=torch.bfloat16)}
    (row,) = fuse_blocks(capture(writes_a_buffer, **inputs).graph).report.refused
    assert "`torch.bmm(w2[ids.reshape(-1)], inside, out=buffer)` (test_words.py:" in row.reason, row.reason
    assert "inside the MoE block, writes an input of the graph" in row.reason


def test_a_function_transform_is_named():
    def one(x, gate, w1, w2):
        return torch.func.vmap(lambda v: block(batched)(v, gate, w1, w2))(x[None])[0]

    row = fuse_blocks(capture(one, **weights(dtype=torch.float32)).graph).report.refused[0]
    said = r"`.+` \(\w+\.py:\d+\): this is a value of a function transform \(vmap, grad, jvp\), which the operators"
    assert re.match(said, row.reason), row.reason
