"""`gradsentinel drill`: a fire drill for a training script of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import complain, console, print_json
from gradsentinel.wording import printable

if TYPE_CHECKING:
    from gradsentinel.campaign.drill import Drill, Verdict

_HELP = (
    "Run a training script of your own with one fault in it, and say whether it survives.\n\n"
    "The fault comes in through the script's sentinel, so the script stays as it is: a plain loop, a Trainer "
    "of Lightning or Hugging Face. What comes after -- are the script's own arguments. With several ranks: "
    "torchrun ... -m gradsentinel drill ...\n\n"
    "Exit codes: 0 survived; 1 not; 2 the drill could not be held."
)


@app.command(help=_HELP)
def drill(
    script: Annotated[Path | None, typer.Argument(help="The script.", show_default=False)] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, after --.", show_default=False)
    ] = None,
    *,
    fault: Annotated[str, typer.Option(help="Which fault; --list shows them.")] = "nan-gradient",
    step: Annotated[int, typer.Option(min=0, help="Optimizer step it happens in, from 0.")] = 50,
    place: Annotated[
        str | None,
        typer.Option(
            help="Parameter, module or field of the batch, or a pattern.", show_default="the seed chooses"
        ),
    ] = None,
    persistent: Annotated[
        bool | None,
        typer.Option(
            "--persistent/--once",
            help="Whether it is there again when its step is computed again.",
            show_default="as usual for the fault",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank it happens on.")] = 0,
    seed: Annotated[int, typer.Option(help="Chooses what is left open.")] = 0,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as a JSON object.")] = False,
) -> None:
    """Run a training script of your own with one fault in it, and say whether it survives."""
    if list_faults:
        _list()
        return
    if script is None:
        complain("error", "give the script to run, or --list")
        raise typer.Exit(2)
    from gradsentinel.campaign.drill import Drill, hold  # noqa: PLC0415 - imports torch

    held = Drill(fault=fault, step=step, place=place, persistent=persistent, rank=rank, seed=seed)
    verdict = hold(held, script, arguments or ())
    if as_json:
        print_json(_as_dict(held, verdict))
    elif int(os.environ.get("RANK", "0")) == rank:  # the others know less
        _show(held, verdict)
    raise typer.Exit(verdict.exit_code)


def _list() -> None:
    from gradsentinel.campaign.drill_faults import DRILLS  # noqa: PLC0415 - imports torch

    shown = Table(box=None, pad_edge=False, show_header=False)
    for one in DRILLS.values():
        shown.add_row(Text(one.name, "bold"), Text(one.what))
    console().print(shown)


def _show(held: Drill, verdict: Verdict) -> None:
    out = console()
    out.print(Text(f"\nDrill: {held.fault} at step {held.step}", "bold"))
    for injection in held.injected[:1]:
        place = f"{injection.target} {printable(injection.where)}{list(injection.index)}"
        change = "" if injection.after is None else f": {injection.before} became {injection.after}"
        again = f", {len(held.injected)} times" if len(held.injected) > 1 else ""
        out.print(Text(f"  put in   {place}{change}{again}"), soft_wrap=True)
    for incident in held.incidents[:5]:
        out.print(
            Text(f"  found    step {incident.step}, {incident.kind}: {printable(incident.message)}"),
            soft_wrap=True,
        )
        if incident.diagnosis is not None:
            place = ", ".join(p for p in (incident.diagnosis.op, incident.diagnosis.module) if p)
            cause = f"{incident.diagnosis.cause}{f' ({place})' if place else ''}"
            out.print(Text(f"  cause    {printable(cause)}"), soft_wrap=True)
        recovery = f"{incident.outcome}: {incident.recovery}".replace("_", " ")
        out.print(Text(f"  done     {printable(recovery)}"), soft_wrap=True)
    if len(held.incidents) > 5:
        out.print(Text(f"  and {len(held.incidents) - 5} more incidents"))
    if held.earlier:
        out.print(Text(f"  {held.earlier} incidents before the fault are not its doing"))
    for note in verdict.notes:
        out.print(Text(f"  note     {printable(note)}"), soft_wrap=True)
    styles = {True: "bold green", False: "bold red", None: "bold yellow"}
    said = printable(f"{verdict.said[0].upper()}{verdict.said[1:]}.")
    out.print(Text(said, styles[verdict.survived]), soft_wrap=True)


def _as_dict(held: Drill, verdict: Verdict) -> dict[str, object]:
    return {
        "fault": held.fault,
        "step": held.step,
        "survived": verdict.survived,
        "said": verdict.said,
        "notes": list(verdict.notes),
        "injected": [one.as_dict() for one in held.injected],
        "incidents": [one.as_dict() for one in held.incidents],
    }
