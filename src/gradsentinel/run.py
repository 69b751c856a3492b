"""What callbacks and responders may know of the run, and do to it."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsentinel.again.scene import MicroBatch, Scene
from gradsentinel.data.course import Course
from gradsentinel.data.skipped import SkippedBatches
from gradsentinel.errors import TrainingAborted
from gradsentinel.host import Forward, Host
from gradsentinel.incident import Incident, fold
from gradsentinel.measures.histogram import Histogram
from gradsentinel.measures.norm_history import NormHistory
from gradsentinel.ranks.blame import LocalGradients, Seen
from gradsentinel.ranks.consensus import Consensus
from gradsentinel.ranks.replicas import ReplicaGroup
from gradsentinel.ranks.topology import Rank
from gradsentinel.state import snapshot as snapshots
from gradsentinel.state.archive import ArchiveError
from gradsentinel.state.disk import Disk
from gradsentinel.state.health import StateHealth, in_words
from gradsentinel.state.layout import layout_of
from gradsentinel.state.lock import RunLock
from gradsentinel.state.resharding import divide_anew
from gradsentinel.state.rng import RngState
from gradsentinel.state.saved_states import SavedStates
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.staging import Staging
from gradsentinel.state.tree import clone_tree
from gradsentinel.store import RunDirectory

if TYPE_CHECKING:
    from gradsentinel.callback import Callback

logger = logging.getLogger("gradsentinel")


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
    diagnosers: list[Callable[[Incident, Run], None]] = field(default_factory=list)
    """What callbacks add in `on_run_start` to complete an incident, after everybody else; each is called on
    every rank, and may communicate."""
    callbacks: Sequence[Callback] = ()
    """All callbacks of the run, in order of registration."""
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
    """The newest state that later steps proved sound, or the one that the last rollback went to."""
    has_resume: bool = True
    """False where a run goes on from the framework's own checkpoint, and there is no `resume=`."""
    saved_at: str | None = None
    """Where the last good state was saved when the run was aborted."""
    optimizers: Sequence[Optimizer] = ()
    """The optimizers of the step in flight."""
    lag: int = 0
    """So many steps later the host hears of a step; 0 if it decides before the step."""
    decides_late: bool = False
    """True if the device drops bad steps by itself (`guard="device"`), and the host hears of it later."""
    late_step: int | None = None
    """The step whose incident is handled, while that is an earlier one that the device has dropped."""
    last_loss: float | None = None
    last_grad_norm: float | None = None
    usual: tuple[float | None, float] | None = None
    """Loss and gradient norm of the last step that was applied without an incident."""
    metrics: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Numbers that callbacks publish, by name: the attempted step each belongs to, and its value."""
    histograms: dict[str, tuple[int, Histogram]] = field(default_factory=dict)
    """Histograms that callbacks publish, likewise."""
    lifeless: dict[str, int] = field(default_factory=dict)
    """Parameters that were told to be dead or stuck, and the attempted step until which that is known."""
    suspected: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same by detector, of what is not told yet."""
    norms: NormHistory = field(default_factory=NormHistory)
    """The norms of every gradient over the last steps, for the incident that may come."""
    budgets: dict[str, Callable[[], Mapping[str, Any]]] = field(default_factory=dict)
    """What responders may spend, by their names: limit, window, and the attempted steps of each expense."""
    journal: deque[tuple[str, Mapping[str, Any]]] = field(default_factory=lambda: deque(maxlen=100))
    """Facts that are to become lines of the event log at the end of the step: what it is called, and what."""
    prompt: bool = False
    """True if somebody who keeps books wants to hear of this step's end before the next one."""
    course: Course = field(default_factory=Course)
    """The way through the data, where `Sentinel.steps` draws it."""
    resumed_from: int | None = None
    """The step that this run took up from an earlier process."""
    remember: Callable[[], Mapping[str, Any]] | None = None
    """Asks the callbacks what they must remember over a restart."""
    lock: RunLock | None = None
    """Keeps others from writing to the same run directory."""
    disk: Disk = field(default_factory=Disk)
    """What the disk does not take at the moment."""
    staging: Staging = field(default_factory=Staging)
    """Memory for snapshots."""
    states: SavedStates = field(init=False)
    """Known-good states on disk."""
    skipped: SkippedBatches = field(init=False)
    """The batches to leave out."""
    _layout: tuple[int, dict[str, Any]] = (-1, {})
    """Which parts of the whole this rank's tensors are, and for which generation of the host's."""
    in_flight: list[Snapshot] = field(default_factory=list)
    """Snapshots that may still be being copied."""

    def __post_init__(self) -> None:
        self.states = SavedStates(self.directory.snapshots, self.consensus, self.staging, self.disk)
        self.skipped = SkippedBatches(self.directory, self.consensus, self.disk)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number in it of the micro-batch that comes next, or has just been drawn."""
        return self.data["epoch"], self.data["batch"]

    def capture(self, *, before_step: bool = False, norms: Mapping[str, Tensor] | None = None) -> Snapshot:
        """Begin to copy the training state as it is between two steps; `hold` before the next one.

        `before_step` means that the next step may have begun: its random draws and its writes to
        buffers are left out. `norms` are those of the parts of the state, to be kept with it.
        """
        taken = snapshots.capture(
            self.host,
            self.scene.buffers,
            step=self.step,
            data=self.data,
            staging=self.staging,
            before_step=before_step,
            norms=norms,
        )
        if before_step and self.scene.rng is not None:
            taken.rng = self.scene.rng
        taken.iteration = self.iteration
        taken.loss, taken.grad_norm = self.last_loss, self.last_grad_norm
        taken.epoch = self.course.state(self, before_step=before_step)
        taken.callbacks = clone_tree(self.remember(), "cpu") if self.remember is not None else {}
        taken.layout = self._parts()
        self.in_flight.append(taken)
        return taken

    def _parts(self) -> dict[str, Any]:
        generation = getattr(self.host, "generation", 0)
        if self._layout[0] != generation:
            self._layout = generation, layout_of(self.host, self.scene.buffers.named())
        return self._layout[1]

    def restore(self, snapshot: Snapshot) -> None:
        """Put the training state back to a snapshot; the data position goes on as it is.

        Raises:
            SnapshotMismatch: if it does not fit; nothing was changed then.
        """
        self.hold()
        flaws = snapshot.flaws()
        if flaws:
            raise RuntimeError(f"the snapshot of step {snapshot.step} is not finite: {fold(flaws)}")
        snapshots.restore(snapshot, self.host, self.scene.buffers)
        self.step = snapshot.step
        found = self.health.scan()
        if found:
            raise RuntimeError(f"the restored state of step {snapshot.step} is not finite: {in_words(found)}")

    def resume(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """Load a saved state and put it back; called on every rank, and fails on every rank if on one.

        Args:
            path: this rank's archive; None takes the newest that every rank has.

        Raises:
            ArchiveError: if there is none, if it is damaged, or if another rank failed.
            SnapshotMismatch: if it does not fit; nothing was changed on this rank then.
        """
        mark = None
        snapshot: Snapshot | None = None
        failure: Exception | None = None
        if path is None:
            mark, snapshot = self.states.load_newest(self._divided)
        try:
            snapshot = snapshot or self.states.load(Path(path or ""))
            self.restore(snapshot)
        except TrainingAborted:
            raise
        except Exception as error:  # noqa: BLE001 - told to every rank first, then raised
            failure = error
        if not self.consensus.all_of(failure is None) or snapshot is None:
            raise failure or ArchiveError("another rank could not put its saved state back, see its log")
        self.data.update(snapshot.data)
        self.course.forget()
        self.skipped.take_up()
        if mark is not None:
            self.states.go_on_from(mark)
        self.iteration = max(self.iteration, snapshot.iteration, self.states.last_iteration())
        return snapshot

    def _divided(self, paths: Sequence[Path]) -> Snapshot:
        """Return this rank's part of a state that another number of ranks has saved."""
        here = self.consensus
        if not here.rank:
            logger.warning(
                "the state was saved by %d ranks and is taken by %d: weights and moments are divided anew, "
                "the position in the data is the number of batches that each of those %d had drawn",
                len(paths),
                here.world_size,
                len(paths),
            )
        named = self.scene.buffers.named()
        return divide_anew(paths, self.host, named, rank=here.rank, ranks=here.world_size)

    @contextmanager
    def as_it_was(
        self,
        step: int,
        microbatches: Sequence[MicroBatch],
        rng: RngState | None,
        optimizers: Sequence[Optimizer],
        seen: Seen,
    ) -> Iterator[None]:
        """Handle an incident of an earlier step, which the device has dropped, with that step's scene."""
        scene, local = self.scene, self.local
        now = scene.microbatches, scene.rng, self.optimizers, local.seen
        scene.microbatches, scene.rng, self.optimizers = list(microbatches), rng, optimizers
        local.seen, self.late_step = seen, step
        try:
            yield
        finally:
            scene.microbatches, scene.rng, self.optimizers, local.seen = now
            self.late_step = None

    def undo_step(self) -> None:
        """Take back what the step in flight has done so far: its gradients and its writes to buffers."""
        if self.late_step is not None:
            return  # the device has done so, and another step may be in flight
        self.scene.buffers.restore(self.stepping())
        self.host.drop(self.optimizers)

    def stepping(self) -> list[nn.Module] | None:
        """Return the root modules the step is about: another player's graph may still be in use (GAN)."""
        if len(self.optimizers) >= len(self.host.optimizers):
            return None
        mine = {id(p) for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        return [root for _, root in self.host.modules() if any(id(p) in mine for p in root.parameters())]

    def hold(self) -> None:
        """Have snapshots that are still being copied finished before the optimizer writes; no host wait."""
        for snapshot in self.in_flight:
            if snapshot.pending is not None and not snapshot.pending.hold():
                snapshot.torn = True
                self.staging.in_line()
        self.in_flight.clear()

    def save_known_good(self) -> str | None:
        """Write the last known-good state to disk; returns where, or None if that was not possible."""
        path = None if self.known_good is None else self.states.save_now(self.known_good)
        self.saved_at = None if path is None else str(path)
        return self.saved_at

    def close(self, error: BaseException | None = None) -> None:
        """Finish what is being written, and give the directory back; a second call does nothing.

        Called on: every rank, after the ranks have agreed for the last time if there was no error.
        """
        if error is None or isinstance(error, Exception):  # who presses Ctrl-C does not want to wait
            self.states.finish()
        if error is None:
            self.states.thin_out()
        self.states.close()
        if error is None:
            self.states.finish()
        if self.lock is not None:
            self.lock.release()
