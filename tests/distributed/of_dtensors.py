"""Expert weights as DTensors: sharded by expert over the group they are this rank's block, otherwise a named error."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import moe_ops
from tests.distributed.doors import RANKS, Checks

T, E, K, H, I = 6, 4, 2, 16, 8
NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


def layer() -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Tokens of all ranks, weights, ids, and the experts' tensors; the same on every rank."""
    made = torch.Generator().manual_seed(0)
    shapes = ((E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H))
    tensors = {name: torch.randn(shape, generator=made) / 4 for name, shape in zip(NAMES, shapes, strict=True)}
    ids = torch.rand(RANKS * T, E, generator=made).topk(K).indices
    return torch.randn(RANKS * T, H, generator=made), torch.rand(RANKS * T, K, generator=made), ids, tensors


def distributed(tensors: dict[str, Tensor], mesh: Any, *placements: Any) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(distribute_tensor(tensor, mesh, placements or [Shard(0)], src_data_rank=None))
        for name, tensor in tensors.items()
    }


def results_and_gradients_are_those_of_one_process(form: str, rank: int, folder: Path) -> None:
    x, weights, ids, tensors = layer()
    whole = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    wanted = moe_ops.fused_experts(x, topk_weights=weights, topk_ids=ids, **whole)
    wanted.sum().backward()
    mesh = init_device_mesh("cpu", (RANKS,))
    held = distributed(tensors, mesh)
    mine = slice(rank * T, (rank + 1) * T)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if form != "parts":
            group = mesh if form == "mesh" else mesh.get_group()
            return moe_ops.fused_experts(x, topk_weights=weights, topk_ids=ids, group=group, **held)
        prepared = moe_ops.ep.prepare(x, weights, ids, num_experts=E, group=mesh)
        return moe_ops.ep.finalize(moe_ops.ep.experts(prepared, **held), prepared)

    function = torch.compile(run, backend="aot_eager", fullgraph=True) if form == "compiled" else run
    got = function(x[mine], weights[mine], ids[mine])
    got.sum().backward()
    torch.testing.assert_close(got, wanted[mine], rtol=0, atol=1e-5)
    for name, parameter in held.items():
        grad: Any = parameter.grad
        assert grad.placements == (Shard(0),) and grad.device_mesh == mesh, name
        torch.testing.assert_close(grad.full_tensor(), whole[name].grad, rtol=0, atol=1e-5)


def _square() -> Any:
    return init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("fsdp", "ep"))


#: name -> (the mesh, the placements, the group, what the error says)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], Any, tuple[str, ...]]] = {
    "replicate": (None, (Replicate(),), None, ("got R", "[Shard(0)]")),
    "shard_1": (None, (Shard(1),), None, ("got S(1)", "[Shard(0)]")),
    "two_dimensions": (_square, (Replicate(), Shard(0)), None, ("a mesh of 2 dimensions", "mesh['ep']")),
    "no_group": (None, (Shard(0),), "none", ("got a DTensor", "Pass group=weight.device_mesh.get_group()")),
    "other_order": (
        lambda: DeviceMesh("cpu", list(range(RANKS))[::-1]), (Shard(0),), None,
        ("on rank", "Make the mesh of the group's ranks in their order"),
    ),
    "part_of_the_group": (
        lambda: [DeviceMesh("cpu", [rank]) for rank in range(RANKS)][dist.get_rank()], (Shard(0),), None,
        ("one over other ranks", "Pass group=weight.device_mesh.get_group()"),
    ),
}  # fmt: skip


def others_are_refused(name: str, part: str, rank: int, folder: Path) -> None:
    mesh, placements, group, texts = REFUSED[name]
    x, weights, ids, tensors = layer()
    held = distributed(tensors, init_device_mesh("cpu", (RANKS,)) if mesh is None else mesh(), *placements)
    group = dist.group.WORLD if group is None else None
    if part == "ep.experts":
        prepared = moe_ops.ep.prepare(x, weights, ids, num_experts=E, group=dist.group.WORLD)
        call = partial(moe_ops.ep.experts, prepared, **held)
    else:
        call = partial(moe_ops.fused_experts, x, topk_weights=weights, topk_ids=ids, group=group, **held)
    _expect(call, f"{part}: gate_up_proj must be", *texts)


def what_one_rank_refuses_all_do(rank: int, folder: Path) -> None:
    x, weights, ids, tensors = layer()
    held = distributed(tensors, init_device_mesh("cpu", (RANKS,)), Shard(1) if rank else Shard(0))
    text = "gate_up_proj must be" if rank else "rank 1 of group"
    call = partial(moe_ops.fused_experts, x, topk_weights=weights, topk_ids=ids, group=dist.group.WORLD, **held)
    _expect(call, text, "[Shard(0)]")


def an_uneven_split_is_refused(rank: int, folder: Path) -> None:
    x, weights, ids, tensors = layer()
    odd = {name: tensor[:-1] for name, tensor in tensors.items()}
    held = distributed(odd, init_device_mesh("cpu", (RANKS,)))
    call = partial(moe_ops.fused_experts, x, topk_weights=weights, topk_ids=ids, group=dist.group.WORLD, **held)
    _expect(call, "gate_up_proj must be evenly split", "3 experts for 2 ranks")


def a_whole_block_has_no_group(rank: int, folder: Path) -> None:
    x, _, _, tensors = layer()
    held = distributed(tensors, init_device_mesh("cpu", (RANKS,)))
    call = partial(moe_ops.fused_moe, x, torch.randn(RANKS * T, E), **held, top_k=K)
    _expect(call, "fused_moe: gate_up_proj must be", "Pass group=weight.device_mesh.get_group() to fused_experts")


def _expect(call: Any, *texts: str) -> None:
    try:
        call()
    except ValueError as error:
        assert all(text in str(error) for text in texts), str(error)
    else:
        raise AssertionError(f"no error that says {texts}")


CHECKS: Checks = {
    f"equal_{form}": partial(results_and_gradients_are_those_of_one_process, form)
    for form in ("mesh", "group", "parts", "compiled")
}
for _name in REFUSED:
    CHECKS[f"refused_{_name}"] = partial(others_are_refused, _name, "fused_experts")
CHECKS["refused_by_ep_experts"] = partial(others_are_refused, "replicate", "ep.experts")
for _check in (what_one_rank_refuses_all_do, an_uneven_split_is_refused, a_whole_block_has_no_group):
    CHECKS[_check.__name__] = _check
