"""What is told of a value that is far outside: how far, since when, what makes it up, what changed before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.incident import MAY_STAND
from gradsentinel.measures.bands import Band

WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
_DOMINANT = 5
"""So many parameters are named, if they make up a tenth of the largest."""
_LEVELS = 5.0
"""More than so many times what the run began with is worth a word."""
_GROWING = 3
"""So many values in a row, each larger than the one before, are a divergence."""
_JUMP = 3.0
"""A learning rate that grew by so much may explain one."""
_LOOK_BACK = 16


class Past(NamedTuple):
    """What is remembered of a step."""

    step: int
    loss: float | None
    grad_norm: float
    rate: float | None
    """The largest learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A value outside its band."""

    signal: str
    value: float
    band: Band
    streak: tuple[tuple[int, float], ...] = ()
    """Step and value of those outside just before it."""

    @property
    def exploded(self) -> bool:
        """True if it is so far out that it is no ordinary spike."""
        return abs(self.value) > self.band.explosion

    @property
    def ratio(self) -> float:
        """How many times the usual value."""
        return self.value / self.band.center if self.band.center else math.inf

    @property
    def words(self) -> str:
        """One phrase."""
        band, text = self.band, f"the {WORDS[self.signal]} is {self.value:.4g}"
        if band.center > 0:
            text += f", {self.ratio:.3g} times the median of the last {band.count} healthy steps"
        else:
            text += f", and {band.center:.4g} in the median of the last {band.count} healthy steps"
        if band.began is not None and 0 < _LEVELS * band.began < self.value:
            text += f" and {self.value / band.began:.3g} times what the run began with"
        far = band.deviations(self.value)
        if not band.early and math.isfinite(far):
            text += f" ({far:+.1f} deviations)"
        return text

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for `details`."""
        band = self.band
        return {
            "value": self.value,
            "median": band.center,
            "mad": band.spread / 1.4826,
            "deviations": band.deviations(self.value),
            "ratio": self.ratio,
            "bound": band.explosion if band.early else band.high,
            "explosion": band.explosion,
            "window": band.count,
            "outside_before": len(self.streak),
        }


def finding_of_first(signal: str, left_out: tuple[int, float, float]) -> Finding:
    """Return the warning of a first value that nothing could be compared with when it came."""
    step, value, factor = left_out
    message = (
        f"the {WORDS[signal]} of step {step} was {value:.4g}, {factor:.3g} times that of the steps after it; "
        "nothing was there to compare it with, and the step was made"
    )
    remedy = (
        "start again if the loss has suffered; clip gradients, which bounds what such a step does",
        "set MagnitudeCallback(max_global_norm=...), which needs nothing to compare with",
    )
    evidence = Evidence(
        kind=Kind.SPIKE,
        action=Action.WARN,
        message=message,
        diagnosis=Diagnosis(cause="unknown", confidence=0.0, phase="backward", remedy=remedy),
        details={"first_step": step, "value": value, "ratio": factor},
    )
    return Finding(kind=Kind.SPIKE, value=torch.tensor(True), action=Action.WARN, confirm=lambda: evidence)


def evidence_of(
    outliers: Sequence[Outlier],
    *,
    step: int,
    action: Action,
    may_stand: bool,
    view: GradientView,
    past: Sequence[Past],
    window: int,
) -> Evidence:
    """Return the evidence for values outside their bands, the farthest first."""
    ordered = sorted(outliers, key=lambda one: -abs(one.value) / max(one.band.explosion, 1e-300))
    facts = [one.words for one in ordered]
    story, jumped = _story(ordered, step, past)
    return Evidence(
        kind=Kind.SPIKE,
        action=action,
        message="; ".join(facts) + (f"; {story}" if story else ""),
        tensors=dominant(view),
        diagnosis=_advice(story, facts, jumped=jumped),
        details={
            "signals": {one.signal: one.as_dict() for one in ordered},
            "exploded": any(one.exploded for one in ordered),
            "history": window,
            **({MAY_STAND: True} if may_stand else {}),
        },
    )


def evidence_of_nonfinite(broken: Mapping[str, float], *, action: Action, view: GradientView) -> Evidence:
    """Return the evidence for a loss or norm that is not finite: no spike, but nothing to let through."""
    name = "loss" if "loss" in broken else "grad_norm"
    return Evidence(
        kind=Kind.NONFINITE_LOSS if name == "loss" else Kind.NONFINITE_GRADIENT,
        action=action,
        message=f"the {WORDS[name]} is {broken[name]}",
        tensors=view.evidence(),
    )


def evidence_of_groups(
    groups: Mapping[str, tuple[float, float, float]],
    *,
    action: Action,
    view: GradientView,
    members: Mapping[str, str],
) -> Evidence:
    """Return the evidence for groups of parameters outside their bands.

    `groups` has norm, usual norm and score (1 at the bound) by name, `members` the group of each parameter.
    """
    ordered = sorted(groups.items(), key=lambda entry: -entry[1][2])
    name, (norm, usual, _) = ordered[0]
    more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    found = view.inspect()
    tensors = [entry for entry in found if members.get(entry.name) in groups]
    return Evidence(
        kind=Kind.SPIKE,
        action=action,
        message=f"the gradient norm of {name} is {norm:.4g}, {norm / usual if usual else math.inf:.3g} times "
        f"its usual value{more}",
        tensors=tuple(sorted(tensors, key=lambda entry: -entry.norm)),
        diagnosis=_unexplained("backward"),
        details={
            "groups": {
                one: {"norm": norm, "usual": usual, "score": score}
                for one, (norm, usual, score) in ordered[:16]
            },
            "subject": "groups",
        },
        about=tuple(one for one, _ in ordered),
    )


def dominant(view: GradientView) -> tuple[TensorEvidence, ...]:
    """Return the parameters that make up the norm: the largest, and those within a tenth of it."""
    found = sorted(view.inspect(), key=lambda entry: -entry.norm)
    return tuple(entry for entry in found[:_DOMINANT] if entry.norm >= 0.1 * found[0].norm)


def _story(outliers: Sequence[Outlier], step: int, past: Sequence[Past]) -> tuple[str, bool]:
    """Say since when the values are outside or grow, and whether the learning rate jumped just before."""
    text, onset = "", step
    for one in outliers:
        first, factor = _growth(one, step, past)
        if factor:
            text, onset = f"it has grown {factor:.3g} times per step since step {first}", first
        elif one.streak:
            onset = one.streak[0][0]
            text = f"it has been outside since step {onset}"
        if text:
            break
    jump = _rate_jump(past, onset)
    if not jump:
        return text, False
    return f"{text}, right after {jump}" if text else f"shortly before, {jump}", True


def _growth(one: Outlier, step: int, past: Sequence[Past]) -> tuple[int, float]:
    """Since when a signal has grown from step to step, and how many times per step; 0 if it has not."""
    grown = [(step, one.value)]
    for entry in reversed(past):
        value = getattr(entry, one.signal)
        if value is None or not 0 < value < grown[-1][1] or entry.step != grown[-1][0] - 1:
            break
        grown.append((entry.step, value))
    while len(grown) > 1 and one.band.holds(grown[-1][1]) and one.band.holds(grown[-2][1]):
        grown.pop()
    if len(grown) < _GROWING:
        return step, 0.0
    first, start = grown[-1]
    return first, float((one.value / start) ** (1 / (step - first)))


def _rate_jump(past: Sequence[Past], step: int) -> str:
    """Say how the learning rate jumped shortly before a step."""
    rates = [(p.step, p.rate) for p in past if p.rate is not None and step - _LOOK_BACK <= p.step <= step + 1]
    for (_, before), (place, after) in pairwise(rates):
        if before > 0 and after >= _JUMP * before:
            return f"the learning rate went from {before:g} to {after:g} in step {place}"
    return ""


def _advice(story: str, facts: Sequence[str], *, jumped: bool) -> Diagnosis:
    diverges = "grown" in story
    if not jumped and not diverges:
        return _unexplained("backward")
    remedy = ["lower the learning rate, or warm it up over more steps"]
    if jumped:
        remedy.insert(0, "look at the LR schedule: the trouble began when the rate jumped")
    remedy.append("go back to a state from before it began: Rollback(), or action='rollback'")
    return Diagnosis(
        cause="optimizer",
        confidence=0.8 if jumped and not story.startswith("shortly") else 0.5,
        phase="optimizer",
        evidence=(*facts, story),
        remedy=tuple(remedy),
    )


def _unexplained(phase: str) -> Diagnosis:
    return Diagnosis(
        cause="unknown",
        confidence=0.0,
        phase=phase,
        remedy=("clip gradients by norm", "look at the batch of this step: SnapshotSaver keeps it"),
    )
