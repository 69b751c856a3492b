"""What the charts draw: the losses of a run, and the scales that several runs share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradsentinel.demo.canvas import Scale


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The losses of one run and what happened to it."""

    name: str
    """Title of the run."""

    losses: list[float]
    """The loss of every step; NaN and infinities are welcome."""

    marks: list[tuple[int, str]] = field(default_factory=list)
    """Steps at which something happened, and what."""

    first_step: int = 0
    """Number of the step that the first loss belongs to."""

    @property
    def finite(self) -> list[float]:
        """The losses that are finite."""
        return [loss for loss in self.losses if math.isfinite(loss)]

    @property
    def last_step(self) -> int:
        """Number of the last step; one less than that of the first if there is none."""
        return self.first_step + len(self.losses) - 1

    @property
    def broken_from(self) -> int | None:
        """The step from which on no loss is finite; None if the last one is, or there is none."""
        broken = len(self.losses)
        while broken and not math.isfinite(self.losses[broken - 1]):
            broken -= 1
        return self.first_step + broken if broken < len(self.losses) else None

    @property
    def crosses(self) -> list[tuple[int, float]]:
        """Where to put crosses: at each lost loss, and at the first if the curve breaks off there.

        A cross stands at the mean of the five finite losses before it; without one there is no cross.
        """
        places: list[tuple[int, float]] = []
        before: list[float] = []
        broken = self.broken_from
        for step, loss in enumerate(self.losses, self.first_step):
            if math.isfinite(loss):
                before = [*before[-4:], loss]
            elif before and (broken is None or step <= broken):
                places.append((step, sum(before) / len(before)))
        return places

    @property
    def verdict(self) -> str:
        """How the run ended, in a few words."""
        if not self.losses:
            return "no steps"
        if self.broken_from is not None:
            return f"{'NaN' if math.isnan(self.losses[-1]) else 'Inf'} from step {self.broken_from} on"
        tail = self.finite[-20:]  # of one batch alone, the loss is a matter of luck
        return f"final loss {sum(tail) / len(tail):.2f}"


def common_scales(curves: Sequence[LossCurve]) -> tuple[Scale, Scale]:
    """Return the scale of the steps and the scale of the losses that fit all curves.

    A run that blows up leaves the picture at the top rather than flatten the others.
    """
    first = min(curve.first_step for curve in curves)
    steps = Scale(first, max(first + 1, *(curve.last_step for curve in curves)))
    losses = Scale.around([loss for curve in curves for loss in curve.finite])
    start = max((curve.finite[0] for curve in curves if curve.finite), default=losses.high)
    if start > losses.low:
        losses = Scale(losses.low, min(losses.high, losses.low + 1.5 * (start - losses.low)))
    return steps, losses
