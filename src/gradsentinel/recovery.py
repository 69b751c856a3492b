"""The recovery ladder: from the cheapest rung that may help up to a safe stop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Kind, Severity
from gradsentinel.errors import RecoveryFailed, TrainingAborted
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.measures.inspection import nonfinite_in
from gradsentinel.ranks.ballot import GuardedConsensus
from gradsentinel.run import Run
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_RESUME = "; Sentinel(resume='auto') goes on from it"

T = TypeVar("T")

_OF_THE_STATE = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE, Kind.RANK_DIVERGENCE}
"""Incidents in which the state itself is what is bad."""
_NOT_OF_THE_STEP = {
    Kind.LOSS_SCALE,
    Kind.STAGNATION,
    Kind.DEVICE_HEALTH,
    Kind.CALLBACK_ERROR,
    Kind.CUSTOM,
}
"""Incidents that are no sign of a bad update, also where they come after it."""


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

    def as_dict(self) -> dict[str, Any]:
        """JSON form: the limit, the window, and the attempted steps of the expenses."""
        return {"limit": self.limit, "window": self.window, "spent": list(self._spent)}

    def state_dict(self) -> dict[str, list[int]]:
        """Return the expenses in the window."""
        return {"spent": list(self._spent)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Take back what `state_dict` returned."""
        self._spent = deque(state["spent"])


class _Answer(IntEnum):
    """What a responder said on a rank, as far as the ranks have to say the same."""

    NO = 0
    YES = 1
    """Escalate; or: recovered, and the step is dropped."""
    APPLY = 2
    """Recovered, and the step is applied."""
    FAILED = 3


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
        if not incident.may_stand:
            return self._climb(incident, run, incident.action)
        # Without its gradients there is nothing left that could be made.
        return self._recheck(incident, run) or self._climb(incident, run, Action.SKIP)

    def _climb(self, incident: Incident, run: Run, start: Action) -> Recovery:
        """Ask the rungs from one upwards, or from a higher one that somebody takes the incident over to."""
        if run.late_step is not None:  # the weights have moved on: the step cannot be made any more
            start = max(start, Action.SKIP)
        for responder in self.responders:
            _, answers, rung = self._ask(responder, responder.escalates, incident, run)
            if _Answer.YES in answers:  # on one rank is enough: the most severe wins
                start = max(start, Action(rung))
        closed = self._closed(incident, run)
        for responder in self.responders:
            if responder.rung < start or responder.rung in closed:
                continue
            recovery, answers, _ = self._ask(responder, responder.respond, incident, run)
            if len(answers) > 1:
                self._fail(incident, run, f"{type(responder).__name__} did not do the same on every rank")
            if recovery is not None and not self._holds(recovery, run):
                incident.notes += (
                    f"the gradients that {type(responder).__name__} made are not finite either",
                )
                continue
            if recovery is not None:
                harmless = recovery.outcome is Outcome.REPORTED
                incident.action = Action.WARN if harmless else responder.rung
                return recovery
        return self._abort(incident, run, asked=incident.action is Action.ABORT)

    def _recheck(self, incident: Incident, run: Run) -> Recovery | None:
        """Have a step computed again that is made as it is unless that shows a fault; None if it is lost."""
        for responder in self.responders:
            if not responder.rechecks(run):
                continue
            recovery, answers, _ = self._ask(responder, responder.respond, incident, run)
            if len(answers) > 1:
                self._fail(incident, run, f"{type(responder).__name__} did not do the same on every rank")
            if recovery is None or not self._holds(recovery, run):
                return None
            incident.action = Action.WARN if recovery.outcome is Outcome.REPORTED else responder.rung
            return recovery
        incident.action = Action.WARN
        return Recovery(outcome=Outcome.REPORTED, apply=True, message="the step is made as it is")

    def _closed(self, incident: Incident, run: Run) -> set[Action]:
        """Return the rungs that some responder, on some rank, closes for this incident."""
        closing = [one for one in self.responders if type(one).closes is not Responder.closes]
        if not closing:
            return set()
        mine: set[Action] = set()
        failure: Exception | None = None
        try:
            for responder in closing:
                mine.update(responder.closes(incident, run))
        except Exception as error:  # noqa: BLE001 - told to every rank first, then raised with its cause
            failure = error
        own = [*(int(action in mine) for action in Action), int(failure is not None)]
        *votes, failed = run.consensus.agree(torch.tensor(own, dtype=torch.int32)).tolist()
        if failed:
            where = "on another rank" if failure is None else f"on this rank: {failure}"
            self._fail(incident, run, f"a budget could not be looked up {where}", failure)
        return {action for action, vote in zip(Action, votes, strict=True) if vote}

    @staticmethod
    def _holds(recovery: Recovery, run: Run) -> bool:
        """Look at new gradients before anybody steps with them; called on every rank."""
        if not recovery.apply or recovery.overflow:
            return True
        present: Iterable[tuple[str, Tensor]]
        if hasattr(run.host, "gradients"):
            view = run.host.gradients(run.optimizers)
            present = zip(view.names, view.gradients, strict=True)
        else:
            present = ((name, p.grad) for name, p in run.host.named_parameters() if p.grad is not None)
        return run.consensus.all_of(not nonfinite_in(present))

    def _ask(
        self, responder: Responder, question: Callable[[Incident, Run], T], incident: Incident, run: Run
    ) -> tuple[T | None, set[int], int]:
        """Return this rank's answer, the kinds of answers that any rank gave, and the farthest of them.

        How far an answer goes is the rung that it escalates to, or the step that it went back to.
        """
        answer: T | None = None
        failure: Exception | None = None
        guard, plain = GuardedConsensus(run.consensus, width=len(_Answer) + 2), run.consensus
        run.consensus = guard
        try:
            answer = question(incident, run)
            own = _sort(answer)
        except Exception as error:  # noqa: BLE001 - told to every rank first, then raised with its cause
            own, failure = _Answer.FAILED, None if guard.left else error
        finally:
            run.consensus = plain
        there = _reach(answer, responder)
        (*votes, farthest, nearest), busy = guard.close_with(
            [*(int(own is kind) for kind in _Answer), there, -there]
        )
        answers = {int(kind) for kind, vote in zip(_Answer, votes, strict=True) if vote > 0}
        name = type(responder).__name__
        if busy and _Answer.FAILED not in answers:
            self._fail(incident, run, f"{name} did not do the same on every rank")
        if failure is not None:
            self._fail(incident, run, f"{name} failed on this rank: {failure}", failure)
        if _Answer.FAILED in answers:
            self._fail(incident, run, f"{name} failed on another rank")
        if isinstance(answer, Recovery) and len(answers) == 1 and farthest != -nearest:
            self._fail(incident, run, f"{name} went to step {there} here and elsewhere on another rank")
        return answer, answers, farthest

    def _fail(self, incident: Incident, run: Run, reason: str, cause: Exception | None = None) -> NoReturn:
        kept = _leave_safely(incident, run)
        incident.recovery = reason
        failed = RecoveryFailed(f"step {incident.step}: {reason}. {kept}. {_evidence(incident, run)}")
        failed.incident, failed.snapshot = incident, run.saved_at
        raise failed from cause

    def _abort(self, incident: Incident, run: Run, *, asked: bool) -> NoReturn:
        kept = _leave_safely(incident, run)
        why = f"stopped: {_why(incident, asked=asked)}"
        incident.recovery = f"{why}. {kept}"
        aborted = TrainingAborted(  # the reason first, since the rest is long
            f"step {incident.step}: {why}. {kept}. What was found: {incident.message}. "
            f"{_evidence(incident, run)}"
        )
        aborted.incident, aborted.snapshot = incident, run.saved_at
        raise aborted


def _sort(answer: object) -> _Answer:
    if isinstance(answer, Recovery):
        return _Answer.APPLY if answer.apply else _Answer.YES
    if answer is None or isinstance(answer, (bool, Action)):
        return _Answer.YES if answer else _Answer.NO
    raise TypeError(f"it returned {type(answer).__name__}; respond returns a Recovery or None")


def _reach(answer: object, responder: Responder) -> int:
    if isinstance(answer, Recovery) and answer.step is not None:
        return answer.step
    if isinstance(answer, Action) or answer is True:
        return int(responder.rung if answer is True else answer)
    return -1


def _leave_safely(incident: Incident, run: Run) -> str:
    """Undo the step, save the last good state, and say so; the caller raises."""
    try:
        run.undo_step()
    except Exception as error:  # the run stops anyway, and on every rank for the same reason
        logger.exception("step %d: what it had done so far could not be undone", incident.step)
        record_swallowed(error)
    incident.action, incident.outcome, incident.severity = Action.ABORT, Outcome.ABORTED, Severity.CRITICAL
    if run.known_good is None and run.applied and _untouched(incident, run) and not run.health.scan():
        # Dropped steps change nothing, so this is the state from before the trouble.
        run.known_good = run.capture()
    saved = run.save_known_good()
    if run.lock is not None:
        run.lock.release()
    if saved is not None:
        return f"The last good state is in {saved}" + _RESUME * run.has_resume
    before = run.states.saved()
    if run.known_good is None and before:
        run.saved_at = str(before[max(before)])
        return f"The newest state is still {run.saved_at}" + _RESUME * run.has_resume
    if run.known_good is None:
        return "There is no good state to save; Rollback() keeps some"
    return "The last good state could not be saved, see the log"


def _untouched(incident: Incident, run: Run) -> bool:
    """Say whether the weights are those from before the trouble, and good as far as anybody knows."""
    if incident.kind in _NOT_OF_THE_STEP:
        return True
    in_flight = incident.step == run.step and run.late_step is None
    return in_flight and (incident.kind not in _OF_THE_STATE or incident.can_be_undone)


def _evidence(incident: Incident, run: Run) -> str:
    return f"The evidence is in {run.directory.incidents / incident.id}"


def _why(incident: Incident, *, asked: bool) -> str:
    if incident.notes:
        return "; ".join(incident.notes)
    return f"{incident.detector} asked for it" if asked else "no rung of the recovery ladder is left"
