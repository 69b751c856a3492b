"""guard='device': the device drops a bad step by itself, and the host hears of it later, without waiting."""

import copy
import logging
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from gradsentinel import (
    Action,
    AfterStep,
    BeforeClip,
    Callback,
    ConfigurationError,
    Detector,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
    Skip,
    StepStart,
    TrainingAborted,
)
from gradsentinel.incident import Outcome

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in"
)  # torch 2.6 says it of its own SequentialLR

NAN, INF = float("nan"), float("inf")
STEPS = 12


class Net(nn.Module):
    """With statistics in its forward pass and random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(batch)))))


def batches(steps: int = STEPS, bad: dict[int, float] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    drawn = [torch.randn(5, 6) for _ in range(steps)]
    for step, value in (bad or {}).items():
        drawn[step][0, 0] = value
    return drawn


@dataclass
class Loop:
    """A model and what trains it; the same for every loop with the same settings."""

    optimizer: str = "AdamW"
    scaled: bool = False
    scheduled: bool = True
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        makes = {
            "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
            "Adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True, amsgrad=True),
            "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1, fused=True),
        }
        self.optimizers = [makes[self.optimizer](self.model.parameters())]
        self.schedulers = []
        if self.scheduled:
            self.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if self.scaled else None
        torch.manual_seed(2)

    def state(self) -> dict[str, object]:
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizers[0].state_dict()),
            "schedule": [copy.deepcopy(one.state_dict()) for one in self.schedulers],
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "rng": torch.get_rng_state(),
        }


def plain(loop: Loop, data: list[torch.Tensor], max_norm: float | None = 0.5) -> list[float]:
    (optimizer,), losses = loop.optimizers, []
    for batch in data:
        loss = loop.model(batch).square().mean()
        (loop.scaler.scale(loss) if loop.scaler else loss).backward()
        if loop.scaler:
            loop.scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm)
        if loop.scaler:
            loop.scaler.step(optimizer)
            loop.scaler.update()
        else:
            optimizer.step()
        for scheduler in loop.schedulers:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def watched(
    loop: Loop,
    data: list[torch.Tensor],
    folder,
    guard: str,
    *,
    callbacks: list[Callback] | None = None,
    max_norm: float | None = 0.5,
) -> tuple[list[float], Sentinel]:
    losses = []
    sentinel = Sentinel(
        loop.model,
        loop.optimizers,
        callbacks=callbacks,
        run_dir=folder / guard,
        scheduler=loop.schedulers or None,
        scaler=loop.scaler,
        guard=guard,
    )
    with sentinel:
        for batch in sentinel.steps(data):
            loss = loop.model(batch).square().mean()
            sentinel.backward(loss)
            sentinel.step(max_norm)
            losses.append(loss.item())
    return losses, sentinel


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert [part for part in one if not same(one[part], other[part])] == []


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD"])
def test_a_healthy_run_is_bit_identical(tmp_path, optimizer, scaled, max_norm):
    loop, other = Loop(optimizer, scaled), Loop(optimizer, scaled)
    expected = plain(loop, batches(), max_norm)
    torch.set_rng_state(torch.Generator().manual_seed(2).get_state())
    found, sentinel = watched(other, batches(), tmp_path, "device", max_norm=max_norm)
    assert found == expected
    assert_same(loop.state(), other.state())
    assert sentinel.incidents == ()
    assert sentinel.applied_steps == STEPS


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("step", range(STEPS))
def test_a_fault_at_any_step_ends_as_under_the_host_guard(tmp_path, optimizer, scaled, step):
    """Without a schedule in between: it is one step ahead until the host has heard of the drop."""
    ends = {}
    for guard in ("host", "device"):
        loop = Loop(optimizer, scaled, scheduled=False)
        _, sentinel = watched(loop, batches(bad={step: NAN}), tmp_path, guard)
        ends[guard] = loop.state()
        (incident,) = sentinel.incidents
        assert (incident.step, incident.outcome) == (step, Outcome.SKIPPED)
        assert sentinel.applied_steps == STEPS - 1
        assert all(torch.isfinite(value).all() for value in loop.model.state_dict().values())
    assert_same(ends["host"], ends["device"])


SCHEDULES = {
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, 10)], [5]),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("bad", [{4: NAN}, {4: NAN, 5: INF}, {3: NAN, 6: NAN}, {STEPS - 1: NAN}])
def test_the_schedule_ends_where_the_decision_says(tmp_path, schedule, bad):
    ends = {}
    for guard in ("host", "device"):
        loop = Loop(scheduled=False)
        (optimizer,) = loop.optimizers
        loop.schedulers.append(SCHEDULES[schedule](optimizer))
        watched(loop, batches(bad=bad), tmp_path, guard)
        ends[guard] = (optimizer.param_groups[0]["lr"], loop.schedulers[0].state_dict()["last_epoch"])
        # what the loop would do next
        loop.schedulers[0].step()
        ends[guard] += (optimizer.param_groups[0]["lr"],)
    assert ends["host"] == pytest.approx(ends["device"], rel=1e-12)
    assert ends["device"][1] == STEPS - len(bad)


@dataclass(kw_only=True)
class Diary(Callback):
    heard: list[AfterStep] = field(default_factory=list)

    def on_after_step(self, event: AfterStep) -> None:
        self.heard.append(event)


def test_every_step_is_told_once_and_in_order_with_its_own_numbers(tmp_path):
    heard, data = {}, batches(bad={4: NAN})
    for guard in ("host", "device"):
        diary = Diary()
        loop = Loop()
        watched(loop, data, tmp_path, guard, callbacks=[NanCallback(), diary])
        heard[guard] = diary.heard
    for here, there in zip(heard["host"], heard["device"], strict=True):
        assert (here.step, here.iteration, here.applied, here.action) == (
            there.step,
            there.iteration,
            there.applied,
            there.action,
        )
    assert [event.step for event in heard["device"]] == list(range(STEPS))
    early = [(event.grad_norm, event.loss, event.learning_rates) for event in heard["device"][:4]]
    assert early == [(event.grad_norm, event.loss, event.learning_rates) for event in heard["host"][:4]]


def test_the_incident_names_the_parameters_from_the_norms_that_were_kept(tmp_path):
    loop = Loop()
    loop.model.last.weight.register_hook(Once(3))
    _, sentinel = watched(loop, batches(), tmp_path, "device")
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.step) == (Kind.NONFINITE_GRADIENT, 3)
    assert [entry.name for entry in incident.tensors] == ["last.weight"]
    assert not incident.tensors[0].counted
    assert math.isnan(incident.tensors[0].norm)
    assert (tmp_path / "device" / "incidents" / incident.id / "incident.json").exists()


class Once:
    """Spoils the gradient of one step."""

    def __init__(self, step: int, value: float = NAN) -> None:
        self.step, self.value, self.calls = step, value, 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient + self.value if self.calls == self.step + 1 else gradient


def test_a_norm_that_only_overflows_drops_the_step_and_is_told(tmp_path):
    loop = Loop()
    loop.model.last.weight.register_hook(Once(3, 1e20))
    _, sentinel = watched(loop, batches(), tmp_path, "device")
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.outcome) == (Kind.NONFINITE_GRADIENT, Outcome.SKIPPED)
    assert incident.tensors[0].norm == INF


class Nervous(Detector):
    """Suspects what a closer look does not bear out."""

    def on_before_clip(self, event: BeforeClip) -> Finding | None:
        value = torch.tensor(INF if event.step == 3 else 0.0)
        return Finding(kind=Kind.NONFINITE_GRADIENT, value=value, confirm=lambda: None)


def test_a_step_that_was_dropped_for_nothing_is_told_too(tmp_path):
    made = {}
    for guard in ("host", "device"):
        loop = Loop()
        _, sentinel = watched(loop, batches(), tmp_path, guard, callbacks=[NanCallback(), Nervous()])
        made[guard] = sentinel.applied_steps
        if guard == "device":
            (incident,) = sentinel.incidents
            assert incident.outcome is Outcome.SKIPPED
            assert "closer look finds nothing" in incident.message
    assert made == {"host": STEPS, "device": STEPS - 1}


@pytest.mark.parametrize("where", ["weight", "mask"])
def test_a_state_of_large_and_finite_numbers_is_no_bad_one(tmp_path, where):
    """Neither guard finds anything to act on: what overflows are squares that only the sentinel makes."""
    ends = {}
    for guard in ("host", "device"):
        loop = Loop()
        unused = torch.full((3,), torch.finfo(torch.float32).min)
        if where == "mask":
            loop.model.register_buffer("mask", unused)
        else:
            loop.model.register_parameter("spare", nn.Parameter(unused, requires_grad=False))
        _, sentinel = watched(loop, batches(), tmp_path, guard)
        assert sentinel.incidents == ()
        assert sentinel.applied_steps == STEPS
        ends[guard] = loop.state()
    assert_same(ends["host"], ends["device"])


@pytest.mark.parametrize(("guard", "lag"), [("host", 0), ("device", 2)])
def test_a_parameter_that_a_flipped_bit_makes_huge_is_told_of_once(tmp_path, guard, lag):
    """No loss and no gradient shows it: the look at the state does, which follows each of these steps."""
    loop = Loop()
    spare = loop.model.spare = nn.Parameter(torch.zeros(3))
    values = {2: 1e9, 5: -1e37}  # what may be; what is far beyond the look before

    class Flip(Callback):
        def on_step_start(self, event: StepStart) -> None:
            if event.step in values:
                spare.data[1] = values[event.step]

    _, sentinel = watched(loop, batches(), tmp_path, guard, callbacks=[NanCallback(), Flip()])
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.action, incident.step) == (Kind.MAGNITUDE, Action.WARN, 5 - lag)
    assert [tensor.name for tensor in incident.tensors] == ["spare"]
    assert incident.tensors[0].norm == pytest.approx(1e37)
    assert sentinel.applied_steps == STEPS


def test_a_warning_does_not_drop_the_step(tmp_path):
    ends = {}
    for guard in ("host", "device"):
        loop = Loop()
        bounds = MagnitudeCallback(max_global_norm=1e-3)
        _, sentinel = watched(loop, batches(), tmp_path, guard, callbacks=[NanCallback(), bounds])
        ends[guard] = loop.state()
        assert sentinel.applied_steps == STEPS
        assert {incident.action for incident in sentinel.incidents} == {Action.WARN}
    assert_same(ends["host"], ends["device"])


def test_going_back_forgets_the_steps_in_flight(tmp_path):
    loop = Loop(scheduled=False)
    bounds = MagnitudeCallback(max_global_norm=1e4, action="rollback")
    callbacks = [NanCallback(), bounds, Rollback(every=5, confirm_after=0)]
    loop.model.last.weight.register_hook(Once(8, 1e9))
    _, sentinel = watched(loop, batches(16), tmp_path, "device", callbacks=callbacks)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.outcome) == (8, Outcome.ROLLED_BACK)
    # a snapshot is due after step 9, so the host looks before it: that batch is lost, six are left
    assert sentinel.step_count == 5 + 6
    assert all(torch.isfinite(value).all() for value in loop.model.state_dict().values())


def test_the_budget_of_drops_ends_the_run(tmp_path):
    loop = Loop()
    data = batches(bad=dict.fromkeys(range(3, 9), NAN))
    with pytest.raises(TrainingAborted):
        watched(loop, data, tmp_path, "device", callbacks=[NanCallback(), Skip(max_skips=2)])
    assert all(torch.isfinite(value).all() for value in loop.model.state_dict().values())


def test_what_was_dropped_just_before_the_run_fails_is_in_the_log(tmp_path, caplog):
    loop = Loop()
    sentinel = Sentinel(loop.model, loop.optimizers, run_dir=tmp_path / "run", guard="device")

    def train() -> None:
        with sentinel:
            for step, batch in enumerate(sentinel.steps(batches(bad={6: NAN}))):
                sentinel.backward(loop.model(batch).square().mean())
                sentinel.step(0.5)
                if step == 7:
                    raise KeyError("the user's own")

    with caplog.at_level(logging.ERROR, "gradsentinel"), pytest.raises(KeyError, match="own"):
        train()
    assert "step 6 was dropped on the device" in caplog.text


@pytest.mark.expects_swallowed
def test_a_detector_that_raises_is_switched_off_and_told(tmp_path):
    class Broken(Detector):
        def on_before_clip(self, event: BeforeClip) -> Finding:
            raise ValueError("no")

    loop = Loop()
    _, sentinel = watched(
        loop, batches(bad={6: NAN}), tmp_path, "device", callbacks=[NanCallback(), Broken()]
    )
    kinds = [(incident.kind, incident.step) for incident in sentinel.incidents]
    assert (Kind.CALLBACK_ERROR, 0) in kinds
    assert sentinel.applied_steps == STEPS - 1


def test_two_players_are_dropped_apart(tmp_path):
    """Each optimizer's step is a step; dropping one leaves the other's weights and buffers alone."""
    ends = {}
    for guard in ("host", "device"):
        torch.manual_seed(0)
        players = {"a": Net(), "b": Net()}
        optimizers = {k: torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for k, m in players.items()}
        sentinel = Sentinel(players, list(optimizers.values()), run_dir=tmp_path / guard, guard=guard)
        spoil = Once(5)
        players["b"].last.weight.register_hook(spoil)
        torch.manual_seed(2)
        with sentinel:
            for batch in sentinel.steps(batches()):
                for name, player in players.items():
                    sentinel.backward(player(batch).square().mean())
                    sentinel.step(0.5, optimizer=optimizers[name])
        (incident,) = sentinel.incidents
        assert [entry.name for entry in incident.tensors] == ["b.last.weight"]
        ends[guard] = {name: copy.deepcopy(player.state_dict()) for name, player in players.items()}
    assert_same(ends["host"], ends["device"])


def test_accumulation_and_an_odd_window_at_the_end(tmp_path):
    ends = {}
    for guard in ("host", "device"):
        loop = Loop(scheduled=False)
        sentinel = Sentinel(loop.model, loop.optimizers, run_dir=tmp_path / guard, guard=guard)
        with sentinel:
            for batch in sentinel.steps(batches(15, bad={7: NAN}), accumulate=2):
                sentinel.backward(loop.model(batch).square().mean())
                sentinel.step(0.5)
        (incident,) = sentinel.incidents
        assert (incident.step, incident.microbatch) == (3, 1)
        assert sentinel.applied_steps == 7
        ends[guard] = loop.state()
    assert_same(ends["host"], ends["device"])


def test_what_cannot_be_dropped_on_the_device_is_refused_at_construction(tmp_path):
    model = Net()
    slow = torch.optim.AdamW(model.parameters(), 1e-2)
    fast = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    with pytest.raises(ConfigurationError, match="fused=True"):
        Sentinel(model, slow, run_dir=tmp_path, guard="device")
    with pytest.raises(ConfigurationError, match="AdamW cannot"):
        Sentinel(model, [fast, slow], run_dir=tmp_path, guard="device")
    with pytest.raises(ConfigurationError, match="ema="):
        Sentinel(
            model,
            fast,
            run_dir=tmp_path,
            guard="device",
            ema=torch.optim.swa_utils.AveragedModel(model),
        )
    with pytest.raises(ConfigurationError, match="'host' or 'device'"):
        Sentinel(model, fast, run_dir=tmp_path, guard="both")
    with pytest.raises(ConfigurationError, match="attached"):
        Sentinel(model, fast, run_dir=tmp_path, guard="device").attached()


def test_nobody_can_ask_too_early_whether_a_step_was_made(tmp_path):
    loop = Loop()
    sentinel = Sentinel(loop.model, loop.optimizers, run_dir=tmp_path / "run", guard="device")
    with sentinel:
        for batch in sentinel.steps(batches(2)):
            sentinel.backward(loop.model(batch).square().mean())
            sentinel.step(0.5)
            with pytest.raises(RuntimeError, match="nobody knows yet"):
                _ = sentinel.applied
    assert sentinel.applied_steps == 2


@pytest.mark.parametrize("guard", ["host", "device"])
def test_a_bound_that_is_nan_is_refused_before_anything_is_clipped(guard, tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=tmp_path, guard=guard)
    before = [parameter.clone() for parameter in model.parameters()]
    sentinel.backward(model(torch.ones(1, 2)).square().sum())
    with pytest.raises(ConfigurationError, match="max_norm is NaN"):
        sentinel.step(max_norm=float("nan"))
    sentinel.step(max_norm=1.0)
    sentinel.close()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert not all(map(torch.equal, model.parameters(), before))
