"""The runs that any kind of device has to pass, on the simulated NPU; tests/devices has them for CUDA."""

from contextlib import contextmanager
from functools import partial

import pytest
import simulator
import torch
from on_npu import run_on_npu

import device_runs

DEVICE = "npu:0"


def runs(folder):
    counted = {}

    @contextmanager
    def quiet(name):
        simulator.reset()
        yield
        counted[name] = simulator.counts()

    expected = device_runs.by_hand(DEVICE), device_runs.by_hand(DEVICE, 1e3)
    ours = {
        name: device_runs.watched(
            DEVICE, folder / name, guard, quiet=partial(quiet, name), scaled=scaled, max_norm=max_norm
        )
        for name, guard, scaled, max_norm in (
            ("device", "device", False, 0.1),
            ("scaled", "device", True, 0.1),
            ("host", "host", False, 0.1),
            ("unclipped", "host", False, 1e3),
        )
    }
    alike = {
        name: (told, all(map(torch.equal, weights, expected[name == "unclipped"])))
        for name, (weights, told) in ours.items()
    }
    return alike, {name: (found.syncs, found.hazards, found.fallbacks) for name, found in counted.items()}


def test_healthy_runs_are_untouched_and_wait_only_to_read_the_ruling(tmp_path):
    alike, counted = run_on_npu(runs, tmp_path)
    assert alike == dict.fromkeys(("device", "scaled", "host", "unclipped"), ([], True))
    for name, (syncs, hazards, fallbacks) in counted.items():
        assert syncs == ({"blocking_d2h": device_runs.STEPS} if name in {"host", "unclipped"} else {})
        assert (hazards, fallbacks) == ([], {})


def faults(folder):
    simulator.reset()
    told = [device_runs.spoilt(DEVICE, folder / guard, guard) for guard in ("host", "device")]
    back = device_runs.sent_back(DEVICE, folder / "back")
    return told, back, device_runs.letters(DEVICE), device_runs.pieces(DEVICE), simulator.counts().hazards


def test_bad_updates_land_nowhere_and_rollbacks_give_back_every_bit(tmp_path):
    ((told, host), (late, device)), (restored, seen, pinned), letters, pieces, hazards = run_on_npu(
        faults, tmp_path
    )
    assert told == late == [(7, "nonfinite_input", "skipped")]
    assert all(map(torch.equal, host, device))
    assert all(bool(tensor.isfinite().all()) for tensor in host)
    assert all(map(torch.equal, restored, seen))
    assert pinned
    assert all(pinned)
    assert letters == ([[n, n + 1.0, n + 2.0] for n in range(5)], 12)
    assert pieces == {
        "generators": ["npu:0", "npu:1"],
        "missing": (),
        "same draws": True,
        "same checksum": True,
        "same product": True,
        "sent": ("npu", [0, 1, 2, 3]),
        "saturates": False,
        "flag": None,
        "named": True,
    }
    assert hazards == []


def marked(folder):
    device_runs.watched(DEVICE, folder, "device")
    return simulator.ranges


@pytest.mark.parametrize("on", [False, True])
def test_marks_are_mstx_ranges_and_only_where_asked_for(tmp_path, monkeypatch, on):
    monkeypatch.delenv("GRADSENTINEL_MARKS", raising=False)
    ranges = run_on_npu(partial(with_marks, on=on), tmp_path)
    if not on:
        assert ranges == []
        return
    assert {
        "+gradsentinel/before_clip",
        "+gradsentinel/settle",
        "+gradsentinel/SpikeCallback.on_after_step",
    } <= {*ranges}
    depth = 0
    for name in ranges:
        depth += 1 if name[0] == "+" else -1
        assert depth >= 0
    assert depth == 0


def with_marks(folder, *, on):
    import os  # noqa: PLC0415 - of the child

    os.environ["GRADSENTINEL_MARKS"] = str(int(on))
    return marked(folder)
