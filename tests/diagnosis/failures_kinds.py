"""Seventh round: singular formulas, narrow types, custom Functions, optimizers, records and devices."""

from typing import NamedTuple

import torch
from broken_kernels import Failing
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

NAN = float("nan")
seventh = {"round": 7}


class Record(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@failure("length by hypot at the origin", **seventh, batch=normal, cause="math", phase="backward",
         op="aten.div.Tensor", node="HypotBackward0", line="hypot")  # fmt: skip
def origin(model, x):
    h = model(x) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
    return torch.hypot(h[:, 0], h[:, 1]).mean()


@failure("a learned power of negative activations", **seventh, batch=normal, cause="math", phase="forward",
         op="aten.pow.Tensor_Tensor", line="** (2.5 +")  # fmt: skip
def learned_power(model, x):
    h = model(x)
    return (h ** (2.5 + model.bias[0] * 0)).mean()


@failure("angle of a rotation beyond a half turn", **seventh, batch=lambda: normal() * 9, cause="math",
         phase="forward", op="aten.acos.default", line="acos")  # fmt: skip
def rotation(model, x):
    trace = model(x).sum(1)
    return torch.acos((trace - 1) / 2).mean()


@failure("a Bessel function beyond any float", **seventh, batch=lambda: normal() * 1000, cause="math",
         phase="forward", op=("aten.i0.default", "aten.special_i0.default"), line="i0(")  # fmt: skip
def bessel(model, x):
    return torch.special.i0(model(x)).log().mean()


@failure(
    "divergence from a negative probability",
    **seventh,
    cause="data",
    phase="forward",
    samples=(3,),
    batch=lambda: {
        "x": normal(),
        "p": torch.tensor([[0.25] * 4] * 3 + [[1.2, -0.2, 0, 0]] + [[0.25] * 4] * 2),
    },
    op="aten.xlogy.Tensor",
    line="kl_div",
    field="p",
)
def negative_probability(model, b):
    return functional.kl_div(model(b["x"]).log_softmax(1), b["p"], reduction="batchmean")


@failure("a logarithm of nothing under a loss scaler", **seventh, batch=normal, cause="math", phase="forward",
         op="aten.log.default", line="log()",
         scaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0))  # fmt: skip
def scaled_log(model, x):
    h = model(x)
    return (h - h.detach()).pow(2).sum(1).log().mean()


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        h = self.inner(x)
        return h + (h * 0).abs().sqrt()


@failure("a root in one of several checkpointed stages", **seventh, batch=normal, cause="math",
         phase="backward", op="aten.div.Tensor", node="SqrtBackward0", module="1",
         model=lambda: nn.Sequential(nn.Linear(4, 4), Rooted(), nn.Tanh(), nn.Linear(4, 1)))  # fmt: skip
def stages(model, x):
    return checkpoint_sequential(model, 2, x, use_reentrant=False).mean()


class Logs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu().log()


@failure("a logarithm in a compiled block", **seventh, batch=normal, cause="math", phase="forward",
         op="aten.log.default", module="1",
         model=lambda: nn.Sequential(nn.Linear(4, 4), torch.compile(Logs(), backend="eager")))  # fmt: skip
def compiled(model, x):
    return model(x).mean()


def windows():
    return [{"x": normal() + i, "w": torch.full((6,), float(i != 2))} for i in range(4)]


@failure("the third of four micro-batches weighs nothing", **seventh, batch=windows, accumulate=4,
         cause="data", phase="forward", op="aten.div.Tensor", line="/ b", microbatch=2,
         samples=None)  # fmt: skip
def weighs_nothing(model, b):
    return (model(b["x"]).pow(2).mean(1) * b["w"]).sum() / b["w"].sum()


class HalfResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).clamp(-3e4, 3e4)
        return x


@failure("a residual stream beyond float16", **seventh, batch=lambda: normal().half().abs() * 1e4,
         cause="precision", phase="forward", op=("aten.add.Tensor", "aten.addmm.default"), samples=None,
         model=lambda: HalfResidual().half(),
         prepare=lambda m: [b.weight.data.copy_(torch.eye(4) * 0.9) for b in m.blocks])  # fmt: skip
def residual(model, x):
    return model(x).float().sigmoid().mean()


def images():
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(2))


@failure("a convolution beyond float16", **seventh, batch=lambda: images() * 100, cause="precision",
         phase="forward", op=("aten.convolution.default", "aten.mkldnn_convolution.default"),
         model=lambda: nn.Conv2d(3, 4, 3), line="model(x)", samples=None,
         prepare=lambda m: m.weight.data.mul_(3000))  # fmt: skip
def wide_convolution(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x)
    return h.float().sigmoid().mean() + (h.float() * 1e-9).mean()


@failure("derivative of a convolution beyond float16", **seventh, batch=lambda: images() * 200,
         cause="precision", phase="backward", op="aten.convolution_backward.default", samples=None,
         model=lambda: nn.Conv2d(3, 4, 3))  # fmt: skip
def wide_derivative(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x)
    return (h.float() * 60.0).sum()


@failure("a bag of embeddings beyond float16", **seventh, cause="precision", phase="forward", samples=None,
         batch=lambda: torch.arange(18).reshape(6, 3) % 7,
         model=lambda: nn.EmbeddingBag(7, 4, mode="sum").half(), line="model(x)",
         op=("aten._embedding_bag.default", "aten.sum.dim_IntList"),
         prepare=lambda m: m.weight.data.fill_(3e4))  # fmt: skip
def wide_bag(model, x):
    h = model(x).float()
    return h.sigmoid().mean() + (h * 1e-9).mean()


@failure("a summed cross entropy beyond float16", **seventh, cause="precision", phase="forward", samples=None,
         batch=lambda: {"x": normal(), "y": torch.tensor([1, 1, 1, 1, 1, 1])},
         op=("aten.nll_loss_forward.default", "aten.nll_loss.default"), line="cross_entropy",
         prepare=lambda m: m.bias.data.copy_(torch.tensor([3e4, 0, 0, 0])))  # fmt: skip
def summed(model, b):
    scores = model(b["x"]).half()
    return functional.cross_entropy(scores, b["y"], reduction="sum").float()


class DividesByInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x / x.abs()


@failure("a custom derivative that divides by its input", **seventh, batch=normal, cause="operator",
         phase="backward", op="aten.div.Tensor", node="DividesByInputBackward")  # fmt: skip
def custom_derivative(model, x):
    h = model(x)
    return DividesByInput.apply(h - h.detach()).mean() + h.mean()


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        e = x.exp()
        ctx.save_for_backward(e)
        return e.sum(1).log()

    @staticmethod
    def backward(ctx, g):
        (e,) = ctx.saved_tensors
        return g[:, None] * e / e.sum(1, keepdim=True)


@failure("a custom log-sum that overflows", **seventh, batch=lambda: normal() * 1000, cause="operator",
         phase="forward", op="aten.exp.default", node="LogSumBackward")  # fmt: skip
def custom_sum(model, x):
    return LogSum.apply(model(x)).mean()


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x * 2

    @staticmethod
    def backward(ctx, g):
        out = torch.empty_like(g)
        out[: ctx.n] = g[: ctx.n] * 2
        out[ctx.n :] = NAN  # what old memory may hold
        return out, None


@failure("a custom derivative that leaves rows to old memory", **seventh, batch=normal, cause="operator",
         phase="backward", op=None, samples=None)  # fmt: skip
def old_memory(model, x):
    return Part.apply(model(x), 4).pow(2).mean()


class Sometimes(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Sometimes.calls += 1
        return x * (NAN if Sometimes.calls % 1000 == 1 else 2.0)

    @staticmethod
    def backward(ctx, g):
        return g * 2


def first_call(model):
    Sometimes.calls = 0


@failure("a custom operator that races in the forward pass", **seventh, batch=normal,
         cause=("operator", "unknown"), phase=None, op=None, samples=None, prepare=first_call)  # fmt: skip
def races(model, x):
    return Sometimes.apply(model(x)).pow(2).mean()


WORK = torch.full((8, 4), NAN)


@failure("a workspace with what an earlier batch left", **seventh, batch=normal, cause=("setup", "operator"),
         phase="forward", op=None, samples=None)  # fmt: skip
def workspace(model, x):
    h = model(x)
    room = WORK.clone()
    room[:6] = h
    return room.mean()


class Standardises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("deviation", torch.zeros(4))

    def forward(self, x):
        return self.inner(x) / self.deviation


@failure("a statistic nobody has set", **seventh, batch=normal, model=Standardises, cause=("setup", "math"),
         phase="forward", op="aten.div.Tensor", samples=None)  # fmt: skip
def unset(model, x):
    return model(x).pow(2).mean()


optimizer = {"round": 7, "cause": "optimizer", "phase": "optimizer", "batch": normal}


def forgets_nothing(model):
    made = torch.optim.Adam(model.parameters(), foreach=False)
    made.param_groups[0]["betas"] = (0.9, 1.0)
    return made


@failure("Adam whose second beta is 1", **optimizer, module="", optimizer=forgets_nothing,
         op=("aten.div.Tensor", "aten.addcdiv_.default"))  # fmt: skip
def second_beta(model, x):
    return model(x).pow(2).mean()


def half_embedding():
    return nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).half()


@failure("AMSGrad in float16", **{**optimizer, "batch": lambda: torch.tensor([1, 2])}, model=half_embedding,
         module="0", op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, foreach=False))  # fmt: skip
def amsgrad(model, x):
    return model(x).float().pow(2).mean()


@failure("NAdam in float16", **{**optimizer, "batch": lambda: torch.tensor([1, 2])}, model=half_embedding,
         module="0", op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.NAdam(m.parameters(), foreach=False))  # fmt: skip
def nadam(model, x):
    return model(x).float().pow(2).mean()


MADE = []


def remembered(model):
    MADE[:] = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)]
    return MADE[0]


def spoils_rate(model):
    MADE[0].param_groups[0]["lr"] = NAN


@failure("a schedule that makes the learning rate NaN", **optimizer, op="aten.add_.Tensor", module="",
         optimizer=remembered, after_backward=spoils_rate)  # fmt: skip
def bad_rate(model, x):
    return model(x).pow(2).mean()


def nested():
    good, bad = normal(), normal()
    bad[4, 1] = NAN
    return {"views": [{"a": good}, {"a": bad}], "y": normal()[:, 0], "id": torch.arange(50, 56)}


@failure("NaN in one field of a nested batch", **seventh, batch=nested, cause="data", phase="input", op=None,
         samples=(4,), field="views[1].a")  # fmt: skip
def nested_batch(model, b):
    return sum((model(view["a"]).mean(1) - b["y"]).pow(2).mean() for view in b["views"])


def targets():
    y = normal()
    y[2, 0] = INF
    return Record(normal(), y)


@failure(
    "an infinite target of a named tuple",
    **seventh,
    batch=targets,
    cause="data",
    phase="input",
    op=None,
    samples=(2,),
    field="y",
)
def infinite_target(model, b):
    return functional.smooth_l1_loss(model(b.x), b.y)


@failure(
    "a double that float32 cannot hold",
    **seventh,
    cause="data",
    phase="forward",
    samples=(1,),
    field="",
    batch=lambda: normal().double() * torch.tensor([1.0, 1e300, 1, 1, 1, 1], dtype=torch.float64)[:, None],
    op="aten._to_copy.default",
    line="x.float()",
)
def double(model, x):
    return model(x.float()).pow(2).mean()


@failure("a rate of clicks where nothing was shown", **seventh, cause="data", phase="forward", samples=(0, 3),
         batch=lambda: {"x": normal(), "hits": torch.tensor([0, 3, 1, 0, 2, 5]),
                        "shown": torch.tensor([0, 9, 4, 0, 7, 8])},
         op="aten.div.Tensor", line='/ b["shown"]', field="shown")  # fmt: skip
def clicks(model, b):
    return (model(b["x"]).mean(1) - b["hits"] / b["shown"]).pow(2).mean()


@failure(
    "a speed over no time",
    **seventh,
    cause="data",
    phase="forward",
    samples=(5,),
    field="time",
    batch=lambda: {"x": normal(), "time": torch.tensor([[1.0, 2], [0, 3], [4, 5], [1, 9], [2, 7], [6, 6]])},
    op="aten.div.Tensor",
    line='/ b["time"].diff',
)
def speed(model, b):
    return (model(b["x"]) / b["time"].diff(dim=1)).pow(2).mean()


def flips_weight(model):
    model.weight.data.view(torch.int32).view(-1)[6] |= 0x7E000000


@failure("a bit of one weight flipped, no state to compare with", **seventh, batch=normal,
         cause=("hardware", "unknown"), phase=None, op=None, samples=None, prepare=flips_weight)  # fmt: skip
def flipped_weight(model, x):
    return model(x).pow(2).mean()


def flips_activation(result):
    result.view(torch.int32).view(-1)[9] |= 0x7E000000


@failure("a bit of one activation flipped, once", **seventh, batch=normal, cause=("hardware", "unknown"),
         phase=None, op=None, samples=None,
         device=lambda: Failing("aten.addmm.default", flips_activation))  # fmt: skip
def flipped_activation(model, x):
    return model(x).pow(2).mean()


def flips_sign_of_exponent(model):
    model.bias.grad.view(torch.int32)[2] = 0x7F800000


@failure("the exponent of one element of a bias gradient filled", **seventh, batch=normal,
         cause=("hardware", "unknown"), phase=None, op=None, samples=None,
         after_backward=flips_sign_of_exponent)  # fmt: skip
def flipped_gradient(model, x):
    return model(x).pow(2).mean()
