"""A loader whose batches carry the faults of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from gradsentinel.faults.plan import FaultPlan

B = TypeVar("B")


class Batches(Generic[B]):
    """The batches of a loader, each the current micro-batch of the plan until the next is asked for."""

    def __init__(self, plan: FaultPlan, batches: Iterable[B], accumulate: int) -> None:
        self._plan = plan
        self._batches = batches
        self._accumulate = accumulate

    def __iter__(self) -> Iterator[B]:
        for batch in self._batches:
            step, microbatch = divmod(self._plan._drawn, self._accumulate)
            self._plan._drawn += 1
            with self._plan.at(step, microbatch):
                yield self._plan.poison(batch)


class SizedBatches(Batches[B]):
    """The same for a loader that knows its length; its last step ends with it, complete or not."""

    def __init__(self, plan: FaultPlan, batches: Iterable[B], accumulate: int, length: Sized) -> None:
        super().__init__(plan, batches, accumulate)
        self._length = length

    def __iter__(self) -> Iterator[B]:
        yield from super().__iter__()
        self._plan._drawn += -self._plan._drawn % self._accumulate

    def __len__(self) -> int:
        return len(self._length)
