"""The tensors that a checkpoint has of one projection, by what each is."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from meta.checks import fail

OP = "load_experts_"

#: What helps against parts that no layout has, or not these alone.
OTHER_LAYOUT = "Layouts of GPTQ, AWQ, bitsandbytes and HQQ are not read; compressed-tensors writes some that are."
#: Parts whose keys have no "weight" in front.
_OWN_NAMES = ("bias", "scales")
#: Suffixes that decode no weight: those of activations are for schemes that quantise them.
_NOT_OF_THE_WEIGHT = ("bias", "input_scale", "input_zero_point", "input_global_scale")


def part_of(suffix: str) -> str:
    """What a key adds to its projection's name, in one spelling: ``".weight_scale"`` and ``"_scale"`` are "scale", and
    the weight itself is "".
    """
    return re.sub(r"^[._]*(weight)?[._]*", "", suffix)


class Parts:
    """The tensors of one projection, of one expert or of all, read when they are taken.

    Attributes:
        turned: the parts that are stored ``[E, K, ..]``, and read as ``[E, N, ..]``.

    Args:
        keys: of the checkpoint, by their part (:func:`part_of`).
        view: a key's tensor, in memory that others may write.
        note: what the metadata of a key's file say about a name.
        name: of the projection, for messages: what keys begin with.
        stacked: they are of all experts.
        weights_alone: the checkpoint says that its activations are not quantised.
        has_zero_points: it says that its weights have zero points.
    """

    def __init__(
        self,
        keys: dict[str, str],
        view: Callable[[str], Tensor],
        note: Callable[[str, str], str | None],
        *,
        name: str,
        stacked: bool,
        weights_alone: bool = False,
        has_zero_points: bool = False,
    ) -> None:
        self.keys = keys
        self.name = name
        self.stacked = stacked
        self.weights_alone = weights_alone
        self.has_zero_points = has_zero_points
        self.turned: frozenset[str] = frozenset()
        self._view = view
        self._note = note
        self._taken: set[str] = set()

    def __contains__(self, part: str) -> bool:
        return part in self.keys

    @property
    def of_the_weight(self) -> set[str]:
        """The parts that decode the weight, which is one of them."""
        return {part for part in self.keys if part not in _NOT_OF_THE_WEIGHT}

    def any_key(self) -> str:
        """One of the keys, for messages about all."""
        return min(self.keys.values())

    def find(self, *parts: str) -> str:
        """The first of ``parts`` that is there.

        Raises:
            ValueError: none is.
        """
        for part in parts:
            if part in self:
                return part
        names = " or ".join(repr(part if part in _OWN_NAMES else f"weight_{part}") for part in parts)
        cure = "" if "bias" in parts else OTHER_LAYOUT
        raise fail(OP, self.any_key(), f"stored beside {names}", sorted(self.keys.values()), cure)

    def take(self, *parts: str) -> tuple[str, Tensor]:
        """Key and tensor of the first of ``parts`` that is there.

        Raises:
            ValueError: none is.
        """
        part = self.find(*parts)
        self._taken.add(part)
        return self.keys[part], self.read(part)

    def read(self, part: str) -> Tensor:
        """The tensor of a part that is there, in memory of its own; it does not count as understood yet."""
        tensor = self._view(self.keys[part])
        turned = part in self.turned and tensor.dim() == 3  # a number for each row or expert is stored in one way alone
        stored = tensor.mT if turned else tensor
        return stored.clone(memory_format=torch.contiguous_format)

    def note(self, part: str, name: str) -> str | None:
        """What the metadata of the file that a part is in say about a name."""
        return self._note(self.keys[part], name)

    def like(self, part: str) -> Tensor:
        """Dtype and shape of a part that is there, as it is stored, on meta: nothing of it is read."""
        return self._view(self.keys[part]).to("meta")

    def check_all_taken(self) -> None:
        """Every tensor has been understood.

        Raises:
            ValueError: naming the key of one that was not.
        """
        for part, key in self.keys.items():
            if part not in self._taken and part in self.of_the_weight:
                raise fail(OP, key, "absent beside a weight of this layout", "it", "Nothing here knows what it means.")
