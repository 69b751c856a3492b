"""Runs a function in a child process that has the simulated NPU; the parent stays without one.

The children are forked from a server that has done nothing but import: autograd's engine counts the devices
when it is first used, so a child of a process that has used it would have no queue for the NPU.
"""

import io
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import simulator
import torch
import torch.distributed as dist


class ChildFailedError(AssertionError):
    """The child raised, died or did not finish in time."""


def run_on_npu(
    function: Callable[..., Any], *args: Any, timeout: float = 240.0, saturating: bool = False
) -> Any:
    """Call `function(*args)` in a child that has a simulated NPU, and return what it returns."""
    return _run([(None, function, args)], timeout, saturating=saturating)[0]


def run_ranks_on_npu(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    timeout: float = 240.0,
    saturating: bool = False,
) -> list[Any]:
    """Call `function(rank, *args)` on each rank over simulated HCCL and return the results by rank."""
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    jobs = [((rank, world_size, rendezvous), function, args) for rank in range(world_size)]
    return _run(jobs, timeout, saturating=saturating)


def _run(
    jobs: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]], timeout: float, *, saturating: bool
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.utils.cpp_extension", "gradsentinel"])
    results: Any = context.Queue()
    processes = [
        context.Process(target=_main, args=(i, saturating, *job, results)) for i, job in enumerate(jobs)
    ]
    for process in processes:
        process.start()
    answers: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(answers) < len(jobs):
            try:
                index, error, value = results.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise ChildFailedError(f"no answer in {timeout} s") from None
                dead = [p.exitcode for i, p in enumerate(processes) if p.exitcode and i not in answers]
                if dead:
                    raise ChildFailedError(f"a child ended with exit code {dead[0]}") from None
                continue
            if error is not None:
                raise ChildFailedError(error)
            answers[index] = value
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(io.BytesIO(answers[i]), weights_only=False) for i in range(len(jobs))]


def _main(
    index: int,
    saturating: bool,  # noqa: FBT001 - handed on by position
    ranks: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        simulator.install(saturating=saturating)
        torch.manual_seed(1234)
        if ranks is None:
            value = function(*args)
        else:
            rank, world_size, rendezvous = ranks
            where = f"file://{rendezvous}"
            dist.init_process_group("hccl", init_method=where, rank=rank, world_size=world_size)
            value = function(rank, *args)
            dist.destroy_process_group()
        packed = io.BytesIO()
        torch.save(value, packed)
        results.put((index, None, packed.getvalue()))
    except BaseException:  # noqa: BLE001 - whatever it was, the test must hear of it
        results.put((index, traceback.format_exc(), None))
