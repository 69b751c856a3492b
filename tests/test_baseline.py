"""The statistics of a healthy series cannot be poisoned, and follow a real change within a bounded time."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsentinel.measures.bands import History, Robust, Sigma
from gradsentinel.measures.baseline import Baseline

RULES = {"robust": Robust(), "sigma": Sigma(), "history": History()}
anything = st.floats(allow_nan=True, allow_infinity=True, width=64)
mixed = st.one_of(st.floats(0.5, 2.0), st.floats(0.5, 2.0), anything)


def steady(count, *, sigma=0.1, level=1.0, seed=0):
    dice = random.Random(seed)
    return [level * math.exp(dice.gauss(0, sigma)) for _ in range(count)]


def taught(values=None, *, rule=None, first=0, **settings):
    baseline = Baseline(rule or Robust(), **settings)
    for step, value in enumerate(steady(200) if values is None else values, start=first):
        baseline.learn(step, value)
    return baseline


def reopened(baseline, **settings):
    """The same after a restart, the state through JSON."""
    restarted = Baseline(Robust(), **settings)
    restarted.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    return restarted


def flagged(baseline, values, *, first=1000):
    """Which of the values are outside, judged and learnt one after the other."""
    return [number for number, value in enumerate(values) if not baseline.learn(first + number, value)]


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@given(stream=st.lists(mixed, min_size=1, max_size=120))
def test_what_is_outside_never_enters(rule, stream):
    baseline = taught(steady(40), rule=rule, window=32)
    for step, value in enumerate(stream):
        band, before, streak = baseline.expect(), baseline.values, len(baseline.streak)
        entered = baseline.learn(100 + step, value)
        assert entered == (math.isfinite(value) and band.holds(value))
        if not entered and len(baseline.streak) > streak:  # and it did not complete a new level
            assert baseline.values == before
        assert all(math.isfinite(known) for known in baseline.values)


@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=300))
def test_nan_and_inf_leave_no_trace_at_all(stream):
    baseline, twin = taught(), taught()
    assert flagged(baseline, stream) == list(range(len(stream)))
    assert baseline.state_dict() == twin.state_dict()


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@given(burst=st.lists(st.floats(50, 1e30), min_size=1, max_size=7))
def test_a_burst_does_not_mask_the_next_spike(rule, burst):
    baseline, after = taught(rule=rule), steady(12, seed=1)
    bound = baseline.expect().high
    assert flagged(baseline, burst) == list(range(len(burst)))
    assert baseline.expect().high == bound
    assert flagged(baseline, [*after, 60.0]) == [len(after)]


@settings(max_examples=30)
@given(st.floats(4, 1e12), st.integers(2, 12), st.integers(0, 5))
def test_a_new_level_is_accepted_in_time_and_not_before(factor, patience, seed):
    baseline = taught(patience=patience)
    outside = flagged(baseline, steady(100, level=factor, seed=seed))
    assert outside == list(range(len(outside)))
    assert patience <= len(outside) <= 4 * patience
    band = baseline.expect()
    assert band.holds(factor)
    assert not band.holds(100 * factor)


def test_a_band_is_due_whenever_expect_would_compute_it_anew():
    baseline = taught()
    while not baseline.due:
        flagged(baseline, [1.0])
    known = baseline.expect()
    for _ in range(15):
        flagged(baseline, [1.0])
        assert not baseline.due
        assert baseline.band is known  # a full window is looked at anew after 16 values
    flagged(baseline, [1.0])
    assert baseline.due
    for undo in (lambda: baseline.forget_from(1010), lambda: baseline.load_state_dict(baseline.state_dict())):
        baseline.expect()
        undo()
        assert baseline.due
    young = taught(steady(10))
    for step in range(5):
        assert young.due
        young.expect()
        flagged(young, [1.0], first=100 + step)


def test_an_explosion_needs_four_times_the_patience():
    assert len(flagged(taught(), [1e6] * 100)) == 32
    assert len(flagged(taught(), [20.0] * 100)) == 8


def test_what_still_grows_is_no_new_level():
    assert len(flagged(taught(explosion=None), [5 * 1.3**step for step in range(40)])) >= 32


def test_the_old_level_comes_back_after_a_long_burst():
    baseline = taught()
    bound = baseline.expect().high
    flagged(baseline, [20.0] * 15)
    assert baseline.expect().high > 5 * bound
    assert flagged(baseline, steady(20, seed=2), first=2000) == []
    assert baseline.expect().high == pytest.approx(bound, rel=0.2)
    assert flagged(baseline, [20.0], first=3000) == [0]


def test_what_recurs_all_the_time_becomes_part_of_the_run():
    stream = [value * (30 if number % 4 == 0 else 1) for number, value in enumerate(steady(400, seed=3))]
    assert len(flagged(taught(), stream)) < 40
    rare = [value * (30 if number % 40 == 0 else 1) for number, value in enumerate(steady(2000, seed=3))]
    assert len(flagged(taught(), rare)) == 50


def test_an_explosion_among_them_does_not():
    baseline = taught(explosion=100)
    stream = [value * (30 if number % 3 == 0 else 1) for number, value in enumerate(steady(200, seed=3))]
    stream[30:30] = [1e154]
    flagged(baseline, stream)
    assert max(baseline.values) > 20
    assert max(value for _, _, value in baseline.state_dict()["kept"]) < 1e3
    long = taught(explosion=100)
    flagged(long, [1e6] * 20 + [1e154] + [1e6] * 20)
    assert max(long.values) == 1e6


@pytest.mark.parametrize("end", [0.05, 20.0])
def test_a_drift_is_followed(end):
    stream = [value * end ** (number / 1500) for number, value in enumerate(steady(1500, seed=4))]
    assert flagged(taught(), stream) == []


def test_a_divergence_is_not():
    assert len(flagged(taught(), [1.25**step for step in range(60)])) > 20


def test_healthy_noise_of_any_strength_is_quiet():
    for sigma in (0.01, 0.1, 0.5, 1.0):
        baseline = taught(steady(128, sigma=sigma, seed=5))
        assert len(flagged(baseline, steady(3000, sigma=sigma, seed=6))) <= 1


def test_undone_steps_leave():
    baseline, twin = taught(), taught()
    flagged(baseline, [*steady(30, level=2, seed=1), 100.0, *steady(30, level=2, seed=2)])
    baseline.forget_from(1000)
    assert baseline.values == twin.values
    assert baseline.streak == ()
    assert baseline.expect() == reopened(twin).expect()
    baseline.forget_from(150)
    assert baseline.values == taught(steady(200)[:150]).values  # the older ones come back
    baseline.forget_from(0)
    assert (baseline.expect(), baseline.values) == (None, ())


def test_a_new_level_that_was_undone_gives_the_old_one_back():
    baseline, twin = taught(), taught()
    flagged(baseline, [20.0] * 9)
    assert baseline.expect().center == pytest.approx(20)
    baseline.forget_from(1000)
    assert baseline.values == twin.values
    assert baseline.expect() == reopened(twin).expect()


@given(st.integers(0, 80), st.integers(0, 12))
@settings(max_examples=25)
def test_a_restart_changes_nothing(cut, spikes):
    stream = [*steady(60, seed=7), *[30.0] * spikes, *steady(60, seed=8), 50.0]
    baseline, other = taught(steady(60)), taught(steady(60))
    flagged(baseline, stream[:cut])
    flagged(other, stream[:cut])
    restarted, rest = reopened(other), stream[cut:]
    assert flagged(restarted, rest, first=2000) == flagged(baseline, rest, first=2000)
    assert restarted.values == baseline.values
    assert restarted.streak == baseline.streak


def test_a_damaged_state_cannot_poison_it():
    state = taught().state_dict()
    state["kept"][5][2] = math.nan
    state["kept"][6][2] = math.inf
    baseline = Baseline(Robust())
    baseline.load_state_dict(state)
    assert len(baseline) == 198
    assert math.isfinite(baseline.expect().high)


def test_explosions_show_before_the_warm_up_is_over():
    baseline = taught([1.0, 2.0, 1.5])
    band = baseline.expect()
    assert band.early
    assert band.explosion == pytest.approx(2000)
    assert not baseline.learn(3, 1e11)


def test_hardly_anything_is_known_before_the_third_value():
    """So it takes a hundred times as much to be an explosion, and all that is none is learnt."""
    assert Baseline(Robust()).expect() is None
    for values in ([2.0], [2.0, 1.0]):
        band = taught(values).expect()
        assert band.early
        assert band.explosion == band.high == pytest.approx(2e5)
        assert taught(values).learn(2, 1e5)
        assert not taught(values).learn(2, 3e5)
    assert taught([2.0], explosion=None).learn(1, 1e30)


def test_with_eight_values_a_hundred_times_the_largest_is_an_explosion():
    assert taught([1.0, 2.0] * 3 + [1.0]).expect().explosion == pytest.approx(2000)
    assert taught([1.0, 2.0] * 4).expect().explosion == pytest.approx(200)
    assert taught([1.0, 2.0] * 4, explosion=5.0).expect().explosion == pytest.approx(20)


def test_a_leap_during_the_warm_up_is_not_learnt_and_accepted_in_time():
    baseline = taught([1.0, 2.0, 1.5, 1.2])
    assert flagged(baseline, [100.0] * 12) == list(range(8))


def test_of_a_dropped_step_nothing_is_learnt():
    baseline = taught()
    before = baseline.values
    assert not baseline.learn(500, 1.0, healthy=False)
    assert baseline.values == before
    assert not baseline.learn(501, 30.0, healthy=False)  # but a new level may show in dropped steps
    assert baseline.streak == ((501, 30.0),)


def test_norms_of_zero_are_passed_over():
    baseline = taught(positive=True)
    assert not baseline.learn(500, 0.0)
    assert 0.0 not in baseline.values


def test_small_change_next_to_the_first_level_is_no_spike():
    values = [2.0] * 40 + [0.001] * 200
    plain, lenient = taught(values), taught(values, negligible=0.05)
    assert not plain.learn(500, 0.05)
    assert lenient.learn(500, 0.05)
    assert not lenient.learn(501, 0.2)


def test_a_series_knows_when_it_has_become_negligible():
    baseline = taught([2.0] * 40, negligible=0.05)
    assert not baseline.negligible
    flagged(baseline, [0.01] * 200)
    assert baseline.negligible
    assert not taught([2.0] * 40 + [0.01] * 200).negligible


def test_a_gentle_climb_ends_at_the_ceiling():
    climb = [2 * 1.02**step for step in range(400)]
    assert flagged(taught([]), climb) == []
    first = flagged(taught([], ceiling=30.0), climb)[0]
    assert climb[first] == pytest.approx(30 * climb[10], rel=0.1)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_its_size_is_bounded(rule):
    baseline = Baseline(rule, window=16)
    for step, value in enumerate(steady(5000, sigma=0.5)):
        baseline.learn(step, value * (100 if step % 50 == 0 else 1))
    state = baseline.state_dict()
    assert max(len(part) for part in state.values() if isinstance(part, list)) <= 64


@pytest.mark.parametrize("size", [1e4, 1e11])
@pytest.mark.parametrize("place", range(3))
def test_a_first_value_far_out_hides_nothing_for_long(place, size):
    """Nothing is known in the first three steps, so such a value enters; eight steps later it is out."""
    values = steady(20)
    values[place] = size
    baseline = taught(values[:8])
    assert size not in baseline.values
    assert baseline.expect().explosion < size
    assert flagged(taught(values), [1.0, 20.0, 1.0]) == [1]


def test_first_values_that_fall_steeply_are_part_of_the_run():
    values = [500 * 0.5**number for number in range(8)] + steady(12)
    assert taught(values).values == tuple(values)


def test_zeros_say_nothing_of_the_first_values():
    values = [1.0] * 3 + [0.0] * 17
    assert taught(values).values == tuple(values)
