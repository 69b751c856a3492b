"""Whether what is not finite in a batch is what spoilt the step: some models expect missing values."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.replay import Replay, reason_against
from gradsentinel.measures.inspection import readable
from gradsentinel.run import Run
from gradsentinel.state.tree import map_tensors, tensors_in

logger = logging.getLogger("gradsentinel")


def innocent(run: Run, suspects: Mapping[int, Sequence[str]], *, buffers: bool = False) -> bool:
    """Return True if the step is not finite without these values either; leaves the run as it is.

    Args:
        run: at an incident.
        suspects: by the number of the micro-batch, the paths of its tensors with bad values.
        buffers: the step spoilt buffers.

    Each suspect is run with ordinary values in place of the bad ones. False if one is finite then, and if
    it cannot be tried.
    """
    if reason_against(run) is not None:
        return False
    replay, deadline = Replay(run, buffers=buffers), time.monotonic() + run.diagnosis_budget / 2
    several = len(run.scene.microbatches) > 1
    try:
        with replay.sheltered():
            for microbatch in run.scene.microbatches:
                fields = suspects.get(microbatch.index)
                if fields is None:
                    continue
                if not {path for path, _ in tensors_in(microbatch.batch)}.issuperset(fields):
                    return False  # an array, or within an object of the user's own: nothing is put there
                if time.monotonic() + 2 * replay.slowest > deadline:
                    return False
                if several and swap.is_finite(replay.compute(microbatch)):
                    continue  # with its bad values: another one is to blame
                if swap.is_finite(replay.compute(microbatch, batch=_filled(microbatch, fields))):
                    return False
    except Exception as error:  # noqa: BLE001 - the user's own code: it may not like to run twice
        logger.debug("the batch could not be tried without its bad values: %s", error)
        return False
    return True


def _filled(microbatch: MicroBatch, fields: Sequence[str]) -> object:
    """Copy a batch, its bad values replaced by the mean of the others of that field."""
    chosen = {id(tensor) for path, tensor in tensors_in(microbatch.batch) if path in fields}

    @torch.no_grad()
    def filled(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if id(tensor) in chosen and readable(copy) is None and copy.layout is torch.strided:
            fine = torch.isfinite(copy)
            copy[~fine] = copy[fine].mean() if bool(fine.any()) else 1.0
        return copy.requires_grad_(tensor.requires_grad)

    return map_tensors(filled, microbatch.batch)
