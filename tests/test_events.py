"""The events and the callback methods that hear them."""

import dataclasses
import inspect

import pytest

import gradsentinel
from gradsentinel import Callback, Event, events

EVENTS = [
    event
    for _, event in inspect.getmembers(events, inspect.isclass)
    if issubclass(event, Event) and event is not Event
]


def snake_case(name):
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).strip("_")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_every_event_has_its_method_of_the_same_name(event):
    assert events.METHODS[event] == f"on_{snake_case(event.__name__.removesuffix('Event'))}"
    assert inspect.isfunction(getattr(Callback, events.METHODS[event]))


def test_every_method_has_its_event():
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    assert sorted(methods) == sorted(events.METHODS.values())
    assert set(events.METHODS) == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_the_method_says_which_event_it_takes(event):
    (_, parameter) = inspect.signature(getattr(Callback, events.METHODS[event])).parameters.values()
    assert parameter.annotation == f"events.{event.__name__}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_is_frozen_and_takes_keywords_only(event):
    values = {field.name: 0 for field in dataclasses.fields(event)}
    made = event(**values)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.step = 1
    assert not hasattr(made, "__dict__"), "a misspelt attribute would be taken silently"
    with pytest.raises(TypeError):
        event(*values.values())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_is_public(event):
    assert getattr(gradsentinel, event.__name__) is event
    assert event.__name__ in gradsentinel.__all__


def test_the_methods_stand_in_the_order_of_a_step():
    order = list(events.METHODS.values())
    assert order[0] == "on_run_start"
    assert order[-1] == "on_run_end"
    step = ["on_step_start", "on_batch", "on_after_backward", "on_before_clip", "on_after_step"]
    assert [name for name in order if name in step] == step
