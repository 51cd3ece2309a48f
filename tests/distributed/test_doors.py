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


#: Modules of checks, and how many processes run them.
DOORS = {"of_transformers": RANKS, "of_shared_batches": 4, "of_dtensors": RANKS, "of_torchtitan": RANKS}
CASES = [(module, name) for module in DOORS for name in names(module)]


@pytest.mark.parametrize(("module", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_on_every_rank(module: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = outcome(tmp_path_factory, DOORS[module], name, "tests.distributed.doors", "--checks", module)
    assert not wrong, wrong


def test_without_torchtitan_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"models/common/token_dispatcher\.py must be installed"):
        import_module("moe_ops.integrations.torchtitan")


#: Imports each of its arguments in a process of its own, all of which have transformers from one.
PROGRAM = """
import importlib, os, sys
from transformers.distributed.expert_parallel import EPImplementationInterface
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module("moe_ops.integrations." + name)
        print(name, EPImplementationInterface()["moe_ops"].__name__, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def registered() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "transformers", "transformers_ep"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not names("of_transformers"), reason="this transformers has no interface for expert parallelism")
@pytest.mark.parametrize("module", ["transformers", "transformers_ep"])
def test_an_import_registers_it(module: str, registered: subprocess.CompletedProcess[str]) -> None:
    assert f"{module} MoeOpsEP" in registered.stdout.splitlines(), registered.stderr


def test_a_transformers_without_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are registered as ever."""
    pytest.importorskip("transformers", minversion="5.17")
    integration = import_module("moe_ops.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delitem(sys.modules, "moe_ops.integrations.transformers_ep", raising=False)
    integration._register()
    with pytest.raises(ImportError, match=r"with an EPImplementationInterface \(5\.23 or later\)"):
        import_module("moe_ops.integrations.transformers_ep")
