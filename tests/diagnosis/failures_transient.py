"""Fourth round: what is finite when it is run again, mostly because the loop computes something else."""

import torch
from failures import failure, normal
from torch.nn import functional

NAN = float("nan")
made_by_the_loop = {"round": 4, "cause": "data", "phase": "input", "op": None, "batch": normal}
"""What the loop does to a batch before the model gets it."""
other = {"round": 4, "cause": "unknown", "phase": None, "op": None, "batch": normal}


def rebinds(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / parameter.grad.sub(parameter.grad)


@failure("a loop that rebinds the gradients", **other, after_backward=rebinds)
def rebound(model, x):
    return model(x).pow(2).mean()


def noisy(model, x):
    return model(x + torch.tensor([0.0, 0, NAN, 0])).pow(2).mean()


@failure("noise that the loop adds to the batch", **made_by_the_loop, loop=noisy)
def noise(model, x):
    return model(x).pow(2).mean()


def rescales(model, x):
    loss = model(x / x.sub(x)).pow(2).mean()
    return loss  # noqa: RET504 - the loop's own line


@failure("a batch that the loop normalises by itself", **made_by_the_loop, loop=rescales)
def normalised(model, x):
    return model(x).pow(2).mean()


def loses(model, x):
    saved = x[1].clone()
    x[1] = NAN
    loss = model(x.clone()).pow(2).mean()
    x[1] = saved
    return loss


@failure("a batch that is spoilt and repaired in place", **made_by_the_loop, samples=(1,), loop=loses)
def repaired(model, x):
    return model(x).pow(2).mean()


def narrow(model, x):
    with torch.autocast("cpu", torch.float16):
        return model(x * 1e4).float().pow(2).mean()


@failure("autocast in the loop alone", **other, loop=narrow, prepare=lambda m: m.weight.data.mul_(10))
def no_autocast(model, x):
    return model(x * 1e4).pow(2).mean()


def other_mode(model, x):
    h = model(x)
    return (h / functional.dropout(h.sign().abs(), 0.5, training=True)).mean()


@failure("dropout that forward= leaves out", **other, loop=other_mode)
def without_dropout(model, x):
    h = model(x)
    return (h / functional.dropout(h.sign().abs(), 0.5, training=False)).mean()


class Stale:
    weight = NAN


def stale_loop(model, x):
    loss = model(x).pow(2).mean() * Stale.weight
    Stale.weight = 1.0
    return loss


@failure("a weight that has changed when the step is run again", **other, loop=stale_loop)
def stale(model, x):
    return model(x).pow(2).mean() * Stale.weight


def regularised(model, x):
    return model(x).pow(2).mean() + 0.1 * (model.bias * 0 - 1).log().sum()


@failure("a penalty that forward= leaves out", **other, loop=regularised)
def penalty(model, x):
    return model(x).pow(2).mean()


class Racy(torch.autograd.Function):
    fired = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        Racy.fired += 1
        return g * (NAN if Racy.fired % 1000 == 1 else 2.0)


def reset_race(model):
    Racy.fired = 0


@failure("a race in a custom operator", round=4, cause=("operator", "unknown"), phase="backward", op=None,
         batch=normal, prepare=reset_race)  # fmt: skip
def race(model, x):
    return Racy.apply(model(x)).pow(2).mean()


def flips(model):
    bits = model.weight.grad.view(torch.int32).view(-1)
    bits[5] |= 0x7FC00000


@failure("bits of one gradient element turned to NaN", round=4, cause=("hardware", "unknown"), phase=None,
         op=None, batch=normal, after_backward=flips)  # fmt: skip
def nan_bits(model, x):
    return model(x).pow(2).mean()
