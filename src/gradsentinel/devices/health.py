"""What a card says of its own health: one reading, where readings come from, what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_FINE = frozenset({"ok", "normal", "healthy", "good"})
_SILENT = frozenset({"", "-", "na", "n/a", "unknown"})
"""Words for health that say nothing: virtual machines and containers often show no more."""
_SERIOUS = re.compile(r"double|uncorrect|isolat|retire|remap", re.IGNORECASE)


class HealthUnavailable(Exception):
    """The card could not be asked, or did not answer; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one card said of itself at one moment; None where it said nothing."""

    card: str
    """Which card, in the words of its tool: the number on this machine, or a UUID."""
    name: str = ""
    time: str = ""
    """UTC, to the second."""
    temperature: float | None = None
    """Degrees Celsius."""
    hottest: float | None = None
    """The temperature from which on the card slows itself down, if it tells; degrees Celsius."""
    power: float | None = None
    """Watts."""
    health: str | None = None
    """The card's own word: OK, Warning, Alarm, Critical."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Memory errors and the like, by name; they grow, and may start anew when a driver is loaded."""
    notes: tuple[str, ...] = ()
    """What else it said, and what could not be asked."""

    @property
    def healthy(self) -> bool | None:
        """Whether its own word for its health is a good one; None if there is no such word."""
        word = (self.health or "").strip().lower()
        return None if word in _SILENT else word in _FINE

    @property
    def words(self) -> str:
        """The reading in a few words."""
        parts = [] if self.health is None else [f"health {self.health}"]
        parts += [] if self.temperature is None else [f"{self.temperature:g} C"]
        parts += [] if self.power is None else [f"{self.power:g} W"]
        parts += [f"{name} {count}" for name, count in self.counters.items() if count]
        return f"{self.card}: {', '.join((*parts, *self.notes)) or 'nothing told'}"

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "card": self.card,
            "name": self.name,
            "time": self.time,
            "temperature": self.temperature,
            "hottest": self.hottest,
            "power": self.power,
            "health": self.health,
            "counters": dict(self.counters),
            "notes": list(self.notes),
        }


class HealthSource(Protocol):
    """Where the readings of one card come from."""

    card: str
    """Which card it is, known without asking it."""

    def read(self) -> Reading:
        """Ask the card; called in a thread, may take seconds.

        Raises:
            HealthUnavailable: if it cannot be asked now.
        """
        ...


def is_serious(counter: str) -> bool:
    """Return True if a counter counts what the card could not correct, or memory it has given up."""
    return _SERIOUS.search(counter) is not None


def growth(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each counter grew; one that became smaller was set back, and counts from 0."""
    found = {name: count - before.get(name, count) for name, count in now.items()}
    grown = {name: now[name] if more < 0 else more for name, more in found.items()}
    return {name: more for name, more in grown.items() if more}
