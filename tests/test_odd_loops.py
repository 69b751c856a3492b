"""Loops and models that do what nobody expects, and what they once broke."""

import math

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, MagnitudeCallback, NanCallback, Outcome, Rollback, Sentinel

NAN = float("nan")


def bad(model):
    return [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]


def make(*layers):
    model = nn.Sequential(*layers) if layers else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), 0.01)


def test_a_module_that_is_added_during_the_run_is_watched_too(run_dir):
    model, optimizer = make(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(20)])):
        if number == 6:
            model[1] = nn.BatchNorm1d(4)
            optimizer.add_param_group({"params": list(model[1].parameters())})
        x = batch * NAN if number == 15 else batch
        sentinel.backward(model(x).square().mean())
        sentinel.step()
    assert len(sentinel.incidents) == 1
    assert bad(model) == []


def test_a_loss_that_is_written_to_after_its_backward_pass_stands_for_no_graph(run_dir):
    model, optimizer = make()
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 4)] * 2):
            loss = model(batch).square().mean()
            sentinel.backward(loss)
            scene = sentinel._watch.run.scene
            assert scene.graph == (0, loss.grad_fn)
            loss /= 2  # as for the log; its node is that of the division now
            assert scene.graph is None
            sentinel.step()
    assert not sentinel.incidents


class Bank(nn.Module):
    """Writes to a large buffer through .data, from the 10th step on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bank", torch.zeros(70_000, 4))
        self.calls = 0

    def forward(self, x):
        h = self.linear(x)
        self.calls += 1
        if self.calls > 10:
            self.bank.data[self.calls : self.calls + 8] = torch.nan_to_num(h.detach())
        return h


def test_a_dropped_step_does_not_take_a_large_buffer_back_to_an_old_copy(run_dir):
    model = Bank()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    filled = 0
    for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(31)])):
        filled = int((model.bank != 0).any(1).sum())
        loss = model(batch).square().mean()
        sentinel.backward(loss * NAN if number == 30 else loss)
        sentinel.step()
    assert sentinel.incidents[-1].outcome is Outcome.SKIPPED
    assert int((model.bank != 0).any(1).sum()) == filled > 0


def test_a_dropped_step_leaves_another_graph_usable(run_dir):
    """The discriminator's step is dropped; the generator's graph, which went through it, is still needed."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    maker = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    of_judge = torch.optim.SGD(judge.parameters(), 0.01)
    of_maker = torch.optim.SGD(maker.parameters(), 0.01)
    modules = {"judge": judge, "maker": maker}
    callbacks = [NanCallback()]
    sentinel = Sentinel(modules, [of_judge, of_maker], callbacks=callbacks, run_dir=run_dir)
    fake = maker(torch.randn(16, 2))
    sentinel.backward(judge(fake.detach()).mean() * NAN)
    sentinel.step(optimizer=of_judge)
    assert len(sentinel.incidents) == 1
    of_judge.zero_grad()
    sentinel.backward(judge(fake).mean())
    sentinel.step(optimizer=of_maker)
    assert bad(maker) == bad(judge) == []


def test_two_players_without_zero_grad_are_told(run_dir, caplog):
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)
    sentinel = Sentinel([one, two], [first, second], callbacks=[NanCallback()], run_dir=run_dir)
    for _ in range(2):
        sentinel.backward(two(one(torch.randn(4, 2))).mean())
        sentinel.step(optimizer=first)
    assert "call the other optimizer's zero_grad() first" in caplog.text


def test_a_shared_backward_with_a_step_for_each_optimizer_is_not_told(run_dir, caplog):
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)
    sentinel = Sentinel([one, two], [first, second], callbacks=[NanCallback()], run_dir=run_dir)
    for _ in range(3):
        sentinel.backward(two(one(torch.randn(4, 2))).mean())
        sentinel.step(optimizer=first)
        sentinel.step(optimizer=second)
    assert "zero_grad" not in caplog.text
    assert sentinel.applied_steps == 6


def test_several_steps_on_one_batch_are_dropped_one_by_one(run_dir):
    model, optimizer = make(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    for batch in sentinel.steps([torch.randn(8, 4) for _ in range(3)]):
        for epoch in range(2):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            spoil = epoch == 1 and sentinel.step_count == 3
            sentinel.backward(model(batch * NAN if spoil else batch).square().mean())
            sentinel.step()
            if spoil:
                after = model.state_dict()
                assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [incident.step for incident in sentinel.incidents] == [3]


class Running(nn.Module):
    """A buffer that forward replaces; under inference_mode it becomes an inference tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.linear(x)


def test_validation_under_inference_mode_between_epochs_does_no_harm(run_dir):
    model = Running()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    for epoch in range(3):
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(3)])):
            spoil = epoch == 1 and number == 0
            sentinel.backward(model(batch * NAN if spoil else batch).square().mean())
            sentinel.step()
        with torch.inference_mode():
            model(torch.randn(8, 4))
    assert len(sentinel.incidents) == 1
    assert bad(model) == []


def test_an_average_that_turned_nan_is_never_called_good(run_dir):
    model, optimizer = make()
    ema = torch.optim.swa_utils.AveragedModel(model)
    callbacks = [NanCallback(), Rollback(every=5, confirm_after=1)]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, ema=ema)
    for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(20)])):
        if number == 7:
            with torch.no_grad():
                ema.module[0].weight[0, 0] = NAN
        sentinel.backward(model(batch).square().mean())
        sentinel.step()
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.ROLLED_BACK]
    assert bad(ema) == []


def test_steps_inside_steps_is_refused(run_dir):
    model, optimizer = make()
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    for _ in sentinel.steps([torch.randn(8, 4)]):
        with pytest.raises(ConfigurationError, match=r"steps\(\) inside steps\(\)"):
            next(iter(sentinel.steps([torch.randn(8, 4)])))


def test_a_warning_that_goes_on_is_one_incident(run_dir):
    model, optimizer = make()
    callbacks = [MagnitudeCallback(max_global_norm=1e-9)]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir)
    for batch in sentinel.steps([torch.randn(8, 4) for _ in range(20)]):
        sentinel.backward(model(batch).square().mean())
        sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.details == {"repeated": 19, "last_step": 19}
    assert sentinel.applied_steps == 20


def test_nobody_who_detects_is_said(run_dir, caplog):
    model, optimizer = make()
    Sentinel(model, optimizer, callbacks=[], run_dir=run_dir)
    assert "add NanCallback()" in caplog.text


def test_an_unused_field_of_the_batch_is_not_blamed_for_a_gradient(run_dir):
    model, optimizer = make()
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    batches = [{"x": torch.randn(8, 4), "meta": torch.tensor([1.0, NAN])} for _ in range(4)]
    for number, batch in enumerate(sentinel.steps(batches)):
        sentinel.backward(model(batch["x"]).square().mean())
        if number == 2:
            model[0].weight.grad[1, 1] = math.inf
        sentinel.step()
    (incident,) = sentinel.incidents
    assert str(incident.kind) == "nonfinite_gradient"
    assert [tensor.name for tensor in incident.tensors] == ["0.weight"]
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause != "data"


def test_the_state_from_before_the_trouble_is_saved_even_without_rollback(run_dir):
    from gradsentinel import TrainingAborted  # noqa: PLC0415 - only here

    model, optimizer = make()
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    good = None
    with pytest.raises(TrainingAborted) as stopped:  # noqa: PT012 - the loop is what raises
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(40)])):
            if number == 5:
                good = [p.detach().clone() for p in model.parameters()]
            sentinel.backward(model(batch).square().mean() * (NAN if number >= 5 else 1.0))
            sentinel.step()
    assert stopped.value.incident is sentinel.incidents[-1]
    again, fresh = make()
    restarted = Sentinel(again, fresh, callbacks=[NanCallback()], run_dir=run_dir / "next")
    restarted.restore(stopped.value.snapshot)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), good, strict=True))
