"""What to think of a step that is fine when it is run again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradsentinel.decision import Kind
from gradsentinel.diagnosis.boundary import Difference
from gradsentinel.diagnosis.comparison import Comparison, Gradients, add_up
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.passed import Passed, in_words
from gradsentinel.diagnosis.remedy import for_device
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.spiked import is_usual_again
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident, fold
from gradsentinel.run import Run

FINITE = (Kind.MAGNITUDE, Kind.SPIKE)
_ORDINARY = 2.0**16
"""Arithmetic that doubles, halves or unscales a gradient stays below that; flipped exponent bits do not."""
_ACCUMULATES = "aten.add_.Tensor"
"""By which a further micro-batch's gradient is added."""
_LOOK_BACK = 8
"""Earlier incidents that are looked at: what comes back at the same place is no accident."""


@dataclass(slots=True, kw_only=True)
class Again:
    """The step run twice more, both times finite."""

    computed: Mapping[int, Computed]
    """By number of micro-batch."""
    complete: bool
    """True if there was time to compute every micro-batch twice."""
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
    compiled: bool | None
    """None if nothing is compiled; else whether the compiled code, run again, was finite, too."""
    found: Mapping[str, Tensor]
    """The gradients of the run itself."""
    scale: Tensor | None
    comparison: Comparison
    passed: Passed = field(default_factory=Passed)
    """What the model was given and returned, in the loop and when it was run again."""
    given: Diagnosis | None = None
    """What to say of it if the loop gave the model something else than `forward=`."""

    @property
    def made(self) -> Difference | None:
        """Damage that the model has done to some records only, though it was given the same as ever.

        The other records, the same bit for bit, show that it was the same model.
        """
        made = self.passed.made
        return made if made is not None and made.confined else None


_CLEAN = "run again from the same batch, weights and random state, the step is finite"
_CLEAN_LATE = "run again from the same batch and random state, with the weights of now, the step is finite"
_LIKE_THE_LOOP = (
    "let forward= compute exactly what the loop computes: the same inputs (augmentation and noise inside "
    "of it), train or eval mode, autocast, and every term of the loss"
)


def judge_again(again: Again, incident: Incident, run: Run) -> Diagnosis:
    """Return the diagnosis of a fault that does not come back.

    Hardware only if nothing else explains it and the replay has shown, by finite parts of the step that it
    repeats bit for bit, that it computes what the loop computed. Where the loss is finite that takes bits
    that no arithmetic makes: nobody saw the gradients before the loop could write to them.
    """
    found = (
        _added_up(again)
        or _unwritten(again)
        or _in_one_bit(again, run)
        or _given_otherwise(again)
        or _as_usual_again(again, incident, run)
        or _by_other_code(again)
        or _not_shown(again, incident)
        or _in_the_gradients_alone(again)
    )
    if found is not None:
        if run.late_step is None:
            return found
        said = tuple(_CLEAN_LATE if text == _CLEAN else text for text in found.evidence)
        return replace(found, evidence=said)
    if again.made is not None:
        fact = (
            "two runs agree bit for bit, only standard operators took part, and given the same, bit for bit, "
            f"the model once returned something else: {in_words(again.made)}; the other records are the "
            "same: the device is suspect"
        )
        found = _answer("hardware", 0.7, fact, remedy=for_device(run)[0], phase="forward")
        return replace(found, module=again.passed.module or None)
    fact = (
        "two runs agree bit for bit, only standard operators took part, and what is finite of the step is "
        f"the same again ({_in_common(again.comparison)}): the device is suspect"
    )
    return _answer("hardware", 0.6, fact, remedy=for_device(run)[0])


def comes_back(again: Again, incident: Incident) -> bool:
    """Return True if a step that is finite and far too large is the same when it is run again."""
    gradients = again.comparison.gradients
    if incident.kind not in FINITE or again.comparison.against:
        return False
    return gradients is None or (not gradients.odd and gradients.alike > 0)


# -- software --------------------------------------------------------------------------------------


def _added_up(again: Again) -> Diagnosis | None:
    """Micro-batches that are finite one by one, and whose sum is not."""
    if len(again.computed) < 2:
        return None
    total = add_up(list(again.computed.values()), again.scale)
    name = next((name for name, gradient in total.items() if judge(gradient)), None)
    if name is None:
        return None
    dtype = str(total[name].dtype).removeprefix("torch.")
    fact = f"the gradient of {name} is finite for each micro-batch, the sum of all exceeds {dtype}"
    if total[name].dtype in (torch.float16, torch.bfloat16):
        fix = "accumulate gradients in float32, or divide the loss by the number of micro-batches first"
        found = _answer("precision", 0.9, fact, remedy=fix, phase="reduce")
    else:
        fix = "clip each micro-batch, or lower the learning rate"
        found = _answer("math", 0.8, fact, remedy=fix, phase="reduce")
    return replace(found, op=_ACCUMULATES)


def _unwritten(again: Again) -> Diagnosis | None:
    if not again.unwritten:
        return None
    custom = ", ".join(sorted(again.custom))
    by = f" (custom operators: {custom})" if custom else ""
    fact = f"memory that is read before it is written gets into the result, and changes from run to run{by}"
    return _answer("operator", 0.85, fact, remedy="allocate with zeros instead of empty, or write it all")


def _given_otherwise(again: Again) -> Diagnosis | None:
    """The loop gave the model something else than `forward=` does; the replay is no witness then."""
    if again.given is None:
        return None
    first, *more = again.given.evidence
    return replace(again.given, evidence=(first, _CLEAN, *more))


def _by_other_code(again: Again) -> Diagnosis | None:
    """Return what a difference between the loop and the replay explains; the replay is no witness then."""
    if again.compiled is False:
        fact = "the compiled code, run again, is not finite, and the same code run eagerly is: the compiler"
        fix = "leave what torch.compile got wrong out of it (torch.compiler.disable), and report it"
        return _answer("operator", 0.9, fact, remedy=fix)
    if again.comparison.against and not _differs_by_damage(again):
        return _answer("unknown", 0.2, again.comparison.against, remedy=_LIKE_THE_LOOP)
    # What is written to gradients afterwards makes nothing of what the model returned.
    if again.complete and again.written and again.made is None:
        return _outside(again, again.comparison.gradients)
    return _unsettled(again)


def _differs_by_damage(again: Again) -> bool:
    """Return True if the loss that is another one is that of the micro-batch that the model has damaged."""
    made, number = again.made, again.comparison.other_in
    return made is not None and number is not None and again.passed.each[number].made is made


def _unsettled(again: Again) -> Diagnosis | None:
    """Return why two runs of this step prove nothing."""
    if not again.complete:
        fact = "diagnosis_budget was used up before all of the step was run again"
        return _answer("unknown", 0.1, fact, remedy="raise diagnosis_budget")
    if again.hooked and again.made is None:
        fact = "hooks on accumulated gradients took part, a replay leaves them out"
        return _answer("unknown", 0.3, fact, remedy="look at what these hooks do to the gradients")
    if not again.deterministic and not again.custom:
        fact = "two runs on the same inputs differ: the step is not deterministic"
        return _answer("unknown", 0.3, fact, remedy="torch.use_deterministic_algorithms(True) tells more")
    return None


def _outside(again: Again, gradients: Gradients | None) -> Diagnosis:
    """Something between backward and step wrote to gradients; no replay runs it."""
    names = fold(list(again.written))
    fact = (
        f"the gradient of {names} was written to more often than forward= accounts for: in place, after the "
        "backward pass, or by a further term of the loss whose gradient was added to it"
    )
    name, was = again.written[0], 0.0
    first = None if gradients is None or 2 * gradients.odd > gradients.total else gradients.first
    if first is not None:
        name, was = first.name, first.was
        fact += f"; {first}"
    where = (
        "code between backward and step that changes gradients (accumulating, scaling, clipping, hooks), and "
        "at terms of the loss that forward= lacks"
    )
    dtype = again.found[name].dtype
    if dtype in (torch.float16, torch.bfloat16) and math.isinf(was):
        narrow = str(dtype).removeprefix("torch.")
        return _answer(
            "precision", 0.5, fact, f"Inf and not NaN in {narrow}: a sum that overflowed",
            remedy=f"accumulate gradients in float32; look at {where}", phase="reduce",
        )  # fmt: skip
    return _answer("unknown", 0.4, fact, remedy=f"look at {where}", phase="reduce")


# -- hardware, or not ------------------------------------------------------------------------------


def _in_one_bit(again: Again, run: Run) -> Diagnosis | None:
    returned = again.passed.flipped
    if returned is not None and again.deterministic and not again.custom:
        fact = (
            "given the same, bit for bit, the model once returned another number in one bit "
            f"({returned.flipped}): {in_words(returned)}"
        )
        found = _answer("hardware", 0.95, fact, remedy=for_device(run)[0], phase="forward")
        return replace(found, module=again.passed.module or None)
    gradients = again.comparison.gradients
    first, bit = (None, None) if gradients is None else (gradients.first, gradients.bit)
    if gradients is None or first is None or bit is None or not gradients.alike or again.comparison.against:
        return None
    # Doubling, negating, and dividing by 0 change one bit, too, and what is written through `.data` or NumPy
    # leaves no mark on the tensor's version.
    if first.computable or not first.should or 1 / _ORDINARY < abs(first.was / first.should) < _ORDINARY:
        return None
    fact = (
        f"the gradient of {first.name} differs in one bit: element {first.index}, "
        f"bit {bit}, {first.was:g} instead of {first.should:g}"
    )
    return _answer("hardware", 0.95, fact, remedy=for_device(run)[0])


def _as_usual_again(again: Again, incident: Incident, run: Run) -> Diagnosis | None:
    """A loss that was far out, and is where the run's losses lie when it is computed again.

    An honest "unknown": records that the loop alone changed, by augmentation, do that as a device does.
    """
    if (
        again.comparison.other_loss is None
        or _differs_by_damage(again)
        or again.compiled is not None
        or again.custom
        or again.written
    ):
        return None
    before, now = again.comparison.other_loss
    if run.late_step is not None or _unsettled(again) or not is_usual_again(incident, before, now):
        return None
    fact = (
        f"two further computations agree bit for bit on a loss of {now:.6g}, as usual; the loop's was "
        f"{before:.6g}: a device failed in it once, or the loop gave the model other records"
    )
    remedy = (*for_device(run)[:1], "let forward= compute what the loop computes, augmentation included")
    return replace(_answer("unknown", 0.4, fact, phase="forward"), remedy=remedy)


def _not_shown(again: Again, incident: Incident) -> Diagnosis | None:
    """Return an honest "unknown" as long as it is not shown that the replay computes what the loop did."""
    comparison = again.comparison
    gradients = comparison.gradients
    custom = ", ".join(sorted(again.custom))
    if custom and (comparison.losses or (gradients is not None and gradients.alike)):
        fact = f"custom operators took part ({custom}): a race in them explains it, or a failing device"
        fix = f"look for a race in {custom}, or use standard operators"
        return _answer("operator", 0.5, fact, remedy=fix)
    if again.compiled is not None:
        fact = "the loop ran compiled code, the replay ran it eagerly: the compiler explains it, too"
        return _answer("unknown", 0.3, fact, remedy="run the step without torch.compile to tell")
    doubt = "" if again.made is not None else _doubt(comparison, incident)
    # If what the model returned is the same, and the loss, too, then no gradient is needed to show it.
    shown = again.passed.same and comparison.finite_loss and doubt == _NOWHERE_IN_PART
    if doubt and not shown:
        return _answer("unknown", 0.2, doubt, remedy=_LIKE_THE_LOOP)
    return None


def _in_the_gradients_alone(again: Again) -> Diagnosis | None:
    """Return an honest "unknown" where the loss is the same and finite, and only gradients differ.

    Hooks that the loop alone registers on activations, and writes through `.data`, `.detach()` or NumPy,
    which no version of a tensor counts, damage a part of a gradient as a failing device does.
    """
    if not again.comparison.finite_loss or again.made is not None:
        return None
    gradients = again.comparison.gradients
    first = None if gradients is None else gradients.first
    what = "gradients differ" if first is None else f"{first}"
    return _answer(
        "unknown",
        0.3,
        f"{what}, of the same loss: a hook or a write that only the loop has explains it, or a failing "
        "device",
        remedy="look at hooks on tensors, and at what writes to .grad (also by .data, .detach(), .numpy()) "
        "between backward and step; if there is none, test the device",
    )


def _doubt(comparison: Comparison, incident: Incident) -> str:
    """Return why the replay has not shown that it computes what the loop computed; empty if it has."""
    gradients = comparison.gradients
    if gradients is None:
        return "" if comparison.losses and comparison.finite_loss else _NOTHING_FINITE
    if incident.kind in FINITE:
        huge = any(one.in_part and one.growth > _ORDINARY for one in gradients.each)
        return "" if comparison.losses and huge else f"{gradients.first}, of the same loss"
    if not gradients.odd:
        return _ONLY_THE_LOSS
    if not comparison.losses and not gradients.alike:
        return _NOTHING_FINITE
    if gradients.other is not None:
        return f"the gradients differ as no fault at one place makes them ({gradients.other}): {_OTHER_LOOP}"
    return "" if gradients.in_part else _NOWHERE_IN_PART


_OTHER_LOOP = (
    "forward= is not what the loop computes, or something replaces gradients after the backward pass"
)
_ONLY_THE_LOSS = (
    "the gradients are those of the replay, bit for bit, and only the loss differs: the loop adds a term to "
    "the loss that forward= lacks"
)
_NOWHERE_IN_PART = (
    "no gradient is damaged in part only; finite elements beside the bad ones would have to show that "
    "forward= computes what the loop does"
)
_NOTHING_FINITE = (
    "nothing finite is left of the step's loss and gradients that would show that forward= computes what "
    "the loop computes"
)


def came_back(incident: Incident, earlier: Sequence[Incident]) -> bool:
    """Return True if an earlier step was fine when run again, too, and bad in the same parameters."""
    mine = {tensor.name for tensor in incident.tensors}
    for other in list(earlier)[-_LOOK_BACK - 1 :]:
        known = other.diagnosis
        if other is incident or known is None or _CLEAN not in known.evidence:
            continue
        if mine == {tensor.name for tensor in other.tensors}:
            return True
    return False


def less_sure(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of what comes back at the same place: no accident."""
    fact = "it came back in the same parameters: a device does not fail so regularly"
    return not_sure(diagnosis, fact)


def not_sure(diagnosis: Diagnosis, *facts: str) -> Diagnosis:
    """Return an honest "unknown" for a device that is suspect, and the facts that speak for another cause."""
    before = (text for text in diagnosis.evidence if text != _CLEAN)
    return _answer("unknown", 0.3, *facts, *before, remedy=_LIKE_THE_LOOP)


# -- words -----------------------------------------------------------------------------------------


def _in_common(comparison: Comparison) -> str:
    said = []
    if comparison.losses:
        said.append("the loss" if comparison.losses == 1 else f"{comparison.losses} losses")
    if comparison.gradients is not None and comparison.gradients.alike:
        said.append(f"{comparison.gradients.alike} elements of the gradients")
    return " and ".join(said)


def _answer(
    cause: str, confidence: float, *facts: str, remedy: str = "", phase: str | None = "backward"
) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        confidence=confidence,
        phase=phase,
        evidence=(facts[0], _CLEAN, *facts[1:]),
        remedy=(remedy,) if remedy else (),
    )
