"""The report as Markdown, to be pasted into a ticket."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from gradsentinel.errors import StoreError
from gradsentinel.views.files import ViewError
from gradsentinel.views.gather import Gathered, gather, gravest
from gradsentinel.views.strings import Strings
from gradsentinel.wording import duration, printable

QUIET = {
    "sound": "overview.no_incidents",
    "dropped": "overview.not_all_made",
    "unread": "overview.not_all_read",
}
"""What is said of a run without incidents to show."""
_MOST_ROWS = 50
_MOST_FACTS = 12
# Intraword underscores and most punctuation mean nothing; a backslash before them would only be in the way of
# those who read the text itself.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|^[#+=-]|^\d+(?=[.)](?:\s|$))")
_LINKS = re.compile(r"@(?=\w)|#(?=\d)|(?<=://)|(?<=\bwww)(?=\.)", re.IGNORECASE)
"""Where trackers make links, calls to people and references out of bare text."""


def markdown(run_dir: str | os.PathLike[str], *, lang: str = "en", incident: str | None = None) -> str:
    """Return the report on a run as Markdown: the gravest incident in full, the others in a table.

    What comes from the run is shown as it is: no markup, link, picture, mention or HTML in it has an effect.

    Args:
        run_dir: the directory that `run_dir=` named; it is read only.
        lang: "en" or "zh".
        incident: the id of an incident, which is told instead, without the table.

    Raises:
        StoreError: if there is no run, or no such incident.
        ConfigurationError: for another language.
    """
    words = Strings(lang)
    run = gather(run_dir)
    try:
        return "\n".join(_lines(run, words, incident)).rstrip() + "\n"
    except ViewError as error:
        raise StoreError(f"{run_dir}: {error}") from error


def plain(text: object) -> str:
    """Return text that Markdown shows as it is."""
    escaped = _SPECIAL.sub(_escape, printable(text))
    return _LINKS.sub(lambda found: f"{found[0]}\u200b", escaped)


def _escape(found: re.Match[str]) -> str:
    """A number at the beginning is not made a list by the point behind it, if that is escaped."""
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"


def code(text: object) -> str:
    """Return text as a span of code, whatever backticks are in it."""
    shown = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _lines(run: Gathered, words: Strings, incident: str | None) -> Iterator[str]:
    overview = run.run(words.lang)
    rows = run.incidents(words.lang)
    yield f"# GradSentinel: {plain(run.name)}"
    yield ""
    yield f"**{plain(overview['headline'])}**"
    yield ""
    for problem in overview["problems"]:
        yield f"> {plain(problem)}"
        yield ""
    if incident is not None:
        chosen = next((row for row in rows if row["id"] == incident), None)
        if chosen is None:
            raise StoreError(f"there is no incident {incident!r} that can be read")
        yield from _incident(run.incident(incident, words.lang), chosen, words)
        return
    yield from _numbers(overview, words)
    if not rows:
        empty = overview["state"] == "empty"
        yield plain(words("overview.no_events" if empty else QUIET[overview["quiet"]]))
        return
    worst = gravest(rows)[0]
    yield from _incident(run.incident(worst["id"], words.lang), worst, words)
    yield f"## {words('nav.incidents')}"
    yield ""
    yield from _table(rows, words)


def _numbers(overview: dict[str, Any], words: Strings) -> Iterator[str]:
    numbers = overview["numbers"]
    share = numbers.get("useful_share")
    rows = [
        (words("column.state"), words.label("state", overview["state"])),
        (words("tile.applied"), numbers.get("applied") if numbers.get("applied") is not None else "–"),  # noqa: RUF001
        (words("tile.useful"), "–" if share is None else f"{100 * share:.2f} %"),  # noqa: RUF001
        (words("tile.incidents"), numbers.get("incidents", 0)),
        (words("tile.lost"), numbers.get("lost_batches", 0)),
        (words("tile.starts"), overview.get("starts", 0)),
        (words("tile.ranks"), overview.get("world_size", 1)),
    ]
    yield "| " + " | ".join(plain(name) for name, _ in rows) + " |"
    yield "|" + "---|" * len(rows)
    yield "| " + " | ".join(plain(value) for _, value in rows) + " |"
    yield ""


def _incident(data: dict[str, Any], row: dict[str, Any], words: Strings) -> Iterator[str]:
    incident = data["incident"]
    kind = words.label("kind", incident["kind"])
    yield f"## {plain(words('incident.title', step=incident['step'], kind=kind))}"
    yield ""
    state = (words.label("severity", incident["severity"]), words.label("outcome", incident["outcome"]))
    yield f"**{' · '.join(plain(one) for one in state)}** · {code(incident['id'])}"
    yield ""
    yield plain(row["message"])
    yield ""
    yield f"### {words('incident.todo')}"
    yield ""
    todo = data["todo"] or [words("incident.no_todo")]
    yield from (f"{number}. {plain(one)}" for number, one in enumerate(todo, 1))
    yield ""
    yield from (f"- **{plain(name)}**: {value}" for name, value in _facts(incident, row, words))
    yield ""
    yield f"### {words('incident.story')}"
    yield ""
    for sentence in data["story"]:
        yield f"- {plain(sentence)}"
    yield ""
    evidence = data.get("evidence") or []
    if evidence:
        yield f"### {words('incident.evidence')}"
        yield ""
        yield from (f"- {plain(one)}" for one in evidence[:_MOST_FACTS])
        yield ""
    if data["commands"]:
        yield f"### {words('incident.commands')}"
        yield ""
        yield from (
            f"- {plain(one.get('label') or one['what'])}: {code(one['line'])}" for one in data["commands"]
        )
        yield ""


def _facts(incident: dict[str, Any], row: dict[str, Any], words: Strings) -> Iterator[tuple[str, str]]:
    diagnosis = incident.get("diagnosis") or {}
    cause = words.label("cause", diagnosis.get("cause", "unknown"))
    confidence = diagnosis.get("confidence")
    sure = ""
    if isinstance(confidence, (int, float)):
        sure = f" ({words('incident.confidence', share=f'{100 * confidence:.0f} %')})"
    yield words("incident.cause"), plain(f"{cause}{sure}")
    if row.get("where"):
        yield words("incident.where"), code(row["where"])
    if diagnosis.get("phase"):
        yield words("fact.phase"), plain(words.label("phase", diagnosis["phase"]))
    for key in ("module", "op", "source"):
        if diagnosis.get(key):
            yield words(f"fact.{key}"), code(diagnosis[key])
    if row.get("who"):
        yield words("fact.ranks"), plain(row["who"])
    yield words("fact.action"), plain(words.label("action", incident["action"]))
    if isinstance(row.get("seconds"), (int, float)):
        yield words("fact.cost"), plain(duration(row["seconds"]))


def _table(rows: list[dict[str, Any]], words: Strings) -> Iterator[str]:
    columns = ("severity", "step", "kind", "cause", "where", "who", "outcome")
    yield "| " + " | ".join(plain(words.label("column", name)) for name in columns) + " |"
    yield "|" + "---|" * len(columns)
    shown = rows[-_MOST_ROWS:]
    for row in reversed(shown):
        cells = [
            words.label(name, row[name]) if name in {"severity", "kind", "cause", "outcome"} else row[name]
            for name in columns
        ]
        texts = [
            code(cell).replace("|", "\\|") if name == "where" and cell else plain(cell)
            for name, cell in zip(columns, cells, strict=True)
        ]
        yield f"| {' | '.join(texts)} |"
    if len(rows) > len(shown):
        yield ""
        yield plain(words("incidents.some", kept=len(shown), all=len(rows)))
