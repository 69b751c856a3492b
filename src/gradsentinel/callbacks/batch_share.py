"""How much of the data each rank sees: an average over ranks is only fair if they see about as much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.callback import Comparer
from gradsentinel.callbacks.batch_fields import Field, record_count
from gradsentinel.callbacks.batch_links import widened
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Finding
from gradsentinel.ranks.replicas import ReplicaGroup
from gradsentinel.run import Run

_TWICE = math.log(2.0)
_DEVIATIONS = 6.0


@dataclass(slots=True)
class Share:
    """Counts what this rank sees: labels that are not ignored, or records where there are no labels."""

    several: bool = False
    """True if there are other ranks; alone nothing is counted."""
    steps: int = 0
    """Since the ranks were compared last."""
    _seen: list[Tensor | int] = field(default_factory=list)

    def count(self, batch: Any, fields: Sequence[tuple[Field, Tensor]], ignore_index: int) -> None:
        """Count a micro-batch; no wait."""
        if not self.several:
            return
        labels = [values for one, values in fields if one.role == "labels" and not one.is_float]
        self._seen.append((widened(labels[0]) != ignore_index).sum() if labels else record_count(batch) or 0)

    def standing(self) -> Tensor | None:
        """Return log(1 + number per step) and begin anew; None if nothing was seen. Waits for the device."""
        seen, steps = self._seen, max(self.steps, 1)
        self._seen, self.steps = [], 0
        if not seen:
            return None
        total = sum(int(count) for count in seen)
        return torch.tensor(math.log1p(total / steps))

    @staticmethod
    def unfair(own: float, others: tuple[float, float]) -> str | None:
        """Say so if a rank sees less than half of what the others see, or more than twice as much."""
        mean, deviation = others
        if abs(own - mean) <= max(_TWICE, _DEVIATIONS * deviation):
            return None
        return (
            f"this rank sees {math.expm1(own):.4g} labels or records a step, the others about "
            f"{math.expm1(mean):.4g}: in an average over the ranks its own weigh too much or too little"
        )


class SharesCompared(Comparer):
    """What compares the shares of the ranks; the settings and the counts are the subclass's."""

    compare_every: int
    _share: Share
    _run: Run | None

    def compares(self, step: int) -> bool:
        """Return True after every `compare_every`-th step, if there are other ranks."""
        return bool(self._share.several and self.compare_every and (step + 1) % self.compare_every == 0)

    def width(self, group: ReplicaGroup) -> int:
        """Return 0: nothing has to be equal."""
        return 0

    def fingerprints(self, group: ReplicaGroup) -> Tensor:
        """Return nothing that has to be equal."""
        return torch.zeros(0, dtype=torch.int64, device=self._run.host.device if self._run else None)

    def differing(self, step: int, group: ReplicaGroup, places: Sequence[int], own: int) -> None:
        """Never called: nothing has to be equal."""

    def standing(self) -> Tensor | None:
        """Return the logarithm of what this rank saw per step."""
        return self._share.standing()

    def compared(self, step: int, own: float, others: tuple[float, float]) -> Finding | None:
        """Warn if this rank sees far less or more than the others."""
        message = self._share.unfair(own, others)
        if message is None:
            return None
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.WARN, message=message)
