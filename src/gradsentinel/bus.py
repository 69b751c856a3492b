"""Delivers events to those who listen, and holds the line when one of them raises."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from gradsentinel.callback import (
    Callback,
    Comparer,
    Detector,
    Responder,
    answers,
    check_callback,
    check_signature,
    prompt_every,
)
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.events import METHODS, AfterBackward, AfterStep, Batch, BeforeClip, Event, IncidentEvent
from gradsentinel.evidence import Finding
from gradsentinel.judge import Filed
from gradsentinel.testing import record_swallowed

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradsentinel")

E = TypeVar("E", bound=Event)

_LISTS = (list, tuple)
_LOOKS = (Batch, AfterBackward, BeforeClip)
"""Where a detector looks at a step; one with a `check_interval` hears them in every so many steps."""


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
    attention: int = 0
    """It hears the event in each of so many steps after an incident, whatever `every` is."""


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
        on_error: Callable[[Listener, Exception, int], None] | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._on_error = on_error
        self._alone = alone
        self.callbacks: list[Callback] = []
        # Plain functions share the first slot: a function registered on one rank alone (as loggers are)
        # must not give that rank another layout than its peers.
        self.slot_names: list[str] = ["functions"]
        self._names: dict[int, str] = {}
        self._off: set[int] = set()
        self._last_incident = -math.inf
        """The step of the last incident."""
        self.heard: dict[type[Event], tuple[Listener, ...]] = dict.fromkeys(METHODS, ())
        """Who hears what; whoever asks in each step looks here, others ask `hears`."""
        self.calm_ones: tuple[Detector, ...] | None = ()
        """Who looks at gradients, if each of them can say when it need not; else None."""
        self.prompt_every: tuple[int, ...] = ()
        """After which steps somebody wants to hear of their end at once: those divisible by one of these."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before somebody else listens, or nobody does any more."""
        self.comparers: list[Comparer] = []
        """The callbacks that compare ranks, switched-off ones too: all ranks need one list."""
        self._checkers: list[Callback] = []
        """Those who say after which steps their findings may not wait."""
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
        if isinstance(callback, Comparer):
            self.comparers.append(callback)
        if type(callback).checks_after_step is not Callback.checks_after_step:
            self._checkers.append(callback)
        slot = self._new_slot(type(callback).__name__)
        self._names[id(callback)] = self.slot_names[slot]
        for event, method in METHODS.items():
            if getattr(type(callback), method) is not getattr(Callback, method):
                listener = Listener(getattr(callback, method), callback, self.slot_names[slot], slot)
                if isinstance(callback, Detector) and event in _LOOKS:
                    listener.every, listener.attention = callback.check_interval, callback.attention_steps
                self._append(event, listener)

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

    def listeners(self) -> list[Listener]:
        """Return who hears anything, in order of the events."""
        return [listener for heard in self.heard.values() for listener in heard]

    def hears(self, event: type[Event]) -> bool:
        """Return True if anybody listens; ask before building an event."""
        return bool(self.heard[event])

    def has_functions(self, event: type[Event]) -> bool:
        """Return True if a plain function listens, which other ranks may not have."""
        return any(listener.slot == 0 for listener in self.heard[event])

    def _find_calm_ones(self) -> None:
        owners = {
            id(listener.owner): listener.owner
            for event in (AfterBackward, BeforeClip)
            for listener in self.heard[event]
            if listener.alive
        }.values()
        able = all(isinstance(owner, Detector) and answers(owner) for owner in owners)
        self.calm_ones = cast("tuple[Detector, ...]", tuple(owners)) if able else None
        periods = {prompt_every(listener.owner, listener.every) for listener in self.heard[AfterStep]}
        self.prompt_every = tuple(period for period in periods if period is not None)

    def emit(self, event: Event) -> list[Filed]:
        """Deliver an event in order of registration and return the findings that came back."""
        filed: list[Filed] = []
        if isinstance(event, IncidentEvent):
            self._last_incident = event.step
        for listener in self.heard[type(event)]:
            if not listener.alive or (
                event.step % listener.every and not self._attends(listener, event.step)
            ):
                continue
            try:
                found = listener.function(event)
                # Most find nothing, and say so by an empty list: there is nothing to be looked at then.
                if found is not None and not (type(found) in _LISTS and not found):
                    filed.extend(self._file(found, listener, event.step))
            except TrainingAborted as wish:
                if self._alone:
                    raise
                filed.append(self._wish_to_stop(listener, wish, event.step))
            except Exception as error:  # noqa: BLE001 - the edge of the bus: a callback must not kill the run
                self._switch_off(listener, error, event.step, METHODS[type(event)])
            if listener.once and listener.alive:
                self._remove(type(event), listener)
        return filed

    def _attends(self, listener: Listener, step: int) -> bool:
        """True if there was an incident lately, the same one on every rank, and the listener cares."""
        return listener.attention > 0 and step <= self._last_incident + listener.attention

    @staticmethod
    def _wish_to_stop(listener: Listener, wish: TrainingAborted, step: int) -> Filed:
        """A rank may not leave on its own: its peers would wait for it. They all stop at the agreement."""
        finding = Finding(
            kind=Kind.CUSTOM,
            value=torch.tensor(True),
            action=Action.ABORT,
            message=f"{listener.name} asked to stop: {wish}",
        )
        return Filed(listener.slot, step, finding, listener.name)

    def name_of(self, callback: Callback) -> str:
        """Return the name of a registered callback, unique on this bus."""
        return self._names[id(callback)]

    def must_settle(self, step: int, *, responders_only: bool = False) -> bool:
        """Return True if findings made after this step may not wait for the next one.

        Asks switched-off callbacks too: the answer has to be the same on every rank.
        """
        for callback in self._checkers:
            if responders_only and not isinstance(callback, Responder):
                continue
            try:
                if callback.checks_after_step(step):
                    return True
            except Exception as error:  # noqa: BLE001 - the edge of the bus, as in emit
                if id(callback) not in self._off:
                    self._switch_off(
                        self._listener(callback, callback.checks_after_step), error, step, "checks_after_step"
                    )
        return False

    def responders(self) -> list[Responder]:
        """Return the responders from the cheapest rung to the dearest, in order of registration."""
        found = [callback for callback in self.callbacks if isinstance(callback, Responder)]
        return sorted(found, key=lambda responder: (responder.rung, responder.place))

    def ask(
        self, callback: Callback, question: Callable[..., Any], step: int, where: str, *given: Any
    ) -> Any:
        """Return a callback's answer to anything but an event, under the same error policy.

        None if it raised or is switched off. `given` is what the question is asked with.
        """
        if id(callback) in self._off:
            return None
        try:
            return question(*given)
        except TrainingAborted:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the bus, as in emit
            self._switch_off(self._listener(callback, question), error, step, where)
            return None

    def glimpses(self, detectors: Sequence[Detector], step: int) -> list[Tensor]:
        """Return what these of the `calm_ones` want read along (`Detector.glimpse`); same error policy."""
        found = []
        for detector in detectors:
            try:
                value = detector.glimpse(step)
            except TrainingAborted:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the bus, as in emit
                self._switch_off(self._listener(detector, detector.glimpse), error, step, "glimpse")
                continue
            if value is not None:
                found.append(value)
        return found

    def are_calm(
        self, detectors: Sequence[Detector], step: int, norm: float, losses: Sequence[float]
    ) -> bool | None:
        """Return True if each of the `calm_ones` says so (`Detector.calm`), else what the first other said.

        Under the same error policy: None if it raised, or if these are not the ones any more.
        """
        if detectors is not self.calm_ones:
            return None
        for detector in detectors:
            try:
                answer = detector.calm(step, norm, losses)
            except TrainingAborted:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the bus, as in emit
                self._switch_off(self._listener(detector, detector.calm), error, step, "calm")
                return None
            if not answer:
                return None if answer is None else False
        return True

    def states(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what each callback must remember, by its name."""
        return {
            self.name_of(callback): self.ask(callback, callback.state_dict, step, "state_dict") or {}
            for callback in self.callbacks
        }

    def take_states(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Hand back what `states` returned; callbacks that are not there any more are left out."""
        for callback in self.callbacks:
            mine = states.get(self.name_of(callback))
            if mine:
                callback.load_state_dict(mine)

    def file(self, callback: Callback, found: Any, step: int) -> list[Filed]:
        """Return findings that a callback gave outside an event, filed under its slot."""
        if found is None:
            return []
        return list(self._file(found, self._listener(callback, callback.checks_after_step), step))

    def _listener(self, callback: Callback, function: Callable[..., Any]) -> Listener:
        name = self.name_of(callback)
        return Listener(function, callback, name, self.slot_names.index(name))

    @staticmethod
    def _file(found: Any, listener: Listener, step: int) -> Iterable[Filed]:
        if not isinstance(found, (Finding, Iterable)) or isinstance(found, str):
            raise TypeError(f"{listener.name} returned {type(found).__name__}; return a Finding or None")
        entries = [found] if isinstance(found, Finding) else list(found)
        for entry in entries:
            if not isinstance(entry, Finding):
                raise TypeError(f"{listener.name} returned {type(entry).__name__}; return a Finding or None")
            flaw = _flaw(entry.value, entry.limit, entry.action)
            if flaw is not None:
                raise TypeError(f"{listener.name} returned a finding {flaw}")
        return [Filed(listener.slot, step, entry, listener.name) for entry in entries]

    def _switch_off(self, listener: Listener, error: Exception, step: int, where: str) -> None:
        self._off.add(id(listener.owner))
        for listeners in self.heard.values():
            for other in listeners:
                if other.owner is listener.owner:
                    other.alive = False
        self._find_calm_ones()
        logger.error(
            "step %d: %s raised in %s and is switched off; the run goes on without it",
            step,
            listener.name,
            where,
            exc_info=error,
        )
        record_swallowed(error)
        if self._on_error is not None:
            self._on_error(listener, error, step)

    def _new_slot(self, name: str) -> int:
        taken = self.slot_names.count(name) + sum(known.startswith(f"{name}#") for known in self.slot_names)
        self.slot_names.append(f"{name}#{taken + 1}" if taken else name)
        return len(self.slot_names) - 1

    def _append(self, event: type[Event], listener: Listener) -> None:
        self.before_change()
        self.heard[event] = (*self.heard[event], listener)
        self._find_calm_ones()

    def _remove(self, event: type[Event], listener: Listener) -> None:
        self.before_change()
        self.heard[event] = tuple(known for known in self.heard[event] if known is not listener)
        self._find_calm_ones()


def failure_of(listener: Listener, error: Exception, step: int) -> Filed:
    """Return a callback's failure as a finding of its own slot, so that all ranks hear of it."""
    finding = Finding(
        kind=Kind.CALLBACK_ERROR,
        action=Action.WARN,
        value=torch.tensor(True),
        message=f"{listener.name} raised {type(error).__name__}: {error}; the run goes on without it",
    )
    return Filed(listener.slot, step, finding, listener.name)


def _flaw(value: Any, limit: Any, action: Any) -> str | None:
    """Say what keeps a finding from being judged together with those of the others; None if nothing."""
    if not isinstance(value, Tensor):
        return f"whose value is a {type(value).__name__}; it must be a tensor"
    if value.numel() != 1:
        return f"whose value has shape {tuple(value.shape)}; it must be 0-dim"
    if value.is_complex() or value.device.type == "meta":
        return f"whose value is {value.dtype} on {value.device}; it must be a real number"
    if not (limit is None or isinstance(limit, Real)):
        return f"whose limit is a {type(limit).__name__}; it must be a number"
    if not isinstance(action, Action):
        return f"whose action is {action!r}; it must be an Action, such as Action.SKIP"
    return None
