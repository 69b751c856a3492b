"""One trial: the same stretch of training under each policy, each with a file of its own when it is done."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradsentinel.campaign.journal import Journal, plain
from gradsentinel.campaign.kinds import FOR_MEGATRON, KINDS
from gradsentinel.campaign.policies import POLICIES, Job
from gradsentinel.campaign.schedule import Planned, draw, sweep
from gradsentinel.campaign.workloads.text import Text, held_out_loss
from gradsentinel.incident import jsonable

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A stretch of training and its faults."""

    workload: str
    """`plain`, `scaler` (plain with a GradScaler), `bits` (the sweep), `lightning` or `megatron`."""
    number: int
    """Number among the trials of its workload."""
    seed: int
    """Seed of the campaign."""
    first: int
    """Number of its first fault among those of its workload."""
    count: int
    """How many faults."""
    every: int
    """Steps from one fault to the next, on average."""
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.workload}-{self.number:03}"

    @property
    def steps(self) -> int:
        """Batches of the run: a stretch without faults at the beginning, one for each fault."""
        return (self.count + 2) * self.every if self.workload == "bits" else (self.count + 1) * self.every

    def faults(self) -> list[Planned]:
        """Draw its faults."""
        if self.workload == "bits":
            return sweep(first=self.first, count=self.count, every=self.every)
        kinds = [kind for kind in KINDS if not kind.needs_scaler or self.workload == "scaler"]
        # Workloads draw from sequences of their own.
        seed = self.seed * 10 + ("plain", "scaler", "lightning", "megatron").index(self.workload)
        ranks = 0
        if self.workload == "megatron":
            kinds, ranks = list(FOR_MEGATRON), 4
        return draw(seed=seed, first=self.first, count=self.count, every=self.every, kinds=kinds, ranks=ranks)

    def file(self, folder: Path, policy: str) -> Path:
        """Where the result of one policy is kept."""
        return folder / "trials" / f"{self.name}-{policy}.json"

    def missing(self, folder: Path) -> list[str]:
        """Return the policies whose results are not there."""
        return [policy for policy in self.policies if not self.file(folder, policy).is_file()]

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def run_trial(trial: Trial, folder: Path, policies: Sequence[str]) -> None:
    """Train under each of these policies, and write what came of each as soon as it is done."""
    for policy in policies:
        keep(trial, folder, policy, _run(trial, policy))


def keep(trial: Trial, folder: Path, policy: str, result: dict[str, Any]) -> None:
    """Write the result of one policy, whole or not at all."""
    path = trial.file(folder, policy)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schema": SCHEMA, "trial": trial.as_dict(), "policy": policy}
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(jsonable({**head, **result}), indent=1, allow_nan=False))
    temporary.replace(path)


def _run(trial: Trial, policy: str) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="gradsentinel-campaign-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what did not happen is counted, and the loops warn as they must
            if trial.workload == "lightning":
                from gradsentinel.campaign.workloads import on_lightning  # noqa: PLC0415 - imports Lightning

                return on_lightning.train(trial, policy, scratch)
            if trial.workload == "megatron":
                from gradsentinel.campaign.workloads import on_megatron  # noqa: PLC0415 - starts processes

                return on_megatron.train(trial, policy, scratch)
            return _plain(trial, policy, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _plain(trial: Trial, policy: str, scratch: Path) -> dict[str, Any]:
    seed = trial.seed * 1000 + trial.number
    scaler = torch.amp.GradScaler("cpu") if trial.workload == "scaler" else None
    job = Job(task=Text(steps=trial.steps, seed=seed), faults=trial.faults(), seed=seed, scaler=scaler)
    how = POLICIES[policy]
    started = time.perf_counter()
    feed = job.run(how.loop, scratch, faulty=how.faulty)
    return result(trial, job.journal, job.model, {**feed.as_dict(), "seconds": time.perf_counter() - started})


def result(trial: Trial, journal: Journal, model: nn.Module, measured: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of one run; what depends on the clock lies under `clock`."""
    seconds = measured.pop("seconds")
    faulty = {one.step for one in trial.faults()}
    incidents = [{"number": one["number"], **plain(one["incident"])} for one in journal.incidents]
    clocks = [one.pop("seconds") for one in incidents]
    calm = [spent for number, spent in journal.seconds if number not in faulty and number > 5]
    return {
        "steps": trial.steps,
        "faults": [one.as_dict() for one in trial.faults()],
        **journal.as_dict(),
        "incidents": incidents,
        **measured,
        "loss": held_out_loss(model),
        "weights": digest(model),
        "clock": {
            "seconds": seconds,
            "step": statistics.median(calm) if calm else None,
            "incidents": clocks,
        },
    }


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, bit for bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main(arguments: Sequence[str]) -> None:
    """Run a trial in this process: its JSON form, the folder, the policies."""
    torch.set_num_threads(1)
    logging.getLogger("gradsentinel").setLevel(logging.CRITICAL)
    given = json.loads(arguments[0])
    trial = Trial(**{**given, "policies": tuple(given["policies"])})
    run_trial(trial, Path(arguments[1]), arguments[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
