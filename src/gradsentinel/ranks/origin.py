"""Which rank it began on, of those between which a bad value travels inside of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gradsentinel.incident import fold
from gradsentinel.ranks.topology import fold_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one rank knows of where it began; a few hundred bytes, whatever the job."""

    leader: int
    """The smallest rank of those that exchange values with it in forward and backward pass."""
    handed: int | None = None
    """The number of the first bad value that it handed to them, in the order of the step."""
    what: str = ""
    """That value in words."""
    order: str = ""
    """Digest of the names of its parameters, in the order in which the backward pass comes to them."""
    bad: int = 0
    """Which of their gradients are bad: bit 0 is the first one's."""
    first: tuple[str, ...] = ()
    """The names of the first few of these."""


@dataclass(slots=True)
class Verdict:
    """Where it began."""

    ranks: set[int] = field(default_factory=set)
    """Those that did not only receive it, as far as anybody can tell."""
    says: list[str] = field(default_factory=list)
    """How that was told, or that it cannot be."""
    names: tuple[str, ...] = ()
    """Parameters whose gradients are bad where it began and finite on ranks that it reached."""
    places: int = 0
    """How many independent origins there are: ranks that exchange values are one."""


def began(claims: Mapping[int, Claim], holders: Collection[int]) -> Verdict:
    """Tell origins from receivers among ranks that hold a bad value; the same answer on every rank.

    Ranks that exchange values inside of the model are compared with each other. Who handed over a bad
    value first began it, also if it then went to others only. If nobody was seen to hand one over: who has
    a bad gradient that comes before all bad ones of another rank, and all of those too; the other one's
    came from an exchange in between.

    Args:
        claims: what the ranks know, by rank.
        holders: the ranks that hold the bad value.
    """
    verdict = Verdict()
    peers: dict[int, dict[int, Claim]] = {}
    for rank, claim in sorted(claims.items()):
        peers.setdefault(claim.leader, {})[rank] = claim
    for everyone in peers.values():
        group = {rank: everyone[rank] for rank in everyone if rank in holders}
        if group:
            _judge(verdict, everyone, group)
    return verdict


def _judge(verdict: Verdict, everyone: Mapping[int, Claim], holders: Mapping[int, Claim]) -> None:
    """Complete the verdict with what is known of one group of ranks that exchange values."""
    first = min((claim.handed for claim in everyone.values() if claim.handed is not None), default=None)
    if first is None:
        group, kept = holders, _nearest(holders)
    else:
        group = {rank: claim for rank, claim in everyone.items() if rank in holders or claim.handed == first}
        kept = {rank for rank, claim in group.items() if claim.handed == first}
    verdict.ranks |= kept
    verdict.places += 1
    if len(group) == 1:
        return
    who, claim = fold_ranks(kept), group[min(kept)]
    own = _own(claim, [group[rank] for rank in group if rank not in kept])
    if own:
        verdict.names += own
        verdict.says.append(
            f"it began on {who}: where it only arrived, the gradient of {fold(own)} is finite"
        )
    elif len(kept) < len(group):
        what = f"{claim.what} was not finite there before the ranks put theirs together"
        verdict.says.append(f"it began on {who}: {what}")
    if len(kept) > 1:
        why = "they exchange values within the model and are equally bad"
        verdict.says.append(f"it began on one of {who}, or on all of them: {why}")


def _nearest(group: Mapping[int, Claim]) -> set[int]:
    """Leave out those to which the bad gradients of another rank came."""
    return {
        rank
        for rank, claim in group.items()
        if not any(_came_from(claim, other) for other in group.values() if other is not claim)
    }


def _came_from(claim: Claim, other: Claim) -> bool:
    """True if `other` has all bad gradients of `claim`, and a bad one before the first of them."""
    if not claim.order or claim.order != other.order or not claim.bad or claim.bad & ~other.bad:
        return False
    return _lowest(other.bad) < _lowest(claim.bad)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _own(claim: Claim, others: Sequence[Claim]) -> tuple[str, ...]:
    """The first few bad gradients of a rank that are finite on those who only received it."""
    if not others or any(other.order != claim.order or not other.order for other in others):
        return ()
    names, bits = [], claim.bad
    for name in claim.first:
        lowest = bits & -bits
        if not any(other.bad & lowest for other in others):
            names.append(name)
        bits ^= lowest
    return tuple(names)
