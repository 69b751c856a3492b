"""The scripts under examples/, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsentinel import Action, Kind, Outcome
from gradsentinel.store import RunDirectory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MAX_LINES = {"ddp.py": 90, "fsdp2.py": 90}
MAX_LINES_ELSE = 40


@pytest.fixture
def run_example(tmp_path):
    def run(name: str) -> str:
        done = subprocess.run(  # noqa: S603 - our own script
            [sys.executable, EXAMPLES / name],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_plain_loop_drops_the_three_bad_steps_and_goes_on(run_example, tmp_path):
    printed = run_example("plain_loop.py").splitlines()
    steps = {int(line.split()[1]): line.split() for line in printed if line.startswith("step ")}
    assert steps[60] == ["step", "60", "loss", "nan", "skip"]
    assert {step for step, words in steps.items() if words[-1] == "skip"} == {60, 75, 90}
    assert {words[-1] for step, words in steps.items() if step not in {60, 75, 90}} == {"continue"}
    assert float(steps[100][3]) < 0.6 * float(steps[0][3])
    assert "all weights finite: True" in printed

    incident, overflow, flip = RunDirectory(tmp_path / "runs" / "plain").read_incidents()
    assert (overflow.step, overflow.kind) == (75, Kind.NONFINITE_LOSS)
    assert (flip.step, flip.kind, flip.where) == (90, Kind.MAGNITUDE, "head.weight")
    assert (incident.step, incident.kind) == (60, Kind.NONFINITE_INPUT)
    assert (incident.action, incident.outcome) == (Action.SKIP, Outcome.SKIPPED)
    assert [(sample.position, sample.field) for sample in incident.samples] == [(7, "weight")]
    assert f"{incident.id}: {incident.message}" in printed


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_can_be_read_at_a_glance(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES.get(script.name, MAX_LINES_ELSE)
