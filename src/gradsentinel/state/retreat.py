"""How far to go back: to the same snapshot again, or to one before it."""

from __future__ import annotations

import statistics

from gradsentinel.decision import Kind
from gradsentinel.incident import Incident
from gradsentinel.state.ring import WORSE
from gradsentinel.state.snapshot import Snapshot

_OF_THE_STATE = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE, Kind.RANK_DIVERGENCE}
"""Incidents in which the state itself is what is bad."""
_ACQUITTED = {"data", "hardware", "operator", "setup"}
"""Causes that have nothing to do with the numbers in the state."""
_CERTAIN = 0.5
_COURSE = 64
"""Of so many clean steps since a rollback the losses are remembered."""


class Retreat:
    """Judges a restored state by what follows from it, until the run is past the trouble it went back for.

    Trouble that comes back is a matter of other batches as long as the state gives no reason to doubt it;
    then the snapshot is as good as it was, and going further back would only lose more. Against the state
    speaks that it is bad itself; that the trouble follows at once, and no diagnosis acquits the state; that
    the clean steps made from it are worse than those that proved it.

    Args:
        acquit_after: so many clean steps in a row from the restored state clear it of suspicion.
    """

    def __init__(self, acquit_after: int) -> None:
        self._acquit_after = acquit_after
        self._trouble = -1
        """The step at which the trouble was; -1 when the run is past it."""
        self._in_a_row = 0
        self._cleared = False
        self._losses: list[float] = []
        self._to: Snapshot | None = None

    @property
    def past_trouble(self) -> bool:
        """False while the run repeats steps that led to a rollback: its snapshots may lead there too."""
        return self._trouble < 0

    def count(self, step: int, *, clean: bool, loss: float | None) -> None:
        """Hear of a step that was made or dropped."""
        if self.past_trouble:
            return
        if step > self._trouble:
            self._trouble, self._to = -1, None
            return
        self._in_a_row = self._in_a_row + 1 if clean else 0
        self._cleared |= self._in_a_row >= self._acquit_after
        if clean and loss is not None and len(self._losses) < _COURSE:
            self._losses.append(loss)

    def went_to(self, snapshot: Snapshot, trouble: int) -> None:
        """Hear that the run goes on from a snapshot, because of trouble at a step."""
        self._trouble = max(self._trouble, trouble)
        self._to, self._in_a_row, self._cleared = snapshot, 0, False
        self._losses.clear()

    def against(self, incident: Incident) -> str | None:
        """Say what speaks against the state that the run last went back to; None if nothing does."""
        if self._to is None or self.past_trouble:
            return None
        found = incident.diagnosis
        cause = found.cause if found is not None and found.confidence >= _CERTAIN else "unknown"
        if incident.kind in _OF_THE_STATE or cause == "optimizer":
            return "the state itself has gone bad again"
        if incident.kind is Kind.NONFINITE_INPUT or cause in _ACQUITTED:
            return None
        if not self._cleared:
            return f"the trouble came back before {self._acquit_after} steps in a row were clean"
        before = self._to.loss
        if before is not None and before > 0 and self._losses:
            now = statistics.median(self._losses)
            if now > WORSE * before:
                return f"the loss of the steps made from it is {now:.3g}, before it was {before:.3g}"
        return None
