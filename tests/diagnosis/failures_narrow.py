"""Fourth round: float16 and bfloat16, whole models and autocast."""

import torch
from failures import failure, normal
from torch import nn
from torch.utils.checkpoint import checkpoint

precision = {"round": 4, "cause": "precision"}


@failure("eps that vanishes in float16", **precision, batch=normal, phase="forward", op="aten.rsqrt.default",
         line="rsqrt")  # fmt: skip
def vanishing_eps(model, x):
    h = model(x).half() * torch.tensor([0.0, 1, 1, 1, 1, 1]).half()[:, None]
    return (h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-8)).float().pow(2).mean()


@failure("product of activations beyond float16", **precision, batch=lambda: normal() * 100, phase="forward",
         op="aten.mul.Tensor", line="h * h", prepare=lambda m: m.weight.data.mul_(20))  # fmt: skip
def gated(model, x):
    with torch.autocast("cpu", torch.float16):
        h = model(x)
        h = h * h
    return h.float().sigmoid().mean() + (h.float() * 1e-9).mean()


@failure("variance by cancellation in bfloat16", **precision, batch=normal, phase="forward",
         op="aten.sqrt.default", line="sqrt()", prepare=lambda m: m.bias.data.fill_(101.7))  # fmt: skip
def cancellation(model, x):
    h = model(x).bfloat16()
    return (h.pow(2).mean(1) - h.mean(1).pow(2)).sqrt().float().mean()


@failure("norm beyond float16", **precision, batch=lambda: normal() * 5000, phase="forward",
         op="aten.linalg_vector_norm.default", line="vector_norm",
         prepare=lambda m: m.weight.data.mul_(5))  # fmt: skip
def norm_beyond_half(model, x):
    return torch.linalg.vector_norm(model(x).half().repeat(1, 8).flatten()).float() * 1e-3


@failure("temperature below what float16 holds", **precision, batch=lambda: normal() * 100, phase="forward",
         op="aten.div.Tensor", line="/ 1e-4")  # fmt: skip
def cold_half(model, x):
    return (model(x).half() / 1e-4).float().softmax(1).pow(2).sum()


@failure("exponential beyond float16", **precision, batch=lambda: normal() * 30, phase="forward",
         op="aten.exp.default", line="exp()")  # fmt: skip
def exponential_half(model, x):
    return model(x).clamp(max=20).half().exp().float().log1p().mean()


@failure("one minus a probability in float16", **precision, batch=normal, phase="forward",
         op="aten.log.default", line="(1 - p)", prepare=lambda m: m.bias.data.fill_(12))  # fmt: skip
def one_minus(model, x):
    p = torch.sigmoid(model(x).half())
    return -torch.log(1 - p).float().mean()


@failure("radius that rounds to one in bfloat16", **precision, batch=normal, phase="forward",
         op="aten.atanh.default", line="atanh")  # fmt: skip
def rounds_to_one(model, x):
    r = (torch.sigmoid(model(x)) * 0.0005 + 0.9990).bfloat16()
    return torch.atanh(r).float().mean()


@failure("einsum beyond float16", **precision, batch=lambda: normal()[None].repeat(2, 1, 1) * 100,
         phase="forward", op="aten.bmm.default", line="einsum",
         prepare=lambda m: m.weight.data.mul_(10))  # fmt: skip
def einsum_half(model, x):
    q = model(x).half()
    scores = torch.einsum("bqd,bkd->bqk", q, q)
    return scores.float().softmax(2).pow(2).mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, h):
        return self.down(torch.relu(self.up(h)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@failure("checkpointed block beyond float16", **precision, model=Stack, batch=lambda: normal() * 50,
         phase="forward", op="aten.addmm.default", module="blocks.1.down",
         prepare=lambda m: [p.data.mul_(400) for p in m.blocks[1].parameters()])  # fmt: skip
def checkpointed_half(model, x):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().pow(2).mean().log()


@failure("forward overflow under a loss scaler", **precision, batch=lambda: normal() * 100, phase="forward",
         op="aten.addmm.default", line="model(x)", scaler=lambda: torch.amp.GradScaler("cpu"),
         prepare=lambda m: m.weight.data.mul_(2000))  # fmt: skip
def scaled_forward(model, x):
    with torch.autocast("cpu", torch.float16):
        out = model(x)
    return out.float().pow(2).mean()


@failure("a record that float16 cannot hold", round=4, cause=("data", "precision"), phase="forward",
         batch=lambda: normal() * torch.tensor([1.0, 1, 1, 1, 1, 1e6])[:, None], op="aten._to_copy.default",
         samples=None, line="half()")  # fmt: skip
def record_beyond_half(model, x):
    return model(x.half().float()).pow(2).mean()


@failure("sum of a long sequence in float16", **precision, batch=lambda: normal().abs() * 10, phase="forward",
         op="aten.cumsum.default", line="cumsum", samples=(0, 5),
         prepare=lambda m: (m.weight.data.abs_(), m.bias.data.zero_()))  # fmt: skip
def long_sum(model, x):
    h = model(x).half().repeat(1, 2000)
    return h.cumsum(1).float().mean()


@failure("gradient beyond float16 in a narrow part", **precision, batch=normal, phase="backward",
         op=None)  # fmt: skip
def narrow_gradient(model, x):
    h = model(x).half()
    return (h.float() * 1e7).mean() + h.float().mean()
