"""When a value that grows will overflow: a straight line through the logarithms of its samples."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from gradsentinel.callbacks.peaks import LOGITS, Site

LEAST_SAMPLES = 4
"""Samples that a trend takes."""
_SURE = 4.0
"""A slope counts if it is so many times its own error."""
_STEADY = 1e-3
"""Doublings a step below which growth is no trend, however sure: a run of 1000 steps gains one."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the samples of one site say."""

    site: Site
    value: float
    """The largest magnitude in the last sample."""
    doublings: float
    """How often it may still double."""
    steps: float | None = None
    """Steps until it overflows at the present pace; None if it does not grow for certain."""

    @property
    def words(self) -> str:
        """The site, how far it is, and when it will overflow."""
        limit = f"{self.site.limit:.4g} in {str(self.site.dtype).removeprefix('torch.')}"
        text = f"the {self.site} reaches {self.value:.4g} of at most {limit}"
        return text if self.steps is None else f"{text}, and will overflow in about {self.steps:.0f} steps"


@dataclass(slots=True)
class Trend:
    """The newest samples of one site: attempted step, and magnitude in doublings above 1."""

    samples: deque[tuple[int, float]]

    def add(self, step: int, value: float) -> None:
        """Take a sample in."""
        self.samples.append((step, math.log2(value)))

    def forecast(self, site: Site) -> Forecast:
        """Extrapolate the magnitude's logarithm by a straight line through the samples (least squares)."""
        value = self.samples[-1][1]
        left = math.log2(site.limit) - value
        slope = self._slope()
        steps = max(left, 0.0) / slope if slope is not None and slope > 0 else None
        return Forecast(site, 2.0**value, left, steps)

    def _slope(self) -> float | None:
        """Doublings per step, if that is known for certain; the usual error of a regression's slope."""
        count = len(self.samples)
        if count < LEAST_SAMPLES:
            return None
        mean_x = sum(x for x, _ in self.samples) / count
        mean_y = sum(y for _, y in self.samples) / count
        spread = sum((x - mean_x) ** 2 for x, _ in self.samples)
        if not spread:
            return None
        slope = sum((x - mean_x) * (y - mean_y) for x, y in self.samples) / spread
        rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in self.samples)
        error = math.sqrt(rest / (count - 2) / spread)
        return slope if abs(slope) > max(_SURE * error, _STEADY) else None


def magnitude(site: Site, low: float, high: float) -> float | None:
    """Return the largest magnitude that counts; None if there is none to speak of.

    What is at the lower end is a mask, and of what a softmax is given only the upper end can do harm.
    Values that are not finite are another detector's business.
    """
    if not (math.isfinite(high) and high <= site.limit):
        return None
    masked = not low > -0.99 * site.limit
    value = high if masked or site.what == LOGITS else max(high, -low)
    return value if value > 0 and math.isfinite(value) else None
