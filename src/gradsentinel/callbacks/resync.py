"""Making replicas alike again, from the ranks that agree with each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.measures.inspection import local
from gradsentinel.ranks.replicas import ReplicaGroup, checksums, combine
from gradsentinel.recovery import Budget
from gradsentinel.run import Run


@dataclass(kw_only=True)
class Resync(Responder):
    """Copies parameters and their optimizer state from the majority to the ranks that drifted away.

    Only for replicas that differ, and only if each group of them has a majority; everything else is left
    to the next rung, such as a Rollback after it in the list. So is a state that still differs when it was
    compared once more. Called on: every rank.
    """

    rung: ClassVar[Action] = Action.ROLLBACK
    max_resyncs: int = 3
    """So many within `window` steps are allowed: a rank that keeps drifting needs to be looked at."""
    window: int = 1000
    """Length of the window, in attempted steps."""
    _budget: Budget = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_resyncs < 0 or self.window < 1:
            raise ConfigurationError("max_resyncs must be 0 or more and window at least 1 step")
        self._budget = Budget(self.max_resyncs, self.window)

    def on_run_start(self, event: events.RunStart) -> None:
        """Let the event log know of the budget."""
        event.run.budgets[type(self).__name__] = self._budget.as_dict

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Broadcast the majority's values within each group that differs, and compare all groups again."""
        if incident.kind is not Kind.RANK_DIVERGENCE or not incident.sources:
            return None
        if incident.details.get("groups_without_majority"):
            incident.notes += ("no resync: where there is no majority there is nothing to copy from",)
            return None
        if not self._budget.spend(run.iteration):
            incident.notes += (f"the budget of {self.max_resyncs} resyncs in {self.window} steps is used up",)
            return None
        differing = [group for group in run.replicas if group.label in incident.sources]
        states = {group.label: _state_of(group, run) for group in differing}
        layouts = run.consensus.gather({group.label: _layout_of(group, run) for group in differing})
        mine = layouts[run.rank.rank]
        alike = all(
            layouts[rank].get(group.label) == mine[group.label] for group in differing for rank in group.ranks
        )
        if not run.consensus.all_of(alike):  # as when a rank has not made a step yet that the others made
            incident.notes += ("the optimizer state is not of the same kind on all ranks",)
            return None
        for group in differing:
            run.consensus.copy_from(incident.sources[group.label], states[group.label], group.group)
        if not _all_alike(run):
            incident.notes += ("replicas still differ after the majority's values were copied",)
            return None
        return Recovery(
            outcome=Outcome.RESCUED,
            apply=True,
            message=f"{incident.who} resynchronised with the majority",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the resyncs in the window."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state)


def _all_alike(run: Run) -> bool:
    """Compare the parameters of all replicas; called on every rank."""
    parameters, differs = dict(run.host.named_parameters()), False
    for group in run.replicas:
        total = combine(checksums([parameters[name] for name in group.members]))
        differs = bool(run.consensus.differ(total, group.group)) or differs
    return run.consensus.all_of(not differs)


def _layout_of(group: ReplicaGroup, run: Run) -> str:
    """Say in short what `_state_of` returns, and what of the state is no tensor: it must be the same."""
    parameters = dict(run.host.named_parameters())
    words = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in _state_of(group, run)]
    for name in group.members:
        for optimizer in run.host.optimizers:
            state = optimizer.state.get(parameters[name], {})
            words += [f"{key} {state[key]}" for key in sorted(state) if isinstance(state[key], (int, float))]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _state_of(group: ReplicaGroup, run: Run) -> list[Tensor]:
    """The group's parameters and their optimizer state, in the same order on every rank."""
    parameters = dict(run.host.named_parameters())
    tensors: list[Tensor] = []
    for name in group.members:
        parameter = parameters[name]
        tensors.append(local(parameter))
        for optimizer in run.host.optimizers:
            state = optimizer.state.get(parameter, {})
            tensors += [local(state[key]) for key in sorted(state) if isinstance(state[key], Tensor)]
    return tensors
