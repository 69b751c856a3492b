import pytest
import torch
from torch import nn

from gradsentinel.faults import ChangeSetting, FaultPlan, SpoilField


def spoiled(batch, **settings):
    plan = FaultPlan([SpoilField(steps=(0,), **settings)], seed=3)
    return next(iter(plan.batches([batch]))), plan.log


def test_a_mask_is_emptied_without_touching_the_data_set():
    batch = {"mask": torch.ones(2, 3), "x": torch.arange(6.0).reshape(2, 3)}
    got, log = spoiled(batch, field="mask", change="zero")
    assert not got["mask"].any()
    assert batch["mask"].all()
    assert got["x"] is batch["x"]
    assert (log[0].where, log[0].elements, log[0].target) == ("mask", 6, "sample")


def test_labels_are_shuffled_and_none_is_lost():
    labels = torch.arange(32)
    got, _ = spoiled((torch.zeros(1), labels), field="1", change="shuffle")
    assert not torch.equal(got[1], labels)
    assert torch.equal(got[1].sort().values, labels)
    again, _ = spoiled((torch.zeros(1), labels), field="1", change="shuffle")
    assert torch.equal(got[1], again[1])


def test_one_sample_is_scaled_and_its_neighbours_are_not():
    got, log = spoiled({"x": torch.ones(3, 2)}, field="x", change="scale", factor=50.0, position=1)
    assert got["x"].tolist() == [[1, 1], [50, 50], [1, 1]]
    assert log[0].index == (1, 0)


def test_a_change_that_changes_nothing_is_no_fault():
    got, log = spoiled({"mask": torch.zeros(2)}, field="mask", change="zero")
    assert log == []
    assert not got["mask"].any()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"field": "mask", "change": "blank"}, ValueError, "zero, shuffle, scale"),
        ({"field": "mask", "change": "zero", "position": -1}, ValueError, "position=-1"),
        ({"field": "maks", "change": "zero"}, LookupError, "'mask'"),
        ({"field": "mask", "change": "zero", "position": 9}, IndexError, "position=9"),
    ],
)
def test_what_cannot_be_is_said(settings, error, message):
    with pytest.raises(error, match=message):
        spoiled({"mask": torch.ones(2)}, **settings)


def test_a_setting_that_somebody_else_changed_meanwhile_stays_as_it_is_then():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    plan = FaultPlan([ChangeSetting(steps=(0,), owner=optimizer, name="lr", value=7.0)], rank=0)
    with plan.attach(nn.Linear(1, 1)):
        for _ in plan.batches([0, 1]):
            if optimizer.param_groups[0]["lr"] == 7.0:
                optimizer.param_groups[0]["lr"] = 0.05
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert [(one.where, one.before, one.after) for one in plan.log] == [("lr", 0.1, 7.0)]
