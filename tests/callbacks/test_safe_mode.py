"""SafeMode: off after an incident, on again after clean steps, the same after a restart."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradsentinel import ConfigurationError, NanCallback, Retry, SafeMode, Sentinel, TrainingAborted


class Switches:
    """Two features, and the order in which they were flipped."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self) -> dict[str, Any]:
        return {
            name: (
                lambda name=name: self.calls.append(f"{name} off"),
                lambda name=name: self.calls.append(f"{name} on"),
            )
            for name in ("fp8", "compile")
        }


def run(folder: Any, *callbacks: Any, bad: tuple[int, ...] = (), steps: int = 10, retry: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sentinel = Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[NanCallback(), *callbacks],
        run_dir=folder,
        forward=(lambda m, b: m(b).square().mean()) if retry else None,
    )
    with sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(3, 4) for _ in range(steps)])):
            loss = model(batch).square().mean()
            sentinel.backward(loss * float("nan") if number in bad else loss)
            sentinel.step()
            yield number


def test_off_after_an_incident_and_on_again_after_clean_steps(tmp_path):
    switches = Switches()
    mode = SafeMode(switches=switches(), clean_steps=3)
    seen = [(number, mode.active) for number in run(tmp_path, mode, bad=(2, 4))]
    assert [number for number, active in seen if active] == [2, 3, 4, 5, 6]  # the second incident starts anew
    assert switches.calls == ["fp8 off", "compile off", "fp8 on", "compile on"]


def test_incidents_that_cost_less_do_not_count(tmp_path):
    switches = Switches()
    list(run(tmp_path / "dropped", SafeMode(switches=switches(), min_action="rollback"), bad=(2,)))
    list(run(tmp_path / "retried", Retry(), SafeMode(switches=switches()), bad=(2,), retry=True))
    assert switches.calls == []
    list(
        run(
            tmp_path / "all", Retry(), SafeMode(switches=switches(), min_action="retry"), bad=(2,), retry=True
        )
    )
    assert switches.calls[:2] == ["fp8 off", "compile off"]


@pytest.mark.expects_swallowed
def test_a_switch_that_raises_does_not_keep_the_others_from_being_flipped(tmp_path):
    switches = Switches()
    broken = {"broken": (lambda: 1 / 0, lambda: None), **switches()}
    list(run(tmp_path, SafeMode(switches=broken, clean_steps=2), bad=(2,)))
    assert switches.calls[:2] == ["fp8 off", "compile off"]


def test_it_is_in_the_same_state_after_a_restart(tmp_path):
    first, calls = SafeMode(switches=Switches()(), clean_steps=5), Switches()
    list(run(tmp_path / "first", first, bad=(2,), steps=5))
    state = copy.deepcopy(first.state_dict())
    assert state == {"off": ["fp8", "compile"], "clean": 2}
    second = SafeMode(switches=calls(), clean_steps=5)
    second.load_state_dict(state)
    assert calls.calls == []  # not before the run begins
    active = [second.active for _ in run(tmp_path / "second", second, steps=6)]
    assert active == [True, True, False, False, False, False]
    assert calls.calls == ["fp8 off", "compile off", "fp8 on", "compile on"]


def test_a_state_taken_back_in_the_middle_flips_what_differs(tmp_path):
    switches = Switches()
    mode = SafeMode(switches=switches(), clean_steps=100)
    steps = run(tmp_path, mode, bad=(1,), steps=4)
    next(steps)
    calm = copy.deepcopy(mode.state_dict())
    next(steps)
    assert mode.active
    mode.load_state_dict(calm)
    assert not mode.active
    mode.load_state_dict({"off": ["compile", "gone"], "clean": 0})
    assert switches.calls == ["fp8 off", "compile off", "fp8 on", "compile on", "compile off"]
    list(steps)


def test_an_aborted_run_flips_nothing(tmp_path):
    switches = Switches()
    with pytest.raises(TrainingAborted):
        list(run(tmp_path, SafeMode(switches=switches()), bad=tuple(range(20)), steps=20))
    assert switches.calls == ["fp8 off", "compile off"]  # by the first dropped step


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({}, "at least one feature"),
        ({"switches": {}}, "at least one feature"),
        ({"switches": {"fp8": print}}, "two functions"),
        ({"switches": {"fp8": (print, 3)}}, "two functions"),
        ({"switches": {"fp8": (print, print)}, "clean_steps": 0}, "clean_steps"),
        ({"switches": {"fp8": (print, print)}, "min_action": "warn"}, "min_action"),
        ({"switches": {"fp8": (print, print)}, "min_action": "never"}, "unknown action"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, match):
    with pytest.raises(ConfigurationError, match=match):
        SafeMode(**wrong)
