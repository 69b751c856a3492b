"""A forward pass that spoils running statistics only, while loss and gradients are finite."""

import pytest
import torch

from gradsentinel import Kind, NanCallback, Outcome, Retry, Rollback, Sentinel, SpikeCallback, TrainingAborted
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


@pytest.fixture
def all_large(monkeypatch):
    """As if the model's buffers were too large to be looked at in each step."""
    monkeypatch.setattr("gradsentinel.state.health._SMALL", 0)


@pytest.mark.usefixtures("all_large")
def test_what_is_found_too_late_needs_a_rollback(tmp_path):
    """Between two looks at the state the weights step with it, so putting buffers back would be a lie."""
    watch = [NanCallback(state_warmup=0, state_every=14), Retry(), Rollback(every=4, confirm_after=1)]
    run, sentinel = train(watch, tmp_path)
    assert [one.outcome for one in sentinel.incidents] == [Outcome.ROLLED_BACK]
    assert differences(run.state(), by_hand(BATCHES[:12] + BATCHES[14:])) == []


@pytest.mark.usefixtures("all_large")
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


# -- small ones, in every step -------------------------------------------------------------------------

SELDOM = {"state_warmup": 0, "state_every": 0}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_small_statistics_are_looked_at_in_every_step(accumulate, recompute, tmp_path):
    watch = [NanCallback(**SELDOM), *([Retry()] if recompute else [])]
    run, sentinel = train(watch, tmp_path, accumulate=accumulate)
    assert [one.outcome for one in sentinel.incidents] == [Outcome.RETRIED if recompute else Outcome.SKIPPED]
    assert sentinel.incidents[0].step == BAD // accumulate
    assert "norm.running_var" in sentinel.incidents[0].message
    kept = BATCHES if recompute else without(BAD, accumulate)
    assert differences(run.state(), by_hand(kept, accumulate)) == []


def without(bad, accumulate):
    first = bad - bad % accumulate
    return BATCHES[:first] + BATCHES[first + accumulate :]


def test_it_is_found_in_a_step_that_is_not_only_glanced_at(tmp_path):
    watch = [NanCallback(**SELDOM), SpikeCallback(groups=None)]
    _, sentinel = train(watch, tmp_path)
    assert [one.step for one in sentinel.incidents] == [BAD]
    assert "norm.running_var" in sentinel.incidents[0].message


def test_a_healthy_run_is_still_only_glanced_at(tmp_path):
    run = build()
    with run.sentinel([NanCallback(**SELDOM)], run_dir=tmp_path) as sentinel:
        watch, glanced = sentinel._watch, []
        decide = watch.glance.decide

        def counted(*given):
            decision = decide(*given)
            glanced.append(decision is not None)
            return decision

        watch.glance.decide = counted
        for batch in sentinel.steps(BATCHES):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert glanced == [True] * len(BATCHES)
    assert differences(run.state(), by_hand(BATCHES)) == []


class Odd(torch.nn.Module):
    """Buffers of many kinds, one of which is not finite on purpose."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        for name, value in {
            "narrow": torch.ones(3, dtype=torch.float16),
            "brain": torch.ones(2, 2, dtype=torch.bfloat16),
            "wide": torch.ones(2, dtype=torch.float64),
            "whole": torch.ones(3, dtype=torch.int64),
            "complex": torch.ones(3, dtype=torch.complex64),
            "nothing": torch.ones(0),
            "scalar": torch.tensor(1.0),
            "turned": torch.ones(3, 2).t(),
            "large": torch.ones(20_000),
            "sparse": torch.ones(2, 2).to_sparse(),
            "nowhere": torch.ones(2, device="meta"),
            "packed": torch.ones(2).to(torch.float8_e4m3fn),
            "masked": torch.tensor([0.0, float("-inf")]),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("empty", None)

    def forward(self, x):
        return self.layer(x).mean()


def watched(model, steps, spoil, settings=SELDOM):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback(**settings)])
    with sentinel:
        for number, batch in enumerate(sentinel.steps([torch.ones(2, 2)] * steps)):
            spoil(number)
            sentinel.backward(model(batch))
            sentinel.step()
    return sentinel


def test_buffers_of_every_kind_stop_nothing():
    sentinel = watched(Odd(), 4, lambda number: None)
    assert sentinel.incidents == ()
    assert sentinel.applied_steps == 4


@pytest.mark.parametrize("name", ["narrow", "brain", "wide", "scalar", "turned"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_small_ones_of_every_type_are_looked_at(name, value):
    model = Odd()

    def spoil(number):
        if number == 2:
            getattr(model, name).view(-1).fill_(value) if name != "turned" else model.turned.fill_(value)

    sentinel = watched(model, 4, spoil)
    assert [(one.step, one.outcome) for one in sentinel.incidents] == [(2, Outcome.SKIPPED)]
    assert name in sentinel.incidents[0].message
    assert getattr(model, name).isfinite().all()


def test_one_that_is_put_in_the_place_of_another_is_looked_at():
    model = Odd()

    def spoil(number):
        model.narrow = torch.full((3,), float("nan") if number == 2 else 1.0)

    sentinel = watched(model, 4, spoil)
    assert [one.step for one in sentinel.incidents] == [2]


def test_a_sum_that_overflows_is_no_alarm():
    model = Odd()

    def spoil(number):
        model.wide.fill_(1e308)
        model.narrow.fill_(60_000)

    assert watched(model, 4, spoil).incidents == ()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("bad", [False, True])
def test_nested_ones_are_looked_at_with_the_state(bad):
    model = Odd()
    model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))

    def spoil(number):
        if bad and number == 2:
            model.nested.values()[0] = float("nan")

    found = watched(model, 4, spoil, {"state_every": 1}).incidents
    assert [one.kind for one in found] == ([Kind.NONFINITE_STATE] if bad else [])


def test_a_mask_of_the_lowest_numbers_is_no_alarm():
    model = Odd()
    lowest = torch.full((16, 16), torch.finfo(torch.float32).min)
    model.register_buffer("causal", torch.triu(lowest, 1))  # adds up to -inf
    sentinel = watched(model, 4, lambda _: None)
    assert sentinel.incidents == ()
    assert sentinel._watch.run.health.small_buffers().isfinite()
    model.causal[0, 0] = float("nan")
    assert not sentinel._watch.run.health.small_buffers().isfinite()


def test_what_a_warning_let_through_is_not_warned_of_in_every_step(tmp_path):
    _, sentinel = train([NanCallback(**SELDOM, action="warn")], tmp_path)
    assert [one.step for one in sentinel.incidents] == [BAD]
    assert sentinel._watch.run.health.small_buffers().isfinite()


def test_the_look_never_writes_to_the_only_buffer(monkeypatch):
    """Where putting one tensor together hands back that very tensor, as a backend may."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_buffer("mean", torch.arange(1.0, 5.0))
    sentinel = Sentinel(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[NanCallback()])
    whole = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: parts[0] if len(parts) == 1 else whole(parts))
    value = sentinel._watch.run.health.small_buffers()
    sentinel.close()
    assert value is not None
    assert value.item() == 0.0
    assert model.mean.tolist() == [1.0, 2.0, 3.0, 4.0]
