"""The numbers of a batch, taken on the device it is on, in a few launches and without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.callbacks.batch_links import widened
from gradsentinel.callbacks.batch_reading import Plan, Reading

_PER_RECORD, _IN_ALL = 256, 1 << 16
"""So many numbers of a record, and of a field, are enough for statistics."""
_MASKED_OUT = -1e4
"""Additive masks are lower than this."""
_MOST_PLANS = 64
"""So many are kept: batches of texts come in many shapes, which come again."""

_Key = tuple[tuple[int, ...], frozenset[str], bool]


@dataclass(slots=True)
class Meter:
    """Measures batches."""

    ignore_index: int
    """The label that is not counted."""
    _before: dict[torch.device, Tensor] = field(default_factory=dict)
    """A code for each record of the batch before."""
    _weights: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)
    _plans: dict[_Key, list[Plan]] = field(default_factory=dict)
    """By the identity of the fields, which the plans hold on to: a field has one type, device and shape."""

    def measure(
        self, fields: Sequence[tuple[Field, Tensor]], *, allowed: frozenset[str], statistics: bool
    ) -> list[Reading]:
        """Return one reading per device. `allowed` are paths of fields that may hold NaN and Inf.

        The values are without a graph, as `plain_values` gives them. A field is one object as long as its
        type, device and shape are the same, as a `Reader` has it: what is measured is laid out once for it.
        """
        key = tuple([id(one) for one, _ in fields]), allowed, statistics
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plans = self._plans[key] = self._lay_out(
                [one for one, _ in fields], allowed, statistics=statistics
            )
        return [self._measure(plan, fields) for plan in plans]

    def _lay_out(self, fields: list[Field], allowed: frozenset[str], *, statistics: bool) -> list[Plan]:
        """Return what to measure on each device."""
        by_device: dict[torch.device, list[int]] = {}
        for place, one in enumerate(fields):
            if not one.empty:
                by_device.setdefault(one.device, []).append(place)
        return [Plan(fields, places, self.ignore_index, allowed, statistics) for places in by_device.values()]

    def _measure(self, plan: Plan, fields: Sequence[tuple[Field, Tensor]]) -> Reading:
        parts: list[Tensor] = []
        outside: list[Tensor] = []
        if plan.flagged:
            flags = [_outside(*fields[place], self.ignore_index) for place in plan.judged]
            outside = [
                flag for place, flag in zip(plan.judged, flags, strict=True) if plan.fields[place].is_given
            ]
            flags += [fully_masked_rows(*fields[place]).any() for place in plan.masks]
            parts.append(torch.stack(flags))
        ranges: list[Tensor] = []
        for number, place in enumerate(plan.places):
            values = fields[place][1]
            if number and number == plan.floats:  # the integers have a type of their own
                parts.append(torch.stack(ranges))
                ranges = []
            ranges += torch.aminmax(values.view(torch.uint8) if values.dtype is torch.bool else values)
        parts.append(torch.stack(ranges))
        if plan.main is not None:
            moments = [
                x for place in plan.large for x in torch.var_mean(_sampled(fields[place][1]), correction=0)
            ]
            parts += [torch.stack(moments)] if moments else []
            parts.append(self._compare(fields[plan.main][1], plan.device))
        wide = plan.wide
        sheet = parts[0].to(wide) if len(parts) == 1 else torch.cat([part.to(wide) for part in parts])
        return Reading(plan, sheet, outside)

    def _compare(self, values: Tensor, device: torch.device) -> Tensor:
        """Compare the records with each other and with those of the batch before.

        By a weighted sum of a few numbers of each: what looks alike is compared in full when it is told.
        """
        rows = _sampled_rows(values).to(torch.float32)
        codes = (rows * self._weights_for(rows)).sum(1)
        before = self._before.get(device)
        self._before[device] = codes
        if before is not None and before.shape == codes.shape:
            alike = (before == codes).all()
        else:
            alike = torch.zeros((), dtype=torch.int64, device=device)
        ordered = torch.sort(codes).values
        low, high = torch.aminmax(rows, dim=1)
        copies, constant = (ordered[1:] == ordered[:-1]).sum(), (low == high).sum()
        return torch.stack([alike, copies, constant])

    def _weights_for(self, rows: Tensor) -> Tensor:
        """Numbers without a pattern between 1 and 2, the same ones for every batch."""
        key = (rows.device, rows.shape[1])
        if key not in self._weights:
            place = torch.arange(rows.shape[1], device=rows.device, dtype=torch.float32)
            self._weights = {key: torch.remainder(torch.sin(place + 1.0) * 43758.5453, 1.0) + 1.0}
        return self._weights[key]


def _outside(one: Field, values: Tensor, ignore_index: int) -> Tensor:
    """Return whether a number is outside of its range, 0-dim bool; a label that is left out is not."""
    bound = one.bound
    if bound is None:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    values = widened(values)
    bad = (values < bound.low) | (values >= bound.high)
    return (bad & (values != ignore_index) if one.role == "labels" else bad).any()


def fully_masked_rows(one: Field, values: Tensor) -> Tensor:
    """Return which records have no position left, 1-dim bool, on the device; no wait."""
    if not one.is_float:
        held = values if values.dtype is torch.bool else values != 0
        return held.any(1).logical_not() if one.role == "kept" else held.all(1)
    largest = values.amax(1)
    added = largest < _MASKED_OUT  # to the scores
    if one.role == "padded":
        return added
    # Factors of 0 and 1: then some are above 0, and none below.
    factors = (values.amin() >= 0) & (values.amax() > 0)
    return torch.where(factors, largest == 0, added)


def _is_dense(values: Tensor) -> bool:
    """Return True if the elements fill a piece of memory, in whatever order (as channels_last images do)."""
    reach = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return reach + 1 == values.numel()


def _sampled(values: Tensor) -> Tensor:
    """Some numbers of a field, without copying all of it."""
    count = values.numel()
    flat = values.as_strided((count,), (1,)) if _is_dense(values) else values.reshape(-1)
    return flat[:: max(1, count // _IN_ALL)].to(torch.float32)


def _sampled_rows(values: Tensor) -> Tensor:
    """Some numbers of each record, the same ones of each."""
    records = values.shape[0]
    width = values.numel() // records
    if _is_dense(values) and values.stride(0) == width:
        rows = values.as_strided((records, width), (width, 1))
    else:
        rows = values.reshape(records, width)
    return rows[:, :: max(1, width // _PER_RECORD)]
