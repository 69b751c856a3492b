"""The incident bundle: what somebody else needs to look at the fault on another machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsentinel import events
from gradsentinel._version import __version__
from gradsentinel.archive import write_archive
from gradsentinel.callback import Callback
from gradsentinel.decision import Action
from gradsentinel.errors import ConfigurationError
from gradsentinel.incident import Incident
from gradsentinel.run import Run
from gradsentinel.scene import MicroBatch
from gradsentinel.store import write_json
from gradsentinel.tree import UnsupportedStateError, tensors_in

BUNDLE_KIND = "scene"
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


@dataclass(kw_only=True)
class SnapshotSaver(Callback):
    """Saves a bundle for each incident: environment, random states and the offending micro-batch.

    JSON and safetensors only, so that opening it is safe. What cannot be stored that way is left out
    and named in `environment.json`. Called on: every rank, each writes its own part.
    """

    max_bundles: int = 20
    """So many bundles are written per run; incidents beyond have their incident.json only."""
    max_bytes: int = 1 << 30
    """Micro-batches beyond this size are left out, which the bundle says."""
    min_action: Action | str = Action.WARN
    """Incidents below this action get no bundle."""
    _run: Run | None = field(default=None, init=False, repr=False)
    _written: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.min_action = Action.parse(self.min_action)
        if self.max_bundles < 0 or self.max_bytes < 0:
            raise ConfigurationError("max_bundles and max_bytes must be 0 or more")

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    def on_incident(self, event: events.IncidentEvent) -> None:
        """Write the bundle beside incident.json."""
        run = self._run
        if (
            run is None
            or event.incident.action < Action.parse(self.min_action)
            or self._written >= self.max_bundles
        ):
            return
        self._written += 1
        directory = run.directory.incidents / event.incident.id
        directory.mkdir(parents=True, exist_ok=True)
        left_out: list[str] = []
        microbatches: Sequence[MicroBatch] = _offending(event.incident, event.scene["microbatches"])
        state: dict[str, Any] = {"microbatches": []}
        room = self.max_bytes
        for microbatch in microbatches:
            room -= _nbytes(microbatch.batch)
            if room < 0:
                left_out.append(f"micro-batch {microbatch.index}: larger than max_bytes={self.max_bytes}")
                continue
            state["microbatches"].append(
                {"index": microbatch.index, "batch": microbatch.batch, "rng": microbatch.rng.to_tree()}
            )
        if event.scene["rng"] is not None:
            state["rng"] = event.scene["rng"].to_tree()
        suffix = f"-rank{run.rank.rank}" if run.consensus.world_size > 1 else ""
        meta = {"incident": event.incident.id, "step": event.step, "rank": run.rank.rank}
        try:
            write_archive(directory / f"scene{suffix}", state, meta, kind=BUNDLE_KIND)
        except UnsupportedStateError as error:
            left_out.append(f"micro-batches: {error}")
            kept: dict[str, Any] = {"microbatches": [], "rng": state.get("rng")}
            write_archive(directory / f"scene{suffix}", kept, meta, kind=BUNDLE_KIND)
        write_json(directory / f"environment{suffix}.json", {**environment(), "left_out": left_out})


def environment() -> dict[str, Any]:
    """Return what a reader elsewhere wants to know of this process: versions, device, settings."""
    return {
        "schema": 1,
        "gradsentinel": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _offending(incident: Incident, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """The micro-batch that was bad, or all of them if it is not known."""
    mine = [entry for entry in microbatches if entry.index == incident.microbatch]
    return mine or microbatches


def _nbytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(batch))
