"""The numbers of the steps and the stories of the incidents, handed to any sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident
from gradsentinel.run import Run
from gradsentinel.sinks.markdown import markdown
from gradsentinel.sinks.outbox import Outbox
from gradsentinel.sinks.protocol import MetricsSink, check_sink, timed
from gradsentinel.sinks.rows import Gathered, Picture, Row

logger = logging.getLogger("gradsentinel")


@dataclass(kw_only=True)
class GathersNumbers(Callback):
    """Gathers what a step has to say with one append, and hands it over in bunches; rank 0 alone does.

    Handed over is every 32 steps, after 10 seconds, at each incident and at the end, so an exception loses
    nothing, and a process that is killed a bunch at most.
    """

    every: int = 1
    """Numbers every so many steps; incidents are written always."""
    _gathered: Gathered = field(default_factory=Gathered, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _silent: bool = field(default=False, init=False, repr=False)
    """True on the ranks that leave the writing to rank 0."""
    _untold: list[Incident] = field(default_factory=list, init=False, repr=False)
    """Incidents whose story has not been written yet."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"every={self.every} must be at least 1 step")

    def on_run_start(self, event: events.RunStart) -> None:
        """Open what is written to, on rank 0."""
        self._silent = event.run.consensus.rank > 0
        if not self._silent:
            self._run = event.run
            self._open(event.run)

    def on_after_step(self, event: events.AfterStep) -> None:
        """Take the step's numbers."""
        run = self._run
        if run is None:
            return
        if event.scaler_skipped:
            self._gathered.count("scaler_skips")
        if run.metrics or run.histograms:
            self._gathered.take_published(run)
        if self._untold:  # a warning; its diagnosis is there by now
            self._tell()
        if event.step % self.every and event.action is Action.CONTINUE:
            return
        if self._gathered.take(event):
            self._hand_over(self._gathered.rows(), self._gathered.pictures())

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Hand over what led up to it, and count it."""
        if self._run is None:
            return
        self._hand_over(self._gathered.rows(), self._gathered.pictures())
        self._gathered.count("incidents")
        self._untold.append(event.incident)
        self._look_at(event.incident, self._run)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Write the whole story of the incident as one text."""
        if self._run is None:
            return
        self._gathered.count(str(event.recovery.outcome))
        if not any(one is event.incident for one in self._untold):
            self._untold.append(event.incident)
        self._tell()

    def on_run_end(self, event: events.RunEnd) -> None:
        """Hand over what is left, and close what was opened."""
        run, self._run = self._run, None
        if run is None:
            return
        self._gathered.take_published(run)
        self._hand_over(self._gathered.rows(), self._gathered.pictures())
        self._tell()
        self._close()

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for incident in untold:
            self._show(incident)

    def _open(self, run: Run) -> None:
        raise NotImplementedError

    def _hand_over(self, rows: Sequence[Row], pictures: Sequence[Picture]) -> None:
        raise NotImplementedError

    def _look_at(self, incident: Incident, run: Run) -> None:
        """Look at the step of an incident, while its gradients are there."""

    def _show(self, incident: Incident) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


@dataclass(kw_only=True)
class MetricsCallback(GathersNumbers):
    """Hands numbers and incidents to sinks, such as `MLflowSink`; each in a thread that nobody waits for.

    A sink that is slow or fails never holds up training; what waits is bounded, what is lost is counted
    and logged. Called on: every rank; rank 0 writes.
    """

    sink: MetricsSink | Sequence[MetricsSink] | None = field(default=None, repr=False)
    """Where the numbers go: one `MetricsSink`, or several."""
    patience: float = 10.0
    """Seconds to wait for the sinks at the end of the run."""
    _feeds: list[_Feed] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink is None:
            raise ConfigurationError(
                "MetricsCallback needs a sink, as in MetricsCallback(sink=MLflowSink('sqlite:///mlflow.db'))"
            )
        if self.patience < 0:
            raise ConfigurationError(f"patience={self.patience} must be a number of seconds, 0 or more")
        for sink in self._sinks():
            check_sink(sink)

    def _sinks(self) -> tuple[Any, ...]:
        return tuple(self.sink) if isinstance(self.sink, (list, tuple)) else (self.sink,)

    def _open(self, run: Run) -> None:
        self._feeds = [_Feed(sink) for sink in self._sinks()]

    def _hand_over(self, rows: Sequence[Row], pictures: Sequence[Picture]) -> None:
        if rows:
            for feed in self._feeds:
                feed.put(partial(feed.write, rows))

    def _show(self, incident: Incident) -> None:
        text = markdown(incident)
        for feed in self._feeds:
            feed.put(partial(feed.sink.text, incident.iteration, "incident", text))

    def _close(self) -> None:
        for feed in self._feeds:
            feed.put(feed.sink.close)
        for feed in self._feeds:
            feed.end(self.patience)


class _Feed:
    """One sink with the thread that works for it."""

    def __init__(self, sink: MetricsSink) -> None:
        self.sink = sink
        self._name = type(sink).__name__
        self._scalars = timed(sink)
        self._outbox: Outbox[Callable[[], None]] = Outbox(self._name, lambda work: work())
        self.put = self._outbox.put

    def write(self, rows: Sequence[Row]) -> None:
        """Write a bunch; a sink that gathers them itself is asked to send them."""
        for row in rows:
            self._scalars(row.step, row.numbers, row.time)
        flush = getattr(self.sink, "flush", None)
        if callable(flush):
            flush()

    def end(self, patience: float) -> None:
        """Wait for what is left; say so if it was not finished in time."""
        left = self._outbox.close(patience)
        if left or self._outbox.dropped:
            logger.warning(
                "%s: %d bunches of numbers were not written", self._name, left + self._outbox.dropped
            )
