"""The first step of a diagnosis: was something bad before any operator ran?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsentinel.data.holdings import held_in
from gradsentinel.decision import Kind
from gradsentinel.diagnosis.fields import in_words
from gradsentinel.diagnosis.fingerprint import what_is_different
from gradsentinel.diagnosis.innocence import innocent
from gradsentinel.diagnosis.update import explain_update
from gradsentinel.evidence import Diagnosis, Evidence, Sample
from gradsentinel.incident import OF_THIS_STEP, Incident, fold
from gradsentinel.measures.inspection import first_index, local, parts_of, readable, values_of
from gradsentinel.run import Run

_EXPLAINED_BY_DATA = {Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE}
_MAX_SAMPLES = 64
_STATE = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE}


def scan(evidence: Evidence, run: Run) -> Evidence:
    """Return the evidence, completed if inputs or training state were bad before the step.

    Leaves the run as it is. A -inf is no fault in a mask, that is, in a tensor without a positive value.
    Called on: ranks that
    suspect something.
    """
    if evidence.kind in _EXPLAINED_BY_DATA or spoilt_by_forward(evidence):
        return _scan_inputs(evidence, run)
    if evidence.kind in _STATE and not evidence.details.get(OF_THIS_STEP):
        return explain_update(evidence, run)
    return evidence


def spoilt_by_forward(found: Evidence | Incident) -> bool:
    """Return True if the forward pass of this very step has made buffers non-finite."""
    known = found.diagnosis
    by_forward = known is None or known.phase != "optimizer"
    return found.kind is Kind.NONFINITE_STATE and bool(found.details.get(OF_THIS_STEP)) and by_forward


def _scan_inputs(evidence: Evidence, run: Run) -> Evidence:
    """Look for NaN and Inf in the micro-batches, and only if there is none for a -inf outside of masks.

    If the step can be run again, they must have spoilt it, too: a model may fill in missing values.
    """
    return _blame_inputs(evidence, run) or _blame_inputs(evidence, run, minus=True) or evidence


def _blame_inputs(evidence: Evidence, run: Run, *, minus: bool = False) -> Evidence | None:
    statements: list[str] = []
    samples: list[Sample] = []
    named: list[Sample] = []
    guilty: int | None = None
    suspects: dict[int, list[str]] = {}
    usual = usual_fields(run, minus=minus)
    for microbatch in run.scene.microbatches:
        if microbatch.written:  # what it held before the step is gone
            continue
        ids = microbatch.ids
        for path, tensor in held_in(microbatch.batch):
            bad = bad_values(tensor, minus=minus)
            if bad is None or path in usual:
                continue
            place = f"{path or 'batch'}[{', '.join(map(str, bad.index))}]"
            statements.append(
                f"{place} is {bad.value} before the forward pass ({bad.count} non-finite of "
                f"{tensor.numel()} values, micro-batch {microbatch.index})"
            )
            found = [Sample(position=row, id=ids.get(row), field=path) for row in bad.rows]
            named += found
            guilty = microbatch.index if guilty is None else guilty
            samples += found if guilty == microbatch.index else []  # positions are those of one micro-batch
            suspects.setdefault(microbatch.index, []).append(path)
    spoilt = spoilt_by_forward(evidence)
    if not statements or innocent(run, suspects, buffers=spoilt):
        return None
    text = what_is_different(run.scene.microbatches[guilty or 0].batch, [m.batch for m in run.scene.healthy])
    if text:
        statements.append(text)
    where = in_words(list(dict.fromkeys(s.field for s in named)))
    several = {"bad_microbatches": list(suspects)} if len(suspects) > 1 else {}
    fix = "replace non-finite values when loading"
    who = "the records of this batch"  # of what is sparse or ragged nobody knows which
    if named:
        names = [f"id {s.id}" if s.id is not None else f"position {s.position}" for s in named]
        who = "the record(s) with " + fold(names)
    message = f"bad data: {statements[0]}"
    if any(s.id is not None for s in named[:1]):
        message += f", of {who}"
    return replace(
        evidence,
        kind=evidence.kind if spoilt else Kind.NONFINITE_INPUT,
        microbatch=guilty,
        samples=tuple(samples[:_MAX_SAMPLES]),
        message=evidence.message if spoilt else message,
        details={**evidence.details, **several},
        diagnosis=Diagnosis(
            cause="data",
            confidence=0.7 if minus else 0.95,
            phase="input",
            evidence=tuple(statements),
            remedy=(f"repair or filter {who}, or {fix}{where}",),
        ),
    )


def usual_fields(run: Run, *, minus: bool) -> set[str]:
    """Fields that held such values in the last healthy step too: missing values by design, or unused."""
    return {
        path
        for microbatch in run.scene.healthy
        for path, tensor in held_in(microbatch.batch)
        if bad_values(tensor, minus=minus) is not None
    }


@dataclass(frozen=True, slots=True)
class Bad:
    """What is wrong with one tensor of a batch."""

    count: int
    index: tuple[int, ...]
    """Of the first bad element, in the tensor."""
    value: float
    rows: list[int]
    """Positions along the first dimension that hold a bad value."""


def bad_values(tensor: Tensor, *, minus: bool) -> Bad | None:
    """Find NaN and +inf, or with `minus` -inf where the tensor cannot be a mask; None if there is none."""
    if readable(tensor) is not None or tensor.numel() == 0:
        return None
    values = values_of(tensor)
    parts = parts_of(values)
    negative = torch.isneginf(parts)
    if minus and not bool((torch.isfinite(parts) & (parts > 0)).any()):
        return None
    flags = negative if minus else ~(torch.isfinite(parts) | negative)
    bad = flags.any(-1) if values.is_complex() else flags
    count = int(bad.sum())
    if not count:
        return None
    flat = int(bad.flatten().to(torch.uint8).argmax())
    value = float(parts.flatten()[int(flags.flatten().to(torch.uint8).argmax())])
    return Bad(count, first_index(tensor, bad, flat), value, _rows(tensor, bad))


def _rows(tensor: Tensor, bad: Tensor) -> list[int]:
    source = local(tensor)
    if bad.dim() == 0 or source.is_nested or source.layout not in (torch.strided, torch.sparse_coo):
        return []
    rows = bad.flatten(1).any(1).nonzero().flatten() if bad.dim() > 1 else bad.nonzero().flatten()
    if source.layout is torch.sparse_coo:  # `bad` counts stored entries, not rows
        rows = torch.unique(source.coalesce().indices()[0, rows])
    found: list[int] = rows.tolist()
    return found
