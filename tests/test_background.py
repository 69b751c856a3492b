"""Writing beside the training: in order, bounded, finished in time, and never a danger to the run."""

import _thread
import os
import subprocess
import sys
import threading
import time

import pytest

from gradsentinel.state.background import Background


def waiting_for(event, done, value):
    def work():
        assert event.wait(30)
        done.append(value)

    return work


def test_jobs_are_done_in_order_and_the_thread_goes_away():
    before = _thread._count()
    background, done = Background(max_bytes=100), []
    for number in range(20):
        assert background.submit(f"job {number}", lambda number=number: done.append(number), 1)
    assert background.finish(30)
    assert done == list(range(20))
    assert background.failures() == []
    deadline = time.monotonic() + 30
    while _thread._count() > before and time.monotonic() < deadline:  # it is about to end
        time.sleep(0.001)
    assert _thread._count() == before


def test_the_caller_does_not_wait_for_the_disk():
    background, release, done = Background(max_bytes=100), threading.Event(), []
    background.submit("slow", waiting_for(release, done, 1), 10)
    background.submit("behind", waiting_for(release, done, 2), 10)
    assert done == []
    release.set()
    assert background.finish(30)
    assert done == [1, 2]


def test_a_job_that_raises_is_reported_and_the_next_one_done(caplog):
    background, done = Background(max_bytes=100), []

    def fail():
        raise OSError(28, "No space left on device")

    background.submit("the bundle of a", fail)
    background.submit("the bundle of b", lambda: done.append("b"))
    assert background.finish(30)
    assert done == ["b"]
    (failure,) = background.failures()
    assert failure == "the bundle of a could not be written: [Errno 28] No space left on device"
    assert "the bundle of a could not be written" in caplog.text
    assert background.failures() == []


def test_no_more_than_so_much_memory_waits(caplog):
    background, release, done = Background(max_bytes=100, patience=0.0), threading.Event(), []
    assert background.submit("first", waiting_for(release, done, 1), 80)
    assert not background.submit("too much", waiting_for(release, done, 2), 30)
    assert background.submit("fits", waiting_for(release, done, 3), 20)
    assert background.failures() == [
        "too much could not be written: the disk does not keep up with what is to be written"
    ]
    release.set()
    assert background.finish(30)
    assert done == [1, 3]
    assert background.submit(
        "alone", lambda: done.append(4), 1000
    )  # nothing else waits: it has to be possible
    assert background.finish(30)
    assert done == [1, 3, 4]


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_run(caplog):
    background, release = Background(max_bytes=100), threading.Event()
    background.submit("the bundle of c", waiting_for(release, [], 1))
    assert not background.finish(0.0)
    assert "the bundle of c" in caplog.text
    release.set()
    assert background.finish(30)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_has_jobs_of_its_own():
    background, release, done = Background(max_bytes=100), threading.Event(), []
    background.submit("parent's", waiting_for(release, done, "parent"), 60)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        good = background.submit("child's", lambda: told.append("child"), 60) and background.finish(30)
        os.write(writer, b"1" if good and told == ["child"] else b"0")
        os._exit(0)
    assert os.read(reader, 1) == b"1"
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    release.set()
    assert background.finish(30)
    assert done == ["parent"]


EXITS = """
import sys, time
from pathlib import Path
from gradsentinel.state.background import Background
Background(max_bytes=100).submit("late", lambda: (time.sleep(0.3), Path(sys.argv[1]).write_text("whole")))
"""


def test_an_interpreter_that_exits_waits_for_it(tmp_path):
    subprocess.run([sys.executable, "-c", EXITS, str(tmp_path / "file")], check=True)  # noqa: S603 - our own script
    assert (tmp_path / "file").read_text() == "whole"
