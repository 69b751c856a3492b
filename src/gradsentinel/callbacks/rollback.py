"""Going back to a state that is known to be good."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gradsentinel import events
from gradsentinel.callback import Findings, Responder
from gradsentinel.callbacks.incurable import outgrown, rescued_in_a_row
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.recovery import Budget
from gradsentinel.run import Run
from gradsentinel.state.health import in_words
from gradsentinel.state.retreat import Retreat
from gradsentinel.state.ring import Ring
from gradsentinel.state.snapshot import Snapshot, is_initialised
from gradsentinel.state.staging import Cost

logger = logging.getLogger("gradsentinel")


@dataclass(kw_only=True)
class Rollback(Responder):
    """Keeps snapshots of the training state, and goes back to one when a dropped step is not enough.

    That is: when the state itself is bad, when `after` steps in a row fail, when the budget of dropped
    steps is used up, or when a detector asks for it; and at once when a step fails after `Rescue` has saved
    `after` in a row at one place, or while a parameter is finite and 10,000 times what it was in the newest
    known-good snapshot. A snapshot is known good once it was verified
    finite and `confirm_after` later steps were clean; the initial state counts as good. One that is finite
    but looks ruined is passed over. A second rollback before the run got past the first one's trouble goes
    one snapshot further back if something speaks against the state: it is bad itself, the trouble came back
    before `after` steps in a row were clean, or these were worse than before. Called on: every rank, each
    for its own shard.
    """

    rung: ClassVar[Action] = Action.ROLLBACK
    every: int = 100
    """Take a snapshot every so many steps: a copy in host memory, made beside the computation if there is an
    accelerator."""
    keep: int = 3
    """So many known-good snapshots are kept in memory."""
    confirm_after: int = 20
    """So many clean steps after it make a snapshot known good."""
    after: int = 3
    """So many failed steps in a row call for a rollback instead of dropping one more."""
    max_rollbacks: int = 3
    """So many rollbacks within `window` are allowed; then the run stops, with the state on disk."""
    window: int = 1000
    """Length of the window, in attempted steps."""
    on_disk: int = 0
    """So many known-good snapshots are kept in the run directory, written beside the training as they are
    found good, for a restart with `Sentinel(resume="auto")`; 0 writes one only when the run is aborted."""
    together: bool = False
    """With several ranks: a state on disk is finished by all of them, through
    `torch.distributed.checkpoint`, or by none; over gloo, beside the training."""
    data: str = "go_on"
    """What comes after a rollback: "go_on" takes the next batches, so those since the snapshot are lost;
    "replay" draws them once more, without those that led to an incident. That needs `Sentinel.steps`, a
    loader that can be iterated over again, and `Skip(remember=True)`."""
    _budget: Budget = field(init=False, repr=False)
    _ring: Ring = field(init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _retreat: Retreat = field(init=False, repr=False)
    _lost: int = field(default=0, init=False, repr=False)
    """So many steps were taken back in this process."""
    _unsaved: dict[tuple[int, int], str] = field(default_factory=dict, init=False, repr=False)
    """The snapshots that could not be saved, and why, until all ranks have heard of it."""
    _disk_refuses: bool = field(default=False, init=False, repr=False)
    """True once that was said, until the disk takes everything again."""

    def __post_init__(self) -> None:
        for name in ("every", "keep", "after", "window"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("confirm_after", "max_rollbacks", "on_disk"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.together and not self.on_disk:
            raise ConfigurationError("together=True needs on_disk=1 or more: it is about states on disk")
        if self.data not in {"go_on", "replay"}:
            raise ConfigurationError(f"data={self.data!r}; choose 'go_on' or 'replay'")
        self._budget = Budget(self.max_rollbacks, self.window)
        self._retreat = Retreat(self.after)
        self._ring = Ring(self.keep, self.confirm_after, self.keep + self.confirm_after // self.every)

    @property
    def known_good_steps(self) -> tuple[int, ...]:
        """The steps one could go back to, oldest first."""
        return tuple(snapshot.step for snapshot in self._ring.good)

    @property
    def replays_data(self) -> bool:
        """True if the data is drawn once more after a rollback."""
        return self.data == "replay"

    @property
    def cost(self) -> Cost:
        """What the run's snapshots have cost so far."""
        return Cost() if self._run is None else self._run.staging.cost

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run
        event.run.budgets[type(self).__name__] = self._budget.as_dict
        event.run.states.keep = self.on_disk
        if self.on_disk:
            event.run.staging.share()
            if self.together:
                event.run.states.write_together()

    def on_step_start(self, event: events.StepStart) -> None:
        """Keep the initial state, as late as possible: a checkpoint may have been loaded until now.

        Lazy modules have none; there the state after their first step takes its place.
        """
        run = self._run
        if run is None or self._ring:
            return
        if is_initialised(run.host, run.scene.buffers) and not run.health.scan(before_step=True):
            norms = run.health.norms(before_step=True)
            self._promote(run.capture(before_step=True, norms=norms), run)

    def checks_after_step(self, step: int) -> bool:
        """Return True on the steps whose outcome becomes a snapshot: those must be settled first."""
        return (step + 1) % self.every == 0

    def on_after_step(self, event: events.AfterStep) -> Findings:
        """Count clean steps, promote what has proved itself, take a snapshot when one is due."""
        run = self._run
        if run is None:
            return None
        run.states.thin_out(now=run.iteration)
        found = self._of_the_disk(run)
        if event.action is Action.ROLLBACK:
            return found
        self._ring.drop_torn()
        # A step that was computed again and is sound is as good as any.
        sound = event.action <= Action.WARN or (event.action is Action.RETRY and event.applied)
        if event.applied or event.action > Action.WARN:
            self._ring.count(clean=sound, warned=event.action is Action.WARN, loss=event.loss)
        self._retreat.count(event.step, clean=sound and event.applied, loss=event.loss)
        if self._retreat.past_trouble:
            for snapshot in self._ring.proved():
                self._promote(snapshot, run)
        if self.checks_after_step(event.step) and sound:
            found += self._take(run)
        return found

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Forget snapshots that are not what they were taken for.

        Those from after the ranks drifted apart hold something else on each; those that some rank could
        not save are of no use to the others.
        """
        run, details = self._run, event.incident.details
        if run is None:
            return
        if isinstance(details.get("alike_until"), int):
            self._ring.forget_after(details["alike_until"])
            run.known_good = self._ring.good[-1] if self._ring.good else None
            run.states.forget_after(step=details["alike_until"])
            self._tell(run)
        if event.incident.detector.startswith(type(self).__name__):
            for iteration, step in details.get("unsaved", ()):
                self._disk_refuses |= self._unsaved.pop((iteration, step), None) is not None
                run.states.doubt((iteration, step))

    def on_run_end(self, event: events.RunEnd) -> Findings:
        """Wait for what is being written, and say what could not be, unless the run is torn down."""
        if self._run is None or event.error is not None:
            return None
        if self._lost and not self.replays_data and not self._run.consensus.rank:
            logger.warning(
                "the run ends at step %d: rollbacks took back %d steps, whose batches were not drawn again "
                "(data='go_on'), so a loop over fixed data ends that much short",
                self._run.step,
                self._lost,
            )
        self._run.states.finish()
        return self._of_the_disk(self._run)

    def escalates(self, incident: Incident, run: Run) -> bool:
        """Return True when dropping one more step would be no cure; bad data is not cured by going back."""
        if incident.action < Action.RETRY or incident.kind is Kind.NONFINITE_INPUT:
            return False
        streak, step = 1, incident.step
        for earlier in reversed(run.incidents[:-1]):
            if earlier.action <= Action.WARN:
                continue
            if earlier.step != step - 1 or earlier.action is Action.ROLLBACK or earlier.cured:
                break
            streak, step = streak + 1, earlier.step
        return streak >= self.after or self._is_incurable(incident, run)

    def _is_incurable(self, incident: Incident, run: Run) -> bool:
        """Say whether to go back at once, where that can be done: what is finite may be ruined; notes why."""
        if not self._budget.left(run.iteration):
            return False
        why = None
        if self._ring.good:
            why = rescued_in_a_row(
                incident, run.incidents[:-1], self.after, since=run.iteration - self.window
            ) or outgrown(run.health.parameters(), self._ring.good[-1])
        everyone = run.consensus.gather((bool(self._ring.good), why))
        reasons = dict.fromkeys(reason for _, reason in everyone if reason is not None)
        if not reasons or not all(can for can, _ in everyone):
            return False
        incident.notes += tuple(reasons)
        return True

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Restore a known-good snapshot, or hand over if there is none or the budget is used up."""
        run.hold()
        ring = self._ring
        ring.drop_torn()
        strained = {snapshot.step: strain for snapshot in ring.good if (strain := ring.strain(snapshot))}
        sound = {snapshot.step for snapshot in ring.good if not snapshot.flaws()}
        everyone = run.consensus.gather((sound, strained, self._retreat.against(incident)))
        common = set.intersection(*(steps for steps, _, _ in everyone))
        doubtful = {step: strain for _, strains, _ in everyone for step, strain in strains.items()}
        against = next((doubt for _, _, doubt in everyone if doubt is not None), None)
        ring.good = [snapshot for snapshot in ring.good if snapshot.step in common]
        if not ring.good:
            incident.notes += ("there is no known-good snapshot to go back to",)
            return None
        if not self._budget.spend(run.iteration):
            incident.notes += (
                f"the budget of {self.max_rollbacks} rollbacks in {self.window} steps is used up",
            )
            return None
        snapshot, passed = self._choose(set(doubtful), further=against is not None)
        incident.notes += tuple(
            f"the snapshot of step {step} is passed over: {doubtful[step]}" for step in passed
        )
        further = snapshot is not ring.good[-1]
        if against is not None and further:
            incident.notes += (f"one snapshot further back than last time: {against}",)
        ring.go_back_to(snapshot)
        self._tell(run)
        run.restore(snapshot)
        self._retreat.went_to(snapshot, incident.step)
        run.known_good = snapshot
        if self.replays_data:
            run.course.go_back_to(snapshot, run)
        if further:  # a restart is to go on from here, too, and not from the later ones
            snapshot.iteration = run.iteration
            if self.on_disk and snapshot.step:
                run.states.save(snapshot, now=run.iteration)
        lost, left = incident.step - snapshot.step, self._budget.left(run.iteration)
        self._lost += lost
        what = f"{lost} steps are repeated" if self.replays_data else f"{lost} steps lost"
        return Recovery(
            outcome=Outcome.ROLLED_BACK,
            apply=False,
            step=snapshot.step,
            message=f"rolled back to step {snapshot.step} ({what}, {left} of {self.max_rollbacks} rollbacks "
            "left)",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rollbacks in the window; snapshots live in memory and on disk, not here."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state)

    def _choose(self, doubtful: set[int], *, further: bool) -> tuple[Snapshot, list[int]]:
        """Return the snapshot to go back to, and the steps of those that are passed over for their looks."""
        good = self._ring.good
        last = len(good) - (2 if further and len(good) > 1 else 1)
        for index in range(last, -1, -1):
            if good[index].step not in doubtful:
                return good[index], [snapshot.step for snapshot in good[index + 1 : last + 1]]
        return good[last], []

    def _take(self, run: Run) -> list[Finding]:
        """Take a snapshot, and have its soundness settled before the loop goes on."""
        if self.confirm_after == 0 and self._retreat.past_trouble:  # it is good at once: look first
            evidence = self._look(run)
            if evidence is not None:
                value = torch.tensor(True)
                return [
                    Finding(kind=evidence.kind, value=value, action=evidence.action, confirm=lambda: evidence)
                ]
            self._promote(run.capture(norms=run.health.norms()), run)
            return []
        norms = run.health.norms()
        self._ring.add(run.capture(norms=norms))
        self._tell(run)
        on_device = [norm for norm in norms.values() if norm.device == run.host.device]
        on_host = [float(norm) for norm in norms.values() if norm.device.type == "cpu"]
        finite = all(map(math.isfinite, on_host))  # for those nobody need wait for the device
        total = torch.stack(on_device).sum() if finite and on_device else torch.tensor(not finite)
        return [
            Finding(
                kind=Kind.NONFINITE_STATE,
                value=total,
                action=Action.ROLLBACK,
                confirm=lambda: self._look(run),
            )
        ]

    @staticmethod
    def _look(run: Run) -> Evidence | None:
        found = run.health.scan()
        if not found:
            return None
        return Evidence(
            kind=Kind.NONFINITE_PARAMETER if "parameters" in found else Kind.NONFINITE_STATE,
            action=Action.ROLLBACK,
            message=f"no snapshot can be taken: non-finite values in {in_words(found)}",
            tensors=tuple(entry for part in found.values() for entry in part),
        )

    def _of_the_disk(self, run: Run) -> list[Finding]:
        """Say what could not be saved, until all ranks have heard of it."""
        self._unsaved.update(run.states.failures())
        if not self._unsaved:
            self._disk_refuses = self._disk_refuses and run.disk.refuses_something
            return []
        evidence = Evidence(
            kind=Kind.CUSTOM,
            action=Action.WARN,
            message=f"{'; '.join(self._unsaved.values())}; until the disk takes them again, known-good "
            "states are in memory only",
            details={
                "unsaved": [list(mark) for mark in self._unsaved],
                "subject": str(max(self._unsaved)),
                "said": self._disk_refuses or run.consensus.rank == 0,  # then its own log has it
            },
        )
        value = torch.tensor(True)
        return [Finding(kind=evidence.kind, value=value, action=evidence.action, confirm=lambda: evidence)]

    def _tell(self, run: Run) -> None:
        """Have the event log say which snapshots there are now."""
        run.journal.append(("snapshots", self._ring.as_dict()))

    def _promote(self, snapshot: Snapshot, run: Run) -> None:
        self._ring.promote(snapshot)
        run.course.forget_before(self._ring.good[0])
        self._tell(run)
        run.known_good = snapshot
        if self.on_disk and snapshot.step:
            run.states.save(snapshot, now=run.iteration)
