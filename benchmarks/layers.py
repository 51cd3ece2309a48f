"""Time of one MoE layer by shape, number of tokens and peer."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.cases import Case, layer_weights, make_case
from benchmarks.peers import Peer
from benchmarks.results import ResultFile, progress_bar
from benchmarks.shapes import Shape
from benchmarks.timing import method, time_us

METHOD = (
    "one MoE layer; 8 input sets up to 64 tokens, 2 above; {timing}; error: Euclidean, relative to a float64 "
    "computation of at most 16 tokens from the unquantised weights; roof: max(bytes / bandwidth, FLOPs / rate) with "
    "the distinct experts that the inputs are routed to and the ceilings of meta/arch.py. Work: moe = router logits to "
    "output, experts = routing given, gemms = the two expert products alone"
)


def run(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    peers: Sequence[Peer],
    results: ResultFile,
    *,
    dtype: torch.dtype = torch.bfloat16,
    replays: int = 20,
) -> None:
    """Time every (shape, T, peer), one row each; a peer that cannot run is a row with the reason instead of a time."""
    with progress_bar() as progress, torch.no_grad():
        task = progress.add_task("layers", total=len(shapes) * len(tokens) * len(peers))
        for shape in shapes:
            for row in time_shape(shape, tokens, peers, dtype, replays):
                results.add(row)
                progress.update(task, advance=1, description=f"{shape.name} T={row['T']}")
                progress.console.print(describe(row), highlight=False, soft_wrap=True)
            release()


def time_shape(
    shape: Shape, tokens: Sequence[int], peers: Sequence[Peer], dtype: torch.dtype, replays: int
) -> Iterator[dict[str, Any]]:
    """Rows of one shape; its weights are freed when the last one was given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Static shapes: every T compiles on its own.
    with torch._dynamo.config.patch(recompile_limit=256):
        weights = layer_weights(shape, dtype, device)
        for T in tokens:
            case = make_case(weights, T)
            for peer in peers:
                yield time_peer(case, peer, replays)


def release() -> None:
    """Give back what compiled code and dead cases hold."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_peer(case: Case, peer: Peer, replays: int) -> dict[str, Any]:
    """One result row; never raises for what a peer cannot do."""
    row: dict[str, Any] = {"shape": case.shape.name, "T": case.T, "peer": peer.name, "work": peer.work}
    reason = peer.missing() or peer.unfit(case)
    if reason:
        return row | {"us": None, "reason": reason}
    try:
        thunks = peer.prepare(case)
        output = thunks[0]()
        error = case.error(output) if peer.exact else None
        del output
        row |= {"us": time_us(thunks, replays), "error": error, "roof_us": case.roof_us(peer.scheme)}
        row["roof_kind"] = peer.scheme or str(case.weights.down_proj.dtype).removeprefix("torch.")
    except torch.OutOfMemoryError:
        row |= {"us": None, "reason": "out of memory"}
    except Exception as failure:
        row |= {"us": None, "reason": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"}
        traceback.print_exc(limit=-3)
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return row


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    head = f"{row['shape']:>14} T={row['T']:<6} {row['peer']:<18}"
    if row["us"] is None:
        return f"{head} -  {row['reason']}"
    roof = f"  roof {row['roof_us']:.1f} us ({row['roof_us'] / row['us']:.0%})" if row["roof_us"] else ""
    error = f"  error {row['error']:.1e}" if row["error"] is not None else ""
    return f"{head} {row['us']:10.1f} us{roof}{error}"


def layer_method(replays: int) -> str:
    """The method as it is written into the result file."""
    return METHOD.format(timing=method(replays))
