"""A known-good state as a torch.distributed.checkpoint, for another number of ranks or another framework."""

from __future__ import annotations

import inspect
import io
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsentinel.state.archive import ArchiveError, read_archive, temporary_beside
from gradsentinel.state.archive_files import octets, sync_directory
from gradsentinel.state.parts import SNAPSHOT_KIND, SavedState, complete_states
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.store import RunDirectory

_Chunk = tuple[str, tuple[int, ...]]
"""A tensor by its key in the checkpoint, and where in the whole the part begins."""


def saved_states(run_dir: Path) -> list[SavedState]:
    """Return the known-good states in a run directory that all ranks have, oldest first."""
    return complete_states(RunDirectory(run_dir).snapshots)


def export(run_dir: Path, target: Path, *, step: int | None = None) -> SavedState:
    """Write a known-good state as a torch.distributed.checkpoint directory, and return which it was.

    It holds what `torch.distributed.checkpoint.state_dict.get_state_dict` names: `model` and `optimizer`,
    whole tensors put together from the parts of all ranks, so that any number of ranks can load it; and
    `scheduler`, `scaler` and `extra` of rank 0, `step` and `data` (the position). In one process, one rank's
    part in memory at a time. Every part is read back from the disk and compared before the directory has its
    name.

    Args:
        run_dir: the run's directory.
        target: the directory to make.
        step: of the state; None takes the newest.

    Raises:
        ArchiveError: there is no such state, it is damaged, parts of it are nowhere described, the target
            exists or cannot be written.
    """
    from torch.distributed.checkpoint.default_planner import (  # noqa: PLC0415 - takes long, and few need it
        create_default_global_save_plan,
    )
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415 - likewise

    chosen = _choose(run_dir, step)
    if target.exists():
        raise ArchiveError(f"{target} exists already: name a directory that does not")
    temporary = temporary_beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        writer.set_up_storage_writer(is_coordinator=True)
        told: dict[str, tuple[int, str]] = {}
        sums: dict[_Chunk, int] = {}
        plans: list[Any] = []
        written: list[Any] = []
        mappings: dict[str, Any] = {}
        for rank, path in enumerate(chosen.paths):
            part = _Part(_read(path), rank, told, sums)
            plan = part.planner.create_local_plan()
            writer.prepare_local_plan(plan)
            plan = writer.prepare_global_plan([*plans, plan])[-1]
            written.append(writer.write_data(plan, part.planner).wait())
            plans.append(plan)
            mappings.update(part.planner.mappings)
        _, metadata = create_default_global_save_plan(plans)
        metadata.planner_data = mappings
        writer.finish(metadata, written)
        _verify(temporary, metadata, sums)
        sync_directory(temporary)
        temporary.rename(target)
        sync_directory(target.parent)
    except OSError as error:
        raise ArchiveError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return chosen


def _choose(run_dir: Path, step: int | None) -> SavedState:
    there = saved_states(run_dir)
    fitting = [one for one in there if step is None or one.step == step]
    if fitting:
        return fitting[-1]
    where = RunDirectory(run_dir).snapshots
    if not there:
        raise ArchiveError(f"{where} holds no state that all ranks have; Rollback(on_disk=2) writes some")
    steps = ", ".join(str(one.step) for one in there)
    raise ArchiveError(f"{where} holds no state of step {step}; there are: {steps}")


def _read(path: Path) -> Snapshot:
    state, _ = read_archive(path, kind=SNAPSHOT_KIND)
    return Snapshot.from_tree(state)


class _Part:
    """What one rank adds to the checkpoint.

    Args:
        snapshot: of this rank.
        rank: its number.
        told: the whole tensors that ranks before it have written, with rank and checksum; filled.
        sums: the checksum of each part that was written; filled.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        rank: int,
        told: dict[str, tuple[int, str]],
        sums: dict[_Chunk, int],
    ) -> None:
        self._snapshot, self._rank = snapshot, rank
        self._told, self._sums = told, sums
        nest, self._shards = named_nest(snapshot)
        self.planner = _planner(nest, self._write_items)

    def _write_items(self, flat: Mapping[str, Any]) -> list[Any]:
        """Return what this rank writes: its shards, and what no rank before it has written whole."""
        items = []
        for key, value in flat.items():
            shard = self._shards.get(id(value)) if isinstance(value, Tensor) else None
            if shard is not None:
                offsets = tuple(shard["offsets"])
                if value.numel() and (key, offsets) not in self._sums:
                    items.append(_item(key, value, offsets, tuple(shard["shape"])))
                    self._sums[key, offsets] = _sum_of(value)
            elif isinstance(value, Tensor):
                items += self._whole(key, value)
            elif not self._rank:
                items.append(_item(key, value, None, None))
        return items

    def _whole(self, key: str, value: Tensor) -> Iterator[Any]:
        crc = _sum_of(value)
        mark = f"{value.dtype} {tuple(value.shape)} {crc:08x}"
        rank, before = self._told.setdefault(key, (self._rank, mark))
        name = key.removeprefix("model.")
        if before != mark and name in self._snapshot.parameters and name not in self._snapshot.frozen:
            raise ArchiveError(
                f"ranks {rank} and {self._rank} hold different values of {name!r}, and nothing says which "
                "parts of the whole they are: only replicas and DTensors (FSDP2, torch's own tensor "
                "parallelism) can be exported"
            )
        if rank == self._rank:
            self._sums[key, (0,) * value.dim()] = crc
            yield _item(key, value, (0,) * value.dim(), tuple(value.shape))


def named_nest(snapshot: Snapshot) -> tuple[dict[str, Any], dict[int, Mapping[str, Any]]]:
    """Return a state under the names of torch's `get_state_dict`, and the place in the whole of each shard.

    The places are by the tensors' ids.
    """
    places: dict[int, Mapping[str, Any]] = {}
    shards = snapshot.layout.get("shards", {})
    model = {**snapshot.parameters, **snapshot.buffers}
    for name, tensor in model.items():
        if name in shards:
            places[id(tensor)] = shards[name]
    nest: dict[str, Any] = {**snapshot.stateful, "model": model}
    nest |= {"step": snapshot.step, "data": dict(snapshot.data)}
    states: dict[str, Any] = {}
    groups: list[Any] = []
    members = snapshot.layout.get("groups", ())
    for optimizer, names in zip(snapshot.optimizers, members, strict=False):
        if not (isinstance(optimizer, Mapping) and {"state", "groups"} <= optimizer.keys()):
            continue  # a framework's own, whose state only that framework can read
        states |= optimizer["state"]
        groups += [{**g, "params": list(n)} for g, n in zip(optimizer["groups"], names, strict=False)]
    for name, moments in states.items():
        here = snapshot.parameters.get(name)
        for tensor in moments.values():
            alike = isinstance(tensor, Tensor) and here is not None and tensor.shape == here.shape
            if alike and name in shards:
                places[id(tensor)] = shards[name]
    return {**nest, "optimizer": {"state": states, "param_groups": groups}}, places


def _planner(nest: Mapping[str, Any], write_items: Any) -> Any:
    """Return torch's planner for this nest, with write items of our own."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415 - takes long
    from torch.distributed.checkpoint.planner import SavePlan  # noqa: PLC0415 - likewise

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return SavePlan(write_items(self.state_dict))

        def resolve_data(self, write_item: Any) -> Tensor | io.BytesIO:
            value = self.state_dict[write_item.index.fqn]
            if isinstance(value, Tensor):
                return value.detach()
            data = io.BytesIO()
            torch.save(value, data)
            return data

    planner = Planner()
    planner.set_up_planner(dict(nest), is_coordinator=True)
    return planner


def _item(key: str, value: Any, offsets: Sequence[int] | None, shape: Sequence[int] | None) -> Any:
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415 - takes long
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (  # noqa: PLC0415 - likewise
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    if offsets is None or shape is None:
        return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
    begins = torch.Size(offsets)
    return WriteItem(
        index=MetadataIndex(key, begins),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=begins, sizes=value.shape),
            properties=TensorProperties.create_from_tensor(value),
            size=torch.Size(shape),
        ),
    )


def _verify(path: Path, metadata: Any, sums: Mapping[_Chunk, int]) -> None:
    """Read every part back, one tensor at a time, and compare it with what was to be written."""
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - takes long

    left = dict(sums)
    # before torch 2.7 it goes by itself by whether there is a process group
    alone = {"no_dist": True} if "no_dist" in inspect.signature(load).parameters else {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            load({key: whole}, checkpoint_id=path, **alone)
        for chunk in entry.chunks:
            part = whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
            if _sum_of(part) != left.pop((key, tuple(chunk.offsets)), None):
                raise ArchiveError(f"cannot write the checkpoint: {key} is not read back as it was written")
    if left:
        raise ArchiveError(f"cannot write the checkpoint: {next(iter(left))[0]} is not in it")


def _sum_of(tensor: Tensor) -> int:
    held = tensor.detach().contiguous()
    return zlib.crc32(octets(held)) if held.nbytes else 0
