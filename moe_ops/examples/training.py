"""The same training in several ways: what is the same is in `Settings`, what came out is a `Run`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops import explain  # (looking it up registers the backends in a checkout that is not installed)
from moe_ops.examples import text
from moe_ops.examples.families import TINY, Family

WARMUP_STEPS = 2  # the first compiles and makes the optimizer's state, the second finds it made
RISE_STEPS = 10  # of the learning rate
VALIDATION_WINDOWS = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}  # of the parameters
# How far two right curves may be from each other, in units of how far rounding alone takes one: see `tolerance`.
FACTOR = 3.0


@dataclass(frozen=True)
class Way:
    """How a training is run.

    Attributes:
        backend: of torch.compile; None for code that is not compiled.
        nudged: whether every weight is moved by up to a rounding step before the first step.
    """

    backend: str | None = None
    nudged: bool = False


WAYS = {
    "eager": Way(),
    "torch.compile": Way("inductor"),
    "moe_ops": Way("moe_ops"),
    "nudged": Way(nudged=True),
}
EAGER, PLAIN, FUSED, NUDGED = WAYS


@dataclass(frozen=True)
class Settings:
    """What all ways have in common.

    Attributes:
        real: whether the layers have the family's own dimensions.
        steps, batch, accumulate, length: of the optimizer; sequences of a micro batch; micro batches of a step; bytes
            of a sequence.
        dtype: a name of `DTYPES`; "autocast" is bfloat16 autocast over float32 parameters.
        rate: AdamW's learning rate, which the first `RISE_STEPS` rise to.
    """

    family: Family
    device: str
    real: bool
    layers: int
    steps: int
    batch: int
    length: int
    accumulate: int
    dtype: str
    rate: float
    freeze_experts: bool
    checkpointing: bool

    @property
    def tokens(self) -> int:
        """Of one step of the optimizer."""
        return self.batch * self.accumulate * self.length

    def model(self, nudged: bool = False) -> Any:
        """The model before its first step, in training mode."""
        sizes = self.family.real if self.real else {**TINY, **self.family.tiny}
        sizes = {**sizes, "num_hidden_layers": self.layers, "vocab_size": text.SYMBOLS}
        sizes["max_position_embeddings"] = max(self.length, 4096)
        sizes |= {"bos_token_id": None, "eos_token_id": None}  # (a byte is neither)
        model: Any = self.family.model(self.device, DTYPES[self.dtype], sizes).train()
        if nudged:
            _nudge(model, torch.finfo(torch.float32 if self.dtype == "float32" else torch.bfloat16).eps)
        if self.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if self.freeze_experts:
            for experts in experts_of(model):
                experts.requires_grad_(False)
        return model

    def micro_batches(self, bytes_: Tensor, step: int) -> Tensor:
        """Tokens of a step, int64 [accumulate, batch, length]."""
        tokens = text.windows(bytes_, self.accumulate * self.batch, self.length, seed=step)
        return tokens.view(self.accumulate, self.batch, self.length).to(self.device)

    def loss(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Mean cross entropy of the next byte in nats, from tokens [batch, length]."""
        with self._autocast():
            loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def explained(self, tokens: Tensor) -> str:
        """What `moe_ops.explain` says of the forward pass on tokens [batch, length]."""
        with self._autocast():
            return str(explain(self.model(), input_ids=tokens, labels=tokens, use_cache=False))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "autocast")


@dataclass
class Run:
    """What one way came to so far.

    Attributes:
        tokens: of a step.
        losses: of every step, before it.
        seconds: of every step, all of it.
        validation: loss on text that was not trained on, after the last step; computed by eager code for all.
        peak_bytes: most memory in use after the warm-up, without what others held; None where it is not known.
        layers, fused, refused, errors: MoE layers of the model, and what the passes counted.
        graphs, graph_breaks: of Dynamo.
    """

    tokens: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float | None = None
    peak_bytes: int | None = None
    layers: int = 0
    fused: int = 0
    refused: int = 0
    errors: int = 0
    graphs: int = 0
    graph_breaks: int = 0

    @property
    def step_seconds(self) -> float | None:
        """Median after the warm-up."""
        return statistics.median(self.seconds[WARMUP_STEPS:]) if len(self.seconds) > WARMUP_STEPS else None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_seconds is None else self.tokens / self.step_seconds

    @property
    def warmup_seconds(self) -> float | None:
        """What the steps of the warm-up took longer than others: compilation, where there is one."""
        usual = self.step_seconds
        return None if usual is None else max(0.0, sum(self.seconds[:WARMUP_STEPS]) - WARMUP_STEPS * usual)

    @property
    def last_loss(self) -> float | None:
        """Mean of the last tenth of the steps: one batch is harder than another."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :]) if self.losses else None

    def distances(self, other: Run) -> list[float]:
        """How far the curves are from each other at every step that both made."""
        return [abs(mine - its) for mine, its in zip(self.losses, other.losses, strict=False)]


class Training:
    """One way's model, optimizer and `Run`, a step at a time.

    What a step compiles, counts and holds is told apart from what others do between two steps.
    """

    def __init__(self, settings: Settings, way: Way) -> None:
        self.settings, self.run = settings, Run(settings.tokens)
        before = _allocated(settings.device)
        self.model = settings.model(way.nudged)
        self.run.layers = len(experts_of(self.model))
        self._function = self.model if way.backend is None else torch.compile(self.model, backend=way.backend)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=settings.rate, fused=True)
        self._held = _allocated(settings.device) - before

    def step(self, bytes_: Tensor) -> None:
        """The next step, on windows of ``bytes_``, and its numbers."""
        number, run, settings = len(self.run.losses), self.run, self.settings
        batches = settings.micro_batches(bytes_, number)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate * min(1.0, (number + 1) / RISE_STEPS)
        counted, before = _counts(), _allocated(settings.device)
        start = time.perf_counter()
        loss = self._step(batches)
        seconds = time.perf_counter() - start
        for name, count in _counts().items():
            setattr(run, name, getattr(run, name) + count - counted[name])
        if settings.device == "cuda":
            most = self._held + torch.cuda.max_memory_allocated() - before
            if number >= WARMUP_STEPS:
                run.peak_bytes = max(run.peak_bytes or 0, most)
            self._held += _allocated(settings.device) - before
        run.losses.append(loss)
        run.seconds.append(seconds)

    def _step(self, batches: Tensor) -> float:
        losses = []
        for batch in batches:
            loss = self.settings.loss(self._function, batch) / self.settings.accumulate
            loss.backward()
            losses.append(loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        found = torch.stack(losses).sum().item()
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return found


def train(
    settings: Settings,
    ways: dict[str, Way],
    texts: tuple[Tensor, Tensor],
    runs: dict[str, Run],
    tell: Callable[[str, Run], None],
) -> None:
    """Train a model in each of ``ways`` from its first weights on. Steps in turn, so that a busy moment hits all alike.

    Args:
        texts: bytes to train on and to validate on, uint8.
        runs: gets a `Run` for every way, which grows: Ctrl-C leaves what was measured so far.
        tell: called after every step.
    """
    torch.compiler.reset()
    gc.collect()
    trainings = {name: Training(settings, way) for name, way in ways.items()}
    runs.update((name, training.run) for name, training in trainings.items())
    for _ in range(settings.steps):
        for name, training in trainings.items():
            training.step(texts[0])
            tell(name, training.run)
    for training in trainings.values():
        training.run.validation = validate(settings, training.model, texts[1])


def validate(settings: Settings, model: nn.Module, bytes_: Tensor) -> float:
    """Mean loss on windows of ``bytes_`` that lie behind each other."""
    tokens = bytes_[: len(bytes_) // settings.length * settings.length].view(-1, settings.length).long()
    batches = tokens[:VALIDATION_WINDOWS].to(settings.device).split(settings.batch)
    model.eval()
    with torch.no_grad():
        return sum(settings.loss(model, batch).item() * len(batch) for batch in batches) / sum(map(len, batches))


def tolerance(runs: dict[str, Run]) -> float:
    """How far the fused curve may be from the eager one on average, in nats.

    Training amplifies rounding: where two experts of a token nearly tie, the last bit decides. How much it does is
    measured, by two curves that are right and differ from the eager one by rounding alone: that of plain torch.compile,
    and that of eager code from weights that were moved by up to a rounding step. `FACTOR` times the further of them is
    tolerated, and always one token's loss in every step: the first tie may fall to this curve alone. The average,
    because right curves part late, and one of a wrong gradient is elsewhere from the second step on.
    """
    eager = runs[EAGER]
    noise = [average(runs[name], eager) for name in (PLAIN, NUDGED)]
    return _most([FACTOR * value for value in noise] + [eager.losses[0] / eager.tokens])


def average(run: Run, eager: Run) -> float:
    """The mean distance between two curves; NaN where one of them is."""
    return statistics.fmean(run.distances(eager))


def furthest(run: Run, eager: Run) -> float:
    """The largest distance between two curves; NaN where one of them is."""
    return _most(run.distances(eager))


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts of every MoE layer."""
    found = (getattr(module, "experts", None) for module in model.modules())
    return [experts for experts in found if isinstance(experts, nn.Module)]


def _counts() -> dict[str, int]:
    """What Dynamo and the passes have counted so far, by the attributes of `Run`."""
    counters = torch._dynamo.utils.counters
    ours = counters["moe_ops"]
    return {
        "fused": ours["fused"] + ours["staged"],
        "refused": ours["refused"],
        "errors": ours["errors"],
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def _allocated(device: str) -> int:
    """Bytes in use on a GPU, and from here on the most of them."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _nudge(model: nn.Module, step: float) -> None:
    """Move every parameter by up to ``step`` of itself, at random."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand_like(parameter, dtype=torch.float32).mul_(2).sub_(1).mul_(step).add_(1)
            parameter.copy_(noise.mul_(parameter))


def _most(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).max())
