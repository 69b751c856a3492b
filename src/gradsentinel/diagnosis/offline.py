"""Runs a saved step in another process and repeats the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel.decision import Kind
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.diagnose import FINITE, NONFINITE, diagnose
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.scan import scan, spoilt_by_forward
from gradsentinel.diagnosis.stage import Stage
from gradsentinel.evidence import Diagnosis, Evidence
from gradsentinel.incident import OF_THIS_STEP, Incident, fold
from gradsentinel.measures.inspection import nonfinite_in

_REPLAYED = NONFINITE | FINITE | {Kind.NONFINITE_INPUT}
STATE_KINDS = {Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the step came to."""

    computed: list[Computed] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    """Numbers of the micro-batches whose loss was not finite."""
    gradients: list[str] = field(default_factory=list)
    """Names of the parameters whose gradients were not finite, or whose sum was not."""
    summed: bool = False
    """True if only the sum over the micro-batches is not finite."""
    wide: list[Computed] = field(default_factory=list)
    """The same, where everything narrower was computed in float32 and came out finite."""
    state: list[str] = field(default_factory=list)
    """What optimizer or forward pass left behind that is not finite, if the incident is about that."""

    @property
    def finite(self) -> bool:
        """True if each micro-batch, and the sum of their gradients, is finite."""
        return not self.losses and not self.gradients and not self.state

    def in_words(self) -> str:
        """Say what was not finite."""
        said = [f"{fold(self.state)} after the step"] if self.state else []
        if self.losses:
            which = f" of micro-batch {fold([*map(str, self.losses)])}" if len(self.computed) > 1 else ""
            said.append(f"the loss{which}")
        if self.gradients:
            names = list(dict.fromkeys(self.gradients))
            many = "gradients" if len(names) > 1 else "gradient"
            said.append(f"the {f'sum of the {many}' if self.summed else many} of {fold(names)}")
        return ", ".join(said)


def by_update(incident: Incident) -> bool:
    """Return True if it is about what the optimizer left behind, not what a forward pass has spoilt."""
    return incident.kind in STATE_KINDS and not spoilt_by_forward(incident)


def reason_against(incident: Incident) -> str | None:
    """Return why one process cannot repeat an incident, or None if it can."""
    if incident.kind in _REPLAYED | STATE_KINDS:
        return None
    return f"{incident.id}: an incident of the kind {incident.kind} is about more than one step of one rank"


def compute(stage: Stage) -> Outcome:
    """Run each saved micro-batch, forward and backward; changes nothing.

    Of a step that left a bad state behind, and whose bad state was saved, that is looked at instead.

    Raises:
        Exception: whatever the user's code raises.
    """
    buffers = spoilt_by_forward(stage.bundle.incident)
    if by_update(stage.bundle.incident) and not stage.fixed:
        left = [*stage.run.host.named_parameters(), *stage.run.health.moments()]
        return Outcome(state=[entry.name for entry in nonfinite_in(left)])
    replay = Replay(stage.run, buffers=buffers)
    outcome = Outcome()
    with replay.sheltered():
        for microbatch in replay.microbatches:
            computed = replay.compute(microbatch)
            outcome.computed.append(computed)
            outcome.losses += [microbatch.index for _ in nonfinite_in([("loss", computed.loss)])]
            outcome.gradients += [entry.name for entry in nonfinite_in(computed.gradients.items())]
            outcome.state += [name for name in computed.spoilt if name not in outcome.state]
    if outcome.finite:
        total = total_gradients(outcome.computed)
        outcome.gradients = [entry.name for entry in nonfinite_in(total.items())]
        outcome.summed = not outcome.finite
    return outcome


@torch.no_grad()
def total_gradients(computed: Sequence[Computed]) -> dict[str, Tensor]:
    """Add up the micro-batches' gradients, as accumulation does."""
    total: dict[str, Tensor] = {}
    for one in computed:
        for name, gradient in one.gradients.items():
            total[name] = total[name] + gradient if name in total else gradient.detach().clone()
    return total


def compute_in_wide(stage: Stage) -> list[Computed]:
    """Compute the step with half-precision operators in float32; empty if that fails, or is not finite."""
    replay = Replay(stage.run, buffers=spoilt_by_forward(stage.bundle.incident))
    with replay.sheltered():
        found = [swap.compute_in_wide(replay, microbatch) for microbatch in replay.microbatches]
    computed = [one for one in found if one is not None and swap.is_finite(one)]
    return computed if len(computed) == len(found) else []


def judge(stage: Stage) -> Diagnosis | None:
    """Return the verdict on the step, by the rules of the run itself; None if there is none."""
    incident, run = stage.bundle.incident, stage.run
    kind = Kind.NONFINITE_LOSS if incident.kind is Kind.NONFINITE_INPUT else incident.kind
    buffers = spoilt_by_forward(incident)
    details = {OF_THIS_STEP: True} if buffers else {}
    evidence = Evidence(
        kind=kind,
        action=incident.action,
        message=incident.message,
        tensors=incident.tensors,
        microbatch=incident.microbatch,
        details=details,
    )
    found = scan(evidence, run).diagnosis
    if found is not None or (incident.kind not in _REPLAYED and not buffers):
        return found
    fresh = Incident(
        id=incident.id,
        step=incident.step,
        kind=kind,
        action=incident.action,
        message=incident.message,
        tensors=incident.tensors,
        microbatch=incident.microbatch,
        details=details,
    )
    diagnose(fresh, run)
    return fresh.diagnosis


def same_verdict(recorded: Diagnosis | None, now: Diagnosis | None) -> bool:
    """Return True if a verdict says what was recorded: cause, operator, module, as far as they were known."""
    if recorded is None or now is None:
        return recorded is None or recorded.cause == "unknown"
    # Without an operator, "outside of all modules" is what only the loop itself could show.
    module = recorded.module if recorded.op is not None else recorded.module or None
    known = [(recorded.op, now.op), (module, now.module)]
    cause = recorded.cause in ("unknown", now.cause)
    return cause and all(then in (None, there) for then, there in known)
