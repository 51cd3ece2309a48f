"""What other libraries ask of a quantised weight besides operations: its numbers in memory, and to be sharded."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from meta.checks import fail

_OP = "QuantizedWeight"


class _Absent:
    """An attribute that a tensor has, and this one has not."""

    def __get__(self, weight: Any, kind: Any = None) -> NoReturn:
        raise AttributeError


class _MarkOfFSDP(_Absent):
    """An attribute that FSDP sets on the parameters that it is about to flatten or shard."""

    def __set__(self, weight: Any, value: Any) -> None:
        cure = "Pass it in ignored_params= of fully_shard, in ignored_states= of FullyShardedDataParallel."
        raise fail(_OP, "self", "a float tensor for FSDP, which shards dequantised numbers", "quantised bytes", cure)


class ExchangedTensor(Tensor):
    """A tensor that stands for the numbers of its ``dequantize()``, and has no memory in which they are."""

    _fsdp_orig_uid, _fsdp_flattened = _MarkOfFSDP(), _MarkOfFSDP()
    # Each gives away the pointer of a tensor, which is null here.
    __cuda_array_interface__: Any = _Absent()
    __dlpack_c_exchange_api__: Any = _Absent()

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantised numbers as an array of the same shape."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> list[Any]:
        """The dequantised numbers in lists."""
        found: list[Any] = self.dequantize().tolist()
        return found

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it would be read as a pointer to the numbers.

        Raises:
            ValueError: always.
        """
        raise fail(_OP, "self", "a float tensor for DLPack", "quantised bytes", "Pass .dequantize() of it.")

    def apply_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as ``map_`` and ``map2_``: these write through the pointer, and no operator is called.

        Raises:
            ValueError: always.
        """
        rule = "a float tensor for a function of each element, which is written"
        raise fail(_OP, "self", rule, "quantised bytes", "Change the float weights, then call moe_ops.quantize_.")

    map_ = map2_ = apply_
