"""What happens in one run, step by step, as far as anybody needs it to judge the policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.incident import Incident, Outcome


@dataclass
class Journal:
    """The notes of one run. Batches go by their numbers, from 0; `made` holds what is in the weights now."""

    number: int = -1
    """The batch in flight."""
    attempts: int = 0
    """How many steps were computed, those that were undone or made again included."""
    applied: int = 0
    """How many updates were made, those that were undone included."""
    made: list[tuple[int, int]] = field(default_factory=list)
    """Step and batch of each update that is in the weights, oldest first."""
    bad: set[int] = field(default_factory=set)
    """Batches whose update was made from a non-finite loss or gradient."""
    interruptions: list[dict[str, Any]] = field(default_factory=list)
    """Each time the job died: at which batch, and why."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    """The incidents, each with the batch that was in flight."""
    seconds: list[tuple[int, float]] = field(default_factory=list)
    """Batch and wall clock of each step."""
    _since: float | None = None

    def draw(self, number: int) -> None:
        """Note that a batch was drawn."""
        now = time.perf_counter()
        if self._since is not None:
            self.seconds.append((self.number, now - self._since))
        self.number = number
        self._since = time.perf_counter()

    def rest(self) -> None:
        """Stop the clock: what comes now is the campaign's own work."""
        if self._since is not None:
            self.seconds.append((self.number, time.perf_counter() - self._since))
        self._since = None

    def step(self, step: int, *, applied: bool, finite: bool) -> None:
        """Note that a step was computed, and whether it was applied."""
        self.attempts += 1
        if applied:
            self.applied += 1
            self.made.append((step, self.number))
            if not finite:
                self.bad.add(self.number)

    def back_to(self, step: int) -> None:
        """Note that the run went back to the state before this step."""
        self.made = [entry for entry in self.made if entry[0] < step]

    def start_again(self, number: int) -> None:
        """Note that the job was started again from the state before this batch."""
        self.made = [entry for entry in self.made if entry[1] < number]

    def died(self, why: str) -> None:
        """Note that the job ended, and would have had to be started again."""
        self.interruptions.append({"number": self.number, "why": why})

    def as_dict(self) -> dict[str, Any]:
        """JSON form; what depends on the clock lies under `seconds`."""
        return {
            "attempts": self.attempts,
            "applied": self.applied,
            "kept": sorted({number for _, number in self.made}),
            "bad": sorted(self.bad),
            "interruptions": self.interruptions,
            "incidents": self.incidents,
        }


@dataclass(kw_only=True)
class Notes(Callback):
    """Writes a sentinel's decisions into a journal; never looks at a gradient."""

    judges_steps = False
    journal: Journal
    """Where it writes."""
    offset: int = 0
    """What is added to a sentinel's steps, after the job was started again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Notes:
        """Frameworks copy callbacks for each run; the journal is one."""
        return Notes(journal=self.journal, offset=self.offset)

    def on_after_step(self, event: events.AfterStep) -> None:
        """Note the step."""
        loss, norm = event.loss, event.grad_norm
        finite = (loss is None or abs(loss) < float("inf")) and abs(norm) < float("inf")
        # A step that was computed again is made with other numbers than the event shows.
        healed = event.action is event.action.RETRY
        self.journal.step(event.step + self.offset, applied=event.applied, finite=finite or healed)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Note an incident that is over, and where the run goes on."""
        if event.recovery.outcome is Outcome.ROLLED_BACK and event.recovery.step is not None:
            self.journal.back_to(event.recovery.step + self.offset)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Keep the incident: it is completed while it is handled."""
        self.journal.incidents.append({"number": self.journal.number, "incident": event.incident})


def plain(incident: Incident) -> dict[str, Any]:
    """Return what the scores need of an incident."""
    found = incident.diagnosis
    return {
        "kind": str(incident.kind),
        "action": incident.action.label,
        "outcome": str(incident.outcome),
        "message": incident.message,
        "cause": None if found is None else found.cause,
        "module": None if found is None else found.module,
        "op": None if found is None else found.op,
        "parameters": [tensor.name for tensor in incident.tensors][:5],
        "samples": [sample.position for sample in incident.samples],
        "fields": [sample.field for sample in incident.samples],
        "ranks": [rank.rank for rank in incident.ranks],
        "seconds": dict(incident.seconds),
    }
