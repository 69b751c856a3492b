"""Seventh round: what goes wrong in other architectures, from convolutions to mixtures of experts."""

import torch
from failures import failure, normal
from torch import nn
from torch.nn import functional

seventh = {"round": 7}


def images() -> torch.Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(2))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


@failure("group norm by hand over dead channels", **seventh, batch=images, model=conv, cause="math",
         phase="forward", op="aten.div.Tensor", line="/ g.var",
         prepare=lambda m: m[0].bias.data.fill_(-100))  # fmt: skip
def dead_channels(model, x):
    g = model(x).unflatten(1, (2, 2)).flatten(2)
    g = (g - g.mean(-1, keepdim=True)) / g.var(-1, keepdim=True).sqrt()
    return g.pow(2).mean()


@failure("layer norm of a constant image, without eps", **seventh, cause="data", phase="forward",
         batch=lambda: images() * torch.tensor([1.0, 1, 1, 0, 1, 1])[:, None, None, None], model=conv,
         op="aten.native_layer_norm.default", samples=(3,), line="layer_norm")  # fmt: skip
def constant_image(model, x):
    return model(functional.layer_norm(x, x.shape[1:], eps=0.0)).pow(2).mean()


@failure("feature maps scaled to their own range", **seventh, batch=images, model=conv, cause="math",
         phase="forward", op="aten.div.Tensor", line="/ (high - low)",
         prepare=lambda m: m[0].bias.data[1].fill_(-100))  # fmt: skip
def own_range(model, x):
    h = model(x)
    low, high = h.amin((2, 3), keepdim=True), h.amax((2, 3), keepdim=True)
    return ((h - low) / (high - low)).mean()


@failure("segmentation whose pixels are all ignored", **seventh, cause="data", phase="forward",
         batch=lambda: {"image": images(), "mask": torch.full((6, 3, 3), 255)}, model=conv,
         op="aten.nll_loss2d_forward.default", line="cross_entropy", samples=None)  # fmt: skip
def no_pixel(model, b):
    return functional.cross_entropy(model(b["image"]), b["mask"], ignore_index=255)


@failure("label smoothing without a label", **seventh, cause="data", phase="forward",
         batch=lambda: {"x": normal(), "y": torch.full((6,), -100)}, samples=None,
         op=("aten.nll_loss_forward.default", "aten.div.Tensor"), line="cross_entropy")  # fmt: skip
def smoothing(model, b):
    return functional.cross_entropy(model(b["x"]), b["y"], label_smoothing=0.1)


@failure(
    "variance over a map of one pixel",
    **seventh,
    model=conv,
    cause=("math", "data"),
    phase="forward",
    batch=lambda: images()[:, :, :3, :3],
    op="aten.var.correction",
    line="h.var",
    samples=None,
)
def one_pixel(model, x):
    h = model(x)
    return (h.flatten(2) / (h.var((2, 3)) + 1e-5)[..., None]).mean()


def sequences() -> torch.Tensor:
    return torch.randn(6, 7, 4, generator=torch.Generator().manual_seed(3))


@failure("survival from a saturated hazard of an LSTM", **seventh, cause="math", phase="forward",
         batch=sequences, model=lambda: nn.LSTM(4, 5, batch_first=True), op="aten.log.default",
         line="survival.log()")  # fmt: skip
def hazard(model, x):
    h, _ = model(x)
    survival = 1 - torch.sigmoid(h * 1e3)
    return -survival.log().mean()


@failure("last state of a GRU by lengths, one of them zero", **seventh, cause="data", phase="forward",
         batch=lambda: {"x": sequences(), "length": torch.tensor([3.0, 7, 5, 0, 2, 6])}, samples=(3,),
         field="length", model=lambda: nn.GRU(4, 5, batch_first=True), op="aten.div.Tensor",
         line='/ b["length"]')  # fmt: skip
def mean_state(model, b):
    h, _ = model(b["x"])
    on = torch.arange(7)[None] < b["length"][:, None]
    return ((h * on[..., None]).sum(1) / b["length"][:, None]).pow(2).mean()


def ctc_batch():
    return {
        "x": sequences()[:, :4],
        "y": torch.tensor([[1, 2], [1, 3], [2, 3], [1, 2], [3, 1], [1, 2]]).repeat(1, 2)[:, :3],
        "n": torch.tensor([4, 4, 4, 2, 4, 4]),
    }


@failure("frames that are too few for a transcript", **seventh, cause="data", phase="forward",
         batch=ctc_batch, model=lambda: nn.Linear(4, 4), op="aten._ctc_loss.Tensor", line="ctc_loss",
         samples=None)  # fmt: skip
def too_few_frames(model, b):
    scores = model(b["x"]).log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(scores, b["y"], b["n"], torch.full((6,), 3))


@failure(
    "weights of a weighted bag that add up to zero",
    **seventh,
    cause="data",
    phase="forward",
    batch=lambda: {
        "ids": torch.arange(18).reshape(6, 3) % 7,
        "w": torch.tensor([[1.0, 2, 3], [1, 1, 1], [0, 0, 0], [2, 1, 1], [1, 2, 1], [3, 1, 1]]),
    },
    model=lambda: nn.EmbeddingBag(7, 4, mode="sum"),
    op="aten.div.Tensor",
    line="/ b",
    samples=(2,),
    field="w",
)
def weighted_bag(model, b):
    weights = b["w"] / b["w"].sum(1, keepdim=True)
    return model(b["ids"], per_sample_weights=weights).pow(2).mean()


@failure(
    "unit vector of an empty bag",
    **seventh,
    cause=("math", "data"),
    phase="forward",
    samples=None,
    batch=lambda: {"ids": torch.tensor([1, 2, 3, 4, 5]), "offsets": torch.tensor([0, 2, 2, 4])},
    model=lambda: nn.EmbeddingBag(7, 4, mode="mean"),
    op="aten.div.Tensor",
    line="h / h.norm",
)
def empty_bag(model, b):
    h = model(b["ids"], b["offsets"])
    return (h / h.norm(dim=1, keepdim=True)).sum()


def labels_batch():
    return {"x": normal(), "y": torch.tensor([0, 0, 1, 1, 2, 1]), "id": torch.arange(100, 106)}


@failure(
    "supervised contrast of a class with one member",
    **seventh,
    cause="data",
    phase="forward",
    batch=labels_batch,
    op="aten.div.Tensor",
    line="/ positive.sum",
    samples=(4,),
    field="y",
)
def lonely_class(model, b):
    h = functional.normalize(model(b["x"]), dim=1)
    apart = ~torch.eye(6, dtype=torch.bool)
    positive = (b["y"][:, None] == b["y"][None]) & apart
    scores = (h @ h.T / 0.1).masked_fill(~apart, -1e4).log_softmax(1)
    return -((scores * positive).sum(1) / positive.sum(1)).mean()


@failure("contrast by hand at a small temperature", **seventh, batch=normal, cause="math", phase="forward",
         op="aten.exp.default", line="exp()")  # fmt: skip
def small_temperature(model, x):
    h = functional.normalize(model(x), dim=1)
    e = (h @ h.T / 0.005).exp()
    return -(e.diagonal() / e.sum(1)).log().mean()


@failure("contrast under a learned temperature that vanished", **seventh, batch=normal, cause="math",
         phase="forward", op=("aten.div.Tensor", "aten.reciprocal.default"), line="/ model.bias[0].exp()",
         prepare=lambda m: m.bias.data.fill_(-200))  # fmt: skip
def vanished_temperature(model, x):
    h = functional.normalize(x @ model.weight.T, dim=1)
    scores = h @ h.T / model.bias[0].exp()
    return functional.cross_entropy(scores, torch.arange(6))


@failure("weight of a noise level by its ratio to the signal", **seventh, cause=("data", "math"),
         phase="forward", batch=lambda: {"x": normal(), "t": torch.tensor([3, 5, 9, 1, 0, 7])},
         op="aten.div.Tensor", line="snr = ", samples=None)  # fmt: skip
def noise_level(model, b):
    kept = torch.linspace(1, 0.01, 10)[b["t"]]
    snr = kept / (1 - kept)
    error = (model(b["x"]) - b["x"]).pow(2).mean(1)
    return (snr * error).mean()


@failure("velocity of a flow at the end of time, in bfloat16", **seventh, cause="precision", phase="forward",
         batch=lambda: {"x": normal(), "t": torch.tensor([0.1, 0.5, 0.999, 0.3, 0.7, 0.2])}, samples=None,
         op="aten.div.Tensor", line="/ (1 - t)")  # fmt: skip
def end_of_time(model, b):
    t = b["t"].bfloat16()[:, None]
    h = model(b["x"]).bfloat16()
    return (h / (1 - t)).float().pow(2).mean()


@failure("experts' gates, renormalised after a mask", **seventh, batch=normal, cause="math", phase="forward",
         op="aten.div.Tensor", line="gates / gates.sum")  # fmt: skip
def masked_gates(model, x):
    gates = (model(x) * 1e3).softmax(-1)
    gates = gates * (gates < 0.5)
    gates = gates / gates.sum(-1, keepdim=True)
    return (gates @ x[:4]).pow(2).mean()


@failure("the mean output of an expert without a token", **seventh, batch=normal, cause=("math", "data"),
         phase="forward", op="aten.mean.dim", line="mean(0)", samples=None,
         prepare=lambda m: m.bias.data[2].fill_(-100))  # fmt: skip
def idle_expert(model, x):
    h = model(x)
    chosen = h.argmax(1)
    means = [h[chosen == expert].mean(0) for expert in range(4)]
    return torch.stack(means).pow(2).mean()


@failure("a filter without a constant part, undone", **seventh, cause="data", phase="forward",
         batch=lambda: {"x": normal(), "kernel": torch.tensor([[1.0, 2, 1, 1]] * 5 + [[1.0, -1, 1, -1]])},
         op="aten.div.Tensor", line="/ torch.fft.fft", samples=(5,), field="kernel")  # fmt: skip
def deconvolution(model, b):
    spectrum = torch.fft.fft(model(b["x"])) / torch.fft.fft(b["kernel"])
    return torch.fft.ifft(spectrum).abs().pow(2).mean()


@failure("einsum attention over a length of zero", **seventh, cause="data", phase="forward",
         batch=lambda: {"x": sequences(), "length": torch.tensor([3, 0, 5, 7, 2, 6])}, samples=(1,),
         field="length", op="aten._softmax.default", line="softmax(-1)")  # fmt: skip
def einsum_attention(model, b):
    q = model(b["x"]).unflatten(-1, (2, 2))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q)
    off = torch.arange(7)[None] >= b["length"][:, None]
    weights = scores.masked_fill(off[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, q).pow(2).mean()


@failure(
    "a log partition over no label",
    **seventh,
    cause="data",
    phase="forward",
    batch=lambda: {"x": normal(), "allowed": torch.tensor([[True] * 4] * 4 + [[False] * 4] + [[True] * 4])},
    op="aten.logsumexp.default",
    line="logsumexp",
    samples=(4,),
    field="allowed",
)
def partition(model, b):
    scores = model(b["x"]).masked_fill(~b["allowed"], float("-inf"))
    return torch.logsumexp(scores, 1).mean()


@failure("entropy with masked actions", **seventh, cause="math", phase="forward", samples=None,
         batch=lambda: {"x": normal(), "ok": torch.tensor([[True, True, True, False]] * 6)},
         op="aten.log.default", line="p.log()")  # fmt: skip
def masked_entropy(model, b):
    p = model(b["x"]).masked_fill(~b["ok"], float("-inf")).softmax(1)
    return -(p * p.log()).sum(1).mean()


@failure("a tail of a squashed policy", **seventh, batch=lambda: normal() * 50, cause="math", phase="forward",
         op="aten.log.default", line="1 - action.pow(2)")  # fmt: skip
def squashed(model, x):
    action = model(x).tanh()
    return -torch.log(1 - action.pow(2)).sum(1).mean()


@failure(
    "mass between atoms at one place",
    **seventh,
    cause="data",
    phase="forward",
    samples=(2,),
    batch=lambda: {
        "place": torch.cat([sequences()[:2, :2, :3], torch.ones(1, 2, 3), sequences()[3:, :2, :3]]),
        "x": normal(),
    },
    op="aten.div.Tensor",
    line="/ distance",
    field="place",
)
def atoms(model, b):
    charge = model(b["x"])
    distance = (b["place"][:, 0] - b["place"][:, 1]).norm(dim=-1)
    return (charge[:, 0] * charge[:, 1] / distance).mean()


@failure("a transport plan whose kernel underflows", **seventh, batch=lambda: normal() * 10, cause="math",
         phase="forward", op=("aten.reciprocal.default", "aten.div.Tensor"), line="1.0 /")  # fmt: skip
def transport(model, x):
    h = model(x)
    kernel = torch.exp(-torch.cdist(h, h + 50) / 0.01)
    u = torch.ones(6)
    for _ in range(2):
        u = 1.0 / (kernel @ u)
    return (u[:, None] * kernel).sum()
