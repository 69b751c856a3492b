"""What can be registered: everything that could never be called as meant fails at once, by name."""

import functools
from dataclasses import dataclass, field

import pytest

from gradsentinel import (
    Action,
    AfterStep,
    BeforeClip,
    Callback,
    ConfigurationError,
    Detector,
    NanCallback,
    Responder,
    Sentinel,
    Skip,
)
from gradsentinel.bus import Bus
from gradsentinel.callback import check_callback
from gradsentinel.events import METHODS
from loops import build


def callback_with(name, function):
    return type("Mine", (Detector,), {name: function})()


@pytest.mark.parametrize("method", METHODS.values())
def test_a_callback_is_one_method(method):
    callback = callback_with(method, lambda self, event: None)
    assert check_callback(callback) is callback


def test_a_class_instead_of_an_instance():
    with pytest.raises(
        ConfigurationError, match=r"NanCallback is a class; give an instance: NanCallback\(\)"
    ):
        Bus([NanCallback])


@pytest.mark.parametrize("thing", [object(), "NanCallback", print, None])
def test_something_else_altogether(thing):
    with pytest.raises(ConfigurationError, match=f"{type(thing).__name__} is not a gradsentinel.Callback"):
        Bus([thing])


@pytest.mark.parametrize("callbacks", [NanCallback(), iter([NanCallback()])])
def test_not_a_list(callbacks, run_dir):
    run = build()
    with pytest.raises(ConfigurationError, match="callbacks must be a list"):
        run.sentinel(callbacks, run_dir=run_dir)


def test_the_same_instance_twice():
    callback = NanCallback()
    with pytest.raises(ConfigurationError, match="the same NanCallback is in the list twice"):
        Bus([callback, callback])
    Bus([NanCallback(), NanCallback()])  # two that are equal are fine


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("on_before_clipping", "on_before_clip"),
        ("on_after_backwards", "on_after_backward"),
        ("on_beforeclip", "on_before_clip"),
        ("on_step_begin", "on_step_start"),
        ("on_step_end", "on_step_start"),
        ("on_batchs", "on_batch"),
        ("on_run_finish", "on_run_end"),
        ("on_incidents", "on_incident"),
        ("on_diagnoses", "on_diagnosis"),
        ("on_recover", "on_recovery"),
        ("before_clip", "on_before_clip"),
        ("after_backward", "on_after_backward"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(wrong, right):
    with pytest.raises(ConfigurationError, match=rf"Mine\.{wrong} .*did you mean {right}\?"):
        Bus([callback_with(wrong, lambda self, event: None)])


def test_names_that_merely_resemble_are_left_alone():
    for name in ["measure", "once", "_on_before_clip", "only", "confirm", "clip"]:
        Bus([callback_with(name, lambda self, event: None)])


def no_argument(self): ...
def two_arguments(self, event, other): ...
def only_by_keyword(self, *, event): ...


@pytest.mark.parametrize("function", [no_argument, two_arguments, only_by_keyword])
def test_a_wrong_signature(function):
    with pytest.raises(ConfigurationError, match=r"Mine\.on_before_clip.*exactly one argument, the event"):
        Bus([callback_with("on_before_clip", function)])


def by_another_name(self, happening): ...
def with_a_default(self, event, extra=None): ...
def with_anything(self, *args, **kwargs): ...


@pytest.mark.parametrize("function", [by_another_name, with_a_default, with_anything])
def test_a_signature_that_can_be_called(function):
    Bus([callback_with("on_before_clip", function)])


async def coroutine(self, event): ...


def test_a_coroutine():
    with pytest.raises(ConfigurationError, match=r"Mine\.on_after_step is a coroutine.*use a plain def"):
        Bus([callback_with("on_after_step", coroutine)])


def test_a_responder_without_a_rung():
    class Rungless(Responder):
        def respond(self, incident, run): ...

    with pytest.raises(ConfigurationError, match="Rungless needs a rung"):
        Bus([Rungless()])


def test_a_dataclass_with_state_is_a_callback():
    @dataclass(kw_only=True)
    class Counter(Detector):
        limit: int = 3
        seen: int = field(default=0, init=False)

        def on_after_step(self, event):
            self.seen += 1

    assert Counter(limit=2).state_dict() == {}
    Bus([Counter(), Counter()])


# -- plain functions -------------------------------------------------------------------------------


def listen(event): ...


@pytest.mark.parametrize("event", ["BeforeClip", BeforeClip(step=0, gradients=None, losses=()), object, None])
def test_an_unknown_event(event):
    with pytest.raises(
        ConfigurationError, match=r"is no event; choose one of: RunStart, .*BeforeClip.*RunEnd"
    ):
        Bus([]).on(event, listen)


@pytest.mark.parametrize("every", [0, -1])
def test_every_below_one(every):
    with pytest.raises(ConfigurationError, match=f"every={every} must be at least 1"):
        Bus([]).on(AfterStep, listen, every=every)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "cannot hear an event"),
        (lambda event, other: None, "cannot hear an event"),
        (functools.partial(listen, 1), "cannot hear an event"),
        (coroutine.__get__(1), "is a coroutine"),
        ("listen", "'listen' cannot be called"),
        (None, "None cannot be called"),
    ],
)
def test_a_function_that_cannot_hear(function, message):
    with pytest.raises(ConfigurationError, match=message):
        Bus([]).on(AfterStep, function)


@pytest.mark.parametrize(
    "function", [listen, [].append, print, functools.partial(print, "step:"), lambda *args: None]
)
def test_a_function_that_can(function):
    Bus([]).on(AfterStep, function)


def test_it_is_refused_before_anything_starts(run_dir):
    run = build()
    with pytest.raises(ConfigurationError, match="did you mean on_before_clip"):
        Sentinel(
            run.model,
            run.optimizers,
            callbacks=[callback_with("on_before_clips", lambda self, event: None)],
            run_dir=run_dir,
        )
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Skip(max_skips=-1), "max_skips"),
        (lambda: Skip(window=0), "window"),
        (lambda: NanCallback(max_scaler_skips=0), "max_scaler_skips"),
        (lambda: NanCallback(state_every=-1), "state_every"),
        (lambda: NanCallback(action="skp"), "choose one of: continue, warn"),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_base_class_hears_nothing():
    bus = Bus([Callback(), Detector()])
    assert not any(bus.hears(event) for event in METHODS)
    assert bus.slot_names == ["functions", "Callback", "Detector"]
    assert Action.CONTINUE < Action.WARN
