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
    with the option `debug`; makes a table of all dtypes to look one up; and spells out the types of every shape.
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
