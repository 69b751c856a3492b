"""The scripts under examples/, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsentinel import Action, Kind, Outcome
from gradsentinel.store import RunDirectory

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MAX_LINES = {"ddp.py": 90, "fsdp2.py": 90, "ladder.py": 70, "megatron_gpt.py": 225, "cuda_on_cpu.py": 125}
MAX_LINES |= {"npu_smoke.py": 570, "lightning_gpt.py": 50, "hf_trainer.py": 45, "accelerate_loop.py": 50}
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


@pytest.mark.slow
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
    found = overflow.diagnosis  # the product that overflowed, not the softmax that met the infinities
    assert (found.cause, found.op, found.module) == ("precision", "aten.mm.default", "head")
    assert (flip.step, flip.kind, flip.where) == (90, Kind.MAGNITUDE, "head.weight")
    assert (incident.step, incident.kind) == (60, Kind.NONFINITE_INPUT)
    assert (incident.action, incident.outcome) == (Action.SKIP, Outcome.SKIPPED)
    assert [(sample.position, sample.field) for sample in incident.samples] == [(7, "weight")]
    assert f"{incident.id}: {incident.message}" in printed


@pytest.mark.slow
def test_the_ladder_walks_through_every_rung_and_says_what_each_cost(run_example, tmp_path):
    printed = run_example("ladder.py").splitlines()
    steps = [line.split()[1:4] for line in printed if line.startswith("  step ")]
    assert [(step, outcome) for step, outcome, _ in steps[:4]] == [
        ("20", "retried"),
        ("40", "rescued"),
        ("60", "skipped"),
        ("80", "rolled_back"),
    ]
    assert [outcome for _, outcome, _ in steps[4:]] == ["skipped", "skipped", "aborted"]
    assert all(float(seconds) >= 0 for _, _, seconds in steps)
    assert "stopped; uncaught, the exit code would be 75" in printed
    assert "starts at step 80, batch 91 of the data" in printed
    assert sum("snapshots took" in line for line in printed) == 2
    assert float(printed[-1].split()[-1]) < 2.5
    outcomes = [incident.outcome for incident in RunDirectory(tmp_path / "runs" / "ladder").read_incidents()]
    assert outcomes == [outcome for _, outcome, _ in steps]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_can_be_read_at_a_glance(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES.get(script.name, MAX_LINES_ELSE)
