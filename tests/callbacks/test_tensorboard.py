"""What a person finds in TensorBoard afterwards."""

import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from gradsentinel import ConfigurationError, NanCallback, Rollback, Sentinel, TensorBoardCallback

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
