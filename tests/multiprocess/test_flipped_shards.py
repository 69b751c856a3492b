"""A weight of a sharded model whose bit flips on one rank, which looks at its own part and asks nobody."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradsentinel import NanCallback, Sentinel, TrainingAborted

pytestmark = pytest.mark.multiprocess


def train(rank, run_dir):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    nn.init.uniform_(model[1].weight, 1.2, 1.8)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    try:
        with sentinel:
            for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(4)])):
                sentinel.backward(model(batch).pow(2).mean())
                if number == 2 and rank == 1:
                    model[1].weight.to_local().detach().view(torch.int32)[3] ^= 1 << 30
                sentinel.step()
    except TrainingAborted:
        pass
    (incident,) = sentinel.incidents
    return incident.step, incident.diagnosis.cause, incident.diagnosis.evidence[0]


def test_the_rank_that_holds_it_tells(tmp_path):
    for step, cause, fact in run_ranks(train, 2, tmp_path, tmp_path / "run"):
        assert (step, cause) == (2, "hardware")
        assert "1.weight: element 3 is a NaN that no arithmetic makes" in fact
