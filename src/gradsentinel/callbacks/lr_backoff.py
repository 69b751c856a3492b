"""A lower learning rate after a rollback, back to the schedule step by step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Outcome
from gradsentinel.measures.inspection import local
from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

MOMENTUM = ("momentum_buffer", "exp_avg", "exp_avg_diff", "momentum", "mu")
"""Entries of an optimizer's state that average gradients: what carries a bad direction on."""


@dataclass(kw_only=True)
class LearningRateBackoff(Callback):
    """Lowers the learning rate after a rollback, and lets it climb back to the schedule.

    The factor is applied around each `optimizer.step()` and taken away after it, exactly: a scheduler,
    a snapshot and a checkpoint see the learning rate of the schedule, and so does the run once it is
    back there. A further rollback on the way lowers it again. Called on: every rank.
    """

    factor: float = 0.5
    """The learning rate is multiplied by this after a rollback."""
    recover_steps: int = 100
    """So many applied steps later it is on its schedule again; it climbs in a straight line."""
    lowest: float = 0.01
    """It is never multiplied by less than this, however many rollbacks follow each other."""
    reset_momentum: bool = False
    """Also set the momentum of every optimizer to zero (first moments only), so that the direction that
    led to the trouble is forgotten."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _low: float = field(default=1.0, init=False, repr=False)
    """What it was multiplied by right after the last rollback; 1 when it is on its schedule."""
    _since: int = field(default=0, init=False, repr=False)
    """Applied steps since then."""
    _hooked: dict[int, _Lowered] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ConfigurationError(f"factor={self.factor} must be between 0 and 1, such as 0.5")
        if self.recover_steps < 1:
            raise ConfigurationError("recover_steps must be at least 1 step")
        if not 0 < self.lowest <= self.factor:
            raise ConfigurationError("lowest must be above 0 and at most factor")

    @property
    def multiplier(self) -> float:
        """What the learning rate is multiplied by in the next step; 1 on the schedule."""
        return self._low + (1.0 - self._low) * self._since / self.recover_steps

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run; go on climbing if an earlier process was."""
        self._run = event.run
        self._hook()

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Lower the learning rate if the run went back."""
        run = self._run
        if run is None or event.recovery.outcome is not Outcome.ROLLED_BACK:
            return
        self._low, self._since = max(self.lowest, self.multiplier * self.factor), 0
        self._hook()
        if self.reset_momentum:
            for optimizer in run.host.optimizers:
                _forget_direction(optimizer)
        if not run.consensus.rank:
            logger.warning(
                "step %d: the learning rate is multiplied by %.3g and climbs back in %d steps",
                run.step,
                self._low,
                self.recover_steps,
            )

    def on_after_step(self, event: events.AfterStep) -> None:
        """Climb one step."""
        if self._low == 1.0 or not event.applied:
            return
        self._since += 1
        if self._run is not None:
            self._run.metrics["learning_rate_factor"] = (event.iteration, self.multiplier)
        if self._since >= self.recover_steps:
            self._low, self._since = 1.0, 0
            self._unhook()

    def on_run_end(self, event: events.RunEnd) -> None:
        """Leave the optimizers as they were."""
        self._unhook()

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has climbed."""
        return {"low": self._low, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._low, self._since = float(state["low"]), int(state["since"])
        self._unhook()
        self._hook()

    def _hook(self) -> None:
        if self._run is None or self._low == 1.0:
            return
        for optimizer in self._run.host.optimizers:
            if id(optimizer) not in self._hooked:
                self._hooked[id(optimizer)] = _Lowered(optimizer, self)

    def _unhook(self) -> None:
        for lowered in self._hooked.values():
            lowered.remove()
        self._hooked.clear()


class _Lowered:
    """Hooks around one optimizer's step: multiply before it, put back after it."""

    def __init__(self, optimizer: Optimizer, backoff: LearningRateBackoff) -> None:
        self._optimizer = optimizer
        self._backoff = backoff
        self._kept: list[tuple[dict[str, Any], Any, Any]] = []
        """Each group, its learning rate, and, where that is a tensor, a copy of its value."""
        self._handles = [
            optimizer.register_step_pre_hook(self._lower),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _lower(self, *_: Any) -> None:
        self._put_back()  # a step that raised has left it as it was in the middle
        multiplier = self._backoff.multiplier
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):  # the very tensor: compiled and captured steps hold on to it
                self._kept.append((group, rate, rate.clone()))
                rate.mul_(multiplier)
            elif rate is not None:  # some optimizers find their own
                self._kept.append((group, rate, None))
                group["lr"] = rate * multiplier

    @torch.no_grad()
    def _put_back(self, *_: Any) -> None:
        for group, rate, value in self._kept:
            if value is not None:
                rate.copy_(value)
            group["lr"] = rate
        self._kept.clear()


@torch.no_grad()
def _forget_direction(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for name in MOMENTUM:
            value = state.get(name) if isinstance(state, dict) else None
            if isinstance(value, Tensor):
                local(value).zero_()
