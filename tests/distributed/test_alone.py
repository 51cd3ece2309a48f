"""What one process can check of several ranks: every check of `tests.distributed.alone` is one test."""

from __future__ import annotations

import pytest

from tests.distributed.alone import CHECKS
from tests.distributed.processes import outcome


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_alone(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = outcome(tmp_path_factory, 1, name, "tests.distributed.alone")
    assert not wrong, wrong
