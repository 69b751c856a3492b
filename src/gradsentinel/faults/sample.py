"""Bad data: one bad number in one sample of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradsentinel.faults.course import Shot
from gradsentinel.faults.damage import locate, set_value
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Fault, Index, check_index, check_name, check_value, is_count
from gradsentinel.faults.names import Names
from gradsentinel.faults.tree import dotted, listing, pick, replaced


@dataclass(frozen=True, kw_only=True)
class PoisonSample(Fault):
    """One bad number in one sample: NaN, an infinity, a wild value, or an id outside the vocabulary.

    The batch is copied where it is changed, so the data set stays clean. With `persistent` a batch drawn
    again for the same step is bad again; a replay from the batch itself sees the bad number either way.
    """

    value: float = math.nan
    """The bad number. An int goes to a field of integers, such as token ids, if the batch has one."""
    field: str | None = None
    """Dotted path of the field in the batch, such as `images`, `0` or `inputs.pixel_values`; None: the seed
    chooses one whose dtype can hold the value."""
    position: int | None = None
    """Sample within the batch (first dimension of the field); None: the seed chooses."""
    index: Index = None
    """Element within the sample: its number in reading order, or one number per dimension; None: the seed
    chooses."""

    kind: ClassVar[str] = "poison_sample"
    needs_model: ClassVar[bool] = False
    unfired: ClassVar[str] = (
        "no batch passed through plan.batches or plan.poison in that step and micro-batch, or it was empty"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value(self.value)
        check_name("field", self.field)
        check_index(self.index)
        if self.position is not None and not is_count(self.position):
            raise ValueError(
                f"position={self.position!r}: give the number of a sample in the batch, from 0 on"
            )

    def poison(self, batch: Any, shot: Shot) -> Any:
        """Return the batch with the bad number in it if the fault fires now.

        Raises:
            ValueError: no field can hold the value.
            LookupError: there is no such field, sample or element.
        """
        if not shot.live():
            return batch
        path, tensor = self._choose(batch, shot.dice)
        place = self._place(tensor, shot.dice)
        if place is None:
            return batch
        twin = tensor.detach().clone()
        hit = set_value(self.value, place, shot.dice)(twin)
        assert hit is not None
        shot.record("sample", dotted(path), hit)
        return replaced(batch, path, twin.requires_grad_(tensor.requires_grad))

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> PoisonSample:  # noqa: ARG003
        """Return one with NaN or an infinity in a field, sample and element that the seed chooses."""
        return cls(value=dice.choice((math.nan, math.inf, -math.inf), "value"), **when)

    def _choose(self, batch: Any, dice: Dice) -> tuple[tuple[Any, ...], Tensor]:
        fields = []
        if isinstance(self.value, int):
            fields = pick(batch, self.field, _holds_integers, what="the batch")
        fields = fields or pick(batch, self.field, _holds_floats, what="the batch")
        if not fields:
            raise ValueError(
                f"no {'such ' if self.field else ''}field can hold value={self.value!r}; the batch has: "
                f"{listing(batch)}. Name a floating field, or give an int: an id outside the vocabulary, say"
            )
        path, tensor = dice.choice([f for f in fields if f[1].numel()] or fields, "field")
        if not tensor.is_floating_point():
            limits = torch.iinfo(tensor.dtype)
            if not limits.min <= self.value <= limits.max:
                raise ValueError(
                    f"field {dotted(path)!r} of dtype {tensor.dtype} holds {limits.min} to {limits.max}, not "
                    f"value={self.value}: give a number in that range that means nothing to the model"
                )
        return path, tensor

    def _place(self, tensor: Tensor, dice: Dice) -> tuple[int, ...] | None:
        if tensor.dim() == 0:
            return ()
        if self.position is not None and self.position >= len(tensor):
            raise IndexError(f"position={self.position}: the batch has samples 0 to {len(tensor) - 1}")
        sample = self.position
        if sample is None:
            sample = dice.below(max(len(tensor), 1), "position")
        inside = locate(tensor.shape[1:], self.index, dice) if len(tensor) else None
        return None if inside is None else (sample, *inside)


def _holds_floats(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_floating_point()


def _holds_integers(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
    )
