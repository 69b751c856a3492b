"""A rank that dies or sleeps keeps nobody waiting for ever, and is named."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsentinel import NanCallback, Sentinel
from gradsentinel.errors import ConsensusError

pytestmark = pytest.mark.multiprocess

BAD_STEP = 2
LONG = 600.0  # seconds: a test that waited for such a timeout would not end in time


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def oversleep() -> None:
    time.sleep(7)  # longer than the timeout and the roll call after it


def train(folder: Path, victim: int, fate: Callable[[], None], timeout: float) -> str:
    """Train without DDP, so that the agreement is the first to notice; return how it ended."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run", timeout=timeout)
    try:
        with sentinel:
            for step, batch in enumerate(sentinel.steps([torch.ones(2, 4)] * 4)):
                sentinel.backward(model(batch).square().mean())
                if step == BAD_STEP and dist.get_rank() == victim:
                    fate()
                sentinel.step()
    except ConsensusError as error:
        first = f"step {sentinel.step_count}: {error}"
    else:
        return "no error"
    try:
        sentinel._watch.settle_pending()
    except ConsensusError as error:  # who goes on all the same is told again, at once
        return first if first.endswith(str(error)) else f"first {first}, then {error}"
    return "no error the second time"


def _main(
    rank: int, world_size: int, folder: Path, port: int, answer: Connection, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if port:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    elif rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        answer.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", answer.recv(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # however slow the start was, from here on the ranks keep pace
    answer.send(train(folder, *args))
    with contextlib.suppress(EOFError):
        answer.recv()  # a process that is gone would be noticed by the others, and tell them too much


def outcomes(
    folder: Path,
    world_size: int,
    victim: int,
    fate: Callable[[], None],
    timeout: float,
    *,
    store_in_rank_0: bool = False,
) -> dict[int, str]:
    """Return how training ended on each rank that lived to tell it."""
    context = multiprocessing.get_context("fork")
    # Outside the ranks, as torchrun's agent keeps it, or in rank 0, as without torchrun.
    store = None if store_in_rank_0 else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(world_size)]
    ranks = [
        context.Process(
            target=_main,
            args=(
                rank,
                world_size,
                folder,
                store.port if store is not None else 0,
                pipes[rank][1],
                (victim, fate, timeout),
            ),
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    told: dict[int, str] = {}
    deadline = time.monotonic() + 60
    try:
        if store is None:
            assert pipes[0][0].poll(30), "rank 0 did not make its store"
            port = pipes[0][0].recv()
            for mine, _ in pipes[1:]:
                mine.send(port)
        for rank, (mine, _) in enumerate(pipes):
            ready = wait([mine, ranks[rank].sentinel], max(0.0, deadline - time.monotonic()))
            if mine.poll():
                told[rank] = mine.recv()
            elif not ready:
                pytest.fail(f"rank {rank} hangs; told so far: {told}")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return told


def test_a_rank_that_is_killed_is_named_by_all_others_long_before_the_timeout(tmp_path):
    told = outcomes(tmp_path, 4, victim=1, fate=die, timeout=LONG)
    assert told.keys() == {0, 2, 3}
    for text in told.values():
        assert text.startswith(f"step {BAD_STEP}: no answer from rank 1: ")


def test_a_rank_that_sleeps_longer_than_the_timeout_is_named_and_told_so(tmp_path):
    told = outcomes(tmp_path, 3, victim=1, fate=oversleep, timeout=3.0)
    assert told.keys() == {0, 1, 2}
    assert told.pop(1).startswith(f"step {BAD_STEP}: this rank came too late")
    for text in told.values():
        assert text.startswith(f"step {BAD_STEP}: no answer from rank 1: ")


def test_a_rank_that_takes_the_store_with_it_is_noticed_though_nobody_can_name_it(tmp_path):
    told = outcomes(tmp_path, 3, victim=0, fate=die, timeout=LONG, store_in_rank_0=True)
    assert told.keys() == {1, 2}
    for text in told.values():
        assert text.startswith(
            f"step {BAD_STEP}: the ranks could not agree, and nobody can say who is missing"
        )
        assert "rank 0, or the machine that holds the store, is gone too" in text
