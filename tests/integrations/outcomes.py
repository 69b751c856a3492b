"""How the outcomes of trainings are compared: bit for bit, rank for rank, incident for incident.

An adapter under test trains a small model three ways: alone, watched, and alone with the bad steps left out.
Of each it gives an `Outcome`: one mapping per rank, from the name of a part of the training state (weights,
optimizer, schedule, random, ...) to a value that is equal only if the part is, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Incident = Mapping[str, Any]
"""As `Incident.as_dict` gives it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a training ended."""

    states: Sequence[Mapping[str, Any]]
    """By rank."""
    incidents: Sequence[Sequence[Incident]] = ()
    """By rank, as that rank has them."""
    swallowed: Sequence[Collection[str]] = ()
    """By rank: what was caught on the way and should not have been there."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One incident that has to be there."""

    step: int
    outcome: str
    rank: int | None = None
    parameter: str | None = None
    kinds: Collection[str] = field(default=("nonfinite_gradient",))


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return which parts of the state differ, and on which rank."""
    return [
        f"rank {rank}: {part}"
        for rank, (ours, theirs) in enumerate(zip(one.states, other.states, strict=True))
        for part in sorted(ours.keys() | theirs.keys())
        if ours.get(part) != theirs.get(part)
    ]


def check_untouched(alone: Outcome, watched: Outcome) -> None:
    """A healthy run is the same with and without the watch, bit for bit, and has no incident."""
    assert differences(alone, watched) == []
    assert all(list(found) == [] for found in watched.incidents)
    check_nothing_swallowed(watched)


def check_cured(reference: Outcome, watched: Outcome, expected: Sequence[Expected]) -> None:
    """A run with faults ends as the reference does; each fault is one incident, alike on every rank."""
    check_incidents(watched, expected)
    assert differences(reference, watched) == []
    check_nothing_swallowed(watched)


def check_incidents(watched: Outcome, expected: Sequence[Expected]) -> None:
    """Each fault is one incident of its step, with its rank and parameter, the same on every rank."""
    first = watched.incidents[0]
    for others in watched.incidents[1:]:
        assert [_same_everywhere(one) for one in others] == [_same_everywhere(one) for one in first]
    assert [(one["step"], one["outcome"]) for one in first] == [(e.step, e.outcome) for e in expected]
    for incident, wanted in zip(first, expected, strict=True):
        assert incident["kind"] in wanted.kinds, incident
        if wanted.rank is not None:
            assert [rank["rank"] for rank in incident["ranks"]] == [wanted.rank], incident
        if wanted.parameter is not None:
            names = [entry["name"] for entry in incident["parameters"]]
            assert any(wanted.parameter in name for name in names), incident


def check_nothing_swallowed(watched: Outcome) -> None:
    """Nobody has caught an exception on the way."""
    assert [list(found) for found in watched.swallowed if found] == []


def _same_everywhere(incident: Incident) -> tuple[Any, ...]:
    ranks = tuple(rank["rank"] for rank in incident["ranks"])
    return (incident["id"], incident["action"], incident["outcome"], incident["message"], ranks)
