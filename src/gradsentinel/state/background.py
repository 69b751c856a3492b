"""Work for a thread beside the training: writing to disk, bounded, and finished before the process ends."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradsentinel.state.disk import Refused

logger = logging.getLogger("gradsentinel")

_AT_EXIT = 1e6
"""Seconds: an interpreter that exits waits for the disk, however slow it is; Ctrl-C ends that."""


@dataclass(frozen=True, slots=True)
class _Job:
    what: str
    work: Callable[[], None]
    nbytes: int


class Background:
    """Does one job after the other in a thread that lives as long as there are any.

    An interpreter that exits waits for it. A job that raises is logged and kept for `failures`; it never
    reaches the program. Whoever submits does not wait for the thread to come up, as `threading.Thread.start`
    does: where every core is taken that was a tenth of a second.

    Args:
        max_bytes: so much memory may wait to be written; a job that would exceed it has to wait.
        patience: seconds that `submit` waits for room.
    """

    def __init__(self, *, max_bytes: int, patience: float = 30.0) -> None:
        self._max_bytes = max_bytes
        self._patience = patience
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._waiting = 0
        self._works = False
        """True while there is a thread."""
        self._failures: list[str] = []
        self._process = os.getpid()
        self._waits_at_exit = False

    def submit(self, what: str, work: Callable[[], None], nbytes: int = 0) -> bool:
        """Have a job done later; returns False, and logs it, if there was no room for it in time.

        Args:
            what: the job in words, such as 'the bundle of 000123-nonfinite_loss'.
            work: is called in the thread.
            nbytes: memory that the job holds until it is done.
        """
        self._after_fork()
        job = _Job(what, work, nbytes)
        with self._changed:
            room = self._changed.wait_for(
                lambda: not self._waiting or self._waiting + nbytes <= self._max_bytes, self._patience
            )
            if not room:
                self._fail(what, "the disk does not keep up with what is to be written")
                return False
            self._jobs.append(job)
            self._waiting += nbytes
            if self._works:
                return True
            self._works = True
        if not self._waits_at_exit:
            self._waits_at_exit = True
            atexit.register(_finish_all, weakref.ref(self))
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter is about to exit: no more threads
            self._run()
        return True

    def finish(self, timeout: float) -> bool:
        """Wait until all jobs are done; returns False, and logs it, if they are not after so many seconds."""
        self._after_fork()
        deadline = time.monotonic() + timeout
        with self._changed:
            done = self._changed.wait_for(lambda: not self._works, deadline - time.monotonic())
            if not done:
                left = ", ".join(job.what for job in self._jobs) or "the last job"
                logger.error("still writing after %.0f seconds: %s", timeout, left)
        return done

    def failures(self) -> list[str]:
        """Return what went wrong since the last call, one sentence each."""
        with self._changed:
            found, self._failures = self._failures, []
        return found

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._works = False
                    self._changed.notify_all()
                    return
                job = self._jobs[0]
            try:
                job.work()
            except Exception as error:  # the thread's edge: a full disk must not kill the run
                if not isinstance(error, Refused):
                    logger.exception("%s could not be written", job.what)
                with self._changed:
                    self._failures.append(f"{job.what} could not be written: {error}")
            with self._changed:
                self._jobs.popleft()
                self._waiting -= job.nbytes
                self._changed.notify_all()
            del job

    def _fail(self, what: str, why: str) -> None:
        logger.error("%s could not be written: %s", what, why)
        self._failures.append(f"{what} could not be written: {why}")

    def _after_fork(self) -> None:
        """A child process has none of its parent's threads: their jobs are the parent's business."""
        if self._process != os.getpid():
            self.__init__(max_bytes=self._max_bytes, patience=self._patience)  # type: ignore[misc]


def _finish_all(of: weakref.ref[Background]) -> None:
    background = of()
    if background is not None:
        background.finish(_AT_EXIT)
