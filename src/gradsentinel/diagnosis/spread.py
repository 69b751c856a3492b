"""Which numbers measure how far values lie apart, or how long a vector is: 0 for values that are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LENGTH = "length"
"""A deviation, a variance, a norm, a range."""
_GAP = "gap"
"""A distance between two of the values: a record may say two things that exclude each other."""
_SQUARE, _MEAN, _MOST, _LEAST = "square", "mean", "most", "least"
_NORMS = frozenset({"linalg_vector_norm", "norm"})
_DEVIATIONS = frozenset({"std", "std_mean", "var", "var_mean"})
_SUMS = frozenset({"mean", "sum"})
_COPIES = frozenset({"_to_copy", "clone"})
_EXTREMES = {"amax": _MOST, "max": _MOST, "amin": _LEAST, "min": _LEAST}


def measure_of(func: Any, args: Sequence[Any], given: Sequence[str]) -> str:
    """Return what an operator's result measures; empty for anything else.

    Args:
        func: the operator.
        args: what it was given.
        given: what its tensors measure, in their order.
    """
    name = func.overloadpacket.__name__.rstrip("_")
    if name in _DEVIATIONS:
        return LENGTH
    if len(given) == 1:
        return _of_one(func, name, args, given[0])
    if name == "mul" and isinstance(args[0], Tensor) and args[0] is args[1]:
        return given[0] if given[0] == _GAP else _SQUARE
    return _of_difference(given) if name == "sub" and len(given) == 2 else ""


def _of_difference(given: Sequence[str]) -> str:
    if set(given) == {_MOST, _LEAST}:
        return LENGTH
    return "" if _MEAN in given else _GAP


def _of_one(func: Any, name: str, args: Sequence[Any], before: str) -> str:
    if name in _EXTREMES:
        return _EXTREMES[name]
    if before not in (LENGTH, _GAP):
        if name in _NORMS:
            return LENGTH
        if name in ("abs", "square") or (name == "pow" and _is_two(args[1])):
            return _SQUARE
        if name in _SUMS:
            return LENGTH if before == _SQUARE else _MEAN if name == "mean" else ""
    kept = torch.Tag.pointwise in func.tags or name in _COPIES or name in _SUMS or name in _NORMS
    return before if kept else ""


def _is_two(exponent: Any) -> bool:
    return (
        isinstance(exponent, (int, float)) and exponent == 2
    )  # of a number to the power of a tensor it is that
