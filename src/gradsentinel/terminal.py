"""Incidents as text for the terminal: the table of a run and the story of one incident.

Whatever comes from a file may have been written by anybody: it is shown as it is, never interpreted as
markup or as control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradsentinel.decision import Action, Severity
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident, Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.wording import duration, printable, size_of

_SEVERITY_STYLES = {
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
    Severity.CRITICAL: "bold red",
}
_OUTCOME_STYLES = {
    Outcome.RETRIED: "green",
    Outcome.RESCUED: "green",
    Outcome.SKIPPED: "green",
    Outcome.ROLLED_BACK: "cyan",
    Outcome.ABORTED: "bold red",
    Outcome.REPORTED: "yellow",
}
_PHASES = {
    "setup": "during set-up",
    "input": "in the input",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "reduce": "in the reduction over ranks",
    "optimizer": "in the optimizer step",
}
_LEAST_WHERE = 20
"""Columns for the place; where there are fewer, other columns of the table give way."""
_MOST_ROWS = 12
"""Rows of a list in the story; the rest is counted, incident.json has more of them."""


def incident_table(incidents: Iterable[Incident], *, most_where: int | None = None) -> IncidentTable:
    """Return a table of incidents, one a row, to be printed on a rich console.

    A narrow console gets fewer columns: first those whose content is in the id go, then the less telling.
    `most_where` is how many characters of a place are shown, None for all.
    """
    return IncidentTable(tuple(incidents), most_where)


def incident_story(incident: Incident, files: Sequence[tuple[str, int]] = ()) -> RenderableType:
    """Return everything known about one incident, to be printed on a rich console.

    Args:
        incident: the incident.
        files: names and sizes in bytes of the files in its bundle.
    """
    story = Table.grid(padding=(0, 2, 0, 0))
    story.add_column(style="bold", no_wrap=True)
    story.add_column(overflow="fold")
    for label, content in _paragraphs(incident, files):
        story.add_row(label, content)
    return Group(_headline(incident), Text(), story)


def clipped(text: str, most: int) -> str:
    """Return text of at most so many characters, three dots among them."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _severity(incident: Incident) -> Text:
    return Text(incident.severity.label, _SEVERITY_STYLES[incident.severity])


def _outcome(incident: Incident) -> Text:
    return Text(str(incident.outcome), _OUTCOME_STYLES[incident.outcome])


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[Incident], Text]
    right: bool = False


_COLUMNS = {
    "id": _Column("id", lambda incident: Text(printable(incident.id), "bold")),
    "step": _Column("step", lambda incident: Text(str(incident.step)), right=True),
    "severity": _Column("severity", _severity),
    "kind": _Column("kind", lambda incident: Text(str(incident.kind))),
    "where": _Column("where", lambda incident: Text(printable(incident.where) or "-")),
    "cause": _Column("cause", lambda incident: Text(_cause(incident.diagnosis))),
    "action": _Column("action", lambda incident: Text(incident.action.label)),
    "outcome": _Column("outcome", _outcome),
    "seconds": _Column("seconds", lambda incident: Text(f"{sum(incident.seconds.values()):.3f}"), right=True),
}
_DISPENSABLE = ("kind", "step", "action", "seconds", "severity", "cause")


@dataclass(frozen=True, slots=True)
class IncidentTable:
    """A rich renderable: a table that leaves out columns until it fits."""

    incidents: tuple[Incident, ...]
    most_where: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = dict(_COLUMNS)
        for name in _DISPENSABLE:
            least = self._table(columns, options.max_width, most_where=_LEAST_WHERE)
            if Measurement.get(console, options.update(width=1 << 16), least).maximum <= options.max_width:
                break
            del columns[name]
        yield self._table(columns, options.max_width)

    def _table(self, columns: Mapping[str, _Column], width: int, *, most_where: int | None = None) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        longest = max((len(printable(incident.id)) for incident in self.incidents), default=0)
        for name, column in columns.items():
            table.add_column(
                Text(column.title),
                justify="right" if column.right else "left",
                overflow="fold",
                no_wrap=name not in {"id", "where"},
                min_width=min(longest, width // 2) if name == "id" else None,
                max_width=most_where if name == "where" else None,
            )
        for incident in self.incidents:
            cells = {name: column.cell(incident) for name, column in columns.items()}
            if self.most_where is not None and "where" in cells:
                cells["where"] = Text(clipped(cells["where"].plain, self.most_where))
            table.add_row(*cells.values())
        return table


def _headline(incident: Incident) -> Text:
    return Text.assemble(
        (f"Step {incident.step}: {str(incident.kind).replace('_', ' ')}", "bold"),
        "  ",
        _severity(incident),
        "  ",
        _outcome(incident),
    )


def _paragraphs(incident: Incident, files: Sequence[tuple[str, int]]) -> Iterable[tuple[str, RenderableType]]:
    """The rows of the story; what is not known has none."""
    yield "What", Text(_what(incident))
    yield "Done", Text(_done(incident))
    if incident.diagnosis is not None:
        yield from _explanation(incident.diagnosis)
    if incident.notes:
        yield "Notes", _bullets(incident.notes)
    if incident.samples:
        rows = [(s.position, "-" if s.id is None else s.id, s.field) for s in incident.samples]
        yield "Samples", _list(("position", "id", "field"), rows, right=(0,))
    if incident.tensors:
        tensors = [
            (
                t.name,
                f"{'' if t.counted else 'at least '}{t.nonfinite} of {t.numel}",
                _number(t.norm),
                _index(t.first_index),
            )
            for t in incident.tensors
        ]
        yield "Tensors", _list(("name", "non-finite", "norm", "first at"), tensors, right=(1, 2))
    yield from _who(incident)
    if incident.details:
        yield "Details", _list((), [(name, value) for name, value in incident.details.items()])
    if incident.seconds:
        parts = (f"{printable(name)} {duration(value)}" for name, value in incident.seconds.items())
        yield "Took", Text(", ".join(parts))
    if files:
        yield "Files", _list((), [(name, size_of(size)) for name, size in files], right=(1,))


def _what(incident: Incident) -> str:
    day, _, clock = incident.time.removesuffix("Z").partition("T")
    when = f" on {day} at {clock} UTC" if clock else ""
    who = f"{incident.detector} reported" if incident.detector else "Reported"
    sentences = [f"{who}{when}: {incident.message.rstrip('.')}."]
    if incident.microbatch is not None and "micro-batch" not in incident.message:
        sentences.append(f"It was in micro-batch {incident.microbatch}.")
    numbers = [
        f"{name} was {_number(value)}"
        for name, value in (("the loss", incident.loss), ("the gradient norm", incident.grad_norm))
        if value is not None
    ]
    if numbers:
        text = " and ".join(numbers)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return printable(" ".join(sentences))


def _done(incident: Incident) -> str:
    if incident.action is Action.WARN and not incident.recovery:
        return "Reported only: the step was made and the run went on."
    sentence = incident.recovery or f"action {incident.action.label}, outcome {incident.outcome}"
    return printable(f"{sentence[0].upper()}{sentence[1:]}".rstrip(".") + ".")


def _explanation(diagnosis: Diagnosis) -> Iterable[tuple[str, RenderableType]]:
    sure = f" ({diagnosis.confidence:.0%} sure)" if diagnosis.confidence > 0 else ""
    phase = "" if diagnosis.phase is None else f", {_PHASES.get(diagnosis.phase, diagnosis.phase)}"
    places = (diagnosis.module, diagnosis.op, diagnosis.node, diagnosis.source)
    place = ", ".join(entry for entry in places if entry)
    yield "Cause", Text(printable(f"{diagnosis.cause}{sure}{phase}{': ' + place if place else ''}"))
    if diagnosis.evidence:
        yield "Evidence", _bullets(diagnosis.evidence)
    if diagnosis.remedy:
        yield "To do", _bullets(diagnosis.remedy)


def _who(incident: Incident) -> Iterable[tuple[str, RenderableType]]:
    if len(incident.ranks) == 1:
        yield "Rank", Text(printable(_rank(incident.ranks[0])))
    elif incident.ranks:
        yield "Ranks", _ranks(incident.ranks)
    if incident.rank_count > _MOST_ROWS:
        yield "In all", Text(printable(f"{incident.rank_count}: {incident.who}"))


def _ranks(ranks: Sequence[Rank]) -> Table:
    axes = list(dict.fromkeys(axis for rank in ranks for axis in rank.coordinates))
    rows = [
        (rank.rank, *(rank.coordinates.get(axis, "-") for axis in axes), rank.host, rank.device)
        for rank in ranks
    ]
    return _list(("rank", *axes, "host", "device"), rows, right=range(1 + len(axes)))


def _rank(rank: Rank) -> str:
    axes = "".join(f", {axis} {position}" for axis, position in rank.coordinates.items())
    return f"{rank.rank} on {rank.host}, {rank.device}{axes}"


def _list(titles: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Iterable[int] = ()) -> Table:
    """A small table without lines; its first column folds, a long one is cut and counted."""
    table = Table(box=None, show_header=bool(titles), pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(titles or [""] * len(rows[0])):
        side = "right" if index in set(right) else "left"
        table.add_column(Text(printable(title)), justify=side, overflow="fold", header_style="dim")  # type: ignore[arg-type]
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if len(rows) > _MOST_ROWS:
        table.add_row(Text(f"and {len(rows) - _MOST_ROWS} more", "dim"))
    return table


def _bullets(lines: Sequence[str]) -> Table:
    bullets = Table.grid(padding=(0, 1, 0, 0))
    bullets.add_column()
    bullets.add_column(overflow="fold")
    for line in lines:
        bullets.add_row(Text("-"), Text(printable(line)))
    return bullets


def _cause(diagnosis: Diagnosis | None) -> str:
    return "-" if diagnosis is None else printable(diagnosis.cause)


def _index(index: Sequence[int] | None) -> str:
    return "-" if index is None else f"[{', '.join(map(str, index))}]"


def _number(value: float) -> str:
    return f"{value:.4g}"
