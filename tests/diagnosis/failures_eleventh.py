"""Rounds eleven and twelve: formulas, data and types that no round before had, and what was wrong in them."""

import torch
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional

math = {"round": 11, "cause": "math", "samples": None}
data = {"round": 11, "cause": "data"}
precision = {"round": 11, "cause": "precision", "samples": None}


class Unit(nn.Module):
    def forward(self, h):
        h = h.relu()
        return h / h.norm(dim=1, keepdim=True)


def dead(model):
    model[0].bias.data.fill_(-100)


@failure("a projector whose units are all dead", **math, batch=normal, phase="forward",
         op="aten.div.Tensor", module="1", prepare=dead,
         model=lambda: nn.Sequential(nn.Linear(4, 4), Unit(), nn.Linear(4, 2)))  # fmt: skip
def dead_units(model, x):
    return model(x).pow(2).mean()


@failure("digamma of a concentration of zero", **math, batch=normal, phase="forward",
         op="aten.digamma.default", line="digamma")  # fmt: skip
def dirichlet(model, x):
    return (torch.digamma(model(x).relu()) * 0.1).mean()


class Hyperbolic(nn.Module):
    def forward(self, u, v):
        return torch.acosh(1 + 2 * (u - v).pow(2).sum(1))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 4)
        self.dist = Hyperbolic()

    def forward(self, u, v):
        return self.dist(self.enc(u), self.enc(v))


@failure("hyperbolic distance of a point to itself", **math, model=Pairs, phase="backward", op=None,
         node="AcoshBackward0", module="dist",
         batch=lambda: (normal(), torch.cat([normal()[1:3], normal()[2:]])))  # fmt: skip
def hyperbolic(model, pair):
    return model(*pair).mean()


@failure("sinkhorn in the wrong space", **math, batch=lambda: normal() * 100, phase="forward",
         op=("aten.div.Tensor", "aten.reciprocal.default"), line="1.0 / ")  # fmt: skip
def sinkhorn(model, x):
    h = model(x)
    cost = (h[:, None] - h[None] + 100).pow(2).sum(-1)
    kernel = torch.exp(-cost / 0.01)
    u = torch.ones(6)
    for _ in range(3):
        u = 1.0 / (kernel @ u)
    return (u[:, None] * kernel * cost).sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, keep):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        return scores.masked_fill(~keep[:, None, :], -INF).softmax(-1) @ self.v(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.head = nn.Linear(8, 1)

    def forward(self, b):
        return self.head(self.attn(b["tokens"], b["keep"]).mean(1))


def padded():
    keep = torch.arange(5)[None] < torch.tensor([5, 3, 2, 4, 0, 1])[:, None]
    return {"tokens": torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(4)), "keep": keep}


@failure("a sentence of padding in attention by hand", **data, model=Encoder, batch=padded, phase="forward",
         op="aten._softmax.default", module="attn", samples=(4,), field="keep")  # fmt: skip
def empty_sentence(model, b):
    return model(b).pow(2).mean()


@failure("a clock that ran backwards", **data, phase="forward", op="aten.log1p.default", samples=(5,),
         field="delta", line="log1p",
         batch=lambda: {"x": normal(), "delta": torch.tensor([1.0, 2, 0, 3, 1, -1])})  # fmt: skip
def backwards(model, b):
    return model(b["x"] * torch.log1p(b["delta"])[:, None]).pow(2).mean()


@failure("spectrum of a silent clip", **data, phase="forward", op="aten.log.default", samples=(3,),
         line="log()", model=lambda: nn.Linear(9, 4),
         batch=lambda: {"wave": torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
                        * torch.tensor([1.0, 1, 1, 0])[:, None], "y": torch.arange(4)})  # fmt: skip
def silent(model, b):
    return functional.cross_entropy(model(torch.fft.rfft(b["wave"]).abs().log()), b["y"])


@failure("a running sum in half precision", **precision, phase="forward", op="aten.cumsum.default",
         line="cumsum", batch=lambda: normal().abs()[:, :1].repeat(300, 4) * 100)  # fmt: skip
def running_sum(model, x):
    return (model(x).abs() + 50).half().cumsum(0).float().mean()


@failure("a variance that becomes 0 in half, divided by in float32", **precision, phase="forward", op=None,
         batch=normal)  # fmt: skip
def small_variance(model, x):
    h = (model(x) * 1e-4).half()
    var = (h - h.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True)
    return (h.float() / var.float().sqrt()).pow(2).mean()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g * g.new_tensor(ctx.alpha) / g.new_tensor(ctx.alpha), None


class Adversary(nn.Module):
    def forward(self, x):
        return Reverse.apply(x, 0.0)


@failure("gradient reversal of strength zero", round=11, cause="operator", phase="backward", op=None,
         node="ReverseBackward", batch=normal, module="1",
         model=lambda: nn.Sequential(nn.Linear(4, 4), Adversary(), nn.Linear(4, 1)))  # fmt: skip
def reversal(model, x):
    return model(x).pow(2).mean()


def beyond(model):
    model[0].weight.data.mul_(1e25)
    model[1].weight.data.mul_(1e25)


@failure("weights so large that a product overflows to Inf - Inf", round=12, cause="optimizer",
         phase="forward", op="aten.addmm.default", module="1", samples=None, batch=normal, prepare=beyond,
         model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))  # fmt: skip
def diverged(model, x):
    return model(x).tanh().mean()


def eps_for_a_step(optimizer):
    """Something sets eps to 0 for one step, and back: nobody sees it afterwards."""
    usual = optimizer.param_groups[0]["eps"]

    def to(value):
        return lambda *_: optimizer.param_groups[0].update(eps=value)

    optimizer.register_step_pre_hook(to(0.0))
    optimizer.register_step_post_hook(to(usual))
    return optimizer


@failure("an eps of 0 for one step", round=11, cause="optimizer", phase="optimizer", samples=None,
         op=("aten.addcdiv_.default", "aten._foreach_addcdiv_.ScalarList"),
         model=lambda: nn.Embedding(10, 4), batch=lambda: torch.tensor([1, 2, 3]),
         optimizer=lambda m: eps_for_a_step(torch.optim.Adam(m.parameters())))  # fmt: skip
def eps_of_zero(model, x):
    return model(x).pow(2).mean()


def writes_to_weights(model):
    model.weight.data[2] = float("nan")


@failure("a loop that writes to weights before the step", round=11, cause="unknown", phase="optimizer",
         op=None, samples=None, batch=normal, after_backward=writes_to_weights)  # fmt: skip
def own_weights(model, x):
    return model(x).pow(2).mean()
