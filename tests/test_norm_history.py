"""The norms before an incident: the right ones, bounded; nothing is launched for them on a healthy step."""

import gc
import json
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import NanCallback, Retry, Sentinel
from gradsentinel.gradients import GradientView
from gradsentinel.measures.bounds import Bounds
from gradsentinel.measures.norm_history import NormHistory


def view_of(**gradients):
    view = GradientView(list(gradients.items()))
    _ = view.total_norm
    return view


def train(run_dir, *, bad=(), steps=80, seen=None, guard="host", dtype=None):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    if dtype is not None:
        model[1].to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=guard == "device")
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, guard=guard) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            hidden = model[0](batch)
            sentinel.backward(model[1](hidden if dtype is None else hidden.to(dtype)).float().square().mean())
            if number in bad:
                model[1].weight.grad.fill_(math.inf)
            if seen is not None:
                seen.append({name: float(p.grad.float().norm()) for name, p in model.named_parameters()})
            sentinel.step(max_norm=0.1)
    return sentinel


def norms_of(run_dir, incident):
    return json.loads((run_dir / "incidents" / incident.id / "norms.json").read_text())


@pytest.mark.parametrize("guard", ["host", "device"])
def test_the_file_holds_the_norms_of_the_steps_before_and_of_the_bad_one(run_dir, guard):
    seen = []
    sentinel = train(run_dir, bad=(75,), seen=seen, guard=guard)
    (incident,) = sentinel.incidents
    found = norms_of(run_dir, incident)
    assert found["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found["iterations"] == found["steps"] == list(range(75 - Bounds().steps + 1, 76))
    assert (found["schema"], found["rank"], found["local"]) == (1, 0, False)
    for at, row in zip(found["iterations"][:-1], found["values"][:-1], strict=True):
        assert row == pytest.approx(list(seen[at].values()), rel=1e-4)
    assert found["values"][-1][2] == "inf"


def test_norms_of_several_dtypes_are_under_their_names(run_dir):
    seen = []
    sentinel = train(run_dir, bad=(5,), steps=8, seen=seen, dtype=torch.bfloat16)
    found = norms_of(run_dir, sentinel.incidents[0])
    assert len(found["iterations"]) == 6
    assert found["values"][3] == pytest.approx(list(seen[3].values()), rel=1e-2)
    assert found["values"][-1][2] == "inf"


def test_without_an_incident_nothing_is_written(run_dir):
    train(run_dir, steps=5)
    assert not (run_dir / "incidents").exists()


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_remembering_launches_copies_and_reads_nothing(dtype):
    history = NormHistory()
    view = view_of(a=torch.ones(3), b=torch.ones(2, dtype=dtype))
    with Counted() as counted:
        history.remember(0, 0, view)
    assert counted.count == 0
    assert len(history) == 1


def test_a_view_that_nobody_measured_is_not_measured_for_it():
    history = NormHistory()
    view = GradientView([("a", torch.ones(3))])
    with Counted() as counted:
        history.remember(0, 0, view)
    assert (counted.count, len(history)) == (0, 0)
    assert history.until(10) is None


def test_the_gradients_themselves_are_let_go():
    history, gradient = NormHistory(), torch.ones(1000)
    gone = weakref.ref(gradient)
    history.remember(0, 0, view_of(a=gradient))
    del gradient
    gc.collect()
    assert gone() is None
    assert history.until(0)["values"] == [[pytest.approx(math.sqrt(1000), rel=1e-5)]]


def test_the_number_of_steps_and_of_norms_is_bounded():
    history = NormHistory(Bounds(steps=8, norms=20))
    for step in range(30):
        history.remember(step, step, view_of(a=torch.ones(1)))
    assert history.until(100)["iterations"] == list(range(22, 30))
    for step in range(30, 40):
        history.remember(step, step, view_of(**{f"p{number}": torch.ones(1) for number in range(7)}))
    assert history.until(100)["iterations"] == [38, 39]
    history.remember(40, 40, view_of(**{f"p{number}": torch.ones(1) for number in range(100)}))
    assert history.until(100)["iterations"] == [40]


def test_players_that_take_turns_each_have_their_own_steps():
    history = NormHistory()
    history.remember(0, 0, view_of(d=torch.tensor([3.0, 4.0])))
    history.remember(0, 1, view_of(g=torch.tensor([6.0, 8.0])))
    found = history.until(1)
    assert found["names"] == ["d", "g"]
    assert found["values"] == [[5.0, None], [None, 10.0]]
    assert history.until(0)["names"] == ["d"]


def test_a_step_that_was_computed_again_shows_the_bad_norms(run_dir):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spoil = iter([math.nan])

    def forward(model, batch):
        return model(batch).square().mean() * next(spoil, 1.0)

    callbacks = [NanCallback(), Retry()]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=forward) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 4) for _ in range(2)]):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert str(incident.outcome) == "retried"
    assert norms_of(run_dir, incident)["values"] == [["nan", "nan"]]


def test_a_file_that_cannot_be_written_does_not_stop_the_run(run_dir, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("gradsentinel.store.RunDirectory.write_norms", refuse)
    sentinel = train(run_dir, bad=(3,), steps=6)
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["skipped"]
    assert "before incident 000003-nonfinite_gradient could not be written: disk full" in caplog.text
