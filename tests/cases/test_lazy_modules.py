"""Lazy modules: no shape, no values and no statistics before the first batch."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback


def lazy_network():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("use_steps", [True, False], ids=["steps", "own loop"])
@pytest.mark.parametrize("warmed", [False, True], ids=["before the first forward", "after it"])
def test_lazy_modules(warmed, use_steps, bad, watch, told, nonfinite):
    """LazyLinear has no shape until its first batch; watching starts before or after that."""
    model = lazy_network()
    if warmed:
        model(torch.randn(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0))
    batches = [torch.randn(8, 4) for _ in range(5)]
    batches[bad][0, 0] = torch.nan
    actions = []
    for batch in sentinel.steps(batches) if use_steps else batches:
        sentinel.backward(model(batch).pow(2).mean())
        sentinel.step(max_norm=1.0)
        actions.append(sentinel.last_action.label)
    assert actions == ["skip" if step == bad else "continue" for step in range(5)]
    assert [step for step, _, _ in told(sentinel)] == [bad]
    assert nonfinite(model, optimizer) == []


def test_persistent_failure_of_a_lazy_model(watch, told, nonfinite):
    """A rollback in a lazy model goes to the first state it had values in."""
    model = lazy_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(after=2))
    for step in range(6):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        sentinel.backward(loss * torch.nan if step in (2, 3) else loss)
        sentinel.step()
    assert told(sentinel) == [(2, "nonfinite_loss", "skipped"), (3, "nonfinite_loss", "rolled_back")]
    assert "rolled back to step 1" in sentinel.incidents[-1].recovery
    assert nonfinite(model, optimizer) == []


def test_statistics_of_lazy_batch_norm_in_the_very_first_step(watch, drive, told, nonfinite):
    """Lazy modules get their buffers inside the first forward pass, and that one may be the bad one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    sentinel = watch(model, optimizer)
    batches = [torch.randn(8, 4) for _ in range(3)]
    batches[0][3, 2] = torch.nan
    drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert [step for step, _, _ in told(sentinel)] == [0]
    assert nonfinite(model, optimizer) == []
