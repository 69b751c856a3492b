"""Snapshots on a device with streams: copied beside the computation, in order, and not one wait too many."""

from functools import partial

import pytest
import simulator
import torch
from on_npu import run_on_npu
from torch import nn

from gradsentinel import Action, BeforeClip, Finding, Kind, NanCallback, Rollback, Sentinel

STEPS = 24


def make():
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).to("npu")
    return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def batches(count):
    torch.manual_seed(1)
    return list(torch.randn(count, 5, 6).to("npu"))


def state(model, optimizer):
    moments = [value for entries in optimizer.state.values() for value in entries.values()]
    return [tensor.detach().cpu() for tensor in (*model.state_dict().values(), *moments)]


def train(folder, every, guard="host", *, small=False, back_at=None):
    """A healthy run that counts; with `back_at` it is sent back once."""
    if small:  # nothing is so small that it is copied on the device first
        import gradsentinel.state.snapshot  # noqa: PLC0415 - patched in this child only
        import gradsentinel.state.staging  # noqa: PLC0415 - likewise

        gradsentinel.state.snapshot._SMALL = gradsentinel.state.staging._SMALL = -1
    model, optimizer = make()
    rollback = Rollback(every=every, confirm_after=2)
    sentinel = Sentinel(
        model, optimizer, callbacks=[NanCallback(state_every=0), rollback], run_dir=folder, guard=guard
    )
    run = sentinel._watch.run
    asked = iter([number == back_at for number in range(STEPS + 10)])
    if back_at is not None:
        sentinel.on(
            BeforeClip,
            lambda event: Finding(
                kind=Kind.SPIKE, value=torch.tensor(next(asked), device="npu"), action=Action.ROLLBACK
            ),
        )
    states, restored = {}, None
    loader = iter(sentinel.steps(batches(STEPS)))

    def step():
        sentinel.backward(model(next(loader)).square().mean())
        sentinel.step(1.0)

    for _ in range(8):
        step()
        states[sentinel.step_count] = state(model, optimizer)
    with simulator.counted() as found:
        for _ in range(STEPS - 8):
            if back_at is not None:
                before = sentinel.step_count
            step()
            if back_at is not None:
                if sentinel.step_count < before:
                    restored = (sentinel.step_count, state(model, optimizer))
                else:
                    states[sentinel.step_count] = state(model, optimizer)
    cost = run.staging.cost
    pinned = all(value.is_pinned() for value in run.known_good.parameters.values())
    sentinel.close()
    return found.__dict__, state(model, optimizer), states, restored, (cost.count, pinned)


@pytest.mark.parametrize("small", [False, True], ids=["as it is", "all beside the computation"])
@pytest.mark.parametrize("guard", ["host", "device"])
def test_a_healthy_run_is_ordered_untouched_and_waits_only_to_settle(tmp_path, guard, small):
    plain, expected, *_ = run_on_npu(train, tmp_path / "plain", 1000, guard)
    found, weights, _, _, (count, pinned) = run_on_npu(
        partial(train, small=small), tmp_path / "kept", 4, guard
    )
    assert all(map(torch.equal, weights, expected))
    assert found["hazards"] == plain["hazards"] == []
    assert (count, pinned) == (1 + STEPS // 4, True)
    snapshots = (STEPS - 8) // 4
    extra = {name: n - plain["syncs"].get(name, 0) for name, n in found["syncs"].items()}
    # To settle that the state is finite; the device guard first reads what is under way. The ruling has a
    # layout of its own, and small tables for it.
    assert extra.pop("blocking_d2h") == snapshots * (1 if guard == "host" else 2)
    assert extra.pop("blocking_h2d", 0) <= 2 * snapshots
    assert not any(extra.values()), extra


def test_a_rollback_gives_back_every_bit_of_the_device(tmp_path):
    found, _, states, (step, restored), _ = run_on_npu(partial(train, small=True, back_at=18), tmp_path, 4)
    assert step == 16
    assert all(map(torch.equal, restored, states[16]))
    assert found["hazards"] == []


def without_hold(folder):
    from gradsentinel.run import Run  # noqa: PLC0415 - patched in this child only

    Run.hold = lambda self: self.in_flight.clear()  # type: ignore[method-assign]
    return train(folder, 4, small=True)[0]


def test_the_simulation_would_have_seen_an_optimizer_that_does_not_wait(tmp_path):
    assert run_on_npu(without_hold, tmp_path)["hazards"]
