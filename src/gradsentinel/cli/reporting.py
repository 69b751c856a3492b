"""`gradsentinel report`: a run as one file to look at, or as text for a ticket."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradsentinel.cli.application import app
from gradsentinel.cli.output import ids_in, quoted, the_one
from gradsentinel.errors import StoreError
from gradsentinel.wording import id_order

_HELP = (
    "Write a run's report: one HTML file with all pictures, or Markdown for a ticket.\n\n"
    "The file needs nothing else and asks nobody for anything: timeline, incidents, what to do, heat maps of "
    "ranks and layers, in English and Chinese, light and dark, and for paper. Markdown goes to stdout."
)


@app.command(help=_HELP)
def report(
    run_dir: Annotated[Path, typer.Argument(help="The directory that run_dir= named.", show_default=False)],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; - is stdout.", show_default="report.html"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write Markdown, to stdout if no -o.")] = False,
    lang: Annotated[str, typer.Option(metavar="en|zh", help="The language it opens in.")] = "en",
    incident: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Only this incident: its id, the beginning of it, or its step.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run's report: one HTML file with all pictures, or Markdown for a ticket."""
    from gradsentinel.views.markdown import markdown as as_markdown  # noqa: PLC0415 - imports torch
    from gradsentinel.views.report import report as as_page  # noqa: PLC0415 - imports torch

    chosen = None if incident is None else _chosen(run_dir, incident)
    make = as_markdown if markdown else as_page
    text = make(run_dir, lang=lang, incident=chosen)
    target = output or (Path("-") if markdown else Path("report.html"))
    if str(target) == "-":
        sys.stdout.write(text)
        return
    _write(target, text)
    sys.stdout.write(f"Report: {quoted(target)}\n")


def _chosen(run_dir: Path, incident: str) -> str:
    """Return the id that is meant, also of an incident that only the event log tells of."""
    from gradsentinel.views.gather import gather  # noqa: PLC0415 - imports torch

    ids = {one["id"] for one in gather(run_dir).incidents("en")}
    if (run_dir / "incidents").is_dir():
        ids.update(ids_in(run_dir / "incidents"))
    return the_one(sorted(ids, key=id_order), incident, run_dir)


def _write(path: Path, text: str) -> None:
    """Write the file as a whole or not at all; raises StoreError if its place cannot hold one."""
    if path.is_dir():
        raise StoreError(f"{path} is a directory; name a file, as in -o {path / 'report.html'}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
