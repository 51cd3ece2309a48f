"""Expert-load statistics: what `with moe_ops.load_statistics(model)` counts, in words, numbers and a picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meta.checks import check_module
from moe_ops import counters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_BLOCK = (
    "load statistics: no fused MoE block of the model has run since counting began. Compile the model with "
    'backend="moe_ops"; moe_ops.explain(model, *inputs) says which blocks are fused, and why others are not. Blocks '
    "with low-rank factors are not counted."
)
_MOST_LABELS = 64  # names of layers beside a heat map


@contextmanager
def load_statistics(model: nn.Module) -> Iterator[LoadStatistics]:
    """Count the tokens that every expert of every layer gets, for as long as the block is open.

    Fused blocks count on their device, in kernels that run anyway: nothing is compiled or captured again, nothing waits
    for the device until a number is asked for, and CUDA graphs captured before count too. Works for models compiled in
    any of the ways of this package, whole or layer by layer, and for the operators called in eager code. Blocks nest,
    each with numbers of its own, of one model or several. Entering and leaving are in the order of each device's
    current stream.

    A token counts once for each of its K experts. What counts is what an expert computed: ids of -1, pairs of experts
    held elsewhere (`expert_map`; expert e is then the e-th held here) and pairs past a capacity do not. Backward passes
    do not count; activation checkpointing runs forward passes again, which do. Layers are told apart by the addresses
    of their weights: tied layers are one, under the first name. Of the operators that are called one by one
    :func:`moe_ops.grouped_mm_glu` and :func:`moe_ops.batched_mm_glu` count, whose weights tell the layer.

    Args:
        model: the module that holds the experts' weights, or what `torch.compile` or `moe_ops.compile` made of it.

    Returns:
        A context manager that gives a :class:`LoadStatistics`, which stays readable after the block, with the numbers
        of its end.

    Raises:
        ValueError: no module, or entered while a CUDA graph is being captured.

    Source: the fraction of tokens dispatched to each expert, Switch Transformers (arXiv 2101.03961, section 2.2).

    Example:
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.randn(4, 64, 16), requires_grad=False)
        ...         self.down = torch.nn.Parameter(torch.randn(4, 16, 32), requires_grad=False)
        ...
        ...     def forward(self, x, weights, ids):
        ...         return moe_ops.fused_experts(x, self.up, self.down, weights, ids)
        >>> model = torch.nn.ModuleDict({"experts": Experts()})
        >>> ids = torch.tensor([[0, 1], [0, 3], [0, -1]])
        >>> with moe_ops.load_statistics(model) as load:
        ...     out = model["experts"](torch.randn(3, 16), torch.rand(3, 2), ids)
        >>> load.counts["experts"].tolist(), load.imbalance
        ([3, 1, 0, 1], {'experts': 2.4})
    """
    check_module("load_statistics", model, "Pass the module that holds the experts' weights.")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "load_statistics: the block must begin outside of a CUDA graph's capture, got inside. Graphs captured "
            "before it count, too."
        )
    load = LoadStatistics(model)
    counters.turn(+1)
    try:
        yield load
    finally:
        counters.turn(-1)
        load._end()


class _Owner(NamedTuple):
    """Memory of a module's tensor, addresses start .. end - 1; not the tensor, which may go while a block is open.

    Attributes:
        order: place among the tensors of the model.
        step: bytes from one entry of the first dimension to the next.
    """

    start: int
    end: int
    device: torch.device
    order: int
    path: str
    name: str
    sizes: tuple[int, ...]
    step: int


class _Layer(NamedTuple):
    """Weights that have a row: those of `owner`, or nobody's.

    Attributes:
        place: which of the layers that the owner's tensor holds, None where it holds one.
        ran: whether it was called since counting began; a CUDA graph's replay is no call.
    """

    owner: _Owner | None
    place: int | None
    experts: int
    counts: Tensor
    ran: bool = False


class LoadStatistics:
    """What :func:`load_statistics` counts.

    Layers are in the order of the model, by the path of the module that holds the weights of their second projection;
    `path.name` where a module holds several such tensors, `path.name[i]` where one tensor holds several layers.
    "(weights of no module, E=8)" stands for all layers of 8 experts whose weights are no tensor of the model's: made of
    them in the graph, as autocast does, or another model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        self._first = _owners(model)
        self._name = type(_original(model)).__name__
        self._layers: list[_Layer] = []
        self._lost: list[_Layer] = []
        self.reset()

    def reset(self) -> None:
        """Count from here on.

        Raises:
            ValueError: the block is over.
        """
        if self._model is None:
            raise ValueError("load.reset: must be called inside the block, got after its end. Open another one.")
        self._since = counters.mark()
        self._before = {(rows.device, rows.experts): rows.counted()[-1] for rows in counters.tables()}

    @property
    def counts(self) -> dict[str, Tensor]:
        """Pairs of every expert, int64 ``[E]`` on the layer's device, by layer; inside the block those so far. A layer
        that ran and whose experts got nothing is there with zeros, unless it ran in replays of CUDA graphs only.
        Reading waits for the device only where a layer, of any model in the process, was not called since.
        """
        if self._model is not None:
            self._read(self._model)
        found: dict[str, Tensor] = {}
        for name, layer in self._named(_living(self._layers)):
            held = found.get(name)
            if held is not None and len(held) != layer.experts:  # the row of weights whose memory a model took over
                name, held = f"{name}, E={layer.experts}", None
            found[name] = layer.counts if held is None else held + layer.counts.to(held.device)
        return found

    @property
    def pairs(self) -> dict[str, int]:
        """Pairs of all experts, K for each token, by layer."""
        return {name: int(counts.sum()) for name, counts in self._on_host().items()}

    @property
    def shares(self) -> dict[str, Tensor]:
        """Share of the layer's pairs that every expert got, float64 ``[E]`` on the CPU, by layer; NaN without pairs."""
        return {name: counts.double() / counts.sum() for name, counts in self._on_host().items()}

    @property
    def imbalance(self) -> dict[str, float]:
        """Pairs of the busiest expert over the mean of all, by layer: 1 is even, E is all on one; NaN without pairs."""
        return {name: float(share.max() * len(share)) for name, share in self.shares.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: ``layers``, each with its name, ``experts``, ``pairs``, ``imbalance`` (null without
        pairs) and ``counts``; ``uncounted``, layers with CUDA graphs that cannot count, as their first call ever was
        in the capture.
        """
        layers = []
        for name, counts in self._on_host().items():
            pairs = int(counts.sum())
            imbalance = int(counts.max()) * len(counts) / pairs if pairs else None
            layers.append(
                {
                    "name": name,
                    "experts": len(counts),
                    "pairs": pairs,
                    "imbalance": imbalance,
                    "counts": counts.tolist(),
                }
            )
        uncounted = [name for name, layer in self._named(self._lost) if layer.owner is not None]
        return {"layers": layers, "uncounted": uncounted}

    def __str__(self) -> str:
        """A table, a line for each layer."""
        found = self.to_dict()
        lines = [_NO_BLOCK]
        if any(layer["pairs"] for layer in found["layers"]):
            rows: list[tuple[str, ...]] = [("layer", "experts", "pairs", "max/mean", "busiest", "idle")]
            rows += [_line(layer) for layer in found["layers"]]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = [
                "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
            ]
        if found["uncounted"]:
            layers = ", ".join(found["uncounted"])
            lines.append(f"not counted in CUDA graphs that were captured before any other call: {layers}")
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> Figure:
        """A heat map, layers by experts, of pairs over the layer's mean: 1 (white) is even, red more, blue less.

        Args:
            path: a file to write, its ending says of what kind; None to write none.

        Returns:
            A matplotlib figure.

        Raises:
            ValueError: nothing was counted, or matplotlib is not installed.
        """
        try:
            from matplotlib.colors import TwoSlopeNorm
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ValueError("load.plot: draws with matplotlib, got none. pip install matplotlib") from error
        loads = {name: share * len(share) for name, share in self.shares.items() if not bool(share.isnan().any())}
        if not loads:
            raise ValueError(_NO_BLOCK.replace("load statistics", "load.plot", 1))
        experts = max(map(len, loads.values()))
        grid = torch.full((len(loads), experts), float("nan"), dtype=torch.float64)
        for row, load in zip(grid, loads.values(), strict=True):
            row[: len(load)] = load
        figure = Figure(figsize=(9.0, min(2.0 + 0.22 * len(loads), 16.0)), layout="constrained")
        axes = figure.add_subplot()
        norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(grid.nan_to_num(0.0).max())))
        image = axes.imshow(grid.tolist(), aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm)
        step = -(-len(loads) // _MOST_LABELS)
        axes.set_yticks(range(0, len(loads), step), list(loads)[::step], fontsize="small")
        axes.set_xlabel("expert")
        axes.set_title("Load of the experts")
        figure.colorbar(image, label="pairs, over the layer's mean")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _on_host(self) -> dict[str, Tensor]:
        return {name: counts.cpu() for name, counts in self.counts.items()}

    def _end(self) -> None:
        if self._model is not None:
            self._read(self._model)
        self._model, self._first, self._before = None, [], {}

    def _read(self, model: nn.Module) -> None:
        """The numbers up to now, with the owners that the model's weights have now, or had when the block began."""
        now = _owners(model)

        def layer_of(rows: counters.Rows, address: int, row: Tensor, asked: int = 0) -> _Layer:
            owner, place = _find(now, rows, address) or _find(self._first, rows, address) or (None, None)
            return _Layer(owner, place, rows.experts, row, asked >= self._since)

        self._layers, self._lost = [], []
        for rows in counters.tables():
            addresses, asked, blocks = rows.counted(self._before.get((rows.device, rows.experts), ()))
            counts = [row[1 : 1 + rows.experts] for block in blocks for row in block.unbind(0)]
            self._layers += [layer_of(rows, *given) for given in zip(addresses, counts, asked, strict=False)]
            self._lost += [layer_of(rows, address, row) for address, row in rows.uncounted.items()]

    def _named(self, layers: list[_Layer]) -> Iterator[tuple[str, _Layer]]:
        """Layers with their names, in the order of the model; nobody's last."""
        alike: dict[tuple[Any, ...], set[str]] = {}
        for layer in layers:
            if layer.owner is not None:
                alike.setdefault((layer.owner.path, layer.owner.sizes), set()).add(layer.owner.name)
        layers.sort(key=lambda layer: (layer.owner is None, layer.owner and layer.owner.order, layer.place or 0))
        for layer in layers:
            owner = layer.owner
            if owner is None:
                yield f"(weights of no module, E={layer.experts})", layer
            elif layer.place is None and len(alike[owner.path, owner.sizes]) == 1:
                yield owner.path or self._name, layer
            else:
                name = f"{owner.path}.{owner.name}" if owner.path else owner.name
                yield (name if layer.place is None else f"{name}[{layer.place}]"), layer


def _living(layers: list[_Layer]) -> list[_Layer]:
    """Those that ran since counting began. Rows outlive weights, and others may have come into their memory: a row that
    nobody asked for and that counted nothing is of weights that are gone, or of a layer that did not run.
    """
    return [layer for layer in layers if (layer.ran and layer.owner is not None) or bool(layer.counts.any())]


def _line(layer: dict[str, Any]) -> tuple[str, ...]:
    counts, pairs = layer["counts"], layer["pairs"]
    head = (layer["name"], str(layer["experts"]), str(pairs))
    if not pairs:
        return (*head, "-", "-", str(len(counts)))
    most = max(counts)
    busiest = f"{counts.index(most)} ({100 * most / pairs:.1f} %)"
    return (*head, f"{layer['imbalance']:.2f}", busiest, str(counts.count(0)))


def _original(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given."""
    inside = getattr(model, "_orig_mod", model)
    return inside if isinstance(inside, nn.Module) else model


def _owners(model: nn.Module) -> list[_Owner]:
    """The memory of all tensors that modules hold, by address."""
    found: list[_Owner] = []
    for path, module in _original(model).named_modules():
        path = ".".join(part for part in path.split(".") if part != "_orig_mod")
        held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        held |= {**dict(module.named_buffers(recurse=False, remove_duplicate=False)), **vars(module)}
        for name, tensor in held.items():
            for memory in _memories(tensor):
                sizes, strides = tuple(memory.shape), memory.stride()
                extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
                start, itemsize = memory.data_ptr(), memory.element_size()
                step = itemsize * strides[0] if strides else 0
                end = start + itemsize * extent
                found.append(_Owner(start, end, memory.device, len(found), path, name, sizes, step))
    return sorted(found, key=lambda owner: (owner.start, -owner.order))


def _memories(tensor: Any) -> Iterator[Tensor]:
    """The strided tensors with elements that `tensor` is, or is made of."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):  # such as a DTensor
        for name in tensor.__tensor_flatten__()[0]:
            yield from _memories(getattr(tensor, name))
    elif tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel():
        yield tensor


def _find(owners: list[_Owner], rows: counters.Rows, address: int) -> tuple[_Owner, int | None] | None:
    """Whose weights begin at `address`, and which of the layers in a tensor; of several names the first.

    Rows outlive weights, and others may have come into their memory: what begins elsewhere, or has not as many experts,
    is not meant.
    """
    for owner in reversed(owners[: bisect_right(owners, address, key=lambda owner: owner.start)]):
        if address < owner.end and owner.device == rows.device:
            step = _step(owner, rows.experts)
            if step and (address - owner.start) % step == 0:
                return owner, (address - owner.start) // step
            if address == owner.start and owner.sizes and owner.sizes[0] % rows.experts == 0:
                return owner, None
    return None


def _step(owner: _Owner, experts: int) -> int:
    """Bytes from one layer's weights to the next one's, in a tensor that holds several; 0 of one alone."""
    sizes = owner.sizes
    if len(sizes) == 3 and sizes[0] > experts and sizes[0] % experts == 0:
        return owner.step * experts
    return owner.step if len(sizes) > 3 and sizes[1] == experts else 0
