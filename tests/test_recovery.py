"""Budgets, and the way up the ladder."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    Finding,
    Kind,
    NanCallback,
    Outcome,
    Recovery,
    Responder,
    Rollback,
    Skip,
    TrainingAborted,
)
from gradsentinel.recovery import Budget
from loops import Spoiler, build, differences, finish, make_batches, train_by_hand, train_watched

gaps = st.lists(st.integers(0, 5), max_size=60)


class Naive:
    """Keeps everything that was ever spent."""

    def __init__(self, limit, window):
        self.limit, self.window, self.spent = limit, window, []

    def left(self, now):
        return max(0, self.limit - sum(now - self.window < step <= now for step in self.spent))

    def spend(self, now):
        if not self.left(now):
            return False
        self.spent.append(now)
        return True


@given(st.integers(0, 4), st.integers(1, 12), gaps)
def test_a_budget_is_that_of_the_naive_model_and_holds_in_every_window(limit, window, gaps):
    budget, naive, now = Budget(limit, window), Naive(limit, window), 0
    for gap in gaps:
        now += gap
        assert budget.left(now) == naive.left(now)
        assert budget.spend(now) == naive.spend(now)
        assert budget.left(now) == naive.left(now)
    for start in range(now + 1):
        assert sum(start <= step < start + window for step in naive.spent) <= limit


@given(st.integers(0, 4), st.integers(1, 12), gaps, st.integers(0, 60))
def test_a_budget_survives_a_restart(limit, window, gaps, at):
    budget, expected, now = Budget(limit, window), Budget(limit, window), 0
    for number, gap in enumerate(gaps):
        now += gap
        if number == at:
            state = json.loads(json.dumps(budget.state_dict()))
            budget = Budget(limit, window)
            budget.load_state_dict(state)
        assert budget.spend(now) == expected.spend(now)


def test_the_state_is_a_copy():
    budget = Budget(3, 10)
    budget.spend(1)
    state = budget.state_dict()
    budget.spend(2)
    other = Budget(3, 10)
    other.load_state_dict(state)
    other.spend(3)
    assert (budget.left(3), other.left(3)) == (1, 1)
    assert state == {"spent": [1]}


@pytest.mark.parametrize("callback", [Skip(max_skips=2, window=10), Rollback(max_rollbacks=2, window=10)])
def test_a_callback_takes_its_budget_over_a_restart(callback):
    callback._budget.spend(4)
    state = json.loads(json.dumps(callback.state_dict()))
    again = type(callback)(window=10)
    again.load_state_dict(state)
    assert again._budget.state_dict() == {"spent": [4]}


# -- the ladder ------------------------------------------------------------------------------------


class Rung(Responder):
    """Answers or passes, and writes down that it was asked."""

    def __init__(self, asked, *, answers=True, escalates=False):
        self.asked, self.answers, self.escalating = asked, answers, escalates

    def escalates(self, incident, run):
        return self.escalating

    def respond(self, incident, run):
        self.asked.append(self.rung.label)
        if not self.answers:
            return None
        run.undo_step()
        return Recovery(outcome=Outcome.SKIPPED, apply=False, message="answered")


class Low(Rung):
    rung = Action.RETRY


class Middle(Rung):
    rung = Action.SKIP


class High(Rung):
    rung = Action.ROLLBACK


def suspect(sentinel, action):
    """Suspect the second step that is attempted."""
    attempts = iter([False, True])

    def look(event):
        suspicious = torch.tensor(next(attempts, False))
        return Finding(kind=Kind.CUSTOM, value=suspicious, action=action, message="suspicious")

    sentinel.on(BeforeClip, look)


def climb(action, answers, run_dir, *, escalating=""):
    """Train through one suspicion; return the rungs that were asked, and the sentinel."""
    asked = []
    rungs = [
        kind(asked, answers=kind.rung.label in answers, escalates=kind.rung.label == escalating)
        for kind in (High, Low, Middle)
    ]
    run = build()
    with run.sentinel([*rungs, Skip(max_skips=0)], run_dir=run_dir) as sentinel:
        suspect(sentinel, action)
        finish(train_watched(run, sentinel, make_batches(3)))
    return asked, sentinel


@pytest.mark.parametrize(
    ("action", "answers", "asked"),
    [
        (Action.RETRY, {"retry", "skip", "rollback"}, ["retry"]),
        (Action.RETRY, {"skip", "rollback"}, ["retry", "skip"]),
        (Action.RETRY, {"rollback"}, ["retry", "skip", "rollback"]),
        (Action.SKIP, {"retry", "skip", "rollback"}, ["skip"]),
        (Action.ROLLBACK, {"retry", "skip", "rollback"}, ["rollback"]),
        (Action.WARN, {"retry", "skip", "rollback"}, []),
    ],
)
def test_the_cheapest_rung_that_may_help_and_can(action, answers, asked, run_dir):
    was_asked, sentinel = climb(action, answers, run_dir)
    assert was_asked == asked
    (incident,) = sentinel.incidents
    assert incident.action.label == (asked[-1] if asked else "warn")


@pytest.mark.parametrize(
    ("action", "answers"),
    [(Action.ABORT, {"retry", "skip", "rollback"}), (Action.SKIP, set()), (Action.ROLLBACK, {"skip"})],
)
def test_without_a_rung_left_the_run_stops(action, answers, run_dir):
    with pytest.raises(TrainingAborted, match=r"step 1: stopped: .+ What was found: suspicious\."):
        climb(action, answers, run_dir)


def test_a_dearer_rung_may_take_over(run_dir):
    everything = {"retry", "skip", "rollback"}
    assert climb(Action.RETRY, everything, run_dir, escalating="rollback")[0] == ["rollback"]
    assert climb(Action.ROLLBACK, everything, run_dir, escalating="skip")[0] == ["rollback"]


def test_of_two_suspicions_in_one_step_the_more_severe_decides(run_dir):
    asked = []
    run = build()
    with run.sentinel([Middle(asked), High(asked)], run_dir=run_dir) as sentinel:
        suspect(sentinel, Action.WARN)
        suspect(sentinel, Action.ROLLBACK)
        suspect(sentinel, Action.SKIP)
        finish(train_watched(run, sentinel, make_batches(3)))
    assert asked == ["rollback"]
    assert sentinel.applied_steps == 2


# -- rolling back ----------------------------------------------------------------------------------


def test_several_failed_steps_in_a_row_are_rolled_back(run_dir):
    run = build(scheduler="cosine")
    batches = make_batches(14)
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, after=3)]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, batches, spoil=Spoiler("gradient", frozenset({6, 7, 8}))))
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["skipped", "skipped", "rolled_back"]
    # the snapshot after 4 steps was proved by the fifth; the one after 6 never was
    reference = build(scheduler="cosine")
    train_by_hand(reference, [*batches[:4], *batches[9:]])
    assert differences(run.state(), reference.state()) == []
    assert sentinel.step_count == 4 + 5


def test_trouble_that_comes_back_leads_further_back_and_then_to_the_end(run_dir):
    run = build()
    rollback = Rollback(every=1, confirm_after=1, after=1, keep=5, max_rollbacks=2)
    goals = []
    spoiler = Spoiler("loss", frozenset(range(6, 12)))
    with (
        run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted, match="budget of 2 rollbacks in 1000 steps is used up"),
    ):
        goals.extend(
            sentinel.step_count for _ in train_watched(run, sentinel, make_batches(12), spoil=spoiler)
        )
    assert goals[:6] == [1, 2, 3, 4, 5, 6]
    assert goals[6:] == [5, 4]
    assert [str(incident.outcome) for incident in sentinel.incidents] == [
        "rolled_back",
        "rolled_back",
        "aborted",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("every", 0), ("keep", 0), ("after", 0), ("window", 0), ("confirm_after", -1), ("max_rollbacks", -1)],
)
def test_settings_that_cannot_work(name, value):
    with pytest.raises(ConfigurationError, match=f"{name}={value}"):
        Rollback(**{name: value})
