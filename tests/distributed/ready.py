"""What the processes of `tests.distributed.processes` import before they are what they are."""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import contextlib
import gc
import logging

import torch._inductor.compile_fx
import torch.testing._internal.distributed.fake_pg  # noqa: F401

import compile_passes  # noqa: F401
from tests.lean import leave_out

leave_out()
with contextlib.suppress(ImportError):
    import transformers.integrations.moe  # noqa: F401
logging.disable(logging.WARNING)  # of torchao, what it has no GPU for
with contextlib.suppress(ImportError):
    import moe_ops.examples.families
    import moe_ops.integrations.transformers  # noqa: F401
logging.disable(logging.NOTSET)
gc.set_threshold(50_000, 20, 50)
gc.freeze()  # what there is stays, and every search of garbage would go through it, in pages that forked ones share
