"""Thirteenth round: what the first run of some hundred new failures and baits got wrong, and its like."""

import numpy as np
import torch
from broken_kernels import Failing
from failures import INF, failure, normal, puts
from torch import nn
from torch.nn import functional

_ROUND = {"round": 13}
precision = {**_ROUND, "cause": "precision", "samples": None}
other = {**_ROUND, "cause": "unknown", "phase": "forward", "op": None, "samples": None}


def recorded():
    old = -normal()[:, 0].abs()
    old[4] = -INF
    return {"x": normal(), "a": torch.arange(6) % 4, "old": old, "adv": normal()[:, 1]}


def log_probability(model, b):
    return model(b["x"]).log_softmax(1).gather(1, b["a"][:, None])[:, 0]


@failure("an old probability of zero in the record of a policy, clipped", **_ROUND, cause="data",
         phase="backward", op="aten.mul.Tensor", node="ExpBackward0", batch=recorded, samples=(4,),
         field="old")  # fmt: skip
def clipped_ratio(model, b):
    ratio = (log_probability(model, b) - b["old"]).exp()
    return -torch.minimum(ratio * b["adv"], ratio.clamp(0.8, 1.2) * b["adv"]).mean()


@failure("an old probability of zero in the record of a policy, as it is", **_ROUND, cause="data",
         phase="forward", op="aten.mean.default", batch=recorded, samples=(4,), field="old")  # fmt: skip
def plain_ratio(model, b):
    ratio = (log_probability(model, b) - b["old"]).exp()
    return -(ratio * b["adv"].abs()).mean()


def padded():
    bias = torch.zeros(6, 4)
    bias[:4, 3] = -INF
    return {"x": normal(), "bias": bias}


@failure("a mask of the batch, of most records, times zero", **_ROUND, cause="math", phase="forward",
         op="aten.mul.Tensor", batch=padded, line="* keep")  # fmt: skip
def mask_times_zero(model, b):
    scores = model(b["x"]) + b["bias"]
    keep = (b["bias"] == 0).float()
    return (scores * keep).mean()


@failure("distances by a product that bfloat16 rounds", **precision, batch=normal, phase="forward",
         op="aten.sqrt.default", line="sqrt()",
         prepare=lambda m: m.bias.data.fill_(10.0))  # fmt: skip
def rounded_distance(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = model(x)
        g = model(x + 0.3)
        product = h @ g.T
    squares = (h.pow(2).sum(1)[:, None] + g.pow(2).sum(1)[None] - 2 * product).float()
    return squares.sqrt().mean()


@failure("variance by squares that bfloat16 rounds", **precision, batch=normal, phase="forward",
         op="aten.sqrt.default", line="sqrt()", prepare=lambda m: m.bias.data.fill_(20.0))  # fmt: skip
def rounded_variance(model, x):
    h = model(x)
    share = torch.full((6, 1), 1 / 6)
    with torch.autocast("cpu", torch.bfloat16):
        mean, square = h.T @ share, h.T.pow(2) @ share
    return (square.float() - mean.float().pow(2)).sqrt().mean()


@failure("a difference that is 0 in float32, too, beside bfloat16", **_ROUND, cause="math", batch=normal,
         phase="backward", op="aten.div.Tensor", node="SqrtBackward0", line="sqrt()")  # fmt: skip
def zero_in_any_type(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = model(x)
    return (h - h).float().pow(2).sum(1).sqrt().mean() + h.float().mean()


class Weighs(nn.Module):
    """Computes the weights of the classes in NumPy."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x, y):
        with np.errstate(all="ignore"):
            weights = 1 / np.bincount(y.numpy(), minlength=3).astype("float32")
        weights = torch.from_numpy(weights)
        return functional.cross_entropy(self.lin(x), y, weight=weights / weights.sum())


@failure("class weights that NumPy makes, of a class that is absent", **_ROUND, cause="math", model=Weighs,
         phase="forward", op="aten.div.Tensor", module="",
         batch=lambda: {"x": normal(), "y": torch.arange(6) % 2})  # fmt: skip
def numpy_weights(model, b):
    return model(b["x"], b["y"])


class Table(nn.Module):
    """Holds its positions in a list, where no buffer is."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.tables = [torch.tensor([0.0, 0.0, float("nan"), 0.0])]

    def forward(self, x):
        return self.lin(x) + self.tables[0]


@failure("a table of positions that was loaded in part", **_ROUND, cause="setup", model=Table, module="",
         batch=normal, phase="forward", op="aten.add.Tensor")  # fmt: skip
def loaded_in_part(model, x):
    return model(x).pow(2).mean()


# -- damage in one place that is no device's ---------------------------------------------------------


def perceptron():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def many():
    return {"x": torch.cat([normal()] * 5), "y": torch.arange(30) % 3}


def loss_of(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"])


local = {**other, "batch": many, "model": perceptron}


def edited_by_hook(model, b):
    def edit(_module, _args, output):
        with torch.no_grad():
            output[3, 1] = INF

    handle = model[2].register_forward_hook(edit)
    loss = loss_of(model, b)
    handle.remove()
    return loss


def edited_in_numpy(model, b):
    features = model[2](model[1](model[0](b["x"])))
    features.detach().numpy()[6, 3] = np.inf
    return functional.cross_entropy(model[3](features), b["y"])


def edited_by_out(model, b):
    features = model[2](model[1](model[0](b["x"])))
    scale = torch.ones(30, 1)
    scale[7] = 0
    alias = features.detach()
    torch.div(alias, scale, out=alias)
    return functional.cross_entropy(model[3](features), b["y"])


def edited_by_a_helper(model, b):
    features = model[2](model[1](model[0](b["x"])))
    spoil(features)
    return functional.cross_entropy(model[3](features), b["y"])


def spoil(features):
    alias = features.data
    alias[4, 0] = INF


failure("a hook that the loop adds, that edits an activation", loop=edited_by_hook, **local)(loss_of)
failure("a loop that edits an activation in NumPy", loop=edited_in_numpy, **local)(loss_of)
failure("a loop that divides into an alias of an activation", loop=edited_by_out, **local)(loss_of)
failure("a helper of the loop that edits an activation", loop=edited_by_a_helper, **local)(loss_of)


class Settings:
    temperature = 1.0


def by_settings(model, b):
    scale = torch.ones(30, 1)
    scale[2] = Settings.temperature
    return functional.cross_entropy(model(b["x"]) / scale, b["y"])


def changes_settings(model, b):
    Settings.temperature = 0.0
    loss = by_settings(model, b)
    Settings.temperature = 1.0
    return loss


failure("settings that the loop changes for one forward pass", loop=changes_settings,
        **{**local, "phase": "loss"})(by_settings)  # fmt: skip


class Cached(nn.Module):
    """Is wrong the first time, while it fills a table of its class."""

    scales = {}  # noqa: RUF012 - that it is shared is the fault

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        scale = torch.ones(30, 1)
        if len(x) not in Cached.scales:
            Cached.scales[len(x)] = True
            scale[2] = 0
        return self.net(x / scale)


@failure("a table of a class that is filled the first time", **{**local, "model": Cached},
         prepare=lambda _: Cached.scales.clear())  # fmt: skip
def filled_once(model, b):
    return loss_of(model, b)


FIRED = []


class Stumbles(nn.Module):
    """Remembers in a list that it has stumbled."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        scale = torch.ones(30, 1)
        if not FIRED:
            FIRED.append(True)
            scale[5] = 0
        return self.net(x / scale)


@failure("a list that remembers", **{**local, "model": Stumbles}, prepare=lambda _: FIRED.clear())
def remembered(model, b):
    return loss_of(model, b)


class Trainer:
    def run(self, model, b):
        features = model[2](model[1](model[0](b["x"])))
        self.edit(features)
        return functional.cross_entropy(model[3](features), b["y"])

    def edit(self, features):
        with torch.inference_mode():
            features.select(0, 3).fill_(INF)


def edited_by_a_method(model, b):
    return Trainer().run(model, b)


failure("a trainer's method that edits an activation", loop=edited_by_a_method, **local)(loss_of)


class Draws(nn.Module):
    """Leaves a record out now and then, by draws that only go forward."""

    dice = iter(())

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        keep = np.ones((30, 1), "float32")
        if next(Draws.dice) < 0.5:
            keep[4] = 0
        return self.net(x / torch.from_numpy(keep))

    @classmethod
    def begin(cls, _model):
        cls.dice = iter((0.1, 0.9, 0.9, 0.1, *[0.9] * 99))  # the fourth pass looks for unwritten memory


@failure("records left out by draws that no replay repeats", **{**local, "model": Draws, "phase": None},
         prepare=Draws.begin)  # fmt: skip
def drawn(model, b):
    return loss_of(model, b)


# -- and a device's, in a loop that writes to much else ----------------------------------------------


AVERAGE, SEEN = {}, [0]


def with_averages(model, b):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            AVERAGE.setdefault(name, parameter.clone()).mul_(0.9).add_(parameter, alpha=0.1)
        for average, parameter in zip(AVERAGE.values(), model.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.1)
        SEEN[0] = 1
    loss = loss_of(model, b)
    curve = np.zeros(3)
    curve[0] = loss.detach().numpy()
    copy = model[0].weight.detach().clone()
    copy[0] = 0
    return loss


failure("one activation, once, in a loop that keeps averages", **{**local, "cause": "hardware"},
        loop=with_averages, prepare=lambda _: AVERAGE.clear(),
        device=lambda: Failing("aten.addmm.default", puts((1, 3), float("nan"))))(loss_of)  # fmt: skip


HITS = torch.zeros(3, 3)


def with_an_evaluation(model, b):
    with torch.no_grad():
        for label, guess in zip(b["y"], model(b["x"]).argmax(1), strict=True):
            HITS[label, guess] += 1
    return loss_of(model, b)


failure("one activation, once, in a loop that counts hits", **{**local, "cause": "hardware"},
        loop=with_an_evaluation,
        device=lambda: Failing("aten.addmm.default", puts((1, 3), float("nan")), call=2))(
            loss_of)  # fmt: skip


class Counting(nn.Module):
    """Counts the records that it has seen in a buffer, which a replay begins with as the step did."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen += len(x)
        return self.net(x)


@failure("one activation, once, of a model that counts", **{**local, "cause": "hardware", "model": Counting},
         device=lambda: Failing("aten.addmm.default", puts((1, 3), float("nan"))))  # fmt: skip
def counted(model, b):
    return loss_of(model, b)
