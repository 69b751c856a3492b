"""Runs a function on several ranks that talk through gloo: forked, file rendezvous, hard timeout."""

import io
import multiprocessing
import queue
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

_BEFORE_2_7 = {
    "'Stream' object has no attribute 'record_event'": "FSDP2 on CPUs",
    "Cannot use ReduceOp.AVG with Gloo": "a mean over the ranks of a DTensor on CPUs",
}
"""What torch 2.6 itself raises on CPUs, watched or not, and what it lacks there."""
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call `function(rank, *args)` on each rank and return the results by rank.

    gloo corrupts the memory of a rank once in some ten thousand groups (in a run of all tests under a
    checking malloc nothing of ours did), so ranks of which one crashed that way are run once more; stderr
    tells. What torch 2.6 lacks on CPUs is skipped there.
    """
    try:
        try:
            return _run(function, world_size, folder, args, timeout)
        except _Crash as crash:
            sys.stderr.write(f"a rank crashed, all are run once more: {crash}\n")
        return _run(function, world_size, folder, args, timeout)
    except RankFailedError as error:
        lacks = [what for text, what in _BEFORE_2_7.items() if text in f"{error}"]
        if lacks and torch.__version__.startswith("2.6."):
            pytest.skip(f"torch 2.6 lacks {lacks[0]}")
        raise


class _Crash(RankFailedError):
    """A rank was ended by the system, for touching memory that it must not touch."""


def _run(
    function: Callable[..., Any], world_size: int, folder: Path, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    processes = [
        context.Process(target=_main, args=(rank, world_size, rendezvous, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        answers = _answers(processes, results, timeout)
    except RankFailedError as error:
        _end(processes)
        if any(process.exitcode in _CRASHES for process in processes):
            raise _Crash(f"{error}") from error
        raise
    _end(processes)
    return [torch.load(io.BytesIO(answers[rank]), weights_only=False) for rank in range(world_size)]


def _answers(processes: list[Any], results: Any, timeout: float) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(processes):
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in answers]
            if dead:
                raise RankFailedError(f"ranks {dead} died") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(answers))
                raise RankFailedError(f"ranks {missing} gave no answer in {timeout} s: a hang") from None
            continue
        if error is not None:
            raise RankFailedError(f"rank {rank}:\n{error}")
        answers[rank] = value
    return answers


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


def _main(
    rank: int,
    world_size: int,
    rendezvous: Path,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # torch 2.6 says it of every DTensor on a CPU mesh, random or not.
    warnings.filterwarnings("ignore", message="DTensor random operators")
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        torch.manual_seed(1234)
        value = function(rank, *args)
        dist.barrier()
        if torch.__version__.startswith("2.6."):  # its gloo hangs if it is closed while its threads still run
            time.sleep(0.05)
        dist.destroy_process_group()
        packed = io.BytesIO()
        torch.save(value, packed)  # a queue would share the tensors' memory with a process that is gone
        results.put((rank, None, packed.getvalue()))
    except BaseException:  # noqa: BLE001 - whatever it was, the test must hear of it
        results.put((rank, traceback.format_exc(), None))
