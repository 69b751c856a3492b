"""Which fault happens when: drawn from the seed alone, the same for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gradsentinel.campaign.kinds import BY_NAME, FAMILIES, KINDS, Family, Kind, Site
from gradsentinel.faults import Fault, FlipBit
from gradsentinel.faults.dice import Dice

T = TypeVar("T")

FLIPPED = ("activation", "parameter", "gradient")
"""What the sweep over bits flips one in."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault of a trial."""

    step: int
    """Number of the batch it happens with, from 0."""
    kind: str
    persistent: bool
    seed: int
    """Decides what the kind leaves open."""
    bit: int | None = None
    """In the sweep over bits, the one that is flipped."""
    rank: int | None = None
    """Rank it happens on; None in one process."""

    @property
    def family(self) -> Family:
        """Family of the kind."""
        return BY_NAME[self.kind].family

    @property
    def cause(self) -> str:
        """What a right diagnosis says."""
        return BY_NAME[self.kind].cause

    def fault(self, site: Site) -> Fault:
        """Make it, for a model with this optimizer and loss scaler."""
        ranks = None if self.rank is None else (self.rank,)
        when: dict[str, Any] = {"steps": (self.step,), "persistent": self.persistent, "ranks": ranks}
        if self.bit is not None:
            target: Any = dict(zip(("flip-activation", "flip-weight", "flip-gradient"), FLIPPED, strict=True))
            return FlipBit(target=target[self.kind], bit=self.bit, **when)
        return BY_NAME[self.kind].make(when, Dice(self.seed, self.step), site)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def draw(
    *, seed: int, first: int, count: int, every: int, kinds: Sequence[Kind] = KINDS, ranks: int = 0
) -> list[Planned]:
    """Draw the faults of one trial: one in each stretch of `every` steps but the first, 60/30/10 by family.

    Args:
        seed: seed of the campaign.
        first: number of the trial's first fault in the campaign, so that the shares and the kinds come out
            even over all of them.
        count: how many.
        every: steps from one to the next, on average.
        kinds: those to draw from.
        ranks: each happens on one of so many ranks; 0 in one process.
    """
    planned = []
    for number in range(first, first + count):
        dice = Dice(seed, number)
        kind = _kind(seed, number, kinds)
        begin = (number - first + 1) * every
        planned.append(
            Planned(
                step=begin + every // 4 + dice.below(max(1, every // 4), "step"),
                kind=kind.name,
                persistent=dice.choice(kind.persistence, "persistent"),
                seed=dice.below(2**31, "fault"),
                rank=dice.below(ranks, "rank") if ranks else None,
            )
        )
    return planned


def sweep(*, first: int, count: int, every: int) -> list[Planned]:
    """Return the faults of one trial of the sweep: a flip of each bit of float32, in each of three places."""
    names = ("flip-activation", "flip-weight", "flip-gradient")
    return [
        Planned(
            step=(number - first + 2) * every,
            kind=names[number // 32 % 3],
            persistent=False,
            seed=number,
            bit=number % 32,
        )
        for number in range(first, first + count)
    ]


def _kind(seed: int, number: int, kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a fault: of ten six are of the data, three of the precision, one of hardware."""
    block, place = divmod(number, 10)
    order = _shuffled(
        Dice(seed, -1 - block), [f for f, share in FAMILIES.items() for _ in range(share // 10)]
    )
    family = order[place]
    of_family = [kind for kind in kinds if kind.family == family] or list(kinds)
    before = block * FAMILIES[family] // 10 + order[:place].count(family)
    turn, index = divmod(before, len(of_family))
    return _shuffled(Dice(seed, -1 - turn), of_family, purpose=family)[index]


def _shuffled(dice: Dice, items: Sequence[T], purpose: str = "order") -> list[T]:
    left, taken = list(items), list[T]()
    while left:
        taken.append(left.pop(dice.below(len(left), f"{purpose} {len(left)}")))
    return taken
