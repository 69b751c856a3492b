"""Dropping a step, exactly and not for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from gradsentinel.callback import Responder
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.recovery import Budget
from gradsentinel.run import Run


@dataclass(kw_only=True)
class Skip(Responder):
    """Drops a bad step: weights, moments, step counters, buffers and the LR schedule stay as before it.

    The random state is not taken back: a random draw may have been the cause, and the next batch
    should not repeat it. Added with its defaults to every run that has none. Called on: every rank.
    """

    rung: ClassVar[Action] = Action.SKIP
    max_skips: int = 10
    """So many dropped steps within `window` are allowed; then the next rung takes over, or the run stops."""
    window: int = 200
    """Length of the window, in attempted steps."""
    _budget: Budget = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_skips < 0 or self.window < 1:
            raise ConfigurationError("max_skips must be 0 or more and window at least 1 step")
        self._budget = Budget(self.max_skips, self.window)

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Undo the step in flight, or hand over if the budget is used up."""
        if not self._budget.spend(run.iteration):
            incident.notes += (f"the budget of {self.max_skips} dropped steps in {self.window} is used up",)
            return None
        run.undo_step()
        left = self._budget.left(run.iteration)
        what = "only the loss scale changed" if "scaler" in run.host.stateful() else "nothing changed"
        return Recovery(
            outcome=Outcome.SKIPPED,
            apply=False,
            message=f"step dropped, {what} ({left} of {self.max_skips} drops left)",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the drops in the window."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state)
