"""A series of numbers over the attempted steps, which grows and is drawn with few points."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

_MOST = 1 << 17
"""So many points are kept at most; then neighbours are put together, with their extremes."""
_NAN, _INF, _MINUS_INF = 1, 2, 4
_WORDS = ((_NAN, "nan"), (_INF, "inf"), (_MINUS_INF, "-inf"))


def number(value: Any) -> float | None:
    """Return a number of a JSON file, which may be written as "nan", "inf" or "-inf"; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and value in {"nan", "inf", "-inf"}:
        return float(value)
    return None


def shown(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it."""
    return value if value is None or math.isfinite(value) else str(value)


class Series:
    """Points of x (ascending), least, largest and last value; memory is bounded, extremes are never lost."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self.x = array("q")
        self._low = array("d")
        self._high = array("d")
        self._last = array("d")
        self._odd = bytearray()
        self.factor = 1
        """So many values were put into each point."""
        self._open = 0
        """Values in the last point so far."""

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: int, value: float) -> None:
        """Append a value; x must not be smaller than the last one."""
        odd = 0 if math.isfinite(value) else _NAN if value != value else _INF if value > 0 else _MINUS_INF  # noqa: PLR0124 - NaN
        low, high = (value, value) if not odd else (math.inf, -math.inf)
        if self._open and self._open < self.factor:
            self.x[-1] = x
            self._low[-1] = min(self._low[-1], low)
            self._high[-1] = max(self._high[-1], high)
            self._last[-1] = value
            self._odd[-1] |= odd
            self._open += 1
            return
        if len(self.x) >= self._most:
            self._halve()
        self.x.append(x)
        self._low.append(low)
        self._high.append(high)
        self._last.append(value)
        self._odd.append(odd)
        self._open = 1

    def points(self, start: int, stop: int, most: int) -> list[list[Any]]:
        """Return points from `start` to `stop`, both included, at most so many.

        A point is x of its last value, least, largest and last value, and, if something in it is not
        finite beside values that are, a list of what that is.
        """
        first, end = bisect_left(self.x, start), bisect_right(self.x, stop)
        if end - first <= most:
            return [self._point(index, index + 1) for index in range(first, end)]
        found = []
        for low, high in self._buckets(first, end, most):
            found.append(self._point(low, high))
        return found

    def last(self) -> float | None:
        """Return the newest value."""
        return self._last[-1] if self._last else None

    def _buckets(self, first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Divide the points into stretches of equal width."""
        start, width = self.x[first], (self.x[end - 1] - self.x[first] + 1) / most
        low = first
        for number_of in range(most):
            high = (
                end
                if number_of == most - 1
                else bisect_left(self.x, start + width * (number_of + 1), low, end)
            )
            if high > low:
                yield low, high
            low = high

    def _point(self, first: int, end: int) -> list[Any]:
        odd = 0
        for flags in set(self._odd[first:end]):
            odd |= flags
        low, high = min(self._low[first:end]), max(self._high[first:end])
        last = self._last[end - 1]
        words = [word for flag, word in _WORDS if odd & flag]
        if low > high:  # nothing in it is finite
            return [self.x[end - 1], words[-1], words[0], shown(last)]
        point = [self.x[end - 1], low, high, shown(last)]
        return [*point, words] if words else point

    def _halve(self) -> None:
        """Put every two neighbours together."""
        for column, merge in ((self._low, min), (self._high, max)):
            for index in range(len(column) // 2):
                column[index] = merge(column[2 * index], column[2 * index + 1])
            del column[len(column) // 2 :]
        for index in range(len(self.x) // 2):
            self.x[index] = self.x[2 * index + 1]
            self._last[index] = self._last[2 * index + 1]
            self._odd[index] = self._odd[2 * index] | self._odd[2 * index + 1]
        half = len(self.x) // 2
        del self.x[half:], self._last[half:], self._odd[half:]
        self.factor *= 2
