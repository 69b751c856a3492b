"""A series of numbers as one line of characters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from gradsentinel.views.series import number

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_BAD, _ASCII_BAD = "×", "x"  # noqa: RUF001 - a cross, as in the pictures
_MARK, _ASCII_MARK = "▲", "^"
_WIDE = 100.0
"""Where the largest number is so many times the smallest, heights are logarithmic."""


def sparkline(points: Sequence[Sequence[Any]], *, ascii_only: bool = False, style: str = "cyan") -> Text:
    """Return the largest value of each point as a height; what is not finite is a red cross.

    Args:
        points: as `Series.points` gives them: x, least, largest and last value, and what else was in between.
        ascii_only: draw with ASCII.
        style: of the heights.
    """
    values = [number(point[2]) for point in points]
    odd = [
        len(point) > 4 or value is None or not math.isfinite(value)
        for point, value in zip(points, values, strict=True)
    ]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    scale = _scale(finite)
    heights, bad = (_ASCII, _ASCII_BAD) if ascii_only else (_BLOCKS, _BAD)
    line = Text(no_wrap=True, overflow="crop")
    for value, strange in zip(values, odd, strict=True):
        if strange or value is None:
            line.append(bad, "bold red")
        else:
            line.append(heights[min(len(heights) - 1, int(scale(value) * len(heights)))], style)
    return line


def mark_line(
    points: Sequence[Sequence[Any]],
    marks: Iterable[Mapping[str, Any]],
    styles: Mapping[str, str],
    *,
    ascii_only: bool = False,
) -> Text:
    """Return a line to stand below a sparkline: marks where incidents were, in the colour of the gravest.

    Args:
        points: those of the sparkline.
        marks: as in a timeline.
        styles: for each severity, the gravest last.
        ascii_only: draw with ASCII.
    """
    order = list(styles)
    xs = [point[0] for point in points]
    gravest: dict[int, int] = {}
    for mark in marks:
        if xs and mark.get("severity") in styles:
            place = min(bisect_left(xs, mark["iteration"]), len(xs) - 1)
            gravest[place] = max(gravest.get(place, 0), order.index(mark["severity"]))
    line = Text(no_wrap=True, overflow="crop")
    for place in range(len(xs)):
        if place in gravest:
            line.append(_ASCII_MARK if ascii_only else _MARK, styles[order[gravest[place]]])
        else:
            line.append(" ")
    return line


def _scale(values: Sequence[float]) -> Any:
    """Return a function from a value to 0..1."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low > 0 and high / low > _WIDE:
        low_log, spread = math.log(low), math.log(high) - math.log(low)
        return lambda value: (math.log(value) - low_log) / spread
    spread = high - low
    if not (spread > 0 and math.isfinite(spread)):
        return lambda _: 0.0
    return lambda value: (value - low) / spread
