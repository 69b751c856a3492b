"""LossScaleCallback: a scale that sinks, goes back and forth, or never grows."""

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, LossScaleCallback, NanCallback, Sentinel


def train(run_dir, overflows=(), *, steps=120, interval=10, scale=2.0**10, scaler=None, **settings):
    """Train with a GradScaler on the CPU; in some steps the scaled loss overflows."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    callback = LossScaleCallback(**settings)
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), callback], scaler=scaler, run_dir=run_dir
    ) as sentinel:
        for step in sentinel.steps(range(steps)):
            loss = model(torch.randn(8, 6)).square().mean()
            sentinel.backward(loss)
            if step in overflows:
                model.weight.grad.fill_(torch.inf)
            sentinel.step()
    return sentinel


def told(sentinel):
    return [(i.step, i.details["subject"]) for i in sentinel.incidents]


def test_a_healthy_scaler_is_quiet(run_dir):
    assert told(train(run_dir)) == []
    assert told(train(run_dir / "search", range(6), steps=60)) == []  # its search for a scale
    often = [step for step in range(300) if step % 4 == 3]  # each time it tries a larger scale
    assert told(train(run_dir / "often", often, steps=300, interval=3)) == []


def test_too_many_overflows(run_dir):
    sentinel = train(
        run_dir, range(1, 90, 4), steps=90, scale=2.0**30, window=40, interval=2000, max_fall=1e30
    )
    assert [subject for _, subject in told(sentinel)] == ["oscillates"]
    assert sentinel.incidents[0].details["repeated"] == 1  # once a window
    assert "overflowed and were lost" in sentinel.incidents[0].message


def test_a_scale_that_sinks(run_dir):
    sentinel = train(run_dir, range(50, 60), window=100, interval=2000)
    assert [subject for _, subject in told(sentinel)] == ["sinks"]
    assert 59 <= sentinel.incidents[0].step <= 61


def test_a_scale_that_never_grows(run_dir):
    class Forgetful(torch.amp.GradScaler):
        def update(self, new_scale=None):
            """As in a loop that calls it on another scaler."""
            self._per_optimizer_states.clear()

    scaler = Forgetful("cpu", init_scale=2.0**10, growth_interval=10)
    assert [subject for _, subject in told(train(run_dir, scaler=scaler, steps=60))] == ["stands"]
    constant = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=1.0 + 1e-9, growth_interval=10)
    constant.set_growth_factor(1.0)  # one that is not meant to grow
    assert told(train(run_dir / "constant", scaler=constant, steps=60)) == []


def test_without_a_scaler_it_does_nothing(run_dir):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback = LossScaleCallback()
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for _ in sentinel.steps(range(5)):
            sentinel.backward(model(torch.randn(2, 4)).mean())
            sentinel.step()
    assert callback.state_dict()["recent"] == []


def test_a_restart_goes_on_counting(run_dir):
    kept = train(run_dir, range(20, 25), steps=30).state_dict()["callbacks"]["LossScaleCallback"]
    assert sum(kept["recent"]) == 5
    restarted = LossScaleCallback()
    restarted.load_state_dict(kept)
    assert restarted.state_dict() == kept


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"max_overflows": 0}, {"max_overflows": 2}, {"max_fall": 1}, {"patience": 0}]
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(ConfigurationError):
        LossScaleCallback(**wrong)
