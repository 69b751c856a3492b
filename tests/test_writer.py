"""The process that writes beside the training: the same files, the same errors, and never a danger."""

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from gradsentinel import NanCallback, Rollback
from gradsentinel.state import saved_states, scribe, writer_program
from gradsentinel.state import writer as writer_module
from gradsentinel.state.archive import ArchiveError, read_archive, write_archive
from gradsentinel.state.archive_files import checksum, octets, write_file
from gradsentinel.state.shared import SharedMemory
from gradsentinel.state.writer import KeptWriter, NoWriter, Reliance, Writer, WriterGone
from loops import build, make_batches


def state():
    wide = torch.arange(4_000_000, dtype=torch.float32).reshape(1000, 4000)
    return {
        "whole": wide,
        "turned": wide.t(),  # has to be copied to be written
        "half": torch.full((3, 5), 0.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        **{f"small {number}": torch.full((7,), float(number)) for number in range(600)},
    }


def contents(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def test_what_it_writes_is_what_a_thread_writes(tmp_path):
    write_archive(tmp_path / "thread", state(), {"step": 3}, kind="test", max_file_bytes=1 << 24)
    with Writer() as writer:
        write_archive(
            tmp_path / "process",
            state(),
            {"step": 3},
            kind="test",
            max_file_bytes=1 << 24,
            verify=True,
            writer=writer,
        )
    assert contents(tmp_path / "process") == contents(tmp_path / "thread")
    found, _ = read_archive(tmp_path / "process", kind="test")
    assert all(torch.equal(found[name], value) for name, value in state().items())


def test_it_takes_pieces_of_any_size_and_none_at_all(tmp_path):
    pieces = [b"", b"x", memoryview(b"y" * 3_000_000), b"z" * 1_048_576]
    with Writer() as writer:
        facts = writer.write_file(tmp_path / "some", pieces)
        nothing = writer.write_file(tmp_path / "nothing", [])
        assert writer.checksum(tmp_path / "some") == facts["crc32"] == checksum(tmp_path / "some")
    assert facts == write_file(tmp_path / "same", pieces)
    assert nothing == {"bytes": 0, "crc32": "00000000"}
    assert (tmp_path / "some").read_bytes() == (tmp_path / "same").read_bytes()


def test_copies_live_until_they_are_handed_over():
    view = octets(torch.full((1000,), 3.0))  # nobody else keeps the tensor
    other = [torch.full((1000,), 5.0) for _ in range(50)]
    assert bytes(view) == octets(torch.full((1000,), 3.0)).tobytes()
    assert len(other) == 50


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_what_it_meets_is_raised_here(tmp_path, size):
    (tmp_path / "there").touch()
    with Writer() as writer, pytest.raises(FileExistsError):
        writer.write_file(tmp_path / "there", [b"x" * size])
    with Writer() as writer, pytest.raises(FileNotFoundError):
        writer.checksum(tmp_path / "missing")


def test_a_disk_that_is_full_half_way_through(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, hard))
    try:
        writer = Writer()  # it inherits the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with writer, pytest.raises(ArchiveError, match=r"^cannot write the archive .*: File too large$"):
        write_archive(tmp_path / "a", state(), {}, kind="test", verify=True, writer=writer)
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_does_not_give_back_gets_no_name(tmp_path):
    class Forgetful(Writer):
        def checksum(self, path):
            with path.open("r+b") as file:
                file.write(b"\xff")
            return super().checksum(path)

    with Forgetful() as writer, pytest.raises(ArchiveError, match="is not read back as written"):
        write_archive(tmp_path / "a", state(), {}, kind="test", verify=True, writer=writer)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_is_told_from_a_disk_that_refuses(tmp_path):
    with Writer() as writer:
        writer._process.kill()
        with pytest.raises(WriterGone):
            write_archive(tmp_path / "a", state(), {}, kind="test", verify=True, writer=writer)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_was_forked_meanwhile_does_not_keep_it(tmp_path):
    reader, writing = os.pipe()
    child = 0

    def end(_, __):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    try:
        with Writer() as writer:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
                child = os.fork()
            if not child:  # like a worker of a DataLoader, which lives for an epoch
                os.close(writing)
                os.read(reader, 1)
                os._exit(0)
            assert writer.write_file(tmp_path / "a", [b"abc"])["bytes"] == 3
        assert writer._process.returncode == 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.close(writing)
        os.close(reader)
        os.waitpid(child, 0)


def test_one_that_is_left_half_way_through_is_ended(tmp_path):
    def pieces():
        yield b"abc"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Writer() as writer:
        writer.write_file(tmp_path / "a", pieces())
    assert writer._process.returncode == -signal.SIGKILL


def test_signals_that_are_meant_for_the_training_do_not_stop_it(tmp_path):
    with Writer() as writer:
        writer.write_file(tmp_path / "first", [b"x"])  # it is up
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            writer._process.send_signal(number)
        assert writer.write_file(tmp_path / "second", [b"y"])["bytes"] == 1


def test_a_file_system_that_takes_nothing_past_its_cache(tmp_path, monkeypatch):
    """One that says so only when something is written, or read."""
    refused = []

    def refuse(call):
        def made(descriptor, what):
            if descriptor > 2 and writer_program.is_past_the_cache(descriptor):
                refused.append(call.__name__)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return call(descriptor, what)

        return made

    data = os.urandom(3_500_000)
    told = iter([len(data) | 1 << 63, 0, 0, 0])
    monkeypatch.setattr(writer_program, "take_number", lambda: next(told))
    monkeypatch.setattr(os, "write", refuse(os.write))
    monkeypatch.setattr(os, "readv", refuse(os.readv))
    buffer, path = memoryview(bytearray(1 << 20)), os.fsencode(tmp_path / "a")
    facts = writer_program.write_file(path, buffer, [memoryview(data)])
    if not refused:
        pytest.skip("this one never does")
    assert facts["crc32"] == writer_program.checksum(path, buffer)["crc32"]
    assert (tmp_path / "a").read_bytes() == data
    assert refused == ["write", "readv"]


@pytest.mark.parametrize("missing", ["executable", "frozen", "writev"])
def test_where_there_can_be_none_it_says_so(monkeypatch, missing):
    if missing == "executable":
        monkeypatch.setattr(sys, "executable", "")
    elif missing == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.delattr(os, "writev")
    with pytest.raises(NoWriter):
        Writer()


def life(run_dir, steps=6):
    run = build()
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=1)]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(make_batches(steps)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
        sentinel._watch.run.states.finish()
        failures = sentinel._watch.run.states.failures()
    return failures, sorted(path.name for path in (run_dir / "snapshots").iterdir())


def test_a_run_whose_states_are_large_uses_it(tmp_path, monkeypatch):
    started = []

    class Counted(Writer):
        def __init__(self, memory=None):
            super().__init__(memory)
            started.append(self._process)

    monkeypatch.setattr(scribe, "_FOR_A_PROCESS", 0)
    monkeypatch.setattr(writer_module, "Writer", Counted)
    failures, names = life(tmp_path / "run")
    assert failures == []
    assert len(started) == 1, "it is kept from one state to the next"
    assert started[0].returncode == 0
    assert len(names) == 1
    with build().sentinel([NanCallback(), Rollback()], run_dir=tmp_path / "run", resume="auto") as sentinel:
        assert sentinel.step_count == int(names[0].split("-")[1])


def test_a_run_goes_on_without_it(tmp_path, monkeypatch, caplog):
    def none(memory):
        raise NoWriter("this program is not run by a Python that could be started again")

    monkeypatch.setattr(scribe, "_FOR_A_PROCESS", 0)
    monkeypatch.setattr(writer_module, "Writer", none)
    failures, names = life(tmp_path / "run")
    assert failures == []
    assert len(names) == 1
    assert caplog.text.count("snapshots are written by a thread from now on") == 1


@pytest.mark.parametrize("strike", ["when it starts", "in the middle"])
def test_one_that_is_lost_is_replaced_and_not_for_ever(tmp_path, monkeypatch, caplog, strike):
    """The states are those of a thread meanwhile; the third time waits longer than the second."""
    asked, written, doomed = [], [], {0, 1, 4, 8}

    class Mortal(Writer):
        def __init__(self, memory=None):
            asked.append(len(written))
            if len(written) in doomed and strike == "when it starts":
                raise WriterGone("no process can be started: [Errno 11] Resource temporarily unavailable")
            super().__init__(memory)

        def write_file(self, path, pieces):
            if len(written) in doomed:
                self._process.kill()
            return super().write_file(path, pieces)

        @property
        def sees_all(self):  # so that one is started for each state
            return strike == "in the middle"

    class Counted(scribe.Scribe):
        def write_beside(self, snapshot, *, there):
            super().write_beside(snapshot, there=there)
            written.append(snapshot.step)

    monkeypatch.setattr(scribe, "_FOR_A_PROCESS", 0)
    monkeypatch.setattr(writer_module, "Writer", Mortal)
    monkeypatch.setattr(saved_states, "Scribe", Counted)
    failures, names = life(tmp_path / "run", steps=30)
    assert failures == []
    assert len(names) == 1
    # Lost with states 0, 1, 4 and 8; of the second loss state 2, of the third states 5 to 7 are left out.
    assert asked == ([0, 1, 3, 4, 8] if strike == "when it starts" else [0, 1, 3, 8])
    assert len(written) == 14
    assert caplog.text.count("then another process is started") == 1
    assert caplog.text.count("snapshots are written by a thread from now on") == 1


def test_what_was_lost_long_ago_does_not_count():
    reliance = Reliance()
    for _ in range(3):
        reliance.lost(WriterGone("killed"))
    for _ in range(3):
        assert not reliance
        reliance.left_out()
    for _ in range(50):
        assert reliance
        reliance.kept()
    reliance.lost(WriterGone("killed"))
    assert reliance


def test_a_disk_that_refuses_the_process_is_told_as_ever(tmp_path, monkeypatch):
    class Full(Writer):
        def write_file(self, path, pieces):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scribe, "_FOR_A_PROCESS", 0)
    monkeypatch.setattr(writer_module, "Writer", Full)
    run = build()
    with run.sentinel(
        [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=1)], run_dir=tmp_path
    ) as sentinel:
        for batch in sentinel.steps(make_batches(8)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert any("No space left on device" in incident.message for incident in sentinel.incidents)
    assert list((tmp_path / "snapshots").iterdir()) == []


def keep(kept, path, memory=None, pieces=(b"abc",)):
    """Write a file with the kept process, and return which one that was."""

    def work(process):
        process.write_file(path, pieces)
        return process

    return kept.do(work, memory)


def test_one_that_is_kept_is_started_again_for_memory_that_it_does_not_see(tmp_path):
    kept, memory = KeptWriter(), SharedMemory()
    memory.tensor_like(torch.empty(1_000_000))
    first = keep(kept, tmp_path / "a", memory)
    assert keep(kept, tmp_path / "b", memory) is first
    late = memory.tensor_like(torch.empty(30_000_000)).fill_(3.0)  # a segment of its own
    second = keep(kept, tmp_path / "c", memory, [late])
    assert second is not first
    assert first._process.returncode == 0
    assert (tmp_path / "c").read_bytes() == octets(late).tobytes()
    kept.close()
    assert second._process.returncode == 0


def test_one_that_is_kept_ends_with_whoever_kept_it(tmp_path):
    kept = KeptWriter()
    process = keep(kept, tmp_path / "a")._process
    del kept
    gc.collect()
    assert process.returncode == -signal.SIGKILL


def test_a_forked_child_leaves_its_parents_process_alone_and_has_its_own(tmp_path):
    kept = KeptWriter()
    first = keep(kept, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            code = int(keep(kept, tmp_path / "b")._process.pid == first._process.pid)
            kept.close()
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "b").read_bytes() == b"abc"
    assert keep(kept, tmp_path / "c") is first
    kept.close()


WORKER = """
import os, sys, time
from gradsentinel.state.writer import Writer
writer = Writer()
writer.write_file(__import__("pathlib").Path(sys.argv[1]), [b"abc"])
if not os.fork():  # a worker that outlives the training, and holds the pipe open
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(writer._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_ends_when_the_training_is_killed_and_a_worker_of_it_lives_on(tmp_path):
    killed = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", WORKER, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    process = int(killed.stdout)
    deadline = time.monotonic() + 45
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(process)


ORPHAN = """
import os, sys, torch
from pathlib import Path
from gradsentinel.state.archive import write_archive
from gradsentinel.state.writer import Writer
class Told(Writer):
    def _put(self, pieces):
        super()._put(pieces[:1] if len(pieces) > 2 else pieces)
        if len(pieces) > 2:
            print(self._process.pid, flush=True)
            os.kill(os.getpid(), 9)
with Told() as writer:
    state = {str(n): torch.ones(100_000) for n in range(20)}
    write_archive(Path(sys.argv[1]), state, {}, kind="test", verify=True, writer=writer)
"""


def is_running(process):
    """Whether a process, which may be nobody's child, has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def test_it_ends_when_the_training_is_killed_and_gives_nothing_a_name(tmp_path):
    killed = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", ORPHAN, str(tmp_path / "a")], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    process = int(killed.stdout)
    deadline = time.monotonic() + 30
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(process)
    assert all(entry.name.startswith(".tmp-") for entry in tmp_path.iterdir())
