"""Levels of many numbers at once: learnt from healthy values only, without waiting for the device."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.measures import bands, windows
from gradsentinel.measures.bands import Life, Robust
from gradsentinel.measures.levels import Levels
from gradsentinel.measures.windows import Look, locate

HEALTHY = (3.0, 0.01, 1e6)
SETTLED = 200
"""More steps than the window has places: what is expected is computed anew in every 16th only."""


def levels(**settings):
    return Levels(**{"limit": 5.0, "floor": math.log(5), "warmup": 10, **settings})


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


def usual(found, step):
    """What is expected, by its factor to the healthy level, and what a value as usual is taken for."""
    judged = found.judge(step, values(step))
    return (judged.center.exp() / torch.tensor(HEALTHY)).tolist(), judged.scores.tolist()


def scores(found, start, rows):
    """The score of the first number, fed with these factors of its healthy level."""
    told = []
    for place, row in enumerate(rows):
        changed = values(start + place)
        changed[0] *= row
        told.append(found.judge(start + place, changed).scores[0].item())
    return told


def test_each_number_is_compared_with_its_own_past():
    found = taught()
    judged = found.judge(60, values(60))
    assert judged.score.item() < 1
    assert judged.center.exp().tolist() == pytest.approx(HEALTHY, rel=0.2)
    spoilt = values(61)
    spoilt[1] *= 30  # still tiny next to the others
    judged = found.judge(61, spoilt)
    assert judged.score.item() > 1
    assert judged.scores.argmax().item() == 1
    assert found.judge(62, values(62)).score.item() < 1


def test_the_rule_is_that_of_the_global_norm(monkeypatch):
    monkeypatch.setattr(windows, "_TAIL", bands._TAIL)
    monkeypatch.setattr(windows, "_TAIL_DEVIATIONS", bands._TAIL_DEVIATIONS)
    series = torch.randn(7, 128, generator=torch.Generator().manual_seed(3)).mul(0.4)
    series += torch.arange(128) * torch.linspace(-0.02, 0.02, 7).unsqueeze(1)
    for count in (30, 128):
        place = locate(series, torch.full((7,), count), Look(128, torch.device("cpu")))
        for number, row in enumerate(series[:, -count:]):
            band = Robust()(row.exp().tolist(), Life())
            assert place.center[number].item() == pytest.approx(math.log(band.center), abs=1e-3)
            assert place.spread[number].item() == pytest.approx(band.spread, rel=0.05)


def test_too_small_is_no_alarm_and_not_learnt():
    found = taught()
    before = known(found)["number"]
    small = values(60)
    small[0] *= 1e-6
    assert found.judge(60, small).score.item() < 1
    assert known(found)["number"][0] == before[0]


@pytest.mark.slow
@given(st.sampled_from([math.nan, math.inf, 0.0, 1e30, 1e-30]), st.integers(0, 2), st.integers(1, 7))
def test_what_is_outside_leaves_no_trace(bad, place, times):
    found, twin = taught(), taught()
    for step in range(times):
        spoilt = values(60 + step)
        spoilt[place] = bad
        judged = found.judge(60 + step, spoilt)
        assert math.isfinite(judged.score.item())
        others = values(60 + step)
        others[place] = 0.0
        twin.judge(60 + step, others)
    for name, part in known(found).items():
        assert all(math.isfinite(number) for number in torch.tensor(part).flatten().tolist())
        if name not in {"streak", "total", "above", "often", "values"}:
            assert part == known(twin)[name]


def test_a_nan_never_reaches_what_is_kept():
    found = taught(SETTLED)
    for step in range(SETTLED, 2 * SETTLED):
        found.judge(step, torch.full((3,), math.nan if step % 2 else math.inf))
    assert found._ring.isfinite().all()
    assert known(found)["number"] == [SETTLED] * 3
    assert scores(found, 2 * SETTLED, [30.0])[0] > 1


@pytest.mark.parametrize("length", [2, 4, 7])
def test_a_burst_does_not_mask_the_next_spike(length):
    found = taught(SETTLED)
    told = scores(found, SETTLED, [*[300.0] * length, *[1.0] * 4, 10.0, 1.0])
    assert [score > 1 for score in told] == [True] * length + [False] * 4 + [True, False]
    assert found.state_dict()["values"][0].exp().max() < 2 * HEALTHY[0]  # not one of them was learnt


def test_many_bursts_widen_nothing():
    found, twin = taught(SETTLED), taught(SETTLED)
    rows = ([300.0] * 4 + [1.0] * 28) * 10
    told = scores(found, SETTLED, rows)
    assert [score > 1 for score in told] == [row > 1 for row in rows]
    scores(twin, SETTLED, [0.0 if row > 1 else 1.0 for row in rows])
    assert usual(found, 600) == usual(twin, 600)


def test_after_a_long_burst_the_old_level_counts_again():
    found = taught(SETTLED)
    told = scores(found, SETTLED, [*[300.0] * 20, *[1.0] * 3, 30.0])
    assert [score > 1 for score in told] == [True] * 8 + [False] * 15 + [True]


def test_values_that_grow_are_no_new_level_before_long():
    found = taught(SETTLED)
    told = scores(found, SETTLED, [10 * 1.4 ** min(step, 32) for step in range(60)])
    assert [score > 1 for score in told[:32]] == [True] * 32
    assert max(told[42:]) < 1  # where it ends it is one


def test_a_slow_boil_does_not_widen_the_band():
    found = taught(SETTLED)
    rows = [1.02**step for step in range(300)]
    told = scores(found, SETTLED, rows)
    assert max(told) < 1
    assert scores(found, 500, [rows[-1] * 8])[0] > 1


def test_a_falling_learning_rate_takes_the_level_along():
    found = taught(SETTLED)
    rows = [0.985**step for step in range(300)]
    assert max(scores(found, SETTLED, rows)) < 1
    assert scores(found, 500, [rows[-1] * 15])[0] > 1


def test_the_noise_of_a_burst_in_the_warm_up_is_outvoted():
    found = levels()
    scores(found, 0, [300.0 if step == 5 else 1.0 for step in range(40)])
    assert scores(found, 40, [30.0])[0] > 1


def test_nothing_is_told_during_the_warm_up():
    found = levels()
    for step in range(10):
        assert found.judge(step, values(step) * 10.0**step).score.item() == 0


@pytest.mark.parametrize("before", [60, SETTLED, SETTLED + 7])
def test_a_new_level_is_accepted_after_the_patience(before):
    found = taught(before, patience=4)
    scores = [found.judge(before + step, values(step) * 100).score.item() for step in range(30)]
    assert [score > 1 for score in scores] == [True] * 4 + [False] * 26
    spike = values(31) * 100
    spike[2] *= 30
    assert found.judge(before + 30, spike).scores.argmax().item() == 2
    assert found.judge(before + 31, spike).score.item() > 1


def test_a_lower_level_is_accepted_too():
    found = taught(SETTLED)
    assert max(scores(found, SETTLED, [0.01] * 40)) < 1
    assert scores(found, 240, [1.0])[0] > 1


def test_what_comes_and_goes_becomes_part_of_the_run():
    found = taught(SETTLED)
    told = scores(found, SETTLED, [20.0 if step % 3 == 0 else 1.0 for step in range(600)])
    assert told[0] > 1
    assert max(told[300:]) < 1


def test_undone_steps_leave():
    found, twin = taught(48), taught(48)
    for step in range(48, 64):
        found.judge(step, values(step) * 2)
    found.forget_from(48)
    assert known(found) == known(twin)
    found.forget_from(0)
    assert found.judge(0, values()).score.item() == 0


def test_what_had_left_the_window_is_back_after_a_rollback():
    found, twin = taught(304), taught(304)
    scores(found, 304, [2.0] * 100)
    found.forget_from(304)
    assert known(found)["number"] == [304] * 3
    rows = [1.0] * 40
    assert scores(found, 304, rows) == scores(twin, 304, rows)


def test_what_is_known_survives_a_rollback_past_all_values():
    found = taught(304)
    scores(found, 304, [3.0] * 400)
    found.forget_from(304)
    expected, told = usual(found, 304)
    assert expected == pytest.approx([1.0] * 3, rel=0.2)
    assert max(told) < 1
    assert scores(found, 305, [30.0])[0] > 1
    assert max(scores(found, 306, [1.0] * 60)) < 1


def test_a_dropped_step_teaches_nothing():
    found, twin = taught(SETTLED), taught(SETTLED)
    spoilt = values(SETTLED)
    spoilt[0] *= 30
    found.judge(SETTLED, spoilt)
    found.withdraw(SETTLED)
    assert known(found)["number"] == known(twin)["number"]
    assert known(found)["streak"] == [1, 0, 0]  # it still counts towards a new level
    found.judge(SETTLED + 1, values(1))
    found.withdraw(SETTLED)  # too late: another one was judged
    assert known(found)["number"] == [SETTLED + 1] * 3


def test_dropping_what_is_outside_does_not_put_off_a_new_level():
    found = taught(SETTLED)
    told = []
    for step in range(12):
        told += scores(found, SETTLED + step, [100.0])
        if told[-1] > 1:
            found.withdraw(SETTLED + step)
    assert [score > 1 for score in told] == [True] * 8 + [False] * 4


def test_nothing_is_learnt_from_an_overflow():
    found = taught(SETTLED)
    before = known(found)
    judged = found.judge(SETTLED, values() * 1e4, torch.tensor([1.0]))
    assert judged.score.item() == 0
    after = known(found)
    assert {**after, "calls": 0} == {**before, "calls": 0}
    assert found.judge(SETTLED + 1, values() * 1e4, torch.tensor([0.0])).score.item() > 1


@pytest.mark.parametrize("steps", [60, SETTLED + 7])
def test_a_restart_changes_nothing(steps):
    found, other = taught(steps), levels()
    scores(found, steps, [300.0] * 3)  # a streak that is not over
    other.load_state_dict(found.state_dict())
    rows = [300.0] * 4 + [1.0] * 40 + [300.0] * 20
    assert scores(found, steps + 3, rows) == scores(other, steps + 3, rows)


def test_a_restart_with_another_window_takes_what_fits():
    found = taught(SETTLED)
    for window in (32, 512):
        other = levels(window=window)
        other.load_state_dict(found.state_dict())
        expected, told = usual(other, SETTLED)
        assert expected == pytest.approx([1.0] * 3, rel=0.2)
        assert max(told) < 1
        assert max(scores(other, SETTLED + 1, [1.0] * 60)) < 1
        assert scores(other, SETTLED + 61, [30.0])[0] > 1


def spoilt_states():
    good = taught().state_dict()
    old = dict.fromkeys(("mean", "variance", "number", "streak"), torch.zeros(3))
    return {
        "earlier version": old,
        "sizes": {**good, "center": torch.zeros(4)},
        "rows": {**good, "values": torch.zeros(2, 8)},
        "not finite": {**good, "values": good["values"] * math.nan},
        "no tensors": dict.fromkeys(good, "?"),
    }


@pytest.mark.parametrize("what", list(spoilt_states()))
def test_a_state_that_is_none_is_refused_in_the_log(what, caplog):
    other = levels()
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        other.load_state_dict(spoilt_states()[what])
    assert "learnt anew" in caplog.text
    assert other.state_dict() == {}
    assert other.judge(0, values()).score.item() == 0


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


def test_a_number_that_is_always_zero_is_never_told():
    found = levels()
    for step in range(SETTLED):
        row = values(step)
        row[1] = 0.0
        judged = found.judge(step, row)
        assert judged.scores[1].item() == 0
        assert judged.scores.isfinite().all()
    assert known(found)["number"] == [SETTLED, 0, SETTLED]
    for step in range(9):  # and once it is alive it has a warm-up of its own
        assert found.judge(SETTLED + step, values(step)).score.item() < 1


@pytest.mark.parametrize("pause", [2, 10, 40])
def test_a_number_that_is_alive_now_and_then_is_judged_by_when_it_was(pause):
    found = levels()
    for step in range(30 * pause):
        row = values(step)
        row[0] *= step % pause == 0
        assert found.judge(step, row).score.item() < 1
    assert known(found)["number"][0] == 30
    assert scores(found, 30 * pause, [30.0])[0] > 1
