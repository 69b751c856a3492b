"""The known-good states of a run on disk: written beside the training, thinned out, found again."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsentinel.ranks.consensus import Consensus
from gradsentinel.state.archive import (
    ArchiveError,
    list_archives,
    read_archive,
    read_manifest,
    remove_archive,
)
from gradsentinel.state.background import Background
from gradsentinel.state.disk import Disk, is_of_the_disk
from gradsentinel.state.parts import SNAPSHOT_KIND, complete_states, orphans
from gradsentinel.state.resharding import CannotDivide
from gradsentinel.state.scribe import Scribe
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.staging import Staging
from gradsentinel.store import unused

logger = logging.getLogger("gradsentinel")

_PATIENCE = 600.0
"""Seconds that the training waits for a disk that is slower than the snapshots follow each other."""

_WHAT = "the known-good states"

Mark = tuple[int, int]
"""Which state it is: steps attempted until then, steps done. The first never goes back, so it orders them."""


class SavedStates:
    """This rank's known-good states in `snapshots/`, each an archive, whole or not there.

    One is written at a time, beside the training, and read back before it gets its name. While it is
    written the snapshot stays in memory; the next one waits, so memory is bounded and all ranks save the
    same steps. An older state is deleted only when all ranks are known to have a newer one.

    Args:
        directory: where the states lie; made when the first is saved.
        consensus: to find the newest that all ranks have.
        staging: the memory of the snapshots, and where to add up what saving costs.
        disk: who says that it refuses, and that it takes them again.
    """

    def __init__(
        self, directory: Path, consensus: Consensus, staging: Staging, disk: Disk | None = None
    ) -> None:
        self.directory = directory
        self._disk = disk or Disk()
        self._consensus = consensus
        self._staging = staging
        self._cost = staging.cost
        self.keep = 0
        """So many are to be kept on disk; 0 while nobody saves any regularly."""
        self._background = Background(max_bytes=1 << 62)
        self._last: Mark | None = None
        """Written last, perhaps not finished yet."""
        self._whole: list[Mark] = []
        """Those that all ranks have, as far as this rank can know."""
        self._written: set[Mark] = set()
        """Those that this process has written, or found to be there."""
        self._asked: int | None = None
        """When the last was asked for, until older ones were thinned out."""
        self._scribe = Scribe(directory, consensus, staging)
        self._failed: list[tuple[Mark, str]] = []
        self._unusable: set[Mark] = set()
        """Those that some rank could not read."""

    # -- saving -----------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, *, now: int) -> None:
        """Have this rank's snapshot, a good one, written beside the training; called on every rank.

        Waits for the one before to be finished. What goes wrong is logged, and kept for `failures`.

        Args:
            snapshot: a state that is known to be good.
            now: number of steps attempted so far, by which `thin_out` tells that the ranks have agreed since.
        """
        mark = _mark(snapshot)
        started = time.perf_counter()
        finished = self.finish()
        self._cost.wait_seconds += time.perf_counter() - started
        if not finished:
            self._failed.append((mark, f"the disk is too slow for the state of step {snapshot.step}"))
            return
        if self._last in self._written:
            self._count_as_whole(self._last)
        self._last, self._asked = mark, now

        def write() -> None:
            there = self._is_ours(self.saved().get(mark))  # it was taken up again, or gone back to
            if there and not self._scribe.together:
                self._written.add(mark)
                return
            started = time.perf_counter()
            try:
                self._scribe.write_beside(snapshot, there=there)
            except Exception as error:
                self._failed.append((mark, f"the state of step {snapshot.step} could not be saved: {error}"))
                if is_of_the_disk(error):
                    self._disk.refused(_WHAT, error, lost=f"the state of step {snapshot.step} on disk")
                elif not isinstance(error, ArchiveError):  # that one is going to be an incident
                    raise
                return
            self._written.add(mark)
            self._disk.taken(_WHAT)
            self._cost.written += 1
            self._cost.write_seconds += time.perf_counter() - started

        self._background.submit(f"the state of step {snapshot.step}", write)

    def save_now(self, snapshot: Snapshot) -> Path | None:
        """Write this rank's snapshot before going on, unless it is there; None, and logged, if it fails."""
        self.finish()
        there = self.saved().get(_mark(snapshot))
        if there is not None:
            return there
        try:
            path = self._scribe.write(snapshot)
        except (OSError, RuntimeError, TypeError) as error:
            if is_of_the_disk(error):
                logger.error("the state of step %d could not be saved: %s", snapshot.step, error)  # noqa: TRY400
                self._disk.refused(_WHAT, error)
            else:
                logger.exception("the state of step %d could not be saved", snapshot.step)
            return None
        self._disk.taken(_WHAT)
        self._delete_older()
        return path

    def failures(self) -> list[tuple[Mark, str]]:
        """Return what could not be written since the last call, each with a sentence that says why."""
        self._background.failures()  # the same ones in other words
        found, self._failed = self._failed, []
        return found

    def finish(self) -> bool:
        """Wait until everything is written; False, and logged, if that takes too long."""
        return self._background.finish(_PATIENCE)

    def write_together(self) -> None:
        """From now on have all ranks finish a state beside the training, or none; called on every rank."""
        self._scribe.write_together(_PATIENCE / 2)

    def close(self) -> None:
        """Have the process that writes ended when all is written, without waiting for that."""
        self._background.submit("the end of the process that writes", self._scribe.close)

    # -- thinning out -----------------------------------------------------------------------------

    def thin_out(self, *, now: int | None = None) -> None:
        """Delete the older states, beside the training: all but the newest that all ranks have.

        Does nothing until the ranks have agreed on something since the last `save`, for only then have all
        of them finished the one before that.

        Args:
            now: number of steps attempted so far; None says that all ranks have finished the last one, too.
        """
        if now is not None and (self._asked is None or now <= self._asked):
            return
        self._asked = None
        if now is None and self._last in self.saved():
            self._count_as_whole(self._last)
        self._delete_older()

    def doubt(self, mark: Mark) -> None:
        """Hear that some rank has no such state: it is of no use to the others, and the older ones stay."""
        self._whole = [known for known in self._whole if known != mark]
        if self._last == mark:
            self._last = None
        self._delete([mark])

    def forget_after(self, *, step: int) -> None:
        """Delete the states of later steps than this one: they are not what they were taken for."""
        self.finish()
        self._delete(mark for mark in self.saved() if mark[1] > step)

    def _count_as_whole(self, mark: Mark | None) -> None:
        if mark is not None:
            self._whole = [*(known for known in self._whole if known != mark), mark]

    def _delete_older(self) -> None:
        self._whole = self._whole[-max(self.keep, 1) :]
        if self._whole:
            oldest = self._whole[0]
            self._remove(lambda mark, saved: mark < oldest and oldest in saved)

    def _delete(self, marks: Iterable[Mark]) -> None:
        """Delete states, beside the training, when what is being written is there."""
        gone = set(marks)
        if not gone:
            return
        self._whole = [mark for mark in self._whole if mark not in gone]
        self._written -= gone
        if self._last in gone:
            self._last = None
        self._remove(lambda mark, _: mark in gone)

    def _remove(self, is_gone: Callable[[Mark, Mapping[Mark, Path]], bool]) -> None:
        """Have a thread look for the states that are there, which takes a while, and remove some."""

        def delete() -> None:
            saved = self.saved()
            left = orphans(self.directory, self._consensus.world_size) if not self._consensus.rank else ()
            for mark, path in (*saved.items(), *left):
                if is_gone(mark, saved):
                    remove_archive(path)

        self._background.submit("the removal of old states", delete)

    # -- finding ----------------------------------------------------------------------------------

    def saved(self) -> dict[Mark, Path]:
        """Return this rank's whole states, oldest first."""
        found: dict[Mark, Path] = {}
        with suppress(ArchiveError):
            for path in list_archives(self.directory, SNAPSHOT_KIND):
                mark = self._mark_of(path)
                if mark is None or mark in self._unusable:
                    continue
                if mark not in found or not self._is_ours(found[mark]):
                    found[mark] = path
        return dict(sorted(found.items()))

    def _mark_of(self, path: Path) -> Mark | None:
        match = re.fullmatch(rf"step-(\d+)-rank{self._consensus.rank}(?:-\d+)?", path.name)
        if match is None:
            return None
        meta = _meta(path)
        iteration = meta.get("iteration", int(match[1]))
        return (iteration, int(match[1])) if isinstance(iteration, int) else None

    def _is_ours(self, path: Path | None) -> bool:
        """Whether there is an archive of as many ranks as there are."""
        return path is not None and _meta(path).get("world_size") == self._consensus.world_size

    def newest(self) -> Mark | None:
        """Return the newest state that every rank has, None if there is none; called on every rank.

        One that another number of ranks has saved counts if every rank sees all its parts.

        Raises:
            ArchiveError: if the newest was saved by another number of ranks, and parts of it are not here; on
                every rank.
        """
        everyone = self._survey()
        here = self._consensus.world_size
        newest = self._whole[-1] if self._whole else None
        others = [
            (mark, size)
            for theirs in everyone
            for mark, size in theirs.items()
            if isinstance(size, int) and size != here and (newest is None or mark > newest)
        ]
        if others:
            mark, size = max(others)
            if self._consensus.all_of(self._parts(mark, size) is not None):
                return mark
            raise ArchiveError(
                f"the state of step {mark[1]} in {self.directory} was saved by {size} ranks, this job has "
                f"{here}, and not every rank sees all {size} parts: put the run directory where all see it, "
                "or start as many again"
            )
        return newest

    def _parts(self, mark: Mark, size: int | None = None) -> tuple[Path, ...] | None:
        """Return the archives of a state that another number of ranks has saved, None if one is missing."""
        here = self._consensus.world_size
        for one in complete_states(self.directory):
            count = len(one.paths)
            if (one.iteration, one.step) == mark and count != here and size in (None, count):
                return one.paths
        return None

    def load_newest(self, divide: Callable[[tuple[Path, ...]], Snapshot]) -> tuple[Mark, Snapshot]:
        """Read the newest state that every rank has and can read; called on every rank.

        One that is damaged on some rank is reported and passed over.

        Args:
            divide: makes this rank's part of the archives of another number of ranks.

        Raises:
            ArchiveError: if there is none, or it cannot be divided anew; on every rank.
        """
        failure: Exception | None = None
        while (mark := self.newest()) is not None:
            snapshot, refusal = None, ""
            try:
                parts = None if mark in self._whole else self._parts(mark)
                snapshot = self.load(self.saved()[mark]) if parts is None else divide(parts)
            except CannotDivide as error:
                refusal = f"the state of step {mark[1]} cannot be divided anew: {error}"
            except (ArchiveError, RuntimeError) as error:
                failure = error
                logger.error("the state of step %d cannot be used: %s", mark[1], error)  # noqa: TRY400
            told = next(filter(None, self._consensus.gather(refusal)), None)
            if told is not None:
                raise ArchiveError(told)
            if self._consensus.all_of(snapshot is not None) and snapshot is not None:
                return mark, snapshot
            self._set_aside(mark)
        reason = "" if failure is None else f": {failure}"
        raise ArchiveError(f"there is no saved state in {self.directory} that every rank has{reason}")

    def load(self, path: Path) -> Snapshot:
        """Read one state; raises ArchiveError or SnapshotMismatch if it is none."""
        state, _ = read_archive(path, kind=SNAPSHOT_KIND)
        return Snapshot.from_tree(state)

    def _set_aside(self, mark: Mark) -> None:
        """Rename a state that some rank cannot read, so that nobody takes it for one; it is not deleted."""
        path = self.saved().get(mark)
        self._unusable.add(mark)
        if path is not None:
            with suppress(OSError):
                path.rename(unused(path.parent, f"damaged-{path.name}"))

    def go_on_from(self, mark: Mark) -> None:
        """Hear that the run goes on from this state, which all ranks have: later ones are of another past."""
        self._delete(known for known in self.saved() if known > mark)
        self._whole, self._last, self._written = [mark], mark, {mark}

    def last_iteration(self) -> int:
        """Return the largest number of attempted steps of any state of any rank, -1 if there is none.

        Called on: every rank.
        """
        return max((mark[0] for theirs in self._survey() for mark in theirs), default=-1)

    def _survey(self) -> list[dict[Mark, Any]]:
        """Return every rank's marks, with the number of ranks that saved it; called on every rank."""
        mine = {mark: _meta(path).get("world_size") for mark, path in self.saved().items()}
        everyone = self._consensus.gather(mine)
        here = self._consensus.world_size
        usable = ({mark for mark, size in theirs.items() if size == here} for theirs in everyone)
        self._whole = sorted(set.intersection(*usable))
        return everyone


def _mark(snapshot: Snapshot) -> Mark:
    return snapshot.iteration, snapshot.step


def _meta(path: Path) -> Mapping[str, Any]:
    try:
        meta = read_manifest(path, kind=SNAPSHOT_KIND).meta
    except ArchiveError:
        return {}
    return meta if isinstance(meta, Mapping) else {}
