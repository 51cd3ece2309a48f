"""What the processes of `tests.distributed.processes` import before they are what they are."""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import contextlib

import torch._inductor.compile_fx
import torch.testing._internal.distributed.fake_pg  # noqa: F401

import compile_passes  # noqa: F401
from tests.lean import leave_out

leave_out()
with contextlib.suppress(ImportError):
    import transformers.integrations.moe  # noqa: F401
