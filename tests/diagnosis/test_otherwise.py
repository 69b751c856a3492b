"""What else than a failing device may have damaged a forward pass, looked for piece by piece."""

import weakref
from array import array

import numpy as np
import pytest
import torch
from failures import normal
from failures_outside import divided, perceptron, struck
from torch import nn

from gradsentinel import NanCallback, Sentinel
from gradsentinel.again.generators import own_generators
from gradsentinel.diagnosis.graph import difference, graph_of
from gradsentinel.diagnosis.surroundings import Surroundings
from gradsentinel.faults.damage import damage


def loss_of(model, x):
    return model(x).relu().mean()


@pytest.fixture
def sentinel(sentinel_for):
    return lambda model, forward=loss_of: sentinel_for(model, forward, NanCallback())


def test_a_graph_is_compared_after_the_backward_pass_has_freed_it():
    model, x = perceptron(), normal()
    one, other = loss_of(model, x), loss_of(model, x)
    before = graph_of(one.grad_fn)
    one.backward()
    assert graph_of(one.grad_fn) == before == graph_of(other.grad_fn)
    assert difference(before, before) == ""
    more = graph_of((loss_of(model, x) + model[0].bias.sum()).grad_fn)
    assert difference(more, before) == "AddBackward0, SumBackward0 only in the loop"
    assert difference(before, more) == "AddBackward0, SumBackward0 only in forward="


def test_the_same_operators_put_together_in_another_way_are_another_graph():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    chain, tree = (a.exp() * b).exp().sum(), (a.exp() * b.exp()).sum()
    assert difference(graph_of(chain.grad_fn), graph_of(tree.grad_fn))


def test_a_fault_that_is_put_in_for_a_drill_is_no_operator_of_the_program():
    model, x = perceptron(), normal()
    plain = graph_of(loss_of(model, x).grad_fn)
    handle = model[0].register_forward_hook(lambda _m, _a, out: damage(out, lambda _: None))
    assert graph_of(loss_of(model, x).grad_fn) == plain
    handle.remove()


def test_the_graph_is_let_go_with_the_step(sentinel):
    model = perceptron()
    watched = sentinel(model)
    for batch in watched.steps([normal(), normal()]):
        watched.backward(loss_of(model, batch))
        assert watched._watch.run.scene.graph is not None
        watched.step()
        assert watched._watch.run.scene.graph is None


def test_a_loop_that_does_not_show_its_loss_is_no_witness(run_dir):
    model = perceptron()
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[NanCallback()],
        run_dir=run_dir,
        forward=loss_of,
    ) as sentinel:
        for batch in sentinel.steps([normal()]):
            with struck():
                loss = loss_of(model, batch)
            loss.backward()
            sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause == "unknown"
    assert "did not show its loss" in found.evidence[0]


class Keeps(nn.Module):
    """Puts aside what it computes, as attention maps are: with its graph, or as plain numbers."""

    def __init__(self, *, plain: bool):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.plain = plain

    def forward(self, x):
        self.map = self.lin(x)
        if self.plain:
            self.map = self.map.detach()
        return self.lin(x)


@pytest.mark.parametrize("plain", [False, True])
def test_activations_that_are_put_aside_are_no_state(plain, sentinel):
    model = Keeps(plain=plain)
    run = sentinel(model)._watch.run
    loss_of(model, normal())
    around = Surroundings(run)
    loss_of(model, normal())
    assert bool({*around.changed(), *around.written()}) is plain


class Hostile:
    """Does not like to be looked into."""

    __slots__ = ("held",)

    def __getattribute__(self, name):
        if name in ("held", "__dict__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


def test_objects_that_cannot_be_looked_into_do_no_harm(sentinel):
    odd = Hostile()

    def forward(model, x):
        return loss_of(model, x) * (1 if odd else 0)

    around = Surroundings(sentinel(perceptron(), forward)._watch.run)
    assert around.changed() == []


def test_what_is_gone_or_too_long_to_be_put_in_words_does_no_harm(sentinel):
    owner, model = Forgotten(), perceptron()
    gone = model.owner = weakref.proxy(owner)
    model.length = 10**5000
    del owner

    def forward(model, x):
        return loss_of(model, x) * (0 if gone is None else 1)

    run = sentinel(model, forward)._watch.run
    around = Surroundings(run)
    assert around.changed() == []
    assert list(around.tensors()) == []
    assert own_generators(run) == []


class Forgotten:
    """Is gone before anybody looks."""


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (np.zeros(3), lambda held: held.fill(1)),
        (bytearray(3), lambda held: held.__setitem__(0, 1)),
        (array("d", [0.0]), lambda held: held.__setitem__(0, 1.0)),
        (list(range(5000)), lambda held: held.append(1)),
        (dict.fromkeys(range(5000)), lambda held: held.update(one=1)),
        (set(range(5000)), lambda held: held.add(-1)),
    ],
    ids=["array of numpy", "bytes", "array", "long list", "large dictionary", "large set"],
)
def test_a_change_of_what_the_forward_pass_reads_is_seen(held, change, sentinel):
    def forward(model, x):
        return loss_of(model, x) * (0 if held is None else 1)

    around = Surroundings(sentinel(perceptron(), forward)._watch.run)
    assert around.changed() == []
    change(held)
    assert around.changed() == ["held"]
    assert around.drawn() == []


def test_an_array_that_is_written_alike_in_each_pass_explains_it_too(sentinel_for):
    divisor = np.zeros(1)

    def forward(model, x):
        found = divided(model, x, float(divisor[0]))
        divisor.fill(1)
        return found

    model = perceptron()
    watched = sentinel_for(model, forward, NanCallback())
    for batch in watched.steps([normal()]):
        watched.backward(forward(model, batch))
        watched.step()
    found = watched.incidents[0].diagnosis
    assert found.cause == "unknown"
    assert "changes divisor" in found.evidence[0]
