"""States written by torch.distributed.checkpoint's own save, whole or not there, and without pickle."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gradsentinel.state.archive import (
    ArchiveError,
    read_manifest,
    remove_stale,
    temporary_beside,
    write_archive,
)
from gradsentinel.state.archive_files import sync_directory
from gradsentinel.state.parts import CHECKPOINT_KIND, checkpoint_name, part_name
from gradsentinel.state.tree import UnsupportedStateError
from gradsentinel.store import RunDirectory


class SnapshotWriter(StorageWriter):
    """Has `torch.distributed.checkpoint.save` and `async_save` write a state into a run's directory.

        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        torch.distributed.checkpoint.save(state, storage_writer=SnapshotWriter("runs/fsdp2", step=60))

    Each rank writes what torch's planner gives to it (its shards, its share of the replicas) as an archive of
    safetensors and JSON, and reads it back; the state gets its name, ``snapshots/step-000000060``, when the
    archives of all ranks are there, by one renaming. Whatever happens before that leaves nothing that is
    taken for a state. `SnapshotReader` reads it, on any number of ranks. It is yours: no `Sentinel` goes on
    from it or deletes it.

    All ranks have to see the directory. Use one writer for one state.

    Args:
        run_dir: the run's directory.
        step: number of optimizer steps done; the state is found by it.

    Raises:
        torch.distributed.checkpoint.CheckpointException: by `save`, on every rank, if one of them could not
            write its part or the state is there already; it names the ranks and their reasons (ArchiveError,
            UnsupportedStateError for what cannot be stored without pickle).
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, step: int) -> None:
        if step < 0:
            raise ValueError(f"step={step}: give the number of optimizer steps done")
        self._step = step
        self._path = RunDirectory(Path(run_dir)).snapshots / checkpoint_name(step)
        self._folder: Path | None = None
        """Where the parts lie until all are there; of the coordinator."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget a save that came to nothing; raises ArchiveError if a checkpoint_id is given."""
        if checkpoint_id is not None:
            raise ArchiveError(
                f"checkpoint_id={os.fspath(checkpoint_id)!r} has no meaning here: the state is named by "
                "SnapshotWriter(run_dir, step=...)"
            )
        self._give_up()

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's
        """Refuse what cannot come to a whole state; the coordinator removes what killed processes left."""
        if not kwargs.get("use_collectives", True):
            raise ArchiveError(
                "use_collectives=False: the ranks would not know of each other, and a state is one of all of "
                "them; leave it out"
            )
        if is_coordinator:
            if os.path.lexists(self._path):
                raise ArchiveError(
                    f"cannot write the state of step {self._step}: {self._path} exists already"
                )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._path.parent)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory for the parts, and tell each rank its number; on the coordinator."""
        folder = self._folder = temporary_beside(self._path)
        folder.mkdir()
        self._unfinished = weakref.finalize(self, _remove, os.getpid(), folder)
        return [
            replace(plan, storage_data=(str(folder), rank, len(plans))) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and read it back."""
        folder, rank, ranks = plan.storage_data
        if not Path(folder).is_dir():
            raise ArchiveError(
                f"rank {rank} does not see {folder}, which rank 0 has just made: save to a file system that "
                "all ranks see, and with a planner that keeps no plans (enable_plan_caching=False)"
            )
        tensors: dict[str, list[dict[str, Any]]] = {}
        values: dict[str, Any] = {}
        written = []
        for item in plan.items:
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                values[key] = _value_of(planner, item)
                written.append(WriteResult(item.index, 0, part_name(rank)))
                continue
            facts, part = item.tensor_data, planner.resolve_data(item)
            assert facts is not None
            assert isinstance(part, Tensor)
            if part.layout is not torch.strided:
                raise UnsupportedStateError(
                    f"{key}: a tensor of the layout {part.layout} has no place in a state that is divided; "
                    "save it dense, or leave it out"
                )
            place = {"offsets": list(facts.chunk.offsets), "shape": list(facts.size)}
            tensors.setdefault(key, []).append({**place, "values": part.detach()})
            written.append(WriteResult(item.index, part.nbytes, part_name(rank)))
        write_archive(
            Path(folder) / part_name(rank),
            {"tensors": tensors, "values": values, "names": _names(plan)},
            {"step": self._step, "iteration": self._step, "known_good": False, "world_size": ranks},
            kind=CHECKPOINT_KIND,
            verify=True,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the state its name if the parts of all ranks are there; on the coordinator."""
        del metadata  # what it says is in the parts
        folder = self._folder
        assert folder is not None
        for rank in range(len(results)):
            try:
                read_manifest(folder / part_name(rank), kind=CHECKPOINT_KIND)
            except ArchiveError as error:
                raise ArchiveError(
                    f"the part of rank {rank} is not seen by rank 0: save to a file system that all ranks "
                    f"see ({error})"
                ) from error
        try:
            sync_directory(folder)
            folder.rename(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            self._give_up()
            raise ArchiveError(f"cannot write the state {self._path}: {error.strerror or error}") from error
        self._folder = None
        self._unfinished.detach()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: it is to be made by hand."""
        del checkpoint_id
        return False

    def _give_up(self) -> None:
        if self._folder is not None:
            self._folder = None
            self._unfinished()


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return what is no tensor as it is: what a planner resolves it to is its pickle."""
    look_up = getattr(planner, "lookup_object", None)  # of torch's own planner, and of what is made from it
    if look_up is None:
        raise UnsupportedStateError(
            f"{item.index.fqn}: of what is no tensor {type(planner).__name__} gives the pickle only, which "
            "is not stored; derive it from DefaultSavePlanner"
        )
    return look_up(item.index)


def _names(plan: SavePlan) -> dict[str, Any]:
    """Return where in the nest each key was: torch's planner puts it together again by that."""
    names = plan.planner_data
    return dict(names) if isinstance(names, Mapping) else {}


def _remove(owner: int, folder: Path) -> None:
    """Remove the parts of a state that never became one; not those of a parent."""
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
