"""Every operator under torch's own checks, and its fake outputs against its real ones, over real variants."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

import moe_ops  # noqa: F401  (registers the operators)
from meta.shapes import RULES
from tests.ops.calls import CALLS, DIFFERENTIABLE, Call, covering, with_grad

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(call: Call, utilities: tuple[str, ...] = UTILITIES) -> None:
    stored = [a for a in call.tensors if a.dtype.itemsize == 1 and a.is_floating_point()]
    # test_schema compares inputs before and after by allclose, which torch does not have for fp8: compare bytes
    # instead.
    utilities = tuple(name for name in utilities if not (stored and name == "test_schema"))
    before = [a.view(torch.uint8).clone() for a in stored]
    torch.library.opcheck(call.overload, call.args, call.kwargs, test_utils=utilities)
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(stored, before, strict=True))


#: Of the stages, whose formulas tests/ops/test_layer.py checks in every form, those that differ to a registration.
OF_STAGES = ("plain", "gpt_oss", "bf16", "no_tokens")
#: Compiled with gradients: quantised weights have none (tests/ops/test_validation.py checks the error).
WITH_FORMULA = covering(
    name
    for name, call in CALLS.items()
    if call.op in DIFFERENTIABLE
    and (call.op.startswith("fused") or name.partition("-")[2] in OF_STAGES)
    and call.kwargs.get("scheme") is None
)
#: Compiled without them: the plainest call of each operator, and what is not compiled with gradients.
COMPILED = {name for name in covering(CALLS) if name not in WITH_FORMULA or name.endswith(("-plain", "-softmax"))}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """To be traced and compiled is nine tenths of the time, and knows only what `covering` tells apart."""
    check(CALLS[name], UTILITIES if name in COMPILED else UTILITIES[:-1])


@pytest.mark.parametrize("name", WITH_FORMULA)
def test_opcheck_with_gradients(name: str) -> None:
    check(with_grad(CALLS[name]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_fake_outputs_equal_the_real_ones(name: str, dynamic: bool) -> None:
    call = CALLS[name]
    real = call.run()
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    with mode:
        fake = Call(call.op, tree_map_only(torch.Tensor, mode.from_tensor, call.args), call.kwargs).run()
    assert len(fake) == len(real)
    for got, wanted in zip(fake, real, strict=True):
        assert tuple(int(size) for size in got.shape) == tuple(wanted.shape)
        assert tuple(int(stride) for stride in got.stride()) == wanted.stride()
        assert got.dtype == wanted.dtype and got.device == wanted.device
        assert wanted.is_contiguous() and wanted.storage_offset() == 0


@pytest.mark.parametrize("name", CALLS)
def test_outputs_never_alias_inputs(name: str) -> None:
    call = CALLS[name]
    inputs = {a.untyped_storage().data_ptr() for a in call.tensors if a.numel()}
    outputs = [out for out in call.run() if out.numel()]
    assert not inputs & {out.untyped_storage().data_ptr() for out in outputs}
    assert len({out.untyped_storage().data_ptr() for out in outputs}) == len(outputs)


def test_every_operator_is_called() -> None:
    assert {call.op for call in CALLS.values()} == set(RULES)


@pytest.mark.parametrize("op", ["fused_experts", "fused_moe", "moe_permute", "batched_dispatch", "fused_topk"])
def test_no_guard_on_the_number_of_tokens(op: str) -> None:
    """The fake of a symbolic T leaves T free: no guard beyond those torch makes for any size (0 and 1 apart)."""
    call = CALLS[f"{op}-plain"] if op != "fused_topk" else CALLS["fused_topk-softmax"]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens = call.args[0].shape[0]
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [DimDynamic.DUCK if size == tokens else DimDynamic.STATIC for size in value.shape]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    with mode:
        Call(op, tuple(fake(value) for value in call.args), call.kwargs).run()
    assert [str(guard.expr) for guard in env.guards] == []
