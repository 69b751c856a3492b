"""The ways to guard a run that are compared, on the plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradsentinel import NanCallback, Sentinel, Skip, TrainingAborted, standard
from gradsentinel.callback import Callback
from gradsentinel.campaign.feed import Feed
from gradsentinel.campaign.journal import Journal, Notes
from gradsentinel.campaign.kinds import Site
from gradsentinel.campaign.probe import Probe, State
from gradsentinel.campaign.schedule import Planned
from gradsentinel.campaign.workloads.text import MAX_NORM, LossScale, Text, loss_of
from gradsentinel.faults import FaultPlan

CHECKPOINT_EVERY = 50
"""Steps between two checkpoints of the job, which every policy has."""
DIES_BEFORE_DROPPED = 2
"""A job that died so often without getting further is started again without the batches to blame."""
DIAGNOSIS_BUDGET = 120.0
"""Seconds: so many that a busy machine decides nothing."""


class JobDiedError(Exception):
    """The check of a framework found a number that is not finite, and ended the job."""


@dataclass
class Job:
    """One run of the plain loop under one policy, from the first batch to the last, restarts included."""

    task: Text
    faults: Sequence[Planned]
    seed: int
    scaler: torch.amp.GradScaler | None = None
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        self.model = self.task.model()
        self.optimizer = self.task.optimizer(self.model)
        torch.manual_seed(self.task.seed)
        self._scale = None if self.scaler is None else LossScale(self.scaler)
        self._checkpoints: list[tuple[int, State]] = []
        self._furthest = -1
        self._deaths = 0  # without getting further

    def run(self, loop: Callable[[Job, Feed, Path], None], folder: Path, *, faulty: bool) -> Feed:
        """Train to the end; every time the loop dies it is started again from a checkpoint."""
        site = Site(optimizer=self.optimizer, scale=self._scale)
        plan = FaultPlan([one.fault(site) for one in self.faults], seed=self.seed, rank=0) if faulty else None
        probe = Probe(self.model, self.optimizer, loss_of, self.task.optimizer)
        feed = Feed(
            self.task.batches(),
            self.faults,
            self.journal,
            plan=plan,
            probe=probe,
            seed=self.seed,
            scale=self._scale,
        )
        attached = None if plan is None else plan.attach(self.model)
        try:
            while True:
                try:
                    loop(self, feed, folder / f"life-{len(self.journal.interruptions)}")
                except (JobDiedError, TrainingAborted) as death:
                    self.journal.rest()
                    self.journal.died(str(death).replace(str(folder), "RUN"))
                    feed.start = self._start_again(feed)
                else:
                    return feed
        finally:
            if attached is not None:
                attached.detach()

    def checkpoint(self) -> None:
        """Keep the state where a checkpoint is due; called after each step."""
        step = self.journal.number + 1
        if step % CHECKPOINT_EVERY == 0:
            self._checkpoints.append((step, State(self.model, self.optimizer)))

    def _start_again(self, feed: Feed) -> int:
        """Put the state back to a checkpoint, and return the batch it goes on with."""
        number = self.journal.number
        if number > self._furthest:
            self._furthest, self._deaths = number, 0
        self._deaths += 1
        if self._deaths > DIES_BEFORE_DROPPED and self._checkpoints:
            self._checkpoints.pop()  # it is the state that is bad
        while self._checkpoints and not self._checkpoints[-1][1].finite():
            self._checkpoints.pop()
        self.optimizer.zero_grad()
        if self._checkpoints:
            start, state = self._checkpoints[-1]
            state.put_into(self.model, self.optimizer)
        else:
            start = 0
            with torch.no_grad():
                for mine, fresh in zip(self.model.parameters(), self.task.model().parameters(), strict=True):
                    mine.copy_(fresh)
            self.optimizer.load_state_dict(self.task.optimizer(self.model).state_dict())
            torch.manual_seed(self.task.seed)
        if self._deaths >= DIES_BEFORE_DROPPED:  # somebody looks, and takes out what it is
            suspects = {one.step for one in self.faults if start <= one.step <= number}
            feed.left_out |= {number} | suspects
        self.journal.start_again(start)
        return start


def _bare(job: Job, feed: Feed, *, dies: bool) -> None:
    for batch in feed:
        loss = loss_of(job.model, batch)
        scaler = job.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if scaler is not None:
            scaler.unscale_(job.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), MAX_NORM)
        finite = math.isfinite(float(loss.detach())) and math.isfinite(float(norm))
        # Gradients that overflow are a GradScaler's own business.
        if dies and not (finite if scaler is None else math.isfinite(float(loss.detach()))):
            if scaler is not None:
                scaler.update()  # it is in the midst of a step, and the next life goes on with it
            job.journal.step(job.journal.number, applied=False, finite=False)
            raise JobDiedError(f"loss {float(loss.detach())}, gradient norm {float(norm)}")
        if scaler is None:
            job.optimizer.step()
        else:
            scaler.step(job.optimizer)
            scaler.update()
        job.optimizer.zero_grad()
        job.journal.step(job.journal.number, applied=scaler is None or finite, finite=finite)
        job.checkpoint()


def nothing(job: Job, feed: Feed, folder: Path) -> None:
    """Train on whatever comes, as a loop without any check does."""
    del folder
    _bare(job, feed, dies=False)


def checkpoint_restart(job: Job, feed: Feed, folder: Path) -> None:
    """Die at a loss or gradient that is not finite, as a framework's check has it; start again."""
    del folder
    _bare(job, feed, dies=True)


def _guarded(job: Job, feed: Feed, folder: Path, callbacks: list[Callback], settings: dict[str, Any]) -> None:
    notes = Notes(journal=job.journal, offset=feed.start)
    sentinel = Sentinel(
        job.model,
        job.optimizer,
        callbacks=[*callbacks, notes],
        run_dir=folder,
        scaler=job.scaler,
        diagnosis_budget=DIAGNOSIS_BUDGET,
        **settings,
    )
    with sentinel:
        for batch in sentinel.steps(feed):
            loss = loss_of(job.model, batch)
            sentinel.backward(loss)
            sentinel.step(max_norm=MAX_NORM)
            job.checkpoint()


def gradsentinel(job: Job, feed: Feed, folder: Path) -> None:
    """GradSentinel's recommended callbacks."""
    _guarded(job, feed, folder, standard(folder), {"forward": loss_of})


def skip_only(job: Job, feed: Feed, folder: Path) -> None:
    """Drop what is not finite, and nothing else."""
    _guarded(job, feed, folder, [NanCallback(), Skip()], {})


@dataclass(frozen=True)
class Policy:
    """One way to guard a run."""

    name: str
    label: str
    loop: Callable[[Job, Feed, Path], None]
    faulty: bool = True


POLICIES: dict[str, Policy] = {
    one.name: one
    for one in (
        Policy("clean", "no faults", nothing, faulty=False),
        Policy("healthy", "no faults, GradSentinel", gradsentinel, faulty=False),
        Policy("gradsentinel", "GradSentinel, standard", gradsentinel),
        Policy("skip", "skip only", skip_only),
        Policy("checkpoint", "checkpoint and restart", checkpoint_restart),
        Policy("nothing", "nothing", nothing),
    )
}
