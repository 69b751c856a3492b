"""What to do about it, with the concrete argument, line, module or sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gradsentinel.diagnosis.fields import in_words
from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.record import FROM_PARAMETERS
from gradsentinel.incident import fold
from gradsentinel.run import Run

_AT_ZERO = {
    "SqrtBackward0": "sqrt has no derivative at 0: add eps under the root, (x + 1e-12).sqrt(), "
    "or use torch.linalg.vector_norm for a distance",
    "PowBackward0": "pow with an exponent below 1 has no derivative at 0: add eps to the base, or clamp it",
    "PowBackward1": "pow has no derivative there: add eps to the base, or clamp it",
    "RsqrtBackward0": "add eps under the root: (x + eps).rsqrt()",
    "LogBackward0": "clamp before the logarithm: x.clamp(min=eps).log()",
    "AcosBackward0": "acos has no derivative at -1 and 1: clamp to (-1 + eps, 1 - eps)",
    "AsinBackward0": "asin has no derivative at -1 and 1: clamp to (-1 + eps, 1 - eps)",
    "NormBackward1": "this norm has no derivative at 0: add eps, or use torch.linalg.vector_norm",
}
_BY_OP = {
    "log": "clamp before the logarithm: x.clamp(min=eps).log(), or use log_softmax / logsigmoid",
    "log2": "clamp before the logarithm: x.clamp(min=eps)",
    "log10": "clamp before the logarithm: x.clamp(min=eps)",
    "log1p": "clamp what log1p is given to more than -1",
    "sqrt": "clamp before the root: x.clamp(min=eps).sqrt()",
    "rsqrt": "add eps under the root: (x + eps).rsqrt()",
    "div": "make the divisor safe: x / (y + eps), or y.clamp(min=eps)",
    "reciprocal": "make the divisor safe: 1 / (y + eps)",
    "exp": "subtract the maximum before exp, use log-space (logsumexp, softplus), or clamp the exponent",
    "expm1": "clamp the exponent",
    "sinh": "clamp the argument",
    "cosh": "clamp the argument",
    "acos": "clamp to (-1 + eps, 1 - eps)",
    "asin": "clamp to (-1 + eps, 1 - eps)",
    "atanh": "clamp to (-1 + eps, 1 - eps)",
    "var": "a variance over one element is NaN: use correction=0, or leave out groups of one",
    "std": "a standard deviation over one element is NaN: use correction=0, or leave out groups of one",
    "pow": "clamp the base to where the power is defined",
}


def _at(found: Findings) -> str:
    line = found.call.line
    return "" if line is None else f" ({line})"


def for_math(found: Findings) -> tuple[str, ...]:
    """Return what makes the formula safe."""
    known = _AT_ZERO.get(found.node or "") if found.origin.backward else _BY_OP.get(found.name)
    general = "add an eps, clamp what goes in, or compute it in a stabler form"
    return (f"{known or general}{_at(found)}",)


def for_any_batch(found: Findings) -> tuple[str, ...]:
    """Return what to do about a formula that is singular whatever it is given."""
    masked = "or replace these elements before it, torch.where(same, 1.0, x), and leave them out afterwards"
    return (*for_math(found), f"{masked}{_at(found)}")


def for_constant(found: Findings, what: str) -> tuple[str, ...]:
    """Return what to do about zeros that were there before the step."""
    return (
        f"look at how {what} was made: features that never vary, rows that nobody has filled",
        *for_math(found),
    )


def for_hidden(found: Findings) -> tuple[str, ...]:
    """Return how to keep a value that is not used from coming back."""
    text = f"mask the input, not the output{_at(found)}: replace it before {found.name} "
    return (f"{text}(x_safe = torch.where(ok, x, 1.0)), and select afterwards",)


def for_masked(found: Findings, *, by_batch: bool) -> tuple[str, ...]:
    """Return what to do about rows without anything left."""
    safe = f"give fully masked rows one position, or a large negative number instead of -inf{_at(found)}"
    leave = f"leave out samples without a single valid position{_records(found)}"
    return (leave, safe) if by_batch else (safe,)


def for_masked_values(found: Findings) -> tuple[str, ...]:
    """Return how to leave masked positions out without computing with their infinities."""
    return (f"leave masked positions out by torch.where or masked_fill(mask, 0), not by times 0{_at(found)}",)


def for_literal(found: Findings) -> tuple[str, ...]:
    """Return what to do about a NaN or Inf that stands in the code."""
    return (f"replace the literal NaN or Inf by a finite number, or mask it{_at(found)}",)


def for_alignment(found: Findings) -> tuple[str, ...]:
    """Return what to do about targets that do not fit their inputs."""
    return (
        f"leave out samples whose target is longer than the input{_records(found)}",
        f"or use zero_infinity=True{_at(found)}",
    )


def for_empty(found: Findings) -> tuple[str, ...]:
    """Return what to do about means over nothing."""
    return (
        f"leave out batches in which nothing is supervised{in_words(found.fields)}",
        f"divide by max(count, 1){_at(found)}",
    )


def for_data(found: Findings) -> tuple[str, ...]:
    """Return what to do about the batch."""
    rows, known = found.guilty_rows, _BY_OP.get(found.name)
    who = _who(rows, found.ids()) if rows and len(rows) != found.size else "the records of this batch"
    return (f"repair or filter {who}{in_words(found.fields)}", *((f"{known}{_at(found)}",) if known else ()))


def for_samples(found: Findings, rows: list[int], field: str) -> tuple[str, ...]:
    """Return what to do about named samples."""
    return for_records(rows, found.ids(), field)


def for_records(rows: Sequence[int], ids: Mapping[int, Any], field: str) -> tuple[str, ...]:
    """Return what to do about records, by the user's id or by position, and about a field of theirs."""
    who = _who(rows, ids) if rows else "the record(s) with such values"
    return (f"repair or filter {who}{in_words([field])}", "normalise or clip the inputs when loading")


def _who(rows: Sequence[int], ids: Mapping[int, Any]) -> str:
    names = fold([f"id {ids[row]}" if row in ids else f"position {row}" for row in rows])
    return f"the record(s) with {names}"


def _records(found: Findings) -> str:
    rows = found.guilty_rows
    some = f" ({_who(rows, found.ids())})" if rows and len(rows) != found.size else ""
    return f"{some}{in_words(found.fields)}"


_INTEGERS = {"float16": 2048, "bfloat16": 256}
"""Up to here each type tells whole numbers apart."""


def for_precision(found: Findings, *, overflows: bool) -> tuple[str, ...]:
    """Return what to do about a dtype that is too narrow."""
    counted = _INTEGERS.get(found.half or "")
    if not overflows and counted and found.origin.literal is False and not _by_parameters(found):
        kept = "keep positions, times and counts in float32 or in whole numbers, and convert what follows"
        return (f"{kept}: {found.half} tells whole numbers apart only up to {counted}{_at(found)}",)
    where = found.call.module or "this computation"
    said, number = [], _too_large(found)
    if number is not None:
        fill = (
            f"use a number that {found.half} holds instead of {number:g}: torch.finfo(x.dtype).min for a mask"
        )
        said.append(f"{fill}{_at(found)}")
    said += [
        f"compute {where} in float32: with torch.autocast(device_type, enabled=False) around it{_at(found)}",
    ]
    if found.half == "float16":
        said.append("use bfloat16 instead of float16")
    if found.origin.backward and getattr(found.run.host, "scaler", None) is not None:
        said.append("lower the loss scale (init_scale), or let the scaler find it")
    elif overflows and not found.origin.backward:
        said.append("scale the inputs down first; lowering the loss scale does not help in the forward pass")
    return tuple(said)


def _too_large(found: Findings) -> float | None:
    """Return a plain number that the operator was given and that its narrow type does not hold."""
    if found.half is None:
        return None
    limit = torch.finfo(getattr(torch, found.half)).max
    given = tree_leaves((found.origin.args, found.origin.kwargs))
    numbers = (x for x in given if isinstance(x, (int, float)) and not isinstance(x, bool))
    return next((float(x) for x in numbers if limit < abs(x) < math.inf), None)


def _by_parameters(found: Findings) -> bool:
    return bool(found.singular_origin() & FROM_PARAMETERS)


def for_lost(found: Findings) -> tuple[str, ...]:
    """Return what to do about a number that a narrow type lost before it was needed."""
    lost = found.lost
    call = found.call if lost is None else lost.call
    at = "" if call.line is None else f" ({call.line})"
    where = call.module or "this computation"
    said = [f"compute {where} in float32: with torch.autocast(device_type, enabled=False) around it{at}"]
    if lost is not None and lost.badness.inf:
        return (*said, "scale its inputs down first, or use bfloat16, whose range is that of float32")
    return (*said, "add logarithms instead of multiplying probabilities, which do not vanish")


def for_rounded(found: Findings) -> tuple[str, ...]:
    """Return what to do about numbers that a narrow type has rounded."""
    where = f"what {found.name} is given"
    return (
        f"compute {where} in float32: with torch.autocast(device_type, enabled=False) around it{_at(found)}",
        *for_math(found),
    )


def for_custom(found: Findings) -> tuple[str, ...]:
    """Return what to do about the user's own operator."""
    return (
        f"check {found.custom}{_at(found)} with torch.autograd.gradcheck on the inputs of this step",
        "replace it by standard operators meanwhile",
    )


def for_uninitialised(found: Findings) -> tuple[str, ...]:
    """Return what to do about memory nobody wrote."""
    return (f"allocate with zeros instead of empty, or write every element{_at(found)}",)


def for_operator(found: Findings) -> tuple[str, ...]:
    """Return what to do about a wrong operator."""
    return (f"replace or bypass {found.origin.op}{_at(found)}, and report it with its inputs",)


def for_device(run: Run) -> tuple[str, ...]:
    """Return what to do about a device that made a mistake."""
    device = f"{run.rank.device} of {run.rank.host}, rank {run.rank.rank}"
    return (f"test {device}, and move off it if this comes back; the batch is innocent",)


def for_divergence(found: Findings) -> tuple[str, ...]:
    """Return what to do about weights that have grown away."""
    good = found.run.known_good
    back = "roll back to before it grew" + ("" if good is None else f" (step {good.step} or earlier)")
    return (f"lower the learning rate, warm it up, or clip gradients, and {back}",)


def changed_rates(run: Run) -> list[str]:
    """Say which learning rates differ from those of the known-good state."""
    if run.known_good is None:
        return []
    said = []
    for optimizer, before in zip(run.host.optimizers, run.known_good.optimizers, strict=False):
        for group, old in zip(optimizer.param_groups, before.get("groups", ()), strict=False):
            now, then = float(group.get("lr") or 0), float(old.get("lr") or 0)
            if now != then:
                said.append(f"the learning rate went from {then:g} to {now:g}")
    return list(dict.fromkeys(said))
