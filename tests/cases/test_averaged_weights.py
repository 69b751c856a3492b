"""An average of the weights must not remember what the weights were saved from."""

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback


@pytest.mark.parametrize("use_buffers", [True, False])
def test_average_of_a_poisoned_model(use_buffers, watch, drive, told, nonfinite):
    """The weights turn NaN in optimizer.step, the average is updated with them: both go back."""
    model = nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
    )
    optimizer = torch.optim.Adam(model.parameters())
    callbacks = NanCallback(), Rollback(every=1, confirm_after=0)
    sentinel = watch(model, optimizer, *callbacks, ema=average)
    step = iter(range(5))

    def loss_of(x):
        if next(step) == 2:
            optimizer.param_groups[0]["weight_decay"] = torch.nan
        return model(x).pow(2).mean()

    drive(sentinel, [torch.randn(8, 4) for _ in range(5)], loss_of)
    assert told(sentinel) == [(2, "nonfinite_parameter", "rolled_back")]
    assert nonfinite(model, optimizer, average) == []
    assert average.n_averaged.item() == 4


def test_average_is_not_updated_by_a_dropped_step(watch, drive, nonfinite):
    """A dropped step does not count for the average either."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, ema=average)
    batches = [torch.randn(8, 4) for _ in range(4)]
    batches[1][0] = torch.nan
    actions = drive(sentinel, batches, lambda x: model(x).pow(2).mean())
    assert actions == ["continue", "skip", "continue", "continue"]
    assert average.n_averaged.item() == 3
    assert nonfinite(model, optimizer, average) == []
