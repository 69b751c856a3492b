"""The short way through a healthy step: two numbers say that no detector has anything to say."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.bus import Bus
from gradsentinel.callback import Detector
from gradsentinel.decision import Action, Decision
from gradsentinel.devices import device_of
from gradsentinel.gradients import GradientView
from gradsentinel.run import Run


class Glance:
    """Reads global norm and losses, and asks the detectors whether these say all there is to say of a step.

    Only where this process is alone and waits for the device in each step anyway, and where every detector
    that would look at the gradients knows an answer (`Detector.calm`). As soon as one of them hesitates, all
    of them hear the step's events as ever: what they would have heard of the last backward pass was kept.
    """

    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self._kept: events.AfterBackward | None = None
        self._never: tuple[Detector, ...] | None = None
        """Detectors among whom is one that cannot tell by these numbers."""
        self._asked: tuple[Detector, ...] | None = None
        self._own: list[Detector] = []
        """Those of them that have numbers of their own."""

    def possible(self) -> bool:
        """Return True if a step may turn out to need no more than a glance."""
        run = self._run
        if run.consensus.world_size > 1 or run.decides_late:
            return False
        calm_ones = self._bus.calm_ones()
        return calm_ones is not None and calm_ones is not self._never

    def keep(self, event: events.AfterBackward) -> None:
        """Keep the event of the backward pass that is expected to be the step's last."""
        self._kept = event

    def take_kept(self) -> events.AfterBackward | None:
        """Return the event that nobody has heard yet, if there is one."""
        kept, self._kept = self._kept, None
        return kept

    def decide(self, gradients: GradientView, losses: list[Tensor]) -> Decision | None:
        """Return the decision to go on, or None if somebody has to look; waits for the device.

        Called on: the only rank.
        """
        run = self._run
        calm_ones = self._bus.calm_ones()
        if calm_ones is None or not gradients.norm_type > 0 or not self.possible():
            return None
        factor = None
        if gradients.clip_at is not None and len(gradients):
            factor = gradients.clip_factor(gradients.clip_at)
        own = self._glimpses(calm_ones)
        numbers = _read([gradients.total_norm, *losses, *own, *(() if factor is None else (factor,))])
        if numbers is None:
            return None
        if factor is not None:
            gradients.known_factor = numbers.pop()
        norm, seen = numbers[0], numbers[1 : 1 + len(losses)]
        if not all(map(math.isfinite, numbers)):
            return None
        for one in calm_ones:
            answer = self._bus.ask(one, partial(one.calm, run.step, norm, seen), run.step, "calm")
            if answer is None:
                self._never = calm_ones
            if not answer:
                return None
        run.norms.remember(run.step, run.iteration, gradients)
        self._kept = None
        run.last_grad_norm = norm
        run.last_loss = loss = sum(seen) / len(seen) if seen else None
        return Decision(
            apply=True, step=run.step, action=Action.CONTINUE, grad_norm=norm, loss=loss, glanced=True
        )

    def _glimpses(self, calm_ones: tuple[Detector, ...]) -> list[Tensor]:
        """Return the numbers that detectors want read along."""
        if self._asked is not calm_ones:
            self._asked = calm_ones
            self._own = [one for one in calm_ones if type(one).glimpse is not Detector.glimpse]
        step = self._run.step
        found = [self._bus.ask(one, partial(one.glimpse, step), step, "glimpse") for one in self._own]
        return [value for value in found if value is not None]


def _read(values: list[Tensor]) -> list[float] | None:
    """Return 0-dim numbers on the host, in one wait; None if they are not of a kind to be read so."""
    if any(type(value) is not Tensor or value.numel() != 1 for value in values):
        return None
    first = values[0]
    device, dtype = first.device, first.dtype
    if any(value.dtype is not dtype or value.device != device or value.dim() for value in values):
        wide = any(value.dtype is torch.float64 for value in values)
        dtype = device_of(device).wide if wide else torch.float32
        values = [value.reshape(()).to(device, dtype) for value in values]
    numbers: list[float] = torch.stack(values).tolist()
    return numbers
