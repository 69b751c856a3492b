"""What the loop puts in the place of something else, or writes to weights, as far as its code shows."""

import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from gradsentinel.diagnosis.loop_code import LoopCode
from gradsentinel.diagnosis.own_code import writes_beside_autograd
from gradsentinel.diagnosis.replaced import replaces
from gradsentinel.diagnosis.weight_writes import weights_written

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
NAMES = {"weight", "bias"}


def bad(*args):
    return args


def patches_a_function():
    functional.linear = bad


def patches_by_an_alias():
    F.linear = bad


def patches_a_tensor():
    torch.Tensor.tanh = bad


def patches_deep_inside():
    torch.nn.functional.softmax = bad


def patches_by_name(value):
    setattr(functional, "linear", value)  # noqa: B010 - the very thing


def patches_a_class():
    nn.Linear.forward = bad


def replaces_a_call():
    MODEL.forward = bad


def replaces_an_item():
    MODEL[1] = nn.Linear(2, 2)


def sets_switches():
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)


def names_a_head():
    MODEL.head = nn.Linear(2, 2)


def of_its_own():
    table = {}
    table["linear"] = functional.linear
    box = types.SimpleNamespace()
    box.linear = functional.linear
    return table, box, getattr(functional, "linear")  # noqa: B009 - it only looks


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (patches_a_function, 1), (patches_by_an_alias, 1), (patches_a_tensor, 1), (patches_deep_inside, 1),
        (patches_by_name, 1), (patches_a_class, 1), (replaces_a_call, 1), (replaces_an_item, 1),
        (sets_switches, 0), (names_a_head, 0), (of_its_own, 0),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_what_puts_something_in_the_place_of_a_function(function, found):
    places = replaces(function.__code__, globals())
    assert len(places) == found
    assert all(place.startswith("test_replaced.py:") for place in places)


def by_data(model):
    model.lin.weight.data[0] = 1


def under_no_grad(model):
    with torch.no_grad():
        model.lin.weight.add_(1)


def over_parameters(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def over_groups(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.add_(1)


def over_pairs(model, noise):
    with torch.no_grad():
        for number, (n, (_, p)) in enumerate(zip(noise, model.named_parameters(), strict=True)):
            p.add_(n, alpha=number)


def averages(model, ema):
    with torch.no_grad():
        for average, p in zip(ema.parameters(), model.parameters(), strict=True):
            average.mul_(0.9).add_(p)


def a_teacher(student, teacher):
    for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
        one.data.lerp_(other.data, 0.1)


def gradients(model):
    for p in model.parameters():
        p.grad.data.clamp_(-1, 1)
        p.requires_grad_(True)


def with_a_graph(model, x):
    x = x.clone()
    x[0] = model.lin.weight[0, 0]
    return x


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (by_data, 1), (under_no_grad, 1), (over_parameters, 1), (over_groups, 1), (over_pairs, 1),
        (averages, 0), (a_teacher, 0), (gradients, 0), (with_a_graph, 0),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_what_writes_to_weights(function, found):
    assert len(weights_written(function.__code__, NAMES)) == found


def gives_an_address(library, out):
    library.fill(out.data_ptr(), 3)


def looks_at_an_address(out):
    str(out.data_ptr())
    return out.data_ptr() == 0


def gives_an_interface(library, out):
    library.fill(pointer=out.__array_interface__["data"][0])


@pytest.mark.parametrize(
    ("function", "found"), [(gives_an_address, 1), (looks_at_an_address, 0), (gives_an_interface, 1)]
)
def test_a_library_that_is_told_where_the_memory_is(function, found):
    assert len(writes_beside_autograd(function.__code__)) == found


# -- of a loop that is running -----------------------------------------------------------------------


class Edit:
    def __call__(self, out):
        np.asarray(out.detach())[0] = 1


class Patch:
    def __enter__(self):
        functional.linear = bad

    def __exit__(self, *_):
        pass


TABLE = {"all": [Edit()], "patch": Patch(), "first": by_data}


def test_functions_and_objects_in_containers_are_read_too():
    def step():
        return [TABLE, LoopCode([])]

    _, code = step()
    assert len(code.hidden_writes()) == 2
    assert len(code.replaced()) == 1


def initialise(model):
    for parameter in model.parameters():
        parameter.data.fill_(1)


def test_what_is_done_before_the_loop_begins_is_none_of_a_steps():
    model = nn.Sequential(nn.Linear(2, 2))
    initialise(model)
    model[0] = nn.Linear(2, 2)
    model[0].weight.data.fill_(1)
    for _ in range(1):
        code = LoopCode([])
    assert code.replaced() == []
    assert code.weights_written(NAMES) == []


def test_what_is_done_in_it_is():
    model = nn.Sequential(nn.Linear(2, 2))
    for number in range(2):
        if number:
            initialise(model)
            model[0] = nn.Linear(2, 2)
            model[0].weight.data.fill_(1)
        code = LoopCode([])
    assert len(code.replaced()) == 1
    assert len(code.weights_written(NAMES)) == 2
