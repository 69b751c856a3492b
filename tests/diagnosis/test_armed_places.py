"""Without forward=, armed hooks tell between which calls a bad value came up, functional code included."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsentinel import NanCallback, Rollback, Sentinel


class Breaks(torch.autograd.Function):
    """The identity, until it is told to break."""

    forwards = backwards = False

    @staticmethod
    def forward(ctx, x):
        return x / (x - x) if Breaks.forwards else x * 1

    @staticmethod
    def backward(ctx, g):
        return g / (g - g) if Breaks.backwards else g * 1


class Parent(nn.Module):
    """Three modules, and something of its own before, between and after them."""

    def __init__(self, place="", phase="forward"):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.place, self.phase, self.on = place, phase, False

    def at(self, place, h):
        if not (self.on and self.place == place):
            return h
        if self.phase == "forward":
            return (h - h.detach()).log()
        return (h - h.detach()).sqrt() + h

    def forward(self, x):
        h = self.at("first", x * 1)
        h = self.a(h)
        h = self.at("between", h)
        h = self.b(h)
        h = self.c(h)
        return self.at("last", h)


class Model(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.stem, self.parent, self.head = nn.Linear(4, 4), parent, nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.parent(self.stem(x)))


def mean(model, x):
    return model(x).mean()


def run(model, run_dir, switch, loss=mean, *, bad=(1, 3), steps=5, **settings):
    """Train; the fault is there in the bad steps only."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, **settings) as sentinel:
        for step, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(steps)])):
            switch(step in bad)
            sentinel.backward(loss(model, batch))
            sentinel.step()
    assert [incident.step for incident in sentinel.incidents] == list(bad)
    return sentinel.incidents


def said(incident):
    return "\n".join(incident.diagnosis.evidence)


def line_with(function, text):
    """'file:number' of the line in a function that holds a text."""
    first = function.__code__.co_firstlineno
    lines = Path(function.__code__.co_filename).read_text(encoding="utf-8").splitlines()[first - 1 :]
    return f"{Path(__file__).name}:{first + next(n for n, line in enumerate(lines) if text in line)}"


PLACES = {
    "first": ("before parent.a was called, in the forward of parent", "self.a(h)"),
    "between": ("between parent.a and parent.b, in the forward of parent", "self.b(h)"),
    "last": ("after parent.c, in the forward of parent", "self.c(h)"),
}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("place", PLACES)
def test_functional_code_of_a_parent(place, phase, run_dir):
    parent = Parent(place, phase)
    first, *_, last = run(Model(parent), run_dir, lambda on: setattr(parent, "on", on), bad=(1, 2, 3))
    words, text = PLACES[place]
    assert "hooks are armed on" in said(first)
    assert words in said(last)
    assert (last.diagnosis.phase, last.diagnosis.module) == (phase, "parent")
    assert last.diagnosis.source == line_with(Parent.forward, text)
    assert ("LogBackward0" if phase == "forward" else "SqrtBackward0") in said(last)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_custom_function_between_two_modules_is_named(phase, run_dir):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(Breaks.apply(self.a(x)))

    def switch(on):
        setattr(Breaks, f"{phase}s", on)

    _, second = run(Between(), run_dir, switch)
    found = second.diagnosis
    assert "between a and b, in the forward of the model" in said(second)
    assert (found.cause, found.phase, found.module, found.node) == ("operator", phase, "", "BreaksBackward")
    assert found.source == line_with(Between.forward, "Breaks.apply")
    assert "BreaksBackward" in found.remedy[0]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_loss_outside_of_all_modules(phase, run_dir):
    model, switched = Model(Parent()), []

    def loss(model, x):
        h = model(x)
        if not switched[-1]:
            return h.mean()
        return (h - h.detach()).log().mean() if phase == "forward" else ((h * 0).sqrt() + h).mean()

    _, second = run(model, run_dir, switched.append, loss)
    assert "after the model, outside of all modules, in the loss" in said(second)
    assert (second.diagnosis.phase, second.diagnosis.module) == (phase, None)
    assert second.diagnosis.source == line_with(loss, "model(x)")


def test_the_watch_moves_to_where_the_value_comes_from(run_dir):
    """The suspect is far from the fault: each occurrence leads one level closer."""
    parent = Parent("between")

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), parent)])
            self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    incidents = run(Tower(), run_dir, lambda on: setattr(parent, "on", on), bad=(1, 3, 5, 7), steps=9)
    where = [incident.diagnosis.module for incident in incidents]
    assert "between blocks.1.1.a and blocks.1.1.b, in the forward of blocks.1.1" in said(incidents[-1])
    assert where[-1] == "blocks.1.1"
    assert "hooks are armed on" in said(incidents[1])


def test_a_tensor_that_is_used_twice_has_two_candidates(run_dir):
    class Residual(nn.Module):
        on = False

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h) + ((h - h.detach()).sqrt() if self.on else h)

    model = Residual()
    _, second = run(model, run_dir, lambda on: setattr(model, "on", on))
    assert second.diagnosis.phase == "backward"
    assert "in the model" in said(second)
    assert "in b" in said(second)
    assert "used" in said(second)


def test_masks_of_minus_infinity_are_not_where_it_began(run_dir):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.inner, self.b = nn.Linear(4, 4), Scores(), nn.Linear(4, 1)
            self.on = False

        def forward(self, x):
            h = self.inner(self.a(x), torch.full((4,), float("-inf"))).softmax(-1)
            return self.b(h / (h - h) if self.on else h)

    class Scores(nn.Module):
        def forward(self, h, mask):
            return h.masked_fill(torch.tensor([False, False, False, True]), float("-inf"))

    model = Masked()
    *_, last = run(model, run_dir, lambda on: setattr(model, "on", on), bad=(1, 8), steps=10)
    assert "between inner and b" in said(last)


def test_a_checkpointed_block(run_dir):
    parent = Parent("between")

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.parent = nn.Linear(4, 4), parent

        def forward(self, x):
            return checkpoint(self.parent, self.stem(x), use_reentrant=False)

    *_, last = run(Checkpointed(), run_dir, lambda on: setattr(parent, "on", on), bad=(1, 2, 3))
    assert "between parent.a and parent.b, in the forward of parent" in said(last)


@pytest.mark.parametrize("why", ["reduced", "hooked"])
def test_a_gradient_that_only_a_hook_spoils(why, run_dir):
    model, on = Model(Parent()), [False]

    def accumulated(parameter):
        parameter.grad.div_(0 if on[-1] else 1)

    if why == "hooked":
        model.head.weight.register_hook(lambda g: g * float("nan") if on[-1] else g)
    else:
        model.head.weight.register_post_accumulate_grad_hook(accumulated)
    _, second = run(model, run_dir, on.append)
    assert second.diagnosis.module == "head"
    assert "a hook or code after the backward pass" in said(second)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile's own
def test_hooks_on_a_compiled_part_leave_its_code_alone(run_dir):
    parent = Parent("between")
    compiled = torch.compile(parent, backend="eager")

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.parent = nn.Linear(4, 4), compiled

        def forward(self, x):
            return self.parent(self.stem(x))

    model = Half()
    *_, last = run(model, run_dir, lambda on: setattr(parent, "on", on), bad=(1, 3))
    assert last.diagnosis.module == "parent"
    assert not any(module._forward_hooks for module in parent.modules())


def test_what_the_hooks_cannot_see_is_said(run_dir):
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x)

    model, on = Elsewhere(), [False]

    def loss(model, x):
        weight = model.lin.weight if on[-1] else model.lin.weight.detach() * 0 + model.lin.weight
        return (x @ (weight.log() if on[-1] else weight)).mean()

    _, second = run(model, run_dir, on.append, loss)
    assert "the armed hooks saw nothing" in said(second)


def test_micro_batches(run_dir):
    parent, on = Parent("between"), [False]
    model = Model(parent)
    with Sentinel(
        model, torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[NanCallback()], run_dir=run_dir
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(6, 4) for _ in range(18)], accumulate=3)):
            parent.on = number in (4, 10, 17)  # the second, the second, the third of their steps
            sentinel.backward(model(batch).mean())
            sentinel.step()
    assert on == [False]
    assert [incident.microbatch for incident in sentinel.incidents] == [1, 1, 2]
    assert "between parent.a and parent.b" in said(sentinel.incidents[-1])


def test_after_a_rollback_the_same_step_is_another_one(run_dir):
    """A step number comes again: what was seen the first time must not be taken for what is seen now."""
    parent = Parent("between")
    model = Model(parent)
    callbacks = [NanCallback(action="rollback"), Rollback(every=1, confirm_after=0, on_disk=0)]
    calls = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(6, 4) for _ in range(9)]):
            calls.append(True)
            parent.on = len(calls) in (3, 4)
            loss = model(batch).mean()
            if len(calls) == 6:
                loss = (model(batch).detach() * 0).log().mean() + loss
            sentinel.backward(loss)
            sentinel.step()
    assert [incident.step for incident in sentinel.incidents] == [2, 2, 2]
    _, second, last = sentinel.incidents
    assert (second.diagnosis.phase, second.diagnosis.module) == ("forward", "parent")
    assert "in the loss" in said(last)
    assert last.diagnosis.module is None


@pytest.mark.expects_swallowed
def test_an_error_of_the_hooks_ends_the_looking_and_not_the_run(run_dir, monkeypatch):
    model, on = Model(Parent("between")), [False]

    def switch(bad):
        model.parent.on = bad
        on.append(bad)
        if len(on) == 4:
            monkeypatch.setattr("gradsentinel.diagnosis.arm.is_finite", None)

    first, second = run(model, run_dir, switch, bad=(1, 4), steps=6)
    assert "hooks are armed on" in said(first)
    assert re.search("saw nothing|outside", said(second)) or second.diagnosis.cause == "unknown"


def test_nothing_is_left_on_the_modules_and_tensors(run_dir):
    parent = Parent("between")
    model = Model(parent)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    leaf = torch.randn(6, 4, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir) as sentinel:
        for step, _ in enumerate(sentinel.steps([leaf] * 6)):
            parent.on = step == 1
            sentinel.backward(model(leaf).mean())
            sentinel.step()
            if step > 1:
                assert len(leaf._backward_hooks) <= 2, "hooks of earlier steps pile up on a leaf"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before
    assert not leaf._backward_hooks
