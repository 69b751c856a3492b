"""Faults that no bad operator shows by itself: lost in a narrow type, made in NumPy, a target at an edge."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gradsentinel import NanCallback
from gradsentinel.diagnosis.swap import outlier_rows


@pytest.fixture
def incident_of(sentinel_for):
    """Run a loop over the batches and return its first incident."""

    def run(model, batches, forward):
        sentinel = sentinel_for(model, forward, NanCallback())
        for batch in sentinel.steps(batches):
            sentinel.backward(forward(model, batch))
            sentinel.step()
        return sentinel.incidents[0]

    return run


# -- lost in a narrow type, noticed in a wider one ---------------------------------------------------------


class HandNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_an_overflow_of_float16_that_float32_divides_by(incident_of):
    """Inf becomes 0 by rsqrt; what fails is 0 / 0 in float32, what is to blame is the square."""
    model = nn.ModuleDict({"lin": nn.Linear(6, 8), "norm": HandNorm()}).half()
    with torch.no_grad():
        model["lin"].weight.fill_(1)

    def forward(model, x):
        h = model["norm"](model["lin"](x)).float()
        return (h / h.norm(dim=1, keepdim=True)).sum(1).log().mean()

    batches = [torch.rand(4, 6).half() + 0.1, torch.rand(4, 6).half() * 900 + 100]
    found = incident_of(model, batches, forward).diagnosis
    assert (found.cause, found.op, found.module) == ("precision", "aten.pow.Tensor_Scalar", "norm")
    assert "overflows in float16" in found.evidence[1]
    assert "float32" in found.remedy[0]


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return torch.sigmoid(self.a(x)) * torch.sigmoid(self.b(x))


@pytest.mark.parametrize("follows", ["log", "division"])
def test_a_product_that_vanishes_in_float16(follows, incident_of):
    model = nn.ModuleDict({"p": Product()})
    nn.init.constant_(model["p"].a.bias, -12.0)
    nn.init.constant_(model["p"].b.bias, -9.0)

    def forward(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            q = model["p"](x)
        return -q.float().log().mean() if follows == "log" else (1e-6 / q.float()).mean()

    found = incident_of(model, [torch.randn(8, 6)], forward).diagnosis
    assert (found.cause, found.op, found.module) == ("precision", "aten.mul.Tensor", "p")
    assert "makes 0 of numbers that are not 0" in found.evidence[1]


def test_a_formula_that_float32_cannot_compute_either_is_not_precision(incident_of):
    model = nn.ModuleDict({"p": Product()})

    def forward(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            q = model["p"](x)
        return (q.float() - q.float().detach()).log().mean()

    assert incident_of(model, [torch.randn(8, 6)], forward).diagnosis.cause == "math"


def test_times_that_bfloat16_cannot_tell_apart(incident_of):
    model = nn.Linear(1, 4)

    def forward(model, x):
        times = torch.arange(x.shape[1], dtype=torch.bfloat16)
        speed = x.diff(dim=1).to(torch.bfloat16) / times.diff()
        return model(speed.float().mean(1, keepdim=True)).pow(2).mean()

    found = incident_of(model, [torch.randn(4, 100), torch.randn(4, 300)], forward).diagnosis
    assert found.cause == "precision"
    assert "whole numbers apart only up to 256" in found.remedy[0]
    assert not any("scale the inputs" in text for text in found.remedy)


# -- made in NumPy -----------------------------------------------------------------------------------------


class NumpyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        with np.errstate(invalid="ignore"):
            result = torch.from_numpy(array / (array * array).sum(1, keepdims=True) ** 0.5)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad


class NumpySign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        array = grad.numpy()
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(array / np.abs(array))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@pytest.mark.parametrize(("function", "phase"), [(NumpyNorm, "forward"), (NumpySign, "backward")])
def test_a_function_that_computes_in_numpy(function, phase, incident_of):
    model = nn.ModuleDict(
        {"lin": nn.Linear(6, 6, bias=False), "own": Calls(function), "out": nn.Linear(6, 1)}
    )

    def forward(model, x):
        h = model["own"](model["lin"](x))
        return (model["out"](h) if phase == "forward" else h[:, :1]).pow(2).mean()

    batch = torch.randn(8, 6)
    batch[4] = 0
    found = incident_of(model, [batch], forward).diagnosis
    assert (found.cause, found.phase, found.module) == ("operator", phase, "own")
    assert found.node == f"{function.__name__}Backward"
    assert any(f"import {function.__name__}" in text for text in found.evidence)


def test_a_tensor_from_outside_beside_an_innocent_function(incident_of):
    """The constant is bad, the Function only passes on what it is given."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(6, 6)
            self.table = torch.full((6,), float("nan"))

        def forward(self, x):
            return NumpyNorm.apply(self.lin(x) + self.table)

    found = incident_of(Table(), [torch.randn(8, 6)], lambda model, x: model(x).pow(2).mean()).diagnosis
    assert found.cause == "setup"


# -- a target at the edge of what a likelihood is defined for ------------------------------------------------


def gamma(model, batch):
    ratio = batch["y"] / functional.softplus(model(batch["x"]))
    return 2 * (ratio - 1 - ratio.log()).mean()


def beta(model, batch):
    a, b = (functional.softplus(model(batch["x"])) + 0.5).unbind(1)
    return -torch.distributions.Beta(a, b).log_prob(batch["y"][:, 0]).mean()


@pytest.mark.parametrize(("loss", "width", "edge"), [(gamma, 1, 0.0), (beta, 2, 1.0)])
def test_a_target_at_which_the_loss_is_singular(loss, width, edge, incident_of):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width))
    batches = [
        {"row_id": [f"r{n}-{i}" for i in range(8)], "x": torch.randn(8, 6), "y": torch.rand(8, 1) * 0.8 + 0.1}
        for n in range(3)
    ]
    batches[2]["y"][5] = edge
    incident = incident_of(model, batches, loss)
    assert incident.diagnosis.cause == "data"
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(5, "r2-5", "y")]
    assert "r2-5" in incident.diagnosis.remedy[0]


def test_an_input_at_which_a_layer_is_singular_is_no_bad_target(incident_of):
    """The same 0 in a field that a layer with weights is given: the formula has to be safe."""
    model = nn.Linear(6, 1, bias=False)
    batches = [{"x": torch.randn(8, 6), "y": torch.rand(8, 1)} for _ in range(2)]
    batches[1]["x"][3] = 0
    found = incident_of(model, batches, lambda m, b: (m(b["x"]).abs().log() - b["y"]).pow(2).mean())
    assert found.diagnosis.cause == "math"


def test_ordinary_counts_among_zeros_are_no_outliers():
    counts = torch.zeros(8)
    counts[[2, 5]] = torch.tensor([1.0, 3.0])
    assert outlier_rows({"y": counts}, 8) == {}
    counts[6] = 1e9
    assert outlier_rows({"y": counts}, 8) == {"y": [6]}
