"""What the model looks up of a batch, and how a number beyond every row is kept from it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_calls import Calls
from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.callbacks.batch_links import Link, Miss, Misses, within
from gradsentinel.callbacks.batch_matches import Matches, Values, apart, equal, near_in_size
from gradsentinel.callbacks.batch_reading import Reading
from gradsentinel.callbacks.batch_tables import Tables
from gradsentinel.callbacks.peaks import anything_compiled
from gradsentinel.host import Host

logger = logging.getLogger("gradsentinel")

_LEARN, _MOST_TRIES = 4, 64
"""A field is listened for until it was looked up in so many micro-batches, and in at most so many."""
_MOST_FIELDS = 256


@dataclass(slots=True)
class Lookups:
    """Hears the look-ups of a micro-batch that may have bad numbers, and gives the table others instead.

    Nothing is replaced in most steps. The first micro-batches with a field show in which tables its numbers
    may be looked up; from then on the look-ups are heard where such a field has a number that the table has
    not. Only what is in fact looked up counts, in a table of the watched model or among the classes of a
    loss, and only if it is of the micro-batch: a model may clamp, hash or replace a number before, and the
    loop may have other models, trainings and data. Where numbers come on a device the host would have to wait
    for them, so there each look-up is heard, and what is beyond the table is replaced and flagged there.
    """

    host: Host
    replaces: bool
    """False leaves a number that no table has to the model, and only notes it."""
    _misses: Misses | None = None
    """Of the micro-batch that is on its way; None: nobody listens."""
    calls: Calls = field(init=False)
    _tables: Tables = field(init=False)
    _links: dict[str, dict[str, Link]] = field(default_factory=dict)
    """By the path of the field and what has the rows."""
    _seen: dict[str, int] = field(default_factory=dict)
    """In how many of the micro-batches that were heard a field was looked up, as it seems."""
    _tried: dict[str, int] = field(default_factory=dict)
    """How many micro-batches with a field were heard to see that."""
    _matches: Matches = field(default_factory=Matches)
    _present: list[tuple[Field, Tensor, float, float]] = field(default_factory=list)
    """The integer fields on the host, with their smallest and largest number."""
    _unknown: list[str] = field(default_factory=list)
    """The fields of this micro-batch of which it is yet to be seen."""
    _linked: set[str] = field(default_factory=set)
    """Those that were looked up during this micro-batch, as it seems."""
    _suspects: list[tuple[str, str, set[int]]] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)
    """What was looked into during this micro-batch."""
    _told: bool = False

    def __post_init__(self) -> None:
        self._tables = Tables(self.host)
        self.calls = Calls(self, self._tables.spread)

    # -- around a micro-batch --------------------------------------------------------------------------

    def begin(
        self, fields: Values, sheets: Sequence[tuple[Reading, Sequence[float]]], *, insist: bool
    ) -> Misses | None:
        """Listen to a micro-batch if need be; return where its misses are going to be, else None; no wait.

        `sheets` is what was measured on the host, with its numbers; `insist` says that one was found outside
        of a given range.
        """
        self.end()
        if self._tables.moved():
            self._find()
        self._present = [(*fields[place], low, high) for place, low, high in _integers(sheets)]
        elsewhere = insist
        for one, _ in fields:
            if one.device.type != "cpu" and _is_integer(one):
                elsewhere = True
        self._unknown = [one.path for one, *_ in self._present if not self._knows_enough(one.path)]
        self._suspects = list(self._find_suspects())
        if not (elsewhere or self._unknown or self._suspects):
            return None
        if len(self._tried) > _MOST_FIELDS:
            self._forget()
        self._matches.take([(one, values) for one, values in fields if _is_integer(one)])
        self._misses = misses = Misses(torch.zeros((), dtype=torch.bool, device=self.host.device))
        functions = not anything_compiled()
        if not functions and not self._told:
            self._told = True
            logger.warning(
                "torch.compile or torch.export is at work in this process, so nobody listens to what is "
                "looked up: an id beyond a table is not kept from it; say what is lawful by "
                "BatchCallback(ranges={'input_ids': (0, 50257)})"
            )
        self.calls.begin(functions=functions)
        return misses

    def end(self) -> None:
        """Listen no more; what was suspected and did no harm is remembered as that."""
        misses, self._misses = self._misses, None
        if misses is None:
            return
        self.calls.end()
        for path in self._unknown:
            self._tried[path] = self._tried.get(path, 0) + 1
            self._seen[path] = self._seen.get(path, 0) + (path in self._linked)
        if not any(miss.flag is None for miss in misses.found):
            for path, source, strangers in self._suspects:
                link = self._links.get(path, {}).get(source)
                if link is not None and source in self._asked:
                    link.spare(strangers)
        self._matches.take(())
        self._suspects, self._present, self._unknown = [], [], []
        self._asked.clear()
        self._linked.clear()

    def looks_up(self, numbers: Tensor, size: int, table: Any, ignore: int | None) -> Tensor | None:
        """Hear of a look-up; return what to look up instead, or None; no wait."""
        misses = self._misses
        source = None if size < 1 or misses is None else self._source(table, size)
        if source is None or misses is None:
            return None
        self._asked.add(source)
        if numbers.device.type == "cpu":
            miss, instead = self._look(numbers, size, source, ignore)
        else:
            miss, instead = self._look_there(numbers, size, source, ignore)
        if miss is None:
            return None
        misses.add(miss)
        return instead if self.replaces else None

    def _look_there(
        self, numbers: Tensor, size: int, source: str, ignore: int | None
    ) -> tuple[Miss | None, Tensor]:
        """Return what may be a miss on a device, and what to look up instead then; no wait."""
        self._learn(numbers, None, size, source, ignore)
        wrong = self._matches.on_device(numbers, size, ignore)
        if wrong is None:
            return None, numbers
        instead = torch.where(wrong, within(numbers, size, ignore), numbers)
        return Miss(numbers, size, source, ignore, wrong.any()), instead

    def _look(
        self, numbers: Tensor, size: int, source: str, ignore: int | None
    ) -> tuple[Miss | None, Tensor]:
        """Return a miss of numbers on the host, if they are the batch's, and what to look up then."""
        low, high = (int(number) for number in torch.aminmax(numbers))
        inside = low >= 0 and high < size
        instead = numbers if inside else within(numbers, size, ignore)
        bad = instead != numbers
        if inside or not bool(bad.any()):
            self._learn(numbers, (low, high), size, source, ignore)
            return None, numbers
        shifts = {path: {link.shift for link in links.values()} for path, links in self._links.items()}
        mine = self._matches.on_host(numbers, bad, shifts)
        for path, shift in mine:
            self._links.setdefault(path, {}).setdefault(source, Link(size, ignore, shift))
            self._linked.add(path)
        return Miss(numbers.clone(), size, source, ignore) if mine else None, instead

    def holds(self, numbers: Tensor) -> bool:
        """Say whether these are the numbers of a field of the micro-batch, one by one; no wait."""
        return self._misses is not None and self._matches.hold(numbers)

    # -- which field is looked up where ----------------------------------------------------------------

    def _knows_enough(self, path: str) -> bool:
        return self._seen.get(path, 0) >= _LEARN or self._tried.get(path, 0) >= _MOST_TRIES

    def _find_suspects(self) -> Iterator[tuple[str, str, set[int]]]:
        for one, values, low, high in self._present:
            for source, link in self._links.get(one.path, {}).items():
                strangers = link.suspects(values, low, high)
                if strangers:
                    yield one.path, source, strangers

    def _learn(
        self, numbers: Tensor, ends: tuple[int, int] | None, size: int, source: str, ignore: int | None
    ) -> None:
        """Link the fields that these numbers may be of; a wrong link costs a closer look now and then.

        `ends` are the smallest and the largest of the numbers, which are lawful; None: nobody knows.
        """
        those = [one for one in self._present if near_in_size(one[0].numel, numbers.numel())]
        if ends is not None:
            those = [one for one in those if equal(one[1], numbers)] or those
        for one, values, low, high in those:
            links = self._links.setdefault(one.path, {})
            if source not in links:
                shift = 0
                if ends is not None and not (low <= ends[0] and ends[1] <= high):
                    shift = ends[0] - int(low)
                    if ends[1] - high != shift:
                        continue
                    if one.numel == numbers.numel() and apart(values, numbers) != shift:
                        continue
                links[source] = link = Link(size, ignore, shift)
                link.begin(values)
            self._linked.add(one.path)

    def _find(self) -> None:
        """Find the tables anew, and learn anew what is looked up in them."""
        self.calls.end()
        self._tables.find()
        self.calls = Calls(self, self._tables.spread)
        self._forget()

    def _forget(self) -> None:
        self._seen.clear()
        self._tried.clear()
        self._links.clear()

    def _source(self, table: Any, size: int) -> str | None:
        """Return in words what has so many rows or classes; None for a table of another model."""
        if table is None:
            return f"the {size} classes that the loss is given"
        name = self._tables.name_of(table)
        if name is None:
            return None
        return f"the {size} rows of {name}" if name else f"the {size} rows of an embedding"


def _is_integer(one: Field) -> bool:
    return not one.is_float and one.dtype is not torch.bool and not one.empty


def _integers(sheets: Sequence[tuple[Reading, Sequence[float]]]) -> Iterator[tuple[int, float, float]]:
    """Yield the place, the smallest and the largest number of each integer field that was measured."""
    for reading, sheet in sheets:
        plan = reading.plan
        for number, place in plan.integers:
            at = plan.pair(number)
            yield place, sheet[at], sheet[at + 1]
