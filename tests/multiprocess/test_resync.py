"""Copying from the majority: only where each group has one, and only if all are alike afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import CrossRankCallback, NanCallback, Resync, Rollback, Sentinel

pytestmark = pytest.mark.multiprocess

STEPS = 5
FLIPPED_AFTER = 2


def flip(parameter: Tensor) -> None:
    """Change one bit of what this rank holds."""
    held = parameter.detach()
    held = held.to_local() if hasattr(held, "to_local") else held
    held.view(torch.int32).view(-1)[0] ^= 1 << 8


def told(sentinel: Sentinel) -> dict[str, Any]:
    (incident,) = sentinel.incidents
    return {
        "step": incident.step,
        "kind": str(incident.kind),
        "outcome": str(incident.outcome),
        "ranks": [rank.rank for rank in incident.ranks],
        "notes": incident.notes,
        "details": {key: incident.details[key] for key in ("groups_that_differ", "groups_without_majority")},
    }


# -- two kinds of replicas ----------------------------------------------------------------------------


FLIPS: dict[str, dict[int, str]] = {
    "majority": {2: "wide"},
    "majority, and none": {2: "wide", 1: "pair"},
    "both on one rank": {2: "wide pair"},
}
"""Which parameters change on which rank: one is copied on four ranks, one on two."""


def in_pairs(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name, flips in FLIPS.items():
        torch.manual_seed(7)
        parts = {
            "wide": DistributedDataParallel(nn.Linear(2, 2)),
            "pair": DistributedDataParallel(nn.Linear(2, 2), process_group=pairs[rank // 2]),
        }
        optimizer = torch.optim.SGD(
            [p for part in parts.values() for p in part.parameters()], 0.1, momentum=0.9
        )
        callbacks = [NanCallback(), CrossRankCallback(every=1), Resync(), Rollback(every=1, confirm_after=0)]
        with Sentinel(parts, optimizer, callbacks=callbacks, run_dir=folder / name) as sentinel:
            for number, batch in enumerate(sentinel.steps([torch.full((3, 2), 1.0 + rank)] * STEPS)):
                sentinel.backward(parts["pair"](parts["wide"](batch)).square().mean())
                sentinel.step()
                if number == FLIPPED_AFTER:
                    for part in flips.get(rank, "").split():
                        flip(parts[part].module.weight)
        weights = {part: parts[part].module.weight.detach().clone() for part in parts}
        found[name] = {**told(sentinel), "weights": weights}
    return found


def test_a_group_without_a_majority_is_not_said_to_be_rescued(tmp_path):
    results = run_ranks(in_pairs, 4, tmp_path, tmp_path)
    expected = {
        "majority": ("rescued", [2], (1, 0)),
        "majority, and none": ("rolled_back", [0, 1, 2], (2, 1)),
        "both on one rank": ("rolled_back", [2], (2, 0)),
    }
    for name, (outcome, ranks, counts) in expected.items():
        for rank, result in enumerate(results):
            found = result[name]
            assert (found["step"], found["kind"]) == (FLIPPED_AFTER + 1, "rank_divergence")
            assert (found["outcome"], found["ranks"]) == (outcome, ranks), name
            assert tuple(found["details"].values()) == counts
            assert torch.equal(found["weights"]["wide"], results[0][name]["weights"]["wide"])
            assert torch.equal(found["weights"]["pair"], results[rank // 2 * 2][name]["weights"]["pair"])
    notes = {name: results[0][name]["notes"] for name in expected}
    assert not any("resync" in note or "still" in note for note in notes["majority"])
    assert (
        "no resync: where there is no majority there is nothing to copy from" in notes["majority, and none"]
    )
    assert "replicas still differ after the majority's values were copied" in notes["both on one rank"]


# -- one parameter, two dimensions ----------------------------------------------------------------------


def in_two_dimensions(rank: int, folder: Path) -> dict[str, Any]:
    """Every parameter is copied along both dimensions of a mesh of 2 x 3 ranks."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    model = nn.Linear(2, 2)
    whole = [Replicate(), Replicate()]
    distribute_module(model, mesh, input_fn=lambda _, inputs, on: (distribute_tensor(inputs[0], on, whole),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    callbacks = [NanCallback(), CrossRankCallback(every=1), Resync()]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.ones(3, 2)] * STEPS)):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
            if number == FLIPPED_AFTER and rank == 4:
                flip(model.weight)
    return {**told(sentinel), "weight": model.weight.to_local().detach().clone()}


def test_what_three_outvote_is_cured_along_the_other_dimension_too(tmp_path):
    """Ranks 1 and 4 differ along the first dimension, and nobody there could say who is right."""
    results = run_ranks(in_two_dimensions, 6, tmp_path, tmp_path)
    for found in results:
        assert (found["step"], found["outcome"], found["ranks"]) == (FLIPPED_AFTER + 1, "rescued", [4])
        assert tuple(found["details"].values()) == (2, 0)
        assert not any("no majority" in note for note in found["notes"])
        assert torch.equal(found["weight"], results[0]["weight"])
