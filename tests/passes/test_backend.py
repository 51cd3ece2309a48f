"""The ways in: backends, options and modes, the user's own passes, caches, contexts, and the loop that is switched."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import moe_ops
from compile_passes.backend import _with_our_passes
from compile_passes.passes import PRE_GRAD, MoEPass
from tests.corpus.families import build, result, tokens
from tests.passes.blocks import E, H, I, K, batched, block, weights


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch.compiler.reset()


class Recorder(CustomGraphPass):
    """A user's pass: remembers whether it saw our operators."""

    def __init__(self, identity="recorder"):
        self.identity, self.calls, self.saw_ours = identity, 0, False

    def __call__(self, graph):
        self.calls += 1
        self.saw_ours |= any("moe_ops" in str(node.target) for node in graph.nodes)

    def uuid(self):
        return self.identity


def run(**compile_arguments):
    inputs = weights(dtype=torch.float32)
    with torch.no_grad():
        output = torch.compile(block(batched), fullgraph=True, **compile_arguments)(**inputs)
    torch.testing.assert_close(output, block(batched)(**inputs))


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_backend_fuses_and_joins(backend):
    run(backend=backend)
    assert counters["moe_ops"] == {"fused": 1, "refused": 0, "joined": 1, "shared_heads": 0}


def test_backend_is_listed():
    assert {"moe_ops", "moe_ops_eager"} <= set(torch._dynamo.list_backends())


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_users_pass_runs_before_ours(backend):
    own = Recorder()
    run(backend=backend, options={"pre_grad_custom_pass": own})
    assert own.calls == 1 and not own.saw_ours
    assert counters["moe_ops"]["fused"] == 1


def test_users_pass_in_the_configuration_is_kept():
    own = Recorder()
    with config.patch({"post_grad_custom_pre_pass": own}):
        run(backend="moe_ops")
        assert config.post_grad_custom_pre_pass is own
    assert own.calls == 1 and own.saw_ours
    assert counters["moe_ops"]["joined"] == 1


def test_unknown_option_is_an_error():
    with pytest.raises(Exception, match="Unexpected optimization option no_such_option"):
        run(backend="moe_ops", options={"no_such_option": 1})


def test_mode_and_options_reach_inductor():
    seen = {}

    class Look(Recorder):
        def __call__(self, graph):
            seen.update(autotune=config.max_autotune, epilogue=config.epilogue_fusion, ours=config.pre_grad_custom_pass)

    inputs = weights(dtype=torch.float32)
    compiled = moe_ops.compile(
        block(batched), mode="max-autotune-no-cudagraphs",
        options={"epilogue_fusion": False, "pre_grad_custom_pass": Look(), "max_autotune_gemm_backends": "ATEN"},
    )  # fmt: skip
    with torch.no_grad():
        compiled(**inputs)
    assert seen["autotune"] and not seen["epilogue"] and isinstance(seen["ours"], MoEPass)
    assert counters["moe_ops"]["fused"] == 1


def test_mode_of_torch_compile():
    run(backend="moe_ops", mode="reduce-overhead")
    assert counters["moe_ops"]["fused"] == 1


def test_fuse_context_and_its_end():
    with moe_ops.fuse():
        run()
    assert counters["moe_ops"]["fused"] == 1
    assert config.pre_grad_custom_pass is None and config.post_grad_custom_pre_pass is None


def test_fuse_nests_without_running_twice():
    with moe_ops.fuse(), moe_ops.fuse():
        run()
    assert counters["moe_ops"]["fused"] == 1


def test_second_compilation_is_a_cache_hit():
    run(backend="moe_ops")
    torch.compiler.reset()
    counters.clear()
    run(backend="moe_ops")
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] >= 1


def test_uuid_covers_ours_and_the_users():
    ours = MoEPass(PRE_GRAD)
    assert ours.uuid() == MoEPass(PRE_GRAD).uuid()
    with_user = MoEPass(PRE_GRAD, Recorder("one"))
    assert len({ours.uuid(), with_user.uuid(), MoEPass(PRE_GRAD, [Recorder("two")]).uuid()}) == 3
    assert MoEPass(PRE_GRAD, lambda graph: None).uuid() is None


def test_passes_of_an_enclosing_context_are_not_doubled():
    own = Recorder()
    with config.patch({"pre_grad_custom_pass": MoEPass(PRE_GRAD, own)}):
        assert _with_our_passes({})["pre_grad_custom_pass"].users == (own,)


def test_training_through_inductor():
    inputs = {name: value.requires_grad_() for name, value in weights(dtype=torch.float32).items()}
    expected = torch.autograd.grad(block(batched)(**inputs).square().sum(), list(inputs.values()))
    loss = torch.compile(block(batched), backend="moe_ops", fullgraph=True)(**inputs).square().sum()
    for one, other in zip(torch.autograd.grad(loss, list(inputs.values())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_checkpointed_block(backend):
    """The block is the body of a higher-order operator there."""

    def run(x, gate, w1, w2):
        return checkpoint(block(batched), x, gate, w1, w2, use_reentrant=False)

    inputs = {name: value.requires_grad_() for name, value in weights(dtype=torch.float32).items()}
    expected = torch.autograd.grad(run(**inputs).square().sum(), list(inputs.values()))
    loss = torch.compile(run, backend=backend, fullgraph=True)(**inputs).square().sum()
    for one, other in zip(torch.autograd.grad(loss, list(inputs.values())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["moe_ops"]["fused"] == 1


def test_compile_switches_the_eager_loop_of_transformers():
    model, ids = build("mixtral", torch.float32, "eager"), tokens(2, 8)
    with torch.no_grad():
        expected = result(model(input_ids=ids))
        with pytest.warns(UserWarning, match='switched the experts of MixtralForCausalLM from the "eager" loop'):
            compiled = moe_ops.compile(model, backend="moe_ops_eager", fullgraph=True)
        torch.testing.assert_close(result(compiled(input_ids=ids)), expected, rtol=1e-4, atol=1e-5)
    assert counters["moe_ops"]["fused"] == 2


def test_compile_leaves_a_captured_model_alone():
    model = build("mixtral", torch.bfloat16, "batched_mm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe_ops.compile(model, backend="moe_ops_eager")
    assert model.config._experts_implementation == "batched_mm"


class Loop(torch.nn.Module):
    """Experts as a list of modules, visited by a Python loop over the data."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(H, E, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(H, I), torch.nn.SiLU(), torch.nn.Linear(I, H)) for _ in range(E)
        )

    def forward(self, x):
        values, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for expert in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero().flatten().tolist():
            token, slot = torch.where(ids == expert)
            out.index_add_(0, token, self.experts[expert](x[token]) * values[token, slot, None])
        return out


def test_compile_names_a_loop_that_it_cannot_switch():
    model, x = Loop(), torch.randn(5, H)
    with pytest.warns(UserWarning, match="run their experts in a Python loop"):
        compiled = moe_ops.compile(model, backend="moe_ops_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
