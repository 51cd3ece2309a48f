"""Expert parallelism by other doors than its functions, in two processes; each check is one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.distributed import doors

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo")


def names(module: str) -> list[str]:
    """The checks of a module; none where this transformers has no interface for them."""
    try:
        return list(import_module(f"tests.distributed.{module}").CHECKS)
    except ImportError:
        return []


def outcome(module: str, name: str, factory: pytest.TempPathFactory) -> str:
    """What was wrong with a check. All of a module run in one pair of processes, whichever test asks first."""
    root = factory.getbasetemp()
    folder = Path(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root, f"doors_{module}")
    kept = folder / "found.json"
    with FileLock(f"{folder}.lock"):
        if not kept.exists():
            folder.mkdir(exist_ok=True)
            kept.write_text(json.dumps(doors.run(module, folder)))
    return json.loads(kept.read_text())[name]


@pytest.mark.parametrize("name", names("of_transformers"))
def test_of_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not outcome("of_transformers", name, tmp_path_factory)


@pytest.mark.parametrize("name", names("of_dtensors"))
def test_of_dtensors(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not outcome("of_dtensors", name, tmp_path_factory)


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
