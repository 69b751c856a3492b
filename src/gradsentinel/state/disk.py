"""What the disk does not take at the moment: said once when it begins, and once when it is over."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from gradsentinel.errors import GradSentinelError

logger = logging.getLogger("gradsentinel")


class Refused(GradSentinelError, RuntimeError):
    """The disk refused something, which `Disk` has said already."""


class Disk:
    """Told by everything that writes to the run directory, in whatever thread, how it went.

    A full disk refuses one thing after the other for hours: a line for each of them would bury the one that
    matters. So there is a line when the first is refused and one when the last of them is taken, and
    whoever writes keeps what can be kept in memory until then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: dict[str, Callable[[], object] | None] = {}
        """What is refused at the moment, and how to try again where that is not done anyway."""
        self._since = 0.0
        self._count = 0
        self._reasons: set[str] = set()
        self._lost: list[str] = []
        """What will not be tried again."""
        self._pause = self._calls = 0

    @property
    def refuses_something(self) -> bool:
        """Whether there is something that the disk did not take the last time."""
        return bool(self._refused)

    def refused(
        self, what: str, error: BaseException, again: Callable[[], object] | None = None, *, lost: str = ""
    ) -> None:
        """Hear that something was not taken.

        Args:
            what: by whom, such as 'the event log'; a later `taken` of the same name ends it.
            error: the reason.
            again: tries it once more, and says here how that went; called by `retry`.
            lost: what will be missing for good, to be named at the end.
        """
        reason = reason_of(error)
        with self._lock:
            if not self._refused:
                self._since, self._count, self._lost = time.monotonic(), 0, []
                self._reasons.clear()
                self._pause = self._calls = 0
            is_news = reason not in self._reasons  # a full disk must not hide one that is broken
            self._reasons.add(reason)
            self._refused[what] = again
            self._count += 1
            if lost:
                self._lost.append(lost)
        if is_news:
            logger.error(
                "%s could not be written: %s; the run goes on with what can be kept in memory only, where a "
                "restart does not find it; no more is said of that until the disk takes everything again",
                what,
                reason,
            )

    def taken(self, what: str) -> None:
        """Hear that something was taken."""
        if not self._refused:  # as ever; looked at without the lock, since this is called for each line
            return
        with self._lock:
            known = what in self._refused
            self._refused.pop(what, None)
            over = known and not self._refused
            seconds, count, lost = time.monotonic() - self._since, self._count, self._lost
        if over:
            logger.warning(
                "the disk takes everything again, after %.0f seconds in which it refused %d times; %s",
                seconds,
                count,
                f"missing for good: {_few(lost)}" if lost else "what was kept in memory is written now",
            )

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Write something small, now and, if the disk refuses, again when `retry` is called.

        Returns whether it was taken. Other exceptions than the disk's pass.
        """
        try:
            write()
        except OSError as error:
            self.refused(what, error, lambda: self.attempt(what, write))
            return False
        self.taken(what)
        return True

    def retry(self, *, now: bool = False) -> None:
        """Try again what was refused; called from the training's thread whenever something else was taken.

        Rarer and rarer, up to every 64th call, unless `now`: a try may take milliseconds.
        """
        self._calls += 1
        if self._calls <= self._pause and not now:
            return
        self._calls, self._pause = 0, min(2 * self._pause + 1, 63)
        with self._lock:
            waiting = [(what, again) for what, again in self._refused.items() if again is not None]
            for what, _ in waiting:
                self._refused[what] = None  # not twice at once
        for _, again in waiting:
            again()


def reason_of(error: BaseException) -> str:
    """Return why the disk refused, as the system says it."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (isinstance(cause, OSError) and cause.strerror) or str(error) or type(error).__name__


def is_of_the_disk(error: BaseException) -> bool:
    """Whether an exception says that the system did not write, and nothing is wrong with what was to be."""
    return isinstance(error, OSError) or isinstance(error.__cause__, OSError)


def is_full_or_broken(error: OSError) -> bool:
    """Whether it is the disk, and not something in the way of a single file."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE}


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
