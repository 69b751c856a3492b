"""The Megatron runs: four forked ranks, started again from a checkpoint whenever they die."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsentinel.campaign.journal import Journal
from gradsentinel.campaign.plan import cuda_on_cpu
from gradsentinel.campaign.workloads.text import corpus

if TYPE_CHECKING:
    from gradsentinel.campaign.trial import Trial
    from gradsentinel.campaign.workloads.megatron_job import Life

GRACE = 5.0
"""Seconds that the other ranks get to notice that one of them has died."""
LAST = 10
"""The final loss is the mean over so many last steps that were made."""


def train(trial: Trial, policy: str, scratch: Path) -> dict[str, Any]:
    """Train under a policy, deaths and restarts included, and return what is kept of it."""
    _prepare()
    from gradsentinel.campaign.workloads.megatron_job import RANKS, Life  # noqa: PLC0415 - after _prepare

    corpus()  # read once, before the ranks are forked
    faults = tuple(trial.faults())
    life = Life(
        policy=policy,
        seed=trial.seed * 1000 + 700 + trial.number,
        steps=trial.steps,
        faults=faults,
        folder=scratch,
        number=0,
    )
    started = time.perf_counter()
    furthest, deaths, died = -1, 0, []
    while True:
        code = _live(life)
        if code == 0:
            break
        number = _last_drawn(scratch)
        died.append({"number": number, "why": f"exit code {code}"})
        if number > furthest:
            furthest, deaths = number, 0
        deaths += 1
        start = _checkpoint(scratch, RANKS)
        left_out = life.left_out
        if deaths > 1:
            left_out |= {number} | {one.step for one in faults if start <= one.step <= number}
        with (scratch / "rank-0.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": "restart", "number": start}) + "\n")
        life = replace(life, number=life.number + 1, start=start, left_out=left_out)
    seconds = time.perf_counter() - started
    return _result(trial, scratch, died, seconds, RANKS)


def _prepare() -> None:
    """Let Megatron run on CPUs, once a process, before its first import."""
    if "cuda_on_cpu" not in sys.modules:
        path = cuda_on_cpu()
        if path is None:
            raise RuntimeError("examples/cuda_on_cpu.py is not there")
        spec = importlib.util.spec_from_file_location("cuda_on_cpu", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["cuda_on_cpu"] = module
        spec.loader.exec_module(module)
        module.install()
    import megatron.core.models.gpt  # noqa: F401, PLC0415 - the ranks are forked with it


def _live(life: Life) -> int:
    """Run the ranks of one life; return 0, or the exit code of the first that died."""
    from gradsentinel.campaign.workloads.megatron_job import RANKS, rank_main  # noqa: PLC0415 - likewise

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, life)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    first = 0
    try:
        waiting = list(ranks)
        while waiting and not first:
            multiprocessing.connection.wait([one.sentinel for one in waiting])
            first = next((one.exitcode for one in waiting if one.exitcode), 0) or 0
            waiting = [one for one in waiting if one.exitcode is None]
        deadline = time.monotonic() + GRACE
        for one in waiting:
            one.join(max(0.0, deadline - time.monotonic()))
    finally:
        for one in ranks:
            if one.is_alive():
                one.kill()
            one.join()
    return first


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _last_drawn(scratch: Path) -> int:
    drawn = [one["number"] for one in _lines(scratch / "rank-0.jsonl") if one["what"] == "drawn"]
    return int(drawn[-1]) if drawn else 0


def _checkpoint(scratch: Path, ranks: int) -> int:
    """Return the step of the newest checkpoint that every rank has; 0 if there is none."""
    steps: dict[int, int] = {}
    for path in scratch.glob("checkpoint-*.pt"):
        step = int(path.name.split("-")[1])
        steps[step] = steps.get(step, 0) + 1
    return max((step for step, count in steps.items() if count == ranks), default=0)


def _result(
    trial: Trial, scratch: Path, died: list[dict[str, Any]], seconds: float, ranks: int
) -> dict[str, Any]:
    journal = Journal()
    losses: list[float] = []
    weights: list[str] = []
    hits: dict[int, dict[str, Any]] = {}
    incidents: list[dict[str, Any]] = []
    for rank in range(ranks):
        for one in _lines(scratch / f"rank-{rank}.jsonl"):
            if one["what"] == "hit":
                hits.setdefault(int(one["hit"]["step"]), one["hit"])
            elif one["what"] == "end":
                weights.append(one["weights"])
            elif rank == 0:
                _follow(one, journal, losses, incidents)
    clocks = [one.pop("seconds") for one in incidents]
    tail = losses[-LAST:]
    return {
        "steps": trial.steps,
        "faults": [one.as_dict() for one in trial.faults()],
        **journal.as_dict(),
        "interruptions": died,
        "incidents": incidents,
        "effects": [],
        "truths": [_truth(step, hit) for step, hit in sorted(hits.items())],
        "loss": sum(tail) / len(tail) if tail else math.nan,
        "weights": "".join(weights),
        "clock": {"seconds": seconds, "step": None, "incidents": clocks},
    }


def _follow(
    one: dict[str, Any], journal: Journal, losses: list[float], incidents: list[dict[str, Any]]
) -> None:
    """Take one line of the first rank's notes into the journal."""
    if one["what"] == "drawn":
        journal.number = one["number"]
        journal.attempts += 1  # a step in which the job died was computed, too
    elif one["what"] == "step":
        journal.step(one["number"], applied=one["applied"], finite=one["finite"])
        journal.attempts -= 1  # it was counted when its batch was drawn
        if one["applied"]:
            losses.append(float(one["loss"]))
    elif one["what"] == "back":
        journal.back_to(one["step"])
    elif one["what"] == "restart":
        journal.start_again(one["number"])
    elif one["what"] == "incident":
        incidents.append({"number": one["number"], **one["incident"]})


def _truth(step: int, hit: dict[str, Any]) -> dict[str, Any]:
    """Say what a fault does, as far as it is known without trying it on a copy: the value that was put in."""
    after = float(hit["after"]) if hit["after"] is not None else 0.0
    finite = math.isfinite(after) and hit["kind"] != "spoil_field"
    return {
        "number": step,
        "fired": True,
        "finite": finite,
        "loss": math.nan,
        "loss_without": math.nan,
        "deviation": 0.0 if finite else math.inf,
        "hit": hit,
    }
