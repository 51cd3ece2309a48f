"""Formulas are registered after `torch.utils.flop_counter` is imported, and nothing about that module is changed."""

from __future__ import annotations

import pytest

from tests.ops.forked import forked

BEFORE = """
import importlib, importlib.util, inspect, pickle, sys
import torch, moe_ops
from importlib.machinery import SourceFileLoader
from moe_ops import compat

NAME = "torch.utils.flop_counter"
finders = len(sys.meta_path)
assert NAME not in sys.modules
"""
CASES = {
    "loader": """
import torch.utils.flop_counter as module
assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
assert module.__loader__ is module.__spec__.loader
assert repr(module) == f"<module {NAME!r} from {module.__file__!r}>"
""",
    "the module sees its own loader": """
seen = []
original = SourceFileLoader.exec_module
def look(self, module):
    if module.__name__ == NAME:
        seen.append((type(module.__loader__), type(module.__spec__.loader)))
    return original(self, module)
SourceFileLoader.exec_module = look
import torch.utils.flop_counter
assert seen == [(SourceFileLoader, SourceFileLoader)]
""",
    "source": """
import torch.utils.flop_counter as module
assert "class FlopCounterMode" in inspect.getsource(module)
assert module.__loader__.get_source(NAME) == inspect.getsource(module)
""",
    "reload": """
import torch.utils.flop_counter as module
assert importlib.reload(module) is module
""",
    "pickle": """
import torch.utils.flop_counter as module
assert pickle.loads(pickle.dumps(module.__spec__.loader.path)) == module.__file__
assert pickle.loads(pickle.dumps(module.FlopCounterMode)) is module.FlopCounterMode
""",
    "finder goes": """
import torch.utils.flop_counter
assert len(sys.meta_path) == finders - 1
""",
    "asked for without an import": """
spec = importlib.util.find_spec(NAME)
assert spec.loader.get_filename(NAME) == spec.origin
importlib.util.find_spec(NAME)
from torch.utils.flop_counter import flop_registry
assert torch.ops.moe_ops.fused_moe in flop_registry
twice = importlib.util.module_from_spec(spec)
spec.loader.exec_module(twice)
""",
    "missing module": """
called = []
compat.when_imported("no_such_module_anywhere", lambda: called.append(1))
try:
    import no_such_module_anywhere
except ModuleNotFoundError:
    assert not called
else:
    raise SystemExit("imported")
""",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What was wrong with each case, "" if nothing."""
    return forked(BEFORE, CASES)


@pytest.mark.parametrize("case", CASES)
def test_torchs_module_is_as_torch_made_it(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
