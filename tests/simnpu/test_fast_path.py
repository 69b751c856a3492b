"""The hot path in native operators only: waits, launches, order and memory, on a device that counts."""

import os
from math import ceil

import pytest
import simulator
import torch
from on_npu import run_on_npu
from torch import nn

from gradsentinel import HeadroomCallback, MagnitudeCallback, NanCallback, Sentinel, SpikeCallback
from gradsentinel.devices import device_of
from gradsentinel.devices.npu import ONE_LAUNCH
from gradsentinel.diagnosis.environment import environment
from gradsentinel.faults.damage import bit_of
from gradsentinel.measures.histogram import count_exponents
from gradsentinel.measures.mailbox import Mailbox
from gradsentinel.ranks.replicas import checksum

WARM_UP = 12
"""The state is checked after each of the first 10 steps."""
STEPS = 20
LAYERS = 20
TENSORS = 2 * LAYERS
CHUNKS = ceil(TENSORS / 24)
"""So many launches a list of the gradients takes."""
MULTIPLY = "aten::mul.out"
SCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS))).to("npu", dtype)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def train(guard, callbacks, folder, max_norm, dtype=torch.float32, *, lag=2, warm_up=WARM_UP):
    """What healthy steps ask of the device after the first few; without a guard nobody watches."""
    model, optimizer = make(dtype)
    torch.manual_seed(1)
    data = list(torch.randn(warm_up + STEPS, 4, 8).to("npu", dtype))
    sentinel = None
    if guard:
        place = folder / str(len(list(folder.iterdir())))
        sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=place, guard=guard, lag=lag)
        loader = iter(sentinel.steps(data))

    def step():
        if sentinel is not None:
            sentinel.backward(model(next(loader)).float().square().mean())
            sentinel.step(max_norm)
            return
        model(data.pop(0)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(warm_up):
        step()
    held = torch.npu.memory_allocated()
    with simulator.counted() as found:
        for _ in range(STEPS):
            step()
    grown = torch.npu.memory_allocated() - held
    weights = [value.cpu() for value in model.state_dict().values()]
    flights = spare = 0
    if sentinel is not None:
        if guard == "device":
            flights, spare = len(sentinel._guard._flights), sentinel._guard._mailbox.spare
        sentinel.close()
        assert sentinel.incidents == ()
    return found.__dict__, weights, grown, flights, spare


def detectors(count):
    return [
        NanCallback(),
        *(MagnitudeCallback(max_global_norm=1e6 + number) for number in range(count)),
        *(MagnitudeCallback(max_parameter_norm=1e6 + number) for number in range(count)),
    ]


def by_guard(folder, guard, dtype):
    plain = train(None, None, folder, 1e-3, dtype)
    clipped = train(guard, [NanCallback()], folder, 1e-3, dtype)
    unclipped = train(guard, [NanCallback()], folder, 1e3, dtype)
    untouched = train(None, None, folder, 1e3, dtype)
    return plain, clipped, untouched, unclipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("guard", ["host", "device"])
def test_clipping_is_that_of_torch_in_few_launches(tmp_path, guard, dtype):
    plain, clipped, untouched, unclipped = run_on_npu(by_guard, tmp_path, guard, dtype)
    for one, other in ((plain, clipped), (untouched, unclipped)):
        assert all(map(torch.equal, one[1], other[1]))
        assert other[0]["fallbacks"] == one[0]["fallbacks"] == {}
        assert other[0]["hazards"] == one[0]["hazards"] == []
    # torch multiplies by a tensor, for which there is no kernel on lists
    assert plain[0]["launches"][MULTIPLY] >= TENSORS * STEPS
    found = clipped[0]["launches"]
    rest = plain[0]["launches"][MULTIPLY] - TENSORS * STEPS  # of the model's own
    assert found.get(MULTIPLY, 0) <= rest + STEPS
    if guard == "host":  # the host has read the factor, and knows when it is 1
        assert found["aten::_foreach_mul_.Scalar"] == CHUNKS * STEPS
        assert SCALE not in found
        assert (
            not {"aten::_foreach_mul_.Scalar", SCALE, "aten::mul_.Tensor"} & unclipped[0]["launches"].keys()
        )
        assert clipped[0]["syncs"] == {"blocking_d2h": STEPS}
    else:
        assert found[SCALE] == unclipped[0]["launches"][SCALE] == STEPS
        assert clipped[0]["syncs"] == unclipped[0]["syncs"] == {}
    assert clipped[0]["launches"]["aten::_foreach_norm.Scalar"] == CHUNKS * STEPS


def counts(folder):
    found = {}
    for guard in ("host", "device"):
        one, many = (train(guard, detectors(count), folder, 1e-3)[0] for count in (1, 12))
        rich = [NanCallback(), SpikeCallback(), HeadroomCallback(every=5)]
        found[guard] = one, many, train(guard, rich, folder, 1e-3)[0]
    return found


def test_launches_do_not_depend_on_how_many_look_and_nobody_waits(tmp_path):
    for guard, (one, many, rich) in run_on_npu(counts, tmp_path).items():
        assert one["launches"] == many["launches"]
        for found in (one, many, rich):
            assert found["hazards"] == []
            assert found["fallbacks"] == {}
            assert found["syncs"] == ({"blocking_d2h": STEPS} if guard == "host" else {})


def bounded(folder):
    kept = {lag: train("device", [NanCallback()], folder, 1e-3, lag=lag, warm_up=100)[2:] for lag in (1, 5)}
    os.environ["GRADSENTINEL_BUFFERS"] = "pinned=4KiB"  # of this process alone
    mailbox = Mailbox(torch.device("npu", 0))
    for size in range(1, 200):
        letter = mailbox.post(torch.zeros(size, device="npu"))
        letter.read()
        mailbox.take_back(letter)
    return kept, mailbox.spare


def test_what_is_kept_of_steps_is_bounded_and_the_bound_is_a_setting(tmp_path):
    kept, spare = run_on_npu(bounded, tmp_path)
    for lag, (grown, flights, sheets) in kept.items():
        assert grown == 0
        assert flights == lag
        assert 0 < sheets < 1000
    assert 0 < spare <= 4096


def lagging(folder):
    found = {}
    for lag in (1, 4):
        model, optimizer = make()
        torch.manual_seed(1)
        data = list(torch.randn(10, 4, 8).to("npu"))
        data[3][0, 0] = float("nan")
        with Sentinel(model, optimizer, run_dir=folder / str(lag), guard="device", lag=lag) as sentinel:
            heard = None
            for number, batch in enumerate(sentinel.steps(data)):
                sentinel.backward(model(batch).square().mean())
                sentinel.step(1.0)
                heard = number if sentinel.incidents and heard is None else heard
        found[lag] = (
            heard,
            [i.step for i in sentinel.incidents],
            [v.cpu() for v in model.state_dict().values()],
        )
    return found


def test_an_incident_is_handled_as_late_as_was_said(tmp_path):
    found = run_on_npu(lagging, tmp_path)
    assert [(heard, steps) for heard, steps, _ in found.values()] == [(4, [3]), (7, [3])]
    assert all(map(torch.equal, found[1][2], found[4][2]))


def test_the_operators_that_count_have_kernels_of_their_own():
    native = set(simulator.native_ops())
    assert native >= ONE_LAUNCH
    assert not {"aten::_foreach_mul_.Tensor", "aten::_foreach_max", "aten::hash_tensor"} & native


def formats():
    torch.manual_seed(0)
    plain = torch.randn(6, 4, device="npu")
    blocked = __import__("torch_npu").npu_format_cast(plain, 29)
    with simulator.counted() as careless:
        blocked.view(torch.int32)
    with simulator.counted() as found:
        sums = int(checksum(plain)), int(checksum(blocked))
        counted = torch.equal(count_exponents(plain.view(-1)).cpu(), count_exponents(blocked.view(-1)).cpu())
    try:
        bit_of(blocked, (0, 0), 3, None)
    except ValueError as error:
        refused = str(error)
    return len(careless.hazards), found.hazards, sums, counted, refused


def test_bits_are_looked_at_in_a_plain_format_only():
    careless, hazards, (one, other), counted, refused = run_on_npu(formats)
    assert careless == 1
    assert hazards == []
    assert one == other
    assert counted
    assert "format" in refused


def described():
    torch.npu.matmul.allow_hf32 = True
    return environment()["npu"], device_of("npu:0").name, type(device_of("npu:1").health_source()).__name__


def test_the_settings_of_the_device_are_in_the_environment_of_a_bundle():
    found, name, health = run_on_npu(described)
    assert (found["matmul_allow_hf32"], found["conv_allow_hf32"], found["inf_nan_mode"]) == (True, True, True)
    assert found["devices"] == [name] * 2
    assert (name, health) == ("SimAscend910B", "NpuSmi")
