"""The numbers of a run over its attempted steps, and the marks of what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsentinel.incident import Incident, Outcome
from gradsentinel.views.history import TAGS
from gradsentinel.views.run_files import RunFiles

_MOST_TAGS = 16
_MOST_SCALER_SKIPS = 200
_WHAT = {Outcome.ROLLED_BACK: "rollback", Outcome.ABORTED: "abort"}


def timeline_of(
    run: RunFiles, tags: Sequence[str] | None, start: int | None, stop: int | None, points: int
) -> dict[str, Any]:
    """Return series and marks; see `Views.timeline`."""
    series = run.series
    all_marks = marks(run)
    ends = [one.x[edge] for one in series.values() if len(one) for edge in (0, -1)]
    ends += [mark["iteration"] for mark in all_marks]
    first, last = min(ends, default=0), max(ends, default=0)
    low = first if start is None else start
    high = last if stop is None else stop
    known = [tag for tag in TAGS if tag in series] + sorted(tag for tag in series if tag not in TAGS)
    wanted = [tag for tag in known if tag in TAGS] if tags is None else [tag for tag in tags if tag in series]
    return {
        "first": first,
        "last": last,
        "tags": known,
        "source": run.source,
        "reading": run.share,
        "resolution": max((one.factor for one in series.values()), default=1),
        "series": [
            {"tag": tag, "points": series[tag].points(low, high, points)}
            for tag in dict.fromkeys(wanted[:_MOST_TAGS])
        ],
        "marks": [mark for mark in all_marks if low <= mark["iteration"] <= high],
    }


def one_series(run: RunFiles, tag: str, points: int) -> list[list[Any]]:
    """Return one series of a run; empty if it has none of this name."""
    series = run.series.get(tag)
    return [] if series is None or not len(series) else series.points(series.x[0], series.x[-1], points)


def marks(run: RunFiles) -> list[dict[str, Any]]:
    """Return what happened, in the order of the axis."""
    history = run.history
    found = [_of_incident(run, incident) for incident in run.incidents()[0]]
    for number, start in enumerate(history.starts):
        what = "restart" if number else "run_start"
        found.append(_mark(start.x, start.step, what, label=start.time))
        if start.ended is not None:
            until = history.starts[number + 1].x - 1 if number + 1 < len(history.starts) else history.x
            end = start.step if start.end_step is None else start.end_step
            found.append(_mark(max(until, start.x), end, "run_end", label=start.error or start.ended))
    skips = history.scaler_skips
    stride = max(1, -(-len(skips) // _MOST_SCALER_SKIPS))
    found += [_mark(x, x, "scaler_skip", kind="loss_scale") for x in skips[::stride]]
    return sorted(found, key=lambda mark: (mark["iteration"], mark["step"]))


def _of_incident(run: RunFiles, incident: Incident) -> dict[str, Any]:
    return _mark(
        run.place_of(incident),
        incident.step,
        _WHAT.get(incident.outcome, "incident"),
        kind=str(incident.kind),
        severity=incident.severity.label,
        outcome=str(incident.outcome),
        incident=incident.id,
        label=incident.message,
    )


def _mark(iteration: int, step: int, what: str, **told: Any) -> dict[str, Any]:
    empty = {"kind": None, "severity": None, "outcome": None, "incident": None, "label": ""}
    return {"iteration": iteration, "step": step, "what": what, **empty, **told}
