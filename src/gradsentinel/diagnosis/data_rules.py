"""The rules by which a batch is to blame."""

from __future__ import annotations

import torch

from gradsentinel.diagnosis import remedy
from gradsentinel.diagnosis.cause import Cause, overflows, sample_name, samples_in_words
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.operands import tensors_of
from gradsentinel.diagnosis.swap import peak_of, peaks_of, tensors_by_path
from gradsentinel.incident import fold

_HUGE_WEIGHT = 1e4
_LARGEST_RECORD = 16
"""A value in a larger one, an image, is not what a formula fails at."""
_SHOWN = 4
"""Values of a record that are told."""
_FAR = 1e3
"""So many times larger than the others is another scale."""
_ABSURD = 1e8
"""No normalised input comes near this."""


def nothing_to_average(found: Findings) -> Cause | None:
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


def impossible_alignment(found: Findings) -> Cause | None:
    """A CTC target that is longer than its input."""
    if "ctc_loss" not in found.name:
        return None
    why = f"the target cannot be aligned: it is longer than its input{samples_in_words(found)}"
    return Cause("data", 0.75, why, remedy.for_alignment(found))


def infinite_records(found: Findings) -> Cause | None:
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


def forbidden_choice(found: Findings) -> Cause | None:
    """Records whose label, or index, chooses what a mask forbids."""
    rows = found.guilty_rows
    few = 2 * len(rows) <= (found.size or 0)
    if found.choice is None or not rows or not few or found.finite_without_rows is not True:
        return None
    who = fold([sample_name(found, row) for row in rows])
    named = [field for field in found.fields if field]
    what = fold(named) if named else "a whole number"
    why = (
        f"{what} of {who} chooses what the mask forbids (-inf); with another record in its place it is finite"
    )
    return Cause("data", 0.75, why, remedy.for_samples(found, rows, named[0] if len(named) == 1 else ""))


def outlier(found: Findings) -> Cause | None:
    """Samples far from all others that make the step overflow, and without which it is finite."""
    suspects = set(found.rows)
    guilty = {p: rows for p, rows in found.outliers.items() if not suspects or suspects & set(rows)}
    if not guilty or found.finite_without_rows is not True or not overflows(found):
        return None
    path, rows = next(iter(guilty.items()))
    words = fold([sample_name(found, row) for row in rows])
    what = path or "the batch"
    why = f"{what}: {words} is over 1000 times larger than the others; without it all is finite"
    return Cause("data", 0.8, why, remedy.for_samples(found, rows, path))


def far_from_the_others(found: Findings) -> Cause | None:
    """A whole micro-batch on another scale than the rest of the step, or than anything the weights expect."""
    if not overflows(found) or (found.half is not None and found.finite_in_wide):
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


def data_alone(found: Findings) -> Cause | None:
    """The operand that makes it singular comes from the batch and from no parameter.

    But a formula has to bear values that are equal, and zeros that are there whatever the batch holds it
    makes itself: a distance of each point to itself.
    """
    if not found.by_batch_alone:
        return None
    if found.by_equal_values:
        why = (
            "it is singular at a deviation or a norm of 0: values that are equal, which a batch may hold"
            f"{samples_in_words(found)}"
        )
        return Cause("math", 0.75, why, (*remedy.for_math(found), *remedy.for_data(found)[:1]))
    if found.singular_for_any_batch:
        why = (
            "with every value of the batch moved a little the same elements are singular: the formula makes "
            "their zeros (the difference of a value and itself, say), not the batch"
        )
        return Cause("math", 0.8, why, remedy.for_any_batch(found))
    what = "the divisor" if found.name in ("div", "true_divide") else "what it is given"
    named = [field for field in found.fields if field]
    source = f"{fold(named)} of the batch" if named else "the batch"
    why = f"{what} is computed from {source} alone, no parameter has a part in it{samples_in_words(found)}"
    return Cause("data", 0.75, why, remedy.for_data(found))


def target(found: Findings) -> Cause | None:
    """A value of one record, in a field that no layer is given, at which the loss has no finite value.

    A target at the edge of what a likelihood is defined for, say: the weights have a part in the operand, but
    all weights fail at it.
    """
    rows, size = found.guilty_rows, found.size
    if found.finite_without_rows is not True or not rows or size is None or len(found.fields) != 1:
        return None
    if 2 * len(rows) > size or overflows(found) or found.origin.backward or found.path.reentry is not None:
        return None
    field = found.fields[0]
    if field in found.trace.fields_in(found.trace.fed) or found.finite_with_healthy is False:
        return None
    tensor = tensors_by_path(found.microbatch.batch).get(field)
    if tensor is None or tensor.layout is not torch.strided or tensor.is_complex() or not tensor.dim():
        return None
    if tensor.shape[0] != size or tensor[0].numel() > _LARGEST_RECORD:
        return None
    values = {value for row in rows for value in tensor[row].flatten()[:_SHOWN].tolist()}
    shown = f" ({fold([f'{value:.4g}' for value in sorted(values)])})" if len(values) <= _SHOWN else ""
    who = fold([sample_name(found, row) for row in rows])
    why = (
        f"{field or 'the batch'} of {who}{shown} is where the formula is singular: with another record's "
        "value in its place the step is finite, with the same weights"
    )
    return Cause("data", 0.75, why, remedy.for_data(found))
