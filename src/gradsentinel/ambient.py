"""Callbacks that come into every run of this process, whoever makes it: for a drill of an unedited script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gradsentinel.callback import Callback

_MAKERS: list[Callable[[], Callback]] = []


def callbacks() -> list[Callback]:
    """Return a new one of each, for a run that begins; they hear every event before the run's own."""
    return [make() for make in _MAKERS]


@contextmanager
def everywhere(make: Callable[[], Callback]) -> Iterator[None]:
    """Put a callback into every run that is begun inside; on several ranks, on each of them.

    Args:
        make: makes one for each run.
    """
    _MAKERS.append(make)
    try:
        yield
    finally:
        _MAKERS.remove(make)
