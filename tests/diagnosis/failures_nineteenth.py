"""Zeros that a formula makes of whatever it is given, and such as only this batch has."""

import torch
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional

later = {"round": 19, "phase": "forward"}
recip = "aten.reciprocal.default"


def points(seed=3):
    draw = torch.Generator().manual_seed(seed)
    return {"pos": torch.randn(6, 5, 3, generator=draw), "x": torch.randn(6, 4, generator=draw)}


def distances(pos):
    return (pos[:, :, None] - pos[:, None]).pow(2).sum(-1).sqrt()


@failure("distance of each point to itself", **later, cause="math", op=recip, batch=points, line="1 / r")
def to_itself(model, b):
    r = distances(b["pos"])
    weight = (1 - torch.eye(5)) * (1 / r)
    return (model(b["x"]).sum(1) * weight.sum((1, 2))).mean()


@failure(
    "records against themselves", **later, cause="math", op="aten.log.default", batch=normal, line="log()"
)
def among_records(model, x):
    gap = (x[:, None] - x[None]).abs().sum(-1)
    return (model(x).sum(1) * (gap.log() * (1 - torch.eye(6))).sum(1)).mean()


def twins():
    b = points()
    b["pos"][2, 1] = b["pos"][2, 4]
    return b


@failure("two points of a record in one place", **later, cause="data", op=recip, batch=twins, line="1 / r",
         samples=(2,), field="pos")  # fmt: skip
def in_one_place(model, b):
    r = distances(b["pos"]) + torch.eye(5)
    return (model(b["x"]).sum(1) * (1 / r).sum((1, 2))).mean()


@failure("a column that is 0 in all records", **later, cause="data", op="aten.div.Tensor", line="/ x[:, 1:2]",
         batch=lambda: normal() * torch.tensor([1.0, 0.0, 1.0, 1.0]))  # fmt: skip
def empty_column(model, x):
    return model(x / x[:, 1:2]).pow(2).mean()


@failure("a mask of floats that leaves nothing", **later, cause="data", op="aten.div.Tensor",
         line="/ keep.sum", batch=lambda: {"x": normal(), "keep": torch.zeros(6, 4)})  # fmt: skip
def nothing_kept(model, b):
    keep = b["keep"]
    return ((model(b["x"]) * keep).sum(1) / keep.sum(1)).mean()


@failure("a number that float16 does not hold, for a mask", round=19, phase="forward", cause="precision",
         op="aten.mul.Tensor", line="-1e9", samples=(2,), model=lambda: nn.Linear(4, 4).half(),
         batch=lambda: {"x": normal().half(), "keep": (torch.arange(6) != 2)[:, None] & True})  # fmt: skip
def large_fill(model, b):
    bias = (1 - b["keep"].half()) * -1e9
    return functional.softmax(model(b["x"]) + bias, 1)[:, 0].float().pow(2).mean()


twentieth = {"round": 20, "phase": "forward"}


@failure("the largest of an empty set", **twentieth, cause="data", op="aten.amax.default", line="amax(1,",
         samples=(2,), batch=lambda: {"x": normal(), "n": torch.tensor([3, 1, 0, 2, 4, 2])})  # fmt: skip
def largest_of_nothing(model, b):
    gone = torch.arange(4)[None] >= b["n"][:, None]
    return model(b["x"].masked_fill(gone, -INF).amax(1, keepdim=True).repeat(1, 4)).pow(2).mean()


@failure("a label that the mask forbids", **twentieth, cause="data", op="aten._log_softmax.default",
         line="cross_entropy", samples=(3,), field="y",
         batch=lambda: {"x": normal(), "ok": torch.tensor([[True, True, True, False]]).repeat(6, 1),
                        "y": torch.tensor([0, 1, 2, 3, 1, 0])})  # fmt: skip
def forbidden_label(model, b):
    return functional.cross_entropy(model(b["x"]).masked_fill(~b["ok"], -INF), b["y"])


@failure("a choice that the mask forbids, gathered", **twentieth, cause="data",
         op="aten._log_softmax.default", line="log_softmax", samples=(5,), field="move",
         batch=lambda: {"x": normal(), "ok": torch.tensor([[True, True, True, False]]).repeat(6, 1),
                        "move": torch.tensor([0, 1, 2, 2, 1, 3])})  # fmt: skip
def forbidden_move(model, b):
    scores = model(b["x"]).masked_fill(~b["ok"], -INF)
    return -scores.log_softmax(1).gather(1, b["move"][:, None]).mean()


@failure("every label is forbidden", **twentieth, cause="math", op="aten._log_softmax.default",
         line="cross_entropy", batch=lambda: {"x": normal(), "y": torch.full((6,), 3)})  # fmt: skip
def forbidden_class(model, b):
    scores = model(b["x"]) + torch.tensor([0.0, 0, 0, -INF])
    return functional.cross_entropy(scores, b["y"])


def bags():
    n = torch.tensor([2, 3, 1, 0, 2, 1])
    return {"words": torch.arange(9) % 5, "starts": n.cumsum(0) - n, "length": n.float()}


@failure("a bag without a word", **twentieth, cause="data", op="aten.div.Tensor", line='/ b["length"]',
         samples=(3,), field="length", batch=bags,
         model=lambda: nn.EmbeddingBag(5, 4, mode="sum"))  # fmt: skip
def empty_bag(model, b):
    return (model(b["words"], b["starts"]) / b["length"][:, None]).pow(2).mean()


@failure("scaled by a range of nothing", **twentieth, cause="math", op="aten.div.Tensor",
         line="/ (high - low)", samples=(1,), look="x",
         batch=lambda: {"x": normal() * torch.tensor([1.0, 0, 1, 1, 1, 1])[:, None]})  # fmt: skip
def no_range(model, b):
    low, high = b["x"].amin(1, keepdim=True), b["x"].amax(1, keepdim=True)
    return model((b["x"] - low) / (high - low)).pow(2).mean()


@failure("a deviation by hand", **twentieth, cause="math", op="aten.div.Tensor", line="/ spread",
         samples=(4,), batch=lambda: normal() * torch.tensor([1.0, 1, 1, 1, 0, 1])[:, None])  # fmt: skip
def deviation_by_hand(model, x):
    centred = x - x.mean(1, keepdim=True)
    spread = centred.pow(2).mean(1, keepdim=True).sqrt()
    return model(centred / spread).pow(2).mean()


def two_at_once():
    t = torch.tensor([[0.0, 1, 2, 4]]).repeat(6, 1)
    t[2, 1] = t[2, 2]
    return {"t": t, "v": normal()}


@failure("two readings at one time", **twentieth, cause="data", op="aten.div.Tensor", line="/ gap",
         samples=(2,), field="t", batch=two_at_once, model=lambda: nn.Linear(3, 1))  # fmt: skip
def speed(model, b):
    gap = b["t"][:, 1:] - b["t"][:, :-1]
    return model((b["v"][:, 1:] - b["v"][:, :-1]) / gap).pow(2).mean()


class Decoder(nn.Module):
    """Convolutions insist on inputs of one type: in float32, too, when only the weights have become wider."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.out = nn.Conv1d(1, 4, 1), nn.GroupNorm(2, 4), nn.Conv1d(4, 1, 1)

    def forward(self, x):
        return self.out(self.norm(self.up(x[:, None])).relu())


@failure("a convolution in half precision", **twentieth, cause="precision", op="aten.convolution.default",
         module="up", batch=lambda: normal().half() * 100, model=lambda: Decoder().half(), samples=None,
         prepare=lambda m: m.up.weight.data.fill_(1000.0))  # fmt: skip
def wide_decoder(model, x):
    return model(x).float().pow(2).mean()


class Standardised(nn.Module):
    """The deviations of the training data, of a feature that never varied there."""

    def __init__(self, *, buffer):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        deviation = torch.tensor([1.0, 0.0, 2.0, 0.5])
        if buffer:
            self.register_buffer("deviation", deviation)
        else:
            self.deviation = deviation

    def forward(self, x):
        return self.lin(x / self.deviation)


for kept in (True, False):

    @failure(f"a deviation of 0 in {'a buffer' if kept else 'an attribute'}", **twentieth, cause="setup",
             op="aten.div.Tensor", look="deviation", batch=normal,
             model=lambda kept=kept: Standardised(buffer=kept))  # fmt: skip
    def by_a_constant(model, x):
        return model(x).pow(2).mean()


def pictures():
    draw = torch.Generator().manual_seed(5)
    x = torch.rand(6, 4, 8, generator=draw)
    return {"x": x[:, :, 0], "image": x.reshape(6, 32) - torch.tensor([0.0, 0, 0, 2, 0, 0])[:, None]}


@failure("a power of what may be negative", **twentieth, cause="math", op="aten.pow.Tensor_Scalar",
         line="** 0.3", samples=(3,), batch=pictures)  # fmt: skip
def unlike_pictures(model, b):
    """The picture is no single value at which a likelihood would have no value: the formula is to bear it."""
    alike = (model(b["x"]).sigmoid().mean(1) * b["image"].mean(1)) ** 0.3
    return 1 - alike.mean()
