"""From the evidence of all ranks to one incident, and how serious it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsentinel.decision import Action, Kind, Severity, merge
from gradsentinel.evidence import Evidence
from gradsentinel.incident import Incident, Rank, fold, now
from gradsentinel.run import Run

_STATE = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE}
_FIRST = (
    Kind.NONFINITE_PARAMETER,
    Kind.NONFINITE_STATE,
    Kind.NONFINITE_INPUT,
    Kind.NONFINITE_LOSS,
    Kind.NONFINITE_GRADIENT,
)
"""What explains the rest comes first: a bad state makes a bad loss, a bad loss makes bad gradients."""
_PERSISTS_AFTER = 3
"""So many incidents at the same place in a row are no accident."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One detector's confirmed evidence."""

    detector: str
    step: int
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class _Testimony:
    """What one rank has to say."""

    rank: Rank
    time: str
    statements: tuple[Statement, ...]


def open_incidents(run: Run, confirmed: Sequence[Statement]) -> list[Incident]:
    """Merge what the ranks confirmed into incidents, the one to act on last; called on every rank.

    A callback's own failure is an incident of its own; everything else explains one and the same step.
    """
    everyone = run.consensus.gather(_Testimony(run.rank, now(), tuple(confirmed)))
    said = [(testimony.rank, statement) for testimony in everyone for statement in testimony.statements]
    groups: dict[str, list[tuple[Rank, Statement]]] = {}
    for rank, statement in said:
        if statement.evidence.kind is Kind.CALLBACK_ERROR:
            groups.setdefault(statement.detector, []).append((rank, statement))
    rest = [(rank, s) for rank, s in said if s.evidence.kind is not Kind.CALLBACK_ERROR]
    return [_open(run, group, everyone[0].time) for group in (*groups.values(), rest) if group]


def _open(run: Run, group: Sequence[tuple[Rank, Statement]], time: str) -> Incident:
    """Make one incident of statements; the evidence that explains the rest leads."""
    first = min((statement for _, statement in group), key=lambda s: _lead(s.evidence))
    lead = first.evidence
    others = dict.fromkeys(s.evidence.message for _, s in group if s.evidence.message != lead.message)
    origin = {rank.rank: rank for rank, s in group if s.evidence.kind is lead.kind}
    own_id = run.directory.new_incident_id(first.step, str(lead.kind))
    incident = Incident(
        id=run.consensus.gather(own_id)[0],
        step=first.step,
        kind=lead.kind,
        action=merge(s.evidence.action for _, s in group),
        message=lead.message,
        time=time,
        detector=first.detector,
        tensors=lead.tensors,
        ranks=tuple(origin.values()),
        microbatch=lead.microbatch,
        samples=lead.samples,
        diagnosis=lead.diagnosis,
        loss=run.last_loss,
        grad_norm=run.last_grad_norm,
        notes=tuple(others),
        details=dict(lead.details),
    )
    pattern = _pattern(incident, run.incidents)
    if pattern:
        incident.notes += (pattern,)
    return incident


def severity_of(incident: Incident, history: Sequence[Incident]) -> Severity:
    """Return how serious an incident is: one transient fault, a persistent one, or the run at risk."""
    if len(incident.ranks) > 1 or incident.kind is Kind.RANK_DIVERGENCE:
        return Severity.CRITICAL
    persists = len(_streak(incident, [entry for entry in history if entry is not incident])) > 0
    if incident.kind in _STATE or persists or incident.kind is Kind.CALLBACK_ERROR:
        return Severity.ERROR
    return Severity.WARNING


def _lead(evidence: Evidence) -> tuple[int, int]:
    place = _FIRST.index(evidence.kind) if evidence.kind in _FIRST else len(_FIRST)
    return place, -int(evidence.action)


def _streak(incident: Incident, history: Sequence[Incident]) -> list[Incident]:
    """The unbroken run of incidents in the steps just before this one."""
    streak: list[Incident] = []
    step = incident.step
    for earlier in reversed(history):
        if earlier.action <= Action.WARN:
            continue
        if earlier.step != step - 1:
            break
        streak.append(earlier)
        step = earlier.step
    return streak


def _pattern(incident: Incident, history: Sequence[Incident]) -> str:
    """Say so when the same thing happens step after step: dropping steps does not help then."""
    streak = _streak(incident, history)
    if len(streak) + 1 < _PERSISTS_AFTER:
        return ""
    if all(entry.kind is Kind.NONFINITE_INPUT for entry in (incident, *streak)):
        return f"{len(streak) + 1} batches in a row hold bad data: look at what reads them"
    text = f"{len(streak) + 1} steps in a row failed"
    if len(streak) == incident.step:
        text += ", every one since the start"
    names = {tuple(tensor.name for tensor in entry.tensors) for entry in (incident, *streak)}
    if len(names) == 1 and incident.tensors:
        text += f", always {fold([tensor.name for tensor in incident.tensors])}"
    return f"{text}: this is not transient, and dropping steps does not cure it"
