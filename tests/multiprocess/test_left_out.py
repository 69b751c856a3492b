"""A batch that is bad on one rank is left out on all of them, or on none: they stay in step."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from gradsentinel import MagnitudeCallback, NanCallback, Sentinel, SkipBatches
from gradsentinel.data.skipped import FILE

pytestmark = pytest.mark.multiprocess

BAD = 13  # the third record of rank 1, which draws 1, 3, 5, ...
SIZE = 32


def rows(value: float) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    data = [{"x": torch.randn(4, generator=generator), "id": number} for number in range(SIZE)]
    data[BAD]["x"][0] = value
    return data


def make(folder: Path) -> tuple[Sentinel, nn.Module]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]
    return Sentinel(model, optimizer, callbacks=watch, run_dir=folder, timeout=20.0), model


def epoch(sentinel: Sentinel, model: nn.Module, loader: Any) -> list[list[int]]:
    seen = []
    for batch in sentinel.steps(loader):
        seen.append(batch["id"].tolist())
        sentinel.backward(model(batch["x"]).square().mean())
        sentinel.step()
    return seen


def train(rank: int, folder: Path, value: float, *, shuffle: bool, through_sampler: bool) -> dict[str, Any]:
    data = rows(value)
    order = DistributedSampler(data, shuffle=shuffle, seed=3)  # type: ignore[arg-type]
    sampler: Any = BatchSampler(order, 4, drop_last=True)
    loader: Any = DataLoader(data, batch_sampler=SkipBatches(sampler) if through_sampler else sampler)  # type: ignore[arg-type]
    sentinel, model = make(folder)
    epochs, positions = [], []
    with sentinel:
        for number in range(3):
            order.set_epoch(number)
            epochs.append(epoch(sentinel, model, loader))
            positions.append(sentinel.data_position["batches"])
    again, model = make(folder)  # the list of rank 0's directory is everybody's
    with again:
        order.set_epoch(0)
        restarted = epoch(again, model, loader)
    return {
        "epochs": epochs,
        "positions": positions,
        "steps": sentinel.step_count,
        "incidents": [i.step for i in sentinel.incidents],
        "restarted": restarted,
        "weights": [p.detach() for p in model.parameters()],
    }


def test_bad_data_of_one_rank_takes_the_same_position_out_on_all(tmp_path):
    nan = float("nan")
    run = tmp_path / "run"
    ended = run_ranks(lambda rank: train(rank, run, nan, shuffle=False, through_sampler=False), 2, tmp_path)
    for one in ended:
        assert one["incidents"] == [1]
        assert one["epochs"][1] == one["epochs"][2] == one["restarted"]
        assert one["epochs"][1] == [ids for number, ids in enumerate(one["epochs"][0]) if number != 1]
        assert one["positions"] == [4, 8, 12]
        assert one["steps"] == 4 + 3 + 3
    assert torch.equal(ended[0]["weights"][0], ended[1]["weights"][0])
    (entry,) = json.loads((run / FILE).read_text())["batches"]
    assert [part["guilty"] for part in entry["ranks"]] == [False, True]
    assert (entry["batch"], entry["for_good"]) == (1, True)


def test_in_another_order_the_position_is_nobody_elses_fault(tmp_path):
    """The bad record is somewhere else by then: it fails again, and no good batch is lost for it."""
    nan, run = float("nan"), tmp_path / "run"
    ended = run_ranks(lambda rank: train(rank, run, nan, shuffle=True, through_sampler=False), 2, tmp_path)
    for one in ended:
        assert len(one["incidents"]) == 3
        assert [len(seen) for seen in one["epochs"]] == [4, 4, 4]
        assert len(one["restarted"]) == 3  # the order of the first epoch: there it is again
    drawn = sorted(i for one in ended for ids in one["restarted"] for i in ids)
    assert BAD not in drawn


def test_a_sampler_takes_the_bad_record_out_wherever_it_is(tmp_path):
    nan, run = float("nan"), tmp_path / "run"
    ended = run_ranks(lambda rank: train(rank, run, nan, shuffle=True, through_sampler=True), 2, tmp_path)
    for one in ended:
        assert len(one["incidents"]) == 1
        assert [len(seen) for seen in one["epochs"]] == [4, 4, 4]
    for number in (1, 2):
        drawn = [ids for one in ended for ids in one["epochs"][number]]
        assert {i for ids in drawn for i in ids} == {i for i in range(SIZE) if i != BAD}
        assert [len(ids) for ids in drawn] == [4] * 8


def test_a_spike_of_one_rank_is_tried_again_by_all(tmp_path):
    run = tmp_path / "run"
    ended = run_ranks(lambda rank: train(rank, run, 1e4, shuffle=False, through_sampler=False), 2, tmp_path)
    for one in ended:
        assert one["incidents"] == [1, 5, 9]
        assert [len(seen) for seen in one["epochs"]] == [4, 4, 4]
        assert len(one["restarted"]) == 3  # after three epochs it is left out for good


# -- the last one, with accumulation ----------------------------------------------------------------------


def accumulating(rank: int, folder: Path, sync: str) -> dict[str, Any]:
    data = rows(float("nan"))
    data[BAD]["x"], data[SIZE - 1]["x"] = data[SIZE - 1]["x"], data[BAD]["x"]  # in the last batch of rank 1
    order = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    loader: Any = DataLoader(data, batch_size=4, sampler=order)  # type: ignore[arg-type]
    sentinel, model = make(folder)
    applied = []
    with sentinel:
        for _ in range(4):
            for number, batch in enumerate(sentinel.steps(loader, accumulate=4)):
                waits = sync == "at the end" and number + 1 < len(loader)
                with model.no_sync() if waits else contextlib.nullcontext():
                    sentinel.backward(model(batch["x"]).square().mean())
                sentinel.step()
            applied.append(sentinel.applied_steps)
    return {"applied": applied, "weights": [p.detach() for p in model.parameters()]}


@pytest.mark.parametrize(
    ("sync", "applied"),
    [
        ("always", [0, 1, 2, 3]),
        ("at the end", [0, 0, 0, 0]),  # nothing adds the gradients up, and with parts nobody may step
    ],
)
def test_a_window_at_the_end_is_stepped_on_all_ranks(tmp_path, sync, applied):
    run = tmp_path / "run"
    one, other = run_ranks(lambda rank: accumulating(rank, run, sync), 2, tmp_path)
    assert one["applied"] == other["applied"] == applied
    assert torch.equal(one["weights"][0], other["weights"][0])
