"""What being close to a singularity does to the gradient: the judge of all rules about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEAR = {torch.float16: 1e-6, torch.float64: 1e-290}
NEAR_OTHERWISE = 1e-30
"""A value above 0 and below this is about to underflow, whatever the others are."""
MARGIN = 10
"""By so much a recommended eps is better than it has to be."""
_MOST = 1 << 16
"""Elements that a typical value is taken of."""


def bearable(dtype: torch.dtype) -> float:
    """Return how many times as large as elsewhere a gradient may be before it drowns the rest.

    At 1e5 one element in a million has most of the norm, and its square in Adam is 1e10 times that of the
    others; a float16 with a loss scale is at its end before.
    """
    return 2e3 if dtype is torch.float16 else 1e5


def typical(values: Tensor) -> float | None:
    """Return the median of what is finite and above 0, None if nothing is; waits for the device."""
    flat = values.detach().flatten()
    flat = flat[:: -(-flat.numel() // _MOST) or 1]
    flat = flat[(flat > 0) & torch.isfinite(flat)]
    return float(flat.median()) if flat.numel() else None


def sizes(tensor: Tensor) -> Tensor:
    """Return the magnitudes in a type that holds their reciprocals."""
    found = tensor.detach().abs()
    wide = found.dtype is torch.float64 or (found.numel() <= _MOST and _has_float64(found.device))
    return found.double() if wide else found.float()


def _has_float64(device: torch.device) -> bool:
    return device.type in {"cpu", "cuda"}


def safe(eps: float) -> float:
    """Return an eps rounded to a power of ten."""
    return float(10.0 ** round(math.log10(eps)))


def written(eps: float) -> str:
    """Return a power of ten as a program has it."""
    return f"1e{round(math.log10(eps))}"


@dataclass(frozen=True, slots=True)
class Effect:
    """Elements that are close to a singularity, and by what each one's derivative multiplies a gradient."""

    near: Tensor
    """Boolean, of a shape that can be expanded to that of the gradient."""
    gain: Tensor
    """Magnitudes of the local derivative, likewise."""
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    """That the gradient takes first."""

    def on(self, gradient: Tensor) -> float:
        """Return the norm of what those elements give back, if it is out of proportion, else 0; waits.

        It is not if nothing comes back to them (what a mask or a selection leaves out), nor if what does is
        as small as the derivative is large (p * log p).
        """
        given = sizes(gradient if self.shape is None else gradient.reshape(self.shape))
        made = torch.where(given > 0, given * self.gain.to(given.dtype), 0)
        near = self.near.expand_as(made)
        inside = made[near]
        largest = float(inside.amax()) if inside.numel() else 0.0
        if largest == 0:
            return 0.0
        usual = typical(made[~near])
        usual = float(given.amax()) if usual is None else usual
        if largest <= bearable(self.dtype) * usual:
            return 0.0
        norm = float(torch.linalg.vector_norm(inside))
        return norm if norm == norm else float("inf")  # noqa: PLR0124 - NaN

    def without(self, gradient: Tensor) -> Tensor:
        """Return the gradient with nothing coming back to those elements."""
        given = gradient if self.shape is None else gradient.reshape(self.shape)
        kept: Tensor = given.masked_fill(self.near, 0)
        return kept.reshape(gradient.shape)


def nodes_behind(node: Any) -> Iterator[Any]:
    """Yield the autograd nodes of a graph that operators have made, each once."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
        if not node.name().endswith("AccumulateGrad"):
            yield node
