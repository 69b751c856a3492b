"""The examples for many ranks, run through torchrun as a user runs them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from gradsentinel import Kind, NanCallback, Outcome, Sentinel
from gradsentinel.store import RunDirectory

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HANGS_AFTER = 240  # seconds; a few on an idle machine


def torchrun(folder: Path, example: str, *arguments: str, restarts: int = 0, ranks: int = 2) -> str:
    """Run an example on ranks of this machine, and return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    job = subprocess.Popen(  # noqa: S603 - our own script
        [
            *launcher,
            "--nproc-per-node",
            f"{ranks}",
            "--max-restarts",
            f"{restarts}",
            EXAMPLES / example,
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = job.communicate(timeout=HANGS_AFTER)
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun ends its ranks before it goes
        printed, errors = job.communicate(timeout=40)
        pytest.fail(f"{example} hangs:\n{printed}\n{errors}")
    finally:
        job.kill()
    assert job.returncode == 0, errors
    return printed


def losses(printed: str) -> dict[int, float]:
    """Return the losses that were printed, by step."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step +(\d+)  loss (\S+)", printed, re.MULTILINE)
    }


def events(run: RunDirectory, rank: int, name: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events(rank) if event["event"] == name]


@pytest.mark.parametrize(("guilty", "bad", "steps"), [(1, 20, 60), (0, 3, 6)])
def test_ddp_names_the_rank_with_the_bad_gradient_and_goes_on(tmp_path, guilty, bad, steps):
    where = ["--fault-rank", f"{guilty}", "--fault-step", f"{bad}", "--steps", f"{steps}"]
    printed = torchrun(tmp_path, "ddp.py", "--run-dir", "here", *where)
    run = RunDirectory(tmp_path / "here")
    [incident] = run.read_incidents()
    assert (incident.step, incident.kind, incident.outcome) == (bad, Kind.NONFINITE_GRADIENT, Outcome.SKIPPED)
    assert [place.rank for place in incident.ranks] == [guilty]
    assert [tensor.name for tensor in incident.tensors] == ["blocks.1.attn.query.weight"]
    for rank in range(2):
        [recovery] = events(run, rank, "recovery")
        assert (recovery["step"], recovery["outcome"]) == (bad, "skipped")
        [end] = events(run, rank, "run_end")
        assert (end["step"], end["error"]) == (steps, None)
    assert f"step {bad:3}  loss" in printed
    assert re.search(rf"^ +{bad}  {guilty} +nonfinite_gradient +skipped", printed, re.MULTILINE)
    if steps > 10:
        assert losses(printed)[50] < 0.8 * losses(printed)[0]


def test_fsdp2_goes_on_from_the_last_good_state_when_a_rank_was_killed(tmp_path):
    """Killed at step 48: the state of step 40 had proved good at 45, and was perhaps still being written.

    That of step 30 is on both disks by then: no rank begins to write a state before its last one is there.
    """
    printed = torchrun(tmp_path, "fsdp2.py", "--run-dir", "here", restarts=1)
    first, second = printed.split("start 1: ")
    assert first.startswith("start 0: goes on from step 0\n")
    found = re.match(r"goes on from step (30|40)\n", second)
    assert found is not None, second
    resumed = int(found[1])
    assert max(losses(first)) == 40
    assert min(losses(second)) == resumed
    # the same weights, moments and text as the first time
    assert losses(second)[resumed] == losses(first)[resumed]
    assert losses(second)[40] == losses(first)[40]
    assert losses(second)[70] < 0.8 * losses(first)[0]

    run = RunDirectory(tmp_path / "here")
    [incident] = run.read_incidents()
    assert (incident.step, incident.kind, incident.outcome) == (15, Kind.NONFINITE_GRADIENT, Outcome.SKIPPED)
    assert [place.rank for place in incident.ranks] == [1]
    for rank in range(2):
        assert len(events(run, rank, "run_start")) == 2
        assert (events(run, rank, "run_end")[-1]["step"], events(run, rank, "run_end")[-1]["error"]) == (
            80,
            None,
        )
    assert len(events(run, 1, "run_end")) == 1  # the killed one could say nothing
    saved = {path.name for path in run.snapshots.iterdir()}
    assert saved == {f"step-{step:09d}-rank{rank}" for step in (60, 70) for rank in range(2)}


def groups_of_a_run(rank: int, folder: Path) -> tuple[int, int, int]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = [len(dist.distributed_c10d._world.pg_map)]
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=folder / "run") as sentinel:
        counts.append(len(dist.distributed_c10d._world.pg_map))
        sentinel.backward(model(torch.ones(1, 2)).sum())
        sentinel.step()
    sentinel.close()  # once more does nothing
    return (*counts, len(dist.distributed_c10d._world.pg_map))


def test_a_run_that_ended_leaves_no_process_group_behind(tmp_path):
    # gloo may still work for a group when the interpreter ends, and would abort the process then
    assert run_ranks(groups_of_a_run, 2, tmp_path, tmp_path) == [(1, 2, 1), (1, 2, 1)]


def test_megatron_names_the_rank_with_the_bad_gradient_and_computes_the_step_again(tmp_path):
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    where = ["--fault-rank", "2", "--fault-step", "3", "--steps", "6", "--tensor", "2", "--pipeline", "2"]
    printed = torchrun(tmp_path, "megatron_gpt.py", "--run-dir", "here", *where, ranks=4)
    [incident] = RunDirectory(tmp_path / "here").read_incidents()
    assert (incident.step, incident.kind, incident.outcome) == (3, Kind.NONFINITE_GRADIENT, Outcome.RETRIED)
    [place] = incident.ranks
    assert (place.rank, place.coordinates) == (2, {"tp": 0, "pp": 1, "dp": 0})
    assert [tensor.name for tensor in incident.tensors] == ["decoder.layers.2.mlp.linear_fc1.weight"]
    assert re.search(r"^step +3  loss \S+  norm \S+  retry$", printed, re.MULTILINE)
    assert losses(printed)[5] < losses(printed)[0]
