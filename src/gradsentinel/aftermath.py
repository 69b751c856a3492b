"""Who listens hears how a step ended: at once, or some steps later where nobody minds."""

from __future__ import annotations

from collections import deque

from gradsentinel.bus import Bus
from gradsentinel.decision import Decision
from gradsentinel.events import AfterStep
from gradsentinel.judge import Filed
from gradsentinel.run import Run

_MOST_WAITING = 8
"""So many steps may be over before those who keep books hear of them."""


class Aftermath:
    """Emits the last event of each step.

    In a step each function costs some microseconds, as the training has pushed it out of the caches. So those
    who only keep books (`Callback.prompt_every`) hear of several steps in a row that needed no more than a
    glance. They hear of all of them, in order, and before a step that is looked at, an incident, a state that
    is kept, and the end.
    """

    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self._waiting: deque[tuple[Decision, int, tuple[float, ...], bool]] = deque()
        """What nobody has heard of yet: decision, number of the attempted step, learning rates, clipped."""
        self._telling = False

    def tell(
        self,
        decision: Decision,
        iteration: int,
        learning_rates: tuple[float, ...],
        *,
        clipped: bool,
        due: bool,
    ) -> list[Filed]:
        """Emit the event, or have it wait; `due` says that something is due after this step."""
        run, waiting, step = self._run, self._waiting, decision.step
        waiting.append((decision, iteration, learning_rates, clipped))
        if decision.glanced and not (due or run.prompt or run.journal) and len(waiting) < _MOST_WAITING:
            for period in self._bus.prompt_every:
                if not step % period:
                    break
            else:
                return []
        run.prompt = False
        return self.catch_up()

    def catch_up(self) -> list[Filed]:
        """Emit all events that wait, and return what was found; if one raises, the rest waits on."""
        found: list[Filed] = []
        if not self._waiting or self._telling:  # who listens no more from now on hears the others' first
            return found
        self._telling = True
        try:
            while self._waiting:
                decision, iteration, learning_rates, clipped = self._waiting.popleft()
                if not self._bus.heard[AfterStep]:
                    continue
                event = AfterStep(
                    step=decision.step,
                    applied=decision.apply and not decision.scaler_skips,
                    iteration=iteration,
                    action=decision.action,
                    grad_norm=decision.grad_norm if decision.safe_norm is None else decision.safe_norm,
                    loss=decision.loss,
                    learning_rates=learning_rates,
                    loss_scale=decision.loss_scale,
                    scaler_skipped=decision.scaler_skips,
                    clipped=clipped,
                )
                found += self._bus.emit(event)
        finally:
            self._telling = False
        return found
