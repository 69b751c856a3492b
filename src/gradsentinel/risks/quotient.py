"""Divisions close to 0: by a number, by what was made one over it, and within normalisations."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    BOUNDED,
    COUNT,
    FADES_ALL,
    GATED,
    INVERSE,
    NOTHING,
    Facts,
    guard_of,
)
from gradsentinel.risks.op import Hit, Op

# -- quotients -----------------------------------------------------------------------------------------


def division(op: Op) -> Iterator[Hit]:
    """Judge x / y, one over y, and x times what is one over y."""
    given = op.given.args
    index = 0 if op.name == "reciprocal" else 2 if op.name == "addcdiv" else 1
    divisor = given[index] if len(given) > index else None
    if isinstance(divisor, float) and divisor != 0 and op.tensor.is_floating_point():
        divisor = torch.tensor(divisor, dtype=op.tensor.dtype, device=op.tensor.device)
    if not isinstance(divisor, Tensor) or op.kwargs.get("rounding_mode") is not None:
        return
    facts = op.facts(index)
    if COUNT in facts and BOUNDED not in facts:
        yield Hit(
            "division_by_count",
            "divides by a count, which is 0 for a batch in which nothing is selected"
            + (f" (the smallest is {float(divisor.detach().amin()):g})" if divisor.numel() else ""),
            "divide by count.clamp(min=1)",
        )
        return
    above = index - 1 if index else None
    yield from _quotient(op, above, divisor, facts)


def product(op: Op) -> Iterator[Hit]:
    """Judge a product with what was made by rsqrt or reciprocal: it is a division."""
    for index in (0, 1):
        factor = op.given.args[index] if len(op.given.args) > index else None
        if isinstance(factor, Tensor) and INVERSE in op.facts(index):
            yield from _quotient(op, 1 - index, factor, op.facts(index), inverted=True)
            return


def _quotient(
    op: Op, above: int | None, below: Tensor, facts: Facts, *, inverted: bool = False
) -> Iterator[Hit]:
    if not op.differentiable or not below.is_floating_point() or not below.numel():
        return
    x = 1.0 if above is None else op.given.args[above]
    x_facts = op.facts(above) if above is not None else NOTHING
    x_alive = isinstance(x, Tensor) and x.requires_grad
    y = 1 / sizes(below) if inverted else sizes(below)
    over = sizes(x) if isinstance(x, Tensor) else torch.tensor(abs(float(x)), dtype=y.dtype, device=y.device)
    over = over.to(y.dtype)
    bears = bearable(below.dtype)
    usual, guard = typical(y), guard_of(facts)
    if usual is None:
        return
    at_guard = torch.zeros_like(y, dtype=torch.bool) if guard is None else (y <= 1.001 * guard)
    of_x = torch.where((over == 0) & at_guard, 0, 1 / y) if GATED in x_facts else 1 / y
    of_y = torch.where(at_guard, 0, over / y / y) if GATED in facts else over / y / y
    gain = torch.zeros((), dtype=y.dtype, device=y.device)
    if x_alive:
        gain = torch.maximum(gain, of_x)
    if below.requires_grad and not inverted:  # the derivative by one over y is x itself
        gain = torch.maximum(gain, of_y)
    tiny = y < NEAR.get(below.dtype, NEAR_OTHERWISE)
    scaled = bool(facts & FADES_ALL) and bool(x_facts & FADES_ALL)  # exp(x) / exp(x).sum(): both fade alike
    near, seen = tiny, "tiny"
    if not scaled:
        small = y < usual / bears
        only_eps = (y <= 2 * guard) if guard is not None and guard * bears < 1 else torch.zeros_like(small)
        alone = y.numel() == 1 or usual * bears < 1
        blown = (y * bears < 1) & (over > bears * y) if alone else torch.zeros_like(small)
        near = tiny | small | only_eps | blown
        seen = "eps" if bool(only_eps.any()) else "small" if bool(small.any()) else "blown"
    near = near & (y > 0) & torch.isfinite(y) & (gain > 0)
    if not bool(near.any()):
        return
    least, count, among = float(torch.where(near, y, math.inf).amin()), int(near.sum()), near.numel()
    rest = typical(torch.where(near, 0, y))
    eps = safe((rest or 1.0) / bears * MARGIN)
    better = (
        f"use an eps of {written(eps)}" if guard is not None and seen == "eps" else "make the divisor safe"
    )
    yield Hit(
        "near_singularity",
        _quotient_message(seen, least, guard, rest, count, among),
        f"{better}: x / (y + {written(eps)}), or y.clamp(min={written(eps)})",
        effect=Effect(near, gain, below.dtype),
    )


def _quotient_message(
    seen: str, least: float, guard: float | None, rest: float | None, count: int, among: int
) -> str:
    if seen == "eps":
        return (
            f"of a divisor nothing but its eps of {guard:.3g} is left in {count} of {among} place(s): "
            f"the gradient is multiplied by {1 / least:.3g} there"
        )
    if rest is not None:
        return (
            f"divides by {least:.3g}, while {rest:.3g} is typical ({count} of {among} place(s)): "
            f"the gradient is multiplied by {1 / least:.3g} there"
        )
    return f"divides by {least:.3g}: the gradient is multiplied by {1 / least:.3g}"


# -- normalisation -------------------------------------------------------------------------------------


def normalisation(op: Op) -> Iterator[Hit]:
    """Judge layer, group, batch and weight norm by the deviations that they divide by."""
    found = _deviations(op) if op.differentiable else None
    if found is None:
        return
    inverse, weight, shape, eps = found
    bears = bearable(op.tensor.dtype)
    usual = typical(inverse)
    if usual is None:
        return
    near = inverse > bears * usual
    guarded = eps > 0 and eps**-0.5 > bears
    if guarded:
        near = near | (inverse > 0.7 * eps**-0.5)
    near = near & torch.isfinite(inverse)
    if not bool(near.any()):
        return
    largest = float(torch.where(near, inverse, 0).amax())
    what = op.name.lstrip("_").removeprefix("native_").removesuffix("_interface")
    kind = "norm(s) close to 0" if "weight" in what else "group(s) of (nearly) equal values"
    advice = (
        "initialise the weight, whose rows are close to 0: its direction means nothing there"
        if "weight" in what
        else "use the usual eps=1e-5: with it equal values do no harm"
    )
    yield Hit(
        "near_singularity",
        f"{what} with eps={eps:g} divides {int(near.sum())} of {near.numel()} {kind} by {1 / largest:.3g}: "
        f"the gradient is multiplied by {largest:.3g} there",
        advice,
        effect=Effect(near, inverse * weight, op.tensor.dtype, shape),
    )


def _deviations(op: Op) -> tuple[Tensor, Tensor, tuple[int, ...] | None, float] | None:
    """One over the deviations, of a shape that the gradient can be multiplied by; weight; shape; eps."""
    args, x = op.given.args, op.tensor
    one = torch.ones((), device=x.device)
    if op.name == "_weight_norm_interface":
        return 1 / sizes(op.result[1]), sizes(args[1]), None, 0.0
    eps = next((float(arg) for arg in reversed(args) if isinstance(arg, float)), 0.0)
    if op.name in {"native_layer_norm", "_fused_rms_norm"}:
        weight = args[2] if isinstance(args[2], Tensor) else one
        return sizes(op.result[-1]), sizes(weight), None, eps
    if op.name == "native_group_norm":
        weight, (count, channels, size, groups) = args[1], args[3:7]
        shape = (count, groups, channels // groups, size)
        scale = sizes(weight).reshape(1, groups, -1, 1) if isinstance(weight, Tensor) else one
        return sizes(op.result[2])[:, :, None, None], scale, shape, eps
    training = next((arg for arg in args if isinstance(arg, bool)), True)
    along = (1, -1, *(1,) * (x.dim() - 2))
    weight = sizes(args[1]).reshape(along) if isinstance(args[1], Tensor) else one
    inverse = sizes(op.result[2]) if training else (sizes(args[4]) + eps).rsqrt()
    return (inverse.reshape(along), weight, None, eps) if inverse.numel() else None
