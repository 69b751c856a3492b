"""How values were made, as far as it matters for what may be done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SQUARE, SQUARES, COUNT, SOFTMAX, SIGMOID, BOUNDED = (
    *("square", "squares", "count", "softmax", "sigmoid", "bounded"),
)
"""A square; a sum of squares, which is 0 only if all are; a number of things; probabilities, of many and of
two; what was clamped away from 0 or scaled down."""
FLOOR, INSIDE, AT_ZERO, AT_ONE = "floor", "inside", "at zero", "at one"
"""Clamped from below at more than 0; clamped or scaled to less than 1 in size; clamped at 0, or at 1, which
pass."""
FADING, SHIFTED, GATED, TANH = "fading", "shifted", "gated", "tanh"
"""Small values have derivatives as small (exp, probabilities); squares with a constant; no derivative at its
lowest value (relu, clamp); a hyperbolic tangent."""
INVERSE = "inverse"
"""One over what was divided by."""
_GUARD = "guard:"
"""Begins the fact that an eps was added, or clamped to: its value follows."""
Facts = frozenset[str]
NOTHING: Facts = frozenset()
FADES: Facts = frozenset({FADING})
FADES_ALL: Facts = frozenset({FADING, SOFTMAX, SIGMOID})
"""What fades, by whatever name."""
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
    kwargs: dict[str, Any] = field(default_factory=dict)

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


def guard_of(facts: Facts) -> float | None:
    """Return the eps that keeps a value from 0; None if there is none."""
    return next((float(fact.removeprefix(_GUARD)) for fact in facts if fact.startswith(_GUARD)), None)


def _guarded(facts: Facts, function: Callable[[float], float]) -> Facts:
    """The facts with another eps."""
    eps = guard_of(facts)
    others = frozenset(fact for fact in facts if not fact.startswith(_GUARD))
    return others if eps is None else others | {f"{_GUARD}{function(eps)!r}"}


def _and_constant(given: Given) -> tuple[Tensor, float] | None:
    """Split two arguments into a tensor and a number, which may be a tensor, too; None if there is none."""
    tensors = [x for x in given.args[:2] if isinstance(x, Tensor)]
    if len(tensors) == 1:
        return tensors[0], given.number
    for tensor, small in ((tensors[0], tensors[1]), (tensors[1], tensors[0])):
        if small.dim() == 0 and not small.requires_grad and not given.known(small) and not small.is_complex():
            return tensor, float(small)
    return None


def _mul(given: Given) -> Facts:
    number = given.number
    if number != number:  # noqa: PLR0124 - NaN: two tensors
        one, other = given.args[:2]
        same = one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride())
        if same and one.shape == other.shape:
            return frozenset({SQUARE}) | (given.known(one) & {TANH})
        fades = any(given.facts(index) & FADES_ALL for index in (0, 1))
        return FADES if fades else NOTHING
    facts = given.known(given.tensor)
    kept = _guarded(facts, lambda eps: eps / number if INVERSE in facts else eps * number)
    kept = kept - {BOUNDED, INSIDE} if number > 0 else NOTHING
    return kept | (frozenset({BOUNDED, INSIDE}) if 0 < abs(number) < 1 else NOTHING)


def _div(given: Given) -> Facts:
    facts, number = given.facts(), given.number
    if isinstance(given.args[0], Tensor) and number > 0:
        kept = {SQUARE, SQUARES, COUNT, FADING, SHIFTED, GATED}
        return _guarded(facts, lambda eps: eps / number) - (facts - kept - _eps_in(facts))
    return FADES if facts & FADES_ALL else NOTHING


def _eps_in(facts: Facts) -> Facts:
    return frozenset(fact for fact in facts if fact.startswith(_GUARD))


def _add(given: Given) -> Facts:
    """A sum of squares stays one; with a constant that counts it has become safe."""
    found = _and_constant(given)
    if found is None:
        one, other = given.facts(), given.facts(1)
        squares = all(facts & {SQUARE, SQUARES} for facts in (one, other))
        fades = all(facts & FADES_ALL for facts in (one, other))
        return frozenset({SQUARES}) if squares else FADES if fades else NOTHING
    tensor, number = found
    floating = tensor.is_floating_point() or tensor.is_complex()
    if number == 0 or (floating and vanishes(number, tensor.dtype)):
        return given.known(tensor)
    return _shifted(given.known(tensor), number)


def _shifted(facts: Facts, number: float) -> Facts:
    """What is left of the facts when a constant is added."""
    kept = facts & {FADING, GATED, SHIFTED}
    if facts & {SOFTMAX, SIGMOID} or (TANH in facts and abs(number) == 1):
        kept |= {FADING}
    if facts & {SQUARE, SQUARES}:
        kept |= {SHIFTED}
    return kept | ({f"{_GUARD}{number!r}"} if number > 0 else NOTHING)


def _rsub(given: Given) -> Facts:
    """One minus a probability is one; one minus the square of a tanh is its derivative."""
    facts = given.facts()
    if given.number != 1 or not facts & {SOFTMAX, SIGMOID, TANH}:
        return NOTHING if given.number != 0 else facts & {SOFTMAX, SIGMOID}
    return facts & {SOFTMAX, SIGMOID} or FADES


def _power(given: Given) -> Facts:
    return _to_the(given, given.args[1] if len(given.args) > 1 else None)


def _to_the(given: Given, exponent: Any) -> Facts:
    facts = given.facts()
    if not isinstance(exponent, (int, float)) or exponent == 0:
        return NOTHING
    kept = _eps_in(_guarded(facts, lambda eps: eps ** abs(exponent))) | (facts & {SHIFTED, GATED})
    if exponent < 0:
        return kept | {INVERSE}
    kept |= FADES if facts & FADES_ALL else NOTHING
    even = exponent % 2 == 0
    return kept | (frozenset({SQUARE}) | (facts & {TANH}) if even else NOTHING)


def _clamp(given: Given, low: Any, high: Any) -> Facts:
    """What a clamp leaves: at 0 it protects nothing."""
    low, high = (_as_number(x, given.tensor) for x in (low, high))
    facts = given.known(given.tensor)
    inside: Facts = NOTHING
    if (low is None or low > -1) and (high is None or high < 1) and (low is not None or high is not None):
        inside = frozenset({INSIDE})
    elif low == -1 or high == 1:
        inside = frozenset({AT_ONE})
    if low is None or low < 0:
        return (facts - {INSIDE}) | inside
    if low == 0:
        return (facts - {INSIDE} - _eps_in(facts)) | inside | {AT_ZERO, GATED}
    return frozenset({FLOOR, BOUNDED, GATED, f"{_GUARD}{low!r}"}) | inside | (facts & {FADING, SHIFTED})


def _as_number(bound: Any, tensor: Tensor) -> float | None:
    """A bound as the type holds it; one that differs from element to element is taken for a good one."""
    if isinstance(bound, Tensor):
        return float(bound.amin()) if bound.numel() and not bound.is_complex() else None
    if bound is None:
        return None
    return float(torch.tensor(bound, dtype=torch.float64).to(tensor.dtype))


def _clamped(given: Given) -> Facts:
    bounds = (*given.args[1:3], None, None)
    return _clamp(given, bounds[0], given.kwargs.get("max", bounds[1]))


def _maximum(given: Given) -> Facts:
    one, other = given.args[:2]
    bound, tensor = (one, other) if one.numel() < other.numel() else (other, one)
    if bound.requires_grad:
        return frozenset({BOUNDED, FLOOR, INSIDE})
    return _clamp(Given((tensor, bound), given.known), bound, None)


def _sum(given: Given) -> Facts:
    if not given.tensor.is_floating_point() and not given.tensor.is_complex():
        return frozenset({COUNT})
    facts = given.facts()
    if facts & {SQUARE, SQUARES}:
        return frozenset({SQUARES})
    return (facts & {COUNT, GATED}) | (FADES if facts & FADES_ALL else NOTHING)


def _always(*facts: str) -> Callable[[Given], Facts]:
    return lambda _given: frozenset(facts)


_RULES: dict[str, Callable[[Given], Facts]] = {
    "mul": _mul,
    "div": _div,
    "true_divide": _div,
    **dict.fromkeys(("add", "sub"), _add),
    "rsub": _rsub,
    "pow": _power,
    "sqrt": lambda given: _to_the(given, 0.5),
    "rsqrt": lambda given: _to_the(given, -0.5),
    "reciprocal": lambda given: _to_the(given, -1.0),
    **dict.fromkeys(("sum", "mean", "nansum"), _sum),
    "square": _always(SQUARE),
    "count_nonzero": _always(COUNT),
    **dict.fromkeys(("var", "var_mean"), _always(SQUARES)),
    **dict.fromkeys(("_softmax", "_safe_softmax"), _always(SOFTMAX)),
    "sigmoid": _always(SIGMOID),
    "tanh": _always(TANH),
    **dict.fromkeys(("exp", "exp2", "softplus"), _always(FADING)),
    "relu": _always(GATED),
    "clamp": _clamped,
    "clamp_min": lambda given: _clamp(given, given.args[1], None),
    "clamp_max": lambda given: _clamp(given, None, given.args[1]),
    "hardtanh": lambda given: _clamp(given, *(*given.args[1:3], -1.0, 1.0)[:2]),
    "maximum": _maximum,
    "minimum": lambda given: given.facts() | {INSIDE},
}
