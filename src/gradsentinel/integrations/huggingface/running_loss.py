"""The sum of losses that a Trainer logs and averages, kept to what its steps came to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradsentinel.integrations.wraps import Wraps


class RunningLoss:
    """Has a step that was computed again counted with its new loss, and a dropped one with no loss at all.

    The Trainer adds each micro-batch's loss to its sum before the step can be judged, and divides by the
    number of steps when it logs. So in a dropped step's place comes the mean of the steps since the last
    line of its log; if there are none, the mean of that line.

    Args:
        trainer: that is training; one without such a sum (another release) is left alone.
        wraps: where a wrap around its `log` is put.
    """

    def __init__(self, trainer: Any, wraps: Wraps) -> None:
        self._trainer = trainer
        self._before: Tensor | None = None
        """The sum at the start of the step in flight."""
        self._again: dict[int, Tensor] = {}
        self._last = 0.0
        """What the last line of the log said."""
        self._shown: float | None = None
        """What its next line has to say, as the Trainer was told not to hide it."""
        wraps.wrap(trainer, "log", self._around_log)

    @property
    def _sum(self) -> Tensor | None:
        found = vars(self._trainer).get("_tr_loss")
        return found if isinstance(found, Tensor) else None

    def begin(self) -> None:
        """Remember the sum at the start of a step; waits for nothing."""
        running = self._sum
        self._before = None if running is None else running.clone()
        self._again.clear()

    def recompute(self, number: int, loss: Tensor) -> None:
        """Keep what `training_step` returned for a micro-batch that was computed again; the last counts."""
        self._again[number] = loss.detach()

    def healed(self, count: int) -> None:
        """Count the step with the losses of its micro-batches as they were computed again."""
        running = self._sum
        if running is None or self._before is None or len(self._again) != count:
            return
        with torch.no_grad():
            running.copy_(self._before)
            for number in sorted(self._again):
                running += self._again[number]

    def dropped(self, loss: float | None) -> None:
        """Count the step, whose loss was this one, like those around it."""
        running = self._sum
        if running is None or self._before is None:
            return
        steps = self._trainer.state.global_step - 1 - self._trainer._globalstep_last_logged
        with torch.no_grad():
            running.copy_(self._before)
            running += self._before / steps if steps > 0 else self._last
        if not self._trainer.args.logging_nan_inf_filter and loss is not None and not math.isfinite(loss):
            self._shown = loss

    def _around_log(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                if math.isfinite(logs["loss"]):
                    self._last = logs["loss"]
                if self._shown is not None:
                    logs["loss"], self._shown = self._shown, None
            plain(logs, *args, **kwargs)

        return log
