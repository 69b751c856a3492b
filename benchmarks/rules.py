"""The rules that tell a spike: ours, and what others publish, each as a function of what it may look at."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradsentinel import SpikeCallback


class Detector(Protocol):
    """Says of each step whether it is a spike, and learns from it."""

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Return True for a spike."""


class Ours:
    """The statistics of a SpikeCallback, on the loss and on the global norm."""

    def __init__(self, **settings: Any) -> None:
        callback = SpikeCallback(**settings)
        self.loss, self.norm = callback._baseline("all", "loss"), callback._baseline("all", "grad_norm")

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Judge, then learn."""
        found = False
        for baseline, value in ((self.loss, loss), (self.norm, norm)):
            band = baseline.expect()
            if band is not None:
                found |= value > band.explosion or not (band.early or band.holds(value))
            baseline.learn(step, value)
        self.norm.ease = 1.4 if self.loss.negligible else 1.0
        return found


class SixSigma:
    """OLMo's skipped steps: 6 sigma over the last 128, both ways, on loss and norm; every value enters."""

    def __init__(self, sigmas: float = 6.0, window: int = 128) -> None:
        self.sigmas = sigmas
        self.kept: tuple[deque[float], deque[float]] = (deque(maxlen=window), deque(maxlen=window))
        self.least = max(20, window // 2)

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Judge, then learn."""
        found = False
        for kept, value in zip(self.kept, (loss, norm), strict=True):
            if len(kept) + 1 >= self.least:
                mean = sum(kept) / len(kept)
                deviation = math.sqrt(sum([(one - mean) ** 2 for one in kept]) / (len(kept) - 1))
                found |= abs(value - mean) > self.sigmas * deviation
            kept.append(value)
        return found


class EmaZScore:
    """ZClip: a z-score of 2.5 over averages (0.97) of the norm; a clipped value enters (arXiv 2504.02507)."""

    def __init__(self, alpha: float = 0.97, limit: float = 2.5, warmup: int = 25) -> None:
        self.alpha, self.limit, self.warmup = alpha, limit, warmup
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Judge, then learn."""
        if len(self.first) < self.warmup:
            self.first.append(norm)
            if len(self.first) == self.warmup:
                self.mean, self.variance = statistics.fmean(self.first), statistics.pvariance(self.first)
            return False
        deviation = math.sqrt(self.variance)
        z = (norm - self.mean) / (deviation + 1e-6)
        found = z > self.limit
        value = self.mean + self.limit**2 / z * deviation if found else norm
        self.mean = self.alpha * self.mean + (1 - self.alpha) * value
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (value - self.mean) ** 2
        return found


class FirstHundred:
    """Ten times the largest norm of the first hundred steps."""

    def __init__(self, times: float = 10.0, first: int = 100) -> None:
        self.times, self.left, self.largest = times, first, 0.0

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Learn from the first steps, then judge."""
        if self.left:
            self.left -= 1
            self.largest = max(self.largest, norm)
            return False
        return norm > self.times * self.largest


class TensorClip:
    """AdaGC: a tensor is clipped at 1.05 times the average (0.98) of its clipped norms (arXiv 2502.11034)."""

    def __init__(self, times: float = 1.05, beta: float = 0.98, warmup: int = 100) -> None:
        self.times, self.beta, self.warmup = times, beta, warmup
        self.averages: list[float] = []
        self.seen = 0

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Judge, then learn."""
        self.seen += 1
        if not self.averages:
            self.averages = list(norms)
        if self.seen <= self.warmup:  # the smallest so far, of globally clipped gradients
            self.averages = [min(a, n) if n else a for a, n in zip(self.averages, norms, strict=True)]
            return False
        found = any(n > self.times * a > 0 for a, n in zip(self.averages, norms, strict=True))
        self.averages = [
            self.beta * a + (1 - self.beta) * (min(n, 1.05 * a) if a else n)
            for a, n in zip(self.averages, norms, strict=True)
        ]
        return found


class ElementRatio:
    """SPAM: an element whose square is 5000 times its second moment (arXiv 2501.06842)."""

    def __init__(self, times: float = 5000.0) -> None:
        self.times = times

    def __call__(self, step: int, loss: float, norm: float, norms: Sequence[float], ratio: float) -> bool:
        """Judge by the largest ratio of any element."""
        return ratio > self.times


RULES: dict[str, Callable[[], Detector]] = {
    "SpikeCallback()": Ours,
    "SpikeCallback(limit=3)": lambda: Ours(limit=3.0),
    "SpikeCallback(rule='sigma')": lambda: Ours(rule="sigma"),
    "SpikeCallback(rule='history')": lambda: Ours(rule="history"),
    "6 sigma over 128 (OLMo)": SixSigma,
    "EMA z-score 2.5 (ZClip)": EmaZScore,
    "10 x max of first 100": FirstHundred,
    "tensor EMA x 1.05 (AdaGC)": TensorClip,
    "g^2/v > 5000 (SPAM)": ElementRatio,
}
"""As published."""
TUNABLE: dict[str, tuple[Callable[[float], Detector], Sequence[float]]] = {
    "SpikeCallback": (lambda limit: Ours(limit=limit), (2.0, 2.5, 3.0, 4.0)),
    "6 sigma over 128 (OLMo)": (SixSigma, (3.0, 4.0, 5.0, 6.0)),
    "EMA z-score 2.5 (ZClip)": (lambda limit: EmaZScore(limit=limit), (2.5, 6.0, 8.0, 12.0)),
    "10 x max of first 100": (FirstHundred, (1.0, 2.0, 3.0, 10.0)),
    "tensor EMA x 1.05 (AdaGC)": (TensorClip, (1.05, 8.0, 32.0, 64.0, 256.0, 1024.0)),
    "g^2/v > 5000 (SPAM)": (ElementRatio, (5e3, 5e5, 5e7, 5e9)),
}
"""The same with another threshold, the best of these on the tuning seeds over all regimes."""
