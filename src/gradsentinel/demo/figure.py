"""The loss curves as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsentinel.demo.canvas import Scale
from gradsentinel.demo.curve import LossCurve, common_scales

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2563eb", "#059669", "#7c3aed")
_INK, _QUIET, _FAINT = "#111827", "#6b7280", "#e5e7eb"
_BAD, _MARK = "#dc2626", "#d97706"
_STYLE: Any = {  # rcParams, whose keys matplotlib types as one literal each
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "text.parse_math": False,  # names may hold a dollar sign
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": _QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
}


def save_png(curves: Sequence[LossCurve], path: Path | str, *, title: str | None = None) -> Path | None:
    """Draw loss curves side by side into a PNG file, with the same scales, and return its path.

    The first curve is drawn faintly behind the others. Returns None if matplotlib is not installed; the
    caller can then name the extra, `gradsentinel[demo]`. No display is needed.

    Raises:
        ValueError: there are no curves.
    """
    if not curves:
        raise ValueError("there are no curves to draw")
    try:
        import matplotlib as mpl  # noqa: PLC0415  optional, and slow to import
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return None
    legend_lines = max(len(curve.marks) for curve in curves)
    height = 4.0 + 0.22 * legend_lines + (0.35 if title else 0.0)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4 * len(curves) + 0.6, height), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        row = figure.subplots(1, len(curves), sharex=True, sharey=True, squeeze=False)[0]
        scales = common_scales(curves)
        for number, (axes, curve) in enumerate(zip(row, curves, strict=True)):
            _draw(axes, curve, scales, _COLOURS[number % len(_COLOURS)])
            if number:
                axes.plot(
                    *_points(curves[0], _smooth(curves[0].losses)), color="#9ca3af", linewidth=1.0, zorder=2
                )
        row[0].set_ylabel("loss (nats per character)")
        if title:
            figure.suptitle(
                title,
                x=0.65 / figure.get_figwidth(),
                y=1 - 0.1 / height,
                ha="left",
                va="top",
                fontsize=14,
                fontweight="bold",
            )
        figure.subplots_adjust(
            left=0.65 / figure.get_figwidth(),
            right=1 - 0.2 / figure.get_figwidth(),
            top=1 - (0.9 if title else 0.55) / height,
            bottom=(0.6 + 0.22 * legend_lines) / height,
            wspace=0.1,
        )
        target = Path(path)
        figure.savefig(target, format="png")
    return target


def _draw(axes: "Axes", curve: LossCurve, scales: tuple[Scale, Scale], colour: str) -> None:
    """Draw one panel."""
    steps, losses = scales
    room = 0.06 * (losses.high - losses.low)
    axes.set_xlim(steps.low, steps.high)
    axes.set_ylim(losses.low - room, losses.high + room)
    axes.set_xlabel("step")
    axes.tick_params(length=0, labelleft=True)
    broken = curve.broken_from
    axes.set_title(curve.name, loc="left", fontsize=11.5, fontweight="bold", pad=18)
    axes.set_title(
        curve.verdict,
        loc="right",
        fontsize=10,
        fontweight="bold",
        color=_BAD if broken is not None else colour,
        pad=18,
    )
    axes.plot(*_points(curve, curve.losses), color=colour, linewidth=0.8, alpha=0.28, zorder=3)
    axes.plot(
        *_points(curve, _smooth(curve.losses)), color=colour, linewidth=2.2, solid_capstyle="round", zorder=4
    )
    for step, loss in curve.crosses:
        axes.scatter([step], [loss], marker="x", color=_BAD, linewidths=2.2, s=55, zorder=6)
    if broken is not None:
        axes.axvspan(broken, steps.high, color=_BAD, alpha=0.07, linewidth=0, zorder=1)
        axes.axvline(broken, color=_BAD, linewidth=1.2, linestyle=(0, (4, 3)), zorder=5)
        left = steps.place(broken) > 0.6
        axes.annotate(
            curve.verdict,
            (broken, 0.86),
            xycoords=("data", "axes fraction"),
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            color=_BAD,
            fontweight="bold",
        )
    for number, (step, what) in enumerate(curve.marks, 1):
        at = min(max(step, steps.low), steps.high)
        axes.axvline(at, color=_MARK, linewidth=1.0, linestyle=(0, (1, 2)), zorder=2)
        axes.annotate(
            str(number),
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            ha="center",
            textcoords="offset points",
            color="white",
            fontsize=7.5,
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "color": _MARK, "linewidth": 0},
        )
        axes.annotate(
            f"{number}   step {step}   {what}",
            (0.0, 0.0),
            xycoords="axes fraction",
            xytext=(0, -38 - 15.8 * (number - 1)),
            textcoords="offset points",
            fontsize=8.5,
            va="top",
        )


def _points(curve: LossCurve, losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return coordinates in which a line has a hole where a loss is not finite."""
    steps = list(range(curve.first_step, curve.last_step + 1))
    return steps, [loss if math.isfinite(loss) else math.nan for loss in losses]


def _smooth(losses: Sequence[float], reach: int = 5) -> list[float]:
    """Average every finite loss with its finite neighbours; the others stay as they are.

    At the start, where the loss falls fast, the average reaches no further forward than back.
    """
    smooth = []
    for step, loss in enumerate(losses):
        span = min(reach, step)
        near = [other for other in losses[step - span : step + span + 1] if math.isfinite(other)]
        smooth.append(sum(near) / len(near) if math.isfinite(loss) else loss)
    return smooth
