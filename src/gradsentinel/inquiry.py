"""What happens when something is wrong: confirm, keep evidence, diagnose, recover, record."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from gradsentinel import events
from gradsentinel.bus import Bus
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import TrainingAborted
from gradsentinel.evidence import Diagnosis, Evidence
from gradsentinel.incident import Incident, Outcome, Recovery, now
from gradsentinel.judge import Filed, Ruling
from gradsentinel.ranks.testimony import Statement, bounded, open_incidents, severity_of
from gradsentinel.recovery import Ladder
from gradsentinel.repeats import Repeats
from gradsentinel.run import Run
from gradsentinel.testing import record_swallowed
from gradsentinel.wording import printable

logger = logging.getLogger("gradsentinel")

Examiner = Callable[[Evidence, Run], Evidence]
"""Looks closer at one rank's evidence, on the host: no collectives, nothing changed."""

Diagnoser = Callable[[Incident, Run], None]
"""Completes an incident with its diagnosis; called on every rank, may take seconds and run the step again."""

_MOST_ALIKE = 8
"""So many findings of one detector, kind and action are looked into in one step."""
_REPORTED = Recovery(outcome=Outcome.REPORTED, apply=True, message="")


class Inquiry:
    """The incident path of a run; every rank enters it as soon as one suspects something."""

    def __init__(
        self, run: Run, bus: Bus, *, examiners: Sequence[Examiner], diagnosers: Sequence[Diagnoser]
    ) -> None:
        self._run = run
        self._bus = bus
        self._examiners = list(examiners)
        self._diagnosers = list(diagnosers)
        self.repeats = Repeats()
        self._examined = 0.0
        """Seconds that examiners took in the confirmation going on: they may run a step again."""

    def confirm(self, ruling: Ruling, started: float, *, insist: bool = False) -> list[Incident]:
        """Look closer on the host; every rank does as soon as one suspects something.

        `insist` keeps a suspicion that turns out to be unfounded: the device has dropped the step for it.
        """
        if not ruling.suspicious:
            return []
        self._examined = 0.0
        confirmed: list[Statement] = []
        alike: Counter[tuple[str, Kind, Action]] = Counter()
        for entry in ruling.fired:
            key = (entry.detector, entry.finding.kind, entry.finding.action)
            alike[key] += 1
            if alike[key] > _MOST_ALIKE:
                continue
            evidence = self._look_closer(entry, insist=insist and entry.finding.action >= Action.RETRY)
            if evidence is not None and evidence.action > Action.CONTINUE:
                confirmed.append(Statement(entry.detector, entry.step, evidence))
        for (detector, kind, _), count in alike.items():
            if count > _MOST_ALIKE:
                logger.warning(
                    "%s: of %d findings (%s) %d were looked into", detector, count, kind, _MOST_ALIKE
                )
        incidents = open_incidents(self._run, confirmed)
        for incident in incidents:
            incident.seconds["detect"] = time.perf_counter() - started - self._examined
            incident.seconds["diagnose"] = self._examined
        return incidents

    def _look_closer(self, entry: Filed, *, insist: bool) -> Evidence | None:
        """Return what is left of a suspicion; one that cannot be examined stands."""
        finding = entry.finding
        try:
            evidence = finding.resolve()
            if evidence is None and insist:
                evidence = _unfounded(entry)
            if evidence is None:
                return None
            examining = time.perf_counter()
            try:
                for examine in self._examiners:
                    evidence = examine(evidence, self._run)
            finally:
                self._examined += time.perf_counter() - examining
            return bounded(evidence, travels=self._run.consensus.world_size > 1)
        except TrainingAborted:
            raise
        except Exception as error:
            logger.exception("step %d: evidence of %s failed", entry.step, entry.detector)
            record_swallowed(error)
            failed = Evidence(
                kind=finding.kind,
                action=finding.action,
                message=f"{finding.kind} suspected; looking closer failed: {error}",
                microbatch=finding.microbatch,
            )
            return bounded(failed, travels=True)

    def handle(self, incident: Incident) -> Recovery:
        """Evidence, diagnosis, recovery, record; called on every rank.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        if incident.action is Action.WARN and self._goes_on(incident):
            return _REPORTED
        return self._tell(incident)

    def tell_what_waits(self, *, all_of_them: bool = False) -> None:
        """Tell the warnings that were held back long enough; on every rank, with the same ones on each."""
        run = self._run
        for held in self.repeats.overdue(run.iteration, all_of_them=all_of_them):
            own_id = run.directory.new_incident_id(run.step, str(held.kind))
            held.id, held.time = run.consensus.gather((own_id, now()))[0]
            held.step, held.iteration = run.step, run.iteration
            self.repeats.tell(held)
            self._tell(held)

    def _tell(self, incident: Incident) -> Recovery:
        run, bus = self._run, self._bus
        run.incidents.append(incident)
        self._write(incident)
        self._write_norms(incident)
        bus.emit(events.IncidentEvent(step=incident.step, incident=incident, scene=run.scene.as_mapping()))
        self._diagnose(incident)
        if incident.diagnosis is not None:
            bus.emit(
                events.DiagnosisEvent(step=incident.step, incident=incident, diagnosis=incident.diagnosis)
            )
        incident.severity = severity_of(incident, run.incidents)
        if incident.action is Action.WARN:
            self._write(incident)
            self._announce(incident, incident.message)
            return _REPORTED
        recovery = self._recover(incident)
        if recovery.outcome is Outcome.REPORTED:  # a warning after all; what follows of it is the same one
            self.repeats.tell(incident)
        return recovery

    def _diagnose(self, incident: Incident) -> None:
        """Find out more, if somebody can; without a diagnosis there is still a recovery."""
        started = time.perf_counter()
        diagnosers = (*self._diagnosers, *self._run.diagnosers)
        for diagnose in diagnosers:
            try:
                diagnose(incident, self._run)
            except TrainingAborted:
                raise
            except Exception as error:
                logger.exception("step %d: the diagnosis failed", incident.step)
                record_swallowed(error)
                incident.notes += (f"the diagnosis failed: {type(error).__name__}: {error}",)
        if diagnosers:
            incident.seconds["diagnose"] = (
                incident.seconds.get("diagnose", 0.0) + time.perf_counter() - started
            )

    def _goes_on(self, incident: Incident) -> bool:
        """Count a warning that goes on step after step, instead of opening an incident for each step."""
        first = self.repeats.goes_on(incident)
        if first is None:
            return False
        count = first.details["repeated"] = first.details.get("repeated", 0) + 1
        first.details["last_step"] = incident.step
        if count & (count - 1) == 0:  # at 1, 2, 4, 8 ...: what goes on for ever must not flood log and disk
            self._announce(incident, f"{incident.message} ({count} more since step {first.step})")
            self._write(first)
        return True

    def _recover(self, incident: Incident) -> Recovery:
        started = time.perf_counter()
        try:
            recovery = Ladder(self._bus.responders()).recover(incident, self._run)
        except TrainingAborted:
            incident.seconds["recover"] = time.perf_counter() - started
            self._write(incident)
            # The reason stands in the exception, which is caught or printed: no need to say it here as well.
            logger.error("step %d: the run stops, by incident %s", incident.step, incident.id)  # noqa: TRY400
            failed = Recovery(outcome=Outcome.ABORTED, apply=False, message=incident.recovery)
            self._bus.emit(events.RecoveryEvent(step=incident.step, incident=incident, recovery=failed))
            raise
        incident.outcome = recovery.outcome
        incident.recovery = recovery.message
        incident.seconds["recover"] = time.perf_counter() - started
        self._write(incident)
        self._announce(incident, f"{incident.message}; {recovery.message}")
        self._bus.emit(events.RecoveryEvent(step=incident.step, incident=incident, recovery=recovery))
        return recovery

    def _announce(self, incident: Incident, text: str) -> None:
        """Log one line for the whole job, and say in it where the trouble was."""
        if self._run.consensus.rank or incident.details.get("said"):  # as `Disk` does for what it refuses
            return
        alone = self._run.consensus.world_size == 1
        where = "" if alone else f", {incident.who}"
        # Ids of records are in it, which may be anything; not every log takes that.
        logger.warning("step %d%s: %s", incident.step, where, printable(text))

    def _write(self, incident: Incident) -> None:
        """Rank 0 writes the merged incident; the ranks' own evidence is their callbacks' business."""
        if self._run.consensus.rank:
            return
        write = partial(self._run.directory.write_incident, incident)
        try:
            self._run.disk.attempt(f"incident {incident.id}", write)
        except (TypeError, ValueError) as error:
            logger.error("incident %s could not be written: %s", incident.id, error)  # noqa: TRY400

    def _write_norms(self, incident: Incident) -> None:
        """Write what led up to it; the first rank that it is about does, as each may have its own layers."""
        run = self._run
        if run.rank.rank != (incident.ranks[0].rank if incident.ranks else 0):
            return
        try:
            norms = run.norms.until(incident.iteration)
            if norms is not None:
                rank = run.rank.rank if run.consensus.world_size > 1 else None
                write = partial(run.directory.write_norms, incident, norms, rank=rank)
                run.disk.attempt(f"the norms before incident {incident.id}", write)
        except (RuntimeError, TypeError, ValueError) as error:
            logger.error("the norms before incident %s could not be written: %s", incident.id, error)  # noqa: TRY400


def _unfounded(entry: Filed) -> Evidence:
    """What is left of a suspicion that the device acted on and the host would not have."""
    finding = entry.finding
    return Evidence(
        kind=finding.kind,
        action=finding.action,
        message=f"{entry.detector} suspected {str(finding.kind).replace('_', ' ')} "
        f"({float(finding.value):g}) and the device dropped the step; a closer look finds nothing wrong, "
        "so it was an intermediate result that overflowed",
        microbatch=finding.microbatch,
        diagnosis=Diagnosis(
            cause="precision",
            confidence=0.5,
            phase="backward",
            evidence=("nothing that was measured is bad by itself",),
            remedy=("lower the loss scale; guard='host' looks closer before it drops a step",),
        ),
    )
