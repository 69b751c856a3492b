"""The first step of a diagnosis: was something bad before any operator ran?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsentinel.decision import Kind
from gradsentinel.evidence import Diagnosis, Evidence, Sample
from gradsentinel.incident import fold
from gradsentinel.inspection import first_index, local, parts_of, readable, values_of
from gradsentinel.run import Run
from gradsentinel.tree import tensors_in

ID_FIELDS = ("sample_id", "sample_ids", "id", "ids", "idx", "index", "indices")
"""Fields of a batch that are taken for the user's own ids of its records."""

_EXPLAINED_BY_DATA = {Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE}
_MAX_SAMPLES = 64
_SETTINGS = ("lr", "weight_decay", "momentum", "dampening")
_STATE = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE}


def scan(evidence: Evidence, run: Run) -> Evidence:
    """Return the evidence, completed if inputs or training state were bad before the step; reads only.

    A -inf is no fault in a mask, that is, in a tensor without a positive value. Called on: ranks that
    suspect something.
    """
    if evidence.kind in _EXPLAINED_BY_DATA:
        return _scan_inputs(evidence, run)
    if evidence.kind in _STATE:
        return _scan_optimizer(evidence, run)
    return evidence


def _scan_inputs(evidence: Evidence, run: Run) -> Evidence:
    """Look for NaN and Inf in the micro-batches, and only if there is none for a -inf outside of masks."""
    return _blame_inputs(evidence, run) or _blame_inputs(evidence, run, minus=True) or evidence


def _blame_inputs(evidence: Evidence, run: Run, *, minus: bool = False) -> Evidence | None:
    statements: list[str] = []
    samples: list[Sample] = []
    guilty: int | None = None
    usual = _usual(run, minus=minus)
    for microbatch in run.scene.microbatches:
        ids = sample_ids(microbatch.batch)
        for path, tensor in tensors_in(microbatch.batch):
            bad = _bad_values(tensor, minus=minus)
            if bad is None or path in usual:
                continue
            place = f"{path or 'batch'}[{', '.join(map(str, bad.index))}]"
            statements.append(
                f"{place} is {bad.value} before the forward pass ({bad.count} non-finite of "
                f"{tensor.numel()} values, micro-batch {microbatch.index})"
            )
            samples += [Sample(position=row, id=ids.get(row), field=path) for row in bad.rows]
            guilty = microbatch.index if guilty is None else guilty
    if not statements:
        return None
    who = fold([f"id {s.id}" if s.id is not None else f"position {s.position}" for s in samples])
    return replace(
        evidence,
        kind=Kind.NONFINITE_INPUT,
        microbatch=guilty,
        samples=tuple(samples[:_MAX_SAMPLES]),
        message=f"bad data: {statements[0]}",
        diagnosis=Diagnosis(
            cause="data",
            confidence=0.7 if minus else 0.95,
            phase="input",
            evidence=tuple(statements),
            remedy=(f"repair or filter the record(s) with {who}, or replace non-finite values when loading",),
        ),
    )


def _usual(run: Run, *, minus: bool) -> set[str]:
    """Fields that held such values in the last healthy step too: missing values by design, or unused."""
    return {
        path
        for microbatch in run.scene.healthy
        for path, tensor in tensors_in(microbatch.batch)
        if _bad_values(tensor, minus=minus) is not None
    }


def _scan_optimizer(evidence: Evidence, run: Run) -> Evidence:
    """Tell a setting that lets an optimizer make NaN of finite gradients."""
    if evidence.diagnosis is not None and evidence.diagnosis.phase == "setup":
        return evidence  # no optimizer has run yet
    bad = {name for entry in evidence.tensors for name in (entry.name, entry.name.rpartition(":")[0])}
    for name, parameter, group in _members(run):
        found = _suspect_setting(group, parameter) if name in bad else None
        if found is None:
            continue
        fact, remedy = found
        return replace(
            evidence,
            message=f"{evidence.message}: {fact}",
            diagnosis=Diagnosis(
                cause="optimizer",
                confidence=0.95,
                phase="optimizer",
                module=name.rpartition(".")[0],
                evidence=(fact,),
                remedy=(remedy,),
            ),
        )
    return evidence


def _suspect_setting(group: Mapping[str, Any], parameter: Tensor) -> tuple[str, str] | None:
    """Return what is wrong with a parameter group, and what to do about it."""
    for key in _SETTINGS:
        value = group.get(key)
        if isinstance(value, (int, float, Tensor)) and not math.isfinite(value):
            return f"{key} is {float(value)}", f"find what sets {key}: a scheduler or a hook"
    eps = group.get("eps")
    if not isinstance(eps, (int, float)) or parameter.device.type == "meta":
        return None
    dtype = parameter.dtype.to_real()
    if float(torch.tensor(eps, dtype=torch.float64).to(dtype)) > 0:
        return None
    name = str(dtype).removeprefix("torch.")
    fact = f"eps={eps:g} is 0 in {name}: an element whose gradient is 0 becomes 0/0 in the optimizer"
    if dtype.itemsize < 4:
        return fact, "use eps >= 1e-4, or keep float32 master weights for the optimizer"
    return fact, "use eps >= 1e-8"


def _members(run: Run) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    names = {id(p): name for name, p in run.host.named_parameters()}
    for optimizer in run.host.optimizers:
        for group in optimizer.param_groups:
            yield from ((names[id(p)], p, group) for p in group["params"] if id(p) in names)


@dataclass(frozen=True, slots=True)
class _Bad:
    """What is wrong with one tensor of a batch."""

    count: int
    index: tuple[int, ...]
    """Of the first bad element, in the tensor."""
    value: float
    rows: list[int]
    """Positions along the first dimension that hold a bad value."""


def _bad_values(tensor: Tensor, *, minus: bool) -> _Bad | None:
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
    return _Bad(count, first_index(tensor, bad, flat), value, _rows(tensor, bad))


def _rows(tensor: Tensor, bad: Tensor) -> list[int]:
    source = local(tensor)
    if bad.dim() == 0 or source.is_nested or source.layout not in (torch.strided, torch.sparse_coo):
        return []
    rows = bad.flatten(1).any(1).nonzero().flatten() if bad.dim() > 1 else bad.nonzero().flatten()
    if source.layout is torch.sparse_coo:  # `bad` counts stored entries, not rows
        rows = torch.unique(source.coalesce().indices()[0, rows])
    found: list[int] = rows.tolist()
    return found


def sample_ids(batch: Any) -> dict[int, Any]:
    """The user's ids of the records, by position, if the batch carries some."""
    if not isinstance(batch, Mapping):
        return {}
    for field in ID_FIELDS:
        found = batch.get(field)
        if isinstance(found, Tensor) and found.dim() == 1:
            return dict(enumerate(found.tolist()))
        if isinstance(found, Sequence) and not isinstance(found, str):
            return dict(enumerate(found))
    return {}
