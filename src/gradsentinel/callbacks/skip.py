"""Dropping a step, exactly and not for ever, and remembering what it was computed from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gradsentinel import events
from gradsentinel.again.scene import MicroBatch
from gradsentinel.callback import Responder
from gradsentinel.data.records import fingerprint, sample_ids
from gradsentinel.data.skipped import Part, SkippedBatch
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.incident import Incident, Outcome, Recovery, jsonable
from gradsentinel.recovery import Budget
from gradsentinel.run import Run
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_LOST = {Outcome.SKIPPED, Outcome.ROLLED_BACK, Outcome.ABORTED}
"""Outcomes after which the step's data was of no use."""
_NOT_OF_DATA = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE, Kind.RANK_DIVERGENCE, Kind.CALLBACK_ERROR}
_NOT_THE_DATA = {"hardware", "desync", "setup", "optimizer"}
"""Causes of a diagnosis that acquit the batch."""
_CERTAIN = 0.5

_Drawn = tuple[tuple[int, int] | None, Part]
"""A micro-batch's position in the data, and what the list keeps of it."""


@dataclass(kw_only=True)
class Skip(Responder):
    """Drops a bad step: weights, moments, step counters, buffers and the LR schedule stay as before it.

    The random state is not taken back: a random draw may have been the cause, and the next batch
    should not repeat it. The batch is remembered, so that `Sentinel.steps` leaves it out when it comes
    again: for good if the data is to blame, else where the same epoch is drawn again, as after a restart.
    Added with its defaults to every run that has none. Called on: every rank.
    """

    needs_random_states = False
    rung: ClassVar[Action] = Action.SKIP
    max_skips: int = 10
    """So many dropped steps within `window` are allowed; then the next rung takes over, or the run stops."""
    window: int = 200
    """Length of the window, in attempted steps."""
    remember: bool = True
    """Write the batches of steps that were dropped, rolled back or aborted to `skipped-batches.json`, and
    leave them out when they come again. False only drops steps."""
    give_up_after: int = 3
    """A batch that fails in so many epochs is left out for good, whatever the reason."""
    _budget: Budget = field(init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _scene: tuple[MicroBatch, ...] = field(default=(), init=False, repr=False)
    """The micro-batches of the step whose incident is being handled."""

    def __post_init__(self) -> None:
        if self.max_skips < 0 or self.window < 1:
            raise ConfigurationError("max_skips must be 0 or more and window at least 1 step")
        if self.give_up_after < 1:
            raise ConfigurationError("give_up_after must be at least 1 epoch")
        self._budget = Budget(self.max_skips, self.window)

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run
        event.run.budgets[type(self).__name__] = self._budget.as_dict

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Hold on to the step's batches until it is clear what becomes of it."""
        self._scene = tuple(event.scene["microbatches"])

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Put the batches on the list if they were of no use."""
        scene, self._scene = self._scene, ()
        run, incident = self._run, event.incident
        if run is None or not self.remember or event.recovery.outcome not in _LOST:
            return
        if not _may_be_data(incident, event.recovery.outcome):
            return
        parts: list[_Drawn] = []
        failure: Exception | None = None
        try:
            parts = [_drawn(one, incident, run) for one in _chosen(scene, incident)]
        except Exception as error:  # noqa: BLE001 - the ranks meet below, and it is reported then
            failure = error
        try:
            everyone = run.consensus.gather(parts)
        except TrainingAborted:  # the run is being aborted because some rank is gone
            return
        cause, for_good = _cause(incident)
        for entry in _entries(everyone, incident, cause, for_good=for_good):
            run.skipped.add(entry, give_up_after=self.give_up_after)
        run.skipped.save()
        if failure is not None:
            logger.error("step %d: the batch could not be remembered", incident.step, exc_info=failure)
            record_swallowed(failure)

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


def _may_be_data(incident: Incident, outcome: Outcome) -> bool:
    """Say whether the batch may have had to do with it."""
    not_of_data = incident.kind in _NOT_OF_DATA and not incident.can_be_undone
    if not_of_data or (incident.kind is Kind.CUSTOM and outcome is Outcome.ABORTED):
        return False
    found = incident.diagnosis
    return found is None or found.confidence < _CERTAIN or found.cause not in _NOT_THE_DATA


def _cause(incident: Incident) -> tuple[str, bool]:
    """Return what is to blame, in one word, and whether that is the batch as it was loaded."""
    found = incident.diagnosis
    known = found is not None and found.confidence >= _CERTAIN
    cause = found.cause if found is not None and known else "unknown"
    is_data = incident.kind is Kind.NONFINITE_INPUT or cause == "data"
    return ("data" if is_data else cause), is_data and not incident.details.get("made_by_the_loop")


def _chosen(scene: Sequence[MicroBatch], incident: Incident) -> Sequence[MicroBatch]:
    """The micro-batches that are to blame, or all of the step if that is not known."""
    bad = incident.details.get("bad_microbatches") or [incident.microbatch]
    return [one for one in scene if one.index in bad] or scene


def _drawn(microbatch: MicroBatch, incident: Incident, run: Run) -> _Drawn:
    guilty = any(place.rank == run.rank.rank for place in incident.ranks)
    first = bool(incident.ranks) and incident.ranks[0].rank == run.rank.rank
    samples = [{"position": s.position, "id": jsonable(s.id)} for s in incident.samples] if first else []
    part = Part(
        rank=run.rank.rank,
        guilty=guilty,
        fingerprint=fingerprint(microbatch.batch),
        ids=tuple(map(jsonable, sample_ids(microbatch.batch).values())),
        samples=tuple({one["position"]: one for one in samples}.values()),
        indices=microbatch.places,
    )
    return microbatch.position, part


def _entries(
    everyone: Sequence[Sequence[_Drawn]], incident: Incident, cause: str, *, for_good: bool
) -> list[SkippedBatch]:
    """One entry for each micro-batch; the same on every rank."""
    entries = []
    for number in range(max(map(len, everyone), default=0)):
        drawn = [mine[number] for mine in everyone if number < len(mine)]
        positions = {position for position, _ in drawn}
        in_step = len(positions) == 1 and len(drawn) == len(everyone)
        epoch, batch = next(iter(positions)) or (0, -1)
        entries.append(
            SkippedBatch(
                epoch=epoch,
                batch=batch if in_step else -1,
                step=incident.step,
                incident=incident.id,
                cause=cause,
                for_good=for_good,
                parts=tuple(part for _, part in drawn),
            )
        )
    return entries
