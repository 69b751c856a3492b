"""Where the next value of a series is expected: the rules by themselves."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.measures.bands import Band, History, Life, Robust, Sigma, early, with_explosion

GROWN_UP = Life(age=10**6)
positive = st.lists(st.floats(1e-3, 1e3), min_size=20, max_size=128)


def lognormal(count, *, sigma=0.3, seed=0):
    dice = random.Random(seed)
    return [math.exp(dice.gauss(0, sigma)) for _ in range(count)]


@given(positive, st.floats(1e-6, 1e6))
def test_the_unit_of_a_series_does_not_matter(values, unit):
    one, other = Robust()(values, GROWN_UP), Robust()([unit * value for value in values], GROWN_UP)
    assert other.center == pytest.approx(unit * one.center, rel=1e-6)
    assert other.high == pytest.approx(unit * one.high, rel=1e-6)
    assert other.spread == pytest.approx(one.spread, rel=1e-5, abs=1e-9)


def test_the_spread_is_the_standard_deviation_of_the_logarithm():
    band = Robust()(lognormal(5000, sigma=0.3), GROWN_UP)
    assert band.spread == pytest.approx(0.3, rel=0.1)
    assert band.center == pytest.approx(1, rel=0.1)
    assert band.deviations(math.exp(0.9)) == pytest.approx(3, abs=0.5)


def test_three_wild_values_in_a_window_change_little():
    clean = lognormal(128)
    spoilt = list(clean)
    for place in (20, 60, 100):
        spoilt[place] = 1e9
    assert Robust()(spoilt, GROWN_UP).high < 2 * Robust()(clean, GROWN_UP).high
    assert Sigma()(spoilt, GROWN_UP).high > 1e6 * Sigma()(clean, GROWN_UP).high


def test_a_steady_series_has_the_width_of_the_floor():
    assert Robust(floor=math.log(3))([2.0] * 128, GROWN_UP).high == pytest.approx(6)


def test_the_floor_of_a_young_run_is_wider():
    rule = Robust(floor=math.log(3), youth=math.log(2.5))
    assert rule([2.0] * 20, Life(age=0)).high == pytest.approx(15)
    assert rule([2.0] * 20, Life(age=256)).high == pytest.approx(6 * math.sqrt(2.5))


def test_a_heavy_tail_widens_the_band_and_only_so_far():
    values = lognormal(128, sigma=0.5)
    width = [math.log((b := Robust()(values, Life(peak=peak))).high / b.center) for peak in (0, 4, 50)]
    assert width[1] == pytest.approx(1.3 * width[0])
    assert width[2] == pytest.approx(1.75 * width[0])


def test_the_limit_can_be_eased_from_outside():
    values = lognormal(128, sigma=0.5)
    usual, eased = Robust()(values, GROWN_UP), Robust()(values, Life(ease=1.5))
    assert math.log(eased.high / eased.center) == pytest.approx(1.5 * math.log(usual.high / usual.center))


@pytest.mark.parametrize("rate", [1.05, 0.95])
def test_a_trend_does_not_widen_the_spread(rate):
    noise = lognormal(128, sigma=0.1)
    trended = [value * rate**place for place, value in enumerate(noise)]
    assert Robust()(trended, GROWN_UP).spread == pytest.approx(Robust()(noise, GROWN_UP).spread, rel=0.3)


def test_the_next_value_of_a_trend_is_inside_and_a_falling_one_may_end():
    for rate in (1.04, 0.9):
        values = [rate**place for place in range(128)]
        band = Robust()(values, GROWN_UP)
        assert band.holds(values[-1] * rate)
        assert band.holds(values[-1])


def test_what_climbs_step_by_step_may_go_half_as_far_again():
    flat = lognormal(122, sigma=0.3)
    limit = Robust()(flat, GROWN_UP).high
    band = Robust()([*flat, *(limit * share for share in (0.4, 0.5, 0.6, 0.7, 0.85, 1.0))], GROWN_UP)
    assert band.ordinary < band.high == pytest.approx(1.5 * band.ordinary)


def test_values_that_change_sign_are_judged_as_they_are():
    dice = random.Random(0)
    values = [dice.gauss(-1, 0.5) for _ in range(128)]
    band = Robust()(values, GROWN_UP)
    assert band.linear
    assert all(band.holds(value) for value in (-100.0, *values, 1.0))  # too small is no spike
    assert not band.holds(30.0)
    assert band.deviations(-1.0) == pytest.approx(0, abs=0.5)


def test_zeros_among_the_losses():
    rare = Robust()([1.0] * 60 + [0.0] * 4, GROWN_UP)
    assert not rare.early
    assert rare.center == pytest.approx(1)
    assert Robust()([1.0] * 40 + [0.0] * 24, GROWN_UP).early
    assert early([0.0] * 30).holds(1e30)  # nothing is known of its size


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=50), st.floats(1, 6))
def test_sigma_is_mean_and_standard_deviation(values, sigmas):
    band = Sigma(sigmas=sigmas)(values, GROWN_UP)
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert band.center == pytest.approx(mean, abs=1e-6)
    assert band.high - mean == pytest.approx(max(sigmas * deviation, 1e-6 * sigmas * abs(mean)), abs=1e-5)
    assert mean - band.low == pytest.approx(band.high - mean, abs=1e-5)


def test_history_is_a_multiple_of_the_maximum():
    assert History(times=10)([1.0, 3.0, 2.0], GROWN_UP).high == 30
    assert History(times=10)([-4.0, -3.0], GROWN_UP).high == 24  # nine times its size above it


def test_an_explosion_is_so_many_times_beyond_the_bound():
    band = with_explosion(Robust(floor=math.log(3))([2.0] * 64, GROWN_UP), 100)
    assert (band.high, band.explosion) == (pytest.approx(6), pytest.approx(600))
    signed = with_explosion(Band(center=-1, high=1, linear=True), 100)
    assert signed.explosion == pytest.approx(300)  # of a spread of 2 around -1
    young = with_explosion(early([1.0, 2.0, 1.0]), 100)
    assert young.explosion == pytest.approx(2000)
    assert with_explosion(band, None) is band


def test_bounds_stay_finite_numbers():
    huge = Robust()([1e300, 1e-300] * 32, GROWN_UP)
    assert math.isfinite(huge.high)
    assert not huge.holds(math.nan)
    assert not huge.holds(math.inf)
