"""What to think of a step that is fine when it is run again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import fold
from gradsentinel.inspection import local
from gradsentinel.run import Run

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAME_LOSS = 1e-4


@dataclass(slots=True, kw_only=True)
class Again:
    """The step run twice more, both times finite."""

    computed: Sequence[Computed]
    """One per micro-batch."""
    deterministic: bool
    """True if both runs agree bit for bit."""
    custom: frozenset[str]
    """The user's own operators that took part."""
    unwritten: bool
    """True if memory that is read before it is written gets into the result."""
    written: tuple[str, ...]
    """Gradients of the run that something wrote to in place after the backward pass."""
    hooked: bool
    """True if the user's own hooks on accumulated gradients took part, which a replay leaves out."""
    found: Mapping[str, Tensor]
    """The gradients of the run itself."""
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class Difference:
    """How the run's gradients differ from those of the replay."""

    elements: int
    total: int
    name: str
    index: int
    """Flat position of the first element that differs."""
    bit: int | None
    """Number of the flipped bit, if one element differs in exactly one."""
    was: float
    should: float


_CLEAN = "run again from the same batch, weights and random state, the step is finite"


def judge_again(again: Again, run: Run, *, reduced: bool) -> Diagnosis:
    """Return the diagnosis of a fault that does not come back; hardware only if nothing else explains it."""
    return (
        _added_up(again)
        or _software(again, run)
        or _in_one_bit(again, run, reduced=reduced)
        or _rest(again, run, reduced=reduced)
    )


def _added_up(again: Again) -> Diagnosis | None:
    """Micro-batches that are finite one by one, and whose sum is not."""
    total = _total(again)
    name = next((name for name, gradient in total.items() if judge(gradient)), None)
    if name is None or len(again.computed) < 2:
        return None
    dtype = str(total[name].dtype).removeprefix("torch.")
    fact = f"the gradient of {name} is finite for each micro-batch, the sum of all exceeds {dtype}"
    if total[name].dtype in (torch.float16, torch.bfloat16):
        fix = "accumulate gradients in float32, or divide the loss by the number of micro-batches first"
        return _answer("precision", 0.9, fact, remedy=fix, phase="reduce")
    return _answer(
        "math", 0.8, fact, remedy="clip each micro-batch, or lower the learning rate", phase="reduce"
    )


def _software(again: Again, run: Run) -> Diagnosis | None:
    custom = ", ".join(sorted(again.custom))
    if again.unwritten:
        by = f" (custom operators: {custom})" if custom else ""
        fact = (
            f"memory that is read before it is written gets into the result, and changes from run to run{by}"
        )
        return _answer("operator", 0.85, fact, remedy="allocate with zeros instead of empty, or write it all")
    lost = _other_loss(again, run)
    if lost:
        return _answer("unknown", 0.2, lost, remedy="let forward= compute exactly what the loop computes")
    if again.custom:
        fact = (
            f"custom operators took part ({custom}): a race in them explains it as well as a failing device"
        )
        return _answer(
            "operator", 0.5, fact, remedy=f"look for a race in {custom}, or use standard operators"
        )
    if not again.deterministic:
        fact = "two runs on the same inputs differ: the step is not deterministic"
        return _answer("unknown", 0.3, fact, remedy="torch.use_deterministic_algorithms(True) tells more")
    return None


def _in_one_bit(again: Again, run: Run, *, reduced: bool) -> Diagnosis | None:
    difference = None if reduced else _difference(again)
    if difference is None or difference.bit is None:
        return None
    fact = (
        f"the gradient of {difference.name} differs in one bit: element {difference.index}, "
        f"bit {difference.bit}, {difference.was:g} instead of {difference.should:g}"
    )
    return _answer("hardware", 0.95, fact, remedy=_move_off(run))


def _rest(again: Again, run: Run, *, reduced: bool) -> Diagnosis:
    if again.hooked:
        fact = "hooks on accumulated gradients took part, a replay leaves them out"
        return _answer("unknown", 0.3, fact, remedy="look at what these hooks do to the gradients")
    if again.written:
        return _outside(again, None if reduced else _difference(again))
    fact = "two runs agree bit for bit and only standard operators took part: the device is suspect"
    return _answer("hardware", 0.6, fact, remedy=_move_off(run))


def _move_off(run: Run) -> str:
    device = f"{run.rank.device} of {run.rank.host}, rank {run.rank.rank}"
    return f"test {device}, and move off it if this comes back; the batch is innocent"


def reproduces(again: Again) -> bool:
    """Return True if the replay gives the run's gradients, bit for bit."""
    total = _total(again)
    return bool(total) and all(_same(total[n], g) for n, g in again.found.items() if n in total)


def _difference(again: Again) -> Difference | None:
    """Compare the gradients, element by element; None if they are not comparable."""
    total = _total(again)
    count = elements = 0
    first: tuple[str, int, Tensor, Tensor] | None = None
    for name, run in again.found.items():
        if name not in total or local(run).layout is not torch.strided:
            continue
        mine, theirs = local(run).detach().flatten(), total[name].flatten()
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape or mine.is_complex():
            return None
        bits = _BITS[mine.element_size()]
        unequal = (mine.contiguous().view(bits) != theirs.contiguous().view(bits)) & ~(mine == theirs)
        differing = int(unequal.sum())
        elements += mine.numel()
        count += differing
        if differing and first is None:
            first = (name, int(unequal.to(torch.uint8).argmax()), mine, theirs)
    if first is None or count > elements // 2:
        return None
    name, index, mine, theirs = first
    kind = _BITS[mine.element_size()]
    pair = [int(t[index : index + 1].view(kind)) for t in (mine, theirs)]
    changed = (pair[0] ^ pair[1]) & ((1 << (8 * mine.element_size())) - 1)
    single = count == 1 and changed & (changed - 1) == 0
    bit = changed.bit_length() - 1 if single else None
    return Difference(count, elements, name, index, bit, float(mine[index]), float(theirs[index]))


def _outside(again: Again, difference: Difference | None) -> Diagnosis:
    """Something between backward and step wrote to gradients; no replay runs it."""
    names = fold(list(again.written))
    fact = f"after the backward pass something wrote in place to the gradient of {names}"
    if difference is not None:
        more = f" and {difference.elements - 1} more" if difference.elements > 1 else ""
        fact += (
            f"; element {difference.index} of {difference.name}{more} differs: "
            f"{difference.was:g} instead of {difference.should:g}"
        )
    where = "code between backward and step that changes gradients (accumulation, scaling, clipping, a hook)"
    name = again.written[0] if difference is None else difference.name
    dtype = again.found[name].dtype
    if difference is not None and dtype in (torch.float16, torch.bfloat16) and math.isinf(difference.was):
        narrow = str(dtype).removeprefix("torch.")
        return _answer(
            "precision", 0.5, fact, f"Inf and not NaN in {narrow}: a sum that overflowed",
            remedy=f"accumulate gradients in float32; look at {where}", phase="reduce",
        )  # fmt: skip
    return _answer("unknown", 0.4, fact, remedy=f"look at {where}", phase="reduce")


def _other_loss(again: Again, run: Run) -> str:
    """Say so if the replay computes another loss than the loop did."""
    before = run.last_loss
    if before is None or not math.isfinite(before):
        return ""
    now = sum(float(c.loss) for c in again.computed) / len(again.computed)
    if abs(now - before) <= _SAME_LOSS * max(abs(before), abs(now), 1e-12):
        return ""
    return f"the replay's loss is {now:g}, the loop's was {before:g}: forward= is not what the loop computes"


@torch.no_grad()
def _total(again: Again) -> dict[str, Tensor]:
    """Add up the micro-batches' gradients as the run did, and unscale them as it did."""
    total: dict[str, Tensor] = {}
    for computed in again.computed:
        for name, gradient in computed.gradients.items():
            if gradient.layout is torch.strided:
                total[name] = total[name] + gradient if name in total else gradient.detach().clone()
    if again.scale is not None:
        inverse = again.scale.double().reciprocal().float()
        total = {name: gradient * inverse.to(gradient.device) for name, gradient in total.items()}
    return total


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = local(one), local(other)
    return one.layout is not torch.strided or torch.equal(one, other)


def _answer(
    cause: str, confidence: float, *facts: str, remedy: str = "", phase: str | None = "backward"
) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        confidence=confidence,
        phase=phase,
        evidence=(_CLEAN, *facts),
        remedy=(remedy,) if remedy else (),
    )


def alike(one: Computed, other: Computed) -> bool:
    """Return True if two replays of a micro-batch agree bit for bit."""
    if one.gradients.keys() != other.gradients.keys() or judge(one.loss) != judge(other.loss):
        return False
    return torch.equal(one.loss, other.loss) and all(
        gradient.layout is not torch.strided or torch.equal(gradient, other.gradients[name])
        for name, gradient in one.gradients.items()
    )


def written_after(computed: Sequence[Computed], found: dict[str, Tensor], *, scaled: bool) -> tuple[str, ...]:
    """Return the gradients that were written to more often than accumulating and unscaling them does."""
    usual = len(computed) - 1 + scaled
    names = []
    for name, gradient in found.items():
        versions = [c.gradients[name]._version for c in computed if name in c.gradients]
        if versions and gradient._version > max(versions) + usual:
            names.append(name)
    return tuple(names)


def is_hooked(parameter: Any) -> bool:
    """Return True if the user has a hook on the accumulated gradient, which a replay leaves out."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(not getattr(hook, "__module__", "").startswith("gradsentinel") for hook in hooks.values())
