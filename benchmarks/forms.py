"""MoE layers of other people's code, as it is: torch.compile with the backend "moe_ops" against plain torch.compile."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import compile_passes  # noqa: F401  (registers the backend)
import moe_ops
from benchmarks import foreign, loops, tutorials
from benchmarks.intervals import fields, median_interval, ratio_interval
from benchmarks.results import ResultFile, progress_bar
from benchmarks.timing import INTERVALS, Run, Thunk, cpu_budget, in_turn, repeated, sequence, wait, warm
from compile_passes.stackable import expert_lists

CPU_SHRINK = 16  # of widths, where there is no GPU
CALLS = 20  # of a sample
METHOD = (
    "one layer, bf16, no gradients, torch.compile in its default mode, ours prepared by moe_ops.compile. call: wall "
    f"clock of {CALLS} calls between two waits for the device, divided by {CALLS}, what a caller sees; graph: the "
    "layer in a captured CUDA graph, by CUDA events, where it can be captured. {rounds} rounds, both ways in turn; "
    + INTERVALS.format(unit="us", division="", of="ours / plain torch.compile")
    + "; error: largest difference from the eager layer, of its largest element"
)


@dataclass(frozen=True)
class Form:
    """A layer at one real size, and the numbers of tokens that it is timed at.

    ``waits``: as it is written it waits for what the data says, and no CUDA graph can hold it. ``staged``: code of its
    own stays between our operators.
    """

    name: str
    make: Callable[..., nn.Module]
    dim: int
    hidden: int
    num_experts: int
    top_k: int
    tokens: tuple[int, ...]
    waits: bool = False
    staged: bool = False

    def build(self, device: str, shrink: int) -> nn.Module:
        """The layer with random weights; with ``shrink``, of a fraction of its width."""
        torch.manual_seed(0)
        with torch.device(device):
            sizes = {"dim": self.dim // shrink, "hidden": self.hidden // shrink}
            module = self.make(**sizes, num_experts=self.num_experts, top_k=self.top_k).to(torch.bfloat16)
        for weight in module.parameters():
            weight.requires_grad_(False).normal_(std=weight.shape[-1] ** -0.5)
        return module.eval()


def _loop(how: str) -> Callable[..., nn.Module]:
    return partial(foreign.ExpertLoop, how)


def _switch(dim: int, hidden: int, num_experts: int, top_k: int) -> nn.Module:
    """transformers' layer of Switch: one expert for each token, of which each takes 64 of a sequence."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = SwitchTransformersConfig(d_model=dim, d_ff=hidden, num_experts=num_experts, expert_capacity=64)
    return SwitchTransformersSparseMLP(config)


def _nllb(dim: int, hidden: int, num_experts: int, top_k: int) -> nn.Module:
    """transformers' layer of NLLB-MoE."""
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

    return NllbMoeSparseMLP(NllbMoeConfig(d_model=dim, num_experts=num_experts, expert_capacity=64), hidden)


def _dbrx(dim: int, hidden: int, num_experts: int, top_k: int) -> nn.Module:
    """transformers' layer of DBRX: the weights of all experts in one matrix each."""
    from transformers import DbrxConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN

    sizes = {"hidden_size": dim, "ffn_hidden_size": hidden, "moe_num_experts": num_experts, "moe_top_k": top_k}
    return DbrxFFN(DbrxConfig(d_model=dim, ffn_config=sizes))


_MIXTRAL = (4096, 14336, 8, 2)
FORMS = {
    form.name: form
    for form in (
        Form("torchtitan", foreign.TorchTitanMoE, 2048, 1408, 64, 6, (16, 4096)),
        Form("torchtitan-loop", partial(foreign.TorchTitanMoE, looped=True), 2048, 1408, 64, 6, (16, 4096), waits=True),
        Form("granite-3", foreign.GraniteMoe, 1536, 512, 40, 8, (16, 4096), waits=True),
        Form("gpt-fast", foreign.GptFast, *_MIXTRAL, (1, 8)),
        Form("gpt-oss", foreign.GptOss, 2880, 2880, 32, 4, (1, 8)),
        Form("llama4", foreign.Llama4, 5120, 8192, 16, 1, (1, 512)),
        Form("llama4-transformers", foreign.Llama4OfTransformers, 5120, 8192, 16, 1, (1, 512)),
        Form("sparse-by-mask", foreign.SparseByMask, 2048, 8192, 8, 2, (1, 1024)),
        Form("deepspeed", foreign.DeepSpeed, *_MIXTRAL, (64, 512)),
        Form("post-norm", foreign.PostNormExperts, 4096, 4096, 64, 8, (1, 64, 4096), staged=True),
        Form("mixtral-4x-loop", _loop("transformers"), *_MIXTRAL, (1, 512), waits=True),
        Form("mistral-loop", _loop("mistral"), *_MIXTRAL, (1, 512), waits=True),
        Form("mask-loop", _loop("mask"), *_MIXTRAL, (1, 512)),
        Form("slots-loop", _loop("slots"), *_MIXTRAL, (1, 512)),
        Form("stack-loop", _loop("stack"), *_MIXTRAL, (1, 512)),
        Form("mixtral-4x-hits", loops.MixtralHits, *_MIXTRAL, (1, 512), waits=True),
        Form("deepseek-infer", loops.MoeInfer, 2048, 1408, 64, 6, (1, 512), waits=True),
        Form("switch-transformers", _switch, 768, 3072, 128, 1, (16, 512), waits=True),
        Form("nllb-transformers", _nllb, 2048, 8192, 128, 2, (16, 512), waits=True),
        Form("dbrx-transformers", _dbrx, 6144, 10752, 16, 4, (1, 512), waits=True),
        Form("litgpt", tutorials.LitGPT, *_MIXTRAL, (1, 512), waits=True),
        Form("halves-loop", tutorials.HalvesInTheLoop, *_MIXTRAL, (1, 512), waits=True),
        Form("split-pairs", tutorials.SplitPairs, 2048, 1408, 64, 6, (16, 4096), waits=True),
        Form("megatron", tutorials.ListedByMask, 2048, 1408, 64, 6, (16, 4096), waits=True),
        Form("repeated-biases", tutorials.RepeatedBiases, 3072, 3072, 32, 4, (8, 1024)),
        Form("gathered-einsum", tutorials.UnflattenedGather, *_MIXTRAL, (1, 8)),
        Form("one-hots-einsum", tutorials.BestTwoOneHots, 2048, 8192, 8, 2, (1, 1024)),
    )
}


def run(names: Sequence[str], results: ResultFile, rounds: int) -> None:
    """Measure every form at each of its numbers of tokens, one row each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with progress_bar() as progress, torch.no_grad():
        task = progress.add_task("forms", total=sum(len(FORMS[name].tokens) for name in names))
        for name in names:
            form = FORMS[name]
            for tokens in form.tokens if device == "cuda" else form.tokens[:1]:
                row = measure(form, tokens, device, rounds)
                results.add(row)
                progress.console.print(describe(row), highlight=False, soft_wrap=True)
                progress.update(task, advance=1)


def measure(form: Form, tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """The row of one form at one number of tokens."""
    gc.collect()
    torch.compiler.reset()
    shrink = 1 if device == "cuda" else CPU_SHRINK
    module, width = form.build(device, shrink), form.dim // shrink
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16)
    wanted = _first(module(x)).float()
    plain = torch.compile(_apart(module))
    plain(x)
    ours = _ours(module)
    counters.clear()
    error = ((_first(ours(x)).float() - wanted).abs().max() / wanted.abs().max()).item()
    if counters["moe_ops"]["staged" if form.staged else "fused"] != 1:
        raise RuntimeError(f"benchmarks: the block of {form.name} is not fused")
    ways = {"ours": partial(ours, x), "plain": partial(plain, x)}
    row = {
        "form": form.name, "E": form.num_experts, "K": form.top_k, "H": width, "I": form.hidden // shrink, "T": tokens,
        "error": error,
    }  # fmt: skip
    row |= _intervals("call", {name: Run(partial(_calls, way), repeats=1) for name, way in ways.items()}, rounds, CALLS)
    if device == "cuda":
        capturable = {name: way for name, way in ways.items() if name == "ours" or not form.waits}
        graphs = {name: repeated(Run(sequence([way]))) for name, way in capturable.items()}
        row |= _intervals("graph", graphs, rounds, 1)
    return row


def _intervals(kind: str, runs: dict[str, Run], rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds of one call for each way, and their ratio."""
    warm(runs)
    times = {name: [us / calls for us in row] for name, row in in_turn(runs, rounds, budget_s=cpu_budget(runs)).items()}
    found: dict[str, Any] = {}
    for name, row in times.items():
        found |= fields(f"{name}_{kind}_us", median_interval(row))
    if len(times) == 2:
        found |= fields(f"{kind}_ratio", ratio_interval(times["ours"], times["plain"]))
    return found


def _calls(way: Thunk) -> None:
    """A sample of calls that begins and ends with a device that has nothing to do."""
    wait()
    for _ in range(CALLS):
        way()
    wait()


def _ours(module: nn.Module) -> Callable[[Tensor], Any]:
    """``module`` with its block fused: in a copy, with parameters of its own where a list of experts is stacked."""
    tensors = [] if expert_lists(module) else [*module.parameters(), *module.buffers()]
    module = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    with warnings.catch_warnings():  # what it prepares
        warnings.simplefilter("ignore")
        return moe_ops.compile(module, fullgraph=True)


def _apart(module: nn.Module) -> nn.Module:
    """``module``, its tensors shared, with code of its own: torch.compile marks code that breaks its graph in a loop,
    and runs it as it is from then on, whoever compiles it.
    """
    other, forward = copy.copy(module), type(module).forward
    code = forward.__code__.replace()
    own = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    other.__class__ = type(type(module).__name__, (type(module),), {"forward": own})
    return other


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    line = f"{row['form']:>20} T={row['T']:<5}"
    for kind in ("call", "graph"):
        ours, plain = (row.get(f"{name}_{kind}_us") for name in ("ours", "plain"))
        if ours is not None:
            line += f"  {kind} {ours:8.1f} us" + ("" if plain is None else f" / {plain:8.1f} = {ours / plain:4.2f}")
    return f"{line}  error {row['error']:.1e}"
