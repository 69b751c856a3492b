"""Operators close to where their derivative is infinite, as the values of the dry step show it.

Close is what multiplies a gradient by more than the rest of its tensor bears: compared with the typical
value of the same tensor, or by an eps that is all there is and far too small. What is small as a whole is
a matter of scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradsentinel.risks.effect import (
    MARGIN,
    NEAR,
    NEAR_OTHERWISE,
    Effect,
    bearable,
    safe,
    sizes,
    typical,
    written,
)
from gradsentinel.risks.facts import (
    AT_ONE,
    AT_ZERO,
    BOUNDED,
    FADES_ALL,
    FLOOR,
    GATED,
    INSIDE,
    SHIFTED,
    SIGMOID,
    SOFTMAX,
    SQUARE,
    SQUARES,
    guard_of,
)
from gradsentinel.risks.op import Hit, Op

_CLOSE_TO_ONE = 1e-3


# -- roots, powers, logarithms -------------------------------------------------------------------------


def root(op: Op) -> Iterator[Hit]:
    """Judge sqrt, rsqrt and powers below 1."""
    exponent = {"sqrt": 0.5, "rsqrt": -0.5}.get(op.name)
    if exponent is None:
        exponent = op.given.args[1] if len(op.given.args) > 1 else None
    if not op.differentiable or not isinstance(exponent, (int, float)) or exponent >= 1 or exponent == 0:
        return
    facts, what = op.facts(), f"x ** {op.given.args[1]}" if op.name == "pow" else op.name
    eps = "1e-5" if op.tensor.dtype is torch.float16 else "1e-8"
    if facts & {SQUARE, SQUARES} and BOUNDED not in facts:
        yield Hit(
            "root_at_zero",
            f"{what} of a sum of squares has no derivative where all of them are 0{_least(op.tensor)}",
            f"add eps under the root, (x + {eps}).sqrt(), or use torch.linalg.vector_norm, "
            "which is safe at 0",
        )
        return
    if AT_ZERO in facts and guard_of(facts) is None:
        yield Hit(
            "root_at_zero",
            f"{what} of what is clamped at 0 has no derivative there{_least(op.tensor)}: "
            "the clamp passes the 0",
            f"clamp at more than 0: x.clamp(min={eps}), or use torch.cdist for distances, which is safe at 0",
        )
        return
    bears = bearable(op.tensor.dtype)
    power = exponent if exponent > 0 else -1  # a negative power divides, and is judged as such
    least = (bears / abs(exponent)) ** (1 / (power - 1)) if exponent > 0 else 1 / bears
    yield from _small(
        op,
        op.tensor,
        what=what,
        least=least,
        gain=lambda x: abs(exponent) * x ** (exponent - 1),
        harmless=bool(facts & (FADES_ALL | {SHIFTED})),
        advise=lambda eps: f"add eps before it, (x + {written(eps)}), or clamp: x.clamp(min={written(eps)})",
        margin=MARGIN ** (1 / abs(power - 1)) if exponent > 0 else MARGIN,
        absolute=exponent > 0,
    )


def logarithm(op: Op) -> Iterator[Hit]:
    """Judge logarithms; those of probabilities by what they are."""
    if not op.differentiable:
        return
    facts = op.facts()
    if facts & {SOFTMAX, SIGMOID} and BOUNDED not in facts:
        made, better = (
            ("sigmoid", "logsigmoid, or a loss with logits")
            if SIGMOID in facts
            else ("softmax", "log_softmax")
        )
        yield Hit(
            "log_of_probability",
            f"{op.name} of a {made}: a probability that rounds to 0 makes it -inf{_least(op.tensor)}",
            f"use torch.nn.functional.{better}",
        )
        return
    if AT_ZERO in facts and guard_of(facts) is None and op.name != "log1p":
        yield Hit(
            "near_singularity",
            f"{op.name} of what is clamped at 0 is -inf there{_least(op.tensor)}",
            f"clamp at more than 0: x.clamp(min={written(MARGIN / bearable(op.tensor.dtype))})",
        )
        return
    argument = 1 + op.tensor.detach() if op.name == "log1p" else op.tensor
    start, finest = ("-1 + ", torch.finfo(op.tensor.dtype).eps) if op.name == "log1p" else ("", 0.0)
    yield from _small(
        op,
        argument,
        what=f"{op.name}, as 1 + x," if op.name == "log1p" else op.name,
        least=1 / bearable(op.tensor.dtype),
        gain=lambda x: 1 / x,
        harmless=bool(facts & (FADES_ALL | {SHIFTED})),
        advise=lambda eps: f"clamp before the logarithm: x.clamp(min={start}{written(max(eps, finest))})",
    )


def other(op: Op) -> Iterator[Hit]:
    """Judge atan2, angle, tan, logit, xlogy and erfinv by their distance from where they are singular."""
    if not op.differentiable:
        return
    x, dtype = op.tensor.detach(), op.result.dtype
    away = written(max(4 * torch.finfo(dtype).eps, MARGIN / bearable(dtype)))
    gain: Callable[[Tensor], Tensor] = lambda distance: 1 / distance  # noqa: E731
    if op.name == "atan2":
        distance, where = (
            torch.hypot(*(t.detach() for t in op.given.args[:2])),
            "the distance of (y, x) from 0",
        )
        advice = "keep the pair away from 0, where an angle means nothing: leave such elements out"
    elif op.name == "angle":
        distance, where = x.abs(), "the magnitude"
        advice = "keep the numbers away from 0, where an angle means nothing: leave such elements out"
    elif op.name == "logit":
        if len(op.given.args) > 1 and op.given.args[1] is not None:
            return
        distance, where = torch.minimum(x, 1 - x), "the distance from 0 and 1"
        advice = f"clamp before it, x.clamp({away}, 1 - {away}), or compute with logits throughout"
    elif op.name == "tan":
        distance, where = x.cos().abs(), "the cosine"
        gain = lambda distance: distance**-2  # noqa: E731
        advice = "keep the angle away from pi / 2, or compute with sine and cosine"
    elif op.name == "xlogy":
        other = op.given.args[1]
        if not isinstance(other, Tensor) or not other.requires_grad:
            return
        weight = sizes(op.given.args[0]) if isinstance(op.given.args[0], Tensor) else op.given.args[0]
        distance, where = other.detach(), "y"
        gain = lambda distance: abs(weight) / distance  # noqa: E731
        advice = "clamp before it: y.clamp(min=1e-4)"
    else:
        distance, where = 1 - x.abs(), "the distance from 1"
        advice = f"clamp before it: x.clamp(-1 + {away}, 1 - {away})"
    yield from _small(
        op,
        distance,
        what=f"{op.name}: {where}",
        least=1 / bearable(dtype),
        gain=gain,
        harmless=bool(op.facts(1 if op.name == "xlogy" else 0) & FADES_ALL),
        advise=lambda _eps: advice,
    )


def inverse(op: Op) -> Iterator[Hit]:
    """Judge the inverses of functions that end at 1: what is not clamped gets there by rounding alone."""
    if not op.differentiable or not op.tensor.numel():
        return
    if op.name == "acosh":
        guard, least = guard_of(op.facts()), float(op.tensor.detach().amin())
        if (FLOOR in op.facts() and guard is not None and guard > 1) or least > 1 + _CLOSE_TO_ONE:
            return
        yield Hit(
            "inverse_at_one",
            f"acosh has no derivative at 1, is NaN below, and is given {least:.8g}: rounding alone can get "
            "there",
            f"clamp before it: x.clamp(min=1 + {_step(op.tensor)}).acosh()",
        )
    elif INSIDE not in op.facts():
        largest = float(op.tensor.detach().abs().amax())
        yield Hit(
            "inverse_at_one",
            f"{op.name} has no derivative at -1 and 1, and the clamp before it lets just those pass"
            if AT_ONE in op.facts()
            else f"{op.name} has no derivative at -1 and 1, is NaN beyond, and is given up to {largest:.8g}: "
            "rounding alone can get there",
            f"clamp before it: x.clamp(-1 + {_step(op.tensor)}, 1 - {_step(op.tensor)}).{op.name}()",
        )


# -- what they share -----------------------------------------------------------------------------------


def _small(
    op: Op,
    values: Tensor,
    *,
    what: str,
    least: float,
    gain: Callable[[Tensor], Tensor],
    harmless: bool,
    advise: Callable[[float], str],
    margin: float = MARGIN,
    absolute: bool = False,
) -> Iterator[Hit]:
    """Judge what is singular at 0.

    Args:
        op: the operator.
        values: the distances from its singularity.
        what: it is called.
        least: the smallest value that is bearable, where 1 is typical.
        gain: the derivative.
        harmless: the values fade with their derivative; only underflow matters.
        advise: the remedy for an eps.
        margin: by which the eps is larger than needed.
        absolute: judges a single value as if 1 were typical; else it is a matter of scale.
    """
    if not values.numel() or not (values.is_floating_point() or values.is_complex()):
        return
    signed = values.detach()
    sizes_ = torch.where(signed > 0, sizes(signed), 0) if not signed.is_complex() else sizes(signed)
    usual, guard = typical(sizes_), guard_of(op.facts()) if values is op.tensor else None
    if usual is None:
        return
    near = sizes_ < NEAR.get(values.dtype, NEAR_OTHERWISE)
    only_eps = torch.zeros_like(near)
    if not harmless:
        usual = 1.0 if absolute and sizes_.numel() == 1 else usual
        near = near | (sizes_ < usual * least)
        if guard is not None and guard < least:
            only_eps = sizes_ <= 2 * guard
        near = near | only_eps
        if GATED in op.facts() and guard is not None:  # below it nothing comes back
            near, only_eps = (mask & (sizes_ > 1.001 * guard) for mask in (near, only_eps))
    near = near & (sizes_ > 0) & torch.isfinite(sizes_)
    if not bool(near.any()):
        return
    smallest = float(torch.where(near, sizes_, math.inf).amin())
    rest = typical(torch.where(near, 0, sizes_))
    eps = safe((rest or 1.0) * least * margin)
    at = (
        float(gain(torch.tensor(smallest, dtype=torch.float64)).max()) if op.name != "xlogy" else 1 / smallest
    )
    yield Hit(
        "near_singularity",
        _small_message(what, smallest, rest, at, int(near.sum()), near.numel(), eps=bool(only_eps.any())),
        advise(eps),
        effect=Effect(near, torch.where(sizes_ > 0, gain(sizes_), 0), values.dtype),
    )


def _small_message(
    what: str, smallest: float, rest: float | None, at: float, count: int, among: int, *, eps: bool
) -> str:
    places = f"{count} of {among} place(s)"
    if eps:
        return (
            f"{what} is given {smallest:.3g} in {places}, hardly more than the eps: "
            f"its derivative is {at:.3g} there"
        )
    if rest is not None:
        return (
            f"{what} is given {smallest:.3g}, while {rest:.3g} is typical ({places}): "
            f"its derivative is {at:.3g} there"
        )
    return f"{what} is given {smallest:.3g}: its derivative is {at:.3g} there"


def _least(tensor: Tensor) -> str:
    """The smallest value, for a message."""
    values = tensor.detach()
    return (
        f" (the smallest is {float(values.amin()):.3g})"
        if values.numel() and values.is_floating_point()
        else ""
    )


def _step(tensor: Tensor) -> str:
    """A distance from 1 that the type can hold."""
    return written(4 * torch.finfo(tensor.dtype).eps)
