"""What was measured of a batch: how its numbers are laid out, and what they say once they are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.devices import device_of

NONFINITE, OUT_OF_RANGE, BEYOND, IGNORED, MASKED, UNSELECTED, EMPTY = (
    *("nonfinite", "out_of_range", "beyond_table", "ignored", "masked", "unselected", "empty"),
)
"""What can be wrong with a batch by itself; out of a range that was given, or beyond a table of the model."""
_INF = float("inf")

Mark = tuple[str, str]
"""What is wrong, and the path of the field."""


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


@dataclass(frozen=True, slots=True)
class Demand:
    """What the smallest and the largest number of a field must not both be."""

    place: int
    """Where in the sheet the smallest is; the largest follows."""
    path: str
    finite: bool
    """True if neither may be NaN or infinite."""
    counted: bool
    """True if they may be labels, not all of which may be left out."""
    selects: bool
    """True if not all numbers may be 0."""


@dataclass(slots=True)
class Plan:
    """What is measured of the fields of a batch that are on one device, and where its numbers stand.

    Laid out once for fields that stay the same from batch to batch. The sheet holds, in this order: flags,
    smallest and largest number of each floating-point field, the same of each integer field, and, with
    statistics, variance and mean of each large floating-point field, and three numbers of the records.
    """

    fields: Sequence[Field]
    """All fields of the batch, on other devices too."""
    places: Sequence[int]
    """Those of them that are measured here: the floating-point ones first, then the integers."""
    ignore_index: int
    allowed: frozenset[str]
    """Paths of fields that may hold NaN and Inf."""
    statistics: bool
    device: torch.device = field(init=False)
    on_host: bool = field(init=False)
    """True if the fields are in host memory."""
    wide: torch.dtype = field(init=False)
    """Of the sheet."""
    floats: int = field(init=False)
    """How many of the fields are floating-point ones."""
    integers: list[tuple[int, int]] = field(init=False)
    """Of the integer fields: which of the measured fields each is, and its place."""
    judged: list[int] = field(init=False)
    """Places of fields whose numbers are compared with their range."""
    masks: list[int] = field(init=False)
    """Places of masks of (sample, position)."""
    flagged: list[Mark] = field(init=False)
    """What the flags mean: of the judged fields, then of the masks."""
    demands: list[Demand] = field(init=False)
    sizes: list[tuple[int, str]] = field(init=False)
    """Where in the sheet the smallest number of each field of numbers is, and its path."""
    large: list[int] = field(init=False)
    """Places of the floating-point fields with statistics."""
    main: int | None = field(init=False)
    """Place of the field whose records are compared; None without statistics."""

    def __post_init__(self) -> None:
        fields, in_order = self.fields, self.places
        self.device = fields[in_order[0]].device
        self.on_host = self.device.type == "cpu"
        self.wide = device_of(self.device).wide
        self.places = sorted(in_order, key=lambda place: not fields[place].is_float)
        self.floats = sum(fields[place].is_float for place in in_order)
        self.integers = [
            (number, place)
            for number, place in enumerate(self.places)
            if not fields[place].is_float and fields[place].dtype is not torch.bool
        ]
        self.judged = [place for place in in_order if fields[place].is_judged]
        self.masks = [place for place in in_order if fields[place].role in {"kept", "padded"}]
        self.flagged = [
            (OUT_OF_RANGE if fields[place].is_given else BEYOND, fields[place].path) for place in self.judged
        ] + [(MASKED, fields[place].path) for place in self.masks]
        ordered = [(self.pair(number), fields[place]) for number, place in enumerate(self.places)]
        demands = [
            Demand(
                place=at,
                path=one.path,
                finite=one.is_float and one.path not in self.allowed,
                counted=one.is_counted,
                selects=one.role == "selects",
            )
            for at, one in ordered
        ]
        self.demands = [one for one in demands if one.finite or one.counted or one.selects]
        self.sizes = [(at, one.path) for at, one in ordered if one.is_float and one.sized]
        chosen = [place for place in in_order if self.statistics and fields[place].large]
        self.large = [place for place in chosen if fields[place].is_float]
        self.main = max(chosen, key=lambda place: (fields[place].is_float, fields[place].numel), default=None)

    def pair(self, number: int) -> int:
        """Return where in the sheet the smallest number of a measured field is; the largest follows."""
        return len(self.flagged) + 2 * number


@dataclass(slots=True)
class Reading:
    """What was measured of a micro-batch on one device."""

    plan: Plan
    sheet: Tensor
    """All numbers for the host, 1-dim."""
    outside: Sequence[Tensor] = ()
    """0-dim bool, one for each field with a given range: is a number outside?"""

    def suspicion(self) -> Tensor | None:
        """Return whether something may be wrong, 0-dim bool, on the device; no wait.

        Never False if something is; True too where a mask holds -inf. None if nothing can be wrong.
        """
        plan, sheet = self.plan, self.sheet
        found = []
        finite = [at for one in plan.demands if one.finite for at in (one.place, one.place + 1)]
        if finite:
            found.append(torch.isfinite(_at(sheet, finite)).all().logical_not())
        for number, places in (
            (plan.ignore_index, [one.place for one in plan.demands if one.counted]),
            (0, [one.place for one in plan.demands if one.selects]),
        ):
            if places:
                pairs = _at(sheet, [at for place in places for at in (place, place + 1)])
                found.append((pairs.view(-1, 2) == number).all(1).any())
        if plan.flagged:
            found.append((sheet[: len(plan.flagged)] != 0).any())
        return torch.stack(found).any() if found else None

    def marks(self, sheet: Sequence[float]) -> list[Mark]:
        """Return what is wrong, once the sheet is on the host."""
        plan = self.plan
        found = [mark for mark, flag in zip(plan.flagged, sheet, strict=False) if flag]
        for one in plan.demands:
            low, high = sheet[one.place], sheet[one.place + 1]
            if one.finite and _is_bad(low, high):
                found.append((NONFINITE, one.path))
            if one.counted and low == high == plan.ignore_index:
                found.append((IGNORED, one.path))
            if one.selects and low == high == 0:
                found.append((UNSELECTED, one.path))
        return found

    def statistics(self, sheet: Sequence[float]) -> list[Statistics]:
        """Return the statistics of the fields that are large enough, once the sheet is on the host."""
        plan = self.plan
        if plan.main is None:
            return []
        first = len(sheet) - 3 - 2 * len(plan.large)
        floats: list[Statistics] = []
        integers: list[Statistics] = []
        for number, place in enumerate(plan.places):
            one, at = plan.fields[place], plan.pair(number)
            if not one.large:
                continue
            if one.is_float:
                moments = first + 2 * len(floats)
                floats.append(
                    Statistics(one.path, sheet[at], sheet[at + 1], sheet[moments + 1], sheet[moments])
                )
            else:
                integers.append(Statistics(one.path, sheet[at], sheet[at + 1]))
        return floats + integers

    def sizes(self, sheet: Sequence[float]) -> list[tuple[str, float]]:
        """Return path and largest magnitude of each field of numbers, once the sheet is on the host."""
        return [(path, max(abs(sheet[at]), abs(sheet[at + 1]))) for at, path in self.plan.sizes]

    def rows(self, sheet: Sequence[float]) -> Rows | None:
        """Return how the records compare, once the sheet is on the host."""
        plan = self.plan
        if plan.main is None:
            return None
        alike, copies, constant = sheet[-3:]
        main = plan.fields[plan.main]
        return Rows(main.path, bool(alike), copies / (main.records - 1), constant / main.records)


def _at(sheet: Tensor, places: Sequence[int]) -> Tensor:
    """Some numbers of a sheet, 1-dim; views of it and one launch, and nothing that is sent."""
    return torch.stack([sheet[place] for place in places])


def _is_bad(low: float, high: float) -> bool:
    """True for NaN and +inf, and for -inf where something is positive: elsewhere it masks."""
    return not high < _INF or (low == -_INF and high > 0)
