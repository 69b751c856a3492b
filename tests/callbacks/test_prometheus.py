"""What Prometheus gets to see."""

import re
import socket
import urllib.request

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, NanCallback, PrometheusCallback, Sentinel, Skip


def train(run_dir, callback, *, steps=8, bad=(), while_it_runs=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [NanCallback(), Skip(max_skips=5), callback]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            sentinel.backward(model(batch).square().mean() * (float("nan") if number in bad else 1.0))
            sentinel.step(max_norm=1.0)
        return None if while_it_runs is None else while_it_runs()


def samples(text):
    """Values by name and labels."""
    found = re.findall(r"^(gradsentinel_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    return {
        (name, re.sub(r'(,|^)run="run"', "", labels).strip(",")): float(value)
        for name, labels, value in found
    }


def test_the_page_has_the_numbers_of_the_run(run_dir):
    callback = PrometheusCallback(port=0)

    def scrape():
        with urllib.request.urlopen(f"http://127.0.0.1:{callback.bound_port}/metrics", timeout=30) as answer:
            return answer.read().decode()

    text = train(run_dir, callback, bad={3}, while_it_runs=scrape)
    found = samples(text)
    assert found["gradsentinel_steps_attempted_total", ""] == 8
    assert found["gradsentinel_steps_applied_total", ""] == 7
    assert found["gradsentinel_step", ""] == 7
    assert found["gradsentinel_loss", ""] > 0
    assert found["gradsentinel_gradient_norm", ""] > 0
    assert found["gradsentinel_learning_rate", ""] == pytest.approx(0.01)
    assert found["gradsentinel_last_step_timestamp_seconds", ""] > 1e9
    assert found["gradsentinel_budget_left", 'budget="Skip"'] == 4
    incidents = {key: value for key, value in found.items() if key[0] == "gradsentinel_incidents_total"}
    assert incidents == {
        (
            "gradsentinel_incidents_total",
            'kind="nonfinite_loss",outcome="skipped",severity="warning"',
        ): 1.0
    }
    assert callback.bound_port is None  # nothing is served after the run


def test_a_port_that_is_taken_is_a_warning_and_the_run_goes_on(run_dir, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        train(run_dir, PrometheusCallback(port=port))
    assert f"127.0.0.1:{port} cannot be used" in caplog.text
    assert "port=0" in caplog.text


def test_the_file_has_the_last_numbers_and_is_valid(run_dir, tmp_path):
    place = tmp_path / "new" / "run.prom"
    train(run_dir, PrometheusCallback(textfile=place), bad={2, 5})
    found = samples(place.read_text())
    assert found["gradsentinel_steps_applied_total", ""] == 6
    assert sum(value for (name, _), value in found.items() if name == "gradsentinel_incidents_total") == 2
    assert [path.name for path in place.parent.iterdir()] == ["run.prom"]


def test_a_file_that_cannot_be_written_is_a_warning(run_dir, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    train(run_dir, PrometheusCallback(textfile=tmp_path / "file" / "run.prom"))
    assert "PrometheusCallback's textfile failed" in caplog.text


def test_a_loss_that_is_nan_is_shown_as_such(run_dir):
    callback = PrometheusCallback(port=0)
    lines = train(run_dir, callback, bad={7}, while_it_runs=lambda: list(callback.collect()))
    by_name = {family.name: family.samples for family in lines}
    assert by_name["gradsentinel_loss"][0].value != by_name["gradsentinel_loss"][0].value


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "needs port="),
        ({"port": -1}, "port=-1"),
        ({"port": 70_000}, "port=70000"),
        ({"textfile": "run.txt"}, "must end in .prom"),
        ({"port": 0, "every_seconds": 0}, "every_seconds=0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        PrometheusCallback(**settings)
