"""What callbacks and responders may know of the run, and do to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from gradsentinel import snapshot as snapshots
from gradsentinel.archive import ArchiveError, list_archives, read_archive, write_archive
from gradsentinel.consensus import Consensus
from gradsentinel.health import StateHealth, in_words
from gradsentinel.host import Host
from gradsentinel.incident import Incident, Rank
from gradsentinel.scene import Scene
from gradsentinel.snapshot import Snapshot
from gradsentinel.store import RunDirectory, unused

logger = logging.getLogger("gradsentinel")

SNAPSHOT_KIND = "snapshot"


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, from start to close, on one rank."""

    host: Host
    directory: RunDirectory
    consensus: Consensus
    scene: Scene
    health: StateHealth
    rank: Rank
    explicit_directory: bool = True
    """False when the run directory was not named and is only made when there is something to keep."""
    step: int = 0
    """Number of the optimizer step in flight; goes back on a rollback."""
    iteration: int = 0
    """Number of steps attempted; never goes back, so budgets count in it."""
    data: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "batch": 0, "batches": 0})
    """Position in the data: epoch, micro-batch in it, micro-batches over all epochs."""
    incidents: list[Incident] = field(default_factory=list)
    known_good: Snapshot | None = None
    """The newest state that later steps proved sound."""
    optimizers: Sequence[Optimizer] = ()
    """The optimizers of the step in flight."""
    last_loss: float | None = None
    last_grad_norm: float | None = None

    def capture(self, *, before_step: bool = False) -> Snapshot:
        """Copy the training state as it is between two steps; waits for the device.

        `before_step` means that the next step may have begun: its random draws and its writes to
        buffers are left out.
        """
        taken = snapshots.capture(
            self.host, self.scene.buffers, step=self.step, data=self.data, before_step=before_step
        )
        if before_step and self.scene.rng is not None:
            taken.rng = self.scene.rng
        taken.loss, taken.grad_norm = self.last_loss, self.last_grad_norm
        return taken

    def restore(self, snapshot: Snapshot) -> None:
        """Put the training state back to a snapshot; the data position goes on as it is.

        Raises:
            SnapshotMismatch: if it does not fit; nothing was changed then.
        """
        snapshots.restore(snapshot, self.host, self.scene.buffers)
        self.step = snapshot.step
        found = self.health.scan()
        if found:
            raise RuntimeError(f"the restored state of step {snapshot.step} is not finite: {in_words(found)}")

    def undo_step(self) -> None:
        """Take back what the step in flight has done so far: its gradients and its writes to buffers."""
        self.scene.buffers.restore()
        self.host.drop(self.optimizers)

    def save_known_good(self) -> str | None:
        """Write the last known-good state to disk; returns where, or None if that was not possible."""
        if self.known_good is None:
            return None
        name = f"step-{self.known_good.step:09d}-rank{self.rank.rank}"
        path = unused(self.directory.snapshots, name)
        try:
            self.directory.snapshots.mkdir(parents=True, exist_ok=True)
            write_archive(
                path,
                self.known_good.to_tree(),
                {"step": self.known_good.step, "known_good": True},
                kind=SNAPSHOT_KIND,
            )
        except (OSError, RuntimeError, TypeError):
            logger.exception("the last good state could not be saved")
            return None
        return str(path)

    def load_snapshot(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """Read a saved state: the one at `path`, or this rank's newest in the run directory.

        Raises:
            ArchiveError: if there is none, or it is damaged.
        """
        if path is None:
            suffix = f"-rank{self.rank.rank}"
            found = [
                saved
                for saved in list_archives(self.directory.snapshots, SNAPSHOT_KIND)
                if suffix in saved.name
            ]
            if not found:
                raise ArchiveError(f"no snapshot of rank {self.rank.rank} in {self.directory.snapshots}")
            path = found[0]
        state, _ = read_archive(path, kind=SNAPSHOT_KIND)
        return Snapshot.from_tree(state)
