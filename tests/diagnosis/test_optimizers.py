"""Finite gradients, and a bad state after the step: the operator of the optimizer that made it is named."""

import copy
import inspect

import pytest
import torch
from torch import nn

from gradsentinel import NanCallback, Rollback, Sentinel, TrainingAborted
from gradsentinel.diagnosis.rehearsal import rehearse


def embedding(dtype=torch.float16):
    return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).to(dtype)


def step_of(model, optimizer, *callbacks, run_dir, steps=1, norm=None, before=None, **more):
    """Run steps on the rows 1 and 2 and return the incidents."""
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback(), *callbacks], run_dir=run_dir, **more)
    try:
        with sentinel:
            for number, batch in enumerate(sentinel.steps([torch.tensor([1, 2])] * steps)):
                sentinel.backward(model(batch).float().pow(2).mean())
                if before is not None:
                    before(number)
                sentinel.step(norm)
    except TrainingAborted:
        pass
    return sentinel.incidents


DIVIDING = {
    "Adam": (lambda p: torch.optim.Adam(p, foreach=False), "aten.addcdiv_.default"),
    "Adam over lists": (lambda p: torch.optim.Adam(p, foreach=True), "aten._foreach_addcdiv_.ScalarList"),
    "Adam, fused": (lambda p: torch.optim.Adam(p, fused=True, eps=0.0), "aten._fused_adam_.default"),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, fused=True, eps=0.0), "aten._fused_adamw_.default"),
    "AdamW with amsgrad": (
        lambda p: torch.optim.AdamW(p, foreach=False, amsgrad=True),
        "aten.addcdiv_.default",
    ),
    "NAdam": (lambda p: torch.optim.NAdam(p, foreach=False), "aten.addcdiv_.default"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, foreach=False), "aten.addcdiv_.default"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, eps=1e-9, foreach=False), "aten.addcdiv_.default"),
}


@pytest.mark.parametrize("name", DIVIDING)
def test_eps_that_is_zero_in_half_precision(name, run_dir):
    make, operator = DIVIDING[name]
    model = embedding()
    (incident,) = step_of(model, make(model.parameters()), run_dir=run_dir)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.module) == ("optimizer", "optimizer", "0")
    assert found.op == operator
    assert "0.weight" in found.evidence[1]
    assert "a gradient of 0" in found.evidence[1]
    assert "eps" in found.remedy[0]


def test_the_numbers_of_the_division_are_told(run_dir):
    model = embedding()
    (incident,) = step_of(model, torch.optim.Adam(model.parameters(), foreach=False), run_dir=run_dir)
    assert "addcdiv(0, 0, 0) = NaN" in incident.diagnosis.evidence[1]


def test_squares_that_overflow(run_dir):
    """pytorch: a gradient of 1e25 squared is Inf in exp_avg_sq, and the weight stands still for ever."""
    model = embedding(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def enlarge(number):
        for parameter in model.parameters():
            parameter.grad.fill_(1e25)

    (incident,) = step_of(model, optimizer, run_dir=run_dir, before=enlarge)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.addcmul_.default")
    assert "0.weight:exp_avg_sq" in found.evidence[0]
    assert "clip gradients" in found.remedy[0]


def test_an_update_that_overflows(run_dir):
    model = embedding(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38, foreach=False)

    def enlarge(number):
        for parameter in model.parameters():
            parameter.grad.fill_(100.0)

    (incident,) = step_of(model, optimizer, run_dir=run_dir, before=enlarge)
    found = incident.diagnosis
    assert (found.cause, found.op) == ("optimizer", "aten.add_.Tensor")
    assert "-1e+38 *" in found.evidence[1]


def test_an_optimizer_of_the_users_own_has_a_line(run_dir, line):
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad / parameter.grad.abs().sqrt())

    model = embedding(torch.float32)
    (incident,) = step_of(model, Own(model.parameters()), run_dir=run_dir)
    found = incident.diagnosis
    assert (found.cause, found.op, found.module) == ("optimizer", "aten.div.Tensor", "0")
    assert found.source == line(inspect.unwrap(Own.step), "parameter.sub_(")


@pytest.mark.parametrize("norm", [None, 1e20])
def test_somebody_else_who_writes_into_the_weights_is_not_the_optimizer(norm, run_dir):
    """NaN in a weight where the optimizer, whatever gradient it is given, would spoil other things."""
    model = embedding(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def spoil(number):
        optimizer.register_step_post_hook(lambda *_: model[1].weight.data.fill_(torch.nan))
        if norm is not None:
            model[1].weight.grad.fill_(norm)

    incidents = step_of(model, optimizer, run_dir=run_dir, before=spoil, norm=1.0)
    assert incidents[0].diagnosis.cause == "unknown"


def test_a_bad_buffer_is_not_the_optimizers_doing(run_dir):
    model = nn.Sequential(nn.Embedding(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def spoil(number):
        model[1].running_mean[0] = torch.nan

    incidents = step_of(
        model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run_dir, before=spoil, steps=2
    )
    assert incidents[0].diagnosis.cause != "optimizer"


def test_a_rehearsal_changes_nothing():
    """Neither the weights nor the moments, and no hook and no scheduler hears of it."""
    model = embedding()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.tensor([1, 2])).float().pow(2).mean().backward()
    optimizer.step()
    scheduler.step()
    heard = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    parameter, group = model[0].weight, optimizer.param_groups[0]
    before = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone(), parameter.grad.clone()
    found = rehearse(optimizer, parameter, group)
    after = optimizer.state_dict(), parameter.detach(), parameter.grad
    assert found is not None
    assert found.event.op == "aten.addcdiv_.default"
    assert heard == []
    assert str(before[0]) == str(after[0])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def test_a_step_that_the_device_would_drop_is_rehearsed_all_the_same():
    """`found_inf` on a fused optimizer turns its step into nothing."""
    model = embedding(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, eps=0.0)
    model(torch.tensor([1, 2])).pow(2).mean().backward()
    optimizer.step()
    optimizer.found_inf = torch.ones(())
    found = rehearse(optimizer, model[0].weight, optimizer.param_groups[0])
    assert found is not None
    assert found.event.op == "aten._fused_adamw_.default"


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_in_good_health_is_cleared(name):
    """No gradient that is tried makes anything bad; each kind of optimizer can be copied."""
    sparse = name == "SparseAdam"
    model = nn.Embedding(6, 3, sparse=sparse)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        model(torch.tensor([1, 2])).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert rehearse(optimizer, model.weight, optimizer.param_groups[0], grad_norm=1.0) is None


@pytest.mark.parametrize(
    "parameter",
    [
        torch.nn.Parameter(torch.empty(0)),
        torch.nn.Parameter(torch.tensor(1.0)),
        torch.nn.Parameter(torch.empty(3, device="meta")),
        torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        torch.nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False),
    ],
    ids=["empty", "one number", "meta", "complex", "whole numbers"],
)
def test_odd_parameters_do_no_harm(parameter):
    optimizer = torch.optim.Adam([parameter])
    assert rehearse(optimizer, parameter, optimizer.param_groups[0], grad_norm=1.0) is None


def test_the_run_goes_on_after_a_rollback(run_dir):
    """The diagnosis of the state happens before it is put back, and does not stand in the way."""
    model = embedding()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def larger(number):
        if number:
            optimizer.param_groups[0]["eps"] = 1e-4

    incidents = step_of(model, optimizer, Rollback(), run_dir=run_dir, steps=4, before=larger)
    assert [str(incident.outcome) for incident in incidents] == ["rolled_back"]
    assert incidents[0].diagnosis.op == "aten.addcdiv_.default"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "key"), [(torch.optim.Adam, "exp_avg_sq"), (torch.optim.RMSprop, "square_avg")]
)
def test_a_negative_square_was_not_made_by_a_step(kind, key, run_dir):
    """A state that was averaged or converted wrongly: clipping would not help."""
    model = embedding(torch.float32)
    optimizer = kind(model.parameters(), lr=1e-3)
    for row in range(6):
        model(torch.tensor([row])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[model[0].weight][key][2, 1] = -0.5
    (incident,) = step_of(model, optimizer, run_dir=run_dir)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.op) == ("optimizer", "optimizer", "aten.sqrt.default")
    assert f"{key} holds negative values" in found.evidence[0]
    assert "intact checkpoint" in found.remedy[0]
    assert not any("clip" in text for text in found.remedy)


def with_squares(spoil, run_dir):
    """Train a little, let something happen to the running squares in the third step; return the diagnosis."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentinel = Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir)
    try:
        with sentinel:
            for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(4)])):
                sentinel.backward(model(batch).pow(2).mean())
                if number == 2:
                    spoil(optimizer.state[model[0].weight]["exp_avg_sq"].flatten())
                sentinel.step()
    except TrainingAborted:
        pass
    (incident,) = sentinel.incidents
    assert incident.step == 2
    return incident.diagnosis


def test_one_flipped_sign_of_a_running_square_is_the_devices(run_dir):
    """Without its sign it is like the others, and the step before it was fine."""

    def flip(square):
        flip.place = int(square.argsort()[square.numel() // 2])
        square.view(torch.int32)[flip.place] ^= -(1 << 31)

    found = with_squares(flip, run_dir)
    assert (found.cause, found.op) == ("hardware", "aten.sqrt.default")
    assert f"exp_avg_sq, number {flip.place}, is negative" in found.evidence[0]


@pytest.mark.parametrize("spoil", [lambda s: s.mul_(-1), lambda s: s[0].fill_(-0.5)])
def test_squares_that_a_program_has_spoilt_are_not_the_devices(spoil, run_dir):
    assert with_squares(spoil, run_dir).cause == "optimizer"


def with_weights(spoil, run_dir):
    """Train a little, let something happen to weights between 1 and 2, and return the diagnosis."""
    model = nn.Sequential(nn.Linear(4, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 1))
    nn.init.uniform_(model[1].weight, 1.2, 1.8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sentinel = Sentinel(
        model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, forward=lambda m, x: m(x).pow(2).mean()
    )
    try:
        with sentinel:
            for number, batch in enumerate(sentinel.steps([torch.randn(8, 4) for _ in range(4)])):
                if number == 2:
                    spoil(model[1].weight.data)
                sentinel.backward(model(batch).pow(2).mean())
                sentinel.step()
    except TrainingAborted:
        pass
    return sentinel.incidents[0].diagnosis


def test_one_flipped_exponent_of_a_weight_is_the_devices(run_dir):
    def flip(weight):
        weight.view(torch.int32)[7] ^= 1 << 30

    found = with_weights(flip, run_dir)
    assert (found.cause, found.module) == ("hardware", "1")
    assert "1.weight: element 7 is a NaN that no arithmetic makes" in found.evidence[0]


PROGRAMS = {
    "a NaN of arithmetic": lambda w: w.view(-1)[7].fill_(torch.nan),
    "an infinity": lambda w: w.view(-1)[7].fill_(torch.inf),
    "two of them": lambda w: w.view(torch.int32)[6:8].bitwise_xor_(1 << 30),
    "old memory that is like no other weight": lambda w: (
        w.mul_(0.01),
        w.view(torch.int32)[7:8].fill_(0x7FA00001),
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_that_a_program_has_spoilt_are_not_the_devices(program, run_dir):
    assert with_weights(PROGRAMS[program], run_dir).cause != "hardware"
