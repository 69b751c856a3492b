"""One line of JSON per event, on disk, as it happens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradsentinel import events
from gradsentinel._version import __version__
from gradsentinel.callback import Callback
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import jsonable, now
from gradsentinel.names import ParameterMap
from gradsentinel.run import Run
from gradsentinel.store import EventFile


@dataclass(kw_only=True)
class EventLog(Callback):
    """Writes `events-rank<N>.jsonl`: append-only, a line is with the system before training goes on.

    Beside it goes `params-rank<N>.json`, which says what each parameter's numbers and names are. Added to
    every run that has none. Called on: every rank, each into its own files.
    """

    every: int | None = None
    """Write a line with loss, norm and learning rate every so many steps; None writes only what matters:
    start, end, incidents, diagnoses, recoveries, and each step that a GradScaler dropped."""
    _file: EventFile | None = field(default=None, init=False, repr=False)
    _waiting: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _names: ParameterMap | None = field(default=None, init=False, repr=False)
    _ended: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigurationError(f"every={self.every} must be at least 1 step, or None")

    def on_run_start(self, event: events.RunStart) -> None:
        """Write who and where; in an unnamed run directory only once there is something to keep."""
        self._run = event.run
        run = event.run
        self._write(
            "run_start",
            event.step,
            lazily=not run.explicit_directory,
            version=__version__,
            rank=run.rank.as_dict(),
            world_size=run.consensus.world_size,
        )

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Write what was found."""
        incident = event.incident
        self._write(
            "incident",
            event.step,
            id=incident.id,
            kind=str(incident.kind),
            action=incident.action.label,
            message=incident.message,
            where=incident.where,
        )

    def on_diagnosis(self, event: events.DiagnosisEvent) -> None:
        """Write what it was."""
        self._write("diagnosis", event.step, id=event.incident.id, **event.diagnosis.as_dict())

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Write what was done."""
        recovery = event.recovery
        self._write(
            "recovery",
            event.step,
            id=event.incident.id,
            outcome=str(recovery.outcome),
            message=recovery.message,
            goes_on_from=recovery.step,
        )

    def on_after_step(self, event: events.AfterStep) -> None:
        """Write the step's numbers when they are due."""
        if self._names is not None:
            self._names.refresh()
        if event.scaler_skipped:
            self._write("scaler_skip", event.step, loss_scale=event.loss_scale)
        if self.every is not None and event.step % self.every == 0:
            self._write(
                "step",
                event.step,
                lazily=self._run is not None and not self._run.explicit_directory,
                applied=event.applied,
                loss=event.loss,
                grad_norm=event.grad_norm,
                learning_rates=list(event.learning_rates),
                loss_scale=event.loss_scale,
            )

    def on_run_end(self, event: events.RunEnd) -> None:
        """Write how it ended."""
        error = event.error
        spent = None if self._run is None or not self._run.staging.cost.count else self._run.staging.cost
        self._write(
            "run_end",
            event.step,
            lazily=error is None and self._file is None,
            error=None if error is None else f"{type(error).__name__}: {error}",
            **({} if not spent else {"snapshots": asdict(spent)}),
        )
        self._ended = True
        self._close()

    def _write(self, name: str, step: int, *, lazily: bool = False, **fields: Any) -> None:
        entry = jsonable({"event": name, "step": step, "time": now(), **fields})
        if self._file is None:
            self._waiting.append(entry)
            if lazily or self._run is None:
                return
            self._file = EventFile(self._run.directory.events_file(self._run.rank.rank))
            for waiting in self._waiting:
                self._file.write(waiting)
            self._waiting.clear()
            self._names = ParameterMap(self._run)
            self._names.write()
        else:
            self._file.write(entry)
        if self._ended:  # what the last event brought to light
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
