"""What one process can check of several ranks: torch's "fake" group, and the parts that need no other rank.

python -m tests.distributed.alone --size 1 --rank 0 --port 0 --out FILE
"""

from __future__ import annotations

import argparse
import json
import re
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import ep
from moe_ops.groups import Group
from moe_ops.ops import SIGNATURES, call

W, T, E, K, H, I = 2, 16, 8, 2, 64, 32


def tensors() -> tuple[Tensor, ...]:
    """Tokens, routing, and the weights of one of two ranks."""
    weights, ids = moe_ops.fused_topk(torch.randn(T, E), top_k=K)
    return torch.randn(T, H), weights, ids, torch.randn(E // W, 2 * I, H), torch.randn(E // W, H, I)


def with_shared(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, up: Tensor, told: bool
) -> Tensor:
    """A shared expert stands between the halves; what it computes with is made before them."""
    x = (x @ x.T) @ x
    preparing = ep.prepare_start(x, weights, ids, num_experts=E, group=dist.group.WORLD, transport="symm")
    h = F.silu(x @ up)
    prepared = ep.prepare_wait(preparing, [h] if told else ())
    finalizing = ep.finalize_start(ep.experts(prepared, gate_up, down), prepared)
    return ep.finalize_wait(finalizing, h @ up.T)


def products_stay_between_the_halves() -> None:
    """Inductor leaves them where the program has them, if the waits are told of them. Otherwise the first comes too
    late; and a wide one would come too early, as it needs more memory than what it is made of.
    """
    on_cpu = torch.library.Library("moe_ops", "IMPL")
    on_cpu.impl("symm_start", lambda tensors, *, group, gather, apart: tensors[0].new_empty(1), "CPU")

    def received(
        token: Tensor, tensors: list[Tensor], after: list[Tensor], *, group: str, gather: bool
    ) -> list[Tensor]:
        return [tensor.repeat(W if gather else 1, *[1] * (tensor.dim() - 1)) for tensor in tensors]

    on_cpu.impl("symm_wait", received, "CPU")
    ep._transport = lambda *arguments: "symm"

    def order(told: bool, width: int) -> list[str]:
        torch.compiler.reset()
        compiled = torch.compile(with_shared, fullgraph=True)
        with torch.no_grad():
            _, code = run_and_get_code(compiled, *tensors(), torch.randn(H, width), told)
        sites = dict(re.findall(r"(moe_ops_site_\w+) = moe_ops_launchers\['(\w+)'\]", code[-1]))
        calls = re.findall(r"= torch\.ops\.moe_ops\.(symm_\w+)|(mm)\(|= (moe_ops_site_\w+)\(\(", code[-1])
        return [sites.get(name, name) for name in map("".join, calls)]

    halves = ["symm_start", "mm", "symm_wait"]
    for width in (I, 8 * I):
        found = order(True, width)
        assert found == ["mm", "mm", *halves, "fused_experts", *halves], (width, found)
    assert order(False, I)[2:5] != halves


def a_layer_of_one_operator() -> None:
    """Shapes and dtype of its fake, plain and with rows that travel quantised, and its FLOPs."""
    group = dist.group.WORLD.group_name
    x, weights, ids, *projections = tensors()
    names = SIGNATURES["fused_experts"].positional
    for scheme in (None, "int8_channel"):
        given = dict(zip(names, (x.bfloat16(), *projections, weights, ids.int()), strict=False))
        if scheme is not None:
            stored = [moe_ops.quantize_weight(weight, scheme=scheme) for weight in projections]
            given |= {"gate_up_proj": stored[0][0], "down_proj": stored[1][0]}
            given |= {"gate_up_scales": list(stored[0][1:]), "down_scales": list(stored[1][1:])}
        else:
            given |= {"gate_up_proj": projections[0].bfloat16(), "down_proj": projections[1].bfloat16()}
        with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
            positional = torch.utils._pytree.tree_map_only(Tensor, to_fake, [given.get(name) for name in names])
            out = torch.ops.moe_ops.experts_across(*positional, scheme=scheme, group=group, wire_scheme=scheme)
        assert (out.shape, out.dtype) == ((T, H), torch.bfloat16), (scheme, out)
        assert counter.get_total_flops() == 2 * T * K * 3 * H * I, counter.get_total_flops()


def to_fake(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cuda")


def rows_of_nvshmem() -> None:
    """Both ranks' halves of the transport, with an exchange of rows that this process makes as torch's does."""
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    batches = [tensors()[:3] for _ in range(W)]
    batches[0][2][3] = -1  # a token for nobody
    batches[1][2][:5] %= E // W  # for the first rank alone
    groups = [Group("alone", rank, W) for rank in range(W)]
    ep.resolve = lambda op, group: groups[int(group)]
    sorted_rows = [ep._sorted_by_rank(*batch, E, groups[0], None) for batch in batches]
    arrived = exchanged([rows for rows, _, _ in sorted_rows], [splits for _, _, splits in sorted_rows])
    results = []
    for rank, (received, splits) in enumerate(arrived):
        sent, places, _ = sorted_rows[rank]
        prepared = ep.prepare_wait(ep.Preparing(received, sent, places, str(rank), "nvshmem", E, False, splits))
        assert (prepared.topk_ids[int(splits[0].sum()) :] == -1).all()  # nothing is computed for what is of no use
        held = slice(rank * E // W, (rank + 1) * E // W)
        routing = (prepared.topk_weights, prepared.topk_ids)
        results.append(moe_ops.fused_experts(prepared.rows, gate_up[held], down[held], *routing))
    back = exchanged([[result] for result in results], [splits for _, splits in arrived])
    for batch, (_, places, _), ((result,), _) in zip(batches, sorted_rows, back, strict=True):
        got = call("moe_unpermute", result, places, torch.ones(places.shape), None)
        want = moe_ops.fused_experts(batch[0], gate_up, down, *batch[1:])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max())


def exchanged(tensors: list[list[Tensor]], splits: list[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Of every rank: what the others sent it, in rank order, behind it garbage; and how much, and where."""
    found = []
    for rank in range(W):
        outs = [torch.ones_like(tensor) for tensor in tensors[rank]]
        made, end = torch.zeros(2, W, dtype=torch.int64), 0
        for sender in range(W):
            count, first = splits[sender][:, rank].tolist()
            for out, tensor in zip(outs, tensors[sender], strict=True):
                out[end : end + count] = tensor[first : first + count]
            made[:, sender] = torch.tensor([count, end])
            end += count
        found.append((outs, made))
    return found


CHECKS = (products_stay_between_the_halves, a_layer_of_one_operator, rows_of_nvshmem)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("size", "rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.compiler.config.force_disable_caches = True  # they know nothing of changes to lowerings
    dist.init_process_group("fake", rank=0, world_size=W, store=FakeStore())
    for check in CHECKS:
        try:
            check()
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        with options.out.open("a") as out:
            print(json.dumps([check.__name__, wrong]), file=out)


if __name__ == "__main__":
    main()
