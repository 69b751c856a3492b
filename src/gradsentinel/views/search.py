"""Where the run directories are below a directory."""

from __future__ import annotations

import os
import re

from gradsentinel.views.files import Files, ViewError

_EVENTS = re.compile(r"events-rank\d+\.jsonl")
_NOT_RUNS = frozenset({"incidents", "snapshots", "__pycache__", "node_modules"})
_DEEPEST = 8
_MOST_DIRECTORIES = 20_000
_MOST_RUNS = 1_000


def find_runs(files: Files, most: int = _MOST_RUNS) -> list[str]:
    """Return the names of the runs below a directory, the nearest first; "." is the directory itself.

    Links, hidden directories and what belongs to a run are not gone into; nor is anything very deep.
    """
    found: list[str] = []
    level = [""]
    seen = 0
    for _ in range(_DEEPEST):
        below: list[str] = []
        for name in level:
            seen += 1
            if seen > _MOST_DIRECTORIES or len(found) >= most:
                return found
            if is_run(files, name):
                found.append(name or ".")
            below += _folders(files, name)
        level = below
    return found


def is_run(files: Files, name: str) -> bool:
    """Return True if a directory is a run's: it has an event log or incidents."""
    if files.is_directory(name, "incidents"):
        return True
    try:
        with os.scandir(files.path(name)) as entries:
            return any(_EVENTS.fullmatch(entry.name) for entry in entries)
    except (OSError, ViewError):
        return False


def _folders(files: Files, name: str) -> list[str]:
    try:
        with os.scandir(files.path(name)) as entries:
            folders = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                and not entry.name.startswith(".")
                and entry.name not in _NOT_RUNS
            ]
    except (OSError, ViewError):
        return []
    return [f"{name}/{folder}" if name else folder for folder in sorted(folders)]
