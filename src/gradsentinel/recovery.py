"""The recovery ladder: from the cheapest rung that may help up to a safe stop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Severity
from gradsentinel.errors import RecoveryFailed, TrainingAborted
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

T = TypeVar("T")


class Budget:
    """At most `limit` expenses within any `window` attempted steps."""

    def __init__(self, limit: int, window: int) -> None:
        self.limit = limit
        self.window = window
        self._spent: deque[int] = deque()

    def left(self, iteration: int) -> int:
        """Return how many expenses are still allowed at this attempted step."""
        while self._spent and self._spent[0] <= iteration - self.window:
            self._spent.popleft()
        return max(0, self.limit - len(self._spent))

    def spend(self, iteration: int) -> bool:
        """Take one expense and return True, or return False if the budget is used up."""
        if not self.left(iteration):
            return False
        self._spent.append(iteration)
        return True

    def state_dict(self) -> dict[str, list[int]]:
        """Return the expenses in the window."""
        return {"spent": list(self._spent)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Take back what `state_dict` returned."""
        self._spent = deque(state["spent"])


class Ladder:
    """Asks the responders in turn, from the rung that was decided on upwards."""

    def __init__(self, responders: Sequence[Responder]) -> None:
        self.responders = responders

    def recover(self, incident: Incident, run: Run) -> Recovery:
        """Carry out the cheapest recovery that is left; called on every rank.

        Raises:
            RecoveryFailed: if a responder raised on some rank; the cause is chained.
            TrainingAborted: if no rung is left, or the incident asked for it.
        """
        start = incident.action
        for responder in self.responders:
            if self._try(responder, responder.escalates, incident, run):
                start = max(start, responder.rung)
        for responder in self.responders:
            if responder.rung < start:
                continue
            recovery = self._try(responder, responder.respond, incident, run)
            if recovery is not None:
                incident.action = responder.rung
                return recovery
        return self._abort(incident, run)

    def _try(
        self, responder: Responder, ask: Callable[[Incident, Run], T], incident: Incident, run: Run
    ) -> T | None:
        answer: T | None = None
        failure: Exception | None = None
        try:
            answer = ask(incident, run)
        except Exception as error:  # noqa: BLE001 - told to every rank first, then raised with its cause
            failure = error
        if run.consensus.all_of(failure is None):
            return answer
        name = type(responder).__name__
        kept = _leave_safely(incident, run)
        reason = f"{name} failed on this rank" if failure is not None else f"{name} failed on another rank"
        incident.recovery = f"{reason}: {failure}" if failure is not None else reason
        raise RecoveryFailed(
            f"step {incident.step}: {incident.recovery}. {kept}. {_evidence(incident, run)}"
        ) from failure

    def _abort(self, incident: Incident, run: Run) -> Recovery:
        kept = _leave_safely(incident, run)
        incident.recovery = f"stopped: {_why(incident)}. {kept}"
        raise TrainingAborted(
            f"step {incident.step}: {incident.message}. {incident.recovery}. {_evidence(incident, run)}"
        )


def _leave_safely(incident: Incident, run: Run) -> str:
    """Undo the step, save the last good state, and say so; the caller raises."""
    run.undo_step()
    incident.action, incident.outcome, incident.severity = Action.ABORT, Outcome.ABORTED, Severity.CRITICAL
    saved = run.save_known_good()
    if saved is not None:
        return f"The last good state is in {saved}"
    if run.known_good is None:
        return "There is no known-good state to save; Rollback() keeps some"
    return "The last good state could not be saved, see the log"


def _evidence(incident: Incident, run: Run) -> str:
    return f"The evidence is in {run.directory.incidents / incident.id}"


def _why(incident: Incident) -> str:
    return "; ".join(incident.notes) if incident.notes else "no rung of the recovery ladder is left"
