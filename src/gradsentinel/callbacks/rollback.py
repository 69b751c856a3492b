"""Going back to a state that is known to be good."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gradsentinel import events
from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.health import in_words
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.recovery import Budget
from gradsentinel.run import Run
from gradsentinel.snapshot import Snapshot, is_initialised


@dataclass(slots=True)
class _Candidate:
    """A snapshot on probation."""

    snapshot: Snapshot
    clean: int = 0


@dataclass(kw_only=True)
class Rollback(Responder):
    """Keeps snapshots of the training state, and goes back to one when a dropped step is not enough.

    That is: when the state itself is bad, when `after` steps in a row fail, when the budget of dropped
    steps is used up, or when a detector asks for it. A snapshot is known good once it was verified
    finite and `confirm_after` later steps were clean; the initial state counts as good. The data goes
    on from where it is. A second rollback before the run got past the first one's trouble goes one
    snapshot further back. Called on: every rank, each for its own shard.
    """

    rung: ClassVar[Action] = Action.ROLLBACK
    every: int = 100
    """Take a snapshot every so many steps; it is a copy in host memory and waits for the device."""
    keep: int = 3
    """So many known-good snapshots are kept."""
    confirm_after: int = 20
    """So many clean steps after it make a snapshot known good."""
    after: int = 3
    """So many failed steps in a row call for a rollback instead of dropping one more."""
    max_rollbacks: int = 3
    """So many rollbacks within `window` are allowed; then the run stops, with the state on disk."""
    window: int = 1000
    """Length of the window, in attempted steps."""
    on_disk: int = 0
    """So many known-good snapshots are written to the run directory as they are found good, for a
    restart with `Sentinel.restore`; 0 writes one only when the run is aborted."""
    _budget: Budget = field(init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _good: list[Snapshot] = field(default_factory=list, init=False, repr=False)
    _candidates: deque[_Candidate] = field(default_factory=deque, init=False, repr=False)
    _tidy: bool = field(default=True, init=False, repr=False)
    """False while more snapshots lie on disk than are to be kept."""
    _failed_until: int = field(default=-1, init=False, repr=False)
    """The step at which the last rollback's trouble was; until it is passed, go further back."""

    def __post_init__(self) -> None:
        for name in ("every", "keep", "after", "window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("confirm_after", "max_rollbacks", "on_disk"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 0 or more")
        self._budget = Budget(self.max_rollbacks, self.window)

    @property
    def known_good_steps(self) -> tuple[int, ...]:
        """The steps one could go back to, oldest first."""
        return tuple(snapshot.step for snapshot in self._good)

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    def on_step_start(self, event: events.StepStart) -> None:
        """Keep the initial state, as late as possible: a checkpoint may have been loaded until now.

        Lazy modules have none; there the state after their first step takes its place.
        """
        run = self._run
        if run is None or self._good or self._candidates:
            return
        if is_initialised(run.host, run.scene.buffers) and not run.health.scan(before_step=True):
            self._promote(run.capture(before_step=True))

    def checks_after_step(self, step: int) -> bool:
        """Return True on the steps whose outcome becomes a snapshot: those must be settled first."""
        return (step + 1) % self.every == 0

    def on_after_step(self, event: events.AfterStep) -> Finding | None:
        """Count clean steps, promote what has proved itself, take a snapshot when one is due."""
        self._tidy_up()
        if self._run is None or event.action is Action.ROLLBACK:
            return None
        if event.action > Action.WARN:
            for candidate in self._candidates:
                candidate.clean = 0
        elif event.applied:
            for candidate in self._candidates:
                candidate.clean += 1
        if event.step > self._failed_until:
            self._failed_until = -1
        while self._past_trouble and self._candidates and self._candidates[0].clean >= self.confirm_after:
            self._promote(self._candidates.popleft().snapshot)
        if self.checks_after_step(event.step) and event.action <= Action.WARN:
            return self._take(self._run)
        return None

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Forget the snapshots from after the ranks drifted apart: they hold something else on each."""
        run, until = self._run, event.incident.details.get("alike_until")
        if run is None or not isinstance(until, int):
            return
        self._good = [snapshot for snapshot in self._good if snapshot.step <= until]
        sound = [candidate for candidate in self._candidates if candidate.snapshot.step <= until]
        self._candidates = deque(sound)
        run.known_good = self._good[-1] if self._good else None
        run.discard_after(until)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Delete what is left over on disk, unless the run is torn down."""
        if event.error is None:
            self._tidy_up()

    def escalates(self, incident: Incident, run: Run) -> bool:
        """Return True when dropping one more step would be no cure; bad data is not cured by going back."""
        if incident.action < Action.RETRY or incident.kind is Kind.NONFINITE_INPUT:
            return False
        streak, step = 1, incident.step
        for earlier in reversed(run.incidents[:-1]):
            if earlier.action <= Action.WARN:
                continue
            if earlier.step != step - 1 or earlier.action is Action.ROLLBACK:
                break
            streak, step = streak + 1, earlier.step
        return streak >= self.after

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Restore a known-good snapshot, or hand over if there is none or the budget is used up."""
        sound = tuple(snapshot.step for snapshot in self._good if not snapshot.flaws())
        common = set.intersection(*map(set, run.consensus.gather(sound)))
        self._good = [snapshot for snapshot in self._good if snapshot.step in common]
        if not self._good:
            incident.notes += ("there is no known-good snapshot to go back to",)
            return None
        if not self._budget.spend(run.iteration):
            incident.notes += (
                f"the budget of {self.max_rollbacks} rollbacks in {self.window} steps is used up",
            )
            return None
        if not self._past_trouble and len(self._good) > 1:
            self._good.pop()
        self._failed_until = max(self._failed_until, incident.step)
        snapshot = self._good[-1]
        lost = incident.step - snapshot.step
        run.restore(snapshot)
        self._candidates.clear()
        run.fallback = snapshot
        left = self._budget.left(run.iteration)
        return Recovery(
            outcome=Outcome.ROLLED_BACK,
            apply=False,
            step=snapshot.step,
            message=f"rolled back to step {snapshot.step} ({lost} steps lost, {left} of {self.max_rollbacks} "
            "rollbacks left)",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rollbacks in the window; snapshots live in memory and on disk, not here."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state)

    def _take(self, run: Run) -> Finding | None:
        found = run.health.scan()
        if found:
            evidence = Evidence(
                kind=Kind.NONFINITE_PARAMETER if "parameters" in found else Kind.NONFINITE_STATE,
                action=Action.ROLLBACK,
                message=f"no snapshot can be taken: non-finite values in {in_words(found)}",
                tensors=tuple(entry for part in found.values() for entry in part),
            )
            value = torch.tensor(True)
            return Finding(kind=evidence.kind, value=value, action=evidence.action, confirm=lambda: evidence)
        if not self._past_trouble and len(self._candidates) >= self.keep:
            self._candidates.popleft()
        candidate = _Candidate(run.capture())
        if self.confirm_after == 0 and self._past_trouble:
            self._promote(candidate.snapshot)
        else:
            self._candidates.append(candidate)
        return None

    def _tidy_up(self) -> None:
        """Delete the older snapshots on disk, one agreement after the newest was written.

        Not before, as another rank may die before it has written its part of the newest: then the one
        before is the newest that all ranks have.
        """
        if self._run is not None and not self._tidy:
            self._run.keep_on_disk(self.on_disk)
            self._tidy = True

    @property
    def _past_trouble(self) -> bool:
        """False while the run repeats steps that led to a rollback: its snapshots may lead there too."""
        return self._failed_until < 0

    def _promote(self, snapshot: Snapshot) -> None:
        self._good.append(snapshot)
        del self._good[: -self.keep]
        if self._run is None:
            return
        self._run.known_good = snapshot
        if self.on_disk and snapshot.step:
            self._run.save(snapshot)
            self._tidy = False
