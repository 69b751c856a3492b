"""Seventeenth round: a device fails below Python's sight, and loops that do as it does.

Invented before the rules looked at what the loop gave to the model and what it got back.
"""

import ctypes
import itertools
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from broken_kernels import Failing
from failures import INF, failure, normal, puts
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAN = float("nan")
_ROUND = {"round": 17, "op": None, "samples": None}
device = {**_ROUND, "cause": "hardware", "phase": "forward"}
doubt = {**_ROUND, "cause": "unknown"}


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def pairs():
    return {"x": normal(), "y": torch.linspace(-1, 1, 6)[:, None]}


def loss_of(model, b):
    return functional.mse_loss(model(b["x"]), b["y"])


# -- a device ----------------------------------------------------------------------------------------


mlp = {"batch": pairs, "model": network}
addmm = "aten.addmm.default"

failure("a kernel of a small perceptron, once", **device, **mlp,
        device=lambda: Failing(addmm, puts((2, 2), NAN), call=1))(loss_of)  # fmt: skip
failure("a kernel that makes an infinity, once", **device, **mlp,
        device=lambda: Failing("aten.tanh.default", puts((4, 1), INF)))(loss_of)  # fmt: skip
failure("a kernel that makes a huge number, once", **device, **mlp,
        device=lambda: Failing(addmm, puts((1, 0), 1e30), call=2))(loss_of)  # fmt: skip
failure("a kernel in the second of three micro-batches", **{**device, "model": network},
        batch=lambda: [pairs(), {**pairs(), "x": normal() * 0.5}, {**pairs(), "x": normal() * 0.7}],
        accumulate=3, device=lambda: FailingOnce(addmm, puts((5, 3), NAN), after=4))(loss_of)  # fmt: skip


class FailingOnce(Failing):
    """Fails at one call of the whole step, where a device is made anew for each micro-batch."""

    seen = 0

    def __init__(self, op, change, *, after):
        start = FailingOnce.seen % 9
        super().__init__(op, change, call=after - start if after >= start else -1)

    def __exit__(self, *error):
        FailingOnce.seen += self.calls
        super().__exit__(*error)


class Reads(nn.Module):
    """A small transformer over sequences, and a class for each of them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, words, mask=None):
        return self.head(self.block(self.words(words), src_key_padding_mask=mask).mean(1))


def sentences():
    generator = torch.Generator().manual_seed(2)
    return {"words": torch.randint(20, (6, 5), generator=generator), "y": torch.arange(6) % 3}


def classes(model, b):
    return functional.cross_entropy(model(b["words"]), b["y"])


failure("the feed-forward of a transformer, with dropout, once", **device, batch=sentences, model=Reads,
        device=lambda: Failing(addmm, puts((11, 2), NAN), call=2))(classes)  # fmt: skip
failure("a layer norm of a transformer, once", **device, batch=sentences, model=Reads,
        device=lambda: Failing("aten.native_layer_norm.default", puts((3, 1, 4), INF)))(classes)  # fmt: skip


class Sees(nn.Module):
    """Convolution, BatchNorm, a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return {"scores": self.head(self.norm(self.conv(x)).relu().mean((2, 3)))}


def images():
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(6, 1, 5, 5, generator=generator), "y": torch.arange(6) % 3}


def labels(model, b):
    return functional.cross_entropy(model(x=b["x"])["scores"], b["y"])


failure("the head of a convolutional network, once", **device, batch=images, model=Sees,
        device=lambda: Failing("aten.mean.dim", puts((2, 1), NAN)))(labels)  # fmt: skip
# BatchNorm hands it on to every record: nothing that the model returned is as it should be.
failure("a convolution before BatchNorm, once", **{**device, "cause": "unknown"}, batch=images, model=Sees,
        device=lambda: Failing("aten.convolution.default", puts((2, 1, 3, 3), NAN)))(labels)  # fmt: skip


def bags():
    generator = torch.Generator().manual_seed(4)
    return {"words": torch.randint(30, (6, 4), generator=generator), "y": torch.arange(6) % 3}


failure("a bag of words, once", **device, batch=bags,
        model=lambda: nn.Sequential(nn.EmbeddingBag(30, 8), nn.Linear(8, 3)),
        device=lambda: Failing("aten._embedding_bag.default", puts((3, 5), NAN)))(classes)  # fmt: skip

# Nobody has seen the gradients before the loop could write to them.
failure("a matrix product of the backward pass, once", **doubt, phase="backward", **mlp,
        backward_device=lambda: Failing("aten.mm.default", puts((2, 3), NAN), call=2))(loss_of)  # fmt: skip
failure("the loss itself, once", **doubt, phase="loss", **mlp,
        device=lambda: Failing("aten.mse_loss.default", puts((), NAN)))(loss_of)  # fmt: skip


# -- and what does as it does ------------------------------------------------------------------------


bait = {**doubt, "phase": "forward", **mlp}


class Dispatches(TorchDispatchMode):
    """A mode of the user's own, below autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func) == addmm and result.shape[1] == 1:
            result[3] = NAN
        return result


class Intercepts(TorchFunctionMode):
    """A mode of the user's own, above autograd."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.tanh:
            result.data[3] = NAN
        return result


MODES = {"below": Dispatches, "above": Intercepts}


def under(kind, model, b):
    with MODES[kind]():
        return loss_of(model, b)


failure("a mode below autograd that the loop alone has", loop=partial(under, "below"), **bait)(loss_of)
failure("a mode above autograd that the loop alone has", loop=partial(under, "above"), **bait)(loss_of)


class Edits:
    """A hook that is an object, and writes to what NumPy shares."""

    def __call__(self, _module, _args, output):
        np.asarray(output.detach())[3] = NAN


EDITS = [Edits()]


def hooks_by_object(model, b):
    handles = [model[2].register_forward_hook(edit) for edit in EDITS]
    loss = loss_of(model, b)
    for handle in handles:
        handle.remove()
    return loss


failure("a hook that is an object in a list", loop=hooks_by_object, **bait)(loss_of)


class Counts(Edits):
    """Stays, and writes the first time."""

    def __init__(self):
        self.count = itertools.count()

    def __call__(self, module, args, output):
        if not next(self.count):
            super().__call__(module, args, output)


failure("a hook that is an object and counts", **bait,
        prepare=lambda m: m[2].register_forward_hook(Counts()))(loss_of)  # fmt: skip

LIBRARY = {"functional": functional}
exec(  # noqa: S102 - a library without a source
    """
real = functional.linear
def linear(x, weight, bias=None):
    found = real(x, weight, bias)
    if found.shape[1] == 1:
        found.data[3] = float("nan")
    return found
def install():
    functional.linear = linear
def uninstall():
    functional.linear = real
""",
    LIBRARY,
)


def patched(model, b):
    LIBRARY["install"]()
    try:
        return loss_of(model, b)
    finally:
        LIBRARY["uninstall"]()


failure("a function of torch that the loop replaces for a while", loop=patched, **bait)(loss_of)


@contextmanager
def replaced(real=functional.linear):
    def linear(x, weight, bias=None):
        found = real(x, weight, bias)
        if found.shape[1] == 1:
            scale = found.detach().numpy()
            scale[3] *= INF
        return found

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = real


def within(model, b):
    with replaced():
        return loss_of(model, b)


failure("a context that replaces a function of torch", loop=within, **bait)(loss_of)


def pokes(model, b):
    out = model(b["x"])
    ctypes.memset(out.data_ptr() + 3 * out.element_size(), 0xFF, out.element_size())
    return functional.mse_loss(out, b["y"])


failure("a library in C that writes to what the model returned", loop=pokes, **bait)(loss_of)


def noisy_weights(model, sign):
    for parameter in model.parameters():
        if parameter.shape == (1, 16):
            parameter.data[0, 7] = NAN if sign else KEPT[0]


KEPT = [0.0]


def perturbs(model, b):
    KEPT[0] = model[4].weight[0, 7].item()
    noisy_weights(model, True)
    loss = loss_of(model, b)
    noisy_weights(model, False)
    return loss


failure("weights that the loop changes and puts back", loop=perturbs, **bait)(loss_of)


def perturbs_words(model, b):
    table = model.words.weight.data
    kept = table[b["words"][2, 0]].clone()
    table[b["words"][2, 0]] = NAN
    loss = classes(model, b)
    table[b["words"][2, 0]] = kept
    return loss


failure("the vector of a word that the loop changes and puts back", loop=perturbs_words,
        **{**bait, "model": Reads, "batch": sentences})(classes)  # fmt: skip


class Masks(nn.Module):
    """Weighs its records by a buffer."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("weight", torch.ones(6, 1))

    def forward(self, x):
        return self.net(x) + self.weight.log()


def weighs(model, b):
    model.weight.copy_(torch.tensor([[1.0], [1], [0], [1], [1], [1]]))
    loss = loss_of(model, b)
    model.weight.fill_(1)
    return loss


failure("a buffer that the loop fills for each batch", loop=weighs, **{**bait, "model": Masks})(loss_of)


class Chances(nn.Module):
    """Leaves out a record now and then."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x) / (torch.rand(len(x), 1) > 0.15).float()


def draws_before(model, b):
    while True:
        state = torch.get_rng_state()
        drawn = torch.rand(len(b["x"]), 1) > 0.15
        torch.set_rng_state(state)
        if int(drawn.sum()) == 5:
            return loss_of(model, b)
        torch.rand(1)


def a_seed_that_is_fine(_model):
    for seed in range(99):
        torch.manual_seed(seed)
        if bool((torch.rand(6, 1) > 0.15).all()):
            torch.manual_seed(seed)
            return


failure("random numbers that the loop draws before the model does", loop=draws_before,
        prepare=a_seed_that_is_fine, **{**bait, "model": Chances})(loss_of)  # fmt: skip

BUFFER = np.zeros((6, 4), "float32")


def in_numpy():
    BUFFER[:] = normal().numpy()
    return {**pairs(), "x": torch.from_numpy(BUFFER)}


def refills(model, b):
    kept = BUFFER[4].copy()
    np.put(BUFFER, 16, NAN)
    loss = loss_of(model, b)
    BUFFER[4] = kept
    return loss


failure("a batch in the memory of NumPy that is filled again", loop=refills,
        **{**bait, "batch": in_numpy})(loss_of)  # fmt: skip


def swaps_the_head(model, b):
    kept, model[4] = model[4], nn.Linear(16, 1)
    model[4].weight.data[0, 2] = NAN
    loss = loss_of(model, b)
    model[4] = kept
    return loss


failure("a head that the loop puts in for once", loop=swaps_the_head, **bait)(loss_of)


def divides_inputs(model, b):
    keep = torch.tensor([[1.0], [1], [1], [1], [0], [1]])
    return functional.mse_loss(model(b["x"] / keep), b["y"])


failure("records that the loop alone divides by zero", **{**_ROUND, "samples": (4,)}, cause="data",
        phase="input", loop=divides_inputs, **mlp)(loss_of)  # fmt: skip


class Wide(nn.Module):
    """Squares what it is given: finite records become infinite ones."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 1)

    def forward(self, x):
        return self.lin(x * x)


def enlarges(model, b):
    return functional.mse_loss(model(b["x"] * torch.tensor([[1.0], [1], [1e30], [1], [1], [1]])), b["y"])


failure("a record that the loop alone makes larger", loop=enlarges, **{**bait, "model": Wide})(loss_of)


def spoils_targets(model, b):
    keep = torch.tensor([[1.0], [1], [1], [1], [0], [1]])
    return functional.mse_loss(model(b["x"]), b["y"] / keep)


failure("targets that the loop alone divides by zero", loop=spoils_targets,
        **{**bait, "phase": "loss"})(loss_of)  # fmt: skip
