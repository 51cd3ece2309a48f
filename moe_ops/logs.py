"""The log of the passes, and how to keep it quiet for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Inside, the passes log nothing below ``level``: what they refuse is said in another way there."""
    logger = logging.getLogger("compile_passes")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
