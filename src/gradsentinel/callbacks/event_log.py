"""One line of JSON per event, on disk, as it happens."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from gradsentinel import events
from gradsentinel._version import __version__
from gradsentinel.callback import Callback
from gradsentinel.devices import device_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import jsonable, now
from gradsentinel.names import ParameterMap
from gradsentinel.run import Run
from gradsentinel.state.disk import reason_of
from gradsentinel.store import EventFile

logger = logging.getLogger("gradsentinel")

_WHAT = "the event log"
_MOST_WAITING = 1000
"""So many lines are held back while a run without a named directory has nothing to keep."""


@dataclass(kw_only=True)
class EventLog(Callback):
    """Writes `events-rank<N>.jsonl`: append-only, a line is with the system before training goes on.

    Beside it goes `params-rank<N>.json`, which says what each parameter's numbers and names are. Added to
    every run that has none. Called on: every rank, each into its own files.
    """

    needs_random_states = False
    every: int | None = 10
    """Rank 0 writes a line with loss, norm and learning rate every so many steps, and in it loss and norm of
    each step since the last line. None writes only what matters: start, end, incidents, diagnoses,
    recoveries, what is left of the budgets, which snapshots there are, and each step that a GradScaler
    dropped."""
    every_rank: bool = False
    """Have each rank write those lines, not rank 0 alone."""
    _file: EventFile | None = field(default=None, init=False, repr=False)
    _waiting: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _names: ParameterMap | None = field(default=None, init=False, repr=False)
    _ended: bool = field(default=False, init=False, repr=False)
    _counts_steps: bool = field(default=False, init=False, repr=False)
    _since: list[tuple[int, float | None, float]] = field(default_factory=list, init=False, repr=False)
    """Attempted step, loss and norm of the steps since the last line."""
    _budgets: list[dict[str, Any]] | None = field(default=None, init=False, repr=False)
    """As they were written last."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigurationError(f"every={self.every} must be at least 1 step, or None")
        self.prompt_every = self.every

    def on_run_start(self, event: events.RunStart) -> None:
        """Write who and where; in an unnamed run directory only once there is something to keep."""
        self._run = event.run
        run = event.run
        self._counts_steps = self.every is not None and (self.every_rank or run.rank.rank == 0)
        self._write(
            "run_start",
            event.step,
            lazily=not run.explicit_directory,
            iteration=run.iteration,
            version=__version__,
            rank=run.rank.as_dict(),
            world_size=run.consensus.world_size,
            **({"saturates": True} if device_of(run.host.device).saturates else {}),  # then NaN is never seen
        )

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Write what was found."""
        incident = event.incident
        self._write(
            "incident",
            event.step,
            iteration=incident.iteration,
            id=incident.id,
            kind=str(incident.kind),
            severity=incident.severity.label,
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
        self._write_budgets(event.step)

    def on_after_step(self, event: events.AfterStep) -> None:
        """Write the step's numbers when they are due."""
        if self._names is not None:
            self._names.refresh()
        if event.scaler_skipped:
            self._write("scaler_skip", event.step, iteration=event.iteration, loss_scale=event.loss_scale)
        if self._budgets is None:
            self._write_budgets(event.step)
        if self._run is not None and self._run.journal:
            self._write_journal(self._run, event.step)
        if not self._counts_steps or self.every is None:
            return
        if event.step % self.every and not event.action:
            self._since.append((event.iteration, event.loss, event.grad_norm))
            return
        self._write_step(event)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Write how it ended."""
        error, run = event.error, self._run
        spent = None if run is None or not run.staging.cost.count else run.staging.cost
        if run is not None and run.journal and self._file is not None:
            self._write_journal(run, event.step)
        self._write(
            "run_end",
            event.step,
            lazily=error is None and self._file is None,
            error=None if error is None else f"{type(error).__name__}: {error}",
            **({} if run is None else {"iteration": run.iteration, "applied": run.applied}),
            **({} if not self._since else {"before": self._take_since()}),
            **({} if not spent else {"snapshots": asdict(spent)}),
        )
        self._ended = True
        if run is not None and run.disk.refuses_something:
            run.disk.retry(now=True)
        self._close()

    def _write_step(self, event: events.AfterStep) -> None:
        self._write(
            "step",
            event.step,
            lazily=self._is_unnamed,
            iteration=event.iteration,
            applied=event.applied,
            loss=event.loss,
            grad_norm=event.grad_norm,
            learning_rates=list(event.learning_rates),
            loss_scale=event.loss_scale,
            **({} if not self._since else {"before": self._take_since()}),
        )

    def _take_since(self) -> dict[str, list[Any]]:
        """Return the numbers of the steps since the last line, and begin anew."""
        since, self._since = self._since, []
        iterations, losses, norms = map(list, zip(*since, strict=True))
        return {"iterations": iterations, "loss": losses, "grad_norm": norms}

    def _write_budgets(self, step: int) -> None:
        """Write what may still be spent, if that has changed."""
        run = self._run
        if run is None:
            return
        budgets = [{"name": name, **tell()} for name, tell in run.budgets.items()]
        before, self._budgets = self._budgets, budgets
        if budgets != (before or []):
            self._write("budgets", step, lazily=self._is_unnamed, iteration=run.iteration, budgets=budgets)

    def _write_journal(self, run: Run, step: int) -> None:
        """Write what others noted during the step."""
        while run.journal:
            name, facts = run.journal.popleft()
            self._write(name, step, lazily=self._is_unnamed, iteration=run.iteration, **facts)

    @property
    def _is_unnamed(self) -> bool:
        return self._run is not None and not self._run.explicit_directory

    def _write(self, name: str, step: int, *, lazily: bool = False, **fields: Any) -> None:
        entry = jsonable({"event": name, "step": step, "time": now(), **fields})
        if self._file is None:
            if len(self._waiting) >= _MOST_WAITING:  # the first says who and where
                del self._waiting[1 : _MOST_WAITING // 2]
            self._waiting.append(entry)
            if lazily or self._run is None:
                return
            self._file = EventFile(self._run.directory.events_file(self._run.rank.rank))
            for waiting in self._waiting:
                self._append(waiting)
            self._waiting.clear()
            self._names = ParameterMap(self._run)
            self._names.write()
        else:
            self._append(entry)
        if self._ended:  # what the last event brought to light
            self._close()

    def _append(self, entry: dict[str, Any]) -> None:
        """Hand a line to the system; what it does not take is kept, and written behind a later line."""
        assert self._file is not None
        assert self._run is not None
        disk = self._run.disk
        try:
            self._file.write(entry)
            if self._file.lost:
                lost, self._file.lost = self._file.lost, 0
                self._file.write({"event": "lines_lost", "step": entry["step"], "time": now(), "count": lost})
        except OSError as error:
            disk.refused(_WHAT, error)
            return
        disk.taken(_WHAT)
        if disk.refuses_something:
            disk.retry()

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            logger.error(  # noqa: TRY400 - the reason is in the message
                "the last %d lines of the event log are lost: %s", self._file.waiting, reason_of(error)
            )
        self._file = None
