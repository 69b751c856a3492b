"""What is usual is learnt, is not moved by what is not, and changes when the change stays."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.callbacks.usual import Usual


def make(*, sizes=False, warmup=20):
    return Usual(limit=8.0, floor=math.log(8.0) if sizes else 1.0, warmup=warmup, sizes=sizes)


def feed(usual, values, first=0):
    return [usual.is_unusual(first + number, value) for number, value in enumerate(values)]


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()


def test_both_sides_count_for_a_place_and_large_values_only_for_a_size():
    place, size = make(), make(sizes=True)
    assert not any(feed(place, normal(200)))
    assert not any(feed(size, [math.exp(0.1 * x) for x in normal(200)]))
    assert feed(place, [30.0, -30.0, 0.0]) == [True, True, False]
    assert feed(size, [30.0, 1e-6, 1.0]) == [True, False, False]


def test_nothing_is_unusual_before_the_warmup():
    assert not any(feed(make(), [0.0] * 10 + [1e9] + [0.0] * 9))


@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30]), max_size=15))
def test_a_burst_of_anything_hides_nothing_after_it(burst):
    usual = make()
    feed(usual, normal(100))
    before = usual.center, usual.high
    assert feed(usual, burst, 100) == [math.isfinite(value) for value in burst]
    assert feed(usual, [0.0, 50.0], 200) == [False, True]
    assert abs(usual.center - before[0]) < 0.5
    assert usual.high < 3 * before[1]


def test_a_change_that_stays_is_accepted():
    usual = make()
    feed(usual, normal(100))
    told = feed(usual, [100 + x for x in normal(60, seed=1)], 100)
    assert told == [True] * 16 + [False] * 44
    assert usual.is_unusual(200, 0.0)


def test_what_happens_often_is_usual():
    usual = make()
    feed(usual, normal(100))
    told = feed(usual, [100.0 if number % 5 == 0 else 0.0 for number in range(400)], 100)
    assert any(told[:60])
    assert not any(told[-100:])


def test_steps_that_are_taken_back_are_forgotten():
    usual, other = make(), make()
    feed(usual, normal(60))
    feed(other, normal(60))
    feed(usual, [*normal(20, seed=3), *[50.0] * 10], 60)
    usual.forget_from(60)
    assert usual.state_dict()["values"] == other.state_dict()["values"]
    assert usual.is_unusual(61, 50.0)


def test_a_restart_goes_on_where_it_was():
    usual, again = make(), make()
    feed(usual, normal(150))
    again.load_state_dict(usual.state_dict())
    values = [*normal(30, seed=2), 40.0]
    assert feed(again, values, 150) == feed(usual, values, 150) == [False] * 30 + [True]
