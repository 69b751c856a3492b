"""NaN and Inf: in the loss, the gradients, and the training state itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Detector
from gradsentinel.callbacks.growth import Growth
from gradsentinel.callbacks.initial_state import certain, initial
from gradsentinel.callbacks.lost_eps import LostEps
from gradsentinel.callbacks.squares import overflowing_squares
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.incident import OF_THIS_STEP, Outcome, fold
from gradsentinel.measures.inspection import nonfinite_in
from gradsentinel.run import Run

_SCALE_HINT = (
    "lowering the loss scale cannot help: look for what makes the value non-finite before any scaling",
)


@dataclass(slots=True)
class _Step:
    """What was seen of one step; a finding that is looked into later goes by the step it was made in."""

    view: GradientView | None = None
    seen: list[tuple[int, Tensor]] = field(default_factory=list)
    """Largest gradient magnitude after each micro-batch: unlike a 2-norm it never overflows by itself."""
    buffers: bool = False
    """True if the small buffers were handed in already."""


@dataclass(kw_only=True)
class NanCallback(Detector):
    """Drops a step whose loss or gradients are not finite; alone, it needs no further callback for that.

    Rides on the norm that clipping computes anyway. A norm that overflows on finite gradients is no alarm,
    unless nobody clips them and the optimizer keeps their squares. With a GradScaler, non-finite gradients
    of a finite loss are the scaler's business, until its scale has collapsed. Called on: every rank.
    """

    prompt_every, needs_random_states = None, False
    action: Action | str = Action.RETRY
    """The cheapest recovery to try: retry (falls through to skip without a Retry callback), skip,
    rollback, abort, or warn, which only reports and lets the bad update through."""
    check_microbatches: bool = True
    """Look at the gradients after each micro-batch but the last, so that the bad one is known; one
    more fused norm per extra micro-batch."""
    state_warmup: int = 10
    """After each of the first so many steps parameters, moments and buffers are checked too."""
    state_every: int = 50
    """After that, every so many steps, at the end, and always when there is an incident. 0: never."""
    state_parts: int = 1
    """Look at one of so many equal parts of the state at a time, in turn, where all of it is too much for one
    pass; then each element is looked at once in `state_every * state_parts` steps. It is always all of it at
    the end and when there is an incident."""
    min_loss_scale: float = 1.0
    """A GradScaler that still overflows at this scale has collapsed."""
    max_scaler_skips: int = 32
    """So many steps in a row dropped by the GradScaler are no search for a scale any more."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _step: _Step = field(default_factory=_Step, init=False, repr=False)
    _scaler_skips: int = field(default=0, init=False, repr=False)
    _unchecked: bool = field(default=False, init=False, repr=False)
    """True if the state changed since all of it was looked at last."""
    _eps: LostEps | None = field(default=None, init=False, repr=False)
    _growth: Growth = field(default_factory=Growth, init=False, repr=False)
    _part: int = field(default=0, init=False, repr=False)
    """The part of the state to look at next."""

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action is Action.CONTINUE:
            raise ConfigurationError(
                "action='continue' would do nothing; leave the callback out, or use warn"
            )
        if self.state_warmup < 0 or self.state_every < 0:
            raise ConfigurationError("state_warmup and state_every are numbers of steps, 0 or more")
        if self.state_parts < 1:
            raise ConfigurationError(f"state_parts={self.state_parts} must be at least 1")
        if self.max_scaler_skips < 1:
            raise ConfigurationError("max_scaler_skips must be at least 1 step")

    def norm_bound(self) -> float:
        """Return infinity: any finite global norm passes."""
        return float("inf")

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool:
        """Return True unless buffers are to be looked at, or finite gradients could still spoil the weights.

        A finite norm is one of finite gradients, and it is only asked about finite losses.
        """
        due = self.checks_after_step(step) and self._buffers_due(step)
        return not due and not (self._eps is not None and self._eps.suspected())

    def glimpse(self, step: int) -> Tensor | None:
        """Return a number for the small buffers: what the forward pass has done to the statistics."""
        return None if self._run is None else self._run.health.small_buffers()

    def on_run_start(self, event: events.RunStart) -> Sequence[Finding]:
        """Look at the initial state: an uninitialised parameter is named before any training."""
        self._run = event.run
        self._eps = LostEps(event.run)
        found = event.run.health.scan()
        findings = []
        if "parameters" in found:
            evidence = initial("parameter", found["parameters"], Kind.NONFINITE_PARAMETER, Action.ABORT)
            findings.append(certain(evidence))
        if "moments" in found:
            evidence = initial("optimizer state", found["moments"], Kind.NONFINITE_STATE, Action.ABORT)
            findings.append(certain(evidence))
        unused = event.run.health.nan_at_start
        if unused:  # whether it is ever used, only the user knows
            evidence = initial("buffer or frozen parameter", unused, Kind.NONFINITE_STATE, Action.WARN)
            findings.append(certain(evidence))
        return findings

    def on_after_backward(self, event: events.AfterBackward) -> list[Finding]:
        """Judge the loss; remember the gradients' size so far, to tell the bad micro-batch later.

        And, after the last one, the small buffers: where the ranks need no agreement while the norm they all
        have is sound (FSDP), what is found later than this reaches nobody.
        """
        if self._step.view is not None:  # of a step that came to nothing: nobody has heard of its end
            self._step = _Step()
        found = self._look_at_small_buffers(scaled=event.scaled) if event.last else []
        if self.check_microbatches and not event.last:
            self._step.seen.append((event.microbatch, event.gradients.max_magnitude))
        if event.loss is None:
            return found
        loss, microbatch, step = event.loss, event.microbatch, self._step
        bad_loss = Finding(
            kind=Kind.NONFINITE_LOSS,
            value=loss,
            action=Action.parse(self.action),
            confirm=lambda: self._confirm_loss(loss, microbatch, step),
            microbatch=microbatch,
        )
        return [bad_loss, *found]

    def on_before_clip(self, event: events.BeforeClip) -> list[Finding]:
        """Judge the gradients through their global norm, or the loss scale if there is a scaler.

        And an update that divides 0 by 0. And what the forward pass has written to buffers, to small ones in
        every step, to all where the state is due after this one: now that can still be put back, and the
        weights have not moved.
        """
        if self._step.view is not None:
            self._step = _Step()
        found = [self._look_at_gradients(event)]
        if self._eps is not None and (lost := self._eps.finding()) is not None:
            found.append(lost)
        run, scaled = self._run, event.loss_scale is not None
        if run is not None and self._buffers_due(event.step):
            found.append(self._buffers(run, run.health.buffer_norm(), scaled=scaled))
        elif not self._step.buffers and event.gradients.alarm is None:
            found += self._look_at_small_buffers(scaled=scaled)
        return found

    def _look_at_small_buffers(self, *, scaled: bool) -> list[Finding]:
        run = self._run
        if run is None or run.decides_late:  # heard of late, the buffers would be those of another step
            return []
        value = run.health.small_buffers()
        if value is None:
            return []
        self._step.buffers = True
        return [self._buffers(run, value, scaled=scaled)]

    def _buffers(self, run: Run, value: Tensor, *, scaled: bool) -> Finding:
        step = self._step
        return Finding(
            kind=Kind.NONFINITE_STATE,
            value=value,
            action=Action.parse(self.action),
            confirm=lambda: self._confirm_buffers(run, step.view, scaled=scaled),
        )

    def _buffers_due(self, step: int) -> bool:
        run = self._run
        if run is None or run.decides_late or not self.checks_after_step(step):
            return False  # heard of late, the buffers would be those of another step
        return any(True for _ in run.health.buffers())

    def _look_at_gradients(self, event: events.BeforeClip) -> Finding:
        step, view = self._step, event.gradients
        step.view = view
        if event.loss_scale is not None and event.overflow is not None:
            scale = event.loss_scale
            return Finding(
                kind=Kind.LOSS_SCALE,
                value=(event.overflow > 0).logical_and(scale <= self.min_loss_scale),
                action=Action.parse(self.action),
                confirm=lambda: self._confirm_scale(scale, view),
            )
        return Finding(
            kind=Kind.NONFINITE_GRADIENT,
            # A norm of order 0 counts elements and one below 0 inverts them: neither shows every NaN and Inf.
            value=view.total_norm if view.norm_type > 0 else view.max_magnitude,
            action=Action.parse(self.action),
            confirm=lambda: self._confirm_gradients(view, step),
        )

    def checks_after_step(self, step: int) -> bool:
        """Return True on the steps after which the training state is looked at."""
        return step < self.state_warmup or (self.state_every > 0 and (step + 1) % self.state_every == 0)

    def on_after_step(self, event: events.AfterStep) -> Sequence[Finding]:
        """Look at the state when it is due, and count the steps that the GradScaler drops."""
        findings = []
        self._scaler_skips = self._scaler_skips + 1 if event.scaler_skipped else 0
        if self._scaler_skips and self._scaler_skips % self.max_scaler_skips == 0:
            findings.append(self._lost_scale(self._scaler_skips, self._step.view))
        self._unchecked = self._unchecked or event.applied
        if self._run is not None and self.checks_after_step(event.step):
            findings += self._look_at_state(self._run, self.state_parts)
        step = self._step
        if step.view is not None or step.seen or step.buffers:
            self._step = _Step()  # it would keep the step's gradients alive through the next backward pass
        return findings

    def _lost_scale(self, skips: int, view: GradientView | None) -> Finding:
        return Finding(
            kind=Kind.LOSS_SCALE,
            value=torch.tensor(True),
            action=Action.ROLLBACK,
            confirm=lambda: Evidence(
                kind=Kind.LOSS_SCALE,
                action=Action.ROLLBACK,
                message=f"the GradScaler has dropped {skips} steps in a row",
                tensors=view.evidence() if view is not None else (),
                diagnosis=_unexplained("backward", _SCALE_HINT),
            ),
        )

    def on_run_end(self, event: events.RunEnd) -> list[Finding] | None:
        """Look at the state that the run leaves behind, if the last update was not looked at yet."""
        run = self._run
        if run is None or event.error is not None or not (self._unchecked and self.state_every):
            return None
        aborted = bool(run.incidents) and run.incidents[-1].outcome is Outcome.ABORTED
        return None if aborted else self._look_at_state(run)

    def _look_at_state(self, run: Run, parts: int = 1) -> list[Finding]:
        part, self._part = self._part % parts, self._part + 1
        self._unchecked = self._unchecked and parts > 1
        # Where the device decides it drops a step by this number alone.
        look = partial(run.health.view, part, parts, largest=run.decides_late)
        view = look()
        bad = Finding(
            kind=Kind.NONFINITE_PARAMETER,
            value=view.total_norm,
            action=Action.ROLLBACK,
            confirm=lambda: self._confirm_state(before_step=False),
        )
        names = {name for name, _ in run.health.parameters()}
        return [bad, *self._growth.findings(view, names, (part, parts), look)]

    # -- on the host, when something is suspected --------------------------------------------------

    def _confirm_loss(self, loss: Tensor, microbatch: int, step: _Step) -> Evidence:
        state = self._confirm_state(before_step=True)
        if state is not None:
            return state
        tensors = step.view.evidence() if step.view is not None else ()
        remedy = _SCALE_HINT if self._run is not None and "scaler" in self._run.host.stateful() else ()
        return Evidence(
            kind=Kind.NONFINITE_LOSS,
            action=Action.parse(self.action),
            message=f"the loss is {float(loss)}" + _in_microbatch(microbatch, step) + _spread(tensors, step),
            tensors=tensors,
            microbatch=microbatch,
            diagnosis=_unexplained("loss", remedy),
        )

    def _confirm_gradients(self, view: GradientView, step: _Step) -> Evidence | None:
        tensors = view.evidence()
        run = self._run
        began_here = run is not None and run.local.watching and bool(run.local.bad_places()[1])
        if not tensors and not began_here:  # a shard may be finite on the very rank that spoilt the others'
            return None if run is None else overflowing_squares(run, view, Action.parse(self.action))
        state = self._confirm_state(before_step=True)
        if state is not None:
            return state
        microbatch = self._first_bad_microbatch(step)
        return Evidence(
            kind=Kind.NONFINITE_GRADIENT,
            action=Action.parse(self.action),
            message=f"non-finite gradient in {_name(tensors) or 'another shard'}"
            + _in_microbatch(microbatch, step),
            tensors=tensors,
            microbatch=microbatch,
            diagnosis=_unexplained("backward"),
        )

    def _confirm_scale(self, scale: Tensor, view: GradientView) -> Evidence | None:
        value = float(scale)
        return Evidence(
            kind=Kind.LOSS_SCALE,
            action=Action.parse(self.action),
            message=f"the loss scale has collapsed to {value:g} and the gradients still overflow",
            tensors=view.evidence(),
            diagnosis=_unexplained("backward", _SCALE_HINT),
            details={"loss_scale": value},
        )

    def _confirm_buffers(self, run: Run, view: GradientView | None, *, scaled: bool) -> Evidence | None:
        """Tell statistics that this step has spoilt from those that were bad before, and from a bad step."""
        losses = [done.loss for done in run.scene.passes if done.loss is not None]
        if not all(bool(torch.isfinite(loss).all()) for loss in losses):
            return None  # that is somebody else's finding, and cured together with it
        if not scaled and view is not None and not bool(torch.isfinite(view.total_norm)):
            return None
        spoilt = nonfinite_in(run.health.buffers())
        if not spoilt:
            return None
        before = run.health.scan(before_step=True)
        if before:  # which is found after the step, when the state is looked at
            run.health.set_aside(entry.name for entry in before.get("buffers", ()))
            return None
        return Evidence(
            kind=Kind.NONFINITE_STATE,
            action=Action.parse(self.action),
            message=f"the forward pass made buffers non-finite: {_name(spoilt)}, and nothing else",
            tensors=spoilt,
            diagnosis=_unexplained("forward"),
            details={OF_THIS_STEP: True},
        )

    def _confirm_state(self, *, before_step: bool) -> Evidence | None:
        """Tell a bad state, which no dropped step can cure, from a bad step."""
        if self._run is None:
            return None
        found = self._run.health.scan(before_step=before_step)
        if not found:
            return None
        kind = Kind.NONFINITE_PARAMETER if "parameters" in found else Kind.NONFINITE_STATE
        tensors = tuple(entry for part in found.values() for entry in part)
        words = "; ".join(f"non-finite {part}: {_name(entries)}" for part, entries in found.items())
        return Evidence(
            kind=kind,
            action=max(Action.parse(self.action), Action.ROLLBACK),
            message=f"{words} (the state itself is bad, not only this step)",
            tensors=tensors,
            diagnosis=_unexplained("optimizer" if "buffers" not in found else "forward"),
        )

    def _first_bad_microbatch(self, step: _Step) -> int | None:
        if not self.check_microbatches:
            return None
        last = step.seen[-1][0] + 1 if step.seen else 0
        made = len({done.microbatch for done in self._run.scene.passes}) if self._run is not None else 0
        otherwise = last if made <= last + 1 else None  # nobody looked in between: any may be the bad one
        return next((one for one, largest in step.seen if not bool(torch.isfinite(largest))), otherwise)


def _spread(tensors: Sequence[TensorEvidence], step: _Step) -> str:
    if step.view is None:
        return ""
    if not tensors:
        return ", while every gradient is finite"
    return f", and so are the gradients of {len(tensors)} of {len(step.view)} parameters"


def _in_microbatch(microbatch: int | None, step: _Step) -> str:
    return "" if microbatch is None or not step.seen else f" (micro-batch {microbatch})"


def _unexplained(phase: str, remedy: tuple[str, ...] = ()) -> Diagnosis:
    return Diagnosis(cause="unknown", confidence=0.0, phase=phase, remedy=remedy)


def _name(tensors: Sequence[TensorEvidence]) -> str:
    return fold([tensor.name for tensor in tensors])
