"""The private or version-dependent parts of torch that the package uses, each behind a feature test."""

from __future__ import annotations

import ctypes
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


class _AfterImport(MetaPathFinder):
    """Lets the other finders find one module, and has callbacks run once after its import."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Once(spec.loader, self)
        return spec


class _Once(Loader):
    """Stands in for a module's loader until the module's code runs: from then on only its own loader is to be seen."""

    def __init__(self, loader: Any, finder: _AfterImport) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:  # a spec may have been asked for, and kept, without an import
            sys.meta_path.remove(self.finder)
            for callback in self.finder.callbacks:
                callback()


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Run ``callback`` now if module ``name`` is loaded, else right after its first import.

    ``torch.utils.flop_counter`` imports triton; formulas registered this way do not make every process pay for that.
    The module keeps its own loader and spec, so that reloading, its source and pickling by name are as without this.
    """
    if name in sys.modules:
        callback()
        return
    finder = next((one for one in sys.meta_path if isinstance(one, _AfterImport) and one.name == name), None)
    if finder is None:
        finder = _AfterImport(name)
        sys.meta_path.insert(0, finder)
    finder.callbacks.append(callback)


#: Enters the dispatcher below autograd, as autograd's own kernels do. Its Python part, and a second conversion of all
#: arguments, are half of what a call of an operator costs.
below_autograd = torch._C._AutoDispatchBelowAutograd

#: For the body of an operator: what it calls is neither recorded by autograd nor as a view, so that its results are
#: tensors like any other; on the CPU the records take a tenth of the time of a small layer.
kernels_alone = torch._C._AutoDispatchBelowADInplaceOrView

#: For the body of an operator, too, where something is cast around its call: it computes in what its rule says.
without_autocast = torch._C._DisableAutocast


def autocast_is_on() -> bool:
    """Whether anything is cast, on any kind of device."""
    return True


if hasattr(torch._C, "_is_any_autocast_enabled"):
    autocast_is_on = torch._C._is_any_autocast_enabled

#: For what is no part of a call: modes for operators, such as one that counts, do not see it.
without_operator_modes = _disable_current_modes

#: For the body of an operator, too, where modes for functions are on around its call, such as the one that puts what a
#: function makes on the default device. The dispatcher lets none in; compiled code calls the body itself.
without_function_modes = torch._C.DisableTorchFunction


def function_modes_are_on() -> bool:
    """Whether any mode for functions is."""
    return True


if hasattr(torch._C, "_is_torch_function_mode_enabled"):
    function_modes_are_on = torch._C._is_torch_function_mode_enabled


def without_fake_tensors() -> Any:
    """A context in which tensors are made that are there, wherever something is traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def empty_cuda(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty_strided`` on the current GPU; Inductor's own, where there is one, costs half."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


if hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
    empty_cuda = torch._C._dynamo.guards._empty_strided_cuda


def current_gpu() -> int:
    """``torch.cuda.current_device()``; without a look at whether CUDA was initialised, which a launch did, half."""
    return torch.cuda.current_device()


if hasattr(torch._C, "_cuda_getDevice"):
    current_gpu = torch._C._cuda_getDevice


def dispatcher_is_undisturbed() -> bool:
    """Whether no mode for functions and no transform is active: those stand above autograd."""
    return not function_modes_are_on() and not transform_is_on()


def forward_mode_is_on() -> bool:
    """Whether a level of forward-mode differentiation is entered."""
    return torch.autograd.forward_ad._current_level >= 0


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether nobody can say what numbers a tensor, or what it is made of, has: something is being traced."""
    from torch._subclasses.fake_tensor import is_fake as found

    return found(tensor)


def carries_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation, which is on, follows a tensor; of a fake one nobody can say, so it does."""
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return is_fake(tensor) or unpack(tensor).tangent is not None


def transform_is_on() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.maybe_current_level() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func, which is on, differentiates a tensor in reverse: it wraps all others, too."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``torch.vmap`` has an element of its own for a tensor each time."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def past_vmap() -> Any:
    """A context in which a call is not asked once more what ``torch.vmap`` makes of it."""
    keys: Any = torch._C
    return keys._ExcludeDispatchKeyGuard(keys.DispatchKeySet(keys.DispatchKey.FuncTorchVmapMode))


def name_in_files(record: type) -> None:
    """Have files of `torch.export` hold a named tuple of ours, where torch can."""
    register = getattr(torch.utils._pytree, "_register_namedtuple", None)
    if register is not None:
        register(record, serialized_type_name=f"{record.__module__}.{record.__qualname__}")


def lower_directly(signatures: Mapping[str, Any], source: str, line: str) -> None:
    """Have Inductor emit a plain call for every operator of ours; once ``torch._inductor.lowering`` is imported.

    A compiled graph has no use for torch's dispatcher and autograd: AOTAutograd has differentiated it, and its tensors
    are plain. Emitted code makes a call site (:meth:`moe_ops.runtime.Launcher.site`) for each call when it is loaded,
    from names and constants alone, so another process can run it from Inductor's cache. C++ code (``cpp_wrapper``,
    AOTInductor) calls the operator itself.

    Args:
        signatures: :class:`moe_ops.ops.Signature` by operator.
        source: the launchers by operator, in emitted code.
        line: imports them.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_symbols
    from torch.utils import _pytree as pytree

    from moe_ops.runtime import TENSOR

    def wrapped(node: Any) -> Any:
        if not isinstance(node, ir.IRNode):
            return node
        # torch 2.11 has one wrapping for all nodes.
        return node.wrap_for_lowering() if hasattr(node, "wrap_for_lowering") else ir.TensorBox.create(node)

    class DirectKernel(ir.FallbackKernel):
        """The operator as an extern kernel: inputs in the strides that the fake saw, by the tag of the schema."""

        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                wrapper.add_import_once(line)
                self.python_kernel_name = f"moe_ops_site_{self.get_name()}"
                wrapper.add_import_once(f"{self.python_kernel_name} = {self._site(wrapper)}")
            super().codegen(wrapper)

        def _site(self, wrapper: Any) -> str:
            """What makes the site: all of the call that does not vary. Notes of what a key is made."""
            name = cast(Any, self.op_overload)._opname
            given, options = self.unflatten_args([TENSOR] * len(self.inputs), self.constant_args)
            given, options = signatures[name].without_defaults(given, options)
            pattern = tuple(len(value) if isinstance(value, (list, tuple)) else value for value in given)
            varying = {
                option: wrapper.val_to_arg_str(value)
                for option, value in options.items()
                if isinstance(value, torch.SymInt)
            }
            fixed = [
                f"{option}={wrapper.val_to_arg_str(value)}"
                for option, value in options.items()
                if option not in varying
            ]
            # In scope wherever memory like an input may be allocated, so of functions of a graph's parts, too.
            layouts = [(tuple(node.get_size()), tuple(node.get_stride())) for node in cast(Any, self.inputs)]
            symbols = {wrapper.val_to_arg_str(symbol) for symbol in free_symbols(layouts)}
            self._key = "".join(f"{number}, " for number in (*varying.values(), *sorted(symbols)))
            return f"{source}[{name!r}].site({', '.join([repr(pattern), repr(tuple(varying)), *fixed])})"

        def codegen_args(self) -> list[str]:
            if V.graph.cpp_wrapper:
                return super().codegen_args()
            return [f"({self._key})", *[node.codegen_reference() for node in cast(Any, self.inputs)]]

        def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
            return super().codegen_kwargs(skip_out) if V.graph.cpp_wrapper else []

    def lower(name: str, signature: Any) -> None:
        op = getattr(torch.ops.moe_ops, name).default

        def lowering(*args: Any, **kwargs: Any) -> Any:
            # As the dispatcher would hand them on: tensors by position.
            given = signature.bind(args, kwargs)
            tensors = [given.pop(argument) for argument in signature.positional]
            made = DirectKernel.create(op, *tensors, **given)
            for node in pytree.tree_leaves(made):
                # A site asks what it learns from.
                node.skip_size_stride_alignment_checks = True
            return pytree.tree_map(wrapped, made)

        add_needs_realized_inputs(op)
        register_lowering(op, type_promotion_kind=None)(lowering)

    for name, signature in signatures.items():
        lower(name, signature)


def size_guards() -> dict[str, str]:
    """What the graph that is being compiled assumes of sizes, and the source line of each, for use inside a backend.

    Empty where this torch cannot be asked.
    """
    context = getattr(torch._guards, "TracingContext", None)
    current = None if context is None else context.try_get()
    env = getattr(getattr(current, "fake_mode", None), "shape_env", None)
    guards = getattr(env, "guards", None) or ()
    lines = ((str(guard.expr), getattr(getattr(guard, "sloc", None), "maybe_user_loc", None)) for guard in guards)
    return {assumed: whole_paths(line) for assumed, line in lines if line}


def whole_paths(text: str) -> str:
    """``text`` with whole paths in every ``code  # file:line in function``: torch leaves out what they share with its
    own, and a letter more where that is the root alone.
    """
    shorten = getattr(torch.utils._traceback, "shorten_filename", str)
    whole = {shorten(path): path for path in linecache.cache}  # torch has read the code from there
    return re.sub(r"(?<=  # )[^\s:]+(?=:\d+ in )", lambda found: whole.get(found[0], found[0]), text)


def kept_inputs(placeholders: Sequence[Any]) -> Sequence[Any]:
    """Those of the forward graph that is being compiled whose memory stays where it is: parameters, buffers, what
    `mark_static_address` marked; for use inside Inductor's passes. All, where this torch cannot be asked.
    """
    context = getattr(torch._guards, "TracingContext", None)
    metadata = getattr(None if context is None else context.try_get(), "fw_metadata", None)
    kept = getattr(metadata, "static_input_indices", None)
    if kept is None or any(node.name.startswith("tangents") for node in placeholders):
        return placeholders
    return [placeholders[index] for index in kept if index < len(placeholders)]


@contextmanager
def when_compiling(look: Callable[[Any], None]) -> Iterator[None]:
    """``look`` is called wherever Dynamo begins to compile a frame, in the stack of the call that made it do so.

    Never where this torch cannot be asked.
    """
    from torch._dynamo import callback

    handler = getattr(callback, "callback_handler", None)
    if handler is None or not hasattr(handler, "remove_start_callback"):
        yield
        return
    handler.register_start_callback(look)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch.compiler.reset has done it
            handler.remove_start_callback(look)


@contextmanager
def as_written(model: Any) -> Iterator[None]:
    """What ``module.compile`` made of a model, or of modules in it, is not what calls of it run inside the block."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    compiled = {module: found for module in modules if (found := vars(module).get("_compiled_call_impl")) is not None}
    for module in compiled:
        vars(module)["_compiled_call_impl"] = None
    try:
        yield
    finally:
        for module, found in compiled.items():
            vars(module)["_compiled_call_impl"] = found


#: Of a module: the settings of `torch._dynamo.config` that are True where `moe_ops.compile` has its code captured.
CAPTURED_UNDER = "_moe_ops_captured_under"


def captured_under(function: Any) -> dict[str, bool]:
    """What `moe_ops.compile` said on the modules of a model, or of those that a function holds or finds by name."""
    found = [getattr(function, "__self__", function), *names_in(function).values()]
    modules = (module for model in found if isinstance(model, torch.nn.Module) for module in model.modules())
    return {name: True for module in modules for name in vars(module).get(CAPTURED_UNDER, ())}


def names_in(function: Any) -> dict[str, Any]:
    """What the names in the code of a function stand for, outside of it; nothing of what is none."""
    with suppress(TypeError, ValueError):  # the latter where a variable has no value
        names = inspect.getclosurevars(function)
        return {**names.globals, **names.nonlocals}
    return {}


def inductor_graphs_pool() -> tuple[int, int] | None:
    """Where the CUDA graphs that Inductor records on the current device have their memory; None before the first."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) if trees else None
    return getattr(manager, "cuda_graphs_thread_pool", None)


#: Of a tensor class whose operations all arrive in its ``__torch_dispatch__``.
without_torch_function: Any = torch._C._disabled_torch_function_impl


def keep_in_graphs(overload: Any) -> None:
    """Have compilers keep calls of an operator whose results nobody uses. As an effect, torch's way for operators that
    run in an order, it would have tokens among every graph's inputs and results.
    """
    mark = getattr(torch.fx.node, "has_side_effect", None)
    if mark is not None:
        mark(overload)


def constant_in_graphs(function: F) -> F:
    """``function``, which Dynamo calls while it captures, with numbers or text, and whose result is a constant there.

    ``torch.compiler.assume_constant_result`` says so in the same way, and imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def object_at(address: int) -> Any:
    """The object of an ``id``, which has to be alive: Dynamo (torch 2.11) gives no modules to `constant_in_graphs`."""
    return ctypes.cast(address, ctypes.py_object).value


def not_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``; Dynamo leaves it and all that it calls as they are.

    ``torch.compiler.disable`` does that by a wrapper, which imports Dynamo.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def wrapper_tensor(
    kind: type[torch.Tensor], size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of class ``kind`` without memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, size, strides=stride, dtype=dtype, device=device)


def with_aliases(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """``result`` of ``func`` on a wrapper tensor, sharing storage with the operand where the schema says so."""
    from torch.utils._python_dispatch import return_and_correct_aliasing

    return return_and_correct_aliasing(func, args, kwargs, result)


def keep_between(wait: Any) -> None:
    """Have Inductor leave what stands between a start and the wait for it there; once its lowerings are imported.

    It orders kernels by the memory that they need, and may put before the start what the wait asks for. The first
    argument of ``wait`` is what the start returned, the third are tensors to be computed in between.
    """
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    def needed(names: Sequence[str]) -> dict[str, Any]:
        """What makes these buffers, by name of the operation: all that is not a graph's input."""
        graph: Any = V.graph
        found, names = {}, list(names)
        while names:
            buffer = graph.name_to_buffer.get(names.pop())
            operation = None if buffer is None else buffer.get_defining_op()
            if operation is not None and operation.get_operation_name() not in found:
                found[operation.get_operation_name()] = operation
                names += [read.name for read in operation.get_read_writes().reads]
        return found

    def lowered(token: Any, tensors: Any, after: Sequence[Any], **options: Any) -> Any:
        for tensor in after:
            tensor.realize()
        start, made = token.get_name(), [tensor.get_name() for tensor in after]
        for name in needed(made).keys() - needed([start]).keys():
            V.graph.additional_buffer_deps[name].add(start)
        return fallback_handler(wait, add_to_fallback_set=False)(token, tensors, after, **options)

    register_lowering(wait, type_promotion_kind=None)(lowered)


def named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an operator was given, by the names of its arguments."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs or {})
