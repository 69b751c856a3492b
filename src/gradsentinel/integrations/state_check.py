"""A look at the whole training state before a checkpoint is written of it."""

from __future__ import annotations

import torch

from gradsentinel.callback import Detector
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.run import Run
from gradsentinel.state.health import in_words


class StateCheck(Detector):
    """Has the training state looked at when somebody is about to write a checkpoint of it."""

    def look(self, run: Run) -> Finding:
        """Return what is to be agreed on; reads the whole state, and waits for the device."""
        found = run.health.scan()

        def confirm() -> Evidence | None:
            if not found:
                return None
            return Evidence(
                kind=Kind.NONFINITE_PARAMETER if "parameters" in found else Kind.NONFINITE_STATE,
                action=Action.ROLLBACK,
                message=f"no checkpoint is written of this state: non-finite values in {in_words(found)}",
                tensors=tuple(entry for part in found.values() for entry in part),
            )

        value = torch.tensor(bool(found))
        return Finding(kind=Kind.NONFINITE_STATE, value=value, action=Action.ROLLBACK, confirm=confirm)
