"""The facts of a training loop: one frozen class and one callback method per event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsentinel.decision import Action

if TYPE_CHECKING:
    from gradsentinel.evidence import Diagnosis
    from gradsentinel.gradients import GradientView
    from gradsentinel.incident import Incident, Recovery
    from gradsentinel.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    step: int
    """Number of the optimizer step, from 0; goes back on a rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart(Event):
    """The run begins; the first event, once. Collectives allowed."""

    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd(Event):
    """The run ends, by close() or by an exception; the last event, once. Collectives allowed."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStart(Event):
    """A step begins, before its first micro-batch. No collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Event):
    """A micro-batch is about to enter the model. No collectives: ranks may see different numbers."""

    microbatch: int
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterBackward(Event):
    """The gradients of a micro-batch exist. No collectives: ranks may see different numbers."""

    microbatch: int
    loss: Tensor | None
    """The loss as the loop computed it: unscaled, not divided by the accumulation; None if unseen."""
    gradients: GradientView
    """Accumulated so far in this step; scaled if `scaled`, local if not `reduced`."""
    scaled: bool
    reduced: bool
    last: bool
    """True when this is expected to be the step's last micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeClip(Event):
    """The final gradients: reduced, unscaled, not yet clipped. Detect here; only the bus communicates."""

    gradients: GradientView
    losses: tuple[Tensor, ...]
    """The losses of the step's micro-batches, unscaled; empty if the loop did not show them."""
    loss_scale: Tensor | None = None
    """0-dim, if a loss scaler is at work; non-finite gradients are then its business first."""
    overflow: Tensor | None = None
    """0-dim, above 0 when the loss scaler found a non-finite gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterStep(Event):
    """The optimizer ran, or the step was dropped. Collectives allowed."""

    applied: bool
    """True when the optimizer changed the weights."""
    iteration: int = 0
    """Number of the attempted step, from 0; never goes back, unlike `step`."""
    action: Action
    grad_norm: float
    """Global gradient norm before clipping."""
    loss: float | None
    """Mean over the step's micro-batches."""
    learning_rates: tuple[float, ...]
    loss_scale: float | None = None
    scaler_skipped: bool = False
    """True when the loss scaler dropped the step while looking for its scale; not an incident."""
    clipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEvent(Event):
    """A decision above CONTINUE was agreed; all ranks are here. Collectives allowed."""

    incident: Incident
    scene: Mapping[str, Any] = field(repr=False)
    """References to the step's micro-batches and random states, for those who keep evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisEvent(Event):
    """The diagnosis of an incident is ready. Collectives allowed."""

    incident: Incident
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryEvent(Event):
    """A recovery was carried out, or failed. Collectives allowed."""

    incident: Incident
    recovery: Recovery


METHODS: dict[type[Event], str] = {
    RunStart: "on_run_start",
    StepStart: "on_step_start",
    Batch: "on_batch",
    AfterBackward: "on_after_backward",
    BeforeClip: "on_before_clip",
    IncidentEvent: "on_incident",
    DiagnosisEvent: "on_diagnosis",
    RecoveryEvent: "on_recovery",
    AfterStep: "on_after_step",
    RunEnd: "on_run_end",
}
"""Which callback method hears which event, in the order of a step."""
