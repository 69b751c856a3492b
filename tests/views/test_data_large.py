"""A large run, as the benchmark writes it: answers stay small whatever its size."""

import sys
from pathlib import Path

import pytest
from runs_on_disk import train

from gradsentinel import Escalation
from gradsentinel.views import Views

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import viewing


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("logs")
    mesh = {"pp": 2, "dp": 4, "tp": 4}
    viewing.write_run(logdir / "run", steps=20_000, parameters=400, incidents=12, mesh=mesh)
    return logdir


def test_answers_are_bounded_by_what_is_drawn(logdir):
    tab = viewing.KeptTab(logdir)
    _, sent, timeline = viewing.ask(tab, "/timeline", name="run", points=800)
    while timeline["reading"] < 1.0:  # on a slow machine the log is read in slices
        _, sent, timeline = viewing.ask(tab, "/timeline", name="run", points=800)
    assert {one["tag"]: len(one["points"]) for one in timeline["series"]} == dict.fromkeys(
        ("loss", "grad_norm", "learning_rate"), 800
    )
    assert sent < 100_000
    assert (timeline["first"], timeline["last"]) == (0, 19_999)
    rows = viewing.ask(tab, "/incidents", name="run")[2]
    assert len(rows) == 12
    _, sent, page = viewing.ask(tab, "/incident", name="run", id=rows[0]["id"])
    layers = page["heat"]["layers"]
    assert (len(layers["names"]) <= 80, len(layers["iterations"]), layers["parameters"]) == (True, 64, 400)
    assert set(layers["hot"]) <= set(layers["names"])
    assert len(page["heat"]["ranks"]["cells"]) == 32
    assert sent < 50_000


def test_a_closer_look_shows_every_step(logdir):
    tab = viewing.KeptTab(logdir)
    query = {"name": "run", "tag": "loss", "start": 10_000, "stop": 10_199, "points": 800}
    timeline = viewing.ask(tab, "/timeline", **query)[2]
    while timeline["reading"] < 1.0:
        timeline = viewing.ask(tab, "/timeline", **query)[2]
    assert [point[0] for point in timeline["series"][0]["points"]] == list(range(10_000, 10_200))


def test_budgets_over_all_restarts_are_shown(run_dir):
    train(run_dir, steps=12, bad=(5,), callbacks=[Escalation()])
    budgets = {one["name"]: (one["used"], one["limit"]) for one in Views(run_dir).run(".")["budgets"]}
    assert budgets == {
        "Skip": (1, 10),
        "Escalation: dropped steps": (1, 50),
        "Escalation: rollbacks": (0, 10),
    }
