"""Where the next value of a series is expected, computed from the values before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

INFINITY = float("inf")

_RECENT = 32
"""So many of the newest values say where the series is now."""
_TREND_FROM = 24
"""With fewer values no trend is looked for."""
_TAIL, _TAIL_DEVIATIONS = 0.95, 1.645
"""A quantile, and how many standard deviations above the median it is in a normal distribution."""
_MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations."""
_FEW = 8.0
"""The deviation of n values is known to about 1 + 8/n: fewer values, a wider band."""
_SPARSE = 0.1
"""With a larger share of zeros a loss cannot be judged by its spread."""
_EARLY = 10.0
"""So many times the largest value so far is not learnt while there is no band yet."""
_BEYOND, _HEAVY = 1.3, 1.75
"""Farther out than any healthy value by this factor, as long as the limit grows by no more than that one."""
_GROWN_UP = 256
"""After so many values half of what is granted to a young run is left."""
_SIGNED = 2.5
"""So many times the limit for values that have no logarithm: their tails are the heaviest."""
_LAST, _CLIMB = 5, math.log(1.5)
"""What is near the largest of so many last values climbs, and may go farther out by this."""
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where the next value is expected."""

    center: float
    high: float
    low: float = -INFINITY
    explosion: float = INFINITY
    """What is above this has exploded."""
    spread: float = 0.0
    """One standard deviation, of the logarithm unless `linear`."""
    linear: bool = False
    count: int = 0
    """How many values it was learnt from."""
    ordinary: float = INFINITY
    """What is above this and yet inside has climbed there step by step."""
    began: float | None = None
    """The level that the series began with."""
    early: bool = False
    """True while too few values are known to call anything a spike; an explosion shows even then."""

    @property
    def relative(self) -> bool:
        """True if how far out a value is can be told by its quotient with the bound."""
        return not (self.early or self.linear) and self.high > 0

    def holds(self, value: float) -> bool:
        """Return True for a value that is as expected; False for NaN."""
        return self.low <= value <= self.high

    def deviations(self, value: float) -> float:
        """Return how many standard deviations a value is from the centre."""
        if self.linear or self.center <= 0 or value <= 0:
            distance = value - self.center
        else:
            distance = math.log(value / self.center)
        if self.spread > 0:
            return distance / self.spread
        return math.copysign(INFINITY, distance) if distance else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of a series beyond its window."""

    age: int = 0
    """How many values there were."""
    peak: float = 0.0
    """How many standard deviations the farthest healthy value was out when it came."""
    ease: float = 1.0
    """So many times the usual limit, for a reason from outside of the series."""


Rule = Callable[[Sequence[float], Life], Band | None]
"""From the values of a window, oldest first, to the band of the next one; None if they say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """Median and spread of the logarithm, which outliers, trends and heavy tails cannot mislead.

    The centre is the median of the newest values, carried on along a rising trend (a falling one is not
    extrapolated: it ends, and what follows would look like a spike). The spread is taken around the trend
    of the whole window, from the values above the median alone: 1.4826 times their median distance from it
    (the upper half of the MAD), or what their 95 % quantile says, whichever is larger. The longer a run is
    and the heavier its own tail, the farther out a spike must be: by 1.3 times the farthest healthy value, up
    to 1.75 times `limit`. What climbs step by step is no spike until it is twice as far out. Values that
    change sign have no logarithm; they are judged as they are, with 2.5 times the limit.
    """

    limit: float = 4.0
    """Standard deviations."""
    floor: float = math.log(3.0)
    """Never narrower than this, in logarithms: less is no spike, however steady the series is."""
    youth: float = 0.0
    """The floor begins higher by this; half of it is left after 256 values. Young runs take leaps."""

    def __call__(self, values: Sequence[float], life: Life) -> Band | None:
        """Return the band of the next value."""
        smallest = min(values)
        linear = smallest < 0
        floor, climb = self.floor + self.youth / (1 + life.age / _GROWN_UP), _CLIMB
        if linear:
            series = values
            size = statistics.median(abs(value) for value in values)
            floor, climb = math.expm1(floor) * size, math.expm1(climb) * size
        else:
            if smallest == 0:
                positive = [value for value in values if value > 0]
                if len(positive) < (1 - _SPARSE) * len(values):
                    return early(values)
                smallest = min(positive)
            series = [math.log(value or smallest) for value in values]
        center, spread = self._locate(series)
        least = life.ease * self.limit * (_SIGNED if linear else 1.0)
        limit = min(max(least, _BEYOND * life.peak), _HEAVY * least)
        width = limit * spread * (1 + _FEW / len(series))
        sudden = max(series[-_LAST:]) + floor
        ordinary = center + max(width, floor)
        high = max(ordinary, min(center + width + min(width, climb), sudden))
        back = _same if linear else _exp
        return Band(
            center=back(center),
            high=back(high),
            ordinary=back(ordinary),
            spread=spread,
            linear=linear,
            count=len(series),
        )

    @staticmethod
    def _locate(values: Sequence[float]) -> tuple[float, float]:
        """Where the next value is expected, and one standard deviation upwards."""
        count, slope = len(values), 0.0
        if count >= _TREND_FROM:
            third = count // 3
            rise = _median(values[-third:]) - _median(values[:third])
            slope = rise / (count - third)
        rest = sorted([value - slope * place for place, value in enumerate(values)])
        middle = _quantile(rest, 0.5)
        half = _quantile(rest[count // 2 :], 0.5) - middle
        spread = max(_MAD_TO_DEVIATION * half, (_quantile(rest, _TAIL) - middle) / _TAIL_DEVIATIONS)
        recent = min(_RECENT, count)
        return _median(values[-recent:]) + max(slope, 0.0) * recent / 2, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigma:
    """Mean plus and minus so many standard deviations of the values as they are."""

    sigmas: float = 3.0

    def __call__(self, values: Sequence[float], life: Life) -> Band | None:
        """Return the band of the next value."""
        count = len(values)
        size = max(abs(value) for value in values) or 1.0  # so that no square overflows
        parts = [value / size for value in values]
        middle = math.fsum(parts) / count
        variance = math.fsum((part - middle) ** 2 for part in parts) / max(1, count - 1)
        mean = size * middle
        spread = max(size * math.sqrt(variance), 1e-6 * abs(mean))  # rounding is no deviation
        width = self.sigmas * spread
        return Band(center=mean, low=mean - width, high=mean + width, spread=spread, linear=True, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """So many times the largest value of the window."""

    times: float = 10.0

    def __call__(self, values: Sequence[float], life: Life) -> Band | None:
        """Return the band of the next value."""
        largest = max(values)
        center = statistics.median(values)
        high = largest + (self.times - 1) * abs(largest)
        return Band(center=center, high=high, spread=abs(largest), linear=True, count=len(values))


def early(values: Sequence[float]) -> Band:
    """Return a band for a series of which too little is known: only what is far out is outside."""
    largest = max(abs(value) for value in values)
    return Band(
        center=statistics.median(values),
        high=_EARLY * largest if largest else INFINITY,
        linear=True,
        count=len(values),
        early=True,
    )


def with_explosion(band: Band, times: float | None) -> Band:
    """Return the band with the bound of an explosion: so many times as far out as a spike begins."""
    if times is None:
        return band
    size = abs(band.high) if not band.linear or band.early else abs(band.center) + (band.high - band.center)
    return replace(band, explosion=times * size)


def _median(values: Sequence[float]) -> float:
    return _quantile(sorted(values), 0.5)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _same(value: float) -> float:
    return value


def _exp(value: float) -> float:
    return math.exp(min(value, _LARGEST_EXPONENT))
