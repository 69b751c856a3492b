"""A gradient that is finite and whose square is not: what the optimizer would keep of it."""

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RAdam, RMSprop

from gradsentinel import Action, Kind, NanCallback, Sentinel

STEPS, BAD = 5, 2


def train(kind, size, run_dir, *, max_norm=None, bad=BAD, **settings):
    """Train with one gradient of a size; the state is never looked at, so only the gradient can tell."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    watch = NanCallback(state_warmup=0, state_every=0)
    before = []
    with Sentinel(model, optimizer, callbacks=[watch], run_dir=run_dir) as sentinel:
        for number in sentinel.steps(range(STEPS)):
            before.append([p.detach().clone() for p in model.parameters()])
            loss = model(torch.ones(3, 4)).sum()
            sentinel.backward(loss * (size if number == bad else 1.0))
            sentinel.step(max_norm)
    after = [*before[bad + 1 :], list(model.parameters())][0]
    moved = any(not torch.equal(one, two) for one, two in zip(before[bad], after, strict=True))
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    finite = all(bool(torch.isfinite(value).all()) for value in state if isinstance(value, torch.Tensor))
    return sentinel.incidents, moved, finite


@pytest.mark.parametrize("kind", [Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad])
@pytest.mark.parametrize("bad", [0, BAD], ids=["first step", "later"])
def test_such_a_step_is_dropped(kind, bad, run_dir):
    (incident,), moved, finite = train(kind, 1e35, run_dir, bad=bad)
    assert (incident.step, incident.kind) == (bad, Kind.MAGNITUDE)
    assert incident.message.startswith("the update would make the optimizer's running square Inf in weight")
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.addcmul_.default")
    assert not moved
    assert finite


@pytest.mark.parametrize("kind", [Adam, RMSprop, Adagrad])
def test_the_bound_is_that_of_the_optimizer(kind, run_dir):
    """Half of the largest gradient whose square the state holds passes, twice as much does not."""
    share = {Adam: 1 - 0.999, RMSprop: 1 - 0.99, Adagrad: 1.0}[kind]
    limit = math.sqrt(torch.finfo(torch.float32).max / share) / 3  # a gradient is 3 times the size
    incidents, moved, finite = train(kind, 0.5 * limit, run_dir / "below")
    assert (incidents, finite) == ((), True)
    incidents, moved, finite = train(kind, 2 * limit, run_dir / "above")
    assert len(incidents) == 1
    assert (moved, finite) == (False, True)


def test_what_is_clipped_does_no_harm(run_dir):
    incidents, moved, finite = train(Adam, 1e35, run_dir, max_norm=1.0)
    assert (incidents, moved, finite) == ((), True, True)


def test_an_optimizer_that_keeps_no_squares_takes_it(run_dir):
    incidents, moved, finite = train(SGD, 1e35, run_dir, momentum=0.9)
    assert (incidents, moved, finite) == ((), True, True)


def test_squares_in_float64_are_held(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = Adam(model.parameters())
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for _ in sentinel.steps(range(2)):
            sentinel.backward(model(torch.ones(3, 4, dtype=torch.float64)).sum() * 1e35)
            sentinel.step()
    assert sentinel.incidents == ()


def test_a_loop_that_cannot_be_edited(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Adam(model.parameters())
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    with sentinel, sentinel.attached():
        for size in (1.0, 1e35, 1.0):
            (model(torch.ones(3, 4)).sum() * size).backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.action) == (1, Kind.MAGNITUDE, Action.SKIP)
    assert all(bool(torch.isfinite(entry["exp_avg_sq"]).all()) for entry in optimizer.state.values())
