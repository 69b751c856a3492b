"""Gradient accumulation: one bad micro-batch spoils the step, and has to be named."""

import json
import math

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Sentinel


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def loss_of(model):
    """The sign of what is wrong travels with the batch."""

    def loss(batch):
        x, wrong = batch
        out = model(x).pow(2).mean()
        if wrong == "loss":
            return out * torch.nan
        if wrong == "gradient":  # a finite loss with a NaN gradient
            return out + (model[2].bias * 0).pow(2).sum().sqrt()
        return out

    return loss


def batches(count, bad, wrong):
    return [(torch.randn(8, 4), wrong if index == bad else "") for index in range(count)]


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
@pytest.mark.parametrize("position", [0, 1, 3], ids=["first", "middle", "last"])
@pytest.mark.parametrize("window", [0, 1], ids=["first step", "later step"])
def test_bad_micro_batch_is_named(window, position, wrong, watch, drive, told, nonfinite):
    """Report number 4 * step + k is of no use if only the sum is looked at: which of the four was it?"""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer)
    data = batches(12, 4 * window + position, wrong)
    actions = drive(sentinel, data, loss_of(model), accumulate=4)
    assert actions == ["skip" if step == window else "continue" for step in range(3)]
    assert told(sentinel) == [(window, f"nonfinite_{wrong}", "skipped")]
    assert sentinel.incidents[0].microbatch == position
    assert model[1].num_batches_tracked.item() == 8  # all four forward passes of the step are taken back
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_bad_micro_batch_in_a_loop_of_ones_own(position, wrong, watch, told, nonfinite):
    """The same without sentinel.steps: k backwards, then one step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer)
    data = batches(9, 3 + position, wrong)
    for index, batch in enumerate(data):
        sentinel.backward(loss_of(model)(batch) / 3)
        if index % 3 == 2:
            sentinel.step(max_norm=1.0)
    assert told(sentinel) == [(1, f"nonfinite_{wrong}", "skipped")]
    assert sentinel.incidents[0].microbatch == position
    assert nonfinite(model, optimizer) == []


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [4, 5, 6, 7, 8, 9])
def test_uneven_windows(bad, wrong, watch, drive, told):
    """Six batches in windows of four leave a window of two; the next epoch starts with four again."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = batches(12, bad, wrong)
    drive(sentinel, data[:6], loss_of(model), accumulate=4)
    drive(sentinel, data[6:], loss_of(model), accumulate=4)
    window, position = {4: (1, 0), 5: (1, 1), 6: (2, 0), 7: (2, 1), 8: (2, 2), 9: (2, 3)}[bad]
    assert told(sentinel) == [(window, f"nonfinite_{wrong}", "skipped")]
    assert sentinel.incidents[0].microbatch == position


@pytest.mark.parametrize("wrong", ["loss", "gradient"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_two_losses_per_micro_batch(position, wrong, watch, told):
    """Multi-task training runs backward once per task: what is named is the micro-batch, not the backward."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in sentinel.steps(batches(8, 4 + position, wrong), accumulate=4):
        sentinel.backward(loss_of(model)((batch[0], "")))
        sentinel.backward(loss_of(model)(batch))
        sentinel.step()
    assert told(sentinel) == [(1, f"nonfinite_{wrong}", "skipped")]
    assert sentinel.incidents[0].microbatch == position


def test_the_first_of_two_bad_micro_batches_is_named(watch, drive, told):
    """The sum is spoilt from the first one on."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = batches(4, 1, "loss")
    data[3] = (data[3][0], "loss")
    drive(sentinel, data, loss_of(model), accumulate=4)
    assert told(sentinel) == [(0, "nonfinite_loss", "skipped")]
    assert sentinel.incidents[0].microbatch == 1


@pytest.mark.parametrize(
    ("dtype", "huge"),
    [(torch.float16, 3e4), (torch.bfloat16, 1e30), (torch.float32, 1e30)],
    ids=["fp16", "bf16", "fp32"],
)
def test_huge_micro_batch_is_not_blamed_for_anothers_nan(dtype, huge, watch, drive, term, told):
    """The first micro-batch's gradient norm overflows, its gradients do not; the third one's are NaN."""
    model = nn.Linear(64, 1, bias=False, dtype=dtype)
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    gradients = [huge, 0.5, torch.nan, 0.5]
    actions = drive(sentinel, gradients, lambda g: term(model.weight, torch.full((1, 64), g)), accumulate=4)
    assert actions == ["skip"]
    assert told(sentinel) == [(0, "nonfinite_gradient", "skipped")]
    assert sentinel.incidents[0].microbatch == 2


def test_micro_batches_need_not_be_checked(watch, drive, told):
    """Switched off, the step is still caught; only the micro-batch is then not told from the gradients."""
    model = network()
    sentinel = watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), NanCallback(check_microbatches=False)
    )
    data = batches(8, 6, "gradient")
    assert drive(sentinel, data, loss_of(model), accumulate=4) == ["continue", "skip"]
    assert told(sentinel) == [(1, "nonfinite_gradient", "skipped")]
    assert sentinel.incidents[0].microbatch is None


def test_a_window_that_was_not_announced_blames_no_micro_batch_that_it_has_not_looked_at(run_dir):
    """Two backward passes to a step, and nobody said so: the gradient of either may be the bad one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    spoilt = [False]
    hook = model.weight.register_hook(lambda grad: grad * (math.nan if spoilt[0] else 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(4, 3) for _ in range(12)])):
            spoilt[0] = number == 9
            sentinel.backward(model(batch).square().mean() / 2)
            if number % 2:
                sentinel.step()
    hook.remove()
    (incident,) = sentinel.incidents
    assert incident.microbatch is None
    skipped = json.loads((run_dir / "skipped-batches.json").read_text())
    assert [entry["batch"] for entry in skipped["batches"]] == [8, 9]
