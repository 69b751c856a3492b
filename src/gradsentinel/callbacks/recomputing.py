"""What the rungs that compute a step again have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gradsentinel import events
from gradsentinel.again.recompute import Recomputed, knows_how, reason_against, recompute
from gradsentinel.callback import Responder
from gradsentinel.decision import Kind
from gradsentinel.diagnosis.replay import rehearse
from gradsentinel.incident import Incident
from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

NONFINITE = frozenset({Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE})
"""Kinds of a step whose outcome is not finite."""
HOPELESS = frozenset({Kind.NONFINITE_INPUT, Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE})
"""Kinds that come out the same however often the step is computed."""


@dataclass(kw_only=True)
class Recomputing(Responder):
    """A rung that computes the step in flight again."""

    def on_run_start(self, event: events.RunStart) -> None:
        """Say at once, and once, if no step can ever be computed again here."""
        run = event.run
        run.scene.notes_writes = True
        reason = ""
        if not knows_how(run):
            reason = "pass forward=lambda model, batch: loss to the Sentinel, which can then repeat a step"
        elif run.decides_late:
            reason = "under guard='device' the step is over when anybody hears of it; it needs guard='host'"
        if reason and run.consensus.rank == 0:
            name = type(self).__name__
            logger.warning("%s can do nothing and hands over to the next rung: %s", name, reason)

    @staticmethod
    def _ready(incident: Incident, run: Run) -> bool:
        """Say whether every rank can compute the step again; notes why not. Called on: every rank."""
        hopeless = incident.kind in HOPELESS and not incident.can_be_undone
        if hopeless or incident.step != run.step:
            return False
        reasons = run.consensus.gather(reason_against(run))
        if not any(reasons):
            return True
        incident.notes += (f"the step cannot be computed again: {next(filter(None, reasons))}",)
        return False

    @staticmethod
    def _again(
        run: Run,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        tentative: bool = False,
    ) -> Recomputed:
        """Compute the step again, after a rehearsal where ranks would wait for each other.

        Called on: every rank.
        """
        failure = rehearse(run, tentative=tentative)
        if failure is not None:
            return Recomputed(failure=failure)
        return recompute(run, around=around, tentative=tentative)
