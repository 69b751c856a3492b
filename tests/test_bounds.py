"""What is kept for a diagnosis is bounded, and each bound follows the one setting."""

import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, NanCallback, Sentinel, SpikeCallback
from gradsentinel.callbacks.silent_check import LOGGER, SilentCheckLog
from gradsentinel.diagnosis.environment import environment
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.measures.bounds import MOST_LAG, SIZES, VARIABLE, Bounds, bounds, parse
from gradsentinel.measures.levels import Levels
from gradsentinel.measures.mailbox import Letter, Mailbox


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Bounds()),
        (" , ", Bounds()),
        ("pinned=4MiB,steps=128,norms=500000", Bounds(pinned=4 << 20, steps=128, norms=500_000)),
        (" pinned = 0 , copies=1.5gib", Bounds(pinned=0, copies=3 << 29)),
        ("weights=512KiB,alarms=1", Bounds(weights=1 << 19, alarms=1)),
    ],
)
def test_the_setting_is_read(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pined=4MiB", "'pined=4MiB' is none of pinned=<size>, steps=<number>, norms=<number>"),
        ("128", "'128' is none of"),
        ("steps=0", "steps=0 is no whole number from 1 on"),
        ("steps=-3", "no whole number"),
        ("norms=1e6", "no whole number"),
        ("steps=4MiB", "no whole number"),
        ("pinned=4MB", "pinned=4MB is no size; give bytes, or 512KiB, 4MiB, 1GiB"),
        ("pinned=", "is no size"),
        ("steps=1,steps=2", "steps is there twice"),
        ("steps=" + "9" * 5000, "more than any memory holds"),
        ("pinned=" + "9" * 400, "more than any memory holds"),
    ],
)
def test_a_mistake_is_told_when_the_run_is_made_with_the_names_there_are(text, why, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, text)
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=VARIABLE) as caught:
        Sentinel(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    assert why in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_bounds_can_be_read_back_and_are_in_a_bundle(monkeypatch):
    monkeypatch.setenv(VARIABLE, "pinned=4MiB,steps=3")
    assert parse(str(bounds())) == bounds() == Bounds(pinned=4 << 20, steps=3)
    assert environment()["variables"][VARIABLE] == "pinned=4MiB,steps=3"
    assert {name for name in Bounds.__dataclass_fields__ if getattr(Bounds(), name) > 1 << 19} == SIZES


# -- each bound binds -----------------------------------------------------------------------------------


def train(run_dir, *, bad, callbacks=None, guard="host", lag=2, steps=12, forward=None, seen=None):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=guard == "device")
    callbacks = callbacks or [NanCallback()]
    with Sentinel(
        model, optimizer, callbacks=callbacks, run_dir=run_dir, guard=guard, lag=lag, forward=forward
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            sentinel.backward(model(batch).square().mean())
            if number in bad:
                model[1].weight.grad.fill_(math.inf)
            sentinel.step()
            if seen is not None:
                seen(sentinel)
    return sentinel


@pytest.mark.parametrize(
    ("text", "iterations"), [("steps=3", [7, 8, 9]), ("norms=8", [8, 9]), ("", list(range(10)))]
)
def test_norms_of_earlier_steps(text, iterations, monkeypatch, run_dir):
    monkeypatch.setenv(VARIABLE, text)
    sentinel = train(run_dir, bad=(9,))
    found = json.loads((run_dir / "incidents" / sentinel.incidents[0].id / "norms.json").read_text())
    assert found["iterations"] == iterations


def test_pinned_memory_that_waits_for_the_next_numbers(monkeypatch):
    monkeypatch.setenv(VARIABLE, "pinned=1KiB")
    mailbox = Mailbox(torch.device("meta"))  # takes no memory; on a CPU there is nothing to keep
    for size in range(1, 100):
        mailbox.take_back(Letter(torch.zeros(size), None))
    assert 0 < mailbox.spare <= 1024


def test_what_a_detector_keeps_for_a_rollback(monkeypatch):
    monkeypatch.setenv(VARIABLE, "marks=2")
    levels = Levels(limit=4.0, floor=0.1)
    for step in range(100):
        levels.judge(step, torch.ones(3))
    assert [step for step, _ in levels._marks] == [80, 96]


def test_modules_that_are_watched(monkeypatch, run_dir):
    monkeypatch.setenv(VARIABLE, "modules=2")
    watched = []

    def seen(sentinel):
        armed = sentinel._watch.run.local.armed
        watched.append(0 if armed is None else len(armed.names))

    train(run_dir, bad=(2,), steps=5, seen=seen)
    assert watched == [0, 0, 2, 2, 2]


def bad_operators(count, size=1000):
    trace = Trace((), ())
    with trace:
        for _ in range(count):
            torch.zeros(size).log()
    return [event for event in trace.events if event.results]


@pytest.mark.parametrize(("text", "kept"), [("calls=3", 3), ("", 5)])
def test_inputs_of_bad_operators(text, kept, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    assert [bool(event.args) for event in bad_operators(5)] == [True] * kept + [False] * (5 - kept)


def test_copies_of_these_inputs(monkeypatch):
    monkeypatch.setenv(VARIABLE, "copies=8000")
    given = [torch.zeros(1000) for _ in range(4)]
    trace = Trace((), ())
    with trace:
        for values in given:
            values.log()
    events = [event for event in trace.events if event.results]
    copied = [event.args[0] is not values for event, values in zip(events, given, strict=True)]
    assert copied == [True, True, False, False]


def test_parameters_that_are_copied_for_a_replay(monkeypatch, run_dir, caplog):
    monkeypatch.setenv(VARIABLE, "weights=16")

    def writes(model, batch):
        with torch.no_grad():
            model[0].weight.mul_(1.0)
        return model(batch).square().mean()

    train(run_dir, bad=(3,), forward=writes)
    assert "the forward pass writes to 0.weight, which is too large to be put back" in caplog.text


def test_warnings_of_the_silent_check(monkeypatch):
    monkeypatch.setenv(VARIABLE, "alarms=3")
    heard = SilentCheckLog()
    heard.install()
    try:
        for number in range(5):
            logging.getLogger(LOGGER).warning("checksum of %d is abnormal", number)
    finally:
        heard.remove()
    assert (heard.waiting, heard.dropped, len(heard.take())) == (3, 2, 3)


# -- what is handled late -------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, MOST_LAG])
def test_a_baseline_learns_from_steps_that_are_heard_of_as_late_as_possible(lag, run_dir):
    spikes = SpikeCallback()
    train(run_dir, bad=(), callbacks=[NanCallback(), spikes], guard="device", lag=lag, steps=60)
    learnt = {name: len(found) for series in spikes._series.values() for name, found in series.items()}
    assert learnt == {"loss": 60, "grad_norm": 60}


class Root(nn.Module):
    bad = False

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.log(self.first(x) * 0) if self.bad else self.first(x))


def test_armed_hooks_remember_as_many_steps_as_an_incident_may_be_late(run_dir):
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    with Sentinel(
        model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, guard="device", lag=6
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(30)])):
            model.bad = number in (2, 12)
            sentinel.backward(model(batch).mean())
            sentinel.step()
    second = sentinel.incidents[1]
    assert second.step == 12
    assert (second.diagnosis.phase, second.diagnosis.module) == ("forward", "")


@pytest.mark.parametrize("page", ["npu.md", "npu.zh-CN.md"])
def test_the_pages_name_each_bound_with_its_default(page):
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\d+\w*)` \|", text, re.MULTILINE)
    assert parse(",".join(f"{name}={default}" for name, default in rows)) == Bounds()
    assert [name for name, _ in rows] == list(Bounds.__dataclass_fields__)
