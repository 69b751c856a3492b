"""The short way through a healthy step: two numbers say that no detector has anything to say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.bus import Bus
from gradsentinel.callback import Detector
from gradsentinel.decision import Decision
from gradsentinel.devices import device_of
from gradsentinel.gradients import GradientView
from gradsentinel.run import Run

_INF = float("inf")


class Glance:
    """Reads global norm and losses, and asks the detectors whether these say all there is to say of a step.

    Only where this process is alone and waits for the device in each step anyway, and where every detector
    that would look at the gradients knows an answer (`Detector.calm`). As soon as one of them hesitates, all
    of them hear the step's events as ever: what they would have heard of the last backward pass was kept.
    """

    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self.kept: Callable[[], events.AfterBackward] | None = None
        """What makes the event of the backward pass that is expected to be the step's last, while nobody has
        heard it."""
        self._never: tuple[Detector, ...] | None = None
        """Detectors among whom is one that cannot tell by these numbers."""
        self._asked: tuple[Detector, ...] | None = None
        self._own: list[Detector] = []
        """Those of them that have numbers of their own."""

    def able(self) -> tuple[Detector, ...] | None:
        """Return whom to ask where a glance may be all that a step needs; None where it may not."""
        run = self._run
        if run.consensus.world_size > 1 or run.decides_late:
            return None
        calm_ones = self._bus.calm_ones
        return None if calm_ones is self._never else calm_ones

    def decide(self, gradients: GradientView, losses: list[Tensor]) -> Decision | None:
        """Return the decision to go on, or None if somebody has to look; waits for the device.

        Called on: the only rank.
        """
        run, bus, step = self._run, self._bus, self._run.step
        calm_ones = self.able()
        if calm_ones is None or not gradients.norm_type > 0:
            return None
        numbers = self._numbers(gradients, losses, calm_ones)
        if numbers is None:
            return None
        for number in numbers:
            if not -_INF < number < _INF:
                return None
        norm, seen = numbers[0], numbers[1 : 1 + len(losses)]
        answer = bus.are_calm(calm_ones, step, norm, seen)
        if answer is None:
            self._never = calm_ones
        if not answer:
            return None
        run.norms.remember(step, run.iteration, gradients)
        self.kept = None
        run.last_grad_norm = norm
        run.last_loss = loss = sum(seen) / len(seen) if seen else None
        return Decision(apply=True, step=step, grad_norm=norm, loss=loss, glanced=True)

    def _numbers(
        self, gradients: GradientView, losses: list[Tensor], calm_ones: tuple[Detector, ...]
    ) -> list[float] | None:
        """Read the norm, the losses, and what detectors want read along, in this order; waits once.

        The factor of the clip travels along where the host is to know it.
        """
        if self._asked is not calm_ones:
            self._asked = calm_ones
            self._own = [one for one in calm_ones if type(one).glimpse is not Detector.glimpse]
        values = [gradients.total_norm, *losses]
        if self._own:
            values += self._bus.glimpses(self._own, self._run.step)
        clip_at = gradients.clip_at
        if clip_at is not None and len(gradients):
            values.append(gradients.clip_factor(clip_at))
        first = values[0]
        device, dtype, alike = first.device, first.dtype, True
        for value in values:
            if type(value) is not Tensor or (value.dim() and value.numel() != 1):  # nothing to be read so
                return None
            alike = alike and value.dtype is dtype and value.device == device and not value.dim()
        if not alike:
            wide = any(value.dtype is torch.float64 for value in values)
            dtype = device_of(device).wide if wide else torch.float32
            values = [value.reshape(()).to(device, dtype) for value in values]
        numbers: list[float] = torch.stack(values).tolist()
        if clip_at is not None and len(gradients):
            gradients.known_factor = numbers.pop()
        return numbers
