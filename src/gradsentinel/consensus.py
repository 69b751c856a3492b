"""The one place with collectives on the hot path: every rank hears the same decision."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Consensus(Protocol):
    """How the ranks of a job agree; every method is called on every rank, in the same order."""

    rank: int
    world_size: int

    def agree(self, levels: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks of a 1-dim int32 tensor; no wait for the device."""

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001 - the question is the argument
        """Return True if every rank says True; waits."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; incident path only."""


class LocalConsensus:
    """A job of one process agrees with itself."""

    rank = 0
    world_size = 1

    def agree(self, levels: Tensor) -> Tensor:
        """Return the levels as they are."""
        return levels

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001
        """Return the answer as it is."""
        return fine

    def gather(self, value: T) -> list[T]:
        """Return the one value."""
        return [value]


class DistributedConsensus:
    """Agreement over a torch.distributed process group: one small int32 all_reduce(MAX) a step."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device = device

    def agree(self, levels: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks."""
        agreed = levels.clone() if self.device is None else levels.to(self.device, copy=True)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return agreed.to(levels.device)

    def all_of(self, fine: bool) -> bool:  # noqa: FBT001
        """Return True if every rank says True."""
        return not int(self.agree(torch.tensor([0 if fine else 1], dtype=torch.int32)).item())

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered


def default_consensus(device: torch.device) -> Consensus:
    """Return the consensus of this process: over all ranks if torch.distributed runs, else local."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return LocalConsensus()
    backend = dist.get_backend()
    on_device = device.type if device.type in backend or backend in {"nccl", "hccl"} else "cpu"
    return DistributedConsensus(device=torch.device(device if on_device != "cpu" else "cpu"))
