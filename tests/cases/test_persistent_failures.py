"""When dropping steps is no cure: the same gate every time, a bad batch every now and then, a bad state."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Skip, TrainingAborted


class Gated(nn.Module):
    """A zero-initialised gate under a hand-made norm: its gradient is NaN on every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.gate = nn.Parameter(torch.zeros(4))

    def loss(self, x):
        loss = (self.lin(x) - 1).pow(2).mean() + 0.01 * self.gate.pow(2).sum().sqrt()
        assert loss.isfinite()
        return loss


def gated_run(watch, *callbacks):
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sentinel = watch(model, optimizer, *callbacks, scheduler=scheduler)
    return model, optimizer, scheduler, sentinel


def test_one_parameter_fails_on_every_step(watch, drive, told, named, nonfinite):
    """DeepSpeed#8415, #2911: the guard drops every step, nothing is logged, nothing is ever trained.

    After the third failure the record says that it is not transient and which parameter it always is;
    when the budget is used up the run stops. Weights and schedule have not moved.
    """
    model, optimizer, scheduler, sentinel = gated_run(watch)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TrainingAborted, match="not transient") as stopped:
        drive(sentinel, [torch.randn(8, 4) for _ in range(1000)], model.loss)
    assert told(sentinel) == [(s, "nonfinite_gradient", "skipped") for s in range(10)] + [
        (10, "nonfinite_gradient", "aborted")
    ]
    assert all(named(incident) == {"gate"} for incident in sentinel.incidents)
    third = sentinel.incidents[2]
    assert third.severity.label == "error"
    assert "3 steps in a row failed, every one since the start, always gate" in third.notes[-1]
    assert "always gate" in str(stopped.value)
    assert "budget of 10 dropped steps" in str(stopped.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scheduler.get_last_lr() == [0.1]
    assert nonfinite(model, optimizer) == []


def test_rollback_does_not_prolong_it_for_ever(watch, drive, named, nonfinite):
    """The same with Rollback: going back changes nothing, so it ends within a few rollbacks."""
    model, optimizer, _, sentinel = gated_run(watch, NanCallback(), Rollback())
    with pytest.raises(TrainingAborted, match="gate"):
        drive(sentinel, [torch.randn(8, 4) for _ in range(1000)], model.loss)
    assert len(sentinel.incidents) <= 12
    assert all(named(incident) == {"gate"} for incident in sentinel.incidents)
    assert [str(i.outcome) for i in sentinel.incidents].count("rolled_back") == 3
    assert sentinel.applied_steps == 0
    assert nonfinite(model, optimizer) == []


def regression(every=0, count=500):
    """A model and batches of which every n-th is bad."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    batches = [torch.randn(4, 4) for _ in range(count)]
    for batch in batches[every - 1 :: every]:
        batch[0, 0] = torch.nan
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches


@pytest.mark.parametrize("callbacks", [[], [Rollback()]], ids=["alone", "rollback"])
def test_every_tenth_batch_is_bad(callbacks, watch, drive, nonfinite):
    """One batch in ten lost is not a transient fault: by default the run says so instead of going on."""
    model, optimizer, batches = regression(every=10)
    sentinel = watch(model, optimizer, NanCallback(), *callbacks)
    with pytest.raises(TrainingAborted, match="budget"):
        drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert str(sentinel.incidents[10].outcome) == ("rolled_back" if callbacks else "aborted")
    assert {str(incident.kind) for incident in sentinel.incidents} == {"nonfinite_input"}
    assert nonfinite(model, optimizer) == []


def test_every_tenth_batch_is_bad_and_that_is_accepted(watch, drive, told, nonfinite):
    """Whoever knows the data may raise the budget; then exactly the bad batches are lost."""
    model, optimizer, batches = regression(every=10)
    sentinel = watch(model, optimizer, NanCallback(), Skip(max_skips=20, window=200))
    actions = drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert actions == (["continue"] * 9 + ["skip"]) * 50
    assert len(told(sentinel)) == 50
    assert sentinel.applied_steps == 450
    assert nonfinite(model, optimizer) == []


def test_the_budget_recovers_as_its_window_moves_on(watch, drive, nonfinite):
    """A bad batch every 25 steps stays below ten in two hundred, for as long as it may take."""
    model, optimizer, batches = regression(every=25)
    sentinel = watch(model, optimizer)
    drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert len(sentinel.incidents) == 20
    assert {incident.severity.label for incident in sentinel.incidents} == {"warning"}
    assert nonfinite(model, optimizer) == []


def test_three_failures_in_a_row_go_back_and_on(watch, drive, told, nonfinite):
    """A stretch of NaN losses from healthy data, as after a bad update: back to good weights, then on."""
    model, optimizer, batches = regression(count=12, every=1000)
    callbacks = NanCallback(), Rollback(every=2, confirm_after=1, after=3)
    sentinel = watch(model, optimizer, *callbacks)
    step = iter(range(12))
    actions = drive(
        sentinel, batches, lambda x: model(x).pow(2).mean() * (torch.nan if next(step) in (5, 6, 7) else 1)
    )
    assert actions == ["continue"] * 5 + ["skip", "skip", "rollback"] + ["continue"] * 4
    assert [kind for _, kind, _ in told(sentinel)] == ["nonfinite_loss"] * 3
    assert "rolled back to step 4" in sentinel.incidents[-1].recovery
    assert sentinel.step_count == 8
    assert nonfinite(model, optimizer) == []


def test_nothing_is_hidden(watch, drive, caplog):
    """Every dropped step is in the log and on disk, and says how many more are allowed."""
    model, optimizer, batches = regression(every=4, count=12)
    sentinel = watch(model, optimizer)
    with caplog.at_level("WARNING", "gradsentinel"):
        drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert ["drops left" in record.getMessage() for record in caplog.records] == [True] * 3
    written = sorted(path.parent.name for path in sentinel.run_dir.glob("incidents/*/incident.json"))
    assert written == [f"{step:06d}-nonfinite_input" for step in (3, 7, 11)]
