"""A bundle of a run on the NPU: complete, and run again on a machine that has none."""

import json
import sys

import simulator
import torch
from on_npu import run_on_npu
from torch import nn

from gradsentinel import NanCallback, Sentinel, SnapshotSaver
from gradsentinel.diagnosis import offline
from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.stage import set_up
from gradsentinel.diagnosis.target import Target
from gradsentinel.diagnosis.verify import verify
from gradsentinel.names import read_map


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.2), nn.BatchNorm1d(4))


def distance(model, batch):
    return model[0](batch["x"]).pow(2).sum(1).sqrt().mean() + model(batch["x"]).mean()


def safe(model, batch):
    return (model[0](batch["x"]).pow(2).sum(1) + 1e-9).sqrt().mean() + model(batch["x"]).mean()


def train(folder):
    model = build().to("npu")
    batches = [{"x": torch.randn(6, 4, device="npu"), "ids": list(range(6 * n, 6 * n + 6))} for n in range(4)]
    batches[2]["x"][1] = 0.0
    with Sentinel(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=folder,
        forward=distance,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(distance(model, batch))
            sentinel.step(max_norm=1.0)
    (incident,) = sentinel.incidents
    return incident.id, [str(hazard) for hazard in simulator.counts().hazards]


def test_a_bundle_from_the_npu_is_run_again_without_one(tmp_path, monkeypatch):
    name, hazards = run_on_npu(train, tmp_path)
    assert hazards == []
    assert not hasattr(torch, "npu")
    directory = tmp_path / "incidents" / name
    bundle = Bundle(directory)
    environment = json.loads((directory / "environment.json").read_text())
    assert len(environment["npu"]["devices"]) >= 1
    assert bundle.facts()["left_out"] == []
    assert read_map(tmp_path, 0)["parameters"][0]["device"] == "npu:0"
    stage = set_up(bundle, Target(name="t", model=build(), forward=distance))
    assert any(text.startswith("random state of npu:0") and "not here" in text for text in stage.said)
    now = offline.judge(stage)
    assert offline.same_verdict(bundle.incident.diagnosis, now)
    assert (now.cause, now.op, now.node) == ("math", "aten.div.Tensor", "SqrtBackward0")
    assert verify(set_up(bundle, Target(name="t", model=build(), forward=safe), fixed=True)).holds is True
    monkeypatch.syspath_prepend(str(directory.parent))
    assert run_program(bundle.program) == 0


def run_program(program):
    import runpy  # noqa: PLC0415 - beside its only use

    before = sys.argv
    sys.argv = [str(program)]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    raise AssertionError("a program ends with an exit code")
