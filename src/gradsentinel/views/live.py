"""A run in the terminal while it goes on: one frame of what `gradsentinel watch` shows.

Whatever comes from a file may have been written by anybody: it is shown as it is, never interpreted as markup
or as control characters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gradsentinel.ranks.topology import fold_ranks
from gradsentinel.terminal import incident_table
from gradsentinel.views.history import History
from gradsentinel.views.run_files import RunFiles
from gradsentinel.views.run_view import overview
from gradsentinel.views.series import number
from gradsentinel.views.sparkline import mark_line, sparkline
from gradsentinel.views.timeline import timeline_of
from gradsentinel.wording import printable, size_of

_STATES = {
    "running": "bold green",
    "ended": "bold cyan",
    "aborted": "bold red",
    "failed": "bold red",
    "empty": "bold yellow",
    "unknown": "bold yellow",
}
SEVERITIES = {"warning": "yellow", "error": "red", "critical": "bold red"}
_QUIET = 60.0
"""Seconds without a sign of life from which on it is pointed out."""
_LABEL = 15
"""Columns for the names of the numbers."""
_FIXED_LINES = 13
"""Lines of a frame besides incidents, budgets and snapshots."""
_MOST_WHERE = 60
"""Characters of a place; names may be of any length, and budgets have to stay in sight."""
_MOST_LISTED = 4
"""Budgets and snapshots in a frame."""


class Pace:
    """Attempted steps a second: of the last minute that was watched, else since the process began."""

    def __init__(self, window: float = 60.0) -> None:
        self._window = window
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, history: History) -> float | None:
        """Take note of how far the run is; returns its pace, None if that cannot be told yet."""
        at = _seconds(history.last.get("time"))
        x = history.last.get("x")
        if at is None or not isinstance(x, int) or not history.starts:
            return None
        if self._seen and (x < self._seen[-1][1] or at < self._seen[-1][0]):  # the log was replaced
            self._seen.clear()
        if not self._seen or x > self._seen[-1][1]:
            self._seen.append((at, x))
        while len(self._seen) > 2 and at - self._seen[1][0] >= self._window:
            self._seen.popleft()
        since, first = self._seen[0]
        if at - since < 1.0:  # times are told to the second
            start = history.starts[-1]
            begun = _seconds(start.time)
            since, first = (at if begun is None else begun), start.x - 1
        return (x - first) / (at - since) if at - since >= 1.0 and x > first else None


def frame(
    run: RunFiles, pace: Pace, *, width: int = 80, height: int | None = None, ascii_only: bool = False
) -> RenderableType:
    """Return what is to be seen of a run now.

    Args:
        run: the run, looked at.
        pace: remembers the frames before.
        width: columns there are.
        height: lines there are; None for no limit.
        ascii_only: draw with ASCII.
    """
    facts = overview(run, "en")
    below = _below(facts, ascii_only=ascii_only)
    parts: list[RenderableType] = [
        _headline(run, facts, ascii_only=ascii_only),
        _numbers(run, facts, pace, width, ascii_only=ascii_only),
    ]
    if facts["state"] == "empty":
        return Group(parts[0], Text("\nWaiting for a run to begin here.", "yellow"))
    parts += [Text("! " + printable(problem), "yellow") for problem in facts["problems"][:3]]
    parts += [_incidents(run, facts, height), below]
    return Group(*parts)


def _headline(run: RunFiles, facts: Mapping[str, Any], *, ascii_only: bool) -> RenderableType:
    state = facts["state"]
    line = Text.assemble((f" {state} ", f"{_STATES[state]} reverse"), "  ", (printable(run.path), "bold"))
    about = []
    begun, quiet = _seconds(facts["started"]), time.time() - run.updated
    if begun is not None:
        until = time.time() if state == "running" else run.updated
        about.append(f"{_span(until - begun)} since its first start")
    if facts["starts"] > 1:
        about.append(f"{facts['starts']} starts")
    if run.ranks:
        about.append(_ranks(run, facts))
    if facts["version"]:
        about.append(printable(f"GradSentinel {facts['version']}"))
    second = Text(", ".join(about) or "no event log yet", "dim")
    if facts["reading"] < 1.0:
        second.append(f", {facts['reading']:.0%} of the log read so far", "yellow")
    if state in {"running", "unknown"} and run.ranks:
        late = quiet > _QUIET or state == "unknown"
        second.append(f", last sign of life {_span(quiet)} ago", "bold yellow" if late else "")
    error = run.history.starts[-1].error if run.history.starts else None
    lines = [line, second, *([Text(printable(error), "red")] if error else [])]
    return Panel(
        Group(*lines), box=box.ASCII if ascii_only else box.ROUNDED, border_style="dim", padding=(0, 1)
    )


def _ranks(run: RunFiles, facts: Mapping[str, Any]) -> str:
    """Return which ranks have written something, in few words."""
    size, seen = facts["world_size"], run.ranks
    if size == 1 and seen == [0]:
        return printable(facts["hosts"][0]) if facts["hosts"] else "1 rank"
    hosts = facts["host_count"]
    where = f" on {hosts} hosts" if hosts > 1 else ""
    if len(seen) >= size:
        return f"all {size:,} ranks{where}"
    return f"{fold_ranks(seen)} of {size:,}{where}"


def _numbers(
    run: RunFiles, facts: Mapping[str, Any], pace: Pace, width: int, *, ascii_only: bool
) -> RenderableType:
    numbers, last = facts["numbers"], facts["last"]
    rate = pace.look(run.history)
    if facts["state"] != "running" and rate is not None:
        rate_text = f"{_rate(rate)} on the way"
    else:
        rate_text = "-" if rate is None else _rate(rate)
    useful = numbers["useful_share"]
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="bold", min_width=_LABEL, no_wrap=True)
    table.add_column(justify="right", min_width=11, no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    attempted = f"{facts['iterations']:,} attempted"
    if useful is not None:
        attempted += f", {numbers['lost_batches']:,} lost ({useful:.2%} useful)"
    table.add_row("step", Text(f"{facts['steps']:,}"), Text(f"{attempted}, {rate_text}", "dim"))
    columns = max(8, width - _LABEL - 11 - 4)
    told = timeline_of(run, ["loss", "grad_norm"], None, None, columns)
    by_tag = {one["tag"]: one["points"] for one in told["series"]}
    for tag, name, style in (("loss", "loss", "cyan"), ("grad_norm", "gradient norm", "magenta")):
        points = by_tag.get(tag, [])
        table.add_row(name, _value(last.get(tag)), sparkline(points, ascii_only=ascii_only, style=style))
    longest: list[Any] = max(by_tag.values(), key=len, default=[])
    marks = mark_line(longest, told["marks"], SEVERITIES, ascii_only=ascii_only)
    if marks.plain.strip():
        table.add_row("", "", marks)
    table.add_row("learning rate", _value(last.get("learning_rate")), _outcomes(numbers))
    return table


def _outcomes(numbers: Mapping[str, Any]) -> Text:
    parts = [f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in numbers["by_outcome"].items()]
    if numbers["scaler_skips"]:
        parts.append(f"{numbers['scaler_skips']:,} dropped by the GradScaler")
    return Text(", ".join(parts), "dim")


def _incidents(run: RunFiles, facts: Mapping[str, Any], height: int | None) -> RenderableType:
    found = run.incidents()[0][::-1]
    if not found:
        sure = facts["quiet"] != "unread"
        words = "No incidents." if sure else "No incident can be shown, and not all could be read."
        return Text(f"\n{words}", "green" if sure else "yellow")
    counts = ", ".join(f"{count:,} {name}" for name, count in facts["numbers"]["by_severity"].items())
    room = 50 if height is None else max(2, height - _FIXED_LINES - _MOST_LISTED)
    listed = found[:room]
    older = f", the newest {len(listed)} shown" if len(listed) < len(found) else ""
    title = Text(f"\n{len(found):,} incident{'s' * (len(found) != 1)} ({counts}){older}", "bold")
    return Group(title, incident_table(listed, most_where=_MOST_WHERE))


def _below(facts: Mapping[str, Any], *, ascii_only: bool) -> RenderableType:
    """Return budgets and snapshots, side by side."""
    both = Table.grid(padding=(0, 4, 0, 0))
    left, right = _budgets(facts["budgets"], ascii_only=ascii_only), _snapshots(facts["snapshots"])
    tables = [table for table in (left, right) if table is not None]
    if not tables:
        return both
    both.add_row(*tables)
    return Group(Text(), both)


def _budgets(budgets: Sequence[Mapping[str, Any]], *, ascii_only: bool) -> Table | None:
    if not budgets:
        return None
    table = _small("budget", "", "left", "within")
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    for one in sorted(budgets, key=lambda one: one["left"] / max(1, one["limit"]))[:_MOST_LISTED]:
        share = one["left"] / max(1, one["limit"])
        style = "red" if share == 0 else "yellow" if share <= 0.34 else "green"
        filled = round(share * 10)
        window = one["window"]
        table.add_row(
            Text(printable(one["name"])),
            Text(full * filled + empty * (10 - filled), style),
            Text(f"{one['left']} of {one['limit']}", style),
            Text(f"{window:,} steps" if isinstance(window, int) else "the run"),
        )
    return table


def _snapshots(snapshots: Sequence[Mapping[str, Any]]) -> Table | None:
    there = [one for one in snapshots if not one.get("gone")] or list(snapshots)
    if not there:
        return None
    table = _small("snapshot", "state", "where", "size")
    styles = {"good": "green", "probation": "yellow", "damaged": "red"}
    for one in there[:_MOST_LISTED]:
        gone = bool(one.get("gone"))
        where = "gone with the process" if gone else one["where"]
        size = one.get("bytes")
        table.add_row(
            Text(f"step {one['step']:,}"),
            Text(one["state"], "dim" if gone else styles.get(one["state"], "")),
            Text(where, "dim" if gone else ""),
            Text(size_of(size) if isinstance(size, (int, float)) else "-", "dim" if gone else ""),
        )
    return table


def _small(*titles: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in titles:
        table.add_column(no_wrap=True)
    table.add_row(*(Text(title, "bold") for title in titles))
    return table


def _value(value: Any) -> Text:
    found = number(value)
    if found is None:
        return Text("-", "dim")
    return Text(f"{found:.4g}", "" if found - found == 0 else "bold red")


def _rate(rate: float) -> str:
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"


def _seconds(text: Any) -> float | None:
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _span(seconds: float) -> str:
    """Return a time in the two units that tell most: `42 s`, `3 min 5 s`, `2 h 40 min`, `5 d 3 h`."""
    whole = max(0, int(seconds))
    for unit, length, lower, step in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // step} {lower}"
    return f"{whole} s"
