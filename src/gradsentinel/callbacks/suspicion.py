"""Is it always the same card? How often incidents began on each, and how likely that is by chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

APART = 10
"""Incidents of one card that are fewer steps apart are one: what goes wrong again at once has one cause."""
_MOST_STEPS = 64
_REPLICATING = frozenset(
    {"dp", "cp", "node", "replicate", "dp_replicate", "dp_shard", "shard", "fsdp", "ddp"}
)
"""Coordinates along which ranks run the same part of the model; along all others they run different parts."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits."""

    card: str
    part: str
    """Which part of the model it runs: ranks with the same part could swap places."""


@dataclass(slots=True)
class _Account:
    """What is known of one card."""

    hits: int = 0
    misses: int = 0
    expected: float = 0.0
    """So many hits were to be expected if all cards were alike."""
    log_scale: float = 0.0
    """The part of the log likelihood ratio that does not depend on how faulty the card may be."""
    steps: list[int] = field(default_factory=list)
    """Of the latest hits."""

    def hit_near(self, step: int) -> bool:
        """Return True if it was hit in a step so near that it counts as the same time."""
        return any(abs(step - before) < APART for before in self.steps)

    def enter(self, share: float, *, hit: bool) -> None:
        """Enter an incident that would have been here by this probability, were all cards alike."""
        self.expected += share
        if hit:
            self.hits += 1
            self.log_scale -= math.log(share)
        else:
            self.misses += 1
            self.log_scale -= math.log1p(-share)

    def log_evidence(self) -> float:
        """Return how much more likely all this is if the card is at fault, as a logarithm.

        A faulty card has its share of the incidents by an unknown probability, any from 0 to 1 alike
        (uniform prior); a sound one by its share of the cards.
        """
        tries = self.hits + self.misses
        return (
            math.lgamma(self.hits + 1) + math.lgamma(self.misses + 1) - math.lgamma(tries + 2)
        ) + self.log_scale


_NONE = _Account()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A card, and what speaks against it."""

    card: str
    hits: int
    tries: int
    """Incidents that could have been on this card as well as on another."""
    expected: float
    chance: float
    """Upper bound of the probability that, without any faulty card, one is ever found as suspicious."""

    @property
    def words(self) -> str:
        """What speaks against it, and how much by chance, in one sentence."""
        return (
            f"{self.hits} of {self.tries} incidents that could have been on other cards too were on "
            f"{self.card}, {self.expected:.2g} were to be expected; by chance this would happen to any card "
            f"with a probability of at most {self.chance:.2g}"
        )


class Suspicion:
    """Counts incidents by card; the same on every rank, if every rank counts the same ones.

    For each card it holds the ratio of two likelihoods: of what was seen if the card is at fault, and if
    every card that runs the same part of the model had been as likely. Without a fault the expected value of
    that ratio is 1 at all times, so it ever reaches N with a probability of at most 1/N (Ville's inequality):
    one may look after every incident. For many cards the bound is multiplied by their number.

    Args:
        seats: where each rank sits, by rank.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._seats = tuple(seats)
        self._accounts: dict[str, _Account] = {}
        self._cards = len({seat.card for seat in self._seats})

    def count(self, ranks: Iterable[int], step: int) -> str | None:
        """Enter an incident that began on these ranks; returns the card, or None if it tells of no card.

        It tells of none if it began on several, if no other card runs the same part of the model, or if the
        same card had one a few steps ago.
        """
        named = [self._seats[rank] for rank in ranks if 0 <= rank < len(self._seats)]
        cards = {seat.card for seat in named}
        if len(cards) != 1:
            return None
        (card,) = cards
        parts = {seat.part for seat in named}
        account = self._accounts.setdefault(card, _Account())
        again = account.hit_near(step)
        # A card that was just hit would not be counted again, so it does not take part in the draw either.
        peers = Counter(
            seat.card
            for seat in self._seats
            if seat.part in parts and not self._accounts.get(seat.card, _NONE).hit_near(step)
        )
        account.steps = [*account.steps, step][-_MOST_STEPS:]
        if again or len(peers) < 2:
            return None
        drawn = sum(peers.values())
        for peer, seats in peers.items():
            entry = self._accounts.setdefault(peer, _Account())
            entry.enter(seats / drawn, hit=peer == card)
        return card

    def suspect(self, card: str) -> Suspect | None:
        """Return what speaks against a card; None if nothing was counted for it."""
        account = self._accounts.get(card)
        if account is None or not account.hits:
            return None
        log_chance = math.log(max(self._cards, 1)) - account.log_evidence()
        return Suspect(
            card=card,
            hits=account.hits,
            tries=account.hits + account.misses,
            expected=account.expected,
            chance=math.exp(min(0.0, log_chance)),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            card: {
                "hits": entry.hits,
                "misses": entry.misses,
                "expected": entry.expected,
                "log_scale": entry.log_scale,
                "steps": list(entry.steps),
            }
            for card, entry in self._accounts.items()
        }

    def take_up(self, data: Mapping[str, Any]) -> None:
        """Go on from what `as_dict` returned.

        Raises:
            TypeError, KeyError, ValueError, AttributeError: if it is no such thing; nothing changes then.
        """
        accounts = {
            str(card): _Account(
                hits=_count(entry["hits"]),
                misses=_count(entry["misses"]),
                expected=_finite(entry["expected"]),
                log_scale=_finite(entry["log_scale"]),
                steps=[int(step) for step in entry["steps"]][-_MOST_STEPS:],
            )
            for card, entry in data.items()
        }
        self._accounts = accounts


def part_of(coordinates: Mapping[str, int]) -> str:
    """Return which part of the model a rank with these coordinates runs, in words."""
    own = sorted((name, place) for name, place in coordinates.items() if name not in _REPLICATING)
    return " ".join(f"{name}{place}" for name, place in own)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.40} is not finite")
    return number
