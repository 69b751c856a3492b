"""The campaign's runs in Lightning and Megatron-Core."""

import json
import logging

import pytest

from gradsentinel.campaign.plan import impossible
from gradsentinel.campaign.pool import run as run_pool
from gradsentinel.campaign.report import results
from gradsentinel.campaign.trial import Trial, run_trial

FACTS = {"command": "", "form": "tiny", "seed": 1, "jobs": 1, "seconds": 1.0, "left_out": {}}


def trial(workload, *, count, every, policies):
    return Trial(
        workload=workload, number=0, seed=1, first=0, count=count, every=every, policies=tuple(policies)
    )


@pytest.mark.slow
def test_lightning_runs_get_the_same_faults_and_survive_them(tmp_path):
    pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    one = trial("lightning", count=2, every=12, policies=("clean", "gradsentinel", "nothing"))
    run_trial(one, tmp_path, one.policies)
    table = results([one], tmp_path, FACTS)["tables"]["lightning"]
    assert table["gradsentinel"]["nonfinite"] == table["gradsentinel"]["noticed"] == 2
    assert table["gradsentinel"]["spoiled"] == 0
    assert table["gradsentinel"]["interruptions"] == 0
    assert table["gradsentinel"]["ruined"] == 0
    assert table["nothing"]["ruined"] == 1
    assert table["clean"]["useful"] == 1.0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(impossible("megatron") is not None, reason=str(impossible("megatron")))
def test_megatron_runs_die_of_a_check_and_not_under_guard(tmp_path):
    one = trial("megatron", count=1, every=6, policies=("clean", "gradsentinel", "megatron"))
    assert run_pool([one], tmp_path, jobs=1, hang=600, done=lambda _: None) == []
    found = results([one], tmp_path, FACTS)["tables"]["megatron"]
    assert found["gradsentinel"]["interruptions"] == 0
    assert found["megatron"]["interruptions"] == 2  # bad data kills it again after the restart
    assert found["gradsentinel"]["rank_right"] == {"right": 1, "of": 1}
    weights = {p: json.loads(one.file(tmp_path, p).read_text())["weights"] for p in one.policies}
    # Dropping the step leaves the weights that a job has which was started again without the batch.
    assert weights["gradsentinel"] == weights["megatron"] != weights["clean"]
