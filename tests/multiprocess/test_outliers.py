"""A rank whose own loss or gradients are far from those of the others, though nothing is non-finite."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import CrossRankCallback, NanCallback, Sentinel

pytestmark = pytest.mark.multiprocess

Loss = Callable[[int, int, Tensor], Tensor]
"""Of rank, step and what the model makes of the batch."""


def usual(rank: int, step: int, outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def a_larger_loss(rank: int, step: int, outputs: Tensor) -> Tensor:
    """Another constant in the loss: no gradient tells."""
    return usual(rank, step, outputs) + (500.0 if (rank, step) == (1, 3) else 0.0)


def larger_gradients(rank: int, step: int, outputs: Tensor) -> Tensor:
    """The same loss with a hundred times the gradient."""
    loss = usual(rank, step, outputs)
    return loss + 99 * (loss - loss.detach()) if (rank, step) == (1, 3) else loss


def both(rank: int, step: int, outputs: Tensor) -> Tensor:
    return usual(rank, step, outputs) * (1000.0 if (rank, step) == (1, 3) else 1.0)


def below_zero(rank: int, step: int, outputs: Tensor) -> Tensor:
    """Has no logarithm."""
    return usual(rank, step, outputs) - (500.0 if (rank, step) == (1, 3) else 10.0)


def only_slightly_larger(rank: int, step: int, outputs: Tensor) -> Tensor:
    return usual(rank, step, outputs) * (3.0 if rank == 1 else 1.0)


LOSSES: list[Loss] = [usual, a_larger_loss, larger_gradients, both, below_zero, only_slightly_larger]


def train(rank: int, folder: Path, loss: Loss) -> list[tuple[int, str, str, list[int], list[str]]]:
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    callbacks = [NanCallback(), CrossRankCallback(every=1)]
    draw = torch.Generator().manual_seed(rank)
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / loss.__name__) as sentinel:
        batches = [torch.randn(64, 4, generator=draw) for _ in range(5)]
        for number, batch in enumerate(sentinel.steps(batches)):
            sentinel.backward(loss(rank, number, model(batch)))
            sentinel.step(max_norm=1.0)
    return [
        (i.step, str(i.kind), str(i.outcome), [r.rank for r in i.ranks], [i.message, *i.notes])
        for i in sentinel.incidents
    ]


def each(rank: int, folder: Path) -> dict[str, Any]:
    return {loss.__name__: train(rank, folder, loss) for loss in LOSSES}


def test_a_rank_that_leaves_the_others_is_reported_and_named(tmp_path):
    results = run_ranks(each, 3, tmp_path, tmp_path)
    assert results[1:] == results[:-1]
    told = {"a_larger_loss": ["loss"], "larger_gradients": ["local gradient norm"]}
    told["both"] = ["local gradient norm", "loss"]
    for loss in LOSSES:
        incidents = results[0][loss.__name__]
        if loss.__name__ not in told:
            assert incidents == []
            continue
        ((step, kind, outcome, ranks, said),) = incidents
        assert (step, kind, outcome, ranks) == (3, "rank_divergence", "reported", [1])
        assert [text.split(" of this rank is ")[0] for text in said] == [
            f"the {what}" for what in told[loss.__name__]
        ]
