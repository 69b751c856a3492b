"""Sinks get each number once, and whatever they do the run goes on."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, MetricsCallback, NanCallback, Sentinel
from gradsentinel.sinks import MetricsSink, TensorBoardSink


class Kept:
    def __init__(self):
        self.numbers, self.texts, self.closed = [], [], 0

    def scalars(self, step, numbers):
        self.numbers.append((step, dict(numbers)))

    def text(self, step, tag, markdown):
        self.texts.append((step, tag, markdown))

    def close(self):
        self.closed += 1


class Timed(Kept):
    def scalars(self, step, numbers, time):
        self.numbers.append((step, time))


def train(run_dir, sink, *, steps=40, bad=(), patience=30.0, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [NanCallback(), MetricsCallback(sink=sink, patience=patience, **settings)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            sentinel.backward(model(batch).square().mean() * (math.nan if number in bad else 1.0))
            sentinel.step(max_norm=1.0)
    return model.weight.detach().clone()


def test_each_step_arrives_once_in_order_and_incidents_as_text(run_dir):
    sink = Kept()
    train(run_dir, sink, bad={7})
    assert [step for step, _ in sink.numbers] == list(range(40))
    assert all("loss" in numbers for step, numbers in sink.numbers if step != 7)
    assert "loss" not in sink.numbers[7][1]  # not finite: a gap
    assert sink.numbers[6][1]["incidents"] == 0
    assert sink.numbers[7][1]["skipped"] == 1
    ((step, tag, text),) = sink.texts
    assert (step, tag) == (7, "incident")
    assert text.startswith("### Step 7: nonfinite loss, skipped")
    assert sink.closed == 1
    assert isinstance(sink, MetricsSink)


def test_several_sinks_and_one_that_wants_the_time(run_dir):
    plain, timed = Kept(), Timed()
    train(run_dir, [plain, timed], every=4)
    assert [step for step, _ in plain.numbers] == [step for step, _ in timed.numbers] == list(range(0, 40, 4))
    times = [at for _, at in timed.numbers]
    assert times == sorted(times)
    assert times[0] > 1e9


def test_a_sink_that_raises_is_told_of_and_the_others_get_everything(run_dir, caplog):
    class Broken(Kept):
        def scalars(self, step, numbers):
            raise ConnectionError("no route")

    good = Kept()
    train(run_dir, [Broken(), good])
    assert "Broken failed (1 so far): ConnectionError: no route" in caplog.text
    assert len(good.numbers) == 40


def test_a_sink_that_hangs_holds_up_nothing(run_dir, caplog):
    """It hangs until the run is over: were a step to wait for it, this would not end."""
    gate = threading.Event()

    class Hanging(Kept):
        def scalars(self, step, numbers):
            gate.wait(60)

    train(run_dir, Hanging(), patience=0.0)
    gate.set()
    assert "Hanging: " in caplog.text
    assert "were not written" in caplog.text


def test_training_is_bit_identical(run_dir):
    plain = train(run_dir / "a", Kept(), bad={3})
    told = train(run_dir / "b", [Kept(), TensorBoardSink(run_dir / "c")], bad={3})
    assert torch.equal(plain, told)
    assert list((run_dir / "c").glob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("sink", "complaint"),
    [
        (None, "needs a sink"),
        (Kept, "Kept is a class"),
        (print, "it has no scalars and no text and no close"),
        ([Kept(), object()], "object cannot be a sink"),
    ],
)
def test_what_is_no_sink_is_refused(sink, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        MetricsCallback(sink=sink)


MLFLOW = """
import sys, torch
from mlflow.tracking import MlflowClient
from torch import nn
from gradsentinel import MetricsCallback, NanCallback, Sentinel
from gradsentinel.sinks import MLflowSink

sink = MLflowSink("sqlite:///mlflow.db", run_name="first")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
callbacks = [NanCallback(), MetricsCallback(sink=sink, patience=100)]
with Sentinel(model, optimizer, callbacks=callbacks, run_dir="run") as sentinel:
    for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(40)])):
        sentinel.backward(model(batch).square().mean() * (float("nan") if number == 7 else 1.0))
        sentinel.step()
client = MlflowClient("sqlite:///mlflow.db")
run = client.get_run(sink.run_id)
history = client.get_metric_history(sink.run_id, "gradsentinel/loss")
assert run.info.status == "FINISHED", run.info
assert run.info.run_name == "first"
assert [one.step for one in history] == [n for n in range(40) if n != 7], history
assert all(one.timestamp > 1e12 for one in history)
(text,) = client.list_artifacts(sink.run_id, "gradsentinel")
assert text.path == "gradsentinel/incident-000007.md", text
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # it makes a database of some sixty tables
def test_mlflow_has_numbers_and_texts(tmp_path):
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", MLFLOW],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path, "mlflow.db").exists()


def test_the_sinks_and_alerts_of_the_page_work(run_dir, monkeypatch, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "seeing.md"
    shown = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (alerts,) = [code for code in shown if "Notify" in code]
    (sink,) = [code for code in shown if "MetricsCallback" in code]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")  # not every system has `logger`
    namespace = {}
    exec(alerts, namespace)  # noqa: S102 - our own page
    assert [namespace[name].on for name in ("alerts", "pager", "chat")] == ["error", "critical", "error"]
    exec(sink, namespace)  # noqa: S102 - our own page
    train(run_dir, namespace["metrics"].sink, bad={3})
    lines = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [n for n in range(40) if n != 3]
    assert len([line for line in lines if "incident" in line]) == 1
