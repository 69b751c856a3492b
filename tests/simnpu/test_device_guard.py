"""The device guard on a device that counts: no wait of the host, no unordered work, nothing bad applied."""

from functools import partial

import pytest
import simulator
import torch
from on_npu import run_on_npu
from torch import nn

from gradsentinel import MagnitudeCallback, NanCallback, Sentinel

NAN = float("nan")
WARM_UP = 5
STEPS = 100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, batch):
        return self.last(torch.relu(self.norm(self.first(batch))))


def make(kind="AdamW"):
    torch.manual_seed(0)
    model = Net().to("npu")
    if kind == "SGD":
        return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, fused=True)
    return model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


def batches(count, bad=None):
    torch.manual_seed(1)
    drawn = torch.randn(count, 5, 6)
    if bad is not None:
        drawn[bad, 0, 0] = NAN
    return list(drawn.to("npu"))


def count(watching, folder, scaled):
    """What 100 healthy steps ask of the device, after the first few."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("npu", init_scale=1024.0) if scaled else None
    data = batches(WARM_UP + STEPS)
    if watching:
        callbacks = [NanCallback(), MagnitudeCallback(max_global_norm=1e6, max_parameter_norm=1e6)]
        sentinel = Sentinel(
            model, optimizer, callbacks=callbacks, run_dir=folder, scaler=scaler, guard="device"
        )
        loader = iter(sentinel.steps(data))

    def step():
        if watching:
            sentinel.backward(model(next(loader)).square().mean())
            sentinel.step(1.0)
            return
        loss = model(data.pop(0)).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    with simulator.counted() as found:
        for _ in range(STEPS):
            step()
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    if watching:
        sentinel.close()
        assert sentinel.incidents == ()
    return found.__dict__, weights


@pytest.mark.parametrize("scaled", [False, True])
def test_a_healthy_run_makes_the_host_wait_for_nothing(tmp_path, scaled):
    plain, expected = run_on_npu(count, False, tmp_path / "plain", scaled)
    found, weights = run_on_npu(count, True, tmp_path / "watched", scaled)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert found["syncs"] == plain["syncs"]
    assert found["hazards"] == plain["hazards"] == []
    assert found["fallbacks"] == plain["fallbacks"]
    assert sum(found["launches"].values()) > sum(plain["launches"].values())


def train(guard, folder, bad, kind):
    model, optimizer = make(kind)
    sentinel = Sentinel(model, optimizer, run_dir=folder / f"{guard}-{bad}", guard=guard)
    simulator.reset()
    with sentinel:
        for batch in sentinel.steps(batches(10, bad)):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(1.0)
    told = [(i.step, str(i.kind), str(i.outcome)) for i in sentinel.incidents]
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    kept = optimizer.state_dict()["state"].values()
    moments = [{key: torch.as_tensor(value).cpu() for key, value in state.items()} for state in kept]
    return told, state, moments, simulator.counts().hazards


def everywhere(folder, kind):
    return {bad: [train(guard, folder, bad, kind) for guard in ("host", "device")] for bad in range(10)}


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_fault_at_any_step_never_reaches_the_state(tmp_path, kind):
    for bad, (host, device) in run_on_npu(everywhere, tmp_path, kind).items():
        assert device[0] == host[0] == [(bad, "nonfinite_input", "skipped")]
        assert all(torch.equal(device[1][name], value) for name, value in host[1].items())
        assert all(torch.isfinite(value).all() for value in device[1].values())
        for here, there in zip(host[2], device[2], strict=True):
            assert here.keys() == there.keys()
            assert all(torch.equal(there[key], value) for key, value in here.items())
        assert device[3] == []


def after_an_incident(folder, *, named):
    model, optimizer = make()
    data = batches(40, bad=8)
    if named:
        data = [(batch, f"batch {number}") for number, batch in enumerate(data)]
    drawn, waits = [], {}
    sentinel = Sentinel(model, optimizer, run_dir=folder, guard="device")
    with sentinel:
        for _epoch in range(2):
            for step, batch in enumerate(sentinel.steps(data)):
                drawn.append(step)
                waits[len(drawn)] = sum(simulator.counts().syncs.values())
                values = batch[0] if isinstance(batch, tuple) else batch
                sentinel.backward(model(values).square().mean())
                sentinel.step(1.0)
    told = [(i.step, str(i.kind), str(i.outcome)) for i in sentinel.incidents]
    return told, len(drawn), [waits[40] - waits[15], waits[79] - waits[55]]


@pytest.mark.parametrize("named", [False, True])
def test_after_an_incident_the_host_waits_for_nothing_again(tmp_path, named):
    told, drawn, waits = run_on_npu(partial(after_an_incident, named=named), tmp_path)
    assert told == [(8, "nonfinite_input", "skipped")]
    assert drawn == 79  # the bad batch is left out at its place in the second epoch
    assert waits == [0, 0]
