"""Each rank compares its own loss with its own past; what one finds, all do alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from gradsentinel import NanCallback, Sentinel, SpikeCallback, StagnationCallback, UpdateRatioCallback

pytestmark = pytest.mark.multiprocess

BAD_STEP, STEPS = 40, 50


def train(rank: int, folder: Path, wrapper: str, factor: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    called: nn.Module = model
    if wrapper == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(called.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    callbacks = [
        NanCallback(),
        SpikeCallback(action="skip", groups="parameter"),
        StagnationCallback(),
        UpdateRatioCallback(every=5, warmup=5),
    ]
    applied = []
    with Sentinel(called, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for step in sentinel.steps(range(STEPS)):
            x = torch.randn(16, 6, generator=data)
            loss = mse_loss(called(x), x.sum(1, keepdim=True))
            sentinel.backward(loss * (factor if step == BAD_STEP and rank == 1 else 1.0))
            sentinel.step(max_norm=1.0)
            applied.append(sentinel.applied)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in called.parameters()]
    return {
        "dropped": [step for step, made in enumerate(applied) if not made],
        "incidents": [(i.step, str(i.kind), [r.rank for r in i.ranks]) for i in sentinel.incidents],
        "weights": [p.detach().double().sum().item() for p in whole],
    }


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_loss_that_spikes_on_one_rank(tmp_path, wrapper):
    one, other = run_ranks(train, 2, tmp_path, tmp_path, wrapper, 8.0)
    assert one == other
    assert one["dropped"] == [BAD_STEP]
    assert one["incidents"] == [(BAD_STEP, "spike", [1])]
