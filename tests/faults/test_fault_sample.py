import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from gradsentinel.faults import FaultPlan, PoisonSample


class Pair(NamedTuple):
    images: torch.Tensor
    labels: object


@dataclass(frozen=True)
class Frozen:
    images: torch.Tensor
    name: str = "batch"


def poisoned(batch, **settings):
    plan = FaultPlan([PoisonSample(steps=(0,), **settings)])
    return next(iter(plan.batches([batch]))), plan.log[0]


@pytest.mark.parametrize(
    ("wrap", "unwrap", "path"),
    [
        (lambda x: x, lambda b: b, ""),
        (lambda x: {"ids": torch.arange(4), "images": x}, lambda b: b["images"], "images"),
        (lambda x: OrderedDict(images=x), lambda b: b["images"], "images"),
        (lambda x: UserDict(images=x), lambda b: b["images"], "images"),
        (lambda x: [torch.arange(4), x], lambda b: b[1], "1"),
        (lambda x: (x, "text", None), lambda b: b[0], "0"),
        (lambda x: Pair(x, torch.arange(4)), lambda b: b.images, "images"),
        (Frozen, lambda b: b.images, "images"),
        (lambda x: {"views": [Pair(x, 1), 3]}, lambda b: b["views"][0].images, "views.0.images"),
    ],
)
def test_any_nesting_is_poisoned_without_touching_the_data_set(wrap, unwrap, path):
    image = torch.zeros(4, 2, 3)
    batch = wrap(image)
    got, injection = poisoned(batch, position=2, index=(1, 0))
    assert type(got) is type(batch)
    assert unwrap(got)[2, 1, 0].isnan()
    assert int(unwrap(got).isnan().sum()) == 1
    assert not image.isnan().any()
    assert unwrap(batch) is image
    assert (injection.where, injection.index, injection.before, injection.target) == (
        path,
        (2, 1, 0),
        0.0,
        "sample",
    )
    assert math.isnan(injection.after)


def test_a_field_can_be_named_and_an_unknown_one_is_answered_with_the_nearest():
    batch = {"a": torch.zeros(2), "deep": {"images": torch.zeros(2, 2)}}
    assert poisoned(batch, field="deep.images", value=math.inf)[0]["deep"]["images"].isinf().any()
    assert poisoned(batch, field="deep")[1].where == "deep.images"
    with pytest.raises(LookupError, match=r"nearest: 'deep\.images'"):
        poisoned(batch, field="deep.image")


def test_integers_cannot_hold_nan_but_an_id_outside_the_vocabulary():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"ids \(torch\.int64\).*outside the vocabulary"):
        poisoned({"ids": ids})
    with pytest.raises(ValueError, match="can hold value=nan"):
        poisoned({"ids": ids, "x": torch.zeros(1)}, field="ids")
    got, injection = poisoned({"x": torch.zeros(2), "ids": ids}, value=50257)
    assert injection.where == "ids"
    assert int(got["ids"].max()) == injection.after == 50257
    with pytest.raises(ValueError, match="holds 0 to 255"):
        poisoned(torch.zeros(2, dtype=torch.uint8), value=300)
    assert poisoned(torch.zeros(2), value=7)[1].after == 7.0  # no integers there: a floating field will do


def test_places_outside_of_the_batch_are_refused():
    with pytest.raises(IndexError, match="samples 0 to 3"):
        poisoned(torch.zeros(4, 2), position=4)
    with pytest.raises(IndexError, match="2 elements"):
        poisoned(torch.zeros(4, 2), index=2)


def test_numbers_without_dimensions_strides_and_gradients_are_handled():
    assert poisoned({"weight": torch.tensor(1.0)})[0]["weight"].isnan()
    shared = torch.zeros(1, 3).expand(4, 3)
    assert int(poisoned(shared, position=1)[0].isnan().sum()) == 1
    strided = torch.zeros(6, 4).t()[:, ::2]
    assert int(poisoned(strided)[0].isnan().sum()) == 1
    leaf = torch.zeros(2, requires_grad=True)
    assert poisoned(leaf)[0].requires_grad


def test_an_empty_batch_is_left_alone_and_the_missing_fault_is_said():
    plan = FaultPlan([PoisonSample(steps=(0,))])
    with pytest.warns(RuntimeWarning, match="it was empty"):
        assert [b.shape for b in plan.batches([torch.zeros(0, 3), torch.zeros(1, 3)])] == [(0, 3), (1, 3)]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_batch_drawn_again_for_its_step_is_bad_again_only_if_persistent(persistent):
    plan = FaultPlan([PoisonSample(steps=(1,), persistent=persistent)])
    data = [torch.zeros(2, 2)] * 3
    bad = [
        [bool(b.isnan().any()) for b in plan.batches(data, start=0)],
        [bool(b.isnan().any()) for b in plan.batches(data, start=0)],
    ]
    assert bad == [[False, True, False], [False, persistent, False]]


def test_without_a_due_fault_the_very_same_object_comes_out():
    data = [{"x": torch.zeros(2)} for _ in range(3)]
    plan = FaultPlan([PoisonSample(steps=(1,))])
    assert [a is b for a, b in zip(data, plan.batches(data), strict=True)] == [True, False, True]
