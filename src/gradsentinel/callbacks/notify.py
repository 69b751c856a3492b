"""Alerts about incidents: to a server, a command or a function."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.callbacks.alert import Allowance, about_end, about_incident, with_repeats
from gradsentinel.callbacks.alert_delivery import Call, Command, Delivery, Post, without_addresses
from gradsentinel.decision import Severity
from gradsentinel.errors import ConfigurationError, TrainingAborted
from gradsentinel.incident import Incident, Outcome
from gradsentinel.run import Run
from gradsentinel.sinks.outbox import Outbox

logger = logging.getLogger("gradsentinel")

_CLAIM = ".alert-of-the-end"
"""A file in the run directory: the rank that makes it says how the run ended, where not all of them can."""


@dataclass(kw_only=True)
class Notify(Callback):
    """Sends an alert about each incident of some severity: JSON by HTTP POST, to a command, or to a function.

    A thread sends them, which training never waits for, but for a few seconds when the run stops. Rank 0
    sends; how a run ended that not all ranks left together says the first of them that gets to it. What
    happens again and again is folded: `7 more like this`. Addresses, headers and arguments are in no log,
    file or error. Called on: every rank.
    """

    on: str = "error"
    """The least severity to tell of: `"warning"`, `"error"` or `"critical"`; an abort is always told."""
    url: str | None = field(default=None, repr=False)
    """Where to POST the alert; http or https."""
    command: str | Sequence[str] | None = field(default=None, repr=False)
    """A program, run without a shell, that gets the alert on its standard input."""
    fn: Callable[[dict[str, Any]], Any] | None = field(default=None, repr=False)
    """A function that gets the alert; it is called in a thread."""
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Further headers for `url`, such as Authorization."""
    shape: Callable[[dict[str, Any]], Any] | None = field(default=None, repr=False)
    """Makes another JSON body of an alert, for a service that wants its own."""
    report: str | None = None
    """A link that goes into the alert, in which `{run}` and `{id}` are filled in."""
    burst: int = 3
    """So many alerts of one kind at once."""
    per_hour: float = 12.0
    """So many alerts of one kind an hour after that; the rest is counted, and told with the next one."""
    timeout: float = 5.0
    """Seconds for one answer of the server, and for the whole command."""
    retries: int = 4
    """Further attempts of a POST after no answer, 408, 425, 429 or 5xx; the waits between them grow."""
    patience: float = 5.0
    """Seconds that a run which stops waits for its last alerts."""
    _delivery: Delivery = field(init=False, repr=False)
    _allowance: Allowance = field(init=False, repr=False)
    _outbox: Outbox[dict[str, Any]] | None = field(default=None, init=False, repr=False)
    _hurry: Any = field(default=None, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _untold: list[Incident] = field(default_factory=list, init=False, repr=False)
    """Warnings, whose severity is known at the end of the step."""
    _held: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict, init=False, repr=False)
    """By kind: how many alerts were not sent, and the newest of them."""
    _least: Severity = field(default=Severity.ERROR, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._least = Severity[self.on.upper()]
        except (KeyError, AttributeError):
            raise ConfigurationError(
                f"on={self.on!r} is no severity; choose warning, error or critical"
            ) from None
        given = [name for name in ("url", "command", "fn") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigurationError(
                f"Notify needs one of url=, command= and fn=, not {' and '.join(given) or 'none'}; for "
                "several ways put several Notify callbacks into the list"
            )
        if self.burst < 1 or not self.per_hour > 0 or math.isinf(self.per_hour):
            raise ConfigurationError(
                f"burst={self.burst} must be at least 1 alert, and per_hour={self.per_hour} above 0"
            )
        if not (self.timeout > 0 and self.patience >= 0 and self.retries >= 0):
            raise ConfigurationError(
                f"timeout={self.timeout} must be above 0 seconds, patience={self.patience} and "
                f"retries={self.retries} at least 0"
            )
        if self.shape is not None and not callable(self.shape):
            raise ConfigurationError("shape= must be a function that makes another body of an alert")
        if self.headers and self.url is None:
            raise ConfigurationError("headers= go with url=")
        self._delivery = self._make_delivery()
        self._allowance = Allowance(self.burst, self.per_hour)

    def _make_delivery(self) -> Delivery:
        if self.url is not None:
            return Post(self.url, _checked(self.headers or {}), self.timeout, self.retries)
        if self.command is not None:
            return Command(self.command, self.timeout)
        assert self.fn is not None
        return Call(self.fn)

    def on_run_start(self, event: events.RunStart) -> None:
        """Get ready; a claim that an earlier process left is void."""
        self._run, self._hurry = event.run, threading.Event()
        self._outbox = Outbox(
            f"{type(self).__name__} to {self._delivery.target}",
            self._deliver,
            most=64,
            tell=without_addresses,
        )
        if event.run.consensus.rank == 0:
            with suppress(OSError):
                (event.run.directory.path / _CLAIM).unlink(missing_ok=True)

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Remember it: how bad it is shows when it is dealt with."""
        if self._speaks():
            self._untold.append(event.incident)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Tell of it; when the run stops, wait a little for the alert to leave."""
        if not self._speaks():
            return
        self._untold = [one for one in self._untold if one is not event.incident]
        self._tell(event.incident)
        if event.recovery.outcome is Outcome.ABORTED:
            self._wait()

    def on_after_step(self, event: events.AfterStep) -> None:
        """Tell of what only was a warning, and of what was held back, if there is something."""
        if self._untold:
            untold, self._untold = self._untold, []
            for incident in untold:
                self._tell(incident)
        if self._held:
            self._tell_held()

    def on_run_end(self, event: events.RunEnd) -> None:
        """Tell of an end that no incident tells of, and of what was held back; then wait a little."""
        run, error = self._run, event.error
        if run is None or self._outbox is None:
            return
        if self._speaks():
            for incident in self._untold:
                self._tell(incident)
            self._tell_held(at_once=True)
        known = isinstance(error, TrainingAborted) and error.incident is not None
        if isinstance(error, Exception) and not known and self._claims(run):
            self._outbox.put(about_end(error, run, self.report), first=True)
        self._wait()
        left = self._outbox.close(0.0)
        self._run = None
        if left or self._outbox.dropped:
            logger.warning("%s: %d alerts were not sent", self._delivery.target, left + self._outbox.dropped)

    def _speaks(self) -> bool:
        return self._run is not None and self._run.consensus.rank == 0

    def _tell(self, incident: Incident) -> None:
        """Send an alert, or count it if there were too many of its kind."""
        assert self._run is not None
        assert self._outbox is not None
        aborts = incident.outcome is Outcome.ABORTED
        if incident.severity < self._least and not aborts:
            return
        alert = about_incident(incident, self._run, self.report)
        kind = str(incident.kind)
        count, _ = self._held.pop(kind, (0, None))
        if self._allowance.take(kind) or aborts:
            self._outbox.put(with_repeats(alert, count) if count else alert, first=aborts)
        else:
            self._held[kind] = (count + 1, alert)

    def _tell_held(self, *, at_once: bool = False) -> None:
        """Send the newest held-back alert of each kind, for all of them, where one is allowed again."""
        assert self._outbox is not None
        for kind in list(self._held):
            if at_once or self._allowance.take(kind):
                count, alert = self._held.pop(kind)
                self._outbox.put(with_repeats(alert, count - 1) if count > 1 else alert)

    def _claims(self, run: Run) -> bool:
        """Return True if this rank is to say how the run ended; others may be gone, so nobody is asked."""
        if run.consensus.world_size == 1:
            return True
        try:
            run.directory.path.mkdir(parents=True, exist_ok=True)
            (run.directory.path / _CLAIM).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return run.consensus.rank == 0
        return True

    def _wait(self) -> None:
        if self._outbox is None:
            return
        self._hurry.set()
        self._outbox.wait(self.patience)

    def _deliver(self, alert: dict[str, Any]) -> None:
        """Send one alert; called in the thread."""
        body = alert if self.shape is None else self.shape(dict(alert))
        try:
            self._delivery.deliver(body, self._hurry)
        except Exception as error:
            run = self._run
            if run is not None:  # nothing is hidden: the event log says it too
                run.journal.append(("alert_failed", {"id": alert["id"], "why": without_addresses(error)}))
            raise


def _checked(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers; raises ConfigurationError without repeating their values."""
    for name, value in headers.items():
        if not (isinstance(name, str) and isinstance(value, str) and name.isascii() and name.isprintable()):
            raise ConfigurationError("headers= must be a mapping of names to values, both strings")
        if not value.isprintable():
            raise ConfigurationError(f"headers=: the value of {name} has characters that no header can have")
    return dict(headers)
