"""Norms of tensors of any layout, alone and over the ranks that hold their shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _has_foreach_support

from gradsentinel.devices import device_of
from gradsentinel.measures.inspection import local, parts_of, values_of

FLOAT8 = frozenset(
    dtype
    for name in dir(torch)
    if name.startswith("float8") and isinstance(dtype := getattr(torch, name), torch.dtype)
)


Sharding = tuple[Any, tuple[int, ...]]
"""A device mesh, and its dimensions over which a tensor is sharded."""


def fused(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return True if one launch can take all of these tensors, which have one dtype and device."""
    first = tensors[0]
    plain = all(tensor.layout is torch.strided and not tensor.is_conj() for tensor in tensors)
    return plain and first.dtype not in FLOAT8 and _has_foreach_support(list(tensors), device)


def norm_of(tensor: Tensor, order: float) -> Tensor:
    """Return one tensor's norm of any layout, 0-dim; of a distributed one a distributed one; no wait."""
    values = values_of(tensor)
    if is_distributed(tensor):  # stays one: its norm is reduced later
        values = tensor.to(torch.float32) if tensor.dtype in FLOAT8 else tensor
    if values.numel() == 0 and order == float("inf"):
        return torch.zeros((), dtype=torch.float32, device=values.device)
    if (
        order == float("inf")
        and values.device.type == "cpu"
        and not values.is_complex()
        and not is_distributed(values)
    ):
        low, high = torch.aminmax(values)  # the same value, many times faster there
        return torch.maximum(high, -low)
    norm: Tensor = torch.linalg.vector_norm(values, order)
    return norm


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient of any dtype in place by a 0-dim factor."""
    if gradient.dtype in FLOAT8:
        gradient.copy_((gradient.to(torch.float32) * factor).to(gradient.dtype))
    else:
        gradient.mul_(factor)


def safe_norm(gradients: Sequence[Tensor], order: float) -> float:
    """Return the norm of all gradients without overflow on the way; called on every rank."""
    by_place: dict[Any, list[Tensor]] = {}
    for each in gradients:
        gradient = summed(each)
        by_place.setdefault(sharding_of(gradient), []).append(values_of(gradient))
    # Every place, even if one norm is infinite here: other ranks may not know, and would wait.
    norms = [_norm_alike(values, order, place) for place, values in by_place.items()]
    peak = max(norms, default=0.0)
    if not 0.0 < peak < float("inf"):
        return peak
    scaled = torch.tensor(norms, dtype=torch.float64) / peak
    return peak * float(torch.linalg.vector_norm(scaled, order))


def _norm_alike(values: Sequence[Tensor], order: float, place: Sharding | None) -> float:
    """Return the norm of gradients that are sharded alike; infinite if any shard holds a bad element."""
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


def _across(norm: float, order: float, place: Sharding | None, device: torch.device) -> float:
    """Join the norms that the ranks have of their shards; called on every rank that has one."""
    if place is None:
        return norm
    mesh, dimensions = place
    travelling = torch.tensor([norm], dtype=device_of(device).wide, device=device)
    greatest = order == float("inf")
    operation = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
    travelling = travelling if greatest else travelling.pow(order)
    for dimension in dimensions:
        dist.all_reduce(travelling, op=operation, group=mesh.get_group(dimension))
    return float(travelling if greatest else travelling.pow(1 / order))


def sharding_of(gradient: Tensor) -> Sharding | None:
    """Return where the parts of a gradient lie; None if this rank has all of it."""
    placements = getattr(gradient, "placements", ())
    dimensions = tuple(index for index, place in enumerate(placements) if not place.is_replicate())
    return (gradient.device_mesh, dimensions) if dimensions else None  # type: ignore[attr-defined]


def summed(gradient: Tensor) -> Tensor:
    """Return a distributed gradient whose terms are still apart added up; any other one as it is."""
    placements = getattr(gradient, "placements", ())
    if not any(place.is_partial() for place in placements):
        return gradient
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - slow, and imported where there is one

    whole = [Replicate() if place.is_partial() else place for place in placements]
    summed: Tensor = gradient.redistribute(placements=whole)  # type: ignore[attr-defined]
    return summed


def with_an_element(gradient: Tensor) -> Tensor:
    """Return the gradient; of a distributed one whose shard here is empty a stand-in that holds a zero.

    An empty shard has no largest element: torch raises, on this rank alone, while the others wait for it.
    """
    if not is_distributed(gradient) or local(gradient).numel():
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


def is_distributed(tensor: Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """Return a distributed tensor whole (called on every rank that holds a part), any other as it is."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def raised(norm: Tensor, alarm: Tensor) -> Tensor:
    """Return a distributed norm that is infinite on all ranks if the alarm is set on this one; no wait.

    For norms of a finite order: a sum with an infinite term is infinite or NaN.
    """
    held = local(norm)
    part = torch.where(alarm.to(held.device), float("inf"), held)
    joined: Tensor = type(norm).from_local(  # type: ignore[attr-defined]
        part,
        norm.device_mesh,  # type: ignore[attr-defined]
        norm.placements,  # type: ignore[attr-defined]
        run_check=False,
    )
    return joined


def spans(parameters: Iterable[Tensor], world_size: int) -> bool:
    """Return True if each parameter is sharded over all ranks, so that a norm of them reaches every rank."""
    found = False
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or mesh.size() != world_size:
            return False
        if not all(place.is_shard() for place in parameter.placements):  # type: ignore[attr-defined]
            return False
        found = True
    return found
