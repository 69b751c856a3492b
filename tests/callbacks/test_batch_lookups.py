"""Numbers that no table of the model has are named and kept from it, without a word about the ranges."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gradsentinel
from gradsentinel import Action, BatchCallback, Kind, NanCallback, Sentinel
from gradsentinel.callbacks import batch_calls
from gradsentinel.callbacks.batch_lookups import Lookups
from loops import differences

ROWS, CLASSES = 20, 5
PLAIN = [(owner, name, getattr(owner, name)) for owner, name, _ in batch_calls._FUNCTIONS]


@pytest.fixture(autouse=True)
def _nothing_stays_replaced():
    yield
    assert all(getattr(owner, name) is plain for owner, name, plain in PLAIN)


class Model(nn.Module):
    """Looks tokens, their types and their places up."""

    def __init__(self, rows=ROWS) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 8)
        self.types = nn.Embedding(2, 8)
        self.places = nn.Embedding(7, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids, types=None):
        hidden = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        if types is not None:
            hidden = hidden + self.types(types)
        return self.head(torch.tanh(hidden.mean(1)))


def make(count, *, seed=0):
    data = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(ROWS, (6, 7), generator=data),
            "types": torch.randint(2, (6, 7), generator=data),
            "labels": torch.randint(CLASSES, (6,), generator=data),
            "id": [f"r{number}.{row}" for row in range(6)],
        }
        for number in range(count)
    ]


def plain_loss(model, batch):
    return cross_entropy(model(batch["input_ids"], batch["types"]), batch["labels"])


def train(batches, run_dir, *, loss=plain_loss, model=None, callbacks=None, accumulate=1, **settings):
    model = Model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    callbacks = [BatchCallback(warmup=100)] if callbacks is None else callbacks
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, **settings) as sentinel:
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(loss(model, batch))
            sentinel.step(max_norm=1.0)
    return sentinel


# -- must be dropped -----------------------------------------------------------------------------------


class Offset(nn.Module):
    """Adds one to what it is given: 0 is for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS + 1, 8, padding_idx=0)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head(self.embed(ids + 1).mean(1))


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8)
        self.head = nn.Linear(8, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


class Bag(nn.Module):
    """Sums bags of features up."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head(self.bag(ids))


class Function(nn.Module):
    """Has a table of its own, and no module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head(functional.embedding(ids, self.table).mean(1))


class Scaled(nn.Embedding):
    """An embedding with a forward pass of its own."""

    def forward(self, ids):
        return super().forward(ids) * 2.0


class TwoTables(nn.Module):
    """Looks the same numbers up in two tables, of which one is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(2 * ROWS, 8)
        self.small = nn.Embedding(ROWS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head((self.large(ids) + self.small(ids)).mean(1))


class Bounded(nn.Module):
    """Keeps the norm of what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8, max_norm=1.0)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class Checkpointed(nn.Module):
    """Looks up once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        hidden = checkpoint(lambda ids: torch.tanh(self.embed(ids)), ids, use_reentrant=False)
        return self.head(hidden.mean(1))


class Segments(nn.Module):
    """Labels each position of an image; 255 is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 1)

    def forward(self, image):
        return self.conv(image)


def scaled():
    model = Model()
    model.embed = Scaled(ROWS, 8)
    return model


def ids_only(model, batch):
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def language(model, batch):
    logits = model(batch["input_ids"])
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["lm"][:, 1:].flatten())


def log_likelihood(model, batch):
    return functional.nll_loss(model(batch["input_ids"], batch["types"]).log_softmax(1), batch["labels"])


def by_module(model, batch):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(batch["input_ids"]), batch["labels"])


def left_out_255(model, batch):
    return cross_entropy(model(batch["image"]), batch["mask"], ignore_index=255)


def lm(count):
    batches = make(count)
    for batch in batches:
        batch["lm"] = batch["input_ids"].clone()
        batch["lm"][:, :2] = -100
    return batches


def images(count):
    data = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        mask = torch.randint(CLASSES, (4, 6, 6), generator=data)
        mask[:, 0] = 255
        batches.append({"image": torch.randn(4, 3, 6, 6, generator=data), "mask": mask})
    return batches


def nested(count):
    return [{"a": [b["input_ids"], (b["types"], b["labels"])]} for b in make(count)]


def from_nested(model, batch):
    ids, (types, labels) = batch["a"]
    return cross_entropy(model(ids, types), labels)


@dataclass
class Record:
    """A batch that is no container."""

    ids: torch.Tensor
    labels: torch.Tensor


def records(count):
    return [Record(b["input_ids"], b["labels"]) for b in make(count)]


def from_record(model, batch):
    return cross_entropy(model(batch.ids), batch.labels)


def int32(count):
    return [{**b, "input_ids": b["input_ids"].int()} for b in make(count)]


def put(field, place, value):
    def spoil(batch):
        batch[field][place] = value

    return spoil


def put_nested(batch):
    batch["a"][1][0][2, 3] = 2


def put_record(batch):
    batch.ids[4, 1] = 33


BAD = {
    "an id": (make, Model, plain_loss, put("input_ids", (1, 4), ROWS), "input_ids[1, 4] is 20", 1),
    "a huge id": (make, Model, plain_loss, put("input_ids", (5, 6), 2**40), f"input_ids[5, 6] is {2**40}", 5),
    "a negative id": (make, Model, plain_loss, put("input_ids", (0, 0), -1), "input_ids[0, 0] is -1", 0),
    "a type": (make, Model, plain_loss, put("types", (3, 2), 2), "types[3, 2] is 2", 3),
    "a label": (make, Model, plain_loss, put("labels", 2, CLASSES), "labels[2] is 5", 2),
    "a negative label": (make, Model, plain_loss, put("labels", 2, -1), "labels[2] is -1", 2),
    "a label of a likelihood": (make, Model, log_likelihood, put("labels", 4, 9), "labels[4] is 9", 4),
    "a label, smoothed": (make, Model, by_module, put("labels", 4, 9), "labels[4] is 9", 4),
    "a token to predict": (lm, Tied, language, put("lm", (1, 5), ROWS), "lm[1, 5] is 20", 1),
    "an id, tied": (lm, Tied, language, put("input_ids", (1, 5), ROWS), "input_ids[1, 5] is 20", 1),
    "a feature of a bag": (make, Bag, ids_only, put("input_ids", (2, 2), 21), "input_ids[2, 2] is 21", 2),
    "no module": (make, Function, ids_only, put("input_ids", (2, 2), 21), "input_ids[2, 2] is 21", 2),
    "a subclass": (make, scaled, ids_only, put("input_ids", (2, 2), 21), "input_ids[2, 2] is 21", 2),
    "the smaller table": (make, TwoTables, ids_only, put("input_ids", (2, 2), 21), "0 to 19", 2),
    "an offset": (make, Offset, ids_only, put("input_ids", (2, 2), 20), "input_ids[2, 2] is 20", 2),
    "below an offset": (make, Offset, ids_only, put("input_ids", (2, 2), -2), "outside -1 to 19", 2),
    "a checkpoint": (make, Checkpointed, ids_only, put("input_ids", (2, 2), 20), "input_ids[2, 2] is 20", 2),
    "bounded norms": (make, Bounded, ids_only, put("input_ids", (2, 2), 20), "input_ids[2, 2] is 20", 2),
    "a class of a pixel": (images, Segments, left_out_255, put("mask", (3, 2, 1), 200), "mask[3, 2, 1]", 3),
    "a nested field": (nested, Model, from_nested, put_nested, "a[1][0][2, 3] is 2", 2),
    "a record": (records, Model, from_record, put_record, "ids[4, 1] is 33", 4),
    "32 bits": (int32, Model, ids_only, put("input_ids", (1, 1), 20), "input_ids[1, 1] is 20", 1),
}


@pytest.mark.parametrize("at", [0, 3, 9])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_number_is_named_and_its_step_dropped(name, at, run_dir):
    make_batches, make_model, loss, spoil, words, row = BAD[name]
    torch.manual_seed(0)
    model, batches, states = make_model(), make_batches(12), []
    spoil(batches[at])

    def noting(model, batch):
        states.append(copy.deepcopy(model.state_dict()))
        return loss(model, batch)

    sentinel = train(batches, run_dir, loss=noting, model=model)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind) == (at, Kind.NONFINITE_INPUT)
    assert incident.outcome.value == "skipped"
    assert words in incident.message
    assert incident.details["faults"] == ["out_of_range"]
    assert {sample.position for sample in incident.samples} == {row}
    assert differences(states[at], states[at + 1]) == [] or name == "bounded norms"
    assert sentinel.applied_steps == 11


@pytest.mark.parametrize("at", [0, 9])
def test_a_label_that_is_looked_up_before_it_is_predicted_is_named_as_a_label(at, run_dir):
    """As a decoder does: what is left out is padding there, and the last one falls off."""

    def loss(model, batch):
        shifted = torch.roll(batch["lm"], 1, 1)
        shifted[:, 0] = 0
        logits = model(torch.where(shifted == -100, 0, shifted))
        return cross_entropy(logits.flatten(0, 1), batch["lm"].flatten())

    batches = lm(12)
    batches[at]["lm"][3, 4] = ROWS
    (incident,) = train(batches, run_dir, loss=loss, model=Tied()).incidents
    assert "lm[3, 4] is 20, outside 0 to 19 (the 20 classes that the loss is given)" in incident.message
    assert "as 1 value(s) are" in incident.message
    assert {sample.position for sample in incident.samples} == {3}


def test_the_table_and_the_class_count_are_named(run_dir):
    batches = make(3)
    batches[1]["input_ids"][1, 4] = ROWS
    batches[2]["labels"][1] = CLASSES
    first, second = train(batches, run_dir).incidents
    assert "outside 0 to 19 (the 20 rows of embed), as 1 value(s) are" in first.message
    assert "r1.1" in first.message
    assert "outside 0 to 4 (the 5 classes that the loss is given)" in second.message
    assert any("another number in its place" in fact for fact in first.diagnosis.evidence)


def test_the_bad_micro_batch_of_a_window_is_named(run_dir):
    batches = make(9)
    batches[4]["input_ids"][3, 0] = 50
    (incident,) = train(batches, run_dir, accumulate=3).incidents
    assert (incident.step, incident.microbatch) == (1, 1)
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(3, "r4.3", "input_ids")]


def test_a_loop_that_runs_backward_itself_is_watched_too(run_dir):
    batches, model = make(8), Model()
    batches[6]["input_ids"][3, 0] = 50
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Sentinel(model, optimizer, callbacks=[BatchCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            plain_loss(model, batch).backward()
            sentinel.step(max_norm=1.0)
    assert [(i.step, i.outcome.value) for i in sentinel.incidents] == [(6, "skipped")]


@pytest.mark.parametrize("guard", ["host", "device"])
def test_the_standard_set_goes_on_after_a_bad_id(guard, run_dir):
    batches, model = make(12), Model()
    batches[7]["input_ids"][3, 0] = 50
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    with Sentinel(
        model,
        optimizer,
        callbacks=gradsentinel.standard(run_dir),
        run_dir=run_dir,
        forward=plain_loss,
        guard=guard,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(plain_loss(model, batch))
            sentinel.step(max_norm=1.0)
    (incident,) = [i for i in sentinel.incidents if i.action > Action.WARN]
    assert (incident.step, incident.kind) == (7, Kind.NONFINITE_INPUT)
    assert "input_ids[3, 0] is 50" in incident.message
    assert incident.diagnosis.cause == "data"
    assert sentinel.applied_steps == 11


@pytest.mark.parametrize("action", ["retry", "rollback"])
def test_computing_the_step_again_does_not_make_a_bad_id_good(action, run_dir):
    batches = make(10)
    batches[6]["input_ids"][3, 0] = 50
    callbacks = [NanCallback(), BatchCallback(action=action), gradsentinel.Retry(), gradsentinel.Rollback()]
    sentinel = train(batches, run_dir, callbacks=callbacks, forward=plain_loss)
    assert [i.step for i in sentinel.incidents] == [6]
    assert sentinel.incidents[0].outcome.value in {"skipped", "rolled_back"}


def test_a_table_that_grows_takes_more_ids(run_dir):
    batches, model = make(12), Model()
    batches[8]["input_ids"][1, 1] = 24
    batches[10]["input_ids"][1, 1] = 30

    def loss(model, batch):
        if batch is batches[6]:  # in place, as Hugging Face resizes
            model.embed.weight.data = torch.cat([model.embed.weight.data, torch.randn(10, 8)])
            model.embed.num_embeddings = 30
            model.embed.weight.grad = None
        return plain_loss(model, batch)

    sentinel = train(batches, run_dir, loss=loss, model=model)
    assert [i.step for i in sentinel.incidents] == [10]
    assert "the 30 rows of embed" in sentinel.incidents[0].message


def test_a_table_that_is_swapped_for_a_smaller_one_takes_fewer_ids(run_dir):
    batches, model = make(14), Model(40)
    for batch in batches[8:]:
        batch["input_ids"] %= 10
    batches[8]["input_ids"][1, 1] = 15
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Sentinel(model, optimizer, callbacks=[BatchCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(plain_loss(model, batch))
            sentinel.step(max_norm=1.0)
            if batch is batches[7]:
                model.embed = nn.Embedding(10, 8)
                optimizer.add_param_group({"params": list(model.embed.parameters())})
    assert [i.step for i in sentinel.incidents] == [8]
    assert "the 10 rows of embed" in sentinel.incidents[0].message


def test_warn_leaves_the_look_up_to_fail_and_explains_it(run_dir, caplog):
    batches = make(4)
    batches[2]["input_ids"][1, 4] = ROWS
    with pytest.raises(IndexError):
        train(batches, run_dir, callbacks=[BatchCallback(action="warn")])
    assert "input_ids[1, 4] is 20, outside 0 to 19" in caplog.text


def test_a_given_range_is_enough_for_a_number_that_no_link_knows(run_dir):
    """The number is beyond the range and beyond the table: the program does not fail on it."""
    batches = make(10)
    batches[8]["input_ids"][1, 4] = 77
    callback = BatchCallback(ranges={"input_ids": (0, ROWS)})
    sentinel = train(batches, run_dir, callbacks=[callback])
    assert {(i.step, i.outcome.value) for i in sentinel.incidents} == {(8, "skipped")}


# -- must never alarm ----------------------------------------------------------------------------------


def hashed(model, batch):
    return plain_loss(model, {**batch, "input_ids": batch["input_ids"] % ROWS})


def clamped(model, batch):
    return plain_loss(model, {**batch, "input_ids": batch["input_ids"].clamp(0, ROWS - 1)})


def replaced(model, batch):
    ids = torch.where(batch["input_ids"] < 0, 0, batch["input_ids"])
    return plain_loss(model, {**batch, "input_ids": ids})


def one_less(model, batch):
    return plain_loss(model, {**batch, "input_ids": batch["input_ids"] - 1})


def classes_from_one(model, batch):
    return plain_loss(model, {**batch, "labels": batch["labels"] - 1})


def masked_by_hand(model, batch):
    kept = batch["labels"] >= 0
    return cross_entropy(model(batch["input_ids"])[kept], batch["labels"][kept])


def left_out_by_hand(model, batch):
    mask = batch["mask"]
    return cross_entropy(model(batch["image"]), torch.where(mask == 255, -100, mask))


def numbers_to_regress(model, batch):
    return (model(batch["input_ids"]).mean(1) - batch["labels"].float()).square().mean()


def soft(model, batch):
    return cross_entropy(model(batch["input_ids"]), functional.one_hot(batch["labels"] % CLASSES, 5).float())


def two_heads(model, batch):
    return plain_loss(model, batch) + plain_loss(model, {**batch, "labels": batch["coarse"] % 2})


def bce(model, batch):
    return functional.binary_cross_entropy_with_logits(model(batch["input_ids"]), (batch["many"] % 2).float())


def change(field, make_values):
    def benign(batches):
        data = torch.Generator().manual_seed(7)
        for number, batch in enumerate(batches):
            batch[field] = make_values(batch.get(field), number, data)
        return batches

    return benign


def late(field, make_values, first=15):
    """Beyond the table only when all that can be learnt was learnt."""

    def benign(batches):
        return batches[:first] + change(field, make_values)(batches[first:])

    return benign


def up_to(high):
    return lambda _, number, data: torch.randint(high, (6, 7), generator=data)


def some(value):
    def make_values(values, number, data):
        values.view(-1)[number % values.numel()] = value
        return values

    return make_values


def untouched(batches):
    return batches


BENIGN = {
    "nothing special": (make, Model, plain_loss, untouched),
    "hashed": (make, Model, hashed, change("input_ids", up_to(100000))),
    "hashed, large ones late": (make, Model, hashed, late("input_ids", up_to(100000))),
    "hashed, few large ones late": (make, Model, hashed, late("input_ids", some(21))),
    "clamped": (make, Model, clamped, change("input_ids", up_to(30))),
    "clamped late": (make, Model, clamped, late("input_ids", up_to(30))),
    "image tokens": (make, Model, replaced, change("input_ids", some(-200))),
    "image tokens late": (make, Model, replaced, late("input_ids", some(-200))),
    "ids from one": (make, Model, one_less, change("input_ids", lambda v, n, d: v + 1)),
    "ids to one": (make, Offset, ids_only, untouched),
    "classes from one": (make, Model, classes_from_one, change("labels", lambda v, n, d: v + 1)),
    "labels left out": (make, Model, plain_loss, change("labels", some(-100))),
    "labels left out late": (make, Model, plain_loss, late("labels", some(-100))),
    "labels left out by hand": (make, Model, masked_by_hand, change("labels", some(-1))),
    "labels left out by hand late": (make, Model, masked_by_hand, late("labels", some(-7))),
    "pixels left out": (images, Segments, left_out_255, untouched),
    "pixels left out by hand": (images, Segments, left_out_by_hand, untouched),
    "numbers to regress": (make, Model, numbers_to_regress, change("labels", lambda v, n, d: v * n * 99)),
    "soft labels": (make, Model, soft, change("labels", lambda v, n, d: v * (n + 1))),
    "a language": (lm, Tied, language, untouched),
    "two heads": (make, Model, two_heads, change("coarse", lambda v, n, d: torch.arange(6) * n)),
    "many labels": (make, Model, bce, change("many", lambda v, n, d: torch.full((6, 5), n))),
    "a counter": (make, Model, plain_loss, change("index", lambda v, n, d: torch.arange(6) + 6 * n)),
    "times": (make, Model, plain_loss, change("time", lambda v, n, d: torch.full((6,), 1_700_000_000 + n))),
    "lengths": (make, Model, plain_loss, change("lengths", lambda v, n, d: torch.full((6,), n * 100))),
    "places": (make, Model, plain_loss, change("position_ids", lambda v, n, d: torch.arange(42).view(6, 7))),
    "pixels": (make, Model, plain_loss, change("pixels", lambda v, n, d: torch.full((6, 7), 255).byte())),
    "two tables": (make, TwoTables, ids_only, untouched),
    "bags": (make, Bag, ids_only, untouched),
    "32 bits": (int32, Model, ids_only, untouched),
}


@pytest.mark.parametrize("name", BENIGN)
def test_a_healthy_run_is_left_alone_to_the_bit(name, run_dir):
    make_batches, make_model, loss, benign = BENIGN[name]
    torch.manual_seed(0)
    plain = make_model()
    watched = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), 1e-2)
    expected = []
    for batch in benign(make_batches(40)):
        value = loss(plain, batch)
        value.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    batches, found = benign(make_batches(40)), []
    originals = copy.deepcopy(batches)

    def noting(model, batch):
        value = loss(model, batch)
        found.append(value.item())
        return value

    sentinel = train(batches, run_dir, loss=noting, model=watched)
    assert sentinel.incidents == ()
    assert sentinel.applied_steps == 40
    assert found == expected
    assert differences(watched.state_dict(), plain.state_dict()) == []
    assert differences(batches, originals) == []


# -- how it listens ------------------------------------------------------------------------------------


def heard(batches, run_dir, monkeypatch, **settings):
    """Return in which micro-batches look-ups were heard."""
    begin, steps, number = batch_calls.Calls.begin, [], [0]

    def noting(self, *, functions):
        steps.append(number[0])
        begin(self, functions=functions)

    monkeypatch.setattr(batch_calls.Calls, "begin", noting)
    loss = settings.pop("loss", plain_loss)

    def counting(model, batch):
        number[0] += 1
        return loss(model, batch)

    sentinel = train(batches, run_dir, loss=counting, **settings)
    assert sentinel.incidents == ()
    return steps


def test_nothing_is_replaced_in_a_usual_step(run_dir, monkeypatch):
    assert heard(make(20), run_dir, monkeypatch) == [0, 1, 2, 3]


def test_a_new_field_is_learnt_when_it_comes(run_dir, monkeypatch):
    def loss(model, batch):
        return plain_loss(model, {**batch, "types": batch.get("more", batch["types"])})

    batches = make(20)
    for batch in batches[10:]:
        batch["more"] = batch["types"].flip(0)
    assert heard(batches, run_dir, monkeypatch, loss=loss) == [0, 1, 2, 3, 10, 11, 12, 13]


@pytest.mark.parametrize("name", ["hashed, large ones late", "clamped late", "labels left out late"])
def test_what_does_no_harm_is_soon_listened_to_no_more(name, run_dir, monkeypatch):
    make_batches, _, loss, benign = BENIGN[name]
    assert max(heard(benign(make_batches(60)), run_dir, monkeypatch, loss=loss)) < 40


def test_a_model_that_is_compiled_is_left_alone(run_dir, monkeypatch):
    begun = []
    monkeypatch.setattr("gradsentinel.callbacks.batch_lookups.anything_compiled", lambda: True)
    monkeypatch.setattr(batch_calls, "_replace", lambda: begun.append(1))
    train(make(6), run_dir)
    assert begun == []


def test_a_compiled_model_is_not_compiled_again(run_dir):
    from torch._dynamo.testing import CompileCounter  # noqa: PLC0415 - takes seconds

    torch._dynamo.reset()
    counter = CompileCounter()
    model = Model()
    compiled = torch.compile(model, backend=counter)
    loss = lambda _, batch: plain_loss(compiled, batch)  # noqa: E731
    try:
        train(make(8), run_dir, model=model, loss=loss)
    finally:
        torch._dynamo.reset()
    assert counter.frame_count == 1


def test_a_model_that_is_copied_in_the_middle_of_a_step_carries_nothing_along(run_dir):
    copies = []

    def loss(model, batch):
        copies.append((copy.deepcopy(model), pickle.dumps(model)))
        return plain_loss(model, batch)

    train(make(3), run_dir, loss=loss)
    for one, dumped in copies:
        with pytest.raises(IndexError):
            one(torch.tensor([[99]]))
        with pytest.raises(IndexError):
            pickle.loads(dumped)(torch.tensor([[99]]))  # noqa: S301 - our own bytes


def test_the_loop_that_looks_up_after_its_step_gets_the_error(run_dir):
    """Between a step and the next batch nothing is replaced."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with Sentinel(model, optimizer, callbacks=[BatchCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(make(3)):
            sentinel.backward(plain_loss(model, batch))
            sentinel.step()
            with pytest.raises(IndexError):
                model(torch.tensor([[99]]))
    assert sentinel.incidents == ()


def test_a_failure_of_the_watch_is_told_and_the_run_goes_on(run_dir, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("ours")

    monkeypatch.setattr(Lookups, "looks_up", broken)
    sentinel = train(make(3), run_dir)
    assert sentinel.applied_steps == 3
    assert "cannot be watched any more" in caplog.text
    gradsentinel.testing.clear_swallowed()


def test_two_trainings_at_once_hear_their_own_look_ups(run_dir):
    """One is in the midst of a step while the other one trains on a bad batch, and the other way round."""
    models = [Model(), Model()]
    batches = [make(6), make(6, seed=1)]
    batches[0][3]["types"][1, 1] = 7
    batches[1][4]["types"][2, 2] = 8
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in models]
    with (
        Sentinel(models[0], optimizers[0], callbacks=[BatchCallback()], run_dir=run_dir / "0") as one,
        Sentinel(models[1], optimizers[1], callbacks=[BatchCallback()], run_dir=run_dir / "1") as other,
    ):
        for first, second in zip(one.steps(batches[0]), other.steps(batches[1]), strict=True):
            losses = plain_loss(models[0], first), plain_loss(models[1], second)
            for sentinel, loss in zip((one, other), losses, strict=True):
                sentinel.backward(loss)
                sentinel.step()
    assert [i.step for i in one.incidents] == [3]
    assert [i.step for i in other.incidents] == [4]


def test_threads_of_the_program_are_not_heard(run_dir):
    failures = []

    def look_up(model, ids):
        try:
            model(ids)
        except IndexError as error:
            failures.append(error)

    def loss(model, batch):
        if batch is batches[2]:
            thread = threading.Thread(target=look_up, args=(model, batch["input_ids"]))
            thread.start()
            thread.join(20)
            batch = batches[1]
        return plain_loss(model, batch)

    batches = make(4)
    batches[2]["input_ids"][1, 1] = 99
    sentinel = train(batches, run_dir, loss=loss)
    assert len(failures) == 1
    assert sentinel.incidents == ()


def test_nothing_is_added_to_a_graph_that_is_being_captured(run_dir, monkeypatch):
    batches = make(3)
    batches[1]["input_ids"][1, 1] = ROWS
    monkeypatch.setattr(batch_calls, "_is_captured", lambda device: True)
    with pytest.raises(IndexError):
        train(batches, run_dir)
