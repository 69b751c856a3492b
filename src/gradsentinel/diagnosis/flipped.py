"""Single bits of the training state that no arithmetic flips: what is left there shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.measures.inspection import readable

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEW = 8
"""Fewer other elements do not show what is usual."""


@torch.no_grad()
def flipped_sign(state: Mapping[str, Any], squares: tuple[str, ...]) -> str | None:
    """Say which single running square is negative, and otherwise like the others; None if none is.

    Args:
        state: of an optimizer, for one parameter.
        squares: the keys of what no step makes negative.
    """
    found = []
    for key, value in state.items():
        if key in squares and isinstance(value, Tensor) and readable(value) is None:
            flat = value.detach().flatten()
            below = (flat < 0).nonzero().flatten().tolist()
            found += [(key, flat, place) for place in below]
    if len(found) != 1:
        return None
    key, flat, place = found[0]
    size = -float(flat[place])
    others = flat[torch.isfinite(flat) & (flat > 0)]
    if others.numel() < _FEW or not float(others.min()) <= size <= float(others.max()):
        return None
    return (
        f"one single element of {key}, number {place}, is negative ({-size:.4g}), and without its sign it is "
        "like the others; the step before was fine: its sign bit was flipped since"
    )


@torch.no_grad()
def flipped_exponent(tensor: Tensor) -> str | None:
    """Say which single element is a NaN that arithmetic does not make, and with one bit flipped is usual.

    Arithmetic makes one NaN, with nothing but its first digit set. A number between 1 and 2 whose highest
    exponent bit is flipped is a NaN that has all other digits still.
    """
    kind = _BITS.get(tensor.element_size())
    if kind is None or readable(tensor) is not None or tensor.layout is not torch.strided:
        return None
    flat = tensor.detach().flatten()
    bad = (~torch.isfinite(flat)).nonzero().flatten().tolist()
    others = flat[torch.isfinite(flat)].abs()
    if len(bad) != 1 or others.numel() < _FEW - 1 or not tensor.dtype.is_floating_point:
        return None
    bits = flat[bad[0] : bad[0] + 1].view(kind)
    usual = flat.new_tensor([float("nan"), float("inf")]).abs().view(kind)
    top = 1 << (8 * tensor.element_size() - 2)
    if int(bits.abs() if int(bits) >= 0 else bits & (2 * top - 1)) in usual.tolist():
        return None
    before = float((bits ^ top).view(tensor.dtype))
    if not 0.5 * float(others.min()) <= abs(before) <= 2 * float(others.max()):
        return None
    return (
        f"element {bad[0]} is a NaN that no arithmetic makes; with its highest exponent bit flipped back it "
        f"is {before:.6g}, like the others: a bit of it was flipped"
    )
