"""Completes an incident with its diagnosis: replay, trace, swap, verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradsentinel.decision import Kind
from gradsentinel.devices import device_of
from gradsentinel.diagnosis.arm import Armed, in_words, suspect_of
from gradsentinel.diagnosis.comparison import alike
from gradsentinel.diagnosis.determinism import asked, deterministic
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.investigation import Investigation
from gradsentinel.diagnosis.progress import Progress
from gradsentinel.diagnosis.replay import Replay, reason_against
from gradsentinel.diagnosis.report import Report
from gradsentinel.diagnosis.scan import spoilt_by_forward
from gradsentinel.diagnosis.transient import not_sure
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident, fold
from gradsentinel.run import Run

NONFINITE = {Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE}
FINITE = {Kind.MAGNITUDE, Kind.SPIKE}
_CERTAIN = 0.5
_SCALE_REMEDY = (
    "find what set or lowered the loss scale; a GradScaler(init_scale=65536.0) begins anew",
    "train in bfloat16, which needs no loss scale",
)
_UNSTEADY = "without deterministic algorithms two runs on the same inputs differ"


def findings_of(incident: Incident, run: Run) -> Findings | None:
    """Return what the replay of the incident of the step in flight showed on this rank, None for any other.

    Holds the bad operator's inputs (`findings.origin.args`), for whoever wants to keep them; the next step
    lets go of them.
    """
    name, findings = run.scene.traced or ("", None)
    return findings if name == incident.id else None


def keep_findings(incident: Incident, findings: Findings) -> None:
    """Keep what somebody else's replay of the incident showed on this rank, for `findings_of`."""
    findings.run.scene.traced = (incident.id, findings)


def diagnose(incident: Incident, run: Run) -> None:
    """Complete the incident with its cause and place, by running the step again. Called on: every rank.

    Ranks run their own micro-batches, without talking; then they share what they found.
    """
    if incident.kind is Kind.RANK_DIVERGENCE and incident.diagnosis is None:
        incident.diagnosis = _desynchronised(incident)
    known = incident.diagnosis is not None and incident.diagnosis.confidence >= _CERTAIN
    repeatable = incident.kind in NONFINITE | FINITE or spoilt_by_forward(incident)
    if known or not repeatable or incident.step not in {run.step, run.late_step}:
        return
    guilty = any(rank.rank == run.rank.rank for rank in incident.ranks) or not incident.ranks
    report, failure = Report(), None
    with Progress(incident.step, run.diagnosis_budget, shown=run.consensus.rank == 0) as progress:
        if guilty:
            try:
                report = _investigate(incident, run, progress)
            except Exception as error:  # noqa: BLE001 - raised below, after the ranks have met
                failure = error
        if run.consensus.world_size > 1:
            progress.stage(f"waiting for {fold([f'rank {rank.rank}' for rank in incident.ranks])}")
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
    before, after = incident.diagnosis, best.diagnosis
    inherited = before.remedy if before is not None else ()
    if before is not None and before.cause != "unknown" and after.cause == "unknown" and not after.confidence:
        after = replace(before, evidence=(*before.evidence, *after.evidence))  # nothing speaks against it
    incident.diagnosis = replace(after, remedy=tuple(dict.fromkeys((*after.remedy, *inherited))))
    incident.microbatch = best.microbatch if best.microbatch is not None else incident.microbatch
    incident.samples = best.samples or incident.samples
    if len(best.microbatches) > 1:
        incident.details["bad_microbatches"] = list(best.microbatches)
    if best.made_by_the_loop:
        incident.details["made_by_the_loop"] = True


def _desynchronised(incident: Incident) -> Diagnosis:
    return Diagnosis(
        cause="desync",
        confidence=0.9,
        evidence=(incident.message,),
        remedy=("let all ranks decide alike whether a step is made, and restore the odd rank from another",),
    )


# -- on one rank -----------------------------------------------------------------------------------


def _investigate(incident: Incident, run: Run, progress: Progress) -> Report:
    collapsed = _collapsed_scale(run)
    if collapsed is not None:
        return Report(diagnosis=collapsed)
    reason = reason_against(run)
    if reason is not None:
        return _not_replayed(incident, run, reason)
    investigation = Investigation(incident, run, progress)
    ranks = run.consensus.world_size > 1
    with deterministic(asked(), device_of(run.host.device), ranks=ranks) as conditions:
        report = investigation.report()
    if report.diagnosis is not None:
        if conditions.switched and report.diagnosis.cause == "hardware" and not _steady(run):
            report.diagnosis = not_sure(report.diagnosis, _UNSTEADY)
        evidence = (*report.diagnosis.evidence, *conditions.said())
        report.diagnosis = replace(report.diagnosis, evidence=evidence)
    else:
        report.notes += conditions.said()
    if investigation.findings is not None:
        keep_findings(incident, investigation.findings)
    return report


def _collapsed_scale(run: Run) -> Diagnosis | None:
    """Say so if a loss scale made the gradients so that is next to 0, or not finite; waits for the device."""
    held = getattr(getattr(run.host, "scaler", None), "_scale", None)
    if held is None:
        return None
    scale = float(held)
    # As a scaler inverts it, but here: not every device has float64.
    inverse = float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())
    if math.isfinite(scale) and math.isfinite(inverse):
        return None
    fact = (
        f"the loss scale is {scale:g}: gradients are multiplied by its inverse, which is infinite in float32"
        if math.isfinite(scale)
        else f"the loss scale itself is {scale:g}: the loss is multiplied by it"
    )
    return Diagnosis(
        cause="precision", confidence=0.95, phase="backward", evidence=(fact,), remedy=_SCALE_REMEDY
    )


def _steady(run: Run) -> bool:
    """Return True if two runs by the kernels of the loop agree, as those in a fixed order always do."""
    replay = Replay(run)
    with replay.sheltered():
        return all(alike(replay.compute(m), replay.compute(m)) for m in replay.microbatches)


def _not_replayed(incident: Incident, run: Run, reason: str) -> Report:
    """Say what armed hooks saw, and arm some for the next time."""
    before = incident.diagnosis
    if before is None or incident.kind not in NONFINITE:
        return Report()
    armed: Armed = run.local.armed or Armed()
    run.local.armed = armed
    said = f"the step was not run again: {reason}"
    seen = armed.explain(incident, run)
    if seen is not None:
        return Report(diagnosis=replace(seen, evidence=(*seen.evidence, said)))
    if armed.names:
        said += "; the armed hooks saw nothing of where it began (code that calls no module, or compiled)"
    armed.arm(run, suspect_of(incident))
    return Report(diagnosis=replace(before, evidence=(*before.evidence, said, in_words(armed))))
