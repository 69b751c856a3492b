"""The learning-rate schedulers of a loop: one step on, and back to where they were."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def advance(schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    """Step the schedulers that belong to these optimizers, or to none."""
    for scheduler in schedulers:
        owner = getattr(scheduler, "optimizer", None)
        if owner is None or any(owner is optimizer for optimizer in optimizers):
            scheduler.step()


@dataclass(frozen=True, slots=True)
class Pace:
    """Where the schedulers and the learning rates were; no wait for the device."""

    states: tuple[dict[str, Any], ...]
    rates: tuple[Any, ...]

    @classmethod
    def of(cls, schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> Pace:
        """Copy the schedulers' states and the optimizers' learning rates, some of which compute on those."""
        rates = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
        return cls(
            states=tuple(copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers),
            rates=tuple(rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates),
        )

    def restore(self, schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
        """Put schedulers and learning rates back."""
        for scheduler, state in zip(schedulers, self.states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(state))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=False):
            if isinstance(group.get("lr"), Tensor) and isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            elif "lr" in group:
                group["lr"] = rate
