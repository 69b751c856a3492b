"""What a card's reading gives cause to worry about, told once each time it gets worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradsentinel.devices.health import Reading, growth, is_serious

USUAL_LIMIT = 90.0
"""Degrees Celsius, for a card that does not tell from where on it slows itself down."""
_COOLER = 5.0
"""Degrees by which it must cool down before it is told again."""


@dataclass(frozen=True, slots=True)
class Worry:
    """One thing that is not as it should be."""

    what: str
    """Without numbers: the same worry has the same name again."""
    words: str
    serious: bool
    """True if values may have been wrong: more than a sign of wear."""


@dataclass(slots=True)
class Worries:
    """Compares the readings of one card with each other.

    Args:
        max_temperature: degrees Celsius; None takes the card's own limit.
        max_corrected: so many further errors that the card corrected by itself are worth a word.
    """

    max_temperature: float | None
    max_corrected: int
    _hot: bool = False
    _word: str | None = None
    """The word for its health that was told last."""
    _slow: bool = False
    _previous: Mapping[str, int] | None = None
    _grown: dict[str, int] = field(default_factory=dict)
    """By how much each counter grew since it was told."""

    def judge(self, reading: Reading) -> list[Worry]:
        """Return what is worse than it was."""
        return [*self._health(reading), *self._temperature(reading), *self._counters(reading)]

    def _health(self, reading: Reading) -> list[Worry]:
        found = []
        if reading.healthy is False and reading.health != self._word:
            found.append(Worry("health", f"health {reading.health}", serious=True))
        if reading.healthy is not None:
            self._word = reading.health
        slow = [note for note in reading.notes if note.startswith("slowed down")]
        if slow and not self._slow:
            found.append(Worry("slowed down", ", ".join(slow), serious=False))
        self._slow = bool(slow)
        return found

    def _temperature(self, reading: Reading) -> list[Worry]:
        if reading.temperature is None:
            return []
        own = reading.hottest if reading.hottest is not None else USUAL_LIMIT
        limit = own if self.max_temperature is None else self.max_temperature
        if self._hot:
            self._hot = reading.temperature > limit - _COOLER
            return []
        self._hot = reading.temperature >= limit
        words = f"{reading.temperature:g} C, the limit is {limit:g} C"
        return [Worry("temperature", words, serious=False)] if self._hot else []

    def _counters(self, reading: Reading) -> list[Worry]:
        if not reading.counters:
            return []  # they could not be asked this time
        before, self._previous = self._previous, dict(reading.counters)
        if before is None:
            return []  # what was there before the run is told in incidents, and is no news
        for name, more in growth(before, reading.counters).items():
            self._grown[name] = self._grown.get(name, 0) + more
        found = []
        for name, more in list(self._grown.items()):
            if is_serious(name) or more >= self.max_corrected:
                total = reading.counters.get(name)
                found.append(Worry(name, f"{name} grew by {more} to {total}", is_serious(name)))
                del self._grown[name]
        return found
