"""Faults of every kind, saved and judged again: data, precision, hardware, optimizer; and does a fix hold."""

import dataclasses
import shutil
import sys

import pytest
import torch
from bundles import OWN, built, failure, ran, saved
from torch import nn
from typer.testing import CliRunner

from gradsentinel import (
    Callback,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Sentinel,
    SnapshotSaver,
    TrainingAborted,
    cli,
)
from gradsentinel.diagnosis import offline
from gradsentinel.diagnosis.bundle import Bundle
from gradsentinel.diagnosis.stage import set_up
from gradsentinel.diagnosis.target import Target
from gradsentinel.diagnosis.verify import verify
from gradsentinel.faults import FaultPlan, FlipBit
from gradsentinel.state.archive import read_archive, write_archive

NAN, INF = float("nan"), float("inf")


def staged(directory, model, forward, **settings):
    """The saved step with a model of its own."""
    return set_up(Bundle(directory), Target(name="t", model=model, forward=forward), **settings)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_every_verdict_is_repeated_and_no_broken_model_passes(tmp_path):
    for number, case in enumerate(OWN):
        incident, directory = saved(tmp_path / str(number), case, level="full")
        model = built(case)
        with torch.no_grad():
            for parameter in model.parameters():  # the saved weights count, not those of the factory
                parameter.add_(1.0)
        stage = staged(directory, model, case.forward)
        assert stage.weights
        now = offline.judge(stage)
        assert offline.same_verdict(incident.diagnosis, now), (case.name, incident.diagnosis, now)
        assert verify(stage).holds is not True, case.name


def test_float16_is_cured_by_a_wider_dtype(tmp_path):
    def forward(model, x):
        with torch.autocast("cpu", torch.float16):
            return model(x).float().pow(2).mean()

    def loud():
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, 3e4)
        return model

    incident, directory = saved(tmp_path, failure(forward, torch.ones(2, 4), loud), level="full")
    assert incident.diagnosis.cause == "precision"
    assert offline.same_verdict(incident.diagnosis, offline.judge(staged(directory, loud(), forward)))
    wide = offline.compute_in_wide(staged(directory, loud(), forward, dtype=torch.float32))
    assert [bool(one.loss.isfinite()) for one in wide] == [True]
    (tmp_path / "narrow.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def forward(model, x):\n"
        "    with torch.autocast('cpu', torch.float16):\n"
        "        return model(x).float().pow(2).mean()\n"
        "def make():\n    return nn.Linear(4, 4), forward\n"
    )
    name = f"{tmp_path / 'narrow.py'}:make"
    assert invoke("replay", directory, "--target", name).exit_code == 0
    wide = invoke("replay", directory, "--target", name, "--dtype", "float32")
    assert wide.exit_code == 1
    assert "computed in float32" in wide.stdout
    assert invoke("replay", directory, "--dtype", "float32").exit_code == 1
    del sys.modules["narrow"]


def test_a_bad_record_is_still_bad_and_a_forward_that_repairs_it_holds(tmp_path):
    def forward(model, batch):
        return (model(batch["x"]) - batch["y"]).pow(2).mean()

    def repaired(model, batch):
        return (model(batch["x"].nan_to_num()) - batch["y"]).pow(2).mean()

    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 1), "idx": torch.arange(12, 16)}
    batch["x"][1, 0] = NAN
    build = lambda: nn.Linear(4, 1)  # noqa: E731 - a factory
    incident, directory = saved(tmp_path, failure(forward, batch, build), level="full")
    assert incident.kind is Kind.NONFINITE_INPUT
    stage = staged(directory, build(), forward)
    now = offline.judge(stage)
    assert (now.cause, now.phase) == ("data", "input")
    assert offline.same_verdict(incident.diagnosis, now)
    assert verify(stage).holds is False
    assert verify(staged(directory, build(), repaired, fixed=True)).holds is True


def test_a_fault_of_the_hardware_stays_one_and_there_is_nothing_to_verify(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    forward = lambda model, x: model(x).pow(2).mean()  # noqa: E731 - as a loop gives it
    plan = FaultPlan([FlipBit(steps=(1,), target="gradient", name="0.weight", bit=30)], seed=1)
    watch = [MagnitudeCallback(max_global_norm=1e3, action="skip"), SnapshotSaver(level="full")]
    with (
        plan.attach(model),
        Sentinel(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            callbacks=watch,
            run_dir=tmp_path,
            forward=forward,
        ) as sentinel,
    ):
        for batch in sentinel.steps(plan.batches([torch.randn(8, 4) for _ in range(3)])):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.confidence) == ("hardware", 0.95)
    stage = staged(
        tmp_path / "incidents" / incident.id,
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        forward,
    )
    assert offline.compute(stage).finite
    now = offline.judge(stage)
    assert (now.cause, now.confidence) == ("hardware", 0.95)
    assert now.evidence == incident.diagnosis.evidence  # the very bit, from the gradients in the bundle
    assert verify(stage).holds is None


def half(eps):
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).half()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)


def test_an_optimizer_that_makes_nan_needs_the_optimizer(tmp_path):
    forward = lambda model, batch: model(batch).float().pow(2).mean()  # noqa: E731 - as a loop gives it
    model, optimizer = half(1e-8)
    with Sentinel(
        model,
        optimizer,
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=tmp_path,
        forward=forward,
    ) as sentinel:
        try:
            for batch in sentinel.steps([torch.tensor([1, 2])]):
                sentinel.backward(forward(model, batch))
                sentinel.step()
        except TrainingAborted:
            pass
    (incident,) = sentinel.incidents
    assert incident.diagnosis.cause == "optimizer"
    bundle = Bundle(tmp_path / "incidents" / incident.id)
    code, text = ran(bundle.program)
    assert code == 0, text
    assert incident.diagnosis.op in text

    def stage(eps, *, fixed):
        model, optimizer = half(eps)
        target = Target(name="t", model=model, forward=forward, optimizers=(optimizer,))
        return set_up(bundle, target, fixed=fixed)

    again = stage(1e-8, fixed=False)
    assert again.said == ["weights: as the failing step left them, bad"]
    assert offline.compute(again).state == [entry.name for entry in incident.tensors]
    assert offline.same_verdict(incident.diagnosis, offline.judge(again))
    broken = verify(stage(1e-8, fixed=True))
    assert broken.holds is False
    assert [(check.what, check.held) for check in broken.checks] == [
        *(("optimizer", False), ("step", True), ("optimizer", False))
    ]
    assert verify(stage(1e-4, fixed=True)).holds is True
    without = verify(set_up(bundle, Target(name="t", model=half(1e-4)[0], forward=forward), fixed=True))
    assert without.holds is None
    assert "return (model, forward, optimizer)" in without.said


def test_micro_batches_that_overflow_when_they_are_added_up(tmp_path):
    case = next(case for case in OWN if case.name == "gradients that overflow when they are added up")
    _, directory = saved(tmp_path, case, level="full")
    found = verify(staged(directory, built(case), case.forward))
    assert found.holds is False
    assert "sum of the gradient" in found.checks[-1].said

    def scaled(model, batch):
        return case.forward(model, batch) / 100

    assert verify(staged(directory, built(case), scaled, fixed=True)).holds is True


def test_an_operator_is_verified_without_a_model(tmp_path, monkeypatch):
    """A torch operator that fails here and not elsewhere, played by a diagnosis that says so."""

    class Blame(Callback):
        def on_diagnosis(self, event):
            changed = dataclasses.replace(event.diagnosis, cause="operator")
            object.__setattr__(event, "diagnosis", changed)
            event.incident.diagnosis = changed

    forward = lambda model, x: model(x).log().mean()  # noqa: E731 - as a loop gives it
    model = nn.Linear(2, 2)
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        callbacks=[NanCallback(), Blame(), SnapshotSaver()],
        run_dir=tmp_path,
        forward=forward,
    ) as sentinel:
        for batch in sentinel.steps([torch.full((3, 2), -9.0)]):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    still = invoke("verify", tmp_path, 0)
    assert still.exit_code == 1
    assert "The operator still fails here." in still.stdout
    other = invoke("verify", tmp_path / "incidents" / "nothing")
    assert other.exit_code == 2


def test_records_are_given_to_the_forward_as_they_were(tmp_path):
    @dataclasses.dataclass
    class Sheet:
        pixels: torch.Tensor
        names: list

    def forward(model, sheet):
        assert sheet.names == ["a", "b"]
        return model(sheet.pixels).log().mean()

    case = failure(forward, Sheet(torch.full((2, 4), -9.0), ["a", "b"]))
    incident, directory = saved(tmp_path, case, level="full")
    stage = staged(directory, nn.Linear(4, 4), forward)
    assert offline.same_verdict(incident.diagnosis, offline.judge(stage))


def test_the_loss_scale_is_that_of_the_step(tmp_path):
    model = nn.Linear(2, 1)
    forward = lambda model, x: model(x).log().mean()  # noqa: E731 - as a loop gives it
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=tmp_path,
        forward=forward,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1),
    ) as sentinel:
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, 0.0)
        for batch in sentinel.steps([torch.ones(2, 2), torch.ones(2, 2), -torch.ones(2, 2)]):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    incident = sentinel.incidents[-1]
    directory = tmp_path / "incidents" / incident.id
    _, meta = read_archive(directory / "scene", kind="scene")
    assert meta["loss_scale"] == 2.0**16
    stage = staged(directory, nn.Linear(2, 1), forward)
    assert float(stage.run.host.scaler.get_scale()) == 2.0**16
    assert offline.same_verdict(incident.diagnosis, offline.judge(stage))


def test_one_ranks_shard_is_no_whole_model(tmp_path):
    case = failure(lambda model, x: model(x).log().mean(), torch.full((2, 4), -9.0))
    _, directory = saved(tmp_path, case, level="full")
    state, meta = read_archive(directory / "state", kind="bundle-state")
    shutil.rmtree(directory / "state")
    write_archive(directory / "state", state, {**meta, "sharded": True}, kind="bundle-state")
    with pytest.raises(Exception, match="one rank's shard"):
        staged(directory, nn.Linear(4, 4), case.forward)
    own = staged(directory, nn.Linear(4, 4), case.forward, own_weights=True)
    assert own.said == ["weights: the target's own, as asked for"]


def test_fields_that_are_never_finite_are_not_blamed_elsewhere(tmp_path):
    """A missing value by design, in every batch: the healthy batch in the bundle tells so."""

    def forward(model, batch):
        return model(batch["x"]).log().mean() if batch["bad"] else model(batch["x"]).pow(2).mean()

    model = nn.Linear(4, 4)
    batches = [
        {"x": torch.full((2, 4), -9.0), "unused": torch.tensor([NAN, INF]), "bad": n == 2} for n in range(3)
    ]
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), 1e-6),
        callbacks=[NanCallback(), SnapshotSaver(level="full")],
        run_dir=tmp_path,
        forward=forward,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.diagnosis.op == "aten.log.default"
    stage = staged(tmp_path / "incidents" / incident.id, nn.Linear(4, 4), forward)
    assert offline.same_verdict(incident.diagnosis, offline.judge(stage))
