"""The health of cards on several ranks: an incident tells that of the rank it names, all count alike."""

import json
import time

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsentinel import DeviceHealthCallback, Kind, NanCallback, Sentinel
from gradsentinel.devices.health import Reading

pytestmark = pytest.mark.multiprocess

WORLD = 4
STEPS = 75
BAD = tuple(range(0, 72, 12))
GUILTY = 2


class Card:
    def __init__(self, rank):
        self.card = f"card {rank}"

    def read(self):
        return Reading(card=self.card, temperature=50 + int(self.card[-1]), health="OK")


def train(rank, folder, fails):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    health = DeviceHealthCallback(source=Card(rank), every=1e-3)
    if fails and rank == 1:
        health._judge = lambda iteration: 1 / 0
    with Sentinel(model, optimizer, callbacks=[NanCallback(), health], run_dir=folder) as sentinel:
        while not health.readings():
            time.sleep(0.001)
        for step, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(STEPS)])):
            loss = model(batch).square().mean()
            bad = step in BAD and rank == GUILTY
            sentinel.backward(loss * float("nan") if bad else loss)
            sentinel.step()
    told = [
        (i.step, str(i.kind), i.message, [r.rank for r in i.ranks], i.details.get("device_health"), i.notes)
        for i in sentinel.incidents
    ]
    return told, [(s.card.split()[-1], s.hits, s.tries, s.chance) for s in health.suspects()]


def test_the_card_that_all_incidents_name_becomes_a_suspect_on_every_rank(tmp_path):
    results = run_ranks(train, WORLD, tmp_path, tmp_path / "run", False)
    assert all(result[1] == results[0][1] for result in results)
    (suspect,) = results[0][1]
    assert suspect[:3] == (str(GUILTY), len(BAD), len(BAD))
    assert suspect[3] == pytest.approx(4 * (len(BAD) + 1) / 4 ** len(BAD))
    for told, _ in results:
        assert [entry[:2] for entry in told] == [entry[:2] for entry in results[0][0]]
    told = results[0][0]
    losses = [entry for entry in told if entry[1] == str(Kind.NONFINITE_LOSS)]
    assert [(entry[0], entry[3]) for entry in losses] == [(step, [GUILTY]) for step in BAD]
    for entry in losses:
        assert entry[4].keys() == {f"rank {GUILTY}"}
        assert entry[4][f"rank {GUILTY}"]["temperature"] == 50 + GUILTY
    (accusation,) = [entry for entry in told if entry[1] == str(Kind.DEVICE_HEALTH)]
    assert accusation[3] == [GUILTY]
    assert accusation[0] == BAD[-1]
    account = json.loads((tmp_path / "run" / "device-health.json").read_text())
    assert sorted(entry["hits"] for entry in account["cards"].values()) == [0, 0, 0, len(BAD)]
    beside = tmp_path / "run" / "incidents" / "000012-nonfinite_loss"
    names = {path.name for path in beside.glob("device-health*")}
    assert names == {"device-health-rank0.json", f"device-health-rank{GUILTY}.json"}


@pytest.mark.expects_swallowed
def test_a_rank_whose_callback_failed_keeps_nobody_waiting(tmp_path):
    results = run_ranks(train, WORLD, tmp_path, tmp_path / "run", True)
    for told, suspects in results:
        assert "callback_error" in {entry[1] for entry in told}
        assert suspects[0][:3] == (str(GUILTY), len(BAD), len(BAD))
