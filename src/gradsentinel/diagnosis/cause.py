"""A cause as a rule gives it, and the words that rules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradsentinel.diagnosis.findings import Findings
from gradsentinel.diagnosis.operands import bad_rows
from gradsentinel.incident import fold

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


def overflows(found: Findings) -> bool:
    """Tell going beyond a type from being singular at 0."""
    at_zero = found.name in _SINGULAR_AT_ZERO and any(operand.zeros for operand in found.operands)
    largest = max((o.largest for o in found.operands if not math.isnan(o.low)), default=0.0)
    large = largest > _LARGE or found.name in _GROWS_FAST or found.half is not None
    return found.overflowed and not at_zero and large


def rows_in_words(found: Findings) -> str:
    """Say in which rows of its result the operator failed; empty if that cannot be told."""
    rows = bad_rows(found.origin)
    if not rows:
        return ""
    whole = rows == list(range(rows[0], rows[-1] + 1)) and len(rows) > 1
    return f" (rows {rows[0]}-{rows[-1]})" if whole else f" (row {fold(list(map(str, rows)))})"


def samples_in_words(found: Findings) -> str:
    """Name the suspicious samples; empty if there are none, or if it is all of them."""
    if not found.rows or found.finite_without_rows is False or len(found.rows) == found.size:
        return ""
    return f", at {fold([sample_name(found, row) for row in found.rows])}"


def sample_name(found: Findings, row: int) -> str:
    """Name a sample by position and, if it has one, by the user's id."""
    known = found.ids().get(row)
    return f"sample {row}" + (f" (id {known})" if known is not None else "")


def dtype_of(found: Findings) -> str:
    """Return the type that the operator computed in, in words."""
    return next((str(o.dtype).removeprefix("torch.") for o in found.operands), "its dtype")
