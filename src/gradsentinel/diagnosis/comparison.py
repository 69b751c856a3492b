"""Compares a replay with what the loop computed: is it the same computation, and where was it damaged?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.measures.inspection import local, parts_of
from gradsentinel.run import Run

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LAST_DIGITS = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """One gradient of the run against the replay's, element by element."""

    name: str
    total: int
    alike: int
    """Finite elements other than 0 that are the same, bit for bit."""
    odd: int
    """Elements that differ: finite ones that are others, and those that are not finite."""
    finite_odd: int
    """Finite elements that are others."""
    growth: float
    """How many times larger than in the replay an element is, at most; infinite if it is not finite."""
    index: int = 0
    """Flat position of the first element that differs, a finite one if there is one."""
    was: float = 0.0
    should: float = 0.0
    changed: int = 0
    """The bits that are not the same in it."""
    computable: bool = False
    """True if it is an Inf, or a NaN as arithmetic makes them: dividing by 0 gives these bits, too."""

    @property
    def in_part(self) -> bool:
        """True if it was damaged in some elements, and is the same in others."""
        return self.odd > 0 and self.alike > 0

    def __str__(self) -> str:
        more = f" and {self.odd - 1} more" if self.odd > 1 else ""
        return f"element {self.index} of {self.name}{more} differs: {self.was:g} instead of {self.should:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """All of them."""

    each: tuple[Gradient, ...]

    @property
    def alike(self) -> int:
        """Finite elements other than 0 that are the same, bit for bit."""
        return sum(one.alike for one in self.each)

    @property
    def odd(self) -> int:
        """Elements that differ."""
        return sum(one.odd for one in self.each)

    @property
    def total(self) -> int:
        """Elements that were compared."""
        return sum(one.total for one in self.each)

    @property
    def first(self) -> Gradient | None:
        """The one with the first difference, finite ones before others."""
        found = [one for one in self.each if one.odd]
        return min(found, key=lambda one: not one.finite_odd, default=None)

    @property
    def bit(self) -> int | None:
        """Number of the flipped bit, if one single element differs, in exactly one."""
        first = self.first
        if first is None or self.odd != 1 or first.changed & (first.changed - 1):
            return None
        return first.changed.bit_length() - 1

    @property
    def in_part(self) -> bool:
        """True if one was damaged in part, and at the same place the whole was left alone."""
        return any(one.in_part for one in self.each)

    @property
    def other(self) -> Gradient | None:
        """One that a fault at one place cannot explain.

        What hits an activation makes some elements bad, and leaves the others of the same gradient as they
        were; and it hits weight and bias of a module alike.
        """
        for one in self.each:
            if one.finite_odd and not one.alike:
                return one
            if one.odd > 1:
                module = one.name.rpartition(".")[0]
                siblings = [g for g in self.each if g.name.rpartition(".")[0] == module]
                if any(not sibling.odd and sibling.alike for sibling in siblings):
                    return one
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What speaks for and against that the replay computes what the loop computed."""

    against: str = ""
    """Why it is not the same computation; empty if nothing says so."""
    other_loss: tuple[float, float] | None = None
    """The loop's loss of a micro-batch and the replay's, if these are not the same."""
    other_in: int | None = None
    """The micro-batch that it is of, if that is known."""
    losses: int = 0
    """Finite losses of the loop that came out the same, bit for bit."""
    finite_loss: bool = False
    """True if every loss of the loop was finite."""
    gradients: Gradients | None = None
    """None where the run's gradients cannot be compared: reduced over ranks, or of another step."""


def compare(
    computed: Mapping[int, Computed],
    found: Mapping[str, Tensor],
    run: Run,
    *,
    scale: Tensor | None,
    reduced: bool,
) -> Comparison:
    """Compare losses and gradients; waits for the device.

    Args:
        computed: what each micro-batch came to when it was run again, by number.
        found: the gradients of the run itself, unscaled.
        run: the run.
        scale: of the loss, where there is a GradScaler.
        reduced: True if `found` are not this rank's own gradients.
    """
    if run.late_step is not None:
        return Comparison(against="the step was over when it was looked at, and the weights have moved on")
    if any(microbatch.written for microbatch in run.scene.microbatches):
        return Comparison(
            against="the loop wrote to the batch after it was handed out: the replay began with what is left"
        )
    numbers = [done.microbatch for done in run.scene.passes if done.loss is not None]
    if len(set(numbers)) < len(numbers):
        text = "the loop ran several backward passes on a micro-batch, forward= gives one loss"
        return Comparison(against=text)
    differs, losses, finite = _losses(computed, run)
    if differs is not None:
        number, before, now = differs
        text = _other_loss(before, now, run)
        return Comparison(against=text, other_loss=(before, now), other_in=number, losses=losses)
    if reduced:
        return Comparison(losses=losses, finite_loss=finite)
    gradients = compare_gradients(found, add_up(list(computed.values()), scale))
    return Comparison(losses=losses, finite_loss=finite, gradients=gradients)


def _losses(
    computed: Mapping[int, Computed], run: Run
) -> tuple[tuple[int | None, float, float] | None, int, bool]:
    """Return the micro-batch whose loss is another one, and both; how many are alike; if all are finite."""
    passes = [done for done in run.scene.passes if done.loss is not None]
    if not passes:
        return _mean_loss(computed, run)
    alike, finite = 0, True
    for done in passes:
        loss = done.loss
        if loss is None or not math.isfinite(before := float(loss)):
            finite = False
        elif done.microbatch in computed:
            again = computed[done.microbatch].loss
            if float(again) != before:
                return (done.microbatch, before, float(again)), alike, False
            alike += 1
    return None, alike, finite


def _mean_loss(
    computed: Mapping[int, Computed], run: Run
) -> tuple[tuple[int | None, float, float] | None, int, bool]:
    before = run.last_loss
    if before is None or not math.isfinite(before):
        return None, 0, False
    now = sum(float(computed[number].loss) for number in sorted(computed)) / len(computed)
    return (None, 1, True) if now == before else ((None, before, now), 0, False)


def _other_loss(before: float, now: float, run: Run) -> str:
    digits = 9 if abs(now - before) <= _LAST_DIGITS * max(abs(before), abs(now)) else 6
    text = f"the replay's loss is {now:.{digits}g}, the loop's was {before:.{digits}g}"
    if run.scene.repeated:
        return f"{text}: it is a further step on the same batch, whose random state is not known"
    return f"{text}: forward= is not what the loop computes"


@torch.no_grad()
def add_up(computed: Sequence[Computed], scale: Tensor | None) -> dict[str, Tensor]:
    """Add up the micro-batches' gradients as the run did, and unscale them as it did."""
    total: dict[str, Tensor] = {}
    for each in computed:
        for name, gradient in each.gradients.items():
            if gradient.layout is torch.strided:
                total[name] = total[name] + gradient if name in total else gradient.detach().clone()
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        total = {name: gradient * inverse.to(gradient.device) for name, gradient in total.items()}
    return total


@torch.no_grad()
def compare_gradients(found: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> Gradients | None:
    """Compare what can be compared; None if nothing can, or if the types are not alike."""
    each = []
    for name, gradient in found.items():
        if name not in total or local(gradient).layout is not torch.strided:
            continue
        mine = parts_of(local(gradient).detach()).flatten().contiguous()
        theirs = parts_of(total[name]).flatten().contiguous()
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return None
        each.append(_compare(name, mine, theirs))
    return Gradients(each=tuple(each)) if each else None


def _compare(name: str, mine: Tensor, theirs: Tensor) -> Gradient:
    kind = _BITS[mine.element_size()]
    same = (mine.view(kind) == theirs.view(kind)) | (mine == theirs)
    finite = torch.isfinite(mine)
    others, odd = ~same & finite, ~same | ~finite
    found = Gradient(
        name=name,
        total=mine.numel(),
        alike=int((same & finite & (mine != 0)).sum()),
        odd=int(odd.sum()),
        finite_odd=int(others.sum()),
        growth=_growth(mine, theirs),
    )
    if not found.odd:
        return found
    index = int((others if found.finite_odd else odd).to(torch.uint8).argmax())
    one, other = (int(tensor[index : index + 1].view(kind)) for tensor in (mine, theirs))
    usual = [int(mine.new_tensor([value]).abs().view(kind)) for value in (math.inf, math.nan)]
    return replace(
        found,
        index=index,
        was=float(mine[index]),
        should=float(theirs[index]),
        changed=(one ^ other) & ((1 << (8 * mine.element_size())) - 1),
        computable=one & ((1 << (8 * mine.element_size() - 1)) - 1) in usual,
    )


def _growth(mine: Tensor, theirs: Tensor) -> float:
    if not mine.numel():
        return 0.0
    ratio = mine.double().abs() / theirs.double().abs().clamp_min(torch.finfo(mine.dtype).tiny)
    return math.inf if bool(torch.isnan(ratio).any()) else float(ratio.max())


def in_order(microbatches: Sequence[MicroBatch], computed: Sequence[Computed]) -> dict[int, Computed]:
    """Return what was computed by the number of its micro-batch, in the order of the run."""
    pairs = zip(microbatches, computed, strict=False)
    return {m.index: c for m, c in sorted(pairs, key=lambda pair: pair[0].index)}


def alike(one: Computed, other: Computed) -> bool:
    """Return True if two replays of a micro-batch agree bit for bit."""
    if one.gradients.keys() != other.gradients.keys() or judge(one.loss) != judge(other.loss):
        return False
    return torch.equal(one.loss, other.loss) and all(
        gradient.layout is not torch.strided or torch.equal(gradient, other.gradients[name])
        for name, gradient in one.gradients.items()
    )
