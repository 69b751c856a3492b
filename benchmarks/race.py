"""Variants of a step side by side in one process, in another order each round; medians of pairs."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from workload import CLOCK

Step = Callable[[Tensor, Tensor], None]


@dataclass
class Variant:
    """One way to do a step, with its own copy of everything."""

    name: str
    step: Step
    baseline: str = "plain"
    """What it is compared with."""
    in_place: bool = True
    """False if it works within forward and backward too, where the clock does not see it."""
    every: int = 1
    """It takes part in every so many rounds: a large effect is seen in few."""
    finish: Callable[[], int] = int
    """Called at the end; returns the number of incidents, which should be none."""
    whole: list[float] = field(default_factory=list)
    rounds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of each round: the whole step, and the part that is neither forward, backward nor optimizer."""


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds it with 95 % certainty, whatever the distribution."""

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Order statistics: how many of n values are below the median is binomial."""
        ordered = sorted(values)
        n, rank, tail = len(ordered), 0, 0.5 ** len(ordered)
        while tail <= 0.025 and rank < n // 2:
            rank += 1
            tail += math.comb(n, rank) * 0.5**n
        rank = max(0, rank - 1)
        return cls(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], n)

    def as_dict(self) -> dict[str, float]:
        """What goes into the file."""
        return {"median": self.median, "low": self.low, "high": self.high, "pairs": self.pairs}


def warm_up(variants: Sequence[Variant], batches: Sequence[Tensor], steps: int) -> None:
    """Make so many steps with each, on a few tokens: what is only done at the start of a run is done then."""
    small = [batch[:1, :8] for batch in batches]
    for variant in variants:
        for number in range(steps):
            variant.step(small[number % len(small)], small[number % len(small)])


def race(variants: Sequence[Variant], batches: Sequence[Tensor], *, seconds: float, least: int = 5) -> int:
    """Run rounds until the time is used up, and return their number."""
    order = random.Random(0)
    CLOCK.watches_backward()
    for variant in variants:
        variant.rounds.clear()
        variant.step(batches[0], batches[0])
    start, number = time.perf_counter(), 0
    while number < least or time.perf_counter() - start < seconds:
        batch = batches[number % len(batches)]
        running = [variant for variant in variants if number % variant.every == 0]
        for variant in order.sample(running, len(running)):
            CLOCK.inside = 0.0
            begin = CLOCK.now()
            variant.step(batch, batch)
            whole = CLOCK.now() - begin
            variant.rounds[number] = (whole, whole - CLOCK.inside)
        number += 1
    return number


def compare(variant: Variant, baseline: Variant) -> dict[str, Any]:
    """Return the ratio of whole steps, and what the rest of the step costs more as a share of a plain one."""
    shared = [number for number in variant.rounds if number in baseline.rounds]
    mine, theirs = variant.rounds, baseline.rounds
    usual = statistics.median(whole for whole, _ in theirs.values())
    ratio = Estimate.of([mine[number][0] / theirs[number][0] for number in shared])
    added = Estimate.of([(mine[number][1] - theirs[number][1]) / usual for number in shared])
    return {
        "baseline": baseline.name,
        "in_place": variant.in_place,
        "ratio": ratio.as_dict(),
        "added": added.as_dict(),
    }
