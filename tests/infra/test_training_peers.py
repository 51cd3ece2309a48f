"""Other projects' layers in the benchmark of training, without their packages or a GPU."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import optional_peers, timing, train, training_peers
from benchmarks.__main__ import main, parse_names
from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.gradients import error
from benchmarks.shapes import parse_shapes

(SHAPE,) = parse_shapes("8x3x16x24")
TOKENS = 5


@pytest.fixture
def case() -> Case:
    return make_case(layer_weights(SHAPE, torch.float32, "cpu"), TOKENS)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Put a module in place, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    vars(sys.modules[name]).update(contents)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """What both projects compute, of weights as ours are."""
    gate, up = torch.einsum("th,tknh->tkn", x, gate_up[ids.long()]).chunk(2, dim=-1)
    rows = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[ids.long()])
    return (rows * values[..., None]).sum(1)


def liger_stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The function that the peer calls, with the host's read of an integer in it, and one of a time in the first."""
    state = SimpleNamespace(tiles=torch.tensor([7]), read=[], calls=0)

    class LigerFusedMoEFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, values: Tensor) -> Tensor:
            E, K, H, I = SHAPE.E, SHAPE.K, SHAPE.H, SHAPE.I
            assert (gate_up.shape, down.shape) == ((E, 2 * I, H), (E, H, I)) and x.shape == (TOKENS, H)
            assert ids.shape == values.shape == (TOKENS, K) and ids.dtype == torch.int32 and values.dtype == x.dtype
            state.calls += 1
            state.tiles += 1
            if state.calls == 1:
                assert torch.tensor(0.5).item() == 0.5
            state.read.append(int(state.tiles[-1].item()))
            ctx.save_for_backward(x, gate_up, down, ids, values)
            return experts(x, gate_up, down, ids, values)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            x, gate_up, down, ids, values = ctx.saved_tensors
            with torch.enable_grad():
                inputs = [tensor.detach().requires_grad_() for tensor in (x, gate_up, down, values)]
                output = experts(*inputs[:3], ids, inputs[3])
            *of_three, of_values = torch.autograd.grad(output, inputs, grad)
            return *of_three, None, of_values

    module(monkeypatch, "liger_kernel.ops.fused_moe", LigerFusedMoEFunction=LigerFusedMoEFunction)
    return state


def sonicmoe_stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The function for routing from elsewhere, with what it asks of weights and pairs."""
    state = SimpleNamespace(inference=[])

    def moe_general_routing_inputs(
        x: Tensor, scores: Tensor, tokens: Tensor, ids: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None, E: int,
        stream_id: int, activation_type: str, is_inference_mode_enabled: bool = False, concat_layout: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        H, I, pairs = SHAPE.H, SHAPE.I, TOKENS * SHAPE.K
        assert (w1.shape, w2.shape) == ((2 * I, H, E), (H, I, E)) and E == SHAPE.E and b1 is b2 is None
        assert w1.permute(2, 0, 1).is_contiguous() and w2.permute(2, 0, 1).is_contiguous()
        assert scores.shape == tokens.shape == ids.shape == (pairs,) and tokens.dtype == ids.dtype == torch.int32
        assert tokens.tolist() == sorted(tokens.tolist()) and concat_layout
        assert (stream_id, activation_type) == (3, "swiglu")
        state.inference.append(is_inference_mode_enabled)
        values, ids = scores.view(TOKENS, -1), ids.view(TOKENS, -1)
        return experts(x, w1.permute(2, 0, 1), w2.permute(2, 0, 1), ids, values), None

    module(monkeypatch, "sonicmoe.functional", moe_general_routing_inputs=moe_general_routing_inputs)
    module(monkeypatch, "sonicmoe.enums", ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=3))
    return state


STAND_INS: dict[str, Callable[[pytest.MonkeyPatch], SimpleNamespace]] = {
    "liger": liger_stand_in,
    "sonicmoe": sonicmoe_stand_in,
}


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, which nothing here depends on, and what has to be importable is."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(training_peers, "not_importable", lambda package: None)


def test_everyone_has_a_stand_in() -> None:
    assert STAND_INS.keys() == training_peers.OPTIONAL.keys()


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("mode", train.MODES)
@pytest.mark.parametrize("peer", STAND_INS)
def test_gradients_are_those_of_the_layer(peer: str, mode: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS[peer](monkeypatch)
    for step in train.steps(case, mode, peer):
        found = step()
        assert len(found) == (4 if mode == "trained" else 2)
        assert error(case, step.inputs, step.grad_output, found) < 1e-5
        assert step.forward().shape == (TOKENS, SHAPE.H)
    assert not case.weights.gate_up_proj.requires_grad and not case.weights.down_proj.requires_grad


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("peer", STAND_INS)
def test_a_run_has_its_row(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STAND_INS[peer](monkeypatch)
    monkeypatch.setattr(timing, "CPU_BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "SAMPLE_US", 0.0)
    path = tmp_path / "train.json"
    arguments = ["--shapes", SHAPE.name, "--tokens", str(TOKENS), "--modes", "trained"]
    assert main(["train", *arguments, "--peers", f"hf_moe,{peer}", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    row = document["rows"][1]
    assert row["peer"] == peer and row["us"] > 0 and row["error"] < 1e-5 and row["ratio"] > 0
    described = training_peers.OPTIONAL[peer].describe()
    assert document["method"].endswith(f"; {peer}: {described}") and training_peers.OPTIONAL[peer].note in described


@pytest.mark.usefixtures("importable")
def test_the_host_reads_once_for_each_input_set(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph can be captured: nothing but the first call waits, and none gets what another set's call read."""
    state = liger_stand_in(monkeypatch)
    first, second = train.steps(case, "frozen", "liger")[:2]
    for step in (first, second, first, second, first):
        step()
    assert state.read == [8, 9, 8, 9, 8] and state.tiles.tolist() == [12]


@pytest.mark.usefixtures("importable")
def test_only_inference_keeps_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    state = sonicmoe_stand_in(monkeypatch)
    step = train.steps(case, "frozen", "sonicmoe")[0]
    step.forward(), step.saving(), step()
    assert state.inference == [True, False, False]


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "no package"])
@pytest.mark.parametrize("peer", STAND_INS)
def test_what_is_missing_is_a_row(
    peer: str, gpu: bool, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = training_peers.OPTIONAL[peer].package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(optional_peers, "PEERS", tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if ".peers" not in path])
    (row,) = train.time_case(case, "trained", train.Plan([SHAPE], [TOKENS], peers=[peer]), train.Kept(wanted=False))
    expected = f"package {package} is not installed, nor in {tmp_path / 'lib'}" if gpu else "needs a CUDA device"
    assert row["us"] is None and row["reason"] == expected and expected in train.describe(row)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("peer", STAND_INS)
def test_another_version_of_the_package_is_a_reason_and_no_time(
    peer: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    STAND_INS[peer](monkeypatch)
    for name in ("liger_kernel.ops.fused_moe", "sonicmoe.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    outcome, prepared = train.prepare(case, "trained", peer, None)
    assert prepared is None and outcome["us"] is None and training_peers.OPTIONAL[peer].package in outcome["reason"]


def test_they_are_asked_for_by_name() -> None:
    known = train.PEERS | train.OPTIONAL
    assert parse_names("--peers", "default", known, tuple(train.PEERS)) == list(train.PEERS)
    assert parse_names("--peers", "hf_moe,optional", known, tuple(train.PEERS)) == ["hf_moe", *STAND_INS]


def test_a_whole_wheel_is_carried_in_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = tmp_path / "peers"
    for version, name in (("1.0", "older"), ("1.1", "newer")):
        wheel = tmp_path / f"liger_kernel-{version}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("liger_kernel/ops/fused_moe.py", f"from . import {name}")
            archive.writestr(f"liger_kernel/ops/{name}.py", "")
            metadata = f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n"
            archive.writestr(f"liger_kernel-{version}.dist-info/METADATA", metadata)
        assert main(["carry", str(wheel), "--to", str(peers)]) == 0
    files = {str(path.relative_to(peers / "lib")) for path in peers.rglob("*") if path.is_file()}
    package = {f"liger_kernel/ops/{name}.py" for name in ("fused_moe", "newer")}
    assert files == {*package, "liger_kernel-1.1.dist-info/METADATA"}
    monkeypatch.setattr(training_peers, "PEERS", peers)
    assert training_peers.OPTIONAL["liger"].describe().startswith("liger-kernel 1.1, ")
