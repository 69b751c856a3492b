"""Ranks that see unlike shares of the data, and a rank on which nothing is supervised (case 05)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.functional import cross_entropy

from gradsentinel import BatchCallback, NanCallback, Sentinel

pytestmark = pytest.mark.multiprocess

STEPS = 8


def train(
    rank: int,
    folder: Path,
    supervised: list[int],
    empty_at: int | None,
    no_class_at: int | None = None,
    how: str = "",
) -> dict[str, Any]:
    """Train a classifier of tokens; rank r has `supervised[r]` labels of 12 in each batch.

    `how` says that the loop runs the backward pass itself.
    """
    parallel = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(parallel.parameters(), 1e-2)
    data = torch.Generator().manual_seed(rank)
    batches = []
    for number in range(STEPS):
        labels = torch.randint(3, (2, 6), generator=data)
        labels.view(-1)[supervised[rank] :] = -100
        if rank == 1 and number == empty_at:
            labels[:] = -100
        if rank == 1 and number == no_class_at:
            labels[1, 0] = 3
        batches.append({"x": torch.randn(2, 6, 4, generator=data), "labels": labels, "id": [10, 11]})
    callbacks = [NanCallback(), BatchCallback(compare_every=4)]
    weights = []
    with Sentinel(parallel, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for batch in sentinel.steps(batches):
            loss = cross_entropy(parallel(batch["x"]).flatten(0, 1), batch["labels"].flatten())
            if how:
                loss.backward()
            else:
                sentinel.backward(loss)
            sentinel.step()
            weights.append(parallel.module.weight.detach().clone())
    return {
        "incidents": [
            (i.step, str(i.kind), i.action.label, [r.rank for r in i.ranks], i.message)
            for i in sentinel.incidents
        ],
        "finite": all(bool(w.isfinite().all()) for w in weights),
        "applied": sentinel.applied_steps,
    }


def test_a_rank_without_a_single_label_is_named_and_all_ranks_drop_the_step(tmp_path):
    one, other = run_ranks(train, 2, tmp_path, tmp_path, [9, 9], 2)
    assert one["incidents"] == other["incidents"]
    ((step, kind, action, ranks, message),) = one["incidents"]
    assert (step, kind, action, ranks) == (2, "nonfinite_input", "skip", [1])
    assert "all 12 values of labels are -100" in message
    assert one["applied"] == other["applied"] == STEPS - 1
    assert one["finite"]
    assert other["finite"]


def test_a_rank_that_sees_far_less_is_told(tmp_path):
    one, other = run_ranks(train, 2, tmp_path, tmp_path, [12, 3], None)
    assert one["incidents"] == other["incidents"]
    assert one["applied"] == STEPS
    ((_, _, action, ranks, message),) = one["incidents"]
    assert action == "warn"
    assert ranks == [0, 1]
    assert "12 labels" in message or "3 labels" in message


def test_even_shares_are_no_news(tmp_path):
    one, other = run_ranks(train, 2, tmp_path, tmp_path, [12, 10], None)
    assert one["incidents"] == other["incidents"] == []


@pytest.mark.parametrize("how", ["", "by itself"])
@pytest.mark.parametrize("at", [0, 6])
def test_a_label_of_one_rank_that_is_no_class_drops_the_step_of_all(tmp_path, at, how):
    one, other = run_ranks(train, 2, tmp_path, tmp_path, [9, 9], None, at, how)
    assert one["incidents"] == other["incidents"]
    ((step, kind, action, ranks, message),) = one["incidents"]
    assert (step, kind, action, ranks) == (at, "nonfinite_input", "skip", [1])
    assert "labels[1, 0] is 3, outside 0 to 2 (the 3 classes that the loss is given)" in message
    assert one["applied"] == other["applied"] == STEPS - 1
