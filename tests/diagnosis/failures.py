"""Failures of the same kinds as the reported ones, thought up after the rules were written, in rounds.

Each says what is really wrong. docs/diagnosis.md tells how many were right before a rule was touched.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from broken_kernels import Failing
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(kw_only=True)
class Failure:
    """A step that goes wrong, and what is really wrong with it."""

    name: str
    forward: Callable[[nn.Module, Any], torch.Tensor]
    batch: Callable[[], Any]
    cause: str | tuple[str, ...]
    phase: str | None
    op: str | tuple[str, ...] | None
    node: str | None = None
    module: str | None = None
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)
    line: str | None = None
    """A text that only the guilty line of `forward` holds."""
    samples: tuple[int, ...] | None = ()
    """None: any."""
    field: str | None = None
    """Of every sample that is named; None: any."""
    look: str | None = None
    """The field that the remedy names where all samples are alike; None: any."""
    microbatch: int | None = None
    after_backward: Callable[[nn.Module], None] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    accumulate: int = 1
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(
        m.parameters(), lr=0.01
    )
    scaler: Callable[[], Any] | None = None
    loop: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """What the loop computes, where that is not what it says in `forward`."""
    device: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What the loop's forward pass runs on, where that makes a mistake."""
    backward_device: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What its backward pass runs on, likewise."""
    round: int = 1


FAILURES: list[Failure] = []
INF = float("inf")


def failure(name: str, **fields: Any) -> Callable[[Any], Any]:
    def keep(forward: Any) -> Any:
        FAILURES.append(Failure(name=name, forward=forward, **fields))
        return forward

    return keep


def normal() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@failure("layer norm of a constant row", batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="/ h.std")  # fmt: skip
def constant_row(model, x):
    h = model(x)
    h = h - h + torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0], [1.0]]) * h
    return ((h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True)).pow(2).mean()


@failure("softmax by hand", batch=lambda: normal() * 1000, cause="math", phase="forward",
         op="aten.exp.default", line="exp()")  # fmt: skip
def softmax_by_hand(model, x):
    e = model(x).exp()
    return -(e / e.sum(1, keepdim=True)).log().mean()


@failure("cross entropy without a label", batch=lambda: {"x": normal(), "y": torch.full((6,), -100)},
         cause="data", phase="forward", op="aten.nll_loss_forward.default", line="cross_entropy")  # fmt: skip
def no_label(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"])


@failure("binary cross entropy by hand, saturated", batch=lambda: normal() * 1000, cause="math",
         phase="forward", op="aten.log.default", line="log()")  # fmt: skip
def saturated(model, x):
    p = torch.sigmoid(model(x))
    return -(p.log() * 0.5 + (1 - p).log() * 0.5).mean()


@failure("error over an empty selection", batch=lambda: {"x": normal(), "ok": torch.zeros(6).bool()},
         cause="data", phase="forward", op="aten.mse_loss.default", line="mse_loss")  # fmt: skip
def empty_selection(model, b):
    h = model(b["x"])
    return functional.mse_loss(h[b["ok"]], b["x"][b["ok"]])


@failure("angle between equal vectors", batch=normal, cause="math", phase="backward", op=None,
         node="AcosBackward0", line="acos")  # fmt: skip
def equal_vectors(model, x):
    h = model(x)
    cosine = functional.cosine_similarity(h, h) * 0 + 1
    return torch.acos(cosine).mean()


@failure("root of a negative base", batch=normal, cause="math", phase="forward",
         op="aten.pow.Tensor_Scalar", line="pow(1.5)")  # fmt: skip
def negative_base(model, x):
    return model(x).pow(1.5).mean()


@failure("feed-forward beyond float16", batch=lambda: normal() * 50, cause="precision", phase="forward",
         op="aten.addmm.default", line="model(x)",
         prepare=lambda m: m.weight.data.mul_(2000))  # fmt: skip
def beyond_half(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x)
    return h.float().sigmoid().mean() + (h.float() * 1e-9).mean()


@failure("cast to float16", batch=lambda: normal() * 100, cause="precision", phase="forward",
         op="aten._to_copy.default", line="half()",
         prepare=lambda m: m.weight.data.mul_(3000))  # fmt: skip
def cast_to_half(model, x):
    h = model(x).half()
    return h.float().mean()


@failure("an image that is all zero, scaled by its maximum", cause="data", phase="forward", samples=(2,),
         batch=lambda: normal() * torch.tensor([[1.0], [1.0], [0.0], [1.0], [1.0], [1.0]]),
         op="aten.div.Tensor", line="x / x")  # fmt: skip
def all_zero(model, x):
    x = x / x.abs().amax(1, keepdim=True)
    return model(x).pow(2).mean()


@failure("logarithm of a price of zero", cause="data", phase="forward", op="aten.log.default", samples=(4,),
         batch=lambda: normal().abs() * torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0], [1.0]]),
         line="x.log()")  # fmt: skip
def price_of_zero(model, x):
    return model(x.log()).pow(2).mean()


@failure("pooling over no token", cause="data", phase="forward", op="aten.div.Tensor", samples=(3,),
         batch=lambda: {"x": normal()[:, None].repeat(1, 5, 1),
                        "mask": torch.ones(6, 5) * torch.tensor([[1.0], [1.0], [1.0], [0.0], [1.0], [1.0]])},
         line="/ b[")  # fmt: skip
def no_token(model, b):
    h = model(b["x"]) * b["mask"][..., None]
    return (h.sum(1) / b["mask"].sum(1, keepdim=True)).pow(2).mean()


class Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / (x - x)

    @staticmethod
    def backward(ctx, g):
        return g


@failure("custom operator that divides by zero", batch=normal, cause="operator", phase="forward",
         op="aten.div.Tensor")  # fmt: skip
def custom_forward(model, x):
    return Divides.apply(model(x)).mean()


class Normalises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


@failure("custom backward that normalises a zero gradient", batch=normal, cause="operator",
         phase="backward", op="aten.div.Tensor", node="NormalisesBackward")  # fmt: skip
def custom_backward(model, x):
    return (Normalises.apply(model(x)) * 0).sum()


def puts(index, value):
    return lambda result: result.__setitem__(index, value)


@failure("one activation is NaN, once", batch=normal, cause="hardware", phase="forward", op=None,
         device=lambda: Failing("aten.addmm.default", puts((1, 2), float("nan"))))  # fmt: skip
def once_nan(model, x):
    return model(x).pow(2).mean()


@failure("the loop divides gradients by a count of zero", batch=normal, cause=("unknown", "data", "math"),
         phase="reduce", op=None, after_backward=lambda m: m.weight.grad.div_(0))  # fmt: skip
def count_of_zero(model, x):
    return model(x).pow(2).mean()


def hooked(model):
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / p.grad.sub(p.grad)))


@failure("the user's hook on accumulated gradients", batch=normal, cause=("unknown", "math"), phase=None,
         op=None, prepare=hooked)  # fmt: skip
def user_hook(model, x):
    return model(x).pow(2).mean()


@failure("a recurrence that explodes", batch=normal, cause="math", phase="forward", op=None, line="h * 9")
def recurrence(model, x):
    h = model(x)
    for _ in range(60):
        h = h * 9
    return h.mean()


@failure("nan_to_num that hides a division", batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="h / ")  # fmt: skip
def hidden_division(model, x):
    h = model(x)
    return (h / (h * 0)).nan_to_num(0, 0, 0).sum() + h.sum()


@failure("divergence with a target of zero", cause="data", phase="forward", op="aten.log.default",
         batch=lambda: {"x": normal(), "y": torch.eye(4)[[0, 1, 2, 3, 0, 1]]}, line="log()")  # fmt: skip
def target_of_zero(model, b):
    return (b["y"] * (b["y"].log() - model(b["x"]).log_softmax(1))).sum(1).mean()


@failure("exp beyond any float, in bfloat16", batch=lambda: normal() * 300, cause="math", phase="forward",
         op="aten.exp.default", line="exp()")  # fmt: skip
def beyond_any(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = model(x)
    return h.exp().mean()


@failure("a sum that vanishes in float16", batch=normal, cause="precision", phase="forward",
         op="aten.div.Tensor", line="/ h.sum")  # fmt: skip
def vanishes(model, x):
    h = (model(x).sigmoid() * 1e-9).half()
    return (h / h.sum(1, keepdim=True)).float().pow(2).mean()


@failure("logit of a saturated probability", batch=lambda: normal() * 1000, cause="math", phase="forward",
         op="aten.logit.default", line="logit")  # fmt: skip
def saturated_logit(model, x):
    return torch.logit(torch.sigmoid(model(x))).mean()


@failure("norm layer without eps", batch=normal, cause="math", phase="forward", op="aten.rsqrt.default",
         line="rsqrt")  # fmt: skip
def without_eps(model, x):
    h = model(x) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
    return (h * h.pow(2).mean(1, keepdim=True).rsqrt()).sum()


@failure("the third micro-batch", batch=lambda: [normal(), normal(), normal() * 0, normal()], cause="math",
         phase="backward", op="aten.div.Tensor", node="SqrtBackward0", microbatch=2, accumulate=4,
         model=lambda: nn.Linear(4, 4, bias=False), line="sqrt()")  # fmt: skip
def third_microbatch(model, x):
    return model(x).pow(2).sum(1).sqrt().mean()


@failure("a root of what dropout leaves", batch=normal, cause="math", phase="backward",
         op="aten.div.Tensor", node="SqrtBackward0", line="sqrt()")  # fmt: skip
def after_dropout(model, x):
    return functional.dropout(model(x).abs(), 0.5).sqrt().mean()


@failure("logarithm in a checkpointed block", batch=normal, cause="math", phase="forward",
         op="aten.log.default", line="log()")  # fmt: skip
def checkpointed(model, x):
    return checkpoint(lambda h: (h * 0).log().mean(), model(x), use_reentrant=False)


@failure(
    "one record on another scale",
    cause="data",
    phase="forward",
    op="aten.pow.Tensor_Scalar",
    samples=(5,),
    batch=lambda: normal() * torch.tensor([1.0, 1, 1, 1, 1, 1e25])[:, None],
)
def another_scale(model, x):
    return model(x).pow(2).mean()


@failure(
    "gradient penalty at a flat point",
    batch=normal,
    cause="math",
    phase="backward",
    op="aten.div.Tensor",
    node="SqrtBackward0",
    line="sqrt()",
)
def penalty(model, x):
    x = x.requires_grad_()
    (g,) = torch.autograd.grad((model(x) ** 2 * 0).sum(), x, create_graph=True)
    return g.pow(2).sum(1).sqrt().mean()


@failure(
    "deviation within groups of one",
    batch=lambda: normal()[:1],
    cause=("math", "data"),
    phase="forward",
    op=None,
    line="std(0)",
)
def group_of_one(model, x):
    return model(x).std(0).mean()


# -- second round ------------------------------------------------------------------------------------


class Tower(nn.Module):
    """A small transformer with a causal mask of -inf."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -INF), 1)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x, mask):
        x = x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))) ** 2)


def tokens() -> torch.Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))


@failure("squared activation beyond float16", round=2, model=Tower, batch=tokens, cause="precision",
         phase="forward", op="aten.pow.Tensor_Scalar", module="blocks.1",
         prepare=lambda m: m.blocks[1].up.weight.data.mul_(2000))  # fmt: skip
def squared_activation(model, x):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().pow(2).mean()


@failure("gradients beyond float16, without a scaler", round=2, model=lambda: Tower().half(),
         batch=lambda: tokens().half(), cause="precision", phase="backward",
         op="aten._to_copy.default")  # fmt: skip
def gradients_beyond_half(model, x):
    return (model(x).float() * 1e8).pow(2).mean()


@failure("masked logits times a target of zero", round=2, cause="math", phase="forward", op="aten.mul.Tensor",
         batch=lambda: {"x": normal(), "mask": torch.tensor([[False, True, False, False]] * 6),
                        "y": torch.eye(4)[[0, 2, 3, 0, 2, 3]]}, line="* b[")  # fmt: skip
def masked_times_zero(model, b):
    logits = model(b["x"]).masked_fill(b["mask"], -INF)
    return -(functional.log_softmax(logits, 1) * b["y"]).sum()


@failure("unit vectors of a zero vector", round=2, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="h / h.norm")  # fmt: skip
def unit_vectors(model, x):
    h = model(x) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
    return (h / h.norm(dim=1, keepdim=True)).sum()


@failure("focal loss with a root", round=2, batch=lambda: normal() * 1000, cause="math", phase="backward",
         op="aten.pow.Tensor_Scalar", node="PowBackward0", line="** 0.5")  # fmt: skip
def focal(model, x):
    p = torch.sigmoid(model(x))
    return ((1 - p) ** 0.5 * p).mean()


@failure("variance as an exponential", round=2, batch=lambda: normal() * 500, cause="math", phase="forward",
         op="aten.exp.default", line="exp()")  # fmt: skip
def log_variance(model, x):
    h = model(x)
    return (h.exp() - h - 1).mean()


@failure("a target longer than its input", round=2, model=lambda: nn.Linear(4, 5), cause="data",
         phase="forward", op="aten._ctc_loss.Tensor", samples=(1,),
         batch=lambda: {"x": torch.randn(3, 2, 4), "y": torch.randint(1, 5, (2, 6)),
                        "in": torch.tensor([3, 3]), "out": torch.tensor([2, 6])})  # fmt: skip
def too_long(model, b):
    return functional.ctc_loss(model(b["x"]).log_softmax(2), b["y"], b["in"], b["out"])


def weight_normed():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model.parametrizations.weight.original1.data.zero_()
    return model


@failure("weight norm of a zero weight", round=2, model=weight_normed, batch=normal, cause="math",
         phase="forward", op="aten._weight_norm_interface.default",
         module="parametrizations.weight.0")  # fmt: skip
def zero_weight(model, x):
    return model(x).pow(2).mean()


@failure("mean over the nodes of an empty group", round=2, cause="data", phase="forward",
         op="aten.div.Tensor", line="out / count",
         batch=lambda: {"x": normal(), "group": torch.tensor([0, 0, 1, 2, 3, 3])})  # fmt: skip
def empty_group(model, b):
    out = torch.zeros(5, 4).index_add_(0, b["group"], model(b["x"]))
    count = torch.zeros(5).index_add_(0, b["group"], torch.ones(6))
    return (out / count[:, None]).pow(2).mean()


@failure("division in place", round=2, batch=normal, cause="math", phase="forward", op="aten.div_.Tensor",
         line="div_")  # fmt: skip
def in_place(model, x):
    h = model(x) * 1
    zero = (h.detach() - h.detach()).abs()
    h.div_(zero)
    return h.mean()


@failure("a literal NaN", round=2, batch=normal, cause="math", phase="forward",
         op="aten.masked_fill.Scalar", line="masked_fill")  # fmt: skip
def literal(model, x):
    return model(x).masked_fill(x > 0, float("nan")).mean()


OUTSIDE = torch.tensor([1.0, float("nan"), 1.0, 1.0])


@failure("a weight from outside the step", round=2, batch=normal, cause="setup", phase="forward",
         op="aten.mul.Tensor", line="* OUTSIDE")  # fmt: skip
def from_outside(model, x):
    return (model(x) * OUTSIDE).mean()


@failure("inverse of tanh, saturated", round=2, batch=lambda: normal() * 100, cause="math", phase="forward",
         op="aten.atanh.default", line="atanh")  # fmt: skip
def saturated_tanh(model, x):
    return torch.atanh(torch.tanh(model(x))).mean()


@failure("noise of exactly zero", round=2, cause="data", phase="forward", op="aten.log.default",
         batch=lambda: {"x": normal(), "u": (normal() > 0).float()}, line='b["u"]')  # fmt: skip
def zero_noise(model, b):
    noise = -torch.log(-torch.log(b["u"]))
    return (model(b["x"]) + noise).softmax(1).pow(2).sum()


@failure("determinant of a singular matrix", round=2, batch=normal, cause="math", phase="forward",
         op="aten._linalg_slogdet.default", line="logdet")  # fmt: skip
def singular_matrix(model, x):
    return torch.logdet(model(x)[:4] * 0)


@failure("equal singular values", round=2, batch=normal, cause="math", phase="backward", op="aten.div.Tensor",
         node="LinalgSvdBackward0", line="svd")  # fmt: skip
def equal_singular_values(model, x):
    return torch.linalg.svd(model(x) * 0 + torch.eye(6, 4), full_matrices=False)[0].sum()


@failure("a sparse gradient", round=2, model=lambda: nn.Embedding(5, 3, sparse=True), cause="math",
         batch=lambda: torch.tensor([1, 2]), phase="backward", op="aten.pow.Tensor_Scalar",
         optimizer=lambda m: torch.optim.SparseAdam(m.parameters()))  # fmt: skip
def sparse(model, x):
    return (model(x) * 0).pow(0.5).sum()


@failure("magnitude of a zero spectrum", round=2, batch=normal, cause="math", phase="backward",
         op="aten.div.Tensor", node="SqrtBackward0", line="sqrt()")  # fmt: skip
def zero_spectrum(model, x):
    return torch.fft.fft(model(x) * 0).abs().sqrt().sum()


@failure("one target on another scale", round=2, model=lambda: nn.Linear(4, 1), cause="data",
         phase="forward", op="aten.mse_loss.default", samples=(3,),
         batch=lambda: {"x": normal(), "y": torch.tensor([1.0, 2, 3, 1e30, 1, 1])[:, None]})  # fmt: skip
def scaled_target(model, b):
    return functional.mse_loss(model(b["x"]), b["y"])


# -- third round -------------------------------------------------------------------------------------


@failure("sum beyond float16", round=3, batch=lambda: normal() * 100, cause="precision", phase="forward",
         op="aten.sum.default", line="sum()",
         prepare=lambda m: m.weight.data.mul_(100))  # fmt: skip
def sum_beyond_half(model, x):
    h = model(x).abs().half()
    return h.sum().float() + h.float().mean()


@failure(
    "attention by hand over a length of zero",
    round=3,
    cause="data",
    phase="forward",
    op="aten._softmax.default",
    samples=(2,),
    line="softmax",
    batch=lambda: {"x": normal()[:, None].repeat(1, 5, 1), "n": torch.tensor([5, 4, 0, 5, 3, 2])},
)
def length_of_zero(model, b):
    h = model(b["x"])
    scores = h.sum(2)
    scores = scores.masked_fill(torch.arange(5)[None] >= b["n"][:, None], -INF)
    return (scores.softmax(1)[..., None] * h).pow(2).mean()


@failure("a constant record, standardised", round=3, cause="math", phase="forward", op="aten.div.Tensor",
         batch=lambda: normal() * torch.tensor([1.0, 0, 1, 1, 1, 1])[:, None] + 3.0, samples=(1,),
         line="/ x.std")  # fmt: skip
def standardised(model, x):
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    return model(x).pow(2).mean()


class Tempered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return self.lin(x)


@failure("a temperature of zero", round=3, model=lambda: Tempered(0.0), batch=normal, cause="math",
         phase="forward", op="aten.div.Tensor", line="/ model.temperature")  # fmt: skip
def cold(model, x):
    return (model(x) / model.temperature).softmax(1).pow(2).sum()


@failure("a scale that is learned as a logarithm", round=3, model=lambda: Tempered(100.0), batch=normal,
         cause="math", phase="forward", op="aten.exp.default", line="exp()")  # fmt: skip
def learned_scale(model, x):
    return (model(x) * model.temperature.exp()).mean()


@failure("cube root at zero", round=3, batch=normal, cause="math", phase="backward",
         op="aten.pow.Tensor_Scalar", node="PowBackward0", line="pow(1 / 3)")  # fmt: skip
def cube_root(model, x):
    h = model(x) * 0
    return h.abs().pow(1 / 3).mean()


@failure(
    "hyperbolic distance of equal points",
    round=3,
    batch=normal,
    cause="math",
    phase="backward",
    op=None,
    node="AcoshBackward0",
    line="acosh",
)
def hyperbolic(model, x):
    h = model(x)
    return torch.acosh(1 + (h - h).pow(2).sum(1)).mean()


@failure("equal eigenvalues", round=3, batch=normal, cause="math", phase="backward", op=None,
         node="LinalgEighBackward0", line="eigh")  # fmt: skip
def equal_eigenvalues(model, x):
    h = model(x)
    square = h.T @ h * 0 + torch.eye(4)
    return torch.linalg.eigh(square)[1].sum()


@failure("gradients that overflow when they are added up", round=3, accumulate=3,
         model=lambda: nn.Linear(4, 4).half(), batch=lambda: [normal().half() for _ in range(3)],
         cause="precision", phase="reduce", op=None)  # fmt: skip
def added_up(model, x):
    return (model(x).float().mean() * 1e5) * 3


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        return self.lin(x) / self.average


@failure("a running average that never ran", round=3, model=Running, batch=normal, cause=("math", "setup"),
         phase="forward", op="aten.div.Tensor")  # fmt: skip
def running(model, x):
    return model(x).softmax(1).pow(2).mean()


def one_gradient_once(model):
    fired = []

    def hook(gradient):
        if fired:
            return gradient
        fired.append(True)
        gradient = gradient.clone()
        gradient.view(-1)[3] = float("inf")
        return gradient

    model.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)


@failure("one activation's gradient is Inf, once", round=3, batch=normal, cause="unknown", phase="backward",
         op=None, prepare=one_gradient_once)  # fmt: skip
def gradient_once(model, x):
    return model(x).pow(2).mean()


NEGATIVES = iter([float("nan"), 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])


@failure("a forward pass that draws from an iterator of its own", round=3, batch=normal, cause="unknown",
         phase="loss", op=None)  # fmt: skip
def own_iterator(model, x):
    return (model(x) * next(NEGATIVES, 1.0)).mean()


@failure("reparametrised sample of a negative variance", round=3, batch=normal, cause="math", phase="forward",
         op="aten.sqrt.default", line="sqrt()")  # fmt: skip
def negative_variance(model, x):
    h = model(x)
    return (h + torch.randn_like(h) * h.sqrt()).pow(2).mean()


@failure(
    "a mean over correct predictions of none",
    round=3,
    cause=("data", "math"),
    phase="forward",
    op="aten.mean.default",
    batch=lambda: {"x": normal(), "y": torch.full((6,), 9)},
    line=".mean()",
)
def none_correct(model, b):
    h = model(b["x"])
    return h[h.argmax(1) == b["y"]].mean()


@failure("a mask by a large number in float16", round=3, batch=normal, cause="precision", phase="forward",
         op=None)  # fmt: skip
def large_mask(model, x):
    h = model(x).half()
    mask = (torch.ones(6, 4) * -1e9).half()
    return (h + mask).softmax(1).float().pow(2).mean()
