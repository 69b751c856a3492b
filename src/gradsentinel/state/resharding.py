"""A state that another number of ranks has saved, divided anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsentinel.host import Host
from gradsentinel.measures.inspection import stored
from gradsentinel.state.archive import ArchiveError, check_archive
from gradsentinel.state.layout import layout_of
from gradsentinel.state.parts import SNAPSHOT_KIND
from gradsentinel.state.rng import RngState
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.tree import clone_tree, tensors_in


class CannotDivide(ArchiveError):
    """It is sound, and nothing says how another number of ranks could take it."""


def divide_anew(
    paths: Sequence[Path], host: Host, buffers: Iterable[tuple[str, Tensor]], *, rank: int, ranks: int
) -> Snapshot:
    """Return this rank's part of a state that was saved by another number of ranks; nothing is communicated.

    Weights, buffers and moments are put together from the parts of all ranks (DTensors: FSDP2, torch's own
    tensor parallelism) or are the replicas of one; each rank reads what it needs. All else is of the rank of
    the same number, where there was one, and otherwise of one that there was; random states then stay.

    Args:
        paths: its archives, by rank; all of them can be read here.
        host: whose state it is to become.
        buffers: the model's buffers.
        rank: this one's number.
        ranks: how many there are now: each verifies its share of the archives.

    Raises:
        ArchiveError: an archive is damaged.
        CannotDivide: nothing says which part of the whole its parts are.
    """
    from gradsentinel.state.checkpoint import Pieces, SnapshotReader, map_snapshot  # noqa: PLC0415 - takes long

    parts = [map_snapshot(path) for path in paths]
    for optimizer in (entry for part in parts for entry in part.optimizers):
        if not (isinstance(optimizer, Mapping) and {"state", "groups"} <= optimizer.keys()):
            raise CannotDivide("the optimizer is a framework's own, and only that can divide its state")
    for number in range(rank, len(paths), ranks):
        check_archive(paths[number], kind=SNAPSHOT_KIND)
        _compare(parts[0], parts[number], number)
    reader, pieces = SnapshotReader.of(parts), Pieces()
    metadata = reader.read_metadata()
    named = [*host.named_parameters(), *(kept := list(buffers))]
    layout, here = layout_of(host, kept), dict(named)
    own = parts[rank % len(parts)]

    def part_of(key: str, name: str, saved: Tensor) -> Tensor:
        """Return memory for this rank's part of a tensor that is divided as a parameter or buffer is."""
        known: Any = metadata.state_dict_metadata.get(key)
        present = here.get(name)
        if present is None or known is None:
            return saved  # to be refused by whoever writes it back
        if known.size != present.shape:
            raise CannotDivide(
                f"{name!r} has shape {tuple(present.shape)}, in the saved state {tuple(known.size)}"
            )
        values = stored(present)
        place = layout["shards"].get(name)
        if place is None and values.shape != present.shape:
            raise CannotDivide(f"nothing says which part of {name!r} this rank has")
        offsets = (0,) * values.dim() if place is None else tuple(place["offsets"])
        target = torch.empty(values.shape, dtype=known.properties.dtype)
        if pieces.want(key, target, offsets, metadata) != target.numel():
            raise CannotDivide(f"the saved state does not hold all of {name!r}")
        return target

    def moments_of(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        shape = own.parameters[name].shape if name in own.parameters else None
        return {
            key: part_of(f"optimizer.state.{name}.{key}", name, value)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for key, value in entries.items()
        }

    divided = replace(
        own,
        parameters={name: part_of(f"model.{name}", name, value) for name, value in own.parameters.items()},
        buffers={name: part_of(f"model.{name}", name, value) for name, value in own.buffers.items()},
        optimizers=[
            {**one, "state": {name: moments_of(name, entries) for name, entries in one["state"].items()}}
            for one in own.optimizers
        ],
        # Copies: what takes these may want memory that is aligned, and that stays when the file goes.
        rng=RngState.from_tree(clone_tree(own.rng.to_tree()))
        if rank < len(parts)
        else RngState.capture((host.device.type,)),
        stateful=clone_tree(own.stateful),
        epoch=clone_tree(own.epoch),
        callbacks=clone_tree(own.callbacks),
        layout=layout,
        norms={},
    )
    pieces.fill(reader)
    return divided


def _compare(first: Snapshot, other: Snapshot, number: int) -> None:
    """Raise CannotDivide unless all that is not known to be a part is the same on both ranks."""
    replicas = dict(_replicas(first))
    for name, tensor in _replicas(other):
        same = replicas.get(name)
        if same is None or same.shape != tensor.shape or not torch.equal(same, tensor):
            raise CannotDivide(
                f"ranks 0 and {number} hold different values of {name!r}, and nothing says which parts of "
                "the whole they are: only replicas and DTensors (FSDP2, torch's own tensor parallelism) can "
                "be divided anew"
            )


def _replicas(part: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Yield what has to be the same on every rank: all tensors that count and are not known to be shards."""
    shards = part.layout.get("shards", {})
    for name, value in part.parameters.items():
        if name not in shards and name not in part.frozen:
            yield name, value
    for optimizer in part.optimizers:
        for name, entries in optimizer["state"].items():
            shape = part.parameters[name].shape if name in part.parameters else None
            for path, value in tensors_in(entries):
                if value.numel() > 1 and not (name in shards and value.shape == shape):
                    yield f"{name}:{path}", value
    for path, value in tensors_in(part.stateful):
        if value.numel() > 1 and value.layout is torch.strided:
            yield path, value
