"""The numbers of a policy over all its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from gradsentinel.campaign.score import Score, Verdict, confusion

VISIBLE = ("nonfinite", "strong")


def totals(scores: Sequence[Score], plain: Sequence[Score] = ()) -> dict[str, Any]:
    """Return the totals of one policy; `plain`: the same runs without guard and faults, for the overhead."""
    verdicts = [one for score in scores for one in score.verdicts if one.strength != "void"]
    noticed = [one for one in verdicts if one.noticed]
    diagnosed = [one for one in noticed if one.found is not None]
    delays = [one.delay for one in noticed if one.delay is not None]
    seconds = sorted(value for score in scores for value in score.diagnosis)
    nonfinite = [one for one in verdicts if one.strength == "nonfinite"]
    return {
        "runs": len(scores),
        "steps": sum(score.steps for score in scores),
        "attempts": sum(score.attempts for score in scores),
        "faults": len(verdicts),
        "void": sum(len(score.verdicts) for score in scores) - len(verdicts),
        "nonfinite": len(nonfinite),
        "interruptions": sum(score.interruptions for score in scores),
        "spoiled": sum(score.spoiled for score in scores),
        "spoiled_by_nonfinite": sum(one.stayed for one in nonfinite),
        "landed_and_undone": sum(one.landed and not one.stayed for one in verdicts),
        "spoiled_by_finite": sum(one.stayed for one in verdicts if one.strength == "strong"),
        "finite": sum(one.strength == "strong" for one in verdicts),
        "useful": _share(sum(s.sound for s in scores), sum(s.attempts for s in scores)),
        "lost": sum(score.lost for score in scores),
        "noticed": sum(one.noticed for one in nonfinite),
        "noticed_finite": sum(one.noticed for one in verdicts if one.strength == "strong"),
        "noticed_faint": sum(one.noticed for one in verdicts if one.strength == "faint"),
        "faint": sum(one.strength == "faint" for one in verdicts),
        "false_alarms": sum(score.false_alarms for score in scores),
        "loss_ratio": _median([score.loss_ratio for score in scores]),
        "loss_worst": _worst([score.loss_ratio for score in scores]),
        "ruined": sum(not math.isfinite(score.loss) for score in scores),
        "transient": sum(_healable(one) and one.exact is not None for one in verdicts),
        "transient_exact": sum(_healable(one) and one.exact is True for one in verdicts),
        "delay_median": _median(delays),
        "delay_worst": max(delays, default=None),
        "cause_right": _rate(one.found == one.cause for one in diagnosed),
        "cause_right_of_all_noticed": _rate(one.found == one.cause for one in noticed),
        **{
            f"{name}_right": _place(noticed, name) for name in ("sample", "parameter", "module", "op", "rank")
        },
        "diagnosis_median": _median(seconds),
        "diagnosis_p95": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))] if seconds else None,
        "overhead": _overhead(scores, plain),
        "outcomes": _count(one.outcome or "not noticed" for one in verdicts),
        "confusion": confusion(verdicts),
    }


def by_kind(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return one row for each kind of fault."""
    verdicts = [one for score in scores for one in score.verdicts]
    rows = []
    for kind in dict.fromkeys(one.kind for one in verdicts):
        mine = [one for one in verdicts if one.kind == kind]
        rows.append(
            {
                "kind": kind,
                "family": mine[0].family,
                "expected": mine[0].cause,
                "faults": len(mine),
                "strengths": _count(one.strength for one in mine),
                "noticed": sum(one.noticed for one in mine),
                "spoiled": sum(one.stayed for one in mine),
                "exact": sum(one.exact is True for one in mine),
                "outcomes": _count(one.outcome or "not noticed" for one in mine),
                "causes": _count(one.found or "no diagnosis" for one in mine if one.noticed),
            }
        )
    return rows


def by_bit(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return what became of flipped bits, one row for each bit, one entry for each place."""
    flips = [one for score in scores for one in score.verdicts if one.bit is not None]
    rows = []
    for bit in sorted({one.bit for one in flips if one.bit is not None}):
        row: dict[str, Any] = {"bit": bit}
        for target in ("activation", "parameter", "gradient"):
            mine = [one for one in flips if one.bit == bit and one.target == target]
            row[target] = {
                "faults": len(mine),
                "nonfinite": sum(one.strength == "nonfinite" for one in mine),
                "strong": sum(one.strength == "strong" for one in mine),
                "noticed": sum(one.noticed for one in mine),
                "stayed": sum(one.stayed for one in mine),
                "exact": sum(one.exact is True for one in mine),
                "outcomes": _count(one.outcome or "not noticed" for one in mine),
                "loss_change": _worst([abs(one.loss_change) for one in mine]),
                "deviation": _worst([one.deviation for one in mine]),
            }
        rows.append(row)
    return rows


def _healable(one: Verdict) -> bool:
    """A fault that is gone when its step is computed again, and that can be seen in it."""
    return (
        not one.persistent
        and one.strength == "nonfinite"
        and one.target not in {"parameter", "setting"}
        and one.noticed
    )


def _place(verdicts: Sequence[Verdict], name: str) -> dict[str, int] | None:
    return _rate(one.right[name] for one in verdicts if name in one.right)


def _rate(right: Iterable[bool]) -> dict[str, int] | None:
    answers = list(right)
    return {"right": sum(answers), "of": len(answers)} if answers else None


def _count(values: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return dict(sorted(found.items()))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def _worst(values: Sequence[float]) -> float | None:
    """Return the largest; what is not finite is larger than all."""
    if not values:
        return None
    return math.inf if not all(map(math.isfinite, values)) else max(values)


def _overhead(scores: Sequence[Score], plain: Sequence[Score]) -> float | None:
    mine = [score.step_seconds for score in scores if score.step_seconds]
    theirs = [score.step_seconds for score in plain if score.step_seconds]
    if not mine or not theirs:
        return None
    return statistics.median(mine) / statistics.median(theirs) - 1
