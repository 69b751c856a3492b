"""The event log: the numbers of every step in few lines, budgets and snapshots when they change."""

import json
import math

import pytest
import torch
from torch import nn

from gradsentinel import Callback, EventLog, NanCallback, Rollback, Sentinel
from gradsentinel.errors import ConfigurationError


def train(run_dir, log=None, *, steps=25, bad=(), callbacks=()):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logs = [] if log is None else [log]
    seen = []
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), *callbacks, *logs], run_dir=run_dir
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            loss = model(batch).square().mean() * (math.nan if number in bad else 1.0)
            sentinel.backward(loss)
            sentinel.step()
            seen.append(float(loss.detach()))
    return sentinel, seen


def lines(run_dir, name):
    text = (run_dir / "events-rank0.jsonl").read_text()
    return [entry for entry in map(json.loads, text.splitlines()) if entry["event"] == name]


def numbers(run_dir):
    """Loss by attempted step, from all lines."""
    found = {}
    for entry in [*lines(run_dir, "step"), *lines(run_dir, "run_end")]:
        before = entry.get("before", {"iterations": [], "loss": []})
        found.update(zip(before["iterations"], before["loss"], strict=True))
        if entry["event"] == "step":
            found[entry["iteration"]] = entry["loss"]
    return found


def test_every_tenth_step_is_a_line_with_the_numbers_of_those_before_it(run_dir):
    _, seen = train(run_dir)
    assert [entry["step"] for entry in lines(run_dir, "step")] == [0, 10, 20]
    assert "before" not in lines(run_dir, "step")[0]
    assert numbers(run_dir) == pytest.approx(dict(enumerate(seen)))


def test_a_step_that_was_not_made_is_a_line_of_its_own(run_dir):
    train(run_dir, bad=(7,))
    assert [entry["step"] for entry in lines(run_dir, "step")] == [0, 7, 10, 20]
    assert numbers(run_dir)[7] == "nan"


@pytest.mark.parametrize(("every", "expected"), [(1, 25), (50, 1), (None, 0)])
def test_how_many_lines_there_are_can_be_set(run_dir, every, expected):
    _, seen = train(run_dir, EventLog(every=every))
    assert len(lines(run_dir, "step")) == expected
    assert len(numbers(run_dir)) == (len(seen) if every else 0)


def test_zero_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1 step"):
        EventLog(every=0)


def test_budgets_are_told_at_the_start_and_when_something_was_spent(run_dir):
    train(run_dir, bad=(7, 12))
    told = [entry["budgets"] for entry in lines(run_dir, "budgets")]
    assert [[(one["name"], one["limit"], one["spent"]) for one in each] for each in told] == [
        [("Skip", 10, [])],
        [("Skip", 10, [7])],
        [("Skip", 10, [7, 12])],
    ]


def test_snapshots_are_told_when_there_are_others(run_dir):
    train(run_dir, callbacks=[Rollback(every=10, confirm_after=3)])
    told = [
        ([one["step"] for one in entry["good"]], [one["step"] for one in entry["probation"]])
        for entry in lines(run_dir, "snapshots")
    ]
    assert told == [([0], []), ([0], [10]), ([0, 10], []), ([0, 10], [20]), ([0, 10, 20], [])]
    assert all(one["bytes"] > 0 for one in lines(run_dir, "snapshots")[-1]["good"])


def test_a_run_without_a_named_directory_holds_back_few_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradsentinel.callbacks.event_log._MOST_WAITING", 10)
    log = EventLog(every=1)
    train(None, log, steps=100)
    assert not (tmp_path / "gradsentinel-runs").exists()
    assert len(log._waiting) <= 10
    train(None, EventLog(every=1), steps=100, bad=(99,))
    (path,) = tmp_path.glob("gradsentinel-runs/*/events-rank0.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0]["event"] == "run_start"
    assert [entry["step"] for entry in found if entry["event"] == "step"][-3:] == [97, 98, 99]


def test_others_may_have_facts_of_theirs_written(run_dir):
    class Noting(Callback):
        def on_run_start(self, event):
            self.run = event.run

        def on_after_step(self, event):
            if event.step == 3:
                self.run.journal.append(("weather", {"degrees": math.inf}))

    train(run_dir, callbacks=[Noting()])
    (entry,) = lines(run_dir, "weather")
    assert (entry["step"], entry["degrees"]) == (3, "inf")
