"""Which fault happens when."""

from collections import Counter

import pytest
import torch
from torch import nn

from gradsentinel.campaign.kinds import BY_NAME, KINDS, Site
from gradsentinel.campaign.plan import FORMS, trials
from gradsentinel.campaign.schedule import draw, sweep
from gradsentinel.campaign.workloads.text import Text, loss_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.faults import ChangeSetting, FaultPlan, FlipBit


def drawn(seed=1, trials=10):
    return [one for t in range(trials) for one in draw(seed=seed, first=10 * t, count=10, every=100)]


def test_the_same_seed_draws_the_same_faults_and_another_one_others():
    assert drawn() == drawn()
    assert drawn() != drawn(seed=2)


def test_of_ten_faults_six_are_in_the_data_three_of_precision_and_one_of_hardware():
    for trial in range(10):
        families = Counter(one.family for one in draw(seed=3, first=10 * trial, count=10, every=100))
        assert families == {"data": 6, "precision": 3, "hardware": 1}


def test_every_kind_comes_up_before_one_of_its_family_comes_too_often():
    counts = Counter(one.kind for one in drawn(trials=14))
    assert counts.keys() == BY_NAME.keys()
    for family in ("data", "precision", "hardware"):
        of_family = [counts[kind.name] for kind in KINDS if kind.family == family]
        assert max(of_family) - min(of_family) <= 1


def test_there_is_one_fault_in_each_stretch_and_none_in_the_first():
    steps = [one.step for one in draw(seed=5, first=0, count=10, every=100)]
    assert [step // 100 for step in steps] == list(range(1, 11))
    assert all(25 <= step % 100 < 50 for step in steps)


def test_a_kind_is_persistent_or_not_as_it_says():
    for one in drawn(trials=20):
        assert one.persistent in BY_NAME[one.kind].persistence


def test_the_sweep_flips_every_bit_in_each_place_once():
    faults = [one for t in range(4) for one in sweep(first=24 * t, count=24, every=16)]
    site = Site(optimizer=None)
    flips = [one.fault(site) for one in faults]
    assert all(isinstance(flip, FlipBit) for flip in flips)
    assert {(flip.target, flip.bit) for flip in flips} == {
        (target, bit) for target in ("activation", "parameter", "gradient") for bit in range(32)
    }


def test_the_short_form_has_two_hundred_faults_and_the_long_one_two_thousand():
    for form, least in (("short", 200), ("long", 2000)):
        shares = [share for share in FORMS[form] if share.workload != "bits"]
        assert sum(share.trials * share.count for share in shares) >= least
        assert {share.workload for share in shares} >= {"plain", "lightning", "megatron"}


def test_an_unknown_form_or_workload_is_answered_with_those_there_are():
    with pytest.raises(ConfigurationError, match="tiny, small, short, long"):
        trials("huge", 1)
    with pytest.raises(ConfigurationError, match=r"'fairseq'.*plain, bits"):
        trials("tiny", 1, only=("fairseq",))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_can_be_put_into_the_model_it_is_for(kind):
    class Scale:
        scale = 1.0

    task = Text(steps=4, seed=0)
    model = task.model()
    planned = next(
        one for t in range(40) for one in draw(seed=9, first=10 * t, count=10, every=4, kinds=[kind])
    )
    fault = planned.fault(Site(optimizer=task.optimizer(model), scale=Scale()))
    plan = FaultPlan([fault], rank=0)
    batch = task.batches()[0]
    with plan.attach(model), plan.at(planned.step):
        loss_of(model, plan.poison(batch)).backward()
    assert len(plan.log) >= 1
    assert all(p.grad is not None for p in model.parameters())


def test_a_setting_is_wrong_for_its_step_only():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-8)
    plan = FaultPlan([ChangeSetting(steps=(1,), owner=optimizer, name="eps", value=0.0)], rank=0)
    seen = []
    with plan.attach(model):
        seen += [optimizer.param_groups[0]["eps"] for _ in plan.batches([0, 1, 2])]
    assert seen == [1e-8, 0.0, 1e-8]
    with pytest.raises(ValueError, match="has no setting 'epsilon'"):
        ChangeSetting(steps=(1,), owner=optimizer, name="epsilon", value=0.0)
