"""Is it always the same card: what the count says, and that it does not cry wolf."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel.callbacks.suspicion import APART, Seat, Suspicion, part_of


def seats(cards, *, parts=1, each=1):
    """Ranks on so many cards, `each` on one; the parts of the model take turns."""
    return [Seat(f"card {i // each}", f"pp{i % parts}") for i in range(cards * each)]


def after(suspicion, ranks):
    """Enter an incident on each of these ranks, far from each other."""
    for number, rank in enumerate(ranks):
        suspicion.count([rank], 100 * number)
    return suspicion


def chance_of(cards, hits, misses):
    """The bound, from its definition: cards over the mean likelihood ratio, by numerical integration."""
    share, slices = 1 / cards, 200_000
    mean = 0.0
    for i in range(slices):
        fault = (i + 0.5) / slices
        mean += (fault / share) ** hits * ((1 - fault) / (1 - share)) ** misses / slices
    return min(1.0, cards / mean)


@pytest.mark.parametrize(
    ("cards", "hits", "misses"), [(8, 4, 0), (8, 3, 0), (8, 5, 1), (64, 3, 0), (2, 9, 3)]
)
def test_the_bound_is_what_the_definition_says(cards, hits, misses):
    suspicion = after(Suspicion(seats(cards)), [0] * hits + [1] * misses)
    suspect = suspicion.suspect("card 0")
    assert (suspect.hits, suspect.tries) == (hits, hits + misses)
    assert suspect.chance == pytest.approx(chance_of(cards, hits, misses), rel=1e-3)
    assert suspect.expected == pytest.approx((hits + misses) / cards)


def test_the_sentence_says_how_likely_it_is_by_chance():
    words = after(Suspicion(seats(8)), [3, 3, 3, 3]).suspect("card 3").words
    assert "4 of 4 incidents" in words
    assert "card 3" in words
    assert "0.0098" in words


def test_it_seldom_cries_wolf_however_often_it_is_asked():
    """In 400 runs of 60 incidents on 8 sound cards, the bound of 5% is passed in at most 5% of the runs."""
    draw, alarms = random.Random(1), 0
    for _ in range(400):
        suspicion = Suspicion(seats(8))
        alarmed = False
        step = 0
        for _ in range(60):
            step += draw.choice([1, 3, 40, 200])  # also in quick succession
            card = suspicion.count([draw.randrange(8)], step)
            alarmed |= card is not None and suspicion.suspect(card).chance <= 0.05
        alarms += alarmed
    assert alarms <= 20


def test_a_faulty_card_is_found_among_sound_ones():
    """It has half of 30 incidents, the others share the rest."""
    draw, found = random.Random(2), 0
    for _ in range(100):
        suspicion = Suspicion(seats(16))
        ranks = [5 if draw.random() < 0.5 else draw.randrange(16) for _ in range(30)]
        after(suspicion, ranks)
        found += suspicion.suspect("card 5").chance <= 0.01
    assert found >= 95


def test_an_incident_of_several_cards_tells_of_none():
    suspicion = Suspicion(seats(8))
    assert suspicion.count([0, 1], 0) is None
    assert suspicion.count([], 0) is None
    assert suspicion.count([99], 0) is None
    assert suspicion.suspect("card 0") is None


def test_two_ranks_on_one_card_are_one_card():
    suspicion = Suspicion(seats(4, each=2))
    assert suspicion.count([2, 3], 0) == "card 1"
    assert suspicion.suspect("card 1").expected == pytest.approx(1 / 4)


def test_a_card_without_peers_tells_nothing():
    alone = Suspicion(seats(1, each=4))
    assert alone.count([2], 0) is None
    stages = Suspicion(seats(4, parts=4))  # each pipeline stage is on one card only
    for step in range(0, 1000, 100):
        assert stages.count([1], step) is None


def test_only_cards_with_the_same_part_of_the_model_are_compared():
    suspicion = after(Suspicion(seats(8, parts=2)), [1, 1])  # ranks 1, 3, 5 and 7 have the same part
    assert suspicion.suspect("card 1").expected == pytest.approx(2 / 4)
    assert after(Suspicion(seats(8)), [1, 1]).suspect("card 1").expected == pytest.approx(2 / 8)


def test_what_goes_wrong_step_after_step_counts_once():
    suspicion = Suspicion(seats(8))
    for step in range(200, 300):
        suspicion.count([4], step)
    assert suspicion.suspect("card 4").hits == 1
    suspicion.count([4], 300 + APART)
    assert suspicion.suspect("card 4").hits == 2


def test_a_step_that_is_taken_again_after_a_rollback_counts_once():
    suspicion = Suspicion(seats(8))
    for _ in range(5):
        suspicion.count([4], 500)
    assert suspicion.suspect("card 4").hits == 1


def test_two_cards_in_turn_do_not_accuse_each_other():
    """While one was just hit the other is the only one that can be: that it is hit says nothing."""
    suspicion = Suspicion(seats(2))
    for step in range(0, 300, 3):
        suspicion.count([step % 2], step)
    assert all(
        suspicion.suspect(f"card {i}") is None or suspicion.suspect(f"card {i}").hits < 3 for i in (0, 1)
    )


def test_it_goes_on_after_a_restart():
    whole = after(Suspicion(seats(8)), [2, 5, 2, 2])
    first = after(Suspicion(seats(8)), [2, 5])
    second = Suspicion(seats(8))
    second.take_up(json.loads(json.dumps(first.as_dict())))
    for number in (2, 3):
        second.count([2], 100 * number)
    assert second.suspect("card 2") == whole.suspect("card 2")


@pytest.mark.parametrize(
    "data",
    [
        {"a": 1},
        {"a": {"hits": -1, "misses": 0, "expected": 0, "log_scale": 0, "steps": []}},
        {"a": {"hits": 1, "misses": 0, "expected": 0, "log_scale": "nan", "steps": []}},
        {"a": {"hits": 1, "misses": 0}},
        [1],
    ],
)
def test_what_is_no_account_is_refused_and_changes_nothing(data):
    suspicion = after(Suspicion(seats(8)), [2])
    before = suspicion.as_dict()
    with pytest.raises((TypeError, KeyError, ValueError, AttributeError)):
        suspicion.take_up(data)
    assert suspicion.as_dict() == before


def test_memory_is_bounded_by_the_number_of_cards():
    suspicion = after(Suspicion(seats(4)), [number % 4 for number in range(2000)])
    account = suspicion.as_dict()
    assert len(account) == 4
    assert max(len(entry["steps"]) for entry in account.values()) <= 64


@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 40))
def test_the_chance_is_a_probability_and_the_same_on_every_rank(ranks, pace):
    here, there = Suspicion(seats(8)), Suspicion(seats(8))
    for suspicion in (here, there):
        for number, rank in enumerate(ranks):
            suspicion.count([rank], pace * number)
    assert here.as_dict() == there.as_dict()
    for card in here.as_dict():
        suspect = here.suspect(card)
        assert suspect is None or (0 < suspect.chance <= 1 and math.isfinite(suspect.expected))


@pytest.mark.parametrize(
    ("coordinates", "part"),
    [
        ({}, ""),
        ({"dp": 3, "node": 1}, ""),
        ({"tp": 1, "pp": 0, "dp": 5, "cp": 1}, "pp0 tp1"),
        ({"ep": 2, "dp": 0}, "ep2"),
        ({"dim0": 1}, "dim01"),
    ],
)
def test_the_part_of_the_model_is_what_the_coordinates_tell_beside_data_parallelism(coordinates, part):
    assert part_of(coordinates) == part
