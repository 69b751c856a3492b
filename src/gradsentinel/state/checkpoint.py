"""Known-good states as a storage of torch.distributed.checkpoint: for any number of ranks, without pickle.

This module imports torch.distributed.checkpoint, which takes long; nothing else does at its top.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gradsentinel.state.archive import ArchiveError, check_archive, read_archive
from gradsentinel.state.checkpoint_writer import SnapshotWriter
from gradsentinel.state.export import named_nest
from gradsentinel.state.parts import CHECKPOINT_KIND, SNAPSHOT_KIND, checkpoints, complete_states
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.store import RunDirectory

__all__ = ["Pieces", "SnapshotReader", "SnapshotWriter", "map_snapshot"]

_Place = tuple[str, tuple[int, ...]]
"""A tensor by its key, and where in the whole a part begins."""


class SnapshotReader(StorageReader):
    """Has `torch.distributed.checkpoint.load` read a known-good state of a run, on any number of ranks.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        torch.distributed.checkpoint.load(state, storage_reader=SnapshotReader("runs/fsdp2"))

    What a rank asks for is read from the parts of the ranks that saved it, and nothing else of them. The
    checksums are compared before, each file once for all ranks of a job that calls `check` on its share.

    Args:
        run_dir: the run's directory.
        step: of the state; None takes the newest that is complete.
        check: compare the checksums of all parts now.

    Raises:
        ArchiveError: there is no such state, or it is damaged.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, step: int | None = None, check: bool = True
    ) -> None:
        where = RunDirectory(Path(run_dir)).snapshots
        # Of one step, what was saved on purpose goes before what the run keeps of its own.
        there = [*complete_states(where), *checkpoints(where)]
        fitting = sorted((s for s in there if step in (None, s.step)), key=lambda state: state.step)
        if not fitting:
            raise ArchiveError(
                f"{where} holds no complete state" + ("" if step is None else f" of step {step}")
            )
        chosen = fitting[-1]
        if check:
            for path in chosen.paths:
                check_archive(path, kind=chosen.kind)
        if chosen.kind == SNAPSHOT_KIND:
            self._read([map_snapshot(path) for path in chosen.paths])
        else:
            self._read_checkpoint(chosen.paths)

    @classmethod
    def of(cls, parts: Sequence[Snapshot]) -> SnapshotReader:
        """Return a reader of these parts, by rank, which are taken as they are."""
        reader = cls.__new__(cls)
        reader._read(parts)
        return reader

    def _start(self) -> None:
        self._values: dict[str, Any] = {}
        """What is no tensor, of the first rank."""
        self._chunks: dict[_Place, Tensor] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._mappings: dict[str, Any] = {}

    def _read_checkpoint(self, paths: Sequence[Path]) -> None:
        self._start()
        for path in paths:
            part, _ = read_archive(path, kind=CHECKPOINT_KIND, lazily=True)
            self._mappings.update(part["names"])
            self._values = {**part["values"], **self._values}
            for key, chunks in part["tensors"].items():
                for chunk in chunks:
                    self._add(key, chunk["values"], chunk)

    def _read(self, parts: Sequence[Snapshot]) -> None:
        self._start()
        for rank, part in enumerate(parts):
            nest, places = named_nest(part)
            planner = DefaultSavePlanner()
            planner.set_up_planner(nest, is_coordinator=True)
            self._mappings.update(planner.mappings)
            for key, value in planner.state_dict.items():
                if isinstance(value, Tensor):
                    self._add(key, value, places.get(id(value)))
                elif not rank:
                    self._values[key] = value

    def _add(self, key: str, value: Tensor, place: Mapping[str, Any] | None) -> None:
        offsets = (0,) * value.dim() if place is None else tuple(place["offsets"])
        size = value.shape if place is None else torch.Size(place["shape"])
        known = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties.create_from_tensor(value), size, [])
        )
        if (key, offsets) not in self._chunks and (value.numel() or place is None):  # not a replica
            known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), value.shape))
            self._chunks[key, offsets] = value

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return which tensors there are, and in which parts."""
        others = {key: BytesStorageMetadata() for key in self._values}
        return Metadata(state_dict_metadata={**self._tensors, **others}, planner_data=self._mappings)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            begin = tuple(item.storage_index.offset or ())
            part = self._chunks[item.storage_index.fqn, begin]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: it reads one state."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001 - torch's
        """Do nothing: it is ready."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return them as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: it is to be made by hand."""
        del checkpoint_id
        return False


def map_snapshot(path: Path) -> Snapshot:
    """Return one rank's part, whose tensors are the files: what is used of them is read then, unchecked."""
    state, _ = read_archive(path, kind=SNAPSHOT_KIND, lazily=True)
    return Snapshot.from_tree(state)


class Pieces(LoadPlanner):
    """Fills tensors that are any parts of whole ones, as of another number of ranks.

    It is run without `load`, which talks over the ranks: here each reads what it needs.
    """

    def __init__(self) -> None:
        self._targets: dict[_Place, Tensor] = {}
        self._items: list[ReadItem] = []

    def want(self, key: str, target: Tensor, offsets: Sequence[int], metadata: Metadata) -> int:
        """Ask for a part that begins there, and return how many of its elements the storage has."""
        known = metadata.state_dict_metadata[key]
        assert isinstance(known, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size(offsets), target.shape)
        items = create_read_items_for_chunk_list(key, known, [chunk]) if target.numel() else []
        self._items += items
        self._targets[key, tuple(offsets)] = target
        return sum(torch.Size(item.lengths).numel() for item in items)

    def fill(self, reader: SnapshotReader) -> None:
        """Read all that was asked for."""
        reader.read_data(self.create_local_plan(), self).wait()

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Do nothing: `want` has said what is to be read."""

    def create_local_plan(self) -> LoadPlan:
        """Return what is to be read."""
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return it as it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return it as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do nothing: only tensors are asked for."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the memory that an item goes to."""
        index: MetadataIndex = read_item.dest_index
        target = self._targets[index.fqn, tuple(index.offset or ())]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: it is where it belongs."""
