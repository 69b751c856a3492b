"""`gradsentinel campaign`: the same runs under the same faults, guarded in several ways."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import quoted

_HELP = (
    "Train the same runs under the same faults, guarded in several ways, and publish what came of it.\n\n"
    "The short form has 202 faults on its schedule and is made for ten minutes on two idle cores; the long "
    "one has ten times as many. Writes results.json, results.md and plots into --out.\n\n"
    "Exit codes: 0 all runs ended; 1 one of them failed or hung; 2 the campaign cannot be run. Goals that "
    "were not met are in the table, and do not change the exit code."
)


@app.command(help=_HELP)
def campaign(
    *,
    form: Annotated[str, typer.Option(help="tiny or small (a look at it), short or long.")] = "short",
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data and faults.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the runs leave their results.")] = Path("runs/campaign"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="one for each core")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this workload: plain, scaler, lightning, megatron or bits; may be repeated."),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Write results.json, results.md and the plots here, too.", show_default=False),
    ] = None,
    hang: Annotated[float, typer.Option(min=1, help="Seconds after which a run counts as hung.")] = 900.0,
) -> None:
    """Train the same runs under the same faults, guarded in several ways, and publish what came of it."""
    from gradsentinel.campaign.conduct import Orders, conduct  # noqa: PLC0415 - imports torch

    screen = Console(highlight=False)
    orders = Orders(
        form=form,
        seed=seed,
        folder=out,
        jobs=jobs or _cores(),
        resume=resume,
        only=tuple(only or ()),
        docs=docs,
        hang=hang,
        command=shlex.join(["gradsentinel", *sys.argv[1:]]),
    )
    found = conduct(orders, screen)
    _show(found, screen)
    screen.print(Text(f"\nThe page: {quoted(out / 'results.md')}"), soft_wrap=True)
    raise typer.Exit(1 if found["failed"] else 0)


def _cores() -> int:
    """Return how many cores this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def _show(found: dict[str, Any], screen: Console) -> None:
    if not found["goals"]:
        return
    shown = Table(box=None, pad_edge=False)
    for head in ("goal", "wanted", "measured", "", ""):
        shown.add_column(head)
    words = {
        True: Text("met", "green"),
        False: Text("not met", "bold red"),
        None: Text("not measured", "dim"),
    }
    for one in found["goals"]:
        measured = "-" if one["measured"] is None else str(one["measured"])
        shown.add_row(one["goal"], one["wanted"], measured, words[one["met"]], one["note"])
    screen.print(shown)
