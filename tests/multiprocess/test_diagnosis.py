"""A rank runs its own micro-batch again, alone: no collective, no hang, and all ranks hear the answer."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import NanCallback, Sentinel
from gradsentinel.faults import FaultPlan, PoisonActivation

pytestmark = pytest.mark.multiprocess


def unsupervised(rank: int, folder: Path, talks: int) -> dict:
    """Rank 1 gets a batch in which no token is supervised."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(inner)

    def forward(model, batch):
        losses = model(batch["x"]).pow(2).flatten() * batch["mask"]
        count = batch["mask"].sum()
        if talks:
            dist.all_reduce(count.clone())
        return losses.sum() / count

    batches = [{"x": torch.randn(6, 4), "mask": torch.ones(6)} for _ in range(3)]
    if rank == 1:
        batches[1]["mask"].zero_()
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[NanCallback()],
        run_dir=folder / "run",
        forward=forward,
        timeout=20,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    found = incident.diagnosis
    return {
        "step": incident.step,
        "ranks": [r.rank for r in incident.ranks],
        "found": (found.cause, found.phase, found.op),
        "notes": incident.notes,
        "weights": [p.detach().clone() for p in model.parameters()],
    }


def test_the_guilty_rank_explains_the_incident_to_all(tmp_path):
    answers = run_ranks(unsupervised, 2, tmp_path, tmp_path, 0)
    for answer in answers:
        assert (answer["step"], answer["ranks"]) == (1, [1])
        assert answer["found"] == ("data", "forward", "aten.div.Tensor")
    assert all(torch.equal(a, b) for a, b in zip(*(answer["weights"] for answer in answers), strict=True))


def test_a_forward_pass_that_talks_to_other_ranks_is_not_run_again(tmp_path):
    for answer in run_ranks(unsupervised, 2, tmp_path, tmp_path, 1):
        assert answer["ranks"] == [1]
        assert answer["found"][0] == "unknown"
        assert any("talks to other ranks" in note for note in answer["notes"])


def struck(rank: int, folder: Path) -> dict:
    """The device of rank 1 makes one bad number in its forward pass, once."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(inner)
    plan = FaultPlan([PoisonActivation(steps=(1,), ranks=(1,), module="0", index=(2, 3))])

    def forward(model, batch):
        return model(batch).pow(2).mean()

    with (
        Sentinel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[NanCallback()],
            run_dir=folder / "run",
            forward=forward,
            timeout=20,
        ) as sentinel,
        plan.attach(inner),
    ):
        for batch in sentinel.steps(plan.batches([torch.randn(6, 4) + rank for _ in range(3)])):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    found = incident.diagnosis
    return {"ranks": [r.rank for r in incident.ranks], "found": found.cause, "said": found.evidence[0]}


def test_a_device_is_told_by_what_the_model_returned_where_gradients_are_reduced(tmp_path):
    """Of the gradients nothing is left: every rank has those of all."""
    for answer in run_ranks(struck, 2, tmp_path, tmp_path):
        assert (answer["ranks"], answer["found"]) == ([1], "hardware"), answer
        assert "record 2" in answer["said"]
