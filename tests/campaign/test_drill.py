"""Fire drills of scripts that know nothing of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gradsentinel import Kind, NanCallback, Sentinel, ambient
from gradsentinel.campaign.drill import Drill, Drilling, hold
from gradsentinel.campaign.drill_faults import DRILLS
from gradsentinel.cli import app
from gradsentinel.errors import ConfigurationError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SCRIPT = """
import sys
import torch
from torch import nn
from gradsentinel import MagnitudeCallback, NanCallback, Rollback, Sentinel

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(int(sys.argv[1]))]
kept = [(x.clone(), y.clone()) for x, y in data]

def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip"), Rollback()]
with Sentinel(model, optimizer, callbacks=callbacks, run_dir="run", forward=loss_of) as sentinel:
    for batch in sentinel.steps(data):
        sentinel.backward(loss_of(model, batch))
        sentinel.step(max_norm=1.0)
assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(data, kept))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("fault", "place", "kind", "cause"),
    [
        ("nan-gradient", None, Kind.NONFINITE_GRADIENT, None),
        ("inf-gradient", None, Kind.NONFINITE_GRADIENT, None),
        ("nan-activation", None, Kind.NONFINITE_LOSS, None),
        ("nan-sample", None, Kind.NONFINITE_INPUT, "data"),
        ("inf-sample", None, Kind.NONFINITE_INPUT, "data"),
        ("overflow", "2", Kind.NONFINITE_LOSS, "precision"),
    ],
)
def test_a_watched_script_survives_and_is_told_what_it_was(script, fault, place, kind, cause):
    drill = Drill(fault=fault, step=5, place=place)
    verdict = hold(drill, script, ["12"])
    assert verdict.survived is True
    assert verdict.exit_code == 0
    assert {one.step for one in drill.injected} == {5}
    (incident,) = drill.incidents
    assert (incident.step, incident.kind) == (5, kind)
    assert cause is None or incident.diagnosis.cause == cause
    assert drill.finite is True
    assert drill.steps == 12


def test_the_same_drill_puts_the_fault_into_the_same_place(script):
    places = []
    for _ in range(2):
        drill = Drill(fault="nan-gradient", step=3, seed=7)
        hold(drill, script, ["8"])
        places.append([(one.where, one.index) for one in drill.injected])
    assert places[0] == places[1]
    assert len(places[0]) == 1


def test_a_place_can_be_named(script):
    drill = Drill(fault="nan-gradient", step=3, place="2.*")
    assert hold(drill, script, ["8"]).survived
    assert drill.injected[0].where in {"2.weight", "2.bias"}
    assert drill.incidents[0].tensors[0].name == drill.injected[0].where


def test_a_step_that_is_never_reached_is_no_success(script):
    verdict = hold(Drill(fault="nan-gradient", step=50), script, ["8"])
    assert verdict.exit_code == 2
    assert "step 50 was never reached: the script made 8 steps" in verdict.said


def test_a_script_without_a_sentinel_is_told_so(tmp_path):
    script = tmp_path / "bare.py"
    script.write_text("print('nothing watches me')\n")
    verdict = hold(Drill(fault="nan-gradient", step=0), script, [])
    assert verdict.exit_code == 2
    assert "made no sentinel" in verdict.said


def test_a_script_that_dies_of_the_fault_has_not_survived(script, capsys):
    strict = SCRIPT.replace("import Magnitude", "import Skip, Magnitude")
    strict = strict.replace("Rollback()]", "Skip(max_skips=0)]")
    script.write_text(strict)
    verdict = hold(Drill(fault="nan-gradient", step=4), script, ["8"])
    assert verdict.exit_code == 1
    assert "not survived: the run was stopped" in verdict.said


def test_a_script_that_breaks_by_itself_before_is_told_apart(script, capsys):
    verdict = hold(Drill(fault="nan-gradient", step=4), script, ["many"])
    assert verdict.exit_code == 2
    assert "ValueError" in verdict.said


def test_a_fault_that_nobody_notices_has_not_been_survived(script):
    script.write_text(SCRIPT.replace('MagnitudeCallback(max_global_norm=1e3, action="skip"), ', ""))
    drill = Drill(fault="flip-gradient", step=4)
    verdict = hold(drill, script, ["8"])
    assert len(drill.injected) == 1
    assert verdict.exit_code == 1
    assert "nobody noticed" in verdict.said
    assert verdict.notes


def test_a_fault_that_does_not_fit_is_answered_with_the_nearest(script):
    verdict = hold(Drill(fault="nan-gradient", step=3, place="0.wieght"), script, ["8"])
    assert verdict.exit_code == 2
    assert "'0.weight'" in verdict.said


def test_unknown_faults_and_scripts_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nan-gradient, inf-gradient"):
        Drill(fault="nan", step=0)
    with pytest.raises(ConfigurationError, match="there is no script"):
        hold(Drill(fault="nan-gradient", step=0), tmp_path / "missing.py", [])


def test_nothing_of_a_drill_is_left_in_the_process(script):
    before = list(sys.argv), list(sys.path)
    hold(Drill(fault="nan-gradient", step=3), script, ["8"])
    assert (sys.argv, sys.path) == before
    assert ambient.callbacks() == []


def test_a_run_in_which_no_fault_is_due_is_bit_for_bit_as_without_the_drill():
    def train(extra):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with Sentinel(model, optimizer, callbacks=[NanCallback(), *extra]) as sentinel:
            for batch in sentinel.steps([torch.randn(4, 3) for _ in range(6)]):
                sentinel.backward(model(batch).square().mean())
                sentinel.step()
        return [p.detach().clone() for p in model.parameters()]

    drill = Drill(fault="nan-activation", step=100)
    assert all(torch.equal(a, b) for a, b in zip(train([]), train([Drilling(drill=drill)]), strict=True))


def test_the_command_lists_the_faults_and_says_what_came_of_one(script):
    listed = CliRunner().invoke(app, ["drill", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in DRILLS)
    done = CliRunner().invoke(
        app, ["drill", str(script), "--fault", "nan-gradient", "--step", "5", "--", "9"]
    )
    assert done.exit_code == 0, done.output
    assert "put in   gradient" in done.stdout
    assert "found    step 5, nonfinite_gradient" in done.stdout
    assert "Survived: the script ran to its end" in done.stdout
    wrong = CliRunner().invoke(app, ["drill", str(script), "--fault", "cosmic-ray"])
    assert wrong.exit_code == 2
    assert CliRunner().invoke(app, ["drill"]).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "step", "kind"),
    [
        ("plain_loop.py", "nan-gradient", 10, "nonfinite_gradient"),
        ("lightning_gpt.py", "nan-sample", 5, "nonfinite_input"),
        # It has a fault of its own in that step, and expects no further incident.
        ("hf_trainer.py", "nan-activation", 20, "nonfinite_loss"),
    ],
)
def test_the_examples_survive_a_drill(name, fault, step, kind, tmp_path):
    done = subprocess.run(  # noqa: S603 - our own scripts
        [*(sys.executable, "-m", "gradsentinel", "drill", str(EXAMPLES / name)),
         *("--fault", fault, "--step", str(step))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"found    step {step}, {kind}" in done.stdout
    assert done.stdout.rstrip().endswith("Survived: the script ran to its end, and its state is finite.")
