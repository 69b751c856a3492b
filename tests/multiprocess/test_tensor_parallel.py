"""Tensor parallelism (DTensor): what only one rank can see of replicated norms and biases, and who it was."""

import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradsentinel import (
    BeforeClip,
    Callback,
    CrossRankCallback,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Resync,
    Rollback,
    Sentinel,
)
from gradsentinel.gradients import GradientView

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.xdist_group("tensor-parallel"),  # tests share runs of several processes
]

NAN = float("nan")
BAD_STEP = 2
STEPS = 5
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """For batches of shape [samples, 4, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def beside_plain_ones(model: Model, mesh: DeviceMesh) -> None:
    """The linear layers are distributed; the norms stay plain parameters, copied on every rank."""
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def all_distributed(model: Model, mesh: DeviceMesh) -> None:
    """Every parameter is a DTensor, the norms replicated; so are the activations and the loss."""
    whole = {"use_local_output": False}
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(**whole), "down": RowwiseParallel(**whole)})
    distribute_module(
        model, mesh, input_fn=lambda _, inputs, on: (distribute_tensor(inputs[0], on, [Replicate()]),)
    )


def along_the_sequence(model: Model, mesh: DeviceMesh) -> None:
    """Norms work on a part of the sequence: their gradients, and the loss, are terms to add up (Partial)."""
    for block in (model.first, model.second):
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"last": SequenceParallel()})
    model.register_forward_pre_hook(lambda _, inputs: (distribute_tensor(inputs[0], mesh, [Shard(1)]),))


Layout = Callable[[Model, DeviceMesh], None]
LAYOUTS: list[Layout] = [beside_plain_ones, all_distributed, along_the_sequence]


def build(layout: Layout) -> Model:
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    layout(model, mesh)
    return model


def batches(count: int) -> list[Tensor]:
    """The same on every rank."""
    draw = torch.Generator().manual_seed(100)
    return [torch.randn(3, 4, WIDTH, generator=draw) for _ in range(count)]


def loss_of(model: Model, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The whole weights and moments; called on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = whole(value)
    return found


def own_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of what this rank holds."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state.get(parameter, {})}.items():
            mine = value.to_local() if isinstance(value, DTensor) else value
            found[f"{name}:{key}"] = mine.detach().clone()
    return found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def told(sentinel: Sentinel) -> list[dict[str, Any]]:
    return [
        {
            "step": incident.step,
            "kind": str(incident.kind),
            "outcome": str(incident.outcome),
            "ranks": [(r.rank, dict(r.coordinates), r.host) for r in incident.ranks],
            "message": incident.message,
            "parameters": [tensor.name for tensor in incident.tensors],
        }
        for incident in sentinel.incidents
    ]


def rank_1_alone() -> list[tuple[int, dict[str, int], str]]:
    return [(1, {"tp": 1}, socket.gethostname())]


# -- a healthy run ------------------------------------------------------------------------------------


def by_hand(layout: Layout, max_norm: float | None) -> dict[str, Any]:
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], []
    for batch in batches(STEPS):
        loss = loss_of(model, batch)
        losses.append(whole(loss))
        loss.backward()
        if max_norm is None:
            gradients = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
            norms.append(torch.linalg.vector_norm(gradients))
        else:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": full_state(model, optimizer)}


def watched(folder: Path, layout: Layout, max_norm: float | None) -> dict[str, Any]:
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    losses, norms = [], []
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for batch in sentinel.steps(batches(STEPS)):
            loss = loss_of(model, batch)
            losses.append(whole(loss))
            sentinel.backward(loss)
            norms.append(sentinel.step(max_norm))
    return {
        "losses": losses,
        "norms": norms,
        "state": full_state(model, optimizer),
        "incidents": told(sentinel),
    }


def compare(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS:
        # torch's own clipping does not take plain gradients beside distributed ones
        max_norm = None if layout is beside_plain_ones else 0.5
        found[layout.__name__] = (
            by_hand(layout, max_norm),
            watched(folder / layout.__name__, layout, max_norm),
        )
    return found


def test_a_healthy_run_is_bit_identical(tmp_path):
    results = run_ranks(compare, 2, tmp_path, tmp_path)
    for layout in LAYOUTS:
        for result in results:
            plain, seen = result[layout.__name__]
            assert seen["incidents"] == []
            assert all(torch.equal(a, b) for a, b in zip(seen["losses"], plain["losses"], strict=True))
            assert equal(seen["state"], plain["state"])
            assert equal(seen["state"], results[0][layout.__name__][1]["state"])
            assert not any(isinstance(norm, DTensor) for norm in seen["norms"])
            if layout is beside_plain_ones:
                torch.testing.assert_close(seen["norms"], plain["norms"])
            else:
                assert all(torch.equal(a, b) for a, b in zip(seen["norms"], plain["norms"], strict=True))


def clip_beside_plain_ones(rank: int, folder: Path) -> tuple[list[Tensor], Tensor]:
    """What one step of SGD does to the weights, and the gradients it should have applied."""
    model = build(beside_plain_ones)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = [whole(parameter) for parameter in model.parameters()]
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        sentinel.backward(loss_of(model, batches(1)[0]))
        gradients = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
        sentinel.step(max_norm=0.01)
    after = [whole(parameter) for parameter in model.parameters()]
    return [old - new for old, new in zip(before, after, strict=True)], gradients


def test_distributed_and_plain_gradients_are_clipped_by_their_common_norm(tmp_path):
    for changes, gradients in run_ranks(clip_beside_plain_ones, 2, tmp_path, tmp_path):
        applied = torch.cat([change.flatten() for change in changes])
        assert torch.linalg.vector_norm(gradients) > 0.1
        torch.testing.assert_close(
            applied, gradients * 0.01 / torch.linalg.vector_norm(gradients), rtol=1e-3, atol=1e-6
        )


# -- something not finite on one rank -------------------------------------------------------------------


FAULTS = {
    "loss": None,
    "plain or replicated norm": "second.norm.weight",
    "replicated bias": "second.down.bias",
    "shard": "second.up.weight",
}


def spoil(gradient: Tensor) -> Tensor:
    """Put NaN into this rank's part of a gradient; the other ranks' parts stay as they are."""
    if not isinstance(gradient, DTensor):
        gradient = gradient.clone()
        gradient.view(-1)[0] = NAN
        return gradient
    part = gradient.to_local().clone()
    part.view(-1)[0] = NAN
    return DTensor.from_local(
        part,
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )


def train(
    rank: int,
    folder: Path,
    layout: Layout,
    callbacks: Sequence[Callback],
    fault: str,
    *,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train, with a fault in one step of rank 1."""
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    name = FAULTS[fault]
    unchanged, norms = False, []
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(steps))):
            now = number == BAD_STEP and rank == 1
            loss = loss_of(model, batch)
            if now and name is None:
                loss = loss + NAN * loss.detach()
            sentinel.backward(loss)
            if now and name is not None:
                parameter = model.get_parameter(name)
                parameter.grad = spoil(parameter.grad)
            before = own_state(model, optimizer)
            norms.append(float(sentinel.step(max_norm=0.5)))
            if number == BAD_STEP:
                unchanged = equal(before, own_state(model, optimizer))
    return {
        "incidents": told(sentinel),
        "unchanged": unchanged,
        "norms": norms,
        "applied": sentinel.applied_steps,
        "state": full_state(model, optimizer),
        "own": own_state(model, optimizer),
    }


def each_fault(rank: int, folder: Path, layout: Layout) -> dict[str, Any]:
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    return {fault: train(rank, folder / fault, layout, callbacks, fault) for fault in FAULTS}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.__name__)
def with_faults(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    return run_ranks(each_fault, 2, folder, folder, request.param)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_only_one_rank_can_see_is_dropped_by_all_and_names_that_rank(with_faults, fault):
    results = [result[fault] for result in with_faults]
    for result in results:
        (incident,) = result["incidents"]
        assert incident["kind"] == ("nonfinite_loss" if fault == "loss" else "nonfinite_gradient")
        assert (incident["step"], incident["outcome"]) == (BAD_STEP, "skipped")
        assert incident["ranks"] == rank_1_alone()
        if FAULTS[fault] is not None:
            assert incident["parameters"] == [FAULTS[fault]]
        assert result["unchanged"]
        assert result["applied"] == STEPS - 1
        assert all(tensor.isfinite().all() for tensor in result["own"].values())
        assert incident == results[0]["incidents"][0]
        assert equal(result["state"], results[0]["state"])


def own_norms(rank: int, folder: Path) -> list[float]:
    found = train(rank, folder, beside_plain_ones, [NanCallback()], "plain or replicated norm")
    return found["norms"]


def test_the_other_rank_cannot_know_by_its_own_norm(tmp_path):
    """The trap: the gradient of a plain parameter is nobody's to reduce, so its NaN stays where it is."""
    fine, bad = run_ranks(own_norms, 2, tmp_path, tmp_path)
    assert all(math.isfinite(norm) for norm in fine)
    assert [math.isfinite(norm) for norm in bad] == [True, True, False, True, True]


def test_a_loss_that_is_nan_on_one_rank_has_finite_gradients(with_faults):
    for result in with_faults:
        (incident,) = result["loss"]["incidents"]
        assert "the loss is nan, while every gradient is finite" in incident["message"]
        assert incident["parameters"] == []


WATCHERS: dict[str, list[Callback]] = {
    "a warning": [NanCallback(action="warn", state_warmup=0, state_every=0)],
    "a bound on the norm": [MagnitudeCallback(max_global_norm=1e6, action="skip"), NanCallback()],
    "nobody looks for nan": [CrossRankCallback(every=100)],
}


def looked_at(rank: int, folder: Path, callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    return train(rank, folder, beside_plain_ones, callbacks, "plain or replicated norm", steps=BAD_STEP + 1)[
        "incidents"
    ]


@pytest.mark.parametrize("name", WATCHERS)
def test_the_rank_with_the_nan_reduces_nothing_alone(tmp_path, name):
    """Whoever looks at the norm, and whatever is done about it: the other rank's norm is finite."""
    for incidents in run_ranks(looked_at, 2, tmp_path, tmp_path, WATCHERS[name], timeout=30):
        if name == "nobody looks for nan":
            assert incidents == []
            continue
        (incident,) = incidents
        assert (incident["step"], incident["kind"]) == (BAD_STEP, "nonfinite_gradient")
        assert incident["outcome"] == ("reported" if name == "a warning" else "skipped")
        assert incident["ranks"] == rank_1_alone()


# -- replicas ---------------------------------------------------------------------------------------------


def flip_a_bit(
    rank: int, folder: Path, layout: Layout, callbacks: Sequence[Callback], guilty: int, name: str
) -> dict[str, Any]:
    """After the third step one bit of one replicated parameter flips on one rank."""
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    history: dict[int, dict[str, Tensor]] = {}
    restored = None
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(7))):
            sentinel.backward(loss_of(model, batch))
            sentinel.step(max_norm=0.5)
            if sentinel.incidents and restored is None:
                restored = (sentinel.step_count, own_state(model, optimizer))
            history.setdefault(sentinel.step_count, own_state(model, optimizer))
            if number == 2 and rank == guilty:
                parameter = model.get_parameter(name).detach()
                mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                mine.view(torch.int32)[1] ^= 1 << 10
    assert restored is not None
    copies = {
        key: value for key, value in own_state(model, optimizer).items() if "norm" in key or "last" in key
    }
    return {
        "incidents": told(sentinel),
        "back to": restored[0],
        "same": equal(restored[1], history[restored[0]]),
        "copies": copies,
        "state": full_state(model, optimizer),
    }


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (beside_plain_ones, "first.norm.bias"),
        (beside_plain_ones, "second.down.bias"),
        (along_the_sequence, "last.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_bit_that_flips_in_one_of_two_copies_is_found_and_undone(tmp_path, layout, name):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    results = run_ranks(flip_a_bit, 2, tmp_path, tmp_path, layout, callbacks, 1, name)
    for result in results:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["kind"]) == (3, "rank_divergence")
        assert incident["outcome"] == "rolled_back"
        assert [rank for rank, _, _ in incident["ranks"]] == [0, 1]  # of two nobody can say who is right
        assert name in incident["parameters"]
        assert "mesh dimension tp hold different bits, since step 2" in incident["message"]
        assert incident == results[0]["incidents"][0]
        assert result["back to"] == 2
        assert result["same"]
        assert equal(result["copies"], results[0]["copies"])
        assert equal(result["state"], results[0]["state"])


def test_a_bit_that_flips_in_one_of_four_copies_is_outvoted(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Resync()]
    arguments = (beside_plain_ones, callbacks, 2, "first.norm.bias")
    results = run_ranks(flip_a_bit, 4, tmp_path, tmp_path, *arguments)
    for result in results:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["kind"]) == (3, "rank_divergence")
        assert incident["outcome"] == "rescued"
        assert incident["ranks"] == [(2, {"tp": 2}, socket.gethostname())]
        assert "first.norm.bias" in incident["parameters"]
        assert "rank 2 differs" in incident["message"]
        assert equal(result["copies"], results[0]["copies"])


# -- two dimensions -----------------------------------------------------------------------------------------


def build_in_two_dimensions() -> Model:
    """Linear layers over both dimensions of the mesh, norms over the data-parallel one only."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    beside_plain_ones(model, mesh["tp"])
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def train_in_two_dimensions(rank: int, folder: Path, fault: str | None) -> dict[str, Any]:
    """Data-parallel ranks get different batches, tensor-parallel ones the same."""
    model = build_in_two_dimensions()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    norms = []
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(7))):
            loss = loss_of(model, batch + rank // 2)
            if fault == "loss" and number == 2 and rank == 2:
                loss = loss + NAN * loss.detach()
            sentinel.backward(loss)
            sharded = model.get_parameter("first.norm.weight")
            assert sharded.device_mesh.mesh_dim_names == ("dp",)
            gradients = [whole(p.grad).flatten() for p in model.parameters()]
            norms.append((sentinel.step(max_norm=0.5), torch.linalg.vector_norm(torch.cat(gradients))))
            if fault == "bit" and number == 2 and rank == 3:
                sharded.detach().to_local().view(torch.int32)[1] ^= 1 << 10
    return {"incidents": told(sentinel), "norms": norms, "own": own_state(model, optimizer)}


@pytest.mark.parametrize("fault", [None, "loss", "bit"])
def test_sharded_over_one_dimension_and_parallel_over_the_other(tmp_path, fault):
    results = run_ranks(train_in_two_dimensions, 4, tmp_path, tmp_path, fault)
    for result in results:
        for norm, true_norm in result["norms"]:
            torch.testing.assert_close(norm, true_norm)
        assert all(tensor.isfinite().all() for tensor in result["own"].values())
        assert result["incidents"] == results[0]["incidents"]
    for one, other in ((0, 1), (2, 3)):  # tensor-parallel neighbours hold the same of every norm
        for name, tensor in results[one]["own"].items():
            if "norm" in name or "last" in name:
                assert torch.equal(tensor, results[other]["own"][name]), name
    incidents = results[0]["incidents"]
    if fault is None:
        assert incidents == []
        return
    (incident,) = incidents
    if fault == "loss":
        assert incident["kind"] == "nonfinite_loss"
        assert incident["ranks"] == [(2, {"dp": 1, "tp": 0}, socket.gethostname())]
    else:
        assert (incident["kind"], incident["outcome"]) == ("rank_divergence", "rolled_back")
        assert [rank for rank, _, _ in incident["ranks"]] == [2, 3]
        assert "first.norm.weight" in incident["parameters"]


# -- no rank waits alone ----------------------------------------------------------------------------------


def distributed_findings_of_one_rank(rank: int, folder: Path) -> list[dict[str, Any]]:
    """A function on rank 1 alone returns findings whose value is still to be added up; then it raises."""
    model = build(along_the_sequence)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def look(event: BeforeClip) -> Finding:
        if event.step == 2:
            raise ValueError("only here")
        (loss,) = event.losses
        assert isinstance(loss, DTensor)
        assert loss.placements[0].is_partial()
        return Finding(kind=Kind.CUSTOM, value=loss.detach() * 0)

    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        if rank == 1:
            sentinel.on(BeforeClip, look)
        for batch in sentinel.steps(batches(STEPS)):
            sentinel.backward(loss_of(model, batch))
            sentinel.step(max_norm=0.5)
    return told(sentinel)


def test_distributed_values_of_one_rank_alone_keep_nobody_waiting(tmp_path):
    for incidents in run_ranks(distributed_findings_of_one_rank, 2, tmp_path, tmp_path, timeout=30):
        (incident,) = incidents
        assert (incident["step"], incident["kind"], incident["outcome"]) == (2, "callback_error", "reported")
        assert incident["ranks"] == rank_1_alone()


def norms_of_all_kinds(rank: int) -> list[tuple[float, float]]:
    """Shards, one of which is empty on rank 1, terms that are still to be added up, and a plain gradient."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def shard(values: Tensor, size: int) -> DTensor:
        return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=(size,), stride=(1,))

    gradients: dict[str, Tensor] = {
        "both": shard(torch.full((2,), rank + 1.0), 4),
        "short": shard(torch.full((1 - rank,), 2.0), 1),
        "plain": torch.full((3,), 1.0),
        "terms": DTensor.from_local(torch.full((2,), rank - 3.0), mesh, [Partial()], run_check=False),
    }
    found = []
    for order in (1.0, 2.0, float("inf")):
        view = GradientView(gradients.items(), norm_type=order)
        found.append((float(view.total_norm), view.safe_norm()))
    return found


def test_norms_of_all_kinds_of_gradients_together(tmp_path):
    values = torch.tensor([1.0, 1, 2, 2, 2, 1, 1, 1, -5, -5])
    expected = [float(torch.linalg.vector_norm(values, order)) for order in (1.0, 2.0, float("inf"))]
    for norms in run_ranks(norms_of_all_kinds, 2, tmp_path):
        for (usual, safe), norm in zip(norms, expected, strict=True):
            assert usual == pytest.approx(norm)
            assert safe == pytest.approx(norm)


def scale_losses(rank: int, folder: Path, layout: Layout, name: str) -> dict[str, Any]:
    """What the scaler did about a gradient that overflows on rank 1."""
    model = build(layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    with Sentinel(
        model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run", scaler=scaler
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(STEPS))):
            sentinel.backward(loss_of(model, batch))
            if number == BAD_STEP and rank == 1:
                parameter = model.get_parameter(name)
                parameter.grad = spoil(parameter.grad)
            sentinel.step(max_norm=0.5)
            seen.append((sentinel.applied, scaler.get_scale()))
    return {"seen": seen, "incidents": told(sentinel), "state": full_state(model, optimizer)}


@pytest.mark.parametrize("name", ["second.norm.weight", "second.up.weight"])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.__name__)
def test_a_step_that_the_scaler_drops_on_one_rank_is_dropped_on_all(tmp_path, layout, name):
    """Torch reduces the scaler's flag as the first gradient lies: over no rank if that one is replicated."""
    results = run_ranks(scale_losses, 2, tmp_path, tmp_path, layout, name, timeout=30)
    for result in results:
        assert result["seen"] == [(True, 4.0), (True, 4.0), (False, 2.0), (True, 2.0), (True, 2.0)]
        assert result["incidents"] == []  # the scaler looks for its scale
        assert all(tensor.isfinite().all() for tensor in result["state"].values())
        assert equal(result["state"], results[0]["state"])
