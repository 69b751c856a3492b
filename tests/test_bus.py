"""Delivery of events, and what happens when a callback raises: the run is never made worse (P6)."""

import itertools
import logging

import pytest
import torch

from gradsentinel import (
    Action,
    AfterBackward,
    AfterStep,
    Batch,
    BeforeClip,
    Detector,
    Event,
    Evidence,
    Finding,
    Kind,
    NanCallback,
    Outcome,
    Recovery,
    RecoveryFailed,
    Responder,
    Rollback,
    RunEnd,
    Severity,
    Skip,
    StepStart,
    TrainingAborted,
    events,
    testing,
)
from gradsentinel.bus import Bus
from gradsentinel.state.archive import read_archive
from gradsentinel.state.saved_states import SNAPSHOT_KIND
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.store import RunDirectory
from loops import Spoiler, build, differences, fingerprint, finish, generators, make_batches, train_watched


def step_start(step=0):
    return StepStart(step=step)


class Recorder:
    """Hears events under a name and writes them into a shared list."""

    def __init__(self, heard, name="") -> None:
        self.heard, self.name = heard, name

    def __call__(self, event):
        self.heard.append((self.name, event.step) if self.name else event.step)


# -- delivery --------------------------------------------------------------------------------------


def test_events_arrive_in_order_of_registration():
    heard = []
    first = type("First", (Detector,), {"on_step_start": lambda self, event: heard.append("first")})()
    third = type("Third", (Detector,), {"on_step_start": lambda self, event: heard.append("third")})()
    bus = Bus([first])
    bus.on(StepStart, lambda event: heard.append("second"))
    bus.add(third)
    bus.emit(step_start())
    assert heard == ["first", "second", "third"]


def test_only_what_is_overridden_is_heard():
    bus = Bus([type("Mine", (Detector,), {"on_before_clip": lambda self, event: None})()])
    assert [event for event in events.METHODS if bus.hears(event)] == [BeforeClip]


def test_an_inherited_method_is_heard():
    base = type("Base", (Detector,), {"on_batch": lambda self, event: None})
    assert Bus([type("Derived", (base,), {})()]).hears(Batch)


def test_removing():
    heard = []
    bus = Bus([])
    handle = bus.on(StepStart, Recorder(heard))
    bus.emit(step_start(0))
    handle.remove()
    handle.remove()
    assert not bus.hears(StepStart)
    bus.emit(step_start(1))
    with bus.on(StepStart, Recorder(heard)):
        bus.emit(step_start(2))
    bus.emit(step_start(3))
    assert heard == [0, 2]


def test_removing_one_of_two_that_are_the_same_function():
    heard = []
    recorder, bus = Recorder(heard), Bus([])
    first, _ = bus.on(StepStart, recorder), bus.on(StepStart, recorder)
    first.remove()
    bus.emit(step_start())
    assert heard == [0]


def test_removing_while_the_event_is_delivered():
    heard, handles = [], []

    def leave(event):
        handles[0].remove()

    bus = Bus([])
    handles.append(bus.on(StepStart, leave))
    bus.on(StepStart, Recorder(heard))
    bus.emit(step_start(0))
    bus.emit(step_start(1))
    assert heard == [0, 1]
    assert len(bus.heard[StepStart]) == 1


def test_every_and_once():
    third, once, both = [], [], []
    bus = Bus([])
    bus.on(StepStart, Recorder(third), every=3)
    bus.on(StepStart, Recorder(once), once=True)
    bus.on(StepStart, Recorder(both), every=2, once=True)
    for step in range(1, 8):
        bus.emit(step_start(step))
    assert (third, once, both) == ([3, 6], [1], [2])


def test_findings_carry_the_slot_of_who_returned_them():
    def finding(name):
        return Finding(kind=Kind.CUSTOM, value=torch.tensor(False), message=name)

    bus = Bus([type("Pair", (Detector,), {"on_step_start": lambda self, e: [finding("a"), finding("b")]})()])
    bus.on(StepStart, lambda event: None)
    bus.on(StepStart, lambda event: finding("c"))
    bus.on(StepStart, lambda event: ())
    filed = bus.emit(step_start(7))
    assert [(entry.slot, entry.step, entry.finding.message) for entry in filed] == [
        (1, 7, "a"),
        (1, 7, "b"),
        (0, 7, "c"),
    ]


def test_slots_keep_their_place_and_have_names_of_their_own():
    """The layout is the same on all ranks, whatever failed or was registered on one of them alone."""
    bus = Bus([NanCallback(), NanCallback(), Skip()])
    handle = bus.on(StepStart, step_start)
    handle.remove()
    bus.on(StepStart, step_start)
    assert bus.slot_names == ["functions", "NanCallback", "NanCallback#2", "Skip"]
    assert bus.slots == 4


def test_responders_stand_in_order_of_their_rung():
    first, second, rollback = Skip(), Skip(), Rollback()
    assert Bus([rollback, first, NanCallback(), second]).responders() == [first, second, rollback]
    assert Bus([rollback, first, second]).responders()[0] is first


# -- events nobody hears ---------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """Count the event objects by class."""
    counts = dict.fromkeys(events.METHODS, 0)

    def counting(event):
        original = event.__init__

        def init(self, **fields):
            counts[event] += 1
            original(self, **fields)

        return init

    for event in counts:
        monkeypatch.setattr(event, "__init__", counting(event))
    return counts


PER_STEP = {StepStart: 5, Batch: 10, AfterBackward: 10, BeforeClip: 5}


def test_an_event_that_nobody_hears_is_not_even_made(made, run_dir):
    run = build(accumulate=2)
    with run.sentinel([], run_dir=run_dir) as sentinel:
        assert not any(sentinel._watch.bus.hears(event) for event in PER_STEP)
        finish(train_watched(run, sentinel, make_batches(10)))
    assert {event: made[event] for event in PER_STEP} == dict.fromkeys(PER_STEP, 0)


@pytest.mark.parametrize("event", PER_STEP)
def test_an_event_that_somebody_hears_is_made_once_for_all(event, made, run_dir):
    heard = []
    run = build(accumulate=2)
    with run.sentinel([], run_dir=run_dir) as sentinel:
        handles = [sentinel.on(event, heard.append) for _ in range(3)]
        finish(train_watched(run, sentinel, make_batches(10)))
        assert made[event] == PER_STEP[event]
        assert len(heard) == 3 * made[event]
        assert len(set(map(id, heard))) == made[event]
        for handle in handles:
            handle.remove()
        assert not sentinel._watch.bus.hears(event)
        finish(train_watched(run, sentinel, make_batches(10)))
    assert made[event] == PER_STEP[event]
    assert sum(made[other] for other in PER_STEP) == made[event]


def test_the_order_and_number_of_events_in_a_run(run_dir):
    """As the design lists them: once per run, step, micro-batch or incident."""
    order = []
    run = build(accumulate=2)
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        for event in events.METHODS:
            sentinel.on(event, lambda event: order.append((type(event).__name__, event.step)))
        finish(train_watched(run, sentinel, make_batches(4), spoil=Spoiler("loss", frozenset({3}))))
    head = ["StepStart", "Batch", "AfterBackward", "Batch", "AfterBackward", "BeforeClip"]
    told = ["IncidentEvent", "DiagnosisEvent", "RecoveryEvent"]
    expected = [(name, 0) for name in [*head, "AfterStep"]]
    expected += [(name, 1) for name in [*head, *told, "AfterStep"]]
    assert order == [*expected, ("RunEnd", 2)]


# -- a detector that raises ------------------------------------------------------------------------


def train(callbacks, run_dir):
    """Train with one fault in it, so that every kind of event occurs; return the sentinel and its end."""
    run = build(scheduler="cosine", max_norm=1.0, random=True)
    sentinel = run.sentinel(callbacks, run_dir=run_dir)
    with sentinel:
        finish(train_watched(run, sentinel, make_batches(8), spoil=Spoiler("loss", frozenset({4}))))
    return sentinel, {**run.state(), "losses": run.losses, "generators": generators()}


def broken(method, error):
    calls = []

    def fail(self, event):
        calls.append(event.step)
        raise error

    return type("Broken", (Detector,), {method: fail})(), calls


@pytest.mark.expects_swallowed
@pytest.mark.parametrize("method", events.METHODS.values())
def test_a_detector_that_raises_is_reported_and_switched_off(method, run_dir, tmp_path, caplog):
    _, expected = train([NanCallback(), Rollback(every=3)], tmp_path / "without")
    error = RuntimeError("out of luck")
    detector, calls = broken(method, error)
    with caplog.at_level(logging.ERROR):
        sentinel, outcome = train([detector, NanCallback(), Rollback(every=3)], run_dir)
    assert differences(outcome, expected) == []
    assert len(calls) == 1
    assert testing.swallowed() == [error]
    assert f"Broken raised in {method} and is switched off" in caplog.text

    stored = RunDirectory(run_dir).read_incidents()
    assert sorted(str(incident.kind) for incident in stored) == ["callback_error", "nonfinite_loss"]
    (incident,) = [incident for incident in stored if incident.kind is Kind.CALLBACK_ERROR]
    assert incident.detector == "Broken"
    assert "Broken raised RuntimeError: out of luck" in incident.message
    assert incident.severity is Severity.ERROR
    assert (incident.action, incident.outcome) == (Action.WARN, Outcome.REPORTED)
    assert [entry.id for entry in sentinel.incidents if entry.kind is Kind.CALLBACK_ERROR] == [incident.id]


@pytest.mark.expects_swallowed
def test_the_other_methods_of_a_detector_that_raised_are_switched_off_too(run_dir):
    heard = []

    class Broken(Detector):
        def on_before_clip(self, event):
            raise ValueError("once")

        def on_after_step(self, event):
            heard.append(event.step)

    train([Broken(), NanCallback()], run_dir)
    assert heard == []


@pytest.mark.expects_swallowed
def test_a_function_that_raises_is_reported_and_switched_off(run_dir):
    calls = []

    def listens_badly(event):
        calls.append(event.step)
        raise ValueError("no")

    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, listens_badly)
        sentinel.on(AfterStep, listens_badly)  # the same function: it is switched off as a whole
        finish(train_watched(run, sentinel, make_batches(4)))
    assert calls == [0]
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.detector) == (Kind.CALLBACK_ERROR, "listens_badly")


@pytest.mark.expects_swallowed
@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("no finding", "returned str"),
        (3, "TypeError"),
        (True, "TypeError"),
        (Finding(kind=Kind.CUSTOM, value=torch.zeros(2)), "shape (2,)"),
        (Finding(kind=Kind.CUSTOM, value=torch.ones((), device="meta")), "on meta; it must be a real number"),
        (Finding(kind=Kind.CUSTOM, value=torch.tensor(1j)), "complex64 on cpu; it must be a real number"),
        (Finding(kind=Kind.CUSTOM, value=torch.tensor(1.0), limit="2"), "limit is a str"),
        (Finding(kind=Kind.CUSTOM, value=torch.tensor(1.0), action="skip"), "action is 'skip'"),
        ([Finding(kind=Kind.CUSTOM, value=torch.tensor(0.0)), "more"], "returned str"),
    ],
)
def test_a_detector_that_returns_something_else_is_reported(found, words, run_dir):
    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, lambda event: found)
        finish(train_watched(run, sentinel, make_batches(3)))
    (incident,) = sentinel.incidents
    assert incident.kind is Kind.CALLBACK_ERROR
    assert words in incident.message


@pytest.mark.expects_swallowed
def test_no_other_callback_misses_the_event(run_dir):
    heard = []
    detector, _ = broken("on_before_clip", RuntimeError("first in line"))
    run = build()
    with run.sentinel([detector, NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, Recorder(heard))
        finish(train_watched(run, sentinel, make_batches(3), spoil=Spoiler("loss", frozenset({0}))))
    assert heard == [0, 1, 2]
    assert {str(incident.kind) for incident in sentinel.incidents} == {"nonfinite_loss", "callback_error"}


def suspicion(confirm):
    return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.SKIP, confirm=confirm)


@pytest.mark.expects_swallowed
def test_a_suspicion_stands_if_looking_closer_fails(run_dir, caplog):
    """Nobody knows that the step is good, so it is dropped; the detector stays on duty."""

    def confirm():
        raise LookupError("where was it")

    run = build()
    states = []
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, lambda event: suspicion(confirm) if event.step in {1, 3} else None)
        steps = train_watched(run, sentinel, make_batches(5))
        states.extend(fingerprint(run.state()) for _ in steps)
    assert [a == b for a, b in itertools.pairwise(states)] == [True, False, True, False]
    assert [(incident.step, incident.kind) for incident in sentinel.incidents] == [
        (1, Kind.CUSTOM),
        (3, Kind.CUSTOM),
    ]
    assert "looking closer failed: where was it" in sentinel.incidents[0].message
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.SKIPPED] * 2
    assert "LookupError" in caplog.text
    assert len(testing.swallowed()) == 2


def test_a_suspicion_that_is_withdrawn_leaves_no_trace(run_dir):
    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, lambda event: suspicion(lambda: None))
        finish(train_watched(run, sentinel, make_batches(3)))
    assert sentinel.incidents == ()
    assert sentinel.applied_steps == 3


def test_evidence_that_json_cannot_hold_does_not_stop_the_run(run_dir):
    """A detector may put tensors and other objects into its details."""
    evidence = Evidence(
        kind=Kind.CUSTOM,
        action=Action.SKIP,
        message="odd details",
        details={"tensor": torch.tensor(3.0), "where": {1, 2}, "object": object(), "dtype": torch.float16},
    )
    run = build()
    with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
        sentinel.on(BeforeClip, lambda event: suspicion(lambda: evidence) if event.step == 1 else None)
        finish(train_watched(run, sentinel, make_batches(3)))
    (stored,) = RunDirectory(run_dir).read_incidents()
    assert stored.outcome is Outcome.SKIPPED
    assert set(stored.details) == {"tensor", "where", "object", "dtype"}


# -- what passes through ---------------------------------------------------------------------------


class Leave(BaseException):
    """No Exception, like KeyboardInterrupt."""


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), Leave()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("method", events.METHODS.values())
def test_what_is_no_exception_passes_through_every_event(method, error, run_dir):
    detector, calls = broken(method, error)
    with pytest.raises(type(error)) as caught:
        train([detector, NanCallback(), Rollback(every=3)], run_dir)
    assert caught.value is error
    assert len(calls) == 1
    assert testing.swallowed() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_it_passes_through_confirming_and_recovering_too(error, run_dir, tmp_path):
    def fail(*_):
        raise error

    for number, callbacks in enumerate(
        [
            [type("Doubts", (Detector,), {"on_before_clip": lambda self, event: suspicion(fail)})()],
            [NanCallback(), type("Rescue", (Responder,), {"rung": Action.RETRY, "respond": fail})()],
            [NanCallback(), type("Rescue", (Responder,), {"rung": Action.RETRY, "escalates": fail})()],
        ]
    ):
        with pytest.raises(type(error)) as caught:
            train(callbacks, run_dir / str(number))
        assert caught.value is error


@pytest.mark.parametrize("method", events.METHODS.values())
def test_a_callback_may_stop_the_run_itself(method, run_dir):
    error = TrainingAborted("enough")
    detector, _ = broken(method, error)
    with pytest.raises(TrainingAborted) as caught:
        train([detector, NanCallback()], run_dir)
    assert caught.value is error
    assert testing.swallowed() == []


def test_the_last_event_tells_why_the_run_ended(run_dir):
    ends = []
    run = build()

    def train_until_it_breaks():
        with run.sentinel([NanCallback()], run_dir=run_dir) as sentinel:
            sentinel.on(RunEnd, ends.append)
            for _ in sentinel.steps(make_batches(2)):
                raise FileNotFoundError("data")

    with pytest.raises(FileNotFoundError):
        train_until_it_breaks()
    assert [str(event.error) for event in ends] == ["data"]
    last = list(RunDirectory(run_dir).read_events())[-1]
    assert (last["event"], last["error"]) == ("run_end", "FileNotFoundError: data")


# -- a responder that raises -----------------------------------------------------------------------


def raising(method, error):
    def fail(self, incident, run):
        raise error

    return type("Rescue", (Responder,), {"rung": Action.RETRY, method: fail})()


@pytest.mark.parametrize("method", ["respond", "escalates"])
def test_a_responder_that_raises_stops_the_run_with_the_last_good_state_on_disk(method, run_dir):
    error = OSError("no room")
    run = build(scheduler="cosine")
    batches = make_batches(12)
    spoiler = Spoiler("loss", frozenset({9}))
    callbacks = [NanCallback(), raising(method, error), Rollback(every=3, confirm_after=2)]
    states = {}
    with run.sentinel(callbacks, run_dir=run_dir) as sentinel, pytest.raises(RecoveryFailed) as caught:
        states.update(
            (done, fingerprint(run.state()["parameters"]))
            for done in train_watched(run, sentinel, batches, spoil=spoiler)
        )
    assert caught.value.__cause__ is error
    assert "Rescue failed on this rank: no room" in str(caught.value)

    # the step itself is undone, and nothing of it is left
    assert fingerprint(run.state()["parameters"]) == states[9]
    assert all(p.grad is None for p in run.model.parameters())

    (incident,) = RunDirectory(run_dir).read_incidents()
    assert (incident.outcome, incident.severity) == (Outcome.ABORTED, Severity.CRITICAL)
    assert "no room" in incident.recovery

    # taken after 6 steps and proved sound by the next two
    (path,) = RunDirectory(run_dir).snapshots.iterdir()
    assert str(path) in str(caught.value)
    assert str(run_dir / "incidents" / incident.id) in str(caught.value)
    state, meta = read_archive(path, kind=SNAPSHOT_KIND)
    assert meta["step"] == 6
    assert meta["known_good"] is True
    snapshot = Snapshot.from_tree(state)
    assert fingerprint(snapshot.parameters) == states[6]


def test_a_responder_that_has_no_answer_hands_over(run_dir):
    class Passes(Responder):
        rung = Action.RETRY

        def respond(self, incident, run):
            return None

    sentinel, _ = train([NanCallback(), Passes()], run_dir)
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.SKIPPED]


def test_a_responder_may_make_new_gradients(run_dir):
    """What comes back with apply=True is looked at again, clipped and applied."""

    class Zero(Responder):
        rung = Action.RETRY

        def respond(self, incident, run):
            for _, parameter in run.host.named_parameters():
                parameter.grad = torch.full_like(parameter, 3.0)
            return Recovery(outcome=Outcome.RETRIED, apply=True, message="made anew")

    run = build(optimizer="sgd")
    with run.sentinel([NanCallback(), Zero()], run_dir=run_dir) as sentinel:
        finish(train_watched(run, sentinel, make_batches(3), spoil=Spoiler("loss", frozenset({1}))))
    assert [incident.outcome for incident in sentinel.incidents] == [Outcome.RETRIED]
    assert sentinel.applied_steps == 3
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_every_event_is_an_event():
    assert all(issubclass(event, Event) for event in events.METHODS)
