"""How a rank's part of a known-good state gets to the disk: by a process, by a thread, with the others."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradsentinel.incident import fold
from gradsentinel.ranks.consensus import Consensus
from gradsentinel.state.archive import ArchiveError, remove_stale, write_archive
from gradsentinel.state.parts import SNAPSHOT_KIND
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.staging import Staging
from gradsentinel.state.tree import UnsupportedStateError, flatten
from gradsentinel.state.writer import KeptWriter, Writer
from gradsentinel.store import unused

if TYPE_CHECKING:
    from gradsentinel.state.together import Together

logger = logging.getLogger("gradsentinel")

_FOR_A_PROCESS = 4 << 20
"""Bytes from which on a state is worth a process: to start one costs as much as to write so many."""


class Scribe:
    """Writes this rank's part of a state as an archive, whole, read back, or not there.

    Args:
        directory: where the archives lie; made when the first is written.
        consensus: tells this rank's number.
        staging: the memory of the snapshots.
    """

    def __init__(self, directory: Path, consensus: Consensus, staging: Staging) -> None:
        self._directory, self._consensus, self._staging = directory, consensus, staging
        self._kept = KeptWriter()
        self.together: Together | None = None
        """Where all ranks finish a state, while they can."""

    def write_together(self, timeout: float) -> None:
        """Finish states that are written beside the training with all ranks; called on every rank.

        Args:
            timeout: seconds that a rank may keep the others waiting.
        """
        if self._consensus.world_size > 1:
            from gradsentinel.state.together import Together  # noqa: PLC0415 - takes long, and few ask for it

            try:
                self.together = Together(timeout)
            except (RuntimeError, ValueError) as error:  # no gloo here
                logger.warning(
                    "the ranks cannot finish states together, each writes its own by itself: %s", error
                )

    def write_beside(self, snapshot: Snapshot, *, there: bool) -> None:
        """Write it in a thread beside the training, with all ranks where that was asked for.

        Args:
            snapshot: whose part it is.
            there: this rank has it already, and only the others are to hear of it.

        Raises:
            ArchiveError, UnsupportedStateError: it could not be written, here or by another rank.
        """
        path = self._path(snapshot)
        if self.together:
            self.together.save(path, None if there else partial(self._write_part, snapshot))
        elif not there:
            self._write_part(snapshot, path)

    def write(self, snapshot: Snapshot) -> Path:
        """Write it in this thread, whatever the others do; raises as `write_beside`."""
        return self._write(snapshot, self._path(snapshot))

    def close(self) -> None:
        """End the process that writes, and give the ranks' group back; not while something is written."""
        self._kept.close()
        if self.together is not None:
            self.together.close()

    def _path(self, snapshot: Snapshot) -> Path:
        return unused(self._directory, f"step-{snapshot.step:09d}-rank{self._consensus.rank}")

    def _write_part(self, snapshot: Snapshot, path: Path) -> Path:
        """Have a large one written by a process, where there can be one: see `gradsentinel.state.writer`."""
        write = partial(self._write, snapshot, path)
        return write() if snapshot.nbytes() < _FOR_A_PROCESS else self._kept.do(write, self._staging.shared)

    def _write(self, snapshot: Snapshot, path: Path, writer: Writer | None = None) -> Path:
        flaws = snapshot.flaws()
        if flaws:
            raise ArchiveError(f"the state of step {snapshot.step} is not finite: {fold(flaws)}")
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_stale(self._directory)  # what a killed process left half written
        meta = {
            "step": snapshot.step,
            "iteration": snapshot.iteration,
            "known_good": True,
            "world_size": self._consensus.world_size,
        }
        state = snapshot.to_tree()
        try:
            flatten(state["callbacks"])
        except UnsupportedStateError as error:  # somebody's own callback is no reason to lose the weights
            logger.warning("step %d is saved without what the callbacks remember: %s", snapshot.step, error)
            state["callbacks"] = {}
        return write_archive(path, state, meta, kind=SNAPSHOT_KIND, verify=True, writer=writer)
