import struct

import pytest
import torch
from torch import nn

from gradsentinel.faults import FaultPlan, FlipBit, PoisonGradient

WORDS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e5m2: torch.int8,
}


def flip(parameter, **settings):
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(parameter, requires_grad=parameter.is_floating_point()))
    plan = FaultPlan([FlipBit(steps=(0,), target="parameter", name="p", **settings)])
    with plan.attach(model), plan.at(0):
        pass
    return model.p.detach(), plan.log[0]


@pytest.mark.parametrize("dtype", WORDS)
def test_every_bit_of_every_dtype_flips_alone(dtype):
    start = torch.tensor([1.5, -2.0, 3.0, 0.25]).to(dtype)
    for bit in range(8 * dtype.itemsize):
        after, injection = flip(start.clone(), bit=bit, index=2)
        changed = start.view(WORDS[dtype]) ^ after.view(WORDS[dtype])
        width = 8 * dtype.itemsize
        assert [int(c) % 2**width for c in changed] == [0, 0, 2**bit, 0]
        assert (injection.bit, injection.index) == (bit, (2,))
        assert injection.before == 3.0
        assert str(injection.after) == str(after[2].item())


def test_the_bit_numbers_are_those_of_ieee_754():
    after, injection = flip(torch.tensor([0.5]), bit=30)
    assert injection.after == after.item() == struct.unpack("f", struct.pack("I", 0x3F000000 ^ 1 << 30))[0]
    assert flip(torch.tensor([0.5]), bit=31)[1].after == -0.5
    assert flip(torch.tensor([1.0]), bit=30)[1].after == float("inf")


def test_the_lower_half_of_a_complex_number_is_the_real_part():
    start = torch.tensor([1 + 2j])
    assert flip(start.clone(), bit=31)[1].after == -1 + 2j
    after, injection = flip(start.clone(), bit=63)
    assert after.item() == injection.after == 1 - 2j
    assert injection.as_dict()["after"] == [1.0, -2.0]
    assert flip(torch.ones(2, dtype=torch.complex128), bit=127)[1].after == complex(1, -0.0)


@pytest.mark.parametrize(
    "make", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.flip(0).t()[1:, 1:], lambda t: t[1]]
)
def test_parameters_with_any_strides_are_really_written(make):
    view = make(torch.arange(1.0, 17.0).reshape(4, 4))
    before = view.clone()
    after, injection = flip(view, bit=31)
    assert int((before != after).sum()) == 1
    assert after[injection.index] == -before[injection.index]


def test_a_parameter_stays_damaged_after_detach_and_is_flipped_once_however_often_it_is_computed():
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    plan = FaultPlan([FlipBit(steps=(1,), target="parameter", name="weight", bit=31, index=2)])
    with plan.attach(model):
        for batch in plan.batches([torch.ones(1, 3)] * 3):
            model(batch)
            model(batch)
    assert model.weight.detach().equal(before * torch.tensor([1.0, 1.0, -1.0]))
    assert len(plan.log) == 1


def test_a_persistent_parameter_bit_is_stuck_through_restores_and_steps():
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    bad = before * torch.tensor([1.0, 1.0, -1.0])
    fault = FlipBit(steps=(1, 2), target="parameter", name="weight", bit=31, index=2, persistent=True)
    plan = FaultPlan([fault])
    with plan.attach(model):
        for step, batch in enumerate(plan.batches([torch.ones(1, 3)] * 4)):
            model(batch).sum().backward()
            if step in (1, 2):
                assert model.weight.detach().equal(bad)
                with torch.no_grad():  # something restores the weights, and computes the step again
                    model.weight.copy_(before)
                model(batch).sum().backward()
                assert model.weight.detach().equal(bad)
    assert [i.step for i in plan.log] == [1, 1, 2]  # at the start of step 2 it was still in its flipped state


def test_the_seed_chooses_bit_and_place():
    start = torch.ones(50)
    drawn = set()
    for seed in range(30):
        model = nn.Module()
        model.register_parameter("p", nn.Parameter(start.clone()))
        plan = FaultPlan([FlipBit(steps=(0,), target="parameter")], seed=seed)
        with plan.attach(model), plan.at(0):
            pass
        drawn.add((plan.log[0].bit, plan.log[0].index))
    assert len(drawn) > 25
    assert all(0 <= bit < 32 for bit, _ in drawn)


def test_sparse_and_expanded_gradients_are_hit():
    table = nn.Embedding(10, 3, sparse=True)
    plan = FaultPlan([PoisonGradient(steps=(0,)), PoisonGradient(steps=(1,))])
    scale = nn.Parameter(torch.ones(4, 3))
    model = nn.ModuleDict({"table": table})
    model.register_parameter("scale", scale)
    plan = FaultPlan(
        [
            PoisonGradient(steps=(0,), parameter="table.weight"),
            FlipBit(steps=(0,), target="gradient", name="scale", bit=30, index=(3, 2)),
        ]
    )
    with plan.attach(model), plan.at(0):
        (
            table(torch.tensor([1, 2])).sum() + scale.sum()
        ).backward()  # the gradient of a sum is one expanded number
    assert int(table.weight.grad.to_dense().isnan().sum()) == 1
    assert int((scale.grad != 1).sum()) == 1
    assert scale.grad[3, 2].isinf()


def test_a_gradient_keeps_its_own_gradient():
    model = nn.Linear(2, 1, bias=False)
    plan = FaultPlan([FlipBit(steps=(0,), target="gradient", bit=31, index=0)])
    x = torch.ones(1, 2)
    with plan.attach(model), plan.at(0):
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), model.weight, create_graph=True)
    assert gradient[0, 0] == -gradient[0, 1]
    assert gradient.requires_grad
    (second,) = torch.autograd.grad(gradient.sum(), model.weight)
    assert second.equal(torch.full((1, 2), 4.0))
