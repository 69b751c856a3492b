"""Runs the trials, each in a process of its own, as many at a time as there are cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradsentinel.campaign.trial import Trial, keep

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass
class _Running:
    trial: Trial
    process: subprocess.Popen[bytes]
    missing: int
    since: float = field(default_factory=time.monotonic)


def run(
    trials: Sequence[Trial],
    folder: Path,
    *,
    jobs: int,
    hang: float,
    done: Callable[[int], object],
) -> list[str]:
    """Run what is missing of the trials; return what went wrong, one line each.

    A process that writes no result for `hang` seconds is ended, its policy counts as a hang, and the trial
    goes on with the next. One that fails does so for its policy alone.

    Args:
        trials: all of the campaign.
        folder: where the results are.
        jobs: so many processes at a time.
        hang: seconds.
        done: called with the number of results that are new.
    """
    waiting = [trial for trial in trials if trial.missing(folder)]
    running: list[_Running] = []
    problems: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs and _may_start(waiting[0], running):
                running.append(_start(waiting.pop(0), folder))
            time.sleep(POLL)
            for one in list(running):
                left = len(one.trial.missing(folder))
                if left < one.missing:
                    done(one.missing - left)
                    one.missing, one.since = left, time.monotonic()
                code = one.process.poll()
                hung = code is None and time.monotonic() - one.since > hang
                if code is None and not hung:
                    continue
                running.remove(one)
                if hung:
                    _end(one)
                if left:
                    policy = one.trial.missing(folder)[0]
                    why = f"no result for {hang:.0f} s" if hung else f"exit code {code}"
                    problems.append(f"{one.trial.name}, {policy}: {why}, see {_log(one.trial, folder)}")
                    keep(one.trial, folder, policy, {"failed": why, "hung": hung})
                    done(1)
                    if one.trial.missing(folder):
                        waiting.insert(0, one.trial)
    finally:
        for one in running:
            _end(one)
    return problems


def _may_start(trial: Trial, running: Sequence[_Running]) -> bool:
    """A trial of several ranks has the machine for itself."""
    return not running or "megatron" not in {trial.workload, *(one.trial.workload for one in running)}


def _log(trial: Trial, folder: Path) -> Path:
    return folder / "logs" / f"{trial.name}.log"


def _start(trial: Trial, folder: Path) -> _Running:
    path = _log(trial, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = trial.missing(folder)
    command = [
        *(sys.executable, "-m", "gradsentinel.campaign.trial"),
        *(json.dumps(trial.as_dict()), str(folder), *missing),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with path.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - ours
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    return _Running(trial, process, len(missing))


def _end(one: _Running) -> None:
    """End a process, and those that it has started."""
    if one.process.poll() is None:
        if hasattr(os, "killpg"):
            os.killpg(one.process.pid, 9)
        else:
            one.process.kill()
    one.process.wait()
