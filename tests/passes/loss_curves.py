"""Twenty steps of training: the loss of tiny models of six families, eagerly and compiled, under six programs.

    python -m tests.passes.loss_curves [--families qwen3_moe ...] [--programs plain ...] [--backend moe_ops] [--steps N]
        [--device cuda]

Each case trains three copies of one model on the same batches with AdamW: in float64 (the exact curve), eagerly, and
compiled. The compiled curve has to be as near to the exact one as eager's own rounding takes it: no further than
``FACTOR`` times the larger distance of transformers' two forms of the experts, and of ``SMALL`` of the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

import moe_ops
from compile_passes.recording import FORWARD_ALONE
from compile_passes.tiny import use_experts
from moe_ops.logs import quiet
from tests.corpus.families import build, tokens

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "llama4")
PROGRAMS = ("plain", "checkpointing", "autocast", "frozen_experts", "accumulation", "lora")
LAYERS, STEPS, RATE = 2, 20, 1e-3
FACTOR, SMALL = 2.0, 1e-6


@dataclass(frozen=True)
class Curve:
    """One case: the losses of its three curves, and how many blocks, graphs and errors of passes there were.

    Attributes:
        noise: the distance of an eager curve from the exact one, of the worse of two.
        distance: the same of the compiled curve.
    """

    family: str
    program: str
    exact: list[float]
    eager: list[float]
    compiled: list[float]
    noise: float
    fused: int
    graphs: int
    errors: int

    @property
    def distance(self) -> float:
        return distance(self.compiled, self.exact)

    @property
    def allowed(self) -> float:
        return FACTOR * max(self.noise, SMALL * max(map(abs, self.exact)))

    @property
    def good(self) -> bool:
        """Whether every block is fused, in one graph, and the curve is eager's."""
        return (self.fused, self.graphs, self.errors) == (LAYERS, 1, 0) and self.distance <= self.allowed


def distance(curve: Sequence[float], exact: Sequence[float]) -> float:
    """The mean difference of two curves: a largest one is of a single step, and chance."""
    return sum(abs(one - other) for one, other in zip(curve, exact, strict=True)) / len(exact)


def model_of(family: str, program: str) -> torch.nn.Module:
    """A tiny model in training mode; router logits are recorded, and their loss is added, where it is checkpointed."""
    model = build(family, torch.float32, "grouped_mm", num_hidden_layers=LAYERS)
    model.train().requires_grad_(True)
    if program == "checkpointing":
        model.config.output_router_logits = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of another name for it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if program == "frozen_experts":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
    return adapted(model) if program == "lora" else model


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with PEFT's adapters of its stacked experts, which alone are trained."""
    import peft

    names = {name for name, weight in model.named_parameters() if ".experts." in name and weight.dim() == 3}
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=[], init_lora_weights=False,
        target_parameters=sorted({".".join(name.rsplit(".", 3)[1:]) for name in names}),
    )  # fmt: skip
    found: torch.nn.Module = peft.get_peft_model(model, config)
    return found


def in_form(model: torch.nn.Module, form: str) -> torch.nn.Module:
    """A copy of ``model`` with the experts' code named ``form``."""
    copied = copy.deepcopy(model)
    use_experts(copied.get_base_model() if hasattr(copied, "get_base_model") else copied, form)
    return copied


def train(model: torch.nn.Module, run: Callable[..., Any], program: str, steps: int) -> list[float]:
    """The loss before each of ``steps`` updates of ``model``, which ``run`` calls."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A gradient that is nothing but rounding is no step, as it is with the usual 1e-8: those send tokens elsewhere.
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=1e-5)
    batches = 2 if program == "accumulation" else 1
    losses = []
    for step in range(steps):
        total = 0.0
        for batch in range(batches):
            ids = tokens(2, 8, seed=batch).to(device)
            with torch.autocast(device.type, torch.bfloat16) if program == "autocast" else contextlib.nullcontext():
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss / batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def curve(family: str, program: str, backend: str = "moe_ops_eager", steps: int = STEPS, device: str = "cpu") -> Curve:
    """Train the three copies."""
    model = model_of(family, program).to(device)
    wide = in_form(model, "eager").double()
    exact = train(wide, wide, "plain" if program == "autocast" else program, steps)
    forms = [in_form(model, form) for form in ("grouped_mm", "batched_mm")]
    eager = [train(form, form, program, steps) for form in forms]
    torch.compiler.reset()
    counters.clear()
    flags = {FORWARD_ALONE: False} if hasattr(torch._dynamo.config, FORWARD_ALONE) else {}
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch._dynamo.config.patch(**flags):
            compiled = train(model, moe_ops.compile(model, backend=backend, fullgraph=True), program, steps)
    passes = counters["moe_ops"]
    return Curve(
        family, program, exact, eager[0], compiled, max(distance(one, exact) for one in eager), passes["fused"],
        counters["stats"]["unique_graphs"], passes["errors"],
    )  # fmt: skip


_ROW = "{:12} {:14} {:>5} {:>6} {:>8} {:>8} {:>8} {:>9} {:>9} {}"


def row(case: Curve) -> str:
    """One line of the table."""
    numbers = (f"{case.exact[0]:.4f}", f"{case.eager[-1]:.4f}", f"{case.compiled[-1]:.4f}")
    far = (f"{case.noise:.1e}", f"{case.distance:.1e}")
    verdict = "" if case.good else "TOO FAR OR NOT FUSED"
    return _ROW.format(case.family, case.program, case.fused, case.graphs, *numbers, *far, verdict).rstrip()


def main() -> int:
    """Print the table; 1 when a case is not good."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--backend", default="moe_ops_eager")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    print(f"{asked.steps} steps of AdamW, {LAYERS} layers, 16 tokens, backend {asked.backend}. Distances are means")
    print("over all steps, from the curve in float64: of the worse of two eager forms, and of the compiled code.")
    print(
        _ROW.format(
            "family", "program", "fused", "graphs", "first", "eager", "compiled", "eager's", "ours", ""
        ).rstrip()
    )
    good = True
    for family in asked.families:
        for program in asked.programs:
            case = curve(family, program, asked.backend, asked.steps, asked.device)
            print(row(case), flush=True)
            good &= case.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
