"""Work that may take long, such as talking to a server, done in a thread that training never waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger("gradsentinel")

T = TypeVar("T")


class Outbox(Generic[T]):
    """Hands things to a function, one after the other, in a daemon thread; what waits is bounded.

    Args:
        name: what the thread is called.
        work: takes one thing; what it raises is logged without a traceback, and the next one follows.
        most: so many things wait at most; of more the oldest are dropped, and counted.
        tell: makes a sentence of an exception, such as one without passwords.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[T], None],
        *,
        most: int = 256,
        tell: Callable[[BaseException], str] = lambda error: f"{type(error).__name__}: {error}",
    ) -> None:
        self._name, self._work, self._most, self._tell = name, work, most, tell
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """So many things were never handed over, since too many waited."""
        self.failed = 0
        """So many things the function did not take."""

    def put(self, thing: T, *, first: bool = False) -> None:
        """Take a thing and return at once; `first` puts it before all that wait."""
        with self._changed:
            if self._closed:
                self.dropped += 1
                return
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:  # at 1, 2, 4, 8 ...
                    logger.warning("%s does not keep up: %d dropped so far", self._name, self.dropped)
            if first:
                self._waiting.appendleft(thing)
            else:
                self._waiting.append(thing)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, patience: float) -> int:
        """Wait until everything is done, at most so many seconds; returns how many things are left."""
        deadline = time.monotonic() + patience
        with self._changed:
            while (self._waiting or self._busy) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return len(self._waiting) + self._busy

    def close(self, patience: float) -> int:
        """Wait as `wait` does, take nothing more, and let the thread end; returns what `wait` does."""
        left = self.wait(patience)
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        return left

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                thing = self._waiting.popleft()
                self._busy = True
            try:
                self._work(thing)
            except Exception as error:  # noqa: BLE001 - the thread's edge: whatever somebody's server or function does
                self.failed += 1
                if self.failed & (self.failed - 1) == 0:
                    logger.warning("%s failed (%d so far): %s", self._name, self.failed, self._tell(error))
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
