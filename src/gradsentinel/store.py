"""The run directory: events, incidents and snapshots, safe against kill -9."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsentinel.errors import StoreError
from gradsentinel.incident import Incident
from gradsentinel.wording import id_order

SCHEMA = 1
_MOST_WAITING = 1000
"""So many lines of an event log are kept while the disk does not take them."""
_LARGEST_INCIDENT = 64 << 20  # bytes
# Names of files that are not UTF-8 hold lone surrogates; escaped this way they are still JSON.
_LONE_SURROGATES = "backslashreplace"


class RunDirectory:
    """One run's files. Created when something is first written; reading never creates anything.

    Layout: `events-rank<N>.jsonl`, `incidents/<id>/incident.json` (plus the bundle),
    `snapshots/`, TensorBoard files beside them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._taken: set[str] = set()
        """Ids given out, whether or not the disk took them."""
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file; give a directory for the run")

    @property
    def incidents(self) -> Path:
        """Where the incident bundles lie."""
        return self.path / "incidents"

    @property
    def snapshots(self) -> Path:
        """Where the known-good snapshots lie."""
        return self.path / "snapshots"

    def new_incident_id(self, step: int, kind: str) -> str:
        """Return an id that no incident of this directory has: step, kind and, if taken, a number."""
        base = f"{step:06d}-{kind}"
        name, number = base, 1
        while name in self._taken or os.path.lexists(self.incidents / name):
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name

    def write_incident(self, incident: Incident) -> Path:
        """Write incident.json, replacing an earlier version at once; returns its directory."""
        directory = self.incidents / incident.id
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "incident.json", incident.as_dict())
        return directory

    def write_norms(self, incident: Incident, norms: Mapping[str, Any], *, rank: int | None) -> Path:
        """Write the norms of the gradients before an incident, as one rank measured them; returns where.

        `rank` None says that the job has one only.
        """
        directory = self.incidents / incident.id
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / ("norms.json" if rank is None else f"norms-rank{rank}.json")
        write_json(path, {"schema": SCHEMA, "rank": rank or 0, **norms}, indent=None)
        return path

    def read_incidents(self) -> list[Incident]:
        """Return the incidents in the order they happened; raises StoreError for a broken one."""
        found, problems = self.survey_incidents()
        for problem in problems:
            raise problem
        return found

    def survey_incidents(self) -> tuple[list[Incident], list[StoreError]]:
        """Return the incidents that can be read, in the order they happened, and what is wrong with the rest.

        Raises StoreError if this is no run directory.
        """
        if not self.path.is_dir():
            raise StoreError(f"{self.path} does not exist; give the directory that run_dir= named")
        if not self.incidents.is_dir():
            if any(self.path.glob("events-rank*.jsonl")):
                return [], []
            raise StoreError(
                f"{self.path} is not a run directory: it has neither incidents/ nor events-rank*.jsonl"
            )
        found: list[Incident] = []
        problems: list[StoreError] = []
        for entry in sorted(self.incidents.iterdir()):
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            try:
                found.append(read_incident(entry))
            except StoreError as error:
                problems.append(error)
        found.sort(key=lambda incident: (incident.time, incident.iteration, id_order(incident.id)))
        return found, problems

    def events_file(self, rank: int) -> Path:
        """Return the event log of one rank."""
        return self.path / f"events-rank{rank}.jsonl"

    def read_events(self, rank: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events of one rank; a line cut short by a crash is left out."""
        path = self.events_file(rank)
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        found = False
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # cut short, perhaps inside of a character
                continue
            check_schema(entry, path)
            found = True
            yield entry
        if not found and any(lines[:-1]):
            raise StoreError(f"{path} is not an event log: none of its lines is JSON")


class EventFile:
    """Appends one line an event; each line is handed to the system before the call returns.

    A line that the system does not take is kept and written by a later call: so many of them that a disk
    which is full for hours costs no memory to speak of. Never is a part of a line followed by another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._closed = False
        self._waiting: deque[bytes] = deque()
        """Lines that are not on disk; the first of them may be the rest of one."""
        self.lost = 0
        """Lines that were given up since there were too many."""
        with suppress(OSError):  # the first line meets it again
            self._open()

    @property
    def waiting(self) -> int:
        """Number of lines that are not on disk."""
        return len(self._waiting)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one JSON object as one line, behind those that are kept; raises OSError if it is kept."""
        if self._closed:
            return
        line = json.dumps({"schema": SCHEMA, **entry}, ensure_ascii=False, allow_nan=False) + "\n"
        self._waiting.append(line.encode(errors=_LONE_SURROGATES))
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[1]  # the first says who and where, or is the rest of a line
            self.lost += 1
        self._flush()

    def close(self) -> None:
        """Close the file; later writes are ignored. Raises OSError if there are lines that are lost now."""
        try:
            if self._waiting:
                self._flush()
        finally:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if _ends_mid_line(self._path):
            self._waiting.appendleft(b"\n")

    def _flush(self) -> None:
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        while self._waiting:
            self._append(self._descriptor, self._waiting[0])
            self._waiting.popleft()

    def _append(self, descriptor: int, line: bytes) -> None:
        """Append a line, or nothing of it: a disk that is nearly full takes a part."""
        done = 0
        try:
            while done < len(line):
                done += os.write(descriptor, line[done:])
        except OSError:
            if done:
                try:
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - done)
                except OSError:  # then it has to be completed later
                    self._waiting[0] = line[done:]
            raise


def read_incident(directory: Path) -> Incident:
    """Read one incident bundle's incident.json; raises StoreError saying what is wrong with it."""
    path = directory
    try:
        path = directory / "incident.json" if directory.is_dir() else directory
        status = path.stat()
        # A pipe would never end, and a checkpoint given by mistake would fill the memory.
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_INCIDENT:
            raise StoreError(f"{path} is not an incident: give an incident directory or its incident.json")
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist; give an incident directory or its incident.json") from None
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is not an incident: it is not text: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is truncated or not JSON: {error}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} is not an incident: it holds a {type(data).__name__}")
    try:
        return Incident.from_dict(data)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def write_json(path: Path, data: Any, *, indent: int | None = 2) -> None:
    """Write a JSON file so that a reader sees the old or the new one, never half of it."""
    write_text(path, json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file likewise; raises OSError, and leaves nothing of it then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors=_LONE_SURROGATES) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk keeps an empty file
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def unused(directory: Path, name: str) -> Path:
    """Return a path in the directory that does not exist: the name, with a number if it is taken."""
    path, number = directory / name, 1
    while os.path.exists(path):  # noqa: PTH110 - Path.exists raises where the directory may not be read
        number += 1
        path = directory / f"{name}-{number}"
    return path


def check_schema(entry: Any, path: Path) -> None:
    """Raise StoreError if a line or file is foreign, or written by a newer version."""
    schema = entry.get("schema") if isinstance(entry, dict) else None
    if not isinstance(schema, int):
        raise StoreError(f"{path} was not written by GradSentinel: no schema version")
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written by a newer GradSentinel (schema {schema}, not {SCHEMA}); upgrade it"
        )


def _ends_mid_line(path: Path) -> bool:
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
