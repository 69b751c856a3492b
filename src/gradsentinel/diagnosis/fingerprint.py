"""What a batch looks like in a few numbers, and how it differs from the healthy ones before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.data.records import ID_FIELDS
from gradsentinel.measures.inspection import parts_of, values_of
from gradsentinel.state.tree import tensors_in

_TOLD = 2
"""Differences that are told; more would bury the first."""
_LARGER = 10.0
"""So many times the usual range is another range."""
_SHARE = 0.25
"""A share of zeros that differs by so much is told."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a batch in numbers, or the same tensor of several batches."""

    dtype: torch.dtype
    shapes: frozenset[tuple[int, ...]]
    """Without the first dimension."""
    numel: int
    low: float
    high: float
    """Range of the finite values; low > high if there is none."""
    mean: float
    zeros: float
    """Share of exact zeros (of False, in a mask)."""
    nonfinite: int

    @property
    def constant(self) -> bool:
        """True if all values are the same one."""
        return self.numel > 1 and self.low == self.high and not self.nonfinite

    @property
    def largest(self) -> float:
        """Largest finite magnitude."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0


@torch.no_grad()
def fingerprint(batch: Any) -> dict[str, Field]:
    """Return the fields of a batch by path; waits for the device."""
    found = {}
    for path, tensor in tensors_in(batch):
        with suppress(RuntimeError, TypeError, NotImplementedError):  # not every layout has every reduction
            if tensor.device.type != "meta":
                found[path] = _field(tensor)
    return found


def what_is_different(batch: Any, healthy: Iterable[Any]) -> str:
    """Say in one sentence how a batch differs from healthy ones; empty if nothing is striking.

    Args:
        batch: the one that went wrong.
        healthy: those of the last step that was applied, and others of the same step that were finite.
    """
    usual = _together([fingerprint(each) for each in healthy])
    if not usual:
        return ""
    mine = fingerprint(batch)
    mine = {path: field for path, field in mine.items() if path.rpartition(".")[2] not in ID_FIELDS}
    found = [difference for path in mine for difference in _differences(path, mine[path], usual.get(path))]
    missing = [path for path in usual if path not in mine and path.rpartition(".")[2] not in ID_FIELDS]
    if missing:
        found.append((80.0, f"has no {' and no '.join(missing[:_TOLD])}"))
    striking = [text for _, text in sorted(found, key=lambda entry: -entry[0])[:_TOLD]]
    return (
        f"unlike the batches of the last healthy step, this one {', and '.join(striking)}" if striking else ""
    )


def _field(tensor: Tensor) -> Field:
    values = parts_of(values_of(tensor)).detach()
    if values.dtype is torch.bool or not values.is_floating_point():
        values = values.double()
    finite = values[torch.isfinite(values)].double()
    some = finite.numel() > 0
    return Field(
        dtype=tensor.dtype,
        shapes=frozenset([tuple(tensor.shape[1:])]),
        numel=tensor.numel(),
        low=float(finite.min()) if some else 1.0,
        high=float(finite.max()) if some else 0.0,
        mean=float(finite.mean()) if some else 0.0,
        zeros=float((finite == 0).double().mean()) if some else 0.0,
        nonfinite=values.numel() - finite.numel(),
    )


def _together(prints: Sequence[Mapping[str, Field]]) -> dict[str, Field]:
    found: dict[str, Field] = {}
    for fields in prints:
        for path, field in fields.items():
            before = found.get(path)
            found[path] = field if before is None else _merged(before, field)
    return found


def _merged(one: Field, other: Field) -> Field:
    count = max(one.numel + other.numel, 1)
    share = one.numel / count
    known = [field for field in (one, other) if field.low <= field.high]
    return Field(
        dtype=one.dtype,
        shapes=one.shapes | other.shapes,
        numel=one.numel + other.numel,
        low=min((field.low for field in known), default=1.0),
        high=max((field.high for field in known), default=0.0),
        mean=one.mean * share + other.mean * (1 - share),
        zeros=one.zeros * share + other.zeros * (1 - share),
        nonfinite=one.nonfinite + other.nonfinite,
    )


def _differences(path: str, mine: Field, usual: Field | None) -> Iterator[tuple[float, str]]:
    """How striking a difference is, and what it is."""
    name = path or "its tensor"
    if usual is None:
        return
    if mine.dtype != usual.dtype:
        yield 90.0, f"holds {name} as {_name(mine.dtype)} instead of {_name(usual.dtype)}"
    if not mine.numel:
        if usual.numel:
            yield 100.0, f"has nothing in {name}"
        return
    if mine.nonfinite and not usual.nonfinite:
        yield 95.0, f"holds {mine.nonfinite} non-finite value(s) in {name}"
    yield from _ranges(name, mine, usual)
    if mine.shapes != usual.shapes and not mine.shapes <= usual.shapes:
        ours, theirs = (list(next(iter(field.shapes))) for field in (mine, usual))
        varied = len(usual.shapes) > 1  # lengths that change from batch to batch are no news
        if not varied:
            yield 20.0, f"has {ours} in {name} for each record, not {theirs}"


def _ranges(name: str, mine: Field, usual: Field) -> Iterator[tuple[float, str]]:
    boolean = mine.dtype is torch.bool
    if mine.constant and not usual.constant:
        value = str(bool(mine.low)) if boolean else f"{mine.low:.6g}"
        before = f"{1 - usual.zeros:.0%} True" if boolean else f"from {usual.low:.4g} to {usual.high:.4g}"
        yield 85.0, f"holds {value} everywhere in {name} (usually {before})"
        return
    if boolean:
        if abs(mine.zeros - usual.zeros) > _SHARE:
            yield 30.0, f"is {1 - mine.zeros:.0%} True in {name} (usually {1 - usual.zeros:.0%})"
        return
    if mine.largest > _LARGER * usual.largest > 0:
        yield 70.0, f"reaches {mine.largest:.4g} in {name} (usually up to {usual.largest:.4g})"
    if mine.low < 0 <= usual.low:
        yield 60.0, f"goes down to {mine.low:.4g} in {name} (usually never below 0)"
    if mine.zeros and not usual.zeros:
        yield 50.0, f"holds zeros in {name} ({mine.zeros:.1%}, usually none)"
    elif abs(mine.zeros - usual.zeros) > _SHARE:
        yield 40.0, f"is {mine.zeros:.0%} zeros in {name} (usually {usual.zeros:.0%})"
    spread = usual.high - usual.low
    if spread > 0 and abs(mine.mean - usual.mean) > spread and mine.largest <= _LARGER * usual.largest:
        yield 35.0, f"has a mean of {mine.mean:.4g} in {name} (usually {usual.mean:.4g})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
