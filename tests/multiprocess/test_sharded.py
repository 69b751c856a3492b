"""Sharded models (FSDP2 and HSDP): one decision, the guilty rank by name, every shard back bit for bit."""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import (
    Action,
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
from gradsentinel.ranks.blame import LocalGradients

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.xdist_group("sharded"),  # tests share runs of several processes
]

NAN = float("nan")
BAD_STEP = 2
MESHES = {
    "fsdp": ((2,), ("dp",)),
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard")),
    "copies": ((4, 1), ("dp_replicate", "dp_shard")),
}


class Spoil(torch.autograd.Function):
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


class Spoiler(nn.Module):
    """Lets a bad gradient into whatever comes before it, when it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.value: float | None = None

    def forward(self, x):
        return x if self.value is None else Spoil.apply(x, self.value)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.spoiler = Spoiler()
        self.down = nn.Linear(7, width)

    def forward(self, x):
        return x + self.down(self.spoiler(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Odd sizes, so that shards differ; the last bias is one number: some ranks have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.spoiler = Spoiler()
        self.first = Block(5)
        self.second = Block(5)
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.second(self.first(self.spoiler(self.enter(x)))))


def build(layout: str, *, precision: torch.dtype | None = None, seed: int = 7) -> Model:
    torch.manual_seed(seed)
    shape, names = MESHES[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=precision)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def batches(rank: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(6, 4, generator=draw) for _ in range(count)]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of this rank's part of the weights and of the optimizer's state."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.to_local().detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = (value.to_local() if isinstance(value, DTensor) else value).clone()
    return found


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The whole weights and moments; called on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = whole(value)
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
            "microbatch": incident.microbatch,
            "message": incident.message,
            "parameters": [tensor.name for tensor in incident.tensors],
        }
        for incident in sentinel.incidents
    ]


# -- a healthy run -------------------------------------------------------------------------------------


HEALTHY: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no clipping": {"max_norm": None},
    "norm of order 1": {"norm_type": 1.0},
    "bfloat16": {"precision": torch.bfloat16},
    "two micro-batches": {"accumulate": 2},
}


def by_hand(rank: int, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The loop without GradSentinel."""
    model = build(layout, precision=settings.get("precision"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    window = settings.get("accumulate", 1)
    losses, norms = [], []
    for number, batch in enumerate(batches(rank, 8), start=1):
        loss = model(batch).square().mean()
        losses.append(loss.detach().clone())
        (loss / window if window > 1 else loss).backward()
        if number % window:
            continue
        if settings.get("max_norm", 1.0) is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, settings.get("norm_type", 2.0))
            norms.append(whole(norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": full_state(model, optimizer)}


def watched(rank: int, folder: Path, layout: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same loop with everything on."""
    model = build(layout, precision=settings.get("precision"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    max_norm = settings.get("max_norm", 1.0)
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    losses, norms = [], []
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for batch in sentinel.steps(batches(rank, 8), accumulate=settings.get("accumulate", 1)):
            loss = model(batch).square().mean()
            losses.append(loss.detach().clone())
            sentinel.backward(loss)
            norm = sentinel.step(max_norm, norm_type=settings.get("norm_type", 2.0))
            if norm is not None and max_norm is not None:
                assert not isinstance(norm, DTensor)
                norms.append(norm)
    assert callbacks[-1].known_good_steps[-1] > 0
    return {
        "losses": losses,
        "norms": norms,
        "state": full_state(model, optimizer),
        "incidents": told(sentinel),
    }


def compare(rank: int, folder: Path, layout: str, names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        plain = by_hand(rank, layout, HEALTHY[name])
        found[name] = (plain, watched(rank, folder / name, layout, HEALTHY[name]))
    return found


@pytest.mark.parametrize(
    ("layout", "world_size", "names"),
    [("fsdp", 2, list(HEALTHY)), ("hsdp", 4, ["as usual", "two micro-batches"])],
    ids=["fsdp", "hsdp"],
)
def test_a_healthy_run_is_bit_identical(tmp_path, layout, world_size, names):
    results = run_ranks(compare, world_size, tmp_path, tmp_path, layout, names, timeout=100)
    for name in names:
        for result in results:
            plain, seen = result[name]
            assert seen["incidents"] == [], name
            assert len(plain["losses"]) == 8
            for part in ("losses", "norms"):
                assert len(seen[part]) == len(plain[part])
                assert all(torch.equal(a, b) for a, b in zip(seen[part], plain[part], strict=True)), name
            assert equal(seen["state"], plain["state"]), name
            assert equal(seen["state"], results[0][name][1]["state"]), name


# -- something not finite on one rank ------------------------------------------------------------------


PLACES = {
    "enter": ("spoiler", ("enter",)),
    "first block": ("first.spoiler", ("first.up", "first.norm", "enter")),
    "second block": ("second.spoiler", ("second.up", "second.norm", "first", "enter")),
}
"""Where a NaN comes into the backward pass, and what it reaches from there, in that order."""


def train(
    rank: int,
    folder: Path,
    layout: str,
    callbacks: Sequence[Callback],
    *,
    guilty: int = -1,
    fault: str | None = None,
    value: float = NAN,
    accumulate: int = 1,
    steps: int = 5,
    listen: Callable[[Sentinel, nn.Module, torch.optim.Optimizer], None] | None = None,
    after: Callable[[Sentinel, nn.Module, torch.optim.Optimizer], None] | None = None,
) -> dict[str, Any]:
    """Train, with a fault in the last micro-batch of one step of one rank."""
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = batches(rank, steps * accumulate)
    bad = BAD_STEP * accumulate + accumulate - 1
    if fault == "record" and rank == guilty:
        data[bad][3, 1] = value
    unchanged = False
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        if listen is not None:
            listen(sentinel, model, optimizer)
        for number, batch in enumerate(sentinel.steps(data, accumulate=accumulate)):
            now = number == bad and rank == guilty
            if fault in PLACES:
                model.get_submodule(PLACES[fault][0]).value = value if now else None
            loss = model(batch).square().mean()
            if fault == "loss" and now:
                loss = loss + value * loss.detach()
            sentinel.backward(loss)
            before = shards(model, optimizer)
            sentinel.step(max_norm=1.0)
            if number == bad:
                unchanged = equal(before, shards(model, optimizer))
            if after is not None:
                after(sentinel, model, optimizer)
    return {
        "incidents": told(sentinel),
        "unchanged": unchanged,
        "state": full_state(model, optimizer),
        "applied": sentinel.applied_steps,
        "step": sentinel.step_count,
    }


def each_fault(rank: int, folder: Path, layout: str, faults: Sequence[str], guilty: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fault in faults:
        for accumulate in (1, 2):
            found[f"{fault} {accumulate}"] = train(
                rank,
                folder / f"{fault}{accumulate}",
                layout,
                [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)],
                guilty=guilty,
                fault=fault,
                accumulate=accumulate,
            )
    return found


KINDS = {"record": "nonfinite_input", "loss": "nonfinite_loss"}


def all_faults(tmp_path_factory, layout: str, faults: Sequence[str], world_size: int) -> list[dict[str, Any]]:
    """What each rank saw of each fault, all in one set of processes; the last rank is the guilty one."""
    folder = tmp_path_factory.mktemp(layout)
    return run_ranks(each_fault, world_size, folder, folder, layout, faults, world_size - 1, timeout=100)


@pytest.fixture(scope="module")
def fsdp_faults(tmp_path_factory) -> list[dict[str, Any]]:
    return all_faults(tmp_path_factory, "fsdp", ["record", "loss", *PLACES], 2)


@pytest.fixture(scope="module")
def hsdp_faults(tmp_path_factory) -> list[dict[str, Any]]:
    return all_faults(tmp_path_factory, "hsdp", ["record", "loss", "first block"], 4)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        *(("fsdp", fault) for fault in ("record", "loss", *PLACES)),
        *(("hsdp", fault) for fault in ("record", "loss", "first block")),
    ],
)
def test_what_is_not_finite_on_one_rank_is_dropped_by_all_and_names_that_rank(
    request, layout, fault, accumulate
):
    faults = request.getfixturevalue(f"{layout}_faults")
    results = [result[f"{fault} {accumulate}"] for result in faults]
    coordinates = {"fsdp": {"dp": 1}, "hsdp": {"dp_replicate": 1, "dp_shard": 1}}[layout]
    guilty = len(results) - 1
    for result in results:
        (incident,) = result["incidents"]
        assert incident["kind"] == KINDS.get(fault, "nonfinite_gradient")
        assert (incident["step"], incident["outcome"]) == (BAD_STEP, "skipped")
        assert incident["ranks"] == [(guilty, coordinates, socket.gethostname())]
        assert incident["microbatch"] == accumulate - 1
        assert result["unchanged"]
        assert result["applied"] == 4
        assert all(tensor.isfinite().all() for tensor in result["state"].values())
        assert incident == results[0]["incidents"][0]
        assert equal(result["state"], results[0]["state"])


@pytest.mark.parametrize("fault", PLACES)
def test_the_parameters_that_a_bad_gradient_reached_are_named(fsdp_faults, fault):
    _, reached = PLACES[fault]
    for result in fsdp_faults:
        (incident,) = result[f"{fault} 1"]["incidents"]
        assert "before the ranks added theirs up" in incident["message"]
        names = incident["parameters"]
        assert [place for place in reached if names[0].startswith(place)] == [reached[0]]
        assert all(name.startswith(reached) for name in names), names


def test_a_loss_that_is_nan_while_all_gradients_are_finite_is_said_to_be_so(fsdp_faults):
    for result in fsdp_faults:
        (incident,) = result["loss 1"]["incidents"]
        assert "the loss is nan" in incident["message"]
        assert "while every gradient is finite" in incident["message"]


class Beside(nn.Module):
    """A head that nobody shards and whose gradients nobody adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.spoiler = Spoiler()

    def forward(self, x):
        return self.spoiler(x * self.weight)


def train_with_a_head(rank: int, folder: Path) -> list[dict[str, Any]]:
    model, head = build("fsdp"), Beside()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.01)
    parts = {"body": model, "head": head}
    with Sentinel(parts, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(rank, 4))):
            head.spoiler.value = NAN if number == BAD_STEP and rank == 1 else None
            sentinel.backward(head(model(batch).detach()).mean() + model(batch).square().mean())
            sentinel.step(max_norm=1.0)
    return told(sentinel)


def test_a_gradient_that_nobody_adds_up_began_where_it_is(tmp_path):
    for incidents in run_ranks(train_with_a_head, 2, tmp_path, tmp_path):
        (incident,) = incidents
        assert (incident["step"], incident["kind"]) == (BAD_STEP, "nonfinite_gradient")
        assert [rank for rank, _, _ in incident["ranks"]] == [1]
        assert incident["parameters"] == ["head.weight"]
        assert "sum" not in incident["message"]


# -- replicas ------------------------------------------------------------------------------------------


def flip_a_bit(rank: int, folder: Path, layout: str, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """After the third step one bit of one weight flips on rank 2."""

    def after(sentinel: Sentinel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if sentinel.step_count == 3 and rank == 2 and not sentinel.incidents:
            shard = model.get_parameter("first.up.weight").to_local().detach()
            shard.view(torch.int32).view(-1)[1] ^= 1 << 12

    return train(rank, folder, layout, callbacks, steps=6, after=after)


def test_a_bit_that_flips_in_one_of_two_replicas_is_found_and_undone(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Rollback(every=2, confirm_after=1)]
    results = run_ranks(flip_a_bit, 4, tmp_path, tmp_path, "hsdp", callbacks)
    for result in results:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["kind"]) == (3, "rank_divergence")
        assert incident["outcome"] == "rolled_back"
        assert [rank for rank, _, _ in incident["ranks"]] == [0, 2]  # of two nobody can say who is right
        assert "first.up.weight" in incident["parameters"]
        assert "dp_replicate" in incident["message"]
        assert incident == results[0]["incidents"][0]
        assert equal(result["state"], results[0]["state"])


def test_a_bit_that_flips_in_one_of_four_replicas_is_outvoted(tmp_path):
    callbacks = [NanCallback(), CrossRankCallback(every=2), Resync()]
    results = run_ranks(flip_a_bit, 4, tmp_path, tmp_path, "copies", callbacks)
    for result in results:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["kind"]) == (3, "rank_divergence")
        assert incident["outcome"] == "rescued"
        assert incident["ranks"] == [(2, {"dp_replicate": 2, "dp_shard": 0}, socket.gethostname())]
        assert "first.up.weight" in incident["parameters"]
        assert equal(result["state"], results[0]["state"])


# -- back to an earlier state --------------------------------------------------------------------------


def roll_back(rank: int, folder: Path) -> dict[str, Any]:
    """At step 5 rank 1 alone asks to go back; compare with what each rank had at the step it goes back to."""
    history: dict[int, dict[str, Tensor]] = {}
    came_back: list[tuple[int, dict[str, Tensor]]] = []
    rollback = Rollback(every=2, confirm_after=1)
    sizes: dict[str, int] = {}

    def listen(sentinel: Sentinel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def ask(event: BeforeClip) -> Finding:
            asked = torch.tensor(event.step == 5 and rank == 1 and not sentinel.incidents)
            return Finding(kind=Kind.SPIKE, value=asked, action=Action.ROLLBACK)

        sentinel.on(BeforeClip, ask)

    def after(sentinel: Sentinel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if sentinel.incidents and not came_back:
            came_back.append((sentinel.step_count, shards(model, optimizer)))
            snapshot = sentinel._watch.run.known_good
            for name, parameter in model.named_parameters():
                state = snapshot.optimizers[0]["state"][name]
                kept = {snapshot.parameters[name].shape, state["exp_avg"].shape, state["exp_avg_sq"].shape}
                assert kept == {parameter.to_local().shape}
            sizes["snapshot"] = sum(tensor.numel() for tensor in snapshot.parameters.values())
            sizes["model"] = sum(parameter.numel() for parameter in model.parameters())
        elif not sentinel.incidents:
            history[sentinel.step_count] = shards(model, optimizer)

    found = train(rank, folder, "fsdp", [NanCallback(), rollback], steps=9, listen=listen, after=after)
    ((step, restored),) = came_back
    return {**found, "back to": step, "same": equal(restored, history[step]), **sizes}


def test_every_rank_goes_back_to_its_own_shard_of_the_same_step(tmp_path):
    results = run_ranks(roll_back, 2, tmp_path, tmp_path)
    for result in results:
        (incident,) = result["incidents"]
        assert (incident["step"], incident["outcome"]) == (5, "rolled_back")
        assert [rank for rank, _, _ in incident["ranks"]] == [1]
        assert result["back to"] == 4
        assert result["same"]
        assert result["step"] == 7
        assert equal(result["state"], results[0]["state"])
    assert sum(result["snapshot"] for result in results) == results[0]["model"]


def first_life(rank: int, folder: Path) -> dict[str, Any]:
    history: dict[int, dict[str, Tensor]] = {}

    def after(sentinel: Sentinel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        history[sentinel.step_count] = shards(model, optimizer)

    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=1)]
    found = train(rank, folder, "fsdp", callbacks, steps=7, after=after)
    return {**found, "history": history}


def evaluate(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(batches(rank, 1)[0])


def second_life(rank: int, folder: Path) -> dict[str, Any]:
    """With an evaluation before each part: after it FSDP2 keeps the whole parameters of the root."""
    model = build("fsdp", seed=8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    evaluate(model, rank)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        evaluate(model, rank)
        step = sentinel.restore()
        restored = shards(model, optimizer)
        distributed = all(
            isinstance(state[key], DTensor)
            for state in optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        )
        for batch in sentinel.steps(batches(rank, 7)[step:]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
    return {
        "step": step,
        "restored": restored,
        "distributed": distributed,
        "state": full_state(model, optimizer),
        "incidents": told(sentinel),
    }


def test_new_processes_go_on_from_the_shards_on_disk(tmp_path):
    before = run_ranks(first_life, 2, tmp_path, tmp_path)
    saved = sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir())
    assert saved == [f"step-000000006-rank{rank}" for rank in (0, 1)]
    after = run_ranks(second_life, 2, tmp_path, tmp_path)
    for old, new in zip(before, after, strict=True):
        assert new["step"] == 6
        assert equal(new["restored"], old["history"][6])
        assert new["distributed"]
        assert new["incidents"] == []
        assert equal(new["state"], old["state"])


# -- a norm that overflows -----------------------------------------------------------------------------


def overflow(rank: int, folder: Path, layout: str) -> dict[str, Any]:
    """Gradients of 1e30 on one rank: finite, but not their squares. A step of SGD shows what was applied."""
    model = build(layout)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = {name: whole(parameter) for name, parameter in model.named_parameters()}
    (batch,) = batches(rank, 1)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        model.second.spoiler.value = 1e30 if rank == 1 else None
        sentinel.backward(model(batch).square().mean())
        gradients = {name: whole(parameter.grad).double() for name, parameter in model.named_parameters()}
        norm = sentinel.step(max_norm=1e-3)
    applied = {
        name: before[name].double() - whole(parameter).double()
        for name, parameter in model.named_parameters()
    }
    true_norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients.values()))
    expected = {name: gradient * 1e-3 / true_norm for name, gradient in gradients.items()}
    return {
        "norm": norm,
        "true": float(true_norm),
        "incidents": told(sentinel),
        "applied": applied,
        "expected": expected,
    }


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("hsdp", 4)])
def test_finite_gradients_whose_norm_overflows_are_clipped_by_the_true_one(tmp_path, layout, world_size):
    results = run_ranks(overflow, world_size, tmp_path, tmp_path, layout)
    for result in results:
        assert result["incidents"] == []
        assert result["norm"] == float("inf")
        assert 1e28 < result["true"] < 1e31
        for name, expected in result["expected"].items():
            torch.testing.assert_close(result["applied"][name], expected, rtol=1e-4, atol=1e-7)
        total = torch.sqrt(sum(change.square().sum() for change in result["applied"].values()))
        assert float(total) == pytest.approx(1e-3, rel=1e-3)
        assert all(torch.equal(result["applied"][n], results[0]["applied"][n]) for n in result["applied"])


# -- what is sent, and what the watch costs ------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes the operators that run, those inside of distributed tensors and collectives too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> list[str]:
        return [name for name in self.seen if "c10d" in name and "wait_tensor" not in name]


def collectives_of(
    rank: int,
    folder: Path,
    callbacks: Sequence[Callback],
    norm_type: float,
    value: float | None,
    *,
    loss: float | None = None,
) -> list[list[str]]:
    """What each of four steps sends; in the third one rank 1 may have a bad gradient."""
    model = build("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sent = []
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(rank, 4))):
            model.spoiler.value = value if number == BAD_STEP and rank == 1 else None
            computed = model(batch).square().mean()
            if loss is not None and number == BAD_STEP and rank == 1:
                computed = computed.nan_to_num() + (computed.detach() * 0 + loss)
            sentinel.backward(computed)
            with Operators() as operators:
                sentinel.step(1.0, norm_type=norm_type)
            sent.append(operators.collectives)
    return sent


def collectives_by_hand(rank: int) -> list[str]:
    model = build("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    (batch,) = batches(rank, 1)
    model(batch).square().mean().backward()
    with Operators() as operators:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return operators.collectives


def all_collectives(rank: int, folder: Path) -> dict[str, Any]:
    watch = [NanCallback(state_warmup=0), Rollback(every=100)]
    found = {"by hand": collectives_by_hand(rank)}
    each = [NanCallback(state_warmup=0), MagnitudeCallback(max_parameter_norm=1e9)]
    found["a second look"] = collectives_of(rank, folder / "second", each, 2.0, None)
    found["a bad loss"] = collectives_of(rank, folder / "loss", watch, 2.0, None, loss=NAN)
    for name, norm_type, value in (
        ("healthy", 2.0, None),
        ("a nan", 2.0, NAN),
        ("an overflow", 2.0, 1e30),
        ("largest value", float("inf"), None),
        ("a nan among the largest", float("inf"), NAN),
    ):
        found[name] = collectives_of(rank, folder / name, watch, norm_type, value)
    return found


def test_each_rank_sends_the_same_and_a_healthy_step_sends_nothing_that_clipping_does_not(tmp_path):
    """The norm carries the alarm; a largest value does not, and one small message more is sent there."""
    results = run_ranks(all_collectives, 2, tmp_path, tmp_path)
    assert results[0] == results[1]
    (found, _) = results
    assert len(found["by hand"]) >= 1
    for step in found["healthy"]:
        assert step == found["by hand"]
    assert len(found["a nan"][BAD_STEP]) > len(found["a nan"][BAD_STEP - 1])
    assert found["a nan"][BAD_STEP + 1] == found["healthy"][BAD_STEP + 1]
    assert len(found["largest value"][0]) == len(found["by hand"]) + 1
    assert len(found["a second look"][1]) == len(found["by hand"]) + 1
    assert len(found["a bad loss"][BAD_STEP]) > len(found["a bad loss"][BAD_STEP - 1]) == len(step)


def operators_in_backward(rank: int, folder: Path) -> tuple[list[str], list[str], int]:
    model = build("fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen = []
    for watching in (False, True):
        (batch,) = batches(rank, 1)
        sentinel = None
        if watching:
            sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run")
        for _ in range(2):  # the first pass makes the whole parameters
            loss = model(batch).square().mean()
            with Operators() as operators:
                loss.backward()
            optimizer.zero_grad()
        seen.append(operators.seen)
        if sentinel is not None:
            assert sentinel._watch.run.local.norm() is not None
            sentinel.close()
    return seen[0], seen[1], len(list(model.parameters()))


def test_looking_behind_the_reduction_is_one_pass_per_parameter_and_no_wait(tmp_path):
    for without, watched_ones, parameters in run_ranks(operators_in_backward, 2, tmp_path, tmp_path):
        more = Counter(watched_ones) - Counter(without)
        views = {"aten.detach.default", "aten.view.default", "aten.alias.default"}  # launch nothing
        of_one_number = {"aten.neg.default", "aten.maximum.default"}
        assert {name: count for name, count in more.items() if name not in views | of_one_number} == {
            "aten.aminmax.default": parameters  # on a device the norm of order infinity: one launch
        }
        assert not [name for name in watched_ones if "_local_scalar_dense" in name or "nonzero" in name]


# -- this rank's own gradients ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gradient",
    [
        torch.full((8,), 3e38),
        torch.full((3, 2), 6e4, dtype=torch.float16),
        torch.full((4,), 1e300, dtype=torch.float64),
        torch.full((2,), 3e38 + 3e38j),
        torch.zeros(0),
        torch.sparse_coo_tensor([[1, 2]], torch.full((2, 2), 2e38), (4, 2), check_invariants=True),
    ],
    ids=["float32", "float16", "float64", "complex", "empty", "sparse"],
)
def test_a_finite_gradient_of_any_size_is_no_bad_place(gradient):
    """Its 2-norm overflows, its largest value does not; and nobody waits for the device."""
    local = LocalGradients()
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    local.watch_parameters([("weight", parameter)])
    with Operators() as operators:
        parameter.backward(gradient)
        local.end_microbatch()
        assert local.norm() is not None
    assert not [name for name in operators.seen if "_local_scalar_dense" in name or "coalesce" in name]
    assert operators.seen.count("aten.aminmax.default") == bool(gradient.numel())
    assert local.bad_places() == (None, ())
    local.detach()


def test_the_micro_batch_and_the_parameters_of_a_bad_gradient_are_known():
    local = LocalGradients()
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("one", "two")}
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    local.watch_parameters([*parameters.items(), ("frozen", frozen)])
    for value in (1.0, 2.0, NAN):
        parameters["one"].backward(torch.full((3,), value))
        parameters["two"].backward(torch.ones(3))
        local.end_microbatch()
    assert local.bad_places() == (2, ("one",))
    assert (local.watches("one"), local.watches("frozen"), local.watches("three")) == (True, False, False)
    local.begin_step()
    assert (local.bad_places(), local.norm()) == ((None, ()), None)
    local.detach()
    parameters["one"].backward(torch.ones(3))
    assert (local.norm(), local.watching) == (None, False)


def accumulate_in_ddp(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Without no_sync the second micro-batch is added to a sum that the first one has spoiled already."""
    torch.manual_seed(7)
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    with Sentinel(parallel, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(rank, 9), accumulate=3)):
            model.spoiler.value = NAN if number == 4 and rank == 1 else None
            sentinel.backward(parallel(batch).square().mean())
            sentinel.step(max_norm=1.0)
    return told(sentinel)


def test_a_rank_that_adds_to_a_sum_spoiled_by_another_is_not_blamed(tmp_path):
    for (incident,) in run_ranks(accumulate_in_ddp, 2, tmp_path, tmp_path):
        assert (incident["step"], incident["microbatch"]) == (1, 1)
        assert [rank for rank, _, _ in incident["ranks"]] == [1]
        assert set(incident["parameters"]) == {"enter.weight", "enter.bias"}
