"""P2: a dropped step leaves everything as if its batch had never been seen, and drops are never endless."""

import json
import logging
import re

import pytest
import torch
from torch import nn

from gradsentinel import Action, Kind, NanCallback, Outcome, Rollback, Sentinel, Skip, TrainingAborted
from gradsentinel.store import RunDirectory
from loops import (
    OPTIMIZERS,
    Spoiler,
    build,
    differences,
    fingerprint,
    finish,
    make_batches,
    train_by_hand,
    train_watched,
)

NAN, INF = float("nan"), float("inf")
KINDS = {
    "input": Kind.NONFINITE_INPUT,
    "loss": Kind.NONFINITE_LOSS,
    "gradient": Kind.NONFINITE_GRADIENT,
}


def drop_and_compare(settings, spoiler, run_dir, *, batches=12, callbacks=None):
    """Train on all batches with some spoiled; it must end as a run by hand without those windows."""
    everything = make_batches(batches)
    reference = build(**settings)
    window = reference.accumulate
    spoiled = {number // window for number in spoiler.at}
    train_by_hand(reference, [b for number, b in enumerate(everything) if number // window not in spoiled])

    run = build(**settings)
    with run.sentinel(callbacks or [NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, spoiler.batches(everything), spoil=spoiler))

    assert differences(run.state(), reference.state()) == []
    assert [incident.step for incident in sentinel.incidents] == sorted(spoiled)
    assert all(incident.outcome is Outcome.SKIPPED for incident in sentinel.incidents)
    return sentinel


@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer, where, value, run_dir):
    sentinel = drop_and_compare(
        {"optimizer": optimizer, "max_norm": 1.0}, Spoiler(where, frozenset({5}), value), run_dir
    )
    (incident,) = sentinel.incidents
    assert incident.kind is KINDS[where]
    assert incident.severity.label == "warning"
    (stored,) = RunDirectory(run_dir).read_incidents()
    assert stored.as_dict() == incident.as_dict()


@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("scheduler", ["onecycle", "lambda", "cosine"])
def test_scheduler_average_and_buffers(scheduler, where, run_dir):
    drop_and_compare(
        {"scheduler": scheduler, "ema": True, "max_norm": 0.5}, Spoiler(where, frozenset({3, 7})), run_dir
    )


@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("microbatch", [0, 2, 3])
def test_the_whole_accumulation_window(microbatch, where, run_dir):
    sentinel = drop_and_compare(
        {"accumulate": 4, "max_norm": 1.0, "scheduler": "cosine", "ema": True},
        Spoiler(where, frozenset({4 + microbatch})),
        run_dir,
    )
    (incident,) = sentinel.incidents
    assert incident.microbatch == microbatch


def test_a_short_last_window(run_dir):
    drop_and_compare({"accumulate": 4}, Spoiler("loss", frozenset({9})), run_dir, batches=10)


def test_two_optimizers(run_dir):
    drop_and_compare(
        {"two_optimizers": True, "scheduler": "cosine", "max_norm": 1.0},
        Spoiler("gradient", frozenset({4})),
        run_dir,
    )


def test_bfloat16_autocast(run_dir):
    drop_and_compare({"autocast": torch.bfloat16}, Spoiler("input", frozenset({2})), run_dir)


@pytest.mark.parametrize("where", KINDS)
def test_the_first_step(where, run_dir):
    drop_and_compare({"max_norm": 1.0}, Spoiler(where, frozenset({0})), run_dir)


@pytest.mark.parametrize("where", KINDS)
def test_the_first_step_of_a_loop_without_steps(where, run_dir):
    batches = make_batches(4)
    reference = build()
    train_by_hand(reference, batches[1:])
    run, spoiler = build(), Spoiler(where, frozenset({0}))
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(spoiler.batches(batches)):
            loss = spoiler.loss(number, run.loss(batch))
            spoiler.arm(number, run.model)
            sentinel.backward(loss)
            sentinel.step()
    assert differences(run.state(), reference.state()) == []
    assert [incident.step for incident in sentinel.incidents] == [0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_that_cannot_be_edited(optimizer, run_dir):
    """Clipping has spread the NaN over all gradients before the hooks are called."""
    settings = {"optimizer": optimizer, "max_norm": 1.0}
    batches, spoiler = make_batches(8), Spoiler("input", frozenset({0, 5}))
    reference = build(**settings)
    train_by_hand(reference, [batch for number, batch in enumerate(batches) if number not in spoiler.at])
    run = build(**settings)
    callbacks = [NanCallback()]
    with (
        Sentinel(run.model, run.optimizers, callbacks=callbacks, run_dir=run_dir) as sentinel,
        sentinel.attached(),
    ):
        train_by_hand(run, spoiler.batches(batches))
    assert differences(run.state(), reference.state()) == []
    assert [incident.step for incident in sentinel.incidents] == [0, 5]


def test_nothing_is_taken_back_of_the_steps_before(run_dir):
    """Right after the drop the state is what it was right before, and the norm that came back says why."""
    run = build(scheduler="onecycle", ema=True)
    batches = make_batches(4)
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        before = None
        for number, batch in enumerate(sentinel.steps(batches)):
            sentinel.backward(run.loss(batch) * (NAN if number == 2 else 1))
            norm = sentinel.step(max_norm=1.0)
            if number == 1:
                before = fingerprint(run.state())
            if number == 2:
                assert fingerprint(run.state()) == before
                assert not torch.isfinite(norm)
                assert not sentinel.applied
                assert sentinel.last_action is Action.SKIP
                assert all(p.grad is None for p in run.model.parameters())
        assert sentinel.applied
        assert sentinel.applied_steps == 3
        assert sentinel.step_count == 4


def test_a_gradient_without_an_optimizer_does_not_outlive_the_drop(run_dir):
    """The backbone is neither frozen nor optimized: its NaN would otherwise stay in `.grad` for ever."""
    run = build()
    optimizer = torch.optim.SGD(run.model.head.parameters(), lr=0.1)
    with Sentinel(run.model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            sentinel.backward(run.loss(batch) * (NAN if number == 1 else 1))
            sentinel.step()
    assert [incident.step for incident in sentinel.incidents] == [1]
    assert sentinel.applied_steps == 3


# -- the loss scaler ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
def test_a_nonfinite_loss_is_no_matter_of_the_scale(optimizer, run_dir):
    run = build(optimizer=optimizer, autocast=torch.float16, scale=1024.0, scheduler="cosine", ema=True)
    spoiler = Spoiler("loss", frozenset({3}))
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        states = []
        steps = train_watched(run, sentinel, make_batches(6), spoil=spoiler)
        states.extend(fingerprint({**run.state(), "scaler": None}) for _ in steps)
    assert states[3] == states[2]
    assert states[4] != states[3]
    (incident,) = sentinel.incidents
    assert incident.kind is Kind.NONFINITE_LOSS
    assert "lowering the loss scale cannot help" in " ".join(incident.diagnosis.remedy)
    assert sentinel.applied_steps == 5  # the scaler was updated, or the step after would have failed
    assert run.scaler.get_scale() > 0


# torch's own remark on every loop whose first step overflows
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_the_search_for_a_scale_is_no_incident_but_is_on_record(run_dir):
    run = build(autocast=torch.float16, scale=2.0**22, scheduler="cosine")
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(8)))
    assert sentinel.incidents == ()
    skips = [event for event in RunDirectory(run_dir).read_events() if event["event"] == "scaler_skip"]
    assert [skip["loss_scale"] for skip in skips][:3] == [2.0**22, 2.0**21, 2.0**20]
    assert sentinel.applied_steps == 8 - len(skips) > 0


def test_a_gradient_that_overflows_at_any_scale_is_one(run_dir):
    run = build(scale=8.0)
    run.model.head.weight.register_hook(lambda gradient: gradient * INF)
    with (
        run.sentinel([NanCallback(), Skip(max_skips=2)], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted),
    ):
        finish(train_watched(run, sentinel, make_batches(20)))
    assert [incident.kind for incident in sentinel.incidents] == [Kind.LOSS_SCALE] * 3
    first = sentinel.incidents[0]
    assert first.step == 3  # dropped by the scaler at 8, 4 and 2
    assert first.details["loss_scale"] == 1.0
    assert "lowering the loss scale cannot help" in " ".join(first.diagnosis.remedy)
    assert [tensor.name for tensor in first.tensors] == ["head.weight"]


def test_a_search_that_never_ends_is_one(run_dir):
    """From a huge scale it would take the scaler hundreds of dropped steps to collapse."""
    run = build(scale=2.0**60)
    run.model.head.weight.register_hook(lambda gradient: gradient * INF)
    with (
        run.sentinel([NanCallback(max_scaler_skips=5)], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted, match="dropped 5 steps in a row"),
    ):
        finish(train_watched(run, sentinel, make_batches(20)))
    (incident,) = sentinel.incidents
    assert incident.kind is Kind.LOSS_SCALE


# -- budgets --------------------------------------------------------------------------------------


def test_an_exhausted_budget_stops_the_run(run_dir):
    run = build(scheduler="cosine")
    batches = make_batches(12)
    with (
        run.sentinel([NanCallback(), Skip(max_skips=2, window=10)], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted) as caught,
    ):
        finish(train_watched(run, sentinel, batches, spoil=Spoiler("loss", frozenset({1, 4, 7}))))
    message = str(caught.value)
    assert "step 7" in message
    assert "budget of 2 dropped steps in 10" in message
    last = sentinel.incidents[-1]
    assert str(run_dir / "incidents" / last.id) in message
    assert last.outcome is Outcome.ABORTED
    assert last.severity.label == "critical"
    assert RunDirectory(run_dir).read_incidents()[-1].as_dict() == last.as_dict()
    reference = build(scheduler="cosine")
    train_by_hand(reference, [batches[number] for number in (0, 2, 3, 5, 6)])
    assert differences(run.state(), reference.state()) == []


def test_drops_far_enough_apart_do_not_exhaust_it(run_dir):
    drop_and_compare(
        {},
        Spoiler("loss", frozenset({0, 5, 10, 15})),
        run_dir,
        batches=16,
        callbacks=[NanCallback(), Skip(max_skips=2, window=10)],
    )


@pytest.mark.parametrize("where", KINDS)
def test_a_run_of_bad_steps_ends_by_default(where, run_dir):
    run, spoiler = build(), Spoiler(where, frozenset(range(100)))
    with (
        run.sentinel([NanCallback()], run_dir=run_dir) as sentinel,
        pytest.raises(TrainingAborted, match="budget of 10 dropped steps"),
    ):
        finish(train_watched(run, sentinel, spoiler.batches(make_batches(100)), spoil=spoiler))
    assert len(sentinel.incidents) == 11
    assert re.search(r"11 \w+ in a row", str(sentinel.incidents[-1].notes))
    assert differences(run.state(), build().state()) == []


def test_the_next_rung_takes_over_from_an_exhausted_budget(run_dir):
    run = build()
    callbacks = [
        NanCallback(),
        Skip(max_skips=2, window=10),
        Rollback(every=2, confirm_after=1, after=100),
    ]
    states = {}
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        steps = train_watched(run, sentinel, make_batches(12), spoil=Spoiler("loss", frozenset({5, 7, 9})))
        for done in steps:
            states[done] = fingerprint(run.state())
    assert [incident.outcome for incident in sentinel.incidents] == [
        Outcome.SKIPPED,
        Outcome.SKIPPED,
        Outcome.ROLLED_BACK,
    ]
    assert any("budget of 2 dropped steps" in note for note in sentinel.incidents[-1].notes)
    assert "rolled back to step" in sentinel.incidents[-1].recovery
    assert sentinel.step_count < 12


def test_every_drop_is_told(run_dir, caplog):
    run = build()
    with caplog.at_level(logging.WARNING), run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(6), spoil=Spoiler("loss", frozenset({1, 4}))))
    told = [record.getMessage() for record in caplog.records if "step dropped" in record.getMessage()]
    assert len(told) == 2
    assert "step 1" in told[0]
    assert "the loss is nan" in told[0]
    lines = [json.loads(line) for line in (run_dir / "events-rank0.jsonl").read_text().splitlines()]
    recoveries = [(line["step"], line["outcome"]) for line in lines if line["event"] == "recovery"]
    assert recoveries == [(1, "skipped"), (4, "skipped")]


@pytest.mark.parametrize("where", KINDS)
def test_an_action_of_warn_lets_the_step_through(where, run_dir):
    """It was asked for in so many words."""
    run, spoiler = build(), Spoiler(where, frozenset({1}))
    callbacks = [NanCallback(action="warn", state_warmup=0, state_every=0)]
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        steps = train_watched(run, sentinel, spoiler.batches(make_batches(2)), spoil=spoiler)
        finish(steps)
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.REPORTED]
    assert sentinel.applied_steps == 2
    assert not all(torch.isfinite(p).all() for p in run.model.parameters())


def test_an_uninitialised_parameter_is_named_before_any_step(run_dir):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.no_grad():
        model[1].bias[1] = NAN
    with pytest.raises(TrainingAborted, match=r"before the first step, parameter '1\.bias'"):
        Sentinel(
            model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[NanCallback()], run_dir=run_dir
        )
    (incident,) = RunDirectory(run_dir).read_incidents()
    assert (incident.kind, incident.step, incident.outcome) == (
        Kind.NONFINITE_PARAMETER,
        0,
        Outcome.ABORTED,
    )


@pytest.mark.parametrize("microbatch", [0, 1, 2, 3])
def test_the_bad_micro_batch_is_named_after_a_short_window_too(microbatch, run_dir):
    """The last window of an epoch of ten batches has two; the first of the next epoch has four again."""
    run = build(accumulate=4)
    batches = make_batches(10)
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, batches))
        finish(train_watched(run, sentinel, batches, spoil=Spoiler("gradient", frozenset({microbatch}))))
    (incident,) = sentinel.incidents
    assert (incident.step, incident.microbatch) == (3, microbatch)
