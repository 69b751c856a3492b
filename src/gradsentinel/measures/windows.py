"""Where each of many series is expected, from its newest values: all at once, on the device, no wait."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ABSENT = 1e4
"""In place of a logarithm that is not there: finite, so that no device changes it, and sorted behind all."""
RECENT = 32
"""So many of the newest values say where a series is now."""
_TREND_FROM = 24
"""With fewer values no trend is looked for."""
_MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations."""
_TAIL, _TAIL_DEVIATIONS = 0.975, 1.96
"""A quantile, and how many standard deviations above the median it is in a normal distribution. Farther out
than for a single series: of many, some have a heavy tail."""
_LEAST_SPREAD = 1e-6
"""Of the logarithm; less is rounding."""


class Place(NamedTuple):
    """Where the next value of each series is expected."""

    center: Tensor
    spread: Tensor
    """One standard deviation upwards."""


class Look:
    """What is the same at every look at windows of one size: asking for it each time would be launches."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.ages = torch.arange(window - 1, -1, -1, device=device)
        """How many values came after each of a window."""
        self.rank = torch.arange(max(1, window // 3), device=device)
        """How many came before each of a third of a window."""
        self.absent = torch.full((), ABSENT, device=device)
        self.middle = torch.full((1,), 0.5, device=device)
        self.spots = torch.stack([torch.full((), spot, device=device) for spot in (0.5, 0.75, _TAIL)])


def newest(ring: Tensor, number: Tensor, ages: Tensor) -> Tensor:
    """Return the newest values of rings of shape (series, slots), the newest last.

    `number` has how many values each series had in all, `ages` how many came after each that is wanted.
    """
    slots = (number.unsqueeze(1) - 1 - ages).remainder(ring.shape[1])
    return ring.gather(1, slots)


def locate(values: Tensor, count: Tensor, look: Look) -> Place:
    """Return where the next values are expected: by the rule of `bands.Robust`.

    Only the quantile of the tail is another. `values` has a row for each series, the newest last, of which
    the last `count` are there. Of a series without values what is returned means nothing.
    """
    ages, recent = look.ages, min(RECENT, values.shape[1])
    near, there, third = count.clamp(max=recent), count.unsqueeze(1), count.div(3, rounding_mode="floor")
    ordered = _ordered(values[:, -recent:], ages[-recent:] < near.unsqueeze(1), look)
    (now,) = _quantiles(ordered, near, look.middle)
    present, rank = ages < there, look.rank
    oldest = values.gather(1, (values.shape[1] - there + rank).clamp(max=values.shape[1] - 1))
    thirds = torch.cat((values[:, -len(rank) :], oldest))  # each has its third at its own end
    chosen = torch.cat((ages[-len(rank) :] < third.unsqueeze(1), rank < third.unsqueeze(1)))
    ordered = _ordered(thirds, chosen, look)
    (ends,) = _quantiles(ordered, torch.cat((third, third)), look.middle)
    after, before = ends.chunk(2)
    slope = (after - before) / (count - third).clamp(min=1) * (count >= _TREND_FROM)
    level = _ordered(values + slope.unsqueeze(1) * ages, present, look)
    middle, half, tail = _quantiles(level, count, look.spots)
    upper, beyond = (half - middle) * _MAD_TO_DEVIATION, (tail - middle) / _TAIL_DEVIATIONS
    spread = torch.maximum(upper, beyond).clamp(min=_LEAST_SPREAD)
    # A falling trend is not extrapolated: it ends, and what follows would look like a spike.
    return Place(center=now + slope.clamp(min=0) * near / 2, spread=spread)


def _ordered(values: Tensor, present: Tensor, look: Look) -> Tensor:
    return torch.where(present, values, look.absent).sort(dim=1).values


def _quantiles(ordered: Tensor, count: Tensor, spots: Tensor) -> tuple[Tensor, ...]:
    """Quantiles of the first `count` of sorted values, interpolated; one tensor for each spot."""
    last = (count - 1).clamp(min=0).unsqueeze(1)
    places = last * spots
    first = places.to(torch.int64)
    below = ordered.gather(1, first)
    above = ordered.gather(1, torch.minimum(first + 1, last))
    return torch.lerp(below, above, places - first).unbind(1)
