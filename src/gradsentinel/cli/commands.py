"""The commands that look at runs and at this installation: demo, incidents, show, doctor."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import choose, complain, console, example, files_in, print_json, quoted
from gradsentinel.errors import StoreError
from gradsentinel.wording import printable

# Each command imports what it needs, so that `gradsentinel --help` imports nothing for the others.


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
        complain("warning" if found else "error", str(problem))
    if problems and not found:
        raise typer.Exit(2)
    if as_json:
        print_json([incident.as_dict() for incident in found])
        return
    out = console(endless=True)
    if not found:
        out.print(Text(f"No incidents in {printable(run_dir)}."))
        return
    out.print(incident_table(found))
    outcomes = Counter(str(incident.outcome).replace("_", " ") for incident in found)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    out.print()
    out.print(Text(f"{counts}. The story of one:\n{example(run_dir)}"), soft_wrap=True)


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

    place = choose(incident, incident_id)
    found = read_incident(place)
    if as_json:
        print_json(found.as_dict())
        return
    bundle = place if place.is_dir() else place.parent if place.name == "incident.json" else None
    out = console()
    out.print(incident_story(found, files_in(bundle) if bundle is not None else ()))
    if bundle is None:
        return
    out.print(Text.assemble(("\nBundle  ", "bold"), quoted(bundle)), soft_wrap=True)
    _print_next(out, bundle)


def _print_next(out: Console, directory: Path) -> None:
    """Say what can be done with what is in the bundle, and what is not in it."""
    from gradsentinel.diagnosis.bundle import Bundle  # noqa: PLC0415 - imports torch

    bundle = Bundle(directory)
    where = quoted(directory)
    try:
        left_out = bundle.facts().get("left_out", ())
    except StoreError as error:
        complain("warning", str(error))
        return
    if left_out:
        out.print(Text("\nNot in the bundle", "bold"))
        for text in left_out:
            out.print(Text(f"- {printable(text)}"))
    commands = []
    if bundle.program is not None:
        commands.append(
            (f"python {quoted(bundle.program)}", "the bad operator alone, with torch and safetensors only")
        )
    elif bundle.has("operator"):
        commands.append((f"gradsentinel replay {where}", "the bad operator alone"))
    if bundle.has("scene"):
        target = "--target pkg.module:factory"
        commands.append((f"gradsentinel replay {where} {target}", "the whole step with your model"))
        commands.append((f"gradsentinel verify {where} {target}", "does a fix hold?"))
    if not commands:
        return
    out.print(Text("\nNext", "bold"))
    for command, what in commands:
        out.print(Text.assemble(f"  {command}", (f"  # {what}", "dim")), soft_wrap=True)


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
        print_json(report.as_dict())
    else:
        console().print(report)
    raise typer.Exit(0 if report.healthy else 1)
