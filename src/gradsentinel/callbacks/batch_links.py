"""Which field is looked up where, and what was looked up in vain."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

_MOST_HARMLESS = 256
"""So many numbers that did no harm are remembered of a field and a table."""
_MOST_AT_ONCE = 16
"""A field that has more different numbers beyond a table, while those looked up there are lawful, is not
looked up there as it is."""
_RECENT = 32
"""Whether a field is looked up as it is shows in so many micro-batches with it."""
_OFTEN, _SELDOM = 24, 8
"""If numbers beyond the table did no harm in so many of those, nobody listens for them any more, until they
come in fewer than so many."""
_ALL = (1 << _RECENT) - 1
_FEW = 8

_NARROW = (torch.uint8, torch.int8, torch.int16)
"""These do not hold the sizes of all tables, nor each `ignore_index`."""


def widened(values: Tensor) -> Tensor:
    """Return integers in a type in which they compare with any number as they should."""
    return values.to(torch.int64) if values.dtype in _NARROW else values


def beyond(values: Tensor, size: int, ignore: int | None) -> Tensor:
    """Return which numbers are neither from 0 to below the size, nor left out; no wait."""
    values = widened(values)
    bad = (values < 0) | (values >= size)
    return bad if ignore is None else bad & (values != ignore)


def within(numbers: Tensor, size: int, ignore: int | None) -> Tensor:
    """Return the numbers, each one beyond the table replaced by the next one that is not; no wait."""
    narrow = torch.iinfo(numbers.dtype)
    last = min(size - 1, narrow.max)
    instead = numbers.clamp(0, last)
    if ignore is None or 0 <= ignore <= last or not narrow.min <= ignore <= narrow.max:
        return instead
    return torch.where(numbers == ignore, numbers, instead)


@dataclass(slots=True)
class Miss:
    """A look-up of a number that the table has not."""

    numbers: Tensor
    """As they were given, on the host or on the device."""
    size: int
    source: str
    """What has so many rows or classes, in words."""
    ignore: int | None
    flag: Tensor | None = None
    """0-dim bool on the device: is it one at all? None: it is."""

    def where(self, values: Tensor) -> Tensor:
        """Return which of these values are beyond the table."""
        return beyond(values, self.size, self.ignore)

    def is_one(self) -> bool:
        """Say whether the numbers are those of the batch, and beyond; waits for the device."""
        return self.flag is None or bool(self.flag)


@dataclass(slots=True)
class Misses:
    """What was looked up beyond the tables during one micro-batch."""

    flag: Tensor
    """0-dim bool on the run's device, true as soon as there is one."""
    found: list[Miss] = field(default_factory=list)

    def add(self, miss: Miss) -> None:
        """Take in one more; no wait."""
        self.found.append(miss)
        if miss.flag is None:
            self.flag.fill_(True)
        else:
            self.flag.logical_or_(miss.flag.to(self.flag.device, non_blocking=True))


@dataclass(slots=True)
class Link:
    """A field whose numbers are looked up in a table, as far as it seems."""

    size: int
    ignore: int | None
    shift: int
    """What the model adds to the numbers first."""
    harmless: set[int] = field(default_factory=set)
    """Numbers beyond the table that came, and were not looked up there."""
    recent: int = 0
    """A bit for each of the newest micro-batches, the newest last: 1 where new numbers did no harm."""
    refuted: bool = False
    """True if it seems that the field is not looked up there after all, or not as it is."""

    def suspects(self, values: Tensor, low: float, high: float) -> set[int]:
        """Return which numbers of the next micro-batch, from `low` to `high`, are to be listened for."""
        self.recent = self.recent << 1 & _ALL
        if low + self.shift >= 0 and high + self.shift < self.size:
            strange = False
        elif not self.refuted:
            return self.strangers(values)
        else:
            strange = True
        if self.refuted:
            self.recent |= strange
            self.refuted = self.recent.bit_count() >= _SELDOM
        return set()

    def spare(self, numbers: set[int]) -> None:
        """Hear that these of the newest micro-batch did no harm."""
        if len(self.harmless) + len(numbers) > _MOST_HARMLESS:
            self.harmless.clear()
        self.harmless.update(islice(numbers, _MOST_HARMLESS))
        self.recent |= 1
        self.refuted = self.recent.bit_count() >= _OFTEN

    def begin(self, values: Tensor) -> None:
        """Learn from the micro-batch that made the link, in which nothing was looked up in vain."""
        strangers = self.strangers(values)
        if len(strangers) > _MOST_AT_ONCE:
            self.recent, self.refuted = _ALL, True
        elif strangers:
            self.spare(strangers)

    def strangers(self, values: Tensor) -> set[int]:
        """Return the numbers on the host that may be beyond the table; waits for nothing."""
        values = widened(values)
        bad = (values < -self.shift) | (values >= self.size - self.shift)
        if self.ignore is not None:
            bad &= values != self.ignore
        for lawful in islice(self.harmless, _FEW):  # not to sort what is in each batch
            bad &= values != lawful
        return set(torch.unique(values[bad]).tolist()) - self.harmless if bool(bad.any()) else set()
