"""The watch over a run: one step's protocol, whatever drives it (a plain loop or a framework's adapter)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsentinel import events, marks
from gradsentinel.aftermath import Aftermath
from gradsentinel.bus import Bus, Listener, failure_of
from gradsentinel.callback import Callback
from gradsentinel.decision import Action, Decision, merge
from gradsentinel.glance import Glance
from gradsentinel.gradients import GradientView
from gradsentinel.incident import Outcome
from gradsentinel.inquiry import Diagnoser, Examiner, Inquiry
from gradsentinel.judge import Filed, Ruling
from gradsentinel.ranks.agreement import Agreement, Submitted
from gradsentinel.ranks.comparison import compare_replicas, compare_settings
from gradsentinel.run import Run

_RECOMPUTED = {Outcome.RETRIED, Outcome.RESCUED}


class Watch:
    """Runs the phases of a step: detect, agree, keep evidence, diagnose, recover, record."""

    def __init__(
        self,
        run: Run,
        callbacks: Sequence[Callback],
        *,
        examiners: Sequence[Examiner] = (),
        diagnosers: Sequence[Diagnoser] = (),
    ) -> None:
        self.run = run
        self.bus = Bus(callbacks, self._callback_failed, alone=run.consensus.world_size == 1)
        self.agreement = Agreement(run, self.bus)
        self.glance = Glance(run, self.bus)
        self.aftermath = Aftermath(run, self.bus)
        self.inquiry = Inquiry(run, self.bus, examiners=examiners, diagnosers=diagnosers)
        self.expected_microbatches: int | None = None
        """How many micro-batches the last step had; None before the first."""
        self._pending: list[Filed] = []
        self._of_backward = 0  # so many of these are of backward passes of the step in flight
        self._losses: list[Tensor] = []
        self._microbatch = self._generation = 0
        self._begun = self._prepared = self._closed = False
        self._due: tuple[bool, ...] = ()
        """What is due after the step in flight, as agreed: settling, and a comparison for each comparer."""
        run.remember, run.callbacks = lambda: self.state_dict()["callbacks"], self.bus.callbacks
        self.bus.before_change = self._catch_up

    # -- what the loop or the adapter calls ----------------------------------------------------------

    def start(self) -> None:
        """Emit the first event and settle what detectors say of the initial state."""
        compare_settings(self.run, self.bus)
        if marks.wanted():
            marks.mark(self)
        self.agreement.start()
        self.run.scene.notes_writes |= self.run.forward is not None
        self.run.health.learn()
        self._pending += self.bus.emit(events.RunStart(step=self.run.step, run=self.run))
        self._pending += compare_replicas(self.run, self.bus, self.run.step, self.bus.comparers)
        self.settle_pending()

    def prepare(self, *, same_batches: bool = False, rng: bool = True) -> None:
        """Remember the state as it is now, for the step that comes next, on new batches or the same."""
        scene, local = self.run.scene, self.run.local
        seen = local.hooked and local.seen.anything
        if self._prepared and scene.buffers.none and not (same_batches or rng or seen):
            # All else is as it was at the end of the last step, where it was remembered.
            scene.microbatches.clear()
            scene.repeated, scene.rng = False, None
            return
        generation = getattr(self.run.host, "generation", 0)
        if generation != self._generation:
            self._generation = generation
            scene.buffers.find()
        scene.begin(same_batches=same_batches, rng=rng)
        if local.hooked:
            local.begin_step()
        self._prepared = True

    def begin_step(self) -> None:
        """Begin a step; its first micro-batch comes next, or has just been seen."""
        if not self._prepared:
            self.prepare()
        self._prepared, self._begun = False, True
        if self.bus.heard[events.StepStart]:
            self._pending += self.bus.emit(events.StepStart(step=self.run.step))

    def batch(self, batch: object) -> None:
        """Take note of a micro-batch that is about to enter the model."""
        if not self._begun:
            self.begin_step()
        run = self.run
        position = run.data["epoch"], run.data["batch"]
        run.scene.add(batch, position, run.skipped.drawn_by(position))
        if self.bus.heard[events.Batch]:
            index = len(run.scene.microbatches) - 1
            self._pending += self.bus.emit(events.Batch(step=self.run.step, microbatch=index, batch=batch))

    def after_backward(
        self,
        loss: Tensor | None,
        gradients: GradientView | Callable[[], GradientView],
        *,
        scaled: bool = False,
        reduced: bool = True,
        microbatch: int | None = None,
    ) -> None:
        """Take note of a finished backward pass; never communicates.

        `gradients` may be what returns the view, once somebody is to hear of it: a glance is mostly enough.
        `microbatch` says which one it was, where a micro-batch may have several; None counts.
        """
        if self.run.scene.listeners:
            self.run.scene.through()
        if not self._begun:
            self.begin_step()
        if self.glance.kept is not None:
            self._tell_kept()
        if loss is not None:
            if loss.requires_grad or type(loss) is not Tensor:
                loss = loss.detach()
            # Of a distributed one the log wants the whole, a detector this rank's part: they go by the id.
            self._losses.append(loss if type(loss) is Tensor else loss.detach())
        if self.run.local.hooked:
            self.run.local.end_microbatch()
        index = self._microbatch if microbatch is None else microbatch
        self._microbatch += 1
        if self.bus.heard[events.AfterBackward]:
            step = self.run.step
            last = self.expected_microbatches is not None and index + 1 >= self.expected_microbatches

            def event() -> events.AfterBackward:
                view = gradients() if callable(gradients) else gradients
                how = {"scaled": scaled, "reduced": reduced, "last": last}
                return events.AfterBackward(step=step, microbatch=index, loss=loss, gradients=view, **how)

            if last and self.glance.able() is not None:
                self.glance.kept = event
            else:
                self._hear_backward(event())

    def before_clip(
        self,
        gradients: GradientView,
        *,
        optimizers: Sequence[Optimizer] = (),
        loss_scale: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> Decision:
        """Detect, agree and, if need be, recover; called on every rank, once per step.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        self._stand_before_step(optimizers)
        if len(self._pending) == self._of_backward and loss_scale is None and overflow is None:
            decision = self.glance.decide(gradients, self._losses)
            if decision is not None:
                self._pending, self._of_backward = [], 0
                self._due = self.agreement.due_after(decision.step)
                return decision
        submitted = self._submit(gradients, loss_scale, overflow, at_once=True)
        ruling = self.agreement.ruling(submitted)
        self._due = ruling.due
        (skips,) = ruling.broken  # a rank that steps while another one's scaler drops the step is lost
        norm, loss = ruling.values["grad_norm"], submitted.loss_of(ruling)
        gradients.known_factor = ruling.values.get("clip_factor")
        self.run.last_loss, self.run.last_grad_norm = loss, norm
        incidents = self.inquiry.confirm(ruling, submitted.started)
        recoveries = [self.inquiry.handle(incident) for incident in incidents]
        apply = all(recovery.apply for recovery in recoveries)
        overflows = any(recovery.overflow for recovery in recoveries)
        recomputed = overflows or any(recovery.outcome in _RECOMPUTED for recovery in recoveries)
        usual = apply and not recomputed and not skips
        return Decision(
            apply=apply,
            step=submitted.step,
            action=merge(incident.action for incident in incidents),
            incident=incidents[-1] if incidents else None,
            went_back=any(recovery.step is not None for recovery in recoveries),
            grad_norm=norm,
            loss=loss,
            safe_norm=self.agreement.true_norm(gradients, norm, agreed=ruling.suspicious) if usual else None,
            recomputed=recomputed,
            loss_scale=ruling.values.get("loss_scale"),
            scaler_skips=(overflows if recomputed else skips) and apply,
        )

    def look_again(self, decision: Decision, gradients: GradientView) -> Decision:
        """Return the decision with the numbers of gradients that were computed anew; called on every rank."""
        norm = self.run.last_grad_norm = float(gradients.total_norm)
        safe = None if decision.scaler_skips else self.agreement.true_norm(gradients, norm, agreed=True)
        return replace(decision, grad_norm=norm, loss=self.run.last_loss, safe_norm=safe)

    def submit(
        self,
        gradients: GradientView,
        *,
        optimizers: Sequence[Optimizer] = (),
        loss_scale: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> Submitted:
        """Detect and agree without waiting for the device; called on every rank, once per step.

        Every step that is submitted is settled later: `settle_late`, in the same order.
        """
        self._stand_before_step(optimizers)
        submitted = self._submit(gradients, loss_scale, overflow, at_once=False)
        self.run.iteration += 1
        self.run.step += 1
        self.expected_microbatches = self._microbatch or self.expected_microbatches
        self.forget_step()
        return submitted

    def settle_late(
        self, submitted: Submitted, ruling: Ruling, *, learning_rates: tuple[float, ...] = (), clipped: bool
    ) -> Decision:
        """Close a step that the device has applied or dropped meanwhile; called on every rank.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        run = self.run
        norm, loss = ruling.values["grad_norm"], submitted.loss_of(ruling)
        run.last_loss, run.last_grad_norm = loss, norm
        dropped = any(level >= Action.RETRY for level in ruling.levels)
        with run.as_it_was(
            submitted.step, submitted.microbatches, submitted.rng, submitted.optimizers, submitted.seen
        ):
            incidents = self.inquiry.confirm(ruling, submitted.started, insist=True)
            recoveries = [self.inquiry.handle(incident) for incident in incidents]
        decision = Decision(
            apply=not dropped,
            step=submitted.step,
            action=merge(incident.action for incident in incidents),
            incident=incidents[-1] if incidents else None,
            went_back=any(recovery.step is not None for recovery in recoveries),
            grad_norm=norm,
            loss=loss,
            loss_scale=ruling.values.get("loss_scale"),
            scaler_skips=any(ruling.broken) and not dropped,
        )
        applied = not dropped and not decision.scaler_skips
        run.applied += applied
        if applied and decision.incident is None:
            run.scene.healthy = submitted.microbatches
            run.usual = loss, norm
        self._pending += self.aftermath.tell(
            decision, submitted.iteration, learning_rates, clipped=clipped, due=True
        )
        return decision

    def must_wait(self) -> bool:
        """Return True if this step's outcome must be known before the loop goes on; alike on every rank."""
        return self.agreement.must_wait(self.run.step)

    def after_step(
        self, decision: Decision, *, learning_rates: tuple[float, ...] = (), clipped: bool = False
    ) -> Action:
        """Close the step: count it, tell the callbacks, settle what may not wait.

        Returns what was done about the step once it was made: CONTINUE in a healthy run.
        """
        applied = decision.apply and not decision.scaler_skips
        self.run.iteration += 1
        self.run.applied += applied
        if applied and decision.incident is None:
            self.run.scene.healthy = tuple(self.run.scene.microbatches)
            self.run.usual = decision.loss, decision.grad_norm
        self.run.step += not decision.went_back
        self.expected_microbatches = self._microbatch or self.expected_microbatches
        self.forget_step()
        due = any(self._due)
        self._pending += self.aftermath.tell(
            decision, self.run.iteration - 1, learning_rates, clipped=clipped, due=due
        )
        if decision.went_back or not due:
            return Action.CONTINUE
        settles, *compares = self._due
        comparers = [one for one, due in zip(self.bus.comparers, compares, strict=True) if due]
        self._pending += compare_replicas(self.run, self.bus, decision.step, comparers)
        return self.settle_pending() if settles else Action.CONTINUE

    def forget_step(self) -> None:
        """Forget the step in flight: it came to nothing, and the loop may go on from a restored state."""
        self._microbatch, self._begun, self.glance.kept = 0, False, None
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return step counters and what the callbacks must remember over a restart."""
        self._catch_up()
        run, states = self.run, self.bus.states(self.run.step)
        return {"step": run.step, "iteration": run.iteration, "data": dict(run.data), "callbacks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; callbacks that are not there any more are left out."""
        self._catch_up()
        run = self.run
        run.step, run.iteration, run.data = state["step"], state["iteration"], dict(state["data"])
        run.skipped.take_up()
        self.bus.take_states(state["callbacks"])

    def file(self, findings: Sequence[Filed]) -> None:
        """Have findings that were made outside an event judged with those of the next ruling."""
        self._pending += findings

    def settle_pending(self) -> Action:
        """Agree on findings that were made outside `before_clip`; called on every rank.

        Returns the most severe action that was taken.
        """
        started = time.perf_counter()
        self._catch_up()
        incidents = self.inquiry.confirm(self.agreement.settle(self._take_pending()), started)
        for incident in incidents:
            self.run.optimizers = tuple(self.run.host.optimizers)
            if incident.action > Action.WARN:  # the step is made: it can no longer be retried or skipped
                incident.action = max(incident.action, Action.ROLLBACK)
            self.inquiry.handle(incident)
        return merge(incident.action for incident in incidents)

    def close(self, error: BaseException | None = None) -> None:
        """Settle what is left and emit the last event; a second call does nothing."""
        if self._closed:
            return
        self._closed, self.run.scene.unmade = True, self._begun
        self.run.scene.through()
        try:
            (self.settle_pending if error is None else self._catch_up)()
        except BaseException as late:
            error = error or late
            raise
        finally:
            self._pending += self.bus.emit(events.RunEnd(step=self.run.step, error=error))
        if error is None:  # the state that the run ends with may be bad
            self.settle_pending()
            self.inquiry.tell_what_waits(all_of_them=True)

    # -- the phases ----------------------------------------------------------------------------------

    def _stand_before_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Note which optimizers are about to step, and have copies of what they write finished before."""
        if self.run.scene.listeners:
            self.run.scene.through()
        if not self._begun:
            self.begin_step()
        if self.run.in_flight:
            self.run.hold()
        self.run.optimizers = tuple(optimizers) or tuple(self.run.host.optimizers)
        if self.inquiry.repeats.any_wait:
            self.inquiry.tell_what_waits()

    def _submit(
        self, gradients: GradientView, loss_scale: Tensor | None, overflow: Tensor | None, *, at_once: bool
    ) -> Submitted:
        self._catch_up()
        self._tell_kept()
        submitted = self.agreement.submit(
            gradients,
            tuple(self._losses),
            self._take_pending(),
            loss_scale=loss_scale,
            overflow=overflow,
            at_once=at_once,
        )
        self.run.norms.remember(submitted.step, submitted.iteration, gradients)
        return submitted

    def _tell_kept(self) -> None:
        """Emit the event of a backward pass after all: it was not the last one, or a glance is not enough."""
        kept, self.glance.kept = self.glance.kept, None
        if kept is not None:
            self._hear_backward(kept())

    def _catch_up(self) -> None:
        """Have all hear of the steps that are over: what comes now may depend on what they know."""
        self._pending += self.aftermath.catch_up()

    def _hear_backward(self, event: events.AfterBackward) -> None:
        self._catch_up()
        self._pending += (found := self.bus.emit(event))
        self._of_backward += len(found)

    def _take_pending(self) -> list[Filed]:
        pending, self._pending, self._of_backward = self._pending, [], 0
        return pending

    def _callback_failed(self, listener: Listener, error: Exception, step: int) -> None:
        self._pending.append(failure_of(listener, error, step))
