"""An eps that is 0 for a step: the update is stopped before it divides 0 by 0."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.incident import Outcome

STEPS, FAULT = 30, 23  # far from the steps after which the state is looked at

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class Words(nn.Module):
    """An embedding of which some rows are never used, so that their gradient stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, words):
        return self.out(self.rows(words)).tanh().mean()


def train(optimizer, *, eps_at=(), used=4, guarded=True, began=None, tmp_path=None, **settings):
    torch.manual_seed(0)
    model = Words()
    optimizer = optimizer(model.parameters())
    usual = optimizer.param_groups[0]["eps"]
    if began is not None:
        optimizer.param_groups[0]["eps"] = usual = began
    batches = [torch.arange(used).repeat(2) for _ in range(STEPS)]
    if not guarded:
        for step, words in enumerate(batches):
            optimizer.param_groups[0]["eps"] = 0.0 if step in eps_at else usual
            optimizer.zero_grad()
            model(words).backward()
            optimizer.step()
        return model, None
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), Rollback()], run_dir=tmp_path, **settings
    ) as sentinel:
        for step, words in enumerate(sentinel.steps(batches)):
            optimizer.param_groups[0]["eps"] = 0.0 if step in eps_at else usual
            sentinel.backward(model(words))
            sentinel.step()
    return model, sentinel


def finite(model):
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_dropped_before_it_is_made(name, tmp_path):
    ruined, _ = train(OPTIMIZERS[name], eps_at=(FAULT,), guarded=False)
    assert not finite(ruined)  # or the test would show nothing
    model, sentinel = train(OPTIMIZERS[name], eps_at=(FAULT,), tmp_path=tmp_path)
    assert finite(model)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.outcome) == (FAULT, Outcome.SKIPPED)
    assert [entry.name for entry in incident.tensors] == ["rows.weight"]
    assert (incident.tensors[0].nonfinite, incident.tensors[0].first_index) == (16, (4, 0))
    assert incident.diagnosis.cause == "optimizer"
    assert "eps is 0" in incident.message


def test_the_devices_guard_drops_it_too(tmp_path):
    model, sentinel = train(OPTIMIZERS["adamw-fused"], eps_at=(FAULT,), tmp_path=tmp_path, guard="device")
    assert finite(model)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.outcome) == (FAULT, Outcome.SKIPPED)
    assert incident.tensors[0].nonfinite == 16


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_nothing_is_divided_by_0_nothing_is_dropped(name, tmp_path):
    model, sentinel = train(OPTIMIZERS[name], eps_at=(FAULT,), used=8, tmp_path=tmp_path)
    plain, _ = train(OPTIMIZERS[name], eps_at=(FAULT,), used=8, guarded=False)
    assert list(sentinel.incidents) == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_weight_decay_in_the_gradient_keeps_it_from_being_0(tmp_path):
    def decayed(parameters):
        return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)

    plain, _ = train(decayed, eps_at=(FAULT,), guarded=False)
    assert finite(plain)
    model, sentinel = train(decayed, eps_at=(FAULT,), tmp_path=tmp_path)
    assert list(sentinel.incidents) == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_run_that_began_with_an_eps_of_0_is_left_alone(tmp_path):
    model, sentinel = train(OPTIMIZERS["adam"], used=8, began=0.0, tmp_path=tmp_path)
    plain, _ = train(OPTIMIZERS["adam"], used=8, began=0.0, guarded=False)
    assert list(sentinel.incidents) == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
