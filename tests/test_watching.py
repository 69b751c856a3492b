"""`gradsentinel watch` as a person uses it."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from gradsentinel import cli
from views import runs_on_disk as disk

ON, OFF = b"\x1b[?1049h", b"\x1b[?1049l"
"""What takes a terminal to its other screen and back."""


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["watch", *map(str, arguments)], env={"COLUMNS": "120"})


@contextmanager
def terminal(*arguments):
    """Run `gradsentinel watch` on a terminal of its own; gives what it takes to use it."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-m", "gradsentinel", "watch", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    seen = bytearray()

    def until(text):
        while text not in seen:
            seen.extend(os.read(ours, 65536))  # the test's own timeout ends this if it never comes
        return bytes(seen)

    def end():
        """Read on until it has left; gives the exit code."""
        while process.poll() is None:
            if select.select([ours], [], [], 0.05)[0]:
                seen.extend(os.read(ours, 65536))
        return process.returncode

    try:
        yield process, ours, until, end
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_one_frame_for_pipes(run_dir):
    disk.write_steps(run_dir, [3.5, 2.5])
    for arguments in ((run_dir, "--once"), (run_dir,)):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.output
        assert " running " in done.stdout or " unknown " in done.stdout
        assert re.search(r"^loss +2.5 ", done.stdout, re.MULTILINE)
        assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), ("ValueError: x", 1), ("TrainingAborted: step 3", 1)], ids=str
)
def test_until_the_end_says_how_it_ended(run_dir, error, code):
    log = disk.write_steps(run_dir, [1.0])
    disk.append(log, {"event": "run_end", "step": 1, "error": error})
    assert invoke(run_dir, "--until-end").exit_code == code
    assert invoke(run_dir, "--once").exit_code == 0


def test_what_is_no_run_is_one_line(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("")
    (tmp_path / "file").write_text("")
    disk.write_steps(tmp_path / "many" / "first", [1.0])
    (tmp_path / "many" / "notes").write_text("")
    expected = {
        "missing\x1b[31m[red]": "does not exist",
        "file": "is no directory",
        "photos": "is no run directory: it has no events-rank*.jsonl and no incidents/",
        "many": "runs below it: first",
    }
    for name, why in expected.items():
        done = invoke(tmp_path / name)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert why in done.stderr
        assert "\x1b" not in done.stderr


def test_an_empty_directory_is_waited_at(tmp_path):
    done = invoke(tmp_path, "--once")
    assert done.exit_code == 0
    assert "Waiting for a run to begin" in done.stdout


def test_q_quits_and_the_last_frame_stays(run_dir):
    log = disk.write_steps(run_dir, [1.0])
    with terminal(run_dir, "--interval", "0.1") as (_, keys, until, end):
        until(b"q quits")
        disk.append(log, disk.step(1, 4.25))
        until(b"4.25")
        os.write(keys, b"\x1b[A\x1bOB")  # an arrow is no reason to leave
        disk.append(log, disk.step(2, 5.75))
        until(b"5.75")
        os.write(keys, b"\x1b[Aq")
        seen = until(OFF)
        assert seen.count(ON) == 1
        assert end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_signals_leave_as_cleanly(run_dir, how):
    disk.write_steps(run_dir, [1.0])
    with terminal(run_dir, "--interval", "0.1") as (process, _, until, end):
        until(b"q quits")
        process.send_signal(how)
        until(OFF)
        assert end() == 0


def test_it_leaves_by_itself_when_the_run_has_ended(run_dir):
    log = disk.write_steps(run_dir, [1.0])
    with terminal(run_dir, "--interval", "0.1", "--until-end") as (_, _, until, end):
        until(b"so does the end of the run")
        disk.append(log, {"event": "run_end", "step": 1, "error": "KeyError: 'x'"})
        until(OFF)
        assert end() == 1
