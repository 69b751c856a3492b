"""What goes wrong on one rank of many, and looks alike on all of them one reduction later."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import (
    Callback,
    CrossRankCallback,
    MagnitudeCallback,
    NanCallback,
    Resync,
    Rollback,
    Sentinel,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "multiprocess"))
from ranks import run_ranks  # shared with the multi-process tests

pytestmark = pytest.mark.multiprocess

STEPS = 6


class Loop:
    """A plain loop under DDP; each case overrides what goes wrong in it."""

    optimizer = staticmethod(lambda parameters: torch.optim.SGD(parameters, 0.1))

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = nn.Linear(4, 2)

    def loss(self, outputs: Tensor, step: int) -> Tensor:
        return outputs.square().mean()

    def before_backward(self, step: int) -> None:
        pass

    def before_step(self, step: int) -> None:
        pass


def train(rank: int, folder: Path, loop: type[Loop], callbacks: list[Callback]) -> dict[str, Any]:
    case = loop(rank)
    parallel = DistributedDataParallel(case.model)
    optimizer = case.optimizer(parallel.parameters())
    batches = [
        torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * s + rank)) for s in range(STEPS)
    ]
    applied = []
    with Sentinel(parallel, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for step, batch in enumerate(sentinel.steps(batches)):
            loss = case.loss(parallel(batch), step)
            case.before_backward(step)
            sentinel.backward(loss)
            case.before_step(step)
            sentinel.step(max_norm=1.0)
            applied.append(sentinel.applied)
    return {
        "incidents": [
            (i.step, str(i.kind), str(i.outcome), [r.rank for r in i.ranks]) for i in sentinel.incidents
        ],
        "messages": [i.message for i in sentinel.incidents],
        "applied": applied,
        "weights": [p.detach().clone() for p in case.model.parameters()],
    }


def run(folder: Path, world_size: int, loop: type[Loop], callbacks: list[Callback]) -> dict[str, Any]:
    """Train and return what all ranks have in common: everything, and sound weights."""
    first, *others = run_ranks(train, world_size, folder, folder, loop, callbacks)
    weights = first.pop("weights")
    assert all(tensor.isfinite().all() for tensor in weights)
    for other in others:
        assert all(map(torch.equal, other.pop("weights"), weights))
        assert other == first
    return first


class ZeroTokens(Loop):
    """Packed fine-tuning data: in one rank's batch no token is supervised, and its loss is 0/0.

    After the reduction every rank holds NaN, and a log of rank 0 shows a finite loss. The rank with
    the empty batch has to be named, and all ranks have to leave the step out together.
    """

    def loss(self, outputs: Tensor, step: int) -> Tensor:
        supervised = torch.zeros(6) if (step, self.rank) == (1, 1) else torch.ones(6)
        return (outputs.square().sum(1) * supervised).sum() / supervised.sum()


def test_a_rank_without_supervised_tokens_is_named_and_the_step_left_out_by_all(tmp_path):
    result = run(tmp_path, 2, ZeroTokens, [NanCallback()])
    assert result["incidents"] == [(1, "nonfinite_loss", "skipped", [1])]
    assert result["applied"] == [True, False, True, True, True, True]


class BitFlip(Loop):
    """Faulty hardware flips the topmost exponent bit of one number of one rank's gradient, once.

    The gradient becomes huge and stays finite, so a NaN check sees nothing; after the reduction it is
    huge on all ranks. Data, model and precision are innocent.
    """

    def before_backward(self, step: int) -> None:
        if (step, self.rank) == (4, 1):
            self.handle = self.model.weight.register_hook(self.flip)

    def flip(self, gradient: Tensor) -> Tensor:
        self.handle.remove()
        gradient = gradient.clone()
        gradient.view(torch.int32).view(-1)[5] ^= 1 << 30
        return gradient


def test_a_flipped_exponent_bit_is_kept_from_the_weights_and_its_rank_named(tmp_path):
    callbacks = [
        NanCallback(),
        MagnitudeCallback(max_global_norm=1e4, action="skip"),
        CrossRankCallback(every=1),
    ]
    result = run(tmp_path, 2, BitFlip, callbacks)
    assert result["applied"] == [True, True, True, True, False, True]
    (step, kind, outcome, _), outlier = result["incidents"]
    assert (step, kind, outcome) == (4, "magnitude", "skipped")
    assert outlier == (4, "rank_divergence", "reported", [1])
    assert "local gradient" in result["messages"][1]


def test_a_flipped_exponent_bit_is_reported_where_nothing_is_to_be_dropped(tmp_path):
    result = run(tmp_path, 2, BitFlip, [NanCallback(), CrossRankCallback(every=1)])
    assert result["incidents"] == [(4, "rank_divergence", "reported", [1])]


class LocalNan(Loop):
    """Each rank skips by its own loss: the rank that sees NaN skips, the others apply the NaN.

    The decision has to be one decision of all ranks.
    """

    def loss(self, outputs: Tensor, step: int) -> Tensor:
        loss = super().loss(outputs, step)
        return loss * float("nan") if (step, self.rank) == (1, 1) else loss


def test_ranks_that_would_skip_by_their_own_loss_decide_together(tmp_path):
    result = run(tmp_path, 2, LocalNan, [NanCallback()])
    assert result["incidents"] == [(1, "nonfinite_loss", "skipped", [1])]
    assert result["applied"] == [True, False, True, True, True, True]


class LocalSkip(Loop):
    """The loop's own spike rule takes the gradients away on one rank only, behind everybody's back.

    All weights stay finite, the losses look normal, and the ranks train different models from then on:
    DDP never compares parameters again.
    """

    at = 1
    optimizer = staticmethod(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))

    def before_step(self, step: int) -> None:
        if (step, self.rank) == (self.at, 1):
            for parameter in self.model.parameters():
                parameter.grad = None


class LocalSkipAtOnce(LocalSkip):
    """The same in the very first step: the other ranks have optimizer state that this one has not."""

    at = 0


def test_a_step_skipped_by_one_rank_alone_is_found_at_the_next_check_and_healed(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Resync()]
    result = run(tmp_path, 3, LocalSkip, callbacks)
    assert result["incidents"] == [(1, "rank_divergence", "rescued", [1])]
    assert "weight" in result["messages"][0]


def test_optimizer_state_that_one_rank_lacks_cannot_be_copied_so_all_ranks_go_back(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=1), Resync(), Rollback(every=1, confirm_after=0)]
    result = run(tmp_path, 3, LocalSkipAtOnce, callbacks)
    assert result["incidents"] == [(0, "rank_divergence", "rolled_back", [1])]


def test_snapshots_from_after_the_skip_are_not_gone_back_to(tmp_path):
    """Each of them is finite, and each rank's holds another model."""
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=1, confirm_after=0)]
    result = run(tmp_path, 2, LocalSkip, callbacks)
    assert result["incidents"] == [(1, "rank_divergence", "rolled_back", [0, 1])]
    assert "since step 0 at the earliest" in result["messages"][0]
