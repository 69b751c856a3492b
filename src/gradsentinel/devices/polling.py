"""Asks for a card's health now and then, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque

from gradsentinel.devices.health import HealthSource, HealthUnavailable, Reading

logger = logging.getLogger("gradsentinel")

_LONGEST_PAUSE = 600.0
"""Seconds between two questions to a card that does not answer, unless it is asked less often anyway."""
_PATIENCE = 1.0


class Poller:
    """The latest readings of one card; the thread ends with `stop`, or with this object.

    Args:
        source: whom to ask.
        every: seconds between two questions; twice as long after each failure, up to ten minutes.
        keep: so many readings are kept.
    """

    def __init__(self, source: HealthSource, *, every: float, keep: int = 64) -> None:
        self.source = source
        self.every = every
        self.count = 0
        """Answers and failures so far: who has seen this number need not look."""
        self.failure = ""
        """Why there was no answer the last time; empty if there was one."""
        self._failures = 0
        self._readings: deque[Reading] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_loop, args=(weakref.ref(self), self._stop), name="gradsentinel-health", daemon=True
        )

    def start(self) -> None:
        """Begin to ask, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that waits for an answer ends when it has it, or with the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def readings(self) -> list[Reading]:
        """Return what was heard, the newest last."""
        with self._lock:
            return list(self._readings)

    def poll(self) -> float:
        """Ask once; returns the seconds until the next time. Never raises."""
        try:
            reading, failure = self.source.read(), ""
        except HealthUnavailable as error:
            reading, failure = None, str(error)
        except Exception as error:  # noqa: BLE001 - drivers raise anything, and this is a thread's end
            reading, failure = None, f"{type(error).__name__}: {error}"
        with self._lock:
            if reading is not None:
                self._readings.append(reading)
        self._failures = self._failures + 1 if failure else 0
        if self._failures == 1:
            logger.warning("no health of %s: %s", self.source.card, failure)
        self.failure = failure
        self.count += 1
        pause = self.every * float(1 << min(self._failures, 16))
        return min(pause, max(self.every, _LONGEST_PAUSE))


def _loop(poller: weakref.ref[Poller], stop: threading.Event) -> None:
    pause = 0.0
    while not stop.wait(pause):
        asked = poller()
        if asked is None:
            return
        pause = asked.poll()
        del asked  # who forgets the poller ends the thread
