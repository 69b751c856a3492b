"""What makes the series of the loss different from that of the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradsentinel.measures.bands import History, Robust, Rule, Sigma
from gradsentinel.measures.baseline import Baseline

_FLOORS = {"loss": 1.2, "grad_norm": 3.0}
"""Less than so many times the usual value is no spike, however steady a series is."""
_YOUTH = 2.5
"""Of a young run's gradient norm so many times as much."""
_NEGLIGIBLE = 0.05
"""A loss below this share of what the run began with harms nothing: a model that has learnt its data by heart
meets a hard sample now and then."""
_CEILING = 30.0
"""A loss so many times what the run began with has diverged, however gently."""

RULES = ("robust", "sigma", "history")


def series_of(
    signal: str,
    *,
    rule: str,
    limit: float,
    sigmas: float,
    times: float,
    window: int,
    warmup: int,
    patience: int,
    explosion: float | None,
) -> Baseline:
    """Return what learns where a signal, loss or grad_norm, is expected, by one of the `RULES`."""
    is_loss = signal == "loss"
    floor, youth = math.log(_FLOORS[signal]), 0.0 if is_loss else math.log(_YOUTH)
    rules: dict[str, Callable[[], Rule]] = {
        "robust": lambda: Robust(limit=limit, floor=floor, youth=youth),
        "sigma": lambda: Sigma(sigmas=sigmas),
        "history": lambda: History(times=times),
    }
    return Baseline(
        rules[rule](),
        window=window,
        warmup=warmup,
        patience=patience,
        explosion=explosion,
        positive=not is_loss,
        negligible=_NEGLIGIBLE if is_loss else 0.0,
        ceiling=_CEILING if is_loss else math.inf,
    )
