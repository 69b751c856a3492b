"""Checks that are made now and then: in the same steps on every rank, and with one outcome."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import (
    ConfigurationError,
    Detector,
    GradientStatistics,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Sentinel,
    TensorBoardCallback,
    check_every,
)

pytestmark = pytest.mark.multiprocess

RANKS = 2


class Diary(Detector):
    """Writes down the steps that it looks at."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_before_clip(self, event):
        self.steps.append(event.step)


def train(rank, folder, callbacks, *, steps, bad=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    nn.init.constant_(model[2].bias, -1e3)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Sentinel(net, optimizer, callbacks=callbacks, run_dir=folder) as sentinel:
        for number in range(steps):
            batch = torch.randn(4, 8) + rank
            loss = net(batch).square().mean()
            if rank == 1 and number in bad:  # one rank alone sees it
                loss = loss * float("nan")
            sentinel.backward(loss)
            sentinel.step(max_norm=1.0)
    return sentinel


def _attentive(rank, folder):
    diary = Diary()
    watch = [NanCallback(), check_every(10, diary, attention_steps=3)]
    train(rank, folder, watch, steps=24, bad={4})
    return diary.steps


def test_every_rank_looks_in_the_same_steps_and_is_attentive_after_the_same_incident(tmp_path):
    steps = run_ranks(_attentive, RANKS, tmp_path, tmp_path / "run")
    assert steps == [[0, 5, 6, 7, 10, 20]] * RANKS


def _statistics(rank, folder):
    callback = GradientStatistics(every=2, elements_per_check=1024, patience=3, show=50)
    watch = [NanCallback(), callback, TensorBoardCallback()]
    sentinel = train(rank, folder, watch, steps=20)
    incidents = [(incident.step, incident.kind, incident.message) for incident in sentinel.incidents]
    metrics = dict(sentinel._watch.run.metrics)
    return incidents, metrics, callback.covers_after


def test_replicas_see_the_same_samples_and_report_a_dead_layer_once(tmp_path):
    found = run_ranks(_statistics, RANKS, tmp_path, tmp_path / "run")
    assert found[0] == found[1]
    ((step, kind, message),), metrics, covers = found[0]
    assert kind is Kind.STAGNATION
    assert step <= 5
    assert "no gradient reaches 0, 2:" in message
    assert covers <= 20
    assert sum(name.startswith("statistics/zeros/") for name in metrics) == 6
    assert len(list((tmp_path / "run").glob("events.out.tfevents*"))) == 1


def _intervals(rank, folder):
    watch = [NanCallback(), check_every(2 + rank, MagnitudeCallback(max_value=1e9))]
    with pytest.raises(ConfigurationError) as caught:
        train(rank, folder, watch, steps=1)
    return str(caught.value)


def test_ranks_that_look_in_different_steps_do_not_start(tmp_path):
    for message in run_ranks(_intervals, RANKS, tmp_path, tmp_path / "run"):
        assert "in every 2 steps" in message
        assert "in every 3 steps" in message


def _sharded(rank, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 33), nn.Linear(33, 1))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    callback = GradientStatistics(every=1, elements_per_check=1024, patience=2, show=50)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), callback], run_dir=folder) as sentinel:
        for _ in range(6):  # the rows of the second rank's shard never get a gradient
            sentinel.backward(model(torch.randint(0, 20, (8,))).square().mean())
            sentinel.step(max_norm=1.0)
    metrics = sentinel._watch.run.metrics
    return len(sentinel.incidents), metrics["statistics/zeros/0.weight"][1], callback.covers_after


def test_shards_are_looked_at_and_not_taken_for_layers(tmp_path):
    (incidents, first, covers), (_, second, _) = run_ranks(_sharded, RANKS, tmp_path, tmp_path / "run")
    assert incidents == 0
    assert first < 1.0 == second
    assert covers == 3  # 1600 + 281 + 17 elements of this rank, in pieces of 128
