"""The runs under a directory, and what a view may ask of each."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsentinel.views.files import Files, ViewError
from gradsentinel.views.incident_view import incident_page, incident_rows
from gradsentinel.views.run_files import RunFiles, brief
from gradsentinel.views.run_view import overview
from gradsentinel.views.search import find_runs, is_run
from gradsentinel.views.timeline import one_series, timeline_of
from gradsentinel.wording import printable

_MOST_OPEN = 64
"""So many runs are kept in memory with what was read of them."""
_FRESH = 5.0
"""Seconds that the list of runs is good for."""
MOST_POINTS = 5_000


class Views:
    """What can be seen of the runs under a directory, as JSON; reads only, and only under it.

    Every value is JSON-able; numbers that are not finite are the strings "nan", "inf" and "-inf". `lang` is
    "en" or "zh". Safe to be called by several threads, and while the runs are being written.

    Args:
        root: a run directory, whose name is then ".", or a directory of run directories.

    Raises:
        ViewError: from each method, if what is asked for is not there or not under the directory.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._files = Files(self.root)
        self._open: OrderedDict[str, RunFiles] = OrderedDict()
        self._lock = threading.Lock()
        self._found: tuple[float, list[str]] = (-_FRESH, [])

    def names(self) -> list[str]:
        """Return the names of the runs: their paths below the directory; links are not followed."""
        now = time.monotonic()
        at, names = self._found
        if now - at >= _FRESH:
            names = find_runs(self._files)
            self._found = now, names
        return names

    def has_runs(self) -> bool:
        """Return True if there is a run."""
        return bool(self.names())

    def runs(self) -> list[dict[str, Any]]:
        """Return name, state and time of the last sign of life of each run, the newest first."""
        found = [brief(self._files, name) for name in self.names()]
        return sorted(found, key=lambda one: (one["updated"], one["name"]), reverse=True)

    def run(self, name: str, lang: str = "en") -> dict[str, Any]:
        """Return the state of a run: numbers, budgets, snapshots and what is wrong with its files."""
        with self._run(name).looked_at() as run:
            return overview(run, lang)

    def timeline(
        self,
        name: str,
        tags: Sequence[str] | None = None,
        start: int | None = None,
        stop: int | None = None,
        points: int = 800,
    ) -> dict[str, Any]:
        """Return the series of a run and the marks on them, of at most `points` points each.

        `tags` None asks for loss, gradient norm, learning rate and loss scale; `start` and `stop` are
        attempted steps, both included. A point is [x, least, largest, last].
        """
        with self._run(name).looked_at() as run:
            return timeline_of(run, tags, start, stop, _points(points))

    def incidents(self, name: str, lang: str = "en") -> list[dict[str, Any]]:
        """Return the incidents of a run in the order they happened, one line each."""
        with self._run(name).looked_at() as run:
            return incident_rows(run, lang)

    def incident(self, name: str, id: str, lang: str = "en") -> dict[str, Any]:  # noqa: A002 - the route's own name
        """Return all that is known about one incident."""
        with self._run(name).looked_at() as run:
            return incident_page(run, id, lang)

    def compare(self, names: Sequence[str], tag: str = "loss", points: int = 800) -> dict[str, Any]:
        """Return one series of several runs."""
        found = []
        for name in list(dict.fromkeys(names))[:64]:
            with self._run(name).looked_at() as run:
                found.append({"name": name, "points": one_series(run, tag, _points(points))})
        return {"tag": tag, "runs": found}

    def _run(self, name: str) -> RunFiles:
        """Return a run by its name; raises ViewError if there is none."""
        if not isinstance(name, str) or not name:
            raise ViewError("no run was named")
        path = self._files.path(name)
        if not path.is_dir():
            raise ViewError(f"there is no run {printable(name)}")
        if not is_run(self._files, name):
            raise ViewError(f"{printable(name)} is no run directory")
        key = str(path)
        with self._lock:
            run = self._open.get(key)
            if run is None:
                run = self._open[key] = RunFiles(Path(path), name)
            self._open.move_to_end(key)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return run


def _points(points: int) -> int:
    return max(1, min(int(points), MOST_POINTS))
