"""Which gradients can be judged, and which of them as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from gradsentinel.measures.inspection import readable

_ORDINARY = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_Kind = tuple[type, torch.dtype, torch.layout, torch.device, bool]
_KIND: Callable[[Tensor], _Kind] = attrgetter("__class__", "dtype", "layout", "device", "requires_grad")
"""What decides how a gradient is read."""
_known: set[_Kind] = set()
"""The few kinds of a run that were found to be ordinary."""


@dataclass(slots=True)  # made in each step: to make a frozen one takes three times as long
class Sorted:
    """What can be judged and what cannot; nobody changes it."""

    names: Sequence[str]
    gradients: list[Tensor]
    unchecked: dict[str, str]
    """By name, why."""
    ordinary: bool
    """True if all of them are dense, of a common type and no subclass: then nothing needs a second look."""
    device: torch.device | None = None
    """Where all of them are, if they are ordinary, of one dtype and device, and part of no graph."""


def sort_out(names: Sequence[str], gradients: list[Tensor]) -> Sorted:
    """Return gradients sorted by whether they can be judged."""
    kinds = set(map(_KIND, gradients))  # not a line of Python for each: the one pass over all
    if (kinds <= _known or _are_ordinary(kinds)) and not any(map(Tensor._is_zerotensor, gradients)):
        device = None
        if len(kinds) == 1:
            _, _, _, device, in_graph = kinds.pop()
            if in_graph:
                device = None
        return Sorted(names, gradients, {}, True, device)
    unchecked: dict[str, str] = {}
    for name, gradient in zip(names, gradients, strict=True):
        usual = _is_ordinary(_KIND(gradient)) and not gradient._is_zerotensor()
        reason = None if usual else readable(gradient)
        if reason is not None:
            unchecked[name] = reason
    if unchecked:
        judged = [index for index, name in enumerate(names) if name not in unchecked]
        names, gradients = [names[i] for i in judged], [gradients[i] for i in judged]
    return Sorted(names, gradients, unchecked, ordinary=False)


def _are_ordinary(kinds: set[_Kind]) -> bool:
    """Return True if all of them are, and have them known from now on."""
    _known.update(filter(_is_ordinary, kinds))
    return kinds <= _known


def _is_ordinary(kind: _Kind) -> bool:
    own, dtype, layout, device, _ = kind
    return own is Tensor and dtype in _ORDINARY and layout is torch.strided and device.type != "meta"
