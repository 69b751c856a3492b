"""What DDP or FSDP leaves alone is each rank's own: no replica, and its bad gradient stays where it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import CrossRankCallback, NanCallback, Rollback, Sentinel

pytestmark = pytest.mark.multiprocess

BAD_STEP = 2
NAN = float("nan")


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own


class Model(nn.Module):
    """The gate's parameter is the one that nobody reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.gate = Gate()
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.gate(torch.tanh(self.enter(x))))


def by_ddp(model: Model) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["gate.own"])
    return DistributedDataParallel(model)


def by_fsdp(model: Model) -> nn.Module:
    return fully_shard(model, ignored_params={model.gate.own})


def outside_of_fsdp(model: Model) -> nn.Module:
    """Only the layers are sharded, so the gate's parameter stays a plain one."""
    for layer in (model.enter, model.leave):
        fully_shard(layer)
    return model


def by_hsdp(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    return fully_shard(model, mesh=mesh, ignored_params={model.gate.own})


WRAPPERS: list[Callable[[Model], nn.Module]] = [by_ddp, by_fsdp, outside_of_fsdp, by_hsdp]


def train(rank: int, folder: Path, wrap: Callable[[Model], nn.Module]) -> dict[str, Any]:
    """Each rank has its own data, so `own` drifts apart; in one step its gradient is NaN on rank 1."""
    torch.manual_seed(7)
    model = Model()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    callbacks = [NanCallback(), CrossRankCallback(every=1), Rollback(every=2, confirm_after=1)]
    draw = torch.Generator().manual_seed(rank)
    watched = []
    with Sentinel(wrapped, optimizer, callbacks=callbacks, run_dir=folder / wrap.__name__) as sentinel:
        run = sentinel._watch.run
        for number, batch in enumerate(sentinel.steps([torch.randn(5, 4, generator=draw) for _ in range(5)])):
            sentinel.backward(wrapped(batch).square().mean())
            if number == BAD_STEP and rank == 1:
                model.gate.own.grad[3] = NAN
            sentinel.step(max_norm=1.0)
            watched = [name for name, _ in model.named_parameters() if run.local.watches(name)]
    return {
        "own": model.gate.own.detach().clone(),
        "compared": sorted({name for group in run.replicas for name in group.members}),
        "watched": sorted(watched),
        "incidents": [
            (i.step, str(i.kind), str(i.outcome), [r.rank for r in i.ranks], [t.name for t in i.tensors])
            for i in sentinel.incidents
        ],
        "messages": [incident.message for incident in sentinel.incidents],
    }


def each(rank: int, folder: Path) -> dict[str, Any]:
    return {wrap.__name__: train(rank, folder, wrap) for wrap in WRAPPERS}


def test_what_nobody_reduces_may_drift_and_is_judged_where_it_is(tmp_path):
    first, second = run_ranks(each, 2, tmp_path, tmp_path)
    reduced = ["enter.bias", "enter.weight", "leave.bias", "leave.weight"]
    for name in (wrap.__name__ for wrap in WRAPPERS):
        assert not torch.equal(first[name]["own"], second[name]["own"]), name
        for found in (first[name], second[name]):
            assert found["incidents"] == [(BAD_STEP, "nonfinite_gradient", "skipped", [1], ["gate.own"])], (
                name
            )
            assert "added theirs up" not in found["messages"][0]
            assert found["compared"] == (reduced if name in {"by_ddp", "by_hsdp"} else []), name
            assert found["watched"] == reduced, name


def delayed(rank: int) -> list[str]:
    """DDP lists a parameter whose reduction it delays among those it ignores."""
    model = Model()
    parallel = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("gate.own", model.gate.own)],
        param_to_hook_all_reduce=model.enter.weight,
    )
    assert "gate.own" in parallel.parameters_to_ignore
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    with Sentinel({"a": parallel}, optimizer, callbacks=[NanCallback()]) as sentinel:
        return sorted({name for group in sentinel._watch.run.replicas for name in group.members})


def test_a_reduction_that_is_only_delayed_makes_replicas_all_the_same(tmp_path):
    for compared in run_ranks(delayed, 2, tmp_path):
        assert compared == ["a.enter.bias", "a.enter.weight", "a.gate.own", "a.leave.bias", "a.leave.weight"]
