"""A state that some ranks have saved is taken by another number of them, bit for bit, and without pickle."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import ArchiveError, NanCallback, Rollback, Sentinel
from gradsentinel.state.checkpoint import SnapshotReader

pytestmark = pytest.mark.multiprocess

STEPS = 4


def build(ranks: int, kind: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3, bias=False), nn.Dropout()
    )
    called: nn.Module = model
    if ranks > 1 and kind == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model[0], mesh=mesh)  # 7 rows: nothing divides by two
        fully_shard(model, mesh=mesh)
    elif ranks > 1:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.1)
    return model, called, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 5, generator=generator) for _ in range(count)]


def whole(tensor: Any) -> list[Any]:
    values: list[Any] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()
    return values


def contents(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    return {
        "weights": [whole(p) for p in model.parameters()],
        "buffers": [whole(b) for b in model.buffers()],
        "moments": [
            whole(optimizer.state[p][key]) for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")
        ],
        "steps": [float(optimizer.state[p]["step"]) for p in model.parameters()],
        "schedule": scheduler.state_dict(),
    }


def live(
    rank: int, run_dir: Path, ranks: int, kind: str, count: int = STEPS + 2, spoil: Any = None
) -> dict[str, Any]:
    """Train on, on the same data on each rank; what there was at the start and at step 4 is returned."""
    model, called, optimizer, scheduler = build(ranks, kind)
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=2)]
    found: dict[str, Any] = {"failed": None}
    load, pickle.load = pickle.load, None  # type: ignore[assignment] # no state is a reason to run anything
    try:
        with Sentinel(
            called,
            optimizer,
            callbacks=callbacks,
            scheduler=scheduler,
            run_dir=run_dir,
            resume="auto",
            timeout=20.0,
        ) as sentinel:
            found["first"] = (sentinel.step_count, dict(sentinel.data_position))
            found["start"] = contents(model, optimizer, scheduler) if sentinel.step_count else None
            for batch in sentinel.steps(batches(count)):
                if spoil is not None:
                    spoil(rank, model)
                sentinel.backward(called(batch).square().mean())
                sentinel.step()
                if sentinel.step_count == STEPS:
                    found["end"] = contents(model, optimizer, scheduler)
    except ArchiveError as error:
        found["failed"] = str(error)
    finally:
        pickle.load = load
    found["saved"] = sorted(path.name for path in (run_dir / "snapshots").iterdir())
    return found


def as_many(ranks: int, folder: Path, run_dir: Path, kind: str, *args: Any) -> list[dict[str, Any]]:
    if ranks == 1:
        return [live(0, run_dir, 1, kind, *args)]
    return run_ranks(live, ranks, folder, run_dir, ranks, kind, *args)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_from_it(before, after, kind, tmp_path):
    saved = as_many(before, tmp_path, tmp_path / "run", kind)
    assert all(f"step-00000000{STEPS}-rank{rank}" in saved[0]["saved"] for rank in range(before))
    taken = as_many(after, tmp_path, tmp_path / "run", kind, STEPS + 6)
    for one in taken:
        assert one["failed"] is None
        assert one["first"] == (STEPS, {"epoch": 0, "batch": STEPS, "batches": STEPS})
        assert one["start"] == saved[0]["end"]
    again = as_many(after, tmp_path, tmp_path / "run", kind)
    for one in again:
        assert one["failed"] is None
        # A busy disk takes fewer states, and older ones stay for so long; the one that counts is of these.
        newest = f"step-{one['first'][0]:09d}-rank"
        assert {name for name in one["saved"] if name.startswith(newest)} == {
            f"{newest}{rank}" for rank in range(after)
        }
    assert again[0]["first"][0] > STEPS


def test_a_damaged_part_is_passed_over_for_an_older_state(tmp_path):
    as_many(2, tmp_path, tmp_path / "run", "fsdp2")
    newest = tmp_path / "run" / "snapshots" / f"step-00000000{STEPS}-rank1" / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 4
    newest.write_bytes(data)
    (one,) = as_many(1, tmp_path, tmp_path / "run", "fsdp2")
    assert one["first"][0] == STEPS - 2


def test_parts_that_are_not_all_here_are_no_fresh_start(tmp_path):
    as_many(2, tmp_path, tmp_path / "run", "fsdp2")
    for path in (tmp_path / "run" / "snapshots").glob("*-rank1"):
        path.rename(path.with_name("elsewhere-" + path.name))
    (one,) = as_many(1, tmp_path, tmp_path / "run", "fsdp2")
    assert "was saved by 2 ranks, this job has 1" in one["failed"]


def own_way(rank: int, model: nn.Module) -> None:
    """Parts that nothing describes, as those of a framework's own tensor parallelism."""
    with torch.no_grad():
        model[3].weight[0, 0] += rank  # type: ignore[index, operator]


def test_parts_that_nothing_describes_are_refused_and_stay(tmp_path):
    before = as_many(2, tmp_path, tmp_path / "run", "ddp", STEPS + 2, own_way)
    (one,) = as_many(1, tmp_path, tmp_path / "run", "ddp")
    assert "cannot be divided anew: ranks 0 and 1 hold different values of '3.weight'" in one["failed"]
    assert one["saved"] == before[0]["saved"]


# -- torch's own load -------------------------------------------------------------------------------------


def load(rank: int, run_dir: Path, ranks: int) -> dict[str, Any]:
    model, _, optimizer, scheduler = build(ranks, "fsdp2")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it does itself
        dcp.load(state, storage_reader=SnapshotReader(run_dir, step=STEPS))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"step": state["step"], **contents(model, optimizer, scheduler)}


@pytest.mark.parametrize("after", [1, 2, 3])
def test_torch_reads_the_very_same_state(after, tmp_path):
    expected = as_many(2, tmp_path, tmp_path / "run", "fsdp2")[0]["end"]
    if after == 1:
        loaded = [load(0, tmp_path / "run", 1)]
    else:
        loaded = run_ranks(load, after, tmp_path, tmp_path / "run", after)
    for one in loaded:
        assert one["step"] == STEPS
        assert {**one, "schedule": None} == {"step": STEPS, **expected, "schedule": None}


def test_a_reader_of_nothing_says_so(tmp_path):
    with pytest.raises(ArchiveError, match="holds no complete state of step 3"):
        SnapshotReader(tmp_path, step=3)
