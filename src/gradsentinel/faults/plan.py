"""The plan: faults, the steps of a run, and one model they are put into."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from gradsentinel.faults.batches import Batches, SizedBatches
from gradsentinel.faults.course import Course, Debts, Shot
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, Removable
from gradsentinel.faults.injection import Injection
from gradsentinel.faults.names import Names
from gradsentinel.faults.replays import Replays

B = TypeVar("B")


class FaultPlan:
    """Puts faults into one run of one model, at given steps on given ranks.

        plan = FaultPlan([PoisonSample(steps=(3,)), FlipBit(steps=(7,), target="gradient", bit=30)], seed=1)
        with plan.attach(model):
            for batch in plan.batches(loader):
                ...                                   # the training loop as it is

    The same plan on the same model injects the same faults. It uses no global random number generator, and
    hooks are there only in the steps that have a fault due: any other step is bit-identical to one without
    the plan. Every rank makes the same plan; each injects what its `ranks` say. One plan serves one run: what
    fired stays in the log. A fault that was due and did not happen gives a RuntimeWarning.

    Compiled models run as written (eagerly) in the micro-batches that have a fault in a module due, so their
    results may differ there in the last bits. Under activation checkpointing a fault that is not `persistent`
    is in the forward pass and not in its recomputation; no fault changes the number or kind of the saved
    tensors, so the checkpoint raises nothing. The exception is selective checkpointing that keeps matrix
    products: it needs `persistent=True` for `MatmulOverflow`. TorchScript modules cannot be hit: `attach`
    says so.
    """

    def __init__(self, faults: Iterable[Fault], *, seed: int = 0, rank: int | None = None) -> None:
        """Make a plan; nothing happens before a model is attached and a step begins.

        Args:
            faults: what goes wrong.
            seed: decides whatever the faults leave open; the same on every rank.
            rank: rank of this process; None: as torch.distributed says, else the variable RANK, else 0.

        Raises:
            ValueError: something in the list is no fault.
        """
        if isinstance(faults, Fault):
            raise ValueError("give a list of faults: FaultPlan([fault])")  # noqa: TRY004
        self.faults = tuple(faults)
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise ValueError(f"{fault!r} is no fault: give PoisonSample(...), FlipBit(...) or the like")  # noqa: TRY004
        self.seed = seed
        self._rank = rank
        self._course = Course()
        self._shots = [
            Shot(fault, Dice(seed, number), self._course) for number, fault in enumerate(self.faults)
        ]
        self._debts = Debts(self._course)
        self._replays = Replays(self._course)
        self._attachment: Attachment | None = None
        self._over = False
        self._removables: list[Removable] = []
        self._drawn = 0

    @property
    def rank(self) -> int:
        """Rank of this process."""
        if self._rank is not None:
            return self._rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return int(os.environ.get("RANK", "0"))

    @property
    def log(self) -> list[Injection]:
        """What was injected on this rank so far, in order."""
        return self._course.log

    def attach(self, model: nn.Module) -> Attachment:
        """Aim the faults at a model, in effect from now until the result is detached or left as a context.

        Names are looked up for the faults that concern this rank only.

        Raises:
            ValueError: a name is not in the model (the message has the nearest), or a fault cannot be there.
            IndexError: a parameter has no element at the given index.
            RuntimeError: the plan is attached already.
        """
        if self._attachment is not None:
            raise RuntimeError("the plan is attached already: detach it first, or make a plan for each model")
        names = Names(model)
        arms = {
            shot.dice.number: shot.fault.aim(names, shot.dice)
            for shot in self._shots
            if shot.fault.needs_model and shot.fault.concerns(self.rank)
        }
        self._over = False
        self._attachment = Attachment(self, model, arms)
        return self._attachment

    def batches(self, batches: Iterable[B], *, accumulate: int = 1, start: int | None = None) -> Batches[B]:
        """Wrap a loader: counts steps, poisons samples and arms the faults of each step.

        A batch counts as the current one until the next is asked for. So put it around the loader, inside
        whatever draws the batches in time (`sentinel.steps(plan.batches(loader))`); not inside a prefetcher.

        Args:
            batches: any iterable of batches; with a length, the result has it too, and its last step ends
                with it, complete or not.
            accumulate: micro-batches in a step.
            start: number of the first step, for a run that resumes; None: goes on from where this plan is.

        Raises:
            ValueError: accumulate or start is out of range.
        """
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: a step has at least one micro-batch")
        if start is not None:
            if start < 0:
                raise ValueError(f"start={start}: steps count from 0")
            self._drawn = start * accumulate
        if isinstance(batches, Sized):
            return SizedBatches(self, batches, accumulate, batches)
        return Batches(self, batches, accumulate)

    @contextmanager
    def at(self, step: int, microbatch: int = 0) -> Iterator[None]:
        """Say where the run is, for loops that count by themselves: what runs inside belongs to this step.

        The forward pass, the backward pass and whatever replays them belong inside; pass the batch through
        `poison`.

        Raises:
            RuntimeError: a fault needs a model, and none is attached.
        """
        if self._attachment is None and not self._over:
            for fault in self.faults:
                if fault.needs_model and fault.concerns(self.rank):
                    raise RuntimeError(
                        f"{fault.kind} needs a model: call plan.attach(model) before the first step"
                    )
        outer = (self._course.step, self._course.microbatch)
        if outer[0] is None and not self._over:
            self._course.rank = self.rank
            if self._debts.begin(step, self._shots):
                self._replays.begin(step, self._shots)
        try:
            self._enter(step, microbatch)
            yield
        finally:
            self._enter(*outer)

    def poison(self, batch: B) -> B:
        """Return the batch with the faults due now: a changed copy, or the same object if none is due."""
        if self._course.step is not None:
            for shot in self._shots:
                batch = shot.fault.poison(batch, shot)
            self._replays.remember(batch)
        return batch

    def _enter(self, step: int | None, microbatch: int) -> None:
        self._disarm()
        self._course.step = None if self._over else step
        self._course.microbatch = microbatch
        if self._course.step is None or self._attachment is None:
            return
        if self._replays.active:
            self._removables += self._replays.watch(self._attachment.model)
        for shot in self._shots:
            if shot.dice.number in self._attachment.arms and self._replays.may_fire(shot):
                self._removables += self._attachment.arms[shot.dice.number](shot)

    def _disarm(self) -> None:
        while self._removables:
            self._removables.pop().remove()  # last in, first out: two faults may have changed the same thing

    def _detach(self, *, quiet: bool) -> None:
        self._disarm()
        self._course.step = None
        self._attachment = None
        self._over = True
        if quiet:
            self._debts.forgive()
        self._debts.settle()


class Attachment:
    """A plan in effect on a model; a context that ends with `detach`."""

    def __init__(self, plan: FaultPlan, model: nn.Module, arms: dict[int, Arm]) -> None:
        self.model = model
        self.arms = arms
        self._plan = plan

    def detach(self) -> None:
        """Remove every hook; from now on the plan does nothing. Flipped bits of parameters stay flipped."""
        self._end(quiet=False)

    def __enter__(self) -> FaultPlan:
        return self._plan

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(quiet=kind is not None)  # a run that failed on its own is not to blame for a missing fault

    def _end(self, *, quiet: bool) -> None:
        if self._plan._attachment is self:
            self._plan._detach(quiet=quiet)
