"""A diagnosis that takes longer than a moment shows that it is at work."""

import io
import logging
import threading
import time

import pytest
import torch
from rich.console import Console
from torch import nn

from gradsentinel.diagnosis import diagnose as entry
from gradsentinel.diagnosis.progress import Progress


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)


def test_a_bar_on_a_terminal_tells_the_stage():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160)
    with Progress(12, 30.0, console=console, after=0.0) as progress:
        progress.expect(4)
        progress.stage("running micro-batch 0 again")
        wait_for(lambda: "running micro-batch 0 again" in stream.getvalue())
        progress.stage("watching every operator")
        wait_for(lambda: "watching every operator" in stream.getvalue())
    assert "step 12, looking for the cause" in stream.getvalue()
    assert "of at most 30 s" in stream.getvalue()


def test_one_line_in_the_log_where_there_is_no_terminal(caplog):
    with Progress(12, 30.0, console=Console(file=io.StringIO()), after=0.0) as progress:
        progress.stage("running micro-batch 0 again")
        wait_for(lambda: caplog.records)
        progress.stage("watching every operator")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "step 12: looking for the cause, which may take up to 30 s (diagnosis_budget)"
    )


@pytest.mark.parametrize(("shown", "after"), [(True, 60.0), (False, 0.0)])
def test_nothing_is_shown_of_a_quick_one_nor_on_another_rank(shown, after, caplog):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True)
    with Progress(12, 30.0, shown=shown, console=console, after=after) as progress:
        progress.stage("running micro-batch 0 again")
    assert stream.getvalue() == ""
    assert not caplog.records


def test_no_thread_is_left_behind():
    before = threading.active_count()
    for after in (0.0, 60.0):
        with Progress(
            1, 1.0, console=Console(file=io.StringIO(), force_terminal=True), after=after
        ) as progress:
            progress.stage("at work")
    wait_for(lambda: threading.active_count() <= before)


def test_a_display_that_fails_does_not_fail_the_diagnosis(monkeypatch):
    tried = threading.Event()

    def broken(self):
        tried.set()
        raise OSError("no display")

    monkeypatch.setattr(Progress, "_make_bar", broken)
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(1, 1.0, console=console, after=0.0) as progress:
        assert tried.wait(10)
        progress.stage("at work")


def test_the_stages_of_a_real_diagnosis(sentinel_for, monkeypatch):
    """Micro-batch by micro-batch, then the trace, then one swap after the other."""
    stages = []
    monkeypatch.setattr(entry.Progress, "stage", lambda self, text: stages.append(text))
    model = nn.Linear(4, 4).half()
    sentinel = sentinel_for(model, lambda model, x: (model(x) * 1e4).float().mean())
    batches = [torch.ones(3, 4).half(), torch.ones(3, 4).half() * 1e3]
    for batch in sentinel.steps(batches, accumulate=2):
        sentinel.backward((model(batch) * 1e4).float().mean())
        sentinel.step()
    assert sentinel.incidents[0].diagnosis.cause == "precision"
    assert stages[0].startswith("running micro-batch")
    assert "watching every operator" in stages
    assert "computing in float32" in stages
