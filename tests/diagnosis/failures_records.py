"""Fourth round: what is wrong with the records of a batch."""

import torch
from failures import failure, normal
from torch import nn
from torch.nn import functional

data = {"round": 4, "cause": "data"}
ONE_ZERO = torch.tensor([1.0, 1, 1, 0, 1, 1])


@failure("infinity in one of several records in a list", **data, phase="input", op=None, samples=None,
         batch=lambda: [{"x": normal()}, {"x": normal() / torch.tensor([1.0, 1, 0, 1])}])  # fmt: skip
def listed(model, b):
    return sum(model(entry["x"]).pow(2).mean() for entry in b)


@failure("class weights that leave out every label", round=4, cause=("data", "math"), phase="forward",
         op="aten.nll_loss_forward.default", line="cross_entropy",
         batch=lambda: {"x": normal(), "y": torch.full((6,), 2)})  # fmt: skip
def weighted_out(model, b):
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    return functional.cross_entropy(model(b["x"]), b["y"], weight=weight)


def three_of_four():
    labels = [torch.tensor([0, 1, 2, 3, 0, 1]), torch.full((6,), -100)]
    return [{"x": normal(), "y": labels[int(index == 1)]} for index in range(4)]


@failure("one micro-batch without a label", **data, batch=three_of_four, accumulate=4, microbatch=1,
         phase="forward", op="aten.nll_loss_forward.default", line="cross_entropy")  # fmt: skip
def second_microbatch(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"])


@failure("loss per token of an empty sequence", **data, phase="forward", op="aten.div.Tensor", samples=(3,),
         batch=lambda: {"x": normal(), "n": (ONE_ZERO * 4).long(), "id": [10, 11, 12, 13, 14, 15]},
         line='/ b["n"]')  # fmt: skip
def per_token(model, b):
    losses = model(b["x"]).pow(2) * (torch.arange(4)[None] < b["n"][:, None])
    return (losses.sum(1) / b["n"]).mean()


@failure("inverse frequency of a class that is not there", **data, phase="forward", samples=None,
         op="aten.reciprocal.default", line="1 / ",
         batch=lambda: {"x": normal(), "count": torch.tensor([3, 2, 0, 1])})  # fmt: skip
def inverse_frequency(model, b):
    weight = 1 / b["count"]
    return (model(b["x"]).log_softmax(1) * weight).mean()


@failure("a batch of no record", **data, batch=lambda: normal()[:0], phase="forward", op="aten.mean.default",
         line="mean()")  # fmt: skip
def no_record(model, x):
    return model(x).pow(2).mean()


@failure("a time stamp among the features", **data, phase="forward", op="aten.pow.Tensor_Scalar",
         samples=(2,),
         batch=lambda: {"x": normal(), "age": torch.tensor([31, 45, 1700000000000, 22, 60, 18])})  # fmt: skip
def time_stamp(model, b):
    age = b["age"].float()[:, None]
    return model(b["x"] + age.pow(2) * 1e-3).pow(2).mean()


@failure("a row in which every class is forbidden", **data, phase="forward", op="aten._log_softmax.default",
         samples=(4,), line="log_softmax",
         batch=lambda: {"x": normal(), "ok": torch.tensor([[True, True, False, True]] * 4
                                                          + [[False] * 4] + [[True] * 4])})  # fmt: skip
def all_forbidden(model, b):
    logits = torch.where(b["ok"], model(b["x"]), -torch.inf)
    return -functional.log_softmax(logits, 1)[:, 0][:3].mean() + logits.log_softmax(1).exp().sum() * 0.1


@failure("recall of an image without foreground", **data, phase="forward", op="aten.div.Tensor", samples=(3,),
         batch=lambda: {"x": normal(), "t": torch.ones(6, 4) * ONE_ZERO[:, None]},
         line='/ b["t"]')  # fmt: skip
def no_foreground(model, b):
    p = torch.sigmoid(model(b["x"]))
    return 1 - ((p * b["t"]).sum(1) / b["t"].sum(1)).mean()


@failure("bags, one of them empty, by their length", **data, phase="forward", op="aten.div.Tensor",
         samples=None, model=lambda: nn.EmbeddingBag(9, 3, mode="sum"),
         batch=lambda: {"ids": torch.tensor([1, 2, 3, 4, 5]), "start": torch.tensor([0, 2, 2]),
                        "n": torch.tensor([2, 0, 3])}, line="/ b")  # fmt: skip
def empty_bag(model, b):
    return (model(b["ids"], b["start"]) / b["n"][:, None]).pow(2).mean()


@failure("rewards that are all alike, standardised", **{**data, "cause": "math"}, phase="forward",
         op="aten.div.Tensor", batch=lambda: {"x": normal(), "reward": torch.ones(6)},
         line="/ r.std()", samples=None)  # fmt: skip
def alike(model, b):
    r = b["reward"]
    return (model(b["x"])[:, 0] * ((r - r.mean()) / r.std())).mean()


@failure("advantages of a batch of one", round=4, cause=("data", "math"), phase="forward",
         op="aten.std.correction", samples=None, line=".std()",
         batch=lambda: {"x": normal()[:1], "reward": torch.ones(1)})  # fmt: skip
def batch_of_one(model, b):
    r = b["reward"]
    return (model(b["x"])[:, 0] * ((r - r.mean()) / (r.std() + 1e-8))).mean()


@failure("labels of one class, balanced", **data, phase="forward", op="aten.div.Tensor", samples=None,
         batch=lambda: {"x": normal(), "y": torch.ones(6)}, line="negative.sum()")  # fmt: skip
def balanced(model, b):
    losses = functional.binary_cross_entropy_with_logits(model(b["x"])[:, 0], b["y"], reduction="none")
    negative = 1 - b["y"]
    return (losses * b["y"]).sum() / b["y"].sum() + (losses * negative).sum() / negative.sum()


@failure("a whole micro-batch in other units", **data, phase="forward", accumulate=3, microbatch=2,
         batch=lambda: [normal(), normal(), normal() * 1e22], op="aten.pow.Tensor_Scalar",
         line="pow(2)")  # fmt: skip
def other_units(model, x):
    return model(x).pow(2).mean()


@failure("targets of which some are negative, as a logarithm", **data, phase="forward",
         op="aten.log1p.default", samples=(1,), line="log1p",
         batch=lambda: {"x": normal(), "y": torch.tensor([3.0, -4.0, 1.0, 2.0, 5.0, 0.0])})  # fmt: skip
def negative_target(model, b):
    return (model(b["x"])[:, 0] - torch.log1p(b["y"])).pow(2).mean()
