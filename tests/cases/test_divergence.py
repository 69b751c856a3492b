"""The step where the NaN shows is innocent: the run was ruined long before, by finite numbers."""

import itertools

import pytest
import torch
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback, Rollback, TrainingAborted

JUMP = 6
"""At this step the learning rate becomes a hundred times too high."""


def diverging(watch, *callbacks, cured_after=None):
    """A regression whose schedule has a bug; `cured_after` rollbacks the user takes it out."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sentinel = watch(model, optimizer, *callbacks)
    attempts = iter(range(10_000))
    norms = []

    def batches(count):
        """The broken schedule sets the rate by the number of the step, as user code does."""
        for _ in range(count):
            next(attempts)
            back = sum(str(i.outcome) == "rolled_back" for i in sentinel.incidents)
            cured = cured_after is not None and back >= cured_after
            rate = 5.0 if sentinel.step_count >= JUMP and not cured else 0.05
            optimizer.param_groups[0]["lr"] = rate
            norms.append(float(model.weight.detach().double().norm()))
            yield torch.randn(16, 6)

    def loss_of(x):
        return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()

    return model, optimizer, sentinel, batches, loss_of, norms


def first_bad_step():
    """When the loss overflows, by plain torch."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 5.0 if step >= JUMP else 0.05
        x = torch.randn(16, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        if not loss.isfinite():
            return step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("this run was to diverge")


def test_caught_at_the_first_infinite_loss(watch, drive, nonfinite):
    """ChatGLM2-6B#519, ESAM#76: the loss overflows while gradients stay finite for twenty steps more.

    A dropped step is no cure: the run must not go on dropping, and must end with a clear error.
    """
    model, optimizer, sentinel, batches, loss_of, _ = diverging(watch)
    with pytest.raises(TrainingAborted, match="not transient"):
        drive(sentinel, batches(60), loss_of)
    first = sentinel.incidents[0]
    assert (first.step, str(first.kind)) == (first_bad_step(), "nonfinite_loss")
    assert first.tensors == ()  # every gradient was finite
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("cured_after", [1, 2])
def test_goes_further_back_than_the_ruined_snapshots(watch, drive, nonfinite, cured_after):
    """'Finite' is not 'good': the newest snapshots were taken during the divergence.

    Their norms and losses give them away, so the first rollback already goes to one from before the
    jump; one that does not get past the trouble goes further back. With the cause removed the run then
    converges.
    """
    rollback = Rollback(every=5, confirm_after=2, keep=10, max_rollbacks=10)
    model, optimizer, sentinel, batches, loss_of, norms = diverging(
        watch, NanCallback(), rollback, cured_after=cured_after
    )
    drive(sentinel, batches(120), loss_of)
    rolled_back = [one for one in sentinel.incidents if str(one.outcome) == "rolled_back"]
    restored = [int(incident.recovery.split("step ")[1].split(" ")[0]) for incident in rolled_back]
    assert len(restored) == cured_after
    assert restored[0] <= JUMP
    assert all(later < earlier or later == 0 for earlier, later in itertools.pairwise(restored))
    assert any("is passed over: " in note for note in rolled_back[0].notes)
    assert norms[-1] < 10
    assert loss_of(torch.randn(16, 6)).item() < 1
    assert nonfinite(model, optimizer) == []


def test_stops_when_the_cause_stays(watch, drive, nonfinite):
    """Going back without removing the cause only repeats it: the budget ends it, a sane state on disk."""
    rollback = Rollback(every=5, confirm_after=2, keep=10, max_rollbacks=6)
    model, optimizer, sentinel, batches, loss_of, _ = diverging(watch, NanCallback(), rollback)
    with pytest.raises(TrainingAborted, match="rollbacks"):
        drive(sentinel, batches(500), loss_of)
    assert nonfinite(model, optimizer) == []
    (saved,) = sentinel.run_dir.glob("snapshots/*")  # the one that the last rollback went to
    assert int(saved.name.split("-")[1]) <= JUMP


def test_magnitude_bound_sees_it_long_before(watch, drive, told):
    """A bound on the gradient norm catches the divergence when it begins, not when it overflows."""
    _, _, sentinel, batches, loss_of, norms = diverging(
        watch,
        NanCallback(),
        MagnitudeCallback(max_global_norm=1e3, action="rollback"),
        Rollback(every=3, confirm_after=2, keep=5),
        cured_after=1,
    )
    drive(sentinel, batches(40), loss_of)
    (incident,) = sentinel.incidents
    assert str(incident.kind) == "magnitude"
    assert JUMP < incident.step <= JUMP + 4
    assert max(norms) < 1e6
    assert loss_of(torch.randn(16, 6)).item() < 1
