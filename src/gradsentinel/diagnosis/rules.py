"""The rules that turn what a replay showed into a cause: the first that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsentinel.diagnosis import remedy
from gradsentinel.diagnosis.excess import by_lone_weight
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.lone_weight import find_lone_weight
from gradsentinel.diagnosis.operands import bad_rows, operands_of, tensors_of
from gradsentinel.diagnosis.record import FROM_BATCH, FROM_PARAMETERS
from gradsentinel.diagnosis.swap import peak_of, peaks_of, tensors_by_path
from gradsentinel.incident import fold

_HUGE_WEIGHT = 1e4
_SHOWN = 4
"""Values of a record that are told."""
_GROWN, _GROWN_AND_CURED = 100.0, 5.0
"""How many times a weight must have grown since the known-good state; less will do if that state cures it."""
_FAR = 1e3
"""So many times larger than the others is another scale."""
_ABSURD = 1e8
"""No normalised input comes near this."""


_LARGE = 1e4
_GROWS_FAST = ("exp", "exp2", "expm1", "sinh", "cosh", "pow")
_SINGULAR_AT_ZERO = ("div", "true_divide", "reciprocal", "log", "log2", "log10", "rsqrt", "sqrt", "pow")


@dataclass(frozen=True, slots=True)
class Cause:
    """A rule's answer."""

    name: str
    confidence: float
    why: str
    remedies: tuple[str, ...]


Rule = Callable[[Findings], "Cause | None"]


def _uninitialised(found: Findings) -> Cause | None:
    if not found.origin.allocation:
        return None
    rows = _rows_in_words(found)
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
    why = f"custom {kind} {custom}: finite in, non-finite out{_rows_in_words(found)}"
    return Cause("operator", 0.9, why, remedy.for_custom(found))


def _unrepeatable(found: Findings) -> Cause | None:
    if found.finite_on_cpu and found.half is None:
        why = f"on the same inputs the CPU gives a finite result, {found.run.host.device} does not"
        return Cause("operator", 0.8, why, remedy.for_operator(found))
    if found.repeatable is not False:
        return None
    why = "the operator alone, on the very same inputs, gives a finite result"
    return Cause("operator", 0.6, why, remedy.for_operator(found))


def _nothing_to_average(found: Findings) -> Cause | None:
    """A reduction over nothing, or a division by a count of nothing."""
    origin = found.origin
    tensors = tensors_of(origin)
    if tensors and all(tensor.numel() == 0 for tensor in tensors):
        why = f"{found.name} of an empty tensor {list(tensors[0].shape)}: nothing in the batch was selected"
        return Cause("data", 0.85, why, remedy.for_empty(found))
    if found.name.startswith("nll_loss") and len(tensors) > 1:
        target, ignored = tensors[1], origin.args[4] if len(origin.args) > 4 else -100
        if bool((target == ignored).all()):
            where = f" in {fold(list(found.fields))}" if any(found.fields) else ""
            why = f"all {target.numel()} labels{where} are {ignored} (ignore_index): the mean is over nothing"
            return Cause("data", 0.9, why, remedy.for_empty(found))
    if found.name.startswith("segment_reduce") and _has_empty_segment(found):
        return Cause("data", 0.8, "a segment is empty: its mean is over nothing", remedy.for_empty(found))
    scalar = origin.args[1] if found.name in ("div", "true_divide") and len(origin.args) > 1 else None
    if isinstance(scalar, (int, float)) and scalar == 0 and _sums_nothing(found):
        return Cause("data", 0.7, "divides 0 by the number 0: a count of nothing", remedy.for_empty(found))
    return None


def _sums_nothing(found: Findings) -> bool:
    """A sum over nothing is 0; what is not 0, or still has all samples, is divided by something else."""
    return all(
        operand.numel == operand.zeros and (found.size is None or found.size not in operand.shape[:1])
        for operand in found.operands
    )


def _has_empty_segment(found: Findings) -> bool:
    given = found.origin.kwargs
    lengths, offsets = given.get("lengths"), given.get("offsets")
    if isinstance(offsets, torch.Tensor):
        lengths = offsets.diff(dim=-1)
    return isinstance(lengths, torch.Tensor) and bool((lengths == 0).any())


def _impossible_alignment(found: Findings) -> Cause | None:
    if "ctc_loss" not in found.name:
        return None
    why = f"the target cannot be aligned: it is longer than its input{_samples_in_words(found)}"
    return Cause("data", 0.75, why, remedy.for_alignment(found))


def _infinite_records(found: Findings) -> Cause | None:
    """Infinities that some records of a batch hold, where the others, and healthy batches, hold none.

    As values of a mask they would be lawful; a mask has them in every batch.
    """
    field, rows = found.infinite_records()
    if (
        field is None
        or found.whole_row_masked()
        or found.finite_without_rows is not True
        or not set(found.guilty_rows) <= set(rows)
    ):
        return None
    what = field or "the batch"
    who = fold([sample_name(found, row) for row in rows])
    why = f"{what} holds infinities in {who} alone; with another record's value in its place all is finite"
    return Cause("data", 0.8, why, remedy.for_samples(found, found.guilty_rows, field))


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
    why = f"a row holds nothing but -inf: the mask leaves nothing{_samples_in_words(found)}"
    name, confidence = ("data", 0.75) if by_batch else ("math", 0.85)
    return Cause(name, confidence, why, remedy.for_masked(found, by_batch=by_batch))


def _literal(found: Findings) -> Cause | None:
    if not found.origin.literal:
        return None
    why = "a NaN or Inf is given to it as a plain number, and nothing masks it afterwards"
    return Cause("math", 0.85, why, remedy.for_literal(found))


def _outlier(found: Findings) -> Cause | None:
    """Samples far from all others that make the step overflow, and without which it is finite."""
    suspects = set(found.rows)
    guilty = {p: rows for p, rows in found.outliers.items() if not suspects or suspects & set(rows)}
    if not guilty or found.finite_without_rows is not True or not _overflows(found):
        return None
    path, rows = next(iter(guilty.items()))
    words = fold([sample_name(found, row) for row in rows])
    what = path or "the batch"
    why = f"{what}: {words} is over 1000 times larger than the others; without it all is finite"
    return Cause("data", 0.8, why, remedy.for_samples(found, rows, path))


def _far_from_the_others(found: Findings) -> Cause | None:
    """A whole micro-batch on another scale than the rest of the step, or than anything the weights expect."""
    if not _overflows(found) or (found.half is not None and found.finite_in_wide):
        return None
    peaks = peaks_of(found.microbatch.batch)
    healthy = found.run.scene.healthy if found.finite_with_healthy else ()
    others = [peaks_of(m.batch) for m in (*found.finite_others, *healthy)]
    for path, peak in peaks.items():
        usual = max((other.get(path, 0.0) for other in others), default=0.0)
        if usual > 0 and peak > _FAR * usual:
            what = path or "the batch"
            why = f"{what} holds values up to {peak:.4g}, finite batches only up to {usual:.4g}"
            return Cause("data", 0.8, why, remedy.for_samples(found, [], path))
    weights = max((peak_of(p) for _, p in found.run.host.named_parameters()), default=0.0)
    path = max(peaks, key=lambda name: peaks[name], default="")
    if peaks and peaks[path] > _ABSURD and weights < _HUGE_WEIGHT:
        what = path or "the batch"
        why = f"{what} holds values up to {peaks[path]:.4g}, while no weight exceeds {weights:.4g}"
        return Cause("data", 0.65, why, remedy.for_samples(found, [], path))
    return None


def _lone_weight(found: Findings) -> Cause | None:
    """An overflow because of one single weight: a flipped bit looks like that."""
    if not _overflows(found) or not found.origin.origin & FROM_PARAMETERS:
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
    if not _overflows(found):
        why = f"in {found.half} {found.origin.op} is singular; computed in float32 {found.widened} is finite"
    return Cause("precision", 0.9, why, remedy.for_precision(found, overflows=_overflows(found)))


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
        f"{found.origin.op} computes in {_dtype(found)} with numbers that narrower operators have rounded; "
        "with all of them in float32 the same step is finite"
    )
    return Cause("precision", 0.75, why, remedy.for_rounded(found))


def _data_alone(found: Findings) -> Cause | None:
    """The operand that makes it singular comes from the batch and from no parameter."""
    singular = found.singular_origin()
    if not singular & FROM_BATCH or singular & FROM_PARAMETERS:
        return None
    what = "the divisor" if found.name in ("div", "true_divide") else "what it is given"
    named = [field for field in found.fields if field]
    source = f"{fold(named)} of the batch" if named else "the batch"
    why = f"{what} is computed from {source} alone, no parameter has a part in it{_samples_in_words(found)}"
    return Cause("data", 0.75, why, remedy.for_data(found))


def _target(found: Findings) -> Cause | None:
    """A value of one record, in a field that no layer is given, at which the loss has no finite value.

    A target at the edge of what a likelihood is defined for, say: the weights have a part in the operand, but
    all weights fail at it.
    """
    rows, size = found.guilty_rows, found.size
    if found.finite_without_rows is not True or not rows or size is None or len(found.fields) != 1:
        return None
    if 2 * len(rows) > size or _overflows(found) or found.origin.backward or found.path.reentry is not None:
        return None
    field = found.fields[0]
    if field in found.trace.fields_in(found.trace.fed) or found.finite_with_healthy is False:
        return None
    tensor = tensors_by_path(found.microbatch.batch).get(field)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_complex() or not tensor.dim():
        return None
    if tensor.shape[0] != size:
        return None
    values = {value for row in rows for value in tensor[row].flatten()[:_SHOWN].tolist()}
    shown = f" ({fold([f'{value:.4g}' for value in sorted(values)])})" if len(values) <= _SHOWN else ""
    who = fold([sample_name(found, row) for row in rows])
    why = (
        f"{field or 'the batch'} of {who}{shown} is where the formula is singular: with another record's "
        "value in its place the step is finite, with the same weights"
    )
    return Cause("data", 0.75, why, remedy.for_data(found))


def _diverged(found: Findings) -> Cause | None:
    """An overflow because the weights have grown out of all proportion."""
    if not _overflows(found) or not found.origin.origin & FROM_PARAMETERS:
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
    if _overflows(found):
        why = f"{found.origin.op} overflows on finite inputs, in {_dtype(found)}"
    else:
        why = "the formula is singular at the values it is given"
    return Cause("math", 0.85, why, remedy.for_math(found))


RULES: tuple[Rule, ...] = (
    _uninitialised,
    _custom,
    _unrepeatable,
    _nothing_to_average,
    _impossible_alignment,
    _infinite_records,
    _masked,
    _literal,
    _outlier,
    _far_from_the_others,
    _lone_weight,
    _precision,
    _lost_in_a_narrow_type,
    _rounded,
    _data_alone,
    _target,
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


def _overflows(found: Findings) -> bool:
    at_zero = found.name in _SINGULAR_AT_ZERO and any(operand.zeros for operand in found.operands)
    largest = max((o.largest for o in found.operands if not math.isnan(o.low)), default=0.0)
    large = largest > _LARGE or found.name in _GROWS_FAST or found.half is not None
    return found.overflowed and not at_zero and large


def _dtype(found: Findings) -> str:
    return next((str(o.dtype).removeprefix("torch.") for o in found.operands), "its dtype")


def _rows_in_words(found: Findings) -> str:
    rows = bad_rows(found.origin)
    if not rows:
        return ""
    whole = rows == list(range(rows[0], rows[-1] + 1)) and len(rows) > 1
    return f" (rows {rows[0]}-{rows[-1]})" if whole else f" (row {fold(list(map(str, rows)))})"


def _samples_in_words(found: Findings) -> str:
    if not found.rows or found.finite_without_rows is False or len(found.rows) == found.size:
        return ""
    return f", at {fold([sample_name(found, row) for row in found.rows])}"


def sample_name(found: Findings, row: int) -> str:
    """Name a sample by position and, if it has one, by the user's id."""
    known = found.ids().get(row)
    return f"sample {row}" + (f" (id {known})" if known is not None else "")
