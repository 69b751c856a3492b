"""A process that has imported Megatron once, and forks the ranks of one training after another.

The tests themselves never import Megatron: what stands for CUDA on a CPU changes torch for the whole process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from pathlib import Path
from typing import Any


class MegatronServer:
    """Runs jobs of jobs.py on several ranks, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, folder))
        self._process.start()
        there.close()

    def run(self, job: str, world_size: int, *args: Any, timeout: float = 100.0, **kwargs: Any) -> list[Any]:
        """Call the job with this name on each rank, and return the results by rank."""
        self._here.send((job, world_size, args, kwargs, timeout))
        if not self._here.poll(timeout + 60.0):
            self._process.kill()
            raise AssertionError(f"{job} on {world_size} ranks gave no answer in {timeout} s")
        failure, results = self._here.recv()
        if failure is not None:
            raise AssertionError(failure)
        return results

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it may be gone already
            self._here.send(None)
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Any, folder: Path) -> None:
    import warnings  # noqa: PLC0415 - in the process that has Megatron only

    warnings.simplefilter("ignore")
    import jobs  # noqa: PLC0415 - likewise
    from ranks import run_ranks  # noqa: PLC0415 - likewise

    while (asked := connection.recv()) is not None:
        name, world_size, args, kwargs, timeout = asked
        try:
            folder.mkdir(parents=True, exist_ok=True)
            call = _Call(getattr(jobs, name), args, kwargs)
            connection.send((None, run_ranks(call, world_size, folder, timeout=timeout)))
        except BaseException:  # noqa: BLE001 - whatever it was, the test must hear of it
            connection.send((traceback.format_exc(), None))


class _Call:
    """A function with its arguments, called with the rank."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def __call__(self, rank: int) -> Any:
        return self._function(rank, *self._args, **self._kwargs)
