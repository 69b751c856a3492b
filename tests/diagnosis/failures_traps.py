"""Eighth round: failures that are easily taken for something else."""

import torch
from failures import failure, normal
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

NAN = float("nan")
INF = float("inf")
eighth = {"round": 8}


def with_missing():
    x = normal()
    x[2, 1] = NAN
    return {"x": x, "price": torch.tensor([1.0, 2, 3, 0, 5, 6])}


@failure("missing values that the model fills in, beside a price of zero", **eighth, batch=with_missing,
         cause="data", phase="forward", op="aten.log.default", line='b["price"].log()', samples=(3,),
         field="price")  # fmt: skip
def innocent_missing(model, b):
    x = torch.where(b["x"].isnan(), 0.0, b["x"])
    return (model(x).mean(1) - b["price"].log()).pow(2).mean()


@failure("missing values that the model fills in, beside a singular formula", **eighth, batch=with_missing,
         cause="math", phase="forward", op="aten.div.Tensor", line="/ h.sub(h)", samples=None)  # fmt: skip
def innocent_and_math(model, b):
    h = model(b["x"].nan_to_num())
    return (h / h.sub(h)).mean()


def with_ids():
    x = normal()
    x[1] = 0
    return {"x": x, "id": ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]}


@failure("an image of nothing, with names", **eighth, batch=with_ids, cause="math", phase="forward",
         op="aten.div.Tensor", line='/ b["x"].norm', samples=(1,), look="x")  # fmt: skip
def named_images(model, b):
    return model(b["x"] / b["x"].norm(dim=1, keepdim=True)).pow(2).mean()


def chain(scores):
    alpha = torch.full((6, 4), -INF)
    alpha = torch.cat([scores[:, :1], alpha[:, 1:]], 1)
    for _ in range(2):
        before = torch.cat([torch.full((6, 1), -INF), alpha[:, :-1]], 1)
        alpha = torch.logaddexp(alpha, before) + scores
    return alpha


@failure("a forward algorithm whose states cannot be reached yet", **eighth, batch=normal, cause="math",
         phase="backward", op=None, node="LogaddexpBackward0", samples=())  # fmt: skip
def alignment(model, x):
    return chain(model(x))[:, 2].mean()


@failure("scores beyond float16, and a mask on top", **eighth, batch=lambda: normal() * 30, samples=None,
         cause="precision", phase="forward", op=("aten.mm.default", "aten.matmul.default"), line="h @ h.T",
         prepare=lambda m: m.weight.data.mul_(40))  # fmt: skip
def masked_overflow(model, x):
    h = model(x).half()
    scores = h @ h.T
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -INF)
    return scores.softmax(-1).float().pow(2).mean()


@failure("a division into a part of a tensor", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="h[positive]", samples=())  # fmt: skip
def in_part(model, x):
    h = model(x).clone()
    positive = h.detach()[:, 0] > 0
    h[positive] = h[positive] / (h[positive] - h[positive])
    return h.mean()


@failure("segments of which one is empty", **eighth, cause="data", phase="forward", samples=None,
         batch=lambda: {"x": normal(), "lengths": torch.tensor([2, 0, 3, 1])},
         op=("aten.segment_reduce.default",), line="segment_reduce")  # fmt: skip
def segments(model, b):
    return torch.segment_reduce(model(b["x"]), "mean", lengths=b["lengths"], axis=0).pow(2).mean()


@failure(
    "exponential of a large matrix",
    **eighth,
    batch=lambda: normal() * 100,
    cause="math",
    phase="forward",
    op="aten.linalg_matrix_exp.default",
    line="matrix_exp",
)
def matrix(model, x):
    h = model(x)[:4]
    return torch.linalg.matrix_exp(h @ h.T).mean()


@failure("a logarithm under vmap", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.log.default", samples=())  # fmt: skip
def mapped(model, x):
    return torch.vmap(lambda row: row.relu().log())(model(x)).mean()


@failure("mean of jagged sequences, one of them empty", **eighth, cause="data", phase="forward", samples=None,
         batch=lambda: {"x": normal(), "offsets": torch.tensor([0, 2, 2, 6])}, op="aten.div.Tensor",
         line="/ length")  # fmt: skip
def jagged(model, b):
    length = b["offsets"].diff()
    total = torch.segment_reduce(model(b["x"]), "sum", lengths=length, axis=0)
    return (total / length[:, None]).pow(2).mean()


@failure("probabilities of a row that sums to zero", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="Categorical", samples=(),
         prepare=lambda m: m.bias.data.fill_(-50))  # fmt: skip
def categorical(model, x):
    chosen = torch.distributions.Categorical(probs=model(x).relu(), validate_args=False)
    return -chosen.log_prob(torch.zeros(6, dtype=torch.long)).mean()


@failure("a grid computed from boxes without width", **eighth, cause="data", phase="forward", samples=(4,),
         batch=lambda: {"image": torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(4)),
                        "box": torch.tensor([[0.0, 1], [0.2, 0.8], [0, 0.5], [0.1, 1], [0.3, 0.3], [0, 1]])},
         op="aten.reciprocal.default", line="1 / ", field="box")  # fmt: skip
def grid(model, b):
    width = 1 / (b["box"][:, 1] - b["box"][:, 0])
    theta = torch.zeros(6, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = width
    seen = functional.grid_sample(
        b["image"], functional.affine_grid(theta, [6, 4, 3, 3], align_corners=False), align_corners=False
    )
    return model(seen.mean((2, 3)) * width[:, None]).pow(2).mean()


@failure("gumbel softmax at a temperature of zero", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="gumbel_softmax", samples=())  # fmt: skip
def gumbel(model, x):
    return functional.gumbel_softmax(model(x), tau=0.0).pow(2).mean()


@failure("a power mean of nothing", **eighth, batch=normal, cause="math", phase="backward",
         op="aten.pow.Tensor_Scalar", node="PowBackward0", line="pow(1 / 3)", samples=())  # fmt: skip
def power_mean(model, x):
    h = model(x)
    return (h - h.detach()).abs().mean(1).pow(1 / 3).mean() + h.mean()


@failure("spectral norm of a weight that is zero", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", samples=(),
         model=lambda: nn.Sequential(nn.Linear(4, 4), parametrizations.spectral_norm(nn.Linear(4, 4))),
         prepare=lambda m: m[1].parametrizations.weight.original.data.zero_())  # fmt: skip
def spectral(model, x):
    return model(x).pow(2).mean()


@failure("a square that vanishes in float16 under a root", **eighth, batch=normal, cause="precision",
         phase="backward", op="aten.div.Tensor", node="SqrtBackward0", line="sqrt()", samples=())  # fmt: skip
def vanished(model, x):
    h = (model(x) * 1e-4).half()
    return h.pow(2).sum(1).sqrt().float().mean()


@failure("activations beyond float8", **eighth, batch=lambda: normal() * 1e5, cause="precision",
         phase="forward", op="aten._to_copy.default", line="float8", samples=None)  # fmt: skip
def eight_bits(model, x):
    h = model(x).to(torch.float8_e5m2)
    return h.float().pow(2).mean()


@failure("a cardinal sine by hand", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="h.sin() / h", samples=())  # fmt: skip
def cardinal(model, x):
    h = model(x) * torch.tensor([1.0, 1, 0, 1, 1, 1])[:, None]
    return (h.sin() / h).mean()


@failure("positions on a line of one point", **eighth, cause=("math", "data"), phase="forward",
         batch=lambda: normal()[:, None], op="aten.div.Tensor", line="/ (x.shape[1] - 1)",
         samples=None)  # fmt: skip
def one_point(model, x):
    where = torch.arange(x.shape[1]) / (x.shape[1] - 1)
    return (model(x) + where[:, None]).pow(2).mean()


@failure("noise that is drawn and rooted", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.sqrt.default", line="sqrt()", samples=None)  # fmt: skip
def rooted_noise(model, x):
    return (model(x) + torch.randn(6, 4).sqrt()).pow(2).mean()


@failure("everything dropped by hand", **eighth, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="/ (1 - p)", samples=())  # fmt: skip
def dropped(model, x):
    p = 1.0
    return (model(x) * (torch.rand(6, 4) >= p) / (1 - p)).pow(2).mean()


class Careless(torch.optim.Optimizer):
    """Adam as somebody may have written it down, without eps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad * p.grad, 0.1)
                p.sub_(group["lr"] * p.grad / state["square"].sqrt())


@failure("an optimizer of one's own, without eps", **eighth, cause="optimizer", phase="optimizer",
         batch=lambda: torch.tensor([1, 2]), model=lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)),
         op="aten.div.Tensor", module="0", optimizer=lambda m: Careless(m.parameters()))  # fmt: skip
def careless(model, x):
    return model(x).pow(2).mean()


@failure("Adam without eps", **eighth, cause="optimizer", phase="optimizer", module="0",
         batch=lambda: torch.tensor([1, 2]), model=lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)),
         op="aten.addcdiv_.default",
         optimizer=lambda m: torch.optim.AdamW(m.parameters(), eps=0.0, foreach=False))  # fmt: skip
def no_eps(model, x):
    return model(x).pow(2).mean()


def sparse_batch():
    return {
        "x": normal(),
        "edges": torch.tensor([[0, 1, 2, 3, 1], [1, 2, 3, 4, 0]]),
    }


@failure("an adjacency normalised by degrees, one of them zero", **eighth, batch=sparse_batch, cause="data",
         phase="forward", op="aten.pow.Tensor_Scalar", line="pow(-0.5)", samples=None)  # fmt: skip
def adjacency(model, b):
    graph = torch.sparse_coo_tensor(b["edges"], torch.ones(5), (6, 6), check_invariants=True).to_dense()
    scale = graph.sum(1).pow(-0.5)
    return (scale[:, None] * graph * scale[None] @ model(b["x"])).pow(2).mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.lin(x) / scale


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x):
        h = self.first(x)
        return self.inner(h, h.detach().clamp(max=0) * 0)


@failure(
    "a scale of zero that one module hands to another",
    **eighth,
    batch=normal,
    model=Outer,
    cause="math",
    phase="forward",
    op="aten.div.Tensor",
    module="inner",
    samples=(),
)
def handed_over(model, x):
    return model(x).pow(2).mean()


def counting():
    count = [0]

    def prepare(model):
        def hook(module, args, output):
            count[0] += 1
            return output / (count[0] - 1) if count[0] == 1 else output

        model.register_forward_hook(hook)

    return prepare


@failure(
    "a schedule inside the model that begins at zero",
    **eighth,
    batch=normal,
    cause=("math", "unknown", "setup"),
    phase=None,
    op=None,
    samples=None,
    prepare=counting(),
)
def begins_at_zero(model, x):
    return model(x).pow(2).mean()


@failure(
    "targets at both ends of a logit",
    **eighth,
    cause="data",
    phase="forward",
    samples=(0, 5),
    field="y",
    batch=lambda: {"x": normal(), "y": torch.tensor([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]), "idx": torch.arange(6)},
    op="aten.logit.default",
    line="logit",
)
def logit_targets(model, b):
    return (model(b["x"]).mean(1) - torch.logit(b["y"])).pow(2).mean()


@failure("a label mask of zeros in one of the fields", **eighth, cause="data", phase="forward", samples=None,
         batch=lambda: ({"input": normal(), "keep": torch.zeros(6)}, {"y": normal()}), look="[0].keep",
         op="aten.div.Tensor", line="/ keep.sum")  # fmt: skip
def keeps_nothing(model, b):
    inputs, targets = b
    keep = inputs["keep"]
    error = (model(inputs["input"]) - targets["y"]).pow(2).mean(1)
    return (error * keep).sum() / keep.sum()


@failure("a weight with one enormous row", **eighth, batch=lambda: torch.tensor([0, 1, 2, 3, 4, 5]),
         cause=("optimizer", "math", "hardware", "unknown"), phase="forward", op=None, samples=None,
         model=lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4)),
         prepare=lambda m: m[0].weight.data[3].fill_(1e30))  # fmt: skip
def enormous_row(model, x):
    return model(x).pow(2).mean()


@failure("a teacher in float16 whose logits overflow", **eighth, batch=lambda: normal() * 100, samples=None,
         cause="precision", phase="forward", op=("aten.addmm.default", "aten.mm.default"),
         model=lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).half()]), module="1",
         prepare=lambda m: m[1].weight.data.mul_(2000))  # fmt: skip
def teacher(model, x):
    with torch.no_grad():
        target = model[1](x.half()).float().softmax(-1)
    return functional.cross_entropy(model[0](x), target)


@failure("a norm of order one half", **eighth, batch=normal, cause="math", phase="backward", op=None,
         node=None, line="h.pow(0.5)", samples=())  # fmt: skip
def half_norm(model, x):
    h = (model(x) * torch.tensor([1.0, 0, 1, 1, 1, 1])[:, None]).abs()
    return h.pow(0.5).sum(1).pow(2).mean()


@failure("a gradient that a custom Function multiplies by infinity", **eighth, batch=normal, cause="operator",
         phase="backward", op="aten.mul.Tensor", node="BoostsBackward", samples=())  # fmt: skip
def boosted(model, x):
    return Boosts.apply(model(x)).pow(2).mean()


class Boosts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * INF
