"""What takes the numbers of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from gradsentinel.errors import ConfigurationError


@runtime_checkable
class MetricsSink(Protocol):
    """Takes numbers and texts and keeps them somewhere; called on rank 0 only.

    Steps come in ascending order, in bunches: what is written now may have been measured some seconds ago. A
    `scalars` that has a further parameter `time` gets when that was, in seconds since 1970.
    """

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the finite numbers of one attempted step, by name."""

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Take a text about a step, such as the story of an incident."""

    def close(self) -> None:
        """Write what is left; nothing is handed over after it."""


def check_sink(sink: Any) -> MetricsSink:
    """Return what can be a sink; raises ConfigurationError saying what is missing."""
    if isinstance(sink, type):
        raise ConfigurationError(f"{sink.__name__} is a class; give an instance: {sink.__name__}(...)")
    missing = [name for name in ("scalars", "text", "close") if not callable(getattr(sink, name, None))]
    if missing:
        raise ConfigurationError(
            f"{type(sink).__name__} cannot be a sink: it has no {' and no '.join(missing)}; "
            "a sink has scalars(step, numbers), text(step, tag, markdown) and close()"
        )
    found: MetricsSink = sink
    return found


def timed(sink: MetricsSink) -> Callable[[int, Mapping[str, float], float], None]:
    """Return `scalars` as a function of step, numbers and time, whether it wants to know the time or not."""
    scalars: Callable[..., None] = sink.scalars
    try:
        parameters = inspect.signature(scalars).parameters
    except (TypeError, ValueError):  # a builtin
        parameters = {}  # type: ignore[assignment]
    if "time" in parameters:
        return lambda step, numbers, time: scalars(step, numbers, time=time)
    return lambda step, numbers, _: scalars(step, numbers)
