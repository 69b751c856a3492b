"""What an alert says, and how many of them there may be."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Callable
from typing import Any

from gradsentinel.decision import Severity
from gradsentinel.incident import Incident, jsonable, now
from gradsentinel.run import Run
from gradsentinel.wording import printable

SCHEMA = 1
_LONGEST = 2000
"""Characters of a text in an alert."""
_MOST = 10
"""Sentences of evidence and remedies in an alert."""


def about_incident(incident: Incident, run: Run, report: str | None) -> dict[str, Any]:
    """Return the alert about an incident; texts are one line each, without control characters."""
    diagnosis = incident.diagnosis
    facts = {
        "step": incident.step,
        "iteration": incident.iteration,
        "time": incident.time or now(),
        "id": incident.id,
        "severity": incident.severity.label,
        "kind": str(incident.kind),
        "cause": "unknown" if diagnosis is None else diagnosis.cause,
        "confidence": 0.0 if diagnosis is None else diagnosis.confidence,
        "where": _line(incident.where),
        "who": _line(incident.who) if incident.ranks else "",
        "action": incident.action.label,
        "outcome": str(incident.outcome),
        "message": _line(incident.message),
        "recovery": _line(incident.recovery),
        "evidence": [] if diagnosis is None else [_line(one) for one in diagnosis.evidence[:_MOST]],
        "remedy": [] if diagnosis is None else [_line(one) for one in diagnosis.remedy[:_MOST]],
    }
    return _alert("incident", facts, run, report)


def about_end(error: BaseException, run: Run, report: str | None) -> dict[str, Any]:
    """Return the alert about a run that ended by an exception that no incident tells of."""
    facts = {
        "step": run.step,
        "iteration": run.iteration,
        "time": now(),
        "id": "",
        "severity": Severity.CRITICAL.label,
        "kind": "run_failed",
        "cause": "unknown",
        "confidence": 0.0,
        "where": "",
        "who": f"rank {run.rank.rank}" if run.consensus.world_size > 1 else "",
        "action": "abort",
        "outcome": "aborted",
        "message": _line(f"{type(error).__name__}: {error}"),
        "recovery": "",
        "evidence": [],
        "remedy": [],
    }
    return _alert("run_failed", facts, run, report)


def with_repeats(alert: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return an alert that also stands for others of its kind, which were not sent."""
    return {**alert, "repeats": repeats, "text": f"{alert['text']} ({repeats} more like this)"}


def _alert(event: str, facts: dict[str, Any], run: Run, report: str | None) -> dict[str, Any]:
    path = run.directory.path.absolute()
    name = path.name
    alert = {
        "schema": SCHEMA,
        "event": event,
        "run": printable(name),
        "run_dir": printable(path),
        "host": platform.node(),
        "world_size": run.consensus.world_size,
        **facts,
        "repeats": 0,
        "report": None if report is None else report.replace("{run}", name).replace("{id}", facts["id"]),
        "command": f"gradsentinel show {printable(shlex.quote(str(path)))} {facts['id']}".rstrip(),
    }
    alert["text"] = _text(alert)
    made: dict[str, Any] = jsonable(alert)
    return made


def _text(alert: dict[str, Any]) -> str:
    """Return the alert in one line."""
    places = ", ".join(place for place in (alert["where"], alert["who"]) if place)
    parts = [
        f"[{alert['severity']}] {alert['run']} step {alert['step']}: {alert['message']}",
        *([f"at {places}"] if places else []),
        *([f"cause: {alert['cause']}"] if alert["cause"] != "unknown" else []),
        *([f"{alert['outcome'].replace('_', ' ')}"] if alert["event"] == "incident" else []),
        *(alert["remedy"][:1] and [f"do: {alert['remedy'][0]}"]),
    ]
    return "; ".join(parts)[:_LONGEST]


def _line(text: str) -> str:
    return printable(text)[:_LONGEST]


class Allowance:
    """A bucket of tokens for each key: `burst` at once, then `per_hour` of them; counts what it refused.

    Args:
        burst: tokens in a full bucket.
        per_hour: tokens that come back in an hour.
        clock: tells the time in seconds.
    """

    def __init__(self, burst: int, per_hour: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._rate, self._clock = burst, per_hour / 3600.0, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> bool:
        """Take a token; returns False if there is none."""
        now_ = self._clock()
        tokens, at = self._buckets.get(key, (float(self._burst), now_))
        tokens = min(float(self._burst), tokens + (now_ - at) * self._rate)
        allowed = tokens >= 1.0
        self._buckets[key] = (tokens - 1.0 if allowed else tokens, now_)
        return allowed
