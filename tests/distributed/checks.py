"""All checks by name, in the order in which every rank runs them."""

from __future__ import annotations

from tests.distributed import compiled, equal, gradients, options, refusals
from tests.distributed.ranks import Check

CHECKS: dict[str, Check] = {**equal.CHECKS, **options.CHECKS, **gradients.CHECKS, **compiled.CHECKS, **refusals.CHECKS}
