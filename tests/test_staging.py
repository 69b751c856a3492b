"""Snapshots taken beside the training: of one moment, into memory that is used again, and no more of it."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradsentinel import Action, BeforeClip, Finding, Kind, NanCallback, Outcome, Rollback
from gradsentinel.host import TorchHost
from gradsentinel.state.buffers import BufferShadow
from gradsentinel.state.snapshot import capture
from gradsentinel.state.staging import HostLane, Staging
from loops import (
    build,
    fingerprint,
    finish,
    generators,
    make_batches,
    train_by_hand,
    train_watched,
)


class LateLane:
    """A device whose side stream is as slow as it may be: it copies when somebody has to wait for it."""

    beside = True

    def copy(self, targets, sources):
        return [(targets, sources)]

    def hold(self, receipt):
        for targets, sources in receipt:
            torch._foreach_copy_(targets, sources)
        receipt.clear()

    def wait(self, receipt):
        self.hold(receipt)


@pytest.fixture
def small(monkeypatch):
    """Nothing is so small that it is copied on the device first."""
    monkeypatch.setattr("gradsentinel.state.staging._SMALL", -1)
    monkeypatch.setattr("gradsentinel.state.snapshot._SMALL", -1)


def late(_device=None):
    return Staging(lane_of=lambda device: LateLane())


class Owner:
    """What a snapshot is to the memory: when it goes, the memory is free."""


def take(staging, *tensors):
    owner, shot = Owner(), staging.begin()
    owner.kept = [shot.keep(tensor) for tensor in tensors]
    owner.pending = shot.finish(owner)
    return owner


# -- of one moment ---------------------------------------------------------------------------------


def test_what_is_written_after_the_hold_is_not_in_it(small):
    weight = torch.arange(4.0)
    snapshot = take(late(), weight)
    assert snapshot.pending.hold()
    weight.add_(1)
    snapshot.pending.wait()
    assert torch.equal(snapshot.kept[0], torch.arange(4.0))


def test_a_write_before_the_hold_is_noticed(small):
    weight = torch.arange(4.0)
    snapshot = take(late(), weight)
    weight.add_(1)
    assert not snapshot.pending.hold()


def test_what_may_change_sooner_is_copied_on_the_device_first(small):
    statistic = torch.arange(4.0)
    owner, shot = Owner(), late().begin()
    kept = shot.keep(statistic, volatile=True)
    pending = shot.finish(owner)
    statistic.add_(1)
    assert pending.hold()
    assert torch.equal(kept, torch.arange(4.0))


def test_in_line_every_later_write_is_too_late(small):
    staging = late()
    staging.in_line()
    weight = torch.arange(4.0)
    snapshot = take(staging, weight)
    weight.add_(1)
    assert snapshot.pending.hold()
    assert torch.equal(snapshot.kept[0], torch.arange(4.0))


ODD = {
    "0-dim": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every second": torch.arange(6.0)[::2],
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(3).bfloat16(),
    "float8": torch.randn(3).to(torch.float8_e4m3fn),
    "sparse": torch.eye(3).to_sparse(),
    "not finite": torch.tensor([math.nan, math.inf, -math.inf]),
    "parameter": nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("lane", [HostLane, LateLane])
@pytest.mark.parametrize("kind", ODD)
def test_any_tensor_comes_out_as_it_went_in(kind, lane):
    staging = Staging(lane_of=lambda device: lane())
    for _ in range(2):  # new memory, and used memory
        snapshot = take(staging, ODD[kind])
        assert snapshot.pending.hold()
        (kept,) = snapshot.kept
        parts = [t.detach().coalesce().values() if t.is_sparse else t.detach() for t in (kept, ODD[kind])]
        assert fingerprint(parts[0]) == fingerprint(parts[1])
        assert parts[0].data_ptr() != parts[1].data_ptr() or not kept.numel()
        del snapshot, kept, parts


# -- memory ----------------------------------------------------------------------------------------


def test_memory_is_used_again_when_a_snapshot_is_gone_and_not_before():
    staging, weight = Staging(), torch.zeros(8)
    first, second = take(staging, weight), take(staging, weight)
    places = {first.kept[0].data_ptr(), second.kept[0].data_ptr()}
    assert len(places) == 2
    held = staging.cost.nbytes
    assert held == 2 * weight.nbytes
    del first
    third = take(staging, weight)
    assert {second.kept[0].data_ptr(), third.kept[0].data_ptr()} == places
    assert staging.cost.nbytes == held
    assert staging.cost.count == 3


def test_memory_that_the_state_has_no_use_for_is_let_go():
    staging = Staging()
    del_me = take(staging, torch.zeros(1000))
    del del_me
    kept = take(staging, torch.zeros(8))
    assert staging.cost.nbytes == kept.kept[0].nbytes


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["take", "drop", "step", "wait"]), max_size=30), st.integers(1, 3))
def test_snapshots_never_change_whatever_comes_and_goes(actions, most):
    """A loop that holds before each step: each snapshot keeps its moment, and memory is bounded."""
    staging, weights = late(), [torch.zeros(3), torch.zeros(2, 2)]
    snapshots, expected = [], []
    for number, action in enumerate(actions):
        if action == "take":
            if len(snapshots) == most:
                snapshots.pop(0)
                expected.pop(0)
            snapshots.append(take(staging, *weights))
            expected.append([weight.clone() for weight in weights])
        elif action == "drop" and snapshots:
            snapshots.pop()
            expected.pop()
        elif action == "step":
            assert all(snapshot.pending.hold() for snapshot in snapshots)
            for weight in weights:
                weight.add_(number + 1)
        elif action == "wait":
            for snapshot in snapshots:
                snapshot.pending.wait()
    for snapshot, then in zip(snapshots, expected, strict=True):
        snapshot.pending.wait()
        assert all(map(torch.equal, snapshot.kept, then))
    assert staging.cost.nbytes <= (most + 1) * sum(weight.nbytes for weight in weights)


def test_a_run_holds_memory_for_the_snapshots_it_keeps_and_one_more(run_dir):
    run, rollback = build(random=True), Rollback(every=2, confirm_after=2, keep=2)
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        held = [
            sentinel._watch.run.staging.cost.nbytes for _ in train_watched(run, sentinel, make_batches(40))
        ]
        size = sentinel._watch.run.known_good.nbytes()
    gc.collect()
    assert held[-1] == held[12], "it still grows"
    assert (
        held[-1] <= 4.2 * size
    )  # two good ones, one on probation, one being taken; the first had no moments


# -- a whole run -----------------------------------------------------------------------------------


FULL = {"random": True, "scheduler": "cosine", "ema": True, "max_norm": 1.0}


def go_back_at(sentinel, step):
    left = {step}

    def look(event):
        asked = event.step in left
        left.discard(event.step)
        return Finding(kind=Kind.SPIKE, value=torch.tensor(asked), action=Action.ROLLBACK)

    sentinel.on(BeforeClip, look)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-fused"])
def test_a_rollback_to_copies_that_were_made_late_gives_back_every_bit(optimizer, run_dir, small):
    settings_ = {**FULL, "optimizer": optimizer}
    batches = make_batches(14)
    reference = build(**settings_)
    train_by_hand(reference, [*batches[:6], *batches[10:]])
    expected = fingerprint({**reference.state(), "generators": generators()})
    run = build(**settings_)
    with run.sentinel([NanCallback(), Rollback(every=3, confirm_after=2)], run_dir=run_dir) as sentinel:
        sentinel._watch.run.staging = late()
        go_back_at(sentinel, 9)
        finish(train_watched(run, sentinel, batches))
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.ROLLED_BACK]
    assert fingerprint({**run.state(), "generators": generators()}) == expected


def test_a_program_that_writes_between_the_steps_costs_one_snapshot_and_then_works(run_dir, caplog, small):
    """A weight clamp after the step, as in a WGAN: the copy under way is torn, and must not be used."""
    run, rollback = build(optimizer="sgd"), Rollback(every=3, confirm_after=1)
    states = {}
    with run.sentinel([NanCallback(), rollback], run_dir=run_dir) as sentinel:
        sentinel._watch.run.staging = late()
        go_back_at(sentinel, 11)
        good = []
        for _ in train_watched(run, sentinel, make_batches(12)):
            if sentinel.last_action is Action.ROLLBACK:
                break
            states[sentinel.step_count] = fingerprint(run.state())
            good.append(rollback.known_good_steps)
            with torch.no_grad():
                run.model.head.weight.clamp_(-0.2, 0.2)
        assert sentinel.step_count == 9
        assert fingerprint(run.state()) == states[9]
    assert 3 not in good[-1], "the torn snapshot was called good"
    assert {6, 9} <= set(good[-1])
    assert caplog.text.count("something writes to the weights") == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_copies_are_of_one_moment():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    host = TorchHost(model, optimizer)
    buffers, staging = BufferShadow(host.modules()), Staging()
    for _ in range(5):
        expected = fingerprint([p.detach().cpu() for p in model.parameters()])
        statistics = fingerprint([b.cpu() for b in model.buffers()])
        snapshot = capture(host, buffers, step=0, data={}, staging=staging)
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        assert snapshot.pending.hold()
        optimizer.step()
        optimizer.zero_grad()
        snapshot.settle()
        assert fingerprint(list(snapshot.parameters.values())) == expected
        assert fingerprint(list(snapshot.buffers.values())) == statistics
        assert all(value.is_pinned() for value in snapshot.parameters.values())
