"""Ninth round: two fields at once, tables and targets, small formulas in other types."""

from dataclasses import dataclass

import torch
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional

ninth = {"round": 9}
ones = torch.ones(4, dtype=torch.bool)


@dataclass
class Record:
    x: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


@failure(
    "difference of two fields as a divisor",
    **ninth,
    cause="data",
    phase="forward",
    op="aten.div.Tensor",
    samples=(2,),
    line="/ (r.first - r.second)",
    batch=lambda: Record(normal(), torch.arange(1.0, 7.0), torch.tensor([0.0, 1, 3, 2, 1, 2])),
)
def two_fields(model, r):
    return (model(r.x).mean(1) / (r.first - r.second)).pow(2).mean()


@failure(
    "positive weight of a class from an empty count",
    **ninth,
    cause="data",
    phase="forward",
    op=("aten.div.Tensor", "aten.reciprocal.default"),
    samples=None,
    look="y",
    line="/ b",
    batch=lambda: {"x": normal(), "y": torch.zeros(6)},
)
def empty_count(model, b):
    weight = (1 - b["y"]).sum() / b["y"].sum()
    return functional.binary_cross_entropy_with_logits(model(b["x"])[:, 0], b["y"], pos_weight=weight)


TABLE = nn.Embedding(5, 4).requires_grad_(False)
TABLE.weight[0] = float("nan")


@failure(
    "a frozen table whose padding row was never set",
    **ninth,
    cause="setup",
    phase="forward",
    op=None,
    samples=None,
    batch=lambda: {"x": normal(), "token": torch.tensor([1, 2, 0, 3, 4, 1])},
)
def unset_row(model, b):
    return (model(b["x"]) + TABLE(b["token"])).pow(2).mean()


def two_masks():
    left, right = ones.repeat(6, 1), ones.repeat(6, 1)
    left[3, 2:] = False
    right[3, :2] = False
    return {"x": normal(), "left": left, "right": right}


@failure(
    "two masks that leave a row empty together",
    **ninth,
    cause="data",
    phase="forward",
    op="aten._softmax.default",
    samples=(3,),
    line="softmax(1)",
    batch=two_masks,
)
def masked_twice(model, b):
    scores = model(b["x"]).masked_fill(~(b["left"] & b["right"]), -INF)
    return scores.softmax(1).pow(2).mean()


@failure(
    "distances by the expanded square",
    **ninth,
    cause="math",
    phase="forward",
    op="aten.sqrt.default",
    samples=None,
    line="sqrt()",
    batch=lambda: normal() * 1000 + 5000,
)
def expanded(model, x):
    h = model(x)
    square = h.pow(2).sum(1)
    return (square[:, None] + square[None] - 2 * h @ h.T - 1).sqrt().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNN(4, 4, nonlinearity="relu", batch_first=True)
        self.cell.weight_hh_l0.data.copy_(torch.eye(4) * 50)

    def forward(self, x):
        return self.cell(x)[0]


@failure(
    "a rectified recurrence that explodes",
    **ninth,
    cause="math",
    phase="forward",
    op=None,
    module="cell",
    samples=None,
    model=Recurrent,
    batch=lambda: normal()[:, None].repeat(1, 40, 1).abs(),
)
def rectified(model, x):
    return model(x).pow(2).mean()


@failure(
    "a batch norm by hand over one record",
    **ninth,
    cause=("data", "math"),
    phase="forward",
    op=("aten.std.correction", "aten.var.correction"),
    samples=None,
    line="h.var(0)",
    batch=lambda: normal()[:1],
)
def one_record(model, x):
    h = model(x)
    return ((h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()).pow(2).mean()


@failure(
    "entropy of the two likeliest",
    **ninth,
    cause="math",
    phase="forward",
    op="aten.log.default",
    samples=None,
    line="torch.log(p)",
    batch=normal,
)
def likeliest(model, x):
    p = model(x).softmax(1)
    p = p * (p >= p.topk(2, 1).values[:, -1:])
    return -(p * torch.log(p)).sum(1).mean()


@failure(
    "a derivative that float16 cannot hold",
    **ninth,
    cause="precision",
    phase="backward",
    op=None,
    samples=None,
    batch=lambda: normal() * 10,
)
def derivative(model, x):
    return (model(x).half().float() * 1e6).sum()


@failure(
    "a hook on a tensor that divides by zero",
    **ninth,
    cause=("math", "operator", "unknown"),
    phase="backward",
    op=None,
    samples=None,
    batch=normal,
)
def hooked(model, x):
    h = model(x)
    h.register_hook(lambda g: g / (g - g))
    return h.pow(2).mean()


@failure(
    "inverse hyperbolic cosine below one",
    **ninth,
    cause="math",
    phase="forward",
    op="aten.acosh.default",
    samples=None,
    line="acosh",
    batch=normal,
)
def below_one(model, x):
    return torch.acosh(model(x)).mean()


@failure(
    "an infinite class weight",
    **ninth,
    cause=("math", "setup"),
    phase="forward",
    op=None,
    samples=None,
    batch=lambda: {"x": normal(), "y": torch.tensor([0, 1, 2, 3, 0, 1])},
)
def infinite_weight(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"], weight=torch.tensor([1.0, INF, 1, 1]))


@failure(
    "targets in other units in one of four micro-batches",
    **ninth,
    cause="data",
    phase="forward",
    op=None,
    samples=None,
    microbatch=1,
    accumulate=4,
    batch=lambda: [{"x": normal(), "y": torch.full((6, 4), 1e25 if i == 1 else 1.0)} for i in range(4)],
)
def other_units(model, b):
    return (model(b["x"]) - b["y"]).pow(2).mean()


@failure(
    "an exponential near one, less one, in bfloat16",
    **ninth,
    cause="precision",
    phase="forward",
    op="aten.log.default",
    samples=None,
    line="log()",
    batch=normal,
)
def near_one(model, x):
    h = (model(x).abs() * 1e-3).bfloat16()
    return (h.exp() - 1).log().float().mean()
