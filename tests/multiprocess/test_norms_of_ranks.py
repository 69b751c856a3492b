"""The norms before an incident in a job of several ranks: of the rank that it is about, of its own part."""

import json
import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import NanCallback, Sentinel

pytestmark = pytest.mark.multiprocess

BAD_STEP = 6


def train(rank: int, run_dir: Path, kind: str):
    """Spoil the loss of rank 1; returns what this rank's shares of the norms were before that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = fully_shard(model) if kind == "sharded" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for step, batch in enumerate(
            sentinel.steps([torch.randn(8, 4, generator=generator) for _ in range(BAD_STEP + 2)])
        ):
            spoiled = math.nan if step == BAD_STEP and rank == 1 else 1.0
            sentinel.backward(model(batch).square().mean() * spoiled)
            gradients = [parameter.grad for parameter in model.parameters()]
            parts = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
            seen.append([float(torch.linalg.vector_norm(part)) for part in parts])
            sentinel.step(max_norm=1.0)
    return seen


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_the_guilty_rank_writes_what_it_saw(tmp_path, kind):
    seen = run_ranks(train, 2, tmp_path, tmp_path / "run", kind)
    (bundle,) = (tmp_path / "run" / "incidents").iterdir()
    assert [path.name for path in bundle.glob("norms*")] == ["norms-rank1.json"]
    found = json.loads((bundle / "norms-rank1.json").read_text())
    assert (found["rank"], found["local"]) == (1, kind == "sharded")
    assert found["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found["iterations"] == list(range(BAD_STEP + 1))
    for row, expected in zip(found["values"][:-1], seen[1], strict=False):
        assert row == pytest.approx(expected, rel=1e-4)
    assert "nan" in found["values"][-1]
