"""From what all ranks say to one incident: who is named, and how much is kept of thousands."""

import dataclasses
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from gradsentinel import Action, Incident, NanCallback, Sentinel, Severity
from gradsentinel.ranks.consensus import LocalConsensus
from gradsentinel.ranks.topology import Rank
from gradsentinel.sinks.markdown import markdown
from gradsentinel.terminal import incident_story

LARGE = 16384
NAN = float("nan")


class Crowd(LocalConsensus):
    """Stands for all ranks of a job: each says what rank 0 says, of itself; tensor-parallel by eights."""

    world_size = LARGE

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = list(ranks)

    def gather(self, value: Any) -> list[Any]:
        if not hasattr(value, "claim"):
            return [value]
        others = []
        for rank in self.ranks:
            place = Rank(
                rank=rank,
                host=f"node{rank // 8:04d}",
                device=f"npu:{rank % 8}",
                coordinates={"dp": rank // 8, "tp": rank % 8},
            )
            claim = dataclasses.replace(value.claim, leader=rank // 8 * 8)
            others.append(dataclasses.replace(value, rank=place, claim=claim))
        return others


def of_many(run_dir: Path, ranks: Iterable[int], action: Action = Action.SKIP) -> Incident:
    """The incident of a step in which these ranks have a bad gradient of their own."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(action=action)],
        run_dir=run_dir,
    )
    sentinel._watch.run.consensus = Crowd(ranks)
    for batch in sentinel.steps([torch.ones(3, 4)]):
        sentinel.backward(model(batch).square().mean())
        for parameter in model.parameters():
            parameter.grad[0] = NAN
        sentinel.step()
    (incident,) = sentinel.incidents
    return incident


def test_an_incident_of_all_ranks_is_a_small_file_that_says_so(run_dir):
    incident = of_many(run_dir, range(LARGE))
    path = run_dir / "incidents" / incident.id / "incident.json"
    assert path.stat().st_size < 16 * 1024
    read = Incident.from_dict(json.loads(path.read_text()))
    for one in (incident, read):
        assert [rank.rank for rank in one.ranks] == list(range(64))
        assert one.ranks[63].coordinates == {"dp": 7, "tp": 7}
        assert (one.rank_count, one.who) == (LARGE, "ranks 0-16383")
        assert one.severity is Severity.CRITICAL
        assert len(one.message) < 1000
        assert one.details["independent_ranks"] == LARGE // 8
    assert read.as_dict() == incident.as_dict() == json.loads(path.read_text())
    out = Console(width=120, file=io.StringIO())
    out.print(incident_story(read))
    shown = out.file.getvalue()
    assert "16384: ranks 0-16383" in shown
    assert len(shown.splitlines()) < 60
    assert "| ranks | 0-16383 |" in markdown(incident)


def test_of_a_few_ranks_each_is_listed(run_dir):
    incident = of_many(run_dir, [3, 70, 16000])
    data = incident.as_dict()
    assert [entry["rank"] for entry in data["ranks"]] == [3, 70, 16000]
    assert (data["rank_count"], data["ranks_folded"]) == (3, "ranks 3, 70, 16000")
    assert "independent_ranks" not in data["details"]


def test_a_file_without_the_number_of_ranks_is_read(run_dir):
    data = of_many(run_dir, [3, 70]).as_dict()
    del data["rank_count"], data["ranks_folded"]
    read = Incident.from_dict(data)
    assert (read.rank_count, read.who) == (2, "ranks 3, 70")
