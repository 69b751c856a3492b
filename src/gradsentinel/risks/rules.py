"""What can go wrong in an operator, told by what it is given, how that was made, and what it makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.risks.facts import (
    BOUNDED,
    COUNT,
    SIGMOID,
    SOFTMAX,
    SQUARE,
    SQUARES,
    Facts,
    Given,
    vanishes,
)

_HALF = (torch.float16, torch.bfloat16)
_NEAR = {torch.float16: 1e-6, torch.float64: 1e-290}
_NEAR_OTHERWISE = 1e-30
"""A value above 0 and below this is about to underflow: its root, logarithm or reciprocal breaks next."""
_MANY = 2048
"""Terms from which on a sum in 16 bits is a rough one: a bfloat16 has 8 significant bits, a float16 11."""
_MASK = 0.5
"""A number below so many times the lowest one is a mask."""
_SHARE = 1 / 8
"""A float16 result above so many times the largest one may overflow for another batch."""
_EXPONENT = 0.8
"""Likewise an exponent."""
_LARGE = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "mul",
    "add",
    "sub",
    "pow",
    "sum",
    "exp",
    "cumsum",
    "div",
}


@dataclass(frozen=True, slots=True)
class Op:
    """One forward operator of the dry step."""

    name: str
    given: Given
    kwargs: dict[str, Any]
    result: Any
    differentiable: bool
    """True if a gradient is going to flow back through it."""

    @property
    def tensor(self) -> Tensor:
        """The first tensor it was given."""
        return self.given.tensor

    def facts(self, index: int = 0) -> Facts:
        """What is known of an argument."""
        return self.given.facts(index)


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule's answer."""

    kind: str
    message: str
    remedy: str
    certain: bool = False


Rule = Callable[[Op], Iterator[Hit]]


def hits_of(op: Op) -> Iterator[Hit]:
    """Yield what may go wrong in an operator; waits for the device."""
    for rule in _BY_NAME.get(op.name, ()):
        yield from rule(op)
    if isinstance(op.result, Tensor) and op.result.dtype in _HALF:
        yield from _narrow(op)


# -- close to a singularity ----------------------------------------------------------------------------


def _root(op: Op) -> Iterator[Hit]:
    exponent = op.given.args[1] if op.name == "pow" else 0.5
    if not op.differentiable or not isinstance(exponent, (int, float)) or exponent >= 1:
        return
    facts, what = op.facts(), _call(op)
    if facts & {SQUARE, SQUARES} and BOUNDED not in facts:
        yield Hit(
            "root_at_zero",
            f"{what} of a sum of squares has no derivative where all of them are 0",
            "add eps under the root, (x + 1e-12).sqrt(), or use torch.linalg.vector_norm, which is safe at 0",
        )
        return
    smallest = _smallest(op.tensor)
    if smallest is not None:
        yield Hit(
            "near_singularity",
            f"{what} is given {smallest:.3g}: at 0 it has no derivative",
            "add eps before it, or clamp: x.clamp(min=eps)",
        )


def _logarithm(op: Op) -> Iterator[Hit]:
    if not op.differentiable:
        return
    facts = op.facts()
    if facts & {SOFTMAX, SIGMOID} and BOUNDED not in facts:
        made, better = (
            ("sigmoid", "logsigmoid, or a loss with logits")
            if SIGMOID in facts
            else (
                "softmax",
                "log_softmax",
            )
        )
        yield Hit(
            "log_of_probability",
            f"{op.name} of a {made}: a probability that rounds to 0 makes it -inf",
            f"use torch.nn.functional.{better}",
        )
        return
    smallest = _smallest(op.tensor)
    if smallest is not None:
        yield Hit(
            "near_singularity",
            f"{op.name} is given {smallest:.3g}: at 0 it is -inf",
            "clamp before the logarithm: x.clamp(min=eps).log()",
        )


def _division(op: Op) -> Iterator[Hit]:
    divisor = op.given.args[0] if op.name == "reciprocal" else op.given.args[1]
    if not isinstance(divisor, Tensor):
        return
    index = 0 if op.name == "reciprocal" else 1
    facts = op.facts(index)
    if COUNT in facts and BOUNDED not in facts:
        yield Hit(
            "division_by_count",
            "divides by a count, which is 0 for a batch in which nothing is selected",
            "divide by count.clamp(min=1)",
        )
        return
    smallest = _smallest(divisor) if divisor.is_floating_point() and op.differentiable else None
    if smallest is not None:
        yield Hit(
            "near_singularity",
            f"divides by {smallest:.3g}",
            "make the divisor safe: x / (y + eps), or y.clamp(min=eps)",
        )


def _inverse(op: Op) -> Iterator[Hit]:
    if op.differentiable and BOUNDED not in op.facts():
        largest = _largest(op.tensor)
        yield Hit(
            "inverse_at_one",
            f"{op.name} has no derivative at -1 and 1, is NaN beyond, and is given up to {largest:.8g}: "
            "rounding alone can get there",
            f"clamp before it: x.clamp(-1 + 1e-7, 1 - 1e-7).{op.name}()",
        )


def _exponential(op: Op) -> Iterator[Hit]:
    if not op.tensor.is_floating_point():
        return
    largest = _highest(op.tensor)
    limit = math.log(torch.finfo(op.tensor.dtype).max)
    if _EXPONENT * limit < largest <= limit:
        yield Hit(
            "near_overflow",
            f"{op.name} is given {largest:.4g}; above {limit:.4g} it overflows in {_name(op.tensor.dtype)}",
            "subtract the maximum first, work with logarithms (logsumexp, softplus), or clamp the exponent",
        )


# -- masks ---------------------------------------------------------------------------------------------


def _masked_rows(op: Op) -> Iterator[Hit]:
    dim = op.given.args[1] if len(op.given.args) > 1 else -1
    if op.tensor.numel() == 0 or not op.tensor.dim():
        return
    rows = torch.isneginf(op.tensor).all(dim)
    if bool(rows.any()):
        yield Hit(
            "masked_row",
            f"{op.name.lstrip('_')} of {int(rows.sum())} row(s) with nothing but -inf: the result is NaN",
            "give fully masked rows one position, or leave out samples without a valid one",
            certain=True,
        )


def _mask_sum(op: Op) -> Iterator[Hit]:
    one, other = op.given.args[:2]
    if not (isinstance(one, Tensor) and isinstance(other, Tensor) and isinstance(op.result, Tensor)):
        return
    if not (op.result.is_floating_point() and op.result.numel()) or float(op.result.amin()) != -math.inf:
        return
    lowest = torch.finfo(op.result.dtype).min
    if min(float(one.amin()), float(other.amin())) > _MASK * lowest:
        return
    reached = torch.isneginf(op.result) & torch.isfinite(one) & torch.isfinite(other)
    if bool(reached.any()):
        yield Hit(
            "mask_overflow",
            f"a mask of {lowest:.4g} and what it is added to make -inf in {int(reached.sum())} place(s): "
            "where that is a whole row, softmax makes NaN of it",
            "mask with masked_fill, combine masks by logical operators, or take half of finfo.min",
            certain=True,
        )


# -- narrow types --------------------------------------------------------------------------------------


def _vanishing(op: Op) -> Iterator[Hit]:
    dtype = op.tensor.dtype
    if not op.tensor.is_floating_point():
        return
    numbers = (
        [op.given.number]
        if op.name in {"add", "sub", "rsub"}
        else [*op.given.args[1:3], op.kwargs.get("min")]
    )
    for number in numbers:
        if isinstance(number, float) and abs(number) < 1 and vanishes(number, dtype):
            yield Hit(
                "vanishing_eps",
                f"{number:g} is 0 in {_name(dtype)}: it protects from nothing",
                "use an eps of 1e-4 or more, or compute this in float32",
                certain=True,
            )


def _narrow(op: Op) -> Iterator[Hit]:
    result: Tensor = op.result
    dtype = _name(result.dtype)
    if op.name in {"sum", "cumsum", "prod", "cumprod", "linalg_vector_norm"} and op.differentiable:
        terms = op.tensor.numel() // max(result.numel(), 1) if op.name[:3] != "cum" else _terms_along(op)
        if terms >= _MANY:
            digits = "2 to 3" if result.dtype is torch.bfloat16 else "3 to 4"
            yield Hit(
                "narrow_reduction",
                f"{op.name} over {terms} terms in {dtype}: the result has {digits} digits"
                + (", and overflows above 65504" if result.dtype is torch.float16 else ""),
                "reduce in float32: x.float().sum()",
            )
    if result.dtype is torch.float16 and op.name in _LARGE and result.numel():
        low, high = (float(x) for x in torch.aminmax(result))
        limit = torch.finfo(torch.float16).max
        largest = max(high, -low if low > -0.99 * limit else 0.0)
        if _SHARE * limit < largest <= limit:
            yield Hit(
                "near_overflow",
                f"{op.name} makes {largest:.4g} in float16, where {limit:.5g} is the largest number",
                "compute it in float32 or bfloat16, or scale its inputs down first",
            )


def _terms_along(op: Op) -> int:
    dim = op.given.args[1] if len(op.given.args) > 1 else 0
    return op.tensor.shape[dim] if op.tensor.dim() and isinstance(dim, int) else 1


# -- numbers and words ---------------------------------------------------------------------------------


def _smallest(tensor: Tensor) -> float | None:
    """The smallest magnitude above 0 if it is about to underflow, and nothing is at 0 or below or not finite.

    What has got there shows in loss and gradients, unless the program knows what it does.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return None
    sizes = tensor.detach().abs()
    smallest, largest = (float(x) for x in torch.aminmax(sizes))
    near = 0 < smallest < _NEAR.get(tensor.dtype, _NEAR_OTHERWISE)
    return smallest if near and math.isfinite(largest) else None


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().amax()) if tensor.numel() else 0.0


def _highest(tensor: Tensor) -> float:
    return float(tensor.detach().amax()) if tensor.numel() else -math.inf


def _call(op: Op) -> str:
    return f"x ** {op.given.args[1]}" if op.name == "pow" else op.name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


WATCHED: frozenset[str]
"""Operators whose arguments are looked at, also where the operator overwrites them."""
_BY_NAME: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "pow"), (_root,)),
    **dict.fromkeys(("log", "log2", "log10"), (_logarithm,)),
    **dict.fromkeys(("div", "true_divide", "reciprocal"), (_division,)),
    **dict.fromkeys(("acos", "asin", "atanh"), (_inverse,)),
    **dict.fromkeys(("exp", "exp2", "expm1"), (_exponential,)),
    **dict.fromkeys(("_softmax", "_log_softmax"), (_masked_rows,)),
    **dict.fromkeys(("add", "sub"), (_mask_sum, _vanishing)),
    **dict.fromkeys(("rsub", "clamp", "clamp_min"), (_vanishing,)),
}
WATCHED = frozenset(_BY_NAME)
