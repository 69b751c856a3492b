"""What one policy made of each fault, and what it cost: from the files of the trials, nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STRONG = 0.1
"""An update is spoiled if it ends this far from the fault-free one, as a fraction of the latter's length."""
WINDOW = 60
"""An incident belongs to the last fault if that was at most so many steps before."""

Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One fault under one policy."""

    kind: str
    family: str
    cause: str
    """What a right diagnosis says."""
    persistent: bool
    bit: int | None
    target: str | None
    """What was hit: sample, activation, gradient, parameter or setting."""
    strength: str
    """`nonfinite`, `strong`, `faint` or `void`: what it does to an unguarded step."""
    deviation: float
    """How far it takes an unguarded update, as a fraction of that update."""
    loss_change: float
    """What it adds to the loss of an unguarded step."""
    landed: bool
    """A spoiled update was made."""
    stayed: bool
    """It is in the final weights."""
    exact: bool | None
    """The step came out as without the fault, bit for bit; None where no copy was tried."""
    noticed: bool
    outcome: str | None
    delay: int | None
    """Steps from the fault to the incident."""
    found: str | None
    """The cause in the diagnosis; None if there is none."""
    right: dict[str, bool]
    """Whether `sample`, `parameter`, `module`, `op` and `rank` are right, as far as there is one."""


@dataclass(kw_only=True)
class Score:
    """One run under one policy."""

    workload: str
    policy: str
    steps: int
    attempts: int
    sound: int
    """Batches whose update is in the final weights and was not spoiled."""
    spoiled: int
    """Updates in the final weights that a fault has spoiled."""
    interruptions: int
    lost: int
    """Batches that are in no update of the final weights."""
    loss: float
    loss_ratio: float
    """Final loss as a fraction of that without faults."""
    exact_run: bool
    """The final weights are those of the run without faults, bit for bit."""
    false_alarms: int
    step_seconds: float | None
    verdicts: list[Verdict] = field(default_factory=list)
    diagnosis: list[float] = field(default_factory=list)
    """Seconds from a bad step to its diagnosis, of each incident that has one."""
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    """Everything that was decided, without clocks."""


def score(result: Result, clean: Result | None) -> Score:
    """Score one run; `clean` is the same trial without faults."""
    faults = {int(one["step"]): one for one in result["faults"]}
    # With several ranks no copy is tried: the run itself knows what was put in.
    known = [*(() if clean is None else clean["truths"]), *result["truths"]]
    truths = {int(one["number"]): one for one in known}
    kept, bad = set(result["kept"]), set(result["bad"])
    assigned, alarms = assign(result["incidents"], faults if result["policy"] not in _HEALTHY else {})
    effects = {int(one["number"]): one for one in result["effects"]}
    verdicts = []
    if result["policy"] not in _HEALTHY:
        verdicts = [
            _verdict(fault, truths.get(step), effects.get(step), assigned.get(step, []), kept, bad)
            for step, fault in sorted(faults.items())
        ]
    spoiled = {step for step, one in zip(sorted(faults), verdicts, strict=False) if one.stayed} | (bad & kept)
    clocks = [
        clock.get("detect", 0.0) + clock["diagnose"]
        for clock in result["clock"]["incidents"]
        if clock.get("diagnose") is not None
    ]
    loss, right = float(result["loss"]), math.nan if clean is None else float(clean["loss"])
    return Score(
        workload=result["trial"]["workload"],
        policy=result["policy"],
        steps=result["steps"],
        attempts=result["attempts"],
        sound=len(kept - spoiled),
        spoiled=len(spoiled),
        interruptions=len(result["interruptions"]),
        lost=result["steps"] - len(kept),
        loss=loss,
        loss_ratio=loss / right,
        exact_run=clean is not None and result["weights"] == clean["weights"],
        false_alarms=alarms,
        step_seconds=result["clock"]["step"],
        verdicts=verdicts,
        diagnosis=clocks,
        decisions=decisions(result),
    )


_HEALTHY = ("clean", "healthy")


def assign(
    incidents: Sequence[Mapping[str, Any]], faults: Mapping[int, Any]
) -> tuple[dict[int, list[Mapping[str, Any]]], int]:
    """Give each incident to the last fault before it; return the rest as the number of false alarms."""
    assigned: dict[int, list[Mapping[str, Any]]] = {}
    alarms = 0
    for incident in incidents:
        number = int(incident["number"])
        step = max((step for step in faults if step <= number), default=None)
        if step is None or number - step > WINDOW:
            alarms += 1
        else:
            assigned.setdefault(step, []).append(incident)
    return assigned, alarms


def decisions(result: Result) -> list[tuple[Any, ...]]:
    """Return what was decided, in order, without anything that depends on a clock."""
    keys = ("number", "kind", "action", "outcome", "cause", "module", "op")
    found: list[tuple[Any, ...]] = [tuple(one[key] for key in keys) for one in result["incidents"]]
    found += [("interrupted", one["number"]) for one in result["interruptions"]]
    return [*found, ("weights", result["weights"], result["attempts"])]


def strength(truth: Mapping[str, Any] | None) -> str:
    """Say what a fault does to an unguarded step."""
    if truth is None or not truth["fired"]:
        return "void"
    if not truth["finite"]:
        return "nonfinite"
    return "strong" if float(truth["deviation"]) > STRONG else "faint"


def _verdict(
    fault: Mapping[str, Any],
    truth: Mapping[str, Any] | None,
    effect: Mapping[str, Any] | None,
    incidents: Sequence[Mapping[str, Any]],
    kept: set[int],
    bad: set[int],
) -> Verdict:
    from gradsentinel.campaign.kinds import BY_NAME  # noqa: PLC0415 - imports torch

    step = int(fault["step"])
    hit = {} if truth is None or truth["hit"] is None else truth["hit"]
    first = incidents[0] if incidents else None
    how = strength(truth)
    landed = step in bad
    if effect is not None and not effect["unchanged"] and how != "void":
        deviation = float(effect["deviation"])
        # A state that was not finite before cannot be compared: `bad` knows then.
        landed = landed or (not math.isnan(deviation) and (not effect["finite"] or deviation > STRONG))
    rolled_back = first is not None and first["outcome"] == "rolled_back" and int(first["number"]) == step
    landed = landed and not rolled_back
    kind = BY_NAME[fault["kind"]]
    return Verdict(
        kind=kind.name,
        family=kind.family,
        cause=kind.cause,
        persistent=bool(fault["persistent"]),
        bit=hit.get("bit"),
        target=hit.get("target"),
        strength=how,
        deviation=math.nan if truth is None else float(truth["deviation"]),
        loss_change=math.nan if truth is None else float(truth["loss"]) - float(truth["loss_without"]),
        landed=landed,
        stayed=landed and step in kept,
        exact=effect if effect is None else bool(effect["exact"]),
        noticed=first is not None,
        outcome=None if first is None else first["outcome"],
        delay=None if first is None else int(first["number"]) - step,
        found=None if first is None else first["cause"],
        right={} if first is None else places(hit, first, fault.get("rank")),
    )


def places(hit: Mapping[str, Any], incident: Mapping[str, Any], rank: int | None) -> dict[str, bool]:
    """Compare what an incident says of the place with where the fault was, as far as there is one."""
    right: dict[str, bool] = {}
    target, where = hit.get("target"), hit.get("where")
    if target == "sample" and hit.get("elements") == 1:
        right["sample"] = incident["samples"] == [hit["index"][0]]
    elif target in ("gradient", "parameter"):
        right["parameter"] = [bare(name) for name in incident["parameters"][:1]] == [bare(where)]
    elif target == "activation":
        right["module"] = bare(incident["module"]) == bare(where)
        if (hit.get("op") or "").startswith("aten."):
            right["op"] = incident["op"] == hit["op"]
    if rank is not None:
        right["rank"] = incident["ranks"] == [rank]
    return right


def bare(name: str | None) -> str | None:
    """Return a name without what wrappers put in front."""
    while name is not None and name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def confusion(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """Count which cause was found for which, of the faults that were noticed."""
    table: dict[str, Counter[str]] = {}
    for one in verdicts:
        if one.noticed:
            table.setdefault(one.cause, Counter())[one.found or "no diagnosis"] += 1
    return {cause: dict(sorted(found.items())) for cause, found in sorted(table.items())}
