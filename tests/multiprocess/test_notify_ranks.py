"""Of many ranks one tells, also where rank 0 cannot any more."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from gradsentinel import ConsensusError, NanCallback, Notify, Sentinel

pytestmark = pytest.mark.multiprocess


def train(run_dir, *, steps, bad=(), fail_at=None, leave_at=None, rank=0, **settings):
    """Return what this rank told of, and what ended its run."""
    found, ended = [], None
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [NanCallback(), Notify(on="warning", fn=found.append, patience=30)]
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, **settings)
    try:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            if number == fail_at:
                raise ValueError("the loader broke")  # noqa: TRY301 - as a user's loop would
            if number == leave_at:
                return found, "left"
            sentinel.backward(model(batch).square().mean() * (float("nan") if number in bad else 1.0))
            sentinel.step(max_norm=1.0)
        sentinel.close()
    except (ValueError, ConsensusError) as error:
        sentinel.__exit__(type(error), error, None)
        ended = type(error).__name__
    return found, ended


def everybody_fails(rank, run_dir):
    return train(run_dir, steps=8, bad={2} if rank == 1 else (), fail_at=5)


def rank_0_is_gone(rank, run_dir):
    return train(run_dir, steps=8, leave_at=4 if rank == 0 else None, timeout=15.0)


def test_an_incident_of_another_rank_is_told_once_and_so_is_the_end(tmp_path):
    told = run_ranks(everybody_fails, 2, tmp_path, tmp_path / "run")
    assert [ended for _, ended in told] == ["ValueError", "ValueError"]
    incidents = [[one for one in found if one["event"] == "incident"] for found, _ in told]
    assert [len(found) for found in incidents] == [1, 0]
    assert incidents[0][0]["who"] == "rank 1"
    ends = [one for found, _ in told for one in found if one["event"] == "run_failed"]
    assert len(ends) == 1
    assert ends[0]["message"] == "ValueError: the loader broke"


@pytest.mark.slow
def test_another_rank_tells_of_the_end_when_rank_0_is_gone(tmp_path):
    (zero, left), (one, ended) = run_ranks(rank_0_is_gone, 2, tmp_path, tmp_path / "run")
    assert (zero, left, ended) == ([], "left", "ConsensusError")
    (alert,) = one
    assert (alert["event"], alert["who"], alert["severity"]) == ("run_failed", "rank 1", "critical")
    assert alert["message"].startswith("ConsensusError: ")
