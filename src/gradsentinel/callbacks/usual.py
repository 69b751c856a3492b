"""Where a number usually lies from batch to batch; what lies elsewhere does not move it, unless it stays."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WINDOW = 128
_REFRESH = 8
"""After so many further values a full window is looked at anew."""
_PATIENCE = 16
"""So many values in a row elsewhere are where the number lies now."""
_OFTEN = 0.1
"""Values elsewhere are usual too if they are this share of a window."""
_FEW = 8.0
"""The deviation of n values is known to about 1 + 8/n: fewer values, a wider range."""
_MAD, _TAIL = 1.4826, 1.96
"""A normal distribution's deviation in median absolute ones; its 95 % quantile in deviations."""


@dataclass(slots=True, kw_only=True)
class Usual:
    """The median of a window of values, and how far around it the next one may be."""

    limit: float
    """Standard deviations."""
    floor: float
    """The range is never narrower than this, however steady the number was."""
    warmup: int
    """With fewer values nothing is unusual."""
    sizes: bool = False
    """True for magnitudes: what counts is the quotient, and only large ones are unusual."""
    _values: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Step and value."""
    _elsewhere: list[tuple[int, float]] = field(default_factory=list)
    """The values elsewhere since the last one within the range."""
    _lately: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _known: tuple[float, float] | None = None
    """Median, and half the width of the range."""
    _stale: int = 0

    @property
    def center(self) -> float:
        """What is usual; NaN while nothing is known."""
        if self._known is None:
            return math.nan
        return math.exp(self._known[0]) if self.sizes else self._known[0]

    @property
    def high(self) -> float:
        """The largest value within the range; NaN while nothing is known."""
        if self._known is None:
            return math.nan
        high = sum(self._known)
        return math.exp(min(high, 700.0)) if self.sizes else high

    def is_unusual(self, step: int, value: float) -> bool:
        """Return True if a value is out of the range, and learn from it."""
        if not math.isfinite(value) or (self.sizes and value <= 0):
            return False
        entry = (step, math.log(value) if self.sizes else value)
        if len(self._values) < self.warmup:
            self._values.append(entry)
            return False
        center, width = self._range()
        outside = entry[1] > center + width or (not self.sizes and entry[1] < center - width)
        self._lately.append(outside)
        if not outside:
            self._elsewhere.clear()
            self._learn(entry)
            return False
        self._elsewhere.append(entry)
        if len(self._elsewhere) >= _PATIENCE:
            self._values = deque(self._elsewhere, maxlen=_WINDOW)
            self._elsewhere.clear()
            self._stale = _REFRESH
        elif sum(self._lately) > _OFTEN * _WINDOW:
            self._learn(entry)
        return True

    def forget_from(self, step: int) -> None:
        """Forget the values of this step and later ones: they were taken back."""
        self._values = deque((entry for entry in self._values if entry[0] < step), maxlen=_WINDOW)
        self._elsewhere.clear()
        self._known = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {"values": [list(entry) for entry in self._values], "lately": list(self._lately)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._values = deque(((int(step), float(value)) for step, value in state["values"]), maxlen=_WINDOW)
        self._lately = deque((bool(flag) for flag in state["lately"]), maxlen=_WINDOW)
        self._elsewhere.clear()
        self._known = None

    def _learn(self, entry: tuple[int, float]) -> None:
        self._values.append(entry)
        self._stale += 1

    def _range(self) -> tuple[float, float]:
        if self._known is None or self._stale >= _REFRESH or len(self._values) < _WINDOW // 2:
            values = [value for _, value in self._values]
            center = statistics.median(values)
            distances = sorted(abs(value - center) for value in values)
            far = distances[min(len(distances) - 1, int(0.95 * len(distances)))]
            spread = max(_MAD * distances[len(distances) // 2], far / _TAIL)
            width = max(self.limit * spread * (1 + _FEW / len(values)), self.floor)
            self._known, self._stale = (center, width), 0
        return self._known
