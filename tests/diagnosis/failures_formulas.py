"""Fourth round: formulas of losses and layers that are singular or overflow, inside modules and outside."""

import torch
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional

math = {"round": 4, "cause": "math"}


@failure("normalize without eps", **math, batch=normal, phase="forward", op="aten.div.Tensor",
         line="normalize")  # fmt: skip
def normalize(model, x):
    h = model(x) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
    return (functional.normalize(h, dim=1, eps=0.0) @ torch.ones(4)).sum()


@failure("log of all pairwise distances", **math, batch=normal, phase="forward", op="aten.log.default",
         line="log()")  # fmt: skip
def pairwise(model, x):
    h = model(x)
    return torch.cdist(h, h).log().mean()


@failure("arc sine of a normalised maximum", **math, batch=normal, phase="backward", op="aten.rsqrt.default",
         node="AsinBackward0", line="asin")  # fmt: skip
def arc_sine(model, x):
    h = model(x).abs()
    return torch.asin(h / h.amax(1, keepdim=True)).mean()


@failure("divergence from a softmax that underflowed", **math, batch=lambda: normal() * 1000, phase="forward",
         op="aten.log.default", line="p.log()")  # fmt: skip
def underflowed(model, x):
    p = model(x).softmax(1)
    return functional.kl_div(p.log(), torch.full((6, 4), 0.25), reduction="batchmean")


@failure("poisson rate as an exponential", **math, batch=normal, phase="forward", op="aten.exp.default",
         line="poisson_nll_loss", prepare=lambda m: m.bias.data.fill_(100))  # fmt: skip
def poisson(model, x):
    return functional.poisson_nll_loss(model(x), x.abs(), log_input=True)


@failure("gaussian likelihood of a rectified variance", **math, batch=normal, phase="forward",
         op="aten.log.default", line="gaussian_nll_loss")  # fmt: skip
def rectified_variance(model, x):
    h = model(x)
    return functional.gaussian_nll_loss(h, x, torch.relu(h) * 0, eps=0.0)


@failure("log gamma of a count of zero", **math, batch=normal, phase="forward", op="aten.lgamma.default",
         line="lgamma")  # fmt: skip
def log_gamma(model, x):
    return torch.lgamma(torch.relu(model(x)) * 0).mean()


class Rooted(nn.Module):
    """RMS norm whose eps was forgotten, around a branch that starts at zero."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, h):
        return h / torch.sqrt(torch.mean(h * h, dim=-1, keepdim=True)) * self.gain


class ZeroInit(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = Rooted()
        nn.init.zeros_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def forward(self, x):
        return x + self.norm(self.body(x))


@failure("norm layer around a branch that starts at zero", **math, model=ZeroInit, batch=normal,
         phase="forward", op="aten.div.Tensor", module="norm")  # fmt: skip
def zero_branch(model, x):
    return model(x).pow(2).mean()


@failure("layer norm of torch without eps", **math, model=lambda: nn.Sequential(nn.Linear(4, 4),
         nn.LayerNorm(4, eps=0.0)), batch=normal, phase="forward", op="aten.native_layer_norm.default",
         module="1", prepare=lambda m: (m[0].weight.data.zero_(), m[0].bias.data.fill_(1)))  # fmt: skip
def layer_norm(model, x):
    return model(x).pow(2).mean()


@failure("RMS norm of torch without eps", **math, model=lambda: nn.Sequential(nn.Linear(4, 4),
         nn.RMSNorm(4, eps=0.0)), batch=normal, phase="forward",
         op=("aten.rsqrt.default", "aten._fused_rms_norm.default"), module="1",
         prepare=lambda m: (m[0].weight.data.zero_(), m[0].bias.data.zero_()))  # fmt: skip
def rms_norm(model, x):
    return model(x).pow(2).mean()


@failure("group norm of torch without eps", **math, model=lambda: nn.Sequential(nn.Linear(4, 4),
         nn.GroupNorm(2, 4, eps=0.0)), batch=normal, phase="forward", op="aten.native_group_norm.default",
         module="1", prepare=lambda m: (m[0].weight.data.zero_(), m[0].bias.data.fill_(1)))  # fmt: skip
def group_norm(model, x):
    return model(x).pow(2).mean()


@failure("likelihood under a scale of zero", **math, batch=normal, phase="forward",
         op=("aten.log.default", "aten.div.Tensor"), line="log_prob")  # fmt: skip
def scale_of_zero(model, x):
    scale = torch.relu(model(x)) * 0
    return -torch.distributions.Normal(model(x), scale, validate_args=False).log_prob(x).mean()


@failure("ratio of policies", round=4, batch=lambda: {"x": normal(), "old": torch.full((6,), -200.0)},
         cause=("math", "data"), phase="forward", op="aten.exp.default", line="exp()")  # fmt: skip
def policies(model, b):
    ratio = (model(b["x"]).log_softmax(1)[:, 0] - b["old"]).exp()
    return (ratio * b["x"][:, 0]).mean()


@failure("overlap of empty boxes", round=4, batch=lambda: {"x": normal(), "box": normal().abs()},
         cause=("math", "data"), phase="forward", op="aten.div.Tensor", line="inter / union")  # fmt: skip
def empty_boxes(model, b):
    size = torch.relu(model(b["x"]))[:, :2] * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
    inter = torch.minimum(size, b["box"][:, :2] * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]).prod(1)
    union = size.prod(1) + (b["box"][:, :2] * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]).prod(1) - inter
    return 1 - (inter / union).mean()


@failure("perplexity as the loss", **math, batch=lambda: {"x": normal() * 1000, "y": torch.zeros(6).long()},
         phase="forward", op="aten.exp.default", line="exp()")  # fmt: skip
def perplexity(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"]).exp()


@failure("softplus, inverted", **math, batch=normal, phase="forward", op="aten.expm1.default", line="expm1",
         prepare=lambda m: m.bias.data.fill_(100))  # fmt: skip
def inverted_softplus(model, x):
    return torch.log(torch.expm1(model(x))).mean()


@failure("two masks by the smallest float, added", round=4, cause=("math", "data"), phase="forward",
         batch=lambda: {"x": normal(), "pad": torch.tensor([False, False, True, False, False, False])},
         op="aten.add.Tensor", samples=None, line="+ padding")  # fmt: skip
def two_masks(model, b):
    h = model(b["x"])
    least = torch.finfo(h.dtype).min
    windows = torch.zeros(6, 6).masked_fill(b["pad"][:, None], least)
    padding = torch.zeros(6, 6).masked_fill(b["pad"][:, None], least)
    scores = h @ h.T + (windows + padding)
    scores = scores - scores.amax(1, keepdim=True)
    return (scores.exp() / scores.exp().sum(1, keepdim=True) @ h).pow(2).mean()


@failure("inverse error function, saturated", **math, batch=lambda: normal() * 1000, phase="forward",
         op="aten.erfinv.default", line="erfinv")  # fmt: skip
def inverse_error(model, x):
    return torch.erfinv(torch.tanh(model(x))).mean()


@failure("temperature of zero as a plain number", **math, batch=normal, phase="forward",
         op="aten.div.Tensor", line="/ 0.0")  # fmt: skip
def plain_zero(model, x):
    return (model(x) / 0.0).softmax(1).pow(2).sum()


@failure("product along a long axis", **math, batch=lambda: torch.ones(2, 4), phase="forward",
         op="aten.cumprod.default", line="cumprod",
         prepare=lambda m: (m.weight.data.zero_(), m.bias.data.fill_(9)))  # fmt: skip
def long_product(model, x):
    return model(x).repeat(1, 20).cumprod(1)[:, -1].mean()


@failure("nanmean that hides a root", **math, batch=normal, phase="forward", op="aten.sqrt.default",
         node="SqrtBackward0", line="sqrt")  # fmt: skip
def hidden_root(model, x):
    return torch.nanmean(torch.sqrt(model(x)))


@failure("auxiliary loss of weight zero", **math, batch=normal, phase="forward", op="aten.log.default",
         line="log(")  # fmt: skip
def weight_zero(model, x):
    h = model(x)
    return h.pow(2).mean() + 0.0 * torch.log(-h.abs()).mean()


@failure("logarithm of a complex zero", **math, batch=normal, phase="forward", op="aten.log.default",
         line="log()")  # fmt: skip
def complex_zero(model, x):
    z = torch.complex(model(x) * 0, x * 0)
    return z.log().abs().mean()


@failure("phase of a spectrum with a zero", **math, batch=normal, phase="forward", op="aten.div.Tensor",
         line="/ z.abs()")  # fmt: skip
def phase_of_zero(model, x):
    z = torch.fft.rfft(model(x) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None])
    return (z / z.abs()).real.sum()


@failure("left padding under a causal mask", round=4, cause=("data", "math"), phase="forward",
         op="aten._softmax.default", line="softmax(", samples=None,
         batch=lambda: {"x": normal()[:, None].repeat(1, 5, 1) * torch.arange(1, 6)[None, :, None],
                        "keep": torch.tensor([[True] * 5] * 2 + [[False, False, True, True, True]]
                                             + [[True] * 5] * 3)})  # fmt: skip
def left_padding(model, b):
    h = model(b["x"])
    allowed = torch.tril(torch.ones(5, 5)).bool()[None] & b["keep"][:, None]
    scores = (h @ h.transpose(1, 2)).masked_fill(~allowed, -INF)
    return (torch.softmax(scores, 2) @ h).pow(2).mean()
