"""A step computed again by all ranks together: reduced as in the loop, and no rank is left waiting."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gradsentinel import AfterStep, NanCallback, Rescue, Retry, Sentinel, SpikeCallback
from gradsentinel.faults import FaultPlan, PoisonActivation, PoisonGradient
from gradsentinel.testing import swallowed
from loops import differences

pytestmark = pytest.mark.multiprocess

STEPS = 6
ACCUMULATE = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.enter(x)))))


def prepare(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    model = Net()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model.enter, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, model
    return model, nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=kind == "bucket view")


def without_reduction(kind: str, model: Any, last: bool) -> Any:  # noqa: FBT001 - of the window
    if kind != "fsdp2":
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def train(rank: int, folder: Path, kind: str, faults: list[Any], forward: str = "own") -> dict[str, Any]:
    model, called = prepare(kind)
    optimizer = torch.optim.AdamW(called.parameters(), 1e-2)
    torch.manual_seed(rank)
    batches = [torch.randn(6, 4) for _ in range(STEPS * ACCUMULATE)]
    calls = []

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    def again(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if forward == "fails on rank 1" and rank == 1:
            raise ValueError("only here")
        if forward == "fails after the model" and rank == 1:
            module(batch)
            raise ValueError("only here, later")
        return loss_of(module, batch)

    sentinel = Sentinel(
        called,
        optimizer,
        callbacks=[NanCallback(), Retry(), Rescue()],
        forward=again,
        run_dir=folder,
        timeout=20.0,
    )
    steps: list[Any] = []
    sentinel.on(AfterStep, lambda e: steps.append(repr((e.step, e.applied, e.loss, e.grad_norm))))
    plan = FaultPlan(faults)
    with plan.attach(model), sentinel:
        drawn = plan.batches(batches, accumulate=ACCUMULATE)
        for number, batch in enumerate(sentinel.steps(drawn, accumulate=ACCUMULATE)):
            with without_reduction(kind, called, number % ACCUMULATE == ACCUMULATE - 1):
                sentinel.backward(loss_of(called, batch))
            sentinel.step(max_norm=0.5)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "state": {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in state.items()
        },
        "optimizer": [
            [(value.to_local() if isinstance(value, DTensor) else value) for value in entry.values()]
            for entry in optimizer.state.values()
        ],
        "random": torch.get_rng_state(),
        "steps": steps,
        "outcomes": [(i.step, str(i.outcome)) for i in sentinel.incidents],
        "notes": [note for i in sentinel.incidents for note in i.notes],
    }


def both(rank: int, folder: Path, kind: str, *arguments: Any) -> dict[str, Any]:
    clean = train(rank, folder / "clean", kind, [])
    faulty = train(rank, folder / "faulty", kind, *arguments)
    odd = [
        part for part in ("state", "optimizer", "random", "steps") if differences(clean[part], faulty[part])
    ]
    return {**faulty, "odd": odd, "clean": clean["outcomes"]}


TRANSIENT = [
    PoisonActivation(steps=(1,), ranks=(1,), module="head", microbatch=0),
    PoisonGradient(steps=(3,), ranks=(0,), parameter="enter.weight", microbatch=1),
]


@pytest.mark.parametrize("kind", ["ddp", "bucket view", "fsdp2"])
def test_a_transient_fault_of_one_rank_leaves_no_trace_on_any(tmp_path, kind):
    """FSDP2 makes its whole parameters in the forward pass: there a gradient is hit in the activations."""
    faults = TRANSIENT[:1] if kind == "fsdp2" else TRANSIENT
    for ended in run_ranks(both, 2, tmp_path, tmp_path, kind, faults):
        assert ended["clean"] == []
        assert ended["outcomes"] == [(1, "retried"), (3, "retried")][: len(faults)]
        assert ended["odd"] == []


def test_a_persistent_fault_of_one_rank_is_dropped_on_all(tmp_path):
    fault = PoisonActivation(steps=(2,), ranks=(1,), module="head", persistent=True)
    for ended in run_ranks(train, 2, tmp_path, tmp_path / "run", "ddp", [fault]):
        assert ended["outcomes"] == [(2, "skipped")]
        assert any("not transient" in note for note in ended["notes"])


@pytest.mark.expects_swallowed
@pytest.mark.parametrize("forward", ["fails on rank 1", "fails after the model"])
def test_a_forward_that_fails_on_one_rank_keeps_nobody_waiting(tmp_path, forward):
    """The rehearsal finds it out, where no rank waits for another."""
    for ended in run_ranks(train, 2, tmp_path, tmp_path / "run", "ddp", TRANSIENT, forward, timeout=40.0):
        assert ended["outcomes"] == [(1, "skipped"), (3, "skipped")]
        assert any("ValueError: only here" in note for note in ended["notes"])


def half(rank: int, folder: Path, kind: str) -> dict[str, Any]:
    """A product that does not fit into float16, on one rank."""
    model, called = prepare(kind)
    optimizer = torch.optim.SGD(called.parameters(), 1e-9)
    torch.manual_seed(rank)
    batches = [torch.randn(6, 4) for _ in range(4)]
    if rank == 1:
        batches[2] = batches[2] * 3e5

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return module(batch).float().square().mean()

    sentinel = Sentinel(
        called, optimizer, callbacks=[NanCallback(), Retry(), Rescue()], forward=loss_of, run_dir=folder
    )
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss_of(called, batch))
            sentinel.step()
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, whole)
    return {
        "outcomes": [(i.step, str(i.outcome), i.details.get("rescue")) for i in sentinel.incidents],
        "alike": differences(everyone[0], everyone[1]) == [],
        "finite": all(bool(torch.isfinite(p).all()) for p in whole.values()),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_number_that_does_not_fit_on_one_rank_is_rescued_by_all(tmp_path, kind):
    for ended in run_ranks(half, 2, tmp_path, tmp_path / "run", kind):
        ((step, outcome, details),) = ended["outcomes"]
        assert (step, outcome) == (2, "rescued")
        assert details["dtype"] == "float32"
        assert ended["alike"]
        assert ended["finite"]


# -- a spike that is only to be reported, on one rank ----------------------------------------------------


def with_spike(
    rank: int,
    folder: Path,
    kind: str,
    times: float,
    again: float,
    recheck: bool = True,  # noqa: FBT001, FBT002 - by position over processes
) -> dict[str, Any]:
    """Train with a loss that is so many times as large on rank 1 in one step, and in forward= as well."""
    model, called = prepare(kind)
    optimizer = torch.optim.AdamW(called.parameters(), 1e-2)
    torch.manual_seed(rank)
    batches = [torch.randn(6, 4) for _ in range(14)]

    def loss_of(module: nn.Module, batch: torch.Tensor, factor: float) -> torch.Tensor:
        bad = rank == 1 and torch.equal(batch, batches[11])
        return module(batch).square().mean() * (factor if bad else 1.0)

    callbacks = [NanCallback(), SpikeCallback(rule="history", warmup=5, recheck=recheck), Retry()]
    sentinel = Sentinel(
        called,
        optimizer,
        callbacks=callbacks,
        forward=lambda module, batch: loss_of(module, batch, again),
        run_dir=folder,
        timeout=20.0,
    )
    with sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss_of(called, batch, times))
            sentinel.step(max_norm=0.5)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "state": {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in state.items()
        },
        "random": torch.get_rng_state(),
        "outcomes": [(i.step, str(i.outcome), i.severity.label) for i in sentinel.incidents],
    }


def spikes(rank: int, folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        with_spike(rank, folder / "clean", kind, 1.0, 1.0),
        with_spike(rank, folder / "gone", kind, 200.0, 1.0),
        with_spike(rank, folder / "told", kind, 200.0, 200.0, recheck=False),
        with_spike(rank, folder / "real", kind, 200.0, 200.0),
    ]


@pytest.mark.parametrize("kind", ["ddp", "bucket view", "fsdp2"])
def test_a_spike_of_one_rank_is_computed_again_by_all(kind, tmp_path):
    for clean, gone, told, real in run_ranks(spikes, 2, tmp_path, tmp_path, kind, timeout=180):
        assert clean["outcomes"] == []
        assert gone["outcomes"] == [(11, "retried", "warning")]
        assert differences(clean["state"], gone["state"]) == []
        assert differences(clean["random"], gone["random"]) == []
        assert [outcome[:2] for outcome in told["outcomes"]] == [(11, "reported")]
        assert real["outcomes"] == [(11, "reported", "warning")]
        assert differences(told["state"], real["state"]) == []
        assert differences(told["random"], real["random"]) == []


# -- and a second opinion that fails on one rank ----------------------------------------------------------

FAILING = {
    "before": "gradsentinel.callbacks.retry.Standing",
    "within": "gradsentinel.callbacks.retry._doubt",
    "after": "gradsentinel.callbacks.retry.Standing.put_back",
    "in the diagnosis": "gradsentinel.diagnosis.excess.explain_spike",
}


def without_opinion(rank: int, folder: Path, kind: str, where: str) -> dict[str, Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no opinion")

    told = with_spike(rank, folder / "told", kind, 200.0, 200.0, recheck=False)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(FAILING[where], fails)
        again = 1.0 if where in {"before", "within"} else 200.0
        checked = with_spike(rank, folder / "checked", kind, 200.0, again)
    return {"told": told, "checked": checked, "swallowed": [str(error) for error in swallowed()]}


@pytest.mark.parametrize("where", FAILING)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_second_opinion_that_fails_on_one_rank_lets_all_go_on(kind, where, tmp_path):
    ranks = run_ranks(without_opinion, 2, tmp_path, tmp_path, kind, where, timeout=180)
    outcomes = [life["checked"]["outcomes"] for life in ranks]
    assert outcomes[0] == outcomes[1]
    ((step, outcome, _),) = outcomes[0]
    # What was written over cannot be made as it was, so the step is dropped; nobody stops.
    assert (step, outcome) == (11, "skipped" if where == "after" else "reported")
    for life in ranks if where != "after" else ():
        assert differences(life["told"]["state"], life["checked"]["state"]) == []
        assert differences(life["told"]["random"], life["checked"]["random"]) == []
    asked = where != "in the diagnosis" or kind == "ddp"  # a sharded model is not run again for a diagnosis
    assert [life["swallowed"] for life in ranks] == [[], ["no opinion"] * asked]
