"""Bad data is named by record before it spoils the weights, and healthy data of every kind is left alone."""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradsentinel import Action, BatchCallback, ConfigurationError, Kind, NanCallback, Sentinel
from gradsentinel.data.holdings import held_in
from gradsentinel.measures import mailbox
from loops import build, differences, finish, generators, make_batches, train_by_hand, train_watched

NAN, INF = float("nan"), float("inf")


class Model(nn.Module):
    """Reads tokens and numbers, of which it uses what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.numbers = nn.Linear(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens=None, numbers=None):
        hidden = 0.0
        if tokens is not None:
            hidden = hidden + self.embed(tokens).mean(1)
        if numbers is not None:
            hidden = hidden + self.numbers(numbers)
        return self.head(torch.tanh(hidden))


def loss_of(model, batch):
    logits = model(batch.get("input_ids"), batch.get("x"))
    return cross_entropy(logits, batch["labels"]) if "labels" in batch else logits.square().mean()


def run_steps(
    batches, callback, run_dir, *, loss=loss_of, model=None, accumulate=1, more=(), optimizers=None
):
    model = Model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    callbacks = [callback, *more]
    with Sentinel(model, optimizers or optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(loss(model, batch))
            sentinel.step(max_norm=1.0)
    return sentinel


def make(count, *, seed=0):
    data = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(20, (6, 7), generator=data),
            "x": torch.randn(6, 4, generator=data),
            "labels": torch.randint(5, (6,), generator=data),
            "id": [f"r{number}.{row}" for row in range(6)],
        }
        for number in range(count)
    ]


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


# -- wrong by itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("more", [[], [NanCallback()]], ids=["alone", "with NanCallback"])
def test_a_number_that_is_not_finite_drops_the_step_and_names_the_record(value, more, run_dir):
    batches, model = make(5), Model()
    batches[2]["x"][3, 1] = value
    states = []

    def loss(model, batch):
        states.append(weights(model))
        return loss_of(model, batch)

    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=loss, model=model, more=more)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind) == (2, Kind.NONFINITE_INPUT)
    assert incident.outcome.value == "skipped"
    assert incident.diagnosis.cause == "data"
    assert incident.diagnosis.phase == "input"
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(3, "r2.3", "x")]
    assert "x[3, 1]" in incident.message
    assert "r2.3" in incident.diagnosis.remedy[0]
    assert differences(states[2], states[3]) == []
    assert sentinel.applied_steps == 4


def test_a_batch_that_was_clamped_on_the_way_is_told_once_and_used(run_dir):
    batches = make(6)
    for number in (1, 3):
        batches[number]["x"][0, 0] = INF

    def loss(model, batch):
        return loss_of(model, {**batch, "x": batch["x"].clamp(-3, 3)})

    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=loss)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.action, incident.kind) == (1, Action.WARN, Kind.NONFINITE_INPUT)
    assert "finite all the same" in incident.message
    assert "allow_nonfinite" in incident.message
    assert sentinel.applied_steps == 6


def test_missing_values_on_purpose_are_no_fault(run_dir):
    batches = make(6)
    for batch in batches:
        batch["x"][::2, 1] = NAN
    batches[4]["labels"][:] = 99  # the next test: not a look-up here

    def loss(model, batch):
        known = torch.where(batch["x"].isnan(), 0.0, batch["x"])
        return loss_of(model, {"x": known})

    sentinel = run_steps(batches, BatchCallback(allow_nonfinite=["x"]), run_dir, loss=loss)
    assert sentinel.incidents == ()


def test_a_mask_of_minus_infinity_is_no_fault(run_dir):
    batches = make(4)
    for batch in batches:
        batch["bias"] = torch.zeros(6, 5).masked_fill(torch.eye(6, 5).bool(), -INF)

    def loss(model, batch):
        return (loss_of(model, batch) + (model(None, batch["x"]) + batch["bias"]).logsumexp(1).mean()) / 2

    assert run_steps(batches, BatchCallback(), run_dir, loss=loss).incidents == ()


def test_numbers_outside_of_given_ranges_drop_the_step(run_dir):
    """A look-up by indexing wraps -1 around: everything is finite, and wrong."""
    batches = make(5)
    batches[1]["input_ids"][2, 3] = -1
    batches[3]["input_ids"][5, 0] = -20

    def loss(model, batch):
        return model.head(model.embed.weight[batch["input_ids"]].mean(1)).square().mean()

    sentinel = run_steps(batches, BatchCallback(ranges={"input_ids": (0, 20)}), run_dir, loss=loss)
    assert [(i.step, i.kind, i.outcome.value) for i in sentinel.incidents] == [
        (1, Kind.NONFINITE_INPUT, "skipped"),
        (3, Kind.NONFINITE_INPUT, "skipped"),
    ]
    first = sentinel.incidents[0]
    assert "input_ids[2, 3] is -1" in first.message
    assert "0 to 19" in first.message
    assert [(s.position, s.id, s.field) for s in first.samples] == [(2, "r1.2", "input_ids")]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([0, 4, 1, 2, 3, 0], False),
        ([0, 4, -100, 2, 3, 0], False),
        ([0, 5, 1, 2, 3, 0], True),
        ([0, -5, -100, 1, 1, 1], True),
    ],
)
def test_labels_may_be_left_out_but_not_beyond_the_classes(labels, found, run_dir):
    batches = make(3)
    batches[1]["labels"] = torch.tensor(labels)

    def loss(model, batch):
        return loss_of(model, {"x": batch["x"], "labels": batch["labels"].clamp(0, 4)})

    sentinel = run_steps(batches, BatchCallback(ranges={"labels": (0, 5)}), run_dir, loss=loss)
    assert [i.step for i in sentinel.incidents] == [1] * found


def test_a_label_that_is_left_out_may_lie_within_the_range(run_dir):
    batches = make(3)
    batches[1]["labels"][0] = 255
    callback = BatchCallback(ranges={"labels": (0, 19)}, ignore_index=255)
    loss = lambda model, batch: loss_of(model, {"x": batch["x"]})  # noqa: E731
    assert run_steps(batches, callback, run_dir, loss=loss).incidents == ()


def test_ranges_name_nested_fields_by_path_or_last_name(run_dir, caplog):
    batches = [{"inner": {"ids": torch.tensor([[1, 30]])}, "x": torch.randn(1, 4)} for _ in range(2)]
    loss = lambda model, batch: loss_of(model, {"x": batch["x"]})  # noqa: E731
    for name, number in (("inner.ids", 2), ("ids", 2), ("other", 0)):
        sentinel = run_steps(batches, BatchCallback(ranges={name: (0, 20)}), run_dir / name, loss=loss)
        assert len(sentinel.incidents) == number
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("ranges=")] == [
        "ranges= names 'other', which the first batch does not have; its fields are 'inner.ids', 'x'"
    ]


def test_labels_that_are_all_ignored_explain_the_nan(run_dir):
    batches = make(4)
    batches[2]["labels"][:] = -100
    sentinel = run_steps(batches, BatchCallback(), run_dir, more=[NanCallback()])
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome.value) == (2, Kind.NONFINITE_INPUT, "skipped")
    assert "all 6 values of labels are -100" in incident.message
    assert incident.diagnosis.cause == "data"


def test_a_sum_over_no_labels_is_told_and_used(run_dir):
    batches = make(5)
    for number in (1, 3):
        batches[number]["labels"][:] = -100
    sum_of = lambda model, b: cross_entropy(model(None, b["x"]), b["labels"], reduction="sum")  # noqa: E731
    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=sum_of)
    assert [(i.step, i.action) for i in sentinel.incidents] == [(1, Action.WARN)]
    assert sentinel.applied_steps == 5


def test_some_ignored_labels_are_healthy(run_dir):
    batches = make(8)
    for batch in batches:
        batch["labels"][:4] = -100
    assert run_steps(batches, BatchCallback(), run_dir).incidents == ()


@pytest.mark.parametrize("batch", [{"x": torch.zeros(0, 4)}, {"x": torch.zeros(0, 4), "w": [torch.zeros(0)]}])
def test_an_empty_batch_drops_the_step(batch, run_dir):
    batches = make(3)
    batches[1] = batch
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome.value) == (1, Kind.NONFINITE_INPUT, "skipped")
    assert "empty" in incident.message


def test_a_field_that_is_empty_by_nature_is_healthy(run_dir):
    batches = make(5)
    for batch in batches:
        batch["boxes"] = [torch.zeros(0, 4), torch.rand(2, 4)]
    assert run_steps(batches, BatchCallback(), run_dir).incidents == ()


MASKS = {
    "kept, bool": ("attention_mask", lambda m: m),
    "kept, int": ("attention_mask", lambda m: m.long()),
    "kept, factors": ("attention_mask", lambda m: m.float()),
    "kept, added": ("attention_mask", lambda m: torch.zeros(m.shape).masked_fill(~m, -INF)),
    "kept, added, finite": (
        "attention_mask",
        lambda m: torch.zeros(m.shape).masked_fill(~m, torch.finfo().min),
    ),
    "padded, bool": ("key_padding_mask", lambda m: ~m),
    "padded, added": ("src_key_padding_mask", lambda m: torch.zeros(m.shape).masked_fill(~m, -INF)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fully", [False, True])
def test_a_record_that_is_masked_from_end_to_end(name, fully, run_dir):
    field, form = MASKS[name]
    batches = make(3)
    for number, batch in enumerate(batches):
        kept = torch.rand(6, 7) < 0.5
        kept[:, 0] = True
        kept[4] = not (fully and number == 1)
        batch[field] = form(kept)
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    assert [(i.step, i.action) for i in sentinel.incidents] == [(1, Action.WARN)] * fully
    if fully:
        assert [(s.position, s.id) for s in sentinel.incidents[0].samples] == [(4, "r1.4")]


def test_a_batch_without_any_mask_at_all_is_healthy(run_dir):
    batches = make(3)
    for batch in batches:
        batch |= {"attention_mask": torch.ones(6, 7), "key_padding_mask": torch.zeros(6, 7)}
    assert run_steps(batches, BatchCallback(), run_dir).incidents == ()


def test_a_mask_that_selects_nothing_explains_the_nan_and_is_no_fault_elsewhere(run_dir):
    """Case 05: on one rank no token is supervised."""
    batches = make(6)
    for number, batch in enumerate(batches):
        batch["loss_mask"] = torch.zeros(6) if number in {2, 4} else torch.ones(6)
    seen = []

    def loss(model, batch):
        seen.append(len(seen))
        each = cross_entropy(model(None, batch["x"]), batch["labels"], reduction="none")
        count = batch["loss_mask"].sum()
        return (each * batch["loss_mask"]).sum() / (count if len(seen) < 5 else count.clamp(min=1))

    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=loss, more=[NanCallback()])
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind) == (2, Kind.NONFINITE_INPUT)
    assert "nothing is selected" in incident.message


def test_the_bad_micro_batch_of_an_accumulated_step(run_dir):
    batches = make(6)
    batches[4]["x"][1, 2] = NAN
    sentinel = run_steps(batches, BatchCallback(), run_dir, accumulate=3)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.microbatch) == (1, 1)
    assert [s.id for s in incident.samples] == ["r4.1"]


def test_warn_lets_the_bad_step_through(run_dir):
    batches = make(3)
    batches[1]["x"][1, 2] = NAN
    sentinel = run_steps(batches, BatchCallback(action="warn"), run_dir)
    assert {i.action for i in sentinel.incidents} == {Action.WARN}
    assert sentinel.incidents[0].step == 1
    assert "all the same" not in sentinel.incidents[0].message
    assert sentinel.applied_steps == 3


# -- the program fails on it ---------------------------------------------------------------------------


def fails_on(batches, run_dir, callback=None):
    with pytest.raises(IndexError) as caught:
        run_steps(batches, callback or BatchCallback(action="warn"), run_dir)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes; the log has it")
def test_a_look_up_that_fails_is_explained(run_dir, caplog):
    batches = make(4)
    batches[2]["input_ids"][1, 4] = 20
    (note,) = fails_on(batches, run_dir)
    assert "input_ids[1, 4] is 20" in note
    assert "20 rows of embed" in note
    assert note.removeprefix("gradsentinel: ") in caplog.text


@pytest.mark.parametrize(
    ("compiled", "source"), [(False, "the 5 classes that the loss is given"), (True, "the 5 outputs of head")]
)
@pytest.mark.parametrize("bad", [5, -1])
def test_a_label_that_is_no_class_is_explained_in_the_log(
    bad, compiled, source, run_dir, caplog, monkeypatch
):
    """Where something is compiled nobody hears the look-up: what the model has is all there is to go by."""
    monkeypatch.setattr("gradsentinel.callbacks.batch_lookups.anything_compiled", lambda: compiled)
    batches = make(3)
    batches[1]["labels"][2] = bad
    fails_on(batches, run_dir)
    assert f"labels[2] is {bad}, outside 0 to 4 ({source})" in caplog.text


def test_a_failure_that_has_nothing_to_do_with_the_batch_is_not_explained(run_dir, caplog):
    def loss(model, batch):
        raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        run_steps(make(2), BatchCallback(), run_dir, loss=loss)
    assert "bad data" not in caplog.text


def test_a_failure_of_another_kind_does_not_blame_the_tables(run_dir, caplog):
    batches = make(2)
    batches[0]["labels"][0] = 50

    def loss(model, batch):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        run_steps(batches, BatchCallback(), run_dir, loss=loss)
    assert "bad data" not in caplog.text


def test_numbers_that_are_not_looked_up_are_not_judged_by_the_tables(run_dir):
    """Some models replace image tokens of -200 first, or hash their ids."""
    batches = make(4)
    for batch in batches:
        batch["input_ids"] = batch["input_ids"] * 1000 - 200
    loss = lambda model, b: loss_of(model, {**b, "input_ids": b["input_ids"] % 20})  # noqa: E731
    assert run_steps(batches, BatchCallback(), run_dir, loss=loss).incidents == ()


# -- out of the ordinary -------------------------------------------------------------------------------


def odd_ones(sentinel):
    return [(i.step, i.details["faults"]) for i in sentinel.incidents]


def test_a_record_far_larger_than_the_others_is_named(run_dir):
    batches = make(40)
    batches[30]["x"][4, 2] = 100.0
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.action) == (30, Kind.CUSTOM, Action.WARN)
    assert incident.details["faults"][0] == "outlier"
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(4, "r30.4", "x")]
    assert "up to 100" in incident.message
    assert sentinel.applied_steps == 40


def test_a_burst_of_outliers_does_not_hide_the_next_one(run_dir):
    batches = make(60)
    for number in (30, 31, 32, 50):
        batches[number]["x"][4, 2] = 100.0
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    (incident,) = sentinel.incidents  # one warning that goes on
    assert incident.details["repeated"] == 3
    assert incident.details["last_step"] == 50


# -- far beyond the others: dropped before it is learnt from ---------------------------------------------


def weighted(count):
    """Batches with a weight for each record, always 1: a field too small for statistics."""
    return [{**batch, "weight": torch.ones(6)} for batch in make(count)]


def weighted_loss(model, batch):
    losses = cross_entropy(model(batch["input_ids"], batch["x"]), batch["labels"], reduction="none")
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("value", [1e3, -1e3, 1e30])
def test_a_value_far_beyond_the_others_drops_the_step(value, own_backward, run_dir):
    """Loss and norm are as ever, and yet the update would be that of one record."""
    batches, model = weighted(40), Model()
    batches[30]["weight"][4] = value
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    seen = []
    with Sentinel(model, optimizer, callbacks=[NanCallback(), BatchCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            seen.append(weights(model))
            loss = weighted_loss(model, batch)
            if own_backward:
                loss.backward()
            else:
                sentinel.backward(loss)
            sentinel.step(max_norm=1.0)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, str(incident.outcome)) == (30, Kind.NONFINITE_INPUT, "skipped")
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(4, "r30.4", "weight")]
    assert (incident.diagnosis.cause, incident.details["faults"]) == ("data", ["outlier"])
    assert "about 1 is usual" in incident.message
    assert all(torch.equal(seen[31][name], value) for name, value in seen[30].items())
    assert sentinel.applied_steps == 39


def test_the_micro_batch_that_is_far_beyond_the_others(run_dir):
    batches = weighted(90)
    batches[3 * 25 + 2]["weight"][1] = 1e6
    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=weighted_loss, accumulate=3)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.microbatch, str(incident.outcome)) == (25, 2, "skipped")
    assert sentinel.applied_steps == 29


@pytest.mark.parametrize("settings", [{"drop_beyond": None}, {"action": "warn"}])
def test_what_is_far_beyond_may_be_only_told(settings, run_dir):
    batches = make(40)
    batches[30]["x"][4, 2] = 1e4
    sentinel = run_steps(batches, BatchCallback(**settings), run_dir)
    assert sentinel.applied_steps == 40
    assert [i.outcome.value for i in sentinel.incidents] == ["reported"] * len(sentinel.incidents)
    assert {i.step for i in sentinel.incidents} == {30}


def test_what_is_far_beyond_again_and_again_is_how_the_data_is(run_dir):
    batches, callback = weighted(80), BatchCallback()
    often = range(30, 80, 5)
    for number in often:
        batches[number]["weight"][4] = 1e4
    sentinel = run_steps(batches, callback, run_dir, loss=weighted_loss)
    dropped = [i.step for i in sentinel.incidents if i.outcome.value == "skipped"]
    assert dropped == list(often)[:3]
    assert sentinel.applied_steps == 77
    second = BatchCallback()
    second.load_state_dict(callback.state_dict())
    assert second.state_dict() == callback.state_dict()


def test_numbers_that_are_still_on_their_way_are_judged_on_the_device(run_dir, monkeypatch):
    """As with a batch on an accelerator: what arrives before the step is made does not matter."""
    batches, model = weighted(40), Model()
    batches[30]["weight"][4] = 1e3
    asked = []

    def late(letter):
        asked.append(letter)
        return asked.count(letter) > 2  # before the step is made it is asked for twice

    monkeypatch.setattr(mailbox.Letter, "arrived", late)
    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=weighted_loss, model=model)
    assert [(i.step, i.outcome.value) for i in sentinel.incidents] == [(30, "skipped")]


def test_heavy_tails_and_fields_that_are_mostly_0_are_left_alone(run_dir):
    """Largest of six: a Pareto variable without a mean, money, and counts that are 0 in most batches."""
    data = torch.Generator().manual_seed(5)
    batches = make(400)
    for number, batch in enumerate(batches):
        uniform = torch.rand(6, 4, generator=data)
        batch["pareto"] = 1 / uniform
        batch["money"] = torch.exp(2.0 * torch.randn(6, 4, generator=data))
        batch["counts"] = torch.zeros(6, 4)
        if number % 7 == 0:
            batch["counts"][1, 2] = 1000.0 * float(torch.rand(1, generator=data))
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    assert sentinel.applied_steps == 400


def test_a_mean_that_moves_is_told(run_dir):
    batches = make(40)
    batches[30]["x"] += 9.0
    assert odd_ones(run_steps(batches, BatchCallback(), run_dir)) == [(30, ["shift"])]


def test_a_field_that_becomes_constant_is_told(run_dir):
    batches = make(40)
    batches[30]["x"][:] = 0.0
    ((step, faults),) = odd_ones(run_steps(batches, BatchCallback(), run_dir))
    assert step == 30
    assert "constant" in faults


def test_another_field_that_becomes_constant_is_told_too(run_dir):
    batches = [{**batch, "z": torch.randn(6, 4)} for batch in make(70)]
    batches[40]["x"] = torch.full((6, 4), 3.0)
    batches[55]["z"] = torch.full((6, 4), 4.0)

    def loss(model, batch):
        return (model.head(model.numbers(batch["x"]) + model.numbers(batch["z"]))).square().mean()

    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=loss)
    said = [(one.step, one.message.partition(" is ")[0]) for one in sentinel.incidents]
    assert said == [(40, "unusual data: x"), (55, "unusual data: z")]


def test_the_same_batch_again_is_told(run_dir):
    batches = make(40)
    batches[31] = {name: v.clone() if isinstance(v, Tensor) else v for name, v in batches[30].items()}
    assert odd_ones(run_steps(batches, BatchCallback(), run_dir)) == [(31, ["repeated"])]


def test_records_that_are_copies_of_each_other_are_told(run_dir):
    batches = make(40)
    for name in ("x", "input_ids", "labels"):
        batches[30][name][1:] = batches[30][name][0].clone()
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    assert [(step, "copies" in faults) for step, faults in odd_ones(sentinel)] == [(30, True)]


def test_a_change_for_good_is_accepted_after_a_while(run_dir):
    batches = make(160)
    for batch in batches[40:]:
        batch["x"] *= 100
    sentinel = run_steps(batches, BatchCallback(), run_dir)
    (incident,) = sentinel.incidents
    assert incident.step == 40
    assert incident.details["last_step"] < 80


class Named(Tensor):
    """A tensor with a name, as libraries have them for images and boxes."""


def healthy(name):  # noqa: C901 - a list of cases
    """Batches of many kinds of healthy data, 60 of each."""
    data = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.rand(shape, generator=data)  # noqa: E731
    for number in range(60):
        batch = {"x": torch.randn(6, 4, generator=data)}
        if name == "one batch for ever":
            batch["x"] = torch.arange(24.0).view(6, 4)
        elif name == "images with a black border":
            image = torch.zeros(4, 1, 12, 12)
            image[:, :, 5:7, 5:7] = rand(4, 1, 2, 2)
            batch["image"] = image.contiguous(memory_format=torch.channels_last)
        elif name == "blank images now and then":
            batch["image"] = rand(4, 3, 8, 8) * (rand(4, 1, 1, 1) < 0.5)
        elif name == "heavy tails":
            batch["amount"] = torch.exp(1.5 * torch.randn(6, 8, generator=data))
        elif name == "binary labels":
            batch["target"] = (rand(4, 4) < 0.1).long()
        elif name == "noise levels":
            batch["sigma"] = torch.exp(torch.randn(6, 1, 1, 1, generator=data) * 1.2 - 1.2).expand(6, 1, 4, 4)
        elif name == "oversampling":
            batch["x"] = batch["x"][torch.randint(6, (6,), generator=data)]
        elif name == "variable sizes":
            batch["x"] = torch.randn(2 + number % 5, 4, generator=data)
            batch["input_ids"] = torch.randint(20, (2 + number % 5, 3 + number % 7), generator=data)
        elif name == "a slow curriculum":
            batch["x"] = batch["x"] * 1.05**number
        elif name == "padding":
            batch["input_ids"] = torch.randint(1, 20, (6, 7), generator=data) * (rand(6, 7) < 0.4)
            batch["token_type_ids"] = torch.zeros(6, 7, dtype=torch.long)
        elif name == "other types":
            batch |= {
                "text": ["a", "b"],
                "none": None,
                "flag": True,
                "u8": (rand(6, 5) * 255).to(torch.uint8),
                "u16": torch.ones(6, 5, dtype=torch.uint16),
                "half": rand(6, 5).half(),
                "f8": rand(6, 5).to(torch.float8_e4m3fn),
                "c": torch.complex(rand(6, 5), rand(6, 5)),
                "scalar": torch.tensor(float(number)),
                "sparse": torch.eye(6).to_sparse(),
                "csr": torch.eye(6).to_sparse_csr(),
                "meta": torch.empty(6, device="meta"),
                "bool": rand(6, 5) < 0.5,
                "boxes": [rand(number % 3, 4) for _ in range(number % 4)],
                "empty": torch.zeros(0),
                "nested": torch.nested.nested_tensor([rand(2, 3), rand(3, 3)], layout=torch.jagged),
                "quantized": torch.quantize_per_tensor(rand(4), 0.1, 0, torch.quint8),
                "bits": torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
                "f4": torch.zeros(4, dtype=torch.uint8).view(getattr(torch, "float4_e2m1fn_x2", torch.bits8)),
                "named": rand(6, 5).as_subclass(Named),
                "expanded": rand(1, 5).expand(6, 5),
                "conj": torch.complex(rand(6, 5), rand(6, 5)).conj(),
            }
        yield batch


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "name",
    [
        "one batch for ever",
        "images with a black border",
        "blank images now and then",
        "heavy tails",
        "binary labels",
        "noise levels",
        "oversampling",
        "variable sizes",
        "a slow curriculum",
        "padding",
        "other types",
    ],
)
def test_healthy_data_is_left_alone(name, run_dir):
    loss = lambda model, batch: loss_of(model, {"x": batch["x"]})  # noqa: E731
    sentinel = run_steps(list(healthy(name)), BatchCallback(), run_dir, loss=loss)
    assert sentinel.incidents == ()
    assert sentinel.applied_steps == 60


@dataclass
class Record:
    """A batch that is no container."""

    x: Tensor
    weight: float = 1.0


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: x, ""),
        (lambda x: (x, "text"), "[0]"),
        (lambda x: {"a": [{"b": x}]}, "a[0].b"),
        (Record, "x"),
        (lambda x: UserDict(x=x), "x"),
    ],
)
def test_batches_of_any_structure(wrap, path, run_dir):
    tensors = [torch.randn(6, 4) for _ in range(3)]
    tensors[1][2, 0] = NAN
    batches = [wrap(x) for x in tensors]
    found = iter(tensors)
    loss = lambda model, batch: loss_of(model, {"x": next(found)})  # noqa: E731
    sentinel = run_steps(batches, BatchCallback(), run_dir, loss=loss)
    (incident,) = sentinel.incidents
    assert [(s.position, s.field) for s in incident.samples] == [(2, path)]


# -- untouched, restarted, alone and among others ------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"two_optimizers": True, "ema": True}])
def test_a_healthy_run_is_bit_identical(settings, run_dir):
    batches = make_batches(40)
    reference = build(random=True, max_norm=1.0, **settings)
    train_by_hand(reference, batches)
    expected = {**reference.state(), "losses": reference.losses, "generators": generators()}
    copies = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
    watched = build(random=True, max_norm=1.0, **settings)
    with watched.sentinel([BatchCallback(ranges={"y": (0, 4)})], run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
    assert sentinel.incidents == ()
    found = {**watched.state(), "losses": watched.losses, "generators": generators()}
    assert differences(found, expected) == []
    assert differences(batches, copies) == []


def test_what_is_usual_survives_a_restart(run_dir):
    batches = make(40)
    first = BatchCallback()
    run_steps(batches[:30], first, run_dir / "1")
    second = BatchCallback()
    second.load_state_dict(first.state_dict())
    batches[30]["x"][4, 2] = 1e4
    ((step, faults),) = odd_ones(run_steps(batches[30:], second, run_dir / "2"))
    assert (step, faults[0]) == (0, "outlier")


def test_the_second_player_of_a_step_is_judged_by_the_same_batch(run_dir):
    batches = make(3)
    batches[1]["x"][0, 0] = NAN
    model = Model()
    optimizers = [torch.optim.SGD([*m.parameters()], 1e-3) for m in (model.numbers, model.head)]
    with Sentinel(model, optimizers, callbacks=[BatchCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(batches):
            for optimizer in optimizers:
                for other in optimizers:
                    other.zero_grad()
                sentinel.backward(loss_of(model, {"x": batch["x"]}))
                sentinel.step(optimizer=optimizer)
    assert [(i.kind, i.outcome.value) for i in sentinel.incidents] == [(Kind.NONFINITE_INPUT, "skipped")] * 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_with_a_scaler_the_search_for_a_scale_is_not_blamed_on_the_data(run_dir):
    """Missing values on purpose, and gradients that overflow because the scale is too high yet."""
    batches, model = make(12), Model()
    for batch in batches:
        batch["x"][0, 0] = NAN
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    callbacks = [BatchCallback()]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, scaler=scaler) as sentinel:
        for batch in sentinel.steps(batches):
            with torch.autocast("cpu", torch.float16):
                logits = model(None, batch["x"].nan_to_num())
            sentinel.backward(cross_entropy(logits.float() * 50, batch["labels"]))
            sentinel.step()
    assert scaler.get_scale() < 2.0**18
    assert {i.action for i in sentinel.incidents} <= {Action.WARN}
    assert len(sentinel.incidents) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"action": "continue"}, "do nothing"),
        ({"ranges": {"x": (5, 5)}}, "first below the second"),
        ({"ranges": {"x": 7}}, "two whole numbers"),
        ({"ranges": [("x", (0, 1))]}, "mapping"),
        ({"ranges": {"x": (0.0, 1.5)}}, "two whole numbers"),
        ({"allow_nonfinite": "x"}, "list of fields"),
        ({"statistics_every": -1}, "statistics_every"),
        ({"compare_every": -1}, "compare_every"),
        ({"warmup": 1}, "warmup"),
        ({"limit": 0.0}, "limit"),
        ({"limit": math.nan}, "limit"),
        ({"drop_beyond": 1.0}, "drop_beyond"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        BatchCallback(**settings)


# -- batches as users have them ------------------------------------------------------------------------


class Holder:
    """An object of the user's own."""

    def __init__(self, **held):
        vars(self).update(held)


class Slotted:
    """One without a dict."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Graph:
    """As torch_geometric's data: it has keys, and attributes for them."""

    def __init__(self, **held):
        self._held = held

    def keys(self):
        return list(self._held)

    def __getitem__(self, key):
        return self._held[key]


def packed(x):
    return nn.utils.rnn.pack_padded_sequence(x[:, :, None], [4] * 6, batch_first=True)


def ragged(x, layout):
    return torch.nested.nested_tensor([row[: 1 + i % 4] for i, row in enumerate(x)], layout=layout)


def cyclic(x):
    batch = {"x": x}
    batch["me"] = batch
    return batch


def read_only(x):
    array = x.numpy().copy()
    array.flags.writeable = False
    return array


AS_USERS_HAVE_THEM = {
    "packed": (packed, [(2, "data")]),
    "packed within": (lambda x: {"p": [packed(x)]}, [(2, "p[0].data")]),
    "graph": (lambda x: Graph(x=x, edge_index=torch.zeros(2, 5, dtype=torch.long)), [(2, "x")]),
    "array": (lambda x: x.numpy(), [(2, "")]),
    "arrays": (lambda x: {"x": x.numpy(), "names": np.array(["a"] * 6)}, [(2, "x")]),
    "array, read only": (lambda x: [read_only(x)], [(2, "[0]")]),
    "array, backwards": (lambda x: [x.numpy()[::-1]], [(3, "[0]")]),
    "array, other end first": (lambda x: [x.numpy().astype(">f4")], [(2, "[0]")]),
    "object": (lambda x: Holder(x=x, vocabulary={str(n): n for n in range(1000)}), [(2, "x")]),
    "objects": (lambda x: {"a": Holder(held=[x])}, [(2, "a.held[0]")]),
    "slots": (lambda x: Slotted(x.numpy()), [(2, "x")]),
    "csr": (lambda x: {"x": x.to_sparse_csr()}, []),
    "sparse": (lambda x: {"x": x.to_sparse()}, [(2, "x")]),
    "ragged": (lambda x: {"x": ragged(x, torch.jagged)}, []),
    "ragged, strided": (lambda x: {"x": ragged(x, torch.strided)}, []),
    "with other things": (lambda x: {"x": x, "s": ["a"], "n": None, "d": torch.tensor(1.0)}, [(2, "x")]),
    "cyclic": (cyclic, [(2, "x")]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("more", [[], [NanCallback()]], ids=["alone", "with NanCallback"])
@pytest.mark.parametrize("name", AS_USERS_HAVE_THEM)
def test_batches_as_users_have_them(name, more, run_dir):
    wrap, samples = AS_USERS_HAVE_THEM[name]
    tensors = [torch.randn(6, 4) for _ in range(5)]
    tensors[3][2, 0] = NAN
    found = iter(tensors)
    loss = lambda model, batch: loss_of(model, {"x": next(found)})  # noqa: E731
    sentinel = run_steps([wrap(x) for x in tensors], BatchCallback(), run_dir, loss=loss, more=more)
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind) == (3, Kind.NONFINITE_INPUT)
    assert incident.diagnosis.cause == "data"
    assert [(s.position, s.field) for s in incident.samples] == samples


def test_the_data_set_that_a_batch_knows_is_not_looked_through():
    entered = []

    class Example:
        def __getattribute__(self, name):
            entered.append(name)
            return super().__getattribute__(name)

    batch = Holder(x=torch.zeros(2), dataset=Holder(examples=[Example()]), examples=[Example()] * 1000)
    assert [path for path, _ in held_in(batch)] == ["x"]
    assert entered == []
