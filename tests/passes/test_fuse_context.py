"""`fuse()` says when nothing was compiled inside it, and leaves nothing behind."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch._inductor import config

import moe_ops
from compile_passes.passes import PASSES, MoEPass

NOTHING = "nothing was compiled there"
COMPILE = torch.compile


@pytest.fixture(autouse=True)
def _nothing_left():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
    assert torch.compile is COMPILE


def function(x):
    return x + 1


def said(caught):
    """Ours among the warnings: the first import of Inductor has some of its own."""
    return [warning for warning in caught if NOTHING in str(warning.message)]


def ran():
    """What a compilation inside does to the passes."""
    MoEPass(PASSES)(torch.fx.symbolic_trace(function).graph)


@pytest.mark.parametrize("compile_it", [
    lambda: torch.compile(function),
    lambda: torch.compile(function, backend="inductor", mode="reduce-overhead"),
    lambda: torch.compile(dynamic=True)(function),
    lambda: torch.nn.Linear(2, 2).compile(),
], ids=["function", "named_backend", "decorator", "module.compile"])  # fmt: skip
def test_compiled_inside_but_never_called(compile_it):
    with pytest.warns(UserWarning, match=NOTHING) as caught, moe_ops.fuse():
        compile_it()
    assert [warning.filename for warning in said(caught)] == [__file__]


@pytest.mark.parametrize("compile_it", [
    lambda: None,
    lambda: torch.compile(function, backend="moe_ops"),
    lambda: torch.compile(function, backend="eager"),
    lambda: torch.compile(function, disable=True),
], ids=["nothing", "moe_ops", "eager", "disabled"])  # fmt: skip
def test_nothing_to_say(compile_it):
    with moe_ops.fuse():
        compile_it()


@pytest.mark.parametrize("consulted", [ran, lambda: MoEPass(PASSES).uuid()], ids=["passes_ran", "cache_key"])
def test_compiled_and_called_inside(consulted):
    with moe_ops.fuse():
        torch.compile(function)
        consulted()


def test_nested_contexts_warn_once_and_only_at_the_outermost_end():
    with pytest.warns(UserWarning, match=NOTHING) as caught:
        with moe_ops.fuse():
            with moe_ops.fuse():
                torch.compile(function)
            assert not said(caught)
    assert len(said(caught)) == 1


def test_called_in_the_outer_context():
    with moe_ops.fuse():
        with moe_ops.fuse():
            torch.compile(function)
        ran()


def test_called_in_the_inner_context():
    with moe_ops.fuse():
        torch.compile(function)
        with moe_ops.fuse():
            ran()


def test_another_threads_compilation_is_not_ours():
    with moe_ops.fuse():
        thread = threading.Thread(target=torch.compile, args=(function,))
        thread.start()
        thread.join()


# Where torch keeps one configuration for all threads, patches that overlap leave it as the last to end found it.
@config.patch({"pre_grad_custom_pass": None, "post_grad_custom_pre_pass": None})
def test_contexts_that_overlap_between_threads():
    """The first to begin is the first to end: torch.compile is put back when the last one ends."""
    began, ended = threading.Event(), threading.Event()
    caught = []

    def other():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with moe_ops.fuse():
                began.set()
                ended.wait(20)
                torch.compile(function)
            caught.extend(seen)

    thread = threading.Thread(target=other)
    with moe_ops.fuse():
        thread.start()
        assert began.wait(20)
    assert torch.compile is not COMPILE, "the other one still watches"
    ended.set()
    thread.join()
    assert torch.compile is COMPILE and len(said(caught)) == 1


def test_error_inside_is_raised_without_a_warning():
    with pytest.raises(KeyError), moe_ops.fuse():
        torch.compile(function)
        raise KeyError


def test_somebody_elses_replacement_is_left_in_place(monkeypatch):
    def theirs(*args, **kwargs):
        return COMPILE(*args, **kwargs)

    with moe_ops.fuse():
        ours = torch.compile
        torch.compile = theirs
    assert torch.compile is theirs
    torch.compile = COMPILE
    with moe_ops.fuse():
        ours(function)
        ran()


def test_torch_compile_keeps_its_signature_inside():
    import inspect

    with moe_ops.fuse():
        assert inspect.signature(torch.compile) == inspect.signature(COMPILE)
