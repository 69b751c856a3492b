"""Measuring batches, gradients and activations never makes the host wait, on a device that counts."""

import pytest
import simulator
import torch
from on_npu import run_on_npu
from torch import nn
from torch.nn.functional import cross_entropy

from gradsentinel import (
    BatchCallback,
    HeadroomCallback,
    NanCallback,
    SaturationCallback,
    Sentinel,
    SpikeCallback,
)

WARM_UP = 6
STEPS = 40


class Net(nn.Module):
    """Embeds tokens, attends, and has float16 activations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.query = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        scores = torch.bmm(self.query(hidden), hidden.transpose(1, 2))
        return self.head(torch.bmm(scores.softmax(-1), hidden)).mean(1)


def callbacks():
    return [
        NanCallback(),
        BatchCallback(ranges={"tokens": (0, 20)}, warmup=3),
        SaturationCallback(activations_every=10),
        HeadroomCallback(every=10),
        SpikeCallback(groups="layer"),
    ]


def batches(count, device):
    torch.manual_seed(1)
    drawn = [{"tokens": torch.randint(20, (6, 7)), "labels": torch.randint(5, (6,))} for _ in range(count)]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]


def count(watching, folder, place, made):
    """What the healthy steps ask of the device, after the first few."""
    torch.manual_seed(0)
    model = Net().to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    watch = callbacks() if watching else [NanCallback()]
    data = batches(WARM_UP + STEPS, place)
    sentinel = Sentinel(model, optimizer, callbacks=watch, run_dir=folder, guard="device")
    loader = iter(sentinel.steps(data))

    def step():
        batch = next(loader)
        tokens = batch["tokens"].to("npu", non_blocking=True)
        labels = batch["labels"].to("npu", non_blocking=True)
        if made:  # other memory and another order than the batch has
            tokens, labels = tokens.flip(1), labels.flip(0)
        sentinel.backward(cross_entropy(model(tokens), labels))
        sentinel.step(1.0)

    for _ in range(WARM_UP):
        step()
    with simulator.counted() as found:
        for _ in range(STEPS):
            step()
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    sentinel.close()
    assert sentinel.incidents == ()
    if watching:
        assert len(watch[3].forecasts()) > 5
    return found.__dict__, weights


@pytest.mark.parametrize(("place", "made"), [("npu", False), ("npu", True), ("cpu", False)])
def test_a_healthy_run_makes_the_host_wait_for_nothing_more(tmp_path, place, made):
    plain, expected = run_on_npu(count, False, tmp_path / "plain", place, made)
    found, weights = run_on_npu(count, True, tmp_path / "watched", place, made)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert found["syncs"] == plain["syncs"]
    assert found["fallbacks"] == plain["fallbacks"]
    assert found["hazards"] == plain["hazards"] == []
    assert sum(found["launches"].values()) > sum(plain["launches"].values())


def spoil(folder, place, field, value):
    torch.manual_seed(0)
    model = Net().to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    data = batches(8, place)
    data[4]["x"] = torch.zeros(6, 3, device=place)
    data[4][field].view(-1)[2] = value
    sentinel = Sentinel(model, optimizer, callbacks=callbacks(), run_dir=folder, guard="device")
    with sentinel:
        for batch in sentinel.steps(data):
            extra = batch["x"].to("npu").sum() if "x" in batch else 0.0
            logits = model(batch["tokens"].to("npu").clamp(0, 19)) + extra
            sentinel.backward(cross_entropy(logits, batch["labels"].to("npu")))
            sentinel.step(1.0)
    told = [
        (i.step, str(i.kind), str(i.outcome), [s.position for s in i.samples]) for i in sentinel.incidents
    ]
    return told, [bool(value.isfinite().all()) for value in model.cpu().state_dict().values()]


@pytest.mark.parametrize(("place", "field", "value"), [("npu", "x", float("nan")), ("cpu", "tokens", 20)])
def test_bad_data_is_dropped_on_the_device(tmp_path, place, field, value):
    told, finite = run_on_npu(spoil, tmp_path, place, field, value)
    assert told == [(4, "nonfinite_input", "skipped", [0])]
    assert all(finite)


def spoilt(folder, place, guard):
    """Train on a batch with an id and one with a label that no table has."""
    torch.manual_seed(0)
    model = Net().to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    data = batches(12, "cpu")
    data[5]["tokens"][3, 1] = 20
    data[9]["labels"][2] = 5
    data = [{name: tensor.to(place) for name, tensor in batch.items()} for batch in data]
    watch = [NanCallback(), BatchCallback()]
    with Sentinel(model, optimizer, callbacks=watch, run_dir=folder, guard=guard) as sentinel:
        for batch in sentinel.steps(data):
            sentinel.backward(cross_entropy(model(batch["tokens"].to("npu")), batch["labels"].to("npu")))
            sentinel.step(1.0)
    return [(one.step, one.outcome.value, one.message) for one in sentinel.incidents], sentinel.applied_steps


@pytest.mark.parametrize("guard", ["host", "device"])
@pytest.mark.parametrize("place", ["npu", "cpu"])
def test_an_id_beyond_the_table_is_replaced_and_flagged_on_the_device(tmp_path, place, guard):
    (first, second), applied = run_on_npu(spoilt, tmp_path, place, guard)
    assert (first[:2], second[:2], applied) == ((5, "skipped"), (9, "skipped"), 10)
    assert "tokens[3, 1] is 20, outside 0 to 19 (the 20 rows of embed)" in first[2]
    assert "labels[2] is 5, outside 0 to 4 (the 5 classes that the loss is given)" in second[2]


def made_of_it(folder, place, guard):
    """Look up what is made of the batch, and other numbers of which the table has none."""
    torch.manual_seed(0)
    model = Net().to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    data = batches(12, "cpu")
    data[5]["tokens"][3, 1] = 20
    data[9]["labels"][2] = 5
    data = [{name: tensor.to(place) for name, tensor in batch.items()} for batch in data]
    strange, failed = torch.tensor([[1, 2, 25]]).to("npu"), 0
    with Sentinel(
        model, optimizer, callbacks=[NanCallback(), BatchCallback()], run_dir=folder, guard=guard
    ) as sentinel:
        for batch in sentinel.steps(data):
            try:
                model.embed(strange)
            except IndexError:
                failed += 1
            tokens, labels = batch["tokens"].to("npu").flip(1), batch["labels"].to("npu").flip(0)
            sentinel.backward(cross_entropy(model(tokens), labels))
            sentinel.step(1.0)
    return [(one.step, one.message) for one in sentinel.incidents], sentinel.applied_steps, failed


@pytest.mark.parametrize("guard", ["host", "device"])
@pytest.mark.parametrize("place", ["npu", "cpu"])
def test_only_what_is_of_the_batch_is_replaced_on_the_device(tmp_path, place, guard):
    (first, second), applied, failed = run_on_npu(made_of_it, tmp_path, place, guard)
    assert (first[0], second[0], applied, failed) == (5, 9, 10, 12)
    assert "tokens[3, 1] is 20" in first[1]
    assert "labels[2] is 5" in second[1]
