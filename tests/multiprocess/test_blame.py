"""Where it began: the rank is named although the reduction spread it (traps of data-parallel training)."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import Callback, CrossRankCallback, NanCallback, Resync, Rollback, Sentinel, TrainingAborted

pytestmark = pytest.mark.multiprocess

BAD_STEP = 2
STEPS = 6


class Poison(torch.autograd.Function):
    """Identity whose gradient becomes `value` in one element."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        g.view(-1)[0] = ctx.value
        return g, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 1)
        self.value: float | None = None

    def forward(self, x):
        h = self.first(x).relu()
        if self.value is not None:
            h = Poison.apply(h, self.value)
        return self.last(h)


def train(
    rank: int, folder: Path, callbacks: list[Callback], fault: Any, options: dict[str, Any]
) -> dict[str, Any]:
    model = Model()
    parallel = DistributedDataParallel(model, **{"find_unused_parameters": True, **options})
    if fault is huge_everywhere:
        parallel.register_comm_hook(None, sum_then_divide)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    sentinel = Sentinel(parallel, optimizer, callbacks=callbacks, run_dir=folder / "run")
    aborted = ""
    norms = []
    try:
        with sentinel:
            for number in sentinel.steps(range(STEPS)):
                step = sentinel.step_count
                x = torch.randn(8, 4, generator=draw)
                model.value = fault(rank) if step == BAD_STEP else None
                hooks = []
                if fault is huge_everywhere and step == BAD_STEP:
                    hooks = [model.last.bias.register_hook(lambda g: torch.full_like(g, 3e38))]
                sentinel.backward(parallel(x).square().mean())
                for hook in hooks:
                    hook.remove()
                norms.append(sentinel.step(max_norm=1.0))
                if fault is drift and rank == 1 and number == BAD_STEP:
                    with torch.no_grad():
                        model.first.bias[3] += 1e-7
    except TrainingAborted as error:
        aborted = str(error)
    return {
        "incidents": [
            (i.step, str(i.kind), i.outcome.value, [r.rank for r in i.ranks], i.message, i.microbatch)
            for i in sentinel.incidents
        ],
        "weights": [p.detach().clone() for p in model.parameters()],
        "aborted": aborted,
        "norms": norms,
    }


def nan_on_rank_1(rank):
    return float("nan") if rank == 1 else None


def huge_everywhere(rank):
    return None


def sum_then_divide(state, bucket):
    """A communication hook as people write it: the sum may overflow where the mean would not."""
    total = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return total.then(lambda future: future.value()[0].div_(torch.distributed.get_world_size()))


def drift(rank):
    """One bit-sized change of one parameter of one rank, which no NaN check can see."""


OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "find_unused_parameters": False},
    {"bucket_cap_mb": 0.0001},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_that_is_nan_on_one_rank_names_that_rank(tmp_path, options):
    results = run_ranks(train, 2, tmp_path, tmp_path, [NanCallback()], nan_on_rank_1, options)
    for result in results:
        ((step, kind, outcome, ranks, message, microbatch),) = result["incidents"]
        assert (step, kind, outcome, ranks, microbatch) == (BAD_STEP, "nonfinite_gradient", "skipped", [1], 0)
        assert "first.weight" in message
        assert "last" not in message
        assert all(w.isfinite().all() for w in result["weights"])


def test_finite_gradients_whose_sum_overflows_blame_the_reduction(tmp_path):
    results = run_ranks(train, 2, tmp_path, tmp_path, [NanCallback()], huge_everywhere, {})
    for result in results:
        ((step, kind, outcome, ranks, message, _),) = result["incidents"]
        assert (step, kind, outcome, ranks) == (BAD_STEP, "nonfinite_gradient", "skipped", [0, 1])
        assert "their sum is not" in message


def test_a_replica_that_drifts_is_found_and_named(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Resync(), Rollback(every=1, confirm_after=0)]
    results = run_ranks(train, 3, tmp_path, tmp_path, callbacks, drift, {})
    first = results[0]
    for result in results:
        ((step, kind, outcome, ranks, message, _),) = result["incidents"]
        assert (step, kind, outcome, ranks) == (3, "rank_divergence", "rescued", [1])
        assert "first.bias" in message
        assert "since step 2" in message
        for mine, theirs in zip(result["weights"], first["weights"], strict=True):
            assert torch.equal(mine, theirs)


def test_two_replicas_that_differ_have_no_majority_and_go_back(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    results = run_ranks(train, 2, tmp_path, tmp_path, callbacks, drift, {})
    for result in results:
        ((step, kind, outcome, ranks, _, _),) = result["incidents"]
        assert (step, kind, outcome, ranks) == (3, "rank_divergence", "rolled_back", [0, 1])
        for mine, theirs in zip(result["weights"], results[0]["weights"], strict=True):
            assert torch.equal(mine, theirs)


def plain(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    model = Model()
    parallel = DistributedDataParallel(model, **{"find_unused_parameters": True, **options})
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        parallel(torch.randn(8, 4, generator=draw)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def healthy(rank):
    return None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_healthy_ddp_run_is_bit_identical(tmp_path, options):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2)]
    watched = run_ranks(train, 2, tmp_path, tmp_path, callbacks, healthy, options)
    unwatched = run_ranks(plain, 2, tmp_path, options)
    for mine, theirs in zip(watched, unwatched, strict=True):
        assert mine["incidents"] == []
        for a, b in zip(mine["weights"], theirs, strict=True):
            assert torch.equal(a, b)


def by_fsdp(model: Model) -> nn.Module:
    for layer in (model.first, model.last, model):
        fully_shard(layer)
    return model


def without_reduction(
    rank: int, folder: Path, layout: str, bad: int
) -> list[tuple[int, list[int], int | None, str]]:
    """Three micro-batches a step, of which only the last is reduced; one of them has a NaN on rank 1."""
    model, sharded = Model(), layout == "fsdp2"
    nn.init.constant_(model.first.bias, 3.0)  # the units are alive: a dead one lets no NaN through
    wrapped = by_fsdp(model) if sharded else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    draw = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, 4, generator=draw) for _ in range(9)]
    with Sentinel(wrapped, optimizer, callbacks=[NanCallback()], run_dir=folder / str(bad)) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches, accumulate=3)):
            model.value = float("nan") if (rank, number) == (1, 3 + bad) else None
            last = number % 3 == 2
            if sharded:
                wrapped.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if sharded or last else wrapped.no_sync():
                sentinel.backward(wrapped(batch).square().mean())
            sentinel.step(max_norm=1.0)
    return [(i.step, [r.rank for r in i.ranks], i.microbatch, i.message) for i in sentinel.incidents]


def each_microbatch(rank: int, folder: Path, layout: str) -> list[Any]:
    return [without_reduction(rank, folder, layout, bad) for bad in range(3)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_micro_batch_is_named_also_where_gradients_stay_local_for_a_while(tmp_path, layout):
    results = run_ranks(each_microbatch, 2, tmp_path, tmp_path, layout)
    assert results[0] == results[1]
    for bad, ((step, ranks, microbatch, message),) in enumerate(results[0]):
        assert (step, ranks, microbatch) == (1, [1], bad)
        assert "first.weight" in message
