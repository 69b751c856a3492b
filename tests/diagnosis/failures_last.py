"""Sixth round, thought up last, from other fields: to see whether the rules carry over."""

import torch
from failures import INF, failure, normal
from torch import nn

math = {"round": 6, "cause": "math"}
data = {"round": 6, "cause": "data"}
precision = {"round": 6, "cause": "precision"}


@failure("residual of a differential equation", **math, batch=normal, phase="backward", op="aten.div.Tensor",
         node="SqrtBackward0", line="sqrt()")  # fmt: skip
def residual(model, x):
    x = x.clone().requires_grad_()
    u = model(x).tanh().sum(1) * 0
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (du.pow(2).sum(1).sqrt() - 1).pow(2).mean() + model(x).pow(2).mean()


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=True)[0]


@failure("scores of an attention layer beyond float16", **precision, model=Reader, phase="forward",
         batch=lambda: torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2)),
         op=("aten.bmm.default", "aten.baddbmm.default"), module="attn",
         prepare=lambda m: m.attn.in_proj_weight.data.mul_(500))  # fmt: skip
def attention_scores(model, x):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().pow(2).mean()


@failure("density of a mixture far away from it", **math, batch=lambda: normal() * 100, phase="forward",
         op="aten.log.default", line="log()")  # fmt: skip
def density(model, x):
    weights = model(x).softmax(1)
    return -(weights * (-0.5 * (x - model(x)) ** 2).exp()).sum(1).log().mean()


class Chain(nn.Module):
    """The forward algorithm of a chain in which one state cannot be reached."""

    def __init__(self):
        super().__init__()
        self.emit = nn.Linear(4, 3)
        allowed = torch.tensor([[0.0, 0.0, -INF], [0.0, 0.0, -INF], [0.0, 0.0, -INF]])
        self.register_buffer("allowed", allowed)

    def forward(self, x):
        scores = self.emit(x)
        alpha = scores[0]
        for step in scores[1:]:
            alpha = torch.logsumexp(alpha[:, None] + self.allowed, 0) + step
        return alpha.sum()


@failure("a state of a chain that cannot be reached", **math, model=Chain, batch=normal, phase="forward",
         op="aten.logsumexp.default", module="")  # fmt: skip
def chain(model, x):
    return -model(x)


@failure("logarithm of the chosen action's probability", **math, phase="forward", op="aten.log.default",
         line="log(",
         batch=lambda: {"x": normal() * 1000, "a": torch.tensor([0, 1, 2, 3, 0, 1])})  # fmt: skip
def chosen_action(model, b):
    p = model(b["x"]).softmax(1)
    return -torch.log(p.gather(1, b["a"][:, None])).mean()


@failure("volume of a flow whose scales vanish", **math, batch=lambda: normal() * 1000, phase="forward",
         op="aten.log.default", line="log()")  # fmt: skip
def volume(model, x):
    return -torch.sigmoid(model(x)).prod(1).log().mean()


@failure("degree of a node without a neighbour", **data, phase="forward", op="aten.pow.Tensor_Scalar",
         samples=None, line="** -0.5",
         batch=lambda: {"x": normal(),
                        "edges": torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])})  # fmt: skip
def lonely_node(model, b):
    source, target = b["edges"]
    degree = torch.zeros(6).index_add(0, target, torch.ones(5)) ** -0.5
    h = model(b["x"])
    out = torch.zeros(6, 4).index_add(0, target, h[source] * (degree[source] * degree[target])[:, None])
    return (out * degree[:, None]).pow(2).mean()


@failure("a window in which nothing moves", **{**data, "cause": "math"}, phase="forward", samples=(4,),
         op="aten.div.Tensor", line="/ series.std",
         batch=lambda: ({"series": normal() * torch.tensor([1.0, 1, 1, 1, 0, 1])[:, None] + 2},
                        torch.arange(6)))  # fmt: skip
def still_window(model, b):
    series = b[0]["series"]
    series = (series - series.mean(1, keepdim=True)) / series.std(1, keepdim=True)
    return model(series).pow(2).mean()


@failure("odds of a sure thing", **data, phase="forward", op="aten.div.Tensor", samples=(2,), line="/ (1 - b",
         batch=lambda: {"x": normal(), "p": torch.tensor([0.2, 0.5, 1.0, 0.1, 0.9, 0.3])})  # fmt: skip
def odds(model, b):
    target = (b["p"] / (1 - b["p"])).log()
    return (model(b["x"])[:, 0] - target).pow(2).mean()


@failure("a result that begins as NaN and is filled in part", **math, batch=normal, phase="forward",
         op="aten.full.default", line="torch.full(")  # fmt: skip
def filled_in_part(model, x):
    out = torch.full((8, 4), torch.nan)
    out[:6] = model(x)
    return out.pow(2).mean()


@failure("a softmax by hand over a row without a positive score", **math, batch=normal, phase="forward",
         op="aten.div.Tensor", line="/ e.sum", prepare=lambda m: m.bias.data.fill_(-100))  # fmt: skip
def none_positive(model, x):
    h = model(x).clone()
    h[h < 0] = -INF
    e = h.exp()
    return (e / e.sum(1, keepdim=True)).pow(2).sum()


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx, g):
        return g, None


@failure("straight-through quantisation of scale zero", round=6, cause="operator", batch=normal,
         phase="forward", op="aten.div.Tensor")  # fmt: skip
def quantised(model, x):
    return Quantise.apply(model(x), model.bias.detach() * 0).pow(2).mean()


@failure("a negative weight of a record", **data, phase="forward", op="aten.sqrt.default", samples=(1,),
         line="sqrt()", batch=lambda: {"x": normal(), "w": torch.tensor([1.0, -1.0, 2.0, 1.0, 1.0, 3.0]),
                                       "idx": torch.arange(30, 36)})  # fmt: skip
def negative_weight(model, b):
    return (model(b["x"]) * b["w"].sqrt()[:, None]).pow(2).mean()


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, x):
        h = nn.functional.normalize(self.lin(x), dim=1).half()
        return (h @ h.T).float() * self.scale.half().exp().float()


@failure("a learned scale beyond float16", **precision, model=Contrast, batch=normal, phase="forward",
         op="aten.exp.default", module="")  # fmt: skip
def learned_half_scale(model, x):
    return nn.functional.cross_entropy(model(x), torch.arange(6))


def wide_weights(model):
    model[1].weight.data.fill_(3e4)


@failure("a loss scale that has come down to 1 in vain", **precision, batch=lambda: normal() * 1e-4,
         phase="backward", op="aten.mm.default", module="1",
         model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), prepare=wide_weights,
         scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1.0))  # fmt: skip
def collapsed(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x * 1e-3)
    return h.float().sum() * 10
