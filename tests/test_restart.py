"""Restarts: one run at a time in a directory, and on from the last known-good state."""

import contextlib
import errno
import gc
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradsentinel.state.lock as lock_module
from gradsentinel import (
    Action,
    ArchiveError,
    BeforeClip,
    ConfigurationError,
    Finding,
    Kind,
    NanCallback,
    Rollback,
    Sentinel,
    SnapshotMismatch,
    TrainingAborted,
)
from gradsentinel.state import scribe
from gradsentinel.state.archive import read_archive, write_archive
from gradsentinel.state.lock import RunLock
from gradsentinel.state.saved_states import SNAPSHOT_KIND
from loops import Spoiler, build, differences, fingerprint, finish, generators, make_batches, train_watched

FULL = {"random": True, "scheduler": "cosine", "ema": True, "max_norm": 1.0}
FORK = multiprocessing.get_context("fork")


def keep(**settings):
    return [NanCallback(), Rollback(**{"every": 3, "confirm_after": 1, "on_disk": 2, **settings})]


def everything(run):
    return fingerprint({**run.state(), "generators": generators()})


# -- one run at a time -----------------------------------------------------------------------------


def hold(directory, ready, rank=0):
    lock = RunLock.take(directory, rank)
    ready.send(os.getpid())
    time.sleep(60)
    lock.release()


@pytest.fixture
def other(run_dir):
    """Another process that uses the run directory."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(run_dir, there))
    process.start()
    assert here.poll(30)
    here.recv()
    yield process
    process.kill()
    process.join()


def test_a_second_process_is_refused_and_told_by_whom(run_dir, other):
    run = build()
    with pytest.raises(ConfigurationError, match=rf"in use by process {other.pid} on .+ since 20"):
        run.sentinel(keep(), run_dir=run_dir)


def test_a_killed_process_locks_nothing(run_dir, other):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    with build().sentinel(keep(), run_dir=run_dir) as sentinel:
        assert sentinel.run_dir == run_dir


def test_each_rank_has_a_lock_of_its_own(run_dir, other):
    RunLock.take(run_dir, 1).release()


def test_a_worker_that_was_forked_does_not_hold_on_to_it(run_dir):
    """As the workers of a DataLoader do when their trainer is killed."""
    here, there = FORK.Pipe()

    def trainer():
        lock = RunLock.take(run_dir, 7)
        worker = FORK.Process(target=time.sleep, args=(60,))
        worker.start()
        there.send(worker.pid)
        os.kill(os.getpid(), signal.SIGKILL)
        lock.release()

    process = FORK.Process(target=trainer)
    process.start()
    assert here.poll(30)
    worker = here.recv()
    process.join()
    try:
        os.kill(worker, 0)  # it is still there
        RunLock.take(run_dir, 7).release()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_second_sentinel_of_the_same_process_is_refused_until_the_first_is_closed(run_dir):
    run = build()
    first = run.sentinel(keep(), run_dir=run_dir)
    with pytest.raises(ConfigurationError, match="in use by another Sentinel of this process"):
        run.sentinel(keep(), run_dir=run_dir)
    first.close()
    run.sentinel(keep(), run_dir=run_dir).close()


def test_one_that_nobody_refers_to_is_over(run_dir):
    run = build()
    run.sentinel(keep(), run_dir=run_dir)
    gc.collect()
    run.sentinel(keep(), run_dir=run_dir).close()


def test_an_aborted_run_gives_the_directory_back(run_dir):
    run = build()
    sentinel = run.sentinel([NanCallback(), Rollback(max_rollbacks=0, after=1)], run_dir=run_dir)
    with pytest.raises(TrainingAborted):
        finish(train_watched(run, sentinel, make_batches(4), spoil=Spoiler("loss", frozenset({2}))))
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as again:
        assert again.step_count == 0


class NoLocks:
    """A file system that has none."""

    LOCK_EX, LOCK_NB = 1, 2

    @staticmethod
    def lockf(descriptor, flags):
        raise OSError(errno.ENOLCK, "No locks available")


def test_without_file_locks_the_process_decides(run_dir, other, monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", NoLocks)
    with pytest.raises(ConfigurationError, match=f"process {other.pid}"):
        RunLock.take(run_dir, 0)
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    RunLock.take(run_dir, 0).release()


@pytest.mark.parametrize("locks", [lock_module.fcntl, NoLocks, None], ids=["locks", "no locks", "no fcntl"])
def test_a_process_of_another_host(run_dir, monkeypatch, locks, caplog):
    """With locks the system knows that it is gone; without them only its job can tell."""
    monkeypatch.setattr(lock_module, "fcntl", locks)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    run_dir.mkdir()
    entry = {"schema": 1, "pid": 4242, "host": "node9", "token": "0badcafe", "time": "2026-01-01T00:00:00Z"}
    file = run_dir / ".lock-rank0"
    file.write_text(json.dumps({**entry, "job": "torchrun 6"}))
    if locks is lock_module.fcntl and locks is not None and locks is not NoLocks:
        RunLock.take(run_dir, 0).release()
        assert "was not given back by process 4242 on node9" in caplog.text
    else:
        with pytest.raises(ConfigurationError, match=r"process 4242 on node9 .+ delete .+\.lock-rank0"):
            RunLock.take(run_dir, 0)
    file.write_text(json.dumps({**entry, "job": "torchrun 7"}))  # torchrun has ended it before it started us
    RunLock.take(run_dir, 0).release()


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b'{"pid": "x"}'])
def test_a_lock_file_that_says_nothing(run_dir, content, monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", NoLocks)
    run_dir.mkdir()
    (run_dir / ".lock-rank0").write_bytes(content)
    RunLock.take(run_dir, 0).release()


# -- going on --------------------------------------------------------------------------------------


class Records(Dataset):
    """With an augmentation that draws from the global generators."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(6, generator=generator) + 0.01 * torch.rand(()) + 0.01 * float(np.random.rand()),  # noqa: NPY002
            "y": torch.randint(4, (), generator=generator),
        }


class Stream(IterableDataset):
    def __iter__(self):
        return (Records()[index] for index in range(40))


class Own:
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def __init__(self):
        self.order, self.position, self.epoch = list(range(10)), 0, 0

    def __len__(self):
        return 10

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield make_batches(10, seed=self.epoch)[self.position - 1]
        self.position, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch, "order": torch.tensor(self.order)}

    def load_state_dict(self, state):
        self.position, self.epoch = state["position"], state["epoch"]


LOADERS = {
    "shuffled": lambda: DataLoader(Records(), batch_size=4, shuffle=True),
    "shuffled by its own generator": lambda: DataLoader(
        Records(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: make_batches(10),
    "with a state": Own,
}


def life(run, loader, run_dir, *, until=None, epochs=3, **settings):
    """Train in epochs, resuming what is there; stop in the middle after so many steps of this life."""
    with run.sentinel(keep(**settings), run_dir=run_dir, resume="auto") as sentinel:
        first = sentinel.step_count
        for _ in range(sentinel.data_position["epoch"], epochs):
            for _ in train_watched(run, sentinel, loader):
                if until is not None and sentinel.step_count - first >= until:
                    return first
    return first


@pytest.mark.slow
@pytest.mark.parametrize("until", [1, 5, 10, 11, 17])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_ends_as_if_it_had_never_stopped(kind, until, run_dir):
    """Bit for bit, random draws of model and data included."""
    reference = build(**FULL)
    life(reference, LOADERS[kind](), run_dir.with_name("reference"))
    expected = everything(reference)
    run = build(**FULL)
    life(run, LOADERS[kind](), run_dir, until=until)
    again = build(**FULL)
    resumed_at = life(again, LOADERS[kind](), run_dir)
    assert resumed_at == (until - 1) // 3 * 3
    assert everything(again) == expected


def test_accumulation_and_the_last_short_window(run_dir):
    settings = {**FULL, "accumulate": 3}
    reference = build(**settings)
    life(reference, make_batches(10), run_dir.with_name("reference"))
    run = build(**settings)
    life(run, make_batches(10), run_dir, until=7)
    again = build(**settings)
    assert life(again, make_batches(10), run_dir) == 6
    assert differences(again.state(), reference.state()) == []


class Zoo(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.linear, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.tensor([1.0, math.inf, 2.0, 3.0]), requires_grad=False)
        self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4,), -math.inf))
        self.register_buffer("positions", torch.arange(4).expand(3, 4))
        self.register_buffer("absent", None)

    def forward(self, indices):
        x = self.norm(self.tied(self.linear(self.embedding(indices).mean(1))))
        y = x * self.complex.real + x * self.narrow.float() + x * self.wide.float()
        return y.square().mean() + 0.01 * self.complex.imag.square().sum() + self.empty.sum()


def zoo_life(run_dir, until):
    torch.manual_seed(0)
    model = Zoo()
    dense = [p for name, p in model.named_parameters() if p.requires_grad and "embedding" not in name]
    sparse = list(model.embedding.parameters())
    optimizers = [torch.optim.SparseAdam(sparse, 1e-2), torch.optim.Adam(dense, 1e-2)]
    generator = torch.Generator().manual_seed(3)
    data = [torch.randint(0, 10, (6, 3), generator=generator) for _ in range(12)]
    with Sentinel(model, optimizers, callbacks=keep(), run_dir=run_dir, resume="auto") as sentinel:
        first = sentinel.step_count
        for batch in sentinel.steps(data):
            sentinel.backward(model(batch))
            sentinel.step(1.0)
            if sentinel.step_count == until:
                break
    assert sentinel.incidents == ()
    return first, fingerprint([model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]])


def test_parameters_of_every_kind_and_two_optimizers(run_dir):
    _, expected = zoo_life(run_dir.with_name("reference"), 12)
    zoo_life(run_dir, 8)
    assert zoo_life(run_dir, 12) == (6, expected)


def test_it_is_told_where_it_goes_on(run_dir, caplog):
    life(build(), make_batches(10), run_dir, until=14)
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == 12
        assert sentinel.data_position == {"epoch": 1, "batch": 2, "batches": 12}
    assert f"goes on from step 12, which was saved in {run_dir} (epoch 1, batch 2)" in caplog.text


def test_nothing_to_resume_is_a_fresh_start(run_dir):
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == 0
        assert sentinel.data_position == {"epoch": 0, "batch": 0, "batches": 0}


def test_a_path_takes_that_one(run_dir):
    life(build(), make_batches(20), run_dir, epochs=1)
    older, newer = sorted((run_dir / "snapshots").iterdir())
    with build().sentinel(keep(), run_dir=run_dir, resume=older) as sentinel:
        assert sentinel.step_count == int(older.name.split("-")[1]) < int(newer.name.split("-")[1])


@pytest.mark.parametrize("setting", ["latest", "nowhere/at/all"])
def test_a_setting_that_is_neither(run_dir, setting):
    with pytest.raises(ConfigurationError, match="give 'auto', or the directory of a saved state"):
        build().sentinel(keep(), run_dir=run_dir, resume=setting)


def test_what_callbacks_remember_comes_along(run_dir):
    run = build()
    with run.sentinel(keep(), run_dir=run_dir) as sentinel:
        spoiler = Spoiler("loss", frozenset({1}))
        finish(train_watched(run, sentinel, make_batches(10), spoil=spoiler))
        spent = [callback._budget.state_dict() for callback in sentinel._watch.bus.responders()[:1]]
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert [callback._budget.state_dict() for callback in sentinel._watch.bus.responders()[:1]] == spent
        assert spent == [{"spent": [1]}]
        assert sentinel._watch.run.iteration == 9


@pytest.mark.expects_swallowed
def test_a_callback_that_does_not_take_its_memory_back_starts_anew(run_dir, caplog):
    class Forgetful(NanCallback):
        def state_dict(self):
            return {"seen": 3}

        def load_state_dict(self, state):
            raise ValueError("what is this?")

    for _ in range(2):
        run = build()
        with run.sentinel([Forgetful(), *keep()], run_dir=run_dir, resume="auto") as sentinel:
            finish(train_watched(run, sentinel, make_batches(9), spoil=Spoiler("loss", frozenset({1}))))
        assert len(sentinel.incidents) == 1, "it must go on watching"
    assert "Forgetful does not take back what it remembered" in caplog.text


def test_the_states_of_an_earlier_run_are_never_the_newest_again(run_dir, caplog):
    """Started afresh in the same directory, and then resumed: that goes on with the second run."""
    life(build(), make_batches(20), run_dir, epochs=1)
    second = build(optimizer="adamw")
    with second.sentinel(keep(), run_dir=run_dir) as sentinel:
        assert sentinel.step_count == 0
        finish(train_watched(second, sentinel, make_batches(4, seed=3)))
    assert "this one starts afresh; resume='auto' goes on from the newest" in caplog.text
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == 3


def test_after_a_rollback_that_went_further_back_a_restart_goes_on_from_there(run_dir):
    run, rollback = build(), Rollback(every=2, confirm_after=1, after=1, on_disk=3, keep=5)
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        spoiler = Spoiler("loss", frozenset({9, 10}))
        for done in train_watched(run, sentinel, make_batches(14), spoil=spoiler):
            if done == 11:
                break
        back = sentinel.step_count
        expected = fingerprint(run.state())
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["rolled_back"] * 2
    again = build()
    with again.sentinel([NanCallback()], run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == back
        assert fingerprint(again.state()) == expected


# -- what is on disk may be damaged, foreign or missing --------------------------------------------


def test_a_damaged_state_is_passed_over_and_set_aside(run_dir, caplog):
    life(build(), make_batches(20), run_dir, epochs=1)
    older, newer = sorted((run_dir / "snapshots").iterdir())
    data = bytearray((newer / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (newer / "state.safetensors").write_bytes(data)
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == int(older.name.split("-")[1])
    assert "cannot be used: the archive" in caplog.text
    assert (run_dir / "snapshots" / f"damaged-{newer.name}").is_dir()


def test_if_none_can_be_read_it_does_not_quietly_start_over(run_dir):
    life(build(), make_batches(5), run_dir, epochs=1)
    for path in (run_dir / "snapshots").iterdir():
        (path / "state.safetensors").write_bytes(bytes((path / "state.safetensors").stat().st_size))
    with pytest.raises(ArchiveError, match="does not match its checksum"):
        build().sentinel(keep(), run_dir=run_dir, resume="auto")


def test_a_model_that_has_changed_is_told_and_left_untouched(run_dir):
    life(build(), make_batches(5), run_dir, epochs=1)
    run = build()
    run.model.head = nn.Linear(16, 5)
    run.optimizers = [torch.optim.AdamW(run.model.parameters())]
    before = fingerprint(run.state())
    with pytest.raises(SnapshotMismatch, match=r"'head.weight' has shape \(5, 16\)"):
        run.sentinel(keep(), run_dir=run_dir, resume="auto")
    assert fingerprint(run.state()) == before


def test_states_of_another_number_of_ranks_are_no_fresh_start(run_dir):
    life(build(), make_batches(5), run_dir, epochs=1)
    (path,) = (run_dir / "snapshots").iterdir()
    state, meta = read_archive(path, kind=SNAPSHOT_KIND)
    write_archive(
        path.with_name("step-000000003-rank1"), state, {**meta, "world_size": 2}, kind=SNAPSHOT_KIND
    )
    path.rename(path.with_name("elsewhere"))
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == 0  # of this rank there is none
    write_archive(path, state, {**meta, "world_size": 2}, kind=SNAPSHOT_KIND)
    (path.with_name("step-000000003-rank1")).rename(path.with_name("gone"))
    with pytest.raises(ArchiveError, match="saved by 2 ranks, this job has 1"):
        build().sentinel(keep(), run_dir=run_dir, resume="auto")


# -- kill -9 ---------------------------------------------------------------------------------------


def killed(run_dir, history, moment, loader):
    """Train in a forked process that kills itself at its so-manieth access to the file system."""

    def main():
        signal.alarm(60)
        left = [moment]

        def count(event, arguments):
            if event in {
                "open",
                "os.rename",
                "os.mkdir",
                "os.remove",
                "os.rmdir",
                "os.truncate",
                "os.listdir",
            }:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        run = build(**FULL)
        resumed_at = life(run, loader(), run_dir, epochs=2)
        history.send((resumed_at, everything(run)))

    process = FORK.Process(target=main)
    process.start()
    process.join(90)
    return process.exitcode


@pytest.mark.slow
def test_kill_9_at_fifty_accesses_to_the_file_system(run_dir):
    """Wherever it strikes, all that is lost are the steps since the last state on disk."""
    reference = build(**FULL)
    life(reference, LOADERS["shuffled"](), run_dir.with_name("reference"), epochs=2)
    expected = everything(reference)
    rng = np.random.default_rng(0)
    kills, ends, steps = 0, 0, 0
    while kills < 50:
        here, there = FORK.Pipe()
        code = killed(run_dir, there, int(rng.integers(3, 120)), LOADERS["shuffled"])
        newest = max((int(path.name.split("-")[1]) for path in whole(run_dir)), default=0)
        if code == -signal.SIGKILL:
            kills += 1
            assert newest >= steps, "a kill must not cost a state that was there before"
            steps = newest
            continue
        assert code == 0
        resumed_at, found = here.recv()
        assert resumed_at == steps
        assert found == expected
        ends += 1
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        steps = 0
    assert ends


def tell_of(run_dir, told):
    """Train like `life`, and say after each step how far it is."""
    signal.alarm(90)
    run, loader = build(**FULL), LOADERS["shuffled"]()
    with run.sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        told.send(sentinel.step_count)
        for _ in range(sentinel.data_position["epoch"], 2):
            for _ in train_watched(run, sentinel, loader):
                told.send(sentinel.step_count)
    told.send(everything(run))


def kill_in(run_dir, steps, delay):
    """Kill such a process from outside, so many messages and seconds later; return all that it said."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=tell_of, args=(run_dir, there))
    process.start()
    there.close()
    said = []
    with contextlib.suppress(EOFError, OSError):  # it is gone
        while len(said) < steps:
            said.append(here.recv())
        time.sleep(delay)
    process.kill()
    process.join()
    with contextlib.suppress(EOFError, OSError):
        while True:
            said.append(here.recv())
    return said, process.exitcode


@pytest.mark.slow
@pytest.mark.timeout(600)  # a hundred processes, on a machine that may have other work
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_kill_9_at_fifty_moments_in_time(run_dir, monkeypatch, writer):
    """From outside, wherever the program and the thread or the process that writes happen to be.

    When step s + 1 is made the state of step s, taken every 3 steps, is found good and begins to be
    written, which waits until the one before it is there. So that one is on disk, whatever the speed of
    the machine.
    """
    monkeypatch.setattr(scribe, "_FOR_A_PROCESS", 0 if writer == "process" else 1 << 40)
    reference = build(**FULL)
    life(reference, LOADERS["shuffled"](), run_dir.with_name("reference"), epochs=2)
    expected = everything(reference)
    rng = np.random.default_rng(1)
    kills, ends, there = 0, 0, 0
    while kills < 50:
        said, code = kill_in(run_dir, int(rng.integers(0, 24)), float(rng.exponential(0.004)))
        newest = max((int(path.name.split("-")[1]) for path in whole(run_dir)), default=0)
        if said:
            assert said[0] == there, "it goes on from the newest state that is on disk"
        if said and isinstance(said[-1], dict):  # it got to its end
            assert said[-1] == expected
            ends += 1
            for path in sorted(run_dir.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            there = 0
            continue
        assert code == -signal.SIGKILL
        kills += 1
        made = said[-1] if said else 0
        assert newest >= max(there, (made - 1) // 3 * 3 - 3)
        there = newest
    assert ends


def whole(run_dir):
    return [path.parent for path in (run_dir / "snapshots").glob("step-*/manifest.json")]


# -- a disk that refuses ---------------------------------------------------------------------------


def refuse(monkeypatch, code, *, while_true):
    """The disk refuses to take snapshots for as long as `while_true()`."""
    import gradsentinel.state.archive as archive_module  # noqa: PLC0415 - patched here only

    write = archive_module.write_tensor_file

    def full(path, tensors):
        if while_true():
            raise OSError(code, os.strerror(code))
        return write(path, tensors)

    monkeypatch.setattr(archive_module, "write_tensor_file", full)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_is_told_and_the_snapshots_stay_in_memory(run_dir, monkeypatch, code, caplog):
    refuse(monkeypatch, code, while_true=lambda: True)
    run = build()
    with run.sentinel(keep(), run_dir=run_dir) as sentinel:
        ask = iter([False] * 10 + [True])
        sentinel.on(
            BeforeClip,
            lambda event: Finding(
                kind=Kind.SPIKE, value=torch.tensor(next(ask, False)), action=Action.ROLLBACK
            ),
        )
        finish(train_watched(run, sentinel, make_batches(14)))
        rollback = sentinel._watch.bus.responders()[-1]
        assert rollback.known_good_steps[-1] >= 9
    told = [incident for incident in sentinel.incidents if "could not be saved" in incident.message]
    assert told
    assert all(str(incident.outcome) == "reported" for incident in told)
    assert os.strerror(code) in told[0].message
    assert "known-good states are in memory only" in told[0].message
    assert [i.outcome for i in sentinel.incidents if i.kind is Kind.SPIKE] == ["rolled_back"]
    assert whole(run_dir) == []
    assert not [path for path in (run_dir / "snapshots").iterdir() if path.name.startswith(".tmp")]
    assert caplog.text.count("the known-good states could not be written") == 1  # and no line for each
    assert "Traceback" not in caplog.text  # nothing is wrong with the program


def test_when_the_disk_takes_them_again_they_are_there_again(run_dir, monkeypatch):
    full = [True]
    refuse(monkeypatch, errno.ENOSPC, while_true=lambda: full[0])
    run = build()
    with run.sentinel(keep(), run_dir=run_dir) as sentinel:
        for done in train_watched(run, sentinel, make_batches(14)):
            sentinel._watch.run.states.finish()
            full[0] = done < 8
    assert whole(run_dir)
    with build().sentinel(keep(), run_dir=run_dir, resume="auto") as sentinel:
        assert sentinel.step_count == 12


def test_an_older_state_is_not_deleted_before_there_is_a_newer_one(run_dir, monkeypatch):
    full = [False]
    refuse(monkeypatch, errno.ENOSPC, while_true=lambda: full[0])
    run = build()
    with run.sentinel(keep(on_disk=1), run_dir=run_dir) as sentinel:
        for done in train_watched(run, sentinel, make_batches(20)):
            sentinel._watch.run.states.finish()
            full[0] = done >= 6
    assert [int(path.name.split("-")[1]) for path in whole(run_dir)] == [3]


@pytest.mark.expects_swallowed
def test_a_directory_that_cannot_be_made_is_told_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").touch()
    run = build()
    with run.sentinel(keep(), run_dir=tmp_path / "file" / "run") as sentinel:
        finish(train_watched(run, sentinel, make_batches(8), spoil=Spoiler("loss", frozenset({2}))))
        assert sentinel.applied_steps == 7
        assert sentinel._watch.bus.responders()[-1].known_good_steps[-1] == 6
    assert "cannot be written to" in caplog.text
    assert "a restart cannot go on from them" in caplog.text


def test_what_is_read_back_is_what_was_written_or_it_is_no_state(run_dir, monkeypatch):
    """A disk that loses what it acknowledged: the archive must not get its name."""
    import gradsentinel.state.archive as archive_module  # noqa: PLC0415 - patched here only

    write = archive_module.write_tensor_file

    def lose(path, tensors):
        facts = write(path, tensors)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x55")
        return facts

    monkeypatch.setattr(archive_module, "write_tensor_file", lose)
    run = build()
    with run.sentinel(keep(), run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(6)))
    assert whole(run_dir) == []
    assert "is not read back as written" in sentinel.incidents[0].message


# -- how a run leaves ------------------------------------------------------------------------------


SCRIPT = """
import sys, torch
from gradsentinel import NanCallback, Sentinel
model = torch.nn.Linear(2, 1)
sentinel = Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[NanCallback(action="abort")],
                    run_dir=sys.argv[1])
for batch in sentinel.steps([torch.full((1, 2), float("nan"))]):
    sentinel.backward(model(batch).mean())
    sentinel.step()
"""


@pytest.mark.slow
def test_an_aborted_script_leaves_with_its_own_exit_code_and_a_traceback(run_dir):
    found = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", SCRIPT, str(run_dir)], capture_output=True, text=True, check=False
    )
    assert found.returncode == TrainingAborted.exit_code == 75
    assert "Traceback" in found.stderr
    assert "gradsentinel.errors.TrainingAborted: step 0" in found.stderr


def test_other_exceptions_leave_as_ever():
    code = (
        "from gradsentinel import TrainingAborted\n"
        "try: raise TrainingAborted('x')\nexcept TrainingAborted: pass\n1/0"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert found.returncode == 1
    assert "ZeroDivisionError" in found.stderr
