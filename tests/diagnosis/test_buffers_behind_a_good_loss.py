"""Buffers that the forward pass spoils while loss and gradients are finite: why, and by which record."""

import pytest
import torch
from torch import nn
from torch.nn import functional

INF = float("inf")


class Sensors(nn.Module):
    """Normalises a second input that it does not trust, and learns nothing through it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.main, self.aux, self.norm = nn.Linear(4, 6), nn.Linear(3, 6), norm
        self.out = nn.Linear(6, 1)

    def forward(self, x, sensor):
        side = self.norm(self.aux(sensor))
        return self.out(self.main(x) + torch.where(torch.isfinite(side), side, 0.0).detach())


class RunningSquare(nn.Module):
    """An average of squares, in a type that does not hold them."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.register_buffer("square", torch.zeros(width, dtype=dtype))

    def forward(self, x):
        with torch.no_grad():
            self.square.mul_(0.9).add_(x.detach().to(self.square.dtype).square().mean(0), alpha=0.1)
        return x


def loss_of(model, b):
    return functional.mse_loss(model(b["x"], b["sensor"]), b["y"])


def batches(count=5):
    draw = torch.randn
    return [
        {"x": draw(8, 4), "sensor": draw(8, 3), "y": draw(8, 1), "id": torch.arange(8)} for _ in range(count)
    ]


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "synchronised": lambda: nn.SyncBatchNorm(6),
    "own average": lambda: RunningSquare(6, torch.float32),
}


@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
@pytest.mark.parametrize("norm", NORMS)
def test_a_bad_record_is_named(norm, value, diagnosed):
    given = batches()
    given[2]["sensor"][5, 1] = value
    model = Sensors(NORMS[norm]())
    incident = diagnosed(model, given, loss_of)
    assert (incident.kind, incident.step) == ("nonfinite_state", 2)
    assert incident.diagnosis.cause == "data"
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(5, 5, "sensor")]
    assert all(bool(torch.isfinite(buffer).all()) for buffer in model.buffers())


def test_what_the_forward_pass_makes_itself_is_traced_to_its_operator(diagnosed):
    """Finite inputs: the statistics overflow in their own narrow type."""
    given = batches()
    given[3]["sensor"] *= 400
    given[3]["sensor"][1] *= 3
    incident = diagnosed(Sensors(RunningSquare(6)), given, loss_of)
    found = incident.diagnosis
    assert incident.kind == "nonfinite_state"
    assert (found.cause, found.op, found.module) == ("precision", "aten.pow.Tensor_Scalar", "norm")
    assert found.source is not None
    assert "norm.square" in " ".join(found.evidence)


def test_running_statistics_that_overflow_are_traced_into_the_norm(diagnosed):
    """A record far from all others: its square exceeds float32 in batch norm's variance."""
    given = batches()
    given[3]["sensor"][4] = 1e25
    incident = diagnosed(Sensors(nn.BatchNorm1d(6)), given, loss_of)
    assert incident.kind == "nonfinite_state"
    assert incident.diagnosis.cause == "data"
    assert [s.position for s in incident.samples] == [4]
    assert incident.diagnosis.op.startswith("aten.native_batch_norm")


def test_a_loop_that_spoils_a_buffer_itself_is_not_the_models_fault(sentinel_for):
    model = Sensors(nn.BatchNorm1d(6))
    sentinel = sentinel_for(model, loss_of)
    for step, b in enumerate(sentinel.steps(batches(4))):
        loss = loss_of(model, b)
        if step == 2:
            model.norm.running_mean[0] = INF
        sentinel.backward(loss)
        sentinel.step()
    (incident,) = sentinel.incidents
    found = incident.diagnosis
    assert (found.cause, found.phase) == ("unknown", "forward")
    assert "norm.running_mean stay finite" in found.evidence[0]


def test_missing_values_that_a_model_fills_in_are_not_blamed_for_spoilt_statistics(diagnosed):
    """NaN in another field, by design, in every batch: the overflow is what spoils the statistics."""

    def forward(model, b):
        return loss_of(model, {**b, "x": torch.nan_to_num(b["x"])})

    given = batches()
    for b in given:
        b["x"][0, 0] = float("nan")
    given[3]["sensor"][4] = 1e25
    incident = diagnosed(Sensors(nn.BatchNorm1d(6)), given, forward)
    assert incident.diagnosis.cause == "data"
    assert [(s.position, s.field) for s in incident.samples] == [(4, "sensor")]
