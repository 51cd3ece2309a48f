"""Expert parallelism by other doors than its functions, in two processes; each check is one test."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import torch

from tests.distributed.doors import RANKS
from tests.distributed.processes import outcome

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def names(module: str) -> list[str]:
    """The checks of a module; none where this transformers has no interface for them."""
    try:
        return list(import_module(f"tests.distributed.{module}").CHECKS)
    except ImportError:
        return []


def wrong(module: str, name: str, factory: pytest.TempPathFactory, ranks: int = RANKS) -> str:
    return outcome(factory, ranks, name, "tests.distributed.doors", "--checks", module)


@pytest.mark.parametrize("name", names("of_transformers"))
def test_of_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = wrong("of_transformers", name, tmp_path_factory)
    assert not found, found


@pytest.mark.parametrize("name", names("of_shared_batches"))
def test_of_shared_batches(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = wrong("of_shared_batches", name, tmp_path_factory, 4)
    assert not found, found


@pytest.mark.parametrize("name", names("of_dtensors"))
def test_of_dtensors(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = wrong("of_dtensors", name, tmp_path_factory)
    assert not found, found


@pytest.mark.parametrize("name", names("of_torchtitan"))
def test_of_torchtitan(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = wrong("of_torchtitan", name, tmp_path_factory)
    assert not found, found


def test_without_torchtitan_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"models/common/token_dispatcher\.py must be installed"):
        import_module("moe_ops.integrations.torchtitan")


@pytest.mark.skipif(not names("of_transformers"), reason="this transformers has no interface for expert parallelism")
@pytest.mark.parametrize("module", ["transformers", "transformers_ep"])
def test_an_import_registers_it(module: str) -> None:
    program = (
        f"import moe_ops.integrations.{module}\n"
        "from transformers.distributed.expert_parallel import EPImplementationInterface\n"
        "print(EPImplementationInterface()['moe_ops'].__name__)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.stdout.endswith("MoeOpsEP\n"), result.stderr


def test_a_transformers_without_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are registered as ever."""
    pytest.importorskip("transformers", minversion="5.17")
    integration = import_module("moe_ops.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.transformers_ep", raising=False)
    integration._register()
    with pytest.raises(ImportError, match=r"with an EPImplementationInterface \(5\.23 or later\)"):
        import_module("moe_ops.integrations.transformers_ep")
