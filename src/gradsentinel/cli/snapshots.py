"""`gradsentinel snapshots`: the known-good states of a run, and one of them for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gradsentinel.cli.application import app
from gradsentinel.cli.output import console, print_json, quoted

snapshots = typer.Typer(no_args_is_help=True, help="The known-good states that a run has on disk.")
app.add_typer(snapshots, name="snapshots")

_RunDir = Annotated[Path, typer.Argument(help="The directory that run_dir= named.", show_default=False)]


@snapshots.command("list")
def list_states(
    run_dir: _RunDir,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the states that all ranks have, oldest first."""
    from gradsentinel.state.export import saved_states  # noqa: PLC0415 - imports torch

    found = [
        {
            "step": one.step,
            "ranks": len(one.paths),
            "bytes": sum(file.stat().st_size for path in one.paths for file in path.iterdir()),
        }
        for one in saved_states(run_dir)
    ]
    if as_json:
        print_json(found)
        return
    out = console(endless=True)
    for one in found:
        out.print(f"step {one['step']}  {one['ranks']} ranks  {one['bytes'] / 1e6:.1f} MB", soft_wrap=True)
    if not found:
        out.print("No state that all ranks have.")


@snapshots.command("export")
def export_state(
    run_dir: _RunDir,
    step: Annotated[int | None, typer.Argument(help="Of which step.", show_default="the newest")] = None,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The directory to make.", show_default=False)
    ],
) -> None:
    """Write a state as a torch.distributed.checkpoint, which any number of ranks can load."""
    from gradsentinel.state.export import export  # noqa: PLC0415 - imports torch

    chosen = export(run_dir, output, step=step)
    sys.stdout.write(f"The state of step {chosen.step}, of {len(chosen.paths)} ranks: {quoted(output)}\n")
