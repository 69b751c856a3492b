"""Repeats: the same warning is folded, another one never is."""

import pytest

from gradsentinel.decision import Action, Kind
from gradsentinel.incident import Incident, Said
from gradsentinel.repeats import QUIET_STEPS, Repeats


def warning(step, *names, detector="One", subject="", once=False, others=()):
    said = Said(detector, Kind.STAGNATION, subject, names, once)
    return Incident(
        id=f"{step}",
        step=step,
        iteration=step,
        kind=Kind.STAGNATION,
        action=Action.WARN,
        message="",
        claims=(said, *others),
    )


def steps_told(repeats, warnings):
    return [one.step for one in warnings if repeats.goes_on(one) is None]


def test_the_same_names_are_one_warning_until_it_was_quiet():
    told = steps_told(Repeats(), [warning(step, "a") for step in (0, 50, 140, 240, 341)])
    assert told == [0, 341]


@pytest.mark.parametrize("names", [("b",), ("a", "b")])
def test_other_names_are_news_at_once(names):
    assert steps_told(Repeats(), [warning(0, "a"), warning(1, *names), warning(2, "a")]) == [0, 1]


def test_detectors_and_subjects_are_told_apart():
    warnings = [warning(0, "a"), warning(1, "a", detector="Two"), warning(2, "a", subject="x")]
    assert steps_told(Repeats(), warnings) == [0, 1, 2]


def test_what_another_detector_says_in_the_same_step_is_not_lost_with_what_goes_on():
    repeats = Repeats()
    other = Said("Two", Kind.MAGNITUDE, "", ("b",))
    assert steps_told(repeats, [warning(0, "a"), warning(1, "a", others=(other,))]) == [0, 1]


def test_a_name_is_news_when_its_own_quiet_is_over_whatever_is_said_of_others():
    warnings = [warning(step, "a", "b") if step == 0 else warning(step, "a") for step in range(0, 300, 10)]
    assert steps_told(Repeats(), [*warnings, warning(300, "b")]) == [0, 300]


def test_a_detector_that_asks_until_it_is_told_does_not_put_itself_off():
    told = steps_told(Repeats(), [warning(step, "a", once=True) for step in range(0, 150, 10)])
    assert told == [0, QUIET_STEPS + 10]


def test_names_one_by_one_are_told_at_once_then_by_growing_sets():
    repeats = Repeats()
    told = steps_told(repeats, [warning(0, f"n{number}") for number in range(1000)])
    assert told == [0] * 14  # eight, then at 16, 32, 64, 128, 256 and 512
    (held,) = repeats.overdue(QUIET_STEPS + 1)
    held.iteration = QUIET_STEPS + 1
    repeats.tell(held)
    assert "and 484 more" in held.notes[-1]
    assert repeats.overdue(10**6, all_of_them=True) == []


def test_what_waits_is_due_when_the_quiet_steps_are_over_and_not_before():
    repeats = Repeats()
    warnings = [warning(number, f"n{number}") for number in range(9)]
    assert steps_told(repeats, warnings) == list(range(8))
    assert repeats.overdue(7 + QUIET_STEPS) == []
    assert repeats.overdue(8 + QUIET_STEPS) == [warnings[-1]]
    assert repeats.overdue(9, all_of_them=True) == [warnings[-1]]
