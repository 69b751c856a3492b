"""The gradient view: one fused pass over a step's gradients, shared by every detector and by clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
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
        if any(_is_dtensor(norm) for norm in norms) and not all(_is_dtensor(norm) for norm in norms):
            norms = [_full(norm) for norm in norms]
        first = self._all[0].gradient.device
        with torch.no_grad():
            total: Tensor = torch.linalg.vector_norm(
                torch.stack([norm.to(first) for norm in norms]), self.norm_type
            )
        return total

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
        """Return the global norm of the local gradients without overflow on the way; slow.

        Each gradient is scaled by the largest absolute value before it is raised to the power (the
        classic two-pass norm, as in BLAS nrm2). Not finite only if an element is.
        """
        order, infinite = self.norm_type, float("inf")
        with torch.no_grad():
            values = [values_of(entry.gradient) for entry in self._all]
            # The parts of a complex number are finite where its modulus may not be.
            peaks = [float(torch.linalg.vector_norm(parts_of(v), infinite)) for v in values if v.numel()]
            bad = [peak for peak in peaks if not peak < infinite]
            peak = bad[0] if bad else max(peaks, default=0.0)
            if bad or peak == 0.0:
                return peak
            wide = (v.to(torch.float32) if v.element_size() < 4 else v for v in values if v.numel())
            norms = [float(torch.linalg.vector_norm(v / peak, order)) for v in wide]
        if order == infinite:
            return peak * max(norms)
        return peak * float(sum(norm**order for norm in norms) ** (1 / order))

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
        coefficient = torch.clamp(
            max_norm / ((self._total if total_norm is None else total_norm) + 1e-6), max=1.0
        )
        for gradients, _ in self._groups:
            device = gradients[0].device
            factor = coefficient.to(device)
            if _is_dtensor(factor) != _is_dtensor(gradients[0]):
                gradients, factor = [local(gradient) for gradient in gradients], _full(factor)  # noqa: PLW2901
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
            device = tensors[0].device
            if _fused(tensors, device) and not (
                order == float("inf") and any(t.numel() == 0 for t in tensors)
            ):
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
    if values.numel() == 0 and order == float("inf"):
        return torch.zeros((), dtype=torch.float32, device=values.device)
    norm: Tensor = torch.linalg.vector_norm(values, order)
    return norm


def _scale(gradient: Tensor, factor: Tensor) -> None:
    if gradient.dtype in _FLOAT8:
        gradient.copy_((gradient.to(torch.float32) * factor).to(gradient.dtype))
    else:
        gradient.mul_(factor)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
