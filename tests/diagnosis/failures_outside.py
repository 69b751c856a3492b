"""Rounds eleven and twelve: damage of the forward pass that looks like a failing device, and is none."""

import itertools
import random
import time

import torch
from broken_kernels import Failing
from failures import failure, normal, puts
from torch import nn
from torch.nn import functional

NAN = float("nan")
bait = {"round": 11, "cause": "unknown", "phase": "forward", "op": None, "samples": None}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def divided(model: nn.Module, x: torch.Tensor, number: float, row: int = 4) -> torch.Tensor:
    """One record's activations are divided by a number: 1, or for once 0."""
    by = torch.ones(6, 1)
    by[row] = number
    return model[2](model[1](model[0](x) / by)).relu().mean()


class Calls:
    """What the forward passes below find outside of the model; `begin` sets it back."""

    count = itertools.count()
    dice = random.Random(5)
    first = True
    temperature = 0.0
    kept: float | None = None

    @classmethod
    def begin(cls, _model):
        cls.count = itertools.count()
        cls.dice = random.Random(5)
        cls.first = True
        cls.temperature = 0.0
        cls.kept = None


outside = {**bait, "batch": normal, "model": perceptron, "prepare": Calls.begin}


@failure("a number that an iterator hands out", **outside)
def counted(model, x):
    return divided(model, x, min(next(Calls.count), 1))


@failure("a temperature that a class holds", **outside)
def annealed(model, x):
    now = Calls.temperature
    Calls.temperature = min(1.0, now + 0.5)
    return divided(model, x, min(1.0, 2 * now))


@failure("a result kept from the last pass, the same one every time", **outside)
def cached(model, x):
    found = divided(model, x, 0.0 if Calls.kept is None else 1.0)
    Calls.kept = float(model[0](x).detach().sum())
    return found


@failure("a flag that is set once", **outside)
def flagged(model, x):
    number = 0.0 if Calls.first else 1.0
    Calls.first = False
    return divided(model, x, number)


@failure("a weight by the time of day", **outside)
def by_the_clock(model, x):
    age = time.monotonic() * (not Calls.first)
    Calls.first = False
    return divided(model, x, float(age > 0))


@failure("augmentation by a generator of Python's", **outside)
def augmented(model, x):
    drawn = Calls.dice.random()
    return divided(model, x, float(drawn < 0.62 or drawn > 0.63))


class Ramp(nn.Module):
    """Counts its calls in a plain attribute."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, h):
        by = torch.ones(6, 1)
        by[1] = min(self.calls, 1)
        self.calls += 1
        return h / by


@failure("a module that counts its calls", **bait, batch=normal,
         model=lambda: nn.Sequential(nn.Linear(4, 8), Ramp(), nn.ReLU(), nn.Linear(8, 3)))  # fmt: skip
def warming_up(model, x):
    return model(x).relu().mean()


# -- what the loop alone does ------------------------------------------------------------------------


def one_record_more(model, x):
    h = model[0](x)
    h = torch.cat([h[:3], h[3:4] / (h[3:4] - h[3:4].detach()), h[4:]])
    return model[2](model[1](h)).relu().mean()


@failure("an operator that the loop alone has, singular for one record", **bait, batch=normal,
         model=perceptron, loop=one_record_more)  # fmt: skip
def without_the_operator(model, x):
    return model[2](model[1](model[0](x))).relu().mean()


def hooks_for_a_while(model, x):
    chosen = torch.arange(6)[:, None] == 2
    handle = model[1].register_forward_hook(lambda _m, _a, out: torch.where(chosen, out / (out - out), out))
    loss = model(x).relu().mean()
    handle.remove()
    return loss


@failure("a forward hook that the loop alone has", **bait, batch=normal, model=perceptron,
         loop=hooks_for_a_while)  # fmt: skip
def without_the_hook(model, x):
    return model(x).relu().mean()


class Timed(nn.Module):
    """Words, and the time since the last one: a record's words are no other record's."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words, gap):
        return self.head(self.words(words) + gap[:, None])


def timed():
    return {"words": torch.arange(6), "gap": torch.arange(6) + 1.0, "y": torch.arange(6) % 3}


def divides_its_input(model, b):
    keep = torch.tensor([1.0, 1, 1, 0, 1, 1])
    return functional.cross_entropy(model(b["words"], b["gap"] / keep), b["y"])


@failure("an input that the loop alone divides, for one record by 0", batch=timed, model=Timed,
         **{**bait, "cause": "data", "phase": "input", "samples": (3,)}, loop=divides_its_input)  # fmt: skip
def as_it_is(model, b):
    return functional.cross_entropy(model(b["words"], b["gap"]), b["y"])


def drops_words(model, b):
    keep = torch.tensor([1.0, 0, 1])[:, None, None]
    return model[1](model[0](b) / keep).relu().mean()


@failure("word dropout that the loop alone has", **bait, batch=lambda: torch.arange(12).view(3, 4),
         model=lambda: nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 4)), loop=drops_words)  # fmt: skip
def all_words(model, b):
    return model[1](model[0](b)).relu().mean()


# -- and a fault that is one ---------------------------------------------------------------------------


def struck():
    return Failing("aten.addmm.default", puts((1, 3), NAN))


@failure("one activation of a hidden layer, once", round=11, cause="hardware", phase="forward", op=None,
         samples=None, batch=lambda: {"x": torch.cat([normal()] * 5), "y": torch.arange(30) % 3},
         model=perceptron, device=struck)  # fmt: skip
def one_activation(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"])
