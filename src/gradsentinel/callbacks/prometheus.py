"""The run's numbers and counts for Prometheus."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsentinel import events
from gradsentinel._version import __version__
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.run import Run
from gradsentinel.sinks.outbox import Outbox

logger = logging.getLogger("gradsentinel")


@dataclass(kw_only=True)
class PrometheusCallback(Callback):
    """Serves the run's numbers and counts to Prometheus, or writes them for node_exporter's textfiles.

    Needs gradsentinel[prometheus]. A step only leaves its numbers; metrics are made of them when somebody
    asks. Without a port or a file that can be used it warns, and the run goes on. Called on: every rank; rank
    0 serves.
    """

    port: int | None = None
    """Where to serve `/metrics`; 0 takes a free port. None serves nothing."""
    address: str = "127.0.0.1"
    """The address to serve at; this machine alone, unless it is another one, such as `"0.0.0.0"`."""
    textfile: str | Path | None = None
    """A file `*.prom` to write; it is replaced as a whole."""
    every_seconds: float = 15.0
    """Seconds between two versions of the file."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _last: events.AfterStep | None = field(default=None, init=False, repr=False)
    _at: float = field(default=0.0, init=False, repr=False)
    """When the last step was made, in seconds since 1970."""
    _skips: int = field(default=0, init=False, repr=False)
    _registry: Any = field(default=None, init=False, repr=False)
    _server: Any = field(default=None, init=False, repr=False)
    _outbox: Outbox[Path] | None = field(default=None, init=False, repr=False)
    _due: float = field(default=math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.port is None and self.textfile is None:
            raise ConfigurationError(
                "PrometheusCallback needs port= to be asked at, as in port=9464, or textfile= to write to"
            )
        if self.port is not None and not (isinstance(self.port, int) and 0 <= self.port < 1 << 16):
            raise ConfigurationError(f"port={self.port!r} must be a number from 0 to 65535")
        if self.textfile is not None and Path(self.textfile).suffix != ".prom":
            raise ConfigurationError(
                f"textfile={str(self.textfile)!r} must end in .prom: node_exporter reads no other files"
            )
        if not self.every_seconds > 0:
            raise ConfigurationError(f"every_seconds={self.every_seconds} must be above 0")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigurationError(
                "PrometheusCallback needs prometheus_client: pip install 'gradsentinel[prometheus]'"
            )

    @property
    def bound_port(self) -> int | None:
        """The port that is served at; None if none is."""
        return None if self._server is None else int(self._server.server_port)

    def on_run_start(self, event: events.RunStart) -> None:
        """Begin to serve, on rank 0."""
        if event.run.consensus.rank:
            return
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - optional

        self._run = event.run
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self))
        if self.port is not None:
            try:
                self._server, _ = start_http_server(self.port, addr=self.address, registry=self._registry)
            except OSError as error:
                logger.warning(
                    "Prometheus is not served: %s:%d cannot be used (%s); choose another port, or port=0 "
                    "for a free one. The run goes on",
                    self.address,
                    self.port,
                    error.strerror or error,
                )
        if self.textfile is not None:
            self._outbox = Outbox("PrometheusCallback's textfile", self._write, most=1)
            self._due = 0.0

    def on_after_step(self, event: events.AfterStep) -> None:
        """Leave the step's numbers for whoever asks."""
        self._last, self._at = event, time.time()
        self._skips += event.scaler_skipped
        if self._at >= self._due and self._outbox is not None:
            self._due = self._at + self.every_seconds
            self._outbox.put(Path(self.textfile or ""))

    def on_run_end(self, event: events.RunEnd) -> None:
        """Write the last numbers, and serve no more."""
        if self._outbox is not None:
            self._outbox.put(Path(self.textfile or ""))
            if self._outbox.close(5.0):
                logger.warning("PrometheusCallback: the last version of the file was not written in time")
            self._outbox = None
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self._run = None

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; called by prometheus_client, in a thread of its own."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - optional

        run, last = self._run, self._last
        if run is None:
            return
        name = run.directory.path.name
        for kind, metric, about, value in _numbers(run, last, self._at, self._skips):
            if value is not None:
                family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                    f"gradsentinel_{metric}", about, labels=["run"]
                )
                family.add_metric([name], float(value))
                yield family
        info = GaugeMetricFamily(
            "gradsentinel_run_info", "What the run is", labels=["run", "version", "world_size"]
        )
        info.add_metric([name, __version__, str(run.consensus.world_size)], 1.0)
        yield info
        counts = Counter(
            (str(one.kind), one.severity.label, str(one.outcome)) for one in tuple(run.incidents)
        )
        incidents = CounterMetricFamily(
            "gradsentinel_incidents",
            "Incidents since the process began",
            labels=["run", "kind", "severity", "outcome"],
        )
        for labels, count in counts.items():
            incidents.add_metric([name, *labels], count)
        yield incidents
        left = GaugeMetricFamily(
            "gradsentinel_budget_left", "What may still be spent within its window", labels=["run", "budget"]
        )
        for budget, rest in _budgets(run):
            left.add_metric([name, budget], rest)
        yield left

    def _write(self, path: Path) -> None:
        from prometheus_client import write_to_textfile  # noqa: PLC0415 - optional

        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), self._registry)


class _Collector:
    """What prometheus_client can keep: it wants to hash it, and a dataclass has no hash."""

    def __init__(self, callback: PrometheusCallback) -> None:
        self.collect = callback.collect


def _numbers(
    run: Run, last: events.AfterStep | None, at: float, skips: int
) -> Iterator[tuple[str, str, str, float | None]]:
    """Yield kind, name, explanation and value of what has no further labels; None where there is no value."""
    yield "counter", "steps_attempted", "Attempted steps of the run, over restarts", run.iteration
    yield "counter", "steps_applied", "Steps of this process that changed the weights", run.applied
    yield "counter", "scaler_skips", "Steps that the GradScaler dropped to find its scale", skips
    if last is None:
        return
    rates = last.learning_rates
    yield "gauge", "step", "The last optimizer step; goes back on a rollback", last.step
    yield "gauge", "loss", "Loss of the last step, mean over its micro-batches", last.loss
    yield "gauge", "gradient_norm", "Global gradient norm of the last step, before clipping", last.grad_norm
    yield "gauge", "learning_rate", "Learning rate of the first group", rates[0] if rates else None
    yield "gauge", "loss_scale", "Scale of the GradScaler", last.loss_scale
    yield "gauge", "last_step_timestamp_seconds", "When the last step was made, since 1970", at


def _budgets(run: Run) -> Iterator[tuple[str, int]]:
    for name, tell in list(run.budgets.items()):
        try:
            told: Mapping[str, Any] = tell()
        except RuntimeError:  # it was spent from while it was read; next time then
            continue
        limit, window, spent = told.get("limit"), told.get("window"), told.get("spent", ())
        if isinstance(limit, int) and isinstance(window, int):
            used = sum(1 for at in spent if at > run.iteration - window)
            yield name, max(0, limit - used)
