"""What exactly is wrong with a batch, and in which records; reads every element, on the host's time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_fields import Field, Reader, is_empty, record_count
from gradsentinel.callbacks.batch_gross import Beyond
from gradsentinel.callbacks.batch_habits import COPIES, MANY, OUTLIER, Oddity
from gradsentinel.callbacks.batch_links import Miss, widened
from gradsentinel.callbacks.batch_meter import fully_masked_rows
from gradsentinel.callbacks.batch_reading import (
    BEYOND,
    EMPTY,
    IGNORED,
    MASKED,
    NONFINITE,
    OUT_OF_RANGE,
    UNSELECTED,
)
from gradsentinel.data.holdings import held_in
from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.scan import bad_values
from gradsentinel.evidence import Diagnosis, Evidence, Sample
from gradsentinel.incident import fold

_MAX_SAMPLES = 64
KEPT_FROM = "the table was asked for another number in its place, and what came of it is dropped"
_LOOK_UPS = ("index", "indices", "out of bounds", "out of range", "device-side assert", "target")
"""What errors of look-ups speak of."""
_REMEDIES = {
    NONFINITE: "repair or filter {who}, or replace non-finite values when loading",
    OUT_OF_RANGE: "repair or filter {who}; look for another tokenizer, vocabulary or label map",
    BEYOND: "repair or filter {who}; look for another tokenizer, vocabulary or label map",
    IGNORED: "leave out batches in which nothing is supervised, or divide by max(count, 1)",
    MASKED: "leave out {who}, or give a fully masked record one position",
    UNSELECTED: "leave out batches in which nothing is selected, or divide by max(count, 1)",
    OUTLIER: "repair or filter {who}, or look at what scales the data when it is read",
    EMPTY: "leave out empty batches when loading (drop_last=True, or a filter after the sampler)",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a batch."""

    mark: str
    path: str
    fact: str
    rows: tuple[int, ...] = ()
    """Positions of the records."""


def faults_of(
    batch: Any, reader: Reader, *, ignore_index: int, allowed: Collection[str], guessed: bool = False
) -> list[Fault]:
    """Return all that is wrong with a batch; `guessed` judges by the model's own tables too."""
    fields = reader.read(batch)
    if is_empty(batch, fields):
        return [Fault(EMPTY, "", "the batch is empty")]
    found = list(_nonfinite(batch, allowed, minus=False))
    found = found or list(_nonfinite(batch, allowed, minus=True))
    for field, values in fields:
        if field.empty or (field.is_float and field.role == "float"):
            continue
        found += _judge(field, values, record_count(batch), ignore_index, guessed=guessed)
    return found


def faults_of_misses(misses: Sequence[Miss], batch: Any, reader: Reader) -> list[Fault]:
    """Return the numbers that were looked up in vain, as far as possible by field and record."""
    integers = [(one, v) for one, v in reader.read(batch) if not one.is_float and v.dtype is not torch.bool]
    told: list[tuple[int, int, Fault]] = []
    for miss in (miss for miss in misses if miss.is_one()):
        bad = miss.where(miss.numbers)
        if not bool(bad.any()):
            continue
        likely = [(_likeness(miss, bad, values), one, values) for one, values in integers]
        (score, shift), one, values = max(likely, key=lambda each: each[0][0], default=((0, 0), None, None))
        if one is None or values is None or not score:
            fact = _beyond("what is looked up", miss.numbers, bad, (0, miss.size), miss.source)
            told.append((0, miss.size, Fault(OUT_OF_RANGE, "", fact)))
            continue
        bad = miss.where(values.to(torch.int64) + shift)
        if score <= _AS_MANY:  # the model has made something of the rest
            bad &= torch.isin(values, miss.numbers[miss.where(miss.numbers)].to(values.device))
        fact = _beyond(one.name, values, bad, (-shift, miss.size - shift), miss.source)
        told.append((score, miss.size, Fault(OUT_OF_RANGE, one.path, fact, _rows(bad, record_count(batch)))))
    found: dict[str, Fault] = {}
    for _, _, fault in sorted(told, key=lambda each: (-each[0], each[1])):  # of several tables the smallest
        found.setdefault(fault.path, fault)
    named = [fault for fault in found.values() if fault.path]
    return named or list(found.values())


_AS_IT_IS, _SHIFTED, _REORDERED, _AS_MANY, _AMONG = 5, 4, 3, 2, 1
"""How likely a field is what was looked up: number by number, with something added, in another order, or of
the bad ones alone: with as many numbers as there are in the field, or with others."""


def _likeness(miss: Miss, bad: Tensor, values: Tensor) -> tuple[int, int]:
    """Return how likely these are the numbers that were looked up, 0 if not, and what was added to them."""
    numbers, values = miss.numbers.to("cpu", torch.int64), values.to("cpu", torch.int64)
    if numbers.numel() == values.numel():
        shifts = numbers.flatten() - values.flatten()
        shift = int(shifts[0])
        if bool((shifts == shift).all()):
            return (_AS_IT_IS if shift == 0 else _SHIFTED), shift
        if torch.equal(numbers.flatten().sort().values, values.flatten().sort().values):
            return _REORDERED, 0
    asked, there = set(numbers[bad.cpu()].tolist()), set(values[miss.where(values)].tolist())
    score = _AS_MANY if numbers.numel() == values.numel() else _AMONG
    return (score if asked <= there else 0), 0


def _beyond(name: str, values: Tensor, bad: Tensor, lawful: tuple[int, int], source: str) -> str:
    """Say which number is not lawful, and how many are not."""
    index = tuple(bad.nonzero()[0].tolist())
    where = f"{name}[{', '.join(map(str, index))}]" if index else name
    within = f"{lawful[0]} to {lawful[1] - 1} ({source})"
    return f"{where} is {values[index].item()}, outside {within}, as {int(bad.sum())} value(s) are"


def facts_of_failure(
    error: Exception, batch: Any, reader: Reader, *, ignore_index: int, allowed: Collection[str]
) -> list[str]:
    """Return what is wrong with the batch that a program failed on, nothing if the device is gone for good.

    By the model's own tables only if the failure is about a number that was looked up.
    """
    looked_up = isinstance(error, IndexError) or any(word in str(error).lower() for word in _LOOK_UPS)
    try:
        faults = faults_of(batch, reader, ignore_index=ignore_index, allowed=allowed, guessed=looked_up)
    except RuntimeError:
        return []
    return [fault.fact for fault in faults]


def evidence_of(
    faults: Sequence[Fault],
    ids: dict[int, Any],
    action: Action,
    microbatch: int | None,
    note: str = "",
    *,
    more: tuple[str, ...] = (),
) -> Evidence:
    """Return the evidence of what is wrong with a batch, whose records have these ids; there is a fault.

    `note` says why it may not be one, `more` what else there is to say.
    """
    first = faults[0]
    named = f", of {_who(first.rows, ids)}" if any(row in ids for row in first.rows) else ""
    samples = tuple(
        Sample(position=row, id=ids.get(row), field=fault.path) for fault in faults for row in fault.rows
    )
    remedies = dict.fromkeys(_remedy(fault, ids) for fault in faults)
    return Evidence(
        kind=Kind.NONFINITE_INPUT,
        action=action,
        message=f"bad data: {first.fact}{named}" + (f"; {note}" if note else ""),
        microbatch=microbatch,
        samples=samples[:_MAX_SAMPLES],
        diagnosis=Diagnosis(
            cause="data",
            confidence=0.6 if note else 0.95,
            phase="input",
            evidence=tuple(fault.fact for fault in faults) + ((note,) if note else ()) + more,
            remedy=tuple(remedies),
        ),
        details={"faults": list(dict.fromkeys(fault.mark for fault in faults))},
        about=tuple(dict.fromkeys(f"{fault.mark} {fault.path}" for fault in faults)),
    )


def fault_beyond(beyond: Beyond, batch: Any) -> Fault:
    """Return the fault of a field with values far beyond the usual ones, with the records that have them."""
    tensor = dict(held_in(batch)).get(beyond.path)
    rows = () if tensor is None else _rows_above(tensor, beyond.limit, record_count(batch))
    return Fault(OUTLIER, beyond.path, beyond.fact, rows)


def evidence_of_oddities(
    odd: Sequence[Oddity], batch: Any, ids: dict[int, Any], microbatch: int
) -> Evidence | None:
    """Return the evidence of what is out of the ordinary, None if it is not so after all."""
    tensors = dict(held_in(batch))
    facts: list[str] = []
    samples: list[Sample] = []
    about: list[str] = []
    for oddity in odd:
        if oddity.what == COPIES and not _has_copies(batch):
            continue
        facts.append(oddity.fact)
        about.append(f"{oddity.what} {oddity.path}")
        if oddity.what == OUTLIER and oddity.path in tensors:
            rows = _rows_above(tensors[oddity.path], oddity.limit, record_count(batch))
            samples += [Sample(position=row, id=ids.get(row), field=oddity.path) for row in rows]
    if not facts:
        return None
    remedies = ["look at what reads the data: the file, the normalisation, the sampler and its seed"]
    if samples:
        remedies.insert(0, f"look at {_who(tuple(sample.position for sample in samples), ids)}")
    return Evidence(
        kind=Kind.CUSTOM,
        action=Action.WARN,
        message=f"unusual data: {facts[0]}",
        microbatch=microbatch,
        samples=tuple(samples[:_MAX_SAMPLES]),
        diagnosis=Diagnosis(
            cause="data", confidence=0.5, phase="input", evidence=tuple(facts), remedy=tuple(remedies)
        ),
        details={"faults": list(dict.fromkeys(oddity.what for oddity in odd))},
        about=tuple(about),
    )


# -- one kind of fault each ----------------------------------------------------------------------------


def _nonfinite(batch: Any, allowed: Collection[str], *, minus: bool) -> Iterator[Fault]:
    for path, tensor in held_in(batch):
        bad = None if path in allowed else bad_values(tensor, minus=minus)
        if bad is not None:
            where = f"{path or 'batch'}[{', '.join(map(str, bad.index))}]"
            fact = f"{where} is {bad.value} ({bad.count} non-finite of {tensor.numel()} values)"
            yield Fault(NONFINITE, path, fact, tuple(bad.rows))


def _judge(
    field: Field, values: Tensor, records: int | None, ignore_index: int, *, guessed: bool
) -> Iterator[Fault]:
    bound = field.bound
    if not field.is_float:
        values = widened(values)
    if bound is not None and (bound.given or guessed):
        bad = (values < bound.low) | (values >= bound.high)
        if field.role == "labels":
            bad &= values != ignore_index
        if bool(bad.any()):
            fact = _beyond(field.name, values, bad, (bound.low, bound.high), bound.source)
            mark = OUT_OF_RANGE if bound.given else BEYOND
            yield Fault(mark, field.path, fact, _rows(bad, records))
    if field.is_counted and bool((values == ignore_index).all()):
        fact = f"all {values.numel()} values of {field.name} are {ignore_index}, the label left out"
        yield Fault(IGNORED, field.path, fact)
    if field.role in {"kept", "padded"}:
        rows = fully_masked_rows(field, values).nonzero().flatten().tolist()
        if rows:
            fact = f"{field.name} leaves nothing of {len(rows)} of {values.shape[0]} records"
            yield Fault(MASKED, field.path, fact, tuple(rows))
    if field.role == "selects" and bool((values == 0).all()):
        yield Fault(UNSELECTED, field.path, f"{field.name} is 0 everywhere: nothing is selected")


def _rows(bad: Tensor, records: int | None) -> tuple[int, ...]:
    if not bad.dim() or bad.shape[0] != records:
        return ()
    rows = bad.reshape(bad.shape[0], -1).any(1).nonzero().flatten()
    return tuple(rows.tolist())


def _rows_above(tensor: Tensor, limit: float, records: int | None) -> tuple[int, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex():
        return ()
    return _rows(tensor.detach().abs() > limit, records)


def _has_copies(batch: Any) -> bool:
    """Compare the records in full, all fields together: what the device compared were a few numbers each."""
    records = record_count(batch)
    tensors = [t.detach() for _, t in held_in(batch) if t.dim() and t.shape[0] == records and t.numel()]
    plain = [t for t in tensors if t.layout is torch.strided and not t.is_complex() and not t.is_nested]
    if not plain or records is None:
        return False
    rows = torch.cat([t.reshape(records, -1).to("cpu", torch.float64) for t in plain], 1)
    return records - len(torch.unique(rows, dim=0)) > MANY * (records - 1)


def _remedy(fault: Fault, ids: dict[int, Any]) -> str:
    return _REMEDIES[fault.mark].format(who=_who(fault.rows, ids))


def _who(rows: Sequence[int], ids: dict[int, Any]) -> str:
    names = [f"id {ids[row]}" if row in ids else f"position {row}" for row in rows]
    return f"the record(s) with {fold(list(dict.fromkeys(names)))}" if names else "the records of this batch"
