"""Launches of kernels, and records of them: what one call launched, to be fired again for other tensors.

A record says where every argument came from: which input, or which piece of memory that the call allocated. So a call
with the same signature (sizes, strides, dtypes, alignment, options: `moe_ops.runtime`) needs neither the code that
chose kernels and sizes nor Triton's binder. A kernel's machine code and all that it was given but for addresses follow
from the signature, and tensor maps from the signature and one address.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.compat import current_gpu, empty_cuda, without_function_modes, without_operator_modes
from moe_ops.counters import Row, rows_of
from moe_ops.kernels.triton.util import INTERPRETED, cdiv
from moe_ops.runtime import Warm

Tensor = torch.Tensor
aten = torch.ops.aten

ALIGNMENT = 512  # bytes, of a piece of the workspace: what torch's allocator gives
# Of a call worth a record: beyond, kernels take longer than their launches, and pieces should be freed one by one.
MOST_LAUNCHES = 16
MOST_BYTES = 2**28
MOST_MAPS = 4096  # addresses that one argument's tensor maps are kept for

_ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
)

_running = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch `kernel` on the GPU that its first tensor is on; a record under way takes note."""
    first = next(argument for argument in arguments if isinstance(argument, Tensor))
    recorder = getattr(_running, "recorder", None)
    with on_device(first), nullcontext() if recorder is None else without_operator_modes():
        named = dict(zip(options, with_memory(options.values()), strict=True))
        compiled = kernel[grid](*with_memory(arguments), **named)
    if recorder is not None:
        recorder.launched(kernel, compiled, grid, arguments, options)


def with_memory(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """`arguments` as Triton takes them."""
    return tuple(value.tensor() if isinstance(value, Row) else value for value in arguments)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make `tensor`'s GPU current for a launch. Free when it already is: Triton launches on the current device."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.get_device())
    return nullcontext()


class Place(NamedTuple):
    """An address: `offset` bytes into source number `source`, with what a view of it needs."""

    source: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Map(NamedTuple):
    """A tensor map, but for its address."""

    place: Place
    shape: list[int]
    strides: list[int]
    block: list[int]


class Counters(NamedTuple):
    """A row of counters, by the place of the weights that it is known by."""

    place: Place
    experts: int


@dataclass(frozen=True)
class Launched:
    """One launch of a record."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Takes note of one call's allocations, views and launches.

    Attributes:
        reason: why the call cannot be fired again from a record, or None.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept: list[Any] = list(inputs)  # so that no id is used twice
        self._sources = {id(tensor): (index, 0) for index, tensor in enumerate(inputs)}
        self._inputs = len(inputs)
        self._pieces: list[Tensor] = []
        self._launches: list[Launched] = []
        self.reason = None if len(self._sources) == len(inputs) else "one tensor is two arguments"

    def __enter__(self) -> Recorder:
        _running.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        _running.recorder = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._sources[id(out)] = (self._inputs + len(self._pieces), 0)
            self._pieces.append(out)
        elif not func._schema.is_mutable and self._is_view(out, args[0] if args else None):
            source, offset = self._sources[id(args[0])]
            self._sources[id(out)] = (source, offset + out.data_ptr() - args[0].data_ptr())
        else:
            self._against(f"{func} is not a launch")
        self._kept.append(out)
        return out

    def _against(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _is_view(self, out: Any, of: Any) -> bool:
        # By the memory: `contiguous` and `reshape` come here whole, as views by their schema, and may have copied.
        return (
            isinstance(out, Tensor)
            and id(of) in self._sources
            and out.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
        )

    def launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: Any, options: Any) -> None:
        """Take note of a launch."""
        given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        named = {name: given.pop(name) for name in kernel.arg_names}
        described = {name: self._describe(value) for name, value in named.items()}
        self._launches.append(Launched(kernel, compiled, grid, described, given))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._place(value)
        if hasattr(value, "block_shape"):  # a descriptor of Triton's, or of Gluon's
            return Map(self._place(value.base), list(value.shape), list(value.strides), list(value.block_shape))
        if isinstance(value, Row):
            return Counters(self._place(value.weight), value.experts)
        return value

    def _place(self, tensor: Tensor) -> Place:
        source, offset = self._sources.get(id(tensor), (-1, 0))
        if source < 0:
            self._against("a tensor of unknown origin")
        return Place(source, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _is_piece(self, place: Place, tensor: Tensor) -> bool:
        number = place.source - self._inputs
        return number >= 0 and place.offset == 0 and tensor.numel() == self._pieces[number].numel()

    def finish(self, result: Any) -> Record | None:
        """The record of a call that returned `result`, None if there is a :attr:`reason` against one."""
        returned = result if isinstance(result, tuple) else (result,)
        places = [self._place(tensor) for tensor in returned]
        sources = [place.source for place in places]
        whole = [self._is_piece(place, tensor) for place, tensor in zip(places, returned, strict=True)]
        if len(set(sources)) < len(sources) or not all(whole):
            self._against("a result is not a piece of memory of its own")
        if not 0 < len(self._launches) <= MOST_LAUNCHES:
            self._against(f"{len(self._launches)} launches")
        taken = sum(piece.untyped_storage().nbytes() for piece in self._pieces)
        if taken > MOST_BYTES:
            self._against(f"{taken} bytes of memory")
        if self.reason is None and not INTERPRETED.value:
            self.reason = next(filter(None, (_obstacle(one.compiled) for one in self._launches)), None)
        if self.reason is not None:
            return None
        offsets, size = {}, 0
        for number, piece in enumerate(self._pieces, self._inputs):
            if number not in sources:
                offsets[number] = size
                size += cdiv(piece.untyped_storage().nbytes(), ALIGNMENT) * ALIGNMENT
        make = RecordInterpreted if INTERPRETED.value else Record
        return make(self._launches, places, self._inputs, offsets, size, returned[0].device, isinstance(result, tuple))


def _obstacle(compiled: Any) -> str | None:
    # What `Record` gives it is the form of Triton 3.6.
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != "iiiKKppOOOOOO":
        return "another form of Triton's launch function"
    if compiled.run.global_scratch_size or compiled.run.profile_scratch_size:
        return "a kernel with scratch memory"
    return None


def _hooked() -> bool:
    """Whether somebody (a profiler) wants to be told of launches, which only Triton's own way does."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Maps(dict[int, Any]):
    """Tensor maps of one argument by address."""

    def __init__(self, rest: tuple[Any, ...]) -> None:
        super().__init__()
        self._rest = rest

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_MAPS:
            self.clear()
        made = self[address] = triton.runtime.driver.active.utils.fill_tma_descriptor(address, *self._rest)
        return made


class Record:
    """A call's launches, to be fired for other tensors of the same signature.

    Attributes:
        fire: the call's result for the inputs, whose addresses the pointers are; None when it must be run anew.
    """

    def __init__(
        self,
        launches: Sequence[Launched],
        results: Sequence[Place],
        inputs: int,
        offsets: dict[int, int],
        workspace: int,
        device: torch.device,
        several: bool,
    ) -> None:
        # In the order of `fire`: inputs, results, workspace.
        self._order = {number: (number, 0) for number in range(inputs)}
        self._order |= {place.source: (inputs + i, 0) for i, place in enumerate(results)}
        self._order |= {number: (inputs + len(results), offset) for number, offset in offsets.items()}
        self._forms = [(place.size, place.stride, place.dtype) for place in results]
        if offsets:
            self._forms.append(((workspace,), (1,), torch.uint8))
        self._inputs, self._results = inputs, len(results)
        self._device, self._several = device.index, several
        self.fire: Warm = self._prepared(launches)

    def _where(self, place: Place) -> tuple[int, int]:
        source, offset = self._order[place.source]
        return source, offset + place.offset

    def _prepared(self, launches: Sequence[Launched]) -> Warm:
        """One straight-line function: nothing is looked up, put into lists or copied that does not change."""
        names: dict[str, Any] = {"hooked": _hooked, "current": current_gpu, "empty": empty_cuda}
        names |= {"on": torch.cuda.device, "stream_of": triton.runtime.driver.active.get_current_stream}
        made = [f"made{number}" for number in range(len(self._forms))]
        results = ", ".join(made[: self._results])
        lines = [
            "def fire(given, pointers):",
            "    if hooked():",
            "        return None",
            f"    if current() != {self._device}:",
            f"        with on({self._device}):",
            "            return fire(given, pointers)",
            f"    {''.join(f'at{number}, ' for number in range(self._inputs))}= pointers",
        ]
        for number, (name, (size, stride, dtype)) in enumerate(zip(made, self._forms, strict=True), self._inputs):
            lines.append(f"    {name} = empty({size}, {stride}, {_named(dtype, names)})")
            lines.append(f"    at{number} = {name}.data_ptr()")
        lines.append(f"    stream = stream_of({self._device})")
        lines += [f"    {self._line(one, names)}" for one in launches]
        lines.append(f"    return ({results},)" if self._several else f"    return {results}")
        exec("\n".join(lines), names)
        fire: Warm = names["fire"]
        return fire

    def _line(self, one: Launched, names: dict[str, Any]) -> str:
        """A call of the launch function: numbers as they are, addresses by their source, all else by name."""

        def named(value: Any) -> str:
            return _named(value, names)

        def at(place: Place) -> str:
            source, offset = self._where(place)
            return f"at{source} + {offset}" if offset else f"at{source}"

        compiled, run = one.compiled, one.compiled.run
        described = iter(compiled.metadata.tensordesc_meta or ())
        launcher, arguments = run.launch, []
        for name in one.kernel.arg_names:
            value = one.arguments[name]
            if compiled.src.signature[name] == "constexpr":
                arguments.append("None")
            elif isinstance(value, Place):
                arguments.append(at(value))
            elif isinstance(value, Counters):
                rows = rows_of(torch.device("cuda", self._device), value.experts)
                arguments.append(f"{named(rows)}[{at(value.place)}]")
            elif isinstance(value, Map):
                meta = next(described)
                code = nvidia.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
                # Codes of four bits that are spread over bytes are counted one by one.
                shape = [*value.shape[:-1], value.shape[-1] * (2 if meta["fp4_padded"] else 1)]
                maps = _Maps((meta["swizzle"], meta["elem_size"], code, meta["block_size"], shape, value.strides, 0))
                arguments.append(f"{named(maps)}[{at(value.place)}]")
                arguments += [named(number) for number in (*shape, *value.strides)]
                launcher = inspect.getclosurevars(run.launch).nonlocals["launcher"]
            else:
                arguments.append(named(value))
        fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        fixed += (compiled.packed_metadata, None, None, None)
        grid = [repr(size) for size in (*one.grid, 1, 1)[:3]]
        return f"{named(launcher)}({', '.join([*grid, 'stream', *map(named, fixed), *arguments])})"


def _named(value: Any, names: dict[str, Any]) -> str:
    """`value` as an expression: numbers as they are, all else by a name among `names`."""
    if value is None or type(value) is int:
        return repr(value)
    name = f"constant{len(names)}"
    names[name] = value
    return name


class RecordInterpreted(Record):
    """The same through Triton's interpreter, which takes tensors."""

    def _prepared(self, launches: Sequence[Launched]) -> Warm:
        def fire(tensors: Sequence[Tensor], pointers: Sequence[int]) -> Any:
            with without_function_modes():  # as around the body that was recorded
                return self._fired(launches, tensors)

        return fire

    def _fired(self, launches: Sequence[Launched], tensors: Sequence[Tensor]) -> Any:
        made = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in self._forms]
        sources = [*tensors, *made]

        def view(place: Place) -> Tensor:
            source, offset = self._where(place)
            first = sources[source].storage_offset() * sources[source].element_size() + offset
            bytes_of = torch.empty(0, dtype=place.dtype).set_(sources[source].untyped_storage())
            return bytes_of.as_strided(place.size, place.stride, first // place.dtype.itemsize)

        def filled(value: Any) -> Any:
            if isinstance(value, Map):
                return TensorDescriptor(view(value.place), value.shape, value.strides, value.block)
            if isinstance(value, Counters):
                return Row(view(value.place)).tensor()
            return view(value) if isinstance(value, Place) else value

        for one in launches:
            arguments = [filled(one.arguments[name]) for name in one.kernel.arg_names]
            one.kernel[one.grid](*arguments, **one.options)
        results = made[: self._results]
        return tuple(results) if self._several else results[0]
