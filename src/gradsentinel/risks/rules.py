"""What can go wrong in an operator, told by what it is given, how that was made, and what it makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradsentinel.risks import quotient, singular
from gradsentinel.risks.facts import vanishes
from gradsentinel.risks.op import Hit, Op
from gradsentinel.risks.op import name_of as _name

_HALF = (torch.float16, torch.bfloat16)
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


Rule = Callable[[Op], Iterator[Hit]]


def hits_of(op: Op) -> Iterator[Hit]:
    """Yield what may go wrong in an operator; waits for the device."""
    for rule in _BY_NAME.get(op.name, ()):
        yield from rule(op)
    if isinstance(op.result, Tensor) and op.result.dtype in _HALF:
        yield from _narrow(op)


# -- overflow -----------------------------------------------------------------------------------------


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
                "use an eps of 1e-3 or more, or compute this in float32",
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


def _highest(tensor: Tensor) -> float:
    return float(tensor.detach().amax()) if tensor.numel() else -math.inf


WATCHED: frozenset[str]
"""Operators whose arguments are looked at, also where the operator overwrites them."""
_BY_NAME: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "pow"), (singular.root,)),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (singular.logarithm,)),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh"), (singular.inverse,)),
    **dict.fromkeys(("atan2", "angle", "tan", "logit", "xlogy", "erfinv"), (singular.other,)),
    **dict.fromkeys(("div", "true_divide", "reciprocal", "addcdiv"), (quotient.division,)),
    "mul": (quotient.product,),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), (quotient.normalisation,)),
    **dict.fromkeys(("native_group_norm", "native_batch_norm"), (quotient.normalisation,)),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm"), (quotient.normalisation,)),
    "_weight_norm_interface": (quotient.normalisation,),
    **dict.fromkeys(("exp", "exp2", "expm1"), (_exponential,)),
    **dict.fromkeys(("_softmax", "_log_softmax"), (_masked_rows,)),
    **dict.fromkeys(("add", "sub"), (_mask_sum, _vanishing)),
    **dict.fromkeys(("rsub", "clamp", "clamp_min"), (_vanishing,)),
}
WATCHED = frozenset(_BY_NAME)
