"""A forward pass that spoils running statistics only, while loss and gradients are finite."""

import pytest

from gradsentinel import NanCallback, Outcome, Retry, Rollback, TrainingAborted
from loops import build, differences, make_batches, train_by_hand

BATCHES = make_batches(16)
BAD = 12
HUGE = 1e30
"""Its square overflows in the running variance, and normalised it is as good as any other."""


def train(callbacks, folder, *, lasting=False, accumulate=1, forward=True, bad=BAD):
    run = build(accumulate=accumulate)
    armed = []

    def overflow(_, __, output):
        return output * HUGE if armed and (lasting or armed.pop()) else output

    run.model.enter.register_forward_hook(overflow)

    def loss_of(_, batch):
        return run.loss(batch)

    sentinel = run.sentinel(callbacks, run_dir=folder, resume="auto", forward=loss_of if forward else None)
    with sentinel:
        for number, batch in enumerate(sentinel.steps(BATCHES, accumulate=accumulate)):
            armed[:] = [True] if number == bad else []
            sentinel.backward(run.loss(batch))
            sentinel.step()
    return run, sentinel


def by_hand(batches, accumulate=1):
    reference = build(accumulate=accumulate)
    train_by_hand(reference, batches)
    return reference.state()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_passing_fault_is_computed_again_and_leaves_no_trace(accumulate, tmp_path):
    run, sentinel = train([NanCallback(state_every=1), Retry()], tmp_path, accumulate=accumulate)
    assert [one.outcome for one in sentinel.incidents] == [Outcome.RETRIED]
    assert sentinel.incidents[0].severity.label == "warning"
    assert "norm.running_var" in sentinel.incidents[0].message
    assert differences(run.state(), by_hand(BATCHES, accumulate)) == []


@pytest.mark.parametrize("callbacks", [[], [Retry()]])
def test_a_lasting_one_costs_its_batch_and_nothing_else(callbacks, tmp_path):
    run, sentinel = train([NanCallback(state_every=1), *callbacks], tmp_path, lasting=True)
    assert [one.outcome for one in sentinel.incidents] == [Outcome.SKIPPED]
    assert differences(run.state(), by_hand(BATCHES[:BAD] + BATCHES[BAD + 1 :])) == []
    assert sentinel._watch.run.skipped.entries[0].batch == BAD  # values of that size may be the batch's own


def test_what_is_found_too_late_needs_a_rollback(tmp_path):
    """Between two looks at the state the weights step with it, so putting buffers back would be a lie."""
    watch = [NanCallback(state_warmup=0, state_every=14), Retry(), Rollback(every=4, confirm_after=1)]
    run, sentinel = train(watch, tmp_path)
    assert [one.outcome for one in sentinel.incidents] == [Outcome.ROLLED_BACK]
    assert differences(run.state(), by_hand(BATCHES[:12] + BATCHES[14:])) == []


def test_without_one_no_state_is_called_good(tmp_path):
    with pytest.raises(TrainingAborted, match="There is no good state to save") as caught:
        train([NanCallback(state_warmup=0, state_every=14), Retry()], tmp_path)
    assert caught.value.snapshot is None
    _, sentinel = train([NanCallback(state_every=1)], tmp_path, bad=None)
    assert sentinel.step_count == len(BATCHES)  # a fresh start


def test_before_the_step_the_state_is_good_and_saved(tmp_path):
    with pytest.raises(TrainingAborted, match="The last good state is in") as caught:
        train([NanCallback(state_every=1, action="abort")], tmp_path)
    assert caught.value.snapshot is not None
    run, sentinel = train([NanCallback(state_every=1)], tmp_path, bad=None)
    assert sentinel._watch.run.resumed_from == BAD
    assert differences(run.state(), by_hand(BATCHES[:BAD] + BATCHES[BAD + 1 :])) == []  # left out
