"""Each assertion of moe_ops.testing passes on sound code and fails, with a useful message, on code broken for it."""

import logging
import re
import tempfile
from collections import UserDict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import moe_ops
from compile_passes import passes
from compile_passes.recognise import recognise
from moe_ops import testing
from moe_ops.testing import (
    assert_cuda_graph_safe,
    assert_fused,
    assert_no_graph_breaks,
    assert_no_recompiles,
    kernel_names,
)


class Sound(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight).sum(-1)


class Branches(Sound):
    """A data-dependent Python branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if x.sum() > 0 else x


class DataDependentSize(Sound):
    """An output whose size only the data tells, so that the host must wait for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x @ self.weight)


class TiesSize(Sound):
    """Python control flow on a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] > 10 else super().forward(x) * 2


class Skipped(Sound):
    """Dynamo does not look into the function."""

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Experts(torch.nn.Module):
    """A router and stacked experts, as often as `blocks` says; the first of them with `activation`."""

    def __init__(self, blocks: int = 1, activation=torch.nn.functional.silu) -> None:
        super().__init__()
        self.blocks, self.activation = blocks, activation
        self.router = torch.nn.Parameter(torch.randn(4, 8))
        self.gate_up = torch.nn.Parameter(torch.randn(4, 12, 8))
        self.down = torch.nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self.blocks):
            x = x + self.block(x, self.activation if index == 0 else torch.nn.functional.silu)
        return x

    def block(self, x: torch.Tensor, activation) -> torch.Tensor:
        weights, ids = torch.nn.functional.linear(x, self.router).softmax(-1).topk(2, dim=-1)
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(2, dim=0)
        gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        out = torch.bmm(self.down[flat], (activation(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1, 1)).view(-1, 2, 8).sum(1)


INPUTS = torch.randn(4, 8)
BACKENDS = ("inductor", "moe_ops")


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sound_code_passes_every_assertion(backend: str) -> None:
    assert_no_graph_breaks(Sound(), INPUTS, backend=backend)
    assert_no_recompiles(Sound(), batch, sizes=(2, 5, 64), backend=backend)
    assert_cuda_graph_safe(Sound(), INPUTS, backend=backend)


@pytest.mark.parametrize(
    "inputs", [INPUTS, (INPUTS,), {"x": INPUTS}, UserDict(x=INPUTS)], ids=["tensor", "tuple", "dict", "mapping"]
)
def test_every_form_of_inputs(inputs: testing.Inputs) -> None:
    assert_no_graph_breaks(Sound(), inputs, backend="inductor")


@pytest.mark.parametrize("blocks", [None, 2], ids=["any number", "exactly two"])
def test_fused_blocks_are_reported(blocks: int | None) -> None:
    with torch.no_grad():
        report = assert_fused(Experts(2), INPUTS, blocks=blocks)
    assert len(report.fused) == 2 and not report.refused


@pytest.mark.parametrize("blocks", [1, 3])
def test_another_number_of_fused_blocks_is_an_error(blocks: int) -> None:
    said = rf"^2 MoE block\(s\) were fused, expected {blocks}\. "
    with torch.no_grad(), pytest.raises(AssertionError, match=said) as caught:
        assert_fused(Experts(2), INPUTS, blocks=blocks)
    assert str(caught.value).count("  test_testing_kit.py:") == 2, "the fused blocks are named"


@pytest.mark.parametrize("blocks", [None, 1], ids=["any number", "the fused one alone"])
def test_one_refused_block_is_an_error_with_line_reason_and_cure(blocks: int | None) -> None:
    model = Experts(2, activation=torch.cos)
    with torch.no_grad():
        (row,) = moe_ops.explain(model, INPUTS).refused
        with pytest.raises(AssertionError) as caught:
            assert_fused(model, INPUTS, blocks=blocks)
    assert str(caught.value).splitlines() == [
        "1 of 2 MoE block(s) not fused:",
        f"  refused: {row.location}",
        f"    line: {row.source}",
        f"    why:  {row.reason}",
        f"    cure: {row.cure}",
    ]
    assert "test_testing_kit.py" in row.location and row.reason and row.cure
    assert row.source.startswith("out = torch.bmm(")


@pytest.mark.provokes_errors
def test_a_pass_that_raised_is_an_error_whatever_else_is_fused(monkeypatch) -> None:
    one, other = Experts(), Experts()

    def run(x: torch.Tensor) -> torch.Tensor:
        x = one(x)
        torch._dynamo.graph_break()
        return other(x)

    calls = []

    def fails_once(reading):
        calls.append(reading)
        if len(calls) == 1:
            raise ValueError("a defect")
        return recognise(reading)

    monkeypatch.setattr(passes, "recognise", fails_once)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"an error in moe_ops[\s\S]*ValueError: a defect"):
        assert_fused(run, INPUTS)


def test_the_module_is_named_first() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Experts(activation=torch.cos))
    said = r"\n  refused: 1 \(.*test_testing_kit\.py:\d+ in block\)"
    with torch.no_grad(), pytest.raises(AssertionError, match=said):
        assert_fused(model, INPUTS)


class Scaled(Experts):
    """Takes two inputs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale


SCALE = torch.tensor(2.0)


@pytest.mark.parametrize(
    "inputs", [(INPUTS, SCALE), ((INPUTS, SCALE),), ({"x": INPUTS, "scale": SCALE},)], ids=["several", "tuple", "dict"]
)
def test_inputs_of_assert_fused(inputs: tuple[object, ...]) -> None:
    with torch.no_grad():
        assert len(assert_fused(Scaled(), *inputs, blocks=1).fused) == 1


def test_a_model_by_name() -> None:
    assert len(assert_fused("mixtral", blocks=2).fused) == 2


def test_the_warnings_of_the_passes_are_in_the_message_alone(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match="1 of 1 MoE block"):
        assert_fused(Experts(activation=torch.cos), INPUTS)
    assert not caplog.records
    assert logging.getLogger("compile_passes").level == logging.NOTSET


class Outside(Experts):
    """The experts run where Dynamo does not look."""

    @torch._dynamo.disable
    def block(self, x: torch.Tensor, activation) -> torch.Tensor:
        return super().block(x, activation)


def test_what_stopped_the_capture_is_named() -> None:
    with torch.no_grad(), pytest.raises(AssertionError) as caught:
        assert_fused(Outside(), INPUTS)
    assert "torch.compiler.disable" in str(caught.value) and "test_testing_kit.py" in str(caught.value)


def test_code_without_experts_is_an_error_that_names_the_usual_causes() -> None:
    with (
        torch.no_grad(),
        pytest.raises(AssertionError, match=r"^no MoE block was found[\s\S]*Python loop over experts"),
    ):
        assert_fused(Sound(), INPUTS)


def test_a_model_that_raises_is_quoted() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the tokens are missing")

    with pytest.raises(AssertionError, match=r"^the model raised: ValueError: the tokens are missing$"):
        assert_fused(fails, INPUTS)


def test_data_dependent_branch_is_a_break() -> None:
    with pytest.raises(AssertionError, match=r"does not compile as one graph[\s\S]*[Dd]ata-dependent") as caught:
        assert_no_graph_breaks(Branches(), INPUTS, backend="inductor")
    assert str(caught.value).splitlines()[1].startswith("  return x @ self.weight if x.sum() > 0 else x  # ")


def test_disabled_function_is_a_break() -> None:
    with pytest.raises(AssertionError, match=r"does not compile as one graph:[\s\S]*torch\.compiler\.disable"):
        assert_no_graph_breaks(Skipped(), INPUTS, backend="inductor")


def test_skipped_function_is_no_graph() -> None:
    """fullgraph=True accepts a frame without tensor operations, and no break is counted: only the number tells."""
    with pytest.raises(AssertionError, match=r"0 graphs instead of 1\. Dynamo skipped the function"):
        assert_no_graph_breaks(lambda x: x.shape[0], INPUTS, backend="inductor")


OFF = {
    "TorchScript": lambda: (torch.jit.trace(Sound().requires_grad_(False), INPUTS), nullcontext()),
    "Dynamo disabled": lambda: (Sound(), torch._dynamo.config.patch(disable=True)),
}


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
@pytest.mark.parametrize("off", OFF.values(), ids=OFF)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_where_nothing_is_compiled_the_causes_are_named(assertion, off) -> None:
    model, context = off()
    searched = assertion is assert_cuda_graph_safe
    said = "no graph reached Inductor" if searched else r"^0 graphs .*TorchScript.*TORCHDYNAMO_DISABLE"
    with context, pytest.raises(AssertionError, match=said):
        assertion(model, batch if assertion is assert_no_recompiles else INPUTS)


STANCES = {
    "force_eager": {"stance": "force_eager"},
    "eager_then_compile": {"stance": "eager_then_compile"},
    "aot_eager_then_compile": {"stance": "aot_eager_then_compile"},
    "eager_on_recompile": {"stance": "eager_on_recompile"},
    "fail_on_recompile": {"stance": "fail_on_recompile"},
    "guards unread": {"skip_guard_eval_unsafe": True},
    "another backend": {"force_backend": "eager"},
}


@pytest.mark.parametrize("stance", STANCES.values(), ids=STANCES)
def test_the_callers_stance_hides_nothing(stance: dict[str, object]) -> None:
    """An eager first call leaves one size to compile, and no guard that is not read fails."""
    with torch.compiler.set_stance(**{"stance": "default", **stance}):
        before = torch._dynamo.eval_frame._stance
        assert_no_graph_breaks(Sound(), INPUTS, backend="aot_eager")
        assert_no_recompiles(Sound(), batch, sizes=(2, 64), backend="aot_eager")
        with pytest.raises(AssertionError, match=r"^size 64 compiles again after size 2"):
            assert_no_recompiles(TiesSize(), batch, sizes=(2, 64), backend="aot_eager")
        with pytest.raises(AssertionError, match=r"^the host needs a value that is on the device"):
            assert_cuda_graph_safe(TO_HOST["cpu"], INPUTS)
        assert torch._dynamo.eval_frame._stance == before


def test_where_nothing_is_compiled_nothing_is_fused() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(AssertionError, match=r"^no MoE block was found"):
        assert_fused(Experts(), INPUTS)


def test_a_break_that_the_model_allows_is_counted() -> None:
    def allows(x: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.error_on_graph_break(False):
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    with pytest.raises(AssertionError, match=r"^1 graph break\(s\):\n  1 x Call to `torch\._dynamo\.graph_break"):
        assert_no_graph_breaks(allows, INPUTS, backend="aot_eager")


class ReadsNumber(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = (x > 0).sum().item()
        return super().forward(x) / positive


class CountsExperts(Experts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hit = torch.bincount(torch.nn.functional.linear(x, self.router).argmax(-1), minlength=4)
        return super().forward(x) + hit.sum()


OF_THE_DATA = {ReadsNumber: "positive = (x > 0).sum().item()", CountsExperts: "hit = torch.bincount("}


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles])
@pytest.mark.parametrize("model", OF_THE_DATA, ids=lambda model: model.__name__)
def test_what_fullgraph_captures_alone_is_a_break(assertion, model) -> None:
    """The user's own call breaks there, and passes where the user lets Dynamo capture that."""
    inputs = batch if assertion is assert_no_recompiles else INPUTS
    with pytest.raises(AssertionError, match=r"^it does not compile as one graph:\n") as caught:
        assertion(model(), inputs, backend="aot_eager")
    line = str(caught.value).splitlines()[1]
    assert OF_THE_DATA[model] in line and "test_testing_kit.py:" in line
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        assertion(model(), inputs, backend="aot_eager")


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
def test_a_number_that_cannot_be_kept_symbolic_is_said_by_its_line(assertion) -> None:
    """Dynamo's own error, where it may capture numbers, names lines of torch alone."""
    weight = torch.randn(4, 8, 8)

    def scales(x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("th,tknh->tkn", x, weight[x[:, :2].long() % 4])
        return y * x.max().item()

    inputs = batch if assertion is assert_no_recompiles else INPUTS
    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.raises(AssertionError) as caught:
        assertion(scales, inputs)
    first, line, reason, cure = str(caught.value).splitlines()
    assert first == "it does not compile as one graph:"
    assert line.startswith("  return y * x.max().item()  # ") and "test_testing_kit.py:" in line
    assert reason.startswith("  Could not guard") and cure == "Keep the value on the device, as a tensor."


class Refuses(Sound):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 3:
            raise ValueError("too many tokens")
        return super().forward(x)


class Asserts(Sound):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] <= 3, "too many tokens"
        return super().forward(x)


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
@pytest.mark.parametrize("model", [Refuses, Asserts])
def test_what_the_model_raises_by_itself_is_no_failed_capture(assertion, model) -> None:
    inputs = batch if assertion is assert_no_recompiles else INPUTS
    said = r"^the model raised, without torch.compile too: (ValueError|AssertionError): too many tokens"
    with pytest.raises(AssertionError, match=said):
        assertion(model(), inputs)


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
def test_a_failed_assertion_leaves_no_folder(assertion, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(AssertionError):
        assertion(Branches(), batch if assertion is assert_no_recompiles else INPUTS)
    assert not [*tmp_path.glob("tmp*")]


class LeftToPython(Sound):
    """What Dynamo compiles is called by code that it skips, which asks the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sound()

    @torch.compiler.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + float(x.sum())


class ListsCounts(torch.nn.Module):
    """A size that only the data knows, and a list of so many numbers, as DeepSeek's loop has them."""

    def forward(self, x):
        counts = torch.bincount((x[:, 0] > 0).long(), minlength=2).tolist()
        return sum(x[:1] * count for count in counts)


def test_sizes_of_the_data_break_the_graph():
    """Dynamo raises something of its own there."""
    with pytest.raises(AssertionError, match="does not compile as one graph"):
        assert_no_graph_breaks(ListsCounts(), INPUTS, backend="moe_ops_eager")


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_cuda_graph_safe])
def test_code_around_the_one_graph_is_named(assertion) -> None:
    """One graph, no break, nothing that cannot be captured in it."""
    with pytest.raises(AssertionError, match=r"^it runs in Python, around what is compiled of it:\n") as caught:
        assertion(LeftToPython(), INPUTS, backend="inductor")
    line = str(caught.value).splitlines()[1]
    assert "test_testing_kit.py:" in line and line.endswith("in LeftToPython.forward")


def test_code_of_a_package_whose_name_begins_with_torch_is_named() -> None:
    file = torch.__path__[0] + "tune/layers.py"
    made = {"compiler": torch.compiler, "LeftToPython": LeftToPython}
    source = (
        "class Outer(LeftToPython):\n"
        "    @compiler.disable(recursive=False)\n"
        "    def forward(self, x):\n"
        "        return self.inner(x) + 1"
    )
    exec(compile(source, file, "exec"), made)
    with pytest.raises(AssertionError, match=rf"^it runs in Python, [\s\S]*{re.escape(file)}:4 in Outer\.forward"):
        assert_no_graph_breaks(made["Outer"](), INPUTS, backend="aot_eager")


def test_what_a_module_was_compiled_with_before_does_not_matter() -> None:
    model = Experts().requires_grad_(False)
    model.compile(backend="eager")
    assert_fused(model, INPUTS, blocks=1)
    assert_cuda_graph_safe(model, INPUTS)
    assert_no_graph_breaks(model, INPUTS, backend="moe_ops_eager")
    assert counters["moe_ops"]["fused"] == 1
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
def test_a_backend_that_does_not_exist_is_named(assertion) -> None:
    inputs = batch if assertion is assert_no_recompiles else INPUTS
    with pytest.raises(ValueError, match=r"^backend must be a name that torch.compile knows \(.*moe_ops.*, got 'nope'"):
        assertion(Sound(), inputs, backend="nope")


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_no_recompiles, assert_cuda_graph_safe])
@pytest.mark.parametrize("function", [None, 3, "mixtral"], ids=["None", "a number", "a name"])
def test_what_is_no_function_is_named(assertion, function: object) -> None:
    inputs = batch if assertion is assert_no_recompiles else INPUTS
    said = f"^{assertion.__name__}: function must be a module or a function, got {type(function).__name__}"
    with pytest.raises(ValueError, match=said):
        assertion(function, inputs)


@pytest.mark.parametrize("blocks", [0, -1, "1", 1.5])
def test_a_number_of_blocks_that_no_model_has_is_refused(blocks: object) -> None:
    with pytest.raises(ValueError, match=f"^assert_fused: blocks must be a number > 0, got {blocks!r}"):
        assert_fused(Experts(), INPUTS, blocks=blocks)


def test_marked_dimensions_that_are_tied_to_a_size() -> None:
    def make(size: int) -> torch.Tensor:
        x = batch(size)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    def ties(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] == 2 else x

    with pytest.raises(AssertionError, match=r"^what is marked as dynamic is tied to a size:\n") as caught:
        assert_no_recompiles(ties, make, backend="aot_eager", dynamic=None)
    line, *_, cure = str(caught.value).splitlines()[1:]
    assert line.startswith("  return x + 1 if x.shape[0] == 2 else x  # ") and "test_testing_kit.py:" in line
    assert cure.endswith("take the branch out.")


@pytest.mark.parametrize("dynamic", [None, False])
def test_sizes_that_nothing_made_dynamic(dynamic: bool | None) -> None:
    with pytest.raises(AssertionError, match=rf"dynamic={dynamic} compiles for the sizes of the first call: pass dyn"):
        assert_no_recompiles(Sound(), batch, sizes=(2, 64), backend="aot_eager", dynamic=dynamic)


def test_what_torch_said_of_an_operation_is_quoted() -> None:
    with pytest.raises(AssertionError, match=r"the model raised: .*must have same reduction dim, but got \[4, 3\]"):
        assert_fused(Experts(), torch.randn(4, 3))


class TrainsOtherwise(Sound):
    """A graph break, and control flow on a size, in training alone."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x) * (2 if torch.is_grad_enabled() and x.shape[0] > 10 else 3)


def test_a_break_in_training_alone() -> None:
    model = TrainsOtherwise(breaks=True)
    assert_no_graph_breaks(model, INPUTS, backend="aot_eager")
    with pytest.raises(AssertionError, match="does not compile as one graph"):
        assert_no_graph_breaks(model, INPUTS, backend="aot_eager", backward=True)


def test_recompiles_in_training_alone() -> None:
    model = TrainsOtherwise(breaks=False)
    assert_no_recompiles(model, batch, sizes=(2, 64), backend="aot_eager")
    with pytest.raises(AssertionError, match=r"size 64 compiles again after size 2[\s\S]*x\.shape\[0\] > 10"):
        assert_no_recompiles(model, batch, sizes=(2, 64), backend="aot_eager", backward=True)


@pytest.mark.parametrize("marked", [False, True], ids=["all dynamic", "marked"])
def test_sound_training_passes(marked: bool) -> None:
    def make(size: int) -> torch.Tensor:
        x = batch(size).requires_grad_()
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        return x

    model = Sound()
    assert_no_graph_breaks(model, INPUTS, backend="aot_eager", backward=True)
    dynamic = None if marked else True
    assert_no_recompiles(model, make, sizes=(2, 5, 64), backend="aot_eager", dynamic=dynamic, backward=True)
    assert model.weight.grad is None


def test_what_cannot_be_captured_at_all_is_no_raw_error_of_dynamo() -> None:
    with pytest.raises(AssertionError, match=r"does not compile as one graph[\s\S]*[Dd]ata-dependent"):
        assert_no_recompiles(Branches(), batch, backend="aot_eager")


def test_a_size_that_cannot_be_captured_is_no_raw_error_of_dynamo() -> None:
    few = torch.randn(32, 8)
    with pytest.raises(AssertionError, match=r"^the model raised, without torch.compile too: RuntimeError: The size"):
        assert_no_recompiles(lambda x: x + few[: x.shape[0]], batch, sizes=(2, 64), backend="aot_eager")


def test_control_flow_on_a_size_recompiles() -> None:
    said = r"size 64 compiles again after size 2[\s\S]*TORCH_LOGS=recompiles"
    with pytest.raises(AssertionError, match=said) as caught:
        assert_no_recompiles(TiesSize(), batch, sizes=(2, 5, 64), backend="inductor")
    first = str(caught.value).splitlines()[1]
    assert "if x.shape[0] > 10 else" in first and "test_testing_kit.py" in first, "the line that ties the code to sizes"
    assert first.partition("  # ")[2].startswith(f"{__file__}:"), "the whole path"
    assert "self.weight" not in str(caught.value), "what holds for both sizes is left out"


def test_without_torchs_record_of_sizes_the_guard_alone_is_quoted(monkeypatch) -> None:
    monkeypatch.setattr(testing, "size_guards", dict)
    with pytest.raises(AssertionError, match=r"^size 64 compiles again after size 2:\n  Recompiling function"):
        assert_no_recompiles(TiesSize(), batch, sizes=(2, 64), backend="inductor")


SIZES = {"one": (2,), "1": (1, 2), "0": (0, 4), "equal": (4, 4), "a number": 4, "text": "ab", "floats": (2.0, 3.0)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_that_torch_specialises_and_what_is_no_sizes_are_refused(sizes) -> None:
    said = (
        r"^assert_no_recompiles: sizes must be at least two sizes >= 2, different integers, got \(.*\)\. Pass some as"
    )
    with pytest.raises(ValueError, match=said):
        assert_no_recompiles(Sound(), batch, sizes=sizes)


def test_sizes_may_be_generated() -> None:
    with pytest.raises(AssertionError, match="size 64 compiles again after size 2"):
        assert_no_recompiles(TiesSize(), batch, sizes=(size for size in (2, 64)), backend="aot_eager")


NO_SIZES = {
    "the same shapes": (lambda size: batch(4), "must give inputs whose shapes follow the size, got the same for each"),
    "the same in a dataclass": (lambda size: (Pair(batch(4), [batch(4)]),), "must give inputs whose shapes follow"),
    "the same in a mapping": (lambda size: (UserDict(x=batch(4)),), "must give inputs whose shapes follow"),
    "no function": (batch(4), "must be a function from a size to inputs, got Tensor. Pass one as"),
}


@pytest.mark.parametrize("make_inputs, said", NO_SIZES.values(), ids=NO_SIZES)
def test_nothing_is_proved_by_inputs_that_no_size_is_in(make_inputs, said: str) -> None:
    with pytest.raises(ValueError, match=f"^assert_no_recompiles: make_inputs {said}"):
        assert_no_recompiles(
            lambda x: x["x"] if isinstance(x, UserDict) else getattr(x, "x", x), make_inputs, backend="aot_eager"
        )


class Held:
    """Nobody can look into it."""

    def __init__(self, size: int) -> None:
        self.x = batch(size)


SIZED = {
    "a number": lambda size: size,
    "a mapping": lambda size: UserDict(x=batch(size)),
    "an object": Held,
    "an object that compares what it holds": lambda size: SimpleNamespace(x=batch(size)),
}


@pytest.mark.parametrize("make", SIZED.values(), ids=SIZED)
def test_a_size_need_not_be_of_a_tensor(make) -> None:
    """What nobody can look into may hold one."""

    def repeats(x: torch.Tensor, other: object) -> torch.Tensor:
        if isinstance(other, int):
            return x.new_zeros(other)
        return x + (other["x"] if isinstance(other, UserDict) else other.x).sum()

    assert_no_recompiles(repeats, lambda size: (INPUTS, make(size)), sizes=(3, 5), backend="aot_eager")


def test_a_dimension_that_is_as_long_as_the_first_size_by_chance() -> None:
    with pytest.raises(
        AssertionError, match=r"^size 16 compiles again after size 8:\n[\s\S]*begin with a size that"
    ) as said:
        assert_no_recompiles(torch.sin, batch, sizes=(8, 16), backend="aot_eager")
    assert "taken from a shape" not in str(said.value)
    assert_no_recompiles(torch.sin, batch, sizes=(5, 8, 16), backend="aot_eager")


class CountsCalls(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def of_another_dtype(size: int) -> torch.Tensor:
    return batch(size).to(torch.float64 if size > 10 else torch.float32)


NOT_OF_SIZES = {"a counter": (CountsCalls, batch, "calls"), "a dtype": (lambda: torch.sin, of_another_dtype, "dtype")}


@pytest.mark.parametrize("make, make_inputs, guard", NOT_OF_SIZES.values(), ids=NOT_OF_SIZES)
def test_the_cause_of_a_recompilation_is_that_of_its_guard(make, make_inputs, guard: str) -> None:
    model = make()
    with pytest.raises(AssertionError, match=rf"^size 64 compiles again after[\s\S]*- 0/0: .*{guard}") as caught:
        assert_no_recompiles(lambda x: model(x), make_inputs, sizes=(2, 64), backend="aot_eager")
    assert "What the guard names must stay the same" in str(caught.value)
    assert "taken from a shape" not in str(caught.value)


@torch.library.custom_op("kit_tests::short_of_memory", mutates_args=())
def _short_of_memory(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 2:
        raise RuntimeError("CUDA out of memory")
    return x.clone()


@_short_of_memory.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_error_of_compiled_code_is_no_recompilation() -> None:
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        assert_no_recompiles(lambda x: _short_of_memory(x) + 1, batch, sizes=(2, 5), backend="aot_eager")


def test_a_recompilation_is_seen_where_dynamo_suppresses_errors() -> None:
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        pytest.raises(AssertionError, match="size 64 compiles again"),
    ):
        assert_no_recompiles(TiesSize(), batch, sizes=(2, 64), backend="aot_eager")


def test_host_synchronisation_is_not_capturable() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(AssertionError) as caught:
        assert_cuda_graph_safe(DataDependentSize(), INPUTS, backend="inductor")
    second = str(caught.value).splitlines()[1]
    assert second.startswith("  return torch.nonzero(x @ self.weight)  # ") and "test_testing_kit.py" in second


OUT_OF_THE_GRAPH = {
    "multiplied by": lambda x: x * x.sum().item(),
    "added": lambda x: x + float(x.sum()),
    "unused": lambda x: (x.sum().item(), x * 2)[1],
}


@pytest.mark.parametrize("function", OUT_OF_THE_GRAPH.values(), ids=OUT_OF_THE_GRAPH)
def test_a_number_that_inductor_takes_out_of_the_graph_breaks_the_callers(function) -> None:
    expected = r"^it does not compile as one graph:\n.*test_testing_kit\.py:\d+ in <lambda>"
    with pytest.raises(AssertionError, match=expected):
        assert_cuda_graph_safe(function, INPUTS)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_cuda_graph_safe(function, INPUTS)


def test_an_index_that_only_the_data_knows_is_said_by_its_line() -> None:
    """Where Dynamo may capture the number, indexing by it raises an error of torch's own."""

    def indexed(x: torch.Tensor) -> torch.Tensor:
        return x[:, int(x[0, 0].abs()) % 4]

    with pytest.raises(AssertionError, match=r"^it does not compile as one graph:\n  return x\[:, int.*kit\.py:\d+"):
        assert_cuda_graph_safe(indexed, INPUTS)


@pytest.mark.parametrize("operator", ["cond", "while_loop"])
def test_branches_of_the_host_are_not_capturable(operator: str) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        if operator == "cond":
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        return torch._higher_order_ops.while_loop(lambda x: x.sum() < 3, lambda x: (x * 2 + 1,), (x,))[0]

    with pytest.raises(AssertionError, match=r"the host needs a value that is on the device[\s\S]*\n    as "):
        assert_cuda_graph_safe(branches, INPUTS, backend="inductor")


def _on_several_lines(x: torch.Tensor) -> torch.Tensor:
    host = x.to(
        dtype=torch.float64,
        device="cpu",
    )
    return x + host


TO_HOST = {
    "cpu": lambda x: x + x.mean().cpu(),
    "to": lambda x: x + x.to("cpu"),
    "to a device": lambda x: x + x.to(torch.device("cpu"), non_blocking=True),
    "to by keyword": lambda x: x + x.to(dtype=torch.float64, device="cpu"),
    "to a device with an index": lambda x: x.to(torch.device("cpu", 0)).sin(),
    "to a name with an index": lambda x: x.to("cpu:0").sin(),
    "in a checkpointed region": lambda x: checkpoint(lambda x: x.cpu().sin(), x, use_reentrant=False),
}


def test_a_copy_to_the_host_that_is_written_on_several_lines_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"^the host needs a value that is on the device[\s\S]*host = x\.to\("):
        assert_cuda_graph_safe(_on_several_lines, INPUTS)


@pytest.mark.parametrize("function", TO_HOST.values(), ids=TO_HOST)
def test_copies_to_the_host_are_seen_where_they_are_none(function) -> None:
    with pytest.raises(AssertionError, match=r"^the host needs a value that is on the device") as caught:
        assert_cuda_graph_safe(function, INPUTS)
    assert "cpu" in str(caught.value).splitlines()[1] and "test_testing_kit.py:" in str(caught.value)


NOT_TO_HOST = {
    "a device that is looked up": lambda x: x + x.to(x.device),
    "a dtype": lambda x: x + x.to(torch.float64 if str(x.device) == "cpu" else x.dtype),
}


@pytest.mark.parametrize("function", NOT_TO_HOST.values(), ids=NOT_TO_HOST)
def test_what_a_gpu_would_not_copy_is_none(function) -> None:
    assert_cuda_graph_safe(function, INPUTS)


class Writes(Sound):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x + 1)
        x[1:].mul_(2)
        return y


class Counts(Sound):
    """Writes a buffer, which stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x) + self.calls


@pytest.mark.parametrize("backward", [False, True])
def test_an_input_that_is_written_is_not_captured(backward: bool) -> None:
    with pytest.raises(AssertionError, match=r"^an input is written in place") as caught:
        assert_cuda_graph_safe(Writes(), INPUTS.clone(), backward=backward)
    line = str(caught.value).splitlines()[1]
    assert line.startswith("  x[1:].mul_(2)  # ") and "test_testing_kit.py:" in line


@pytest.mark.parametrize("backward", [False, True])
def test_buffers_and_what_is_marked_to_stay_may_be_written(backward: bool) -> None:
    assert_cuda_graph_safe(Counts(), INPUTS, backward=backward)
    marked = INPUTS.clone()
    torch._dynamo.mark_static_address(marked)
    assert_cuda_graph_safe(Writes(), marked, backward=backward)


CHANGED = {
    "another shape": ([batch(5)], r"must have the shapes and dtypes of inputs, .*\(4, 8, .*, got .*\(5, 8, "),
    "another dtype": ([INPUTS.double()], "must have the shapes and dtypes of inputs, .*float32.*, got .*float64"),
    "another number": ([(INPUTS, INPUTS)], "must have the shapes and dtypes of inputs"),
    "the second of two": ([2 * INPUTS, batch(5)], "must have the shapes and dtypes of inputs"),
    "a tensor": (2 * INPUTS, "must be a list of inputs, got one Tensor"),
    "None": (None, "must be a list of inputs, got one NoneType"),
    "a mapping": ({"x": INPUTS}, "must be a list of inputs, got one dict"),
}


@pytest.mark.parametrize("changed, said", CHANGED.values(), ids=CHANGED)
def test_changed_inputs_are_like_the_inputs(changed, said: str) -> None:
    with pytest.raises(ValueError, match=f"^assert_cuda_graph_safe: changed {said}"):
        assert_cuda_graph_safe(Sound(), INPUTS, changed=changed)


def test_changed_inputs_may_be_generated() -> None:
    assert_cuda_graph_safe(Sound(), INPUTS, changed=(factor * INPUTS for factor in (2, 3)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "moe_ops_eager"])
def test_a_backend_that_shows_no_graph_proves_nothing(backend: str) -> None:
    with pytest.raises(AssertionError, match=rf"no graph reached Inductor under backend='{backend}'"):
        assert_cuda_graph_safe(Sound(), INPUTS, backend=backend)


def test_tensors_of_any_mapping_are_found() -> None:
    x, y = torch.ones(2), torch.arange(2)
    assert [*map(id, testing._tensors(UserDict(x=x, inner=[UserDict(y=y)], other=3)))] == [id(x), id(y)]


@dataclass(frozen=True)
class Pair:
    """What a model may take and return."""

    x: torch.Tensor
    rest: list[torch.Tensor]


class OfPairs(Sound):
    def forward(self, pair: Pair) -> Pair:
        return Pair(super().forward(pair.x), [pair.rest[0] * 2])


def test_tensors_of_dataclasses_and_mappings_are_found_and_changed() -> None:
    x, y = torch.arange(3.0), torch.arange(2)
    pair = Pair(x, [y])
    assert [*map(id, testing._tensors([pair, {"a": pair}]))] == 2 * [id(x), id(y)]
    flipped = testing._flipped((pair,))[0]
    assert torch.equal(flipped.x, x.flip(0)) and torch.equal(flipped.rest[0], y.flip(0)) and pair.x is x
    (nested,) = testing._flipped((UserDict(x=x),))
    assert torch.equal(nested["x"], x.flip(0)) and isinstance(nested, UserDict)


@pytest.mark.parametrize("assertion", [assert_no_graph_breaks, assert_cuda_graph_safe])
def test_dataclasses_are_differentiated(assertion) -> None:
    assertion(OfPairs(), (Pair(INPUTS, [INPUTS]),), backend="moe_ops", backward=True)


def test_nothing_is_compared_with_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"function must return tensors, alone or in tuples, .*, got int: nothing would"
    ):
        testing._compared(3)


def test_inputs_in_any_mapping_are_captured_and_changed(monkeypatch) -> None:
    class OnDevice(torch.Tensor):
        is_cuda = True

    given: list[testing.Inputs] = []
    monkeypatch.setattr(testing, "_assert_compiled_replays", lambda function, variants, *rest: given.extend(variants))
    monkeypatch.setattr(testing, "contained", nullcontext)
    monkeypatch.setattr(testing, "assert_no_graph_breaks", lambda *_, **options: None)
    assert_cuda_graph_safe(Sound(), UserDict(x=torch.arange(3).as_subclass(OnDevice)))
    assert [variant["x"].tolist() for variant in given] == [[0, 1, 2], [2, 1, 0]]


class _Sparse(torch.autograd.Function):
    """Squares, with a gradient that asks the device for a size."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        places = (grad != 0).nonzero(as_tuple=True)
        return torch.zeros_like(x).index_put(places, (2 * x * grad)[places])


class WaitsInBackward(Sound):
    """Only the backward waits for the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sparse.apply(x @ self.weight)


def test_host_synchronisation_in_the_backward_alone() -> None:
    model, allowed = WaitsInBackward(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with allowed, pytest.raises(AssertionError, match="the host needs a value that is on the device") as caught:
        assert_cuda_graph_safe(model, INPUTS, backend="inductor", backward=True)
    assert "nonzero" in str(caught.value)
    assert model.weight.grad is None, "gradients of the assertion are nobody else's"


@pytest.mark.parametrize("assertion", [assert_cuda_graph_safe, assert_no_graph_breaks, assert_no_recompiles])
def test_outputs_without_gradient_have_no_backward(assertion) -> None:
    inputs = batch if assertion is assert_no_recompiles else INPUTS
    said = f"^{assertion.__name__}: backward must be False for outputs that require no gradient"
    with pytest.raises(ValueError, match=said):
        assertion(lambda x: x * 2, inputs, backend="moe_ops_eager", backward=True)


def test_a_function_without_parameters_of_its_own_has_no_backward() -> None:
    model = Sound()
    with pytest.raises(ValueError, match="function must be a module with trained parameters, or take inputs that req"):
        assert_no_graph_breaks(lambda x: model(x), INPUTS, backend="moe_ops_eager", backward=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's answer")
def test_without_a_device_the_message_says_so() -> None:
    with pytest.raises(RuntimeError, match="without a CUDA device"):
        kernel_names(torch.relu, INPUTS)
    with pytest.raises(ValueError, match="backend must be a name"):
        assert_cuda_graph_safe(Sound(), INPUTS, backend=None)


def test_what_was_counted_and_compiled_before_does_not_matter() -> None:
    """Counters as an earlier test leaves them, and code that the caller compiled: each assertion begins from nothing,
    and leaves nothing behind.
    """
    code, compiled_before = Sound.forward.__code__, []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_: object) -> torch.fx.GraphModule:
        compiled_before.append(len(_debug_get_cache_entry_list(code)))
        return graph

    model = Sound()
    torch.compile(model, backend=backend)(INPUTS)
    assert len(_debug_get_cache_entry_list(code)) == 1
    counters["graph_break"]["of another test"] += 1
    counters["stats"]["unique_graphs"] += 1
    assert_no_graph_breaks(model, INPUTS, backend=backend)
    assert compiled_before == [0, 0]
    assert _debug_get_cache_entry_list(code) == []


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph where there is no device: it records that it was asked to."""

    def capture_end(self) -> str:
        return "captured"

    def replay(self) -> str:
        return "replayed"


def capturing(calls_before_replay: int):
    """A backend that runs as many calls plainly, then records one graph, and replays it from the next call on."""

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: object):
        graph, calls = torch.cuda.CUDAGraph(), 0

        def run(*args: torch.Tensor) -> object:
            nonlocal calls
            calls += 1
            if options.get("mode") == "reduce-overhead" and calls == calls_before_replay:
                assert graph.capture_end() == "captured"
            elif options.get("mode") == "reduce-overhead" and calls > calls_before_replay:
                assert graph.replay() == "replayed"
            return module(*args)

        return run

    return backend


@pytest.mark.parametrize(
    "backend, said",
    [
        (capturing(2), None),
        (capturing(8), r"^1 CUDA graph\(s\) were recorded, and the last 2 calls replayed 0"),
        (capturing(7), r"^1 CUDA graph\(s\) were recorded, and the last 2 calls replayed 1"),
        (capturing(99), r"^0 CUDA graph\(s\) were recorded, and the last 2 calls replayed 0"),
        (capturing(0), r"^0 CUDA graph\(s\) were recorded, and the last 2 calls replayed 2"),
        ("eager", r"^0 CUDA graph\(s\) were recorded[\s\S]*does the backend honour mode='reduce-overhead'"),
    ],
    ids=["replays", "records in the last call", "one of two", "never records", "never recorded", "ignores the mode"],
)
def test_equal_results_do_not_prove_that_a_graph_was_replayed(backend, said, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    methods = dict(vars(FakeGraph))
    check = torch.no_grad()(partial(testing._assert_compiled_replays, run=testing._run))
    if said is None:
        check(Sound(), [INPUTS, 2 * INPUTS], backend)
    else:
        with pytest.raises(AssertionError, match=said):
            check(Sound(), [INPUTS, 2 * INPUTS], backend)
    assert dict(vars(FakeGraph)) == methods, "the methods are put back"


def test_a_graph_holds_work_when_it_has_nodes(monkeypatch) -> None:
    for names, answer in ((["a kernel"], True), ([], False)):
        monkeypatch.setattr(testing, "graph_kernel_names", lambda graph, names=names: names)
        assert testing._holds_work(FakeGraph()) is answer

    def without_cuda_python(graph: object) -> list[str]:
        raise ImportError("no module named cuda")

    monkeypatch.setattr(testing, "graph_kernel_names", without_cuda_python)
    assert testing._holds_work(FakeGraph()) is True


@pytest.mark.cuda
def test_backend_without_cuda_graphs_is_found() -> None:
    with pytest.raises(AssertionError, match=r"^0 CUDA graph\(s\) were recorded"):
        assert_cuda_graph_safe(Sound().cuda(), INPUTS.cuda(), backend="eager")


@pytest.mark.cuda
def test_empty_capture_is_found() -> None:
    kept = torch.ones(3, device="cuda")
    with pytest.raises(AssertionError, match="the captured graph is empty"):
        assert_cuda_graph_safe(lambda x: kept, INPUTS.cuda(), backend=None)


@pytest.mark.cuda
def test_replay_sees_changed_inputs() -> None:
    model, x = Sound().cuda(), INPUTS.cuda()
    assert_cuda_graph_safe(model, x, backend=None)
    assert_cuda_graph_safe(model, x, backend="inductor")


@pytest.mark.cuda
def test_value_frozen_at_capture_is_found() -> None:
    seen: list[float] = []

    def freezes(x: torch.Tensor) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            seen.append(x.sum().item())
        return x * seen[-1]

    with pytest.raises(AssertionError, match="differs from the eager call"):
        assert_cuda_graph_safe(freezes, INPUTS.cuda(), changed=[2 * INPUTS.cuda()], backend=None)


@pytest.mark.cuda
def test_synchronisation_cannot_be_captured() -> None:
    with pytest.raises(AssertionError, match="cannot be captured"):
        assert_cuda_graph_safe(lambda x: x * x.sum().item(), INPUTS.cuda(), backend=None)


def _synchronises(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@torch.library.custom_op("kit_tests::synchronises", mutates_args=())
def _opaque(x: torch.Tensor) -> torch.Tensor:
    return _synchronises(x)


@_opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _refused(backend: str | None) -> None:
    with pytest.raises(AssertionError, match="cannot be captured"):
        assert_cuda_graph_safe(lambda x: _opaque(x) + 1, INPUTS.cuda(), backend=backend)


AFTER = {
    "eager": lambda: _refused(None),
    "compiled": lambda: _refused("inductor"),
    "kernel_names": lambda: kernel_names(_synchronises, INPUTS.cuda()),
}


@pytest.mark.cuda
@pytest.mark.parametrize("refused", AFTER.values(), ids=AFTER)
def test_the_process_goes_on_after_what_cannot_be_captured(refused) -> None:
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(7)
    wanted = torch.randn(3, device="cuda")
    torch.cuda.manual_seed(7)
    refused()
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.randn(3, device="cuda"), wanted)
    assert_cuda_graph_safe(Sound().cuda(), INPUTS.cuda(), backend=None)
    assert_cuda_graph_safe(Sound().cuda(), INPUTS.cuda(), backend="inductor")
    # What another stream used becomes free when that is done, but not while the allocator believes in a capture.
    torch.empty(8, device="cuda").record_stream(torch.cuda.Stream())
    torch.cuda.synchronize()
    torch.empty(8, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["active.all.current"] == stats["allocation.all.current"]


@pytest.mark.cuda
@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
def test_what_cannot_be_captured_is_said_by_its_line(backend) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_cuda_graph_safe(lambda x: _opaque(x) + 1, INPUTS.cuda(), backend=backend)
    said = str(raised.value)
    assert re.search(r"return x \* x\.sum\(\)\.item\(\)  # .*test_testing_kit\.py:\d+ in _synchronises", said), said
    assert "operation not permitted when stream is capturing" in said


@pytest.mark.cuda
def test_census_counts_kernels_copies_and_fills() -> None:
    x = INPUTS.cuda()

    def work() -> torch.Tensor:
        torch.relu(x)
        return torch.zeros_like(x).copy_(x)

    names = kernel_names(work)
    assert 2 <= len(names) <= 3
    assert "elementwise" in names[0]
    assert len(kernel_names(lambda: x.sum().item())) >= 1, "a function that synchronises is profiled"


def test_results_of_a_replay_are_compared_to_the_bit() -> None:
    one = [torch.tensor([1.0, 2.0]), torch.tensor([3])]
    testing._assert_same_bits(one, [value.clone() for value in one], "the replay", "the eager call")
    with pytest.raises(AssertionError, match="output 1 of the replay differs from the eager call by up to 2:"):
        testing._assert_same_bits(one, [one[0], torch.tensor([5])], "the replay", "the eager call")
    with pytest.raises(AssertionError, match="the replay returned 2 tensors, the eager call 1"):
        testing._assert_same_bits(one, one[:1], "the replay", "the eager call")


def test_a_nan_equals_a_nan() -> None:
    one, other, number = (torch.tensor([1.0, last]) for last in (torch.nan, torch.nan, 0.0))
    testing._assert_same_bits([one], [other], "the replay", "the eager call")
    with pytest.raises(AssertionError, match="output 0 of the replay differs"):
        testing._assert_same_bits([one], [number], "the replay", "the eager call")
