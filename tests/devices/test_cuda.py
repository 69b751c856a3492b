"""A CUDA device, where there is one: the runs that the simulated NPU passes, and no wait that torch sees."""

from contextlib import contextmanager

import pytest
import torch

import device_runs

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Said once by torch when the check for waits is switched on.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
DEVICE = "cuda:0"


@contextmanager
def no_wait():
    """Any call that makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_check_for_waits_sees_one():
    value = torch.ones(1, device=DEVICE)
    with no_wait(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.parametrize("scaled", [False, True])
def test_under_the_device_guard_nobody_waits_and_nothing_changes(run_dir, scaled):
    expected = device_runs.by_hand(DEVICE)
    weights, told = device_runs.watched(DEVICE, run_dir, "device", quiet=no_wait, scaled=scaled)
    assert told == []
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_under_the_host_guard_nothing_changes(run_dir, max_norm):
    expected = device_runs.by_hand(DEVICE, max_norm)
    weights, told = device_runs.watched(DEVICE, run_dir, "host", max_norm=max_norm)
    assert told == []
    assert all(map(torch.equal, weights, expected))


def test_a_bad_update_lands_under_neither_guard(run_dir):
    told, host = device_runs.spoilt(DEVICE, run_dir / "host", "host")
    late, device = device_runs.spoilt(DEVICE, run_dir / "device", "device")
    assert told == late == [(7, "nonfinite_input", "skipped")]
    assert all(map(torch.equal, host, device))
    assert all(bool(tensor.isfinite().all()) for tensor in host)


def test_a_rollback_gives_back_every_bit(run_dir):
    restored, seen, pinned = device_runs.sent_back(DEVICE, run_dir)
    assert all(map(torch.equal, restored, seen))
    assert all(pinned)


def test_letters_arrive_in_memory_that_is_used_again():
    found, spare = device_runs.letters(DEVICE)
    assert found == [[n, n + 1.0, n + 2.0] for n in range(5)]
    assert spare == 12


def test_the_small_things():
    found = device_runs.pieces(DEVICE)
    count = torch.cuda.device_count()
    assert found == {
        "generators": [f"cuda:{index}" for index in range(count)],
        "missing": (),
        "same draws": True,
        "same checksum": True,
        "same product": True,
        "sent": ("cuda", [0, 1, 2, 3]),
        "saturates": False,
        "flag": None,
        "named": True,
    }
