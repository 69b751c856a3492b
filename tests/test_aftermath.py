"""Who keeps books hears of healthy steps some steps late: all of them, in order, and before it matters."""

import math

import pytest
import torch

from gradsentinel import (
    AfterStep,
    Callback,
    ConfigurationError,
    IncidentEvent,
    NanCallback,
    Sentinel,
    SpikeCallback,
    TrainingAborted,
)
from gradsentinel.callbacks.event_log import EventLog
from loops import build, make_batches


class Books(Callback):
    """Writes down which step's end it hears of, and how far the run was then."""

    prompt_every = None

    def __init__(self, run):
        self.run = run
        self.heard = []
        self.lines = []

    def on_after_step(self, event):
        self.heard.append((event.step, self.run["at"]))
        self.lines.append(("step", event.step))

    def on_incident(self, event):
        self.lines.append(("incident", event.step))

    def on_run_end(self, event):
        self.lines.append(("end", event.step))

    def state_dict(self):
        return {"heard": len(self.heard)}


class Often(Books):
    prompt_every = 4


class Prompt(Books):
    prompt_every = 1


def drive(sentinel, run, at, steps, *, spoil=None, each=lambda step: None):
    for number, batch in enumerate(sentinel.steps(make_batches(steps))):
        at["at"] = number
        sentinel.backward(run.loss(batch))
        if number == spoil:
            next(iter(run.model.parameters())).grad.fill_(math.nan)
        sentinel.step()
        each(number)


def quiet():
    """No state is looked at, and no line of the log is due: nothing makes anybody hear at once."""
    return [NanCallback(state_warmup=0, state_every=0), EventLog(every=None)]


def test_all_steps_are_heard_of_in_order_and_at_most_seven_late(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Books(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 30)
        assert len(books.heard) == 24
    assert [step for step, _ in books.heard] == list(range(30))
    assert {now - step for step, now in books.heard[:24]} == set(range(8))
    assert books.lines[-2:] == [("step", 29), ("end", 30)]


def test_one_who_hears_at_once_has_all_hear_at_once(run_dir):
    run, at = build(optimizer="sgd"), {}
    books, prompt = Books(at), Prompt(at)
    with run.sentinel([*quiet(), books, prompt], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 12)
    assert books.heard == prompt.heard == [(step, step) for step in range(12)]


def test_at_once_after_some_steps_only(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Often(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 10)
    assert dict(books.heard) == {
        0: 0,
        **dict.fromkeys((1, 2, 3, 4), 4),
        **dict.fromkeys((5, 6, 7, 8), 8),
        9: 9,
    }


def test_what_was_before_an_incident_is_heard_before_it(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Books(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 14, spoil=11)
    steps = [("step", step) for step in range(12)]
    assert books.lines[:13] == [*steps[:11], ("incident", 11), steps[11]]


def test_a_state_knows_all_steps_before_it(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Books(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(
            sentinel,
            run,
            at,
            6,
            each=lambda step: at.update({step: sentinel.state_dict()["callbacks"]["Books"]["heard"]}),
        )
    assert [at[step] for step in range(6)] == [1, 2, 3, 4, 5, 6]


def test_who_comes_later_hears_of_what_comes_later(run_dir):
    run, at, late = build(optimizer="sgd"), {}, []

    def join(step):
        if step == 4:
            sentinel.on(AfterStep, lambda event: late.append(event.step), once=True)

    books = Books(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 8, each=join)
    assert late == [5]
    assert [step for step, _ in books.heard] == list(range(8))


def test_the_end_of_a_run_that_fails_is_heard_of_last(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Books(at)

    def fail(step):
        if step == 5:
            raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel,
    ):
        drive(sentinel, run, at, 8, each=fail)
    assert books.lines == [*(("step", step) for step in range(6)), ("end", 6)]


@pytest.mark.expects_swallowed
def test_one_who_raises_is_switched_off_and_the_others_go_on(run_dir):
    run, at = build(optimizer="sgd"), {}

    class Broken(Books):
        def on_after_step(self, event):
            super().on_after_step(event)
            if event.step == 2:
                raise RuntimeError("book is full")

    broken, books = Broken(at), Books(at)
    with run.sentinel([*quiet(), broken, books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 12)
    assert [step for step, _ in broken.heard] == [0, 1, 2]
    assert [step for step, _ in books.heard] == list(range(12))
    assert any("book is full" in incident.message for incident in sentinel.incidents)


def test_who_hears_of_a_steps_begin_has_heard_of_the_end_before(run_dir):
    run, at = build(optimizer="sgd"), {}

    class Reader(Books):
        def on_batch(self, event):
            self.lines.append(("batch", event.step))

    books = Reader(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 4)
    assert books.lines[:-1] == [(what, step) for step in range(4) for what in ("batch", "step")]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_an_interval_that_is_none(wrong, run_dir):
    books = Books({})
    books.prompt_every = wrong
    with pytest.raises(ConfigurationError, match="prompt_every="):
        build(optimizer="sgd").sentinel([books], run_dir=run_dir)


def test_if_one_stops_the_run_late_the_others_still_hear_of_all_steps(run_dir):
    """It should have said that it hears at once; what waits behind the step that it stops at is not lost."""
    run, at = build(optimizer="sgd"), {}

    class Stops(Books):
        prompt_every = None

        def on_after_step(self, event):
            if event.step == 2:
                raise TrainingAborted("enough")

        def on_run_end(self, event):
            self.lines.append(event.error)

    books, stops = Books(at), Stops(at)
    with (
        pytest.raises(TrainingAborted, match="enough"),
        run.sentinel([*quiet(), books, stops], run_dir=run_dir) as sentinel,
    ):
        drive(sentinel, run, at, 12)
    assert [step for step, _ in books.heard] == list(range(8))
    assert isinstance(stops.lines[-1], TrainingAborted)


def test_a_stop_that_is_heard_of_at_the_end_is_why_the_run_ends(run_dir):
    run, at, ends = build(optimizer="sgd"), {}, []

    class Stops(Books):
        prompt_every = None

        def on_after_step(self, event):
            if event.step == 3:
                raise TrainingAborted("enough")

        def on_run_end(self, event):
            ends.append(event.error)

    sentinel = run.sentinel([*quiet(), Stops(at)], run_dir=run_dir)
    drive(sentinel, run, at, 5)
    with pytest.raises(TrainingAborted, match="enough"):
        sentinel.close()
    assert [str(error) for error in ends] == ["enough"]


def test_a_fact_for_the_log_does_not_wait(run_dir):
    run, at = build(optimizer="sgd"), {}
    books = Books(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        drive(
            sentinel,
            run,
            at,
            6,
            each=lambda step: sentinel._watch.run.journal.append(("note", {})) if step == 2 else None,
        )
    assert books.heard[:4] == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_what_is_loaded_comes_behind_what_waits(run_dir):
    """A state that is taken back is not counted on by steps from before it."""
    run, at = build(optimizer="sgd"), {}

    class Counts(Books):
        def load_state_dict(self, state):
            self.lines.append(("loaded", state["heard"]))

    books = Counts(at)
    with run.sentinel([*quiet(), books], run_dir=run_dir) as sentinel:
        state = {**sentinel.state_dict(), "callbacks": {"Counts": {"heard": 99}}}
        drive(sentinel, run, at, 3)
        sentinel.load_state_dict(state)
        assert books.lines == [("step", 0), ("step", 1), ("step", 2), ("loaded", 99)]


def test_a_subclass_with_an_ear_of_its_own_hears_at_once(run_dir):
    at, heard = {}, []

    class Mine(NanCallback):
        def on_after_step(self, event):
            heard.append((event.step, at["at"]))
            return super().on_after_step(event)

    run = build(optimizer="sgd")
    watch = [Mine(state_warmup=0, state_every=0), EventLog(every=None)]
    with run.sentinel(watch, run_dir=run_dir) as sentinel:
        drive(sentinel, run, at, 6)
    assert heard == [(step, step) for step in range(6)]


class Expecting(SpikeCallback):
    """Writes down what each step is compared with."""

    prompt_every = None

    def calm(self, step, norm, losses):
        answer = super().calm(step, norm, losses)
        self.expected = [*getattr(self, "expected", []), (step, answer, *self.limits())]
        return answer

    def limits(self):
        series = self._series.get("all", {})
        return [(b.band.low, b.band.high) if b.band else None for b in series.values()]


@pytest.mark.parametrize("seed", range(4))
def test_a_spike_is_compared_with_the_same_as_if_all_were_heard_at_once(seed, run_dir):
    """Losses with a heavy tail, spikes and a new level: whatever makes the bounds move."""
    seen = []
    for others in ([], [Prompt({"at": 0})]):
        torch.manual_seed(seed)
        weight = torch.nn.Parameter(torch.ones(3))
        spikes = Expecting()
        factors = torch.randn(400).mul(0.4).exp()
        factors[150::37] *= 30
        factors[300:] *= 6
        with Sentinel(
            torch.nn.ParameterList([weight]),
            torch.optim.SGD([weight], lr=1e-9),
            callbacks=[NanCallback(state_every=0), spikes, EventLog(every=None), *others],
            run_dir=run_dir / str(len(others)),
        ) as sentinel:
            for factor in sentinel.steps(factors.tolist()):
                sentinel.backward((weight * factor).sum())
                sentinel.step()
        seen.append((spikes.expected, spikes.state_dict(), [one.step for one in sentinel.incidents]))
    late, prompt = seen
    assert late[0] == prompt[0]
    assert late[1:] == prompt[1:]
    assert late[2]


# -- random states that nobody wants ---------------------------------------------------------------


def noted(run, callbacks, run_dir, **settings):
    """Return whether the random states before each micro-batch were noted, by step."""
    found = []
    with run.sentinel(callbacks, run_dir=run_dir, **settings) as sentinel:
        for number, batch in enumerate(sentinel.steps(make_batches(4))):
            if number == 2:
                sentinel.on(IncidentEvent, lambda event: None)
            found.append(sentinel._watch.run.scene.microbatches[-1].noted is not None)
            sentinel.backward(run.loss(batch))
            sentinel.step()
    return found


def test_random_states_are_noted_where_somebody_may_want_them(run_dir):
    class Own(Callback):
        pass

    class Curious(NanCallback):
        def on_incident(self, event):
            assert event.scene["rng"] is not None

    def of(name, callbacks, **settings):
        return noted(build(optimizer="sgd"), callbacks, run_dir / name, **settings)

    assert of("nobody", [NanCallback(), SpikeCallback()]) == [False, False, False, True]
    assert of("callback", [NanCallback(), Own()]) == [True] * 4
    assert of("subclass", [Curious()]) == [True] * 4
    assert of("forward", [NanCallback()], forward=lambda model, batch: None) == [True] * 4
