"""The running statistics of a healthy series; nothing that was flagged ever becomes part of them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from gradsentinel.measures.bands import INFINITY, Band, Life, Rule, early, with_explosion

_FEW = 3
"""With fewer values only what is a hundred times farther out is an explosion, and all else is learnt."""
_LOOK_BACK = 8
"""After so many values the first ones, which nothing could be compared with, are compared with the others."""
_UNSEEN, _SEEN = 100.0, 0.1
"""So many times the usual bound of an explosion while hardly anything is known, and when a little is."""
_NO_PART = 1000.0
"""What is so many times the others was no part of the run, as little as what comes later is."""
_REFRESH = 16
"""A full window is looked at anew after so many further values."""
_SOON = 48
"""With fewer values the band follows each of them."""
_FAR = 0.5
"""A value so far on its way from the centre to the bound may be the begin of a climb."""
_TAIL = 8192
"""How far out healthy values were is remembered for so many: the tail of a series takes long to show."""
_MEMORY = 4
"""So many windows are remembered: after a rollback the older values come back."""
_BOUND = 4
"""After so many times the patience any level is accepted."""
_OFTEN, _AGAIN = 0.2, 0.125
"""Values outside are part of the run if they are this share of a window, or of the last four."""
_FAR_OFF = 100.0
"""A value so many times the others' is no part of a new level."""
_GROWTH = 1.5
"""Values that still grow by so much within the patience are no new level."""
_BACK = 3
"""So many values in a row at the old level: the new one was only a long burst."""


class _Value(NamedTuple):
    """A value, and when it was seen."""

    turn: int
    step: int
    value: float


_new = tuple.__new__
"""Makes a named tuple without the function of Python that it has for that."""


class _Regime(NamedTuple):
    """The level that a new one replaced."""

    values: tuple[_Value, ...]
    band: Band
    first: float | None


class Baseline:
    """Learns where the values of a series lie, and cannot be poisoned by those that lie elsewhere.

    A value outside the band never enters, so neither a burst nor a spike widens the band for what follows;
    NaN and Inf never enter. A real change of regime is accepted after a bounded time: when `patience` values
    in a row are outside and do not grow any more, when four times as many are outside whatever they do, or
    when one in five of a window is outside, or one in eight of four windows. If the series then returns to
    its old level, the old baseline comes back.

    Args:
        rule: computes the band.
        window: so many values are looked at.
        warmup: with fewer values only an explosion is told.
        patience: so many values in a row outside may be a new level.
        explosion: so many times as far out as the band's bound; None: never.
        positive: values of 0 or below are passed over.
        negligible: less than this share of the level that the series began with is no spike.
        ceiling: more than so many times that level is one, however gently the series got there.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        window: int = 128,
        warmup: int = 20,
        patience: int = 8,
        explosion: float | None = 100.0,
        positive: bool = False,
        negligible: float = 0.0,
        ceiling: float = math.inf,
    ) -> None:
        self.window = window
        self._rule = rule
        self._warmup = warmup
        self._patience = patience
        self._explosion = explosion
        self._positive = positive
        self._negligible = negligible
        self._ceiling = ceiling
        self._first: float | None = None
        """The level that the series began with."""
        self.ease = 1.0
        """So many times the rule's usual limit, for a reason that the series itself does not show."""
        self.left_out: tuple[tuple[int, float, float], ...] = ()
        """First values that the value learnt last has shown to be no part of the run: step, value, factor."""
        self._turn = 0
        self._kept: deque[_Value] = deque(maxlen=_MEMORY * window)
        self._streak: list[_Value] = []
        """The values outside since the last one inside."""
        self._outside: deque[_Value] = deque()
        """The values outside within the last windows."""
        self._old: _Regime | None = None
        self._back = 0
        self.due = False
        """True if the band is to be computed anew before it is used again: by `expect`."""
        self.band: Band | None = None
        """Where the next value is expected, unless `due`: who asks in each step spares a call."""
        self.room, self.near = 0, math.inf
        """So many values may come in a row before the band is computed anew, if none is above `near`."""
        self._stale = 0
        """How many values the band does not know yet."""
        self._peaks: deque[_Value] = deque()
        """How far out the farthest healthy values were when they came, each farther than all later ones."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def values(self) -> tuple[float, ...]:
        """The values of the window, oldest first."""
        first = max(0, len(self._kept) - self.window)
        return tuple(entry.value for entry in islice(self._kept, first, None))

    @property
    def negligible(self) -> bool:
        """True if the series is now at less than the negligible share of the level that it began with."""
        band, first = self.expect() if self.due else self.band, self._first
        return band is not None and first is not None and 0 < band.center < self._negligible * first

    @property
    def streak(self) -> tuple[tuple[int, float], ...]:
        """Step and value of those outside since the last one inside."""
        return tuple((entry.step, entry.value) for entry in self._streak)

    def expect(self) -> Band | None:
        """Return where the next value is expected; None while nothing is known."""
        if self.due:
            self.due, self._stale = False, 0
            band = self.band = self._judge() if self._kept else None
            self.near = math.inf if band is None else band.center + _FAR * (band.high - band.center)
            young = self._old is not None or len(self._kept) < _SOON
            self.room = 0 if young else _REFRESH
        return self.band

    def learn(self, step: int, value: float, *, healthy: bool = True) -> bool:
        """Take note of a value and return True if it is inside the band and became part of the baseline.

        Of a step that was dropped for another reason (`healthy` False) nothing is learnt.
        """
        if not -INFINITY < value < INFINITY or (self._positive and value <= 0):
            return False
        self._turn += 1
        # What each step goes through is in one function: a further one would cost some microseconds, as the
        # training has pushed that out of the caches.
        entry, band = _new(_Value, (self._turn, step, value)), self.expect() if self.due else self.band
        while self._outside and self._outside[0].turn <= self._turn - _MEMORY * self.window:
            self._outside.popleft()
        if band is not None and not band.low <= value <= band.high:
            self._streak.append(entry)
            self._outside.append(entry)
            self._consider(band)
            return False
        if not healthy:
            return False
        self._streak.clear()
        if band is not None and band.center < value <= band.ordinary and 2 * band.count >= self.window:
            # Not of a few values, whose spread is a guess, nor of what climbs; nothing below is far out.
            self._remember_peak(_Value(self._turn, step, band.deviations(value)))
        self._kept.append(entry)
        self.left_out = self._leave_out_the_first() if len(self._kept) == _LOOK_BACK else ()
        far = band is not None and value > self.near
        self._stale += _REFRESH if far else 1  # a series that has begun to climb is followed closely
        self.due = band is None or self._stale >= _REFRESH or len(self._kept) < _SOON
        if self._old is not None:
            self._compare_with_old(entry)
        self.room = 0 if self.due or self._old is not None else _REFRESH - self._stale
        return True

    def forget_from(self, step: int) -> None:
        """Forget the values of this step and later ones: they were undone."""

        def before(entries: Iterable[_Value]) -> list[_Value]:
            return [entry for entry in entries if entry.step < step]

        self._kept = deque(before(self._kept), maxlen=self._kept.maxlen)
        self._streak = before(self._streak)
        self._outside = deque(before(self._outside))
        self._peaks = deque(before(self._peaks))
        self._back = 0
        if self._old is not None:
            old = before(self._old.values)
            if not self._kept:  # the new level itself was undone
                self._kept.extend(old)
                self._first, self._old = self._old.first, None
            else:
                self._old = self._old._replace(values=tuple(old)) if old else None
        if not self._kept:
            self._first = None
        self._renew()

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted run needs to go on where this one is."""
        return {
            "turn": self._turn,
            "kept": [list(entry) for entry in self._kept],
            "streak": [list(entry) for entry in self._streak],
            "outside": [list(entry) for entry in self._outside],
            "peaks": [list(entry) for entry in self._peaks],
            "old": [list(entry) for entry in self._old.values] if self._old is not None else [],
            "old_first": self._old.first if self._old is not None else None,
            "back": self._back,
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; values that are not finite are left out."""
        self._turn = int(state["turn"])
        self._kept = deque(_entries(state["kept"]), maxlen=self._kept.maxlen)
        self._streak = _entries(state["streak"])
        self._outside = deque(_entries(state["outside"]))
        self._peaks = deque(_entries(state["peaks"]))
        old = _entries(state["old"])
        values = [entry.value for entry in old[-self.window :]]
        band = self._rule(values, Life(age=self._turn)) if len(old) >= _FEW else None
        self._old = _Regime(tuple(old), band, state["old_first"]) if band is not None else None
        self._back = int(state["back"])
        self._first = None if state["first"] is None else float(state["first"])
        self._renew()

    # -- the band ------------------------------------------------------------------------------------

    def _judge(self) -> Band:
        values = self.values
        while self._peaks and self._peaks[0].turn <= self._turn - _TAIL:
            self._peaks.popleft()
        peak = self._peaks[0].value if self._peaks else 0.0
        life = Life(age=self._turn, peak=peak, ease=self.ease)
        band = self._rule(values, life) if len(values) >= self._warmup else None
        if band is None:
            return self._early(values)
        if self._first is None:
            self._first = statistics.median(values[: self._warmup])
        high = max(band.high, self._negligible * self._first)
        if self._first > 0:
            high = min(high, self._ceiling * self._first)
        return with_explosion(replace(band, high=high, began=self._first), self._explosion)

    def _leave_out_the_first(self) -> tuple[tuple[int, float, float], ...]:
        """Forget first values that were no part of the run; return step, value, and factor of the others."""
        level = statistics.median(abs(entry.value) for entry in self._kept)
        if not level:
            return ()
        far = [entry for entry in self._kept if abs(entry.value) > _NO_PART * level]
        near = [entry for entry in self._kept if abs(entry.value) <= _NO_PART * level]
        self._kept = deque(near, maxlen=self._kept.maxlen)
        return tuple((entry.step, entry.value, abs(entry.value) / level) for entry in far)

    def _early(self, values: Sequence[float]) -> Band:
        """Return the band of a series too young for its rule; the more values, the less is an explosion."""
        band = early(values)
        if self._explosion is None:
            return replace(band, high=INFINITY) if len(values) < _FEW else band
        if len(values) < _FEW:
            band = with_explosion(band, _UNSEEN * self._explosion)
            return replace(band, high=band.explosion)
        share = _SEEN if len(values) >= _LOOK_BACK else 1.0
        return with_explosion(band, max(1.0, share * self._explosion))

    def _renew(self) -> None:
        self.band, self.due, self._stale = None, True, 1

    def _remember_peak(self, entry: _Value) -> None:
        while self._peaks and self._peaks[-1].value <= entry.value:
            self._peaks.pop()
        self._peaks.append(entry)

    # -- a new level ---------------------------------------------------------------------------------

    def _consider(self, band: Band) -> None:
        """Accept what is outside, if it is there to stay."""
        count = len(self._streak)
        settled = count >= self._patience and self._is_level(self._streak[-self._patience :], band)
        if settled or count >= _BOUND * self._patience:
            self._old = _Regime(tuple(self._kept), band, self._first)
            self._first = max(self._first or 0.0, statistics.median(entry.value for entry in self._streak))
            level = statistics.median(abs(entry.value) for entry in self._streak)
            near = [entry for entry in self._streak if abs(entry.value) <= _FAR_OFF * level]
            self._kept = deque(near, maxlen=self._kept.maxlen)
            self._back = 0
        elif self._recurs():
            near = [entry for entry in self._outside if abs(entry.value) <= band.explosion]
            self._kept = deque(sorted((*self._kept, *near)), maxlen=self._kept.maxlen)
        else:
            return
        self._streak.clear()
        self._outside.clear()
        self._renew()

    def _recurs(self) -> bool:
        """True if so many values were outside that they are part of the run."""
        before = len(self._outside) - len(self._streak)  # one long streak is another matter
        lately = sum(entry.turn > self._turn - self.window for entry in islice(self._outside, before))
        return (
            lately >= max(2 * self._patience, _OFTEN * self.window)
            or before >= _AGAIN * _MEMORY * self.window
        )

    @staticmethod
    def _is_level(streak: Sequence[_Value], band: Band) -> bool:
        """True if the values have not exploded and do not grow any more."""
        values = [entry.value for entry in streak]
        if any(abs(value) > band.explosion for value in values):
            return False
        half = len(values) // 2
        if not half:
            return True
        first, last = statistics.median(values[:half]), statistics.median(values[half:])
        if first > 0:
            return last <= _GROWTH * first
        return last - first <= abs(band.high - band.center)

    def _compare_with_old(self, entry: _Value) -> None:
        """Return to the old level if the series has, or forget it when the new one is established."""
        old = self._old
        if old is None:
            return
        near = old.band.center + 0.5 * (old.band.high - old.band.center)
        at_old = max(old.band.low, -math.inf) <= entry.value <= near
        self._back = self._back + 1 if at_old else 0
        if self._back >= _BACK:
            newest = list(self._kept)[-_BACK:]
            self._kept = deque((*old.values, *newest), maxlen=self._kept.maxlen)
            self._first, self._old = old.first, None
            self._renew()
        elif len(self._kept) >= self.window:
            self._old = None


def _entries(found: Iterable[Sequence[Any]]) -> list[_Value]:
    entries = [_Value(int(turn), int(step), float(value)) for turn, step, value in found]
    return [entry for entry in entries if math.isfinite(entry.value)]
