"""Values so far beyond anything usual that their step had better not be made."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_habits import LARGER, MOST_FIELDS
from gradsentinel.callbacks.batch_reading import Reading
from gradsentinel.callbacks.usual import Usual
from gradsentinel.devices import device_of

_MOST, _WITHIN = 3, 1000
"""So many steps of so many are dropped for it: what comes more often is how the data is, and only told."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """A field with a value far beyond the usual ones."""

    path: str
    size: float
    usual: float
    limit: float
    """Magnitude above which a value is out of the ordinary."""

    @property
    def fact(self) -> str:
        """In words."""
        name = self.path or "the batch"
        return f"{name} holds values up to {self.size:.4g}, about {self.usual:.4g} is usual"


@dataclass(slots=True, kw_only=True)
class Gross:
    """Follows the largest magnitude of each floating-point field, whatever its size.

    A weight of a record or a single feature is enough to turn a whole update, and need not show in the loss.
    """

    warmup: int
    limit: float
    """Standard deviations."""
    times: float | None
    """So many times beyond the bound of what is unusual; None: nothing is gross."""
    _sizes: dict[str, Usual] = field(default_factory=dict)
    _dropped: deque[int] = field(default_factory=lambda: deque(maxlen=_MOST))

    def found(self, reading: Reading, sheet: Sequence[float], iteration: int) -> Iterator[Beyond]:
        """Yield the fields that are far beyond, by numbers that are on the host."""
        for path, size in reading.sizes(sheet):
            bound = self._bound(path)
            if bound < size < math.inf and self._affordable(iteration):
                usual = self._sizes[path]
                yield Beyond(path, size, usual.center, usual.high)

    def share(self, reading: Reading, iteration: int) -> Tensor | None:
        """Return how far beyond its bound the farthest field is, 1 at the bound; 0-dim, no wait.

        For numbers that are not on the host yet. None if no field has a bound.
        """
        if not self._affordable(iteration):
            return None
        places, bounds = [], []
        for place, path in reading.plan.sizes:
            bound = self._bound(path)
            if bound < math.inf:
                places += [place, place + 1]
                bounds += [bound, bound]
        if not places:
            return None
        sheet, device = reading.sheet, device_of(reading.sheet.device)
        index = device.send(torch.tensor(places))
        limits = device.send(torch.tensor(bounds, dtype=sheet.dtype))
        shares = sheet[index].abs() / limits
        # Infinities and NaN are another matter: a mask may be made of them.
        return torch.where(torch.isfinite(shares), shares, 0.0).amax()

    def learn(self, step: int, reading: Reading, sheet: Sequence[float]) -> None:
        """Learn from a batch that was used."""
        if self.times is None:
            return
        for path, size in reading.sizes(sheet):
            if path not in self._sizes and len(self._sizes) < MOST_FIELDS:
                self._sizes[path] = Usual(limit=self.limit, floor=LARGER, warmup=self.warmup, sizes=True)
            if path in self._sizes:
                self._sizes[path].is_unusual(step, size)

    def dropped(self, iteration: int) -> None:
        """Count a step that is dropped for it."""
        if not self._dropped or self._dropped[-1] != iteration:
            self._dropped.append(iteration)

    def forget_from(self, step: int) -> None:
        """Forget what was learnt of this step and later ones: they were taken back."""
        for usual in self._sizes.values():
            usual.forget_from(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        sizes = {path: usual.state_dict() for path, usual in self._sizes.items()}
        return {"sizes": sizes, "dropped": list(self._dropped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._sizes.clear()
        for path, kept in state["sizes"].items():
            usual = Usual(limit=self.limit, floor=LARGER, warmup=self.warmup, sizes=True)
            usual.load_state_dict(kept)
            self._sizes[path] = usual
        self._dropped = deque(state["dropped"], maxlen=_MOST)

    def _bound(self, path: str) -> float:
        usual = self._sizes.get(path)
        if usual is None or self.times is None or math.isnan(usual.high):
            return math.inf
        return self.times * usual.high

    def _affordable(self, iteration: int) -> bool:
        """Say whether one more step may be dropped; one that is being dropped was counted already."""
        if self.times is None:
            return False
        before = [one for one in self._dropped if iteration - _WITHIN < one < iteration]
        return len(before) < _MOST
