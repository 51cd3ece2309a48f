"""The kernel that writes into other GPUs' memory, between two processes that share theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.interpreted.pushing import RANKS, WORDS

ROOT = Path(__file__).parents[2]


def test_every_word_arrives(tmp_path: Path) -> None:
    """Gathered and sent apart, one to four tensors of changing sizes, one call behind the other."""
    files = [tmp_path / f"of_rank_{rank}" for rank in range(RANKS)]
    for file in files:
        file.write_bytes(bytes(4 * WORDS))
    started = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-m", "tests.interpreted.pushing", "--rank", str(rank), "--memory"]
            started.append(
                subprocess.Popen(
                    [*command, *map(str, files)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        said = [process.communicate(timeout=120)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert all("all words arrived" in text for text in said), "\n".join(text[-2000:] for text in said)
