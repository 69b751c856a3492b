"""Series: bounded memory, few points, and no extreme that is lost on the way."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.views.series import Series, number

values = st.lists(st.floats(width=32), min_size=1, max_size=300)


def filled(numbers, most=1 << 17, stride=1):
    series = Series(most)
    for index, value in enumerate(numbers):
        series.add(index * stride, value)
    return series


def lows(point):
    return float(point[1])


def highs(point):
    return float(point[2])


@given(values, st.integers(1, 40), st.sampled_from([8, 64, 1024]), st.integers(1, 7))
def test_extremes_and_oddities_survive_whatever_the_number_of_points(numbers, points, most, stride):
    found = filled(numbers, most, stride).points(0, 10**9, points)
    assert len(found) <= points
    assert [point[0] for point in found] == sorted({point[0] for point in found})
    finite = [value for value in numbers if math.isfinite(value)]
    drawn = [point for point in found if math.isfinite(lows(point))]
    assert min(map(lows, drawn), default=None) == min(finite, default=None)
    assert max(map(highs, drawn), default=None) == max(finite, default=None)
    odd = {str(value) for value in numbers if not math.isfinite(value)}
    seen = {word for point in found for word in (point[4] if len(point) > 4 else ())}
    seen |= {value for point in found for value in point[1:4] if isinstance(value, str)}
    assert seen == odd
    assert float(found[-1][3]) == pytest.approx(numbers[-1], nan_ok=True)
    json.dumps(found, allow_nan=False)


def test_a_short_series_is_given_as_it_is():
    assert filled([3.0, 1.0, 2.0]).points(0, 2, 3) == [
        [0, 3.0, 3.0, 3.0],
        [1, 1.0, 1.0, 1.0],
        [2, 2.0, 2.0, 2.0],
    ]


def test_a_stretch_is_given_with_both_ends():
    assert [point[0] for point in filled(range(100)).points(10, 20, 50)] == list(range(10, 21))
    assert filled(range(100)).points(200, 300, 50) == []
    assert filled(range(100)).points(20, 10, 50) == []


def test_memory_is_bounded():
    series = filled(range(5000), most=64)
    assert len(series) <= 64
    assert series.factor == 128
    assert series.last() == 4999.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), ("inf", math.inf), ("-inf", -math.inf), (True, None), ("1", None), (None, None), ([], None)],
)
def test_what_is_a_number_in_a_file(value, expected):
    assert number(value) == expected


def test_an_integer_that_no_float_can_hold_is_infinite():
    assert number(-(10**400)) == -math.inf
