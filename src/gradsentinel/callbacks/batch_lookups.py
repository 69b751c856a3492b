"""What the model looks up of a batch, and how a number beyond every row is kept from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.callbacks.batch_calls import Calls
from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.callbacks.batch_reading import Reading
from gradsentinel.callbacks.peaks import anything_compiled
from gradsentinel.host import Host

_LEARN = 4
"""Look-ups are heard in so many micro-batches with a field, to see which numbers are looked up where."""
_MOST_HARMLESS = 16
"""A field with more different numbers beyond a table, all of which did no harm, is not looked up there."""
_MOST_FIELDS = 256
_SPREAD = "VocabParallelEmbedding"
"""Megatron's: looks up what is in this rank's rows, and makes 0 of the rest, whatever it is."""

_NARROW = (torch.uint8, torch.int8, torch.int16)
"""These do not hold the sizes of all tables."""

Values = Sequence[tuple[Field, Tensor]]


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
        bad = (values < 0) | (values >= self.size)
        return bad if self.ignore is None else bad & (values != self.ignore)


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
    refuted: bool = False
    """True if it seems that the field is not looked up there after all, or not as it is."""

    def spare(self, numbers: set[int]) -> None:
        """Hear that these came and did no harm."""
        self.harmless |= numbers
        if len(self.harmless) > _MOST_HARMLESS:
            self.refuted = True
            self.harmless.clear()

    def concerns(self, low: float, high: float) -> bool:
        """Say whether a field from `low` to `high` may have a number that is beyond the table."""
        return low + self.shift < 0 or high + self.shift >= self.size

    def strangers(self, values: Tensor) -> set[int]:
        """Return the numbers on the host that may be beyond the table; waits for nothing."""
        if values.dtype in _NARROW:
            values = values.to(torch.int64)
        bad = (values < -self.shift) | (values >= self.size - self.shift)
        for lawful in self.harmless if self.ignore is None else self.harmless | {self.ignore}:
            bad &= values != lawful
        return set(torch.unique(values[bad]).tolist()) if bool(bad.any()) else set()


@dataclass(slots=True)
class Lookups:
    """Hears the look-ups of a micro-batch that may have bad numbers, and gives the table others instead.

    Nothing is replaced in most steps. The first micro-batches with a field show in which tables its numbers
    may be looked up; from then on the look-ups are heard where such a field has a number that the table has
    not. Only what is in fact looked up counts: a model may clamp, hash or replace it before. Where numbers
    come on a device the host would have to wait for them, so there each look-up is heard, and what is beyond
    the table is replaced and flagged there.
    """

    host: Host
    replaces: bool
    """False leaves a number that no table has to the model, and only notes it."""
    _misses: Misses | None = None
    """Of the micro-batch that is on its way; None: nobody listens."""
    _calls: Calls = field(init=False)
    _links: dict[str, dict[str, Link]] = field(default_factory=dict)
    """By the path of the field and what has the rows."""
    _seen: dict[str, int] = field(default_factory=dict)
    """How many micro-batches with a field were heard."""
    _present: list[tuple[Field, Tensor, float, float]] = field(default_factory=list)
    """The integer fields on the host, with their smallest and largest number."""
    _suspects: list[tuple[str, str, set[int]]] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)
    """What was looked into during this micro-batch."""
    _tables: list[tuple[nn.Module, str, nn.Module, int]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)
    _generation: int = -1

    def __post_init__(self) -> None:
        self._find()

    # -- around a micro-batch --------------------------------------------------------------------------

    def begin(self, fields: Values, readings: Sequence[Reading], *, insist: bool) -> Misses | None:
        """Listen to a micro-batch if need be; return where its misses are going to be, else None; no wait.

        `insist` says that a number was found outside of a given range.
        """
        self.end()
        if self._moved():
            self._find()
        self._present = [(*fields[place], low, high) for place, low, high in _integers(readings)]
        elsewhere = insist
        for one, _ in fields:
            if one.device.type != "cpu" and _is_integer(one):
                elsewhere = True
        unknown = [one.path for one, *_ in self._present if self._seen.get(one.path, 0) < _LEARN]
        self._suspects = list(self._find_suspects())
        if not (elsewhere or unknown or self._suspects):
            return None
        if len(self._seen) > _MOST_FIELDS:
            self._seen.clear()
            self._links.clear()
        for path in unknown:
            self._seen[path] = self._seen.get(path, 0) + 1
        self._misses = misses = Misses(torch.zeros((), dtype=torch.bool, device=self.host.device))
        self._calls.begin(functions=not anything_compiled())
        return misses

    def end(self) -> None:
        """Listen no more; what was suspected and did no harm is remembered as that."""
        misses, self._misses = self._misses, None
        if misses is None:
            return
        self._calls.end()
        if not any(miss.flag is None for miss in misses.found):
            for path, source, strangers in self._suspects:
                link = self._links.get(path, {}).get(source)
                if link is not None and source in self._asked:
                    link.spare(strangers)
        self._suspects, self._present = [], []
        self._asked.clear()

    def looks_up(self, numbers: Tensor, size: int, table: Any, ignore: int | None) -> Tensor | None:
        """Hear of a look-up; return what to look up instead, or None; no wait."""
        misses = self._misses
        if size < 1 or misses is None:
            return None
        source = self._source(table, size)
        self._asked.add(source)
        if numbers.device.type != "cpu":
            self._learn(numbers, None, size, source, ignore)
            instead = _within(numbers, size, ignore)
            misses.add(Miss(numbers, size, source, ignore, (instead != numbers).any()))
            return instead if self.replaces else None
        low, high = (int(number) for number in torch.aminmax(numbers))
        if low >= 0 and high < size:
            self._learn(numbers, (low, high), size, source, ignore)
            return None
        instead = _within(numbers, size, ignore)
        if torch.equal(instead, numbers):
            self._learn(numbers, (low, high), size, source, ignore)
            return None
        misses.add(Miss(numbers.clone(), size, source, ignore))
        return instead if self.replaces else None

    def knows(self, table: Any) -> bool:
        """Say whether a weight is one of the model's."""
        return id(table) in self._names

    # -- which field is looked up where ----------------------------------------------------------------

    def _find_suspects(self) -> Iterator[tuple[str, str, set[int]]]:
        for one, values, low, high in self._present:
            for source, link in self._links.get(one.path, {}).items():
                if link.concerns(low, high) and not link.refuted:
                    strangers = link.strangers(values)
                    if strangers:
                        yield one.path, source, strangers

    def _learn(
        self, numbers: Tensor, ends: tuple[int, int] | None, size: int, source: str, ignore: int | None
    ) -> None:
        """Link the fields that these numbers may be of; a wrong link costs a closer look now and then.

        `ends` are the smallest and the largest of the numbers, which are lawful; None: nobody knows.
        """
        for one, values, low, high in self._present:
            count = numbers.numel()
            links = self._links.setdefault(one.path, {})
            if source in links or not (one.numel <= 2 * count and count <= 2 * one.numel):
                continue
            shift = 0
            if ends is not None and not (low <= ends[0] and ends[1] <= high):
                shift = ends[0] - int(low)
                if ends[1] - high != shift:
                    continue
            link = links[source] = Link(size, ignore, shift)
            if link.concerns(low, high):
                link.spare(link.strangers(values))

    # -- what the model has ----------------------------------------------------------------------------

    def _moved(self) -> bool:
        """Say whether a table is not any more what it was."""
        if getattr(self.host, "generation", 0) != self._generation:
            return True
        for parent, name, module, size in self._tables:
            if parent._modules.get(name) is not module or _rows(module) != size:
                return True
        return False

    def _find(self) -> None:
        """Find the tables anew, and learn anew what is looked up in them."""
        if hasattr(self, "_calls"):
            self._calls.end()
        modules = [
            (prefix, path, module)
            for prefix, root in self.host.modules()
            for path, module in root.named_modules()
        ]
        self._tables = [
            (module, name, child, _rows(child))
            for _, _, module in modules
            for name, child in module._modules.items()
            if child is not None and _rows(child)
        ]
        spread = [(p, n, m) for p, n, m in modules if type(m).__name__ == _SPREAD and _rows(m)]
        self._names = {id(m): _name(p, n) or type(m).__name__ for p, n, m in spread}
        self._names |= {id(p): name.removesuffix(".weight") for name, p in self.host.named_parameters()}
        self._calls = Calls(self, [module for _, _, module in spread])
        self._generation = getattr(self.host, "generation", 0)
        self._seen.clear()
        self._links.clear()

    def _source(self, table: Any, size: int) -> str:
        if table is None:
            return f"the {size} classes that the loss is given"
        name = self._names.get(id(table))
        return f"the {size} rows of an embedding" if name is None else f"the {size} rows of {name}"


def _name(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, path) if part)


def _rows(module: nn.Module) -> int:
    """Return the number of rows of a table, as its module has it; 0 for others."""
    rows = getattr(module, "num_embeddings", 0)
    return rows if isinstance(rows, int) else 0


def _is_integer(one: Field) -> bool:
    return not one.is_float and one.dtype is not torch.bool and not one.empty


def _integers(readings: Sequence[Reading]) -> Iterator[tuple[int, float, float]]:
    """Yield the place, the smallest and the largest number of each integer field on the host."""
    for reading in readings:
        plan = reading.plan
        if plan.on_host and plan.integers:
            sheet = reading.sheet.tolist()
            for number, place in plan.integers:
                at = plan.pair(number)
                yield place, sheet[at], sheet[at + 1]


def _within(numbers: Tensor, size: int, ignore: int | None) -> Tensor:
    """Return the numbers, each one beyond the table replaced by the next one that is not."""
    last = min(size - 1, torch.iinfo(numbers.dtype).max)
    instead = numbers.clamp(0, last)
    if ignore is None or 0 <= ignore <= last:
        return instead
    return torch.where(numbers == ignore, numbers, instead)
