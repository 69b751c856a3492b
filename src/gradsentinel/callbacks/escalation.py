"""How much a run may put up with: budgets over all its processes, a safe stop, an alarm."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from gradsentinel import events
from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Kind, Severity
from gradsentinel.errors import ConfigurationError, StoreError
from gradsentinel.evidence import Finding
from gradsentinel.incident import Incident, Outcome, Recovery, now
from gradsentinel.run import Run
from gradsentinel.store import check_schema, write_json
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

FILE = "escalation.json"
SCHEMA = 1
_FURTHER = 100
"""A run that makes so many steps has got further; only where no state on disk can tell."""


class _Ledger:
    """What all processes of a run have spent, by the number of steps that all of them have attempted."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._spent: dict[Action, list[int]] = {Action.SKIP: [], Action.ROLLBACK: []}
        self._offset = 0
        """Steps attempted by all processes, less this one's own count."""
        self._began = 0
        self._resumed_from: int | None = None
        self.running = True
        """False once a process has ended well."""
        self.restarts = 0
        """Restarts in a row that got no further."""
        self.further = False
        """True when this process has made some steps, where no state on disk can tell."""

    def take_up(self, account: Mapping[str, Any], iteration: int, resumed_from: int | None) -> None:
        """Go on from the account of the process before."""
        self._began, self._resumed_from = iteration, resumed_from
        if not account:
            return
        clock = int(account["attempted"])
        self._offset = max(int(account["offset"]), clock - iteration)
        for rung, spent in self._spent.items():
            spent[:] = [int(entry) for entry in account[rung.label]]
        if account["running"]:
            before = account["resumed_from"]
            further = resumed_from > (before or 0) if resumed_from is not None else bool(account["further"])
            self.restarts = 0 if further else int(account["restarts"]) + 1

    def made(self, iteration: int) -> int:
        """Return how many steps this process has attempted."""
        return iteration - self._began

    def enter(self, outcome: Outcome, iteration: int) -> None:
        """Count what was done about an incident."""
        rung = {Outcome.SKIPPED: Action.SKIP, Outcome.ROLLED_BACK: Action.ROLLBACK}.get(outcome)
        if rung is not None:
            self._spent[rung].append(self._offset + iteration)

    def spent(self, rung: Action, iteration: int) -> int:
        """Return how often a rung was used within the window."""
        entries = self._spent[rung]
        entries[:] = [entry for entry in entries if entry > self._offset + iteration - self._window]
        return len(entries)

    def as_dict(self, iteration: int) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": SCHEMA,
            "time": now(),
            "attempted": self._offset + iteration,
            "offset": self._offset,
            "running": self.running,
            "restarts": self.restarts,
            "resumed_from": self._resumed_from,
            "further": self.further,
            **{rung.label: list(entries) for rung, entries in self._spent.items()},
        }


@dataclass(kw_only=True)
class Escalation(Responder):
    """Ends a run that gets nowhere: budgets over all restarts, kept in `escalation.json`.

    A warning (one transient fault) is left to the other rungs. After an error (one that persists, or a bad
    state) the known-good state is written to disk, whatever `Rollback` is told to. A critical incident
    (several ranks at once, replicas that differ, a used-up budget) stops the run safely. Called on: every
    rank; rank 0 keeps the file and raises the alarm.
    """

    rung: ClassVar[Action] = Action.ABORT
    max_skips: int = 50
    """So many dropped steps within `window`, over all restarts; then a bad step is rolled back instead."""
    max_rollbacks: int = 10
    """So many rollbacks within `window`, over all restarts; then the run stops."""
    max_restarts: int = 3
    """So many restarts in a row that got no further may go on; the next one stops at its start. Further means
    that there is a newer known-good state, or, without `resume=`, that 100 steps were made."""
    window: int = 10_000
    """Length of the window, in steps attempted by all processes of the run."""
    critical: Action | str = Action.ABORT
    """What is done about a critical incident at least; "warn" leaves it to the other rungs."""
    alarm: Callable[[Incident], None] | None = field(
        default=None, repr=False
    )  # of rank 0, not to be compared
    """Is called with each critical incident, to send a message for instance."""
    _ledger: _Ledger = field(init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_skips", "max_rollbacks", "max_restarts"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.window < 1:
            raise ConfigurationError(f"window={self.window} must be at least 1 step")
        if self.alarm is not None and not callable(self.alarm):
            raise ConfigurationError("alarm must be a function that takes an incident")
        self.critical = Action.parse(self.critical)
        self._ledger = _Ledger(window=self.window)

    def on_run_start(self, event: events.RunStart) -> Finding | None:
        """Take up the account of the processes before this one, and stop if they got nowhere."""
        run = self._run = event.run
        told: tuple[dict[str, Any], str | None] = ({}, None)
        if run.consensus.rank == 0:
            told = _read(run.directory.path / FILE)
        account, refusal = run.consensus.gather(told)[0]
        if refusal is not None:
            raise StoreError(refusal)
        ledger = self._ledger
        ledger.take_up(account, run.iteration, run.resumed_from)
        self._save(run)
        if ledger.restarts <= self.max_restarts:
            return None
        return Finding(
            kind=Kind.CUSTOM,
            value=torch.tensor(True),
            action=Action.ABORT,
            message=f"restarted {ledger.restarts} times without getting further than step {run.step}; look "
            f"at the incidents, and delete {run.directory.path / FILE} to try again",
        )

    def on_after_step(self, event: events.AfterStep) -> None:
        """Note that the run gets further, where no state on disk does."""
        run = self._run
        if run is None:
            return
        run.states.thin_out(now=run.iteration)
        ledger = self._ledger
        if not ledger.further and run.resumed_from is None and ledger.made(run.iteration) >= _FURTHER:
            ledger.further = True
            self._save(run)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Enter what was done, secure the good state if it was bad, raise the alarm if it was very bad."""
        run, incident = self._run, event.incident
        if run is None:
            return
        self._ledger.enter(event.recovery.outcome, run.iteration)
        self._save(run)
        if incident.severity is Severity.CRITICAL:
            self._raise_alarm(incident, run)
        elif incident.severity is Severity.ERROR and run.known_good is not None and run.known_good.step:
            run.states.save(run.known_good, now=run.iteration)

    def on_run_end(self, event: events.RunEnd) -> None:
        """Note that the run ended well, or by the user's own wish: then a new start is no restart."""
        if self._run is not None and (event.error is None or isinstance(event.error, KeyboardInterrupt)):
            self._ledger.running = False
            self._save(self._run)

    def escalates(self, incident: Incident, run: Run) -> bool | Action:
        """Return what is to be done about a critical incident at least."""
        if incident.severity is not Severity.CRITICAL or incident.action < Action.RETRY:
            return False
        least = Action.parse(self.critical)
        if least > incident.action:
            incident.notes += (f"the incident is critical, and Escalation(critical={least.label!r}) says so",)
        return least

    def closes(self, incident: Incident, run: Run) -> Collection[Action]:
        """Return the rungs whose budget over all restarts is used up."""
        closed = []
        for rung, limit, what in (
            (Action.SKIP, self.max_skips, "dropped steps"),
            (Action.ROLLBACK, self.max_rollbacks, "rollbacks"),
        ):
            if self._ledger.spent(rung, run.iteration) >= limit:
                closed.append(rung)
                incident.notes += (
                    f"the budget of {limit} {what} in {self.window} steps, over all restarts, is used up",
                )
        return closed

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Hand over: what follows is the safe stop."""
        return None

    def _save(self, run: Run) -> None:
        if run.consensus.rank or not run.explicit_directory:
            return
        run.disk.attempt(
            f"{FILE}, without which a restart will not know what was spent,", lambda: self._write(run)
        )

    def _write(self, run: Run) -> None:
        run.directory.path.mkdir(parents=True, exist_ok=True)
        limits = {"skip": self.max_skips, "rollback": self.max_rollbacks, "window": self.window}
        write_json(run.directory.path / FILE, {**self._ledger.as_dict(run.iteration), "limits": limits})

    def _raise_alarm(self, incident: Incident, run: Run) -> None:
        if run.consensus.rank:
            return
        logger.critical("step %d: incident %s is critical", incident.step, incident.id)  # the rest is said
        if self.alarm is None:
            return
        try:
            self.alarm(incident)
        except Exception as error:
            logger.exception("the alarm failed")
            record_swallowed(error)


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the account on disk, and why it must not be ignored if a newer version wrote it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data["schema"], int) and data["schema"] > SCHEMA:
            check_schema(data, path)
        _Ledger(window=1).take_up(data, 0, None)
    except FileNotFoundError:
        return {}, None
    except StoreError as error:
        return {}, str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.error("%s cannot be read, so the budgets begin anew: %s", path, error)  # noqa: TRY400 - in the text
        return {}, None
    return data, None
