"""Making replicas alike again, from the ranks that agree with each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gradsentinel.callback import Responder
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.inspection import local
from gradsentinel.recovery import Budget
from gradsentinel.replicas import ReplicaGroup
from gradsentinel.run import Run
from gradsentinel.topology import fold_ranks


@dataclass(kw_only=True)
class Resync(Responder):
    """Copies parameters and their optimizer state from the majority to the ranks that drifted away.

    Only for replicas that differ, and only with a majority; everything else is left to the next rung,
    such as a Rollback after it in the list. Called on: every rank.
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

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Broadcast the majority's values within each group that differs."""
        sources: dict[str, int] = incident.details.get("majority", {})
        if incident.kind is not Kind.RANK_DIVERGENCE or not sources:
            return None
        if not self._budget.spend(run.iteration):
            incident.notes += (f"the budget of {self.max_resyncs} resyncs in {self.window} steps is used up",)
            return None
        layouts = run.consensus.gather([_layout_of(group, run) for group in run.replicas])
        mine = layouts[run.rank.rank]
        alike = all(
            layouts[rank][number] == mine[number]
            for number, group in enumerate(run.replicas)
            for rank in group.ranks
        )
        if not run.consensus.all_of(alike):  # as when a rank has not made a step yet that the others made
            incident.notes += ("the optimizer state is not of the same kind on all ranks",)
            return None
        for group in run.replicas:
            for source in sources.values():
                if source in group.ranks and run.rank.rank in group.ranks:
                    run.consensus.copy_from(source, _state_of(group, run), group.group)
        return Recovery(
            outcome=Outcome.RESCUED,
            apply=True,
            message=f"{fold_ranks(rank.rank for rank in incident.ranks)} resynchronised with the majority",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the resyncs in the window."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state)


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
