"""StagnationCallback: layers that die and gradients that stick, told once and by name."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import BeforeClip, ConfigurationError, RunStart, Sentinel, StagnationCallback
from gradsentinel.gradients import GradientView


class Two(nn.Module):
    """Two branches; one can be switched off, cut off, or have its gradient replaced."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.gate = 1.0
        self.detached = False

    def forward(self, x):
        right = self.right(x)
        right = right.detach() if self.detached else right * self.gate
        return (self.left(x) + right).square().mean()


def train(run_dir, change=lambda model, step: None, *, steps=60, before=lambda model, step: None, **settings):
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    callback = StagnationCallback(**settings)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(steps)):
            change(model, step)
            sentinel.backward(model(torch.randn(8, 6)))
            before(model, step)
            sentinel.step()
    return sentinel


def told(sentinel):
    return [(i.step, str(i.kind), str(i.outcome), {t.name for t in i.tensors}) for i in sentinel.incidents]


RIGHT = {"right.weight", "right.bias"}


def test_a_healthy_run_is_quiet(run_dir):
    assert told(train(run_dir)) == []


@pytest.mark.parametrize("how", ["zero", "tiny", "detached"])
def test_a_layer_that_dies(run_dir, how):
    def kill(model, step):
        if step == 40:
            model.gate = {"zero": 0.0, "tiny": 1e-9, "detached": 1.0}[how]
            model.detached = how == "detached"

    assert told(train(run_dir, kill)) == [(49, "stagnation", "reported", RIGHT)]


def test_it_says_what_it_saw(run_dir):
    (incident,) = train(run_dir, lambda model, step: setattr(model, "gate", float(step < 40))).incidents
    assert "right" in incident.message
    assert "10 steps in a row" in incident.message
    assert set(incident.details["dead"]) == RIGHT
    assert any("activation" in remedy for remedy in incident.diagnosis.remedy)


def test_what_pauses_now_and_then_is_not_dead(run_dir):
    """An expert without tokens; only four times its longest pause is news."""

    def gate(model, step):
        model.gate = float(step % 8 < 4) if step < 100 else 0.0

    assert told(train(run_dir, gate, steps=130)) == [(115, "stagnation", "reported", RIGHT)]


def test_what_never_had_a_gradient_is_not_dead(run_dir):
    assert told(train(run_dir, lambda model, step: setattr(model, "gate", 0.0))) == []


def test_what_the_user_freezes_is_not_dead(run_dir):
    def freeze(model, step):
        if step == 40:
            model.right.requires_grad_(False)

    assert told(train(run_dir, freeze)) == []


def test_a_loss_of_exactly_zero_is_no_fault(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Sentinel(model, optimizer, callbacks=[StagnationCallback()], run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(80)):
            x = torch.randn(16, 4)
            hinge = (
                torch.relu(1 - model(x).squeeze(1)).mean() if step < 40 else torch.relu(-model(x) - 99).mean()
            )
            sentinel.backward(hinge)
            sentinel.step()
    assert told(sentinel) == []


class Stuck:
    """The gradient of one layer, or of all, is that of a step before."""

    def __init__(self, names, first):
        self.names, self.first, self.kept = names, first, {}

    def __call__(self, model, step):
        for name, parameter in model.named_parameters():
            if name not in self.names:
                continue
            if step >= self.first:
                parameter.grad.copy_(self.kept[name])
            self.kept[name] = parameter.grad.clone()


def test_a_stuck_layer(run_dir):
    sentinel = train(run_dir, before=Stuck(RIGHT, 40))
    assert told(sentinel) == [(42, "stagnation", "reported", {"right.weight"})]  # a bias is too small to tell
    assert "bit for bit" in sentinel.incidents[0].message


def test_a_stuck_gradient_shows_at_once_if_all_of_it_is(run_dir):
    everything = RIGHT | {"left.weight", "left.bias"}
    assert told(train(run_dir, before=Stuck(everything, 40)))[0] == (40, "stagnation", "reported", everything)


def test_a_gradient_that_is_constant_by_nature_is_not_stuck(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Sentinel(model, optimizer, callbacks=[StagnationCallback()], run_dir=run_dir) as sentinel:
        for _ in sentinel.steps(range(60)):
            sentinel.backward(model(torch.randn(8, 20)).mean())  # its bias always gets 1/20
            sentinel.step()
    assert told(sentinel) == []


def test_two_layers_that_stick_one_after_the_other_are_both_told(run_dir):
    one, other = Stuck({"right.weight"}, 40), Stuck({"left.weight"}, 50)

    def before(model, step):
        one(model, step)
        other(model, step)

    told_of = [(step, names) for step, _, _, names in told(train(run_dir, before=before))]
    assert told_of == [(42, {"right.weight"}), (52, {"left.weight"})]


def test_what_dies_and_what_sticks_in_one_step_are_both_said(run_dir):
    stick = Stuck({"left.weight"}, 47)

    def change(model, step):
        model.gate = float(step < 40)

    (incident,) = train(run_dir, change, before=stick).incidents
    assert "right.weight, right.bias has vanished" in incident.message
    assert "left.weight is stuck" in incident.message


def test_the_same_layer_that_dies_again_is_told_when_it_is_no_repetition_any_more(run_dir, caplog):
    def change(model, step):
        model.gate = float(not (30 <= step < 41 or step >= 60))

    first, second = told(train(run_dir, change, steps=400, dead_after=10))
    assert first[0] == 39
    assert 139 < second[0] < 260


def test_what_is_dead_while_the_loss_is_zero_is_told_if_it_stays_so(run_dir):
    """A loss of exactly 0 explains it only as long as it is 0."""
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Sentinel(model, optimizer, callbacks=[StagnationCallback()], run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(120)):
            model.gate = float(step < 40)
            sentinel.backward(model(torch.randn(8, 6)) * (0.0 if 40 <= step < 55 else 1.0))
            sentinel.step()
    ((step, _, _, names),) = told(sentinel)
    assert 55 <= step <= 90
    assert names == RIGHT


class Many(nn.Module):
    """Very many parameters, each of which can be cut off on its own."""

    def __init__(self, count):
        super().__init__()
        self.all = nn.ParameterList(torch.randn(2) for _ in range(count))
        self.alive = count

    def forward(self):
        return torch.stack(list(self.all[: self.alive])).square().sum()


def die_off(run_dir, count, pace, steps):
    model = Many(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    callback = StagnationCallback(dead_after=3)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(steps)):
            model.alive = max(1, count - max(0, step - 25) * pace)
            sentinel.backward(model() * (1 + step % 7))
            sentinel.step()
    return sentinel.incidents


def test_a_thousand_parameters_that_die_at_once_are_one_warning(run_dir):
    (incident,) = die_off(run_dir, 1000, 1000, 60)
    assert "and 996 more" in incident.message


def test_parameters_that_die_one_after_the_other_are_few_warnings_and_all_are_told(run_dir):
    incidents = die_off(run_dir, 200, 1, 260)
    assert 8 <= len(incidents) <= 16
    names = {name for one in incidents for said in one.claims for name in said.names}
    notes = " ".join(note for one in incidents for note in one.notes)
    assert len(names) < 199
    assert "since the last warning also: dead " in notes
    assert incidents[-1].step >= 220


def started(run_dir, **settings):
    """A callback in a run that has begun."""
    callback = StagnationCallback(**settings)
    callback.on_run_start(RunStart(step=0, run=train(run_dir, steps=1)._watch.run))
    return callback


def look(callback, step, **gradients):
    view = GradientView([(name.replace("_", "."), gradient) for name, gradient in gradients.items()])
    _ = view.norms
    return callback.on_before_clip(BeforeClip(step=step, gradients=view, losses=()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_others_business(run_dir, bad):
    callback = started(run_dir)
    for step in range(80):
        left = torch.full((8, 20), bad) if 30 <= step < 50 else torch.randn(8, 20)
        finding = look(callback, step, left_weight=left, right_weight=torch.randn(4, 20))
        assert not bool(finding.value)


def test_players_are_told_apart(run_dir):
    torch.manual_seed(0)
    one, two = nn.Linear(4, 8), nn.Linear(4, 8)
    first, second = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (one, two))
    callback = StagnationCallback(dead_after=2)
    with Sentinel(
        nn.ModuleList([one, two]), [first, second], callbacks=[callback], run_dir=run_dir
    ) as sentinel:
        for number in range(120):
            player, optimizer = ((one, first), (two, second))[number % 2]
            optimizer.zero_grad()
            sentinel.backward(player(torch.randn(8, 4)).square().mean())
            sentinel.step(optimizer=optimizer)
    assert told(sentinel) == []


def test_action(run_dir):
    sentinel = train(run_dir, before=Stuck(RIGHT, 40), action="skip")
    assert [(i.step, str(i.outcome)) for i in sentinel.incidents] == [(42, "skipped")]


class Quiet(TorchDispatchMode):
    """Refuses to read a number from the device, and counts what is launched."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "item", "nonzero", "equal"}
        self.launched.append(name)
        return function(*arguments, **(keywords or {}))


def test_it_waits_for_nothing_and_its_cost_does_not_grow(run_dir):
    counts = []
    for number in (2, 50):
        callback = started(run_dir / str(number))
        gradients = {f"p{place}": torch.randn(8, 8) for place in range(number)}
        view = GradientView(gradients.items())
        _ = view.norms
        callback.on_before_clip(BeforeClip(step=0, gradients=view, losses=()))
        with Quiet() as quiet:
            callback.on_before_clip(BeforeClip(step=1, gradients=view, losses=()))
        counts.append(len(quiet.launched))
    assert counts[0] <= counts[1] <= 45


@pytest.mark.parametrize(
    "wrong", [{"dead_after": 0}, {"stuck_after": 0}, {"warmup": 0}, {"action": "continue"}]
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(ConfigurationError):
        StagnationCallback(**wrong)
