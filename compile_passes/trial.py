"""Whether a static form of a block computes what the block does: both are run, on a copy, and all they do is compared.

The copy has random weights, so that the answer is one about the code. Batches: many tokens, one token (all other
experts are empty), tokens of one direction (all go to the same experts). Compared are outputs, gradients of the inputs
and of the weights, buffers, and what else the code leaves behind (`effects`), in the dtype of the weights and in
float64, or in float32 where the code does not run in that. Random numbers start from one seed in both, and both have to
draw as many: a form that draws for other experts, or in another order, gives other results.

Where memory has no room for copies of full width, they are narrower, and the block itself is run besides them, with
gradients of the inputs alone; where that is not possible, the trial is made on the CPU.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compile_passes.effects import Effects, Kept, Written
from compile_passes.loops import ALIKE, FORMS, STATIC
from compile_passes.narrow import FULL, Narrowing, narrow_copy, narrowing
from compile_passes.source import NotStatic
from moe_ops.quantized import QuantizedWeight

# (batch, tokens) and whether all tokens have one direction; at most 64 tokens.
BATCHES: dict[str, tuple[tuple[int, int], bool]] = {
    "many tokens": ((4, 16), False),
    "one token": ((1, 1), False),
    "three tokens": ((1, 3), False),
    "tokens of one direction": ((2, 8), True),
}
# Sums of results may be taken in another order.
ULPS = 64
_NUMBERS = itertools.count(1)
_WIDTHS = ("hidden_size", "d_model", "dim", "n_embd", "hidden_dim", "embed_dim", "input_size", "model_dim")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Path of a module -> name of a method -> what takes its place.
Methods = Mapping[str, Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True)
class _Result:
    """What a run came to, under a name for each tensor, and what it left behind."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]  # and other tensors that it left
    state: dict[str, Any]
    random: list[Any]  # the generators after it
    drew: bool


#: Why nothing is proved of a block that has no numbers yet.
ON_META = "its weights are on the meta device"


class NotAlone(NotStatic):
    """The block does not run on hidden states alone: one around it may."""


class _DoesNotRun(NotStatic):
    """The block itself raises."""


class Trial:
    """Runs of a copy of ``block``.

    Args:
        block: a module whose ``forward`` takes hidden states alone.
        flat: run it on [tokens, hidden] alone; False: on [batch, length, hidden], where it runs on that.

    Raises:
        NotStatic: there can be no trial.
    """

    def __init__(self, block: nn.Module, *, flat: bool = False) -> None:
        _check_classes(block)
        self.block, self.dtype, self.effects = block, _widest_used(block), Effects(block)
        problem = "its widths have no factor in common by which it could be narrowed"
        for self.device, self.narrowing in _places(block):
            try:
                self._copy()
                self.width, self.flat = self._inputs((True,) if flat else (False, True))
            except NotStatic as error:
                if self.narrowing is FULL:
                    raise
                problem = f"of a narrower one, {error}"
                continue
            return
        raise NotStatic(
            f"copies of one layer take {_needed(block) / 1e9:.0f} GB, more than half of the memory that is free, and "
            f"{problem}"
        )

    def _copy(self) -> None:
        try:
            with apart():
                self.copy = narrow_copy(self.block, self.narrowing, self.device)
        except Exception as error:
            raise NotStatic(f"it cannot be copied: {_said(error)}") from error
        self._renew()
        if self.narrowing is not FULL:
            self.drawn = [weight.detach().clone() for weight in self.copy.parameters()]

    def _renew(self) -> None:
        """Random weights, no hooks: what users hang on a module must not hear of the trial."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.copy.parameters():
                if weight.is_floating_point() and weight.numel():
                    scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
                    drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32) * scale
                    weight.copy_(drawn.to(weight.device))
                weight.grad = None
        for weight in self.copy.parameters():
            weight.requires_grad_(weight.is_floating_point())
        _drop_hooks(self.copy)

    def _inputs(self, ranks: Sequence[bool]) -> tuple[int, bool]:
        """(width of the hidden states, whether they are [tokens, hidden]) with which the block runs."""
        problem: Exception | None = None
        for width in _widths(self.copy):
            for flat in ranks:
                try:
                    result = self._run(self.copy, {}, self._tokens("three tokens", width, flat, self.dtype))
                except Exception as error:
                    problem = problem or error
                    continue
                if result.outputs:
                    return width, flat
        why = "no size of hidden states is known" if problem is None else _said(problem)
        raise NotAlone(f"it does not run on hidden states alone: {why}")

    def _tokens(self, batch: str, width: int, flat: bool, dtype: torch.dtype) -> Tensor:
        (rows, length), aligned = BATCHES[batch]
        generator = torch.Generator().manual_seed(len(batch))
        x = torch.randn(rows, length, width, generator=generator, dtype=torch.float64)
        if aligned:
            x = x[:1, :1] * torch.linspace(0.5, 2, rows * length, dtype=torch.float64).view(rows, length, 1)
        return (x.flatten(0, 1) if flat else x).to(self.device, dtype)

    def tokens(self, batch: str) -> Tensor:
        """Hidden states of a batch in the dtype of the weights."""
        return self._tokens(batch, self.width, self.flat, self.dtype)

    # ---- comparing

    def compare(self, methods: Methods, training: bool) -> bool:
        """Raise NotStatic when ``methods`` in the place of the block's own do anything else than these; returns whether
        they draw random numbers.
        """
        self.copy.train(training)
        self._compare_exactly(methods)
        drew = [self._compare(own, width, self.dtype, methods) for own, width in self._compared(training)]
        return any(drew)

    def _compare_exactly(self, methods: Methods) -> None:
        """In the dtype of most bits that the code runs in: it may name one of its own, for a router or for sums, beside
        which another does not do.
        """
        problem: _DoesNotRun | None = None
        for dtype in (torch.float64, torch.float32):
            if dtype is self.dtype:
                return
            try:
                self._compare(copy.deepcopy(self.copy).to(dtype), self.width, dtype, methods)
                return
            except _DoesNotRun as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _compare(self, own: nn.Module, width: int, dtype: torch.dtype, methods: Methods) -> bool:
        """One block with and without ``methods``; whether it draws random numbers."""
        drew = False
        for batch in BATCHES:
            x = self._tokens(batch, width, self.flat, dtype)
            try:
                expected = self._run(own, {}, x)
            except Exception as error:
                raise _DoesNotRun(f"it does not run in {_name(dtype)} on {batch}: {_said(error)}") from error
            if not all(value.isfinite().all() for value in expected.outputs.values()):
                raise NotStatic(f"it has outputs that are not finite on {batch}")
            try:
                found = self._run(own, methods, x)
            except Exception as error:
                raise NotStatic(f"the static form raises on {batch}: {_said(error)}") from error
            nudged = self._run(own, {}, x * (1 + 4 * torch.finfo(dtype).eps))
            problem = _difference(found, expected, nudged, dtype)
            if problem is not None:
                raise NotStatic(f"the static form gives other {problem} on {batch} in {_name(dtype)}")
            drew |= expected.drew
        return drew

    def _compared(self, training: bool) -> Iterator[tuple[nn.Module, int]]:
        """Blocks to run in their own dtype with and without the static form, one after the other: block, width."""
        yield self.copy, self.width
        if self.narrowing is FULL:
            return
        # The weights of the block are those of the model, which nothing may write to. To convert them is no write.
        for weight, before in zip(self.copy.parameters(), self.drawn, strict=True):
            if not torch.equal(weight, before.to(weight.dtype)):
                raise NotStatic("its forward writes to its weights")
        yield _view(self.block).train(training), self.narrowing.widened(self.width)

    def _run(self, block: nn.Module, methods: Methods, x: Tensor) -> _Result:
        """Run ``block`` forward and backward with ``methods`` bound in it, and leave it as it was."""
        kept = Kept(self.effects, block)
        buffers = {name: value.clone() for name, value in block.named_buffers()}
        x = x.clone().requires_grad_()
        try:
            with apart(), torch.enable_grad(), bound(block, methods):
                torch.manual_seed(0)
                random.seed(0)
                before = _random_state(self.device)
                out = block.forward(x.clone())
                after = _random_state(self.device)
                leaves = tree_leaves(out)
                outputs = {f"output {place}": value for place, value in enumerate(leaves)
                           if isinstance(value, Tensor)}  # fmt: skip
                gradients = _gradients(block, x, list(outputs.values()))
            left = kept.left()
            state = {name: value for name, value in left.items() if not isinstance(value, Written)}
            state["what it returns beside tensors"] = [value for value in leaves if not isinstance(value, Tensor)]
            tensors = {name: value.numbers() for name, value in left.items() if isinstance(value, Written)}
            tensors |= {name: value.clone() for name, value in block.named_buffers()}
            outputs = {name: value.detach() for name, value in outputs.items()}
            return _Result(outputs, gradients, tensors, state, after, not all(map(_same, before, after)))
        finally:
            kept.put_back()
            with torch.no_grad():
                for name, value in block.named_buffers():
                    if name in buffers and value.shape == buffers[name].shape:
                        value.copy_(buffers[name])


@contextmanager
def bound(block: nn.Module, methods: Methods) -> Iterator[None]:
    """``methods`` in the place of those of the modules of ``block``."""
    owners = [(block.get_submodule(path), own) for path, own in methods.items()]
    for module, own in owners:
        bind_methods(module, own)
    try:
        yield
    finally:
        unbind(module for module, _ in owners)


def bind_methods(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Put ``functions`` in the place of the methods of one module."""
    for name, function in functions.items():
        vars(module)[name] = MethodType(function, module)
        FORMS.add(function)
    vars(module)[STATIC] = tuple(functions)
    rely_anew(module)


def rely_anew(module: nn.Module) -> None:
    """Nothing is known of a change of the experts of a module with static forms: what is captured from here on is asked
    whether they are alike.
    """
    vars(module)[ALIKE] = next(_NUMBERS)


def unbind(modules: Iterable[nn.Module]) -> None:
    """Undo `bind_methods` for modules; a wrapper that somebody has put around a method since stays."""
    for module in modules:
        vars(module).pop(ALIKE, None)
        for name in vars(module).pop(STATIC, ()):
            method = getattr(vars(module).get(name), "__func__", None)
            of_class = getattr(type(module), getattr(method, "__name__", name), None)
            if method is not None and (method in FORMS or method is of_class):  # the latter once it was unpickled
                del vars(module)[name]


@contextmanager
def apart() -> Iterator[None]:
    """Random states are inside as they were, and outside as if there had been no inside."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


def _random_state(device: torch.device) -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _gradients(block: nn.Module, x: Tensor, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of one number made of all outputs: of ``x``, and of every weight."""
    wanted = [value for value in outputs if value.requires_grad and value.is_floating_point()]
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for value in wanted:
        weights = torch.linspace(-1, 1.5, max(value.numel(), 1), dtype=torch.float64, device=value.device)
        total = total + (value.double() * weights[: value.numel()].view(value.shape)).sum()
    leaves = {"x": x, **{name: weight for name, weight in block.named_parameters() if weight.requires_grad}}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if wanted else [None] * len(leaves)
    # An expert without tokens has a gradient of zeros in one form, and none in the other, as users are told. So have
    # all of them where one token exceeds the capacity.
    return {name: torch.zeros_like(leaves[name]) if grad is None else grad
            for name, grad in zip(leaves, found, strict=True)}  # fmt: skip


def _difference(found: _Result, expected: _Result, nudged: _Result, dtype: torch.dtype) -> str | None:
    """What differs: in kind, or by more than rounding; None when nothing does."""
    if not all(map(_same, found.random, expected.random)):
        return "random numbers"
    if found.state != expected.state:
        changed = [name for name in expected.state if found.state.get(name) != expected.state[name]]
        return f"values of {(changed or ['?'])[0].strip('.')}"
    for kind in ("outputs", "gradients", "buffers"):
        one, other, moved = getattr(found, kind), getattr(expected, kind), getattr(nudged, kind)
        if list(one) != list(other):
            changed = one.keys() ^ other.keys()
            return f"values of {min(changed)}" if kind == "buffers" and changed else kind
        for name, value in other.items():
            if not _close(one[name], value, moved.get(name, value), dtype):
                return f"values of {name}" if kind == "buffers" else f"{kind} ({name})"
    return None


def _close(one: Tensor, other: Tensor, nudged: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the order of sums, or nearer than the result of inputs that differ in the last bits is."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not other.isfinite().all() or not other.numel():
        return torch.equal(one.isfinite(), other.isfinite()) and other.numel() == 0
    scale = other.abs().max().double().item()
    # What is computed in fewer bits than ``dtype`` inside shows in how much a change of the last bits changes.
    bits = max(torch.finfo(dtype).eps, torch.finfo(other.dtype).eps)
    moved = (nudged.double() - other.double()).abs().max().item() if nudged.shape == other.shape else 0.0
    coarse = moved > 1e3 * bits * scale and bits < torch.finfo(torch.float32).eps
    bound = 4 * torch.finfo(torch.float32).eps * scale if coarse else ULPS * bits * scale
    return (one.double() - other.double()).abs().max().item() <= bound


# ---- inputs


def takes_hidden_states_alone(module: nn.Module) -> bool:
    """Whether ``forward`` needs one argument, and no more."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [part for part in _arguments(module) if part.default is inspect.Parameter.empty and part.kind not in kinds]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY


def takes_more(module: nn.Module) -> bool:
    """Whether ``forward`` can be given more than the argument that it needs."""
    return len(_arguments(module)) > 1


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    """Of ``forward``, without the module; none where its signature is not known."""
    forward: Any = getattr(type(module), "forward", None)  # TorchScript has none
    try:
        return list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def _widths(block: nn.Module) -> list[int]:
    """Sizes that hidden states may have, the likeliest first."""
    found = [getattr(owner, name, None) for owner in (block, getattr(block, "config", None)) for name in _WIDTHS]
    found += [module.in_features for module in block.modules() if isinstance(module, nn.Linear)]
    found += [size for weight in block.parameters() for size in reversed(weight.shape)]
    return list(dict.fromkeys(size for size in found if type(size) is int and size > 1))[:6]


def _places(block: nn.Module) -> Iterator[tuple[torch.device, Narrowing]]:
    """Where and on what copy the trial can be made, the best first."""
    held = next((weight.device for weight in block.parameters()), torch.device("cpu"))
    if held.type == "meta":
        raise NotStatic(ON_META)
    if 2 * _needed(block) <= _free(held):
        yield held, FULL
        return
    to = narrowing(block)
    if to is not None:
        yield held, to
    cpu = torch.device("cpu")
    if held != cpu and 2 * _needed(block) <= _free(cpu):
        yield cpu, FULL


def _free(device: torch.device) -> float:
    """Bytes of memory that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def _needed(block: nn.Module) -> int:
    """Bytes of a copy, of one in float64 and of its gradients."""
    return sum(weight.numel() for weight in block.parameters()) * 24


def _widest_used(block: nn.Module) -> torch.dtype:
    """The dtype of most of the weights."""
    sizes: dict[torch.dtype, int] = {}
    for weight in block.parameters():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    kinds = [dtype for dtype in sizes if dtype.is_floating_point]
    if not kinds:
        raise NotStatic("it has no floating point weights")
    return max(kinds, key=lambda dtype: sizes[dtype])


def _check_classes(block: nn.Module) -> None:
    """Raise NotStatic where weights are of a class of their own, other than ours, which computes as its numbers do."""
    for weight in block.parameters():
        if type(weight.data) not in (Tensor, QuantizedWeight):
            raise NotStatic(f"it has weights of the class {type(weight.data).__name__}")


def _view(block: nn.Module) -> nn.Module:
    """A copy of the modules on the weights of the block, frozen, without hooks; buffers are copied."""
    memo: dict[int, Any] = {id(weight): nn.Parameter(weight.detach(), False) for weight in block.parameters()}
    memo.update({id(value): value.detach().clone() for value in block.buffers()})
    with apart():
        view = copy.deepcopy(block, memo)
    _drop_hooks(view)
    return view


def _drop_hooks(block: nn.Module) -> None:
    for module in block.modules():
        for name in HOOKS:
            setattr(module, name, OrderedDict())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"
