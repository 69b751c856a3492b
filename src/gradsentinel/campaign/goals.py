"""The goals of the project, each with what was measured, and whether it was met."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Goal = dict[str, Any]


def goals(
    ours: Mapping[str, Any],
    restart: Mapping[str, Any],
    every: float,
    ranks: Mapping[str, Any] | None,
    hangs: int,
) -> list[Goal]:
    """Compare the numbers with the goals.

    Args:
        ours: totals of GradSentinel over the loops.
        restart: totals of checkpoint and restart over the same loops.
        every: steps of these loops for each fault.
        ranks: totals of GradSentinel over the runs with several ranks; None if there are none.
        hangs: how many runs hung.
    """
    fewer = None
    if restart["interruptions"]:
        fewer = 1 - ours["interruptions"] / restart["interruptions"]
    rank = None if ranks is None else ranks["rank_right"]
    return [
        _goal(
            "updates spoiled by non-finite faults, in the final weights",
            "0",
            ours["spoiled_by_nonfinite"],
            ours["spoiled_by_nonfinite"] == 0,
            f"of {ours['nonfinite']} such faults; {ours['landed_and_undone']} updates of all faults were "
            "made and taken back",
        ),
        _goal(
            "updates spoiled by finite faults, in the final weights",
            "0",
            ours["spoiled_by_finite"],
            ours["spoiled_by_finite"] == 0,
            f"of {ours['finite']} faults that turn an unguarded update by more than 10 %",
        ),
        _goal(
            "fewer interruptions than checkpoint and restart",
            "at least 99 %",
            _percent(fewer),
            None if fewer is None else fewer >= 0.99,
            f"{ours['interruptions']} against {restart['interruptions']}",
        ),
        _goal(
            f"useful steps, at one fault in {every:.0f} steps",
            "at least 98.5 %",
            _percent(ours["useful"]),
            None if ours["useful"] is None else ours["useful"] >= 0.985,
            f"{ours['lost']} batches lost",
        ),
        _rate_goal(
            "transient faults that leave no trace, bit for bit",
            1.0,
            {"right": ours["transient_exact"], "of": ours["transient"]} if ours["transient"] else None,
        ),
        _rate_goal("right rank", 1.0, rank),
        _rate_goal("right parameter", 0.99, ours["parameter_right"]),
        _rate_goal("right operator", 0.95, ours["op_right"]),
        _rate_goal("right cause, of the faults that were noticed", 0.9, ours["cause_right_of_all_noticed"]),
        _goal(
            "median time to a diagnosis",
            "seconds",
            None if ours["diagnosis_median"] is None else f"{ours['diagnosis_median']:.2f} s",
            None if ours["diagnosis_median"] is None else ours["diagnosis_median"] < 60,
            "" if ours["diagnosis_p95"] is None else f"95 % within {ours['diagnosis_p95']:.2f} s",
        ),
        _goal(
            "final loss, against no faults",
            "within 0.5 %",
            _percent(None if ours["loss_ratio"] is None else ours["loss_ratio"] - 1, signed=True),
            None
            if ours["loss_ratio"] is None
            else ours["ruined"] == 0 and abs(ours["loss_ratio"] - 1) <= 0.005,
            "median of the runs; the worst "
            + (_percent(None if ours["loss_worst"] is None else ours["loss_worst"] - 1, signed=True) or "-"),
        ),
        _goal("hangs", "0", hangs, hangs == 0, "of all runs of all policies"),
    ]


def _goal(what: str, wanted: str, measured: Any, met: bool | None, note: str = "") -> Goal:  # noqa: FBT001
    return {"goal": what, "wanted": wanted, "measured": measured, "met": met, "note": note}


def _rate_goal(what: str, wanted: float, rate: Mapping[str, int] | None) -> Goal:
    target = "all" if wanted == 1.0 else f"at least {wanted:.0%}".replace("%", " %")
    if rate is None:
        return _goal(what, target, None, None, "no such fault")
    share = rate["right"] / rate["of"]
    return _goal(what, target, _percent(share), share >= wanted, f"{rate['right']} of {rate['of']}")


def _percent(share: float | None, *, signed: bool = False) -> str | None:
    if share is None:
        return None
    return f"{share:{'+' if signed else ''}.2%}".replace("%", " %")
