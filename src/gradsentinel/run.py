"""What callbacks and responders may know of the run, and do to it."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradsentinel import snapshot as snapshots
from gradsentinel.archive import ArchiveError, list_archives, read_archive, remove_stale, write_archive
from gradsentinel.blame import LocalGradients
from gradsentinel.consensus import Consensus
from gradsentinel.errors import TrainingAborted
from gradsentinel.health import StateHealth, in_words
from gradsentinel.host import Forward, Host
from gradsentinel.incident import Incident, Rank, fold
from gradsentinel.replicas import ReplicaGroup
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
    local: LocalGradients = field(default_factory=LocalGradients)
    """This rank's own gradients, from before the reduction."""
    replicas: Sequence[ReplicaGroup] = ()
    """Who must hold the same parameters."""
    model: Any = None
    """The module(s) as the user's loop calls them."""
    forward: Forward | None = None
    """How the loop computes the loss of a micro-batch, if it told: then a step can be computed again."""
    diagnosis_budget: float = 30.0
    """Seconds that a diagnosis may take."""
    explicit_directory: bool = True
    """False when the run directory was not named and is only made when there is something to keep."""
    step: int = 0
    """Number of the optimizer step in flight; goes back on a rollback."""
    iteration: int = 0
    """Number of steps attempted; never goes back, so budgets count in it."""
    applied: int = 0
    """Number of steps that changed the weights."""
    data: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "batch": 0, "batches": 0})
    """Position in the data: epoch, micro-batch in it, micro-batches over all epochs."""
    incidents: list[Incident] = field(default_factory=list)
    known_good: Snapshot | None = None
    """The newest state that later steps proved sound."""
    fallback: Snapshot | None = None
    """The one that the last rollback went to, if it went further back than that."""
    saved_at: str | None = None
    """Where the last good state was saved when the run was aborted."""
    optimizers: Sequence[Optimizer] = ()
    """The optimizers of the step in flight."""
    last_loss: float | None = None
    last_grad_norm: float | None = None
    _saved: Snapshot | None = None
    """The snapshot that was written last."""

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
        flaws = snapshot.flaws()
        if flaws:
            raise RuntimeError(f"the snapshot of step {snapshot.step} is not finite: {fold(flaws)}")
        snapshots.restore(snapshot, self.host, self.scene.buffers)
        self.step = snapshot.step
        found = self.health.scan()
        if found:
            raise RuntimeError(f"the restored state of step {snapshot.step} is not finite: {in_words(found)}")

    def resume(self, path: str | os.PathLike[str] | None = None) -> None:
        """Load a saved state and put it back; called on every rank, and fails on every rank if on one.

        Raises:
            ArchiveError: if there is none, if it is damaged, or if another rank failed.
            SnapshotMismatch: if it does not fit; nothing was changed on this rank then.
        """
        failure: Exception | None = None
        try:
            snapshot = self.load_snapshot(path)
            self.restore(snapshot)
            self.data.update(snapshot.data)
        except TrainingAborted:
            raise
        except Exception as error:  # noqa: BLE001 - told to every rank first, then raised
            failure = error
        if self.consensus.all_of(failure is None):
            return
        raise failure or ArchiveError("another rank could not put its saved state back, see its log")

    def undo_step(self) -> None:
        """Take back what the step in flight has done so far: its gradients and its writes to buffers."""
        self.scene.buffers.restore(self._stepping())
        self.host.drop(self.optimizers)

    def _stepping(self) -> list[nn.Module] | None:
        """The root modules the step is about: the graph of a GAN's other player may still be in use."""
        if len(self.optimizers) >= len(self.host.optimizers):
            return None
        mine = {id(p) for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        return [root for _, root in self.host.modules() if any(id(p) in mine for p in root.parameters())]

    def save_known_good(self) -> str | None:
        """Write the last known-good state to disk; returns where, or None if that was not possible."""
        if self.known_good is None:
            return None
        if self.fallback is not None and self.fallback is not self.known_good:
            self.save(self.fallback)
        there = self.saved().get(self.known_good.step) if self._saved is self.known_good else None
        path = there or self.save(self.known_good)
        self.saved_at = None if path is None else str(path)
        return self.saved_at

    def save(self, snapshot: Snapshot) -> Path | None:
        """Write this rank's snapshot to disk, whole or not at all; None if the disk refuses (logged)."""
        flaws = snapshot.flaws()
        if flaws:
            logger.error(
                "the state of step %d is not finite and is not saved: %s", snapshot.step, fold(flaws)
            )
            return None
        path = unused(self.directory.snapshots, f"step-{snapshot.step:09d}-rank{self.rank.rank}")
        try:
            self.directory.snapshots.mkdir(parents=True, exist_ok=True)
            remove_stale(self.directory.snapshots)  # what a killed process left half written
            write_archive(
                path, snapshot.to_tree(), {"step": snapshot.step, "known_good": True}, kind=SNAPSHOT_KIND
            )
        except (OSError, RuntimeError, TypeError):
            logger.exception("the state of step %d could not be saved", snapshot.step)
            return None
        self._saved = snapshot
        return path

    def saved(self) -> dict[int, Path]:
        """Return this rank's snapshots on disk by step, the newest of each, whole ones only."""
        mine = re.compile(rf"step-(\d+)-rank{self.rank.rank}(?:-(\d+))?")
        found: dict[int, tuple[int, Path]] = {}
        for path in list_archives(self.directory.snapshots, SNAPSHOT_KIND):
            match = mine.fullmatch(path.name)
            if match is not None:
                step, number = int(match[1]), int(match[2] or 1)
                found[step] = max(found.get(step, (0, path)), (number, path))
        return {step: found[step][1] for step in sorted(found)}

    def keep_on_disk(self, count: int) -> None:
        """Delete this rank's older snapshots, leaving the newest `count`."""
        for step in list(self.saved())[:-count]:
            shutil.rmtree(self.saved()[step], ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Delete this rank's snapshots on disk of later steps than this one."""
        for saved, path in self.saved().items():
            if saved > step:
                shutil.rmtree(path, ignore_errors=True)

    def load_snapshot(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """Read a saved state: the one at `path`, or the newest that every rank has; called on every rank.

        Raises:
            ArchiveError: if there is none, or it is damaged.
        """
        if path is None:
            mine = self.saved()
            common = set.intersection(*map(set, self.consensus.gather(tuple(mine))))
            if not common:
                raise ArchiveError(
                    f"there is no saved state in {self.directory.snapshots} that every rank has"
                )
            path = mine[max(common)]
        state, _ = read_archive(path, kind=SNAPSHOT_KIND)
        return Snapshot.from_tree(state)
