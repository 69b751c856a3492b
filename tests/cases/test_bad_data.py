"""Bad records, empty batches, labels that are all ignored; and data that only looks bad."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradsentinel import NanCallback, Rollback


def records(batch_size=4):
    """A loader of 32 records that carries the user's own ids, 4 to a batch, in order."""
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    return [
        {"x": x[i : i + batch_size], "y": y[i : i + batch_size], "id": torch.arange(i, i + batch_size)}
        for i in range(0, 32, batch_size)
    ]


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def regression(model):
    return lambda batch: (model(batch["x"]) - batch["y"]).pow(2).mean()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", ["x", "y"])
def test_one_bad_record(field, value, watch, drive, told, nonfinite):
    """Marigold#111, LlamaFactory#5627: record 13 holds a NaN, all gradients are NaN at once.

    Module hooks blame the first layer. In the target the activations are clean. Either way: data.
    """
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer)
    batches = records()
    batches[3][field][1, 0] = value  # an Inf passes through tanh; that is caught by the weights' gradient
    actions = drive(sentinel, batches, regression(model))
    assert actions == ["continue"] * 3 + ["skip"] + ["continue"] * 4
    assert told(sentinel) == [(3, "nonfinite_input", "skipped")]
    incident = sentinel.incidents[0]
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(1, 13, field)]
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("data", "input")
    assert f"{field}[1, 0]" in incident.message
    assert nonfinite(model, optimizer) == []


def test_rollback_does_not_loop_on_the_same_record(watch, nonfinite):
    """ecole#324, mmf#1251: go back, replay the same order, hit the same record: NaN for ever.

    The data goes on where it was, so the record is met once, and left out in the next epoch.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sentinel = watch(model, optimizer, NanCallback(action="rollback"), Rollback(every=2, confirm_after=1))
    batches = records()
    batches[3]["x"][1, 2] = torch.nan
    met = []
    for _ in range(2):
        for batch in sentinel.steps(batches):
            met.append(int(batch["id"][0]))
            sentinel.backward(regression(model)(batch))
            sentinel.step()
    assert met == [*range(0, 32, 4), *(first for first in range(0, 32, 4) if first != 12)]
    assert [str(i.outcome) for i in sentinel.incidents] == ["rolled_back"]
    assert [i.samples[0].id for i in sentinel.incidents] == [13]
    assert nonfinite(model, optimizer) == []


def test_batches_as_tuples_and_nested_containers(watch, drive, told):
    """Whatever a batch is made of, the path leads to the tensor and the position to the record."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [(b["x"], {"target": [b["y"]]}) for b in records()]
    batches[2][1]["target"][0][3, 0] = torch.nan
    drive(sentinel, batches, lambda b: (model(b[0]) - b[1]["target"][0]).pow(2).mean())
    assert told(sentinel) == [(2, "nonfinite_input", "skipped")]
    (sample,) = sentinel.incidents[0].samples
    assert sample.position == 3
    assert sample.field == "[1].target[0]"


def test_sparse_features_name_the_record(watch, drive, told):
    """A sparse batch stores values without their rows: the position must be the row, not the entry."""
    model = nn.Linear(5, 1)
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dense = torch.zeros(4, 5)
    dense[1, 0], dense[1, 3], dense[2, 4] = 1.0, 2.0, 3.0
    bad = dense.clone()
    bad[2, 4] = torch.nan
    batches = [{"x": dense.to_sparse()}, {"x": bad.to_sparse()}]
    drive(sentinel, batches, lambda b: (torch.sparse.mm(b["x"], model.weight.T) + model.bias).pow(2).mean())
    assert told(sentinel) == [(1, "nonfinite_input", "skipped")]
    assert [s.position for s in sentinel.incidents[0].samples] == [2]
    assert "x[2, 4]" in sentinel.incidents[0].message


def test_complex_features_name_the_record(watch, drive, told):
    """A NaN in an imaginary part of the input."""
    model = nn.Linear(3, 1, dtype=torch.complex64)
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [{"x": torch.randn(4, 3, dtype=torch.complex64)} for _ in range(2)]
    torch.view_as_real(batches[1]["x"])[2, 1, 1] = torch.nan
    drive(sentinel, batches, lambda b: model(b["x"]).abs().pow(2).mean())
    assert told(sentinel) == [(1, "nonfinite_input", "skipped")]
    assert [s.position for s in sentinel.incidents[0].samples] == [2]
    assert "x[2, 1]" in sentinel.incidents[0].message


def test_empty_batch(watch, drive, told, nonfinite):
    """A filter removed every record: the mean of nothing is NaN, and its gradients are all zero."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer)
    batches = records()
    batches[2] = {"x": torch.empty(0, 4), "y": torch.empty(0, 1), "id": torch.empty(0, dtype=torch.long)}
    actions = drive(sentinel, batches, regression(model))
    assert actions[2] == "skip"
    assert told(sentinel) == [(2, "nonfinite_loss", "skipped")]
    assert sentinel.incidents[0].samples == ()
    assert nonfinite(model, optimizer) == []


def test_every_label_is_ignored(watch, drive, told, nonfinite):
    """cross_entropy over ignore_index alone is 0 / 0: a NaN loss; labels are integers and cannot be NaN."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    sentinel = watch(model, optimizer)
    batches = [{"x": torch.randn(4, 4), "labels": torch.tensor([0, 2, -100, 1])} for _ in range(3)]
    batches[1]["labels"] = torch.full((4,), -100)
    actions = drive(
        sentinel, batches, lambda b: functional.cross_entropy(model(b["x"]), b["labels"], ignore_index=-100)
    )
    assert actions == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_loss", "skipped")]
    assert nonfinite(model, optimizer) == []


def test_integer_labels_beside_a_bad_input(watch, drive, told):
    """Only the floating point field can be at fault."""
    model = nn.Linear(4, 3)
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [{"labels": torch.tensor([0, 2, 1, 1]), "x": torch.randn(4, 4)} for _ in range(3)]
    batches[1]["x"][3, 0] = torch.nan
    drive(sentinel, batches, lambda b: functional.cross_entropy(model(b["x"]), b["labels"]))
    assert told(sentinel) == [(1, "nonfinite_input", "skipped")]
    assert [(s.position, s.field) for s in sentinel.incidents[0].samples] == [(3, "x")]


def test_minus_infinity_among_the_features(watch, drive, told):
    """log(0) features: -inf is legal in a mask, but this tensor is no mask, and it made the loss NaN."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    counts = torch.arange(1.0, 17.0).reshape(4, 4)
    batches = [{"x": counts.log(), "y": torch.zeros(4, 1), "id": torch.arange(4)} for _ in range(3)]
    batches[1] = {**batches[1], "x": (counts * (counts != 7)).log()}
    assert drive(sentinel, batches, lambda b: model(b["x"] - b["x"].mean()).mean()) == [
        "continue",
        "skip",
        "continue",
    ]
    assert told(sentinel) == [(1, "nonfinite_input", "skipped")]
    assert [s.position for s in sentinel.incidents[0].samples] == [1]


@pytest.mark.parametrize("bias", [0.0, -0.5], ids=["plain mask", "mask with position bias"])
def test_masks_of_minus_infinity_in_a_batch(bias, watch, drive, told):
    """Additive masks arrive with the batch: legal, and not to blame when something else goes wrong."""
    model = nn.Linear(4, 4)
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.01))
    distance = torch.arange(4.0)[:, None] - torch.arange(4.0)
    mask = torch.where(distance < 0, -torch.inf, bias * distance)
    batches = [{"x": torch.randn(4, 4), "mask": mask, "factor": factor} for factor in (1.0, torch.nan, 1.0)]

    def loss_of(batch):
        h = model(batch["x"])
        return (torch.softmax(h @ h.T + batch["mask"], -1) @ h).pow(2).mean() * batch["factor"]

    assert drive(sentinel, batches, loss_of) == ["continue", "skip", "continue"]
    assert told(sentinel) == [(1, "nonfinite_loss", "skipped")]
    assert sentinel.incidents[0].samples == ()


def test_missing_values_that_the_model_expects(watch, drive):
    """Tables mark what is missing with NaN; a model that fills it in is healthy; so is an unused field."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [{**b, "unused": torch.full((4,), torch.nan)} for b in records()]
    for batch in batches:
        batch["x"][0, 1] = torch.nan
    actions = drive(sentinel, batches, lambda b: (model(b["x"].nan_to_num(0.0)) - b["y"]).pow(2).mean())
    assert actions == ["continue"] * 8
    assert sentinel.incidents == ()


def test_two_bad_batches_in_a_row(watch, drive, told, nonfinite):
    """Two neighbours are still accidents: both dropped, nothing rolled back."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sentinel = watch(model, optimizer, NanCallback(), Rollback())
    batches = records()
    batches[3]["x"][0, 0] = batches[4]["x"][2, 2] = torch.nan
    actions = drive(sentinel, batches, regression(model))
    assert actions == ["continue"] * 3 + ["skip"] * 2 + ["continue"] * 3
    assert [(s.samples[0].id, str(s.severity.label)) for s in sentinel.incidents] == [
        (12, "warning"),
        (18, "error"),
    ]
    assert nonfinite(model, optimizer) == []


def test_the_incident_says_what_the_loss_was(watch, drive):
    """The record keeps the loss and the gradient norm as they were, non-finite as they may be."""
    model = network()
    sentinel = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = records()
    batches[0]["y"][0] = torch.inf
    drive(sentinel, batches, regression(model))
    assert math.isinf(sentinel.incidents[0].loss)
    assert not math.isfinite(sentinel.incidents[0].grad_norm)
