"""Looking into single tensors on the incident path: which elements are non-finite, and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradsentinel.evidence import TensorEvidence

_PACKED = frozenset(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))
"""Two numbers a byte, always finite; torch calls them floating point but has no arithmetic for them."""


def answers(value: Any) -> bool:
    """Return True if a value can be asked what it is: not a weak proxy, say, whose object is gone."""
    try:
        isinstance(value, Tensor)
    except Exception:  # noqa: BLE001 - a proxy hands the question on, to whatever is behind it
        return False
    return True


def local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that this rank holds; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def stored(tensor: Tensor) -> Tensor:
    """Return the plain tensor that holds this rank's values, for copying them bit for bit in place.

    Elements that share their memory (an expanded tensor) are in it once: nothing can be written to them.
    """
    held = local(tensor)
    if held.is_nested:
        held = held.values()
    if held.is_conj():
        held = held.conj()  # the numbers as they lie in memory
    if held.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
            if stride == 0 and size > 1:
                held = held.narrow(dim, 0, 1)
    return held.view(torch.uint8) if held.dtype in _PACKED else held


def readable(tensor: Tensor) -> str | None:
    """Return None if the tensor's values can be judged for finiteness, else the reason why not."""
    if tensor.device.type == "meta":
        return "meta tensor"
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet"
    if tensor._is_zerotensor():
        return "zeros without memory"  # autograd's stand-in for a missing gradient: kernels crash on it
    if tensor.dtype in _PACKED or not (tensor.is_floating_point() or tensor.is_complex()):
        return f"{tensor.dtype} is always finite".replace("torch.", "")
    return None


def values_of(tensor: Tensor) -> Tensor:
    """Return the stored values as a dense tensor that arithmetic works on: local, coalesced, not float8."""
    values = local(tensor).detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.is_nested or values.layout is not torch.strided:
        values = values.values()
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        values = values.to(torch.float32)
    return values


def parts_of(values: Tensor) -> Tensor:
    """Return complex values as pairs of real ones, all others as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def without_infinities(tensor: Tensor) -> Tensor:
    """Return the values of a readable tensor with 0 for each infinity, so that only NaN is left to find."""
    values = values_of(tensor)
    return values.masked_fill(torch.isinf(values), 0)


def is_finite(tensor: Tensor) -> Tensor:
    """Return a 0-dim bool tensor on the tensor's device; one pass, no wait. The tensor must be readable."""
    return torch.isfinite(parts_of(values_of(tensor))).all()


@torch.no_grad()
def inspect_tensor(name: str, tensor: Tensor) -> TensorEvidence:
    """Count the non-finite elements of a readable tensor and find the first; waits for the device."""
    values = values_of(tensor)
    bad = ~torch.isfinite(parts_of(values))
    if values.is_complex():
        bad = bad.any(-1)
    count = int(bad.sum())
    first: tuple[int, ...] | None = None
    if count:
        where = int(bad.flatten().to(torch.uint8).argmax())
        first = first_index(tensor, bad, where)
    wide = values.to(torch.float32) if values.element_size() < 4 else values
    norm = float(torch.linalg.vector_norm(wide))
    if not count and norm == float("inf"):  # the squares overflowed, not the values
        peak = float(torch.linalg.vector_norm(parts_of(wide), float("inf")))
        norm = peak * float(torch.linalg.vector_norm(wide / peak))
    return TensorEvidence(name=name, nonfinite=count, numel=values.numel(), norm=norm, first_index=first)


def nonfinite_in(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorEvidence, ...]:
    """Return evidence for every readable tensor that holds a non-finite element; waits for the device."""
    named = [(name, tensor) for name, tensor in named if readable(tensor) is None]
    if not named:
        return ()
    flags: list[bool] = []
    with torch.no_grad():
        by_device: dict[torch.device, list[Tensor]] = {}
        for _, tensor in named:
            by_device.setdefault(local(tensor).device, []).append(is_finite(tensor))
        settled = {device: iter(torch.stack(found).tolist()) for device, found in by_device.items()}
    flags = [next(settled[local(tensor).device]) for _, tensor in named]
    return tuple(
        inspect_tensor(name, tensor) for (name, tensor), fine in zip(named, flags, strict=True) if not fine
    )


def first_index(tensor: Tensor, bad: Tensor, flat: int) -> tuple[int, ...]:
    """Turn a flat position into an index of the tensor itself (of its row, if it is sparse)."""
    source = local(tensor)
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), bad.shape)) if bad.dim() else ()
    if source.layout is torch.sparse_coo and index:
        head = source.coalesce().indices()[:, index[0]].tolist()
        return (*head, *index[1:])
    return index
