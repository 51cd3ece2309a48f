"""Every private or version-dependent part of torch that the passes use, behind a feature test with a stated fallback.

Importing this module imports neither Dynamo nor Inductor's compiler.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from compile_passes.captures import few_turns
from moe_ops.compat import captured_under, names_in

try:
    from torch._inductor.custom_graph_pass import CustomGraphPass
except ImportError:  # then Inductor asks no pass for an identity, and any callable will do

    class CustomGraphPass:  # type: ignore[no-redef]
        """What Inductor takes for a pass with an identity."""


log = logging.getLogger(__name__)

__all__ = [
    "NUMBERS",
    "SIZES",
    "CustomGraphPass",
    "LostFrame",
    "as_asserted",
    "break_reason",
    "can_restart_with_constants",
    "capturing",
    "compiled",
    "compiling_apart",
    "control_exceptions",
    "counters",
    "cut_for_ddp",
    "equal_by_a_guard",
    "fake_mode_of",
    "feature",
    "inductor",
    "inductor_options",
    "inductor_setting",
    "is_ahead_of_time",
    "is_of_the_data",
    "is_plain",
    "is_tracing",
    "leave_sizes_of_einsum_open",
    "mode_options",
    "must_save",
    "number_by_a_guard",
    "patch_inductor",
    "register_backend",
    "restart_with_constants",
    "same_symbols",
    "sdpa_kernel",
    "statically_known_true",
    "trace_artifact",
    "try_again",
]


@cache
def feature(module: str, name: str) -> Any:
    """``name`` of ``module``, or None where this torch has no such module or name."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


# ---- graphs: symbolic sizes, fake tensors, breaks


def statically_known_true(condition: bool | torch.SymBool) -> bool:
    """Whether ``condition`` holds for every value of the symbols in it; adds no guard. Without torch's test: no."""
    if isinstance(condition, bool):
        return condition
    known = feature("torch.fx.experimental.symbolic_shapes", "statically_known_true")
    return known is not None and bool(known(condition))


class _OptEinsum:
    """The package, asked for orders of contraction by the sizes that symbols were traced with."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)

    def contract_path(self, equation: str, *operands: Any, **options: Any) -> Any:
        """As the package's; from left to right where a size is of the data."""
        shapes = [tuple(operand.shape) for operand in operands]
        if all(type(size) is int for shape in shapes for size in shape):
            return self.package.contract_path(equation, *operands, **options)
        known = [tuple(getattr(getattr(n, "node", None), "hint", n) for n in shape) for shape in shapes]
        if any(size is None for shape in known for size in shape):
            # What two were contracted to is the last from then on.
            return [(0, 1), *((0, left - 1) for left in range(len(operands) - 1, 1, -1))], None
        return self.package.contract_path(equation, *known, shapes=True, **options)


def leave_sizes_of_einsum_open() -> None:
    """From here on captured numbers of tokens stay open where torch.einsum has three operands or more and opt_einsum is
    installed, which compares sizes: each comparison would be a guard, and every batch size a compilation.
    """
    backend: Any = torch.backends.opt_einsum
    package = backend.get_opt_einsum() if hasattr(backend, "get_opt_einsum") else None
    if package is not None and not isinstance(package, _OptEinsum):
        by_hints = _OptEinsum(package)
        backend.get_opt_einsum = lambda: by_hints


def equal_by_a_guard(one: Any, two: Any) -> bool:
    """Whether two sizes are equal in this call, and a guard of Dynamo holds that they are in every later one: where
    they are not, it compiles again. Without Dynamo's guards, and of sizes that only the data knows: no.
    """
    hints = [size if isinstance(size, int) else size.node.hint for size in (one, two)]
    return _is_guarding() and None not in hints and hints[0] == hints[1] and bool(one == two)


def number_by_a_guard(size: Any) -> int | None:
    """The number that a size is in this call, where a guard of Dynamo holds that it is in every later one, too."""
    if type(size) is int:
        return size
    known = isinstance(size, torch.SymInt) and size.node.hint is not None and _is_guarding()
    return int(size) if known else None


def _is_guarding() -> bool:
    context = feature("torch._guards", "TracingContext")
    return context is not None and context.try_get() is not None and not is_ahead_of_time()


def same_symbols(one: Any, two: Any) -> bool:
    """Whether two sizes are one expression of the same symbols; torch's comparison takes ten times as long."""
    return isinstance(one, torch.SymInt) and isinstance(two, torch.SymInt) and bool(one.node.expr == two.node.expr)


def _symbols_of_the_data(size: Any) -> Any:
    """The symbols of a size, or of an expression, that only the data knows."""
    free = feature("torch.fx.experimental.symbolic_shapes", "free_unbacked_symbols")
    return () if free is None else free(size)


def is_of_the_data(size: Any) -> bool:
    """Whether a size has symbols that only the data knows."""
    return isinstance(size, torch.SymInt) and bool(_symbols_of_the_data(size))


def as_asserted(size: Any) -> Any:
    """A size with what the graph asserts of sums of numbers that only the data knows, such as: the rows that ``split``
    cuts are all rows. Torch knows that of the sum alone, not of a quotient or a difference of it.
    """
    env: Any = getattr(getattr(size, "node", None), "shape_env", None)
    asserted: Any = getattr(env, "deferred_runtime_asserts", None)
    symbols = _symbols_of_the_data(size) if asserted else ()
    if not symbols:
        return size
    expression = size.node.expr
    # An assertion on several symbols is filed under one of them, which is in the sum that it is on.
    for condition in (one.expr for symbol in symbols for one in asserted.get(symbol, ())):
        if getattr(condition, "rel_op", "") != "==":
            continue
        for total, value in ((condition.lhs, condition.rhs), (condition.rhs, condition.lhs)):
            terms = total.args if total.is_Add and not _symbols_of_the_data(value) else ()
            if terms and all(term.is_Symbol for term in terms):
                last = max(terms, key=str)
                expression = expression.xreplace({last: value - total + last})
    return size if expression == size.node.expr else env.create_symintnode(env.simplify(expression), hint=None)


def fake_mode_of(value: Any) -> Any:
    """The mode that a fake tensor was made under, or None. The tracing context has another one when passes run."""
    kind = feature("torch._subclasses.fake_tensor", "FakeTensor")
    return value.fake_mode if kind is not None and isinstance(value, kind) else None


def symbolic_sizes() -> AbstractContextManager[Any]:
    """A context in which calls on fake tensors keep their sizes symbols: in Python, as torch's own tracing has them.
    Kernels that are made of others, `matmul` among them, ask for numbers in C++ (torch 2.11), and a graph is for one
    size from then on.
    """
    enable = feature("torch._dispatch.python", "enable_python_dispatcher")
    return nullcontext() if enable is None else enable()


def inner_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory a wrapper tensor shows (a DTensor holds its mesh, too); of others, the tensor itself."""
    is_wrapper = feature("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")
    if is_wrapper is None or not is_wrapper(value):
        return [value]
    names: list[str] = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    parts = [getattr(value, name) for name in names]
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in inner_tensors(part)]


def is_plain(value: torch.Tensor) -> bool:
    """Whether ``value`` is a tensor like any other: no unknown subclass, no value of a function transform (vmap, grad).

    Without torch's test for the latter, a tensor of a graph is plain only when it is a fake one, as those are not.
    """
    fake = feature("torch._subclasses.fake_tensor", "FakeTensor")
    if fake is not None and type(value) is fake:
        return True
    wrapped = feature("torch._C._functorch", "is_functorch_wrapped_tensor")
    return type(value) in (torch.Tensor, torch.nn.Parameter) and wrapped is not None and not wrapped(value)


class _Operators(TorchDispatchMode):
    """Names of the operators that are called under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


_SDPA = "_scaled_dot_product_"


def sdpa_kernel(mode: Any, tensors: Sequence[torch.Tensor | None], **options: Any) -> str | None:
    """Which kernel `scaled_dot_product_attention` chooses for fake (query, key, value, attn_mask) and its options:
    "MATH" where it has none, None where it takes no such call.

    Asked by calling it, as `_fused_sdp_choice` says MATH of every fake tensor (torch 2.11 to 2.13). No guard is left of
    the question.
    """
    trained = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    suppress = getattr(getattr(mode, "shape_env", None), "suppress_guards", nullcontext)
    with mode or nullcontext(), suppress(), torch.set_grad_enabled(trained), _Operators() as called:
        try:
            torch.nn.functional.scaled_dot_product_attention(*tensors, **options)  # type: ignore[arg-type]
        except Exception:
            return None
    found = [name.removeprefix(_SDPA) for name in called.names if name.startswith(_SDPA)]
    return found[0].upper() if found else "MATH"


def break_reason(gm: fx.GraphModule) -> tuple[str, str, tuple[tuple[str, str], ...]] | None:
    """Why Dynamo ended this graph early, where (``file:line``), and in which (file, function) frames, outermost first.

    None for a graph that returned.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = getattr(reason, "user_stack", None) or ()
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown location"
    return str(reason.reason), where, tuple((frame.filename, frame.name) for frame in stack)


# ---- Dynamo: exceptions that steer it, restarts, counters, backends


@cache
def control_exceptions() -> tuple[type[Exception], ...]:
    """Exceptions by which a backend steers Dynamo (trace again, leave this frame alone): never to be swallowed."""
    names = ("RestartAnalysis", "TensorifyScalarRestartAnalysis", "SkipFrame")
    kinds = [feature("torch._dynamo.exc", name) for name in names]
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))


def can_restart_with_constants(numbers: Sequence[torch.SymFloat]) -> bool:
    """Whether Dynamo is compiling and has not yet made these numbers constants. Never, where it cannot be told to."""
    state = feature("torch._dynamo.symbolic_convert", "TensorifyState")
    restart = feature("torch._dynamo.exc", "TensorifyScalarRestartAnalysis")
    context = feature("torch._guards", "TracingContext")
    if not numbers or state is None or restart is None or context is None or is_ahead_of_time():
        return False
    return context.try_get() is not None and not all(map(state.should_specialize, _symbol_names(numbers)))


def restart_with_constants(numbers: Sequence[torch.SymFloat]) -> NoReturn:
    """Make Dynamo trace again with these numbers as constants, guarded by their values.

    ``dynamic=True`` turns the float attributes of modules (a clamp limit, a routed scaling factor) into graph inputs.
    This is the mechanism by which Inductor itself gets rid of those that it cannot keep symbolic. Only after
    `can_restart_with_constants` has answered yes.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    for name in _symbol_names(numbers):
        TensorifyState.specialize(name)
    raise TensorifyScalarRestartAnalysis


def _symbol_names(numbers: Sequence[torch.SymFloat]) -> list[str]:
    return sorted({str(symbol) for number in numbers for symbol in number.node._expr.free_symbols})


_own_counters: defaultdict[str, Counter[str]] = defaultdict(Counter)


def counters() -> Any:
    """``torch._dynamo.utils.counters``: section -> name -> count; counters of our own where torch has none."""
    theirs = feature("torch._dynamo.utils", "counters")
    return _own_counters if theirs is None else theirs


def register_backend(function: Callable[..., Any], name: str) -> None:
    """Make ``torch.compile(backend=name)`` find ``function`` where no installed entry point already does.

    Dynamo registers what it loads from an entry point itself, and refuses a name that is registered already.
    """
    from torch._dynamo.backends import registry

    if name not in registry.list_backends(exclude_tags=()):
        registry.register_backend(function, name)


def cut_for_ddp() -> bool:
    """Whether Dynamo cuts the graph that is being compiled at the bounds of DistributedDataParallel's buckets."""
    parallel = getattr(getattr(torch.nn, "parallel", None), "DistributedDataParallel", None)
    active = getattr(parallel, "_get_active_ddp_module", None)
    if active is None or active() is None:
        return False
    mode = feature("torch._dynamo.utils", "get_optimize_ddp_mode")
    return mode is not None and mode() == "ddp_optimizer"


# ---- the structured trace


def is_tracing() -> bool:
    """Whether somebody collects the structured trace, so that the texts for it are worth making. Else: no."""
    trace_log = feature("torch._logging._internal", "trace_log")
    return bool(getattr(trace_log, "handlers", ()))


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the structured trace (``TORCH_TRACE``), where tlparse shows it next to torch's own graphs."""
    trace = feature("torch._logging", "trace_structured")
    if trace is not None:
        trace("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


# ---- Inductor


def must_save(node: fx.Node) -> None:
    """Have what cuts a graph into forward and backward keep this value, in checkpointed regions, too."""
    policy = feature("torch.utils.checkpoint", "CheckpointPolicy")
    if policy is not None:
        node.meta["recompute"] = policy.MUST_SAVE


def mode_options(mode: str | None, dynamic: bool | None) -> dict[str, Any]:
    """The Inductor options that ``torch.compile(mode=mode)`` stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode, dynamic))


def inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of torch.compile as Inductor configuration entries.

    Where torch's own wrapper is missing, names are taken as they are, and Inductor's configuration rejects wrong ones.

    Raises:
        RuntimeError: an option that Inductor does not have, or of the wrong type.
    """
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None:
        return {name.replace("-", "_"): value for name, value in options.items()}
    return dict(wrapper(None, options, None).config)


def inductor_setting(name: str) -> Any:
    """Present value of an Inductor configuration entry; None for an entry that it does not have."""
    from torch._inductor import config

    return getattr(config, name, None)


def patch_inductor(settings: dict[str, Any]) -> Any:
    """Context manager that changes Inductor's configuration inside it."""
    from torch._inductor import config

    return config.patch(settings)


def inductor(gm: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under ``settings``."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(inputs), config_patches=settings)
    function: Callable[..., Any] = compiled
    return function


def private_copy(graph: fx.Graph) -> fx.GraphModule:
    """The same graph in a module of its own, with what AOTAutograd asks of one of Dynamo's."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copied: Any = copy.graph_copy(graph, copies, return_output_node=True)
    returned, output = copied
    copy.output(returned).meta.update(output.meta)
    for node, twin in copies.items():
        # Dynamo takes it from its own nodes in the end. It holds a weak reference to the input, and torch casts no
        # wrapper tensor in place that somebody has one of.
        twin.meta.pop("grapharg", None)
        if source_of(node) is not None:
            twin._dynamo_source = source_of(node)
    owner = graph.owning_module or torch.nn.Module()
    made = fx.GraphModule(owner, copy)
    made.meta.update(getattr(owner, "meta", {}))
    if hasattr(owner, "_param_name_to_source"):
        made._param_name_to_source = owner._param_name_to_source
    return made


def source_of(node: fx.Node) -> Any:
    """Where Dynamo got a placeholder from: no two have the same. None of a graph that is not Dynamo's."""
    return getattr(node, "_dynamo_source", None)


def mark_part(part: fx.Node, whole: fx.Node, source: Any) -> None:
    """Placeholder ``part`` comes from ``source``, and its memory stays where that of placeholder ``whole`` does."""
    part._dynamo_source = source
    if "tensor_dict" in whole.meta:
        part.meta["tensor_dict"] = whole.meta["tensor_dict"]


def source_of_attribute(source: Any, name: str) -> Any:
    """Where Dynamo would get attribute ``name`` of what comes from ``source``."""
    from torch._dynamo.source import AttrSource

    return AttrSource(source, name)


def is_ahead_of_time() -> bool:
    """Whether AOTInductor is compiling, for which no gradient is ever needed. Where it cannot be asked: no."""
    module = sys.modules.get("torch._inductor.virtualized")
    return getattr(getattr(module, "V", None), "aot_compilation", False) is True


@dataclass(frozen=True)
class LostFrame:
    """A Python frame that Dynamo gave back to the interpreter: its name, ``file:line``, why, and at which line.

    Attributes:
        again: it was not given back, but tried again without what Dynamo is allowed to capture.
    """

    name: str
    location: str
    reason: str
    where: str
    again: bool = False


SIZES, NUMBERS = "capture_dynamic_output_shape_ops", "capture_scalar_outputs"
# What `moe_ops.compile` lets Dynamo capture, of the settings of `torch._dynamo.config`.
_ALLOWED = (SIZES, NUMBERS)
_WITHOUT = f"without {' and '.join(_ALLOWED)}"


class _Tries:
    """What makes compiled code of a frame under settings of `torch._dynamo.config`, with few turns of loops over
    experts (`turns`), and does it again if that fails: with all turns, then without what Dynamo is allowed to capture.

    The settings hold for that alone, in whatever thread it is done: torch lets one at a time compile. Where code of a
    frame asks for a size that only the data knows (`if len(hit)`, `split(counts.tolist())`), Dynamo (torch 2.11 to
    2.13) breaks the graph without them, and raises with them. The frames behind such a break are tried anew, with them:
    a block is captured on its own there.
    """

    def __init__(self, convert: Any, settings: dict[str, bool], fullgraph: bool) -> None:
        self.convert, self._settings, self._fullgraph = convert, settings, fullgraph
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend  # by which torch finds the backend

    @property
    def _clone_with_backend(self) -> Callable[[Any], Any]:
        return lambda backend: _Tries(self.convert._clone_with_backend(backend), self._settings, self._fullgraph)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo import config, decorators, types

        # A function that alone is left to Python: torch looks for its frame next to its own, where this one is now.
        if sys._getframe(2).f_code is getattr(decorators, "_nonrecursive_disable_wrapper_code", None):
            return types.ConvertFrameReturn(apply_to_code=False)
        few = None if config.suppress_errors else self._torchdynamo_orig_backend  # errors would end the first try
        try:
            with few_turns(few) as capture, config.patch(self._settings):
                return self.convert(frame, *args, **kwargs)
        except Exception as error:
            if not capture.used and not self._is_allowed_more():
                raise
            self._say(frame, error, "in full" if capture.used else _WITHOUT)
        if capture.used:
            try:
                with config.patch(self._settings):
                    return self.convert(frame, *args, **kwargs)
            except Exception as error:
                if not self._is_allowed_more():
                    raise
                self._say(frame, error, _WITHOUT)
        with config.patch(dict.fromkeys(_ALLOWED, False)):
            return self.convert(frame, *args, **kwargs)

    def _is_allowed_more(self) -> bool:
        """Whether Dynamo may capture more than it does by itself, and would break the graph without that."""
        return not self._fullgraph and bool(self._settings or any(getattr(torch._dynamo.config, n) for n in _ALLOWED))

    def _say(self, frame: Any, error: Exception, how: str) -> None:
        code, reason = frame.f_code, str(getattr(error, "inner_exception", error)).partition("\n")[0]  # a backend's
        log.info("%s (%s:%d) is captured %s: %s", code.co_name, code.co_filename, code.co_firstlineno, how, reason)


def compiled(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``torch.compile(model, **kwargs)``, which captures what `moe_ops.compile` lets Dynamo capture of ``model``."""
    return capturing(torch.compile(model, **kwargs), captured_under(model), fullgraph=kwargs.get("fullgraph", False))


def capturing(function: Callable[..., Any], settings: dict[str, bool], *, fullgraph: bool) -> Callable[..., Any]:
    """``function``, made by torch.compile, compiles its frames under ``settings``, in several tries: none fails for
    what `moe_ops.compile` lets Dynamo capture, or for loops that are captured in few turns. Where this torch compiles
    frames in another way, there is one, and the settings are the process's from here on; with ``fullgraph`` torch has
    all that captured by itself.
    """
    if not hasattr(function, "_torchdynamo_orig_callable"):  # torch.compile is told to do nothing
        return function
    context = getattr(function, "dynamo_ctx", None)  # of a module
    callback: Any = names_in(function).get("callback") if context is None else context.callback
    convert = getattr(callback, "_torchdynamo_orig_backend", None)
    convert = convert.convert if isinstance(convert, _Tries) else convert
    if hasattr(convert, "_torchdynamo_orig_backend"):
        callback._torchdynamo_orig_backend = _Tries(convert, {} if fullgraph else settings, fullgraph)
    else:
        for name in () if fullgraph else settings:
            setattr(torch._dynamo.config, name, True)
    return function


def try_again(model: Callable[..., Any]) -> None:
    """Dynamo forgets that it could not capture the forwards of ``model``: it marks code for all that compile it later.

    It does so where a graph breaks inside a loop; such code runs as it is from then on, with ``fullgraph=True`` too.
    What the user marked, by ``torch._dynamo.skip`` or ``disable``, keeps its mark.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy

    types = import_module("torch._dynamo.types")  # it does not say that it exports these two
    as_others = types.FrameExecStrategy(types.FrameAction.DEFAULT, types.FrameAction.DEFAULT)
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    for function in [model, *{getattr(type(module), "forward", None) for module in modules}]:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and not getattr(function, "_torchdynamo_disable", False):
            set_code_exec_strategy(code, as_others)


def is_disabled(function: Callable[..., Any]) -> bool:
    """Whether torch.compiler.disable keeps ``function``, and all that it calls, from Dynamo."""
    disabled = getattr(function, "_torchdynamo_disable", False)
    return bool(disabled and getattr(function, "_torchdynamo_disable_recursive", True))


@contextmanager
def compiling_apart(
    backend: Callable[..., Any], model: Callable[..., Any]
) -> Iterator[tuple[dict[str, Any], list[LostFrame]]]:
    """Compiling ``model`` with ``backend`` inside the block leaves no trace: caches, size history, counters, marks.

    Other compiled functions keep what they have, also where they share code with what is compiled here.

    Yields:
        Arguments for `compiled`, and a list that holds the frames that were not compiled once the block has ended.
    """
    from torch._dynamo import config, convert_frame, pgo, utils

    def codes() -> dict[int, CodeType]:  # by identity: the code that Dynamo makes may hold constants without a hash
        trackers = (convert_frame.input_codes, convert_frame.output_codes)
        return {id(code): code for tracker in trackers for ref in tracker.seen if (code := ref()) is not None}

    lost: list[LostFrame] = []
    try_again(model)
    marked = hasattr(model, "_is_torch_compile")  # torch.compile(module) writes it on the module
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    limits = {"accumulated_recompile_limit": 1 << 30} | ({} if apart else {"recompile_limit": 1 << 30})
    before, counts = codes(), {section: Counter(entries) for section, entries in utils.counters.items()}
    with config.patch(limits), _replaced(pgo, "_CODE_STATE", None), _replaced(pgo, "_INIT_CODE_STATE", None):
        with _replaced(utils, "_compilation_metrics", deque()) as metrics:
            try:
                yield ({"isolate_recompiles": True} if apart else {}), lost
            finally:
                places = [(str(entry.co_name), f"{entry.co_filename}:{entry.co_firstlineno}") for entry in metrics]
                for entry, place, after in zip(metrics, places, [*places, None][1:], strict=True):
                    if not getattr(entry, "has_guarded_code", True) and getattr(entry, "fail_reason", None):
                        where = f"{entry.fail_user_frame_filename}:{entry.fail_user_frame_lineno}"
                        # what is given back is not tried again at its next call
                        lost.append(LostFrame(*place, str(entry.fail_reason), where, again=place == after))
                _forget(backend, codes(), before)
                if not marked:
                    getattr(model, "__dict__", {}).pop("_is_torch_compile", None)
                utils.counters.clear()
                utils.counters.update(counts)


def _forget(backend: Callable[..., Any], codes: dict[int, CodeType], known: dict[int, CodeType]) -> None:
    """Drop what ``backend`` compiled; code that was not known before loses its marks too (skipped, run as it is)."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for key, code in codes.items():
        entries = _debug_get_cache_entry_list(code)
        ours = [entry for entry in entries if getattr(entry.backend, "compiler_fn", entry.backend) is backend]
        if len(ours) == len(entries) and (ours or key not in known):
            reset_code(code)
        else:
            for entry in ours:
                state = entry.guard_manager.extra_state
                if state is not None:
                    state.invalidate(entry, DeletedGuardManagerWrapper("explained"))


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[Any]:
    """A private variable of torch replaced inside the block, where this release has it."""
    missing = object()
    old = getattr(module, name, missing)
    if old is not missing:
        setattr(module, name, value)
    try:
        yield value
    finally:
        if old is not missing:
            setattr(module, name, old)


def references_are_counted() -> bool:
    """Whether `sys.getrefcount` knows all of Python's references: without the interpreter's lock it does not."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
