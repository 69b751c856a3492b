"""What the event log of a run tells: its starts and ends, its numbers, budgets and snapshots."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsentinel.views.event_lines import PATIENCE, EventLines
from gradsentinel.views.files import Files
from gradsentinel.views.series import Series, number

TAGS = ("loss", "grad_norm", "learning_rate", "loss_scale")
_MOST_STARTS = 1000
_MOST_DROPS = 1 << 20


@dataclass(slots=True)
class Start:
    """A process that began with the run, or went on with it."""

    x: int
    """Attempted steps of all processes before it."""
    step: int
    time: str
    ended: str | None = None
    """When it ended; None if it has not, or was killed."""
    error: str | None = None
    end_step: int | None = None


@dataclass(slots=True)
class History:
    """The numbers and facts of one rank's event log, in the order they were written.

    `x` counts the attempted steps of all processes of the run: where a restart counts from an earlier
    number again, what it attempts is put behind what was attempted before.
    """

    lines: EventLines
    series: dict[str, Series] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Incidents by id, as far as the log tells, with their `x`."""
    scaler_skips: array[int] = field(default_factory=lambda: array("q"))
    budgets: list[dict[str, Any]] = field(default_factory=list)
    snapshots: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    """The newest `run_start`."""
    x: int = -1
    """The newest attempted step."""
    step: int = 0
    """The newest optimizer step."""
    attempted: int = 0
    applied: int | None = None
    dropped: int = 0
    """Lines of steps that were attempted and not made."""
    updated: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    """The newest `step` line."""
    _shift: int = 0
    _fresh: bool = True
    """True until the first number after a start."""
    _stepless: bool = False
    """True until the first step after a start."""

    @classmethod
    def of(cls, files: Files, *names: str) -> History:
        """Return the history in one file; nothing is read yet."""
        return cls(lines=EventLines(files, *names))

    def refresh(self, patience: float = PATIENCE) -> None:
        """Read what is new."""
        for entry in self.lines.new(patience):
            if self.lines.restarted:
                self._forget()
                self.lines.restarted = False
            self._take(entry)

    def _forget(self) -> None:
        anew = History(lines=self.lines)
        for name in self.__slots__:
            setattr(self, name, getattr(anew, name))

    def _take(self, entry: Mapping[str, Any]) -> None:
        name, time = _text(entry.get("event")), _text(entry.get("time"))
        self.updated = time or self.updated
        step = _whole(entry.get("step"))
        iteration = _whole(entry.get("iteration"))
        if name == "run_start":
            self._start(entry, step or 0, iteration)
        elif name == "run_end":
            self._end(entry, step)
        elif name == "step":
            self._step(entry, step, iteration)
        elif name == "scaler_skip" and step is not None and len(self.scaler_skips) < _MOST_DROPS:
            self.scaler_skips.append(self._advance(iteration, step))
        elif name in {"incident", "diagnosis", "recovery"} and isinstance(entry.get("id"), str):
            known = self.incidents.setdefault(entry["id"], {"step": step or 0})
            if name == "incident":
                known["x"] = self._place(iteration, step or 0)
            known[name] = dict(entry)
        elif name == "budgets" and isinstance(entry.get("budgets"), list):
            self.budgets = [one for one in entry["budgets"] if isinstance(one, dict)]
        elif name == "snapshots":
            self.snapshots = dict(entry)

    def _start(self, entry: Mapping[str, Any], step: int, iteration: int | None) -> None:
        self.first = dict(entry)
        self._fresh = self._stepless = True
        self.step = step
        start = Start(x=self.x + 1, step=step, time=_text(entry.get("time")))
        if len(self.starts) < _MOST_STARTS:
            self.starts.append(start)
        else:
            self.starts[-1] = start
        if iteration is not None:
            self._place(iteration, step)

    def _end(self, entry: Mapping[str, Any], step: int | None) -> None:
        if step is not None:
            self.step = step
        applied, iteration = _whole(entry.get("applied")), _whole(entry.get("iteration"))
        before = entry.get("before")
        if isinstance(before, dict):
            self._add_before(before, self.step)
        if applied is not None:
            self.applied = applied
        if iteration is not None and iteration > 0:
            self._advance(iteration - 1, self.step)
        if self.starts:
            start = self.starts[-1]
            start.ended, start.end_step = _text(entry.get("time")), step
            error = entry.get("error")
            start.error = error if isinstance(error, str) else None

    def _step(self, entry: Mapping[str, Any], step: int | None, iteration: int | None) -> None:
        if step is None:
            return
        before = entry.get("before")
        if self._stepless and self.starts:  # the state may have been restored after the start
            self.starts[-1].step = max(0, step - _count(before))
        self._stepless = False
        if isinstance(before, dict):
            self._add_before(before, step)
        x = self._advance(iteration, step)
        self.dropped += entry.get("applied") is False
        rates = entry.get("learning_rates")
        self._add(x, "loss", entry.get("loss"))
        self._add(x, "grad_norm", entry.get("grad_norm"))
        self._add(x, "learning_rate", rates[0] if isinstance(rates, list) and rates else None)
        self._add(x, "loss_scale", entry.get("loss_scale"))
        self.step = step
        self.last = {**entry, "x": x}

    def _add_before(self, before: Mapping[str, Any], step: int) -> None:
        """Take the numbers of the steps since the last line."""
        iterations = before.get("iterations")
        if not isinstance(iterations, list):
            return
        columns = [(tag, before.get(tag)) for tag in ("loss", "grad_norm")]
        for index, iteration in enumerate(iterations):
            whole = _whole(iteration)
            if whole is None:
                continue
            x = self._advance(whole, step)
            for tag, values in columns:
                if isinstance(values, list) and index < len(values):
                    self._add(x, tag, values[index])

    def _add(self, x: int, tag: str, value: Any) -> None:
        found = number(value)
        if found is None:
            return
        if tag not in self.series:
            self.series[tag] = Series()
        self.series[tag].add(x, found)

    def _advance(self, iteration: int | None, step: int) -> int:
        """Return the place of an attempted step on the axis, and note that the run got there."""
        x = self._place(iteration, step)
        self.x = max(self.x, x)
        self.attempted = self.x + 1
        return self.x

    def _place(self, iteration: int | None, step: int) -> int:
        number_of = step if iteration is None else iteration
        if self._fresh:
            self._fresh = False
            self._shift = max(0, self.x + 1 - number_of)
        return number_of + self._shift


def _count(before: Any) -> int:
    iterations = before.get("iterations") if isinstance(before, dict) else None
    return len(iterations) if isinstance(iterations, list) else 0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def spent(budget: Mapping[str, Any], attempted: int) -> int:
    """Return how much of a budget was spent within its window, seen from the newest attempted step."""
    entries, window = budget.get("spent"), _whole(budget.get("window"))
    if not isinstance(entries, Sequence) or window is None:
        return 0
    return sum(1 for entry in entries if isinstance(entry, int) and entry > attempted - window)
