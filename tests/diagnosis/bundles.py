"""Makes incidents with their bundles on disk, from the failures of this directory."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failures import FAILURES, Failure

from gradsentinel import Callback, Incident, NanCallback, Sentinel, SnapshotSaver, TrainingAborted, events
from gradsentinel.diagnosis.diagnose import findings_of

OWN = [
    case
    for case in FAILURES
    if case.forward.__module__ == "failures" and case.cause not in ("hardware", "unknown")
]
"""Those of failures.py (other files add theirs to the list when they are imported) that can be run again and
again: what strikes once strikes once in a process."""


def built(case: Failure) -> torch.nn.Module:
    """The model of a failure, as the run has it."""
    torch.manual_seed(0)
    model = case.model()
    if case.prepare is not None:
        case.prepare(model)
    return model


class Traced(Callback):
    """Notes whether the step was traced to an operator."""

    found = False

    def on_run_start(self, event: events.RunStart) -> None:
        self._run = event.run

    def on_diagnosis(self, event: events.DiagnosisEvent) -> None:
        self.found = findings_of(event.incident, self._run) is not None


def saved(
    run_dir: Path, case: Any, *, traced: Traced | None = None, **settings: Any
) -> tuple[Incident, Path]:
    """Run one step of a failure with a SnapshotSaver; returns the incident and its directory."""
    model = built(case)
    batches = case.batch()
    callbacks = [NanCallback(), SnapshotSaver(**settings), *([] if traced is None else [traced])]
    with Sentinel(
        model, case.optimizer(model), callbacks=callbacks, run_dir=run_dir, forward=case.forward
    ) as sentinel:
        try:
            for batch in sentinel.steps(
                batches if case.accumulate > 1 else [batches], accumulate=case.accumulate
            ):
                sentinel.backward(case.forward(model, batch))
                if case.after_backward is not None:
                    case.after_backward(model)
                sentinel.step()
        except TrainingAborted:
            pass
    (incident,) = sentinel.incidents
    return incident, run_dir / "incidents" / incident.id


def failure(forward: Any, batch: Any, model: Any = lambda: torch.nn.Linear(4, 4), **more: Any) -> Any:
    """A failure made up in a test."""
    fields: dict[str, Any] = {
        "forward": forward,
        "batch": lambda: batch,
        "model": model,
        "prepare": None,
        "after_backward": None,
        "accumulate": 1,
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    }
    return SimpleNamespace(**{**fields, **more})


def ran(program, *arguments):
    """Run a program in this process; returns its exit code and what it printed."""
    out, before = io.StringIO(), sys.argv
    try:
        sys.argv = [str(program), *arguments]
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
            runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.argv = before
        torch.use_deterministic_algorithms(False)
        sys.path[:] = [entry for entry in sys.path if entry != str(Path.cwd())]
    return end.value.code, out.getvalue()


def header_of(program):
    """The comments of a program, as running text."""
    lines = program.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
