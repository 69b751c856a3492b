"""What every command prints with, and how an incident is named on the command line."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from gradsentinel.errors import StoreError
from gradsentinel.wording import id_order, printable


def console(*, endless: bool = False) -> Console:
    """Return a console on stdout that takes text as it is; without a terminal its lines may be endless."""
    made = Console(highlight=False, markup=False, emoji=False)
    if endless and not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 10_000  # one row a line, for grep and its friends
    return made


def print_json(data: Any) -> None:
    """Write data to stdout as JSON that any reader takes."""
    from gradsentinel.incident import jsonable  # noqa: PLC0415 - imports torch

    sys.stdout.write(json.dumps(jsonable(data), indent=2, allow_nan=False) + "\n")


def complain(how: str, what: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"{how}: {printable(what)}\n")


def reason_of(error: OSError) -> str:
    """Return what the system has against it, and against which file."""
    return (
        f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)
    )


def quoted(path: object) -> str:
    """Return a path as one can paste it into a shell."""
    return printable(shlex.quote(str(path)))


def choose(path: Path, incident_id: str | None, command: str = "show") -> Path:
    """Return where the incident lies; raises StoreError if it is not clear which one is meant."""
    incidents = path / "incidents"
    if incident_id is None:
        if incidents.is_dir() and not (path / "incident.json").exists():
            raise StoreError(
                f"{path} is a run directory: say which incident, as in {example(path, command)} "
                f"({_choices(ids_in(incidents))})"
            )
        return path
    if not incidents.is_dir():
        raise StoreError(f"{path} is not a run directory with incidents: it has no incidents/")
    return incidents / the_one(ids_in(incidents), incident_id, path)


def the_one(ids: list[str], incident_id: str, path: Path) -> str:
    """Return which id of a run is meant by one, its beginning or its step; raises StoreError if none is."""
    matches = (
        [name for name in ids if name == incident_id]
        or [name for name in ids if _step(name) == incident_id]
        or [name for name in ids if name.startswith(incident_id)]
    )
    if len(matches) != 1:
        what = "several incidents match" if matches else "no incident matches"
        raise StoreError(f"{what} {incident_id!r} in {path} ({_choices(matches or ids)})")
    return matches[0]


def example(run_dir: Path, command: str = "show") -> str:
    """Return the command that takes one incident of a run."""
    return f"gradsentinel {command} {quoted(run_dir)} ID"


def files_in(bundle: Path) -> list[tuple[str, int]]:
    """Return what is in the bundle, by name, with sizes in bytes; a directory counts as one."""
    found: dict[str, int] = {}
    for directory, _, names in os.walk(bundle):
        for path in (Path(directory, name) for name in names if not name.startswith(".")):
            first, *inside = path.relative_to(bundle).parts
            name = f"{first}/" if inside else first
            found[name] = found.get(name, 0) + path.lstat().st_size
    return sorted(found.items())


def ids_in(incidents: Path) -> list[str]:
    """Return the names of the bundles in a directory, in order of their steps."""
    entries = (entry for entry in incidents.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted((entry.name for entry in entries), key=id_order)


def _step(incident_id: str) -> str:
    """The step in an id as people write it."""
    return incident_id.partition("-")[0].lstrip("0") or "0"


def _choices(ids: list[str]) -> str:
    if not ids:
        return "it has none"
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"there is {', '.join(ids[:3])}{more}"
