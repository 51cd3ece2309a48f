"""Each assertion of moe_ops.testing passes on sound code and fails, with a useful message, on code broken for it."""

import pytest
import torch

from moe_ops import testing
from moe_ops.testing import (
    assert_cuda_graph_safe,
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


INPUTS = torch.randn(4, 8)
BACKENDS = ("inductor", "moe_ops")


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sound_code_passes_every_assertion(backend: str) -> None:
    assert_no_graph_breaks(Sound(), INPUTS, backend=backend)
    assert_no_recompiles(Sound(), batch, sizes=(2, 5, 64), backend=backend)
    assert_cuda_graph_safe(Sound(), INPUTS, backend=backend)


@pytest.mark.parametrize("inputs", [INPUTS, (INPUTS,), {"x": INPUTS}], ids=["tensor", "tuple", "dict"])
def test_every_form_of_inputs(inputs: testing.Inputs) -> None:
    assert_no_graph_breaks(Sound(), inputs, backend="inductor")


def test_data_dependent_branch_is_a_break() -> None:
    with pytest.raises(AssertionError, match=r"does not compile as one graph[\s\S]*[Dd]ata-dependent"):
        assert_no_graph_breaks(Branches(), INPUTS, backend="inductor")


def test_skipped_function_is_no_graph() -> None:
    with pytest.raises(AssertionError, match="graph"):
        assert_no_graph_breaks(Skipped(), INPUTS, backend="inductor")


def test_control_flow_on_a_size_recompiles() -> None:
    with pytest.raises(AssertionError, match=r"size 64 compiles again after size 2[\s\S]*TORCH_LOGS=recompiles"):
        assert_no_recompiles(TiesSize(), batch, sizes=(2, 5, 64), backend="inductor")


@pytest.mark.parametrize("sizes", [(2,), (1, 2), (0, 4)])
def test_sizes_that_torch_specialises_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes must be at least two sizes >= 2"):
        assert_no_recompiles(Sound(), batch, sizes=sizes)


def test_host_synchronisation_is_not_capturable() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(AssertionError) as caught:
        assert_cuda_graph_safe(DataDependentSize(), INPUTS, backend="inductor")
    assert "torch.nonzero(x @ self.weight)" in str(caught.value), "the message quotes the source line"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's answer")
def test_without_a_device_the_message_says_so() -> None:
    with pytest.raises(RuntimeError, match="without a CUDA device"):
        kernel_names(torch.relu, INPUTS)
    with pytest.raises(ValueError, match="backend must be a name"):
        assert_cuda_graph_safe(Sound(), INPUTS, backend=None)


def test_counters_and_caches_are_left_clean() -> None:
    assert_no_graph_breaks(Sound(), INPUTS, backend="inductor")
    assert_no_graph_breaks(Sound(), INPUTS, backend="inductor")


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
