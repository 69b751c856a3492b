"""Values that are finite and wrong: explosions, divergence, and what only looks like a spike."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradsentinel import NanCallback, Rollback, SpikeCallback, StagnationCallback, TrainingAborted

JUMP = 6
"""At this step the learning rate becomes a hundred times too high."""


class Diverging:
    """A regression whose schedule has a bug; `cured_after` rollbacks the user takes it out."""

    def __init__(self, watch, *callbacks, jump=JUMP, rate=5.0, cured_after=None):
        torch.manual_seed(0)
        self.model = nn.Linear(6, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sentinel = watch(self.model, self.optimizer, *callbacks)
        self.jump, self.rate, self.cured_after = jump, rate, cured_after

    def batches(self, count):
        for _ in range(count):
            back = sum(str(i.outcome) == "rolled_back" for i in self.sentinel.incidents)
            cured = self.cured_after is not None and back >= self.cured_after
            broken = self.sentinel.step_count >= self.jump and not cured
            self.optimizer.param_groups[0]["lr"] = self.rate if broken else 0.05
            yield torch.randn(16, 6)

    def loss(self, x):
        return mse_loss(self.model(x), x.sum(1, keepdim=True))


@pytest.mark.parametrize("jump", [JUMP, 60])
def test_a_divergence_is_caught_where_it_begins(jump, watch, drive, nonfinite):
    """ChatGLM2-6B#519, ESAM#76: the NaN is the end of it; a state from before the jump is needed."""
    keep = Rollback(every=5, confirm_after=2, keep=5)
    run = Diverging(watch, NanCallback(), SpikeCallback(), keep, jump=jump, cured_after=1)
    drive(run.sentinel, run.batches(jump + 60), run.loss)
    incidents = run.sentinel.incidents
    assert {str(incident.kind) for incident in incidents} == {"spike"}
    assert incidents[-1].step <= jump + 5
    assert [str(i.outcome) for i in incidents].count("rolled_back") == 1
    assert int(incidents[-1].recovery.split("step ")[1].split(" ")[0]) <= jump
    assert incidents[-1].diagnosis.cause == "optimizer"
    assert f"the learning rate went from 0.05 to 5 in step {jump}" in incidents[-1].message
    assert run.loss(torch.randn(16, 6)).item() < 1
    assert nonfinite(run.model, run.optimizer) == []


@pytest.mark.parametrize("rate", [0.8, 1.0, 1.5])
def test_a_slow_divergence_is_told_long_before_it_overflows(rate, watch, drive):
    run = Diverging(watch, NanCallback(), SpikeCallback(), jump=60, rate=rate)
    try:
        drive(run.sentinel, run.batches(160), run.loss)
    except TrainingAborted as stopped:  # the dropped steps were no cure
        assert "spike" in str(stopped.incident.id)  # noqa: PT017 - both ends are fine
    first = run.sentinel.incidents[0]
    assert str(first.kind) == "spike"
    assert 60 < first.step < 110
    assert first.loss < 100


def sum_for_mean(loss, model):
    """A loss that is summed in one place and averaged in the others."""
    (loss * 1e11).backward()


def exponent_bit(loss, model):
    """A bit that flips in the gradient of one weight: it becomes 2^64 times as large."""
    loss.backward()
    model[0].weight.grad[1, 2] *= 2.0**64


def wrong_operator(loss, model):
    """An operator that returns what was left in memory: finite, and nothing like a gradient."""
    loss.backward()
    model[2].weight.grad.normal_().mul_(1e11)


@pytest.mark.parametrize("fault", [sum_for_mean, exponent_bit, wrong_operator])
@pytest.mark.parametrize("step", [4, 40])
def test_a_finite_explosion_never_lands(fault, step, watch, nonfinite):
    """Nothing is NaN or Inf, the norm is 1e11 or more: no check for finiteness sees it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentinel = watch(model, optimizer, NanCallback(), SpikeCallback())
    for number in sentinel.steps(range(60)):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        x = torch.randn(16, 6)
        loss = mse_loss(model(x), x.sum(1, keepdim=True))
        sentinel.backward(loss)
        if number == step:
            optimizer.zero_grad()
            fault(mse_loss(model(x), x.sum(1, keepdim=True)), model)
        sentinel.step(max_norm=1.0)
        unchanged = all(torch.equal(before[name], p) for name, p in model.named_parameters())
        assert unchanged is (number == step)
    (incident,) = sentinel.incidents
    assert (incident.step, str(incident.kind), str(incident.outcome)) == (step, "spike", "skipped")
    assert incident.grad_norm > 1e11
    if fault is not sum_for_mean:
        assert incident.tensors[0].name == {exponent_bit: "0.weight", wrong_operator: "2.weight"}[fault]
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("init_scale", [2.0**22, 2.0**30])
def test_the_search_for_a_loss_scale_is_no_spike(init_scale, watch, drive):
    """BVAE-TTS#3, DeepSpeed#1773: the first steps overflow on purpose, and nothing is learnt from them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=8)
    spiky = SpikeCallback(groups="parameter")
    sentinel = watch(model, optimizer, NanCallback(), spiky, StagnationCallback(), scaler=scaler)

    def loss(x):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return (out.float() - 1).pow(2).mean()

    drive(sentinel, [torch.randn(16, 8) * 4 for _ in range(60)], loss)
    assert sentinel.applied_steps < 60
    assert sentinel.incidents == ()
    assert len(spiky._series["all"]["grad_norm"].values) == sentinel.applied_steps
    (groups,) = spiky._grouped["all"]._sets.values()
    assert groups.levels.state_dict()["number"].tolist() == [sentinel.applied_steps] * 2


def test_a_norm_that_overflows_on_finite_gradients_is_no_spike(watch, drive, term):
    """burn#5699, fairscale#263: half gradients of 300 are fine; only their norm does not fit into half.

    The true norm is what is compared and learnt, so a real spike of such a run is found.
    """
    model = nn.Linear(300, 300, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    spiky = SpikeCallback(loss=False)
    sentinel = watch(model, optimizer, NanCallback(), spiky)
    usual = torch.full((300, 300), 300.0, dtype=torch.float16)
    sizes = [1.0 + 0.01 * (number % 5) for number in range(40)]
    drive(sentinel, sizes, lambda size: term(model.weight, usual * size))
    assert sentinel.incidents == ()
    assert min(spiky._series["all"]["grad_norm"].values) == pytest.approx(9e4, rel=0.05)
    drive(sentinel, [100.0], lambda size: term(model.weight, usual * size))
    assert [str(incident.kind) for incident in sentinel.incidents] == ["spike"]
