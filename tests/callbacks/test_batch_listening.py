"""What is looked up concerns a training only if it is of its micro-batch, and nobody listens for longer."""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import logging
import os
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding

from gradsentinel import Action, BatchCallback, Kind, NanCallback, Sentinel
from gradsentinel.callbacks import batch_calls
from gradsentinel.callbacks.batch_links import Link, within
from gradsentinel.callbacks.batch_lookups import Lookups
from gradsentinel.callbacks.batch_matches import Matches
from gradsentinel.data.holdings import held_in
from gradsentinel.testing import clear_swallowed

ROWS = 20
PLAIN = [(owner, name, getattr(owner, name)) for owner, name, _ in batch_calls._FUNCTIONS]
STRANGE = torch.tensor([[1, 2, 25]])


def replaced():
    return any(getattr(owner, name) is not plain for owner, name, plain in PLAIN)


@pytest.fixture(autouse=True)
def _nothing_stays_replaced():
    yield
    assert not replaced()
    assert batch_calls._listening == []


class Model(nn.Module):
    def __init__(self, rows=ROWS) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.head = nn.Linear(8, rows)

    def forward(self, ids):
        return self.head(self.embed(ids))


def make(count, *, rows=ROWS, seed=0):
    data = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(rows, (4, 6), generator=data)  # noqa: E731
    return [{"input_ids": draw(), "labels": draw()} for _ in range(count)]


def loss_of(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def sentinel_of(model, run_dir, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    callbacks = [NanCallback(), BatchCallback(warmup=100, **settings)]
    return Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir)


def train(batches, run_dir, *, model=None, loss=loss_of, **settings):
    model = Model() if model is None else model
    with sentinel_of(model, run_dir, **settings) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss(model, batch))
            sentinel.step(max_norm=1.0)
    return sentinel


def fails(look_up):
    try:
        look_up()
    except IndexError:
        return True
    return False


# -- the listening ends --------------------------------------------------------------------------------


def test_a_loop_that_is_left_hears_nothing_more(run_dir):
    model = Model()
    with sentinel_of(model, run_dir) as sentinel:
        for _ in sentinel.steps(make(4)):
            assert replaced()
            break
        assert not replaced()
        assert fails(lambda: model(STRANGE))
    assert sentinel.incidents == ()


def test_an_error_that_the_program_handles_ends_it_without_a_close(run_dir):
    model = Model()
    sentinel = sentinel_of(model, run_dir)
    with contextlib.suppress(ZeroDivisionError):
        for _ in sentinel.steps(make(4)):
            1 / 0  # noqa: B018 - the program's own
    assert not replaced()
    host = weakref.ref(sentinel.host)
    del sentinel
    gc.collect()
    assert host() is None


class Silent:
    """Hears, and says nothing."""

    def looks_up(self, *_):
        return None

    def holds(self, numbers):
        return False


def test_a_listener_that_is_no_more_hears_nothing_more():
    """A sentinel that nobody has closed, and whose loop nobody has left, is dropped as a whole."""
    model = nn.Embedding(3, 2)
    calls = batch_calls.Calls(Silent(), [model])
    calls.begin(functions=True)
    assert replaced()
    assert len(model._forward_pre_hooks) == 1
    del calls
    gc.collect()
    assert not replaced()
    assert not model._forward_pre_hooks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_hears_nothing(run_dir):
    model = Model()
    with sentinel_of(model, run_dir) as sentinel:
        for batch in sentinel.steps(make(2)):
            child = os.fork()
            if not child:
                os._exit(0 if not replaced() and fails(lambda: model(STRANGE)) else 1)
            assert os.waitpid(child, 0)[1] == 0
            sentinel.backward(loss_of(model, batch))
            sentinel.step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_it_ends_with_the_backward_pass(by_hand, run_dir):
    """Also where nobody is to hear of that pass before the step, and where the loop runs it itself."""
    model = Model()
    with sentinel_of(model, run_dir) as sentinel:
        for batch in sentinel.steps(make(3)):
            assert replaced()
            loss = loss_of(model, batch)
            if by_hand:
                loss.backward()
            else:
                sentinel.backward(loss)
            assert replaced() is by_hand
            sentinel.step()
            assert not replaced()
    assert sentinel.applied_steps == 3


def test_a_miss_whose_step_never_comes_is_told_and_ends_nothing(run_dir, caplog):
    model, batches = Model(), make(3)
    batches[2]["input_ids"][1, 1] = 25
    with sentinel_of(model, run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            loss = loss_of(model, batch)
            if batch is batches[2]:
                break
            sentinel.backward(loss)
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.action is Action.WARN
    assert "input_ids[1, 1] is 25" in incident.message
    assert "the step was never made" in caplog.text


# -- whose numbers they are ----------------------------------------------------------------------------


def test_a_validation_in_the_loop_is_none_of_the_batch(run_dir):
    model, failed = Model(), []

    def loss(model, batch):
        failed.append(fails(lambda: model(STRANGE)))
        return loss_of(model, batch)

    sentinel = train(make(6), run_dir, model=model, loss=loss)
    assert failed == [True] * 6
    assert sentinel.incidents == ()


def test_a_table_of_another_model_is_left_alone(run_dir):
    """Even with a number that the batch has, too: there it has a row."""
    other, failed = nn.Embedding(5, 2), []

    def loss(model, batch):
        failed.append(fails(lambda: other(batch["input_ids"])))
        failed.append(fails(lambda: embedding(batch["input_ids"], torch.randn(5, 2))))
        return loss_of(model, batch)

    sentinel = train(make(6), run_dir, loss=loss)
    assert failed == [True] * 12
    assert sentinel.incidents == ()


@pytest.mark.parametrize("at", [0, 6])
def test_a_table_that_is_computed_of_a_parameter_is_the_models(at, run_dir):
    class Computed(Model):
        def forward(self, ids):
            return self.head(embedding(ids, self.embed.weight * 2.0))

    batches = make(8)
    batches[at]["input_ids"][1, 1] = 25
    assert [i.step for i in train(batches, run_dir, model=Computed()).incidents] == [at]


@pytest.mark.parametrize("field", ["input_ids", "labels"])
@pytest.mark.parametrize("at", [1, 7])
def test_a_bad_number_is_that_trainings_whose_batch_has_it(field, at, run_dir):
    """Two at once in one thread, of which the other one has more rows and classes."""
    models, batches = [Model(), Model(30)], [make(10), make(10, rows=30, seed=1)]
    batches[0][at][field][0, 0] = 25
    with sentinel_of(models[0], run_dir / "0") as one, sentinel_of(models[1], run_dir / "1") as other:
        for first, second in zip(one.steps(batches[0]), other.steps(batches[1]), strict=True):
            losses = loss_of(models[0], first), loss_of(models[1], second)
            for sentinel, loss in zip((one, other), losses, strict=True):
                sentinel.backward(loss)
                sentinel.step()
    assert [(i.step, f"{field}[0, 0] is 25" in i.message) for i in one.incidents] == [(at, True)]
    assert other.incidents == ()


def one_field(values):
    return SimpleNamespace(path="ids"), values


@pytest.mark.parametrize(
    ("make_numbers", "ours"),
    [
        (lambda ids: ids, True),
        (lambda ids: ids[:, 1:], True),
        (lambda ids: ids.clone(), True),
        (lambda ids: ids + 3, True),
        (lambda ids: ids[:, 1:].clone(), True),
        (lambda ids: ids.roll(1, 1), True),
        (lambda ids: torch.full_like(ids, 77), False),
        (lambda ids: torch.tensor([[1, 2, 25]]), False),
    ],
)
def test_the_host_and_the_device_decide_alike(make_numbers, ours):
    """The device's way runs on a CPU here: `on_device` asks for nothing that only the host can know."""
    ids = make(1)[0]["input_ids"]
    ids[2, 3] = ROWS + 1
    numbers, matches = make_numbers(ids), Matches()
    matches.take([one_field(ids)])
    bad = within(numbers, ROWS, None) != numbers
    assert bool(bad.any())
    assert bool(matches.on_host(numbers, bad, {})) is ours
    there = matches.on_device(numbers, ROWS, None)
    assert torch.equal(there, bad & ours)


def test_another_part_of_the_same_memory_is_another_batch():
    data = torch.arange(48).view(8, 6) % ROWS
    data[6, 0] = 99
    matches = Matches()
    matches.take([one_field(data[:4])])
    assert not bool(matches.on_device(data[4:], ROWS, None).any())


# -- what is learnt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[0, 1, 2, 3, 8], [0, 1, 2, 3, 4, 5, 9]])
def test_a_run_that_begins_with_bad_batches_learns_from_them(bad, run_dir):
    batches = make(12)
    for at in bad:
        batches[at]["input_ids"][1, 2] = 99
    assert [i.step for i in train(batches, run_dir).incidents] == bad


def test_a_field_that_is_looked_up_late_is_learnt_then(run_dir):
    batches = make(20)
    batches[14]["input_ids"][0, 0] = 55
    count = iter(range(20))

    def loss(model, batch):
        if next(count) < 8:
            return model.head(torch.ones(3, 8)).square().mean()
        return loss_of(model, batch)

    assert [i.step for i in train(batches, run_dir, loss=loss).incidents] == [14]


def test_a_field_that_is_never_looked_up_is_given_up(run_dir):
    heard = []

    def loss(model, batch):
        heard.append(replaced())
        return loss_of(model, batch)

    batches = [{**batch, "index": torch.arange(4) + 4 * at} for at, batch in enumerate(make(80))]
    assert train(batches, run_dir, loss=loss).incidents == ()
    assert heard == [True] * 64 + [False] * 16


def test_numbers_that_do_no_harm_now_and_then_do_not_end_it(run_dir):
    """Half of the batches are hashed by the loop, all with new numbers; one is forgotten there."""
    batches = make(60)
    for at in range(8, 48, 2):
        batches[at]["input_ids"][0, 0] = 1000 + at
    batches[54]["input_ids"][0, 0] = 55
    count = iter(range(60))

    def loss(model, batch):
        ids = batch["input_ids"] if next(count) == 54 else batch["input_ids"] % ROWS
        return loss_of(model, {**batch, "input_ids": ids})

    assert [i.step for i in train(batches, run_dir, loss=loss).incidents] == [54]


def test_a_link_that_is_refuted_is_taken_up_again():
    link = Link(ROWS, None, 0)
    for number in range(24):
        strangers = link.suspects(torch.tensor([100 + number]), 100.0 + number, 100.0 + number)
        assert strangers == {100 + number}
        link.spare(strangers)
    assert link.refuted
    assert link.suspects(torch.tensor([200]), 200.0, 200.0) == set()
    for _ in range(31):
        link.suspects(torch.tensor([3]), 3.0, 3.0)
    assert link.suspects(torch.tensor([201]), 201.0, 201.0) == {201}


@pytest.mark.parametrize("bad", [155, 156])
def test_a_label_of_eight_bits_is_not_taken_for_the_one_left_out(bad, run_dir):
    """156 is -100 modulo 256."""
    data = torch.Generator().manual_seed(0)
    batches = [
        {
            "x": torch.randn(8, 8, generator=data),
            "labels": torch.randint(ROWS, (8,), generator=data).to(torch.uint8),
        }
        for _ in range(8)
    ]
    batches[5]["labels"][3] = bad
    loss = lambda model, batch: cross_entropy(model.head(batch["x"]), batch["labels"])  # noqa: E731
    (incident,) = train(batches, run_dir, loss=loss).incidents
    assert f"labels[3] is {bad}" in incident.message


# -- switched off --------------------------------------------------------------------------------------


def test_a_program_that_handles_the_error_itself_switches_it_off(run_dir):
    batches, handled = make(20), []
    for at in range(3, 20, 5):
        batches[at]["input_ids"][0, 0] = 33

    def loss(model, batch):
        assert not replaced()
        try:
            return loss_of(model, batch)
        except IndexError:
            handled.append(batch)
            return loss_of(model, {**batch, "input_ids": batch["input_ids"].clamp(max=ROWS - 1)})

    sentinel = train(batches, run_dir, loss=loss, lookups=False)
    assert (sentinel.incidents, sentinel.applied_steps, len(handled)) == ((), 20, 4)


def test_a_failure_while_it_listens_is_an_incident_on_disk(run_dir, monkeypatch):
    monkeypatch.setattr(Lookups, "_source", lambda *_: 1 / 0)
    sentinel = train(make(4), run_dir)
    (incident,) = sentinel.incidents
    assert (incident.kind, incident.action) == (Kind.CALLBACK_ERROR, Action.WARN)
    assert "ZeroDivisionError" in incident.message
    events = [json.loads(line) for line in (run_dir / "events-rank0.jsonl").read_text().splitlines()]
    assert any(event["event"] == "incident" for event in events)
    assert sentinel.applied_steps == 4
    clear_swallowed()


def test_what_is_compiled_is_said_once_with_what_to_do(run_dir, monkeypatch, caplog):
    monkeypatch.setattr("gradsentinel.callbacks.batch_lookups.anything_compiled", lambda: True)
    with caplog.at_level(logging.INFO, "gradsentinel"):
        train(make(4), run_dir)
    said = [record.message for record in caplog.records if "ranges=" in record.message]
    assert len(said) == 1


# -- threads -------------------------------------------------------------------------------------------


def test_two_threads_that_begin_and_end_at_once_leave_nothing(monkeypatch):
    """One puts torch's functions back, and is held up there, while another one begins."""

    put_back, held = batch_calls._put_back, threading.Event()

    def slow():
        held.set()
        threading.Event().wait(0.2)
        put_back()

    monkeypatch.setattr(batch_calls, "_put_back", slow)
    one, other = (batch_calls.Calls(Silent(), []) for _ in range(2))

    def begin_and_end():
        one.begin(functions=True)
        one.end()

    thread = threading.Thread(target=begin_and_end)
    thread.start()
    assert held.wait(20)
    other.begin(functions=True)
    thread.join()
    assert replaced()
    other.end()
    assert not replaced()


def test_what_somebody_has_put_on_top_is_neither_lost_nor_called_twice(run_dir, monkeypatch):
    plain, called = torch.embedding, []

    def theirs(*args, **kwargs):
        called.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch, "embedding", theirs)
    train(make(3), run_dir)
    assert torch.embedding is theirs
    assert len(called) == 3
    monkeypatch.undo()


class _Again(torch.autograd.Function):
    """Looks up in its backward pass, as a checkpoint does."""

    @staticmethod
    def forward(ctx, x, look_up):
        ctx.look_up = look_up
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look_up()
        return gradient, None


@pytest.mark.parametrize(("within_backward", "failed"), [(True, False), (False, True)])
def test_a_thread_that_is_none_of_pythons_is_autograds_in_a_backward_pass_only(
    within_backward, failed, run_dir
):
    done, failures, batches = threading.Event(), [], make(4)
    batches[2]["input_ids"][1, 1] = 25

    def loss(model, batch):
        def work():
            look_up = lambda: failures.append(fails(lambda: model(batch["input_ids"])))  # noqa: E731
            if within_backward:
                _Again.apply(torch.ones(1, requires_grad=True), look_up).backward()
            else:
                look_up()
            done.set()

        if batch is batches[2]:
            _thread.start_new_thread(work, ())
            assert done.wait(20)
        return loss_of(model, batch)

    sentinel = train(batches, run_dir, loss=loss)
    assert failures == [failed]
    assert [i.step for i in sentinel.incidents] == [2]


# -- what an object of the batch only refers to --------------------------------------------------------


class Batch:
    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)


def test_an_array_that_a_batch_only_refers_to_is_not_read():
    whole = np.zeros((300_000, 2), np.float32)
    batch = Batch(x=torch.ones(4, 8), y=np.ones(4), source=whole, mean=np.ones(3))
    assert [path for path, _ in held_in(batch)] == ["x", "y", "mean"]
    large = Batch(images=np.zeros((4, 100_000), np.float32), labels=torch.zeros(4))
    assert [path for path, _ in held_in(large)] == ["images", "labels"]
    assert [path for path, _ in held_in(Batch(images=whole))] == ["images"]
    assert [path for path, _ in held_in({"x": torch.ones(4), "source": whole})] == ["x", "source"]


def test_a_read_only_array_is_read_where_it_is():
    array = np.arange(12.0).reshape(3, 4)
    array.flags.writeable = False
    ((_, tensor),) = held_in({"x": array})
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    address = weakref.ref(array)
    del array
    gc.collect()
    assert address() is not None
    assert tensor.sum() == 66
