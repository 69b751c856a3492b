"""A tiny campaign, from the trials to the page."""

import io
import json
import shutil

import pytest
from rich.console import Console

from gradsentinel.campaign.conduct import Orders, conduct
from gradsentinel.campaign.plan import LOOP
from gradsentinel.campaign.pool import run as run_pool
from gradsentinel.campaign.probe import Probe
from gradsentinel.campaign.report import results
from gradsentinel.campaign.trial import Trial, run_trial
from gradsentinel.campaign.workloads.text import Text, loss_of
from gradsentinel.errors import ConfigurationError, StoreError

TRIAL = Trial(workload="plain", number=0, seed=4, first=0, count=3, every=12, policies=("healthy", *LOOP))
FACTS = {"command": "", "form": "tiny", "seed": 4, "jobs": 1, "seconds": 1.0, "left_out": {}}


def quiet():
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    run_trial(TRIAL, folder, TRIAL.policies)
    return folder


def kept(folder, policy):
    return json.loads(TRIAL.file(folder, policy).read_text())


def without_clock(data):
    return {key: value for key, value in data.items() if key != "clock"}


@pytest.mark.slow
def test_a_second_run_gives_the_same_faults_and_decisions_in_any_order(first, tmp_path):
    run_trial(TRIAL, tmp_path, TRIAL.policies[::-1])
    for policy in TRIAL.policies:
        assert without_clock(kept(first, policy)) == without_clock(kept(tmp_path, policy))
    found = [results([TRIAL], folder, FACTS) for folder in (first, tmp_path)]
    assert found[0]["decisions"] == found[1]["decisions"]


def test_every_policy_gets_the_same_faults(first):
    assert len({json.dumps(kept(first, policy)["faults"]) for policy in TRIAL.policies}) == 1


def test_a_guarded_run_without_faults_is_bit_for_bit_the_unguarded_one(first):
    assert kept(first, "healthy")["weights"] == kept(first, "clean")["weights"]
    assert kept(first, "healthy")["incidents"] == []


def test_the_policies_do_what_they_are_named_for(first):
    table = results([TRIAL], first, FACTS)["tables"]["loops"]
    assert table["clean"]["interruptions"] == 0
    assert table["clean"]["useful"] == 1.0
    nonfinite = table["nothing"]["nonfinite"]
    assert nonfinite >= 2
    assert table["nothing"]["ruined"] == 1
    assert table["checkpoint"]["interruptions"] >= 2  # an overflow is there again after the restart
    assert table["checkpoint"]["attempts"] > table["checkpoint"]["steps"]
    assert table["gradsentinel"]["interruptions"] == 0
    assert table["gradsentinel"]["noticed"] == nonfinite
    assert table["gradsentinel"]["spoiled_by_nonfinite"] == 0
    assert table["skip"]["spoiled_by_nonfinite"] == 0
    assert table["gradsentinel"]["outcomes"].get("rescued", 0) >= 1  # what is dropped without forward=
    assert table["skip"]["outcomes"].get("rescued", 0) == 0


def test_a_job_with_a_scaler_dies_and_is_started_again(tmp_path):
    trial = Trial(
        workload="scaler", number=0, seed=1, first=0, count=2, every=8, policies=("clean", "checkpoint")
    )
    run_trial(trial, tmp_path, trial.policies)
    table = results([trial], tmp_path, FACTS)["tables"]["loops"]
    assert table["checkpoint"]["nonfinite"] >= 1
    assert table["checkpoint"]["interruptions"] >= 2
    assert table["checkpoint"]["ruined"] == 0


def test_a_file_of_another_campaign_is_refused(first, tmp_path):
    other = Trial(**{**TRIAL.as_dict(), "seed": 5})
    shutil.copytree(first / "trials", tmp_path / "trials")
    with pytest.raises(StoreError, match="another campaign"):
        results([other], tmp_path, FACTS)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_campaign_that_was_interrupted_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    orders = Orders(form="tiny", seed=1, folder=tmp_path / "out", jobs=2, only=("bits",))
    whole = conduct(orders, quiet())
    assert whole["failed"] == []
    trials = sorted((tmp_path / "out" / "trials").glob("*.json"))
    assert [path.name for path in trials] == [
        f"bits-000-{policy}.json" for policy in ("clean", "gradsentinel", "nothing")
    ]
    with pytest.raises(ConfigurationError, match="--resume"):
        conduct(orders, quiet())
    trials[1].unlink()
    before = trials[0].stat().st_mtime_ns
    again = conduct(Orders(**{**vars(orders), "resume": True, "docs": tmp_path / "docs"}), quiet())
    assert trials[0].stat().st_mtime_ns == before  # what is there is not run again
    assert again["decisions"] == whole["decisions"]
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "## Flipped bits of float32" in page
    assert json.loads((tmp_path / "docs" / "results.json").read_text())["decisions"] == whole["decisions"]
    assert (tmp_path / "docs" / "images" / "campaign-bits.svg").is_file()
    with pytest.raises(ConfigurationError, match="another campaign"):
        conduct(Orders(**{**vars(orders), "resume": True, "seed": 2}), quiet())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_that_fails_is_counted_and_the_trial_goes_on(tmp_path):
    # A policy that there is not makes its process fail; the next process runs what is left.
    trial = Trial(**{**TRIAL.as_dict(), "policies": ("no such policy", "clean")})
    done = []
    problems = run_pool([trial], tmp_path, jobs=1, hang=600, done=done.append)
    assert len(problems) == 1
    assert "no such policy: exit code 1" in problems[0]
    assert sum(done) == 2
    assert "failed" in json.loads(trial.file(tmp_path, "no such policy").read_text())
    assert json.loads(trial.file(tmp_path, "clean").read_text())["applied"] == trial.steps


def test_a_loss_scale_of_0_is_measured_as_a_scaler_would_have_it():
    """An unguarded run whose scale collapses ends there; gradients times infinity are no numbers."""
    task = Text(steps=2, seed=1)
    model = task.model()
    optimizer = task.optimizer(model)
    probe = Probe(model, optimizer, loss_of, task.optimizer)
    probe.before(0.0)
    effect = probe.after(0, task.batches()[0])
    assert effect.unchanged
    assert not effect.exact
