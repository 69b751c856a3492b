"""A rollback that draws the data once more, on several ranks: the same positions on all of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from gradsentinel import NanCallback, Rollback, Sentinel, Skip

pytestmark = pytest.mark.multiprocess

COUNT = 8


def train(rank: int, run_dir: Path, bad: dict[int, tuple[int, str]], left_out: set[int]) -> list[Any]:
    """Train two epochs; return which batches this rank has seen, its incidents, and the weights.

    Args:
        run_dir: of the run.
        bad: by attempted step, the rank on which something goes wrong, and what.
        left_out: numbers of batches of the first epoch that the loop passes over.
    """
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = [{"x": torch.randn(3) + rank, "id": number} for number in range(2 * COUNT)]
    loader = DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    rollback = Rollback(every=3, confirm_after=1, after=1, max_rollbacks=9, data="replay")
    seen, attempts = [], 0
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(state_every=1), Skip(), rollback], run_dir=run_dir
    ) as sentinel:
        for epoch in range(2):
            for number, batch in enumerate(sentinel.steps(loader)):
                if epoch == 0 and number in left_out:
                    continue
                where, what = bad.get(attempts, (-1, ""))
                attempts += 1
                seen.append((sentinel.data_position["batches"], batch["id"].tolist()))
                loss = model(batch["x"]).square().mean()
                sentinel.backward(loss * math.nan if (where, what) == (rank, "loss") else loss)
                sentinel.step()
                if (where, what) == (rank, "weight"):
                    with torch.no_grad():
                        model.module.weight[0, 0] = math.nan
        incidents = [(one.step, [place.rank for place in one.ranks]) for one in sentinel.incidents]
        position = dict(sentinel.data_position)
    return [seen, incidents, position, [p.tolist() for p in model.parameters()]]


def test_all_ranks_go_back_in_their_data_and_leave_out_the_same_position(tmp_path):
    bad = {4: (1, "loss"), 9: (0, "weight")}  # the second, in the second epoch, is no batch's fault
    ranks = run_ranks(train, 2, tmp_path, tmp_path / "run", bad, set())
    plain = run_ranks(train, 2, tmp_path, tmp_path / "plain", {}, {4})
    for rank in range(2):
        seen, incidents, position, weights = ranks[rank]
        assert [step for step, _ in incidents] == [4, 8]
        assert incidents[0][1] == [1]
        assert position == {"epoch": 2, "batch": 0, "batches": 2 * COUNT}
        assert weights == plain[rank][3]
        assert [place for place, _ in seen] == [1, 2, 3, 4, 5, 4, 6, 7, 8, 9, 10, *range(8, 17)]
        last = dict(seen)  # what each position held the last time
        assert [last[place] for place in sorted(last) if place != 5] == [ids for _, ids in plain[rank][0]]
