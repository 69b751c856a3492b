"""Where a run is: which faults fire now, which did, and which should have."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradsentinel.faults.dice import Dice
from gradsentinel.faults.injection import Hit, Injection

if TYPE_CHECKING:
    from gradsentinel.faults.fault import Fault


@dataclass
class Course:
    """Where the run is, and what has fired so far."""

    step: int | None = None
    """Step that is being computed; None outside any."""
    microbatch: int = 0
    """Micro-batch that is being computed."""
    rank: int = 0
    """Rank of this process."""
    fired: set[tuple[int, int]] = field(default_factory=set)
    """Fault number and step of all that fired."""
    log: list[Injection] = field(default_factory=list)
    """Everything that was injected, in order."""


class Debts:
    """The faults that a step owes: a drill whose fault did not happen would look like a success."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._step: int | None = None
        self._shots: list[Shot] = []

    def begin(self, step: int, shots: Iterable[Shot]) -> bool:
        """Start a step, and return whether it is another than the last."""
        if step == self._step:
            return False
        self.settle()
        self._step = step
        self._shots = [shot for shot in shots if shot.pending(step)]
        return True

    def settle(self) -> None:
        """Warn about the faults that were due and did not happen."""
        shots, step = self._shots, self._step
        self.forgive()
        for shot in shots:
            if (shot.dice.number, step) not in self._course.fired:
                warnings.warn(
                    f"{shot.fault.kind} (fault {shot.dice.number} of the plan) was due at step {step} and "
                    f"did not happen: {shot.fault.unfired}",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def forgive(self) -> None:
        """Forget them."""
        self._shots, self._step = [], None


class Shot:
    """One fault in one run: says whether it fires now, and keeps the record when it did."""

    def __init__(self, fault: Fault, dice: Dice, course: Course) -> None:
        self.fault = fault
        self.dice = dice
        self._course = course

    def live(self) -> bool:
        """Return whether the fault fires in the computation that is going on."""
        course = self._course
        return (
            course.step is not None
            and self.fault.microbatch in (None, course.microbatch)
            and self.pending(course.step)
        )

    def pending(self, step: int) -> bool:
        """Return whether the fault is still to fire in a computation of this step."""
        return self.fault.due_at(step=step, rank=self._course.rank) and (
            self.fault.persistent or (self.dice.number, step) not in self._course.fired
        )

    def settle(self) -> None:
        """Note that the fault is in effect in this step."""
        assert self._course.step is not None
        self._course.fired.add((self.dice.number, self._course.step))

    def record(self, target: str, where: str, hit: Hit) -> None:
        """Note that the fault fired, and what it did."""
        self.settle()
        assert self._course.step is not None
        self._course.log.append(
            Injection(
                step=self._course.step,
                microbatch=self._course.microbatch,
                rank=self._course.rank,
                kind=self.fault.kind,
                target=target,
                where=where,
                index=hit.index,
                before=hit.before,
                after=hit.after,
                bit=hit.bit,
                elements=hit.elements,
                op=hit.op,
            )
        )
