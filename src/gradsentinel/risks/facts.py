"""How values were made, as far as it matters for what may be done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SQUARE, SQUARES, COUNT, SOFTMAX, SIGMOID, BOUNDED = (
    *("square", "squares", "count", "softmax", "sigmoid", "bounded"),
)
"""A square; a sum of squares, which is 0 only if all are; a number of things; probabilities, of many and of
two; what was clamped or scaled down."""
Facts = frozenset[str]
NOTHING: Facts = frozenset()
_CARRIES = {
    *(
        "_to_copy",
        "clone",
        "index",
        "index_select",
        "gather",
        "masked_select",
        "neg",
        "cat",
        "stack",
        "repeat",
    ),
    *("sort", "take", "constant_pad_nd", "where", "masked_fill"),
}
"""Operators whose results are values they were given."""


@dataclass(frozen=True, slots=True)
class Given:
    """What an operator is given."""

    args: tuple[Any, ...]
    known: Callable[[Tensor], Facts]
    """What is known of a tensor."""

    def facts(self, index: int = 0) -> Facts:
        """Return what is known of an argument; nothing of a number."""
        value = self.args[index] if index < len(self.args) else None
        return self.known(value) if isinstance(value, Tensor) else NOTHING

    @property
    def number(self) -> float:
        """The argument among the first two that is a plain number; NaN if both are tensors."""
        numbers = [x for x in self.args[:2] if isinstance(x, (int, float)) and not isinstance(x, bool)]
        return float(numbers[0]) if numbers else float("nan")

    @property
    def tensor(self) -> Tensor:
        """The first argument that is a tensor."""
        return next(x for x in self.args if isinstance(x, Tensor))


def facts_of_result(name: str, given: Given) -> Facts:
    """Return what is known of an operator's result."""
    if not any(isinstance(x, Tensor) for x in given.args):
        return NOTHING
    if name in _RULES:
        return _RULES[name](given)
    return given.known(given.tensor) if name in _CARRIES else NOTHING


def vanishes(number: float, dtype: torch.dtype) -> bool:
    """Return True if a small number that is not 0 becomes 0 in a type."""
    return number != 0 and float(torch.tensor(number, dtype=torch.float64).to(dtype.to_real())) == 0


def _mul(given: Given) -> Facts:
    number = given.number
    if number != number:  # noqa: PLR0124 - NaN: two tensors
        one, other = given.args[:2]
        same = one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride())
        return frozenset({SQUARE}) if same and one.shape == other.shape else NOTHING
    kept = given.known(given.tensor) - {BOUNDED} if number > 0 else NOTHING
    return kept | ({BOUNDED} if 0 < abs(number) < 1 else NOTHING)


def _div(given: Given) -> Facts:
    scaled = isinstance(given.args[0], Tensor) and given.number > 0
    return given.facts() & {SQUARE, SQUARES, COUNT} if scaled else NOTHING


def _add(given: Given) -> Facts:
    """A sum of squares stays one; with a constant that counts it has become safe."""
    number = given.number
    if number != number:  # noqa: PLR0124 - NaN: two tensors
        squares = all(given.facts(index) & {SQUARE, SQUARES} for index in (0, 1))
        return frozenset({SQUARES}) if squares else NOTHING
    floating = given.tensor.is_floating_point() or given.tensor.is_complex()
    safe = number != 0 and not (floating and vanishes(number, given.tensor.dtype))
    return NOTHING if safe else given.known(given.tensor)


def _pow(given: Given) -> Facts:
    exponent = given.args[1]
    even = isinstance(exponent, (int, float)) and exponent > 0 and exponent % 2 == 0
    return frozenset({SQUARE}) if even else NOTHING


def _sum(given: Given) -> Facts:
    if not given.tensor.is_floating_point() and not given.tensor.is_complex():
        return frozenset({COUNT})
    facts = given.facts()
    return frozenset({SQUARES}) if facts & {SQUARE, SQUARES} else facts & {COUNT}


def _always(*facts: str) -> Callable[[Given], Facts]:
    return lambda _given: frozenset(facts)


_RULES: dict[str, Callable[[Given], Facts]] = {
    "mul": _mul,
    "div": _div,
    "true_divide": _div,
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    "pow": _pow,
    **dict.fromkeys(("sum", "mean", "nansum"), _sum),
    "square": _always(SQUARE),
    "count_nonzero": _always(COUNT),
    **dict.fromkeys(("var", "var_mean"), _always(SQUARES)),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _always(SOFTMAX)),
    "sigmoid": _always(SIGMOID),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "hardtanh"), _always(BOUNDED)),
}
