"""A dear detector looks in every so many steps, and in each one for a while after an incident."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from gradsentinel import (
    Action,
    ConfigurationError,
    Detector,
    Finding,
    Kind,
    MagnitudeCallback,
    NanCallback,
    Rollback,
    Sentinel,
    check_every,
)

NAN = float("nan")


@dataclass(kw_only=True)
class Diary(Detector):
    """Writes down what it hears."""

    heard: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def _note(self, name, event):
        self.heard.setdefault(name, []).append(event.step)

    def on_step_start(self, event):
        self._note("step_start", event)

    def on_batch(self, event):
        self._note("batch", event)

    def on_after_backward(self, event):
        self._note("after_backward", event)

    def on_before_clip(self, event):
        self._note("before_clip", event)

    def on_after_step(self, event):
        self._note("after_step", event)

    def on_incident(self, event):
        self._note("incident", event)


def train(run_dir, *callbacks, steps, bad=(), accumulate=1):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Sentinel(model, optimizer, callbacks=list(callbacks), run_dir=run_dir) as sentinel:
        batches = [torch.randn(8, 4) for _ in range(steps * accumulate)]
        for number, batch in enumerate(sentinel.steps(batches, accumulate=accumulate)):
            sentinel.backward(model(batch).square().mean() * (NAN if number in bad else 1.0))
            sentinel.step()
    return sentinel


def test_it_looks_in_every_third_step_and_hears_of_all(run_dir):
    diary = Diary()
    train(run_dir, NanCallback(), check_every(3, diary), steps=10)
    looks = [0, 3, 6, 9]
    for name in ("batch", "after_backward", "before_clip"):
        assert diary.heard[name] == looks, name
    for name in ("step_start", "after_step"):
        assert diary.heard[name] == list(range(10)), name


def test_all_micro_batches_of_its_steps_are_looked_at(run_dir):
    diary = Diary()
    train(run_dir, NanCallback(), check_every(2, diary), steps=4, accumulate=3)
    assert diary.heard["after_backward"] == diary.heard["batch"] == [0, 0, 0, 2, 2, 2]
    assert diary.heard["before_clip"] == [0, 2]


def test_after_an_incident_it_looks_in_each_step_for_a_while(run_dir):
    diary = Diary()
    train(run_dir, NanCallback(), check_every(10, diary, attention_steps=3), steps=25, bad={12})
    assert diary.heard["incident"] == [12]
    assert diary.heard["before_clip"] == [0, 10, 13, 14, 15, 20]


def test_a_detector_that_pays_no_attention_keeps_its_interval(run_dir):
    diary = Diary()
    train(run_dir, NanCallback(), check_every(10, diary, attention_steps=0), steps=25, bad={12})
    assert diary.heard["before_clip"] == [0, 10, 20]


def test_a_rollback_leaves_it_attentive_until_the_trouble_is_past(run_dir):
    diary = Diary()
    rollback = Rollback(every=4, confirm_after=1, after=1)
    train(run_dir, NanCallback(), rollback, check_every(50, diary, attention_steps=2), steps=20, bad={9})
    (bad,) = diary.heard["incident"]
    again = diary.heard["before_clip"][1:]
    assert again[0] < bad  # the run went back
    assert again == list(range(again[0], bad + 3))


def test_the_finding_of_a_thinned_detector_counts_in_its_steps_only(run_dir):
    class Complains(Detector):
        """A class may have an interval of its own."""

        check_interval = 4

        def on_before_clip(self, event):
            return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.SKIP)

    sentinel = train(run_dir, Complains(), steps=9)
    assert [incident.step for incident in sentinel.incidents] == [0, *range(1, 9)]  # attentive from then on


def test_one_instance_differs_and_its_class_does_not():
    thinned = check_every(5, MagnitudeCallback(max_value=1.0), attention_steps=7)
    assert isinstance(thinned, MagnitudeCallback)
    assert (thinned.check_interval, thinned.attention_steps) == (5, 7)
    assert MagnitudeCallback(max_value=1.0).check_interval == 1


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3"])
def test_an_interval_is_a_number_of_steps(steps):
    with pytest.raises(ConfigurationError, match="check_interval"):
        check_every(steps, Diary())


@pytest.mark.parametrize("attention", [-1, 2.5, None])
def test_attention_is_a_number_of_steps(attention):
    with pytest.raises(ConfigurationError, match="attention_steps"):
        check_every(2, Diary(), attention_steps=attention)


@pytest.mark.parametrize("other", [Rollback(), Diary, lambda event: None])
def test_only_detectors_are_thinned_out(other):
    with pytest.raises(ConfigurationError, match="takes a detector"):
        check_every(2, other)


def test_a_class_with_an_impossible_interval_is_refused_when_the_sentinel_is_made(run_dir):
    class Never(Detector):
        check_interval = 0

    model = nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match="check_interval=0"):
        Sentinel(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[Never()], run_dir=run_dir)
