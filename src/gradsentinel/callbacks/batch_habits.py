"""What the batches of a run usually look like, and what is out of the ordinary; on the host, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsentinel.callbacks.batch_reading import Rows, Statistics
from gradsentinel.callbacks.usual import Usual

OUTLIER, SHIFT, CONSTANT, REPEATED, COPIES = "outlier", "shift", "constant", "repeated", "copies"
"""What can be odd about a batch compared with those before it."""
_RARE = 0.02
"""What happened in a larger share of the batches is nothing unusual."""
_MEMORY = 200
"""So many batches count for that share."""
MANY = 0.5
"""So large a share of copies is told."""
MOST_FIELDS = 64
"""So many fields are followed; a batch with more is a list of records."""
LARGER = math.log(8.0)
"""An outlier is at least 8 times as large as what was usual, however steady that was."""
_ELSEWHERE = 1.0
"""A mean has moved if it is a standard deviation of the data away, however steady it was."""


@dataclass(frozen=True, slots=True)
class Oddity:
    """One thing that is out of the ordinary."""

    what: str
    path: str
    fact: str
    limit: float = math.inf
    """Magnitude above which a record is an outlier."""


@dataclass(slots=True)
class Rate:
    """How often something happens, lately."""

    warmup: int
    count: int = 0
    share: float = 0.0

    def is_unusual(self, *, now: bool) -> bool:
        """Take note of whether it happens now; True if it does, and hardly ever did."""
        unusual = now and self.count >= self.warmup and self.share < _RARE
        self.count += 1
        self.share += (float(now) - self.share) / min(self.count, _MEMORY)
        return unusual


@dataclass(slots=True)
class Mean:
    """A number's average, lately."""

    count: int = 0
    value: float = 0.0

    def learn(self, value: float) -> None:
        """Take note of a value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _MEMORY)


@dataclass(slots=True)
class _Habit:
    """What one field is like."""

    size: Usual
    place: Usual
    constant: Rate
    mean: float | None = None
    """Of the first batch; places are told in its deviations from there."""
    deviation: float = 0.0


@dataclass(slots=True, kw_only=True)
class Habits:
    """Learns what the batches of a run are like; what was odd does not become part of it at once."""

    warmup: int
    limit: float
    """Standard deviations."""
    _fields: dict[str, _Habit] = field(default_factory=dict)
    _repeated: Rate = field(init=False)
    _copies: Mean = field(default_factory=Mean)
    """Share of records that are copies of others."""
    _constant: Mean = field(default_factory=Mean)
    """Share of records that are one number from end to end."""
    _before: tuple[Statistics, ...] = ()

    def __post_init__(self) -> None:
        self._repeated = Rate(self.warmup)

    def judge(self, step: int, fields: Sequence[Statistics], rows: Rows) -> list[Oddity]:
        """Return what is odd about a batch of an optimizer step, and learn from it."""
        odd: list[Oddity] = []
        for one in fields:
            odd += self._judge_field(step, one, main=one.path == rows.path)
        self._constant.learn(rows.constant)
        same, self._before = tuple(fields) == self._before, tuple(fields)
        if self._repeated.is_unusual(now=rows.alike and same and rows.constant < 1):
            odd.append(Oddity(REPEATED, "", "the batch is the one before it once more, bit for bit"))
        elif rows.copies > MANY and self._is_rare(self._copies):
            odd.append(Oddity(COPIES, "", "most of its records are copies of others; usually hardly any is"))
        self._copies.learn(rows.copies)
        return odd

    def _is_rare(self, share: Mean) -> bool:
        return share.count >= self.warmup and share.value < _RARE

    def _judge_field(self, step: int, one: Statistics, *, main: bool) -> Iterator[Oddity]:
        if not (math.isfinite(one.low) and math.isfinite(one.high)):
            return
        habit = self._habit(one.path)
        if habit is None:
            return
        name, constant = one.path or "the batch", one.low == one.high
        # Where single records are constant now and then, as blank images are, a whole batch may be, too.
        possible = main and not self._is_rare(self._constant)
        if habit.constant.is_unusual(now=constant and (main or one.mean is not None)) and not possible:
            yield Oddity(CONSTANT, one.path, f"{name} is {one.low:.4g} everywhere, which it never was before")
        if one.mean is None or constant:
            return
        size = max(abs(one.low), abs(one.high))
        if habit.size.is_unusual(step, size):
            fact = f"{name} holds values up to {size:.4g}, about {habit.size.center:.4g} is usual"
            yield Oddity(OUTLIER, one.path, fact, limit=habit.size.high)
        deviation = math.sqrt(max(one.variance, 0.0))
        if habit.mean is None:
            habit.mean, habit.deviation = one.mean, deviation
        deviation = max(deviation, habit.deviation)  # a single outlier moves the mean, and widens this
        if deviation > 0 and habit.place.is_unusual(step, (one.mean - habit.mean) / deviation):
            usual = habit.mean + habit.place.center * habit.deviation
            fact = f"the mean of {name} is {one.mean:.4g}, far from the usual {usual:.4g}"
            yield Oddity(SHIFT, one.path, fact)

    def forget_from(self, step: int) -> None:
        """Forget what was learnt of this step and later ones: they were taken back."""
        for habit in self._fields.values():
            habit.size.forget_from(step)
            habit.place.forget_from(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        return {
            "fields": {
                path: {
                    "size": habit.size.state_dict(),
                    "place": habit.place.state_dict(),
                    "constant": [habit.constant.count, habit.constant.share],
                    "mean": habit.mean,
                    "deviation": habit.deviation,
                }
                for path, habit in self._fields.items()
            },
            "repeated": [self._repeated.count, self._repeated.share],
            "copies": [self._copies.count, self._copies.value],
            "constant": [self._constant.count, self._constant.value],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._fields.clear()
        for path, kept in state["fields"].items():
            habit = self._habit(path)
            if habit is not None:
                habit.size.load_state_dict(kept["size"])
                habit.place.load_state_dict(kept["place"])
                habit.constant = Rate(self.warmup, *kept["constant"])
                habit.mean, habit.deviation = kept["mean"], kept["deviation"]
        self._repeated = Rate(self.warmup, *state["repeated"])
        self._copies, self._constant = Mean(*state["copies"]), Mean(*state["constant"])

    def _habit(self, path: str) -> _Habit | None:
        if path not in self._fields and len(self._fields) < MOST_FIELDS:
            self._fields[path] = _Habit(
                size=Usual(limit=self.limit, floor=LARGER, warmup=self.warmup, sizes=True),
                place=Usual(limit=self.limit, floor=_ELSEWHERE, warmup=self.warmup),
                constant=Rate(self.warmup),
            )
        return self._fields.get(path)
