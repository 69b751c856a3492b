"""The numbers of a batch, taken on the device it is on, in a few launches and without a wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.devices import device_of

NONFINITE, OUT_OF_RANGE, BEYOND, IGNORED, MASKED, UNSELECTED, EMPTY = (
    *("nonfinite", "out_of_range", "beyond_table", "ignored", "masked", "unselected", "empty"),
)
"""What can be wrong with a batch by itself; out of a range that was given, or beyond a table of the model."""
_PER_RECORD, _IN_ALL = 256, 1 << 16
"""So many numbers of a record, and of a field, are enough for statistics."""
_MASKED_OUT = -1e4
"""Additive masks are lower than this."""
_INF = float("inf")

Mark = tuple[str, str]
"""What is wrong, and the path of the field."""
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was measured of a field, on the host."""

    path: str
    low: float
    high: float
    mean: float | None = None
    """None for integers."""
    variance: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """How the records compare, on the host."""

    path: str
    """The field that was compared."""
    alike: bool
    """True if they are those of the batch before."""
    copies: float
    """Share of them that are copies of others."""
    constant: float
    """Share of them that are one number from end to end."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What was measured of a micro-batch on one device."""

    floats: list[Field]
    integers: list[Field]
    large: list[Field]
    """The floating-point fields with statistics."""
    flagged: list[Mark]
    bad: Tensor | None
    """0-dim bool: something may be wrong; never False if something is. None if nothing can be."""
    outside: list[Tensor]
    """0-dim bool, one for each field with a given range: is a number outside?"""
    sheet: Tensor
    """All numbers for the host, 1-dim."""
    main: Field | None
    records: int
    allowed: frozenset[str]
    ignore_index: int

    def marks(self, sheet: Sequence[float]) -> list[Mark]:
        """Return what is wrong, once the sheet is on the host."""
        flags = sheet[: len(self.flagged)]
        found = [mark for mark, flag in zip(self.flagged, flags, strict=True) if flag]
        for one, (low, high) in self._ranges(sheet).items():
            if one.is_float:
                if one.path not in self.allowed and _is_bad(low, high):
                    found.append((NONFINITE, one.path))
            elif one.role in {"labels", "integer"} and low == high == self.ignore_index and one.is_counted:
                found.append((IGNORED, one.path))
            if one.role == "selects" and low == high == 0:
                found.append((UNSELECTED, one.path))
        return found

    def statistics(self, sheet: Sequence[float]) -> list[Statistics]:
        """Return the statistics of the fields that are large enough, once the sheet is on the host."""
        if self.main is None:
            return []
        ranges = self._ranges(sheet)
        first = len(sheet) - 3 - 2 * len(self.large)
        found = [
            Statistics(one.path, *ranges[one], sheet[first + 2 * n + 1], sheet[first + 2 * n])
            for n, one in enumerate(self.large)
        ]
        return found + [
            Statistics(one.path, *pair) for one, pair in ranges.items() if one.large and not one.is_float
        ]

    def sizes(self, sheet: Sequence[float]) -> list[tuple[str, float]]:
        """Return path and largest magnitude of each field of numbers, once the sheet is on the host."""
        return [(path, max(abs(sheet[at]), abs(sheet[at + 1]))) for at, path in self.places()]

    def places(self) -> list[tuple[int, str]]:
        """Return where in the sheet the smallest number of each field of numbers is; the largest follows."""
        first = len(self.flagged)
        return [(first + 2 * number, one.path) for number, one in enumerate(self.floats) if one.sized]

    def rows(self, sheet: Sequence[float]) -> Rows | None:
        """Return how the records compare, once the sheet is on the host."""
        if self.main is None:
            return None
        alike, copies, constant = sheet[-3:]
        return Rows(self.main.path, bool(alike), copies / (self.records - 1), constant / self.records)

    def _ranges(self, sheet: Sequence[float]) -> dict[Field, tuple[float, float]]:
        first, count = len(self.flagged), len(self.floats)
        pairs = [(sheet[at], sheet[at + 1]) for at in range(first, first + 2 * count, 2)]
        first += 2 * count
        pairs += [(sheet[at], sheet[at + 1]) for at in range(first, first + 2 * len(self.integers), 2)]
        return dict(zip([*self.floats, *self.integers], pairs, strict=True))


@dataclass(slots=True)
class Meter:
    """Measures batches."""

    ignore_index: int
    """The label that is not counted."""
    _before: dict[torch.device, Tensor] = field(default_factory=dict)
    """A code for each record of the batch before."""
    _weights: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def measure(
        self, fields: Sequence[tuple[Field, Tensor]], *, allowed: Collection[str], statistics: bool
    ) -> list[Reading]:
        """Return one reading per device. `allowed` are paths of fields that may hold NaN and Inf."""
        by_device: dict[torch.device, list[tuple[Field, Tensor]]] = {}
        for one, values in fields:
            if not one.empty:
                by_device.setdefault(one.device, []).append((one, values))
        return [
            self._measure(device, present, frozenset(allowed), statistics=statistics)
            for device, present in by_device.items()
        ]

    def _measure(
        self,
        device: torch.device,
        present: Sequence[tuple[Field, Tensor]],
        allowed: frozenset[str],
        *,
        statistics: bool,
    ) -> Reading:
        floats: dict[Field, Pair] = {}
        integers: dict[Field, Pair] = {}
        for one, values in present:
            pair = torch.aminmax(values.view(torch.uint8) if values.dtype is torch.bool else values)
            (floats if one.is_float else integers)[one] = pair
        suspicions = self._suspicions(floats, integers, allowed)
        outside = [_outside(one, values, self.ignore_index) for one, values in _judged(present)]
        masked = [
            (one, fully_masked_rows(one, values).any())
            for one, values in present
            if one.role in {"kept", "padded"}
        ]
        flags = [*outside, *(flag for _, flag in masked)]
        suspicions += flags
        chosen = [(one, values) for one, values in present if statistics and one.large]
        main = max(chosen, key=lambda entry: (entry[0].is_float, entry[1].numel()), default=None)
        large = [(one, values) for one, values in chosen if one.is_float]
        parts = [torch.stack(flags)] if flags else []
        parts += [
            torch.stack([x for pair in group.values() for x in pair]) for group in (floats, integers) if group
        ]
        if main is not None:
            moments = [x for _, values in large for x in torch.var_mean(_sampled(values), correction=0)]
            parts += [torch.stack(moments)] if moments else []
            parts.append(self._compare(main[1], device))
        wide = device_of(device).wide
        return Reading(
            floats=list(floats),
            integers=list(integers),
            large=[one for one, _ in large],
            flagged=[(OUT_OF_RANGE if one.is_given else BEYOND, one.path) for one, _ in _judged(present)]
            + [(MASKED, one.path) for one, _ in masked],
            bad=torch.stack(suspicions).any() if suspicions else None,
            outside=[flag for (one, _), flag in zip(_judged(present), outside, strict=True) if one.is_given],
            sheet=parts[0].to(wide) if len(parts) == 1 else torch.cat([part.to(wide) for part in parts]),
            main=None if main is None else main[0],
            records=0 if main is None else main[1].shape[0],
            allowed=allowed,
            ignore_index=self.ignore_index,
        )

    def _suspicions(
        self, floats: dict[Field, Pair], integers: dict[Field, Pair], allowed: frozenset[str]
    ) -> list[Tensor]:
        """Return what may be wrong with the ranges: more than is, where a mask holds -inf."""
        found = []
        finite = [x for one, pair in floats.items() if one.path not in allowed for x in pair]
        if finite:
            found.append(torch.isfinite(torch.stack(finite)).all().logical_not())
        labels = [x for one, pair in integers.items() if one.is_counted for x in pair]
        if labels:
            found.append((torch.stack(labels).view(-1, 2) == self.ignore_index).all(1).any())
        selects = [
            x for one, pair in (*floats.items(), *integers.items()) if one.role == "selects" for x in pair
        ]
        if selects:
            found.append((torch.stack(selects).view(-1, 2) == 0).all(1).any())
        return found

    def _compare(self, values: Tensor, device: torch.device) -> Tensor:
        """Compare the records with each other and with those of the batch before.

        By a weighted sum of a few numbers of each: what looks alike is compared in full when it is told.
        """
        rows = _sampled_rows(values).to(torch.float32)
        codes = (rows * self._weights_for(rows)).sum(1)
        before = self._before.get(device)
        self._before[device] = codes
        alike = torch.zeros((), dtype=torch.int64, device=device)
        if before is not None and before.shape == codes.shape:
            alike = (before == codes).all()
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


def _judged(present: Sequence[tuple[Field, Tensor]]) -> list[tuple[Field, Tensor]]:
    return [(one, values) for one, values in present if one.is_judged]


def _is_bad(low: float, high: float) -> bool:
    """True for NaN and +inf, and for -inf where something is positive: elsewhere it masks."""
    return not high < _INF or (low == -_INF and high > 0)


def _outside(one: Field, values: Tensor, ignore_index: int) -> Tensor:
    """Return whether a number is outside of its range, 0-dim bool; a label that is left out is not."""
    bound = one.bound
    if bound is None:
        return torch.zeros((), dtype=torch.bool, device=values.device)
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
