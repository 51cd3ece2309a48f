"""A regression kit for models under torch.compile, for a project's own continuous integration.

    from moe_ops.testing import assert_cuda_graph_safe, assert_fused, assert_no_graph_breaks, assert_no_recompiles

    def test_my_model():
        assert_fused(model, tokens, blocks=2)
        assert_no_graph_breaks(model, tokens)
        assert_no_recompiles(model, lambda size: torch.randint(0, 1000, (1, size)), sizes=(2, 7, 64))
        assert_cuda_graph_safe(model, tokens)

`inputs` is a tensor, a tuple of positional arguments, or a dict of keyword arguments. Every function compiles afresh
(`torch.compiler.reset()` and an empty cache: the counters that they read stay 0 on a cache hit), whatever
`model.compile` and `torch.compiler.set_stance` were told before, and raises an AssertionError that says what broke and
what to do. None of them trusts a single signal: each of torch's own signals alone misses some failure, which is named
where the signal is read. They call the model, some of them several times: what that writes (a BatchNorm's statistics in
training) and draws from torch's generators is as after other calls; gradients, modes and settings are as they were.
`python -m moe_ops.examples.broken` shows what they say of five models that are broken on purpose.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import linecache
import re
import sys
import traceback
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral, Number
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes
from torch._dynamo.utils import counters

from moe_ops import compat, graphs
from moe_ops.capture import captured, contained, first_cause, leave_pool, warm_up
from moe_ops.census import graph_kernel_names, kernel_names
from moe_ops.compat import as_written, inductor_graphs_pool, kept_inputs, size_guards, when_compiling, whole_paths
from moe_ops.logs import quiet

__all__ = [
    "assert_cuda_graph_safe",
    "assert_fused",
    "assert_no_graph_breaks",
    "assert_no_recompiles",
    "kernel_names",
]

Inputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
_TIED = (
    "A Python int taken from a shape, or a branch on one, ties the code to a size: compute with tensors there, or take "
    "the branch out."
)
_SKIPPED = (
    "Dynamo skipped the function: is it disabled, or TorchScript, is torch.compile switched off "
    "(TORCHDYNAMO_DISABLE), or is there no tensor operation in it?"
)
_HOST = "the host needs a value that is on the device, and a CUDA graph cannot hold that"
_ON_DEVICE = "Keep the value on the device, as a tensor."
_WRITTEN = "an input is written in place, and torch records no CUDA graph of that"
_KEPT = (
    "Return the new value, keep it in a buffer of the module, or tell torch that the input stays where it is "
    "(torch._dynamo.mark_static_address)."
)
REPLAYS = 4  # CUDA graph trees warm up, then record, then replay: the third call is the first replay


def assert_fused(model: Any, *inputs: Any, blocks: int | None = None) -> Any:
    """Every MoE block that is found in `model` is fused, and there is at least one (exactly `blocks`, when given).

    Args:
        model: a model or function, or a name that `moe_ops.explain` knows.
        inputs: its positional arguments; or one tuple of them, or one dict of keyword arguments. None for a name.

    Returns:
        The report of `moe_ops.explain`, for checks on its `.fused` rows.

    Raises:
        AssertionError: a block was refused (its module, the source line that came nearest, the reason and the cure are
            quoted), a pass failed, or the number is wrong.
        ValueError: `blocks` is no number of blocks that can be fused.
    """
    import moe_ops

    if blocks is not None and not (isinstance(blocks, Integral) and blocks > 0):
        raise ValueError(
            f"assert_fused: blocks must be a number > 0, got {blocks!r}. Give None where any number will do; that none "
            "is fused, moe_ops.explain(model, ...).fused tells."
        )
    args, kwargs = _call(inputs[0] if len(inputs) == 1 else inputs)
    with _fresh(model), quiet():
        report = moe_ops.explain(model, *args, **kwargs)
    if report.error:
        rows = "".join("\n" + _indented(str(row)) for row in report.refused)
        left = f"\n{len(report.refused)} MoE block(s) would not be fused either:{rows}" if rows else ""
        raise AssertionError(f"the model raised: {report.error}{left}")
    if report.errors:  # a graph whose pass failed is left as it was, whatever was fused in others
        lines = "\n".join(f"  {line}" for line in report.errors)
        raise AssertionError(f"an error in moe_ops, please report it:\n{lines}")
    found = len(report.fused)
    if report.refused:
        rows = "\n".join(_indented(str(row)) for row in report.refused)
        raise AssertionError(f"{len(report.refused)} of {found + len(report.refused)} MoE block(s) not fused:\n{rows}")
    stops = [*report.graph_break_reasons, *report.eager_frames]
    stopped = "\nCapture stopped at:\n" + "\n".join(f"  {stop}" for stop in stops) if stops else ""
    if found == 0:
        raise AssertionError(
            "no MoE block was found. Is the model's expert code captured? `print(moe_ops.explain(model, ...))` shows "
            "the graphs; a Python loop over experts is not captured: use moe_ops.compile(model), or for transformers "
            f'models experts_implementation="grouped_mm".{stopped}'
        )
    if blocks is not None and found != blocks:
        names = "\n".join(f"  {row.name}" for row in report.fused)
        raise AssertionError(
            f"{found} MoE block(s) were fused, expected {blocks}. print(moe_ops.explain(model, ...)).\n"
            f"Fused are:\n{names}{stopped}"
        )
    return report


def assert_no_graph_breaks(
    function: Callable[..., Any],
    inputs: Inputs,
    *,
    backend: str = "moe_ops",
    dynamic: bool | None = None,
    backward: bool = False,
) -> None:
    """`torch.compile(function, backend=backend, dynamic=dynamic)` makes exactly one graph, without gradients.

    With `backward` so does a training step: gradients are enabled, and the outputs differentiated, as in
    `assert_cuda_graph_safe`.

    Four signals, none of which suffices: an error at the first break says why, but a frame that Dynamo skips is none;
    the break counter stays 0 for data-dependent branches and skipped frames; the number of graphs is 1 for a function
    whose frame was entered but left half in Python, and for one that Dynamo skips around another one that it compiles:
    then the skipped frame is on the stack while that compiles. `fullgraph=True` is none of them: with it Dynamo
    captures numbers and sizes that only the data knows (`.item()`, `bincount`), at which the user's own call breaks.

    Raises:
        AssertionError: with the line, and Dynamo's own reason for the first break; with the model's own error where it
            raises without torch.compile as well; where nothing was compiled, with what may be the cause.
        ValueError: `backward` of outputs that require no gradient; a backend that torch.compile does not know;
            `function` is none.
    """
    _check_given(function, backend, "assert_no_graph_breaks")
    run = _Trained(function, "assert_no_graph_breaks") if backward else _run
    with _fresh(function), torch.set_grad_enabled(backward), _as_one_graph(function, inputs, run):
        run(torch.compile(function, backend=backend, dynamic=dynamic), inputs)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    if breaks:
        reasons = "\n".join(f"  {count} x {reason}" for reason, count in counters["graph_break"].items())
        raise AssertionError(f"{breaks} graph break(s):\n{reasons}\nTORCH_LOGS=graph_breaks shows the source lines.")
    if graphs != 1:
        raise AssertionError(
            f"{graphs} graphs instead of 1. "
            + (_SKIPPED if graphs == 0 else "TORCH_LOGS=graph_code shows where each of them begins.")
        )


def assert_no_recompiles(
    function: Callable[..., Any],
    make_inputs: Callable[[int], Inputs],
    *,
    sizes: Iterable[int] = (2, 3, 16, 64),
    backend: str = "moe_ops",
    dynamic: bool | None = True,
    backward: bool = False,
) -> None:
    """The code compiled for `make_inputs(sizes[0])` serves every other size, without gradients.

    With `backward` that of a training step does: gradients are enabled, and the outputs differentiated, as in
    `assert_cuda_graph_safe`.

    Shapes are dynamic from the start; pass `dynamic=None` where `make_inputs` marks its dimensions itself
    (`torch._dynamo.mark_dynamic`). Left alone, torch.compile compiles a second time at the second size, by design.

    Raises:
        ValueError: `sizes` holds no two different integers, or 0 or 1, which torch.compile always compiles on their
            own; `function` or `make_inputs` is none, or the latter gives inputs of the same shapes for every size;
            `backward` of outputs that require no gradient; a backend that torch.compile does not know.
        AssertionError: with the guard that failed, as Dynamo gives it, and the lines that tie the code to a size, if
            any do; what `assert_no_graph_breaks` raises. Errors of the compiled code are raised as they are.
    """
    listed = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
    if not all(isinstance(size, Integral) and size >= 2 for size in listed) or len({*listed}) < 2:
        raise ValueError(
            f"assert_no_recompiles: sizes must be at least two sizes >= 2, different integers, got {listed}. Pass some "
            "as (2, 3, 16, 64). torch.compile specialises 0 and 1: test them on their own."
        )
    if not callable(make_inputs):
        raise ValueError(
            "assert_no_recompiles: make_inputs must be a function from a size to inputs, got "
            f"{type(make_inputs).__name__}. Pass one as lambda size: torch.randn(size, 8)."
        )
    _check_given(function, backend, "assert_no_recompiles")
    run = _Trained(function, "assert_no_recompiles") if backward else _run
    extents = []
    with _fresh(function), torch.set_grad_enabled(backward):
        compiled = torch.compile(function, backend=backend, dynamic=dynamic)
        for index, size in enumerate(listed):
            inputs = make_inputs(size)
            extents.append(_extents(inputs))
            with _as_one_graph(function, inputs, run):
                try:
                    with torch._dynamo.config.patch(error_on_recompile=index > 0, suppress_errors=False):
                        run(compiled, inputs)
                except torch._dynamo.exc.RecompileError as error:
                    _assert_runs(function, inputs, run)
                    message = _of_recompile(error, function, make_inputs, (listed[0], size), inputs, dynamic)
                    raise AssertionError(message) from error
        graphs = counters["stats"]["unique_graphs"]
    if all(_same_extents(extent, extents[0]) for extent in extents):
        raise ValueError(
            "assert_no_recompiles: make_inputs must give inputs whose shapes follow the size, got the same for each of "
            f"{listed}: nothing was tried. Make them of its argument."
        )
    if graphs != 1:
        cure = _SKIPPED if graphs == 0 else "Use assert_no_graph_breaks first."
        raise AssertionError(f"{graphs} graphs for {len(listed)} sizes instead of 1. {cure}")


def assert_cuda_graph_safe(
    function: Callable[..., Any],
    inputs: Inputs,
    *,
    changed: Iterable[Inputs] = (),
    backend: str | None = "moe_ops",
    backward: bool = False,
) -> None:
    """`function` can be captured in a CUDA graph, and a replay with other values computes what a plain call computes.

    With `backward` so can a training step: outputs are summed and differentiated, by the parameters and by the inputs
    that require gradients.

    With a backend, inputs on a GPU: compiled under `mode="reduce-overhead"`, nothing is skipped or partitioned, every
    call of the last turn replays a recorded graph, and the replays equal, bit for bit, the same compiled code without
    CUDA graphs. With `backend=None`: the function as it stands is captured, the graph holds work, and its replays equal
    the eager calls. Inputs on a CPU: nothing can be captured; the graph is searched for what torch refuses to capture:
    operations that ask the device, branches of the host, `.cpu()` and `.to("cpu")`, inputs that are written in place.
    A CPU does not show what depends on where a tensor is (`.to(other.device)`, NumPy, tensors made of Python data),
    what an operator does inside, values that were computed at capture time, and what the compiler makes for a GPU.

    Args:
        changed: more inputs of the same shapes, whose values take another route; by default each tensor of `inputs`
            flipped along its last dimension.
        backward: whether the backward is captured, or searched, as well.

    Raises:
        AssertionError: with the operation, or torch's reason; what `assert_no_graph_breaks` raises of breaks, also
            where Inductor takes the number that the host asks for out of the graph. For inputs on a CPU also where no
            graph reached Inductor, whose list of such operations it is.
        ValueError: `backend=None` for inputs that are not on a GPU, a backend that torch.compile does not know;
            `backward` of outputs that require no gradient; `changed` is no list of inputs, or holds other shapes;
            `function` is none.
    """
    _check_given(function, backend, "assert_cuda_graph_safe")
    inputs = _plain(inputs)
    if isinstance(changed, (torch.Tensor, Mapping)) or not isinstance(changed, Iterable):
        raise ValueError(
            f"assert_cuda_graph_safe: changed must be a list of inputs, got one {type(changed).__name__}. Use [it]."
        )
    variants = [inputs, *([*map(_plain, changed)] or [_flipped(inputs)])]
    shapes, *others = ([(*tensor.shape, tensor.dtype) for tensor in _tensors(variant)] for variant in variants)
    for other in others:
        if other != shapes:
            raise ValueError(
                f"assert_cuda_graph_safe: changed must have the shapes and dtypes of inputs, {shapes}, got {other}. A "
                "CUDA graph is for one of each: test others on their own."
            )
    run = _Trained(function, "assert_cuda_graph_safe") if backward else _run
    on_gpu = any(tensor.is_cuda for tensor in _tensors(inputs))
    with torch.set_grad_enabled(backward):
        if backend is None and not on_gpu:
            raise ValueError(
                "assert_cuda_graph_safe: backend must be a name for inputs that are not on a GPU, got None."
            )
        if backend is None:
            _assert_replays_equal_eager(function, variants, run)
            return
        # what asks the device is to be found in the graph, and not to break it
        allowed = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
        try:
            with _fresh(function), allowed, _as_one_graph(function, inputs, run):
                if on_gpu:
                    with contained():
                        _assert_compiled_replays(function, variants, backend, run)
                else:
                    _assert_no_incompatible_node(function, inputs, backend, run)
        except IndexError:  # Dynamo's own, of x[:, n] by a number that was allowed
            assert_no_graph_breaks(function, inputs, backend="eager", backward=backward)
            raise
        # Inductor may take a number that was allowed out of the graph: without the permission the caller's call breaks
        assert_no_graph_breaks(function, inputs, backend="eager", backward=backward)


class _Trained:
    """Calls `function`, or what was compiled of it, and differentiates: returns what it returned, then gradients."""

    def __init__(self, function: Callable[..., Any], caller: str) -> None:
        self._caller = caller
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]

    def __call__(self, function: Callable[..., Any], inputs: Inputs) -> list[torch.Tensor]:
        fresh: Inputs = _changed(inputs, self._leaf)
        outputs = _tensors(_run(function, fresh))
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            why = "outputs that require no gradient" if outputs else "outputs without a tensor that is found in them"
            why = "a call inside torch.inference_mode()" if torch.is_inference_mode_enabled() else why
            raise ValueError(f"{self._caller}: backward must be False for {why}, got True.")
        total = torch.stack([output.sum(dtype=torch.float32) for output in differentiable]).sum()
        leaves = [*self._trained, *(tensor for tensor in _tensors(fresh) if tensor.requires_grad)]
        if not leaves:
            raise ValueError(
                f"{self._caller}: function must be a module with trained parameters, or take inputs that require "
                "gradients, for backward=True."
            )
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        return [*(output.detach() for output in outputs), *(grad for grad in grads if grad is not None)]

    @staticmethod
    def _leaf(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().clone().requires_grad_()
        # torch keeps what `mark_dynamic` said of a tensor in its attributes
        vars(leaf).update((name, value) for name, value in vars(tensor).items() if name.startswith("_dynamo_"))
        return leaf


_Run = Callable[[Callable[..., Any], Inputs], Any]


def _assert_compiled_replays(function: Callable[..., Any], variants: list[Inputs], backend: str, run: _Run) -> None:
    """The compiled half of `assert_cuda_graph_safe` on a GPU."""
    import torch._inductor.config as inductor_config

    # One cache for both: Inductor picks the tiles of a reduction by timing, and another tile sums in another order.
    with inductor_config.patch("triton.cudagraph_or_error", True):
        plain = torch.compile(function, backend=backend)
        expected = [_compared(run(plain, variant)) for variant in variants]
        torch.compiler.reset()
        replayed = torch.compile(function, backend=backend, mode="reduce-overhead")
        with _graph_events() as events:
            for turn in range(REPLAYS):
                before = events["replay"]
                for variant, wanted in zip(variants, expected, strict=True):
                    torch.compiler.cudagraph_mark_step_begin()
                    try:
                        got = _tensors(run(replayed, variant))
                    except RuntimeError as error:
                        leave_pool(inductor_graphs_pool())
                        raise _not_capturable(error) from error
                    _assert_same_bits(got, wanted, f"call {turn} under CUDA graphs", "the compiled code without them")
        # Neither equal bits nor a skip counter at 0 says that there was a graph: a backend may ignore `mode`.
        replays = events["replay"] - before
        if not events["capture_end"] or replays < len(variants):
            raise AssertionError(
                f"{events['capture_end']} CUDA graph(s) were recorded, and the last {len(variants)} calls replayed "
                f"{replays}: does the backend honour mode='reduce-overhead'? TORCH_LOGS=cudagraphs shows what it does."
            )
        # cudagraph_or_error covers skips but not partitions, which split one graph into several around an operation.
        for counter in ("cudagraph_skips", "cudagraph_partitions"):
            if counters["inductor"][counter]:
                count = counters["inductor"][counter]
                raise AssertionError(f"{counter} is {count}, expected 0. TORCH_LOGS=cudagraphs names the operation.")


def _assert_replays_equal_eager(function: Callable[..., Any], variants: list[Inputs], run: _Run) -> None:
    """The eager half of `assert_cuda_graph_safe`: capture by hand, replay over changed inputs."""
    expected = [_compared(run(function, variant)) for variant in variants]
    static = _changed(variants[0], _copied)
    warm_up(partial(run, function, static))
    try:
        graph, returned = captured(partial(run, function, static), keep_graph=True)
    except RuntimeError as error:
        raise _not_capturable(error) from error
    outputs = _tensors(returned)
    if not _holds_work(graph):
        raise AssertionError("the captured graph is empty: was the result computed before, or on another stream?")
    for index, (variant, wanted) in enumerate(zip(variants, expected, strict=True)):
        for target, source in zip(_tensors(static), _tensors(variant), strict=True):
            target.detach().copy_(source)
        graph.replay()
        _assert_same_bits(outputs, wanted, f"the replay with inputs {index}", "the eager call")


@contextlib.contextmanager
def _graph_events() -> Iterator[Counter[str]]:
    """Count the recordings and replays of CUDA graphs by anyone, Inductor's trees included: they call these methods."""
    events: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events[name] += 1
            return method(*args, **kwargs)

        return call

    methods = {name: getattr(torch.cuda.CUDAGraph, name) for name in ("capture_end", "replay")}
    try:
        for name, method in methods.items():
            setattr(torch.cuda.CUDAGraph, name, counted(name, method))
        yield events
    finally:
        for name, method in methods.items():
            setattr(torch.cuda.CUDAGraph, name, method)


def _not_capturable(error: RuntimeError) -> AssertionError:
    """Of the call that ended a capture: closing it raises once more, of no reason."""
    cause = first_cause(error)
    if not str(cause).startswith("CUDA error"):
        return AssertionError(f"it cannot be captured:\n{_indent(cause)}")
    place = graphs.in_line(graphs.frame("".join(traceback.format_tb(cause.__traceback__))))
    return AssertionError(
        f"it cannot be captured:\n  {place}\n  {str(cause).splitlines()[0]}\nA graph has no place for what waits for "
        "the GPU (.item(), .tolist(), a copy to the CPU, a size that the data decides): keep the value on the device."
    )


def _holds_work(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a replay runs anything; true where the nodes cannot be listed."""
    try:
        return bool(graph_kernel_names(graph))
    except ImportError:
        return True


def _assert_no_incompatible_node(function: Callable[..., Any], inputs: Inputs, backend: str, run: _Run) -> None:
    """The CPU half: Inductor's own list of what it will not capture, applied to the graphs after all passes; and what
    is nothing on a CPU, by Dynamo's graphs.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    # Inductor's list is of operators; of these it knows when it has lowered them, for a GPU.
    branches = {torch.ops.higher_order.cond, torch.ops.higher_order.while_loop}
    found: list[str] = []
    looked = False

    def note(why: str, node: torch.fx.Node, trace: str, cure: str) -> None:
        place = graphs.frame(trace)
        line = graphs.in_line(place) if place[0] else "(no source line)"
        found.append(f"{why}:\n  {line}\n    as {graphs.describe(node)}\n{cure}")

    def look(graph: torch.fx.Graph) -> None:
        nonlocal looked
        looked = True
        module = graph.owning_module
        first = None if module is None else get_first_incompatible_cudagraph_node(module)
        for node in (first, *(node for node in graph.nodes if node.target in branches)):
            if node is not None:
                note(_HOST, node, graphs.trace_of(node), _ON_DEVICE)
        given = [node for node in graph.nodes if node.op == "placeholder"]
        kept = kept_inputs(given)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            target, value = node.args[:2]
            if target in given and target not in kept:
                trace = graphs.trace_of(node) or graphs.trace_of(value)
                note(_WRITTEN, node, trace, _KEPT)

    def compiler(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                if _copies_to_host(node):
                    note(_HOST, node, graphs.trace_of(node), _ON_DEVICE)
        return torch._dynamo.lookup_backend(backend)(module, *args, **kwargs)

    with inductor_config.patch(post_grad_custom_post_pass=look):
        run(torch.compile(function, backend=compiler), inputs)
    if not looked:
        raise AssertionError(
            f"no graph reached Inductor under backend={backend!r}, so that nothing was searched. Give a backend that "
            'goes through Inductor ("moe_ops", "inductor"); if it does, assert_no_graph_breaks tells what became of '
            "the function."
        )
    if found:
        raise AssertionError(found[0])


def _copies_to_host(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph would copy from a GPU: where the code says so. A device that is looked up is the
    CPU here, and another one there.
    """
    if node.op != "call_method" or node.target not in ("cpu", "to"):
        return False
    told = any(re.fullmatch(r"cpu(:\d+)?", str(value)) for value in (*node.args[1:], *node.kwargs.values()))
    return node.target == "cpu" or (told and re.search("['\"]cpu", _call_text(graphs.trace_of(node))) is not None)


def _call_text(trace: str) -> str:
    """The source of the innermost call outside of torch, whose trace has its first line alone."""
    file, line, _, text = graphs.frame(trace)
    for more in linecache.getlines(file)[int(line or 0) :]:
        if text.count("(") <= text.count(")"):
            break
        text += more
    return text


def _of_recompile(
    error: Exception,
    function: Callable[..., Any],
    make_inputs: Callable[[int], Inputs],
    sizes: tuple[int, int],
    inputs: Inputs,
    dynamic: bool | None,
) -> str:
    """What failed at the second size, with `inputs`: the lines that tie the code to a size, the guard, its cause."""
    lines, guard = _tied_to_sizes(function, make_inputs, *sizes, dynamic), str(error)
    told = dynamic is None and any(hasattr(tensor, "_dynamo_dynamic_indices") for tensor in _tensors(inputs))
    if not lines and not re.search(r"(size|stride)( mismatch|\(\))", guard):
        cause = "What the guard names must stay the same from call to call, or be held in a tensor."
    elif "duck sizing" in guard:
        cause = (
            f"Dimensions that are as long as one another at the first size, {sizes[0]}, count as one. If chance made "
            "them so, begin with a size that is no other dimension, as sizes=(5, 16, 64)."
        )
    elif dynamic or told:
        cause = _TIED
    else:
        cause = (
            f"dynamic={dynamic} compiles for the sizes of the first call: pass dynamic=True, or mark the dimensions of "
            "the inputs (torch._dynamo.mark_dynamic) and pass dynamic=None."
        )
    return (
        f"size {sizes[1]} compiles again after size {sizes[0]}:\n{lines}{_indent(error)}\n{cause} "
        "TORCH_LOGS=recompiles,guards shows more."
    )


def _tied_to_sizes(
    function: Callable[..., Any], make_inputs: Callable[[int], Inputs], size: int, other: int, dynamic: bool | None
) -> str:
    """The source lines whose code holds for `size` and not for `other`, one a line; empty when torch does not know."""
    assumed: list[dict[str, str]] = []

    def look(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assumed[-1].update(size_guards())
        return gm.forward

    for each in (size, other):
        torch.compiler.reset()
        assumed.append({})
        _run(torch.compile(function, backend=look, dynamic=dynamic), make_inputs(each))
    lines = (line for guard, line in assumed[0].items() if guard not in assumed[1])
    return "".join(f"  {line}\n" for line in dict.fromkeys(lines))


_SHAPES = torch.fx.experimental.symbolic_shapes
# What Dynamo lets through of a size, or a number, that only the data knows.
_OF_SIZES: Any = getattr(_SHAPES, "GuardOnDataDependentSymNode", ())
# What it raises of a size that `mark_dynamic` marked, and the code is for one value of.
_OF_MARKS: Any = getattr(_SHAPES, "ConstraintViolationError", ())


def _check_given(function: Any, backend: Any, caller: str) -> None:
    """What torch.compile says of them names neither, or comes out of the compiled call."""
    if not callable(function):
        raise ValueError(f"{caller}: function must be a module or a function, got {type(function).__name__}.")
    try:
        torch._dynamo.lookup_backend(backend)
    except torch._dynamo.exc.InvalidBackend as error:
        names = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"backend must be a name that torch.compile knows ({names}), got {backend!r}.") from error


@contextlib.contextmanager
def _as_one_graph(function: Callable[..., Any], inputs: Inputs, run: _Run) -> Iterator[None]:
    """What Dynamo raises of code that it cannot capture, as an AssertionError, and code around what it compiles too."""
    around: list[list[str]] = []
    try:
        with torch._dynamo.error_on_graph_break(True), when_compiling(lambda _: around.append(_left_to_python())):
            yield
    except (torch._dynamo.exc.TorchDynamoException, _OF_SIZES, _OF_MARKS) as error:
        _assert_runs(function, inputs, run)
        what, said = "it does not compile as one graph", _indent(error)
        if isinstance(error, _OF_MARKS):
            what, said = "what is marked as dynamic is tied to a size", f"{said}\n{_TIED}"
        if isinstance(error, _OF_SIZES):  # the lines after its first are of torch's code
            said = f"{_asking(function, inputs, run)}  {str(error).strip().splitlines()[0]}\n{_ON_DEVICE}"
        raise AssertionError(f"{what}:\n{said}") from error
    if around and around[0]:  # later ones may be compiled inside of what the first has become
        lines = "\n".join(f"  {line}" for line in around[0])
        raise AssertionError(
            f"it runs in Python, around what is compiled of it:\n{lines}\n"
            "Is it disabled (torch.compiler.disable, also with recursive=False), or a wrapper that Dynamo skips?"
        )


def _assert_runs(function: Callable[..., Any], inputs: Inputs, run: _Run) -> None:
    """What fails without torch.compile as well is not torch.compile's."""
    try:
        with torch.compiler.set_stance("force_eager"):
            run(function, inputs)
    except Exception as error:
        raise AssertionError(f"the model raised, without torch.compile too: {type(error).__name__}: {error}") from error


def _asking(function: Callable[..., Any], inputs: Inputs, run: _Run) -> str:
    """The line that asks for a number or a size that only the data knows, where Dynamo may not capture any."""
    torch.compiler.reset()
    refused = torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False)
    try:
        with refused, torch._dynamo.error_on_graph_break(True):
            run(torch.compile(function, backend="eager"), inputs)
    except torch._dynamo.exc.Unsupported as error:
        return _indent(error).partition("\n")[0] + "\n"
    return ""


def _left_to_python() -> list[str]:
    """The frames between the call of the compiled function in this file and Dynamo, but torch's: Dynamo skipped them.
    What it compiles is not on the stack, as it has not begun to run.
    """
    found: list[str] = []
    frame = sys._getframe().f_back
    others = (graphs.TORCH, __file__, str(contextlib.__file__))
    while frame is not None and frame.f_code is not _run.__code__:
        if not frame.f_code.co_filename.startswith(others):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        frame = frame.f_back
    return [] if frame is None else found[::-1]  # None: compiled for somebody else


@contextlib.contextmanager
def _fresh(function: Any) -> Iterator[None]:
    """Compile from nothing: no code, no cache entry, counters at 0, no `module.compile` of before; capture what
    `moe_ops.compile` lets Dynamo capture.

    Under the default stance: others leave calls eager, or guards unread, so that a check could not fail.
    """
    from torch._inductor.utils import fresh_cache

    torch.compiler.reset()
    counters.clear()
    cache = fresh_cache()
    cache.__enter__()
    try:
        allowed = torch._dynamo.config.patch(compat.captured_under(function))
        with as_written(function), torch.compiler.set_stance("default"), allowed:
            yield
    finally:
        cache.__exit__(None, None, None)  # it leaves its folder behind where it sees an error
        torch.compiler.reset()


def _call(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`inputs` as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _run(function: Callable[..., Any], inputs: Inputs) -> Any:
    args, kwargs = _call(inputs)
    return function(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, those of mappings and dataclasses included."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaves(value: Any) -> list[Any]:
    """Those of pytree, with what is in the mappings and dataclasses among them in their place."""
    leaves = torch.utils._pytree.tree_leaves(value)
    nested = (
        [leaf] if isinstance(leaf, torch.Tensor) or not _parts(leaf) else _leaves(_parts(leaf)) for leaf in leaves
    )
    return [leaf for inner in nested for leaf in inner]


def _extents(inputs: Inputs) -> list[Any]:
    """What of inputs may follow a size: shapes, and numbers; what nobody can look into stands for itself."""
    return [getattr(leaf, "shape", leaf) for leaf in _leaves(inputs)]


def _same_extents(one: list[Any], other: list[Any]) -> bool:
    """`==` of what nobody can look into may compare tensors."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        left is right or (isinstance(left, (Number, str, tuple)) and left == right) for left, right in pairs
    )


def _compared(outputs: Any) -> list[torch.Tensor]:
    """The tensors of outputs that others are compared with."""
    found = _tensors(outputs)
    if not found:
        raise ValueError(
            "assert_cuda_graph_safe: function must return tensors, alone or in tuples, lists, mappings or dataclasses, "
            f"got {type(outputs).__name__}: nothing would be compared."
        )
    return found


def _parts(value: Any) -> dict[str, Any]:
    """What a leaf of pytree holds: a mapping that it does not know, a dataclass."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def _plain(value: Any) -> Any:
    """A mapping as a dict: pytree takes one that it does not know, as transformers' BatchEncoding, for a leaf."""
    return dict(value) if isinstance(value, Mapping) else value


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with something else for its tensors, in dataclasses and what is based on UserDict as well."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if isinstance(leaf, UserDict):
            made: Any = copy.copy(leaf)
            made.update(_changed(dict(leaf), change))
            return made
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for name, part in _parts(leaf).items():
            object.__setattr__(made, name, _changed(part, change))
        return made

    return torch.utils._pytree.tree_map(other, value)


def _flipped(inputs: Inputs) -> Inputs:
    """The same values in another order: still valid token ids, but every token is routed elsewhere."""
    flipped: Inputs = _changed(inputs, lambda tensor: _copied(tensor, True))
    return flipped


def _copied(tensor: torch.Tensor, flipped: bool = False) -> torch.Tensor:
    copied = tensor.detach().flip(-1) if flipped else tensor.detach().clone()
    return copied.requires_grad_(tensor.requires_grad)


def _assert_same_bits(got: list[torch.Tensor], wanted: list[torch.Tensor], what: str, reference: str) -> None:
    if len(got) != len(wanted):
        raise AssertionError(f"{what} returned {len(got)} tensors, {reference} {len(wanted)}.")
    for index, (left, right) in enumerate(zip(got, wanted, strict=True)):
        if not torch.equal(left, right):
            one, other = left.double(), right.double()
            if left.shape == right.shape and torch.equal(one.isnan(), other.isnan()):
                one, other = (wide.masked_fill(wide.isnan(), 0.0) for wide in (one, other))
                if torch.equal(one, other):
                    continue
            difference = (one - other).abs().max().item() if one.shape == other.shape else float("nan")
            raise AssertionError(
                f"output {index} of {what} differs from {reference} by up to {difference:g}: something was computed at "
                "capture time (a size, a pointer, a Python number) instead of on the device."
            )


def _indent(error: BaseException) -> str:
    """The first lines of an error, below the line of the user's code that Dynamo names at the end of its own."""
    text, trace, *_ = *re.split("from user code:|User stack:", whole_paths(str(error)).strip(), maxsplit=1), ""
    place = graphs.frame(trace)
    first = [graphs.in_line(place)] if place[0] else []
    return _indented("\n".join([*first, *text.strip().splitlines()[:12]]))


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
