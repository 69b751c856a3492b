"""What the trace must see, and survive: copies that call themselves views, tensors without memory, float8."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.diagnosis.memory import FINE, Badness, judge


class Narrow(TorchDispatchMode):
    """Computes products in float16, as an accelerator's own mode might; `to` arrives whole inside of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default or func is torch.ops.aten.addmm.default:
            return func(*(a.half() for a in args), **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_a_copy_that_calls_itself_a_view(diagnosed):
    """`to` may return its argument, says its schema: the infinities that it copies are still the product's.

    They were taken for a mask's once, and the softmax behind them was blamed.
    """

    def forward(model, batch):
        with Narrow():
            scores = model(batch["x"])
        return nn.functional.cross_entropy(scores, batch["y"])

    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.mul_(1e4)
    batch = {"x": torch.randn(6, 4) * 100, "y": torch.arange(6) % 3}
    found = diagnosed(model, [batch], forward).diagnosis
    assert (found.cause, found.op, found.module) == ("precision", "aten.addmm.default", "")
    assert any("aten._log_softmax.default" in text for text in found.evidence)


def test_an_infinity_from_outside_that_no_mask_holds(diagnosed):
    """Nobody masks with +inf: the tensor is to blame, not the softmax that meets it."""
    outside = torch.tensor([1.0, float("inf"), 1.0, 1.0])
    found = diagnosed(
        nn.Linear(4, 4), [torch.ones(3, 4)], lambda model, x: (model(x) + outside).softmax(1).pow(2).sum()
    ).diagnosis
    assert (found.cause, found.op) == ("setup", "aten.add.Tensor")


def test_a_mask_from_outside_is_lawful(diagnosed):
    outside = torch.tensor([0.0, -float("inf"), 0.0, 0.0])

    def forward(model, x):
        return (model(x) + outside).softmax(1).pow(2).sum() + (model(x) * 0).log().sum()

    found = diagnosed(nn.Linear(4, 4), [torch.ones(3, 4)], forward).diagnosis
    assert found.op == "aten.log.default"


def test_zeros_without_memory(diagnosed):
    """Autograd's stand-in for a missing gradient has no memory at all: a kernel that reads it crashes."""

    def forward(model, x):
        x = x.clone().requires_grad_()
        energy = (model(x) * 0).abs().pow(1.5).sum() + model(x).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.pow(2).sum()

    found = diagnosed(nn.Linear(4, 4), [torch.ones(3, 4)], forward).diagnosis
    assert (found.cause, found.phase, found.op) == ("math", "backward", "aten.pow.Tensor_Scalar")


def functional_gradient(model, x):
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).mul(0).pow(0.5).sum()

    return sum(g.sum() for g in torch.func.grad(loss)(parameters, x).values()) + model(x).sum()


def vectorised(model, x):
    return torch.vmap(lambda row: (model(row) * 0).log().sum())(x).mean()


def forward_mode(model, x):
    out, tangent = torch.func.jvp(lambda y: (model(y) * 0).abs().sqrt(), (x,), (torch.ones_like(x),))
    return (out + tangent).sum()


def nested(model, x):
    rows = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return (model(rows).values() * 0).log().mean()


def sparse(model, x):
    return torch.log(torch.sparse.mm(torch.eye(3).to_sparse(), model(x)) * 0).mean()


def float8(model, x):
    return (model(x) * 1e6).to(torch.float8_e5m2).float().mean()


def through_float8(model, x):
    return (model(x) * (model(x).detach() / 0).to(torch.float8_e5m2).float()).mean()


def complex_numbers(model, x):
    return torch.view_as_real((torch.complex(model(x), x) * 0).reciprocal()).sum()


ODD = {
    functional_gradient: "aten.pow.Tensor_Scalar",
    vectorised: "aten.log.default",
    forward_mode: "aten.div.Tensor",
    nested: "aten.log.default",
    sparse: "aten.log.default",
    float8: "aten._to_copy.default",
    through_float8: "aten.div.Tensor",
    complex_numbers: "aten.reciprocal.default",
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch 2.14 says it of its own code
@pytest.mark.parametrize("forward", ODD, ids=lambda f: f.__name__)
def test_odd_tensors_are_traced_as_well(forward, diagnosed):
    found = diagnosed(nn.Linear(4, 4), [torch.ones(3, 4)], forward).diagnosis
    assert found.op == ODD[forward]
    assert found.cause == ("precision" if forward is float8 else "math")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], FINE),
        ([], FINE),
        ([1.0, float("inf")], Badness(inf=True)),
        ([-float("inf"), 0.0], Badness(inf=True)),
        ([float("nan"), 1.0], Badness(nan=True)),
        ([float("nan"), -float("inf")], Badness(nan=True, inf=True)),
    ],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2],
    ids=str,
)
def test_what_a_tensor_holds(values, expected, dtype):
    assert judge(torch.tensor(values).to(dtype)) == expected


def test_a_narrow_number_that_is_no_number():
    """float8_e4m3fn has no Inf: what overflows is NaN."""
    assert judge(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)) == Badness(nan=True)


@pytest.mark.parametrize(
    "angles",
    [
        lambda: 1 / 10000 ** (torch.arange(4) / 4),
        lambda: 2.0 ** -torch.arange(4.0),
        lambda: torch.arange(1.0, 5.0) ** torch.arange(4.0),
        lambda: (torch.arange(1.0, 5.0) - torch.ones(4).mean()) ** torch.full((4,), 2.0),
        lambda: torch.float_power(2, torch.arange(4)).float(),
    ],
    ids=["rotary", "alibi", "tensor to tensor", "square by a tensor", "float_power"],
)
def test_a_power_whose_exponent_is_a_tensor(angles, diagnosed):
    """As in rotary embeddings: once the look at such an operator failed, and the diagnosis with it."""

    def forward(model, x):
        h = model(x)
        return (h * torch.cos(angles())).square().mean() + (h * 0 - 1).log().mean()

    found = diagnosed(nn.Linear(4, 4), [torch.ones(3, 4)], forward).diagnosis
    assert (found.cause, found.op) == ("math", "aten.log.default")
