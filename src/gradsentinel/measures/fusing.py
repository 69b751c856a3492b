"""Tensors of one device and dtype, taken together in one launch where the device can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from gradsentinel.devices import device_of
from gradsentinel.measures.norms import fused, is_distributed, scale_


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one device and dtype, and their positions."""

    tensors: list[Tensor]
    indices: Sequence[int]
    device: torch.device
    fused: bool
    """True if one launch can take all of them."""


_takes_lists: dict[torch.device, bool] = {}
"""Where one launch can take a list of plain tensors; asked once, with tensors that are there."""


def one_group(tensors: list[Tensor], device: torch.device, indices: Sequence[int] | None = None) -> Group:
    """Return ordinary tensors of one dtype and device, in their order, which is torch's own then."""
    places = range(len(tensors)) if indices is None else indices
    return Group(tensors, places, device, takes_lists(tensors, device))


def takes_lists(tensors: list[Tensor], device: torch.device) -> bool:
    """Return True if one launch can take these ordinary tensors of one dtype; there is one."""
    one_launch = _takes_lists.get(device)
    if one_launch is None:
        one_launch = _takes_lists[device] = _has_foreach_support(tensors[:1], device)  # of one class
    return one_launch


def groups_of(tensors: list[Tensor], *, ordinary: bool) -> list[Group]:
    """Return tensors by device and dtype, in torch's own order; distributed ones apart.

    `ordinary` says that all of them are dense, of a common type and no subclass.
    """
    if not tensors:
        return []
    grouped = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    groups: list[Group] = []
    for lists, indices in grouped.values():
        if ordinary:
            members = cast(list[Tensor], lists[0])  # none of them is None
            groups.append(one_group(members, members[0].device, indices))
            continue
        for distributed in (False, True):
            chosen = [index for index in indices if is_distributed(tensors[index]) is distributed]
            if chosen:
                members = [tensors[index] for index in chosen]
                device = members[0].device
                groups.append(Group(members, chosen, device, fused(members, device)))
    return groups


def multiply_(
    tensors: list[Tensor], factor: Tensor, *, known: float | None = None, one_launch: bool = False
) -> None:
    """Multiply plain tensors of one device and dtype in place by a 0-dim factor; no wait.

    `known` is the factor, if the host knows it; `one_launch` says that one can take all of the tensors.
    """
    device = tensors[0].device
    if not (one_launch or fused(tensors, device)):
        factor = factor.to(device)
        for tensor in tensors:
            scale_(tensor, factor)
    elif known is not None and factor.dtype is tensors[0].dtype:  # else each tensor would round it
        torch._foreach_mul_(tensors, known)
    else:
        device_of(device).scale_(tensors, factor.to(device))
