"""The short way through a healthy step changes nothing but its cost."""

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsentinel
from gradsentinel import (
    BatchCallback,
    Detector,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Outcome,
    Retry,
    Sentinel,
    Skip,
    SpikeCallback,
    events,
)
from loops import build, make_batches

FAULTS = {
    "none": lambda step, parameters: None,
    "NaN gradient": lambda step, parameters: (
        parameters[1].grad.view(-1)[0].fill_(math.nan) if step == 30 else None
    ),
    "Inf gradient": lambda step, parameters: parameters[0].grad.fill_(math.inf) if step == 30 else None,
    "explosion": lambda step, parameters: (
        [p.grad.mul_(1e9) for p in parameters] if step in (30, 31) else None
    ),
    "spike": lambda step, parameters: [p.grad.mul_(40) for p in parameters] if step == 30 else None,
    "squares overflow": lambda step, parameters: parameters[0].grad.fill_(1e25) if step == 30 else None,
}


class Blocker(Detector):
    """Looks at nothing, but cannot say so beforehand: every event is sent."""

    def on_before_clip(self, event: events.BeforeClip) -> None:
        del event


class Listener(Detector):
    """Writes down what it hears, and is calm when told to."""

    def __init__(self, *, calm: Any = True) -> None:
        self.calm_answer = calm
        self.heard: list[tuple[str, int]] = []

    def calm(self, step: int, norm: float, losses: Any) -> bool | None:
        del norm
        self.heard.append(("asked", len(losses)))
        return self.calm_answer(step) if callable(self.calm_answer) else self.calm_answer

    def on_after_backward(self, event: events.AfterBackward) -> None:
        self.heard.append(("backward", event.microbatch))

    def on_before_clip(self, event: events.BeforeClip) -> None:
        self.heard.append(("clip", event.step))


def train(run_dir: Any, fault: Any, *more: Detector, steps: int = 40, accumulate: int = 1) -> dict[str, Any]:
    run = build(optimizer="sgd", accumulate=accumulate)
    watchers = [NanCallback(), MagnitudeCallback(max_global_norm=1e4), SpikeCallback(), BatchCallback()]
    batches = make_batches(steps * accumulate)
    norms = []
    with run.sentinel([*watchers, Skip(), *more], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches, accumulate=accumulate)):
            if fault == "NaN batch" and number == 30 * accumulate:
                batch["x"][0, 0] = math.nan
            loss = run.loss(batch)
            sentinel.backward(loss if not (fault == "NaN loss" and number == 33) else loss * math.nan)
            if fault in FAULTS and number % accumulate == accumulate - 1:
                FAULTS[fault](number // accumulate, list(run.model.parameters()))
            norms.append(sentinel.step(max_norm=1.0))
    return {
        "incidents": [
            (i.step, i.kind, i.outcome, i.message, i.microbatch, [t.name for t in i.tensors], i.loss)
            for i in sentinel.incidents
        ],
        "state": run.state(),
        "norms": [None if norm is None else float(norm) for norm in norms],
    }


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("fault", [*FAULTS, "NaN loss", "NaN batch"])
def test_what_is_found_and_done_is_the_same_without_it(tmp_path, fault, accumulate):
    short = train(tmp_path / "short", fault, accumulate=accumulate)
    whole = train(tmp_path / "whole", fault, Blocker(), accumulate=accumulate)
    assert str(short["incidents"]) == str(whole["incidents"])
    assert bool(short["incidents"]) is (fault != "none")
    torch.testing.assert_close(short["state"], whole["state"], rtol=0, atol=0, equal_nan=True)
    assert str(short["norms"]) == str(whole["norms"])


def heard(tmp_path: Any, *listeners: Detector, steps: int = 4, accumulate: int = 1) -> None:
    run = build(optimizer="sgd", accumulate=accumulate)
    calm = NanCallback(state_warmup=0)  # where the state is due it looks at the buffers before the step
    with run.sentinel([calm, *listeners], run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps(make_batches(steps * accumulate), accumulate=accumulate):
            sentinel.backward(run.loss(batch))
            sentinel.step()


def test_as_long_as_all_are_calm_nobody_hears_the_events(tmp_path):
    listener = Listener()
    heard(tmp_path, listener)
    assert listener.heard == [("asked", 1)] * 4


def test_when_one_hesitates_all_hear_both_events_in_order(tmp_path):
    calm, nervous = Listener(), Listener(calm=lambda step: step != 2)
    heard(tmp_path, calm, nervous)
    looked = [("asked", 1), ("backward", 0), ("clip", 2)]
    assert calm.heard == [("asked", 1)] * 2 + looked + [("asked", 1)]
    assert nervous.heard == calm.heard


def test_micro_batches_but_the_last_are_told_as_they_come(tmp_path):
    listener = Listener(calm=lambda step: step != 1)
    heard(tmp_path, listener, steps=2, accumulate=3)
    early = [("backward", 0), ("backward", 1)]
    assert listener.heard == [*early, ("asked", 3), *early, ("asked", 3), ("backward", 2), ("clip", 1)]


def test_who_never_can_tell_is_asked_once(tmp_path):
    listener = Listener(calm=None)
    heard(tmp_path, listener, steps=3)
    every = [("backward", 0), ("clip", 1), ("backward", 0), ("clip", 2)]
    assert listener.heard == [("asked", 1), ("backward", 0), ("clip", 0), *every]


def test_a_function_hears_every_event(tmp_path):
    steps: list[int] = []
    run = build(optimizer="sgd")
    with run.sentinel([NanCallback()], run_dir=tmp_path) as sentinel:
        sentinel.on(events.BeforeClip, lambda event: steps.append(event.step), every=1)
        for batch in sentinel.steps(make_batches(3)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert steps == [0, 1, 2]


def test_a_subclass_that_looks_for_itself_is_not_answered_for(tmp_path):
    class Stricter(NanCallback):
        def on_before_clip(self, event: events.BeforeClip) -> Finding:
            return Finding(kind=Kind.CUSTOM, value=event.gradients.total_norm, limit=0.0, message="too much")

    heard(tmp_path / "plain")
    run = build(optimizer="sgd")
    with run.sentinel([Stricter()], run_dir=tmp_path / "strict") as sentinel:
        for batch in sentinel.steps(make_batches(2)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert [incident.kind for incident in sentinel.incidents] == [Kind.CUSTOM, Kind.CUSTOM]


@pytest.mark.expects_swallowed
def test_one_that_raises_is_switched_off_and_reported(tmp_path):
    def broken(step: int) -> bool:
        raise ValueError(f"step {step}")

    listener = Listener(calm=broken)
    run = build(optimizer="sgd")
    with run.sentinel([NanCallback(state_warmup=0), listener], run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps(make_batches(3)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    [incident] = sentinel.incidents
    assert (incident.kind, incident.step) == (Kind.CALLBACK_ERROR, 0)
    assert listener.heard == [("asked", 1)]
    assert sentinel.applied_steps == 3


def test_a_second_loss_of_the_same_step_is_looked_at(tmp_path):
    run = build(optimizer="sgd")
    with run.sentinel([NanCallback()], run_dir=tmp_path) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            sentinel.backward(run.loss(batch))
            sentinel.backward(run.loss(batch) * (math.nan if number == 2 else 0.1))
            sentinel.step()
    [incident] = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome) == (2, Kind.NONFINITE_LOSS, Outcome.SKIPPED)


@pytest.mark.parametrize("known", [False, True])
def test_a_bad_further_step_on_the_same_batch_is_dropped_exactly(tmp_path, known):
    """Even the first one in a loop that has always made one step per batch until then."""
    run = build(optimizer="sgd")
    first = next(iter(run.model.parameters()))
    kept: dict[str, Any] = {}
    with run.sentinel(
        [NanCallback(), Retry()], forward=lambda _, batch: run.loss(batch), run_dir=tmp_path
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(8))):
            again = number == 6 or (known and number in (4, 5))
            for attempt in range(2 if again else 1):
                if number == 6 and attempt:
                    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
                loss = run.loss(batch)
                sentinel.backward(loss)
                if number == 6 and attempt:
                    first.grad.view(-1)[0] = math.nan
                sentinel.step()
                if number == 6 and attempt:
                    assert isinstance(run.model.norm, nn.BatchNorm1d)
                    outcome = sentinel.incidents[-1].outcome
                    if outcome is Outcome.SKIPPED:
                        torch.testing.assert_close(run.model.state_dict(), kept, rtol=0, atol=0)
    [incident] = sentinel.incidents
    assert incident.outcome is (Outcome.RETRIED if known else Outcome.SKIPPED)
    assert isinstance(sentinel, Sentinel)


def test_where_the_state_is_due_the_buffers_are_looked_at_before_the_step(tmp_path):
    listener = Listener()
    run = build(optimizer="sgd")
    with run.sentinel([NanCallback(state_warmup=2), listener], run_dir=tmp_path) as sentinel:
        for batch in sentinel.steps(make_batches(4)):
            sentinel.backward(run.loss(batch))
            sentinel.step()
    assert [entry for entry in listener.heard if entry[0] == "clip"] == [("clip", 0), ("clip", 1)]


MOST_CALLS = {"three": 56, "with BatchCallback": 104}
"""So many of our functions a healthy step enters at most, comprehensions included: each is slow in a step
whose work has pushed it out of the caches. In some steps more is due."""


@pytest.mark.parametrize("kind", MOST_CALLS)
def test_a_healthy_step_enters_few_functions(kind, run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 4))
    watchers = [NanCallback(), MagnitudeCallback(max_global_norm=1e4), SpikeCallback()]
    if kind == "with BatchCallback":
        watchers.append(BatchCallback())
    home = str(Path(gradsentinel.__file__).parent)
    calls = 0

    def note(frame: Any, what: str, _: Any) -> None:
        nonlocal calls
        calls += what == "call" and frame.f_code.co_filename.startswith(home)

    counts = []
    with Sentinel(
        model, torch.optim.AdamW(model.parameters(), 1e-3), callbacks=watchers, run_dir=run_dir
    ) as s:
        for number, batch in enumerate(s.steps(torch.randn(1, 8) for _ in range(110))):
            loss = model(batch).square().mean()
            # The state is looked at after each of the first ten steps, each tenth is written down, what is
            # expected is worked out in each of the first 48 and in every sixteenth, and those who keep books
            # hear of up to eight steps at a time.
            calls = 0
            sys.setprofile(note if number >= 60 else None)
            try:
                s.backward(loss)
                s.step(max_norm=1e-4)
            finally:
                sys.setprofile(None)
            counts.append(calls)
        assert not s.incidents
    assert 0 < statistics.median(counts[60:]) <= MOST_CALLS[kind]
