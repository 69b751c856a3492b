"""The numbers of the steps, gathered with one append a step and handed over in bunches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gradsentinel import events
from gradsentinel.decision import Action
from gradsentinel.measures.histogram import Histogram
from gradsentinel.run import Run

BUNCH = 32
"""So many steps are handed over at once."""
OLDEST = 10.0
"""Seconds after which they are handed over, however few they are."""
COUNTED = ("incidents", "skipped", "rolled_back", "scaler_skips")


class Row(NamedTuple):
    """What was measured of one attempted step; only numbers that are finite."""

    step: int
    time: float
    """Seconds since 1970."""
    numbers: Mapping[str, float]


class Picture(NamedTuple):
    """A histogram that a callback published."""

    step: int
    time: float
    name: str
    histogram: Histogram


class Gathered:
    """What waits to be handed over, and the counts that belong to it."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, events.AfterStep, tuple[int, ...]]] = []
        self._published: list[Row] = []
        self._pictures: list[Picture] = []
        self._counts: tuple[int, ...] = (0,) * len(COUNTED)
        self._known: dict[str, int] = {}
        """The attempted step of each number and histogram of other callbacks that was taken last."""

    def count(self, name: str) -> None:
        """Count one more incident or outcome; others than those of `COUNTED` are not counted."""
        if name in COUNTED:
            place = COUNTED.index(name)
            self._counts = (*self._counts[:place], self._counts[place] + 1, *self._counts[place + 1 :])

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(zip(COUNTED, self._counts, strict=True))

    def take(self, event: events.AfterStep) -> bool:
        """Take a step's numbers; returns True if it is time to hand over what was gathered."""
        now, steps = time.time(), self._steps
        steps.append((now, event, self._counts))
        return len(steps) >= BUNCH or now - steps[0][0] > OLDEST or event.action is not Action.CONTINUE

    def take_published(self, run: Run) -> None:
        """Take what other callbacks have published since the last time, on steps of their own choice."""
        now, known = time.time(), self._known
        for name, (step, value) in run.metrics.items():
            if step > known.get(name, -1):
                known[name] = step
                if math.isfinite(value):
                    self._published.append(Row(step, now, {name: value}))
        for name, (step, histogram) in run.histograms.items():
            if step > known.get(name, -1):
                known[name] = step
                self._pictures.append(Picture(step, now, name, histogram))

    def rows(self) -> list[Row]:
        """Return and forget the gathered numbers, by ascending steps."""
        steps, self._steps = self._steps, []
        published, self._published = self._published, []
        rows = [Row(event.iteration, at, dict(_numbers(event, counts))) for at, event, counts in steps]
        return sorted([*rows, *published], key=lambda row: row.step) if published else rows

    def pictures(self) -> list[Picture]:
        """Return and forget the gathered histograms."""
        pictures, self._pictures = self._pictures, []
        return pictures


def _numbers(event: events.AfterStep, counts: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """Yield a step's numbers; one that is not finite leaves a gap, the incident's text says why."""
    measured = (("loss", event.loss), ("grad_norm", event.grad_norm), ("loss_scale", event.loss_scale))
    for name, value in measured:
        if value is not None and math.isfinite(value):
            yield name, value
    if event.learning_rates and math.isfinite(event.learning_rates[0]):
        yield "learning_rate", event.learning_rates[0]
    for name, count in zip(COUNTED, counts, strict=True):
        yield name, float(count)
    yield "action", float(event.action)
