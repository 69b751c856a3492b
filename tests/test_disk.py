"""A disk that refuses: one line when it begins, one when it is over, and nothing cut in half."""

import errno
import itertools
import json
import os
import resource
import signal
import threading
from contextlib import contextmanager, suppress

import pytest

from gradsentinel import NanCallback, Rollback, Skip, SnapshotSaver
from gradsentinel.state.archive import ArchiveError
from gradsentinel.state.disk import Disk, is_of_the_disk, reason_of
from gradsentinel.store import EventFile, RunDirectory, write_json, write_text
from loops import Spoiler, build, make_batches, train_watched


def full():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lines(caplog, what):
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


BEGINS, OVER = "no more is said of that", "the disk takes everything again, after"


class TestWhatIsSaid:
    def test_once_when_it_begins_and_once_when_it_is_over(self, caplog):
        disk = Disk()
        for _ in range(3):
            disk.refused("the event log", full())
            disk.refused("the list", full())
        assert len(caplog.records) == 1
        assert (
            caplog.records[0]
            .getMessage()
            .startswith("the event log could not be written: No space left on device; the run goes on")
        )
        disk.taken("the event log")
        assert len(caplog.records) == 1
        assert disk.refuses_something
        disk.taken("the list")
        assert len(lines(caplog, OVER)) == 1
        assert "it refused 6 times; what was kept in memory is written now" in caplog.text
        assert not disk.refuses_something
        disk.refused("the list", full())
        assert len(lines(caplog, BEGINS)) == 2

    def test_a_second_reason_is_news(self, caplog):
        disk = Disk()
        disk.refused("the event log", full())
        disk.refused("the event log", OSError(errno.EIO, os.strerror(errno.EIO)))
        disk.refused("the list", full())
        assert [line.split(": ")[1].split(";")[0] for line in lines(caplog, BEGINS)] == [
            "No space left on device",
            "Input/output error",
        ]

    def test_what_is_missing_for_good_is_named(self, caplog):
        disk = Disk()
        for step in range(8):
            disk.refused("the states", full(), lost=f"step {step}")
        disk.taken("the states")
        assert lines(caplog, OVER)[0].endswith(
            "missing for good: step 0, step 1, step 2, step 3, step 4 and 3 more"
        )

    def test_what_was_never_refused_says_nothing(self, caplog):
        disk = Disk()
        disk.taken("anything")
        disk.retry()
        assert caplog.records == []

    def test_from_many_threads(self, caplog):
        disk, start = Disk(), threading.Barrier(8)

        def work(name):
            start.wait(30)
            for _ in range(200):
                disk.refused(name, full())

        threads = [threading.Thread(target=work, args=(f"writer {number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(caplog.records) == 1
        for number in range(8):
            disk.taken(f"writer {number}")
        assert "it refused 1600 times" in caplog.records[-1].getMessage()

    def test_a_file_is_tried_again_ever_more_rarely_until_it_is_taken(self, caplog):
        disk, tries, works, calls = Disk(), [], [False], [0]

        def write():
            tries.append(calls[0])
            if not works[0]:
                raise full()

        assert not disk.attempt("the list", write)
        for _ in range(400):
            calls[0] += 1
            disk.retry()
        assert tries[:7] == [0, 1, 3, 7, 15, 31, 63]
        assert {late - early for early, late in itertools.pairwise(tries[7:])} == {64}
        works[0] = True
        disk.retry(now=True)
        assert not disk.refuses_something
        assert len(caplog.records) == 2

    def test_other_errors_are_not_the_disks(self):
        def wrong():
            raise TypeError("not JSON")

        disk = Disk()
        with pytest.raises(TypeError):
            disk.attempt("the list", wrong)
        assert not disk.refuses_something
        error = ArchiveError("cannot write")
        error.__cause__ = full()
        assert is_of_the_disk(error)
        assert reason_of(error) == "No space left on device"
        assert not is_of_the_disk(ArchiveError("is not finite"))


# -- lines ---------------------------------------------------------------------------------------------


@contextmanager
def room_for(size):
    """No file of this process may be larger: the system takes a part of a write, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def numbers(run_dir):
    return [event["number"] for event in RunDirectory(run_dir).read_events()]


@pytest.mark.parametrize("room", range(200, 420, 7))
def test_a_line_is_there_or_not_and_comes_later(run_dir, room):
    log = RunDirectory(run_dir).events_file(0)
    file = EventFile(log)
    with room_for(room):
        for number in range(20):
            with suppress(OSError):
                file.write({"event": "step", "number": number})
        held = log.read_bytes()
        assert held.endswith(b"\n")
        assert numbers(run_dir) == list(range(20 - file.waiting))
    file.write({"event": "step", "number": 20})
    assert file.waiting == 0
    file.close()
    assert [json.loads(line)["number"] for line in log.read_text().splitlines()] == list(range(21))


def test_a_disk_that_takes_a_byte_at_a_time(run_dir, monkeypatch):
    file = EventFile(RunDirectory(run_dir).events_file(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1]))
    file.write({"event": "step", "number": 1})
    file.close()
    assert numbers(run_dir) == [1]


def test_a_part_that_cannot_be_taken_back_is_completed_later(run_dir, monkeypatch):
    log = RunDirectory(run_dir).events_file(0)
    file = EventFile(log)
    file.write({"event": "step", "number": 0})
    write, left = os.write, [5]

    def some(descriptor, data):
        if not left:
            raise full()
        return write(descriptor, data[: left.pop()])

    def stuck(descriptor, size):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", some)
        patch.setattr(os, "ftruncate", stuck)
        for number in (1, 2):
            with pytest.raises(OSError, match="No space left"):
                file.write({"event": "step", "number": number})
    assert numbers(run_dir) == [0]
    file.write({"event": "step", "number": 3})
    file.close()
    assert numbers(run_dir) == [0, 1, 2, 3]
    assert log.read_bytes().count(b"\n") == 4


def test_so_many_lines_are_kept_and_no_more(run_dir, monkeypatch):
    monkeypatch.setattr("gradsentinel.store._MOST_WAITING", 10)
    file = EventFile(RunDirectory(run_dir).events_file(0))
    with room_for(1):
        for number in range(25):
            with pytest.raises(OSError, match="File too large"):
                file.write({"event": "step", "number": number})
    assert (file.waiting, file.lost) == (10, 15)
    file.write({"event": "step", "number": 25})
    file.close()
    assert numbers(run_dir) == [0, *range(17, 26)]


def test_a_file_that_could_not_be_made_is_made_later(tmp_path):
    (tmp_path / "run").write_text("in the way")
    file = EventFile(tmp_path / "run" / "events-rank0.jsonl")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        file.write({"event": "step", "number": 0})
    (tmp_path / "run").unlink()
    file.write({"event": "step", "number": 1})
    file.close()
    assert numbers(tmp_path / "run") == [0, 1]


@pytest.mark.parametrize("write", [write_text, write_json])
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, write):
    path = tmp_path / "list.json"
    path.write_text("before")
    with room_for(1000), pytest.raises(OSError, match="File too large"):
        write(path, "y" * 5000)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["list.json"]


# -- a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_run_whose_disk_is_full_for_a_while(run_dir, monkeypatch, caplog, code):
    """Everything that writes is refused from step 6 to step 13, then the disk has room again."""
    refuses = [False]
    write, sync, make = os.write, os.fsync, os.mkdir

    def unless_full(call):
        def tried(first, *others, **named):
            if refuses[0]:
                raise OSError(code, os.strerror(code))
            return call(first, *others, **named)

        return tried

    monkeypatch.setattr(os, "write", unless_full(write))
    monkeypatch.setattr(os, "fsync", unless_full(sync))
    monkeypatch.setattr(os, "mkdir", unless_full(make))
    run = build()
    callbacks = [
        NanCallback(),
        Skip(remember=True),
        Rollback(every=3, confirm_after=1, on_disk=2),
        SnapshotSaver(level="light"),
    ]
    steps = 40
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        spoiler = Spoiler("loss", frozenset({8}))
        for done in train_watched(run, sentinel, make_batches(steps), spoil=spoiler):
            sentinel._watch.run.states.finish()
            sentinel._watch.bus.callbacks  # noqa: B018 - the bus is still there
            refuses[0] = 6 <= done < 13
    assert sentinel.applied_steps == steps - 1
    assert len(lines(caplog, BEGINS)) == 1
    assert len(lines(caplog, OVER)) == 1
    assert os.strerror(code) in lines(caplog, BEGINS)[0]
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if "switched off" in record.getMessage()]
    # What was kept is there now.
    directory = RunDirectory(run_dir)
    events = list(directory.read_events())
    assert events[0]["event"] == "run_start"
    assert events[-1]["event"] == "run_end"
    (incident,) = [one for one in directory.read_incidents() if one.action.label == "skip"]
    assert [event["id"] for event in events if event["event"] == "recovery"] == [incident.id]
    assert incident.outcome == "skipped"
    skipped = json.loads((run_dir / "skipped-batches.json").read_text())
    assert len(skipped["batches"]) == 1
    with build().sentinel([NanCallback(), Rollback()], run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count >= steps - 5
    assert not list(run_dir.rglob("*.tmp"))
    assert not list(run_dir.rglob(".tmp-*"))
