"""The examples of the adapters, run as a user runs them: each heals what goes wrong in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsentinel import Kind, Outcome
from gradsentinel.store import RunDirectory

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture
def run_example(tmp_path):
    def run(name: str) -> list[str]:
        done = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, EXAMPLES / name],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "run_dir", "steps", "count"),
    [
        ("lightning_gpt.py", "runs/lightning/gradsentinel", (20, 40), 60),
        ("accelerate_loop.py", "runs/accelerate", (10, 20), 30),
    ],
)
def test_a_transient_fault_is_retried_and_a_bad_record_dropped_and_named(
    run_example, tmp_path, script, run_dir, steps, count
):
    printed = run_example(script)
    assert printed[-1] == "all weights finite: True"
    loss = next(line.split() for line in printed if line.startswith("loss "))
    assert loss[2:] == ["after", str(count), "steps"]
    assert float(loss[1]) < 3.8  # it has learned something: it began at about 4.5
    flash, record = RunDirectory(tmp_path / run_dir).read_incidents()
    assert (flash.step, flash.outcome) == (steps[0], Outcome.RETRIED)
    assert (record.step, record.outcome, record.kind) == (steps[1], Outcome.SKIPPED, Kind.NONFINITE_INPUT)
    assert [sample.field for sample in record.samples] == ["weight"]


@pytest.mark.slow
def test_the_trainers_example_retries_and_says_so_in_the_trainers_log(run_example, tmp_path):
    printed = run_example("hf_trainer.py")
    assert "after step 21: loss nan, retry" in printed
    assert printed[-1] == "all weights finite: True"
    (incident,) = RunDirectory(tmp_path / "runs" / "huggingface" / "gradsentinel").read_incidents()
    assert (incident.step, incident.outcome) == (20, Outcome.RETRIED)
    assert (tmp_path / "runs" / "huggingface" / "checkpoint-40" / "gradsentinel-rank0").is_dir()
