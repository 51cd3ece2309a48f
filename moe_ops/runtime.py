"""Warm calls: what a call's signature was found to need is remembered, and later calls pay for their kernels alone.

A signature is everything that may change which kernels run and what they are given, but for addresses: sizes, strides,
dtypes, alignment and options. Its first call is an ordinary one; its second is learnt from; the third and later ones
fire what was learnt: a backend's record of launches, or, for a backend that has none, its function on a call object
that is filled in again without the rule. No tensor is kept, and what is allocated belongs to the call.

A call in compiled code takes no signature. Its compiler has fixed and asserted all of it but for the sizes that vary,
which the code hands on as numbers, and a :class:`Site` finds by these what was learnt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NoReturn, TypeAlias
from weakref import WeakSet

from torch import Tensor
from torch.utils._pytree import tree_leaves

from meta.calls import Call
from meta.checks import fail
from moe_ops import compat, debugging

#: Fires a learnt call for tensors and their addresses; None when it has to be run anew.
Warm: TypeAlias = Callable[[Sequence[Tensor], Sequence[int]], Any]
#: A backend's function for a call, and how it is recorded: ``(function, call, tensors) -> (result, warm or None)``.
Chosen: TypeAlias = tuple[Callable[[Call], Any], Callable[..., tuple[Any, Warm | None]] | None]

MOST_SIGNATURES = 4096  # of one operator; the oldest are forgotten first
MOST_KEYS = 1024  # of one site, likewise
ALIGNED = 32  # bytes: the most that a tensor map asks of an address
TENSOR = -1  # in a site's pattern


def _seen(tensors: Sequence[Tensor], pointers: Sequence[int]) -> None:
    """Stands for a signature that came once."""


def _cold(tensors: Sequence[Tensor], pointers: Sequence[int]) -> None:
    """Stands for a signature of which nothing can be learnt: it is run anew every time."""


class Launcher:
    """One operator below torch's dispatcher.

    Args:
        parse: the rule.
        choose: the backend's function for a call, and its ``record``.
        apart: positions of a weight's up half and of what goes with it: kernels are given the distance between halves
            that are tensors of their own, so their addresses are part of the signature.
        names: of the arguments by position.
    """

    def __init__(
        self,
        parse: Callable[..., Call],
        choose: Callable[[Call], Chosen],
        apart: tuple[int, ...],
        names: tuple[str, ...] = (),
    ) -> None:
        self._parse, self._choose, self._apart, self._names = parse, choose, apart, names
        self._warm: dict[Any, Warm] = {}
        self._sites: WeakSet[Site] = WeakSet()
        self._lock = threading.Lock()

    @compat.not_captured  # where a graph breaks, operators run while Dynamo looks for frames to capture
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The operator's result."""
        if debugging.active() or compat.forward_mode_is_on():
            return self._run(args, kwargs)
        try:
            key, tensors, pointers = self._signature(args, kwargs)
            warm = self._warm.get(key)
        except (RuntimeError, TypeError):  # no strides, no memory, or a value that is no constant: for the rule
            self._refuse_freed(self._parse(*args, **kwargs).op, args)
            return self._run(args, kwargs)
        if warm is None:
            result = self._run(args, kwargs)
            self._remember(key, _seen)
        elif warm is _seen:
            result = self._learn(key, args, kwargs, tensors)
        else:
            result = warm(tensors, pointers)
            if result is None:
                result = self._run(args, kwargs)
        return result

    def forget(self) -> None:
        """Learn again: something that no signature holds was changed, such as a table of plans."""
        with self._lock:
            self._warm.clear()
            for site in self._sites:
                site.known.clear()

    def site(self, pattern: Sequence[int | None], varying: Sequence[str], /, **options: Any) -> Callable[..., Any]:
        """A call that compiled code makes, as a function ``(key, *tensors) -> result``.

        Two calls with one key have the same sizes and options, and, in dimensions of more than one element, strides.

        Args:
            pattern: the operator's arguments by position: ``TENSOR``, a number for a list of as many, None.
            varying: options whose values a key begins with.
            options: all others.
        """
        site = Site(self, pattern, varying, options)
        with self._lock:
            self._sites.add(site)
        numbers = site.numbers()
        given = [numbers[position] if position < len(numbers) else () for position in self._apart]
        apart = tuple(number for one in given for number in one) if given and given[0] else ()
        count = sum(len(one) for one in numbers)
        return _entrance(count, apart)(site.known.get, debugging.active, site.cold)

    def lend(self, known: dict[Any, Warm], key: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Put into ``known`` what was learnt of the signature of a call, if anything was; it is forgotten there too."""
        signature, _, _ = self._signature(args, kwargs)
        with self._lock:
            warm = self._warm.get(signature)
            if warm is not None and warm is not _seen:
                _put(known, key, warm, MOST_KEYS)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._parse(*args, **kwargs)
        if compat.forward_mode_is_on():
            refuse_tangents(call.op, args)
        if debugging.active():
            debugging.check(call)
        return _alone(self._choose(call)[0])(call)

    def _refuse_freed(self, op: str, args: tuple[Any, ...]) -> None:
        """Raise where a tensor's memory was given back, which kernels would read all the same."""
        for name, argument in zip(self._names, args, strict=False):
            for tensor in tree_leaves(argument):
                if isinstance(tensor, Tensor) and tensor.numel() and not tensor.untyped_storage().nbytes():
                    cure = "Gather it first (FSDP: call the module, or summon_full_params)."
                    raise fail(op, name, "a tensor with memory", "one whose storage was freed", cure)

    def _signature(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], list[Tensor], list[int]]:
        key: list[Any] = [len(args)]
        tensors: list[Tensor] = []
        for argument in args:
            if argument is None:
                key.append(None)
            elif isinstance(argument, Tensor):
                key.append(len(tensors))
                tensors.append(argument)
            elif isinstance(argument, (list, tuple)):
                key.append((len(tensors), len(argument)))
                tensors += argument
            else:
                key.append(argument)
        pointers = []
        for tensor in tensors:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            # Tensors without memory tell no number apart: those of a CPU and those of no device have the same.
            place = pointer % ALIGNED if pointer else tensor.device.type
            if not pointer and tensor.numel() and place != "meta":
                raise RuntimeError("freed")
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), place)
        for name, value in kwargs.items():
            key += (name, tuple(value) if isinstance(value, list) else value)
        if self._apart and len(args) > self._apart[0] and args[self._apart[0]] is not None:
            for position in self._apart:
                argument = args[position]
                halves = [argument] if isinstance(argument, Tensor) else argument or ()
                key += [half.data_ptr() for half in halves]
        return tuple(key), tensors, pointers

    def _learn(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        call = self._parse(*args, **kwargs)
        function, record = self._choose(call)
        function = _alone(function)
        result, warm = (function(call), None) if record is None else record(function, call, tensors)
        self._remember(key, warm or _filled_in(function, call, tensors))
        return result

    def _remember(self, key: Any, warm: Warm) -> None:
        with self._lock:
            _put(self._warm, key, warm, MOST_SIGNATURES)


def refuse_tangents(op: str, args: Sequence[Any]) -> None:
    """Raise where forward-mode differentiation follows an argument, whose tangent is lost below autograd."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)] if compat.forward_mode_is_on() else []
    if any(map(compat.carries_tangent, tensors)):
        raise ValueError(
            f"{op}: arguments must not carry a tangent, got one of forward-mode differentiation, which is not "
            "implemented. Differentiate in reverse (backward(), torch.autograd.grad), or pass it without one."
        )


def refuse_transforms(op: str, args: Sequence[Any]) -> None:
    """Raise where torch.func differentiates an argument in reverse: it has no way into operators of others."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)] if compat.transform_is_on() else []
    if any(map(compat.is_transformed, tensors)):
        raise ValueError(
            f"{op}: arguments must not be differentiated by torch.func, got one that is (grad, vjp, jacrev), which is "
            "not implemented. Differentiate it by backward() or torch.autograd.grad."
        )


def refuse_second_derivatives(op: str) -> NoReturn:
    """Raise in a backward whose own gradients would be lost."""
    raise ValueError(
        f"{op}: second derivatives are not implemented, got a backward pass with create_graph=True. "
        "Leave create_graph out."
    )


def _alone(function: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """An operator's body, undisturbed by what is active around its call."""

    def body(call: Call) -> Any:
        with compat.kernels_alone():
            if not compat.autocast_is_on() and not compat.function_modes_are_on():
                return function(call)
            with compat.without_autocast(), compat.without_function_modes():
                return function(call)

    return body


def _put(table: dict[Any, Warm], key: Any, warm: Warm, most: int) -> None:
    table[key] = warm
    while len(table) > most:
        del table[next(iter(table))]


class Site:
    """One call in compiled code: what was learnt of it, by key, and the way to the launcher.

    Of a dimension of one element nobody asserts the stride: it may be another than that of the call which was learnt
    from, as kernels multiply it by 0. Addresses that are no multiples of ``ALIGNED`` are left to the launcher.
    """

    def __init__(
        self, launcher: Launcher, pattern: Sequence[int | None], varying: Sequence[str], options: dict[str, Any]
    ) -> None:
        self.known: dict[Any, Warm] = {}
        self._launcher, self._pattern, self._varying, self._options = launcher, pattern, varying, options

    def numbers(self) -> list[range]:
        """The numbers of each argument's tensors."""
        found, count = [], 0
        for many in self._pattern:
            taken = 0 if many is None else 1 if many == TENSOR else many
            found.append(range(count, count + taken))
            count += taken
        return found

    def cold(self, key: tuple[Any, ...], tensors: tuple[Tensor, ...], known_by: Any) -> Any:
        """The result by the launcher, of whose knowledge a share is taken under the name of ``known_by``."""
        left = iter(tensors)
        args = [
            None if many is None else next(left) if many == TENSOR else list(islice(left, many))
            for many in self._pattern
        ]
        options = {**self._options, **dict(zip(self._varying, key, strict=False))}
        result = self._launcher(*args, **options)
        for one in result if isinstance(result, tuple) else (result,):
            _keep_the_word(one)
        if known_by is not None and known_by not in self.known:
            self._launcher.lend(self.known, known_by, args, options)
        return result


def _keep_the_word(result: Tensor) -> None:
    """What compiled code takes for granted of a result, as its fake is new memory; of a warm call as of a cold one."""
    if not result.is_contiguous() or (result.is_cuda and result.data_ptr() % 16):
        where = f"strides {result.stride()} and shape {tuple(result.shape)} at {result.data_ptr():#x}"
        raise RuntimeError(f"moe_ops: a result must be contiguous and at a multiple of 16 bytes, got {where}.")


@lru_cache
def _entrance(count: int, apart: tuple[int, ...]) -> Callable[..., Callable[..., Any]]:
    """What makes a site's function for ``count`` tensors, of which the addresses of ``apart`` belong to the key."""
    tensors, pointers = ([f"{kind}{number}" for number in range(count)] for kind in "tp")
    lines = [
        "def made(known, debugged, cold):",
        f"    def site(key, {', '.join(tensors)}):",
        *[f"        {pointer} = {tensor}.data_ptr()" for tensor, pointer in zip(tensors, pointers, strict=True)],
        f"        if ({' | '.join(pointers)}) % {ALIGNED} or debugged():",
        f"            return cold(key, ({', '.join(tensors)},), None)",
        f"        by = {', '.join(['key', *[pointers[number] for number in apart]])}",
        "        warm = known(by)",
        "        if warm is not None:",
        f"            result = warm(({', '.join(tensors)},), ({', '.join(pointers)},))",
        "            if result is not None:",
        "                return result",
        f"        return cold(key, ({', '.join(tensors)},), by)",
        "    return site",
    ]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    made: Callable[..., Callable[..., Any]] = names["made"]
    return made


class _OfItsOwn(Exception):
    """A rule's answer holds a tensor that is no argument."""


def _filled_in(function: Callable[[Call], Any], call: Call, tensors: Sequence[Tensor]) -> Warm:
    """``function`` on ``call`` with other tensors, where one example tells which goes where."""
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    if len(numbers) < len(tensors):
        return _cold
    names: dict[str, Any] = {"function": function, "new": object.__new__}
    lines: list[str] = []
    try:
        made = _made(call, numbers, names, lines)
    except _OfItsOwn:
        return _cold
    if made is None:
        return _cold
    # Straight-line code: loops over fields took a tenth of a small layer's time on a CPU.
    exec("\n".join(["def warm(given, pointers):", *lines, f"    return function({made})"]), names)
    warm: Warm = names["warm"]
    return warm


def _made(value: Any, numbers: dict[int, int], names: dict[str, Any], lines: list[str]) -> str | None:
    """An expression for ``value`` around other tensors, and in ``lines`` what comes before it; None for a value without
    any. No tensor is kept.
    """

    def named(constant: Any) -> str:
        name = f"constant{len(names)}"
        names[name] = constant
        return name

    if isinstance(value, Tensor):
        if id(value) not in numbers:
            raise _OfItsOwn
        return f"given[{numbers[id(value)]}]"
    if isinstance(value, tuple):
        parts = [_made(part, numbers, names, lines) for part in value]
        if not any(parts):
            return None
        filled = [part or named(constant) for part, constant in zip(parts, value, strict=True)]
        whole = f"({', '.join(filled)},)"
        return f"{named(type(value)._make)}({whole})" if hasattr(value, "_make") else whole
    if not is_dataclass(value):
        return None
    made = {field.name: _made(getattr(value, field.name), numbers, names, lines) for field in fields(value)}
    if not any(made.values()):
        return None
    one = f"one{len(lines)}"
    lines.append(f"    {one} = new({named(type(value))})")
    for name, part in made.items():
        lines.append(f"    {one}.{name} = {part or named(getattr(value, name))}")
    return one
