"""How far an optimizer can have moved one weight since the known-good state, by its own account."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.run import Run

_NORMALISED = 100.0
"""Learning rates per step that an optimizer moves a weight at most which divides by its own moments."""
_BY_MOMENTS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "SparseAdam")


@torch.no_grad()
def reach_of(run: Run, parameter: Tensor, place: Tensor) -> float | None:
    """Return the most that the optimizer can have moved one element of a parameter; waits for the device.

    An optimizer of torch that divides by moments moves it by a few learning rates per step, whatever the
    gradient was. Momentum remembers the gradients of that element, though they fade. One without a memory has
    only the gradient norm of its last step to tell.

    Args:
        run: with the known-good state.
        parameter: the parameter.
        place: flat position of the element, 0-dim.

    Returns:
        None where nothing is known: an optimizer of the user's own, or steps that nobody looked at.
    """
    good = run.known_good
    if good is None:
        return None
    steps = max(1, run.step - good.step)
    for number, optimizer in enumerate(run.host.optimizers):
        if not type(optimizer).__module__.startswith("torch.optim"):
            continue
        for order, group in enumerate(optimizer.param_groups):
            if not any(member is parameter for member in group["params"]):
                continue
            rate = max(float(group["lr"]), _rate_then(good.optimizers, number, order))
            state: Mapping[str, Any] = optimizer.state.get(parameter, {})
            return _reach(type(optimizer).__name__, group, state, place, rate=rate, steps=steps, run=run)
    return None


def _reach(
    kind: str,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    place: Tensor,
    *,
    rate: float,
    steps: int,
    run: Run,
) -> float | None:
    if kind in _BY_MOMENTS:
        return _NORMALISED * rate * steps
    if kind != "SGD":
        return None
    buffer, momentum = state.get("momentum_buffer"), float(group.get("momentum") or 0.0)
    norm: float | None
    if momentum and isinstance(buffer, Tensor):
        kept = momentum**steps
        norm = abs(float(buffer.flatten()[place])) / kept if kept > 0 else None
    else:
        norm = run.usual[1] if steps == 1 and run.usual is not None else None
    if norm is None or not math.isfinite(norm):
        return None
    return rate * norm * steps


def _rate_then(optimizers: Any, number: int, order: int) -> float:
    try:
        return float(optimizers[number]["groups"][order]["lr"])
    except (LookupError, TypeError, ValueError):
        return 0.0
