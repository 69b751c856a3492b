"""LearningRateBackoff: lower after a rollback, back on the schedule exactly, whatever the schedule is."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from gradsentinel import (
    Action,
    ConfigurationError,
    Detector,
    Finding,
    Kind,
    LearningRateBackoff,
    NanCallback,
    Rollback,
    Sentinel,
)
from loops import differences

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in"
)  # torch 2.6 says it of its own SequentialLR

SCHEDULES: dict[str, Any] = {
    "none": lambda o: None,
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "exponential": lambda o: ExponentialLR(o, 0.9),  # computes on the learning rate that it finds
    "cosine": lambda o: CosineAnnealingLR(o, T_max=30),  # so does this one
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=64, cycle_momentum=False),
    "chained": lambda o: ChainedScheduler([ExponentialLR(o, 0.95), LinearLR(o, total_iters=5)]),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, total_iters=4), ExponentialLR(o, 0.9)], [4]),
}


class GoBack(Detector):
    """Asks for a rollback at given attempted steps."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.count = 0

    def on_before_clip(self, event):
        self.count += 1
        bad = self.count - 1 in self.at
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(bad), action=Action.ROLLBACK)


class Plain(Optimizer):
    """Gradient descent that keeps the learning rates it was called with."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        self.inside: list[list[float]] = []
        super().__init__(params, {"lr": lr})

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.append(self.rates())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class Seen:
    """The learning rates that the step itself saw, and those before and after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inside: list[list[float]] = getattr(optimizer, "inside", [])
        self.around: list[list[float]] = []
        self._optimizer = optimizer

    def look(self) -> None:
        self.around.append([float(group["lr"]) for group in self._optimizer.param_groups])


def run(
    folder: Any,
    *callbacks: Any,
    schedule: str = "none",
    optimizer: Any = Plain,
    steps: int = 14,
    scaler: Any = None,
) -> tuple[Seen, Sentinel, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mine = optimizer([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}])
    scheduler = SCHEDULES[schedule](mine)
    seen = Seen(mine)
    sentinel = Sentinel(
        model,
        mine,
        callbacks=[NanCallback(), Rollback(every=1, confirm_after=0, max_rollbacks=9), *callbacks],
        run_dir=folder,
        scheduler=scheduler,
        scaler=scaler,
    )
    with sentinel:
        for batch in sentinel.steps([torch.randn(5, 4) for _ in range(steps)]):
            seen.look()
            sentinel.backward(model(batch).square().mean())
            sentinel.step()
            seen.look()
    return seen, sentinel, mine


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_multiplied_on_top_of_the_schedule_and_returns_to_it_exactly(tmp_path, schedule):
    plain, _, _ = run(tmp_path / "plain", GoBack(3), schedule=schedule)
    backoff = LearningRateBackoff(factor=0.5, recover_steps=4)
    lowered, _, _ = run(tmp_path / "lowered", GoBack(3), backoff, schedule=schedule)
    assert lowered.around == plain.around  # the schedule does not notice
    factors = [1.0, 1.0, 1.0, 0.5, 0.625, 0.75, 0.875, *[1.0] * 6]
    expected = [[rate * f for rate in rates] for rates, f in zip(plain.inside, factors, strict=True)]
    assert lowered.inside == expected
    assert backoff.multiplier == 1.0


def test_a_learning_rate_in_a_tensor_stays_the_same_tensor(tmp_path):
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        for group in groups:
            group["lr"] = torch.tensor(float(group.get("lr", 0.1)))
        tensors.extend(group["lr"] for group in groups)
        return Plain(groups, lr=torch.tensor(0.1))

    tensors: list[Tensor] = []
    plain, _, _ = run(tmp_path / "plain", GoBack(3), schedule="exponential", optimizer=make)
    tensors.clear()
    backoff = LearningRateBackoff(factor=0.5, recover_steps=2)
    lowered, _, mine = run(tmp_path / "lowered", GoBack(3), backoff, schedule="exponential", optimizer=make)
    assert all(group["lr"] is tensor for group, tensor in zip(mine.param_groups, tensors, strict=True))
    assert lowered.around == plain.around
    assert lowered.inside[3] == pytest.approx([rate * 0.5 for rate in plain.inside[3]])
    assert lowered.inside[5:] == plain.inside[5:]


def test_a_second_rollback_on_the_way_lowers_it_further_but_not_without_end(tmp_path):
    backoff = LearningRateBackoff(factor=0.5, recover_steps=100, lowest=0.2)
    seen, _, _ = run(tmp_path, GoBack(3, 4, 5), backoff, steps=8)
    inside = [rates[0] / 0.1 for rates in seen.inside]
    assert inside[:3] == [1.0, 1.0, 1.0]
    assert inside[3] == pytest.approx(0.2)  # 0.5, then 0.25, then not below 0.2
    assert inside == sorted(inside[:3], reverse=True) + sorted(inside[3:])


def test_nothing_changes_without_a_rollback(tmp_path):
    plain, _, one = run(tmp_path / "plain", schedule="cosine")
    watched, _, other = run(tmp_path / "watched", LearningRateBackoff(), schedule="cosine")
    assert watched.inside == plain.inside
    assert differences(one.state_dict(), other.state_dict()) == []


def test_a_snapshot_taken_meanwhile_holds_the_schedule(tmp_path):
    """A second rollback restores what a first one has lowered: it must not be lowered twice over."""
    plain, _, _ = run(tmp_path / "plain", GoBack(3, 7), schedule="exponential")
    backoff = LearningRateBackoff(factor=0.5, recover_steps=50)
    lowered, _, _ = run(tmp_path / "lowered", GoBack(3, 7), backoff, schedule="exponential")
    assert lowered.around == plain.around


def test_momentum_is_forgotten_if_asked_for(tmp_path):
    class Moments(Detector):
        def __init__(self) -> None:
            self.after: list[dict[str, float]] = []

        def on_recovery(self, event):
            (optimizer,) = sentinel_of[0].host.optimizers
            self.after = [
                {name: float(value.abs().sum()) for name, value in state.items() if torch.is_tensor(value)}
                for state in optimizer.state.values()
            ]

        def on_run_start(self, event):
            sentinel_of.append(event.run)

    for reset in (False, True):
        sentinel_of: list[Any] = []
        moments = Moments()
        run(
            tmp_path / str(reset),
            GoBack(5),
            LearningRateBackoff(reset_momentum=reset),
            moments,
            optimizer=lambda p: AdamW(p, lr=0.1),
            steps=6,
        )
        assert len(moments.after) == 4
        assert all((state["exp_avg"] == 0.0) is reset for state in moments.after)
        assert all(state["exp_avg_sq"] > 0.0 and state["step"] > 0 for state in moments.after)


def test_a_step_that_the_scaler_drops_leaves_it_in_order(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    backoff = LearningRateBackoff(factor=0.5, recover_steps=4)
    seen, _, mine = run(tmp_path, GoBack(3), backoff, scaler=scaler)
    assert [rates[0] for rates in seen.inside[3:7]] == pytest.approx([0.05, 0.0625, 0.075, 0.0875])
    assert [group["lr"] for group in mine.param_groups] == [0.1, 0.02]


def test_a_step_that_raises_does_not_leave_it_lowered(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback(), backoff := LearningRateBackoff()])
    backoff.load_state_dict({"low": 0.5, "since": 0})
    model.weight.grad = torch.ones(1, 2)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    handle.remove()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    sentinel.close()


def test_the_hooks_are_gone_at_the_end(tmp_path):
    _, _, mine = run(tmp_path, GoBack(3), LearningRateBackoff(recover_steps=1000))
    assert not mine._optimizer_step_pre_hooks
    assert not mine._optimizer_step_post_hooks
    assert [group["lr"] for group in mine.param_groups] == [0.1, 0.02]


def test_it_goes_on_climbing_after_a_restart(tmp_path):
    first = LearningRateBackoff(factor=0.5, recover_steps=10)
    run(tmp_path / "first", GoBack(3), first, steps=7)
    state = copy.deepcopy(first.state_dict())
    assert state == {"low": 0.5, "since": 3}
    second = LearningRateBackoff(factor=0.5, recover_steps=10)
    second.load_state_dict(state)
    seen, _, _ = run(tmp_path / "second", second, steps=9)
    assert [rates[0] / 0.1 for rates in seen.inside] == pytest.approx(
        [0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.0]
    )


def test_the_factor_is_published_while_it_is_at_work(tmp_path):
    _, sentinel, _ = run(tmp_path, GoBack(3), LearningRateBackoff(factor=0.5, recover_steps=2))
    name, (iteration, value) = next(iter(sentinel._watch.run.metrics.items()))
    assert (name, iteration, value) == ("learning_rate_factor", 5, 1.0)


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.0}, {"factor": 1.0}, {"recover_steps": 0}, {"lowest": 0.0}, {"lowest": 0.9}]
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        LearningRateBackoff(**wrong)
