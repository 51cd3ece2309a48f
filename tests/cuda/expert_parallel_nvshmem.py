"""What several GPUs' processes check of the transport nvshmem, for which torch's symmetric memory must be NVSHMEM's.

TORCH_SYMMMEM=NVSHMEM python -m tests.cuda.expert_parallel_nvshmem --size 2 --rank 0 --port 29500 --out FILE
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.cuda.expert_parallel import Layer, batch_of, equal_to_one, replays, run, seen


def no_gradient() -> None:
    """Refused before anything is sent."""
    x, weights, ids = seen(batch_of(3, 0), "nvshmem")
    try:
        Layer().spread((x.requires_grad_(), weights, ids), "nvshmem")
    except ValueError as error:
        assert "transport must be one with gradients, got 'nvshmem'" in str(error), error
    else:
        raise AssertionError("no error")


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and check, in the order in which all ranks run them."""
    for scheme in (None, "fp8_block128"):
        yield f"equal to one GPU [{scheme or 'bf16'}]", partial(equal_to_one, "nvshmem", scheme)
    for compiled in (False, True):
        yield f"replays [{'compiled' if compiled else 'eager'}]", partial(replays, "nvshmem", compiled)
    yield "no gradient", no_gradient


if __name__ == "__main__":
    run(checks())
