"""Private names of torch: the fallback of each where torch does not have it; and the identity in the cache keys."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes

from compile_passes import compat, identity
from compile_passes.passes import needs_gradient
from tests.passes.blocks import batched, block, capture, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without(monkeypatch):
    """Pretend that torch lacks some names."""

    def remove(*missing):
        real = compat.feature
        monkeypatch.setattr(compat, "feature", lambda module, name: None if name in missing else real(module, name))

    return remove


def test_feature():
    assert compat.feature("torch._guards", "TracingContext") is torch._guards.TracingContext
    assert compat.feature("torch._guards", "no_such_name") is None
    assert compat.feature("torch.no_such_module", "name") is None


def symbolic():
    """(a size that is symbolic, the same plus one)"""
    (node,) = (n for n in capture(lambda x: x.relu(), torch.randn(4, 4), dynamic=True).graph.nodes if n.name == "relu")
    return node.meta["example_value"].shape[0]


def test_symbolic_conditions(without):
    size = symbolic()
    assert compat.statically_known_true(size == size) and not compat.statically_known_true(size == 5)
    without("statically_known_true")
    assert compat.statically_known_true(True) and not compat.statically_known_true(size + 1 > size + size)


def test_fake_mode(without):
    with FakeTensorMode() as mode:
        value = torch.ones(2)
    assert compat.fake_mode_of(value) is mode and compat.fake_mode_of(torch.ones(2)) is None
    without("FakeTensor")
    assert compat.fake_mode_of(value) is None


def test_plain_tensors(without):
    with FakeTensorMode():
        fake = torch.ones(2)
    assert all(map(compat.is_plain, (fake, torch.ones(2), torch.nn.Parameter(torch.ones(2)))))
    wrapped = []
    torch.vmap(lambda row: wrapped.append(compat.is_plain(row)) or row)(torch.ones(2, 2))
    assert wrapped == [False] and not compat.is_plain(
        torch.nn.Buffer(torch.ones(2)).as_subclass(type("S", (torch.Tensor,), {}))
    )
    without("is_functorch_wrapped_tensor")
    assert compat.is_plain(fake) and not compat.is_plain(torch.ones(2))


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_the_kernel_of_attention_is_the_one_that_torch_will_call(trained):
    """Of fakes, too, whose sizes get no guard."""
    shapes = symbolic_shapes.ShapeEnv()
    mode, x = FakeTensorMode(shape_env=shapes), torch.randn(2, 8, 24, 16, requires_grad=trained)
    sizes = symbolic_shapes.StatelessSymbolicContext([symbolic_shapes.DimDynamic.DYNAMIC] * 4)
    fakes = mode.from_tensor(x, static_shapes=True), mode.from_tensor(x, symbolic_context=sizes)
    others = [q[:, :3] for q in fakes]
    guards = len(shapes.guards)
    for q, other in zip(fakes, others, strict=True):
        assert q.requires_grad == trained
        assert compat.sdpa_kernel(mode, (q, q, q, None), is_causal=True) == "FLASH_ATTENTION_FOR_CPU"
        assert compat.sdpa_kernel(mode, (q, q, q, None), dropout_p=0.5) == "MATH"
        assert compat.sdpa_kernel(mode, (q, other, q, None)) is None
    assert len(shapes.guards) == guards


@pytest.mark.parametrize("missing", ["TensorifyState", "TensorifyScalarRestartAnalysis", "TracingContext"])
def test_no_restart_where_it_cannot_be_asked_for(missing, without):
    without(missing)
    assert not compat.can_restart_with_constants([symbolic()])


def test_counters_and_traces_without_torchs(without):
    without("counters", "trace_log", "trace_structured")
    compat.counters()["moe_ops_test"]["x"] += 1
    assert compat.counters()["moe_ops_test"] == {"x": 1}
    assert not compat.is_tracing()
    compat.trace_artifact("name", "text")


def test_options_without_torchs_wrapper(monkeypatch):
    assert compat.inductor_options({"max-autotune": True})["max_autotune"] is True
    monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    assert compat.inductor_options({"max-autotune": True}) == {"max_autotune": True}


def test_settings_that_inductor_does_not_have():
    assert compat.inductor_setting("no_such_setting") is None


@pytest.mark.parametrize("package", ["compile_passes", "moe_ops", "meta"])
def test_private_names_stand_in_compat_alone(package):
    """Imports of torch._dynamo, torch._inductor and the like; what stands in other files has no other way."""
    allowed = {"moe_ops/census.py", "moe_ops/testing.py"}
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if path.name == "compat.py" or name in allowed or "examples" in name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found.update((name, module) for module in modules if module.startswith("torch._"))
    assert not found


# ---- gradients


@pytest.mark.parametrize(("expected", "how"), [
    (True, "trained"), (True, "weights only"), (True, "enabled inside"), (False, "no_grad"), (False, "no_grad inside"),
    (False, "frozen"), (False, "cast that does nothing"), (False, "detached"),
])  # fmt: skip
def test_needs_gradient(expected, how):
    inputs = weights(dtype=torch.float32)
    for name in () if how == "frozen" else ("w1",) if how == "weights only" else inputs:
        inputs[name].requires_grad_()

    def run(x, gate, w1, w2):
        if how == "detached":
            x, gate, w1, w2 = (value.detach() for value in (x, gate, w1, w2))
        if how == "cast that does nothing":
            gate = gate.float()
        with torch.set_grad_enabled(
            {"enabled inside": True, "no_grad inside": False}.get(how, torch.is_grad_enabled())
        ):
            return block(batched)(x, gate, w1, w2)

    found = []

    def keep(gm, _):
        found.append(needs_gradient([gm.graph]))
        return gm.forward

    torch.compiler.reset()
    with torch.set_grad_enabled(how not in ("no_grad", "enabled inside", "cast that does nothing")):
        torch.compile(run, backend=keep, fullgraph=True)(**inputs)
    assert found == [expected]


def test_graph_without_example_values_follows_the_grad_mode():
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    assert needs_gradient([graph])
    with torch.no_grad():
        assert not needs_gradient([graph])


# ---- identity


@pytest.fixture
def fresh_identity():
    caches = (identity._sources, identity._versions, identity._describe)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("installed", [{}, {"triton": "3.6.0"}, {"pytorch-triton": "3.6.0+git1"}], ids=str)
def test_versions_of_every_distribution_of_triton(installed, monkeypatch, fresh_identity):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(identity, "version", version)
    expected = [f"torch {torch.__version__}", *(f"{name} {number}" for name, number in installed.items())]
    assert identity._versions() == " ".join(expected)


def test_identity_sees_every_visible_device(monkeypatch, fresh_identity):
    devices = [("H200", (9, 0)), ("A100", (8, 0))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: devices[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: devices[index][1])
    both = identity.identity()
    assert both == identity.identity()
    devices.pop()
    one = identity.identity()
    devices.pop()
    assert len({both, one, identity.identity()}) == 3


def test_identity_covers_the_backend_override_and_the_caller(monkeypatch):
    plain = identity.identity()
    assert identity.identity("extra") != plain
    monkeypatch.setenv("MOE_OPS_BACKEND", "cpu")
    assert identity.identity() != plain
