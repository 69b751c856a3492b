"""Snapshots: the whole training state, back bit for bit, and known good only after it has proved itself."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR

from gradsentinel import (
    Action,
    BeforeClip,
    Finding,
    Kind,
    NanCallback,
    Outcome,
    RecoveryFailed,
    Rollback,
    Sentinel,
)
from gradsentinel.host import TorchHost
from gradsentinel.state.archive import read_archive, write_archive
from gradsentinel.state.buffers import BufferShadow
from gradsentinel.state.snapshot import Snapshot, SnapshotMismatch, capture, restore
from loops import (
    OPTIMIZERS,
    SCHEDULERS,
    Spoiler,
    build,
    differences,
    fingerprint,
    finish,
    generators,
    make_batches,
    train_by_hand,
    train_watched,
)


def host_of(run, **settings):
    extra = {} if run.ema is None else {"ema": run.ema}
    return TorchHost(
        run.model,
        run.optimizers,
        scheduler=run.schedulers or None,
        scaler=run.scaler,
        extra=extra,
        **settings,
    )


def take(run, step=0):
    host = host_of(run)
    buffers = BufferShadow(host.modules())
    return capture(host, buffers, step=step, data={"batch": 3}), host, buffers


def everything(run):
    return {**run.state(), "generators": generators()}


FULL = {"random": True, "scheduler": "cosine", "ema": True, "max_norm": 1.0}


# -- rolling back ----------------------------------------------------------------------------------


def go_back_at(sentinel, steps):
    """A detector that asks for a rollback at given attempts, once each."""
    left = set(steps)

    def look(event):
        asked = event.step in left
        left.discard(event.step)
        return Finding(kind=Kind.SPIKE, value=torch.tensor(asked), action=Action.ROLLBACK)

    sentinel.on(BeforeClip, look)


# torch's own remark on every loop whose first step overflows
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [
        *({**FULL, "optimizer": optimizer} for optimizer in OPTIMIZERS),
        *({**FULL, "scheduler": scheduler} for scheduler in SCHEDULERS),
        {**FULL, "two_optimizers": True},
        {**FULL, "accumulate": 3},
        {**FULL, "autocast": torch.float16, "scale": 2.0**22},
    ],
    ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items() if FULL.get(k) != v) or "as usual",
)
def test_a_rollback_gives_back_every_bit(settings, run_dir):
    """Parameters, buffers, moments, schedules, scaler, average of the weights and all generators."""
    run = build(**settings)
    states = {}
    with run.sentinel([NanCallback(), Rollback(every=3, confirm_after=2)], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {9})
        for done in train_watched(run, sentinel, make_batches(12 * run.accumulate)):
            if sentinel.last_action is Action.ROLLBACK:
                assert sentinel.step_count == 6
                assert differences(everything(run), states[6]) == []
                break
            if done % run.accumulate == 0:
                states[sentinel.step_count] = everything(copy_of(run))
        else:
            pytest.fail("there was no rollback")
    assert differences(states[6], states[9]) != []
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.ROLLED_BACK]


def copy_of(run):
    """A frozen view of a run's state, which `state()` alone is not: it refers to the live tensors."""

    class Frozen:
        kept = clone(run.state())

        def state(self):
            return self.kept

    return Frozen()


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [clone(entry) for entry in value]
    return value


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_run_goes_on_from_there_as_if_the_lost_steps_had_never_been(optimizer, run_dir):
    """Random draws included: dropout after the rollback is what it would have been."""
    batches = make_batches(14)
    settings = {**FULL, "optimizer": optimizer}
    reference = build(**settings)
    train_by_hand(reference, [*batches[:6], *batches[10:]])
    expected = everything(copy_of(reference))
    run = build(**settings)
    with run.sentinel([NanCallback(), Rollback(every=3, confirm_after=2)], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {9})
        finish(train_watched(run, sentinel, batches))
    assert differences(everything(run), expected) == []


def test_a_rollback_to_the_start(run_dir):
    run = build(**FULL)
    start = everything(copy_of(run))
    with run.sentinel([NanCallback(), Rollback()], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {4})
        for done in train_watched(run, sentinel, make_batches(5)):
            if done == 5:
                assert sentinel.step_count == 0
                assert differences(everything(run), start) == []


@pytest.mark.parametrize("value", [1.0, float("nan")], ids=["a good first batch", "a bad first batch"])
def test_a_rollback_to_the_start_of_a_loop_without_steps(value, run_dir):
    """There the sentinel is first heard of after a forward pass, which has written to the buffers."""
    run = build(**FULL)
    start = everything(copy_of(run))
    batches = make_batches(5)
    batches[0]["x"] *= value
    with run.sentinel([NanCallback(), Rollback()], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {4})
        for number, batch in enumerate(batches):
            sentinel.backward(run.loss(batch))
            sentinel.step(max_norm=1.0)
            if number == 4:
                assert sentinel.last_action is Action.ROLLBACK
                assert sentinel.step_count == 0
                assert differences(everything(run), start) == []


def test_further_objects_are_part_of_it(run_dir):
    class Counter:
        def __init__(self):
            self.seen = 0

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    run, counter = build(), Counter()
    plateau = ReduceLROnPlateau(run.optimizers[0], patience=0)
    callbacks = [NanCallback(), Rollback(every=3, confirm_after=2)]
    kept = []
    with run.sentinel(callbacks, run_dir=run_dir, extra={"counter": counter, "plateau": plateau}) as sentinel:
        go_back_at(sentinel, {9})
        for done in train_watched(run, sentinel, make_batches(10)):
            counter.seen += 1
            if done < 10:
                plateau.step(done)
            kept.append(
                (counter.seen, plateau.num_bad_epochs, plateau.best, run.optimizers[0].param_groups[0]["lr"])
            )
    # the snapshot after 6 steps is taken inside of step(), before this loop counts
    assert sentinel.step_count == 6
    assert kept[-1][0] == 5 + 1
    assert kept[-1][1:3] == kept[4][1:3]
    assert kept[-1][3] == pytest.approx(kept[4][3])


# -- what is called good ---------------------------------------------------------------------------


def timeline(rollback, batches, run_dir, *, bad=()):
    """The steps one could go back to, after each step."""
    run = build()
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        spoiler = Spoiler("loss", frozenset(bad))
        steps = train_watched(run, sentinel, make_batches(batches), spoil=spoiler)
        return [rollback.known_good_steps for _ in steps]


def test_a_snapshot_is_known_good_after_so_many_clean_later_steps(run_dir):
    found = timeline(Rollback(every=3, confirm_after=2), 9, run_dir)
    assert found == [(0,)] * 4 + [(0, 3)] * 3 + [(0, 3, 6)] * 2


def test_at_once_if_no_later_step_is_asked_for(run_dir):
    assert timeline(Rollback(every=2, confirm_after=0), 4, run_dir) == [(0,), (0, 2), (0, 2), (0, 2, 4)]


def test_a_failed_step_starts_the_count_again(run_dir):
    found = timeline(Rollback(every=3, confirm_after=2), 7, run_dir, bad=[4])
    assert found == [(0,)] * 6 + [(0, 3)]


def test_a_failed_step_is_no_time_for_a_snapshot(run_dir):
    assert timeline(Rollback(every=3, confirm_after=0), 6, run_dir, bad=[2])[-1] == (0, 6)


def test_so_many_are_kept(run_dir):
    found = timeline(Rollback(every=1, confirm_after=0, keep=2), 5, run_dir)
    assert found[-1] == (4, 5)


def test_a_state_that_is_not_finite_is_never_called_good_and_gone_back_from(run_dir):
    """Here nobody else looks at the state, so the detectors call the steps clean."""
    run, rollback = build(), Rollback(every=2, confirm_after=0)
    with run.sentinel([rollback], run_dir=run_dir) as sentinel:
        for done in train_watched(run, sentinel, make_batches(6)):
            if done == 3:
                with torch.no_grad():
                    run.model.norm.running_var[0] = math.inf
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome) == (3, Kind.NONFINITE_STATE, Outcome.ROLLED_BACK)
    assert [tensor.name for tensor in incident.tensors] == ["norm.running_var"]
    assert math.isfinite(float(run.model.norm.running_var[0]))
    assert rollback.known_good_steps[:2] == (0, 2)


def test_a_bad_state_is_rolled_back_and_what_was_taken_after_it_is_forgotten(run_dir):
    run, rollback = build(), Rollback(every=2, confirm_after=1)
    before = None
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        for done in train_watched(run, sentinel, make_batches(8)):
            if done == 2:
                before = fingerprint(run.state())
            if done == 3:
                assert rollback.known_good_steps == (0, 2)
                with torch.no_grad():
                    run.model.head.weight[0, 0] = math.nan
            if done == 4:
                assert sentinel.last_action is Action.ROLLBACK
                assert fingerprint(run.state()) == before
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.outcome) == (Kind.NONFINITE_PARAMETER, Outcome.ROLLED_BACK)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_snapshot_that_is_found_bad_is_passed_over(run_dir):
    """It cannot happen by itself; if memory decays, an older one is used and the bad one never saved."""
    run, rollback = build(), Rollback(every=2, confirm_after=0)
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {3})
        steps = train_watched(run, sentinel, make_batches(6))
        for _ in range(3):
            next(steps)
        rollback._ring.good[-1].parameters["head.weight"][0, 0] = math.nan
        next(steps)
        assert sentinel.incidents[-1].outcome is Outcome.ROLLED_BACK
        assert sentinel.step_count == 0
        assert all(torch.isfinite(p).all() for p in run.model.parameters())


# -- capture and restore ---------------------------------------------------------------------------


@st.composite
def trainings(draw):
    """A random small model with an optimizer that has taken a few steps."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    layers: list[nn.Module] = []
    for width, height in itertools.pairwise(sizes):
        layers.append(nn.Linear(width, height, bias=draw(st.booleans())))
        layers.extend([nn.BatchNorm1d(height)] if draw(st.booleans()) else [nn.Tanh()])
    model = nn.Sequential(*layers).to(dtype)
    if draw(st.booleans()):
        model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1))]
    make = OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]
    split = draw(st.integers(0, len(trainable) - 1))
    groups = [{"params": part} for part in (trainable[:split], trainable[split:]) if part]
    optimizer = make(groups)
    scheduler = draw(
        st.sampled_from(
            [
                None,
                lambda o: StepLR(o, 2),
                lambda o: SequentialLR(o, [ConstantLR(o), StepLR(o, 1)], milestones=[2]),
            ]
        )
    )
    schedulers = [] if scheduler is None else [scheduler(optimizer)]
    steps = draw(st.integers(0, 3))
    return model, optimizer, schedulers, steps, draw(st.integers(1, 3))


def step_randomly(model, optimizer, schedulers):
    width = next(p for p in model.parameters() if p.dim() == 2).shape[1]
    dtype = next(model.parameters()).dtype
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    model(torch.randn(3, width, dtype=dtype))
    optimizer.step()
    optimizer.zero_grad()
    for scheduler in schedulers:
        scheduler.step()


def state_of(model, optimizer, schedulers):
    return fingerprint(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loose": [p.detach() for group in optimizer.param_groups for p in group["params"]],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "generators": generators(),
        }
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in .scheduler.step:UserWarning"
)  # torch 2.6, of its SequentialLR
@settings(max_examples=60)
@given(trainings())
def test_a_snapshot_of_any_training_comes_back_bit_for_bit(training):
    model, optimizer, schedulers, before, after = training
    for _ in range(before):
        step_randomly(model, optimizer, schedulers)
    host = TorchHost(model, optimizer, scheduler=schedulers or None)
    buffers = BufferShadow(host.modules())
    expected = state_of(model, optimizer, schedulers)
    snapshot = capture(host, buffers, step=before, data={})
    content = fingerprint(snapshot.to_tree())
    for _ in range(2):  # a snapshot may be needed more than once
        for _ in range(after):
            step_randomly(model, optimizer, schedulers)
            np.random.rand()  # noqa: NPY002 - the global generator is part of the state
        assert state_of(model, optimizer, schedulers) != expected
        restore(snapshot, host, buffers)
        assert state_of(model, optimizer, schedulers) == expected
        assert fingerprint(snapshot.to_tree()) == content, "training wrote into the snapshot"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_through_the_disk_into_a_fresh_training(optimizer, tmp_path):
    run = build(**FULL, optimizer=optimizer)
    train_by_hand(run, make_batches(4))
    snapshot, _, _ = take(run, step=4)
    expected = everything(copy_of(run))
    write_archive(tmp_path / "snapshot", snapshot.to_tree(), {}, kind="snapshot")

    fresh = build(**FULL, optimizer=optimizer)
    host = host_of(fresh)
    tree, _ = read_archive(tmp_path / "snapshot", kind="snapshot")
    loaded = Snapshot.from_tree(tree)
    assert differences(loaded.to_tree(), snapshot.to_tree()) == []
    restore(loaded, host, BufferShadow(host.modules()))
    assert differences(everything(fresh), expected) == []

    # and it trains on as the other one does
    more = make_batches(3, seed=9)
    train_by_hand(fresh, more)
    here = everything(copy_of(fresh))
    snapshot.rng.restore()
    train_by_hand(run, more)
    assert differences(here, everything(run)) == []


def test_the_very_same_tensors_are_written():
    """The optimizer, a compiled graph or the user may hold on to them."""
    run = build(**FULL)
    train_by_hand(run, make_batches(2))
    snapshot, host, buffers = take(run)
    held = [*run.model.parameters(), *run.model.buffers()]
    held += [value for state in run.optimizers[0].state.values() for value in state.values()]
    places = [tensor.data_ptr() for tensor in held]
    train_by_hand(run, make_batches(2))
    restore(snapshot, host, buffers)
    now = [*run.model.parameters(), *run.model.buffers()]
    now += [value for state in run.optimizers[0].state.values() for value in state.values()]
    assert all(one is two for one, two in zip(held, now, strict=True))
    assert [tensor.data_ptr() for tensor in now] == places


def test_a_learning_rate_that_is_a_tensor():
    model = nn.Linear(2, 1)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, capturable=False)
    host = TorchHost(model, optimizer)
    buffers = BufferShadow(host.modules())
    snapshot = capture(host, buffers, step=0, data={})
    rate.fill_(0.5)
    restore(snapshot, host, buffers)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_moments_that_came_later_are_gone_and_gradients_dropped():
    run = build()
    snapshot, host, buffers = take(run)
    train_by_hand(run, make_batches(1))
    run.loss(make_batches(1)[0]).backward()
    assert run.optimizers[0].state
    restore(snapshot, host, buffers)
    assert not run.optimizers[0].state
    assert all(p.grad is None for p in run.model.parameters())


def test_a_scaler_forgets_whom_it_had_unscaled():
    run = build(scale=16.0)
    snapshot, host, buffers = take(run)
    run.scaler.scale(run.loss(make_batches(1)[0])).backward()
    run.scaler.unscale_(run.optimizers[0])
    restore(snapshot, host, buffers)
    train_by_hand(run, make_batches(1))  # would say that it was unscaled twice
    assert run.scaler.get_scale() == 16.0


def test_its_size_is_known():
    run = build(optimizer="sgd")
    train_by_hand(run, make_batches(1))
    snapshot, _, _ = take(run)
    numbers = sum(p.numel() for p in run.model.parameters()) * 2 + sum(b.numel() for b in run.model.buffers())
    assert snapshot.nbytes() == 4 * numbers + 4  # num_batches_tracked is an int64


# -- what does not fit -----------------------------------------------------------------------------


class Other:
    """Ways in which a run is not the one that a snapshot was taken of."""

    @staticmethod
    def wider(run):
        run.model.head = nn.Linear(16, 5)
        return [torch.optim.AdamW(run.model.parameters())]

    @staticmethod
    def without_a_parameter(run):
        run.model.head = nn.Linear(16, 4, bias=False)
        return [torch.optim.AdamW(run.model.parameters())]

    @staticmethod
    def without_a_buffer(run):
        run.model.norm = nn.BatchNorm1d(16, track_running_stats=False)
        return [torch.optim.AdamW(run.model.parameters())]

    @staticmethod
    def another_buffer(run):
        run.model.norm.running_mean = torch.zeros(17)
        return run.optimizers

    @staticmethod
    def one_more_optimizer(run):
        return [*run.optimizers, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]

    @staticmethod
    def one_more_group(run):
        run.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return run.optimizers


WORDS = {
    "wider": r"parameter 'head.weight' has shape \(5, 16\), in the snapshot \(4, 16\)",
    "without_a_parameter": "the run has no parameter 'head.bias'",
    "without_a_buffer": "the run has no buffer 'norm.running_mean'",
    "another_buffer": r"buffer 'norm.running_mean' has shape \(17,\)",
    "one_more_optimizer": "the snapshot holds 1 optimizers, the run has 2",
}


@pytest.mark.parametrize("other", WORDS)
def test_a_snapshot_that_does_not_fit_leaves_everything_untouched(other):
    snapshot, _, _ = take(build())
    run = build()
    train_by_hand(run, make_batches(2))
    optimizers = getattr(Other, other)(run)
    host = TorchHost(run.model, optimizers)
    run.loss(make_batches(1)[0]) if other != "another_buffer" else None
    before = fingerprint([run.model.state_dict(), [o.state_dict() for o in optimizers], generators()])
    with pytest.raises(SnapshotMismatch, match=WORDS[other]):
        restore(snapshot, host, BufferShadow(host.modules()))
    after = fingerprint([run.model.state_dict(), [o.state_dict() for o in optimizers], generators()])
    assert after == before


def test_parameters_that_came_after_the_snapshot_are_left_as_they_are():
    run = build()
    snapshot, _, _ = take(run)
    expected = fingerprint(run.state()["parameters"])
    optimizers = Other.one_more_group(run)
    run.model.adapter = optimizers[0].param_groups[1]["params"][0]
    train_by_hand(run, make_batches(2))
    host = TorchHost(run.model, optimizers)
    restore(snapshot, host, BufferShadow(host.modules()))
    parameters = run.state()["parameters"]
    assert float(parameters.pop("adapter")) == 1.0
    assert fingerprint(parameters) == expected


def test_a_rollback_that_does_not_fit_stops_the_run(run_dir):
    run, rollback = build(), Rollback(every=2, confirm_after=0)
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {3})
        steps = train_watched(run, sentinel, make_batches(6))
        for _ in range(3):
            next(steps)
        rollback._ring.good[-1].parameters["gone"] = torch.ones(1)
        with pytest.raises(RecoveryFailed, match="no parameter 'gone'") as caught:
            next(steps)
    assert isinstance(caught.value.__cause__, SnapshotMismatch)


def test_a_restart_takes_up_the_state_that_the_aborted_run_left(run_dir):
    run = build(**FULL)
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, max_rollbacks=0)]
    states = {}
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel:
        go_back_at(sentinel, {6})
        steps = train_watched(run, sentinel, make_batches(9))
        for _ in range(6):
            done = next(steps)
            states[done] = everything(copy_of(run))
        with pytest.raises(Exception, match="budget of 0 rollbacks"):
            next(steps)
    again = build(**FULL)
    with Sentinel(
        again.model,
        again.optimizers,
        scheduler=again.schedulers,
        ema=again.ema,
        callbacks=[NanCallback()],
        run_dir=run_dir,
    ) as sentinel:
        assert sentinel.restore() == 4
        assert differences(everything(again), states[4]) == []
