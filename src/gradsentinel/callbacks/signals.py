"""The numbers of a step that are compared with their past: on the device at once, on the host later."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.gradients import GradientView
from gradsentinel.measures.bands import Band

_TINY = 1e-30
"""No bound is smaller, so that its inverse is a number in float32 too."""


@dataclass(slots=True, kw_only=True)
class Sight:
    """What was seen of a step, and what was expected: a finding may be looked into steps later."""

    step: int
    player: str
    view: GradientView
    losses: tuple[Tensor, ...]
    overflow: Tensor | None
    bands: dict[str, Band] = field(default_factory=dict)
    true_norm: float | None = None
    """Where the usual formula overflowed on finite gradients."""

    def read(self) -> dict[str, float]:
        """Return the numbers themselves; waits for the device."""
        numbers = {}
        if "grad_norm" in self.bands:
            norm = float(self.view.total_norm)
            if not math.isfinite(norm) and not self.view.distributed:  # that would take the other ranks
                norm = self.true_norm = self.view.safe_norm()
            numbers["grad_norm"] = norm
        if "loss" in self.bands:
            numbers["loss"] = math.fsum(map(float, self.losses)) / len(self.losses)
        return numbers


def loss_of(event: events.BeforeClip) -> Tensor | None:
    """Return the mean loss of the step's micro-batches, 0-dim; None if it is not to be seen here.

    A distributed loss is not: the ranks would have to meet.
    """
    losses = [loss.reshape(()) for loss in event.losses]
    if not losses or any(hasattr(loss, "full_tensor") for loss in losses):
        return None
    return wide(losses[0]) if len(losses) == 1 else wide(torch.stack(losses)).mean()


def largest(scores: Iterable[Tensor]) -> list[Tensor]:
    """Return the largest score on each device."""
    found: dict[torch.device, Tensor] = {}
    for score in scores:
        known = found.get(score.device)
        found[score.device] = score if known is None else torch.maximum(known, score)
    return list(found.values())


def score_of(value: Tensor, band: Band) -> Tensor:
    """Return how far out a value is, 1 at the bound: one launch, of what no quotient tells three."""
    if band.relative:
        return share_of(value, band.high)
    distance = value - band.center
    if band.low == -math.inf:
        distance.clamp_(min=0)  # what is too small is no spike
    else:
        distance.abs_()
    return share_of(distance, band.high - band.center)


def share_of(value: Tensor, bound: float) -> Tensor:
    """Return the value over its bound; one launch, nothing is copied to the device."""
    return value * (1 / max(bound, _TINY))


def wide(value: Tensor) -> Tensor:
    """Return a number with enough digits to be compared."""
    return value.to(torch.float32) if value.element_size() < 4 else value
