"""Risky features of the training, off after an incident and on again when the run is calm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradsentinel import events
from gradsentinel.callback import Callback
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Outcome
from gradsentinel.run import Run

logger = logging.getLogger("gradsentinel")

Switch = tuple[Callable[[], object], Callable[[], object]]
"""What turns a feature off, and what turns it on again."""


@dataclass(kw_only=True)
class SafeMode(Callback):
    """Turns off named features after an incident, and on again after enough clean steps.

    Features are what the program can do without for a while: compiled code, a fused kernel, fp8, an
    aggressive augmentation. The functions are called between two steps, on every rank, and take no
    arguments. Called on: every rank.
    """

    switches: Mapping[str, Switch] | None = None
    """By name, a function that turns the feature off and one that turns it on again: `{"fp8": (off, on)}`."""
    clean_steps: int = 100
    """So many applied steps without an incident turn the features on again."""
    min_action: Action | str = Action.SKIP
    """Incidents that cost at least this turn them off: retry, skip or rollback."""
    _switches: dict[str, Switch] = field(default_factory=dict, init=False, repr=False)
    _run: Run | None = field(default=None, init=False, repr=False)
    _off: list[str] = field(default_factory=list, init=False, repr=False)
    _clean: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.min_action = Action.parse(self.min_action)
        if self.min_action not in (Action.RETRY, Action.SKIP, Action.ROLLBACK):
            raise ConfigurationError("min_action must be retry, skip or rollback")
        if self.clean_steps < 1:
            raise ConfigurationError("clean_steps must be at least 1 step")
        self._switches = dict(self.switches or {})
        if not self._switches:
            raise ConfigurationError("switches must name at least one feature: {'fp8': (off, on)}")
        for name, switch in self._switches.items():
            if not (isinstance(switch, tuple) and len(switch) == 2 and all(map(callable, switch))):
                raise ConfigurationError(
                    f"switches[{name!r}] must be two functions: what turns it off, what turns it on again"
                )

    @property
    def active(self) -> bool:
        """True while the features are off."""
        return bool(self._off)

    def on_run_start(self, event: events.RunStart) -> None:
        """Turn off what an earlier process had turned off."""
        self._run = event.run
        self._turn(list(self._off), to_on=False)

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Turn the features off if the incident was bad enough."""
        outcome, action = event.recovery.outcome, event.incident.action
        if action < Action.parse(self.min_action) or outcome in (Outcome.REPORTED, Outcome.ABORTED):
            return
        self._clean = 0
        names = [name for name in self._switches if name not in self._off]
        self._off += names
        self._turn(names, to_on=False)

    def on_after_step(self, event: events.AfterStep) -> None:
        """Count clean steps, and turn the features on again when there were enough."""
        if not self._off or not event.applied or event.action > Action.WARN:
            return
        self._clean += 1
        if self._clean >= self.clean_steps:
            names, self._off, self._clean = self._off, [], 0
            self._turn(names, to_on=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what is off, and for how many clean steps it has been."""
        return {"off": list(self._off), "clean": self._clean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, and turn the features off or on accordingly."""
        before, wanted = self._off, [name for name in state["off"] if name in self._switches]
        self._off, self._clean = wanted, int(state["clean"])
        if self._run is not None:
            self._turn([name for name in wanted if name not in before], to_on=False)
            self._turn([name for name in before if name not in wanted], to_on=True)

    def _turn(self, names: list[str], *, to_on: bool) -> None:
        """Flip some switches, every one of them even if one raises; that is raised when all are flipped."""
        if not names:
            return
        failure: Exception | None = None
        for name in names:
            try:
                self._switches[name][to_on]()
            except Exception as error:  # noqa: BLE001 - raised below, when all are flipped
                failure = failure or error
        if self._run is not None and not self._run.consensus.rank:
            logger.warning(
                "step %d: safe mode turns %s %s", self._run.step, ", ".join(names), "on" if to_on else "off"
            )
        if failure is not None:
            raise failure
