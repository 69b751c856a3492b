"""Actions, and how ranks merge them."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel import Action, Severity
from gradsentinel.decision import merge

actions = st.sampled_from(Action)


def test_the_order_is_from_harmless_to_drastic():
    names = ["continue", "warn", "retry", "skip", "rollback", "abort"]
    assert [action.label for action in sorted(Action)] == names
    assert [severity.label for severity in sorted(Severity)] == ["warning", "error", "critical"]


@given(actions, actions, actions)
def test_merging_is_associative(a, b, c):
    assert merge([merge([a, b]), c]) is merge([a, merge([b, c])]) is merge([a, b, c])


@given(actions, actions)
def test_merging_is_commutative(a, b):
    assert merge([a, b]) is merge([b, a])


@given(actions)
def test_merging_is_idempotent(a):
    assert merge([a, a]) is merge([a]) is a


def test_continue_is_its_neutral_element():
    assert merge([]) is Action.CONTINUE
    assert all(merge([Action.CONTINUE, action]) is action for action in Action)


@given(st.lists(actions), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_grouping_of_the_ranks_in_any_order_gives_the_same(votes, groups, rng: random.Random):
    """Trees, rings and hosts reduce in different orders."""
    shuffled = votes.copy()
    rng.shuffle(shuffled)
    parts = [shuffled[start::groups] for start in range(groups)]
    assert merge(merge(part) for part in parts) is merge(votes)


def test_merging_never_weakens():
    for pair in itertools.product(Action, repeat=2):
        assert merge(pair) is max(pair)


@pytest.mark.parametrize("action", Action)
def test_an_action_is_parsed_from_itself_and_its_name(action):
    assert Action.parse(action) is action
    assert Action.parse(action.label) is action
    assert Action.parse(action.name) is action


@pytest.mark.parametrize("value", ["skp", "", 3, None, 2.0])
def test_anything_else_is_refused_with_the_choices(value):
    with pytest.raises(ValueError, match="choose one of: continue, warn, retry, skip, rollback, abort"):
        Action.parse(value)
