"""GradScaler: a search for the scale is no incident, a collapse is, and no scale cures a NaN."""

import logging

import pytest
import torch
from torch import nn

from gradsentinel import AfterStep, NanCallback, Rollback, TrainingAborted


def mixed_precision_loss(model):
    def loss_of(x):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return (out.float() - 1).pow(2).mean()

    return loss_of


def plain_loop(model, optimizer, scaler, batches):
    for x in batches:
        optimizer.zero_grad()
        scaler.scale(mixed_precision_loss(model)(x)).backward()
        scaler.step(optimizer)
        scaler.update()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**22, 2.0**30])
def test_search_for_a_scale_is_left_alone(init_scale, watch, drive, caplog):
    """BVAE-TTS#3, DeepSpeed#1773: the scale starts too high on purpose, the first steps overflow.

    Nothing is wrong: no incident, no warning, and weights, statistics and scale are those of the plain loop.
    """
    batches = [torch.randn(16, 8) * 4 for _ in range(20)]
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    plain_loop(model, optimizer, scaler, batches)

    watched, its_optimizer = build()
    its_scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    sentinel = watch(watched, its_optimizer, NanCallback(), Rollback(), scaler=its_scaler)
    with caplog.at_level(logging.WARNING, "gradsentinel"):
        drive(sentinel, batches, mixed_precision_loss(watched))

    assert sentinel.incidents == ()
    assert caplog.records == []
    assert its_scaler.state_dict() == scaler.state_dict()
    for (name, a), b in zip(model.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    if init_scale > 2.0**20:
        assert sentinel.applied_steps < 20  # the scaler did drop some


@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_loss_that_is_nan_before_scaling(where, watch, drive, told, nonfinite):
    """The scaler would take it for an overflow and halve its scale; lowering the scale cannot help."""
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    sentinel = watch(model, optimizer, scaler=scaler)
    batches = [torch.randn(16, 8) for _ in range(4)]
    if where == "input":
        batches[2][5, 1] = torch.nan
    seen = []

    def loss_of(x):
        seen.append(x)
        loss = mixed_precision_loss(model)(x)
        return loss * torch.nan if where == "loss" and len(seen) == 3 else loss

    assert drive(sentinel, batches, loss_of) == ["continue", "continue", "skip", "continue"]
    kind = "nonfinite_input" if where == "input" else "nonfinite_loss"
    assert told(sentinel) == [(2, kind, "skipped")]
    if where == "loss":
        assert "lowering the loss scale cannot help" in sentinel.incidents[0].diagnosis.remedy[0]
    assert nonfinite(model, optimizer, scaler.state_dict()) == []
    assert scaler.get_scale() == 2.0**7  # its update was done


def nan_gradient(model):
    """A finite loss whose gradient is NaN at any scale."""

    def loss_of(x):
        gate = (model[1].weight * 0).pow(2).sum().sqrt()
        return mixed_precision_loss(model)(x) + gate

    return loss_of


def test_nan_gradients_until_the_scale_collapses(watch, drive, told, named, nonfinite):
    """NaN, not Inf: the scaler halves its scale for nothing, step after step, and nobody is told.

    While the scale is falling it may be a search. At the bottom it is an incident, and the run stops.
    """
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**5)
    sentinel = watch(model, optimizer, scaler=scaler)
    before = {name: t.clone() for name, t in model.named_parameters()}
    batches = [torch.randn(16, 8) for _ in range(100)]
    with pytest.raises(TrainingAborted, match="loss scale"):
        drive(sentinel, batches, nan_gradient(model))
    first = sentinel.incidents[0]
    assert (first.step, str(first.kind)) == (5, "loss_scale")
    assert {str(incident.kind) for incident in sentinel.incidents} == {"loss_scale"}
    assert named(first) == {"1.weight"}
    assert first.details["loss_scale"] == 1.0
    assert "lowering the loss scale cannot help" in first.diagnosis.remedy[0]
    assert len(sentinel.incidents) <= 11  # ten drops and the end, no endless silence
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert nonfinite(model, optimizer, scaler.state_dict()) == []


@pytest.mark.parametrize("callbacks", [[], [Rollback()]], ids=["alone", "rollback"])
def test_endless_drops_at_a_scale_that_is_still_high(callbacks, watch, drive, told):
    """From 2^60 the scale takes long to collapse; so many drops in a row are no search any more."""
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    sentinel = watch(model, optimizer, NanCallback(max_scaler_skips=6), *callbacks, scaler=scaler)
    with pytest.raises(TrainingAborted, match="steps in a row"):
        drive(sentinel, [torch.randn(16, 8) for _ in range(200)], nan_gradient(model))
    assert told(sentinel)[0][:2] == (5, "loss_scale")
    assert sentinel.applied_steps == 0


def test_statistics_poisoned_in_a_step_that_the_scaler_drops(watch, drive, told, nonfinite):
    """pytorch#88474: GradScaler drops the step of an Inf batch, BatchNorm statistics keep the Inf."""

    torch.manual_seed(0)
    model = nn.ModuleDict({"statistics": nn.BatchNorm1d(8), "lin": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    sentinel = watch(model, optimizer, NanCallback(), Rollback(every=1, confirm_after=0), scaler=scaler)
    batches = [torch.randn(16, 8) for _ in range(5)]
    batches[2][3, 3] = torch.inf

    def loss_of(x):
        with torch.no_grad():
            model["statistics"](x)
        loss = mixed_precision_loss(model["lin"])(x.nan_to_num(posinf=0.0))
        return loss + (model["lin"].bias * 0).sqrt().sum() if x.isinf().any() else loss

    dropped_by_scaler = []
    sentinel.on(AfterStep, lambda event: dropped_by_scaler.append(event.scaler_skipped) or None)
    drive(sentinel, batches, loss_of)
    assert not any(dropped_by_scaler)  # the sentinel did so, and the statistics are as they were
    assert told(sentinel) == [(2, "nonfinite_state", "skipped")]
    assert nonfinite(model, optimizer, scaler.state_dict()) == []
    assert (sentinel.applied_steps, scaler.get_scale()) == (4, 2.0**5)  # it has seen it, too


def test_scaler_and_accumulation_name_the_micro_batch(watch, drive, told, nonfinite):
    """A NaN loss in one of four micro-batches under a scaler."""
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    sentinel = watch(model, optimizer, scaler=scaler)
    batches = [torch.randn(16, 8) for _ in range(12)]
    batches[6][0, 0] = torch.inf
    actions = drive(sentinel, batches, mixed_precision_loss(model), accumulate=4)
    assert actions == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_input", "skipped")]
    assert sentinel.incidents[0].microbatch == 2
    assert nonfinite(model, optimizer, scaler.state_dict()) == []
