"""The batches of a run, with the faults in them, and what is measured between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from gradsentinel.campaign.journal import Journal
from gradsentinel.campaign.probe import Effect, Probe, Truth, _plain
from gradsentinel.campaign.schedule import Planned
from gradsentinel.campaign.workloads.text import Batch, LossScale
from gradsentinel.faults import FaultPlan


class Feed:
    """Yields the batches from a number on; between two of them it measures what a fault has done.

    Everything is measured here, so that a loop, and a framework that draws batches by itself, need nothing
    but this in the place of their loader.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        faults: Sequence[Planned],
        journal: Journal,
        *,
        plan: FaultPlan | None,
        probe: Probe,
        seed: int,
        scale: LossScale | None = None,
    ) -> None:
        self.start = 0
        """Number of the batch that comes first."""
        self.left_out: set[int] = set()
        """Batches that somebody has taken out by hand."""
        self.effects: dict[int, Effect] = {}
        self.truths: dict[int, Truth] = {}
        self._batches = batches
        self._faults = {one.step: one for one in faults}
        self._all = faults
        self._journal = journal
        self._plan = plan
        self._probe = probe
        self._seed = seed
        self._scale = scale
        self._step = ExitStack()
        """The faults of the step in flight; a loop that died has left them armed."""

    def __len__(self) -> int:
        return len(self._batches) - self.start - sum(number >= self.start for number in self.left_out)

    def __iter__(self) -> Iterator[Batch]:
        self._step.close()
        for number in range(self.start, len(self._batches)):
            if number in self.left_out:
                continue
            self._journal.draw(number)
            faulty = number in self._faults
            if faulty:
                self._measure_before(number)
            batch = dict(self._batches[number])
            if self._plan is not None:
                self._step.enter_context(self._plan.at(number))
                batch = self._plan.poison(batch)
            yield batch
            self._step.close()
            if faulty and self._plan is not None:
                self._journal.rest()
                self.effects[number] = self._probe.after(number, self._batches[number])
        self._journal.rest()

    def _measure_before(self, number: int) -> None:
        self._journal.rest()
        self._probe.before(self._scale.scale if self._scale is not None else 1.0)
        if self._plan is None:
            self.truths[number] = self._probe.try_fault(self._all, self._seed, number, self._batches[number])
        self._journal.draw(number)

    def as_dict(self) -> dict[str, Any]:
        """JSON form of what was measured."""
        return {
            "effects": [{k: _plain(v) for k, v in asdict(one).items()} for one in self.effects.values()],
            "truths": [one.as_dict() for one in self.truths.values()],
        }
