"""Completes an incident with its diagnosis: replay, trace, swap, verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsentinel.decision import Kind
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.arm import Armed, in_words, suspect_of
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.operands import finite_again
from gradsentinel.diagnosis.replay import Computed, Replay, reason_against
from gradsentinel.diagnosis.scan import sample_ids
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.transient import (
    Again,
    alike,
    is_hooked,
    judge_again,
    reproduces,
    written_after,
)
from gradsentinel.diagnosis.verdict import came_in, decide
from gradsentinel.diagnosis.walk import Path, walk
from gradsentinel.evidence import Diagnosis, Sample
from gradsentinel.host import gradient_of
from gradsentinel.incident import Incident
from gradsentinel.inspection import parts_of
from gradsentinel.run import Run
from gradsentinel.scene import MicroBatch
from gradsentinel.tree import tensors_in

NONFINITE = {Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE}
FINITE = {Kind.MAGNITUDE, Kind.SPIKE}
_CERTAIN = 0.5


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank found out; what travels to the others."""

    diagnosis: Diagnosis | None = None
    notes: tuple[str, ...] = ()
    microbatch: int | None = None
    samples: tuple[Sample, ...] = ()


_latest: dict[str, Findings] = {}


def findings_of(incident: Incident) -> Findings | None:
    """Return what the replay of the latest diagnosed incident showed on this rank, None for any other.

    Holds the bad operator's inputs (`findings.origin.args`), for whoever wants to keep them.
    """
    return _latest.get(incident.id)


def diagnose(incident: Incident, run: Run) -> None:
    """Complete the incident with its cause and place, by running the step again. Called on: every rank.

    Ranks run their own micro-batches, without talking; then they share what they found.
    """
    _latest.clear()
    if incident.kind is Kind.RANK_DIVERGENCE and incident.diagnosis is None:
        incident.diagnosis = _desynchronised(incident)
    known = incident.diagnosis is not None and incident.diagnosis.confidence >= _CERTAIN
    if known or incident.kind not in NONFINITE | FINITE or incident.step != run.step:
        return
    guilty = any(rank.rank == run.rank.rank for rank in incident.ranks) or not incident.ranks
    report, failure = Report(), None
    if guilty:
        try:
            report = _investigate(incident, run)
        except Exception as error:  # noqa: BLE001 - raised below, after the ranks have met
            failure = error
    reports: Sequence[Report] = run.consensus.gather(report)
    _complete(incident, reports)
    if failure is not None:
        raise failure


def _complete(incident: Incident, reports: Sequence[Report]) -> None:
    incident.notes += tuple(dict.fromkeys(note for report in reports for note in report.notes))
    best = max(
        (r for r in reports if r.diagnosis is not None),
        key=lambda r: r.diagnosis.confidence if r.diagnosis else 0.0,
        default=None,
    )
    if best is None or best.diagnosis is None:
        return
    before = incident.diagnosis
    inherited = before.remedy if before is not None else ()
    incident.diagnosis = replace(
        best.diagnosis, remedy=tuple(dict.fromkeys((*best.diagnosis.remedy, *inherited)))
    )
    incident.microbatch = best.microbatch if best.microbatch is not None else incident.microbatch
    incident.samples = best.samples or incident.samples


def _desynchronised(incident: Incident) -> Diagnosis:
    return Diagnosis(
        cause="desync",
        confidence=0.9,
        evidence=(incident.message,),
        remedy=("let all ranks decide alike whether a step is made, and restore the odd rank from another",),
    )


# -- on one rank -----------------------------------------------------------------------------------


def _investigate(incident: Incident, run: Run) -> Report:
    reason = reason_against(run)
    if reason is not None:
        return _not_replayed(incident, run, reason)
    deadline = time.monotonic() + run.diagnosis_budget
    found = {n: g for n, p in run.host.named_parameters() if (g := gradient_of(p)) is not None}
    replay = Replay(run)
    with replay.sheltered():
        computed: list[Computed] = []
        guilty: MicroBatch | None = None
        for microbatch in _ordered(replay.microbatches, incident.microbatch):
            try:
                result = replay.compute(microbatch)
            except Exception as error:  # noqa: BLE001 - the user's own code: it may not like to run twice
                return Report(notes=(f"the step could not be run again: {type(error).__name__}: {error}",))
            computed.append(result)
            if not swap.is_finite(result):
                guilty = microbatch
                break
        if guilty is None:
            return _clean(incident, replay, computed, found, deadline)
        trace = Trace(run.host.modules(), run.host.named_parameters())
        traced = replay.compute(guilty, mode=trace)
        path = walk(trace, traced)
        if path is None:
            return _clean(incident, replay, computed, found, deadline, flaky=True)
        if path.origin is None:
            samples = _samples_of(path, guilty)
            return Report(diagnosis=came_in(trace, path), microbatch=guilty.index, samples=samples)
        findings = Findings.of(run, guilty, trace, traced, path)
        findings.healthy_others = _healthy_others(replay, guilty, computed, deadline)
        _swap(findings, replay, deadline)
    _latest[incident.id] = findings
    diagnosis = decide(findings)
    several = len(replay.microbatches) > 1
    return Report(
        diagnosis=diagnosis,
        microbatch=guilty.index if several or incident.microbatch is None else incident.microbatch,
        samples=_samples(findings, diagnosis),
    )


def _not_replayed(incident: Incident, run: Run, reason: str) -> Report:
    """Say what armed hooks saw, and arm some for the next time."""
    before = incident.diagnosis
    if before is None or incident.kind not in NONFINITE:
        return Report()
    armed: Armed = run.local.armed or Armed()
    run.local.armed = armed
    seen = armed.explain(incident)
    said = f"the step was not run again: {reason}"
    if seen is not None:
        return Report(diagnosis=replace(seen, evidence=(*seen.evidence, said)))
    suspect = suspect_of(incident)
    told: tuple[str, ...] = (said,)
    if suspect is not None:
        armed.arm(run, suspect)
        told = (said, in_words(armed))
    return Report(diagnosis=replace(before, evidence=(*before.evidence, *told)))


def _ordered(microbatches: Sequence[MicroBatch], suspect: int | None) -> list[MicroBatch]:
    return sorted(microbatches, key=lambda m: m.index != suspect)


def _healthy_others(replay: Replay, guilty: MicroBatch, computed: Sequence[Computed], deadline: float) -> int:
    healthy = len(computed) - 1
    for other in _ordered(replay.microbatches, guilty.index)[len(computed) :]:
        if time.monotonic() > deadline:
            break
        healthy += swap.is_finite(replay.compute(other))
    return healthy


def _swap(findings: Findings, replay: Replay, deadline: float) -> None:
    """Change one thing at a time, as long as it can change the verdict and there is time."""
    size, microbatch = findings.size, findings.microbatch
    _run_operator(findings)
    if findings.half is not None and time.monotonic() < deadline:
        findings.finite_in_wide = swap.finite_in_wide(replay, microbatch)
    good = replay.run.known_good
    if good is not None and findings.origin.badness.inf and time.monotonic() < deadline:
        findings.finite_with_known_good = swap.finite_with_weights(replay, microbatch, good)
    if size is None:
        return
    findings.outliers = swap.outlier_rows(microbatch.batch, size)
    rows = sorted({row for guilty in findings.outliers.values() for row in guilty} or set(findings.rows))
    if rows and len(rows) < size and time.monotonic() < deadline:
        findings.finite_without_rows = swap.finite_without(replay, microbatch, rows, size)


def _run_operator(findings: Findings) -> None:
    """Run the bad operator alone, here and on the CPU."""
    if findings.origin.allocation or findings.custom is not None:
        return
    finite = finite_again(findings.origin)
    findings.repeatable = None if finite is None else not finite
    if findings.run.host.device.type != "cpu":
        findings.finite_on_cpu = finite_again(findings.origin, torch.device("cpu"))


def _samples(findings: Findings, diagnosis: Diagnosis) -> tuple[Sample, ...]:
    """Name samples only when the data is to blame, and only when replacing them cured the step."""
    if diagnosis.cause != "data" or not findings.finite_without_rows:
        return ()
    rows = sorted({r for guilty in findings.outliers.values() for r in guilty} or set(findings.rows))
    ids = findings.ids()
    return tuple(Sample(position=row, id=ids.get(row)) for row in rows)


def _samples_of(path: Path, microbatch: MicroBatch) -> tuple[Sample, ...]:
    """Name the samples of a bad tensor of the batch."""
    leaf = path.leaves[0].leaf if path.leaves else ""
    ids = sample_ids(microbatch.batch)
    for name, tensor in tensors_in(microbatch.batch):
        if leaf == f"batch {name}".strip() and tensor.dim() and tensor.layout is torch.strided:
            rows = (~torch.isfinite(parts_of(tensor))).reshape(tensor.shape[0], -1).any(1).nonzero()
            return tuple(Sample(position=r, id=ids.get(r), field=name) for r in rows.flatten().tolist())
    return ()


# -- fine when run again ---------------------------------------------------------------------------


def _clean(
    incident: Incident,
    replay: Replay,
    computed: list[Computed],
    found: dict[str, Tensor],
    deadline: float,
    *,
    flaky: bool = False,
) -> Report:
    run = replay.run
    scale = getattr(getattr(run.host, "scaler", None), "_scale", None)
    custom: set[str] = set()
    unwritten = False
    second: list[Computed] = []
    for microbatch in _ordered(replay.microbatches, incident.microbatch):
        if time.monotonic() > deadline:
            break
        trace = Trace(run.host.modules(), run.host.named_parameters())
        second.append(replay.compute(microbatch, mode=trace))
        custom |= trace.custom | {name for name, mine in second[-1].nodes.values() if mine}
        poisoned = replay.compute(microbatch, mode=swap.Poison())  # type: ignore[no-untyped-call]
        unwritten = unwritten or not swap.is_finite(poisoned)
    same = all(alike(one, other) for one, other in zip(computed, second, strict=False))
    again = Again(
        computed=computed,
        deterministic=same and not flaky and len(second) == len(computed),
        custom=frozenset(custom),
        unwritten=unwritten,
        written=written_after(computed, found, scaled=scale is not None),
        hooked=any(is_hooked(parameter) for _, parameter in run.host.named_parameters()),
        found=found,
        scale=scale,
    )
    reduced = run.consensus.world_size > 1
    if incident.kind in FINITE and (reduced or reproduces(again)):
        return Report(diagnosis=_reproducible())
    diagnosis = judge_again(again, run, reduced=reduced)
    if incident.kind is Kind.NONFINITE_LOSS:
        diagnosis = replace(diagnosis, phase="forward")
    return Report(diagnosis=diagnosis)


def _reproducible() -> Diagnosis:
    return Diagnosis(
        cause="unknown",
        confidence=0.0,
        phase="backward",
        evidence=("run again the step gives the same values, bit for bit: no device failed",),
    )
