"""An eps that one rank has lost: all ranks drop the step, and stay alike."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gradsentinel import NanCallback, Sentinel

pytestmark = pytest.mark.multiprocess


def train(rank, run_dir, guilty):
    torch.manual_seed(0)
    rows = nn.Embedding(8, 4)  # rows 4 to 7 are never used
    model = nn.parallel.DistributedDataParallel(rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.arange(4)] * 20)):
            optimizer.param_groups[0]["eps"] = 0.0 if step == 14 and rank in guilty else 1e-8
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
    causes = [(incident.step, incident.diagnosis.cause) for incident in sentinel.incidents]
    return causes, rows.weight.detach().tolist()


@pytest.mark.parametrize("guilty", [(0,), (1,), (0, 1)])
def test_all_ranks_drop_the_step(guilty, tmp_path):
    (zero, weights), (one, others) = run_ranks(train, 2, tmp_path, tmp_path / "run", guilty)
    assert zero == one == [(14, "optimizer")]
    assert weights == others
    assert torch.tensor(weights).isfinite().all()
