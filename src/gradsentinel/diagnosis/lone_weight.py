"""A single weight that has left all others behind, as a flipped bit leaves it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsentinel.diagnosis.reach import reach_of
from gradsentinel.measures.inspection import local, parts_of, readable
from gradsentinel.run import Run

_FAR = 1e6
"""So many times larger than all others of its tensor, and than it was itself."""
_SIBLINGS = 8
"""With fewer others there is no telling what is usual."""
_MOVED = 2.0
"""The others of its tensor may have moved by this factor since the known-good state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneWeight:
    """The weight, and what is known of it."""

    name: str
    index: tuple[int, ...]
    value: float
    rest: float
    """Largest magnitude of the others."""
    before: float | None = None
    """Its value in the known-good state; None if there is none."""
    step: int | None = None
    """Of that state."""
    alone: bool = False
    """True if the others have hardly changed since then."""
    reach: float | None = None
    """How far its optimizer can have moved it since then; None if nothing says so."""

    @property
    def jumped(self) -> bool:
        """True if it alone has changed, and by far more than its optimizer can have moved it."""
        moved = abs(self.value - (self.before or 0.0))
        return self.alone and self.reach is not None and moved > _FAR * self.reach

    def __str__(self) -> str:
        place = f"{self.name}[{', '.join(map(str, self.index))}]"
        text = f"{place} is {self.value:.6g}, while no other of its weights exceeds {self.rest:.4g}"
        if self.before is None:
            return text
        power = math.log2(abs(self.value / self.before)) if self.before else math.inf
        factor = f", 2**{power:.0f} times as much" if math.isfinite(power) else ""
        return f"{text}; at step {self.step} it was {self.before:.4g}{factor}"


@torch.no_grad()
def find_lone_weight(run: Run) -> LoneWeight | None:
    """Return the one weight of the model that is far from all others of its tensor; waits for the device.

    None if there is none, or more than one: then it is the training that went astray.
    """
    found: LoneWeight | None = None
    good = None if run.known_good is None else run.known_good.parameters
    for name, parameter in run.host.named_parameters():
        values = _values(parameter)
        if values is None or values.numel() <= _SIBLINGS:
            continue
        sizes = values.abs()
        (largest, second), (place, _) = torch.topk(sizes.flatten(), 2)
        if not float(largest) > _FAR * max(float(second), 1e-6):
            continue
        if found is not None:
            return None
        index = tuple(int(i) for i in torch.unravel_index(place, values.shape))
        found = LoneWeight(name=name, index=index, value=float(values[index]), rest=float(second))
        before = None if good is None else good.get(name)
        old = None if before is None else _values(before)
        if old is not None and old.shape == values.shape and run.known_good is not None:
            then = old.to(values.device)
            rest = float(then.abs().flatten().index_fill(0, place, 0).max())
            known = abs(float(then[index]))
            found = LoneWeight(
                name=name,
                index=index,
                value=found.value,
                rest=found.rest,
                before=float(then[index]),
                step=run.known_good.step,
                alone=rest / _MOVED <= found.rest <= rest * _MOVED and known * _FAR < abs(found.value),
                reach=reach_of(run, parameter, place),
            )
    return found


def _values(tensor: Tensor) -> Tensor | None:
    if readable(tensor) is not None or tensor.layout is not torch.strided:
        return None
    return parts_of(local(tensor).detach()).float()
