"""The kernels that write into other GPUs' memory, between two processes that share theirs."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.interpreted import delivering, pushing

#: Forked from this process, which has the kernels: importing them again takes each rank longer than its calls.
START = multiprocessing.get_context("fork")


def run(module: ModuleType, words: list[str], log: Path) -> None:
    """``python -m module words`` in a process of its own, which writes to ``log``."""
    with log.open("w") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
    sys.argv[1:] = words
    module.main()


@pytest.mark.parametrize(
    ("module", "said"), [(pushing, "all words arrived"), (delivering, "all sums arrived")], ids=["push", "deliver"]
)
def test_everything_arrives(module: ModuleType, said: str, tmp_path: Path) -> None:
    """Call behind call: gathered and sent apart, of changing sizes; sums of pairs, in one part and in several."""
    files = [tmp_path / f"of_rank_{rank}" for rank in range(module.RANKS)]
    for file in files:
        file.write_bytes(bytes(4 * module.WORDS))
    started = []
    try:
        for rank, file in enumerate(files):
            words = ["--rank", str(rank), "--memory", *map(str, files)]
            started.append(START.Process(target=run, args=(module, words, file.with_suffix(".log"))))
            started[-1].start()
        for process in started:
            process.join(timeout=120)
    finally:
        for process in started:
            process.kill()
            process.join()
    texts = [file.with_suffix(".log").read_text() for file in files]
    assert all(said in text for text in texts), "\n".join(text[-2000:] for text in texts)
