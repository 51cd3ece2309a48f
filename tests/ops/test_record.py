"""The function that a record becomes, on a machine without a GPU: what it hands to launches that are not there."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from moe_ops.kernels.triton import record
from moe_ops.kernels.triton.record import Launched, Place, Record

DEVICE, STREAM = 1, 77


class Machine:
    """Notes what happens: allocations, launches and changes of the current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = DEVICE
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Any, ...]] = []
        self.devices: list[int] = []
        driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: STREAM + device))
        stand_in = SimpleNamespace(runtime=SimpleNamespace(driver=driver), knobs=triton.knobs)
        monkeypatch.setattr(record, "triton", stand_in)
        monkeypatch.setattr(record, "current_gpu", lambda: self.current)
        monkeypatch.setattr(record, "empty_cuda", self.empty)
        monkeypatch.setattr(torch.cuda, "device", self.on)

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.empty_strided(size, stride, dtype=dtype))
        self.devices.append(self.current)
        return self.made[-1]

    @contextmanager
    def on(self, device: int) -> Any:
        before, self.current = self.current, device
        yield
        self.current = before

    def launched(self, grid: tuple[int, ...], **arguments: Any) -> Launched:
        signature = {name: "constexpr" if name.isupper() else "i32" for name in arguments}
        run = SimpleNamespace(launch=self.launch, launch_cooperative_grid=False, launch_pdl=True)
        compiled = SimpleNamespace(
            metadata=SimpleNamespace(tensordesc_meta=None),
            src=SimpleNamespace(signature=signature),
            run=run,
            function=5,
            packed_metadata=("packed",),
        )
        return Launched(SimpleNamespace(arg_names=list(arguments)), compiled, grid, arguments, {})

    def launch(self, *arguments: Any) -> None:
        self.launches.append(arguments)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def place(source: int, offset: int = 0, size: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32) -> Place:
    return Place(source, offset, dtype, size, tuple(torch.empty(size).stride()))


def fired(made: Record, *tensors: torch.Tensor) -> Any:
    return made.fire(tensors, [tensor.data_ptr() for tensor in tensors])


def test_addresses_of_every_origin(machine: Machine):
    """Inputs 0 and 1; 2 and 4 are pieces of the workspace, 3 and 5 results."""
    launches = [
        machine.launched((4,), a=place(0), b=place(1, 8), c=place(2), n=3, x=0.5, BLOCK=16),
        machine.launched((4, 2), c=place(2, 4), d=place(4, 12), none=None),
        machine.launched((1, 1, 6), e=place(3), f=place(5, 16), flag=True),
    ]
    results = [place(5, size=(4, 2), dtype=torch.int32), place(3)]
    made = Record(launches, results, 2, {2: 0, 4: 512}, 1024, torch.device("cuda", DEVICE), True)
    for _ in range(2):
        machine.made.clear(), machine.launches.clear()
        one, other = torch.empty(3), torch.empty(4)
        found = fired(made, one, other)
        first, second, workspace = machine.made
        assert found[0] is first and found[1] is second and len(found) == 2
        assert (first.shape, first.dtype) == ((4, 2), torch.int32) and second.shape == (2, 3)
        assert workspace.numel() == 1024 and workspace.dtype == torch.uint8
        at = workspace.data_ptr()
        head = (STREAM + DEVICE, 5, False, True, None, None, ("packed",), None, None, None)
        assert machine.launches == [
            (4, 1, 1, *head, one.data_ptr(), other.data_ptr() + 8, at, 3, 0.5, None),
            (4, 2, 1, *head, at + 4, at + 512 + 12, None),
            (1, 1, 6, *head, second.data_ptr(), first.data_ptr() + 16, True),
        ]
    assert set(machine.devices) == {DEVICE}


def test_one_result_and_nothing_else(machine: Machine):
    """Without a workspace none is allocated, and one result is no tuple."""
    made = Record(
        [machine.launched((1,), a=place(0), b=place(1))], [place(1)], 1, {}, 0, torch.device("cuda", 1), False
    )
    found = fired(made, torch.empty(2))
    assert [found] == machine.made and len(machine.launches) == 1


def test_another_current_device(machine: Machine):
    """Memory and launches belong to the tensors' one, which is current for them alone."""
    made = Record(
        [machine.launched((1,), a=place(0), b=place(1))], [place(1)], 1, {}, 0, torch.device("cuda", 1), False
    )
    machine.current = 0
    assert fired(made, torch.empty(2)) is machine.made[0]
    assert machine.devices == [DEVICE] and machine.current == 0 and len(machine.launches) == 1


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_left_to_triton(machine: Machine, hook: str):
    made = Record(
        [machine.launched((1,), a=place(0), b=place(1))], [place(1)], 1, {}, 0, torch.device("cuda", 1), False
    )
    chain, told = getattr(triton.knobs.runtime, hook), lambda metadata: None
    chain.add(told)
    try:
        assert fired(made, torch.empty(2)) is None and not machine.launches and not machine.made
    finally:
        chain.remove(told)
    assert fired(made, torch.empty(2)) is not None
