"""Drawing with characters: a canvas of braille dots and the scale of an axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

Point = tuple[float, float]
"""A place on a canvas: 0 (left) to 1 (right), and 0 (bottom) to 1 (top)."""


class Canvas:
    """Character cells to draw on, each of 2 x 4 braille dots or, in ASCII, of one asterisk."""

    def __init__(self, columns: int, rows: int, *, ascii_only: bool) -> None:
        self.columns = columns
        self.rows = rows
        self.ascii_only = ascii_only
        self._across, self._down = (1, 1) if ascii_only else (2, 4)  # dots in a cell
        self._cells: dict[tuple[int, int], tuple[str, str]] = {}
        self._dots: dict[tuple[int, int], int] = {}

    @property
    def dots_across(self) -> int:
        """How many dots stand side by side."""
        return self.columns * self._across

    def dot(self, point: Point) -> tuple[int, int]:
        """Return column and row of the dot at a place, counted from the top left."""
        x, y = (min(1.0, max(0.0, part)) for part in point)
        return round(x * (self.dots_across - 1)), round((1.0 - y) * (self.rows * self._down - 1))

    def cell(self, point: Point) -> tuple[int, int]:
        """Return column and row of the character cell at a place, counted from the top left."""
        column, row = self.dot(point)
        return column // self._across, row // self._down

    def put(self, column: int, row: int, character: str, style: str) -> None:
        """Write one character over whatever is in a cell; outside the canvas nothing happens."""
        if 0 <= column < self.columns and 0 <= row < self.rows:
            self._cells[column, row] = (character, style)

    def line(self, points: Sequence[Point], style: str) -> None:
        """Join places by straight lines."""
        dots = [self.dot(point) for point in points]
        for (x0, y0), (x1, y1) in zip(dots[:1] + dots, dots, strict=False):
            length = max(abs(x1 - x0), abs(y1 - y0), 1)
            for number in range(length + 1):
                part = number / length
                self._set(round(x0 + part * (x1 - x0)), round(y0 + part * (y1 - y0)), style)

    def _set(self, x: int, y: int, style: str) -> None:
        """Set one dot."""
        cell = (x // self._across, y // self._down)
        if self.ascii_only:
            self.put(*cell, "*", style)
            return
        column, row = x % 2, y % 4
        bit = 6 + column if row == 3 else row + 3 * column  # Unicode numbers the 4th row last
        self._dots[cell] = self._dots.get(cell, 0) | 1 << bit
        self.put(*cell, chr(0x2800 + self._dots[cell]), style)

    def lines(self) -> list[Text]:
        """Return the rows from top to bottom."""
        return [
            Text.assemble(*(self._cells.get((column, row), (" ", "")) for column in range(self.columns)))
            for row in range(self.rows)
        ]


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of an axis; its ends differ."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> "Scale":
        """Return the scale that shows some finite values; values that are all the same get some room."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
            room = max(0.5, 0.1 * abs(low))
            return cls(low - room, high + room)
        return cls(low, high)

    def place(self, value: float) -> float:
        """Place a value: 0 is the low end of the axis, 1 the high end."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Return some round values on the axis, with their labels."""
        rough = (self.high - self.low) / about
        exponent = math.floor(math.log10(rough))
        factor = next(factor for factor in (1.0, 2.0, 5.0, 10.0) if factor * 10.0**exponent >= 0.999 * rough)
        step = factor * 10.0**exponent
        decimals = max(0, -exponent - (factor == 10.0))
        numbers = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        form = f".{decimals}f" if abs(exponent) <= 4 else ".3g"
        return [(number * step, f"{number * step:{form}}") for number in numbers]
