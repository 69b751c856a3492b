"""What torch's own save writes through `SnapshotWriter`: whole or not there, no pickle, for any ranks."""

import inspect
import os
import pickle
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from test_divided_anew import batches, build, contents
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gradsentinel import ArchiveError
from gradsentinel.state import checkpoint_writer
from gradsentinel.state.checkpoint import SnapshotReader, SnapshotWriter

pytestmark = pytest.mark.multiprocess

STEP = 3


def trained(ranks: int, kind: str) -> tuple[Any, Any, Any]:
    model, called, optimizer, scheduler = build(ranks, kind)
    for batch in batches(STEP):
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def nest(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "extra": {"words": ("a", b"b"), "step": STEP}}


def save(rank: int, run_dir: Path, ranks: int, kind: str, how: str = "at once") -> dict[str, Any]:
    model, optimizer, scheduler = trained(ranks, kind)
    state, writer = nest(model, optimizer), SnapshotWriter(run_dir, step=STEP)
    found = contents(model, optimizer, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it does itself
        if how == "beside":
            future: Any = dcp.async_save(state, storage_writer=writer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)  # the training goes on
            future.result()
        else:
            dcp.save(state, storage_writer=writer)
    return found


def load(rank: int, run_dir: Path, ranks: int, kind: str) -> dict[str, Any]:
    model, _, optimizer, scheduler = build(ranks, kind)
    state = nest(model, optimizer)
    state["extra"] = {"words": None, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=SnapshotReader(run_dir, step=STEP))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {"extra": state["extra"], **contents(model, optimizer, scheduler)}


def as_many(function: Any, ranks: int, folder: Path, *args: Any) -> list[Any]:
    return [function(0, *args)] if ranks == 1 else run_ranks(function, ranks, folder, *args)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_ranks_loads_what_two_have_saved(after, kind, tmp_path):
    expected = run_ranks(save, 2, tmp_path, tmp_path / "run", 2, kind)[0]
    (path,) = (tmp_path / "run" / "snapshots").iterdir()
    assert path.name == f"step-{STEP:09d}"
    assert sorted(part.name for part in path.iterdir()) == ["rank0", "rank1"]
    for one in as_many(load, after, tmp_path, tmp_path / "run", after, kind):
        assert one.pop("extra") == {"words": ("a", b"b"), "step": STEP}
        assert {**one, "schedule": None} == {**expected, "schedule": None}


def test_two_ranks_load_what_one_has_saved(tmp_path):
    expected = save(0, tmp_path / "run", 1, "fsdp2")
    for one in run_ranks(load, 2, tmp_path, tmp_path / "run", 2, "fsdp2"):
        del one["extra"]
        assert {**one, "schedule": None} == {**expected, "schedule": None}


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="its async_save copies nothing on CPUs")
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_what_is_saved_beside_the_training_is_the_state_of_that_moment(kind, tmp_path):
    expected = run_ranks(save, 2, tmp_path, tmp_path / "run", 2, kind, "beside")[0]
    for one in run_ranks(load, 2, tmp_path, tmp_path / "run", 2, kind):
        del one["extra"]
        assert {**one, "schedule": None} == {**expected, "schedule": None}


def test_each_rank_writes_its_own_part_and_replicas_once(tmp_path):
    for kind in ("fsdp2", "ddp"):
        run_ranks(save, 2, tmp_path, tmp_path / kind, 2, kind)
        parts = [SnapshotReader(tmp_path / kind)._tensors]
        elements = sum(torch.Size(chunk.sizes).numel() for one in parts[0].values() for chunk in one.chunks)
        wholes = sum(one.size.numel() for one in parts[0].values())
        assert elements == wholes, kind
        sizes = [
            (tmp_path / kind / "snapshots" / f"step-{STEP:09d}" / f"rank{rank}" / "state.safetensors").stat()
            for rank in range(2)
        ]
        assert all(one.st_size > 0 for one in sizes)


def test_nothing_in_it_is_a_pickle(tmp_path):
    run_ranks(save, 2, tmp_path, tmp_path / "run", 2, "fsdp2")
    files = [path for path in (tmp_path / "run" / "snapshots").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"manifest.json", "state.json", "state.safetensors"}
    load_pickle, pickle.load = pickle.load, None  # type: ignore[assignment]
    try:
        assert SnapshotReader(tmp_path / "run")._values["extra.step"] == STEP
    finally:
        pickle.load = load_pickle


def test_a_byte_that_has_changed_is_refused(tmp_path):
    run_ranks(save, 2, tmp_path, tmp_path / "run", 2, "fsdp2")
    file = tmp_path / "run" / "snapshots" / f"step-{STEP:09d}" / "rank1" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(ArchiveError, match="does not match its checksum"):
        SnapshotReader(tmp_path / "run", step=STEP)


def test_a_part_that_has_gone_leaves_no_state(tmp_path):
    run_ranks(save, 2, tmp_path, tmp_path / "run", 2, "fsdp2")
    part = tmp_path / "run" / "snapshots" / f"step-{STEP:09d}" / "rank1"
    part.rename(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match="holds no complete state"):
        SnapshotReader(tmp_path / "run")


class Opaque:
    """Something that only a pickle could store."""


def save_and_fail(rank: int, run_dir: Path, how: str) -> dict[str, Any]:
    model, optimizer, _ = trained(2, "fsdp2")
    state = nest(model, optimizer)
    if how == "an object of one's own":
        state["extra"]["opaque"] = Opaque()
    if how == "a full disk" and rank == 1:

        def refuse(*_: Any, **__: Any) -> None:
            raise ArchiveError("cannot write the archive: No space left on device")

        checkpoint_writer.write_archive = refuse  # type: ignore[assignment]
    if how == "there already":
        (run_dir / "snapshots" / f"step-{STEP:09d}").mkdir(parents=True, exist_ok=True)
    failed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(state, storage_writer=SnapshotWriter(run_dir, step=STEP))
        except dcp.api.CheckpointException as error:
            failed = str(error)
    dist.barrier()  # the others are all here
    return {"failed": failed, "left": [path.name for path in (run_dir / "snapshots").glob("step*/*")]}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("an object of one's own", "object of type test_saved_through_torch.Opaque cannot be stored"),
        ("a full disk", "No space left on device"),
        ("there already", "exists already"),
    ],
)
def test_a_rank_that_cannot_write_fails_all_and_leaves_no_state(how, why, tmp_path):
    for one in run_ranks(save_and_fail, 2, tmp_path, tmp_path / "run", how):
        assert why in one["failed"]
        assert one["left"] == []
    with pytest.raises(ArchiveError, match="holds no complete state"):
        SnapshotReader(tmp_path / "run")
    for path in (tmp_path / "run" / "snapshots").glob("step-*"):
        path.rmdir()
    save(0, tmp_path / "run", 1, "fsdp2")  # it can be saved afterwards
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == [f"step-{STEP:09d}"]


def save_and_die(rank: int, run_dir: Path, mortal: int) -> dict[str, Any]:
    """One rank is killed when its part is written, in the middle of the save; the other goes on alone."""
    model, optimizer, _ = trained(2, "ddp")
    write = checkpoint_writer.write_archive

    def die(*args: Any, **kwargs: Any) -> Any:
        path = write(*args, **kwargs)
        if rank == mortal:
            time.sleep(1.0)  # until the other has written its own
            os.kill(os.getpid(), signal.SIGKILL)
        return path

    checkpoint_writer.write_archive = die
    failed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future: Any = dcp.async_save(
            nest(model, optimizer), storage_writer=SnapshotWriter(run_dir, step=STEP)
        )
        try:
            future.result(timeout=30)
        except Exception:  # noqa: BLE001 - gloo has no exception of its own for it
            failed = True
    (run_dir / "survivor").write_text(f"failed: {failed}")  # it has not been waiting ever since
    return {}


@pytest.mark.parametrize("mortal", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_leaves_no_state_and_hangs_nobody(mortal, tmp_path):
    with pytest.raises(Exception):  # noqa: B017, PT011 - of the harness: a rank has died
        run_ranks(save_and_die, 2, tmp_path, tmp_path / "run", mortal)
    assert (tmp_path / "run" / "survivor").read_text() == "failed: True"
    assert list((tmp_path / "run" / "snapshots").glob("step-*")) == []
    with pytest.raises(ArchiveError, match="holds no complete state"):
        SnapshotReader(tmp_path / "run")
    save(0, tmp_path / "run", 1, "fsdp2")  # removes what the killed one has left
    assert [path.name for path in (tmp_path / "run" / "snapshots").iterdir()] == [f"step-{STEP:09d}"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_id": "elsewhere"},
        pytest.param(
            {"use_collectives": False},
            marks=pytest.mark.skipif(
                "use_collectives" not in inspect.signature(dcp.save).parameters, reason="torch 2.6 has none"
            ),
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
def test_what_cannot_come_to_a_state_is_refused_at_once(arguments, tmp_path):
    with pytest.raises(Exception, match=f"{next(iter(arguments))}=.*: "):
        dcp.save({"a": torch.ones(3)}, storage_writer=SnapshotWriter(tmp_path, step=1), **arguments)
    assert not list((tmp_path / "snapshots").glob("*"))
