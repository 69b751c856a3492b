"""Which micro-batch a replay computes: recognised by its data, since a replay tells the plan nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gradsentinel.faults.course import Course, Shot
from gradsentinel.faults.fault import Removable
from gradsentinel.faults.tree import tensors


class Replays:
    """Lets a persistent fault of one micro-batch fire again when that is replayed later in its step.

    Only in steps with a persistent fault, the tensors of the step's batches are kept, and those that enter
    the model are compared with them. An unknown batch counts as the current micro-batch.
    """

    def __init__(self, course: Course) -> None:
        self.active = False
        self._course = course
        self._batches: dict[int, list[Tensor]] = {}

    def may_fire(self, shot: Shot) -> bool:
        """Return whether a fault may fire while the current micro-batch is current."""
        fault, course = shot.fault, self._course
        if not fault.persistent or fault.microbatch is None or course.step is None:
            return shot.live()
        return shot.pending(course.step) and course.microbatch >= fault.microbatch

    def begin(self, step: int, shots: Iterable[Shot]) -> None:
        """Start a step: drop the batches of the last one, and see whether those of this one are needed."""
        self._batches = {}
        self.active = any(shot.fault.persistent and shot.pending(step) for shot in shots)

    def remember(self, batch: Any) -> None:
        """Keep the tensors of the current micro-batch."""
        if self.active:
            self._batches[self._course.microbatch] = [tensor for _, tensor in tensors(batch)]

    def watch(self, model: nn.Module) -> list[Removable]:
        """Set the current micro-batch whenever one that is known enters the model."""
        current = self._course.microbatch

        def recognise(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [tensor for _, tensor in tensors({"args": args, "kwargs": kwargs})]
            score = {m: sum(_known(g, known) for g in given) for m, known in self._batches.items()}
            best = max(score.values(), default=0)
            likely = [m for m, s in score.items() if s == best and s > 0]
            self._course.microbatch = likely[0] if likely and current not in likely else current

        return [model.register_forward_pre_hook(recognise, with_kwargs=True, prepend=True)]


def _known(tensor: Tensor, batch: list[Tensor]) -> bool:
    return any(_same(tensor, known) for known in batch)


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124 - NaN is equal to NaN here
