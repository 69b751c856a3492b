"""`gradsentinel watch`: a run in the terminal, while it goes on."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.text import Text

from gradsentinel.cli.application import app
from gradsentinel.cli.output import console
from gradsentinel.errors import StoreError

if TYPE_CHECKING:
    from gradsentinel.views.run_files import RunFiles

_OVER = frozenset({"ended", "failed", "aborted"})
_SLICE = 0.1
"""Seconds after which a signal is noticed at the latest."""
_QUIT = frozenset("qQ\x03\x04\x1b")
_SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[ -/]*[@-~]")
"""What a terminal sends for an arrow."""
_HELP = (
    "Watch a run while it goes on: rates, last numbers, incidents, budgets, snapshots.\n\n"
    "q or Ctrl-C quits; the run is only read. Without a terminal one frame is printed. With --until-end the "
    "exit code is 0 if the run has ended well, and 1 if it failed or was aborted."
)


@app.command(help=_HELP)
def watch(
    run_dir: Annotated[Path, typer.Argument(help="The directory that run_dir= named.", show_default=False)],
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Seconds between two frames.")
    ] = 1.0,
    until_end: Annotated[bool, typer.Option("--until-end", help="Leave when the run has ended.")] = False,
) -> None:
    """Watch a run while it goes on: rates, last numbers, incidents, budgets, snapshots."""
    from gradsentinel.views.run_files import RunFiles  # noqa: PLC0415 - imports torch

    _check(run_dir)
    run = RunFiles(Path(os.path.realpath(run_dir)), str(run_dir))
    out = console()
    if once or not out.is_terminal:
        if until_end and not once:
            _wait_for_end(run, interval)
        _print_once(run, out)
    else:
        _follow(run, out, interval, until_end=until_end)
    if until_end and run.state in {"failed", "aborted"}:
        raise typer.Exit(1)


def _check(run_dir: Path) -> None:
    """Raise StoreError unless this is a run directory, or an empty one where a run may begin."""
    from gradsentinel.views.files import Files  # noqa: PLC0415 - imports torch
    from gradsentinel.views.search import find_runs, is_run  # noqa: PLC0415 - imports torch

    if not run_dir.exists():
        raise StoreError(f"{run_dir} does not exist; name the directory that run_dir= names")
    if not run_dir.is_dir():
        raise StoreError(f"{run_dir} is no directory; name the directory that run_dir= names")
    files = Files(run_dir)
    os.listdir(run_dir)  # noqa: PTH208 - raises what the system has against it
    if is_run(files, "") or not any(not name.startswith(".") for name in files.entries()):
        return
    below = find_runs(files, most=4)
    hint = f"; runs below it: {', '.join(below[:3])}{' and more' * (len(below) > 3)}" if below else ""
    raise StoreError(f"{run_dir} is no run directory: it has no events-rank*.jsonl and no incidents/{hint}")


def _print_once(run: RunFiles, out: Console) -> None:
    """Print what is to be seen now, once all of the log has been read."""
    from gradsentinel.views.live import Pace, frame  # noqa: PLC0415 - imports torch

    while True:
        with run.looked_at():
            if run.share >= 1.0:
                break
    with run.looked_at():
        out.print(frame(run, Pace(), width=out.width, ascii_only=out.options.ascii_only))


def _wait_for_end(run: RunFiles, interval: float) -> None:
    while True:
        with run.looked_at():
            if run.share >= 1.0 and run.state in _OVER:
                return
        time.sleep(interval)


def _follow(run: RunFiles, out: Console, interval: float, *, until_end: bool) -> None:
    """Draw frame after frame on the terminal's other screen until somebody has seen enough."""
    from rich.live import Live  # noqa: PLC0415 - only this command needs it

    from gradsentinel.views.live import Pace, frame  # noqa: PLC0415 - imports torch

    pace = Pace()
    ascii_only = out.options.ascii_only
    keys = "q quits" + (", and so does the end of the run" if until_end else "")

    def draw() -> Group:
        with run.looked_at():
            width, height = out.size
            drawn = frame(run, pace, width=width, height=height, ascii_only=ascii_only)
        return Group(drawn, Text(f"\n{keys}; {time.strftime('%H:%M:%S')}", "dim"))

    with (
        _signals() as asked,
        _keyboard() as pressed,
        Live(draw(), console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while not (until_end and run.share >= 1.0 and run.state in _OVER):
            wait = 0.05 if run.share < 1.0 else interval  # a long log is read in slices
            if _told_to_quit(pressed, asked, wait):
                break
            live.update(draw(), refresh=True)
    _print_once(run, out)  # the last frame stays


def _told_to_quit(pressed: Callable[[float], str], asked: list[int], seconds: float) -> bool:
    """Wait so long for a key or a signal; returns True if it means to quit."""
    deadline = time.monotonic() + seconds
    while not asked and (left := deadline - time.monotonic()) > 0:
        if not _QUIT.isdisjoint(pressed(min(left, _SLICE))):
            return True
    return bool(asked)


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Have keys come one by one and unseen; gives a function that waits for one, at most so many seconds."""
    try:
        import termios  # noqa: PLC0415 - not on every system
        import tty  # noqa: PLC0415 - likewise

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, AttributeError):  # no terminal to read from: Ctrl-C is left
        yield _only_wait
        return
    except termios.error:
        yield _only_wait
        return
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _key(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _key(descriptor: int, seconds: float) -> str:
    """Return the keys that were pressed, if any were, without arrows and their like."""
    readable, _, _ = select.select([descriptor], [], [], seconds)
    if not readable:
        return ""
    typed = os.read(descriptor, 32)
    if not typed:  # the terminal is gone
        return "q"
    return _SEQUENCE.sub("", typed.decode(errors="replace"))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Have signals that end a process, Ctrl-C among them, only be noted, in the list that this gives.

    Were they to interrupt a frame that is being drawn, the terminal could be left as it is then.
    """
    noted: list[int] = []
    wanted = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def note(number: int, _: object) -> None:
        noted.append(number)

    before = {one: signal.signal(one, note) for one in wanted}
    try:
        yield noted
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
