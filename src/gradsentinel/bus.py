"""Delivers events to those who listen, and holds the line when one of them raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import Self

from gradsentinel.callback import Callback, Responder, check_callback, check_signature
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.events import METHODS, Event
from gradsentinel.evidence import Finding
from gradsentinel.judge import Filed
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

E = TypeVar("E", bound=Event)


@dataclass(slots=True)
class Listener:
    """One callback method or plain function that hears one kind of event."""

    function: Callable[[Any], Any]
    owner: object
    name: str
    slot: int
    every: int = 1
    once: bool = False
    alive: bool = True


class Handle:
    """Takes a registered function off the bus again."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Bus:
    """Looks once at who overrides what and keeps a tuple per event: unheard events cost nothing.

    A callback that raises an Exception is reported through `on_error` and switched off; the run goes
    on. TrainingAborted passes, and so does every BaseException that is no Exception.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        on_error: Callable[[Listener, Exception, Event], None] | None = None,
    ) -> None:
        self._on_error = on_error
        self.callbacks: list[Callback] = []
        # Plain functions share the first slot: a function registered on one rank alone (as loggers are)
        # must not give that rank another layout than its peers.
        self.slot_names: list[str] = ["functions"]
        self._names: dict[int, str] = {}
        self._listeners: dict[type[Event], tuple[Listener, ...]] = dict.fromkeys(METHODS, ())
        for callback in callbacks:
            self.add(callback)

    @property
    def slots(self) -> int:
        """Number of detector slots handed out; never shrinks, so that all ranks keep one layout."""
        return len(self.slot_names)

    def add(self, callback: Callback) -> None:
        """Register a callback; raises ConfigurationError if it could never be called as meant."""
        check_callback(callback)
        if any(callback is known for known in self.callbacks):
            raise ConfigurationError(f"the same {type(callback).__name__} is in the list twice")
        self.callbacks.append(callback)
        slot = self._new_slot(type(callback).__name__)
        self._names[id(callback)] = self.slot_names[slot]
        for event, method in METHODS.items():
            if getattr(type(callback), method) is not getattr(Callback, method):
                self._append(
                    event, Listener(getattr(callback, method), callback, self.slot_names[slot], slot)
                )

    def on(
        self, event: type[E], function: Callable[[E], Any], *, every: int = 1, once: bool = False
    ) -> Handle:
        """Call a plain function for an event, on every `every`-th step, or only once.

        The function may return findings like a detector's method. Raises ConfigurationError for an
        unknown event, a function that cannot take one, or `every` below 1.
        """
        if event not in METHODS:
            names = ", ".join(known.__name__ for known in METHODS)
            raise ConfigurationError(f"{event!r} is no event; choose one of: {names}")
        if not callable(function):
            raise ConfigurationError(f"{function!r} cannot be called")
        check_signature(function, getattr(function, "__qualname__", repr(function)))
        if every < 1:
            raise ConfigurationError(f"every={every} must be at least 1 step")
        name = getattr(function, "__name__", type(function).__name__)
        listener = Listener(function, function, name, 0, every, once)
        self._append(event, listener)
        return Handle(lambda: self._remove(event, listener))

    def hears(self, event: type[Event]) -> bool:
        """Return True if anybody listens; ask before building an event."""
        return bool(self._listeners[event])

    def emit(self, event: Event) -> list[Filed]:
        """Deliver an event in order of registration and return the findings that came back."""
        filed: list[Filed] = []
        for listener in self._listeners[type(event)]:
            if not listener.alive or event.step % listener.every:
                continue
            try:
                found = listener.function(event)
                if found is not None:
                    filed.extend(self._file(found, listener, event))
            except TrainingAborted:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the bus: a callback must not kill the run
                self._switch_off(listener, error, event)
            if listener.once and listener.alive:
                self._remove(type(event), listener)
        return filed

    def name_of(self, callback: Callback) -> str:
        """Return the name of a registered callback, unique on this bus."""
        return self._names[id(callback)]

    def must_settle(self, step: int) -> bool:
        """Return True if findings made after this step may not wait for the next one.

        Asks switched-off callbacks too: the answer has to be the same on every rank.
        """
        return any(callback.checks_after_step(step) for callback in self.callbacks)

    def responders(self) -> list[Responder]:
        """Return the responders from the cheapest rung to the dearest, in order of registration."""
        found = [callback for callback in self.callbacks if isinstance(callback, Responder)]
        return sorted(found, key=lambda responder: responder.rung)

    @staticmethod
    def _file(found: Any, listener: Listener, event: Event) -> Iterable[Filed]:
        entries = [found] if isinstance(found, Finding) else list(found)
        for entry in entries:
            if not isinstance(entry, Finding):
                raise TypeError(f"{listener.name} returned {type(entry).__name__}; return a Finding or None")
            if entry.value.numel() != 1:
                raise TypeError(
                    f"{listener.name} returned a value of shape {tuple(entry.value.shape)}; it must be 0-dim"
                )
        return [Filed(listener.slot, event.step, entry, listener.name) for entry in entries]

    def _switch_off(self, listener: Listener, error: Exception, event: Event) -> None:
        for listeners in self._listeners.values():
            for other in listeners:
                if other.owner is listener.owner:
                    other.alive = False
        record_swallowed(error)
        logger.error(
            "step %d: %s raised in %s and is switched off; the run goes on without it",
            event.step,
            listener.name,
            METHODS[type(event)],
            exc_info=error,
        )
        if self._on_error is not None:
            self._on_error(listener, error, event)

    def _new_slot(self, name: str) -> int:
        taken = self.slot_names.count(name) + sum(known.startswith(f"{name}#") for known in self.slot_names)
        self.slot_names.append(f"{name}#{taken + 1}" if taken else name)
        return len(self.slot_names) - 1

    def _append(self, event: type[Event], listener: Listener) -> None:
        self._listeners[event] = (*self._listeners[event], listener)

    def _remove(self, event: type[Event], listener: Listener) -> None:
        self._listeners[event] = tuple(known for known in self._listeners[event] if known is not listener)
