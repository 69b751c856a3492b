"""LR schedulers that the user's own loop steps, put back where a dropped step left them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from gradsentinel.host import TorchHost
from gradsentinel.schedules import Pace


class HeldSchedulers:
    """Remembers where schedulers were when a step was dropped, and takes back what they moved since.

    A framework that can be told to leave its schedulers alone needs none of this; here nobody asks before
    the user's code calls `scheduler.step()`. Schedulers that step on a metric, and those that do not move
    with every step, are left alone.
    """

    def __init__(self, host: TorchHost) -> None:
        self._host = host
        self._held: list[tuple[Any, Sequence[Optimizer], Pace]] = []
        self._seen: dict[int, Any] = {}
        """Where each scheduler was when a step of its optimizer was judged last."""
        self._resting: set[int] = set()
        """Those that did not move from one step to the next."""
        self._steppable: list[Any] | None = None
        self.wanted = False
        """True if schedulers have to be put back at all."""

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Hear that a step of these optimizers is about to be judged: the one before is over."""
        if not self.wanted:
            return
        self.put_back()
        mine = self._of(optimizers)
        self._held = [held for held in self._held if all(held[0] is not one for one in mine)]
        for scheduler in mine:
            place = _place(scheduler)
            rests = id(scheduler) in self._seen and self._seen[id(scheduler)] == place
            (self._resting.add if rests else self._resting.discard)(id(scheduler))
            self._seen[id(scheduler)] = place

    def hold(self, optimizers: Sequence[Optimizer]) -> None:
        """Remember the schedulers of these optimizers, whose step was dropped."""
        if not self.wanted:
            return
        for scheduler in self._of(optimizers):
            self._seen.pop(id(scheduler), None)  # it will not have moved, which then says nothing
            if id(scheduler) not in self._resting:
                self._held.append((scheduler, optimizers, Pace.of([scheduler], optimizers)))

    def put_back(self) -> None:
        """Put back those that have moved since."""
        waiting = []
        for scheduler, optimizers, pace in self._held:
            if _place(scheduler) == pace.states[0].get("last_epoch"):
                waiting.append((scheduler, optimizers, pace))
            else:
                pace.restore([scheduler], optimizers)
        self._held = waiting

    def forget(self) -> None:
        """Forget them: whatever moves them now has nothing to do with the step."""
        self._held.clear()

    def _of(self, optimizers: Sequence[Optimizer]) -> list[Any]:
        if self._steppable is None:
            self._steppable = [one for one in self._host.schedulers if _on_steps(one)]
        return [one for one in self._steppable if _belongs(one, optimizers)]


def _place(scheduler: Any) -> Any:
    return getattr(scheduler, "last_epoch", None)


def _on_steps(scheduler: Any) -> bool:
    return hasattr(scheduler, "step") and "metrics" not in inspect.signature(scheduler.step).parameters


def _belongs(scheduler: Any, optimizers: Sequence[Optimizer]) -> bool:
    owner = getattr(scheduler, "optimizer", None)
    inner = getattr(owner, "optimizer", owner)
    return owner is None or any(one is owner or one is inner for one in optimizers)
