import math
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gradsentinel.faults import (
    FaultPlan,
    FlipBit,
    MatmulOverflow,
    PoisonActivation,
    PoisonGradient,
    WrongOperator,
)


def once(model, fault, compute):
    """Compute one step with a fault."""
    plan = FaultPlan([fault])
    with plan.attach(model), plan.at(0):
        result = compute()
    return result, plan.log[0]


class Returns(nn.Module):
    """Returns what it is told to make of its input."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Output(OrderedDict):
    """As model outputs of the usual libraries are: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


@dataclass
class Data:
    ids: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: x, lambda o: o),
        (lambda x: (torch.arange(3), x), lambda o: o[1]),
        (lambda x: [x, x * 2], lambda o: o[0]),
        (lambda x: {"ids": torch.arange(3), "h": x}, lambda o: o["h"]),
        (lambda x: Output(loss=None, hidden=(x,)), lambda o: o.hidden[0]),
        (lambda x: Data(torch.arange(3), x), lambda o: o.hidden),
        (lambda x: x.t()[:, ::2], lambda o: o),
        (lambda x: x[:, :1].expand(4, 6), lambda o: o),
        (lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj(), lambda o: o),
    ],
)
def test_the_first_floating_tensor_of_any_output_is_hit_and_gradients_pass(make, read):
    model = Returns(make)
    x = torch.randn(4, 6, requires_grad=True)
    right = read(make(x)).detach()
    output, injection = once(model, PoisonActivation(steps=(0,), module=""), lambda: model(x))
    assert type(output) is type(make(x))
    got = read(output)
    assert int((~got.isfinite()).sum()) == 1
    assert not got[injection.index].isfinite()
    assert int((got != right).sum()) == 1
    assert x.isfinite().all()
    torch.view_as_real(got.resolve_conj()).sum().backward() if got.is_complex() else got.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


def test_a_path_names_the_tensor():
    model = Returns(lambda x: {"a": x, "b": [x, torch.arange(3)]})
    x = torch.ones(2, 2)
    output, _ = once(model, PoisonActivation(steps=(0,), module="", path="b.0"), lambda: model(x))
    assert output["a"] is x
    assert output["b"][0].isnan().any()
    with pytest.raises(LookupError, match=r"nearest: .*'b\.0'"):
        once(model, PoisonActivation(steps=(0,), module="", path="b.9"), lambda: model(x))
    with pytest.raises(LookupError, match=r"no floating tensor at 'b\.1'"):
        once(model, PoisonActivation(steps=(0,), module="", path="b.1"), lambda: model(x))
    with pytest.raises(ValueError, match="bits 0 to 31"):
        once(model, FlipBit(steps=(0,), target="activation", name="", bit=40), lambda: model(x))


def test_hooks_that_came_first_see_the_fault_as_the_work_of_its_module(tiny, loader):
    model, seen = tiny(), {}
    for name in ("blocks.0.mlp", "blocks.0"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: bool(output.isfinite().all())})
        )
    once(model, PoisonActivation(steps=(0,), module="blocks.0.mlp"), lambda: model(loader[0]))
    assert seen == {"blocks.0.mlp": False, "blocks.0": False}


class Watch(TorchDispatchMode):
    """Notes the operators that got finite numbers and returned others."""

    def __init__(self) -> None:
        super().__init__()
        self.producers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [a for a in args if isinstance(a, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        computed = isinstance(out, torch.Tensor) and out.is_floating_point() and "empty" not in str(func)
        if computed and all(g.isfinite().all() for g in given) and not out.isfinite().all():
            self.producers.append((func, given[-1].dtype))
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("module", ["enter", "blocks.1.attn"])
def test_an_overflow_is_computed_by_the_operator_itself(module, dtype, tiny, loader):
    model = tiny()

    def compute():
        with Watch() as watch:
            loss = model(loader[0]).pow(2).mean()
        loss.backward()
        return watch

    watch, injection = once(model, MatmulOverflow(steps=(0,), module=module, dtype=dtype), compute)
    operator, operand = watch.producers[0]
    assert (str(operator), operand) == (injection.op, dtype)
    assert injection.op in ("aten.addmm.default", "aten.mm.default", "aten.bmm.default")
    assert math.isfinite(injection.before)
    assert math.isinf(injection.after)
    assert not all(p.grad.isfinite().all() for p in model.parameters())


def test_an_overflow_spares_the_wider_dtype_of_a_rescue(tiny, loader):
    model = tiny().eval()
    plan = FaultPlan([MatmulOverflow(steps=(0,), module="head", persistent=True)])
    with plan.attach(model), plan.at(0):
        with torch.autocast("cpu", torch.float16):
            assert not model(loader[0]).isfinite().all()
            assert not model(loader[0]).isfinite().all()
        assert model(loader[0]).isfinite().all()
    assert len(plan.log) == 2


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3, bias=False), (2, 5, 4)),
        (nn.Linear(4, 3), (4,)),
        (nn.Conv2d(2, 3, 3), (1, 2, 5, 5)),
        (nn.Conv1d(2, 3, 3, bias=False), (1, 2, 5)),
        (nn.GRUCell(4, 4), (2, 4)),
        (nn.Linear(4, 3).half(), (2, 4)),
        (nn.Linear(4, 3).bfloat16(), (2, 4)),
        (nn.Linear(4, 3).double(), (2, 4)),
    ],
)
def test_layers_of_many_kinds_and_dtypes_overflow(layer, shape):
    dtype = next(layer.parameters()).dtype
    x = torch.randn(shape, dtype=dtype)
    output, injection = once(layer, MatmulOverflow(steps=(0,), module=""), lambda: layer(x))
    assert output.dtype == dtype
    assert not output.isfinite().all() or isinstance(layer, nn.GRUCell)  # its gates squash the infinity
    assert injection.elements >= 1


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_an_overflow_happens_without_autograd_too(grad_mode):
    layer = nn.Linear(4, 3)
    with grad_mode():
        output, _ = once(layer, MatmulOverflow(steps=(0,)), lambda: layer(torch.randn(2, 4)))
    assert output.isinf().any()


def test_a_later_product_can_be_chosen_and_what_cannot_overflow_is_passed_over():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)

    model, x = Attention(), torch.randn(2, 3, 4)
    _, injection = once(model, MatmulOverflow(steps=(0,), module="", nth=2), lambda: model(x))
    assert injection.op == "aten.bmm.default"
    with torch.no_grad():
        model.q.weight.zero_()
    _, injection = once(model, MatmulOverflow(steps=(0,), module=""), lambda: model(x))
    assert injection.index[-1] < 4  # the product of k: that of q has a factor that is all zero


def test_an_error_in_the_module_leaves_no_overflow_behind():
    def fail(x):
        raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(2, 2), Returns(fail))
    plan = FaultPlan([MatmulOverflow(steps=(0,), module="", nth=5)])
    with pytest.raises(ZeroDivisionError), plan.attach(model), plan.at(0):
        model(torch.ones(1, 2))
    assert nn.Linear(2, 2)(torch.ones(1, 2)).isfinite().all()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_wrong_operator_replaces_the_result_and_leaves_the_other_direction_right(tiny, loader):
    layer = nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)
    right = layer(x)
    right.sum().backward()
    gradient = x.grad.clone()
    for operator, check in {
        "sign_flip": lambda y: y.equal(-right),
        "zero": lambda y: y.equal(torch.zeros_like(right)),
        "uninitialised_rows": lambda y: y[:6].equal(right[:6]) and not y[6:].equal(right[6:]),
        lambda y: y * 1.01: lambda y: y.equal(right * 1.01),
    }.items():
        x.grad = None
        y, injection = once(layer, WrongOperator(steps=(0,), operator=operator, module=""), lambda: layer(x))
        assert check(y)
        y.sum().backward()
        assert x.grad.equal(gradient)
        assert injection.op == (operator if isinstance(operator, str) else "<lambda>")
        assert injection.elements == int((y != right).sum())
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(8, 4\)"):
        once(layer, WrongOperator(steps=(0,), operator=lambda y: y[0], module=""), lambda: layer(x))


def test_a_wrong_backward_sends_garbage_rows_to_the_layers_before(tiny, loader):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    right = model(x).detach()
    fault = WrongOperator(steps=(0,), operator="uninitialised_rows", module="1", phase="backward")

    def compute():
        y = model(x)
        y.sum().backward()
        return y

    y, injection = once(model, fault, compute)
    assert y.equal(right)
    assert injection.target == "gradient"
    assert injection.index[0] == 6
    assert math.isnan(injection.after)
    assert not model[0].weight.grad.isfinite().all()
    assert model[2].weight.grad.isfinite().all()


def test_keyword_inputs_are_found_by_the_backward_fault():
    class Scale(nn.Module):
        def forward(self, *, mask, hidden):
            return hidden * mask

    model = Scale()
    hidden = torch.ones(3, requires_grad=True)
    fault = WrongOperator(steps=(0,), operator="zero", module="", phase="backward")
    _, injection = once(model, fault, lambda: model(mask=torch.ones(3), hidden=hidden).sum().backward())
    assert hidden.grad.equal(torch.zeros(3))
    assert injection.elements == 3


MODULE_FAULTS = [
    lambda **w: PoisonActivation(module="blocks.0.mlp", **w),
    lambda **w: FlipBit(target="activation", name="blocks.0.mlp", bit=14, **w),
    lambda **w: MatmulOverflow(module="blocks.0.mlp", **w),
    lambda **w: MatmulOverflow(module="blocks.0.attn", **w),
    lambda **w: WrongOperator(module="blocks.0.mlp", operator="uninitialised_rows", **w),
    lambda **w: WrongOperator(module="blocks.0.mlp", operator=lambda y: y.exp() * 1e30, **w),
    lambda **w: WrongOperator(module="blocks.0.mlp", operator="uninitialised_rows", phase="backward", **w),
    lambda **w: PoisonGradient(parameter="blocks.0.mlp.weight", **w),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", MODULE_FAULTS)
def test_activation_checkpointing_bears_every_fault(make, *, reentrant, persistent, autocast, tiny, loader):
    model = tiny()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    plan = FaultPlan([make(steps=(0,), persistent=persistent)])
    with plan.attach(model), plan.at(0):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(loader[0]).float().pow(2).mean()
        loss.backward()
    backward = plan.log[0].target == "gradient"
    assert len(plan.log) == (2 if persistent and not backward else 1)  # the recomputation is one more
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", MODULE_FAULTS)
def test_autocast_bears_every_fault(make, tiny, loader):
    model = tiny()

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(loader[0]).float().pow(2).mean()
        loss.backward()

    once(model, make(steps=(0,)), compute)


def test_the_seed_never_chooses_what_an_attention_does_not_call():
    model = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    for seed in range(5):
        plan = FaultPlan([PoisonActivation(steps=(0,))], seed=seed)
        with plan.attach(model), plan.at(0):
            model(x, x, x)
        assert plan.log[0].where == ""
