"""How a step of a plain loop is made: checked before it on the host, or dropped by the device itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel.decision import Action, Decision
from gradsentinel.devices import device_of
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.host import TorchHost
from gradsentinel.measures.bounds import MOST_LAG
from gradsentinel.measures.mailbox import Letter, Mailbox
from gradsentinel.ranks.agreement import Submitted
from gradsentinel.schedules import Pace, advance
from gradsentinel.watch import Watch

logger = logging.getLogger("gradsentinel")

LAG = 2
"""A step is settled so many steps later, if nothing else is said: its numbers have long arrived, and the host
has not waited. What is kept of a step until then (numbers, names, references to its batches) is kept of so
many steps and one."""


_NO_BOUND = "max_norm is NaN: give the largest global gradient norm, or None to leave it as it is"


class HostGuard:
    """Reads the ranks' decision before the step is made: exact for every optimizer, one wait a step."""

    knows = True
    """True if it is known after a step whether that was made."""

    def __init__(self, host: TorchHost, watch: Watch, update_average: Callable[[], None] | None) -> None:
        self.host = host
        self.watch = watch
        self._update_average = update_average
        self._device = device_of(host.device)

    def step(
        self, optimizers: Sequence[Optimizer], *, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Decision | None]:
        """Check, agree, clip, step, and clear the gradients; called on every rank.

        Returns the norm before clipping, 0-dim, and what was decided, None if that is not known yet.
        """
        if max_norm is not None and max_norm != max_norm:  # noqa: PLR0124 - it would make all gradients NaN
            raise ConfigurationError(_NO_BOUND)
        host, watch = self.host, self.watch
        scale, overflow = (None, None) if host.scaler is None else host.unscale(optimizers)
        view = host.gradients(optimizers, norm_type=norm_type)
        if max_norm is None:
            view.final = True
        elif self._device.takes_host_factors:
            view.clip_at = max_norm
        try:
            decision = watch.before_clip(view, optimizers=optimizers, loss_scale=scale, overflow=overflow)
        except TrainingAborted:
            watch.forget_step()
            raise
        watch.run.scene.decided()
        norm = view.total_norm
        if decision.apply:
            if decision.recomputed:
                view = host.gradients(optimizers, norm_type=norm_type)
                decision, norm = watch.look_again(decision, view), view.total_norm
            if max_norm is not None:
                view.clip_(max_norm, total_norm=decision.safe_norm, known_norm=decision.grad_norm)
            # So that the gradients are gone when they are cleared, not when this returns.
            (view.let_go if decision.glanced else view.retire)()
            host.apply(optimizers, overflow=decision.scaler_skips)
        host.finish(optimizers, advance=decision.apply)
        if self._update_average is not None and decision.apply and not decision.scaler_skips:
            self._update_average()
        late = watch.after_step(decision, learning_rates=host.learning_rates(), clipped=max_norm is not None)
        if late and late > Action.WARN:  # the step was made, found bad, and undone
            decision = replace(decision, apply=False, action=late)
        return norm, decision

    def drain(self) -> Decision | None:
        """Settle what is still under way; called on every rank."""
        return None

    def give_up(self) -> None:
        """Hear that the run ends by an error: nobody may be waited for."""


@dataclass(slots=True)
class _Flight:
    """A step that was made on the device and of which the host does not know yet how it went."""

    submitted: Submitted
    letter: Letter
    learning_rates: tuple[float, ...]
    pace: Pace
    optimizers: Sequence[Optimizer]
    clipped: bool


class DeviceGuard(HostGuard):
    """Lets the device drop a bad step by itself; the host hears of it two steps later and never waits.

    A fused optimizer leaves weights, moments and step counters alone when its `found_inf` is set, buffers
    are put back by a select on the device, and the LR schedulers are set right when the host hears of it
    (until then they are one step ahead). The host's own guard makes the steps on which a snapshot or a
    comparison of the ranks is due, and the first ones of an optimizer that has yet to make its state.
    `lag` says how many steps later, and bounds what is kept of steps until then.

    Raises:
        ConfigurationError: if the optimizers or what belongs to them cannot be dropped on the device.
    """

    knows = False

    def __init__(self, host: TorchHost, watch: Watch, lag: int = LAG) -> None:
        super().__init__(host, watch, None)
        if not 1 <= lag <= MOST_LAG:
            raise ConfigurationError(f"lag={lag}: a step can be settled 1 to {MOST_LAG} steps later")
        self._lag = lag
        self._flights: deque[_Flight] = deque()
        self._mailbox = Mailbox(host.device)
        self._checked = -1
        self._warm: set[int] = set()
        watch.run.scene.buffers.may_wait = False
        watch.run.decides_late, watch.run.lag = True, lag
        self._check()

    def step(
        self, optimizers: Sequence[Optimizer], *, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Decision | None]:
        """Make the step without waiting for anything, and settle the one before the last."""
        if max_norm is not None and max_norm != max_norm:  # noqa: PLR0124 - likewise
            raise ConfigurationError(_NO_BOUND)
        host, watch = self.host, self.watch
        self._check()
        if watch.must_wait() or not all(map(self._is_warm, optimizers)):
            settled = self.drain()
            if settled is not None and settled.went_back:  # these gradients are of weights that are gone
                watch.forget_step()
                return torch.zeros((), device=host.device), settled
            return super().step(optimizers, max_norm=max_norm, norm_type=norm_type)
        scale, overflow = host.unscale(optimizers)
        view = host.gradients(optimizers, norm_type=norm_type)
        submitted = watch.submit(view, optimizers=optimizers, loss_scale=scale, overflow=overflow)
        norm = view.total_norm
        condemned = submitted.submission.condemned()
        if max_norm is not None:
            view.clip_(max_norm)
        view.retire()  # while the gradients are still at hand
        found = condemned
        if overflow is not None:
            found = found.logical_or(submitted.submission.broken(0))  # of any rank: all do alike
        with _told(optimizers, found.to(torch.float32)):
            for optimizer in optimizers:
                optimizer.step()
        watch.run.scene.buffers.restore_where(condemned, watch.run.stepping())
        pace = Pace.of(host.schedulers, host.optimizers)
        host.finish(optimizers, advance=True)
        rates = host.learning_rates()
        letter = self._mailbox.post(submitted.submission.sheet())
        self._flights.append(
            _Flight(submitted, letter, rates, pace, optimizers, clipped=max_norm is not None)
        )
        self._settle(keep=self._lag)
        return norm, None

    def drain(self) -> Decision | None:
        """Settle every step that is still under way, the oldest first; called on every rank, waits.

        Returns what was decided about the last of them.
        """
        return self._settle(keep=0)

    def give_up(self) -> None:
        """Say which steps the device dropped and nobody was told of."""
        while self._flights:
            flight = self._flights.popleft()
            ruling = flight.submitted.submission.ruling(flight.letter.read())
            if any(level >= Action.RETRY for level in ruling.levels):
                logger.error(
                    "step %d was dropped on the device; the run ended before it was looked into",
                    flight.submitted.step,
                )

    def _settle(self, *, keep: int) -> Decision | None:
        """Settle flights until so many are left; on every rank as many, since an incident takes them all."""
        decision = None
        for flight in self._flights:
            flight.letter.arrived()  # asking is what gets some drivers to look
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            ruling = flight.submitted.submission.ruling(flight.letter.read())
            self._mailbox.take_back(flight.letter)
            if any(level >= Action.RETRY for level in ruling.levels):
                self._take_back_pace(flight)
            decision = self.watch.settle_late(
                flight.submitted, ruling, learning_rates=flight.learning_rates, clipped=flight.clipped
            )
            if decision.went_back:  # the steps after it are gone with the state that they made
                self._flights.clear()
        return decision

    def _take_back_pace(self, dropped: _Flight) -> None:
        """Set the schedulers to where they would be if they had not moved on after the dropped step."""
        host = self.host
        dropped.pace.restore(host.schedulers, host.optimizers)
        for flight in self._flights:
            flight.pace = Pace.of(host.schedulers, host.optimizers)
            advance(host.schedulers, flight.optimizers)

    def _is_warm(self, optimizer: Optimizer) -> bool:
        """True once dropping a step leaves nothing behind: fused SGD makes its momentum in the first one."""
        if id(optimizer) not in self._warm:
            cold = any(
                group.get("momentum", 0) and "momentum_buffer" not in optimizer.state.get(p, {})
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            )
            if cold:
                return False
            self._warm.add(id(optimizer))
        return True

    def _check(self) -> None:
        if self._checked == self.host.generation:
            return
        for optimizer in self.host.optimizers:
            fused = all(group.get("fused", True) for group in optimizer.param_groups)
            if not (getattr(optimizer, "_step_supports_amp_scaling", False) and fused):
                raise ConfigurationError(
                    f"guard='device' needs optimizers that can drop a step on the device; "
                    f"{type(optimizer).__name__} cannot as it is: make it with fused=True "
                    "(Adam, AdamW, SGD), or use guard='host'"
                )
        for scheduler in self.host.schedulers:
            if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
                raise ConfigurationError(
                    f"guard='device' sets the {type(scheduler).__name__} back after a dropped step: it needs "
                    "state_dict and load_state_dict; use guard='host'"
                )
        self._checked = self.host.generation
        self._warm.clear()


@contextmanager
def _told(optimizers: Sequence[Optimizer], found: Tensor) -> Iterator[None]:
    """Let fused optimizers know by a number on the device whether to leave everything as it is."""
    told: list[Any] = list(optimizers)
    for optimizer in told:
        optimizer.found_inf, optimizer.grad_scale = found, None
    try:
        yield
    finally:
        for optimizer in told:
            del optimizer.found_inf, optimizer.grad_scale


def chosen(
    optimizer: Optimizer | Sequence[Optimizer] | None, known: tuple[Optimizer, ...]
) -> tuple[Optimizer, ...]:
    """Return the optimizers that are to step, None means all; raises ConfigurationError if unknown."""
    if optimizer is None:
        return known
    mine = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    if any(all(one is not other for other in known) for one in mine):
        raise ConfigurationError("step(optimizer=...) takes optimizers that were given at construction")
    if len(set(map(id, mine))) < len(mine):
        raise ConfigurationError("step(optimizer=[...]) has the same optimizer twice: it would step twice")
    return mine
