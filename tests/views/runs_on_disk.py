"""Runs made for the tests: trained small ones, and large or odd ones written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradsentinel import NanCallback, Sentinel
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis, TensorEvidence
from gradsentinel.incident import Incident, Outcome
from gradsentinel.ranks.topology import Rank
from gradsentinel.store import RunDirectory

TIME = "2026-01-31T08:15:00Z"


def train(
    run_dir: Path, *, steps: int = 80, bad: Iterable[int] = (), callbacks: Iterable[Any] = ()
) -> list[Incident]:
    """Train two small layers; in the bad steps the second one's gradient is NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), *callbacks], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            sentinel.backward(model(batch).square().mean())
            if number in set(bad):
                model[1].weight.grad.fill_(math.nan)
            sentinel.step(max_norm=1.0)
        return sentinel.incidents


def append(path: Path, *lines: dict[str, Any], end: str = "\n") -> None:
    """Append lines to an event log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps({"schema": 1, "time": TIME, **line}) for line in lines)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + end)


def start(
    rank: int = 0, world_size: int = 1, step: int = 0, iteration: int = 0, **place: Any
) -> dict[str, Any]:
    told = {"rank": rank, "host": f"node{rank // 8:02d}", "device": f"npu:{rank % 8}", **place}
    return {
        "event": "run_start",
        "step": step,
        "iteration": iteration,
        "version": "9.9",
        "rank": told,
        "world_size": world_size,
    }


def step(number: int, loss: Any = None, *, iteration: int | None = None, norm: Any = 1.0) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "iteration": number if iteration is None else iteration,
        "applied": True,
        "loss": 2.0 if loss is None else loss,
        "grad_norm": norm,
        "learning_rates": [0.1],
        "loss_scale": None,
    }


def write_steps(run_dir: Path, losses: Iterable[Any], *, first: int = 0) -> Path:
    """Write an event log with a line for each loss; returns the file."""
    path = run_dir / "events-rank0.jsonl"
    append(path, start(), *(step(first + number, loss) for number, loss in enumerate(losses)))
    return path


def write_incident(
    run_dir: Path,
    at: int,
    *,
    kind: Kind = Kind.NONFINITE_GRADIENT,
    ranks: Iterable[Rank] = (Rank(rank=0, host="node00", device="npu:0"),),
    tensors: Iterable[str] = ("blocks.3.attn.weight",),
    outcome: Outcome = Outcome.SKIPPED,
    diagnosis: Diagnosis | None = None,
    **fields: Any,
) -> Incident:
    """Write one incident.json."""
    directory = RunDirectory(run_dir)
    incident = Incident(
        id=directory.new_incident_id(at, str(kind)),
        step=at,
        iteration=at,
        kind=kind,
        action=Action.SKIP,
        outcome=outcome,
        time=TIME,
        message=fields.pop("message", "the gradients of 1 of 9 parameters are not finite"),
        tensors=tuple(TensorEvidence(name=name, nonfinite=3, numel=9, norm=math.nan) for name in tensors),
        diagnosis=diagnosis,
        **fields,
    )
    incident.concern(ranks)
    directory.write_incident(incident)
    return incident


def write_norms(
    run_dir: Path, incident: Incident, names: list[str], columns: list[list[Any]], **told: Any
) -> None:
    """Write norms.json: a column of norms for each step before the incident."""
    first = incident.iteration - len(columns) + 1
    iterations = list(range(first, incident.iteration + 1))
    norms = {
        "names": names,
        "steps": iterations,
        "iterations": iterations,
        "values": columns,
        "local": False,
        **told,
    }
    RunDirectory(run_dir).write_norms(incident, norms, rank=told.get("rank"))
