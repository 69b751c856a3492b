"""One lifeless gradient, one warning: whoever sees it first tells, the others are silent."""

import pytest
import torch
from test_stagnation import Two
from torch import nn

from gradsentinel import (
    GradientStatistics,
    Sentinel,
    SpikeCallback,
    StagnationCallback,
    UpdateRatioCallback,
)


def train(run_dir, callbacks, change, *, steps=120, hook=None):
    torch.manual_seed(0)
    model = Two()
    if hook is not None:
        model.right.weight.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(steps)):
            change(model, step)
            sentinel.backward(model(torch.randn(8, 6)))
            sentinel.step()
    return [(one.step, one.detector.split("(")[0], one.message) for one in sentinel.incidents]


def all_of_them():
    return [
        StagnationCallback(),
        GradientStatistics(every=2, patience=8),
        SpikeCallback(groups="parameter"),
        UpdateRatioCallback(),
    ]


def dies(at):
    def change(model, step):
        model.gate = float(step < at)

    return change


def test_a_layer_that_dies_is_told_once(run_dir):
    (told,) = train(run_dir, all_of_them(), dies(60))
    assert told[1] == "StagnationCallback"
    assert "right" in told[2]


def test_whoever_sees_it_first_tells(run_dir):
    callbacks = [StagnationCallback(dead_after=40), GradientStatistics(every=2, patience=3)]
    (told,) = train(run_dir, callbacks, dies(60))
    assert told[1] == "GradientStatistics"


def test_one_alone_tells_as_ever(run_dir):
    (told,) = train(run_dir, [GradientStatistics(every=2, patience=8)], dies(60))
    assert "no gradient reaches right" in told[2]


def test_a_second_death_is_told_again_and_once(run_dir):
    def change(model, step):
        model.gate = float(not (60 <= step < 80 or step >= 110))

    told = train(run_dir, [StagnationCallback(), GradientStatistics(every=2, patience=8)], change, steps=260)
    assert len(told) == 2
    assert 60 < told[0][0] < 80
    assert told[1][0] >= 110


def test_all_gradients_that_vanish_are_told_once(run_dir):
    def change(model, step):
        model.left.requires_grad_(step < 200)
        model.gate = 0.0 if step >= 60 else 1.0
        if step >= 60:
            nn.init.zeros_(model.left.weight)
            nn.init.zeros_(model.left.bias)

    callbacks = [StagnationCallback(), GradientStatistics(every=1, patience=10)]
    told = train(run_dir, callbacks, change)
    assert len(told) == 1


@pytest.mark.parametrize("statistics_first", [False, True])
def test_a_gradient_that_sticks_is_told_once(run_dir, statistics_first):
    kept = []

    def stick(parameter):
        kept.append(parameter.grad.clone())
        if len(kept) > 60:
            parameter.grad.copy_(kept[59])

    callbacks = [
        StagnationCallback(stuck_after=40 if statistics_first else 3),
        GradientStatistics(every=2, patience=5),
    ]
    (told,) = train(run_dir, callbacks, lambda model, step: None, hook=stick)
    assert told[1] == ("GradientStatistics" if statistics_first else "StagnationCallback")
    assert "right.weight" in told[2]


def test_one_that_dies_after_another_is_told_too(run_dir, caplog):
    def change(model, step):
        model.gate = float(step < 60)
        if step == 90:
            model.left.bias.register_hook(torch.zeros_like)

    first, second = train(run_dir, [StagnationCallback(), GradientStatistics(every=2, patience=8)], change)
    assert "right" in first[2]
    assert second[0] == 99
    assert caplog.text.count("the gradient of left.bias has vanished") == 1


def test_a_layer_that_starves_does_not_hide_that_all_gradients_are_gone(run_dir):
    def change(model, step):
        model.gate = float(step < 30)
        if step == 60:
            for parameter in model.left.parameters():
                parameter.register_hook(torch.zeros_like)

    first, second = train(run_dir, [GradientStatistics(every=2, patience=3)], change, steps=90)
    assert "right" in first[2]
    assert second == (62, "GradientStatistics", "every gradient has been zero in 3 steps in a row")


def test_a_death_that_goes_on_is_told_once_by_all_of_them(run_dir):
    callbacks = [StagnationCallback(), GradientStatistics(every=50, patience=2)]
    assert len(train(run_dir, callbacks, dies(40), steps=420)) == 1
