"""From the evidence of all ranks to one incident, and how serious it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any

from gradsentinel.decision import Action, Kind, Severity, merge
from gradsentinel.evidence import Diagnosis, Evidence, TensorEvidence
from gradsentinel.incident import MAY_STAND, Incident, Said, fold, jsonable, now
from gradsentinel.ranks.blame import claim_of
from gradsentinel.ranks.origin import Claim, Verdict, began
from gradsentinel.ranks.topology import Rank
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
_TRAVELS = {Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE}
"""What the ranks may have from each other: forward and backward pass exchange values."""
_MOST_TENSORS = 64
_MOST_TRAVELLING = 16
"""So many tensors of a finding are named, fewer where ranks exchange them: each gets those of all."""
_MOST_SAMPLES = 64
_MOST_NAMES = 256
"""So many names that a warning is about travel."""
_LONGEST_TEXT = 1000
"""Characters of a sentence that travels; of the further details, twice as many."""
_LONGEST_FACT = 300
_MOST_FACTS = 16
_MOST_SAID = 3
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
    claim: Claim | None
    """Where it began, as far as this rank knows; None if it has nothing to say."""
    loss: float | None
    """Of the step, on this rank."""


def bounded(evidence: Evidence, *, travels: bool) -> Evidence:
    """Return evidence of a size that neither the model nor the batch decides, plain data if it travels.

    Of more tensors than can be named the first few stay, and the worst: those with the most non-finite
    elements, then the largest norm. The number stays exact, in `details` under "tensor_count".
    """
    if not (isinstance(evidence, Evidence) and isinstance(evidence.action, Action)):
        raise TypeError(f"confirm returned {evidence!r:.100}; it returns an Evidence or None")
    most = _MOST_TRAVELLING if travels else _MOST_TENSORS
    kept = replace(evidence, kind=Kind(evidence.kind), samples=evidence.samples[:_MOST_SAMPLES])
    if travels:
        details = jsonable(evidence.details)
        if len(str(details)) > 2 * _LONGEST_TEXT:
            stands = {MAY_STAND: details[MAY_STAND]} if MAY_STAND in details else {}
            details = {"left_out": f"details of {len(str(details))} characters", **stands}
        kept = replace(
            kept,
            message=_short(evidence.message, _LONGEST_TEXT),
            samples=tuple(replace(s, id=jsonable(s.id)) for s in kept.samples[:_MOST_TRAVELLING]),
            details=details,
            about=tuple(_short(name, _LONGEST_FACT) for name in kept.about[:_MOST_NAMES]),
        )
        if kept.diagnosis is not None:
            facts, remedy = _few(kept.diagnosis.evidence), _few(kept.diagnosis.remedy)
            kept = replace(kept, diagnosis=replace(kept.diagnosis, evidence=facts, remedy=remedy))
    if len(evidence.tensors) <= most:
        return kept
    tensors = list(enumerate(evidence.tensors))
    first, rest = tensors[: most // 4], tensors[most // 4 :]
    worst = sorted(rest, key=lambda entry: _badness(entry[1]), reverse=True)[: most - len(first)]
    return replace(
        kept,
        tensors=tuple(tensor for _, tensor in (*first, *sorted(worst, key=itemgetter(0)))),
        details={**kept.details, "tensor_count": len(tensors)},
    )


def _badness(tensor: TensorEvidence) -> tuple[int, float]:
    return tensor.nonfinite, math.inf if math.isnan(tensor.norm) else tensor.norm


def _few(facts: Sequence[str]) -> tuple[str, ...]:
    """The first of many sentences, and how many more there are."""
    shown = tuple(_short(fact, _LONGEST_FACT) for fact in facts[:_MOST_FACTS])
    return shown if len(facts) <= _MOST_FACTS else (*shown, f"and {len(facts) - _MOST_FACTS} more")


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


def open_incidents(run: Run, confirmed: Sequence[Statement]) -> list[Incident]:
    """Merge what the ranks confirmed into incidents, the one to act on last; called on every rank.

    A callback's own failure is an incident of its own; everything else explains one and the same step.
    """
    claim = claim_of(run, speaks=bool(confirmed)) if run.consensus.world_size > 1 else None
    everyone = run.consensus.gather(_Testimony(run.rank, now(), tuple(confirmed), claim, run.last_loss))
    claims = {testimony.rank.rank: testimony.claim for testimony in everyone if testimony.claim is not None}
    said = [(testimony.rank, statement) for testimony in everyone for statement in testimony.statements]
    groups: dict[str, list[tuple[Rank, Statement]]] = {}
    for rank, statement in said:
        if statement.evidence.kind is Kind.CALLBACK_ERROR:
            groups.setdefault(statement.detector, []).append((rank, statement))
    rest = [(rank, s) for rank, s in said if s.evidence.kind is not Kind.CALLBACK_ERROR]
    places = {testimony.rank.rank: testimony.rank for testimony in everyone}
    losses = {testimony.rank.rank: testimony.loss for testimony in everyone}
    incidents = []
    for group in (*groups.values(), rest):
        if group:
            incident = _open(run, group, claims, places, everyone[0].time)
            # The loss that belongs to what is said: of the rank that is named, not of the one that writes.
            incident.loss = losses.get(min((r.rank for r in incident.ranks), default=0), incident.loss)
            incidents.append(incident)
    return incidents


def _open(
    run: Run,
    group: Sequence[tuple[Rank, Statement]],
    claims: Mapping[int, Claim],
    places: Mapping[int, Rank],
    time: str,
) -> Incident:
    """Make one incident of statements; the evidence that explains the rest leads."""
    first = min((statement for _, statement in group), key=lambda s: _lead(s.evidence))
    origin = _origin(group, first.evidence)
    told = began(claims, origin)
    travelled = first.evidence.kind in _TRAVELS and first.evidence.origin and bool(told.ranks)
    if travelled:
        origin = {rank: places[rank] for rank in sorted(told.ranks)}
        same = [(rank, s) for rank, s in group if _lead(s.evidence) == _lead(first.evidence)]
        first = next((s for rank, s in same if rank.rank in origin), first)
    lead = first.evidence
    others = dict.fromkeys(s.evidence.message for _, s in group if s.evidence.message != lead.message)
    own_id = run.directory.new_incident_id(first.step, str(lead.kind))
    incident = Incident(
        id=run.consensus.gather(own_id)[0],
        step=first.step,
        kind=lead.kind,
        action=merge(s.evidence.action for _, s in group),
        message=lead.message,
        time=time,
        iteration=run.iteration - max(0, run.step - first.step),  # of its own step, also if handled later
        detector=first.detector,
        tensors=lead.tensors,
        microbatch=None if lead.microbatch is None else int(lead.microbatch),
        samples=lead.samples,
        diagnosis=lead.diagnosis,
        loss=run.last_loss,
        grad_norm=run.last_grad_norm,
        notes=_few(tuple(others)),
        details=_details(lead, [s.evidence for _, s in group]),
        claims=_claims([statement for _, statement in group]),
    )
    incident.concern(origin.values())
    if told.places and told.places != incident.rank_count:
        incident.details["independent_ranks"] = told.places
    if travelled:
        _say_where_it_began(incident, told)
    if "tensor_count" in lead.details:
        incident.notes += (f"{lead.details['tensor_count']} tensors are affected; the worst are listed",)
    if lead.kind is Kind.NONFINITE_GRADIENT and not lead.origin:
        incident.message += "; every rank's own gradients are finite, their sum is not"
        incident.diagnosis = Diagnosis(
            cause="math",
            confidence=0.5,
            phase="reduce",
            evidence=("local gradients were finite on every rank before the reduction",),
            remedy=("lower the loss scale or clip local gradients: their sum overflows",),
        )
    if lead.kind is Kind.RANK_DIVERGENCE:
        _name_the_odd_ones(incident, group)
    pattern = _pattern(incident, run.incidents)
    if pattern:
        incident.notes += (pattern,)
    return incident


def severity_of(incident: Incident, history: Sequence[Incident]) -> Severity:
    """Return how serious an incident is: one transient fault, a persistent one, or the run at risk."""
    if incident.may_stand:  # a norm is the same on every rank, and nothing is wrong with the step so far
        return Severity.WARNING
    independent = incident.details.get("independent_ranks", incident.rank_count)
    if independent > 1 or incident.kind is Kind.RANK_DIVERGENCE:
        return Severity.CRITICAL
    persists = len(_streak(incident, [entry for entry in history if entry is not incident])) > 0
    bad_state = incident.kind in _STATE and not incident.can_be_undone
    if bad_state or persists or incident.kind is Kind.CALLBACK_ERROR:
        return Severity.ERROR
    return Severity.WARNING


def _claims(statements: Sequence[Statement]) -> tuple[Said, ...]:
    """Return what each detector says, by subject, with the names of all ranks."""
    names: dict[tuple[str, Kind, str, bool], dict[str, None]] = {}
    for statement in statements:
        evidence = statement.evidence
        subject = str(evidence.details.get("subject", ""))
        key = (statement.detector, evidence.kind, subject, evidence.once)
        names.setdefault(key, {}).update(dict.fromkeys(evidence.about))
    return tuple(
        Said(detector, kind, subject, tuple(about), once)
        for (detector, kind, subject, once), about in names.items()
    )


def _details(lead: Evidence, everything: Sequence[Evidence]) -> dict[str, Any]:
    """The details of what leads; the step may stand only if all say so that want anything done about it."""
    acting = [evidence for evidence in everything if evidence.action > Action.WARN]
    details = {name: value for name, value in lead.details.items() if name != MAY_STAND}
    if acting and all(evidence.details.get(MAY_STAND) for evidence in acting):
        details[MAY_STAND] = True
    return details


def _lead(evidence: Evidence) -> tuple[int, bool, bool]:
    place = _FIRST.index(evidence.kind) if evidence.kind in _FIRST else len(_FIRST)
    # A scaler tells all ranks of an overflow, also those whose gradients are fine.
    told_only = evidence.kind is Kind.LOSS_SCALE and not evidence.tensors
    return place, not evidence.origin, told_only


def _origin(group: Sequence[tuple[Rank, Statement]], lead: Evidence) -> dict[int, Rank]:
    """The ranks where it began, as far as they know: the others only received it."""
    same = [(rank, s.evidence) for rank, s in group if s.evidence.kind is lead.kind]
    began = {rank.rank: rank for rank, evidence in same if evidence.origin}
    shown = {rank.rank: rank for rank, evidence in same if evidence.tensors}
    return began or shown or {rank.rank: rank for rank, _ in same}


def _say_where_it_began(incident: Incident, told: Verdict) -> None:
    """Say how one of several ranks was singled out, or that it could not be; what is nearest to it first."""
    for sentence in told.says[:_MOST_SAID]:
        incident.message += f"; {sentence}"
    if len(told.says) > _MOST_SAID:
        incident.message += f"; and the like in {len(told.says) - _MOST_SAID} more groups of ranks"
    near = [tensor for tensor in incident.tensors if tensor.name in told.names]
    incident.tensors = (*near, *(tensor for tensor in incident.tensors if tensor.name not in told.names))


def _name_the_odd_ones(incident: Incident, group: Sequence[tuple[Rank, Statement]]) -> None:
    """Find, in each group that differs, the checksum most ranks have; the others are the odd ones."""
    parties: dict[tuple[str, int], dict[int, list[Rank]]] = {}
    alike_until: list[int] = []
    for rank, statement in group:
        details = statement.evidence.details
        if "checksum" in details:
            key = (str(details["group"]), int(details["group_size"]))
            alike_until.append(int(details.get("alike_until", -1)))
            parties.setdefault(key, {}).setdefault(int(details["checksum"]), []).append(rank)
    if not parties:
        return
    odd: dict[int, Rank] = {}
    majorities: dict[str, list[Rank]] = {}
    disputed: dict[str, list[list[Rank]]] = {}
    for (name, size), by_checksum in parties.items():
        largest = max(by_checksum.values(), key=len)
        if 2 * len(largest) <= size:
            disputed[name] = list(by_checksum.values())
            continue
        majorities[name] = largest
        odd.update({r.rank: r for ranks in by_checksum.values() if ranks is not largest for r in ranks})
    outvoted = set(odd)
    open_to_doubt = []
    for name, sides in disputed.items():
        if sum(any(rank.rank not in outvoted for rank in side) for side in sides) > 1:
            odd.update({rank.rank: rank for side in sides for rank in side})
            open_to_doubt.append(name)
            # Else one of its ranks is the odd one of another group, and that explains the difference here.
    incident.notes += _few([f"{name}: no majority, so nobody can say who is right" for name in open_to_doubt])
    incident.concern(odd.values())
    incident.sources = {
        name: next((rank.rank for rank in ranks if rank.rank not in outvoted), ranks[0].rank)
        for name, ranks in majorities.items()
    }
    counted = {key: value for key, value in incident.details.items() if key == "tensor_count"}
    incident.details = {
        "majority": dict(islice(incident.sources.items(), _MOST_FACTS)),
        "groups_that_differ": len(parties),
        "groups_without_majority": len(open_to_doubt),
        "alike_until": min(alike_until),
        **counted,
    }
    incident.message += f"; {incident.who} {'differs' if len(odd) == 1 else 'differ'}"


def _streak(incident: Incident, history: Sequence[Incident]) -> list[Incident]:
    """The unbroken run of incidents in the steps just before this one."""
    streak: list[Incident] = []
    step = incident.step
    for earlier in reversed(history):
        if earlier.action <= Action.WARN:
            continue
        if earlier.step != step - 1 or earlier.cured:
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
