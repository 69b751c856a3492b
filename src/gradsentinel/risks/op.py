"""An operator of the dry step as the rules see it, and their answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.risks.effect import Effect
from gradsentinel.risks.facts import Facts, Given


@dataclass(frozen=True, slots=True)
class Op:
    """One forward operator of the dry step."""

    name: str
    given: Given
    kwargs: dict[str, Any]
    result: Any
    differentiable: bool
    """True if a gradient is going to flow back through it."""
    in_place: bool = False

    @property
    def tensor(self) -> Tensor:
        """The first tensor it was given."""
        return self.given.tensor

    def facts(self, index: int = 0) -> Facts:
        """What is known of an argument."""
        return self.given.facts(index)


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule's answer."""

    kind: str
    message: str
    remedy: str
    certain: bool = False
    effect: Effect | None = None
    """What the gradient has to show before it counts; None counts as it is."""


def name_of(dtype: torch.dtype) -> str:
    """Return a type's name without its module."""
    return str(dtype).removeprefix("torch.")
