"""For tests of callbacks and of GradSentinel itself: what the bus swallowed, and small ways to drive it."""

from __future__ import annotations

from collections import deque

_swallowed: deque[Exception] = deque(maxlen=100)


def record_swallowed(error: Exception) -> None:
    """Remember an exception that was reported and not raised; called by the bus."""
    _swallowed.append(error.with_traceback(None))  # its frames would keep the step's tensors alive


def swallowed() -> list[Exception]:
    """Return the exceptions that were reported and not raised since the last clear, newest last."""
    return list(_swallowed)


def clear_swallowed() -> None:
    """Forget them."""
    _swallowed.clear()
