"""A look at the whole training state before a checkpoint is written of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from gradsentinel.callback import Detector
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConsensusError, TrainingAborted
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.run import Run
from gradsentinel.state.health import in_words

if TYPE_CHECKING:
    from gradsentinel.integrations.engine import Engine

logger = logging.getLogger("gradsentinel")


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


def check_own(engine: Engine) -> bool:
    """Look at the state before this rank writes it, perhaps alone; False if it must not be written.

    A bad one is put right at once where no other rank has to be asked, or all of them are here, each with
    its part. Else it is logged, and put right with the next step.

    Raises:
        TrainingAborted: as `Engine.check_state`.
    """
    run = engine.run
    alone = run.consensus.world_size == 1
    if alone or engine.host.sharded_modules():
        if not alone or run.health.scan():  # a good one is left alone: its step may not be over
            engine.check_state()
        return True
    if engine.may_save():
        return True
    finding = engine.state_check.look(run)
    engine.watch.file(engine.watch.bus.file(engine.state_check, finding, run.step))
    return False


def may_end_badly(run: Run, error: BaseException) -> bool:
    """Say whether this rank's state may be bad after an exception, which is not to be replaced by another.

    With several ranks that are not together any more nobody looks: the device may be waiting for the others.
    """
    together = isinstance(error, TrainingAborted) and not isinstance(error, ConsensusError)
    if run.consensus.world_size > 1 and not together:
        return True
    try:
        return bool(run.health.scan())
    except Exception:  # a device may be out of order by then
        logger.exception("the state that the run ends with could not be looked at")
        return False
