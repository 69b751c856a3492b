"""How far a rollback goes back when trouble comes again, and which snapshots are called good."""

import pytest
import torch

from gradsentinel import (
    Action,
    BeforeClip,
    Diagnosis,
    Finding,
    Kind,
    NanCallback,
    Rollback,
    Skip,
    TrainingAborted,
)
from gradsentinel.incident import Incident
from gradsentinel.state.retreat import Retreat
from gradsentinel.state.ring import Ring
from gradsentinel.state.rng import RngState
from gradsentinel.state.snapshot import Snapshot
from loops import Spoiler, build, finish, make_batches, train_watched


def snapshot(step=400, loss=1.0):
    return Snapshot(
        step=step, parameters={}, buffers={}, optimizers=[], stateful={}, rng=RngState.capture(), loss=loss
    )


def incident(kind=Kind.NONFINITE_GRADIENT, cause=None, confidence=0.9, step=420):
    found = Incident(id="x", step=step, kind=kind, action=Action.ROLLBACK, message="bad")
    found.diagnosis = None if cause is None else Diagnosis(cause=cause, confidence=confidence)
    return found


def went_back(*, clean=0, loss=1.0, before=1.0):
    """A run that went back from step 450 to 400, and made some clean steps since."""
    retreat = Retreat(3)
    retreat.went_to(snapshot(loss=before), 450)
    for step in range(400, 400 + clean):
        retreat.count(step, clean=True, loss=loss)
    return retreat


def test_the_first_time_nothing_speaks_against_a_state():
    assert Retreat(3).against(incident(Kind.NONFINITE_PARAMETER)) is None


@pytest.mark.parametrize("kind", [Kind.SPIKE, Kind.NONFINITE_GRADIENT, Kind.NONFINITE_LOSS, Kind.MAGNITUDE])
def test_other_batches_that_fail_do_not_condemn_a_state_that_healthy_ones_trained(kind):
    assert went_back(clean=3).against(incident(kind)) is None
    assert "before 3 steps in a row were clean" in went_back(clean=2).against(incident(kind))


def test_a_failed_step_between_them_starts_the_count_again():
    retreat = went_back(clean=2)
    retreat.count(402, clean=False, loss=None)
    retreat.count(403, clean=True, loss=1.0)
    assert retreat.against(incident()) is not None
    for step in (404, 405):
        retreat.count(step, clean=True, loss=1.0)
    assert retreat.against(incident()) is None
    retreat.count(406, clean=False, loss=None)  # what has once been cleared stays so
    assert retreat.against(incident()) is None


@pytest.mark.parametrize("kind", [Kind.NONFINITE_PARAMETER, Kind.NONFINITE_STATE, Kind.RANK_DIVERGENCE])
def test_a_state_that_goes_bad_again_is_left(kind):
    assert "the state itself" in went_back(clean=30).against(incident(kind))


@pytest.mark.parametrize(
    ("cause", "confidence", "further"),
    [
        ("data", 0.9, False),
        ("hardware", 0.9, False),
        ("operator", 0.9, False),
        ("data", 0.3, True),
        ("unknown", 0.9, True),
        ("math", 0.9, True),
        ("optimizer", 0.9, True),
    ],
)
def test_at_once_it_depends_on_the_diagnosis(cause, confidence, further):
    against = went_back().against(incident(cause=cause, confidence=confidence))
    assert (against is not None) is further


def test_bad_input_is_no_fault_of_the_state():
    assert went_back().against(incident(Kind.NONFINITE_INPUT)) is None


def test_the_optimizer_is_to_blame_even_later():
    assert went_back(clean=30).against(incident(cause="optimizer")) is not None


def test_a_course_that_is_worse_than_before_condemns_the_state():
    assert "loss" in went_back(clean=30, loss=2.5).against(incident())
    assert went_back(clean=30, loss=1.9).against(incident()) is None
    assert went_back(clean=30, loss=-1.0, before=-3.0).against(incident()) is None  # losses of a critic


def test_past_the_trouble_all_is_forgotten():
    retreat = went_back()
    assert not retreat.past_trouble
    retreat.count(450, clean=True, loss=1.0)
    assert not retreat.past_trouble
    retreat.count(451, clean=True, loss=1.0)
    assert retreat.past_trouble
    assert retreat.against(incident(Kind.NONFINITE_PARAMETER, step=452)) is None


# -- seen from outside -----------------------------------------------------------------------------


def goals(run_dir, at, **settings):
    """Train through bad batches, each of which is rolled back; the steps gone back to, and the sentinel."""
    run = build()
    rollback = Rollback(**{"every": 4, "confirm_after": 2, "keep": 5, "max_rollbacks": 9, **settings})
    wrong = [False]
    callbacks = [NanCallback(state_every=1), Skip(max_skips=0), rollback]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        sentinel.on(
            BeforeClip,
            lambda event: Finding(kind=Kind.SPIKE, value=torch.tensor(wrong[0]), action=Action.ROLLBACK),
        )
        seen = []
        for number, batch in enumerate(sentinel.steps(make_batches(60))):
            wrong[0] = number in at
            sentinel.backward(run.loss(batch))
            before = sentinel.step_count
            sentinel.step()
            if sentinel.step_count <= before:
                seen.append(sentinel.step_count)
    return seen, sentinel


@pytest.mark.slow
@pytest.mark.parametrize("data", ["go_on", "replay"])
def test_one_bad_batch_after_the_other_leads_to_the_same_state(data, run_dir):
    seen, sentinel = goals(run_dir, {19, 24, 28, 33}, after=3, data=data)
    assert seen == [16, 16, 16, 16]
    assert not any("further back" in note for one in sentinel.incidents for note in one.notes)


def test_a_failure_that_follows_at_once_leads_further_back_each_time(run_dir):
    seen, sentinel = goals(run_dir, {19, 20, 21}, after=3)
    assert seen == [16, 12, 8]
    assert "one snapshot further back than last time" in sentinel.incidents[1].notes[0]


def test_at_last_the_oldest_is_tried_again(run_dir):
    seen, _ = goals(run_dir, {19, 20, 21}, after=3, keep=2)
    assert seen == [16, 12, 12]


def test_bad_input_at_once_does_not_lead_further_back(run_dir):
    run = build()
    spoiler = Spoiler("input", frozenset({10, 11, 12, 13}))
    rollback = Rollback(every=2, confirm_after=1, keep=5, max_rollbacks=9)
    callbacks = [NanCallback(), Skip(max_skips=0), rollback]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, spoiler.batches(make_batches(30))))
    wheres = [one.recovery.split(" (")[0] for one in sentinel.incidents]
    assert wheres == ["rolled back to step 8"] * 4


def test_an_aborted_run_leaves_the_state_it_went_back_to(run_dir):
    with pytest.raises(TrainingAborted) as stopped:
        goals(run_dir, {19, 24, 28}, after=3, max_rollbacks=2)
    assert "step-000000016" in stopped.value.snapshot


# -- which snapshots are good ----------------------------------------------------------------------


def proved_after(warned, *, confirm=4, steps=60):
    """Return after how many steps a snapshot is called good, if somebody warns of some of them."""
    ring = Ring(3, confirm, 3)
    ring.add(snapshot())
    for step in range(1, steps):
        ring.count(clean=True, warned=warned(step), loss=1.0)
        if list(ring.proved()):
            return step
    return None


def test_a_step_that_somebody_warned_of_proves_nothing():
    assert proved_after(lambda step: False) == 4
    assert proved_after(lambda step: step in {2, 3}) == 6
    assert proved_after(lambda step: step < 9) == 12


def test_a_warning_that_never_ends_does_not_hold_it_up_for_ever():
    assert proved_after(lambda step: True) == 20


def test_a_failed_step_starts_both_counts_again():
    ring = Ring(3, 4, 3)
    ring.add(snapshot())
    for step in range(100):
        ring.count(clean=step % 4 > 0, warned=step % 4 == 1, loss=1.0)
        assert list(ring.proved()) == []


def test_no_state_is_called_good_while_a_spike_goes_on(run_dir):
    """The warning is there from step 5 to 10: what was saved before it waits, and so does what follows."""
    run = build()
    rollback = Rollback(every=4, confirm_after=3, keep=5)
    open_at = {}
    wrong = [False]
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        sentinel.on(
            BeforeClip,
            lambda event: Finding(kind=Kind.SPIKE, value=torch.tensor(wrong[0]), action=Action.WARN),
        )
        for number, batch in enumerate(sentinel.steps(make_batches(16))):
            wrong[0] = 5 <= number <= 10
            sentinel.backward(run.loss(batch))
            sentinel.step()
            open_at[number] = rollback.known_good_steps
    assert open_at[10] == (0,)
    assert open_at[12] == (0, 4)
    assert open_at[13] == (0, 4, 8)
