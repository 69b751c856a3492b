"""One run directory, with what was read of it so far."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradsentinel.errors import StoreError
from gradsentinel.incident import Incident
from gradsentinel.store import read_incident
from gradsentinel.views.event_lines import first_entry, last_start_or_end
from gradsentinel.views.files import Files, ViewError
from gradsentinel.views.history import History
from gradsentinel.views.logged import logged_incident
from gradsentinel.views.tensorboard_scalars import TensorBoardScalars
from gradsentinel.views.words import plural
from gradsentinel.wording import id_order

_EVENTS = re.compile(r"events-rank(\d+)\.jsonl")
_MOST_INCIDENTS = 5_000
_MOST_RANKS = 20_000
_ALIVE = 15 * 60.0
"""Seconds without a sign of life after which nobody can say that a run is still going on."""


class RunFiles:
    """A run directory as it is looked at again and again: only what is new is read.

    Args:
        path: where it is, without links.
        name: what it is called.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.path = path
        self.files = Files(path)
        self._lock = threading.Lock()
        self._rank: int | None = None
        self.ranks: list[int] = []
        """The ranks that have an event log."""
        self.history = History.of(self.files, "events-rank0.jsonl")
        self.scalars = TensorBoardScalars(self.files)
        self._incidents: dict[str, tuple[tuple[int, int], Incident | StoreError]] = {}
        self.unread = 0
        """Incidents of which nothing can be shown, neither from files nor from the log."""
        self._places: dict[int, dict[str, Any]] = {}

    @contextmanager
    def looked_at(self) -> Iterator[RunFiles]:
        """Read what is new, and keep other threads out meanwhile."""
        with self._lock:
            self._refresh()
            yield self

    def _refresh(self) -> None:
        found = sorted(int(match[1]) for name in self.files.entries() if (match := _EVENTS.fullmatch(name)))
        self.ranks = found[:_MOST_RANKS]
        rank = found[0] if found else 0
        if rank != self._rank:
            self._rank = rank
            self.history = History.of(self.files, f"events-rank{rank}.jsonl")
        self.history.refresh()
        if not self.history.series and self.history.lines.share >= 1.0:
            self.scalars.refresh()

    # -- what was read -----------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """Where the numbers come from: events, tensorboard or none."""
        return "events" if self.history.series else "tensorboard" if self.scalars.series else "none"

    @property
    def series(self) -> dict[str, Any]:
        """The series by name."""
        return self.history.series or self.scalars.series

    @property
    def share(self) -> float:
        """How much of the numbers was read so far, 0 to 1."""
        return self.history.lines.share if self.scalars.complete else min(0.99, self.history.lines.share)

    def incidents(self) -> tuple[list[Incident], list[str]]:
        """Return the incidents, as they happened, and what is wrong with the files of some.

        Those whose files cannot be read are as the event log tells them.
        """
        found: list[Incident] = []
        problems: list[str] = []
        unread: set[str] = set()
        if (self.path / "incidents").is_symlink() and not self.files.is_directory("incidents"):
            problems.append("incidents is a link that leads out of the run, or nowhere: not read")
        names = [name for name in self.files.entries("incidents") if not name.startswith(".")]
        for name in names[-_MOST_INCIDENTS:]:
            read = self._read(name)
            if isinstance(read, StoreError):
                problems.append(str(read).replace(f"{self.path}/", ""))
                unread.add(name)
            elif read is not None:
                found.append(read)
        for gone in self._incidents.keys() - set(names):
            del self._incidents[gone]
        told = {incident.id for incident in found} | set(names[:-_MOST_INCIDENTS])
        found += self._from_log(told, unread, problems)
        found.sort(key=lambda incident: (incident.time, incident.iteration, id_order(incident.id)))
        return found, problems

    def _read(self, name: str) -> Incident | StoreError | None:
        """Return what is in a directory of incidents/, or what is wrong with it; None if it is none."""
        status = self.files.stat("incidents", name, "incident.json")
        if status is None:
            if self.files.is_directory("incidents", name):
                return StoreError(f"incidents/{name} has no incident.json")
            if (self.path / "incidents" / name).is_symlink():
                return StoreError(
                    f"incidents/{name} is a link that leads out of the run, or nowhere: not read"
                )
            return None
        mark = (status.st_mtime_ns, status.st_size)
        known = self._incidents.get(name)
        if known is None or known[0] != mark:
            try:
                read: Incident | StoreError = read_incident(self.files.path("incidents", name))
            except StoreError as error:
                read = error
            except ViewError as error:
                read = StoreError(str(error))
            known = self._incidents[name] = (mark, read)
        return known[1]

    def _from_log(self, told: set[str], unread: set[str], problems: list[str]) -> list[Incident]:
        """Return the incidents that only the event log tells of, and add what is wrong to the problems."""
        found: list[Incident] = []
        lost = 0
        missing = [id_ for id_ in self.history.incidents if id_ not in told]
        for id_ in missing[-_MOST_INCIDENTS:]:
            lines = self.history.incidents[id_]
            # Of a run that goes on the file may just be being written.
            lost += id_ not in unread and ("recovery" in lines or self.state != "running")
            try:
                found.append(logged_incident(id_, lines))
                unread.discard(id_)
            except StoreError:
                unread.add(id_)
        self.unread = len(unread)
        if lost:
            problems.append(f"{plural(lost, 'incident')} of the event log cannot be found in incidents/")
        return found

    def was_read(self, incident: Incident) -> bool:
        """Return True if an incident is from its own file, not from the event log alone."""
        return any(read is incident for _, read in self._incidents.values())

    def incident(self, name: str) -> Incident:
        """Return one incident; raises ViewError if there is none, or if it cannot be read."""
        for incident in self.incidents()[0]:
            if incident.id == name:
                return incident
        raise ViewError("there is no such incident in this run, or it cannot be read")

    def folder_of(self, incident: Incident) -> str:
        """Return the name of the directory that an incident was read from."""
        for name, (_, read) in self._incidents.items():
            if read is incident:
                return name
        return incident.id

    def place_of(self, incident: Incident) -> int:
        """Return the place of an incident on the axis."""
        known = self.history.incidents.get(incident.id, {})
        x = known.get("x")
        return x if isinstance(x, int) else incident.iteration

    def places(self) -> dict[int, dict[str, Any]]:
        """Return who and where each rank is, as its event log says; read once for each rank."""
        for rank in self.ranks:
            if rank not in self._places:
                entry = first_entry(self.files, f"events-rank{rank}.jsonl") or {}
                told = entry.get("rank")
                self._places[rank] = told if isinstance(told, dict) else {}
        return {rank: self._places[rank] for rank in self.ranks}

    @property
    def updated(self) -> float:
        """When something was written last, in seconds since 1970."""
        times = [self.history.lines.updated]
        with suppress(OSError, ViewError):
            times.append(self.files.path("incidents").stat().st_mtime)
        return max(times)

    @property
    def state(self) -> str:
        """What became of the run: running, ended, failed, aborted, empty or unknown."""
        starts = self.history.starts
        if not starts:
            return "unknown" if self.files.entries("incidents") else "empty"
        return state_of(ended=starts[-1].ended is not None, error=starts[-1].error, updated=self.updated)


def state_of(*, ended: bool, error: str | None, updated: float) -> str:
    """Return what became of a run that has begun: running, ended, failed, aborted or unknown."""
    if not ended:
        return "running" if time.time() - updated < _ALIVE else "unknown"
    if error is None:
        return "ended"
    return "aborted" if error.startswith(("TrainingAborted", "RecoveryFailed")) else "failed"


def brief(files: Files, name: str) -> dict[str, Any]:
    """Return name, state and time of the last sign of life of a run, from the end of its log alone."""
    logs = [(int(match[1]), entry) for entry in files.entries(name) if (match := _EVENTS.fullmatch(entry))]
    log = min(logs)[1] if logs else "events-rank0.jsonl"
    status = files.stat(name, log)
    times = [0.0 if status is None else status.st_mtime]
    with suppress(OSError, ViewError):
        times.append(files.path(name, "incidents").stat().st_mtime)
    updated = max(times)
    if status is None or not status.st_size:
        state = "unknown" if files.entries(name, "incidents") else "empty"
    else:
        newest = last_start_or_end(files, name, log) or {}
        error = newest.get("error")
        ended = newest.get("event") == "run_end"
        state = state_of(ended=ended, error=error if isinstance(error, str) else None, updated=updated)
    return {"name": name, "state": state, "updated": clock(updated)}


def clock(seconds: float) -> str:
    """Return a time as in incident.json."""
    if seconds <= 0:
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
