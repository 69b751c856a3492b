"""Which ranks must hold the same values, and exact checksums that tell whether they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsentinel.devices import device_of
from gradsentinel.measures.inspection import local
from gradsentinel.ranks.consensus import ABSENT
from gradsentinel.ranks.topology import evenly, find_mesh, fold_ranks

_WORD = {1: torch.int8, 2: torch.int16}
"""How the bits of narrow numbers are read; wider ones are read as int32."""
_MODULUS = 2**61
"""Checksums stay below this, far from `ABSENT`. Words of 32 bits times odd weights: no single bit is lost."""
_CHUNK = 2**18
"""Elements at a time on a CPU, where the wide integers then stay in its cache: several times faster."""
_LARGE_CHUNK = 2**22
"""Elements at a time on other devices, where each launch costs."""
_APART = (
    *("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "batch"),
    *("cp", "context", "ep", "expert", "pp", "pipeline"),
)
"""How the names of mesh dimensions begin along which ranks see other data, or hold other parameters."""
_MIX = 0x9E3779B97F4A7C1  # odd, so that multiplying loses no bit; spreads the parameters over the total


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroup:
    """Parameters that all ranks of a process group must hold bit for bit alike."""

    name: str
    """In words: data-parallel replicas, or the mesh dimension."""
    group: Any
    """The process group."""
    ranks: Sequence[int]
    """Its global ranks; a range where they are evenly spaced, which does not grow with the job."""
    members: tuple[str, ...]
    """Names of the parameters."""

    @property
    def label(self) -> str:
        """The group in words, another text for each group of a job."""
        return f"{self.name} {fold_ranks(self.ranks)}"


def find_replicas(
    named: Iterable[tuple[str, Tensor]],
    *,
    replicated: Callable[[str], Any] | None = None,
    data_parallel: Sequence[Any] = (),
) -> list[ReplicaGroup]:
    """Return the groups of a model's parameters, the same list on every rank.

    A distributed parameter is replicated over each mesh dimension on which its placement is Replicate
    (HSDP replicas, norms and biases under tensor parallelism). Over those dimensions of the largest mesh
    that it knows nothing of (a plain norm beside tensor-parallel layers, a norm that is sharded over
    data-parallel ranks only) it is replicated where the ranks see the same data and so compute the same
    gradient. Along data-parallel dimensions they do not: what nobody reduces there, such as a parameter
    that `fully_shard` was told to ignore, is each rank's own.

    Args:
        named: parameters by name.
        replicated: returns the process group over which a parameter is replicated otherwise (DDP's), or
            None if nothing is known of it.
        data_parallel: the meshes over which FSDP shards and replicates. A dimension whose name says so
            (dp, data_parallel, dp_shard, cp, ...) counts as one along which the data differ, too.
    """
    named = list(named)
    mesh_of_all = find_mesh(tensor for _, tensor in named)
    same_data = _same_data(mesh_of_all, data_parallel)
    found: dict[tuple[str, tuple[int, ...]], tuple[Any, list[str]]] = {}

    def enter(what: str, group: Any, name: str) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            found.setdefault((what, ranks), (group, []))[1].append(name)

    for name, tensor in named:
        mesh: Any = getattr(tensor, "device_mesh", None)
        group = None if replicated is None else replicated(name)
        if group is not None:
            enter("data-parallel replicas", group, name)
        for dimension, placement in enumerate(getattr(tensor, "placements", ())):
            if placement.is_replicate():
                enter(_dimension(mesh, dimension), mesh.get_group(dimension), name)
        for dimension in _dimensions_without(mesh_of_all, mesh):
            if dimension in same_data:
                enter(_dimension(mesh_of_all, dimension), mesh_of_all.get_group(dimension), name)
    return [
        ReplicaGroup(name=what, group=group, ranks=evenly(ranks), members=tuple(members))
        for (what, ranks), (group, members) in found.items()
    ]


def _same_data(mesh: Any, data_parallel: Sequence[Any]) -> frozenset[int]:
    """The dimensions of a mesh along which all ranks see the same data, as far as anybody can know."""
    if mesh is None or mesh.get_coordinate() is None:
        return frozenset()
    reduced = [set(other.mesh.flatten().tolist()) for other in data_parallel]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return frozenset(
        dimension
        for dimension, name in enumerate(names)
        if not name.lower().startswith(_APART)
        and not any(set(dist.get_process_group_ranks(mesh.get_group(dimension))) <= one for one in reduced)
    )


def _dimensions_without(whole: Any, part: Any) -> list[int]:
    """The dimensions of a mesh that a slice of it, or None, lacks; none if `part` is no slice of it here."""
    if whole is None or part is None:
        return [] if whole is None else list(range(whole.ndim))
    names, own, place = whole.mesh_dim_names, part.mesh_dim_names, whole.get_coordinate()
    if names is None or own is None or place is None or not set(own) < set(names):
        return []
    index = tuple(slice(None) if name in own else at for name, at in zip(names, place, strict=True))
    lacking = [dimension for dimension, name in enumerate(names) if name not in own]
    return lacking if torch.equal(whole.mesh[index], part.mesh) else []


def _dimension(mesh: Any, dimension: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension {names[dimension] if names else dimension}"


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim int64 that depends on every bit and on no order of summation; no wait.

    The bits are read as integers and summed (modulo a power of two, exact, so the order cannot matter),
    each weighted by its place so that swapped values are seen. A distributed tensor counts its shard;
    one whose terms are still to be added up over the ranks (Partial) has no bits to compare and gives 0.
    On an NPU the bits are those of the plain tensor format; a sparse tensor waits for the device.
    """
    if any(place.is_partial() for place in getattr(tensor, "placements", ())):
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for bits in _words(local(tensor).detach()):
        total = total * _MIX
        chunk = _CHUNK if bits.device.type == "cpu" else _LARGE_CHUNK
        place = torch.arange(min(bits.numel(), chunk), device=bits.device, dtype=torch.int64)
        for start in range(0, bits.numel(), chunk):  # wide integers of a large tensor never exist at once
            part = bits[start : start + chunk].to(torch.int64)
            total += ((part + 1) * _weights(place[: part.numel()] + start)).sum()
    return torch.remainder(total, _MODULUS)


def _words(values: Tensor) -> Iterator[Tensor]:
    """The bits of a tensor as 1-dim integers of at most 32 bits; of a sparse one first its places."""
    if values.layout is torch.sparse_coo:
        values = values.coalesce()
        yield from _words(values.indices())
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype is torch.bool:
        values = values.to(torch.int8)
    flat = device_of(values.device).in_plain_format(values.resolve_neg()).contiguous().flatten()
    flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride
    yield flat.view(_WORD.get(flat.element_size(), torch.int32))


def _weights(place: Tensor) -> Tensor:
    """Odd numbers: the low half tells any two places apart, the high half follows no pattern.

    With the low half alone, small changes at several places could cancel out.
    """
    mixed = place * _MIX
    mixed = (mixed ^ (mixed >> 32)) * _MIX
    return 2 * place + 1 + 2**34 * (mixed ^ (mixed >> 29))


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of tensors, 1-dim int64, on the first one's device; no wait."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    first = local(tensors[0]).device
    return torch.stack([checksum(tensor).to(first) for tensor in tensors])


def combine(sums: Tensor) -> Tensor:
    """Return one checksum of many, 1-dim int64 with one element."""
    place = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    return torch.remainder((sums * (_MIX * (2 * place + 1))).sum(), _MODULUS).reshape(1)


def absent(count: int, device: torch.device) -> Tensor:
    """Return what a rank that has nothing to compare contributes."""
    return torch.full((count,), ABSENT, dtype=torch.int64, device=device)
