"""From the files of the trials to results.json."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gradsentinel._version import __version__
from gradsentinel.campaign.goals import goals
from gradsentinel.campaign.policies import POLICIES
from gradsentinel.campaign.score import Score, score
from gradsentinel.campaign.totals import by_bit, by_kind, totals
from gradsentinel.campaign.trial import SCHEMA, Trial
from gradsentinel.errors import StoreError

LOOPS = ("plain", "scaler")
_PACKAGES = ("lightning", "megatron-core", "numpy")
LABELS = {name: one.label for name, one in POLICIES.items()} | {"megatron": "Megatron's own check"}


def results(trials: Sequence[Trial], folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Read what the trials left, score it, and return everything that is published.

    Args:
        trials: those that were run.
        folder: where their files are.
        facts: what the campaign knows of itself: command, form, seed, what was left out and why.
    """
    raw = {trial: _read(trial, folder) for trial in trials}
    failed = [
        {"trial": t.name, "policy": p, "why": r["failed"], "hung": r["hung"]}
        for t, of in raw.items()
        for p, r in of.items()
        if "failed" in r
    ]
    scores = [
        score(result, of.get("clean") if "failed" not in of.get("clean", {"failed": ""}) else None)
        for of in raw.values()
        for result in of.values()
        if "failed" not in result
    ]
    workloads = list(dict.fromkeys(one.workload for one in scores))
    groups = {"loops": [s for s in scores if s.workload in LOOPS]}
    groups |= {w: [s for s in scores if s.workload == w] for w in workloads if w not in LOOPS}
    tables = {
        name: {policy: totals(of, _of(group, "clean")) for policy, of in _policies(group).items()}
        for name, group in groups.items()
        if group
    }
    loops = tables.get("loops", {})
    found = None
    if "gradsentinel" in loops and "checkpoint" in loops:
        ours = loops["gradsentinel"]
        every = ours["steps"] / max(1, ours["faults"] + ours["void"])
        ranks = tables.get("megatron", {}).get("gradsentinel")
        hangs = sum(bool(one["hung"]) for one in failed)
        found = goals(ours, loops["checkpoint"], every, ranks, hangs)
    ours_all = [s for s in scores if s.policy == "gradsentinel"]
    return {
        "schema": SCHEMA,
        **facts,
        "machine": machine(),
        "versions": versions(),
        "faults": sum(trial.count for trial in trials if trial.workload != "bits"),
        "faults_of_the_sweep": sum(trial.count for trial in trials if trial.workload == "bits"),
        "failed": failed,
        "goals": found,
        "tables": tables,
        "kinds": by_kind([s for s in ours_all if s.workload != "bits"]),
        "bits": by_bit([s for s in ours_all if s.workload == "bits"]),
        "runs": [_brief(s) for s in scores],
        "decisions": fingerprint(scores),
    }


def fingerprint(scores: Sequence[Score]) -> str:
    """Return a digest of all that was decided in all runs: the same for the same seed, whatever the clock."""
    lines = sorted(json.dumps([s.workload, s.policy, s.steps, s.decisions]) for s in scores)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """Say what was measured on."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def versions() -> dict[str, str]:
    """Say what it was measured with."""
    found = {"gradsentinel": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _read(trial: Trial, folder: Path) -> dict[str, Any]:
    found = {}
    for policy in trial.policies:
        path = trial.file(folder, policy)
        if not path.is_file():
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StoreError(f"{path} cannot be read ({error}): remove it and use --resume") from error
        if data.get("trial") != json.loads(json.dumps(trial.as_dict())):
            raise StoreError(f"{path} is of another campaign: give another --out, or remove it")
        found[policy] = data
    return found


def _of(scores: Sequence[Score], policy: str) -> list[Score]:
    return [one for one in scores if one.policy == policy]


def _policies(scores: Sequence[Score]) -> dict[str, list[Score]]:
    return {policy: of for policy in LABELS if (of := _of(scores, policy))}


def _brief(one: Score) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "policy": one.policy,
        "steps": one.steps,
        "attempts": one.attempts,
        "interruptions": one.interruptions,
        "spoiled": one.spoiled,
        "lost": one.lost,
        "loss": one.loss,
        "loss_ratio": one.loss_ratio,
        "exact": one.exact_run,
    }
