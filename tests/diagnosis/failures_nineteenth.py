"""Zeros that a formula makes of whatever it is given, and such as only this batch has."""

import torch
from failures import failure, normal
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
