"""The gradient view: one fused pass over a step's gradients, shared by every detector and by clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsentinel.evidence import TensorEvidence
from gradsentinel.measures.factor import factor_on_host
from gradsentinel.measures.fusing import Group, groups_of, multiply_, one_group, takes_lists
from gradsentinel.measures.inspection import inspect_tensor, local, values_of
from gradsentinel.measures.norms import (
    full,
    fused,
    is_distributed,
    norm_of,
    raised,
    safe_norm,
    scale_,
    with_an_element,
)
from gradsentinel.measures.sorting import Sorted, sort_out

_INF = float("inf")
_CPU = torch.device("cpu")
_WELL_WITHIN = 0.98
"""More than the rounding of a bfloat16 norm, of its sum with 1e-6, and of the quotient can make up."""
_Source = Iterable[tuple[str, Tensor]] | Callable[[], Sorted]


class GradientView:
    """Names, norms and flags of the gradients of one moment, each computed at most once.

    Norms ride on the pass that clipping makes anyway: on plain dense gradients `total_norm` and
    `clip_` are those of `torch.nn.utils.clip_grad_norm_`, bit for bit and in the same number of
    kernel launches, however many detectors look. Nothing here waits for the device, except what the
    docstring says so. Sparse gradients count with their coalesced values, float8 in float32,
    distributed tensors with their local shard (the total is then reduced by DTensor itself).
    Integer and meta gradients cannot be judged and are listed in `unchecked`.

    Args:
        gradients: with their names; or what returns them, sorted out, when somebody first looks.
        norm_type: order of `norms` and of `total_norm`.
    """

    # What a view begins with is kept by the class: one is made in each step.
    origin: Callable[[], frozenset[str]] | None = None
    """Where the loop clipped before anybody could look: the parameters that were bad before that."""
    clip_at: float | None = None
    """The bound of the clip, where the host is to know its factor: then that travels with the norm."""
    known_factor: float | None = None
    """The factor of that clip as the device has computed it and the host has read it."""
    final = False
    """True where it is known that nobody clips: the optimizer gets these very gradients."""
    alarm: Tensor | None = None
    """0-dim bool: if set before it is computed, a true one makes the total norm infinite on all ranks."""
    _clip_factor: Tensor | None = None
    _total_norm: Tensor | None = None
    _sizes: list[int] | None = None
    """Numbers of elements, once the gradients themselves are gone."""
    _kept: Sequence[tuple[Sequence[int] | None, Tensor]] = ()
    """What the total norm was made of."""

    def __init__(self, gradients: _Source, *, norm_type: float = 2.0) -> None:
        self._source = gradients
        self.norm_type = float(norm_type)

    @cached_property
    def _sorted_out(self) -> Sorted:
        """What can be judged and what cannot; read on first use, so that an unused view costs nothing."""
        if callable(self._source):
            return self._source()
        named = list(self._source)
        return sort_out([name for name, _ in named], [gradient for _, gradient in named])

    @property
    def unchecked(self) -> dict[str, str]:
        """Gradients that cannot be judged, by name, with the reason."""
        return self._sorted_out.unchecked

    def __len__(self) -> int:
        return len(self._sorted_out.names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that have a gradient, in the order of `norms`."""
        return tuple(self._sorted_out.names)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of those that data-parallel replicas hold as a whole: not of an optimizer's shards."""
        return self.names

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients themselves, in the order of `names`; do not write to them. Empty after `retire`."""
        return () if self.retired else tuple(self._sorted_out.gradients)

    @cached_property
    def _norms(self) -> list[Tensor]:
        """Per-parameter norms in `names` order, each in the dtype torch gives it."""
        with torch.no_grad():
            if self._alike or "_stacked" in self.__dict__:  # which outlives the gradients
                return list(self._stacked.unbind())
            return self._reduce(self.norm_type)

    @cached_property
    def _clip_order(self) -> list[int]:
        """The order in which torch stacks the norms: by device and dtype, as they first appear."""
        order: list[int] = []
        for group in self._groups:
            order.extend(group.indices)
        return order

    @cached_property
    def _stacked(self) -> Tensor:
        """The norms of ordinary gradients of one device and dtype, 1-dim; the tensors of each are let go."""
        return torch.stack(self._reduce(self.norm_type))

    @property
    def _alike(self) -> bool:
        """True if all gradients are ordinary, of one device and dtype, and in no graph: nearly always."""
        return self._sorted_out.device is not None

    def _total(self, alarm: Tensor | None = None) -> Tensor:
        """The global norm as torch computes it, or, with an alarm that is set, an infinite one on all ranks.

        Adding up the norms of shards is where the ranks communicate.
        """
        if not len(self):
            return torch.tensor(0.0)
        kept = self._kept if isinstance(self._kept, list) else []  # the very list that others may have got
        kept.clear()
        self._kept = kept
        norms = [self._norms[index] for index in self._clip_order]
        if alarm is not None and is_distributed(norms[0]):
            norms[0] = raised(norms[0], alarm)
        first = self._sorted_out.gradients[0].device
        by_mesh: dict[Any, list[int]] = {}
        for position, norm in enumerate(norms):
            by_mesh.setdefault(getattr(norm, "device_mesh", None), []).append(position)
        with torch.no_grad():
            parts = []
            for positions in by_mesh.values():  # torch cannot stack those of several meshes
                stack = torch.stack([norms[position].to(first) for position in positions])
                kept.append(([self._clip_order[position] for position in positions], stack))
                parts.append(full(torch.linalg.vector_norm(stack, self.norm_type)))
            if len(parts) == 1:
                return parts[0]
            whole: Tensor = torch.linalg.vector_norm(
                torch.stack([p.to(first) for p in parts]), self.norm_type
            )
            return full(whole)

    @property
    def total_norm(self) -> Tensor:
        """Global norm before clipping, 0-dim, on the first gradient's device.

        Called on: every rank (a distributed tensor's norm is reduced here).
        """
        total = self._total_norm
        if total is not None:
            return total
        # In one function, and without what keeps the other numbers: in a step each function costs some
        # microseconds, as the training has pushed it, and all else that is touched once, out of the caches.
        found: Sorted | None = self.__dict__.get("_sorted_out")
        if found is None:
            found = self._sorted_out = self._source() if callable(self._source) else self._sorted_out
        if found.device is None:
            total = self._total(self.alarm)
        else:
            stacked = self.__dict__.get("_stacked")
            if stacked is None:
                order = self.norm_type
                if order != _INF and takes_lists(found.gradients, found.device):
                    stacked = torch.stack(torch._foreach_norm(found.gradients, order))
                else:
                    stacked = torch.stack(self._reduce(order))
                self._stacked = stacked
            total = torch.linalg.vector_norm(stacked, self.norm_type)
            self._kept = [(None, stacked)]
        self._total_norm = total
        return total

    @property
    def measured(self) -> tuple[Sequence[str], Sequence[tuple[Sequence[int] | None, Tensor]]]:
        """Names, and norms that were computed anyway, with the names' positions (None: all, in order).

        No norms are there before `total_norm` or `norms` was asked for. Nothing is computed or read.
        """
        if not self._kept and "norms" in self.__dict__ and len(self):
            self._kept = [(None, self.norms)]
        return self._sorted_out.names, self._kept

    def calm(self) -> None:
        """Take the alarm back: write the true norm into `total_norm`; called on every rank, no wait."""
        if self.alarm is not None:
            self.total_norm.copy_(self._total())
            self.alarm = self.clip_at = None  # a factor that has been read is not that of the true norm

    def retire(self) -> None:
        """Let go of the gradients, and keep names, sizes and norms to be read later; no wait."""
        if self._sizes is None:
            _ = self.norms, self.total_norm, self.distributed, self.unchecked
            found = self._sorted_out
            sizes = found.gradients if found.ordinary else map(values_of, found.gradients)
            self._sizes = [values.numel() for values in sizes]
            self._sorted_out = Sorted(found.names, [], found.unchecked, found.ordinary)
            self._source = ()
            for cached in ("_groups", "_clip_order"):
                self.__dict__.pop(cached, None)

    def let_go(self) -> None:
        """Let go of the gradients and of all else, where nobody has seen the view."""
        self.__dict__ = {"_source": (), "_sizes": [], "norm_type": self.norm_type}

    @property
    def retired(self) -> bool:
        """True when the gradients themselves are gone."""
        return self._sizes is not None

    @cached_property
    def norms(self) -> Tensor:
        """Per-parameter norms, 1-dim, in the order of `names`; a distributed tensor counts its shard."""
        if not len(self):
            return torch.zeros(0)
        if self._alike:
            return self._stacked
        first = self._sorted_out.gradients[0].device
        with torch.no_grad():
            return torch.stack([local(norm).to(first) for norm in self._norms])

    @cached_property
    def max_norm(self) -> Tensor:
        """Largest per-parameter norm, 0-dim; NaN if one is."""
        return self.norms.max() if len(self) else torch.tensor(0.0)

    @cached_property
    def magnitudes(self) -> Tensor:
        """Largest absolute value per parameter, 1-dim, in the order of `names`; a pass of its own."""
        if not len(self):
            return torch.zeros(0)
        with torch.no_grad():
            peaks = self._reduce(_INF, shard=True)
            first = self._sorted_out.gradients[0].device
            return torch.stack([peak.to(first) for peak in peaks])

    @cached_property
    def max_magnitude(self) -> Tensor:
        """Largest absolute value of all gradients, 0-dim; NaN if one is."""
        return self.magnitudes.max() if len(self) else torch.tensor(0.0)

    @cached_property
    def distributed(self) -> bool:
        """True if a gradient is a distributed tensor, whose norms take all ranks."""
        found = self._sorted_out
        return not found.ordinary and any(is_distributed(gradient) for gradient in found.gradients)

    def norm_of(self, name: str) -> Tensor:
        """Return one parameter's norm, 0-dim; raises KeyError if it has no gradient."""
        for known, norm in zip(self._sorted_out.names, self._norms, strict=True):
            if known == name:
                return local(norm)
        raise KeyError(f"{name!r} has no gradient in this step")

    def inspect(self) -> tuple[TensorEvidence, ...]:
        """Return every gradient's evidence, in the order of `names`: waits, and reads every element.

        Of retired gradients there is the norm only: where it is not finite, at least one element was not.
        """
        if self._sizes is None:
            return tuple(map(inspect_tensor, self._sorted_out.names, self._sorted_out.gradients))
        return tuple(
            TensorEvidence(name=name, nonfinite=int(not abs(norm) < _INF), numel=n, norm=norm, counted=False)
            for name, n, norm in zip(self.names, self._sizes, self.norms.tolist(), strict=True)
        )

    def evidence(self) -> tuple[TensorEvidence, ...]:
        """Return what is non-finite, exactly, by reading every element on the host's time; slow."""
        bad = tuple(entry for entry in self.inspect() if entry.nonfinite)
        origin = self.origin() if self.origin is not None else frozenset()
        return tuple(entry for entry in bad if entry.name in origin) or bad

    def safe_norm(self) -> float:
        """Return the global norm without overflow on the way; slow, and called on every rank.

        Each gradient is scaled by the largest absolute value before it is raised to the power (the
        classic two-pass norm, as in BLAS nrm2). Not finite only if an element is. The ranks communicate
        in the first call only. Retired gradients have the usual norm only.
        """
        return float(self.total_norm) if self.retired else self._safe_norm

    @cached_property
    @torch.no_grad()
    def _safe_norm(self) -> float:
        return safe_norm(self._sorted_out.gradients, self.norm_type)

    def clip_(
        self, max_norm: float, *, total_norm: Tensor | float | None = None, known_norm: float | None = None
    ) -> None:
        """Scale the gradients in place so that the global norm is at most `max_norm`.

        The same arithmetic as `torch.nn.utils.clip_grads_with_norm_`; `total_norm` replaces the
        norm of the view, as when that overflowed although every gradient is finite. `known_norm` is the
        norm of the view as the host has read it: where that is well within the bound, the factor is 1 in
        any arithmetic, and nothing is launched to multiply with it. Nor is it where `known_factor` is 1.
        """
        found = self._sorted_out
        if not found.names:
            return
        known = None if total_norm is not None else self._known(max_norm, known_norm)
        if known == 1.0:
            return
        if isinstance(total_norm, float):
            scale = torch.tensor(min(max_norm / (total_norm + 1e-6), 1.0), dtype=torch.float64)
            with torch.no_grad():
                for gradient in found.gradients:
                    scale_(local(gradient), scale)
            return
        if known is not None and self._clip_factor is None:  # many are multiplied faster by a tensor
            factor, known = torch.full_like(self.total_norm, known), None
            if found.device == _CPU and takes_lists(found.gradients, _CPU):
                torch._foreach_mul_(found.gradients, factor)
                return
        else:
            factor = self.clip_factor(max_norm, total_norm)
        if found.device is not None:
            alone = takes_lists(found.gradients, found.device)
            multiply_(found.gradients, factor, known=known, one_launch=alone)
            return
        with torch.no_grad():
            for group in self._groups:  # the norm is known to all: each scales its shard
                gradients = group.tensors if found.ordinary else [local(one) for one in group.tensors]
                multiply_(gradients, factor, known=known, one_launch=group.fused)

    def _known(self, max_norm: float, known_norm: float | None) -> float | None:
        """Return what the host knows of the factor: it came with the norm, or is computed of that one."""
        if known_norm is not None and known_norm <= _WELL_WITHIN * max_norm - 1e-6:
            return 1.0
        if max_norm == self.clip_at:
            return self.known_factor
        norm = self.total_norm
        alike = self._sorted_out.device is not None
        if known_norm is None or not (alike and norm.is_cpu and norm.dtype is torch.float32):
            return None
        return factor_on_host(max_norm, known_norm)

    @torch.no_grad()
    def clip_factor(self, max_norm: float, total_norm: Tensor | None = None) -> Tensor:
        """Return what clipping multiplies by, 0-dim, as torch computes it; no wait."""
        travels = total_norm is None and max_norm == self.clip_at
        if travels and self._clip_factor is not None:
            return self._clip_factor
        norm = self.total_norm if total_norm is None else full(total_norm)
        factor: Tensor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if travels:
            self._clip_factor = factor
        return factor

    @cached_property
    def _groups(self) -> list[Group]:
        """Gradients and their positions by device and dtype, in torch's own order; distributed ones apart."""
        found = self._sorted_out
        if found.device is not None:
            return [one_group(found.gradients, found.device)]
        return groups_of(found.gradients, ordinary=found.ordinary)

    def _reduce(self, order: float, *, shard: bool = False) -> list[Tensor]:
        """Per-parameter norms of the given order, in `names` order, one launch per device and dtype.

        Called without recording a graph.
        """
        if self._sizes is not None:
            raise RuntimeError("these gradients are gone; measure them in the event that carries them")
        found = self._sorted_out
        if found.device is not None and order != _INF and takes_lists(found.gradients, found.device):
            return list(torch._foreach_norm(found.gradients, order))
        result: list[Tensor | None] = [None] * len(self)
        for group in self._groups:
            tensors, ordinary = group.tensors, found.ordinary
            if shard and not ordinary:
                tensors = [local(gradient) for gradient in tensors]
            if order == _INF and not ordinary:
                tensors = [with_an_element(tensor) for tensor in tensors]
            by_hand = order == _INF and (
                group.device.type == "cpu" or any(tensor.numel() == 0 for tensor in tensors)
            )
            if (group.fused if ordinary else fused(tensors, tensors[0].device)) and not by_hand:
                norms: Sequence[Tensor] = torch._foreach_norm(tensors, order)
            else:
                norms = [norm_of(tensor, order) for tensor in tensors]
            if len(self._groups) == 1:
                return list(norms)
            for index, norm in zip(group.indices, norms, strict=True):
                result[index] = norm
        return [norm for norm in result if norm is not None]
