"""What a bad step comes to when all ranks run it again: transient, or where it begins, and how."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from gradsentinel.again.recompute import recompute
from gradsentinel.again.widening import as_written
from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.diagnose import keep_findings
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.integrations.megatron.operators import Traced, Tracer
from gradsentinel.integrations.megatron.places import Place, Watcher
from gradsentinel.ranks.topology import fold_ranks
from gradsentinel.run import Run

_LOOKED_INTO = frozenset({Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE})
_BEGAN = "; it began on "
_UNDECIDED = "one of "
"""So goes on what is said where nobody could tell."""
_SLOWER = 4.0
"""So many times longer than watching modules it may take to watch the operators of one micro-batch."""


def search(incident: Incident, run: Run) -> None:
    """Complete the incident with what a second computation of the step shows. Called on: every rank.

    If the step is finite then, the fault was transient. If not: which rank, micro-batch and module were the
    first, and, from a third computation in which that rank watches its operators, which operator. What this
    leaves behind is for the recovery, which computes the step again or drops it.
    """
    host = run.host
    known = incident.diagnosis is not None and incident.diagnosis.confidence >= 0.5
    if known or incident.kind not in _LOOKED_INTO or incident.action < Action.RETRY:
        return
    if not isinstance(host, MegatronHost) or incident.step != run.step:
        return
    if not run.consensus.all_of(host.why_no_recompute(run) is None):
        return
    watcher, started = Watcher(host, run.rank), time.monotonic()
    with watcher.watching():
        outcome = recompute(run, tentative=True)
    seconds = time.monotonic() - started
    watcher.complain(run.step)
    places = [place for place in run.consensus.gather(watcher.first) if place is not None]
    if outcome.failure:
        incident.notes += (outcome.failure,)
        return
    before = incident.diagnosis or Diagnosis(cause="unknown", confidence=0.0, phase="backward")
    if outcome.finite:
        incident.diagnosis = replace(
            before,
            cause="hardware",
            confidence=0.6,
            evidence=("computed again by all ranks, from the same batches and random states, it is finite",),
            remedy=(f"if it comes back on {incident.who}, run the self-test of its device",),
        )
    elif places:
        first = _first(places, _told(incident))
        if not first:
            incident.diagnosis = replace(before, evidence=(_again(places), *before.evidence))
            return
        in_time = run.consensus.all_of(seconds * _SLOWER <= run.diagnosis_budget)
        _tell(incident, before, first, _trace(incident, run, host, first) if in_time else {})


def _told(incident: Incident) -> frozenset[int] | None:
    """Return the ranks of which the step itself has shown that it began there, None if it has not.

    They were told by what they were about to hand to others, or by gradients that are finite elsewhere. The
    second computation looks at modules and parameters only: with a fault between these it shows whom it
    reached.
    """
    _, began, where = incident.message.partition(_BEGAN)
    known = bool(began) and not where.startswith(_UNDECIDED)
    return frozenset(rank.rank for rank in incident.ranks) if known else None


def _first(places: Sequence[Place], known: frozenset[int] | None) -> list[Place]:
    """Return the first places, of the ranks that are known to be the ones; none if it was not seen there."""
    there = [place for place in places if known is None or place.rank.rank in known]
    earliest = min((place.order for place in there), default=None)
    return [place for place in there if place.order == earliest]


def _again(places: Sequence[Place]) -> str:
    """Say what the second computation has shown, of ranks that are not the ones where it began."""
    first = _first(places, None)
    who = fold_ranks(place.rank.rank for place in first)
    return f"computed again by all ranks it is not finite either: on {who}, {first[0]}"


def _trace(incident: Incident, run: Run, host: MegatronHost, first: Sequence[Place]) -> dict[int, Traced]:
    """Have the ranks that were the first watch their operators; return what came of it, by rank."""
    mine = next((place for place in first if place.rank.rank == run.rank.rank), None)
    tracer = None if mine is None else Tracer(host, mine, run.scene.microbatches)
    with ExitStack() as stack:
        if tracer is not None:
            stack.enter_context(as_written())
            stack.enter_context(tracer.watching())
        outcome = recompute(run, tentative=True)
    traced, findings = (Traced(), None) if tracer is None else tracer.tell(run)
    if findings is not None:
        keep_findings(incident, findings)
    told = run.consensus.gather(traced)
    return {} if outcome.failure else {place.rank.rank: told[place.rank.rank] for place in first}


def _tell(incident: Incident, before: Diagnosis, places: Sequence[Place], traced: dict[int, Traced]) -> None:
    """Name the ranks, of several that exchange values those that were the first, and what they computed."""
    guilty = [place for place in places if _of(place, traced).diagnosis is not None]
    if not guilty:  # no operator to blame: whoever did not only receive it
        guilty = [place for place in places if not _of(place, traced).arrived] or list(places)
    first = guilty[0]
    who = fold_ranks(place.rank.rank for place in guilty)
    found = _of(first, traced).diagnosis or replace(
        before, confidence=0.5, phase=first.phase, module=first.module or None, evidence=(), remedy=()
    )
    again = f"computed again by all ranks it is not finite either: on {who}, {first}"
    look = f"look at what {first.module or 'the loss function'} computes on {who}"
    incident.concern(place.rank for place in guilty)
    said, began, where = incident.message.partition(_BEGAN)
    if began and not f"{where};".startswith((f"{who}:", f"{who};")):  # which of them it was is known now
        incident.message = f"{said}{_BEGAN}{who}"
    incident.microbatch = first.microbatch
    incident.diagnosis = replace(
        found,
        evidence=(again, *found.evidence),
        remedy=tuple(dict.fromkeys((*found.remedy, look, *before.remedy))),
    )


def _of(place: Place, traced: dict[int, Traced]) -> Traced:
    return traced.get(place.rank.rank, Traced())
