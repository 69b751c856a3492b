"""Running levels of many numbers at once: learnt from healthy values only, without waiting for the device."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.measures.levels import Levels

HEALTHY = (3.0, 0.01, 1e6)


def levels(**settings):
    return Levels(**{"limit": 6.0, "floor": math.log(5), "warmup": 10, **settings})


def values(seed=0, scale=HEALTHY, sigma=0.1):
    noise = torch.randn(len(scale), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(scale) * (sigma * noise).exp()


def taught(steps=60, **settings):
    found = levels(**settings)
    for step in range(steps):
        found.judge(step, values(step))
    return found


def known(found):
    return {name: part.tolist() for name, part in found.state_dict().items()}


def test_each_number_is_compared_with_its_own_past():
    found = taught()
    judged = found.judge(60, values(60))
    assert judged.score.item() < 1
    assert judged.mean.exp().tolist() == pytest.approx(HEALTHY, rel=0.2)
    spoilt = values(61)
    spoilt[1] *= 30  # still tiny next to the others
    judged = found.judge(61, spoilt)
    assert judged.score.item() > 1
    assert judged.scores.argmax().item() == 1
    assert found.judge(62, values(62)).score.item() < 1


def test_too_small_is_no_alarm_and_not_learnt():
    found = taught()
    before = known(found)["mean"]
    small = values(60)
    small[0] *= 1e-6
    assert found.judge(60, small).score.item() < 1
    assert known(found)["mean"][0] == before[0]


@pytest.mark.slow
@given(st.sampled_from([math.nan, math.inf, 0.0, 1e30, 1e-30]), st.integers(0, 2), st.integers(1, 7))
def test_what_is_outside_leaves_no_trace(bad, place, times):
    found = taught()
    before = known(found)
    for step in range(times):
        spoilt = values(60 + step)
        spoilt[place] = bad
        judged = found.judge(60 + step, spoilt)
        assert math.isfinite(judged.score.item())
    after = known(found)
    for part in ("mean", "variance", "number"):
        assert after[part][place] == before[part][place]
        assert all(math.isfinite(number) for number in after[part])


def test_nothing_is_told_during_the_warm_up():
    found = levels()
    for step in range(10):
        assert found.judge(step, values(step) * 10.0**step).score.item() == 0


def test_a_new_level_is_accepted_after_the_patience():
    found = taught(patience=4)
    scores = [found.judge(60 + step, values(step) * 100).score.item() for step in range(30)]
    assert [score > 1 for score in scores] == [True] * 4 + [False] * 26


def test_undone_steps_leave():
    found, twin = taught(48), taught(48)
    for step in range(48, 64):
        found.judge(step, values(step) * 2)
    found.forget_from(48)
    assert known(found) == known(twin)
    found.forget_from(0)
    assert found.judge(0, values()).score.item() == 0


def test_a_restart_changes_nothing():
    found, other = taught(), levels()
    other.load_state_dict(found.state_dict())
    for step in range(60, 80):
        one, two = found.judge(step, values(step)), other.judge(step, values(step))
        assert one.scores.tolist() == two.scores.tolist()


def test_another_number_of_values_begins_anew():
    found = taught()
    assert found.judge(60, values(0, HEALTHY[:2])).score.item() == 0
    assert found.judge(61, torch.zeros(0)).score.item() == 0


def test_low_precision_norms_are_compared_in_float32():
    found = levels()
    for step in range(40):
        judged = found.judge(step, values(step, HEALTHY[:2]).to(torch.bfloat16))
    assert judged.scores.dtype is torch.float32
    assert judged.score.item() < 1
