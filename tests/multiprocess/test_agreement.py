"""All ranks decide alike, whatever happens on one of them, and none hangs (P4)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gradsentinel import (
    Action,
    AfterBackward,
    BeforeClip,
    Callback,
    Detector,
    Finding,
    Kind,
    NanCallback,
    Rollback,
    Sentinel,
    TrainingAborted,
)

pytestmark = pytest.mark.multiprocess

BAD_STEP = 3


class RaisesOnOneRank(Detector):
    def __init__(self, rank: int, method: str) -> None:
        self.rank, self.method = rank, method

    def _maybe(self, method: str, event: Any) -> None:
        if self.method == method and event.step == BAD_STEP and torch.distributed.get_rank() == self.rank:
            raise ValueError("only here")

    def on_after_backward(self, event: AfterBackward) -> None:
        self._maybe("on_after_backward", event)

    def on_before_clip(self, event: BeforeClip) -> None:
        self._maybe("on_before_clip", event)

    def on_after_step(self, event: Any) -> None:
        self._maybe("on_after_step", event)


class OneRankSuspects(Detector):
    def on_before_clip(self, event: BeforeClip) -> Finding:
        guilty = event.step == BAD_STEP and torch.distributed.get_rank() == 1
        return Finding(
            kind=Kind.CUSTOM, value=torch.tensor(guilty), action=Action.SKIP, message="rank 1 says so"
        )


def train(
    rank: int, folder: Path, callbacks: list[Callback], fault: str | None, steps: int = 8
) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    data = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 4, generator=data) for _ in range(steps)]
    if fault == "input" and rank == 1:
        batches[BAD_STEP][2, 1] = float("nan")
    sentinel = Sentinel(parallel, optimizer, callbacks=callbacks, run_dir=folder / "run")
    aborted = ""
    try:
        with sentinel:
            for step, batch in enumerate(sentinel.steps(batches)):
                loss = parallel(batch).pow(2).mean()
                if fault == "loss" and rank == 1 and step == BAD_STEP:
                    loss = loss + float("nan") * loss.detach()
                sentinel.backward(loss)
                if fault == "state" and rank == 1 and step == BAD_STEP:
                    with torch.no_grad():
                        model[0].weight[0, 0] = float("inf")
                sentinel.step(max_norm=1.0)
    except TrainingAborted as error:
        aborted = str(error)
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.detach().clone() for b in model.buffers()],
        "incidents": [
            (i.id, i.step, str(i.kind), i.action.label, [r.rank for r in i.ranks]) for i in sentinel.incidents
        ],
        "step": sentinel.step_count,
        "aborted": aborted,
    }


def agree(results: list[dict[str, Any]]) -> None:
    first, *others = results
    for other in others:
        assert other["incidents"] == first["incidents"]
        assert other["step"] == first["step"]
        assert bool(other["aborted"]) == bool(first["aborted"])
        for mine, theirs in zip(other["weights"], first["weights"], strict=True):
            assert torch.equal(mine, theirs)
    for result in results:
        assert all(tensor.isfinite().all() for tensor in (*result["weights"], *result["buffers"]))


def test_a_bad_record_on_one_rank_is_dropped_by_all_and_names_that_rank(tmp_path):
    results = run_ranks(train, 2, tmp_path, tmp_path, [NanCallback()], "input")
    agree(results)
    assert results[0]["incidents"] == [("000003-nonfinite_input", 3, "nonfinite_input", "skip", [1])]


def test_a_loss_that_is_nan_on_one_rank_with_finite_gradients_is_seen_by_all(tmp_path):
    results = run_ranks(train, 2, tmp_path, tmp_path, [NanCallback()], "loss")
    agree(results)
    assert results[0]["incidents"] == [("000003-nonfinite_loss", 3, "nonfinite_loss", "skip", [1])]


def test_a_finding_on_one_rank_alone_drops_the_step_everywhere(tmp_path):
    results = run_ranks(train, 2, tmp_path, tmp_path, [OneRankSuspects(), NanCallback()], None)
    agree(results)
    assert results[0]["incidents"] == [("000003-custom", 3, "custom", "skip", [1])]


@pytest.mark.expects_swallowed
@pytest.mark.parametrize("method", ["on_after_backward", "on_before_clip", "on_after_step"])
def test_a_callback_that_raises_on_one_rank_hangs_nobody(tmp_path, method):
    results = run_ranks(train, 2, tmp_path, tmp_path, [RaisesOnOneRank(1, method), NanCallback()], "input")
    agree(results)
    kinds = [kind for _, _, kind, _, _ in results[0]["incidents"]]
    assert "nonfinite_input" in kinds
    assert "callback_error" in kinds


def test_a_bad_state_on_one_rank_rolls_every_rank_back(tmp_path):
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=0)]
    results = run_ranks(train, 2, tmp_path, tmp_path, callbacks, "state")
    agree(results)
    assert [action for _, _, _, action, _ in results[0]["incidents"]] == ["rollback"]
    assert results[0]["step"] < 8


def test_without_rollback_every_rank_stops(tmp_path):
    results = run_ranks(train, 2, tmp_path, tmp_path, [NanCallback()], "state")
    assert all(result["aborted"] for result in results)
    assert results[0]["incidents"] == results[1]["incidents"]
