"""How large the numbers of a tensor are: counted by powers of two, exactly, and without a wait."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsentinel.devices import device_of

BINS = 256
"""One for each exponent that a float32 can have."""
_ZERO, _NOT_FINITE = 0, BINS - 1
_BIAS = 127


def count_exponents(values: Tensor) -> Tensor:
    """Return how many of the numbers have each exponent as float32: 1-dim int32, `BINS` elements; no wait.

    The number at place `n` counts the magnitudes from 2**(n - 127) to twice that; the first one those that
    are 0 or, below 2**-126, next to it; the last one NaN and Inf. Takes real numbers of any type, 1-dim, at
    most 2**31; what float32 cannot hold counts as its largest number.
    """
    wide = values.to(torch.float32)
    if values.dtype is torch.float64:
        largest = torch.finfo(torch.float32).max
        wide = torch.where(torch.isfinite(values), values.clamp(-largest, largest), values).to(torch.float32)
    plain = device_of(wide.device).in_plain_format(wide)
    exponents = (plain.contiguous().view(torch.int32) >> 23) & 0xFF
    one = torch.ones(1, dtype=torch.int32, device=values.device).expand(exponents.numel())
    counts = torch.zeros(BINS, dtype=torch.int32, device=values.device)
    return counts.index_add_(0, exponents, one)


@dataclass(slots=True)
class Histogram:
    """Counts of numbers by the power of two of their magnitude, on the host."""

    counts: list[int]
    """As `count_exponents` gives them."""

    @property
    def total(self) -> int:
        """How many numbers there were."""
        return sum(self.counts)

    @property
    def zeros(self) -> float:
        """The share of zeros; NaN if there were no numbers."""
        return self.counts[_ZERO] / self.total if self.total else math.nan

    @property
    def nonfinite(self) -> int:
        """How many were NaN or Inf."""
        return self.counts[_NOT_FINITE]

    def below(self, exponent: int) -> float:
        """Return the share of numbers that are not 0 and smaller than 2**exponent in magnitude."""
        last = min(max(exponent + _BIAS, 1), _NOT_FINITE)
        return sum(self.counts[1:last]) / self.total if self.total else math.nan

    def log2(self) -> tuple[list[float], list[int]]:
        """Return the upper limits of the exponents that occur, and the counts; empty if none does."""
        found = [place for place in range(1, _NOT_FINITE) if self.counts[place]]
        if not found:
            return [], []
        places = range(found[0], found[-1] + 1)
        return [float(place - _BIAS + 1) for place in places], [self.counts[place] for place in places]
