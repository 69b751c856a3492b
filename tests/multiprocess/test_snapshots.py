"""Several ranks save their parts and take them back: the same moment on all of them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsentinel.state.archive as archive_module
from gradsentinel import (
    ArchiveError,
    ConfigurationError,
    Escalation,
    NanCallback,
    Rollback,
    Sentinel,
    TrainingAborted,
)
from gradsentinel.state.lock import RunLock

pytestmark = pytest.mark.multiprocess


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def life(
    rank: int,
    folder: Path,
    *,
    steps: int,
    resume: Any = "auto",
    before: Any = None,
    during: Any = None,
    count: int = 12,
) -> dict[str, Any]:
    """Train up to a step; `before` the sentinel is made, or `during` the steps, something may go wrong."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=1, on_disk=2)]
    if before is not None:
        before(rank, folder)
    found: dict[str, Any] = {}
    try:
        with Sentinel(
            model, optimizer, callbacks=callbacks, run_dir=folder / "run", resume=resume
        ) as sentinel:
            found["first"] = sentinel.step_count
            for batch in sentinel.steps(batches(rank, count)):
                sentinel.backward(model(batch).square().mean())
                sentinel.step(max_norm=1.0)
                if during is not None:
                    during(rank, sentinel)
                if sentinel.step_count >= steps:
                    break
            found["incidents"] = [(i.step, str(i.kind), i.message) for i in sentinel.incidents]
    except (ConfigurationError, ArchiveError) as error:
        found["error"] = str(error)
    found["state"] = [p.detach().clone() for p in model.parameters()]
    found["saved"] = saved(folder, rank)
    return found


def saved(folder: Path, rank: int) -> list[int]:
    snapshots = folder / "run" / "snapshots"
    return sorted(
        int(path.parent.name.split("-")[1]) for path in snapshots.glob(f"step-*-rank{rank}*/manifest.json")
    )


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


def first(rank: int, folder: Path) -> dict[str, Any]:
    return life(rank, folder, steps=7)


def second(rank: int, folder: Path) -> dict[str, Any]:
    return life(rank, folder, steps=12)


def both(rank: int, folder: Path) -> dict[str, Any]:
    return life(rank, folder / "reference", steps=12)


def test_all_go_on_from_the_same_state_and_end_as_if_they_had_never_stopped(tmp_path):
    before = run_ranks(first, 2, tmp_path, tmp_path)
    assert [found["saved"] for found in before] == [[4, 6]] * 2
    after = run_ranks(second, 2, tmp_path, tmp_path)
    reference = run_ranks(both, 2, tmp_path, tmp_path)
    for found, expected in zip(after, reference, strict=True):
        assert (found["first"], expected["first"]) == (6, 0)
        assert found["incidents"] == []
        assert same(found["state"], expected["state"])


def damage(rank: int, folder: Path) -> None:
    if rank == 1:
        (path,) = (folder / "run" / "snapshots").glob("step-000000006-rank1")
        data = bytearray((path / "state.safetensors").read_bytes())
        data[-3] ^= 4
        (path / "state.safetensors").write_bytes(data)


def second_after_damage(rank: int, folder: Path) -> dict[str, Any]:
    return life(rank, folder, steps=12, before=damage)


def test_a_state_that_one_rank_cannot_read_is_passed_over_by_all(tmp_path):
    run_ranks(first, 2, tmp_path, tmp_path)
    after = run_ranks(second_after_damage, 2, tmp_path, tmp_path)
    assert [found["first"] for found in after] == [4, 4]
    assert same(after[0]["state"], after[1]["state"])


def full_from_step_4_on(rank: int, folder: Path) -> dict[str, Any]:
    """The disk of rank 1 takes nothing from step 4 on."""
    write, full = archive_module.write_tensor_file, [False]

    def refuse(path: Path, tensors: Any) -> Any:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    def during(rank: int, sentinel: Sentinel) -> None:
        sentinel._watch.run.states.finish()
        full[0] = rank == 1 and sentinel.step_count >= 4

    archive_module.write_tensor_file = refuse
    return life(rank, folder, steps=11, during=during)


def test_what_one_rank_could_not_save_costs_nobody_the_older_state(tmp_path):
    found = run_ranks(full_from_step_4_on, 2, tmp_path, tmp_path)
    for one in found:
        assert one["saved"] == [2]
        assert one["incidents"]
        assert all("No space left on device" in message for _, _, message in one["incidents"])
    after = run_ranks(second, 2, tmp_path, tmp_path)
    assert [one["first"] for one in after] == [2, 2]


def in_use(rank: int, folder: Path) -> dict[str, Any]:
    """Another run still holds the part of rank 1."""
    here, there = os.pipe(), os.pipe()
    child = os.fork() if rank == 1 else None
    if child == 0:
        lock = RunLock.take(folder / "run", 1)
        os.write(here[1], b"x")
        os.read(there[0], 1)
        lock.release()
        os._exit(0)
    if child is not None:
        os.read(here[0], 1)
    found = life(rank, folder, steps=3)
    if child is not None:
        os.write(there[1], b"x")
        os.waitpid(child, 0)
    return found


def test_a_directory_that_is_in_use_on_one_rank_is_refused_on_all(tmp_path):
    for found in run_ranks(in_use, 2, tmp_path, tmp_path):
        assert "is in use by process" in found["error"]


def one_wants_to_resume(rank: int, folder: Path) -> dict[str, Any]:
    return life(rank, folder, steps=3, resume="auto" if rank else None)


def test_a_setting_that_differs_is_refused_on_all(tmp_path):
    for found in run_ranks(one_wants_to_resume, 2, tmp_path, tmp_path):
        assert found["error"] == "resume= is not the same on every rank"


def both_fail_at_once(rank: int, folder: Path, critical: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told: list[str] = []
    escalation = Escalation(critical=critical, alarm=lambda incident: told.append(incident.id))
    callbacks = [NanCallback(), Rollback(every=2, confirm_after=0, on_disk=1), escalation]
    ended = 0
    sentinel = Sentinel(model, optimizer, callbacks=callbacks, run_dir=folder / "run")
    try:
        with sentinel:
            for step, batch in enumerate(sentinel.steps(batches(rank, 8))):
                loss = model(batch * float("nan") if step == 5 else batch).square().mean()
                sentinel.backward(loss)
                sentinel.step()
    except TrainingAborted as aborted:
        ended = aborted.exit_code
    outcomes = [(i.severity.label, str(i.outcome)) for i in sentinel.incidents]
    return {"ended": ended, "told": told, "outcomes": outcomes, "saved": saved(folder, rank)}


@pytest.mark.parametrize(
    ("critical", "outcome", "code"), [("abort", "aborted", 75), ("rollback", "rolled_back", 0)]
)
def test_a_fault_on_several_ranks_at_once_is_critical_on_all_of_them(tmp_path, critical, outcome, code):
    first, second = run_ranks(both_fail_at_once, 2, tmp_path, tmp_path, critical)
    assert first["outcomes"] == second["outcomes"] == [("critical", outcome)]
    assert first["ended"] == second["ended"] == code
    assert (len(first["told"]), len(second["told"])) == (1, 0)
    assert first["saved"] == second["saved"] != []
    account = json.loads((tmp_path / "run" / "escalation.json").read_text())
    assert account["running"] is (code == 75)
    assert len(account["rollback"]) == (0 if code else 1)
