"""Where a rank stands in a job: its coordinates, host and device; and ranks in few words."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsentinel.errors import ConfigurationError

VARIABLE = "GRADSENTINEL_TOPOLOGY"
"""The environment variable that states how the ranks of a job are arranged: dp=2,pp=2,tp=2."""

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
"""Long names of dimensions and the short ones that incidents use."""
_TAKEN = frozenset({"rank", "host", "device", "node"})
"""Keys that a rank has in incident.json beside its coordinates."""
_MEGATRON = {
    "tp": "tensor_model",
    "pp": "pipeline_model",
    "dp": "data",
    "cp": "context",
    "ep": "expert_model",
    "etp": "expert_tensor",
}
_ALWAYS = frozenset({"tp", "pp", "dp"})
"""Coordinates that are told even where there is only one rank along them."""
_NODES = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # torchrun
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("NODE_RANK", "NNODES"),
)
"""Variables in which launchers tell the number of this machine, and how many there are."""
_MOST_RUNS = 16
"""Of more runs of ranks the first ones are told, and the others counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of the job and its place in it."""

    rank: int
    host: str
    device: str
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """tp, pp, dp, cp, ep: those that exist in this job."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form; keys as in incident.json."""
        return {"rank": self.rank, **self.coordinates, "host": self.host, "device": self.device}


def this_rank(
    rank: int,
    device: torch.device,
    *,
    world_size: int = 1,
    mesh: Any = None,
    coordinates: Mapping[str, int] | None = None,
    parameters: Iterable[Tensor] = (),
) -> Rank:
    """Return who and where this process is.

    The first of these that there is tells the coordinates: `coordinates`, `mesh`, the environment variable
    GRADSENTINEL_TOPOLOGY, Megatron-Core's parallel groups, the mesh that the parameters are distributed over.

    Args:
        rank: its global rank.
        device: where it trains.
        world_size: the number of ranks of the job.
        mesh: a torch DeviceMesh; its dimensions name the coordinates.
        coordinates: the coordinates themselves, for frameworks that know them otherwise.
        parameters: where to look for a mesh if nothing else tells.

    Raises:
        ConfigurationError: if the mesh does not hold this rank, or the variable does not fit the job.
    """
    found = dict(coordinates) if coordinates is not None else _coordinates(rank, world_size, mesh, parameters)
    machine = _machine() if world_size > 1 else {}
    return Rank(
        rank=rank, host=socket.gethostname(), device=device_name(device), coordinates={**found, **machine}
    )


def _coordinates(rank: int, world_size: int, mesh: Any, parameters: Iterable[Tensor]) -> dict[str, int]:
    if mesh is not None:
        return mesh_coordinates(mesh)
    stated = os.environ.get(VARIABLE, "").strip()
    if stated:
        return stated_coordinates(stated, rank, world_size)
    megatron = megatron_coordinates()
    if megatron:
        return megatron
    mesh = find_mesh(parameters)
    return {} if mesh is None or mesh.get_coordinate() is None else mesh_coordinates(mesh)


def mesh_coordinates(mesh: Any) -> dict[str, int]:
    """Return this rank's coordinate along each dimension of a DeviceMesh; raises ConfigurationError."""
    if not hasattr(mesh, "get_coordinate"):
        raise ConfigurationError(f"mesh= takes a torch DeviceMesh, not a {type(mesh).__name__}")
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


def ranks_of(mesh: Any) -> tuple[int, ...]:
    """Return the global ranks of a DeviceMesh; none of None."""
    return () if mesh is None else tuple(mesh.mesh.flatten().tolist())


def stated_coordinates(text: str, rank: int, world_size: int) -> dict[str, int]:
    """Return this rank's coordinates from a text such as 'dp=2,pp=2,tp=2'; raises ConfigurationError.

    The order is that of `init_device_mesh`: ranks that differ by 1 are neighbours along the last dimension.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        given, _, number = (word.strip() for word in part.partition("="))
        name = _SHORT.get(given.lower(), given.lower())
        if not (name.isidentifier() and number.isdecimal() and int(number) > 0):
            raise _misstated(text, f"{part.strip()!r} is not a name and a size")
        if name in sizes or name in _TAKEN:
            raise _misstated(text, f"{given!r} is {'there twice' if name in sizes else 'no dimension'}")
        sizes[name] = int(number)
    total = math.prod(sizes.values())
    if total != world_size:
        early = world_size == 1 and not (dist.is_available() and dist.is_initialized())
        hint = " (is torch.distributed initialised before the Sentinel is made?)" if early else ""
        raise _misstated(text, f"that makes {total} ranks, and the job has {world_size}{hint}")
    found = {}
    for name in reversed(sizes):
        rank, found[name] = divmod(rank, sizes[name])
    return {name: found[name] for name in sizes}


def _misstated(text: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{VARIABLE}={text!r}: {problem}; it states the sizes of the job's dimensions, as in dp=2,pp=2,tp=2, "
        "those whose ranks are next to each other last"
    )


def megatron_coordinates() -> dict[str, int]:
    """Return this rank's coordinates in Megatron-Core's parallel groups, {} if they are not made here.

    Megatron is not imported: a process that uses it has done so. A coordinate that this version does not
    tell is left out; so are cp and ep of size 1, and etp where it is no other than tp. A virtual pipeline
    stage is no coordinate of a rank: each rank holds all of its own.
    """
    state = _megatron()
    if state is None:
        return {}
    found: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, kind in _MEGATRON.items():
        place = _asked(state, f"get_{kind}_parallel_rank")
        if place is not None:
            found[name] = place
            sizes[name] = _asked(state, f"get_{kind}_parallel_world_size") or 0
    return {
        name: place
        for name, place in found.items()
        if name in _ALWAYS or (sizes[name] != 1 and not (name == "etp" and sizes["etp"] == sizes.get("tp")))
    }


def megatron_peers() -> tuple[int, ...]:
    """Return the ranks that exchange values with this one in Megatron-Core's tensor parallelism."""
    state = _megatron()
    for name in ("get_tensor_and_context_parallel_group", "get_tensor_model_parallel_group"):
        try:
            return tuple(dist.get_process_group_ranks(getattr(state, name)()))
        except Exception:  # noqa: BLE001, S112 - another version, or other groups than torch's
            continue
    return ()


def _megatron() -> Any:
    """Megatron-Core's module of parallel groups, if this process has made them."""
    state = sys.modules.get("megatron.core.parallel_state")
    ready = getattr(state, "model_parallel_is_initialized", None) or getattr(state, "is_initialized", None)
    try:
        return state if ready is None or ready() else None
    except Exception:  # noqa: BLE001 - whatever it is, it does not tell coordinates
        return None


def _asked(state: Any, name: str) -> int | None:
    try:
        return int(getattr(state, name)())
    except Exception:  # noqa: BLE001 - another version, or groups that this job has none of
        return None


def _machine() -> dict[str, int]:
    """Return the number of this machine among several, as the launcher tells it."""
    for number, count in _NODES:
        node, nodes = os.environ.get(number, ""), os.environ.get(count, "")
        if node.isdecimal() and nodes.isdecimal():
            return {"node": int(node)} if int(nodes) > 1 else {}
    return {}


def device_name(device: torch.device) -> str:
    """Return the device with its number."""
    name = str(device)
    if device.type == "cpu" or ":" in name:
        return name
    return f"{device.type}:{os.environ.get('LOCAL_RANK', '0')}"


def evenly(ranks: Sequence[int]) -> Sequence[int]:
    """Return ascending ranks as a range if they are evenly spaced: it takes no memory; else as they are."""
    if len(ranks) < 2:
        return ranks
    spaced = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
    return spaced if tuple(spaced) == tuple(ranks) else ranks


def fold_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in few words: 'rank 3', 'ranks 0-63', 'ranks 0, 2, 8-15', 'ranks 0-504 in steps of 8'."""
    numbers = sorted(set(ranks))
    runs = [f"{low}" if low == high else f"{low}-{high}" for low, high in _runs(numbers)]
    if not runs:
        return "no rank"
    if len(runs) > _MOST_RUNS:
        spaced = evenly(numbers)
        if isinstance(spaced, range):
            return f"ranks {spaced[0]}-{spaced[-1]} in steps of {spaced.step}"
        runs = [*runs[: _MOST_RUNS - 1], f"and {len(runs) - _MOST_RUNS + 1} more runs"]
    single = len(runs) == 1 and "-" not in runs[0]
    return f"{'rank' if single else 'ranks'} {', '.join(runs)}"


def _runs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for position, rank in enumerate(ranks):
        if start is None:
            start = rank
        if position + 1 == len(ranks) or ranks[position + 1] != rank + 1:
            yield start, rank
            start = None
