"""Fixtures for kernels run by Triton's CPU interpreter."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def language_patched_by_kernels() -> Iterator[None]:
    """Triton's interpreter looks through its whole language for functions to replace at every call of a device
    function, dozens in a program, though the launch of the kernel has replaced them already: then nothing is left.
    """
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None:  # another version of Triton, which may do it in another way
        yield
        return

    @cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_what_is_not(fn: Callable[..., Any]) -> Any:
        done = languages(fn) and not any(tl.core.is_builtin(language.load) for language in languages(fn))
        return interpreter._LangPatchScope() if done else patch(fn)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_not)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_computed_in_vain() -> Iterator[None]:
    """For every sum and product of integers Triton computes whether it overflows, which its interpreter asserts only
    with the option `debug`; makes a table of all dtypes to look one up; spells out the types of every shape; and makes
    every shape anew for every tensor.
    """
    builder, dtype_of = interpreter.interpreter_builder, getattr(interpreter, "_get_np_dtype", None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not builder.options.debug:
            monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        if dtype_of is not None:
            known: dict[str, Any] = {}

            def remembered(dtype: Any) -> Any:
                name = dtype.scalar.name
                return known[name] if name in known else known.setdefault(name, dtype_of(dtype))

            monkeypatch.setattr(interpreter, "_get_np_dtype", remembered)
        names_when_asked(monkeypatch)
        shapes_made_once(monkeypatch)
        yield


def names_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of tuples, of which every tensor has one, get their names only where somebody looks at them."""
    kind = tl.core.tuple_type
    make = kind.__init__
    made = kind([tl.int32])
    if set(vars(made)) != {"types", "fields", "name"}:  # another version of Triton
        return

    def quickly(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any, attribute: str) -> Any:
        if attribute != "name":
            raise AttributeError(attribute)
        make(self, self.types, self.fields)
        return vars(self)["name"]

    monkeypatch.setattr(kind, "__init__", quickly)
    monkeypatch.setattr(kind, "__getattr__", name, raising=False)
    assert str(kind([tl.int32])) == str(made)


def shapes_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one shape share what follows from it, as do their types, which get their names only when asked."""
    tensor, block = tl.core.tensor, tl.core.block_type
    make_tensor, make_block = tensor.__init__, block.__init__
    full, made = tensor(None, block(tl.int32, [2, 4])), block(tl.int32, [2, 4])
    parts = {"handle", "shape", "numel", "type", "dtype"}, {"element_ty", "shape", "numel", "name"}
    if (set(vars(full)), set(vars(made)), type(made.shape)) != (*parts, tl.core.tuple):  # another version of Triton
        return
    of_blocks: dict[tuple[int, ...], Any] = {}
    of_tensors: dict[tuple[int, ...], Any] = {}

    def quick_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if shape.__class__ is tl.core.tuple else shape)
        known = of_blocks.get(sizes) if all(size.__class__ is int for size in sizes) else None
        if known is None:
            make_block(self, element_ty, shape)
            of_blocks[tuple(self.shape.values)] = self.shape, self.numel
        else:
            self.element_ty, (self.shape, self.numel) = element_ty, known

    def name(self: Any, attribute: str) -> Any:
        if attribute != "name":
            raise AttributeError(attribute)
        make_block(self, self.element_ty, self.shape)
        return vars(self)["name"]

    def quick_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = of_tensors.get(sizes)
        if known is None:
            make_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype, (self.shape, self.numel) = handle, type, type.scalar, known

    monkeypatch.setattr(block, "__init__", quick_block)
    monkeypatch.setattr(block, "__getattr__", name, raising=False)
    monkeypatch.setattr(tensor, "__init__", quick_tensor)
    for _ in range(2):
        again = tensor(None, block(tl.int32, [2, 4]))
        assert (str(again), str(again.type), again.numel.value) == (str(full), str(made), full.numel.value)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random data in every run."""
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fill every new uninitialised tensor with NaN, or -77 where there is none; returns "which entries still are"."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kwargs: fill(new_empty(self, *args, **kwargs)))
    return lambda tensor: tensor.float().isnan() if tensor.is_floating_point() else tensor == -77
