"""Fifth round, thought up after the rules had been mended for the fourth."""

import torch
from failures import INF, failure, normal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@failure("precision of a latent as an exponential", round=5, batch=normal, cause="math", phase="forward",
         op="aten.exp.default", line="(-h).exp()", prepare=lambda m: m.bias.data.fill_(-100))  # fmt: skip
def latent(model, x):
    h = model(x)
    return ((x - h).pow(2) * (-h).exp() + h).mean()


@failure("softmax over the batch, a column masked out", round=5, cause="data", phase="forward",
         op="aten._softmax.default", line="softmax(0)", samples=None,
         batch=lambda: {"x": normal(), "hide": torch.tensor([[False, True, False, False]] * 6)})  # fmt: skip
def column(model, b):
    weights = model(b["x"]).masked_fill(b["hide"], -INF).softmax(0)
    return (weights * b["x"]).pow(2).sum()


@failure("label smoothing over masked classes", round=5, cause="math", phase="forward", op=None,
         batch=lambda: {"x": normal(), "y": torch.tensor([0, 2, 3, 0, 2, 3])})  # fmt: skip
def smoothing(model, b):
    logits = model(b["x"]).masked_fill(torch.tensor([False, True, False, False]), -INF)
    return functional.cross_entropy(logits, b["y"], label_smoothing=0.1)


@failure("squared error in float16", round=5, cause="precision", phase="forward", op="aten.mse_loss.default",
         batch=lambda: normal() * 300, line="mse_loss")  # fmt: skip
def squared_error(model, x):
    return functional.mse_loss(model(x).half(), -x.half()).float()


@failure("solving a singular system unchecked", round=5, batch=normal, cause="math", phase="forward",
         op="aten._linalg_solve_ex.default", line="solve_ex")  # fmt: skip
def singular_system(model, x):
    h = model(x)[:4]
    return torch.linalg.solve_ex(h * torch.tensor([1.0, 1, 1, 0]), x[:4])[0].sum()


@failure("weight of the positives, of which there are none", round=5, cause="data", phase="forward",
         op="aten.div.Tensor", samples=None, line="/ positive",
         batch=lambda: {"x": normal(), "y": torch.zeros(6)})  # fmt: skip
def no_positives(model, b):
    positive = b["y"].sum()
    weight = (b["y"].numel() - positive) / positive
    return functional.binary_cross_entropy_with_logits(model(b["x"])[:, 0], b["y"], pos_weight=weight)


class Robust(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.shape = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        a = self.shape
        base = self.lin(x).pow(2) / (a - 2).abs() + 1
        return (base.pow(a / 2) - 1) * ((a - 2).abs() / a)


@failure("general robust loss whose shape is zero", round=5, model=Robust, batch=normal, cause="math",
         phase="forward", op="aten.div.Tensor", module="")  # fmt: skip
def robust(model, x):
    return model(x).mean()


@failure("positions beyond float16", round=5, batch=normal, cause="precision", phase="forward",
         op=("aten.arange.default", "aten.arange.start"), line="arange")  # fmt: skip
def positions(model, x):
    place = torch.arange(70_000, dtype=torch.float16)
    return (model(x).half().repeat(1, 17_500)[0] * place).float().mean()


@failure("product in the backward pass beyond float16", round=5, batch=lambda: normal() * 1e-4,
         cause="precision", phase="backward", op="aten.mm.default", model=lambda: nn.Sequential(
             nn.Linear(4, 4), nn.Linear(4, 4)), module="1",
         prepare=lambda m: m[1].weight.data.copy_(torch.full((4, 4), 3e4)))  # fmt: skip
def backward_product(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x * 1e-3)
    return h.float().sum() * 10


@failure("maximum of an empty group", round=5, cause=("data", "math"), phase="forward",
         op="aten.sub.Tensor", samples=None, line="h - best",
         batch=lambda: {"x": normal(), "group": torch.tensor([0, 0, 1, 1, 3, 3])})  # fmt: skip
def empty_maximum(model, b):
    h = model(b["x"])[:, 0]
    best = torch.full((4,), -INF).scatter_reduce(0, b["group"], h, "amax")
    h = torch.cat([h, best])
    best = torch.cat([best[b["group"]], best])
    return (h - best).exp().sum()


class Logged(nn.Module):
    def forward(self, h):
        return (h * 0).log().mean()


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.tail = Logged()

    def forward(self, x):
        return checkpoint(self.tail, self.lin(x), use_reentrant=True)


@failure("logarithm in a block of reentrant checkpointing", round=5, model=Reentrant, batch=normal,
         cause="math", phase="forward", op="aten.log.default", module="tail")  # fmt: skip
def reentrant(model, x):
    return model(x)


def unit_length(module, args, output):
    return output / (output * 0).norm(dim=1, keepdim=True)


@failure("a forward hook that normalises", round=5, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", prepare=lambda m: m.register_forward_hook(unit_length))  # fmt: skip
def hooked_forward(model, x):
    return model(x).pow(2).mean()


@failure("soft labels of which one has no mass", round=5, cause="data", phase="forward",
         op="aten.div.Tensor", samples=(2,), line='/ b["y"]',
         batch=lambda: {"x": normal(),
                        "y": torch.ones(6, 4) * torch.tensor([1.0, 1, 0, 1, 1, 1])[:, None]})  # fmt: skip
def no_mass(model, b):
    labels = b["y"] / b["y"].sum(1, keepdim=True)
    return functional.cross_entropy(model(b["x"]), labels)


@failure("Adamax without eps", round=5, cause="optimizer", phase="optimizer", module="0",
         op="aten.addcdiv_.default", batch=lambda: torch.tensor([1, 2]),
         model=lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)),
         optimizer=lambda m: torch.optim.Adamax(m.parameters(), eps=0.0, foreach=False))  # fmt: skip
def adamax(model, x):
    return model(x).pow(2).mean()


OWN = torch.Generator().manual_seed(5)


def own_generator(model, x):
    keep = torch.rand(6, 1, generator=OWN) > 0.9
    return (model(x) * keep / (keep.sum() - keep.sum())).mean()


@failure("a generator of the loop's own", round=5, batch=normal, cause="unknown", phase=None, op=None,
         loop=own_generator)  # fmt: skip
def generator(model, x):
    keep = torch.rand(6, 1) > 0.1
    return (model(x) * keep / keep.sum()).mean()


def in_training(model, x):
    model.train()
    return (model(x) / model[1].num_batches_tracked.sub(model[1].num_batches_tracked)).mean()


@failure("a loop in training mode, forward= in evaluation mode", round=5, batch=normal, cause="unknown",
         phase=None, op=None, loop=in_training,
         model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))  # fmt: skip
def evaluation(model, x):
    model.eval()
    return model(x).pow(2).mean()


@failure("power spectrum of a signal without an average", round=5, batch=normal, cause="math",
         phase="forward", op="aten.log.default", line="log()")  # fmt: skip
def power(model, x):
    h = model(x)
    h = h.sub(h).add(torch.tensor([1.0, -1, 1, -1])) * h.detach().amax()
    return torch.fft.rfft(h).abs().pow(2).log().mean()
