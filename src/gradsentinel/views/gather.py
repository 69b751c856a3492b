"""All that a report shows of one run, in both languages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsentinel.errors import StoreError
from gradsentinel.store import RunDirectory
from gradsentinel.views.files import ViewError
from gradsentinel.views.library import Views
from gradsentinel.wording import printable

_RUN = "."
_GRAVITY = {"critical": 3, "error": 2, "warning": 1}
_MOST_READS = 10_000
"""A log is read in pieces of a moment each; so many are more than any log has."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """One run, to be shown."""

    name: str
    views: Views

    def run(self, lang: str) -> dict[str, Any]:
        """Return the overview, under the name of the directory."""
        return {**self.views.run(_RUN, lang), "name": self.name}

    def timeline(self, points: int) -> dict[str, Any]:
        """Return all series of the run and its marks."""
        tags = self.views.timeline(_RUN, points=1)["tags"]
        return self.views.timeline(_RUN, tags, points=points)

    def around(self, place: int, margin: int) -> dict[str, Any]:
        """Return every step of the loss and the gradient norm around a place on the axis."""
        start, stop = max(0, place - margin), place + margin
        part = self.views.timeline(_RUN, ("loss", "grad_norm"), start, stop, 2 * margin + 1)
        return {**part, "start": start, "stop": stop}

    def incidents(self, lang: str) -> list[dict[str, Any]]:
        """Return the incidents in the order they happened, one line each."""
        return self.views.incidents(_RUN, lang)

    def incident(self, id_: str, lang: str) -> dict[str, Any]:
        """Return one incident with all that is known of it."""
        return self.views.incident(_RUN, id_, lang)


def gather(run_dir: str | os.PathLike[str]) -> Gathered:
    """Return a run to be shown, its log read to the end; raises StoreError if there is none."""
    path = Path(run_dir)
    views = Views(path)
    try:
        RunDirectory(path).survey_incidents()
    except StoreError as error:
        below = _runs_below(views) if path.is_dir() else ""
        raise StoreError(f"{error}{below}") from error
    try:
        for _ in range(_MOST_READS):
            if views.run(_RUN)["reading"] >= 1:
                break
    except ViewError as error:
        raise StoreError(f"cannot look at {path}: {error}") from error
    return Gathered(Path(os.path.realpath(path)).name or str(path), views)


def gravest(incidents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the incidents, what ended the run first, then the gravest, of these the newest."""
    places = {id(one): place for place, one in enumerate(incidents)}
    return sorted(
        incidents,
        key=lambda one: (
            one["outcome"] == "aborted",
            _GRAVITY.get(one["severity"], 0),
            places[id(one)],
        ),
        reverse=True,
    )


def _runs_below(views: Views) -> str:
    """Say which runs there are below a directory that is none itself."""
    names = views.names()
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; it holds {', '.join(printable(name) for name in names[:3])}{more}: give one of them"
