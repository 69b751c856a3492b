"""Shards of FSDP2 as a torch.distributed.checkpoint: loaded by one rank, and by as many as before."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradsentinel import NanCallback, Rollback, Sentinel
from gradsentinel.state.export import export

pytestmark = pytest.mark.multiprocess

STEPS = 4


def build(*, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))  # nothing divides by two
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def train(rank: int, run_dir: Path) -> list[Any]:
    """Train two ranks on the same data; the state of step 4 is on disk, and what it was is returned."""
    model, optimizer = build(sharded=True)
    callbacks = [NanCallback(), Rollback(every=STEPS, confirm_after=1, on_disk=1)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches(STEPS + 2)):
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
            if sentinel.step_count == STEPS:
                weights = [p.full_tensor().tolist() for p in model.parameters()]  # type: ignore[attr-defined]
                moments = [optimizer.state[p]["exp_avg"].full_tensor().tolist() for p in model.parameters()]
    return [weights, moments]


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, alone: bool) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it does itself
        # before torch 2.7 it goes by itself by whether there is a process group
        known = "no_dist" in inspect.signature(dcp.load).parameters
        dcp.load(state, checkpoint_id=path, **({"no_dist": alone} if known else {}))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def load_sharded(rank: int, path: Path) -> list[Any]:
    model, optimizer = build(sharded=True)
    load(model, optimizer, path, alone=False)
    return [
        [p.full_tensor().tolist() for p in model.parameters()],  # type: ignore[attr-defined]
        [optimizer.state[p]["exp_avg"].full_tensor().tolist() for p in model.parameters()],
    ]


def test_shards_of_two_ranks_are_loaded_by_one_and_by_two(tmp_path):
    before, _ = run_ranks(train, 2, tmp_path, tmp_path / "run")
    chosen = export(tmp_path / "run", tmp_path / "out")
    assert (chosen.step, len(chosen.paths)) == (STEPS, 2)

    model, optimizer = build(sharded=False)
    load(model, optimizer, tmp_path / "out", alone=True)
    weights, moments = before
    assert [p.tolist() for p in model.parameters()] == weights
    assert [optimizer.state[p]["exp_avg"].tolist() for p in model.parameters()] == moments
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [STEPS] * 3

    assert run_ranks(load_sharded, 2, tmp_path, tmp_path / "out") == [before, before]
