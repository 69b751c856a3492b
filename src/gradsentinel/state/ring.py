"""The snapshots that one could go back to: on probation, proved good, and which of them to prefer."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradsentinel.state.snapshot import Snapshot

_GROWN = 10.0
"""A norm so many times the usual one is that of a state which is finite, and ruined all the same."""
WORSE = 2.0
"""Likewise a loss, which varies less."""
_HELD_UP = 5
"""So many times as long as a proof takes may warnings hold it up."""


@dataclass(slots=True)
class Candidate:
    """A snapshot on probation."""

    snapshot: Snapshot
    clean: int = 0
    """Clean steps since, without those that somebody warned of."""
    unbroken: int = 0
    """The same, with them."""
    losses: list[float] = field(default_factory=list)
    """Of those steps."""


class Ring:
    """So many known-good snapshots, and those on their way to become good.

    A step that somebody warned of (a spike, say) proves nothing, so snapshots are not called good while a
    warning goes on; but one that goes on for five times as long as a proof takes has become usual.

    Args:
        keep: how many good ones.
        confirm_after: so many clean steps make a candidate good.
        most: so many candidates at once; with more than that the oldest goes.
    """

    def __init__(self, keep: int, confirm_after: int, most: int) -> None:
        self._keep = keep
        self._confirm_after = confirm_after
        self._most = most
        self.good: list[Snapshot] = []
        """Oldest first."""
        self._candidates: deque[Candidate] = deque()
        self._sizes: dict[tuple[int, int], int] = {}
        """Bytes of each snapshot, by the steps attempted and done until then."""

    def __bool__(self) -> bool:
        return bool(self.good or self._candidates)

    def add(self, snapshot: Snapshot) -> None:
        """Put a snapshot on probation."""
        if len(self._candidates) >= self._most:
            self._candidates.popleft()
        self._candidates.append(Candidate(snapshot))

    def count(self, *, clean: bool, warned: bool, loss: float | None) -> None:
        """Count a step for all candidates; one that is not clean starts the count again."""
        for candidate in self._candidates:
            candidate.clean = candidate.clean + (not warned) if clean else 0
            candidate.unbroken = candidate.unbroken + 1 if clean else 0
            if clean and loss is not None:
                candidate.losses.append(loss)

    def proved(self) -> Iterator[Snapshot]:
        """Take the candidates that have become good, oldest first; `promote` them."""
        while self._candidates and self._is_proved(self._candidates[0]):
            candidate = self._candidates.popleft()
            if candidate.losses:  # of one step it would say little
                candidate.snapshot.loss = statistics.median(candidate.losses)
            if not candidate.snapshot.torn:
                yield candidate.snapshot

    def _is_proved(self, candidate: Candidate) -> bool:
        needed = self._confirm_after
        return candidate.clean >= needed or candidate.unbroken >= _HELD_UP * needed

    def promote(self, snapshot: Snapshot) -> None:
        """Call a snapshot good."""
        snapshot.settle()
        self.good.append(snapshot)
        del self.good[: -self._keep]

    def go_back_to(self, snapshot: Snapshot) -> None:
        """Forget what is later than this good snapshot, and all candidates."""
        self.good = self.good[: self.good.index(snapshot) + 1]
        self._candidates.clear()

    def forget_after(self, step: int) -> None:
        """Forget the snapshots of later steps than this one."""
        self.good = [snapshot for snapshot in self.good if snapshot.step <= step]
        sound = [candidate for candidate in self._candidates if candidate.snapshot.step <= step]
        self._candidates = deque(sound)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: step, attempted step and size of each snapshot, good or on probation."""
        trial = [candidate.snapshot for candidate in self._candidates]
        known, self._sizes = self._sizes, {}
        for one in (*self.good, *trial):  # adding up takes a while for a model of many tensors
            mark = one.iteration, one.step
            self._sizes[mark] = known.get(mark) or one.nbytes()
        return {"good": list(map(self._entry, self.good)), "probation": list(map(self._entry, trial))}

    def _entry(self, snapshot: Snapshot) -> dict[str, int]:
        size = self._sizes[snapshot.iteration, snapshot.step]
        return {"step": snapshot.step, "iteration": snapshot.iteration, "bytes": size}

    def drop_torn(self) -> None:
        """Forget good snapshots that turned out to be torn."""
        self.good = [snapshot for snapshot in self.good if not snapshot.torn]

    def strain(self, snapshot: Snapshot) -> str | None:
        """Say what tells that a finite snapshot is ruined, compared with the older ones; None if nothing.

        A norm of a part of the state, or the gradient norm, of more than 10 times the median of the older
        ones; a loss of more than twice theirs, where losses are positive. Whether it is so can only be
        guessed, so this decides between snapshots and nothing else.
        """
        older = self.good[: self.good.index(snapshot)]
        for name, value in _vitals(snapshot).items():
            usual = [vitals[name] for vitals in map(_vitals, older) if vitals.get(name, 0.0) > 0.0]
            factor = WORSE if name == "loss" else _GROWN
            if usual and value > factor * statistics.median(usual):
                return f"{name} {value:.3g}, before {statistics.median(usual):.3g}"
        return None


def _vitals(snapshot: Snapshot) -> Mapping[str, float]:
    vitals = {f"norm of the {part}": float(norm) for part, norm in snapshot.norms.items()}
    if snapshot.grad_norm is not None:
        vitals["gradient norm"] = snapshot.grad_norm
    if snapshot.loss is not None:
        vitals["loss"] = snapshot.loss
    return vitals
