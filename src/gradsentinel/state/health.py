"""Is the training state itself sound? Parameters, buffers and optimizer moments, by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.evidence import TensorEvidence
from gradsentinel.gradients import GradientView
from gradsentinel.host import Host
from gradsentinel.measures.inspection import (
    local,
    nonfinite_in,
    parts_of,
    readable,
    values_of,
    without_infinities,
)
from gradsentinel.state.buffers import BufferShadow
from gradsentinel.state.tree import tensors_in

_SMALL = 1 << 14
"""Elements of a buffer that is looked at in each step: statistics are, masks and tables mostly are not."""
_SMALL_TOGETHER = 1 << 20
_SUMMED = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class StateHealth:
    """Looks for non-finite values in the training state.

    Infinities that were there before the first step in a buffer or a frozen parameter (an attention
    mask of -inf, a running minimum that starts at inf) are part of the model and stay allowed there;
    a NaN that comes later does not.
    """

    def __init__(self, host: Host, buffers: BufferShadow) -> None:
        self._host = host
        self._buffers = buffers
        self._infinite: frozenset[str] = frozenset()
        """What held an infinity, or worse, before the first step."""
        self.nan_at_start: tuple[TensorEvidence, ...] = ()
        """Buffers and frozen parameters that held NaN before the first step; not looked at any more."""
        self._small: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        """Where the small buffers are, and which, as of the generation of buffers that follows."""
        self._small_of = -1
        self._set_aside: set[str] = set()
        """Small buffers that are only looked at together with all the rest."""

    def learn(self) -> None:
        """Note what is non-finite on purpose; call it before the first step; waits for the device."""
        frozen = [(name, p) for name, p in self._host.named_parameters() if not p.requires_grad]
        initial = [*frozen, *self._buffers.named(), *self.others()]
        found = {entry.name for entry in nonfinite_in(initial)}
        self._infinite = frozenset(found)
        self.nan_at_start = nonfinite_in((n, without_infinities(t)) for n, t in initial if n in found)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, as far as they must be finite."""
        return self._demanded(self._host.named_parameters())

    def buffers(self, *, before_step: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers, as far as they must be finite: as they are, or as before the step in flight."""
        return self._demanded(self._buffers.kept() if before_step else self._buffers.named())

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizers' state tensors as 'parameter:key'."""
        return self._host.moments()

    def averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of EMA, schedulers and extra objects, as far as that takes no wait."""
        held: list[tuple[str, Tensor]] = []
        for name, entry in self._host.stateful().items():
            if not hasattr(entry, "get_scale"):  # a GradScaler's numbers are fetched from the device
                held += [(f"{name}.{path}", tensor) for path, tensor in tensors_in(entry.state_dict())]
        return self._demanded(held)

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of EMA, scaler, schedulers and extra objects, and the learning rates."""
        found: list[tuple[str, Tensor]] = []
        for name, entry in self._host.stateful().items():
            found += [(f"{name}.{path}", tensor) for path, tensor in tensors_in(entry.state_dict())]
            if hasattr(entry, "get_scale"):  # a GradScaler's state holds plain numbers
                found.append((f"{name}.scale", torch.tensor(float(entry.get_scale()))))
        for index, optimizer in enumerate(self._host.optimizers):
            rates = [group.get("lr") for group in optimizer.param_groups]
            numbers = [float(rate) for rate in rates if isinstance(rate, (int, float))]
            found.append((f"optimizer.{index}.lr", torch.tensor(numbers)))
        return self._demanded(found)

    def scan(self, *, before_step: bool = False) -> dict[str, tuple[TensorEvidence, ...]]:
        """Return what is non-finite among parameters, buffers and moments; waits for the device.

        `before_step` looks at the buffers as they were before the step in flight: its forward pass
        wrote to them, and dropping the step puts them back.
        """
        found = {
            "parameters": nonfinite_in(self.parameters()),
            "buffers": nonfinite_in(self.buffers(before_step=before_step)),
            "moments": nonfinite_in(self.moments()),
            "averages and schedules": nonfinite_in(self.others()),
        }
        return {part: tensors for part, tensors in found.items() if tensors}

    def norms(self, *, before_step: bool = False) -> dict[str, Tensor]:
        """Return the 2-norm of each part of the local state, 0-dim; one pass, no wait.

        Not finite if an element is, or if the squares overflow.
        """
        parts = {
            "parameters": self.parameters(),
            "buffers": self.buffers(before_step=before_step),
            "moments": self.moments(),
            "averages": self.others(),
        }
        return {
            part: GradientView((name, _held(tensor)) for name, tensor in named).total_norm
            for part, named in parts.items()
        }

    def buffer_norm(self) -> Tensor:
        """Return the 2-norm of the buffers as they are, 0-dim, not finite if an element is; no wait."""
        return GradientView((name, _held(tensor)) for name, tensor in self.buffers()).total_norm

    def small_buffers(self) -> Tensor | None:
        """Return a number that is not finite if an element of a small buffer is, None if there is none.

        0-dim; three launches and no wait, so that it goes with every step: over up to 2^20 elements, of the
        dense buffers of up to 16,384 each that must be finite. What is finite adds up to 0, not to its sum,
        which overflows where a mask is made of the lowest number there is.
        """
        if self._small_of != self._buffers.generation:
            self._small = list(self._find_small())
            self._small_of = self._buffers.generation
        if not self._small:
            return None
        flat: list[Tensor] = []
        for held, name, known in self._small:
            now = held.get(name)
            if now is known or (now is not None and _is_plain(now) and now.device == known.device):
                flat.append(now if now.ndim == 1 else now.reshape(-1))
        if not flat:
            return None
        with torch.no_grad():
            together = torch.cat(flat)
            # Not in place: were a backend to hand back its one input, that would be the model's own buffer.
            return together.mul(0.0).sum(dtype=torch.float32 if together.dtype.itemsize == 2 else None)

    def set_aside(self, names: Iterable[str]) -> None:
        """Hear that these buffers are not finite, and will not become so: `small_buffers` leaves them out."""
        self._set_aside.update(names)
        self._small_of = -1

    def _find_small(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
        """Yield where they are, all on the device of the first."""
        room, first = _SMALL_TOGETHER, None
        for label, held, name in self._buffers.holders():
            buffer = held.get(name)
            if buffer is None or label in self._infinite or label in self._set_aside:
                continue
            if not _is_plain(buffer) or not 0 < buffer.numel() <= min(_SMALL, room):
                continue
            first = first or buffer.device
            if buffer.device == first:
                room -= buffer.numel()
                yield held, name, buffer

    def norm(self, part: int = 0, parts: int = 1, *, largest: bool = False) -> Tensor:
        """Return the norm of a `view` of the local state, 0-dim, not finite if an element is; no wait."""
        return self.view(part, parts, largest=largest).total_norm

    def view(self, part: int = 0, parts: int = 1, *, largest: bool = False) -> GradientView:
        """Return the local state as a view, whose 2-norm takes one pass; the parameters come first.

        Its squares may overflow where every element is finite. The `largest` magnitude in their place is
        finite exactly where all elements are; some devices take a launch for each tensor to find it.
        With `parts` only of one of so many parts with equally many elements, counted from 0. All of them
        together are the whole state: parameters, buffers, moments, averages and what else is stateful.
        """
        if part == 0:
            self._buffers.find()  # one that was registered in the run is looked after from now on
        named = itertools.chain(self.parameters(), self.buffers(), self.moments(), self.averages())
        held = [(name, _held(tensor)) for name, tensor in named]
        looked_at = held if parts == 1 else _share(held, part, parts)
        if not largest:
            return GradientView(looked_at)
        return GradientView(map(_in_parts, looked_at), norm_type=math.inf)

    def _demanded(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        hopeless = {entry.name for entry in self.nan_at_start}
        for name, tensor in named:
            if name not in self._infinite:
                yield name, tensor
            elif name not in hopeless:
                yield name, without_infinities(tensor)


def _held(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, of a nested one its values: nothing adds those up as it is."""
    own = local(tensor)
    return own.values() if own.is_nested else own


def _in_parts(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Return a complex tensor as its parts, which may be finite where its magnitudes are not."""
    name, tensor = named
    return (name, parts_of(values_of(tensor))) if tensor.is_complex() else named


def _is_plain(tensor: Tensor) -> bool:
    """Whether it can be added up with others as it is: dense, real, of a type that arithmetic works on."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _SUMMED
        and tensor.layout is torch.strided
        and not tensor.is_nested  # whose layout may say otherwise
        and tensor.device.type != "meta"
    )


def _share(named: Iterable[tuple[str, Tensor]], part: int, parts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the elements that belong to one of so many equal parts; a large tensor may lie in several."""
    held = [(name, values_of(tensor).reshape(-1)) for name, tensor in named if readable(tensor) is None]
    total = sum(values.numel() for _, values in held)
    first, last = part * total // parts, (part + 1) * total // parts
    place = 0
    for name, values in held:
        begin, end = max(first - place, 0), min(last - place, values.numel())
        place += values.numel()
        if begin < end:
            yield name, values[begin:end]


def in_words(found: Mapping[str, Any]) -> str:
    """Say in a few words which parts of the state are non-finite."""
    return ", ".join(f"{len(tensors)} of the {part}" for part, tensors in found.items())
