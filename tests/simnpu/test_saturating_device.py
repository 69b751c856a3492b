"""A device that saturates: no NaN and no Inf is ever seen there, and an overflow is caught all the same."""

import logging

import pytest
import simulator
import torch
from on_npu import run_on_npu, run_ranks_on_npu
from torch import nn

from gradsentinel import NanCallback, Retry, Sentinel
from gradsentinel.devices import device_of
from gradsentinel.store import RunDirectory

STEPS = 10
BAD = 6


class Net(nn.Module):
    """float32 weights under autocast, so that what overflows does so in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, batch):
        with torch.autocast("npu", torch.float16):
            return self.last(torch.relu(self.first(batch))).float()


def batches(bad=BAD):
    """Activations of the bad batch fit into float16, and its products do not."""
    torch.manual_seed(1)
    drawn = torch.randn(STEPS, 5, 6)
    if bad is not None:
        drawn[bad] *= 3e5
    return list(drawn.to("npu"))


def make(kind="AdamW"):
    torch.manual_seed(0)
    model = Net().to("npu")
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def told(sentinel):
    return [(i.step, str(i.kind), str(i.outcome), i.message) for i in sentinel.incidents]


def state(model, optimizer):
    kept = [value for entries in optimizer.state.values() for value in entries.values()]
    return [tensor.detach().cpu().clone() for tensor in (*model.state_dict().values(), *kept)]


def what_the_device_does():
    device = device_of("npu:0")
    half = torch.full((3,), 6e4, device="npu", dtype=torch.float16)
    assert device.saturates
    before = bool(device.overflow_flag())
    sums = (half + half).tolist()
    after = bool(device.overflow_flag())
    device.clear_overflow_flag()
    nothing = (torch.zeros(2, device="npu") / 0.0).tolist()
    flagged, _ = bool(device.overflow_flag()), device.clear_overflow_flag()
    masked = torch.zeros(2, device="npu").masked_fill(torch.ones(2, device="npu").bool(), -float("inf"))
    return before, sums, after, nothing, flagged, masked.tolist(), bool(device.overflow_flag())


def test_the_simulation_saturates():
    before, sums, after, nothing, flagged, masked, masked_flag = run_on_npu(
        what_the_device_does, saturating=True
    )
    largest = torch.finfo(torch.float32).max
    assert (before, sums, after) == (False, [65504.0] * 3, True)
    assert (nothing, flagged) == ([0.0, 0.0], True)
    assert (masked, masked_flag) == ([-largest] * 2, False)  # a mask that was asked for is no overflow


def in_inf_nan_mode():
    device = device_of("npu:0")
    return device.saturates, device.overflow_flag(), device.clear_overflow_flag()


def test_elsewhere_there_is_no_flag_and_nobody_asks_for_it():
    assert run_on_npu(in_inf_nan_mode) == (False, None, None)


def train(folder, guard, callbacks, *, scaled=False, bad=BAD, forward=None):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**8, growth_interval=1000) if scaled else None
    sentinel = Sentinel(
        model,
        optimizer,
        callbacks=None if callbacks is None else callbacks(),
        run_dir=folder,
        guard=guard,
        scaler=scaler,
        forward=forward,
    )
    states = []
    with sentinel:
        for batch in sentinel.steps(batches(bad)):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(1.0)
            states.append(state(model, optimizer))
    scale = None if scaler is None else scaler.get_scale()
    return told(sentinel), states, scale, simulator.counts().hazards


@pytest.mark.parametrize("guard", ["host", "device"])
def test_an_overflow_is_caught_without_a_loss_scale(tmp_path, guard):
    """NanCallback alone sees nothing: every value is finite. The flag and the counts take its place."""
    incidents, states, _, hazards = run_on_npu(train, tmp_path, guard, None, saturating=True)
    assert [incident[:3] for incident in incidents] == [(BAD, "saturation", "skipped")]
    assert "overflow" in incidents[0][3]
    assert all(torch.equal(*pair) for pair in zip(states[BAD - 1], states[BAD], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(states[BAD], states[BAD + 1], strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in states[-1])
    assert hazards == []


def unwatched():
    model, optimizer = make()
    seen = []
    for batch in batches():
        model(batch).square().mean().backward()
        seen.append(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_no_look_for_nan_would_have_seen_it():
    assert all(run_on_npu(unwatched, saturating=True))
    assert not all(run_on_npu(unwatched))


@pytest.mark.parametrize("guard", ["host", "device"])
def test_a_healthy_run_is_left_alone(tmp_path, guard):
    incidents, states, hazards = run_on_npu(healthy, tmp_path, guard, saturating=True)
    assert incidents == []
    assert all(map(torch.equal, *states))
    assert hazards == []


def healthy(folder, guard):
    watched = train(folder, guard, None, bad=None)
    model, optimizer = make()
    for batch in batches(None):
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return watched[0], (watched[1][-1], state(model, optimizer)), watched[3]


@pytest.mark.parametrize("guard", ["host", "device"])
def test_what_the_loss_scaler_sees_by_the_flag_is_its_own_business(tmp_path, guard):
    incidents, states, scale, hazards = run_on_npu(scaled_run, tmp_path, guard, saturating=True)
    assert incidents == []
    assert scale == 2.0**7
    assert all(torch.equal(*pair) for pair in zip(states[BAD - 1], states[BAD], strict=True))
    assert hazards == []


def scaled_run(folder, guard):
    return train(folder, guard, None, scaled=True)


def retried(folder):
    """In step 2 a value overflows once; in the bad step the data overflow, however often it is computed."""
    model, optimizer = make()

    def forward(model, batch):
        return model(batch).square().mean()

    states = []
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), Retry()], run_dir=folder, forward=forward
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches())):
            loss = forward(model, batch)
            if number == 2:
                loss = loss + (model.first.weight * 1e38 * 1e5).sum()
            sentinel.backward(loss)
            sentinel.step(1.0)
            states.append(state(model, optimizer))
    return told(sentinel), states


def test_an_overflow_that_comes_back_is_not_taken_for_a_transient_one(tmp_path):
    incidents, states = run_on_npu(retried, tmp_path, saturating=True)
    assert [one[:3] for one in incidents] == [(2, "saturation", "retried"), (BAD, "saturation", "skipped")]
    _, undisturbed, _, _ = run_on_npu(train, tmp_path / "undisturbed", "host", None, saturating=True)
    assert all(map(torch.equal, states[-1], undisturbed[-1]))


def said(folder):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("gradsentinel").addHandler(handler)
    train(folder, "host", lambda: [NanCallback()], bad=None)
    return records, next(RunDirectory(folder).read_events())


def test_that_nan_is_not_seen_is_said_at_the_start_and_on_disk(tmp_path):
    records, start = run_on_npu(said, tmp_path, saturating=True)
    (text,) = [record for record in records if "saturates" in record]
    assert "proves anything" in text
    assert start["event"] == "run_start"
    assert start["saturates"] is True
    records, start = run_on_npu(said, tmp_path / "other")
    assert not [record for record in records if "saturates" in record]
    assert "saturates" not in start


def together(rank, folder):
    torch.npu.set_device(rank)
    torch.manual_seed(0)
    model = Net().to(f"npu:{rank}")
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3, fused=True)
    with Sentinel(wrapped, optimizer, run_dir=folder) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches(None))):
            data = batch.to(f"npu:{rank}")
            if number == BAD and rank == 1:
                data = data * 3e5
            sentinel.backward(wrapped(data).square().mean())
            sentinel.step(1.0)
    weights = [value.cpu() for value in model.state_dict().values()]
    return told(sentinel), [[rank.rank for rank in one.ranks] for one in sentinel.incidents], weights


@pytest.mark.multiprocess
def test_the_flag_of_one_rank_drops_the_step_on_all(tmp_path):
    (told0, ranks, weights), (told1, _, others) = run_ranks_on_npu(
        together, 2, tmp_path, tmp_path / "run", saturating=True
    )
    assert told0 == told1
    assert [one[:3] for one in told0] == [(BAD, "saturation", "skipped")]
    assert all(map(torch.equal, weights, others))
    assert ranks == [[1]]
