"""A field of a batch that holds something else than it should: wrong labels, an empty mask, an outlier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from gradsentinel.faults.course import Shot
from gradsentinel.faults.damage import first_change
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Fault, check_name, check_value, is_count
from gradsentinel.faults.names import Names
from gradsentinel.faults.tree import dotted, listing, pick, replaced

Spoiling = Literal["zero", "shuffle", "scale"]


@dataclass(frozen=True, kw_only=True)
class SpoilField(Fault):
    """A whole field of a batch is wrong: set to zero, in another order, or scaled; or that of one sample.

    A mask of zeros masks everything out, shuffled labels belong to other inputs, a scaled sample is an
    outlier. The batch is copied where it is changed, so the data set stays clean.
    """

    field: str
    """Dotted path of the field in the batch, such as `mask`, `labels` or `1`."""
    change: Spoiling
    """`zero`: all its values are 0; `shuffle`: they are in another order, which the seed chooses; `scale`:
    they are multiplied by `factor`."""
    factor: float = 1e4
    """What `scale` multiplies by."""
    position: int | None = None
    """Only this sample of the batch (first dimension of the field); None: the whole field."""

    kind: ClassVar[str] = "spoil_field"
    needs_model: ClassVar[bool] = False
    unfired: ClassVar[str] = (
        "no batch passed through plan.batches or plan.poison in that step and micro-batch, or the change "
        "changes nothing there"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("field", self.field)
        check_value(self.factor)
        if self.change not in get_args(Spoiling):
            raise ValueError(f"change={self.change!r}: give one of {', '.join(get_args(Spoiling))}")
        if self.position is not None and not is_count(self.position):
            raise ValueError(f"position={self.position!r}: give the number of a sample, from 0 on, or None")

    def poison(self, batch: Any, shot: Shot) -> Any:
        """Return the batch with the field changed if the fault fires now.

        Raises:
            LookupError: there is no such field or sample.
            ValueError: the field cannot hold what is to be in it.
        """
        if not shot.live():
            return batch
        found = pick(batch, self.field, lambda tensor: tensor.layout is torch.strided, what="the batch")
        if not found:
            raise ValueError(f"field {self.field!r} holds no plain tensor; the batch has: {listing(batch)}")
        path, tensor = found[0]
        twin = tensor.detach().clone()
        part = twin
        if self.position is not None:
            if twin.dim() == 0 or self.position >= len(twin):
                raise IndexError(f"position={self.position}: the field has shape {tuple(twin.shape)}")
            part = twin[self.position]
        part.copy_(self._changed(part, shot.dice))
        hit = first_change(tensor.detach(), twin)
        if hit is None:
            return batch
        shot.record("sample", dotted(path), hit)
        return replaced(batch, path, twin.requires_grad_(tensor.requires_grad))

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> SpoilField:
        """Say that nobody can know the fields of a batch from the model."""
        raise NotImplementedError("SpoilField needs field=: leave it out of kinds=")

    def _changed(self, tensor: Tensor, dice: Dice) -> Tensor:
        if self.change == "zero":
            return torch.zeros_like(tensor)
        if self.change == "scale":
            return tensor * self.factor
        generator = torch.Generator().manual_seed(dice.below(2**63, "order"))
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor.reshape(-1)[order].reshape(tensor.shape)
