"""The ways in: backends, options and modes, the user's own passes, caches, contexts, and the loop that is switched."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint

import moe_ops
from compile_passes import passes
from compile_passes.builder import operator_name
from compile_passes.passes import PASSES, MoEPass
from tests.corpus.families import build, result, tokens
from tests.passes.blocks import E, H, I, K, batched, block, counts, weights


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


def test_the_structured_trace_has_the_graph_before_and_after():
    class Keep(logging.Handler):
        def emit(self, record):
            if (name := record.metadata.get("artifact", {}).get("name", "")).startswith("moe_ops"):
                texts[name] = record.payload

    trace, handler, texts = logging.getLogger("torch.__trace"), Keep(), {}
    trace.addHandler(handler)
    try:
        run(backend="moe_ops_eager")
    finally:
        trace.removeHandler(handler)
    assert list(texts) == [f"moe_ops_{step}_{when}" for step in ("fuse_blocks", "join") for when in ("before", "after")]
    before, after, _, joined = texts.values()
    assert "bmm" in before and "moe_ops" not in before
    assert "moe_ops.fused_experts" in after and "moe_ops.fused_moe" in joined


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_backend_fuses_and_joins(backend):
    run(backend=backend)
    assert counters["moe_ops"] == counts(fused=1, joined=1)


def test_what_is_logged(caplog):
    with caplog.at_level(logging.DEBUG, "compile_passes"):
        run(backend="moe_ops_eager")
        with torch.no_grad():
            torch.compile(refused_block, backend="moe_ops_eager")(**weights(dtype=torch.float32))
    said = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20, 30)}
    fused = [line for line in said[logging.INFO] if line.startswith("fused ")]
    assert len(fused) == 1 and "blocks.py:" in fused[0]
    assert fused[0].endswith(": batched_mm experts, routing: softmax, backend cpu")
    assert [line.split(": ")[0] for line in said[logging.WARNING]] == ["not fused"]
    done = "1 fused, 0 staged, 0 refused, 0 joined, 0 masks dropped, 0 attention calls share heads"
    assert any(re.match(rf"moe_ops_fuse_blocks: {done}, in [\d.]+ ms", line) for line in said[logging.DEBUG])


def test_backend_is_listed():
    assert {"moe_ops", "moe_ops_eager"} <= set(torch._dynamo.list_backends())


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_users_pass_runs_after_ours(backend):
    own = Recorder()
    run(backend=backend, options={"pre_grad_custom_pass": own})
    assert own.calls == 1 and own.saw_ours
    assert counters["moe_ops"]["fused"] == 1


def test_users_pass_runs_after_ours_in_fuse():
    own = Recorder()
    with config.patch({"pre_grad_custom_pass": own}), moe_ops.fuse():
        run()
    assert own.calls == 1 and own.saw_ours


@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_users_pass_in_the_configuration_is_kept(hook):
    own = Recorder()
    with config.patch({hook: own}):
        run(backend="moe_ops")
        assert getattr(config, hook) is own
    assert own.calls == 1 and own.saw_ours
    assert counters["moe_ops"]["joined"] == 1


def test_unknown_option_is_an_error():
    with pytest.raises(Exception, match="Unexpected optimization option no_such_option"):
        run(backend="moe_ops", options={"no_such_option": 1})


class Settings(Recorder):
    """A user's pass that remembers the configuration it runs under."""

    def __call__(self, graph):
        super().__call__(graph)
        self.autotune, self.epilogue = config.max_autotune, config.epilogue_fusion


def test_mode_and_options_of_compile_reach_inductor():
    inputs, own = weights(dtype=torch.float32), Settings()
    compiled = moe_ops.compile(
        block(batched), mode="max-autotune-no-cudagraphs",
        options={"epilogue_fusion": False, "pre_grad_custom_pass": own, "max_autotune_gemm_backends": "ATEN"},
    )  # fmt: skip
    with torch.no_grad():
        compiled(**inputs)
    assert own.autotune and not own.epilogue
    assert counters["moe_ops"]["fused"] == 1


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_mode_of_torch_compile_reaches_inductor(mode):
    own = Settings()
    with config.patch({"pre_grad_custom_pass": own, "max_autotune_gemm_backends": "ATEN"}):
        run(backend="moe_ops", mode=mode)
    assert own.autotune == (mode == "max-autotune-no-cudagraphs")
    assert counters["moe_ops"]["fused"] == 1


def refused_block(x, gate, w1, w2):
    """A block with an interior value that is used outside."""
    seen = []

    def experts(x, ids, topk_weights, w1, w2):
        flat = ids.reshape(-1)
        first, second = torch.bmm(w1[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        seen.append(F.silu(first) * second)
        out = torch.bmm(w2[flat], seen[0].unsqueeze(-1)).squeeze(-1)
        return (out * topk_weights.reshape(-1, 1)).view(-1, K, H).sum(1)

    return block(experts)(x, gate, w1, w2), seen[0].sum()


def test_fuse_context_and_its_end():
    with moe_ops.fuse():
        run()
    assert counters["moe_ops"] == counts(fused=1, joined=1)
    assert config.pre_grad_custom_pass is None and config.post_grad_custom_pre_pass is None


@pytest.mark.parametrize(
    ("backend", "depth"), [("inductor", 2), ("moe_ops", 1), ("moe_ops_eager", 1), ("moe_ops_eager", 2)]
)
def test_contexts_and_backends_nest_without_running_twice(backend, depth):
    """A second run would refuse the block a second time, and call the user's pass again."""
    own = Recorder()
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(config.patch({"pre_grad_custom_pass": own}))
        for _ in range(depth):
            stack.enter_context(moe_ops.fuse())
        torch.compile(refused_block, backend=backend)(**weights(dtype=torch.float32))
    assert counters["moe_ops"] == counts(refused=1)
    assert own.calls == 1


def test_second_compilation_is_a_cache_hit_and_counts_the_same():
    run(backend="moe_ops")
    first = dict(counters["moe_ops"])
    torch.compiler.reset()
    counters.clear()
    run(backend="moe_ops")
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1 and not counters["aot_autograd"]["autograd_cache_miss"]
    assert counters["moe_ops"] == first


@pytest.mark.parametrize("users", [None, lambda graph: None], ids=["no_pass", "pass_without_identity"])
@pytest.mark.parametrize("way", ["backend", "fuse"])
def test_identity_is_in_the_cache_key(way, users, monkeypatch):
    """What was compiled by other operators is not taken from the caches, whatever passes the user has."""

    def compiled():
        torch.compiler.reset()
        counters.clear()
        with config.patch({"pre_grad_custom_pass": users}), moe_ops.fuse() if way == "fuse" else nullcontext():
            run(backend="moe_ops" if way == "backend" else "inductor")
        return counters["aot_autograd"]["autograd_cache_hit"]

    compiled()
    hits = compiled()
    if users is not None and counters["aot_autograd"]["autograd_cache_bypass"]:
        pytest.skip("this torch caches nothing beside a pass without an identity")
    assert hits == 1
    monkeypatch.setattr(passes, "identity", lambda extra: f"other sources {extra}")
    assert compiled() == 0


def test_uuid_covers_ours_and_the_users():
    ours = MoEPass(PASSES)
    assert ours.uuid() == MoEPass(PASSES).uuid()
    users = [
        MoEPass(PASSES, given) for given in (Recorder("one"), [Recorder("two")], [Recorder("one"), Recorder("two")])
    ]
    assert len({ours.uuid(), MoEPass().uuid(), *(own.uuid() for own in users)}) == 5
    assert MoEPass(PASSES, lambda graph: None).uuid() is None


def test_several_passes_of_the_user():
    first, second = Recorder("one"), Recorder("two")
    with config.patch({"pre_grad_custom_pass": MoEPass((), [first, second])}):
        run(backend="moe_ops")
    assert first.calls == second.calls == 1 and first.saw_ours and second.saw_ours


def test_training_through_inductor():
    inputs = {name: value.requires_grad_() for name, value in weights(dtype=torch.float32).items()}
    expected = torch.autograd.grad(block(batched)(**inputs).square().sum(), list(inputs.values()))
    loss = torch.compile(block(batched), backend="moe_ops", fullgraph=True)(**inputs).square().sum()
    for one, other in zip(torch.autograd.grad(loss, list(inputs.values())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counters["moe_ops"]["fused"] == 1 and counters["moe_ops"]["joined"] == 0


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
    assert counters["moe_ops"]["fused"] == 1 and counters["moe_ops"]["joined"] == 0


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
        # What it says about generate() is another matter: tests/passes/test_generation.py.
        warnings.filterwarnings("ignore", message=".* compiles its decode steps with")
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


def test_compile_gives_a_loop_a_static_form_and_says_so_at_the_line_of_the_user():
    model, x = Loop(), torch.randn(5, H)
    expected = model(x)
    with pytest.warns(UserWarning, match="in a loop over those that were hit") as said:
        compiled = moe_ops.compile(model, backend="moe_ops_eager", fullgraph=True)
    assert {warning.filename for warning in said} == {__file__}
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected)


class Recomputed(Recorder):
    """A user's pass: what the layers are told to compute again in the backward."""

    def __call__(self, graph):
        layers = [node for node in graph.nodes if operator_name(node) in ("fused_experts", "fused_moe")]
        self.seen = [node.kwargs.get("recompute") for node in layers]


def called(hidden, logits, gate_up, down, **options):
    return moe_ops.fused_moe(hidden, logits, gate_up, down, top_k=K, **options)


@pytest.mark.parametrize("option", [None, "activation", "all"])
@pytest.mark.parametrize("form", ["fused", "called", "called_with_its_own"])
def test_what_layers_compute_again_is_an_option(form, option):
    hidden, logits = torch.randn(5, H, requires_grad=True), torch.randn(5, E)
    if form == "fused":
        given = weights(dtype=torch.float32)
        leaf = next(iter(given.values())).requires_grad_()
        function = lambda: block(batched)(**given)  # noqa: E731
    else:
        leaf, own = hidden, {} if form == "called" else {"recompute": "activation"}
        w1, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
        function = lambda: called(hidden, logits, w1, w2, **own)  # noqa: E731
    seer = Recomputed()
    options = {"pre_grad_custom_pass": seer, **({} if option is None else {"recompute": option})}
    compiled = torch.compile(function, backend="moe_ops_eager", fullgraph=True, options=options)
    expected, found = (torch.autograd.grad(run().square().sum(), leaf) for run in (function, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert seer.seen == ["activation" if form == "called_with_its_own" else option]


@pytest.mark.parametrize("backend", ["moe_ops", "moe_ops_eager"])
def test_an_unknown_name_of_what_to_compute_again_is_refused(backend):
    message = r"compile: recompute must be one of \['activation', 'all'\], got 'everything'"
    with pytest.raises(Exception, match=message):
        run(backend=backend, options={"recompute": "everything"})
    with pytest.raises(ValueError, match=message):
        moe_ops.compile(block(batched), backend=backend, options={"recompute": "everything"})
