"""Fourth round: finite gradients of which the optimizer's own arithmetic makes something else."""

import torch
from failures import failure, normal
from torch import nn

optimizer = {"round": 4, "cause": "optimizer", "phase": "optimizer"}


def half_embedding():
    return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).half()


def rows():
    return torch.tensor([1, 2])


@failure("Adam whose eps is 0 in float16", **optimizer, model=half_embedding, batch=rows, module="0",
         op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.Adam(m.parameters(), foreach=False))  # fmt: skip
def adam(model, x):
    return model(x).float().pow(2).mean()


@failure("the same, over lists of tensors", **optimizer, model=half_embedding, batch=rows, module="0",
         op="aten._foreach_addcdiv_.ScalarList",
         optimizer=lambda m: torch.optim.AdamW(m.parameters(), foreach=True))  # fmt: skip
def adamw_lists(model, x):
    return model(x).float().pow(2).mean()


@failure("RMSprop whose eps is 0 in float16", **optimizer, model=half_embedding, batch=rows, module="0",
         op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, foreach=False))  # fmt: skip
def rmsprop(model, x):
    return model(x).float().pow(2).mean()


@failure("Adagrad without eps", **optimizer, model=lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)),
         batch=rows, module="0", op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.Adagrad(m.parameters(), eps=0.0, foreach=False))  # fmt: skip
def adagrad(model, x):
    return model(x).pow(2).mean()


@failure("second moment of a huge gradient", **optimizer, batch=normal, module="",
         op="aten.addcmul_.default",
         optimizer=lambda m: torch.optim.Adam(m.parameters(), foreach=False))  # fmt: skip
def second_moment(model, x):
    return (model(x) * 1e25).mean()


@failure("a learning rate beyond measure", **optimizer, batch=normal, module="", op="aten.add_.Tensor",
         optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e38, foreach=False))  # fmt: skip
def beyond_measure(model, x):
    return (model(x) * 100).sum()
