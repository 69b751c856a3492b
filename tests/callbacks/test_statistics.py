"""Histograms, zeros and largest values of samples that take turns; layers that have died are told."""

from __future__ import annotations

import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import (
    Action,
    ConfigurationError,
    Detector,
    Diagnosis,
    Evidence,
    Finding,
    GradientStatistics,
    Kind,
    NanCallback,
    Rollback,
    Sentinel,
    TensorBoardCallback,
)
from gradsentinel.callbacks import statistics
from loops import build, differences, finish, generators, make_batches, train_by_hand, train_watched

NAN = float("nan")


class Mlp(nn.Module):
    """Three layers, the middle one with 16384 weights."""

    def __init__(self, *, dead: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 128)
        self.inner = nn.Linear(128, 128)
        self.head = nn.Linear(128, 1)
        if dead:  # no input gets through the activation after it
            nn.init.constant_(self.inner.bias, -1e3)

    def forward(self, x):
        return self.head(torch.relu(self.inner(torch.relu(self.enter(x)))))


def run_steps(
    callback, run_dir, steps, *, model=None, more=(), bad=(), spoil=None, guard="host", batches=None
):
    torch.manual_seed(0)
    model = Mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=guard == "device" or None)
    batches = batches or [torch.randn(8, 16) for _ in range(steps)]
    callbacks = [NanCallback(), callback, *more]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, guard=guard) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches)):
            loss = (model(batch) - 1).square().mean() * (NAN if number in bad else 1.0)
            sentinel.backward(loss)
            if spoil is not None:
                spoil(number, model)
            sentinel.step(max_norm=1.0)
    return sentinel


def published(sentinel, kind="zeros"):
    """The parameters that were looked at from end to end, and in which attempted step last."""
    prefix = f"statistics/{kind}/"
    metrics = sentinel._watch.run.metrics
    return {name.removeprefix(prefix): step for name, (step, _) in metrics.items() if name.startswith(prefix)}


def all_names(model):
    return {name for name, _ in model.named_parameters()}


def test_every_parameter_is_seen_within_the_number_of_steps_it_says(run_dir):
    callback = GradientStatistics(every=2, elements_per_check=2048, show=100)
    assert callback.covers_after is None
    sentinel = run_steps(callback, run_dir, 40)
    assert 18 <= callback.covers_after <= 40  # 18817 elements, and at most an eighth more
    assert published(sentinel).keys() == all_names(Mlp())
    assert min(published(sentinel).values()) >= 40 - 2 * callback.covers_after


def test_no_look_is_larger_than_the_bound(run_dir, monkeypatch):
    sizes = []
    honest = statistics.look

    def watched(view, mailbox, sample, **settings):
        sizes.append(sum(len(piece) for piece in sample))
        return honest(view, mailbox, sample, **settings)

    monkeypatch.setattr(statistics, "look", watched)
    run_steps(GradientStatistics(every=1, elements_per_check=2048), run_dir, 24)
    assert len(sizes) == 24
    assert max(sizes) <= 2048
    assert min(sizes) >= 2048 - 2 * 256 - 256


def test_the_numbers_are_those_of_the_gradients(run_dir):
    model = nn.Linear(32, 40)
    kept = {}

    def keep(number, model):
        kept[number] = {name: p.grad.clone() for name, p in model.named_parameters()}

    def put(number, model):
        model.weight.grad[0, :8] = 0.0
        model.weight.grad[1, 0] = -77.0
        model.weight.grad[2, :4] = 2.0**-30
        keep(number, model)

    callback = GradientStatistics(every=1)
    sentinel = run_steps(callback, run_dir, 2, model=model, spoil=put, batches=[torch.randn(8, 32)] * 2)
    metrics, histograms = sentinel._watch.run.metrics, sentinel._watch.run.histograms
    weight = kept[1]["weight"]
    assert metrics["statistics/zeros/weight"] == (1, float((weight == 0).sum()) / weight.numel())
    assert metrics["statistics/largest/weight"] == (1, 77.0)
    below = (weight != 0) & (weight.abs() < 2.0**-24)
    assert metrics["statistics/underflow/weight"] == (1, float(below.sum()) / weight.numel())
    flat = torch.cat([gradient.flatten() for gradient in kept[1].values()])
    assert metrics["statistics/zeros"] == (1, pytest.approx(float((flat == 0).float().mean())))
    step, histogram = histograms["statistics/log2_gradient"]
    assert step == 1
    for limit, count in zip(*histogram.log2(), strict=True):
        inside = (flat.abs() >= 2.0 ** (limit - 1)) & (flat.abs() < 2.0**limit)
        assert count == int(inside.sum())


def test_a_person_finds_them_in_tensorboard(run_dir):
    run_steps(GradientStatistics(every=4, show=2), run_dir, 12, more=[TensorBoardCallback()])
    found = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    tags = found.Tags()
    assert [event.step for event in found.Scalars("gradsentinel/statistics/zeros")] == [0, 4, 8]
    assert {tag for tag in tags["scalars"] if tag.startswith("gradsentinel/statistics/zeros/")} == {
        "gradsentinel/statistics/zeros/enter.weight",
        "gradsentinel/statistics/zeros/inner.bias",
    }
    histograms = found.Histograms("gradsentinel/statistics/log2_gradient")
    assert [event.step for event in histograms] == [0, 4, 8]
    values = histograms[-1].histogram_value
    assert values.num == sum(values.bucket)
    assert values.min >= -60
    assert values.max <= 10


def test_a_dead_layer_is_told_with_what_feeds_it_and_once(run_dir):
    callback = GradientStatistics(every=2, patience=3)
    sentinel = run_steps(callback, run_dir, 30, model=Mlp(dead=True))
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.action, incident.step) == (Kind.STAGNATION, Action.WARN, 4)
    assert "no gradient reaches enter, inner" in incident.message
    assert [tensor.name for tensor in incident.tensors] == [
        "enter.weight",
        "enter.bias",
        "inner.weight",
        "inner.bias",
    ]
    assert incident.diagnosis.module == "enter"
    assert sentinel.applied_steps == 30


def test_a_layer_that_pauses_is_dead_after_four_times_its_longest_pause(run_dir):
    """An expert that got no token for a while."""

    def spoil(number, model):
        if number not in {0, 4, 5, 6}:  # a pause of three looks, then one without end
            model.inner.weight.grad.zero_()
            model.inner.bias.grad.zero_()

    callback = GradientStatistics(every=1, patience=4)
    sentinel = run_steps(callback, run_dir, 24, spoil=spoil)
    (incident,) = sentinel.incidents
    assert incident.step == 6 + 4 * 3
    assert "no gradient reaches inner" in incident.message
    assert "in the last 12 looks" in incident.message


def test_one_parameter_without_a_gradient_is_no_dead_layer(run_dir):
    """The last bias of a critic gets the sum of terms that cancel, for one."""

    def spoil(number, model):
        model.head.bias.grad.zero_()
        model.inner.weight.grad.zero_()

    sentinel = run_steps(GradientStatistics(every=1), run_dir, 12, spoil=spoil)
    assert sentinel.incidents == ()


def test_what_begins_at_zero_is_left_alone(run_dir):
    """The first factor of a LoRA pair gets no gradient while the second is zero."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Linear(16, 4, bias=False)
            self.up = nn.Linear(4, 16, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return x + self.up(self.down(x))

    callback = GradientStatistics(every=1, patience=2)
    assert run_steps(callback, run_dir, 10, model=Pair()).incidents == ()


@pytest.mark.parametrize("guard", ["host", "device"])
def test_gradients_that_are_zero_everywhere_are_told(guard, run_dir):
    def spoil(number, model):
        if number >= 5:
            for parameter in model.parameters():
                parameter.grad.zero_()

    callback = GradientStatistics(every=1000, patience=3)
    sentinel = run_steps(callback, run_dir, 12, spoil=spoil, guard=guard)
    (incident,) = sentinel.incidents
    assert "every gradient has been zero in 3 steps in a row" in incident.message


def test_a_gradient_that_is_never_written_anew_is_told(run_dir):
    stale = {}

    def spoil(number, model):
        if number >= 6:
            model.inner.weight.grad.copy_(stale.setdefault("kept", model.inner.weight.grad.clone()))

    callback = GradientStatistics(every=2, patience=3)
    sentinel = run_steps(callback, run_dir, 16, spoil=spoil)
    (incident,) = sentinel.incidents
    assert incident.step == 10
    assert "gradient of inner.weight had the very same bits in the last 3 looks" in incident.message
    assert incident.diagnosis.module == "inner"


def test_one_bit_makes_it_another_gradient(run_dir):
    kept = {}

    def spoil(number, model):
        gradient = model.inner.weight.grad
        gradient.copy_(kept.setdefault("kept", gradient.clone()))
        for half in (0, 64):  # it is looked at in two pieces
            gradient.view(torch.int32)[half + number, 3] ^= 1

    assert run_steps(GradientStatistics(every=1), run_dir, 10, spoil=spoil).incidents == ()


def test_steps_that_are_dropped_do_not_count(run_dir):
    callback = GradientStatistics(every=1, patience=2)
    sentinel = run_steps(callback, run_dir, 3, model=Mlp(dead=True), bad={1})
    kinds = [incident.kind for incident in sentinel.incidents]
    assert kinds == [Kind.NONFINITE_LOSS, Kind.STAGNATION]
    assert sentinel.incidents[1].step == 2


def suspects_seen(sentinel):
    return {name: step for name, step in published(sentinel).items() if step % 50}


@pytest.mark.parametrize("guard", ["host", "device"])
def test_the_suspects_get_full_attention_for_some_steps(guard, run_dir):
    def spoil(number, model):
        if number == 10:
            model.inner.weight.grad[3, 3] = math.inf

    callback = GradientStatistics(every=50, attention_steps=5, show=0)
    sentinel = run_steps(callback, run_dir, 40, spoil=spoil, guard=guard)
    assert [tensor.name for tensor in sentinel.incidents[0].tensors] == ["inner.weight"]
    late = 2 if guard == "device" else 0  # that is when anybody hears of it
    assert suspects_seen(sentinel) == {"inner.weight": 15 + late}


def test_of_an_incident_that_names_a_module_its_parameters_are_the_suspects(run_dir):
    class Judge(Detector):
        def on_before_clip(self, event):
            diagnosis = Diagnosis(cause="unknown", confidence=0.0, module="enter")
            evidence = Evidence(kind=Kind.CUSTOM, action=Action.WARN, message="", diagnosis=diagnosis)
            value = torch.tensor(event.step == 3)
            return Finding(kind=Kind.CUSTOM, value=value, action=Action.WARN, confirm=lambda: evidence)

    callback = GradientStatistics(every=50, attention_steps=2, show=0)
    sentinel = run_steps(callback, run_dir, 20, more=[Judge()])
    assert suspects_seen(sentinel) == {"enter.weight": 5, "enter.bias": 5}


def test_attention_is_bounded_too(run_dir, monkeypatch):
    sizes = {}
    honest = statistics.look

    def watched(view, mailbox, sample, **settings):
        sizes[settings["iteration"]] = [(piece.name, len(piece)) for piece in sample]
        return honest(view, mailbox, sample, **settings)

    monkeypatch.setattr(statistics, "look", watched)

    def spoil(number, model):
        if number == 1:
            model.inner.weight.grad[3, 3] = math.inf

    callback = GradientStatistics(every=100, elements_per_check=2048, attention_steps=12)
    sentinel = run_steps(callback, run_dir, 20, spoil=spoil)
    looked = {step: pieces for step, pieces in sizes.items() if step > 1}
    assert sorted(looked) == list(range(2, 14))
    assert all(sum(size for _, size in pieces) <= 2048 for pieces in looked.values())
    assert {name for pieces in looked.values() for name, _ in pieces} == {"inner.weight"}
    assert "inner.weight" in suspects_seen(sentinel)  # 16384 elements, whole after some of the steps


class Waits(TorchDispatchMode):
    """Fails on operators whose result the host reads."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "is_nonzero",
        "bincount",
        "unique",
        "masked_select",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_before_the_step(run_dir, monkeypatch):
    looks = []

    class Watched(GradientStatistics):
        def on_before_clip(self, event):
            with monkeypatch.context() as patch, Waits():
                for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__"):
                    patch.setattr(torch.Tensor, name, self._forbidden)
                super().on_before_clip(event)
            looks.append(len(self._looks))

        @staticmethod
        def _forbidden(*_):
            raise AssertionError("the host read a tensor")

    run_steps(Watched(every=2), run_dir, 6, bad={3})
    assert looks == [1, 0, 1, 0, 2, 1]  # the suspects' too


class Zoo(nn.Module):
    """Parameters of many kinds: complex, tied, frozen, unused, sparse, empty, integer, half."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.enter.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 4)
        self.table = nn.Embedding(50, 16, sparse=True)
        self.wave = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.counter = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.short = nn.Parameter(torch.randn(16).to(torch.bfloat16))

    def forward(self, x):
        x = self.frozen(self.tied(torch.relu(self.enter(x)))) * self.short.float()
        return (x + self.table(torch.arange(8)) + torch.fft.ifft(self.wave).real).sum(1) + self.empty.sum()


def test_parameters_of_all_kinds_are_looked_at(run_dir):
    torch.manual_seed(0)
    model = Zoo()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    callback = GradientStatistics(every=1, elements_per_check=1024, show=100)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), callback], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 16) for _ in range(12)]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
    assert sentinel.incidents == ()
    assert published(sentinel).keys() >= {"enter.weight", "enter.bias", "tied.bias", "wave", "short"}
    assert not {"frozen.weight", "unused.weight", "empty", "counter"} & published(sentinel).keys()


def test_players_that_take_turns_are_both_covered(run_dir):
    """With one look in every even number of steps one player's gradients would never be there."""
    torch.manual_seed(0)
    players = {"g": nn.Linear(16, 200), "d": nn.Linear(200, 16)}
    optimizers = [torch.optim.SGD(player.parameters(), 1e-3) for player in players.values()]
    callback = GradientStatistics(every=2, elements_per_check=1024, show=100)
    with Sentinel(players, optimizers, callbacks=[NanCallback(), callback], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 16) for _ in range(60)])):
            sentinel.backward(players["d"](players["g"](batch)).square().mean())
            sentinel.step(optimizer=optimizers[number % 2])
            optimizers[1 - number % 2].zero_grad()
    assert published(sentinel).keys() == {"g.weight", "g.bias", "d.weight", "d.bias"}
    assert {"statistics/0/zeros", "statistics/1/zeros"} <= sentinel._watch.run.metrics.keys()


def test_parameters_that_thaw_are_taken_in(run_dir):
    model = Mlp()
    model.enter.requires_grad_(False)

    def thaw(number, model):
        if number == 5:
            model.enter.requires_grad_(True)

    sentinel = run_steps(GradientStatistics(every=1, show=100), run_dir, 10, model=model, spoil=thaw)
    assert published(sentinel).keys() == all_names(model)


# torch's own remark on every lazy module
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_layer_is_taken_in_when_it_has_its_shape(run_dir):
    model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 1))
    sentinel = run_steps(GradientStatistics(every=2, show=100), run_dir, 6, model=model)
    assert published(sentinel).keys() == all_names(model)


@pytest.mark.expects_swallowed
def test_one_that_raises_is_switched_off_and_the_run_goes_on(run_dir, monkeypatch):
    def broken(*args, **settings):
        raise RuntimeError("no memory")

    monkeypatch.setattr(statistics, "look", broken)
    sentinel = run_steps(GradientStatistics(every=2), run_dir, 6)
    assert [incident.kind for incident in sentinel.incidents] == [Kind.CALLBACK_ERROR]
    assert sentinel.applied_steps == 6


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_harms_nobody(value, run_dir):
    def spoil(number, model):
        if number == 4:
            model.inner.weight.grad.fill_(value)

    callback = GradientStatistics(every=2, show=100)
    sentinel = run_steps(callback, run_dir, 6, spoil=spoil)
    assert [incident.kind for incident in sentinel.incidents] == [Kind.NONFINITE_GRADIENT]
    histogram = sentinel._watch.run.histograms["statistics/log2_gradient"][1]
    assert histogram.nonfinite == 128 * 128


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw-fused", "max_norm": 1.0}, {"ema": True}])
def test_a_healthy_run_is_the_same_bit_for_bit(settings, run_dir):
    batches = make_batches(10)
    reference = build(random=True, **settings)
    train_by_hand(reference, batches)
    expected = {**reference.state(), "losses": reference.losses, "generators": generators()}
    watched = build(random=True, **settings)
    callbacks = [NanCallback(), GradientStatistics(every=2), TensorBoardCallback()]
    with watched.sentinel(callbacks, run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
    assert sentinel.incidents == ()
    outcome = {**watched.state(), "losses": watched.losses, "generators": generators()}
    assert differences(outcome, expected) == []


def test_a_restarted_run_goes_on_where_the_other_stopped(run_dir):
    """Turns, suspects, and how long a layer has been dead."""
    whole = GradientStatistics(every=2, elements_per_check=2048, patience=5)
    run_steps(whole, run_dir / "whole", 14, model=Mlp(dead=True), bad={5})
    first = GradientStatistics(every=2, elements_per_check=2048, patience=5)
    torch.manual_seed(0)
    model = Mlp(dead=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = [torch.randn(8, 16) for _ in range(14)]
    states = {}
    messages = []
    for name, part, callback in (
        ("one", batches[:7], first),
        ("two", batches[7:], GradientStatistics(every=2, elements_per_check=2048, patience=5)),
    ):
        watch = [NanCallback(), callback]
        with Sentinel(model, optimizer, callbacks=watch, run_dir=run_dir / name) as sentinel:
            if states:
                sentinel.load_state_dict(states)
            for number, batch in enumerate(sentinel.steps(part)):
                bad = name == "one" and number == 5
                sentinel.backward((model(batch) - 1).square().mean() * (NAN if bad else 1.0))
                sentinel.step(max_norm=1.0)
            states = sentinel.state_dict()
        messages += [incident.message for incident in sentinel.incidents]
    assert states["callbacks"]["GradientStatistics"] == whole.state_dict()
    assert sum("no gradient reaches" in message for message in messages) == 1


def test_a_run_that_goes_back_keeps_its_turns(run_dir):
    callback = GradientStatistics(every=1, elements_per_check=2048, show=100)
    rollback = Rollback(every=4, confirm_after=1, after=1)
    sentinel = run_steps(callback, run_dir, 24, more=[rollback], bad={9})
    assert sentinel.incidents[0].outcome.value == "rolled_back"
    assert callback.state_dict()["steps"] == {"all": 24}
    assert published(sentinel).keys() == all_names(Mlp())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"every": 0}, "every=0"),
        ({"patience": 0}, "patience=0"),
        ({"attention_steps": -1}, "attention_steps=-1"),
        ({"show": -1}, "show=-1"),
        ({"elements_per_check": 100}, "elements_per_check=100"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        GradientStatistics(**settings)
