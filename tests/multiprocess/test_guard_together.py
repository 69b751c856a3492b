"""guard='device' on several ranks: all drop the same step, and later hear whose fault it was."""

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import Callback, NanCallback, Rollback, Sentinel

pytestmark = pytest.mark.multiprocess
STEPS = 8
NAN = float("nan")


class Spoiler(nn.Module):
    """Hands its input on, and spoils the gradient that comes back if it is told to."""

    bad = False

    def forward(self, x):
        if self.bad:
            x.register_hook(lambda gradient: gradient * NAN)
        return x


def build(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Spoiler(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    if layout == "ddp":
        return DistributedDataParallel(model), model[2]
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[3], model[5]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), model[2]


def train(rank, folder, layout, guard, bad_step, callbacks=None):
    model, spoiler = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    sentinel = Sentinel(
        model, optimizer, run_dir=folder / f"{layout}-{guard}-{bad_step}", guard=guard, callbacks=callbacks
    )
    torch.manual_seed(rank)
    with sentinel:
        for step, batch in enumerate(sentinel.steps(list(torch.randn(STEPS, 3, 4)))):
            spoiler.bad = step == bad_step and rank == 1
            sentinel.backward(model(batch).square().mean())
            sentinel.step(1.0)
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]
    told = [
        (i.step, str(i.kind), str(i.outcome), [place.rank for place in i.ranks]) for i in sentinel.incidents
    ]
    return told, weights, sentinel.applied_steps


def both_guards(rank, folder, layout):
    return {
        step: [train(rank, folder, layout, guard, step) for guard in ("host", "device")]
        for step in (None, 0, 3, STEPS - 1)
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_fault_on_one_rank_ends_on_all_as_under_the_host_guard(tmp_path, layout):
    for found in run_ranks(both_guards, 2, tmp_path, tmp_path, layout):
        for step, (host, device) in found.items():
            expected = [] if step is None else [(step, "nonfinite_gradient", "skipped", [1])]
            assert host[0] == expected
            assert device[0] == expected
            assert all(torch.equal(one, other) for one, other in zip(host[1], device[1], strict=True))
            assert host[2] == device[2] == STEPS - (step is not None)


class Raises(Callback):
    """Fails on one rank, which then hears nothing more."""

    def __init__(self, rank, method):
        self.rank, self.method = rank, method

    def __repr__(self):
        return "Raises()"

    def on_before_clip(self, event):
        if self.method == "on_before_clip" and self.rank == 1 and event.step == 2:
            raise ValueError("only here")

    def on_after_step(self, event):
        if self.method == "on_after_step" and self.rank == 1 and event.step == 2:
            raise ValueError("only here")


def with_a_failing_callback(rank, folder, method):
    callbacks = [NanCallback(), Raises(rank, method), Rollback(every=3)]
    return train(rank, folder, "ddp", "device", 5, callbacks)


@pytest.mark.expects_swallowed
@pytest.mark.parametrize("method", ["on_before_clip", "on_after_step"])
def test_a_callback_that_fails_on_one_rank_hangs_nobody(tmp_path, method):
    first, second = run_ranks(with_a_failing_callback, 2, tmp_path, tmp_path, method)
    assert first[0] == second[0]
    kinds = [(kind, ranks) for _, kind, _, ranks in first[0]]
    assert ("callback_error", [1]) in kinds
    assert ("nonfinite_gradient", [1]) in kinds
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))
