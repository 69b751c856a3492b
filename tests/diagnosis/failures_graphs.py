"""Fourth round: custom operators, hooks, islands without gradients, second derivatives, recurrences."""

import numpy as np
import torch
from failures import failure, normal
from torch import nn
from torch.nn import functional

math = {"round": 4, "cause": "math"}
operator = {"round": 4, "cause": "operator"}


class Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return functional.softplus(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp() / (1 + x.exp())


@failure("custom backward by an unstable formula", **operator, batch=lambda: normal() * 1000,
         phase="backward", op="aten.exp.default", node="SoftplusBackward")  # fmt: skip
def unstable_backward(model, x):
    return Softplus.apply(model(x)).mean()


@torch.library.custom_op("gradsentinel_tests::standardise", mutates_args=())
def standardise(x: torch.Tensor) -> torch.Tensor:
    values = x.detach().numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy((values - values.mean()) / (values.std() - values.std()))


standardise.register_autograd(lambda ctx, g: g)


@failure("custom operator of another library", **operator, batch=normal, phase="forward",
         op="gradsentinel_tests.standardise.default", line="standardise(")  # fmt: skip
def library_operator(model, x):
    return standardise(model(x)).pow(2).mean()


@failure("a result that is allocated and written in part", **operator, batch=normal, phase="forward",
         op=("aten.empty.memory_format", "aten.new_empty.default"), line="new_empty")  # fmt: skip
def written_in_part(model, x):
    h = model(x)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what is allocated with NaN: old memory, made certain
    out = h.new_empty(8, 4)
    torch.use_deterministic_algorithms(before)
    out[:6] = h
    return out.pow(2).mean()


@failure("a scale computed without gradients", **math, batch=normal, phase="forward",
         op="aten.reciprocal.default", line="1 / h")  # fmt: skip
def without_gradients(model, x):
    h = model(x)
    with torch.no_grad():
        scale = 1 / h.sub(h).std()
    return (h * scale).mean()


@failure("a teacher whose output is normalised", **math, batch=normal, phase="forward", op="aten.div.Tensor",
         line="/ target.norm")  # fmt: skip
def teacher(model, x):
    with torch.no_grad():
        target = torch.relu(model(x)) * torch.tensor([0.0, 1, 1, 1, 1, 1])[:, None]
        target = target / target.norm(dim=1, keepdim=True)
    return (model(x) - target).pow(2).mean()


@failure("second derivative of a power", **math, batch=normal, phase="backward", op="aten.pow.Tensor_Scalar",
         line="pow(1.5)")  # fmt: skip
def second_derivative(model, x):
    x = x.clone().requires_grad_()
    energy = (model(x) * 0).abs().pow(1.5).sum() + model(x).pow(2).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force.pow(2).sum()


@failure("gradient penalty by a root, in a critic", **math, batch=normal, phase="backward",
         op="aten.div.Tensor", node="SqrtBackward0", line="sqrt",
         model=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)),
         prepare=lambda m: m[0].bias.data.fill_(-100))  # fmt: skip
def critic(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (torch.sqrt((g * g).sum(1)) - 1).pow(2).mean()


@failure("root of a matrix without full rank", **math, batch=normal, phase="backward",
         op="aten.linalg_solve_triangular.default", node="LinalgQrBackward0", line="qr(")  # fmt: skip
def rank(model, x):
    return torch.linalg.qr(model(x) * 0)[0].sum()


@failure("a hook that normalises a zero gradient", **math, batch=normal, phase="backward",
         op="aten.div.Tensor", line="g / g.norm()")  # fmt: skip
def hook(model, x):
    h = model(x) * 1
    h.register_hook(lambda g: g / g.norm())
    return (h * 0).sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(4, 4, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.rnn.weight_hh_l0.data.mul_(2)

    def forward(self, x):
        return self.rnn(x)[0][:, -1]


@failure("a recurrence that doubles", **math, batch=lambda: torch.ones(2, 140, 4), phase="forward", op=None,
         module="rnn", model=Recurrent)  # fmt: skip
def doubles(model, x):
    return model(x).mean()


class Teacher(nn.Linear):
    pass


TEACHER = Teacher(4, 4)
TEACHER.weight.data[1, 1] = float("nan")


@failure("a teacher that was never loaded", round=4, cause="setup", batch=normal, phase="forward",
         op="aten.addmm.default", line="TEACHER(x)")  # fmt: skip
def never_loaded(model, x):
    with torch.no_grad():
        target = TEACHER(x)
    return (model(x) - target).pow(2).mean()


@failure("batch norm with a negative running variance", round=4, cause=("math", "setup"), batch=normal,
         phase="forward", op="aten.native_batch_norm.default", module="1",
         model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
         prepare=lambda m: m[1].running_var.fill_(-1.0))  # fmt: skip
def negative_variance(model, x):
    return model(x).pow(2).mean()


class Mixture(nn.Module):
    """Routes each row to one expert; the load-balancing loss takes the logarithm of the shares."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.router.bias.data[2] = -1000.0

    def forward(self, x):
        gates = self.router(x).softmax(1)
        best = gates.argmax(1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * gates[rows, index, None])
        share = gates.mean(0)
        entropy = -(share * share.log()).sum()
        return out, entropy


@failure("entropy of a router that never picks an expert", **math, model=Mixture, batch=normal,
         phase="forward", op="aten.log.default", module="")  # fmt: skip
def router(model, x):
    out, entropy = model(x)
    return out.pow(2).mean() - 0.01 * entropy


@failure("product that is scattered into groups", **math, batch=lambda: torch.ones(6, 4), phase="forward",
         op="aten.exp.default", line="exp()", prepare=lambda m: m.bias.data.fill_(90))  # fmt: skip
def segment_softmax(model, x):
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    e = model(x)[:, 0].exp()
    total = torch.zeros(3).scatter_add(0, group, e)
    return (e / total[group]).pow(2).sum()
