"""The rules that turn what a replay showed into a cause: the first that fits."""

from __future__ import annotations

import math

import torch

from gradsentinel.diagnosis import data_rules, remedy
from gradsentinel.diagnosis.cause import Cause, Rule, dtype_of, overflows, rows_in_words, samples_in_words
from gradsentinel.diagnosis.excess import by_lone_weight
from gradsentinel.diagnosis.findings import DIVISIONS, Findings
from gradsentinel.diagnosis.lone_weight import find_lone_weight
from gradsentinel.diagnosis.operands import operands_of
from gradsentinel.diagnosis.record import FROM_BATCH, FROM_BUFFERS, FROM_PARAMETERS
from gradsentinel.diagnosis.swap import peak_of

_HUGE_WEIGHT = 1e4
_GROWN, _GROWN_AND_CURED = 100.0, 5.0
"""How many times a weight must have grown since the known-good state; less will do if that state cures it."""


def _uninitialised(found: Findings) -> Cause | None:
    if not found.origin.allocation:
        return None
    rows = rows_in_words(found)
    custom = found.custom or found.node
    if found.custom is not None:
        why = f"{custom} leaves a part of what it allocates unwritten{rows}: old memory comes out"
    else:
        why = f"memory is allocated and read before it is written{rows}"
    return Cause("operator", 0.95, why, remedy.for_uninitialised(found))


def _custom(found: Findings) -> Cause | None:
    custom = found.custom
    if custom is None:
        return None
    if found.half is not None and not found.origin.badness.nan and found.finite_in_wide:
        return None  # an honest overflow of a narrow type
    kind = "autograd.Function" if "Backward" in custom else "operator library"
    why = f"custom {kind} {custom}: finite in, non-finite out{rows_in_words(found)}"
    return Cause("operator", 0.9, why, remedy.for_custom(found))


def _unrepeatable(found: Findings) -> Cause | None:
    if found.finite_on_cpu and found.half is None:
        why = f"on the same inputs the CPU gives a finite result, {found.run.host.device} does not"
        return Cause("operator", 0.8, why, remedy.for_operator(found))
    if found.repeatable is not False:
        return None
    why = "the operator alone, on the very same inputs, gives a finite result"
    return Cause("operator", 0.6, why, remedy.for_operator(found))


def _masked(found: Findings) -> Cause | None:
    """NaN made of nothing but infinities that were put there on purpose."""
    origin = found.origin
    if not origin.edges or not all(edge.lawful for edge in origin.edges):
        return None
    if not found.whole_row_masked():
        why = "it computes with the infinities of a mask"
        return Cause("math", 0.85, why, remedy.for_masked_values(found))
    singular = found.singular_origin()
    by_batch = bool(singular & FROM_BATCH) and not singular & FROM_PARAMETERS
    why = f"a row holds nothing but -inf: the mask leaves nothing{samples_in_words(found)}"
    name, confidence = ("data", 0.75) if by_batch else ("math", 0.85)
    return Cause(name, confidence, why, remedy.for_masked(found, by_batch=by_batch))


def _literal(found: Findings) -> Cause | None:
    if not found.origin.literal:
        return None
    why = "a NaN or Inf is given to it as a plain number, and nothing masks it afterwards"
    return Cause("math", 0.85, why, remedy.for_literal(found))


def _lone_weight(found: Findings) -> Cause | None:
    """An overflow because of one single weight: a flipped bit looks like that."""
    if not overflows(found) or not found.origin.origin & FROM_PARAMETERS:
        return None
    lone = find_lone_weight(found.run)
    if lone is None:
        return None
    diagnosis = by_lone_weight(lone, found.run)
    return Cause(diagnosis.cause, diagnosis.confidence, "; ".join(diagnosis.evidence), diagnosis.remedy)


def _precision(found: Findings) -> Cause | None:
    if found.half is None or found.finite_in_wide is not True:
        return None
    largest = max((o.largest for o in found.operands if not math.isnan(o.low)), default=0.0)
    limit = torch.finfo(getattr(torch, found.half)).max
    why = (
        f"{found.half} holds at most {limit:.6g}: from inputs up to {largest:.4g} {found.origin.op} "
        f"overflows; computed in float32 {found.widened} is finite"
    )
    if not overflows(found):
        why = f"in {found.half} {found.origin.op} is singular; computed in float32 {found.widened} is finite"
    return Cause("precision", 0.9, why, remedy.for_precision(found, overflows=overflows(found)))


def _lost_in_a_narrow_type(found: Findings) -> Cause | None:
    """A wider operator stumbles over what a narrow one made of its inputs: Inf, or 0."""
    lost = found.lost
    if lost is None:
        return None
    narrow = str(lost.results[0].dtype).removeprefix("torch.")
    what = "overflows" if lost.badness.inf else "makes 0 of numbers that are not 0"
    given = "; ".join(map(str, operands_of(lost)))
    line = "" if lost.call.line is None else f", {lost.call.line}: {lost.call.line.text}"
    why = (
        f"before that {lost.op} {what} in {narrow}{line} (inputs: {given}); computed in float32 the same "
        "step is finite"
    )
    return Cause("precision", 0.9, why, remedy.for_lost(found))


def _rounded(found: Findings) -> Cause | None:
    """A wider operator fails at what narrow ones have rounded: at a difference that is 0 only so, say."""
    if found.half is not None or found.finite_in_wide is not True:
        return None
    why = (
        f"{found.origin.op} computes in {dtype_of(found)} with numbers that narrower operators have rounded; "
        "with all of them in float32 the same step is finite"
    )
    return Cause("precision", 0.75, why, remedy.for_rounded(found))


def _by_a_constant(found: Findings) -> Cause | None:
    """It is singular at a buffer's 0, which no step has made: a deviation of what never varied."""
    if found.origin.backward or found.singular_origin() != FROM_BUFFERS or not found.singular_at_zero():
        return None
    place = 1 if found.name in DIVISIONS else 0
    tensor = found.origin.args[place]
    what = next((leaf for leaf, one in found.trace.outside if _same_values(one, tensor)), "a buffer")
    count = int((tensor == 0).sum())
    why = f"{what} holds {count} zero(s), at which it is singular; the step did not make them"
    return Cause("setup", 0.7, why, remedy.for_constant(found, what))


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether a tensor holds what an operator was given, in whatever shape; never for a sparse one."""
    alike = one.layout is other.layout is torch.strided and one.device == other.device
    return alike and one.dtype is other.dtype and torch.equal(one.detach().flatten(), other.flatten())


def _diverged(found: Findings) -> Cause | None:
    """An overflow because the weights have grown out of all proportion."""
    if not overflows(found) or not found.origin.origin & FROM_PARAMETERS:
        return None
    run = found.run
    peaks = {n: peak_of(p) for n, p in run.host.named_parameters() if p.requires_grad}
    name = max(peaks, key=lambda n: peaks[n], default="")
    good = run.known_good
    facts = []
    if good is not None:
        before = {n: peak_of(p) for n, p in good.parameters.items() if n in peaks}
        grown = {n: peaks[n] / value for n, value in before.items() if value > 0}
        worst = max(grown, key=lambda n: grown[n], default="")
        much = _GROWN if found.finite_with_known_good is not True else _GROWN_AND_CURED
        if worst and grown[worst] > much:
            grew = f"from {before[worst]:.4g} to {peaks[worst]:.4g}"
            facts.append(f"{worst} grew {grew} since step {good.step}")
    if not facts and name and peaks[name] > _HUGE_WEIGHT:
        facts.append(f"{name} holds weights up to {peaks[name]:.4g}")
    if not facts:
        return None
    if found.finite_with_known_good and good is not None:
        facts.append(f"with the weights of step {good.step} the same batch is finite")
    facts += remedy.changed_rates(run)
    why = f"the run diverged before this step: {'; '.join(facts)}"
    return Cause("optimizer", 0.75, why, remedy.for_divergence(found))


def _math(found: Findings) -> Cause:
    if found.path.absorbers or (found.path.reentry is not None and not found.origin.backward):
        return Cause("math", 0.9, _hidden(found), remedy.for_hidden(found))
    if overflows(found):
        why = f"{found.origin.op} overflows on finite inputs, in {dtype_of(found)}"
    else:
        why = "the formula is singular at the values it is given"
    return Cause("math", 0.85, why, remedy.for_math(found))


RULES: tuple[Rule, ...] = (
    _uninitialised,
    _custom,
    _unrepeatable,
    data_rules.nothing_to_average,
    data_rules.impossible_alignment,
    data_rules.infinite_records,
    data_rules.forbidden_choice,
    _masked,
    _literal,
    data_rules.outlier,
    data_rules.far_from_the_others,
    _lone_weight,
    _precision,
    _lost_in_a_narrow_type,
    _rounded,
    data_rules.data_alone,
    data_rules.target,
    _by_a_constant,
    _diverged,
    _math,
)


# -- words -----------------------------------------------------------------------------------------


def _hidden(found: Findings) -> str:
    how = found.path.absorbers[0].op if found.path.absorbers else "what follows"
    if ".where" in how:
        what = "where() hides it in its branch not taken, the output is finite"
    elif "nan_to_num" in how or "nansum" in how or "nanmean" in how:
        what = f"{how} swallows it in the forward pass"
    else:
        what = f"{how} leaves it out of the loss"
    return f"{what}; in the backward pass 0 times it is NaN"
