"""Loss curves side by side in the terminal; `save_png` draws the same as a picture."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradsentinel.demo.canvas import Canvas, Scale
from gradsentinel.demo.curve import LossCurve, common_scales
from gradsentinel.demo.figure import save_png

__all__ = ["LossChart", "LossCurve", "Sparkline", "loss_chart", "save_png", "sparkline"]

_CURVE_STYLES = ("bright_cyan", "bright_green", "bright_magenta")
_MARK_STYLE = "bold yellow"
_BAD_STYLE = "bold red"
_AXIS_STYLE = "dim"
_LEAST_WIDTH = 26  # of a panel; panels that would be narrower are stacked
_ROWS = 11  # of a plot


def loss_chart(curves: Sequence[LossCurve]) -> "LossChart":
    """Draw loss curves for the terminal: print the result to a rich console.

    All panels have the same scales. They stand in a row if the console is wide enough for that and are
    stacked otherwise; a console that cannot show Unicode gets plain characters.
    """
    return LossChart(list(curves))


def sparkline(values: Sequence[float], width: int) -> "Sparkline":
    """Draw a curve of at most `width` characters that is one line high, for rich.

    Where a value is not finite there is a red cross.
    """
    return Sparkline(list(values), width)


@dataclass(frozen=True, slots=True)
class LossChart:
    """Several loss curves, as a rich renderable."""

    curves: list[LossCurve]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.curves:
            return
        in_a_row = options.max_width >= _LEAST_WIDTH * len(self.curves)
        width = options.max_width // len(self.curves) if in_a_row else options.max_width
        scales = common_scales(self.curves)
        panels = [
            _panel(
                curve,
                scales,
                style=style,
                width=width,
                numbered=any(other.marks for other in (self.curves if in_a_row else [curve])),
                ascii_only=options.ascii_only,
            )
            for curve, style in zip(self.curves, itertools.cycle(_CURVE_STYLES), strict=False)
        ]
        if not in_a_row:
            yield from panels
            return
        heights = [len(console.render_lines(panel, options.update(width=width))) for panel in panels]
        row = Table.grid()
        for panel in panels:
            panel.height = max(heights)
            row.add_column(width=width)
        row.add_row(*panels)
        yield row


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A curve that is one line high, as a rich renderable."""

    values: list[float]
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars, cross = (".:-=+*#", "x") if options.ascii_only else ("▁▂▃▄▅▆▇█", "\N{MULTIPLICATION SIGN}")
        means = list(self._means(min(self.width, options.max_width, len(self.values))))
        scale = Scale.around([mean for mean in means if math.isfinite(mean)])
        line = Text(no_wrap=True)
        for mean in means:
            if math.isfinite(mean):
                line.append(bars[min(len(bars) - 1, int(scale.place(mean) * len(bars)))])
            else:
                line.append(cross, _BAD_STYLE)
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width, options.max_width, len(self.values))
        return Measurement(width, width)

    def _means(self, count: int) -> Iterator[float]:
        """Average the values in `count` bins; a bin with a non-finite value is non-finite."""
        for number in range(count):
            values = self.values[
                number * len(self.values) // count : (number + 1) * len(self.values) // count
            ]
            yield sum(values) / len(values)


def _panel(
    curve: LossCurve, scales: tuple[Scale, Scale], *, style: str, width: int, numbered: bool, ascii_only: bool
) -> Panel:
    """Draw one curve with its axes; the verdict is on the frame and the marks are explained below.

    `numbered` leaves a row for the numbers of the marks, so that panels side by side stay level.
    """
    _, losses = scales
    ticks = losses.ticks(4)
    label_width = max(len(label) for _, label in ticks)
    margin = " " * (label_width + 1)
    canvas = Canvas(max(1, width - 3 - len(margin)), _ROWS, ascii_only=ascii_only)
    _draw(canvas, curve, scales, style)
    labels = {canvas.cell((0.0, losses.place(value)))[1]: label for value, label in ticks}
    tick, line, corner = "+|+" if ascii_only else "┤│└"
    plot = Text(no_wrap=True, overflow="crop").append("loss\n", _AXIS_STYLE)
    for row, cells in enumerate(canvas.lines()):
        label = labels.get(row, "")
        plot.append(label.rjust(label_width) + (tick if label else line), _AXIS_STYLE)
        plot.append_text(cells).append("\n")
    floor, numbers = _marks(canvas, curve, scales)
    plot.append(corner.rjust(len(margin)), _AXIS_STYLE).append_text(floor).append("\n")
    if numbered:
        plot.append(margin).append_text(numbers).append("\n")
    plot.append(margin + _step_labels(canvas.columns, scales[0]), _AXIS_STYLE)
    legend = Table.grid(padding=(0, 1))
    for number, (step, what) in enumerate(curve.marks, 1):
        legend.add_row(Text(f" {number}", _MARK_STYLE), Text.assemble((f"step {step}", "bold"), f"  {what}"))
    broken = curve.broken_from is not None
    return Panel(
        Group(plot, legend) if curve.marks else plot,
        title=Text(curve.name, f"not dim bold {style}"),
        title_align="left",
        subtitle=Text(curve.verdict, _BAD_STYLE if broken else "not dim bold"),
        subtitle_align="right",
        border_style="red" if broken else "dim",
        padding=0,
        width=width,
    )


def _draw(canvas: Canvas, curve: LossCurve, scales: tuple[Scale, Scale], style: str) -> None:
    """Draw the line of a curve, the holes in it, and where it breaks off."""
    steps, losses = scales
    heights: dict[int, list[float]] = defaultdict(list)
    for step, loss in enumerate(curve.losses, curve.first_step):
        if math.isfinite(loss):
            column, _ = canvas.dot((steps.place(step), 0.0))
            heights[column].append(min(1.0, losses.place(loss)))
    last = max(1, canvas.dots_across - 1)
    canvas.line([(column / last, sum(some) / len(some)) for column, some in sorted(heights.items())], style)
    cross, dash = ("X", ":") if canvas.ascii_only else ("\N{MULTIPLICATION SIGN}", "╎")
    if curve.broken_from is not None:
        where, _ = canvas.cell((steps.place(curve.broken_from), 0.0))
        for row in range(canvas.rows):
            canvas.put(where, row, dash, "red")
        _write(canvas, curve.verdict, where)
    for step, loss in curve.crosses:
        canvas.put(*canvas.cell((steps.place(step), losses.place(loss))), cross, _BAD_STYLE)


def _write(canvas: Canvas, text: str, where: int) -> None:
    """Write red text beside a column, on the roomier side, in as many lines as it takes."""
    on_the_right = canvas.columns - where - 2 >= where - 1
    room = canvas.columns - where - 2 if on_the_right else where - 1
    if room < max(len(word) for word in text.split()):
        return  # the frame says it too
    for row, line in enumerate(Text(text).wrap(Console(width=room), room), 1):
        written = line.plain.rstrip()
        start = where + 2 if on_the_right else where - 1 - len(written)
        for column, character in enumerate(written, start):
            canvas.put(column, row, character, _BAD_STYLE)


def _marks(canvas: Canvas, curve: LossCurve, scales: tuple[Scale, Scale]) -> tuple[Text, Text]:
    """Draw the horizontal axis with an arrow at every mark, and the numbers of the marks."""
    line, arrow = "-^" if canvas.ascii_only else "─▲"
    floor, numbers = [line] * canvas.columns, [" "] * canvas.columns
    for number, (step, _) in enumerate(curve.marks, 1):
        column, _ = canvas.cell((scales[0].place(step), 0.0))
        floor[column] = arrow
        digits = str(number)
        start = max(0, min(column, canvas.columns - len(digits)))
        numbers[start : start + len(digits)] = digits
    axis = Text.assemble(*((cell, _MARK_STYLE if cell == arrow else _AXIS_STYLE) for cell in floor))
    return axis, Text("".join(numbers), _MARK_STYLE)


def _step_labels(width: int, steps: Scale) -> str:
    """Label the ends of the horizontal axis and what it counts, as far as there is room."""
    first, last = f"{steps.low:.0f}", f"{steps.high:.0f}"
    line = list(first + last.rjust(width - len(first)))
    if width >= len(first + last) + 8:
        line[(width - 4) // 2 : (width + 4) // 2] = "step"
    return "".join(line)
