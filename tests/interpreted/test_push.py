"""The kernels that write into other GPUs' memory, between two processes that share theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreted import delivering, pushing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "said"), [(pushing, "all words arrived"), (delivering, "all sums arrived")], ids=["push", "deliver"]
)
def test_everything_arrives(module: object, said: str, tmp_path: Path) -> None:
    """Call behind call: gathered and sent apart, of changing sizes; sums of pairs, in one part and in several."""
    files = [tmp_path / f"of_rank_{rank}" for rank in range(module.RANKS)]
    for file in files:
        file.write_bytes(bytes(4 * module.WORDS))
    started = []
    try:
        for rank in range(module.RANKS):
            command = [sys.executable, "-m", module.__name__, "--rank", str(rank), "--memory", *map(str, files)]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        texts = [process.communicate(timeout=120)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(said in text for text in texts), "\n".join(text[-2000:] for text in texts)
