"""Profiler marks: there when asked for, and not a trace of them otherwise."""

import pytest
import torch
from torch import nn

from gradsentinel import AfterStep, MagnitudeCallback, NanCallback, Sentinel, marks
from loops import build, differences, finish, make_batches, train_watched


def train(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e6)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.ones(4, 3)] * 3):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(1.0)
    return sentinel, model


def names(run_dir):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(run_dir)
    return {event.key for event in profile.key_averages() if event.key.startswith("gradsentinel/")}


def test_off_by_default_and_then_nothing_is_wrapped(run_dir, monkeypatch):
    monkeypatch.delenv(marks.VARIABLE, raising=False)
    assert names(run_dir) == set()
    sentinel, _ = train(run_dir.parent / "again")
    watch = sentinel._watch
    assert not {"before_clip", "after_step", "after_backward"} & vars(watch).keys()
    assert all(listener.function.__self__ is listener.owner for listener in watch.bus.listeners())


@pytest.mark.parametrize("value", ["0", "", "off", "False"])
def test_a_variable_that_says_no(value, monkeypatch):
    monkeypatch.setenv(marks.VARIABLE, value)
    assert not marks.wanted()


def test_phases_and_callbacks_are_ranges(run_dir, monkeypatch):
    monkeypatch.setenv(marks.VARIABLE, "1")
    found = names(run_dir)
    assert found >= {
        *("gradsentinel/before_clip", "gradsentinel/after_backward", "gradsentinel/after_step"),
        *("gradsentinel/NanCallback.on_run_start", "gradsentinel/NanCallback.on_after_step"),
        "gradsentinel/EventLog.on_after_step",
    }


def test_a_marked_run_is_the_same_run(run_dir, monkeypatch):
    plain = build(random=True, max_norm=1.0)
    with plain.sentinel([NanCallback()], run_dir=run_dir / "plain") as sentinel:
        finish(train_watched(plain, sentinel, make_batches(8)))
    monkeypatch.setenv(marks.VARIABLE, "1")
    marked = build(random=True, max_norm=1.0)
    heard = []
    with marked.sentinel([NanCallback()], run_dir=run_dir / "marked") as sentinel:
        sentinel.on(AfterStep, lambda event: heard.append(event.step))
        finish(train_watched(marked, sentinel, make_batches(8)))
    assert differences(marked.state(), plain.state()) == []
    assert heard == list(range(8))


@pytest.mark.expects_swallowed
def test_a_callback_that_raises_is_switched_off_as_ever(run_dir, monkeypatch):
    monkeypatch.setenv(marks.VARIABLE, "1")
    monkeypatch.setattr(NanCallback, "on_after_step", lambda self, event: 1 / 0)
    sentinel, _ = train(run_dir)
    assert [str(incident.kind) for incident in sentinel.incidents] == ["callback_error"]
