"""A state that all ranks finish together, through torch.distributed.checkpoint's save, or none of them has.

Each rank writes its own part beside the training, under a temporary name, and reads it back; torch tells all
of them whether all have, and only then the parts get their names. That talks over the ranks in the thread
that writes, in a group of its own with a timeout: a rank that fails is heard of by all, one that is late or
gone costs the others that state and this way of writing, and nobody the run.
"""

from __future__ import annotations

import logging
import shutil
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gradsentinel.ranks.consensus import give_back
from gradsentinel.state.archive import ArchiveError, temporary_beside
from gradsentinel.state.archive_files import sync_directory

logger = logging.getLogger("gradsentinel")


class Together:
    """The ranks of a job, which finish each state together; made on every rank.

    Args:
        timeout: seconds that a rank may keep the others waiting.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def __bool__(self) -> bool:
        """False once a rank has kept the others waiting too long: from then on each writes by itself."""
        return self._group is not None

    def save(self, path: Path, write: Callable[[Path], object] | None) -> None:
        """Write this rank's part, and give it its name if all ranks have theirs; called on every rank.

        Args:
            path: its name.
            write: writes it under another name, whole and read back; None if this rank has it already.

        Raises:
            ArchiveError: some rank could not write its part, or was not there in time; no rank has the state.
        """
        hidden = temporary_beside(path)
        part = _Part(None if write is None else lambda: write(hidden))
        try:
            save(
                {},
                storage_writer=part,
                planner=DefaultSavePlanner(),
                process_group=self._group,
            )
            if write is not None:
                hidden.rename(path)
                sync_directory(path.parent)
        except CheckpointException as error:
            if part.failure is not None:  # the others hear of it in words
                raise part.failure from error
            why = "; ".join(f"rank {rank}: {told[0]}" for rank, told in sorted(error.failures.items()))
            raise ArchiveError(f"cannot write the archive {path}: {why}") from error
        except RuntimeError as error:  # gloo has no exception of its own
            traceback.clear_frames(error.__traceback__)  # they hold the group, which closes when nobody does
            self.close()  # the next collectives would not fit; and who waits for this rank hears of it now
            logger.warning(
                "%s was not finished by all ranks within %g seconds and is dropped; from now on each rank "
                "writes its states by itself (%s)",
                path.name,
                self._timeout,
                str(error).partition("\n")[0],
            )
            raise ArchiveError(
                f"cannot write the archive {path}: not all ranks finished theirs in time"
            ) from error
        finally:
            shutil.rmtree(hidden, ignore_errors=True)

    def close(self) -> None:
        """Give the group back, when no state is being written any more."""
        group, self._group = self._group, None
        if group is not None:
            give_back(group)


class _Part(StorageWriter):
    """A rank's part: what torch plans is nothing, since each rank has what it writes."""

    def __init__(self, write: Callable[[], object] | None) -> None:
        self._write = write
        self.failure: Exception | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: it writes one state."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001 - torch's
        """Do nothing: it is ready."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return them as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write it; what that raises all ranks hear."""
        if self._write is not None:
            try:
                self._write()
            except Exception as error:  # whatever it is, the others are not to wait
                self.failure = error
                raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: all ranks are told, and each gives its part its name."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: it is to be made by hand."""
        del checkpoint_id
        return False
