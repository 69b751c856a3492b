"""A loss or a gradient norm that is far from the run's own past: the batch, the weights, or an accident?

What comes out the same again is put down to the batch if another batch does not have it with the same
weights, and to the weights if an earlier state does not have it either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsentinel.again.scene import MicroBatch
from gradsentinel.decision import Kind
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident

_DATA_REMEDY = (
    "look at the records of this batch: labels that do not belong to them, or text that is no text",
    "clipping bounds what one such batch does; SpikeCallback(action='skip') drops it",
)
_STATE_REMEDY = ("go back to a state from before it began: Rollback(), or action='rollback'",)


def explain_spike(
    replay: Replay,
    microbatches: Sequence[MicroBatch],
    computed: Sequence[Computed],
    worst: int,
    incident: Incident,
    facts: tuple[str, ...],
    time_left: Callable[[], bool],
) -> Diagnosis | None:
    """Say whether the batch or the weights make it; None if neither is shown. Call inside `sheltered`.

    Args:
        replay: of the step.
        microbatches: of the step, in the order of `computed`.
        computed: what they came to: the same as in the loop.
        worst: which of them has the largest gradient.
        incident: what it is about.
        facts: what is known already.
        time_left: whether there is time for one more run.
    """
    healthy, good = replay.run.scene.healthy, replay.run.known_good
    usual = _Usual.of(incident, computed, worst)
    if usual is None or not healthy or not time_left():
        return None
    guilty, other = microbatches[worst], healthy[0].batch
    swapped = swap.compute_with_batch(replay, guilty, other)
    if swapped is None:
        return None
    said = f"with the batch of the last healthy step and the same weights {usual.compared(swapped)}"
    if usual.holds(swapped):
        return Diagnosis(
            cause="data", confidence=0.6, phase="input", evidence=(said, *facts), remedy=_DATA_REMEDY
        )
    if good is None or not time_left():
        return None
    older = swap.compute_with_weights(replay, guilty, good, other)
    if older is None or not usual.holds(older):
        return None
    back = f"with it and the weights of step {good.step} {usual.compared(older)}"
    return Diagnosis(
        cause="optimizer", confidence=0.5, phase="optimizer", evidence=(said, back, *facts),
        remedy=_STATE_REMEDY,
    )  # fmt: skip


class _Usual:
    """What the number that is far out would have to be to be as usual, of one micro-batch."""

    def __init__(self, signal: str, bound: float, was: float, read: Callable[[Computed], float]) -> None:
        self._words = "loss" if signal == "loss" else "gradient norm"
        self._bound = bound
        self._was = was
        self._read = read

    @classmethod
    def of(cls, incident: Incident, computed: Sequence[Computed], worst: int) -> _Usual | None:
        """Return the measure of the signal that is farthest out; None if the incident names none."""
        signals: Mapping[str, Any] = incident.details.get("signals") or {}
        if incident.kind is not Kind.SPIKE or not signals:
            return None
        signal, numbers = next(iter(signals.items()))
        value, bound = float(numbers["value"]), float(numbers["bound"])
        if not (math.isfinite(value) and value > bound > 0):
            return None
        if signal == "loss":
            rest = sum(float(one.loss) for number, one in enumerate(computed) if number != worst)
            # The incident is about the mean over the micro-batches, of which only one is computed anew.
            limit = bound * len(computed) - rest
            return cls(signal, limit, float(computed[worst].loss), lambda one: float(one.loss))
        was = norm_of(computed[worst])  # scaled, and of one micro-batch: only the ratio is that of the step
        return cls(signal, was * bound / value, was, norm_of)

    def holds(self, computed: Computed) -> bool:
        """Return True if the micro-batch would be as usual."""
        return self._read(computed) <= self._bound

    def compared(self, computed: Computed) -> str:
        """Say what it came to."""
        return f"the {self._words} is {self._read(computed):.4g} instead of {self._was:.4g}"


def norm_of(computed: Computed) -> float:
    """Return the norm of all gradients of a micro-batch; waits for the device."""
    return math.hypot(*(float(norm) for norm in swap.norms_of(computed)))


def is_usual_again(incident: Incident, before: float, now: float) -> bool:
    """Say whether only the loop's loss was far out, and that of the second computation is not at all.

    That of another computation than the loop's would hardly lie where the loop's losses lie.
    """
    numbers: Mapping[str, Any] = (incident.details.get("signals") or {}).get("loss") or {}
    bound, median = numbers.get("bound"), numbers.get("median")
    if incident.kind is not Kind.SPIKE or bound is None or median is None:
        return False
    return float(median) / 2 < now <= float(bound) < before
