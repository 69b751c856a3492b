"""What a person finds in TensorBoard afterwards."""

import errno
import math
import os
import signal
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from gradsentinel import ConfigurationError, EventLog, NanCallback, Rollback, Sentinel, TensorBoardCallback
from gradsentinel.sinks.rows import BUNCH
from loops import build, make_batches, train_watched

NAN = float("nan")


def train(run_dir, *callbacks, steps=8, bad=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    with Sentinel(model, optimizer, callbacks=[NanCallback(), *callbacks], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(steps)])):
            loss = model(batch).square().mean() * (NAN if number in bad else 1.0)
            losses.append(float(loss.detach()))
            sentinel.backward(loss)
            sentinel.step(max_norm=1.0)
    return losses, sentinel


def read(path):
    found = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_the_numbers_are_those_of_the_run(run_dir):
    losses, _ = train(run_dir, TensorBoardCallback(), bad={3})
    found = read(run_dir)
    written = {event.step: event.value for event in found.Scalars("gradsentinel/loss")}
    assert sorted(written) == [0, 1, 2, 4, 5, 6, 7]  # a NaN leaves a gap; the text says why
    for step, value in written.items():
        assert value == pytest.approx(losses[step])
    assert [event.value for event in found.Scalars("gradsentinel/skipped")] == [0.0] * 3 + [1.0] * 5
    assert [event.value for event in found.Scalars("gradsentinel/action")][3] == 3.0
    assert all(math.isfinite(event.value) for event in found.Scalars("gradsentinel/grad_norm"))


def test_each_incident_is_one_readable_text(run_dir):
    _, sentinel = train(run_dir, TensorBoardCallback(), bad={2, 5})
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in read(run_dir).Tensors("gradsentinel/incident/text_summary")
    ]
    assert len(texts) == len(sentinel.incidents) == 2
    assert "### Step 2: nonfinite loss, skipped" in texts[0]
    assert "| 0.weight | 16 | 16 |" in texts[0]
    assert sentinel.incidents[1].id in texts[1]


def test_the_page_is_laid_out(run_dir):
    train(run_dir, TensorBoardCallback())
    layout = read(run_dir).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for title in (b"Gradient norm", b"Learning rate", b"gradsentinel/loss$"):
        assert title in layout


def test_the_axis_never_goes_back(run_dir):
    """TensorBoard drops points whose step is below one it has seen."""
    callbacks = (Rollback(every=2, confirm_after=1, after=2), TensorBoardCallback())
    _, sentinel = train(run_dir, *callbacks, steps=12, bad={5, 6})
    assert sentinel.incidents[-1].outcome.value == "rolled_back"
    steps = [event.step for event in read(run_dir).Scalars("gradsentinel/action")]
    assert steps == list(range(12))


def test_every_so_many_steps_and_every_incident(run_dir):
    train(run_dir, TensorBoardCallback(every=4), bad={5})
    assert [event.step for event in read(run_dir).Scalars("gradsentinel/incidents")] == [0, 4, 5]


class Recorder:
    def __init__(self):
        self.scalars, self.closed = [], False

    def add_scalar(self, *arguments):
        self.scalars.append(arguments)

    def add_text(self, *arguments):
        pass

    def add_custom_scalars(self, layout):
        pass

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_a_writer_that_was_given_is_used_and_left_open(run_dir):
    writer = Recorder()
    train(run_dir, TensorBoardCallback(writer=writer))
    assert len([entry for entry in writer.scalars if entry[0] == "gradsentinel/loss"]) == 8
    assert not writer.closed
    assert not list(run_dir.glob("events.out.tfevents*"))


def test_no_step_is_no_interval():
    with pytest.raises(ConfigurationError, match="every=0"):
        TensorBoardCallback(every=0)


def set_clock(monkeypatch, start, tick):
    """Each step takes so many seconds; returns the time, in a list."""
    now = [start]

    def time():
        now[0] += tick
        return now[0]

    monkeypatch.setattr("gradsentinel.sinks.rows.time", SimpleNamespace(time=time))
    return now


def test_numbers_are_handed_over_in_bunches_with_the_time_of_each_step(run_dir, monkeypatch):
    set_clock(monkeypatch, 1000.0, 0.1)
    calls = []
    monkeypatch.setattr(
        "gradsentinel.sinks.tensorboard.TensorBoardSink.flush",
        lambda sink: (calls.append(1), sink.writer.flush()),
    )
    train(run_dir, TensorBoardCallback(), steps=2 * BUNCH + 5)
    monkeypatch.undo()
    events = read(run_dir).Scalars("gradsentinel/loss")
    assert len(events) == 2 * BUNCH + 5
    assert len(calls) == 3
    times = [event.wall_time for event in events]
    assert times[0] == pytest.approx(1000.1)
    assert all(later - earlier == pytest.approx(0.1) for earlier, later in pairwise(times))


def test_slow_steps_do_not_wait_for_a_bunch(run_dir, monkeypatch):
    now = set_clock(monkeypatch, 0.0, 8.0)
    seen = []
    monkeypatch.setattr(
        "gradsentinel.sinks.tensorboard.TensorBoardSink.scalars",
        lambda sink, step, numbers, time=None: seen.append((step, now[0])),
    )
    train(run_dir, TensorBoardCallback(), steps=6)
    assert [step for step, _ in seen] == list(range(6))
    assert all(at - 8.0 * (step + 1) <= 16.0 for step, at in seen)


def test_an_exception_loses_nothing(run_dir):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [NanCallback(), TensorBoardCallback()]
    with (  # noqa: PT012 - the loop is what fails
        pytest.raises(KeyError),
        Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel,
    ):
        for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(8)])):
            if number == 5:
                raise KeyError
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
    assert [event.step for event in read(run_dir).Scalars("gradsentinel/loss")] == list(range(5))


KILLED = """
import os, signal, sys, torch
from torch import nn
from gradsentinel import NanCallback, Sentinel, TensorBoardCallback
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sentinel = Sentinel(model, optimizer, callbacks=[NanCallback(), TensorBoardCallback()], run_dir=sys.argv[1])
for number, batch in enumerate(sentinel.steps([torch.randn(8, 4)] * 100)):
    if number == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    sentinel.backward(model(batch).square().mean())
    sentinel.step()
"""


@pytest.mark.slow
def test_kill_9_loses_a_bunch_at_most(run_dir):
    done = subprocess.run([sys.executable, "-c", KILLED, str(run_dir)], check=False, env={**os.environ})  # noqa: S603 - ours
    assert done.returncode == -signal.SIGKILL
    steps = [event.step for event in read(run_dir).Scalars("gradsentinel/loss")]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 70 - BUNCH


def test_the_suspects_of_an_incident_have_histograms(run_dir):
    train(run_dir, TensorBoardCallback(), bad={3})
    found = read(run_dir)
    tags = set(found.Tags()["histograms"])
    assert "gradsentinel/suspects/0.weight/values" in tags
    (event,) = found.Histograms("gradsentinel/suspects/0.weight/values")
    assert event.step == 3
    assert event.histogram_value.num == 16


def test_the_settings_of_the_callbacks_are_hparams_of_the_run(run_dir):
    train(run_dir, TensorBoardCallback(every=2))
    assert len(list(run_dir.rglob("events.out.tfevents*"))) == 1  # no run beside the run
    metadata = read(run_dir).SummaryMetadata("_hparams_/session_start_info")
    assert metadata.plugin_data.plugin_name == "hparams"
    text = metadata.plugin_data.content
    assert b"TensorBoardCallback/every" in text
    assert b"NanCallback/action" in text


def test_a_parameter_named_like_markup_cannot_break_the_table(run_dir):
    from gradsentinel.sinks.markdown import markdown  # noqa: PLC0415 - only here

    _, sentinel = train(run_dir, bad={1})
    incident = sentinel.incidents[0]
    incident.message = "a | b\n# <script>alert(1)</script> `x`"
    text = markdown(incident)
    assert "<script>" not in text
    assert "\n# " not in text


def test_a_writer_that_its_owner_closes_early_has_everything_and_is_left_as_it_was(run_dir, tmp_path):
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional dependency

    writer = SummaryWriter(tmp_path / "board")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    callbacks = [NanCallback(), TensorBoardCallback(writer=writer)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(8, 4) for _ in range(5)]):
            sentinel.backward(model(batch).square().mean())
            sentinel.step(max_norm=1.0)
        writer.close()
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert len(read(tmp_path / "board").Scalars("gradsentinel/loss")) == 5
    assert "close" not in vars(writer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # tensorboard's
def test_a_disk_that_is_full_for_a_while(run_dir, monkeypatch, caplog):
    """tensorboard's own thread ends with the first error: another file is begun when the disk has room."""
    from tensorboard.summary.writer import record_writer  # noqa: PLC0415 - patched here only

    write, refuses = record_writer.RecordWriter.write, [False]

    def unless_full(self, data):
        if refuses[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    def probe(directory):
        if refuses[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_writer.RecordWriter, "write", unless_full)
    monkeypatch.setattr("gradsentinel.callbacks.tensorboard._probe", probe)
    run = build()
    with run.sentinel([NanCallback(), TensorBoardCallback(every=1), EventLog(every=1)], run_dir=run_dir) as s:
        for done in train_watched(run, s, make_batches(200)):
            refuses[0] = 20 <= done < 60
            s._watch.bus.callbacks[1]._hand_over_all()
    assert s.incidents == ()
    assert caplog.text.count("TensorBoard's file could not be written: No space left on device") == 1
    assert caplog.text.count("the disk takes everything again, after") == 1
    assert len(list(run_dir.glob("events.out.tfevents.*"))) > 1
