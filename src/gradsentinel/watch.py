"""The watch over a run: one step's protocol, whatever drives it (a plain loop or a framework's adapter)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel import events
from gradsentinel.bus import Bus, Listener
from gradsentinel.callback import Callback
from gradsentinel.decision import Action, Kind, merge
from gradsentinel.errors import TrainingAborted
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.gradients import GradientView
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.judge import Filed, Judge, Ruling
from gradsentinel.recovery import Ladder
from gradsentinel.run import Run
from gradsentinel.testimony import Statement, open_incidents, severity_of
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

Examiner = Callable[[Evidence, Run], Evidence]
"""Looks closer at one rank's evidence, on the host: no collectives, nothing changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the ranks decided about the step in flight."""

    apply: bool
    """True when the optimizer should step."""
    action: Action = Action.CONTINUE
    incident: Incident | None = None
    grad_norm: float = 0.0
    loss: float | None = None
    safe_norm: float | None = None
    """The true global norm where the usual formula overflowed on finite gradients; clip with this one."""
    recomputed: bool = False
    """True when the gradients were computed anew and must be looked at again."""
    loss_scale: float | None = None
    scaler_skips: bool = False
    """True when the loss scaler is going to drop this step by itself."""


_QUIET_STEPS = 100
"""A warning that comes back within so many steps is the same one going on."""


class Watch:
    """Runs the phases of a step: detect, agree, keep evidence, diagnose, recover, record."""

    def __init__(
        self, run: Run, callbacks: Sequence[Callback], *, examiners: Sequence[Examiner] = ()
    ) -> None:
        self.run = run
        self.bus = Bus(callbacks, self._callback_failed)
        self.judge = Judge(run.consensus)
        self.examiners = list(examiners)
        self.expected_microbatches: int | None = None
        """How many micro-batches the last step had; None before the first."""
        self._pending: list[Filed] = []
        self._warnings: dict[tuple[str, Kind], tuple[Incident, int]] = {}
        self._losses: list[Tensor] = []
        self._microbatch = 0
        self._begun = False
        self._prepared = False
        self._closed = False

    # -- what the loop or the adapter calls ----------------------------------------------------------

    def start(self) -> None:
        """Emit the first event and settle what detectors say of the initial state."""
        self.run.health.learn()
        self._pending += self.bus.emit(events.RunStart(step=self.run.step, run=self.run))
        self.settle_pending()

    def prepare(self, *, same_batches: bool = False) -> None:
        """Remember the state as it is now, for the step that comes next, on new batches or the same."""
        self.run.scene.begin(same_batches=same_batches)
        self._prepared = True

    def begin_step(self) -> None:
        """Begin a step; its first micro-batch comes next, or has just been seen."""
        if not self._prepared:
            self.prepare()
        self._prepared = False
        self._begun = True
        if self.bus.hears(events.StepStart):
            self._pending += self.bus.emit(events.StepStart(step=self.run.step))

    def batch(self, batch: object) -> None:
        """Take note of a micro-batch that is about to enter the model."""
        if not self._begun:
            self.begin_step()
        self.run.scene.add(batch)
        if self.bus.hears(events.Batch):
            index = len(self.run.scene.microbatches) - 1
            self._pending += self.bus.emit(events.Batch(step=self.run.step, microbatch=index, batch=batch))

    def after_backward(
        self,
        loss: Tensor | None,
        gradients: GradientView,
        *,
        scaled: bool = False,
        reduced: bool = True,
        microbatch: int | None = None,
    ) -> None:
        """Take note of a finished backward pass; never communicates.

        `microbatch` says which one it was, where a micro-batch may have several; None counts.
        """
        if not self._begun:
            self.begin_step()
        if loss is not None:
            self._losses.append(loss.detach())
        index = self._microbatch if microbatch is None else microbatch
        self._microbatch += 1
        if self.bus.hears(events.AfterBackward):
            last = self.expected_microbatches is not None and index + 1 >= self.expected_microbatches
            event = events.AfterBackward(
                step=self.run.step,
                microbatch=index,
                loss=loss.detach() if loss is not None else None,
                gradients=gradients,
                scaled=scaled,
                reduced=reduced,
                last=last,
            )
            self._pending += self.bus.emit(event)

    def before_clip(
        self,
        gradients: GradientView,
        *,
        optimizers: Sequence[Optimizer] = (),
        loss_scale: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> Verdict:
        """Detect, agree and, if need be, recover; called on every rank, once per step.

        Raises:
            TrainingAborted: when the run must not go on.
        """
        if not self._begun:
            self.begin_step()
        started = time.perf_counter()
        self.run.optimizers = tuple(optimizers) or tuple(self.run.host.optimizers)
        losses = tuple(self._losses)
        filed = self._take_pending()
        if self.bus.hears(events.BeforeClip):
            event = events.BeforeClip(
                step=self.run.step,
                gradients=gradients,
                losses=losses,
                loss_scale=loss_scale,
                overflow=overflow,
            )
            filed += self.bus.emit(event)
        extras = {"grad_norm": gradients.total_norm}
        extras.update({f"loss{index}": loss for index, loss in enumerate(losses)})
        if loss_scale is not None and overflow is not None:
            extras.update(loss_scale=loss_scale, overflow=overflow)
        ruling = self._rule(filed, extras)
        norm = ruling.values["grad_norm"]
        seen = [ruling.values[f"loss{index}"] for index in range(len(losses))]
        loss = sum(seen) / len(seen) if seen else None
        self.run.last_loss, self.run.last_grad_norm = loss, norm
        skips = bool(ruling.values.get("overflow"))
        scale = ruling.values.get("loss_scale")
        apply, recomputed, action = True, False, Action.CONTINUE
        incidents = self._confirm(ruling, started)
        for incident in incidents:
            applies, new = self._handle(incident)
            apply, recomputed = apply and applies, recomputed or new
            action = max(action, incident.action)
        usual = apply and not recomputed and not skips
        return Verdict(
            apply=apply,
            action=action,
            incident=incidents[-1] if incidents else None,
            grad_norm=norm,
            loss=loss,
            safe_norm=_safe_norm(gradients, norm) if usual else None,
            recomputed=recomputed,
            loss_scale=scale,
            scaler_skips=skips and apply,
        )

    def after_step(
        self, verdict: Verdict, *, learning_rates: tuple[float, ...] = (), clipped: bool = False
    ) -> Action:
        """Close the step: count it, tell the callbacks, settle what may not wait.

        Returns what was done about the step once it was made: CONTINUE in a healthy run.
        """
        step = self.run.step
        rolled_back = verdict.action is Action.ROLLBACK
        self.run.iteration += 1
        if not rolled_back:
            self.run.step += 1
        if self._microbatch:
            self.expected_microbatches = self._microbatch
        self._microbatch = 0
        self._losses.clear()
        self._begun = False
        if self.bus.hears(events.AfterStep):
            event = events.AfterStep(
                step=step,
                applied=verdict.apply and not verdict.scaler_skips,
                action=verdict.action,
                grad_norm=verdict.grad_norm,
                loss=verdict.loss,
                learning_rates=learning_rates,
                loss_scale=verdict.loss_scale,
                scaler_skipped=verdict.scaler_skips,
                clipped=clipped,
            )
            self._pending += self.bus.emit(event)
        if not rolled_back and self.bus.must_settle(step):
            return self.settle_pending()
        return Action.CONTINUE

    def settle_pending(self) -> Action:
        """Agree on findings that were made outside `before_clip`; called on every rank.

        Returns the most severe action that was taken.
        """
        started = time.perf_counter()
        ruling = self._rule(self._take_pending(), {})
        incidents = self._confirm(ruling, started)
        for incident in incidents:
            self.run.optimizers = tuple(self.run.host.optimizers)
            if incident.action > Action.WARN:  # the step is made: it can no longer be retried or skipped
                incident.action = max(incident.action, Action.ROLLBACK)
            self._handle(incident)
        return merge(incident.action for incident in incidents)

    def close(self, error: BaseException | None = None) -> None:
        """Settle what is left and emit the last event; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if error is None:
                self.settle_pending()
        finally:
            self.bus.emit(events.RunEnd(step=self.run.step, error=error))
        if error is None:  # a callback may have raised in the last event itself
            self.settle_pending()

    # -- the phases ----------------------------------------------------------------------------------

    def _rule(self, filed: Sequence[Filed], extras: Mapping[str, Tensor]) -> Ruling:
        self.judge.slots = self.bus.slots
        return self.judge.rule(filed, extras, self.run.host.device)

    def _take_pending(self) -> list[Filed]:
        pending, self._pending = self._pending, []
        return pending

    def _confirm(self, ruling: Ruling, started: float) -> list[Incident]:
        """Look closer on the host; every rank does as soon as one suspects something."""
        if not ruling.suspicious:
            return []
        confirmed: list[Statement] = []
        for entry in ruling.fired:
            name = entry.detector
            try:
                evidence = entry.finding.resolve()
                if evidence is not None:
                    for examine in self.examiners:
                        evidence = examine(evidence, self.run)
            except Exception as error:  # a suspicion that cannot be examined stands
                logger.exception("step %d: evidence of %s failed", entry.step, name)
                record_swallowed(error)
                evidence = Evidence(
                    kind=entry.finding.kind,
                    action=entry.finding.action,
                    message=f"{entry.finding.kind} suspected; looking closer failed: {error}",
                    microbatch=entry.finding.microbatch,
                )
            if evidence is not None and evidence.action > Action.CONTINUE:
                confirmed.append(Statement(name, entry.step, evidence))
        incidents = open_incidents(self.run, confirmed)
        for incident in incidents:
            incident.seconds["detect"] = time.perf_counter() - started
        return incidents

    def _handle(self, incident: Incident) -> tuple[bool, bool]:
        """Evidence, diagnosis, recovery, record; returns (apply the step, gradients are new)."""
        run = self.run
        if incident.action is Action.WARN and self._goes_on(incident):
            return True, False
        run.incidents.append(incident)
        self._write(incident)
        self.bus.emit(
            events.IncidentEvent(step=incident.step, incident=incident, scene=run.scene.as_mapping())
        )
        if incident.diagnosis is not None:
            self.bus.emit(
                events.DiagnosisEvent(step=incident.step, incident=incident, diagnosis=incident.diagnosis)
            )
        incident.severity = severity_of(incident, run.incidents)
        if incident.action is Action.WARN:
            self._write(incident)
            logger.warning("step %d: %s", incident.step, incident.message)
            return True, False
        return self._recover(incident)

    def _goes_on(self, incident: Incident) -> bool:
        """Count a warning that goes on step after step, instead of opening an incident for each step."""
        key = (incident.detector, incident.kind)
        first, last_step = self._warnings.get(key, (incident, incident.step))
        self._warnings[key] = (first, incident.step)
        if first is incident or incident.step - last_step > _QUIET_STEPS:
            self._warnings[key] = (incident, incident.step)
            return False
        count = first.details["repeated"] = first.details.get("repeated", 0) + 1
        first.details["last_step"] = incident.step
        if count & (count - 1) == 0:  # at 1, 2, 4, 8 ...: what goes on for ever must not flood log and disk
            logger.warning(
                "step %d: %s (%d more since step %d)", incident.step, incident.message, count, first.step
            )
            self._write(first)
        return True

    def _recover(self, incident: Incident) -> tuple[bool, bool]:
        started = time.perf_counter()
        try:
            recovery = Ladder(self.bus.responders()).recover(incident, self.run)
        except TrainingAborted as error:
            incident.seconds["recover"] = time.perf_counter() - started
            self._write(incident)
            logger.error("%s", error)  # noqa: TRY400 - the traceback travels with the exception
            failed = Recovery(outcome=Outcome.ABORTED, apply=False, message=incident.recovery)
            self.bus.emit(events.RecoveryEvent(step=incident.step, incident=incident, recovery=failed))
            raise
        incident.outcome = recovery.outcome
        incident.recovery = recovery.message
        incident.seconds["recover"] = time.perf_counter() - started
        self._write(incident)
        logger.warning("step %d: %s; %s", incident.step, incident.message, recovery.message)
        self.bus.emit(events.RecoveryEvent(step=incident.step, incident=incident, recovery=recovery))
        return recovery.apply, recovery.apply

    def _write(self, incident: Incident) -> None:
        if self.run.consensus.rank:
            return
        try:
            self.run.directory.write_incident(incident)
        except OSError as error:
            logger.error("incident %s could not be written: %s", incident.id, error)  # noqa: TRY400

    def _callback_failed(self, listener: Listener, error: Exception, event: events.Event) -> None:
        """File a callback's failure as a finding of its own slot, so that all ranks hear of it."""
        finding = Finding(
            kind=Kind.CALLBACK_ERROR,
            action=Action.WARN,
            value=torch.tensor(True),
            message=f"{listener.name} raised {type(error).__name__}: {error}; the run goes on without it",
        )
        self._pending.append(Filed(listener.slot, event.step, finding, listener.name))


def _safe_norm(gradients: GradientView, norm: float) -> float | None:
    """Return the true norm if the usual formula overflowed on finite gradients, else None."""
    if abs(norm) < float("inf"):
        return None
    safe = gradients.safe_norm()
    return safe if safe < float("inf") else None
