"""Callbacks for those who do not want to choose yet."""

from __future__ import annotations

import importlib.util
import os

import torch.distributed as dist

from gradsentinel import callbacks
from gradsentinel.callback import Callback


def standard(run_dir: str | os.PathLike[str] | None = None) -> list[Callback]:
    """Return the recommended callbacks: the detectors that every run wants, and the whole ladder.

    Give the same directory to the Sentinel, and `forward=` for the rungs that compute a step again:

        sentinel = Sentinel(model, optimizer, callbacks=gradsentinel.standard("runs/demo"),
                            run_dir="runs/demo", forward=lambda model, batch: model(**batch).loss)

    With a directory the last two known-good states are kept on disk, and TensorBoard files are written if
    tensorboard is installed. Where torch.distributed runs with several ranks, replicas are compared. A
    critical incident is rolled back as long as the budgets last; a job that something starts again
    anyway may prefer `Escalation(critical="abort")`. Called on: every rank, after `init_process_group`.
    """
    chosen: list[Callback] = [callbacks.NanCallback(), callbacks.SpikeCallback(), callbacks.BatchCallback()]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        chosen.append(callbacks.CrossRankCallback())
    chosen += [
        callbacks.Retry(),
        callbacks.Rescue(),
        callbacks.Skip(),
        callbacks.Rollback(on_disk=0 if run_dir is None else 2),
        callbacks.Escalation(critical="rollback"),
        callbacks.SnapshotSaver(),
        callbacks.EventLog(),
    ]
    if run_dir is not None and importlib.util.find_spec("tensorboard") is not None:
        chosen.append(callbacks.TensorBoardCallback())
    return chosen
