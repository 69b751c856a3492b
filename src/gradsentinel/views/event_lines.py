"""Reading an event log that still grows: only what is new, and a slice at a time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from gradsentinel.store import SCHEMA
from gradsentinel.views.files import Files, ViewError

_CHUNK = 1 << 20
_TAIL = 1 << 16
_LONGEST = 16 << 20
"""Bytes of a line; a longer one is damaged."""
PATIENCE = 1.0
"""Seconds that one look at a log may take; the next one goes on from there."""


class EventLines:
    """The lines of one `events-rank<N>.jsonl`; each is given once, when it is complete.

    A file that became shorter, or was replaced, is read anew.
    """

    def __init__(self, files: Files, *names: str) -> None:
        self._files = files
        self._names = names
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""
        self._skipping = False
        self.size = 0
        self.updated = 0.0
        """When the file was written to last, in seconds since 1970."""
        self.damaged = 0
        """Lines that are no JSON objects."""
        self.too_new = 0
        """Lines of a newer version."""
        self.restarted = False
        """True if the last look began with the first line again: what was known is void."""

    @property
    def share(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return 1.0 if self._offset >= self.size else self._offset / self.size

    def new(self, patience: float = PATIENCE) -> Iterator[dict[str, Any]]:
        """Yield what has been written since the last look; stops when it has taken too long."""
        self.restarted = False
        status = self._files.stat(*self._names)
        if status is None:
            return
        identity = status.st_dev, status.st_ino
        self.restarted = self._identity not in {None, identity} or status.st_size < self._offset
        if self.restarted:
            self._offset, self._rest, self._skipping = 0, b"", False
            self.damaged = self.too_new = 0
        self._identity, self.size, self.updated = identity, status.st_size, status.st_mtime
        if self._offset == self.size:
            return
        deadline = time.monotonic() + patience
        try:
            with self._files.open(*self._names) as file:
                file.seek(self._offset, os.SEEK_SET)
                while self._offset < self.size:
                    chunk = file.read(min(_CHUNK, self.size - self._offset))
                    if not chunk:
                        break
                    self._offset += len(chunk)
                    yield from self._entries(chunk)
                    if time.monotonic() > deadline:
                        break
        except (OSError, ViewError):  # gone meanwhile; the next look sees that
            return

    def _entries(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            entry = self._entry(line)
            if entry is not None:
                yield entry
        if len(self._rest) > _LONGEST:
            self._rest, self._skipping = b"", True
            self.damaged += 1

    def _entry(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("schema"), int):
            self.damaged += 1
            return None
        if entry["schema"] > SCHEMA:
            self.too_new += 1
            return None
        return entry


def last_start_or_end(files: Files, *names: str) -> dict[str, Any] | None:
    """Return the newest `run_start` or `run_end` of an event log, if it is near the end of the file."""
    try:
        with files.open(*names) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")
    except (OSError, ViewError):
        return None
    for line in reversed(lines):
        if b'"run_end"' not in line and b'"run_start"' not in line:
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and entry.get("event") in {"run_end", "run_start"}:
            return entry
    return None


def first_entry(files: Files, *names: str) -> dict[str, Any] | None:
    """Return the first line of an event log, if it can be read; reads no more than a few KiB."""
    try:
        with files.open(*names) as file:
            line = file.readline(1 << 16)
        entry = json.loads(line)
    except (OSError, ViewError, ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
