"""What a clip multiplies by, computed by the host bit for bit as torch computes it in float32 on a CPU."""

from __future__ import annotations

import math
from ctypes import c_float
from functools import cache

import torch

_EPS = c_float(1e-6).value
_SMALLEST = 2.0**-126
"""What is smaller has fewer bits than others, and is 0 where the program says so."""
_TRIALS = 64


def factor_on_host(max_norm: float, norm: float) -> float | None:
    """Return the factor that clips a norm of float32 to this one; None where that is not certain.

    Four operations of torch on one number cost more than all else that a clip does on the host. The sum,
    quotient and product of two numbers of float32 are the same whether they are rounded once, or to the more
    than twice as many bits of a float first.
    """
    if type(max_norm) is not float or not 0.0 <= norm < math.inf or not _as_torch():
        return None
    factor, exact = _factor(max_norm, norm)
    return factor if exact else None


def _factor(max_norm: float, norm: float) -> tuple[float, bool]:
    inverse = c_float(1.0 / c_float(norm + _EPS).value).value
    factor = c_float(inverse * c_float(max_norm).value).value
    return min(factor, 1.0), inverse >= _SMALLEST and factor >= _SMALLEST


@cache
def _as_torch() -> bool:
    """Return True if this torch divides as the ones that this was written for: by the reciprocal."""
    # A true quotient would differ in every fourth or so.
    norms = [c_float(0.0137 * 1.09**number).value for number in range(_TRIALS)]
    numbers = [torch.tensor(norm, dtype=torch.float32, device="cpu") for norm in norms]
    by_torch = [torch.clamp(0.1 / (number + 1e-6), max=1.0) for number in numbers]
    return [float(factor) for factor in by_torch] == [_factor(0.1, norm)[0] for norm in norms]
