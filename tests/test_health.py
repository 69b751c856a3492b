"""The training state is looked at whole, or in parts that cover all of it within a bounded time."""

import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradsentinel import ConfigurationError, NanCallback, Sentinel, TrainingAborted


class Model(nn.Module):
    """Parameters, buffers of several kinds, a mask of infinities, and one tensor larger than all others."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.leave = nn.Linear(40, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, 0.0]))
        self.register_buffer("count", torch.arange(4))

    def forward(self, x):
        return self.leave(torch.relu(self.norm(self.enter(x)))).square().mean()


def trained(run_dir, *callbacks, steps=2, **settings):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    sentinel = Sentinel(
        model, optimizer, callbacks=callbacks or [NanCallback()], ema=ema, run_dir=run_dir, **settings
    )
    for _ in sentinel.steps(range(steps)):
        sentinel.backward(model(torch.randn(8, 6)))
        sentinel.step()
    return sentinel, model, optimizer, ema


def places(model, optimizer, ema):
    """Every tensor of the state that must be finite, by name."""
    yield from ((f"parameter {name}", p.data) for name, p in model.named_parameters())
    yield "buffer", model.norm.running_mean
    for name, parameter in model.named_parameters():
        yield f"moment of {name}", optimizer.state[parameter]["exp_avg_sq"]
    yield from ((f"average {name}", p.data) for name, p in ema.module.named_parameters())


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_an_element_anywhere_shows_in_exactly_one_part(run_dir, parts):
    sentinel, *state = trained(run_dir)
    health = sentinel._watch.run.health
    assert all(math.isfinite(health.norm(part, parts)) for part in range(parts))
    for name, tensor in places(*state):
        for place in (0, tensor.numel() - 1):
            kept = tensor.view(-1)[place].clone()
            tensor.view(-1)[place] = math.nan
            bad = [part for part in range(parts) if not math.isfinite(health.norm(part, parts))]
            tensor.view(-1)[place] = kept
            assert len(bad) == 1, name


def test_parts_are_equal_and_together_the_whole(run_dir):
    sentinel, *_ = trained(run_dir)
    health = sentinel._watch.run.health
    whole = float(health.norm())
    norms = [float(health.norm(part, 5)) for part in range(5)]
    assert math.hypot(*norms) == pytest.approx(whole, rel=1e-5)


def test_the_largest_magnitude_is_finite_exactly_where_all_elements_are(run_dir):
    """The square of 1e37 is no float32 any more, and 2 of the lowest numbers of a mask add up to none."""
    sentinel, model, optimizer, ema = trained(run_dir)
    health, tried = sentinel._watch.run.health, list(places(model, optimizer, ema))
    model.register_buffer("low", torch.full((4,), torch.finfo(torch.float32).min))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    model.register_buffer("modulus", torch.full((2,), complex(3e38, 3e38)))
    for _, tensor in tried:
        kept = tensor.view(-1)[0].clone()
        tensor.view(-1)[0] = -3e38
        assert health.norm(largest=True) == torch.finfo(torch.float32).max
        for bad in (math.nan, math.inf, -math.inf):
            tensor.view(-1)[-1], last = bad, tensor.view(-1)[-1].clone()
            found = [part for part in range(3) if not math.isfinite(health.norm(part, 3, largest=True))]
            assert len(found) == 1
            tensor.view(-1)[-1] = last
        tensor.view(-1)[0] = kept


def test_a_bad_element_is_found_within_the_bound(run_dir):
    """In turn each part is looked at: state_every * state_parts steps after the warm-up."""
    callback = NanCallback(state_warmup=0, state_every=2, state_parts=4)
    sentinel, model, _, ema = trained(run_dir, callback, steps=3)
    ema.module.enter.weight.data[0, 0] = math.nan  # nothing else shows it: the model does not use its average

    def goes_on(steps):
        for _ in sentinel.steps(range(steps)):
            sentinel.backward(model(torch.randn(8, 6)))
            sentinel.step()

    with pytest.raises(TrainingAborted):
        goes_on(2 * 4)
    assert sentinel.incidents[0].tensors[0].name == "extra.ema.module.enter.weight"


@pytest.mark.parametrize("parts", [1, 3])
def test_growth_is_judged_by_the_same_part_of_the_look_before(run_dir, parts):
    """Moments grow as they like, and what has been told of is not told again."""
    callback = NanCallback(state_warmup=0, state_every=1, state_parts=parts)
    sentinel, model, optimizer, _ = trained(run_dir, callback, steps=parts)
    weight = model.enter.weight

    def goes_on():
        for _ in sentinel.steps(range(parts)):
            sentinel.backward(model(torch.randn(8, 6)) * 1e-20)
            sentinel.step()
        return [(str(one.kind), [tensor.name for tensor in one.tensors]) for one in sentinel.incidents]

    optimizer.state[weight]["exp_avg_sq"][0, 0] = 1e30
    assert goes_on() == []
    model.leave.bias.data[0] = -1e15
    assert goes_on() == [("magnitude", ["leave.bias"])]
    assert goes_on() == [("magnitude", ["leave.bias"])]


def test_the_end_looks_at_everything(run_dir):
    callback = NanCallback(state_warmup=0, state_every=1000, state_parts=4)
    sentinel, model, optimizer, _ = trained(run_dir, callback)
    optimizer.state[model.leave.bias]["exp_avg"].fill_(math.nan)
    with pytest.raises(TrainingAborted):
        sentinel.close()


def test_settings_that_cannot_work():
    with pytest.raises(ConfigurationError):
        NanCallback(state_parts=0)
