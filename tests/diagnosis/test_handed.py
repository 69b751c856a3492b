"""Tensors that autograd does not see, handed to functions of the loop's own that write to them."""

import inspect
import math

import pytest
import torch
from torch import nn

from gradsentinel.diagnosis.loop_code import LoopCode
from loops import make_batches


def times(part, row, factor):
    part[row] *= factor


def fill(part, *, value):
    rows = part.view(-1)
    rows.fill_(value)


def hands_on(whole):
    times(whole, 0, math.inf)


def of_any_number(*parts):
    parts[0][0] = 1.0


class Mender:
    def mend(self, out):
        out.clamp_(-1.0, 1.0)

    def __call__(self, out):
        out[0] = 0.0


TABLE = {"times": times}
mender = Mender()


def by_position(out):
    times(out.data, 0, math.inf)
    return LoopCode([])


def by_keyword(out):
    fill(part=out.detach()[0], value=math.nan)
    return LoopCode([])


def by_a_name_for_it(out):
    rows = out.data.reshape(-1)
    few = rows[:2]
    times(few, 0, math.inf)
    return LoopCode([])


def through_numpy(out):
    times(out.detach().numpy(), 0, math.inf)
    return LoopCode([])


def handed_on(out):
    hands_on(out.data)
    return LoopCode([])


def spread(out):
    of_any_number(*[out.data])
    return LoopCode([])


def to_a_method(out):
    mender.mend(out.data)
    return LoopCode([])


def to_an_object(out):
    mender(out.data)
    return LoopCode([])


def out_of_a_table(out):
    TABLE["times"](out.data, 0, math.inf)
    return LoopCode([])


def first_line_in(function):
    return inspect.getsourcelines(function)[1]


@pytest.mark.parametrize(
    ("loop", "writer", "lines"),
    [
        (by_position, times, 1),
        (by_keyword, fill, 2),
        (by_a_name_for_it, times, 1),
        (through_numpy, times, 1),
        (handed_on, times, 1),
        (spread, of_any_number, 1),
        (to_a_method, Mender.mend, 1),
        (to_an_object, Mender.__call__, 1),
        (out_of_a_table, times, 1),
    ],
)
def test_what_a_function_writes_to_that_it_was_given_without_autograd(loop, writer, lines):
    out = torch.ones(2, 2, requires_grad=True) * 2
    assert f"test_handed.py:{first_line_in(writer) + lines}" in loop(out).hidden_writes()


def add(total, value):
    total += value


def remember(history, value):
    history.append(value)


def scaled(part):
    mine = part.clone()
    mine *= 2.0
    return mine


def notes(out):
    totals, history = torch.zeros(()), []
    add(totals, out.detach().sum())
    remember(history, out.data)
    scaled(out.data)
    times(torch.ones(2), 0, 2.0)
    return LoopCode([])


def sees(out):
    times(out, 0, 2.0)
    return LoopCode([])


@pytest.mark.parametrize("loop", [notes, sees])
def test_what_is_only_looked_at_copied_or_seen_by_autograd_is_no_such_write(loop):
    assert loop(torch.ones(2, 2, requires_grad=True) * 2).hidden_writes() == []


@pytest.mark.parametrize("beside", ["data", "detach"])
def test_a_function_of_the_loop_that_spoils_a_row_is_no_device(beside, sentinel_for):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    sentinel = sentinel_for(model, forward)
    for step, batch in enumerate(sentinel.steps(make_batches(6))):
        out = model(batch["x"])
        if step == 4:
            times(out.data if beside == "data" else out.detach(), 1, math.inf)
        sentinel.backward(nn.functional.cross_entropy(out, batch["y"]))
        sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.diagnosis.cause == "unknown"
