"""The `gradsentinel` command.

Exit codes: 0 all went well; 1 the doctor found something essential broken, or the demo failed;
2 the command or a path cannot be used.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
from collections import Counter
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from gradsentinel._version import __version__
from gradsentinel.errors import GradSentinelError, StoreError
from gradsentinel.wording import printable

# Each command imports what it needs, so that `gradsentinel --help` imports nothing for the others.


class _Commands(TyperGroup):
    """The one place where an unusable path or file becomes one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except GradSentinelError as error:
            _complain("error", str(error))
        except OSError as error:
            _complain("error", _reason(error))
        raise typer.Exit(2)


app = typer.Typer(
    name="gradsentinel",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line of this process and exit; what a stream cannot encode is written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader, such as head, has all it wanted
            sys.exit(1)
        _complain("error", _reason(error))
        sys.exit(2)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        sys.stdout.write(f"gradsentinel {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """An immune system for training runs: what it caught, and whether it works here."""


@app.command()
def demo(
    *,
    steps: Annotated[
        int | None, typer.Option(min=40, help="Optimizer steps per run.", show_default="some hundred")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to write.", show_default="runs/demo-<time>")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the data and the faults.")] = 0,
) -> None:
    """Watch a training run survive injected faults."""
    from gradsentinel.demo.run import run_demo  # noqa: PLC0415 - only this command trains

    directory = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    raise typer.Exit(run_demo(steps=steps, run_dir=directory, seed=seed, console=Console(highlight=False)))


@app.command()
def incidents(
    run_dir: Annotated[Path, typer.Argument(help="The directory that run_dir= named.", show_default=False)],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of incident.json objects.")
    ] = False,
) -> None:
    """List the incidents of a run.

    Incidents that cannot be read are named on stderr; the exit code is 2 if none could be read.
    """
    from gradsentinel.store import RunDirectory  # noqa: PLC0415 - imports torch
    from gradsentinel.terminal import incident_table  # noqa: PLC0415 - imports torch

    found, problems = RunDirectory(run_dir).survey_incidents()
    for problem in problems:
        _complain("warning" if found else "error", str(problem))
    if problems and not found:
        raise typer.Exit(2)
    if as_json:
        _print_json([incident.as_dict() for incident in found])
        return
    console = _console(endless=True)
    if not found:
        console.print(Text(f"No incidents in {printable(run_dir)}."))
        return
    console.print(incident_table(found))
    outcomes = Counter(str(incident.outcome).replace("_", " ") for incident in found)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    console.print()
    console.print(Text(f"{counts}. The story of one:\n{_show_command(run_dir)}"), soft_wrap=True)


@app.command()
def show(
    incident: Annotated[
        Path,
        typer.Argument(
            help="An incident's directory, its incident.json, or a run directory.", show_default=False
        ),
    ],
    incident_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="Which incident of a run directory: its id, the beginning of it, or its step.",
            show_default=False,
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the incident.json object.")] = False,
) -> None:
    """Tell the story of one incident."""
    from gradsentinel.store import read_incident  # noqa: PLC0415 - imports torch
    from gradsentinel.terminal import incident_story  # noqa: PLC0415 - imports torch

    place = _choose(incident, incident_id)
    found = read_incident(place)
    if as_json:
        _print_json(found.as_dict())
        return
    bundle = place if place.is_dir() else place.parent if place.name == "incident.json" else None
    console = _console()
    console.print(incident_story(found, _files(bundle) if bundle is not None else ()))
    if bundle is not None:
        console.print(Text.assemble(("\nBundle  ", "bold"), printable(bundle)), soft_wrap=True)


@app.command()
def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON object.")] = False,
) -> None:
    """Say what is installed, what works here and what to do about the rest.

    The exit code is 1 if something essential is broken.
    """
    from gradsentinel.doctor import examine  # noqa: PLC0415 - only this command examines

    report = examine()
    if as_json:
        _print_json(report.as_dict())
    else:
        _console().print(report)
    raise typer.Exit(0 if report.healthy else 1)


def _choose(path: Path, incident_id: str | None) -> Path:
    """Return where the incident lies; raises StoreError if it is not clear which one is meant."""
    incidents = path / "incidents"
    if incident_id is None:
        if incidents.is_dir() and not (path / "incident.json").exists():
            raise StoreError(
                f"{path} is a run directory: say which incident, as in {_show_command(path)} "
                f"({_choices(_ids(incidents))})"
            )
        return path
    if not incidents.is_dir():
        raise StoreError(f"{path} is not a run directory with incidents: it has no incidents/")
    ids = _ids(incidents)
    matches = (
        [name for name in ids if name == incident_id]
        or [name for name in ids if _step(name) == incident_id]
        or [name for name in ids if name.startswith(incident_id)]
    )
    if len(matches) != 1:
        what = "several incidents match" if matches else "no incident matches"
        raise StoreError(f"{what} {incident_id!r} in {path} ({_choices(matches or ids)})")
    return incidents / matches[0]


def _show_command(run_dir: Path) -> str:
    return f"gradsentinel show {printable(shlex.quote(str(run_dir)))} ID"


def _ids(incidents: Path) -> list[str]:
    return sorted(
        entry.name for entry in incidents.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _step(incident_id: str) -> str:
    """The step in an id as people write it."""
    return incident_id.partition("-")[0].lstrip("0") or "0"


def _choices(ids: list[str]) -> str:
    if not ids:
        return "it has none"
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"there is {', '.join(ids[:3])}{more}"


def _files(bundle: Path) -> list[tuple[str, int]]:
    """The bundle's files by name, with their sizes in bytes."""
    found = []
    for directory, _, names in os.walk(bundle):
        paths = [Path(directory, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(bundle).as_posix(), path.lstat().st_size) for path in paths]
    return sorted(found)


def _console(*, endless: bool = False) -> Console:
    """Return a console on stdout that takes text as it is; without a terminal its lines may be endless."""
    console = Console(highlight=False, markup=False, emoji=False)
    if endless and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000  # one incident a line, for grep and its friends
    return console


def _print_json(data: Any) -> None:
    from gradsentinel.incident import jsonable  # noqa: PLC0415 - imports torch

    sys.stdout.write(json.dumps(jsonable(data), indent=2, allow_nan=False) + "\n")


def _complain(how: str, what: str) -> None:
    sys.stderr.write(f"{how}: {printable(what)}\n")


def _reason(error: OSError) -> str:
    return (
        f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)
    )
