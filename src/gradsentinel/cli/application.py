"""The command itself: its options, its errors, its way out."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gradsentinel._version import __version__
from gradsentinel.cli.output import complain, reason_of
from gradsentinel.errors import GradSentinelError


class _Commands(TyperGroup):
    """The one place where an unusable path or file becomes one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except GradSentinelError as error:
            complain("error", str(error))
        except OSError as error:
            complain("error", reason_of(error))
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
        complain("error", reason_of(error))
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
