"""The peer of the benchmarks that runs triton_kernels' layer with our mxfp4 weights, without the package or a GPU."""

import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks import mxfp4_peer, optional_peers
from benchmarks.__main__ import main, parse_names
from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.layers import prepare
from benchmarks.peers import DEFAULT_PEERS, PEERS
from benchmarks.shapes import parse_shapes
from tests.infra import triton_kernels_stand_in as stand_in

NAME = "triton_kernels_mxfp4"
# Three groups of 32 along H and five along I: neither is a multiple of the four that a product reads at once.
(SHAPE,) = parse_shapes("8x2x96x160")


@pytest.fixture
def case() -> Case:
    return make_case(layer_weights(SHAPE, torch.bfloat16, "cpu"), 5)


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{NAME} ")]
    assert line.split()[1] == "moe"


def test_output_is_that_of_our_layer_with_the_same_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)
    (theirs, *_), (ours, *_) = (PEERS[name].prepare(case) for name in (NAME, "ours_mxfp4"))
    of_theirs, of_ours = theirs(), ours()
    assert of_theirs.shape == of_ours.shape and of_theirs.dtype == torch.bfloat16
    difference = (of_theirs.double() - of_ours.double()).norm() / of_ours.double().norm()
    assert difference < 0.01, "bf16's rounding, where four bits are off by 0.2"
    assert case.error(of_theirs) == pytest.approx(case.error(of_ours), rel=0.05)


def test_its_row_holds_an_error_and_the_roof_of_the_scheme(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)
    monkeypatch.setattr(optional_peers, "not_importable", lambda package: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    known, call = prepare(case, PEERS[NAME], None)
    assert call is not None and 0.05 < known["error"] < 0.4 and known["roof_kind"] == "mxfp4"


def test_bytes_are_made_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)
    made = case.weights.quantized("mxfp4")
    PEERS[NAME].prepare(case)
    assert case.weights.quantized("mxfp4") is made
    kept = case.weights.form(NAME, lambda: None)
    PEERS[NAME].prepare(case)
    assert kept is not None and case.weights.form(NAME, lambda: None) is kept


def test_products_are_split_by_nobody_else_s_rule(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    package = stand_in.install(monkeypatch)
    (run, *_) = PEERS[NAME].prepare(case)
    assert package.constraints == {}, "binding sets nothing"
    run()
    assert package.seen == [{"split_k": 1}] * 2 and package.constraints == {}
    with pytest.raises(RuntimeError, match="in a product"), mxfp4_peer.products_in_one_part():
        raise RuntimeError("in a product")
    assert package.constraints == {}


@pytest.mark.parametrize(
    ("package", "capability", "reason"),
    [
        ("package triton_kernels is not installed", (9, 0), "triton_kernels is not installed"),
        (None, (8, 0), "needs a GPU of compute capability 9"),
        (None, (10, 0), "needs a GPU of compute capability 9"),
        (None, (9, 0), None),
    ],
    ids=["no package", "A100", "B200", "H200"],
)
def test_what_is_missing_is_said(
    package: str | None, capability: tuple[int, int], reason: str | None, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional_peers, "not_importable", lambda name: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    missing = PEERS[NAME].missing()
    assert missing is None if reason is None else reason in missing
    if reason is not None:
        known, call = prepare(case, PEERS[NAME], None)
        assert call is None and known == {"us": None, "reason": missing}


def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["triton_kernels.tensor_details"].layout, "HopperMXValueLayout")


def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_kernels.matmul_ogs", None)


@pytest.mark.parametrize("change", [without_layouts, without_products], ids=["layouts", "matmul_ogs"])
def test_another_version_of_the_package_is_a_reason_and_no_time(
    change: Callable[[pytest.MonkeyPatch], None], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    monkeypatch.setattr(optional_peers, "not_importable", lambda package: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    change(monkeypatch)
    known, call = prepare(case, PEERS[NAME], None)
    assert call is None and known["us"] is None and ("Hopper" in known["reason"] or "matmul_ogs" in known["reason"])


def test_other_activations_than_bf16_are_unfit(case: Case) -> None:
    half = make_case(layer_weights(SHAPE, torch.float16, "cpu"), 1)
    assert PEERS[NAME].unfit(case) is None
    assert PEERS[NAME].unfit(half) == "takes bf16 activations, not float16"


def test_optional_peers_are_those_of_the_scheme() -> None:
    """A bf16 layer is compared with nobody's four bits."""
    names = {
        scheme: parse_names("--peers", "optional", PEERS, DEFAULT_PEERS[scheme, "grouped"], scheme)
        for scheme in ("bf16", "mxfp4", "nvfp4")
    }
    assert names["bf16"] == names["nvfp4"] == ["vllm_kernel", "triton_kernels", "sonicmoe"]
    assert sorted(names["mxfp4"]) == sorted([*names["bf16"], NAME])
