"""Healthy formulas of vision, language, diffusion, flows, RL, graphs and contrastive learning.

Each takes h, 6 by 4, from a linear layer; what it returns is summed to the loss. None is an alarm.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

INF = float("inf")
ZERO_ROW = torch.tensor([[0.0], *[[1.0]] * 5])
distributions = torch.distributions


def ddpm(h):
    beta = torch.linspace(1e-4, 0.02, 1000)
    abar = torch.cumprod(1 - beta, 0)
    t = torch.tensor([0, 10, 100, 500, 900, 999])
    x = torch.ones(6, 4)
    xt = abar[t].sqrt()[:, None] * x + (1 - abar[t]).sqrt()[:, None] * 0.3
    pred = (xt - (1 - abar[t]).sqrt()[:, None] * h) / abar[t].sqrt()[:, None]
    return (pred - x).pow(2)


def gcn(h):
    adj = torch.zeros(6, 6)
    adj[0, 1] = adj[1, 0] = adj[2, 3] = adj[3, 2] = 1
    deg = adj.sum(1).clamp(min=1)
    return (deg.rsqrt()[:, None] * adj * deg.rsqrt()[None]) @ h


def infonce(h):
    z = functional.normalize(h, dim=1)
    s = z @ z.T / 0.07
    return functional.cross_entropy(s.masked_fill(torch.eye(6).bool(), -INF), torch.arange(6).roll(1))


def vae(h):
    mu, logvar = h.chunk(2, 1)
    return -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()) + (mu + (0.5 * logvar).exp() * 0.1).pow(2)


def gaussian_nll(h):
    return functional.gaussian_nll_loss(h[:, :2], torch.zeros(6, 2), functional.softplus(h[:, 2:]) + 1e-6)


def coupling(h):
    a, b = h.chunk(2, 1)
    s = torch.tanh(a)
    return (b * s.exp() + a).pow(2) * 0.5 - s


def ppo(h):
    logp = functional.log_softmax(h, 1)[:, 0]
    adv = torch.randn(6)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = (logp - logp.detach()).exp()
    return -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)


def constant_advantages(h):
    r = torch.ones(6)
    a = (r - r.mean()) / (r.std() + 1e-8)
    return functional.log_softmax(h, 1)[:, 0] * a


def entropy(h):
    p = torch.softmax(h * 12, 1)
    return -(p * (p + 1e-12).log()).sum(1)


def soft_tail(h):
    p = torch.softmax(h * 25, 1)
    return p * h


def lr_constant(h):
    return (h * 1e-12).pow(2).sum() / 1e-24 * 0.1


def tiny_scale_div(h):
    s = h * 1e-9
    return s / s.detach().abs().mean()


def tiny_weight_std(h):
    w = h * 1e-6
    return w / (w.var(dim=1, keepdim=True) + 1e-20).sqrt()


def gate_root(h):
    return (torch.relu(h) + 1e-12).sqrt()


def eps_distance(h):
    return ((h[:3] - h[:3]).pow(2).sum(1) + 1e-12).sqrt() + h[3:].sum(1)


def bce_hand(h):
    p = torch.sigmoid(h * 20)
    return -(p + 1e-8).log() - (1 - p + 1e-8).log()


def focal(h):
    p = torch.sigmoid(h)
    return -((1 - p) ** 2) * functional.logsigmoid(h)


def dice(h):
    p = torch.sigmoid(h)
    t = torch.zeros(6, 4)
    return 1 - (2 * (p * t).sum() + 1e-6) / (p.sum() + t.sum() + 1e-6)


def masked_mean(h):
    m = torch.zeros(6, 4)
    m[0] = 1
    return (h * m).sum() / (m.sum() + 1e-9)


def padded_normalise_masked(h):
    z = functional.normalize(h * ZERO_ROW, dim=1)
    return (z @ torch.ones(4)) * ZERO_ROW[:, 0]


def big_cdist(h):
    x = torch.cat([h] * 6) + torch.arange(36.0)[:, None]
    return torch.cdist(x, x)


def stft_loss(h):
    s = torch.stft(h.reshape(-1), 8, 2, window=torch.hann_window(8), return_complex=True)
    return (s.real.pow(2) + s.imag.pow(2)).clamp(min=1e-7).sqrt().log()


def handsoftmax(h):
    e = (h * 8 - (h * 8).amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def handsoftmax2(h):
    e = (h - torch.tensor([40.0] + [0.0] * 5)[:, None]).exp()
    return e / e.sum(1, keepdim=True) * h


def charbonnier(h):
    return (h.pow(2) + 1e-6).sqrt()


def power_mean(h):
    return (torch.sigmoid(h).clamp(min=1e-6)).pow(3).mean(0).pow(1 / 3)


def constant_layer_norm(h):
    return functional.layer_norm(h * ZERO_ROW, (4,))


def dead_batch_norm(h):
    return functional.batch_norm(h * torch.tensor([0.0, 1, 1, 1]), None, None, training=True)


def rms_zero_row(h):
    z = h * ZERO_ROW
    return z * torch.rsqrt(z.pow(2).mean(1, keepdim=True) + 1e-6)


def sinkhorn(h):
    K = torch.exp(-torch.cdist(h, h + 1) / 0.5)
    u = torch.ones(6) / 6
    v = u
    for _ in range(5):
        u = (1 / 6) / (K @ v + 1e-8)
        v = (1 / 6) / (K.T @ u + 1e-8)
    return u[:, None] * K * v


def double_norm_gp(h):
    x = torch.randn(6, 4, requires_grad=True)
    y = (x @ h.T).tanh().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return (g.norm(dim=1) - 1).pow(2)


def cosine_loss(h):
    return 1 - functional.cosine_similarity(h, h.roll(1, 0))


def barlow(h):
    z = (h - h.mean(0)) / (h.std(0) + 1e-5)
    return (z.T @ z / 6 - torch.eye(4)).pow(2)


def vicreg(h):
    return functional.relu(1 - (h.var(0) + 1e-4).sqrt())


def triplet(h):
    return functional.triplet_margin_loss(h[:2], h[2:4], h[4:])


def supcon(h):
    z = functional.normalize(h, dim=1)
    s = z @ z.T / 0.1
    s = s - s.amax(1, keepdim=True).detach()
    e = s.exp() * (1 - torch.eye(6))
    lp = s - (e.sum(1, keepdim=True) + 1e-12).log()
    m = torch.ones(6, 6) - torch.eye(6)
    return -(m * lp).sum(1) / m.sum(1).clamp(min=1)


def edm(h):
    sigma = torch.tensor([0.002, 0.01, 0.1, 1.0, 10.0, 80.0])[:, None]
    sd = 0.5
    return (sd / (sigma**2 + sd**2).sqrt() * h / sigma).pow(2) * 1e-3


def min_snr(h):
    snr = torch.logspace(-6, 4, 6)[:, None]
    return torch.minimum(snr, torch.full_like(snr, 5.0)) / snr * h.pow(2)


def sac(h):
    mu, ls = h.chunk(2, 1)
    std = ls.clamp(-20, 2).exp()
    u = mu + std * 0.3
    a = u.tanh()
    return -0.5 * ((u - mu) / std).pow(2) - ls - (1 - a.pow(2) + 1e-6).log()


def mdn(h):
    pi = functional.log_softmax(h[:, :2], 1)
    mu = h[:, 2:]
    s = functional.softplus(h[:, :2]) + 1e-3
    return -torch.logsumexp(pi - 0.5 * ((1.0 - mu) / s).pow(2) - s.log(), 1)


def mdn_prob(h):
    pi = torch.softmax(h[:, :2], 1)
    mu = h[:, 2:]
    p = (pi * torch.exp(-0.5 * (6.0 - mu).pow(2))).sum(1)
    return -(p + 1e-10).log()


def rational_quadratic(h):
    w = torch.softmax(h, 1) * (1 - 4e-3) + 1e-3
    d = functional.softplus(h) + 1e-3
    return (d / w).log()


def planar(h):
    u = torch.tanh(h)
    return (1 + (1 - u.pow(2)) * 0.3).abs().add(1e-6).log() + u


def gat(h):
    e = functional.leaky_relu(h @ h.T, 0.2)
    m = torch.eye(6).bool() | torch.eye(6).roll(1, 0).bool()
    e = e - e.amax(1, keepdim=True).detach()
    a = e.exp() * m
    return a / (a.sum(1, keepdim=True) + 1e-16) @ h


def sage(h):
    idx = torch.tensor([0, 0, 1, 2])
    agg = torch.zeros(6, 4).index_add(0, idx, h[:4])
    cnt = torch.zeros(6).index_add(0, idx, torch.ones(4))
    return functional.normalize(agg / cnt.clamp(min=1)[:, None] + h, dim=1)


def linear_attention(h):
    q, k = functional.elu(h) + 1, functional.elu(h) + 1
    return q @ (k.T @ h) / ((q * k.sum(0)).sum(1, keepdim=True) + 1e-6)


def weight_decay_tiny(h):
    return h.pow(2).mean() + 1e-12 * h.pow(2).sum()


def tversky(h):
    p = torch.sigmoid(h - 15)
    return 1 - (p.sum() + 1.0) / (p.sum() + 1.0 + 0.3 * p.pow(2).sum())


def huber(h):
    return functional.smooth_l1_loss(h, torch.zeros_like(h), beta=1e-6)


def quant(h):
    s = h.detach().abs().amax() / 127
    return ((h / s).round() - h / s).detach() * s + h


def gumbel(h):
    u = torch.rand(6, 4)
    g = -(-(u + 1e-10).log() + 1e-10).log()
    return torch.softmax((h + g) / 0.5, 1) * h


def ctc(h):
    return functional.ctc_loss(
        functional.log_softmax(h[:, None], 2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
    )


def kl_dists(h):
    return distributions.kl_divergence(
        distributions.Normal(h, functional.softplus(h) + 1e-4),
        distributions.Normal(torch.zeros(6, 4), torch.ones(6, 4)),
    )


def dirichlet(h):
    return torch.distributions.Dirichlet(functional.softplus(h) + 1e-2).log_prob(torch.full((6, 4), 0.25))


def beta_ll(h):
    return torch.distributions.Beta(functional.softplus(h) + 1, functional.softplus(-h) + 1).log_prob(
        torch.full((6, 4), 0.3)
    )


def tanh_normal(h):
    return distributions.TransformedDistribution(
        distributions.Normal(h, 1.0), [distributions.TanhTransform()]
    ).rsample()


def spectral(h):
    return h / torch.linalg.matrix_norm(h, 2)


def orthogonal(h):
    return (h.T @ h - torch.eye(4)).pow(2)


def giou(h):
    a = torch.sigmoid(h)
    x1 = a[:, :2].minimum(a[:, 2:])
    x2 = a[:, :2].maximum(a[:, 2:])
    area = (x2 - x1).prod(1)
    inter = (x2.minimum(x2.roll(1, 0)) - x1.maximum(x1.roll(1, 0))).clamp(min=0).prod(1)
    return 1 - inter / (area + area.roll(1, 0) - inter + 1e-6)


def ssim(h):
    mu, va = h.mean(), h.var()
    t = torch.rand(6, 4)
    return (
        (2 * mu * t.mean() + 1e-4)
        * (2 * ((h - mu) * (t - t.mean())).mean() + 9e-4)
        / ((mu**2 + t.mean() ** 2 + 1e-4) * (va + t.var() + 9e-4))
    )


def clip_norm(h):
    n = h.norm()
    return h * (1.0 / (n + 1e-6)).clamp(max=1.0)


def rot6d(h):
    a = functional.normalize(h[:, :3], dim=1)
    b = h[:, 1:]
    b = functional.normalize(b - (a * b).sum(1, keepdim=True) * a, dim=1)
    return torch.linalg.cross(a, b)


def pinn(h):
    return torch.atan2(h[:, 0], h[:, 1]) + torch.hypot(h[:, 2], h[:, 3])


def relu_rows_normalised(h):
    return functional.normalize(torch.relu(h - ZERO_ROW.logical_not() * 100), dim=1)


def log_clamped_mag(h):
    return torch.log10(torch.clamp(h.abs(), min=1e-10)) * 0 + h


def instance_norm(h):
    return functional.instance_norm((h * ZERO_ROW)[:, None])


def group_norm(h):
    return functional.group_norm(h * ZERO_ROW, 2)


def rms_module(h):
    return functional.rms_norm(h * ZERO_ROW, (4,))


def nerf(h):
    sigma = functional.softplus(h)
    alpha = 1 - torch.exp(-sigma * 0.1)
    T = torch.cumprod(torch.cat([torch.ones(6, 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    w = alpha * T
    return -(w / (w.sum(1, keepdim=True) + 1e-10)) * torch.log(w + 1e-10)


def opaque_nerf(h):
    sigma = functional.relu(h * 100)
    alpha = 1 - torch.exp(-sigma)
    T = torch.cumprod(torch.cat([torch.ones(6, 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return (alpha * T * torch.arange(4.0)).sum(1)


def vq(h):
    code = torch.arange(20.0).reshape(5, 4) / 10
    d = h.pow(2).sum(1, keepdim=True) + code.pow(2).sum(1) - 2 * h @ code.T
    q = code[d.argmin(1)]
    return (q.detach() - h).pow(2) + h + (q - h).detach()


def quaternion(h):
    q = h / (h.norm(dim=1, keepdim=True) + 1e-8)
    return 2 * torch.acos((q * q.roll(1, 0)).sum(1).abs().clamp(max=1 - 1e-6))


def coulomb(h):
    r = torch.cdist(h, h) + torch.eye(6)
    return (1 - torch.eye(6)) / r


def lennard(h):
    r = torch.cdist(h[:, :3], h[:, :3] + 3) + 1
    return (1 / r) ** 12 - (1 / r) ** 6


def poincare(h):
    x = 0.5 * torch.tanh(h)
    y = x.roll(1, 0)
    d = (x - y).pow(2).sum(1)
    a = 1 - x.pow(2).sum(1)
    b = 1 - y.pow(2).sum(1)
    return torch.acosh((1 + 2 * d / (a * b).clamp(min=1e-5)).clamp(min=1 + 1e-6))


def segment_softmax(h):
    idx = torch.tensor([0, 0, 1, 1, 1, 4])
    e = (h[:, 0] - h[:, 0].max().detach()).exp()
    s = torch.zeros(6).index_add(0, idx, e)
    return e / (s[idx] + 1e-16) * h[:, 1]


def moe(h):
    p = torch.softmax(h * 30, 1)
    top, i = p.topk(2, 1)
    top = top / top.sum(1, keepdim=True)
    load = torch.zeros(4).index_add(0, i.flatten(), torch.ones(12)) / 12
    return (top * h.gather(1, i)).sum() + (load * p.mean(0)).sum() * 4


def sparsemax_like(h):
    p = functional.relu(h)
    return p / (p.sum(1, keepdim=True) + 1e-9)


def temperature(h):
    t = torch.tensor(0.01)
    return functional.log_softmax(h / t, 1)[:, 0]


def js(h):
    p, q = torch.softmax(h * 10, 1), torch.softmax(h.roll(1, 0) * 10, 1)
    m = 0.5 * (p + q)
    return (p * ((p + 1e-10) / (m + 1e-10)).log()).sum(1)


def clip_grad_inside(h):
    g = h.detach() * 1e-9
    return h / (g.norm() + 1e-6).clamp(min=1)


def whitening(h):
    z = h - h.mean(0)
    c = z.T @ z / 6 + 1e-4 * torch.eye(4)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(c), z.T, upper=False)


def logdet(h):
    return torch.logdet(h.T @ h + torch.eye(4))


def focal_tail(h):
    p = torch.sigmoid(h * 40).clamp(1e-6, 1 - 1e-6)
    return -((1 - p) ** 0.5) * p.log()


def gem(h):
    return functional.relu(h).clamp(min=1e-6).pow(3).mean(1).pow(1 / 3)


def tanh_log_prob(h):
    a = torch.tanh(h * 10)
    return -torch.log(1 - a * a + 1e-6)


def snr_weight(h):
    a = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[[0, 1, 500, 700, 900, 999]][:, None]
    return ((h - 1) / (1 - a).sqrt()).pow(2) * (1 - a) / a.sqrt()


def wave(h):
    return torch.log1p(h.abs() * 255) / math.log(256) * h.sign()


def spectral_conv(h):
    s = torch.fft.rfft(h, dim=1)
    return torch.fft.irfft(s * 0.5, n=4, dim=1) + (s.abs() + 1e-5).log().sum() * 0.01


def student(h):
    return -distributions.StudentT(3.0, h[:, :2], functional.softplus(h[:, 2:]) + 1e-3).log_prob(
        torch.zeros(6, 2)
    )


def gamma(h):
    return -distributions.Gamma(
        functional.softplus(h[:, :2]) + 1e-2, functional.softplus(h[:, 2:]) + 1e-2
    ).log_prob(torch.full((6, 2), 0.5))


def concrete(h):
    return distributions.RelaxedOneHotCategorical(torch.tensor(0.3), logits=h).rsample()


def categorical(h):
    return distributions.Categorical(probs=torch.softmax(h, 1)).entropy()


def probs_tail(h):
    return -distributions.Categorical(probs=torch.softmax(h * 20, 1)).log_prob(
        torch.zeros(6, dtype=torch.long)
    )


def bernoulli(h):
    return -distributions.Bernoulli(probs=torch.sigmoid(h * 30)).log_prob(torch.ones(6, 4))


def lowrank(h):
    return -distributions.LowRankMultivariateNormal(h, torch.ones(6, 4, 1), torch.full((6, 4), 0.1)).log_prob(
        torch.zeros(6, 4)
    )


def minmax(h):
    return (h - h.amin(1, keepdim=True)) / (h.amax(1, keepdim=True) - h.amin(1, keepdim=True) + 1e-6)


def signed_sqrt(h):
    return h.sign() * (h.abs() + 1e-4).sqrt()


def running_std(h):
    s = torch.tensor([1e-3, 1.0, 10.0, 1e2])
    return h / (s + 1e-8)


def wide_features(h):
    s = torch.tensor([1e-6, 1e-3, 1.0, 1e4])
    return (h * s) / s


def dead_channel_bn(h):
    m = nn.BatchNorm1d(4)
    return m(functional.relu(h - torch.tensor([100.0, 0, 0, 0])))


def mixup(h):
    lam = torch.tensor(1e-7)
    return lam * functional.cross_entropy(h, torch.zeros(6, dtype=torch.long)) + (
        1 - lam
    ) * functional.cross_entropy(h, torch.ones(6, dtype=torch.long))


def rotary(h):
    frequency = 1 / 10000 ** (torch.arange(2) / 2)
    angle = torch.arange(6.0)[:, None] * frequency
    a, b = h.chunk(2, 1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)


def alibi(h):
    slope = 2.0 ** -torch.arange(1.0, 5.0)
    return functional.softmax(h - slope * torch.arange(6.0)[:, None], 1)


def discounted(h):
    return (0.99 ** torch.arange(6) * h.mean(1)).cumsum(0)


def learnt_power(h):
    return (h.abs() + 1e-3) ** functional.softplus(h)


FORMULAS = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
}
