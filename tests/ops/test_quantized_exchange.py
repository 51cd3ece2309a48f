"""Quantised weights in the hands of other libraries: arrays, offloading, replicas and shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import moe_ops
from moe_ops.quantized import QuantizedWeight

E, I, H = 4, 32, 64
#: With e4m3, packed codes, exponents, and two scales.
SOME = ("fp8_channel", "int4_w4a16", "mxfp4", "nvfp4")


class Layer(nn.Module):
    """Experts of its own, every one for every token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H, generator=generator))
        self.down_proj = nn.Parameter(torch.randn(E, H, I, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("th,enh->etn", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(nn.functional.silu(gate) * up, self.down_proj.transpose(1, 2)).sum(0)


def model(scheme: str = "mxfp4", seed: int = 0) -> nn.Sequential:
    """A linear layer that is trained before quantised experts."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(H, H), Layer(seed))
    moe_ops.quantize_(made, scheme)
    return made


def weights(of: nn.Module) -> list[QuantizedWeight]:
    return [parameter for parameter in of.parameters() if isinstance(parameter, QuantizedWeight)]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    parts, others = (each.parts() for each in (one, other))  # type: ignore[attr-defined]
    bits = [[part.contiguous().view(torch.uint8) for part in each.values()] for each in (parts, others)]
    return parts.keys() == others.keys() and all(map(torch.equal, *bits))


X = torch.randn(5, H, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("transposed", [False, True], ids=["E_N_K", "E_K_N"])
@pytest.mark.parametrize("scheme", SOME)
def test_arrays_and_lists_hold_the_dequantised_numbers(scheme: str, transposed: bool) -> None:
    weight = weights(model(scheme))[0]
    weight = weight.mT if transposed else weight
    want = weight.dequantize()
    for array in (weight.numpy(), weight.numpy(force=True), np.asarray(weight), np.array(weight)):
        assert isinstance(array, np.ndarray) and np.array_equal(array, want.numpy())
    assert np.asarray(weight, dtype=np.float64).dtype == np.float64
    assert weight.tolist() == want.tolist()


@pytest.mark.parametrize("read", [torch.from_dlpack, np.from_dlpack], ids=["torch", "numpy"])
def test_dlpack_is_refused(read: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"QuantizedWeight: self must be .* for DLPack, .* Pass \.dequantize\(\)"):
        read(weights(model())[0])


@pytest.mark.parametrize("way", ["__cuda_array_interface__", "__dlpack_c_exchange_api__"])
def test_no_other_way_gives_away_a_null_pointer(way: str) -> None:
    weight = weights(model())[0]
    assert not hasattr(weight, way) and not hasattr(type(weight), way)


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
def test_a_parameter_is_made_again_from_its_data(parameter: bool) -> None:
    weight = weights(model())[0].mT.half()
    given = nn.Parameter(weight, requires_grad=False) if parameter else weight
    for again in (type(given)(given, requires_grad=False), type(given)(given)):
        assert isinstance(again, QuantizedWeight) and isinstance(again, nn.Parameter) and not again.requires_grad
        assert again.transposed and again.dtype == torch.float16 and again.stored.data_ptr() == weight.stored.data_ptr()
        assert same_bytes(again, weight)


STORED, *SCALES = moe_ops.quantize_weight(torch.ones(E, H, I), scheme="mxfp4")
NOT_MADE: dict[str, tuple[Callable[[], object], str]] = {
    "with_a_gradient": (
        lambda: QuantizedWeight(weights(model())[0], requires_grad=True),
        r"requires_grad must be False, got True\. Change the float weights, then call moe_ops\.quantize_",
    ),
    "bytes_with_a_gradient": (
        lambda: QuantizedWeight(STORED, SCALES, scheme="mxfp4", requires_grad=True), "requires_grad must be False",
    ),
    "of_floats": (
        lambda: QuantizedWeight(torch.ones(E, H, I), requires_grad=False),
        r"stored must be a QuantizedWeight where it is given alone, got Tensor\. Pass scales and scheme",
    ),
    "without_scales": (lambda: QuantizedWeight(STORED, scheme="mxfp4"), "scales must be a list or tuple of tensors"),
    "without_a_scheme": (lambda: QuantizedWeight(STORED, SCALES), "scheme must be a string, got None"),
    "of_floats_as_data": (
        lambda: setattr(weights(model())[0], "data", torch.ones(E, 2 * I, H)),
        r"data must be a QuantizedWeight, got Tensor\. Make one by moe_ops\.quantize_weight; leave this one out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_MADE)
def test_what_is_no_weight_is_refused(case: str) -> None:
    call, message = NOT_MADE[case]
    with pytest.raises(ValueError, match=f"^QuantizedWeight: {message}"):
        call()


@pytest.mark.parametrize("scheme", SOME)
def test_its_own_numbers_are_copied_into_it(scheme: str) -> None:
    for weight in (weights(model(scheme))[0], weights(model(scheme))[1].mT):
        before = copy.deepcopy(weight)
        assert weight.copy_(before.dequantize()) is weight and same_bytes(weight, before)
        for other in (before.dequantize() + 1, before.dequantize().double(), before.dequantize()[:1]):
            with pytest.raises(ValueError, match=r"copy_: source must be .*, or the numbers that it stands for, got"):
                weight.copy_(other)
        assert same_bytes(weight, before)


def test_numbers_that_are_not_finite_are_its_own() -> None:
    made = nn.Sequential(Layer())
    made[0].gate_up_proj.data[1, 2, 3] = float("nan")
    moe_ops.quantize_(made, "mxfp4")
    (weight, _), before = weights(made), copy.deepcopy(made)
    assert weight.dequantize().isnan().any()
    weight.copy_(weight.dequantize())
    assert same_bytes(weight, weights(before)[0])


def test_numbers_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="copy_: source must be"):
        weights(model())[0].copy_(torch.ones(E, 2 * I, H, device="meta"))
    with pytest.raises(ValueError, match="copy_: source must be"):
        weights(model().to("meta"))[0].copy_(torch.ones(E, 2 * I, H))
    torch.compiler.reset()
    run = torch.compile(lambda w, numbers: w.copy_(numbers), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="copy_: source must be"):
        run(weights(model())[0], torch.ones(E, 2 * I, H))


def test_another_form_is_refused_with_what_takes_it() -> None:
    weight, other = weights(model("mxfp4"))[0], weights(model("nvfp4"))[0]
    with pytest.raises(ValueError, match=r"copy_: source must be .* got \('nvfp4'.*Assign it to \.data"):
        weight.copy_(other)
    weight.data = other
    assert same_bytes(weight, other)


def test_averages_keep_it() -> None:
    given = model()
    average = AveragedModel(given)
    for _ in range(3):
        with torch.no_grad():
            given[0].weight += 1
        average.update_parameters(given)
    assert all(map(same_bytes, weights(average), weights(given)))
    assert torch.allclose(average.module[0].weight, given[0].weight - 1)


def test_averages_by_a_function_may_leave_it_as_it_is() -> None:
    mean = get_ema_avg_fn(0.9)
    given = model()
    average = AveragedModel(
        given, avg_fn=lambda old, new, n: old if isinstance(old, QuantizedWeight) else mean(old, new, n)
    )
    for _ in range(3):
        average.update_parameters(given)
    assert all(map(same_bytes, weights(average), weights(given)))


@pytest.fixture
def group() -> Iterator[None]:
    """This process alone, as a process group."""
    if not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("scheme", SOME)
def test_replicas_begin_with_it(scheme: str, group: None) -> None:
    given = model(scheme)
    before = copy.deepcopy(given)
    replica = DistributedDataParallel(given)
    replica(X).sum().backward()
    assert torch.equal(replica(X), before(X)) and given[0].weight.grad is not None
    assert all(map(same_bytes, weights(given), weights(before)))


def test_distributed_checkpoints_hold_its_state_dict(group: None, tmp_path: Path) -> None:
    given, other = model(), model(seed=1)
    checkpoint.save({"model": given.state_dict()}, checkpoint_id=tmp_path)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    assert all(map(same_bytes, weights(other), weights(given)))


FSDP = r"QuantizedWeight: self must be a float tensor for FSDP, .* ignored_params= of fully_shard, in ignored_states="


def test_shards_are_refused_or_leave_it_out(group: None) -> None:
    mesh, given = init_device_mesh("cpu", (1,)), model()
    before = copy.deepcopy(given)
    if hasattr(_fsdp_param, "_get_orig_param_uid"):  # torch 2.11 does not mark what it shards
        with pytest.raises(ValueError, match=FSDP):
            fully_shard(model(), mesh=mesh)
    fully_shard(given, mesh=mesh, ignored_params={*weights(given)})
    assert torch.equal(given(X), before(X)) and len(weights(given)) == 2


def test_flat_shards_are_refused_or_leave_it_out(group: None) -> None:
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    with pytest.raises(ValueError, match=FSDP):
        FullyShardedDataParallel(model(), **options)
    given = model()
    before = copy.deepcopy(given)
    sharded = FullyShardedDataParallel(given, ignored_states=weights(given), **options)
    assert torch.equal(sharded(X), before(X)) and len(weights(sharded)) == 2


def offloaded(given: nn.Module) -> nn.Module:
    """Its weights are brought to the CPU for each call, and are on meta between."""
    accelerate = pytest.importorskip("accelerate")
    held = dict(given.named_parameters())
    return accelerate.cpu_offload(given, execution_device=torch.device("cpu"), state_dict=held)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", SOME)
def test_accelerate_offloads_it(scheme: str) -> None:
    want = model(scheme)(X)
    given = offloaded(model(scheme))
    for _ in range(2):
        assert torch.equal(given(X), want)
        assert all(weight.is_meta and isinstance(weight, nn.Parameter) for weight in weights(given))


def test_a_hook_of_accelerate_moves_it() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    given, before = model(), model()
    hooks.add_hook_to_module(given[1], hooks.AlignDevicesHook("cpu", offload=True))
    assert torch.equal(given(X), before(X)) and weights(given)[0].is_meta
    hooks.remove_hook_from_submodules(given)
    assert all(map(same_bytes, weights(given), weights(before))) and torch.equal(given(X), before(X))


def test_accelerate_puts_one_in_its_place() -> None:
    set_tensor = pytest.importorskip("accelerate.utils").set_module_tensor_to_device
    given, other = model(), model(seed=1)
    set_tensor(given, "1.gate_up_proj", "cpu", value=other[1].gate_up_proj.data)
    assert same_bytes(given[1].gate_up_proj, other[1].gate_up_proj)
    set_tensor(given, "1.gate_up_proj", "meta")
    assert given[1].gate_up_proj.stored.is_meta
    with pytest.raises(ValueError, match="stored must be a QuantizedWeight where it is given alone"):
        set_tensor(given, "1.gate_up_proj", "cpu", value=torch.ones(E, 2 * I, H))


def test_what_accelerate_holds_elsewhere_is_not_loaded(tmp_path: Path) -> None:
    """Its hook would bring the weights of before into every call."""
    with pytest.raises(ValueError, match=r"load_experts_: 0\.\w+ must be in memory, got one on meta .* load before"):
        moe_ops.load_experts_(offloaded(nn.Sequential(Layer())), tmp_path)


def test_what_accelerate_holds_elsewhere_is_not_quantised() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    plain, want = nn.Sequential(Layer()), model()[1:]
    given = offloaded(plain)
    with pytest.raises(
        ValueError, match=r"quantize_: 0\.\w+ must be in memory, got one on meta .*remove_hook_from_sub"
    ):
        moe_ops.quantize_(given, "mxfp4")
    hooks.remove_hook_from_submodules(given)
    moe_ops.quantize_(given, "mxfp4")
    assert torch.equal(given(X), want(X))
