"""``ep_implementation="moe_ops"``: tiny models of transformers over two processes, and what one process gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

import compile_passes  # noqa: F401  (registers the backends in a checkout that is not installed)
import moe_ops.integrations.transformers  # noqa: F401  (registers the implementation, too)
from moe_ops.examples.families import FAMILIES, TINY
from tests.distributed.doors import RANKS, Checks

NAMES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
#: What a model is compiled with: "aot_eager" and "moe_ops_eager" capture alike, and no compiler runs for them. One
#: model shows what becomes of the graphs, both ways: those of the others differ in what is no concern of this door, and
#: each of them is captured in one way, as it is the same code of ours around other experts.
BACKENDS = {
    "shared": {"qwen3_moe": "moe_ops", "deepseek_v3": "moe_ops_eager"},
    "different": {"qwen3_moe": "inductor", "gpt_oss": "aot_eager"},
}
#: Some families have no plan for tensor parallelism of their own.
HEAD = {"lm_head": "colwise_gather_output"}
VOCABULARY = 256


def alone(name: str) -> Any:
    """The whole model in this process, the same numbers on every rank."""
    family = next(family for family in FAMILIES if family.name == name)
    settings = {**TINY, **family.tiny, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
    return family.model("cpu", torch.float32, settings).eval()


def tokens(rank: int | None) -> Tensor:
    """The batch of a rank; of None, all of them."""
    made = torch.randint(0, VOCABULARY, (RANKS, 2, 9), generator=torch.Generator().manual_seed(1))
    return made.flatten(0, 1) if rank is None else made[rank]


def loaded(model: Any, folder: Path, rank: int, **config: Any) -> Any:
    """The model as a user loads it, spread over the ranks."""
    place = folder / model.config.model_type
    if rank == 0 and not place.exists():
        model.save_pretrained(place)
    dist.barrier()
    distributed = DistributedConfig(ep_size=RANKS, **{"ep_implementation": "moe_ops", **config})
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, distributed_config=distributed).eval()


def shared(name: str, folder: Path, rank: int, **config: Any) -> Any:
    """Both ranks have one batch, and share the rest of the model, too."""
    plan = {} if name == "qwen3_moe" else {"tp_plan": HEAD}
    return loaded(alone(name), folder, rank, tp_size=RANKS, **plan, **config)


def spread(model: Any, implementation: str = "moe_ops") -> Any:
    """The model with its experts alone over the ranks, each of which has a batch of its own."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)
    return apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, implementation)


def logits_are_those_of_one_process(name: str, way: str, rank: int, folder: Path) -> None:
    """Eager, and compiled in one graph: a graph break, or an error in a pass, fails it."""
    model = shared(name, folder, rank) if way == "shared" else spread(alone(name))
    ids = tokens(0 if way == "shared" else rank)
    found: list[Tensor] = []
    with torch.no_grad():
        wanted = alone(name)(ids).logits
        found.append(model(ids).logits)
        if name in BACKENDS[way]:
            found.append(torch.compile(model, backend=BACKENDS[way][name], fullgraph=True)(ids).logits)
    for got in found:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert counters["moe_ops"]["errors"] == 0 and not counters["graph_break"]


def gradients_are_those_of_one_process(name: str, way: str, rank: int, folder: Path) -> None:
    """Of one training step; with batches of their own, under FSDP, which averages over the ranks."""
    one = alone(name).train()
    if way == "shared":
        model, mine, whole = shared(name, folder, rank), tokens(0), tokens(0)
    else:
        model, mine, whole = loaded(one, folder, rank, fsdp_size=RANKS), tokens(rank), tokens(None)
    one(whole, labels=whole).loss.backward()
    wanted = dict(one.named_parameters())
    model.train()
    captured = torch.compile(model, backend="aot_eager", fullgraph=True)
    for function in (model, captured) if way == "shared" and name == NAMES[0] else (model,):
        model.zero_grad()
        function(mine, labels=mine).loss.backward()
        for key, held in model.named_parameters():
            got, right = _whole(held.grad), wanted[key].grad
            close = torch.allclose(got, right, rtol=0, atol=1e-5 * right.abs().max().item() + 1e-9)
            assert close, f"{key}: {(got - right).abs().max()} of {right.abs().max()}"


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def fsdp_runs_compiled_between_its_hooks(rank: int, folder: Path) -> None:
    """torch leaves the graph at FSDP's hooks; no break is of the experts."""
    one = alone(NAMES[0])
    model = loaded(one, folder, rank, fsdp_size=RANKS)
    with torch.no_grad():
        got = torch.compile(model, backend="moe_ops_eager")(tokens(rank)).logits
        wanted = one(tokens(rank)).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert counters["moe_ops"]["errors"] == 0
    assert all("disable" in reason for reason in counters["graph_break"]), [*counters["graph_break"]]


def transformers_own_exchange_is_not_captured(rank: int, folder: Path) -> None:
    """What this door is for: the sizes that transformers reads on the host."""
    model = spread(alone(NAMES[0]), "all_to_all")
    with torch.no_grad():
        try:
            torch.compile(model, backend="eager", fullgraph=True)(tokens(rank))
        except torch._dynamo.exc.UserError as error:
            assert "data-dependent" in str(error), str(error)
        else:
            raise AssertionError("it was captured: what this door says of it is not true any more")


def fp8_experts_are_those_of_one_process(rank: int, folder: Path) -> None:
    from tests.ops.test_transformers_integration import fp8_inputs, fp8_module

    holder = nn.Module()
    holder.experts = fp8_module()
    arguments = fp8_inputs()
    wanted = fp8_module()(*arguments)
    _spread_experts(holder, [f"{name}_proj{end}" for name in ("gate_up", "down") for end in ("", "_scale_inv")])
    torch.testing.assert_close(holder.experts(*arguments), wanted, rtol=1e-2, atol=1e-2)


def _spread_experts(holder: Any, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
    plan = {f"experts.{name}": "grouped_gemm" for name in names}
    apply_expert_parallelism(holder, mesh["ep"], mesh["tp"], {**plan, "experts": "ep_dispatch_experts"}, "moe_ops")


def experts_that_are_not_served_are_named(rank: int, folder: Path) -> None:
    one = alone(NAMES[0])
    experts = one.model.layers[0].mlp.experts
    experts.has_post_expert_norm = True
    _expect(
        "Qwen3MoeExperts must have no norm after each expert, got has_post_expert_norm=True. Use ep_impl", spread, one
    )
    experts.has_post_expert_norm = False
    experts._apply_gate = lambda values: values.sin().chunk(2, -1)[0]
    _expect("the activation of Qwen3MoeExperts must be one of", spread, one)


def _expect(text: str, function: Any, *arguments: Any) -> None:
    try:
        function(*arguments)
    except ValueError as error:
        assert text in str(error) and 'ep_implementation="auto"' in str(error), str(error)
    else:
        raise AssertionError(f"no error that says {text!r}")


CHECKS: Checks = {}
for _name in NAMES:
    for _way in BACKENDS:
        CHECKS[f"logits_{_way}_{_name}"] = partial(logits_are_those_of_one_process, _name, _way)
        CHECKS[f"gradients_{_way}_{_name}"] = partial(gradients_are_those_of_one_process, _name, _way)
for _check in (
    fsdp_runs_compiled_between_its_hooks,
    transformers_own_exchange_is_not_captured,
    fp8_experts_are_those_of_one_process,
    experts_that_are_not_served_are_named,
):
    CHECKS[_check.__name__] = _check
