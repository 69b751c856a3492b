"""Taking up a run where an earlier process left it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsentinel.errors import ConfigurationError
from gradsentinel.run import Run
from gradsentinel.state.lock import RunLock
from gradsentinel.state.tree import clone_tree
from gradsentinel.testing import record_swallowed

if TYPE_CHECKING:
    from gradsentinel.watch import Watch

logger = logging.getLogger("gradsentinel")


def claim_directory(run: Run) -> None:
    """Lock a named run directory, on every rank or on none; called on every rank.

    One that cannot be written to is reported, and the run goes on: what would be saved stays in memory.

    Raises:
        ConfigurationError: if another run is using it; on every rank.
    """
    trouble: str | None = None
    if run.explicit_directory:
        try:
            run.lock = RunLock.take(run.directory.path, run.rank.rank)
        except ConfigurationError as error:
            trouble = str(error)
        except OSError as error:
            logger.error(  # noqa: TRY400 - the reason is in the message
                "%s cannot be written to (%s): incidents are only logged, and known-good states are kept in "
                "memory only, so a restart cannot go on from them",
                run.directory.path,
                error.strerror or error,
            )
    told = [text for text in run.consensus.gather(trouble) if text is not None]
    if told:
        if run.lock is not None:
            run.lock.release()
        raise ConfigurationError(trouble or told[0])


def resume(watch: Watch, setting: str | os.PathLike[str] | None) -> bool:
    """Put the state back that an earlier process left, if it is asked for; called on every rank.

    Before the first event of the run, and also where nothing is to be put back: what the callbacks ask of
    the data is looked at here. Returns True if there was a state.

    Args:
        watch: of the run.
        setting: None starts afresh; 'auto' takes the newest state in the run directory that every rank
            has, or starts afresh if there is none; otherwise this rank's archive.

    Raises:
        ConfigurationError: if the setting is not of the same kind on every rank; if a callback wants to go
            back in data that the loop does not draw through the sentinel.
        ArchiveError: if there are states, but none that can be used; or no archive at the path.
        SnapshotMismatch: if it does not fit the model or optimizer; nothing was changed then.
    """
    run = watch.run
    _look_at_the_data(watch)
    kind = setting if setting is None or setting == "auto" else "path"
    if len(set(run.consensus.gather(kind))) > 1:
        raise ConfigurationError("resume= is not the same on every rank")
    if kind == "path" and not Path(setting or "").exists():
        raise ConfigurationError(f"resume={setting!r}: give 'auto', or the directory of a saved state")
    if kind is None or (kind == "auto" and run.states.newest() is None):
        _start_afresh(run, asked=kind is None)
        return False
    run.health.learn()  # an attention mask of -inf is no damage
    snapshot = run.resume(None if kind == "auto" else setting)
    recall(watch, snapshot.callbacks)
    run.course.saved = snapshot.epoch
    run.resumed_from = snapshot.step
    if not run.consensus.rank:
        place = f"epoch {run.data['epoch']}, batch {run.data['batch']}"
        logger.warning(
            "goes on from step %d, which was saved in %s (%s)", run.step, run.directory.path, place
        )
    return True


def _look_at_the_data(watch: Watch) -> None:
    """Let the callbacks that may go back in the data do so, or refuse them."""
    responders = watch.bus.responders()
    for responder in responders:
        if responder.replays_data:
            watch.run.course.require(f"{type(responder).__name__}(data='replay')")
    forgetful = [one for one in responders if getattr(one, "remember", True) is False]
    if watch.run.course.can_go_back and forgetful:
        raise ConfigurationError(
            "a rollback with data='replay' would draw the bad batches again, since "
            f"{type(forgetful[0]).__name__}(remember=False) keeps no list of them: leave remember=False out"
        )


def recall(watch: Watch, states: Mapping[str, Any]) -> None:
    """Give callbacks back what they remembered in an earlier process; one that refuses starts anew."""
    for callback in watch.bus.callbacks:
        name = watch.bus.name_of(callback)
        if not states.get(name):
            continue
        try:
            callback.load_state_dict(clone_tree(states[name]))
        except Exception as error:
            logger.exception("%s does not take back what it remembered, and starts anew", name)
            record_swallowed(error)


def _start_afresh(run: Run, *, asked: bool) -> None:
    """Count on behind what is on disk, so that the states of an earlier run are never the newest again."""
    if not run.explicit_directory:
        return
    last = run.states.last_iteration()
    if last < 0:
        return
    run.iteration = last + 1
    if run.consensus.rank or not run.has_resume:
        return
    if asked:
        logger.warning(
            "%s holds known-good states of an earlier run, and this one starts afresh; resume='auto' goes on "
            "from the newest",
            run.directory.snapshots,
        )
    else:
        logger.warning("%s holds no state that every rank has: starting afresh", run.directory.snapshots)
