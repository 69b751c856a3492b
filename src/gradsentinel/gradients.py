"""The gradient view: one fused pass over a step's gradients, shared by every detector and by clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import (
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from gradsentinel.evidence import TensorEvidence
from gradsentinel.inspection import inspect_tensor, local, parts_of, readable, values_of

_FLOAT8 = frozenset(
    dtype
    for name in dir(torch)
    if name.startswith("float8") and isinstance(dtype := getattr(torch, name), torch.dtype)
)


_Sharding = tuple[Any, tuple[int, ...]]
"""A device mesh, and its dimensions over which a tensor is sharded."""


@dataclass(frozen=True, slots=True)
class NamedGradient:
    """One parameter's gradient and its name."""

    name: str
    gradient: Tensor


class GradientView:
    """Names, norms and flags of the gradients of one moment, each computed at most once.

    Norms ride on the pass that clipping makes anyway: on plain dense gradients `total_norm` and
    `clip_` are those of `torch.nn.utils.clip_grad_norm_`, bit for bit and in the same number of
    kernel launches, however many detectors look. Nothing here waits for the device, except what the
    docstring says so. Sparse gradients count with their coalesced values, float8 in float32,
    distributed tensors with their local shard (the total is then reduced by DTensor itself).
    Integer and meta gradients cannot be judged and are listed in `unchecked`.
    """

    def __init__(self, gradients: Iterable[tuple[str, Tensor]], *, norm_type: float = 2.0) -> None:
        self._source = gradients
        self.origin: Callable[[], frozenset[str]] | None = None
        """Where the loop clipped before anybody could look: the parameters that were bad before that."""
        self.norm_type = float(norm_type)

    @cached_property
    def _sorted_out(self) -> tuple[list[NamedGradient], dict[str, str]]:
        """What can be judged and what cannot; read on first use, so that an unused view costs nothing."""
        judged: list[NamedGradient] = []
        unchecked: dict[str, str] = {}
        for name, gradient in self._source:
            reason = readable(gradient)
            if reason is None:
                judged.append(NamedGradient(name, gradient))
            else:
                unchecked[name] = reason
        return judged, unchecked

    @property
    def _all(self) -> list[NamedGradient]:
        return self._sorted_out[0]

    @property
    def unchecked(self) -> dict[str, str]:
        """Gradients that cannot be judged, by name, with the reason."""
        return self._sorted_out[1]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that have a gradient, in the order of `norms`."""
        return tuple(entry.name for entry in self._all)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients themselves, in the order of `names`; do not write to them."""
        return tuple(entry.gradient for entry in self._all)

    @cached_property
    def _norms(self) -> list[Tensor]:
        """Per-parameter norms in `names` order, each in the dtype torch gives it."""
        return self._reduce(self.norm_type)

    @cached_property
    def _clip_order(self) -> list[int]:
        """The order in which torch stacks the norms: by device and dtype, as they first appear."""
        order: list[int] = []
        for _, indices in self._groups:
            order.extend(indices)
        return order

    @cached_property
    def _total(self) -> Tensor:
        """The global norm as torch computes it; a DTensor if every gradient is one."""
        if not self._all:
            return torch.tensor(0.0)
        norms = [self._norms[index] for index in self._clip_order]
        first = self._all[0].gradient.device
        by_mesh: dict[Any, list[Tensor]] = {}
        for norm in norms:
            by_mesh.setdefault(getattr(norm, "device_mesh", None), []).append(norm)
        with torch.no_grad():
            if len(by_mesh) > 1:  # torch cannot stack these: one reduction for each mesh, then their norm
                norms = [_full(self._joined(members, first)) for members in by_mesh.values()]
            return self._joined(norms, first)

    def _joined(self, norms: Sequence[Tensor], device: torch.device) -> Tensor:
        stack = torch.stack([norm.to(device) for norm in norms])
        joined: Tensor = torch.linalg.vector_norm(stack, self.norm_type)
        return joined

    @cached_property
    def total_norm(self) -> Tensor:
        """Global norm before clipping, 0-dim, on the first gradient's device.

        Called on: every rank (a distributed tensor's norm is reduced here).
        """
        return _full(self._total)

    @cached_property
    def norms(self) -> Tensor:
        """Per-parameter norms, 1-dim, in the order of `names`; a distributed tensor counts its shard."""
        if not self._all:
            return torch.zeros(0)
        first = self._all[0].gradient.device
        with torch.no_grad():
            return torch.stack([local(norm).to(first) for norm in self._norms])

    @cached_property
    def max_norm(self) -> Tensor:
        """Largest per-parameter norm, 0-dim; NaN if one is."""
        return self.norms.max() if self._all else torch.tensor(0.0)

    @cached_property
    def magnitudes(self) -> Tensor:
        """Largest absolute value per parameter, 1-dim, in the order of `names`; a pass of its own."""
        if not self._all:
            return torch.zeros(0)
        first = self._all[0].gradient.device
        peaks = self._reduce(float("inf"), shard=True)
        with torch.no_grad():
            return torch.stack([peak.to(first) for peak in peaks])

    @cached_property
    def max_magnitude(self) -> Tensor:
        """Largest absolute value of all gradients, 0-dim; NaN if one is."""
        return self.magnitudes.max() if self._all else torch.tensor(0.0)

    @property
    def distributed(self) -> bool:
        """True if a gradient is a distributed tensor, whose norms take all ranks."""
        return any(_is_dtensor(entry.gradient) for entry in self._all)

    def norm_of(self, name: str) -> Tensor:
        """Return one parameter's norm, 0-dim; raises KeyError if it has no gradient."""
        for entry, norm in zip(self._all, self._norms, strict=True):
            if entry.name == name:
                return local(norm)
        raise KeyError(f"{name!r} has no gradient in this step")

    def evidence(self) -> tuple[TensorEvidence, ...]:
        """Return what is non-finite, exactly, by reading every element on the host's time; slow."""
        found = (inspect_tensor(entry.name, entry.gradient) for entry in self._all)
        bad = tuple(entry for entry in found if entry.nonfinite)
        origin = self.origin() if self.origin is not None else frozenset()
        return tuple(entry for entry in bad if entry.name in origin) or bad

    def safe_norm(self) -> float:
        """Return the global norm without overflow on the way; slow, and called on every rank.

        Each gradient is scaled by the largest absolute value before it is raised to the power (the
        classic two-pass norm, as in BLAS nrm2). Not finite only if an element is. The ranks communicate
        in the first call only.
        """
        return self._safe_norm

    @cached_property
    @torch.no_grad()
    def _safe_norm(self) -> float:
        by_place: dict[Any, list[Tensor]] = {}
        for entry in self._all:
            gradient = _summed(entry.gradient)
            by_place.setdefault(_sharding(gradient), []).append(values_of(gradient))
        # Every place, even if one norm is infinite here: other ranks may not know, and would wait.
        norms = [_safe_norm(values, self.norm_type, place) for place, values in by_place.items()]
        peak = max(norms, default=0.0)
        if not 0.0 < peak < float("inf"):
            return peak
        scaled = torch.tensor(norms, dtype=torch.float64) / peak
        return peak * float(torch.linalg.vector_norm(scaled, self.norm_type))

    @torch.no_grad()
    def clip_(self, max_norm: float, *, total_norm: Tensor | float | None = None) -> None:
        """Scale the gradients in place so that the global norm is at most `max_norm`.

        The same arithmetic as `torch.nn.utils.clip_grads_with_norm_`; `total_norm` replaces the
        norm of the view, as when that overflowed although every gradient is finite.
        """
        if not self._all:
            return
        if isinstance(total_norm, float):
            scale = torch.tensor(min(max_norm / (total_norm + 1e-6), 1.0), dtype=torch.float64)
            for entry in self._all:
                _scale(local(entry.gradient), scale)
            return
        norm = self.total_norm if total_norm is None else _full(total_norm)
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for group, _ in self._groups:
            gradients = [local(gradient) for gradient in group]  # the norm is known to all: each its shard
            device = gradients[0].device
            factor = coefficient.to(device)
            if _fused(gradients, device):
                torch._foreach_mul_(gradients, factor)
            else:
                for gradient in gradients:
                    _scale(gradient, factor)

    @cached_property
    def _groups(self) -> list[tuple[list[Tensor], list[int]]]:
        """Gradients and their positions by device and dtype, in torch's own order; distributed ones apart."""
        gradients = [entry.gradient for entry in self._all]
        if not gradients:
            return []
        grouped = _group_tensors_by_device_and_dtype([gradients], with_indices=True)  # type: ignore[list-item]
        groups: list[tuple[list[Tensor], list[int]]] = []
        for _, indices in grouped.values():
            for distributed in (False, True):
                members = [index for index in indices if _is_dtensor(gradients[index]) is distributed]
                if members:
                    groups.append(([gradients[index] for index in members], members))
        return groups

    @torch.no_grad()
    def _reduce(self, order: float, *, shard: bool = False) -> list[Tensor]:
        """Per-parameter norms of the given order, in `names` order, one launch per device and dtype."""
        result: list[Tensor | None] = [None] * len(self._all)
        for gradients, indices in self._groups:
            tensors = [local(gradient) for gradient in gradients] if shard else gradients
            if order == float("inf"):
                tensors = [_with_an_element(tensor) for tensor in tensors]
            device = tensors[0].device
            by_hand = order == float("inf") and (
                device.type == "cpu" or any(tensor.numel() == 0 for tensor in tensors)
            )
            if _fused(tensors, device) and not by_hand:
                norms: Sequence[Tensor] = torch._foreach_norm(tensors, order)
            else:
                norms = [_norm(tensor, order) for tensor in tensors]
            for index, norm in zip(indices, norms, strict=True):
                result[index] = norm
        return [norm for norm in result if norm is not None]


def _fused(tensors: Sequence[Tensor], device: torch.device) -> bool:
    first = tensors[0]
    plain = all(tensor.layout is torch.strided and not tensor.is_conj() for tensor in tensors)
    return plain and first.dtype not in _FLOAT8 and _has_foreach_support(list(tensors), device)


def _norm(tensor: Tensor, order: float) -> Tensor:
    values = values_of(tensor)
    if _is_dtensor(tensor):  # stays one: its norm is reduced later
        values = tensor.to(torch.float32) if tensor.dtype in _FLOAT8 else tensor
    if values.numel() == 0 and order == float("inf"):
        return torch.zeros((), dtype=torch.float32, device=values.device)
    if (
        order == float("inf")
        and values.device.type == "cpu"
        and not values.is_complex()
        and not _is_dtensor(values)
    ):
        low, high = torch.aminmax(values)  # the same value, many times faster there
        return torch.maximum(high, -low)
    norm: Tensor = torch.linalg.vector_norm(values, order)
    return norm


def _scale(gradient: Tensor, factor: Tensor) -> None:
    if gradient.dtype in _FLOAT8:
        gradient.copy_((gradient.to(torch.float32) * factor).to(gradient.dtype))
    else:
        gradient.mul_(factor)


def _safe_norm(values: Sequence[Tensor], order: float, place: _Sharding | None) -> float:
    """The norm of gradients that are sharded alike; infinite if an element of any shard is not finite."""
    infinite = float("inf")
    device = values[0].device
    values = [v.to(torch.float32) if v.element_size() < 4 else v for v in values if v.numel()]
    # The parts of a complex number are finite where its modulus may not be.
    peaks = [float(torch.linalg.vector_norm(parts_of(v), infinite)) for v in values]
    largest = max((peak if peak < infinite else infinite for peak in peaks), default=0.0)  # noqa: FURB136 - NaN
    peak = _across(largest, infinite, place, device)
    scale = peak if 0.0 < peak < infinite else 1.0
    norms = torch.tensor([float(torch.linalg.vector_norm(v / scale, order)) for v in values])
    norm = float(torch.linalg.vector_norm(norms, order)) if values else 0.0
    norm = _across(norm, order, place, device)
    return scale * norm if peak < infinite else peak


def _across(norm: float, order: float, place: _Sharding | None, device: torch.device) -> float:
    """Join the norms that the ranks have of their shards; called on every rank that has one."""
    if place is None:
        return norm
    mesh, dimensions = place
    dtype = torch.float32 if device.type == "npu" else torch.float64
    travelling = torch.tensor([norm], dtype=dtype, device=device)
    greatest = order == float("inf")
    operation = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
    travelling = travelling if greatest else travelling.pow(order)
    for dimension in dimensions:
        dist.all_reduce(travelling, op=operation, group=mesh.get_group(dimension))
    return float(travelling if greatest else travelling.pow(1 / order))


def _sharding(gradient: Tensor) -> _Sharding | None:
    """Where the parts of a gradient lie; None if this rank has all of it."""
    placements = getattr(gradient, "placements", ())
    dimensions = tuple(index for index, place in enumerate(placements) if not place.is_replicate())
    return (gradient.device_mesh, dimensions) if dimensions else None  # type: ignore[attr-defined]


def _summed(gradient: Tensor) -> Tensor:
    """A distributed gradient whose terms are still apart, added up; any other one as it is."""
    placements = getattr(gradient, "placements", ())
    if not any(place.is_partial() for place in placements):
        return gradient
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - slow, and imported where there is one

    whole = [Replicate() if place.is_partial() else place for place in placements]
    summed: Tensor = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
    return summed


def _with_an_element(gradient: Tensor) -> Tensor:
    """The gradient; of a distributed one whose shard here is empty a stand-in that holds a zero.

    An empty shard has no largest element: torch raises, on this rank alone, while the others wait for it.
    """
    if not _is_dtensor(gradient) or local(gradient).numel():
        return gradient
    zero = local(gradient).new_zeros((1,) * gradient.dim())
    stand_in: Tensor = type(gradient).from_local(  # type: ignore[attr-defined]
        zero,
        gradient.device_mesh,  # type: ignore[attr-defined]
        gradient.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )
    return stand_in


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
