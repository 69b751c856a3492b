"""Eighteenth round: again a device below Python's sight and what does as it does, after the seventeenth."""

import numpy as np
import torch
from broken_kernels import Failing
from failures import INF, failure, normal, puts
from failures_seventeenth import Reads, classes, loss_of, network, pairs, sentences
from torch import nn
from torch.nn import functional

NAN = float("nan")
_ROUND = {"round": 18, "op": None, "samples": None}
device = {**_ROUND, "cause": "hardware", "phase": "forward"}
bait = {**_ROUND, "cause": "unknown", "phase": "forward", "batch": pairs, "model": network}
addmm = "aten.addmm.default"


class Recurs(nn.Module):
    """A recurrent network whose last state is classified."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[1], 8)
        for one in x:
            h = self.cell(one, h)
        return self.head(h), h


def series():
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(5, 6, 4, generator=generator), "y": torch.arange(6) % 3}


def last_state(model, b):
    scores, _ = model(b["x"].detach())
    return functional.cross_entropy(scores, b["y"])


failure("a recurrent cell, once", **device, batch=series, model=Recurs,
        device=lambda: Failing(addmm, puts((2, 1), NAN), call=3))(last_state)  # fmt: skip


def reconstruction(model, x):
    return functional.mse_loss(model(x), x)


failure("an autoencoder, once", **device, batch=normal,
        model=lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4)),
        device=lambda: Failing("aten.relu.default", puts((5, 1), INF)))(reconstruction)  # fmt: skip


def narrow(model, b):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(b["x"])
    return functional.mse_loss(out.float(), b["y"])


failure("a kernel in bfloat16, once", **device, batch=pairs, model=network,
        device=lambda: Failing(addmm, puts((1, 4), NAN), call=1))(narrow)  # fmt: skip


class Normalises(nn.Module):
    """Convolution and normalisation within a record."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(self.net(x))


def pictures():
    generator = torch.Generator().manual_seed(6)
    return {"x": torch.randn(6, 1, 5, 5, generator=generator), "y": torch.arange(6) % 3}


def supervised(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"])


failure("a convolution before a norm of groups, once", **device, batch=pictures, model=Normalises,
        device=lambda: Failing("aten.convolution.default", puts((4, 1, 0, 2), NAN)))(supervised)  # fmt: skip


def mined(model, b):
    with torch.no_grad():
        order = (model(b["x"]) - b["y"]).abs().flatten().argsort()
    return functional.mse_loss(model(b["x"])[order], b["y"][order])


# What is drawn from the first call picks the order of the second's: both are run again.
failure("a kernel of a loop that calls the model twice, once", **device, batch=pairs, model=network,
        device=lambda: Failing(addmm, puts((3, 0), NAN), call=5))(mined)  # fmt: skip


# -- and what does as it does ------------------------------------------------------------------------


def forgets_a_word(model, b):
    word = b["words"][4, 1]
    kept = model.words.weight[word].detach().clone()
    with torch.no_grad():
        model.words.weight[word] = NAN
    loss = classes(model, b)
    with torch.no_grad():
        model.words.weight[word] = kept
    return loss


failure("a word's vector that the loop changes under no_grad", loop=forgets_a_word,
        **{**bait, "batch": sentences, "model": Reads})(classes)  # fmt: skip


class Tools:
    """What a library of tools may do to torch."""

    def __enter__(self):
        self.real = nn.Tanh.forward

        def forward(module, x):
            found = self.real(module, x)
            found.data.select(0, 3).fill_(INF)
            return found

        nn.Tanh.forward = forward

    def __exit__(self, *_):
        nn.Tanh.forward = self.real


TOOLS = {"tanh": Tools()}


def with_tools(model, b):
    with TOOLS["tanh"]:
        return loss_of(model, b)


failure("a method of torch's that the loop replaces for a while", loop=with_tools, **bait)(loss_of)


class Scales(nn.Module):
    """Divides its records by a buffer that the loop may set."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("scale", torch.ones(6, 1))

    def forward(self, x):
        return self.net(x) / self.scale


def sets_a_buffer(model, b):
    kept = model.scale
    model.scale = torch.tensor([[1.0], [1], [1], [1], [1], [0]])
    loss = loss_of(model, b)
    model.scale = kept
    return loss


failure("a buffer that the loop replaces for a while", loop=sets_a_buffer, **{**bait, "model": Scales})(
    loss_of
)


class Weighs(nn.Module):
    """Is given plain numbers beside the records."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, weights):
        return self.net(x) / torch.tensor(weights)[:, None]


def in_numbers(model, b):
    return functional.mse_loss(model(b["x"], [1.0] * 6), b["y"])


def other_numbers(model, b):
    return functional.mse_loss(model(b["x"], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), b["y"])


failure("numbers that the loop gives to the model", loop=other_numbers, **{**bait, "model": Weighs})(
    in_numbers
)


class Settings:
    """An object that is handed to the model, and changed by the loop."""

    def __init__(self):
        self.by = [1.0] * 6


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, settings):
        return self.net(x) / torch.tensor(settings.by)[:, None]


SETTINGS = Settings()


def by_settings(model, b):
    return functional.mse_loss(model(b["x"], SETTINGS), b["y"])


def tunes(model, b):
    SETTINGS.by[1] = 0.0
    loss = by_settings(model, b)
    SETTINGS.by[1] = 1.0
    return loss


failure("an object that the loop changes and hands to the model", loop=tunes, **{**bait, "model": Reading})(
    by_settings
)


class Mends:
    """Writes to what it is given, as a table of corrections would."""

    def __call__(self, out):
        np.asarray(out.detach())[2] = NAN
        return out


MENDS = {"all": [Mends()]}


def mended(model, b):
    out = model(b["x"])
    for mend in MENDS["all"]:
        out = mend(out)
    return functional.mse_loss(out, b["y"])


failure("objects of a table that write to what the model returned", loop=mended, **bait)(loss_of)


def hardest(model, b):
    with torch.no_grad():
        worst = int((model(b["x"]) - b["y"]).abs().argmax())
    keep = torch.ones(6, 1)
    keep[worst] = 0
    return functional.mse_loss(model(b["x"] / keep), b["y"])


failure("the hardest record, which the loop alone divides by zero", loop=hardest,
        **{**bait, "cause": "data", "phase": "input"})(loss_of)  # fmt: skip


class Writes:
    """The one bait of the sixteenth round that had deceived the rules until now; not counted."""

    def __call__(self, features):
        features.data[3, 1] = INF


WRITERS = [Writes()]


def through_a_list(model, b):
    features = model[:4](b["x"])
    for write in WRITERS:
        write(features)
    return functional.mse_loss(model[4](features), b["y"])


failure("a callable object in a list that writes to an activation", loop=through_a_list, **bait)(
    lambda model, b: functional.mse_loss(model[4](model[:4](b["x"])), b["y"])
)


def without_eps(model, b):
    model[1].eps = 0.0
    loss = supervised(model, b)
    model[1].eps = 1e-30
    return loss


def with_an_empty_record():
    found = pictures()
    found["x"][3] = 0
    return {**found, "x": found["x"].flatten(1)}


def plain_norm():
    return nn.Sequential(nn.Linear(25, 8, bias=False), nn.LayerNorm(8, eps=1e-30), nn.ReLU(), nn.Linear(8, 3))


# Thought of after the round, and not counted in it.
failure("a setting of a layer that the loop changes and puts back", loop=without_eps,
        **{**bait, "batch": with_an_empty_record, "model": plain_norm})(supervised)  # fmt: skip
