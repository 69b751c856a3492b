"""SpikeCallback in real training: told, dropped, learnt from healthy steps only, at no wait."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import (
    Action,
    AfterStep,
    BeforeClip,
    ConfigurationError,
    Kind,
    NanCallback,
    Rollback,
    Sentinel,
    SpikeCallback,
)
from gradsentinel.gradients import GradientView
from loops import build, differences, make_batches, train_by_hand, train_watched

STEPS = 60


class Faulty:
    """A regression whose loss is multiplied in given steps."""

    def __init__(self, times=None, *, optimizer=None, **settings):
        torch.manual_seed(0)
        self.times = dict(times or {})
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            if optimizer is None
            else optimizer(self.model.parameters())
        )
        self.settings = settings
        self.applied = []
        self.weights = []

    def loss(self, x, step):
        return mse_loss(self.model(x), x.sum(1, keepdim=True)) * self.times.get(step, 1.0)

    def train(self, run_dir, *callbacks, steps=STEPS, state=None, max_norm=None):
        """Train under the callbacks; a fault comes once, whatever becomes of its step."""
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(16, 6, generator=generator) for _ in range(steps)]
        with Sentinel(
            self.model, self.optimizer, callbacks=callbacks, run_dir=run_dir, **self.settings
        ) as sentinel:
            if state is not None:
                sentinel.load_state_dict(state)
            for number, x in enumerate(sentinel.steps(batches)):
                sentinel.backward(self.loss(x, number))
                sentinel.step(max_norm)
                if self.settings.get("guard") != "device":  # there nobody knows yet
                    self.applied.append(sentinel.applied)
                self.weights.append(self.model[0].weight.detach().clone())
            self.state = sentinel.state_dict()
        return sentinel

    def dropped(self):
        return [number for number, applied in enumerate(self.applied) if not applied]


def told(sentinel):
    return [(i.step, str(i.kind), str(i.outcome)) for i in sentinel.incidents]


def learnt(callback, name, player="all"):
    return callback._series[player][name].values


def test_a_spike_is_told_and_the_step_goes_through(run_dir):
    run = Faulty({50: 30.0})
    sentinel = run.train(run_dir, NanCallback(), SpikeCallback())
    assert told(sentinel) == [(50, "spike", "reported")]
    assert run.dropped() == []
    (incident,) = sentinel.incidents
    assert "times the median of the last" in incident.message
    signals = incident.details["signals"]
    assert set(signals) == {"loss", "grad_norm"}
    for numbers in signals.values():
        assert numbers["value"] > numbers["bound"] > numbers["median"] > 0
        assert numbers["deviations"] > 4
        assert numbers["mad"] > 0
        assert 20 <= numbers["window"] <= 128
    assert incident.tensors[0].norm == max(tensor.norm for tensor in incident.tensors)
    assert {tensor.name for tensor in incident.tensors} <= {name for name, _ in run.model.named_parameters()}


def test_an_explosion_is_dropped_before_it_lands(run_dir):
    run = Faulty({50: 1e11})
    sentinel = run.train(run_dir, NanCallback(), SpikeCallback())
    assert told(sentinel) == [(50, "spike", "skipped")]
    assert run.dropped() == [50]
    assert torch.equal(run.weights[50], run.weights[49])
    assert not torch.equal(run.weights[51], run.weights[50])
    assert sentinel.incidents[0].details["exploded"] is True


@pytest.mark.parametrize("step", [3, 5, 19, 20, 21, 59])
def test_a_finite_explosion_is_dropped_at_any_step_but_the_first_three(run_dir, step):
    run = Faulty({step: 1e11})
    assert told(run.train(run_dir, SpikeCallback())) == [(step, "spike", "skipped")]
    assert run.dropped() == [step]


def test_without_faults_nothing_is_told_and_nothing_changes(run_dir):
    by_hand = build(optimizer="adamw-foreach", max_norm=1.0, scheduler="cosine")
    watched = build(optimizer="adamw-foreach", max_norm=1.0, scheduler="cosine")
    batches = make_batches(80)
    train_by_hand(by_hand, batches)
    sentinel = watched.sentinel([NanCallback(), SpikeCallback(groups="parameter")], run_dir=run_dir)
    with sentinel:
        for _ in train_watched(watched, sentinel, batches):
            pass
    assert differences(by_hand.state(), watched.state()) == []
    assert differences(by_hand.losses, watched.losses) == []
    assert sentinel.incidents == ()


def test_a_spike_that_is_only_told_changes_nothing(run_dir):
    alone, watched = Faulty({50: 30.0}), Faulty({50: 30.0})
    alone.train(run_dir / "one", NanCallback())
    watched.train(run_dir / "two", NanCallback(), SpikeCallback())
    assert all(torch.equal(one, two) for one, two in zip(alone.weights, watched.weights, strict=True))


@pytest.mark.parametrize(("action", "outcome"), [("skip", "skipped"), ("rollback", "rolled_back")])
def test_policies(run_dir, action, outcome):
    run = Faulty({50: 30.0})
    sentinel = run.train(
        run_dir, NanCallback(), SpikeCallback(action=action), Rollback(every=10, confirm_after=5)
    )
    assert told(sentinel) == [(50, "spike", outcome)]
    assert run.dropped() == [50]


def test_an_explosion_is_never_treated_more_gently_than_a_spike(run_dir):
    run = Faulty({50: 1e9})
    run.train(run_dir, SpikeCallback(action="skip", explosion_action="warn"))
    assert run.dropped() == [50]


def test_explosions_can_be_spikes_like_others(run_dir):
    run = Faulty({50: 1e9})
    sentinel = run.train(run_dir, SpikeCallback(explosion=None))
    assert told(sentinel) == [(50, "spike", "reported")]


@pytest.mark.parametrize("rule", ["robust", "sigma", "history"])
def test_each_rule_sees_a_large_spike_and_learns_nothing_from_it(run_dir, rule):
    spiky = SpikeCallback(rule=rule, sigmas=6, explosion=None)
    run = Faulty({50: 1e4, 53: 1e4})
    sentinel = run.train(run_dir, spiky)
    assert {incident.step for incident in sentinel.incidents} == {50}  # the second is the same warning
    assert sentinel.incidents[0].details["repeated"] == 1
    assert max(learnt(spiky, "loss")) < 100


@pytest.mark.parametrize(("rule", "steps"), [("sigma", [50]), ("robust", []), ("history", [])])
def test_only_sigma_looks_both_ways(run_dir, rule, steps):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Sentinel(
        model, optimizer, callbacks=[SpikeCallback(rule=rule, sigmas=6)], run_dir=run_dir
    ) as sentinel:
        for number in sentinel.steps(range(STEPS)):
            loss = 1 + 0.01 * model(torch.randn(8, 4)).square().mean()
            sentinel.backward(loss * (0.1 if number == 50 else 1))
            sentinel.step()
    assert [incident.step for incident in sentinel.incidents] == steps


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_dropped_and_leaves_no_trace(run_dir, value):
    alone, spiky = SpikeCallback(), SpikeCallback()
    run = Faulty({50: value})
    run.train(run_dir / "one", NanCallback(), spiky)
    assert run.dropped() == [50]
    assert len(learnt(spiky, "loss")) == STEPS - 1
    assert all(math.isfinite(known) for name in ("loss", "grad_norm") for known in learnt(spiky, name))
    run = Faulty({50: value})
    (incident,) = run.train(run_dir / "two", alone).incidents  # nobody else is there to see it
    assert run.dropped() == [50]
    assert incident.kind is Kind.NONFINITE_LOSS


def test_a_burst_does_not_mask_the_next_spike(run_dir):
    run = Faulty(dict.fromkeys((*range(40, 46), 55), 1e6))
    run.train(run_dir, NanCallback(), SpikeCallback())
    assert run.dropped() == [*range(40, 46), 55]


def test_undone_steps_leave_the_statistics(run_dir):
    spiky, seen = SpikeCallback(action="rollback"), []
    run = Faulty({50: 30.0})

    def look(event):
        if event.action is Action.ROLLBACK:
            seen.append((len(learnt(spiky, "loss")), spiky._series["all"]["loss"].streak))

    original = Sentinel.__enter__

    def entered(self):
        self.on(AfterStep, look)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sentinel, "__enter__", entered)
        run.train(run_dir, NanCallback(), spiky, Rollback(every=10, confirm_after=5))
    assert seen == [(40, ())]


def test_a_restarted_run_needs_no_warm_up(run_dir):
    before = Faulty()
    before.train(run_dir / "one", SpikeCallback(groups="layer"))
    again = Faulty({0: 30.0})
    again.model.load_state_dict(before.model.state_dict())
    sentinel = again.train(run_dir / "two", SpikeCallback(groups="layer"), steps=5, state=before.state)
    assert [incident.step for incident in sentinel.incidents] == [STEPS]
    cold = Faulty({0: 30.0})
    cold.model.load_state_dict(before.model.state_dict())
    assert cold.train(run_dir / "three", SpikeCallback(groups="layer"), steps=5).incidents == ()


def test_numbers_of_an_earlier_run_replace_the_warm_up(run_dir):
    earlier = SpikeCallback()
    Faulty().train(run_dir / "one", earlier)
    warm = SpikeCallback()
    warm.warm_start(losses=learnt(earlier, "loss"), grad_norms=learnt(earlier, "grad_norm"))
    sentinel = Faulty({1: 1e3}).train(run_dir / "two", warm, steps=5)
    assert [incident.step for incident in sentinel.incidents] == [1]


def test_players_that_take_turns_have_their_own_statistics(run_dir):
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    first = torch.optim.SGD(one.parameters(), lr=1e-3)
    second = torch.optim.SGD(two.parameters(), lr=1e-7)
    spiky = SpikeCallback()
    sentinel = Sentinel(nn.ModuleList([one, two]), [first, second], callbacks=[spiky], run_dir=run_dir)
    for number in range(120):
        player, optimizer, size = ((one, first, 1.0), (two, second, 1e4))[number % 2]
        factor = 1e3 if number == 100 else 1.0  # for the first player a spike, next to the second nothing
        optimizer.zero_grad()
        sentinel.backward(factor * size * player(torch.randn(8, 4)).square().mean())
        sentinel.step(optimizer=optimizer)
    sentinel.close()
    assert [incident.step for incident in sentinel.incidents] == [100]
    assert max(learnt(spiky, "loss", "0")) < 100 < min(learnt(spiky, "loss", "1"))


def test_the_loss_is_the_mean_over_the_micro_batches(run_dir):
    run = build(accumulate=4)
    spiky = SpikeCallback()
    sentinel = run.sentinel([spiky], run_dir=run_dir)
    means = []
    sentinel.on(AfterStep, lambda event: means.append(event.loss))
    with sentinel:
        for _ in train_watched(run, sentinel, make_batches(120)):
            pass
    assert learnt(spiky, "loss") == pytest.approx(means)
    assert sentinel.incidents == ()


@pytest.mark.parametrize(("learnt", "ease"), [(False, 1.0), (True, 1.4)])
def test_norms_are_judged_more_leniently_once_the_data_is_learnt_by_heart(run_dir, learnt, ease):
    spiky = SpikeCallback()
    Faulty(dict.fromkeys(range(25, STEPS), 0.01) if learnt else {}).train(run_dir, spiky)
    assert spiky._series["all"]["grad_norm"].ease == ease


def test_the_bounds_are_published_for_tensorboard(run_dir):
    sentinel = Faulty().train(run_dir, SpikeCallback())
    metrics = sentinel._watch.run.metrics
    assert set(metrics) == {"spike/loss_bound", "spike/grad_norm_bound"}
    step, bound = metrics["spike/loss_bound"]
    assert 20 <= step < STEPS
    assert bound > 1


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


@pytest.mark.parametrize(("groups", "most"), [(None, 5), ("parameter", 50), ("layer", 55)])
def test_a_healthy_step_costs_a_few_launches_and_no_wait(run_dir, groups, most):
    spiky = SpikeCallback(groups=groups)
    run = Faulty()
    run.train(run_dir, spiky)
    launched = []
    for step in range(STEPS, 176):
        view = GradientView([(name, torch.randn_like(p)) for name, p in run.model.named_parameters()])
        _ = view.total_norm, view.norms
        event = BeforeClip(step=step, gradients=view, losses=(torch.tensor(1.0),))
        with Quiet() as quiet:
            findings = spiky.on_before_clip(event)
        launched.append(len(quiet.launched))
        assert len(findings) == (2 if groups is None else 3)
    usual, refreshed = sorted(launched[-32:])[:30], sorted(launched[-32:])[30:]  # every 16th computes anew
    assert max(usual) <= most
    assert max(refreshed) <= (most if groups is None else 190)


def test_a_group_can_spike_where_the_whole_does_not(run_dir):
    torch.manual_seed(0)
    model = nn.ModuleDict({"large": nn.Linear(6, 1), "small": nn.Linear(6, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = {}
    for groups in (None, "parameter", "layer"):
        sentinel = Sentinel(
            model, optimizer, callbacks=[SpikeCallback(groups=groups)], run_dir=run_dir / str(groups)
        )
        for number, x in enumerate(sentinel.steps([torch.randn(32, 6) for _ in range(60)])):
            small = model["small"](x).square().mean() * (1e-3 * (50 if number == 50 else 1))
            sentinel.backward(10 + model["large"](x).square().mean() + small)
            sentinel.step()
        sentinel.close()
        found[groups] = [(i.step, {t.name for t in i.tensors}) for i in sentinel.incidents]
    assert found[None] == []
    assert [step for step, _ in found["parameter"]] == [50]
    assert found["layer"] == [(50, {"small.weight", "small.bias"})]


def group_levels(spiky):
    (found,) = spiky._grouped["all"]._sets.values()
    return found.levels.state_dict()


def test_a_dropped_step_teaches_the_groups_nothing(run_dir):
    spiky = SpikeCallback(groups="parameter")
    model = nn.ModuleDict({"one": nn.Linear(3, 1, bias=False), "other": nn.Linear(3, 1, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), spiky], run_dir=run_dir) as sentinel:
        for number, x in enumerate(sentinel.steps([torch.randn(16, 3) for _ in range(40)])):
            bad = math.nan if number in {10, 30} else 1.0
            sentinel.backward(model["one"](x).square().mean() * bad + model["other"](x).square().mean())
            if number in {10, 30}:  # the other's gradient is as ever
                assert model["other"].weight.grad.isfinite().all()
            sentinel.step()
    assert [incident.step for incident in sentinel.incidents] == [10, 30]
    assert group_levels(spiky)["number"].tolist() == [38, 38]


def test_undone_steps_leave_the_groups(run_dir):
    spiky = SpikeCallback(groups="parameter", explosion_action="rollback")
    run = Faulty({50: 1e11})
    sentinel = run.train(run_dir, NanCallback(), spiky, Rollback(every=10, confirm_after=5))
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["rolled_back"]
    kept = group_levels(spiky)
    assert max(kept["number"].tolist()) < STEPS - 5
    assert kept["values"].isfinite().all()


def test_what_an_earlier_version_learnt_of_groups_is_learnt_anew(run_dir, caplog):
    before = Faulty()
    before.train(run_dir / "one", SpikeCallback(groups="layer"))
    spiky = SpikeCallback(groups="layer")
    state = SpikeCallback(groups="layer").state_dict()
    names = [name for name, _ in before.model.named_parameters()]
    old = dict.fromkeys(("mean", "variance", "number", "streak"), torch.zeros(2))
    state["groups"] = {"all": {"sets": [{"names": names, "levels": old}]}}
    spiky.load_state_dict(state)
    assert "learnt anew" in caplog.text
    sentinel = Faulty().train(run_dir / "two", spiky)
    assert sentinel.incidents == ()
    assert group_levels(spiky)["number"].tolist() == [STEPS, STEPS]


def test_a_divergence_is_traced_to_the_learning_rate(run_dir):
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Sentinel(model, optimizer, callbacks=[SpikeCallback()], run_dir=run_dir) as sentinel:
        for number, x in enumerate(sentinel.steps([torch.randn(16, 6) for _ in range(65)])):
            optimizer.param_groups[0]["lr"] = 5.0 if number >= 60 else 0.05
            sentinel.backward((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
            sentinel.step()
    last = sentinel.incidents[-1]
    assert last.diagnosis.cause == "optimizer"
    assert last.diagnosis.confidence >= 0.5
    assert "the learning rate went from 0.05 to 5 in step 60" in last.message
    assert any("schedule" in remedy for remedy in last.diagnosis.remedy)


def test_a_late_decision_drops_the_explosion_on_the_device(run_dir):
    run = Faulty({50: 1e11}, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), guard="device")
    spiky = SpikeCallback()
    sentinel = run.train(run_dir, NanCallback(), spiky)
    assert told(sentinel) == [(50, "spike", "skipped")]
    assert torch.equal(run.weights[50], run.weights[49])
    assert len(learnt(spiky, "loss")) == STEPS - 1


def test_odd_parameters_and_losses(run_dir):
    torch.manual_seed(0)
    model = nn.Module()
    model.table = nn.Embedding(20, 4, sparse=True)
    model.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.whole = nn.Parameter(torch.arange(3), requires_grad=False)
    model.tied = model.table
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    spiky = SpikeCallback(groups="parameter")
    with Sentinel(model, optimizer, callbacks=[NanCallback(), spiky], run_dir=run_dir) as sentinel:
        for number in sentinel.steps(range(60)):
            rows = model.table(torch.randint(0, 20, (8,)))
            loss = (rows * model.phase.abs()).square().mean() + model.empty.sum() + 1
            sentinel.backward((loss * (1e9 if number == 50 else 1)).reshape(1))
            sentinel.step()
    assert told(sentinel) == [(50, "spike", "skipped")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "continue"},
        {"explosion_action": "explode"},
        {"rule": "median"},
        {"groups": "block"},
        {"loss": False, "grad_norm": False},
        {"limit": 0},
        {"sigmas": -1},
        {"times": 1},
        {"explosion": 0.5},
        {"warmup": 2},
        {"patience": 1},
        {"window": 10},
    ],
    ids=str,
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(ConfigurationError):
        SpikeCallback(**wrong)


@pytest.mark.parametrize("place", range(4))
def test_an_explosion_in_the_first_steps(place, run_dir):
    """From the second step on it is dropped; the first has nothing to be compared with, and is told later."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1e-12)
    done = []
    with Sentinel(
        torch.nn.ParameterList([weight]), optimizer, callbacks=[SpikeCallback()], run_dir=run_dir
    ) as sentinel:
        for number, size in enumerate(sentinel.steps(torch.rand(12).add(1).tolist())):
            sentinel.backward((weight * (size * 1e7 if number == place else size)).sum())
            sentinel.step()
            done.append(sentinel.applied)
    (incident,) = sentinel.incidents
    if place:
        assert (incident.step, incident.action) == (place, Action.SKIP)
        assert done == [number != place for number in range(12)]
    else:
        assert (incident.step, incident.action) == (7, Action.WARN)
        assert incident.details["first_step"] == 0
        assert "of step 0 was" in incident.message
        assert all(done)
