"""Where a rank stands in a job: its coordinates, host and device; and ranks in few words."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Rank

_SHORT = {
    "tensor": "tp",
    "tensor_parallel": "tp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "data": "dp",
    "data_parallel": "dp",
    "context": "cp",
    "context_parallel": "cp",
    "expert": "ep",
    "expert_parallel": "ep",
}
"""Long names of mesh dimensions and the short ones that incidents use."""


def this_rank(
    rank: int, device: torch.device, *, mesh: Any = None, coordinates: Mapping[str, int] | None = None
) -> Rank:
    """Return who and where this process is.

    Args:
        rank: its global rank.
        device: where it trains.
        mesh: a torch DeviceMesh; its dimensions name the coordinates.
        coordinates: the coordinates themselves, for frameworks that have groups instead of a mesh.

    Raises:
        ConfigurationError: if the mesh does not hold this rank.
    """
    found = dict(coordinates or {})
    if mesh is not None:
        found.update(mesh_coordinates(mesh))
    return Rank(rank=rank, host=socket.gethostname(), device=device_name(device), coordinates=found)


def mesh_coordinates(mesh: Any) -> dict[str, int]:
    """Return this rank's coordinate along each dimension of a DeviceMesh; raises ConfigurationError."""
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigurationError("this rank is not in the device mesh that was given as mesh=")
    named: tuple[str, ...] | None = mesh.mesh_dim_names
    names = named if named is not None else tuple(f"dim{index}" for index in range(mesh.ndim))
    return {_SHORT.get(name, name): int(index) for name, index in zip(names, place, strict=True)}


def find_mesh(tensors: Iterable[Tensor]) -> Any:
    """Return the mesh with the most dimensions that the parameters are distributed over, or None."""
    meshes = [mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def device_name(device: torch.device) -> str:
    """Return the device with its number."""
    name = str(device)
    if device.type == "cpu" or ":" in name:
        return name
    return f"{device.type}:{os.environ.get('LOCAL_RANK', '0')}"


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words: 'rank 3', 'ranks 0-63', 'ranks 0, 2, 8-15'."""
    runs = [f"{low}" if low == high else f"{low}-{high}" for low, high in _runs(sorted(set(ranks)))]
    if not runs:
        return "no rank"
    single = len(runs) == 1 and "-" not in runs[0]
    shown = runs if len(runs) <= 16 else [*runs[:15], f"and {len(runs) - 15} more runs"]
    return f"{'rank' if single else 'ranks'} {', '.join(shown)}"


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for position, rank in enumerate(ranks):
        if start is None:
            start = rank
        if position + 1 == len(ranks) or ranks[position + 1] != rank + 1:
            yield start, rank
            start = None
