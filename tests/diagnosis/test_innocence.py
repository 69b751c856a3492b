"""NaN in a batch is blamed if it spoilt the step, and not if the model expects it."""

import pytest
import torch
from torch import nn

from gradsentinel import Callback, Kind, NanCallback, Sentinel
from gradsentinel.diagnosis.innocence import innocent

NAN = float("nan")


def batch(*, missing=True, weight=1.0):
    made = {"x": torch.randn(6, 4), "w": torch.full((6,), weight), "id": torch.arange(70, 76)}
    if missing:
        made["x"][2, 1] = NAN
    return made


def filling(model, b):
    x = torch.where(b["x"].isnan(), 0.0, b["x"])
    return (model(x).pow(2).mean(1) * b["w"]).sum() / b["w"].sum()


def plain(model, b):
    return (model(b["x"]).pow(2).mean(1) * b["w"]).sum() / b["w"].sum()


def incidents_of(batches, loop, run_dir, *, accumulate=1, forward=None, spoil=None):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, forward=forward)
    with sentinel:
        for given in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(loop(model, given))
            if spoil is not None:
                spoil(model)
            sentinel.step()
    return sentinel.incidents


def test_a_record_that_spoils_the_step_is_blamed(run_dir):
    (incident,) = incidents_of([batch()], plain, run_dir, forward=plain)
    assert incident.kind is Kind.NONFINITE_INPUT
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(2, 72, "x")]


def test_one_that_is_filled_in_is_not(run_dir):
    assert incidents_of([batch()], filling, run_dir, forward=filling) == ()
    (incident,) = incidents_of([batch(weight=0.0)], filling, run_dir / "bad", forward=filling)
    assert incident.kind is Kind.NONFINITE_LOSS
    assert (incident.diagnosis.cause, incident.diagnosis.op) == ("data", "aten.div.Tensor")
    assert "look at w" in incident.diagnosis.remedy[0]


def test_without_forward_there_is_nothing_to_try_and_the_record_is_blamed(run_dir):
    (incident,) = incidents_of([batch()], plain, run_dir)
    assert incident.kind is Kind.NONFINITE_INPUT


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_micro_batch_that_is_to_blame_is_another_one(order, run_dir):
    pair = [batch(), batch(missing=False, weight=0.0)]
    given = [pair[number] for number in order]
    (incident,) = incidents_of(given, filling, run_dir, accumulate=2, forward=filling)
    assert incident.microbatch == order.index(1)
    assert incident.diagnosis.op == "aten.div.Tensor"
    assert "look at w" in incident.diagnosis.remedy[0]


def test_a_record_and_a_mask_are_bad_and_the_record_is_what_came_first(run_dir):
    (incident,) = incidents_of([batch(weight=0.0)], plain, run_dir, forward=plain)
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("data", "input")
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(2, 72, "x")]
    assert incident.diagnosis.remedy[0] == "repair or filter the record(s) with id 72: look at x"


def test_a_forward_that_raises_clears_nobody(run_dir):
    calls = []

    def once(model, b):
        calls.append(True)
        if len(calls) > 1:
            raise RuntimeError("cannot run twice")
        return plain(model, b)

    (incident,) = incidents_of([batch()], once, run_dir, forward=once)
    assert incident.kind is Kind.NONFINITE_INPUT
    assert len(calls) > 1


def test_the_trial_changes_nothing(run_dir):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []

    def spy(model, b):
        return model(b["x"]).pow(2).mean()

    class Runs(Callback):
        def on_run_start(self, event):
            self.run = event.run

    runs = Runs()
    callbacks = [NanCallback(), runs]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=spy) as sentinel:
        for given in sentinel.steps([batch()]):
            sentinel.backward(spy(model, given))
            before = {
                "gradients": [p.grad.clone() for p in model.parameters()],
                "buffers": [b.clone() for b in model.buffers()],
                "x": given["x"].clone(),
                "rng": torch.get_rng_state(),
            }
            seen.append(innocent(runs.run, {0: ["x"]}))
            assert all(
                torch.equal(p.grad.nan_to_num(), g.nan_to_num())
                for p, g in zip(model.parameters(), before["gradients"], strict=True)
            )
            assert all(
                torch.equal(b.nan_to_num(), kept.nan_to_num())
                for b, kept in zip(model.buffers(), before["buffers"], strict=True)
            )
            assert torch.equal(given["x"].nan_to_num(), before["x"].nan_to_num())
            assert torch.equal(torch.get_rng_state(), before["rng"])
            sentinel.step()
    assert seen == [False]
