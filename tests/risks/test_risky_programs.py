"""What is close to a singularity is told with its line and its numbers, and its remedy is one."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from gradsentinel import preflight
from gradsentinel.risks.watcher import Watcher

ZERO_ROW = torch.tensor([[0.0], *[[1.0]] * 5])
TINY_ROW = torch.tensor([[1e-12], *[[1.0]] * 5])
ZERO = torch.tensor([0.0, 1.0, 1.0, 1.0])
TINY = torch.tensor([1e-12, 1.0, 1.0, 1.0])
ONE_OF_MANY = torch.ones(300, 1).index_fill(0, torch.tensor([7]), 0.0)


def check(formula, *, dtype=torch.float32, model=None, reduce=torch.sum, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype) if model is None else model
    return preflight(
        model, torch.randn(6, 4).to(dtype), lambda m, x: reduce(formula(m(x)).float()), **settings
    )


def norm(h):
    return h.norm(dim=1, keepdim=True)


def many(h):
    return torch.cat([h] * 50) * ONE_OF_MANY


def centred(h):
    return h - h.mean(1, keepdim=True)


ROW = lambda h: h * ZERO_ROW  # noqa: E731 - a row of zeros
NEAR = {
    # each with an eps, and the one at which it fails; the remedy names another
    "a divisor of 1e-12 among ones": (lambda h, eps: h / (h.detach() * 0 + TINY).clamp(min=eps), 1e-13),
    "a computed divisor": (lambda h, eps: h / (h.abs() * TINY + eps), 0.0),
    "a row of zeros, eps in the divisor": (lambda h, eps: ROW(h) / (norm(ROW(h)) + eps), 1e-12),
    "a row of zeros, the norm clamped": (lambda h, eps: ROW(h) / norm(ROW(h)).clamp(min=eps), 1e-10),
    "a row of zeros, eps in a tensor": (
        lambda h, eps: ROW(h) / torch.maximum(norm(ROW(h)), torch.tensor(eps)),
        1e-10,
    ),
    "a row of zeros, normalize": (lambda h, eps: functional.normalize(ROW(h), dim=1, eps=eps), 1e-12),
    "a row of zeros, cosine": (
        lambda h, eps: functional.cosine_similarity(ROW(h), h.detach() + 1, eps=eps),
        1e-8,
    ),
    "a row that is tiny": (lambda h, eps: functional.normalize(h * TINY_ROW, dim=1, eps=eps), 1e-30),
    "equal values over their deviation": (
        lambda h, eps: centred(ROW(h)) / (centred(ROW(h)).std(1, keepdim=True) + eps),
        1e-8,
    ),
    "equal values over their variance": (
        lambda h, eps: centred(ROW(h)) / (ROW(h).var(1, keepdim=True) + eps),
        1e-9,
    ),
    "equal values over a root": (
        lambda h, eps: centred(ROW(h)) / (ROW(h).var(1, keepdim=True) + eps**2).sqrt(),
        1e-8,
    ),
    "the mean square by rsqrt": (
        lambda h, eps: ROW(h) * (ROW(h).pow(2).mean(1, keepdim=True) + eps**2).rsqrt(),
        1e-7,
    ),
    "equal tensors": (lambda h, eps: (h - h.detach()) / (norm(h - h.detach()) + eps), 1e-10),
    "one row of 300, mean": (lambda h, eps: (many(h) / (norm(many(h)) + eps) - 1).pow(2).mean(), 1e-12),
    "one row of 300, contrastive": (
        lambda h, eps: functional.cross_entropy(
            functional.normalize(many(h), dim=1, eps=eps) @ functional.normalize(h, dim=1).T,
            torch.arange(300) % 6,
        ),
        1e-12,
    ),
    "a slope": (lambda h, eps: (h[:, 1] - h[:, 0]) / (h[:, 3] - h[:, 3].detach() + eps), 1e-7),
    "a single divisor": (lambda h, eps: h.mean() / (h.var() * 1e-14 + eps), 0.0),
    "in place": (lambda h, eps: (h * 1).div_(h.abs() * TINY + eps), 0.0),
    "addcdiv": (lambda h, eps: torch.addcdiv(h, h, h.abs() * TINY + eps), 0.0),
    "reciprocal": (lambda h, eps: (h.abs() * TINY + eps).reciprocal() * h, 0.0),
    "a root": (lambda h, eps: (h.abs() * torch.tensor([1e-14, 1, 1, 1]) + eps).sqrt(), 0.0),
    "a root with too small an eps": (lambda h, eps: (h.abs() * ZERO + eps).sqrt(), 1e-20),
    "a power of 0.3": (lambda h, eps: (h.abs() * TINY + eps).pow(0.3), 0.0),
    "a cube root": (lambda h, eps: (h.abs() * TINY + eps) ** (1 / 3), 0.0),
    "a power of -0.5": (lambda h, eps: (h.abs() * TINY + eps) ** -0.5, 0.0),
    "a logarithm": (lambda h, eps: (h.abs() * TINY + eps).log(), 0.0),
    "a logarithm with too small an eps": (lambda h, eps: (h.abs() * ZERO + eps).log(), 1e-10),
    "a logarithm to base 2": (lambda h, eps: torch.log2(h.abs() * TINY + eps), 0.0),
    "log1p near -1": (
        lambda h, eps: torch.log1p((h.abs() * torch.tensor([1e-7, 1, 1, 1]) - 1).clamp(min=-1 + eps)),
        1e-7,
    ),
    "logit": (lambda h, eps: torch.logit((h.abs() * TINY / 9).clamp(eps, 0.9)), 1e-30),
    "xlogy": (lambda h, eps: torch.xlogy(torch.ones(6, 4), (h.abs() * TINY).clamp(min=eps)), 1e-30),
    "erfinv": (lambda h, eps: torch.erfinv((h * 0.1 + ZERO.sub(1).abs()).clamp(-1 + eps, 1 - eps)), 1e-7),
    "layer norm": (lambda h, eps: functional.layer_norm(ROW(h), (4,), eps=eps), 1e-12),
    "group norm": (lambda h, eps: functional.group_norm(ROW(h), 2, eps=eps), 1e-15),
    "batch norm": (lambda h, eps: functional.batch_norm(h * ZERO, None, None, training=True, eps=eps), 1e-14),
    "batch norm in evaluation": (
        lambda h, eps: functional.batch_norm(h, torch.zeros(4), ZERO, training=False, eps=eps),
        1e-12,
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_close_to_a_singularity(name):
    formula, eps = NEAR[name]
    report = check(lambda h: formula(h, eps))
    assert {risk.kind for risk in report.risks} == {"near_singularity"}
    assert report.unjudged == 0
    for risk in report.risks:
        assert not risk.certain
        assert risk.source.startswith("test_risky_programs.py:")
        assert re.search(r"\de-\d\d|\de\+\d\d", risk.message)
        assert "place(s)" in risk.message or "divide" in risk.message
    better = float(re.search(r"1e-\d+", report.risks[0].remedy[0])[0])
    assert better > eps
    assert check(lambda h: formula(h, better)).risks == ()


def test_the_numbers_are_those_of_the_tensor():
    (risk,) = check(lambda h: h / (h.detach() * 0 + TINY)).risks
    assert risk.message == (
        "divides by 1e-12, while 1 is typical (6 of 24 place(s)): the gradient is multiplied by 1e+12 there"
    )
    assert risk.remedy == ("make the divisor safe: x / (y + 1e-4), or y.clamp(min=1e-4)",)
    assert risk.op == "aten.div.Tensor"


OTHERWISE = {
    # kind, what is wrong, and what its remedy says
    "root_at_zero": (lambda h: h.pow(2).sum(1).sqrt(), lambda h: (h.pow(2).sum(1) + 1e-8).sqrt()),
    "root_at_zero, norm": (lambda h: h.pow(2).sum(1).sqrt(), lambda h: torch.linalg.vector_norm(h, dim=1)),
    "root_at_zero, clamped": (
        lambda h: (h @ h.T + 9).clamp(min=0).sqrt(),
        lambda h: (h @ h.T + 9).clamp(min=1e-8).sqrt(),
    ),
    "inverse_at_one, clamped": (
        lambda h: torch.acos((h / 9).clamp(-1, 1)),
        lambda h: torch.acos((h / 9).clamp(-1 + 1e-6, 1 - 1e-6)),
    ),
    "inverse_at_one, asin": (
        lambda h: torch.asin(h / 9 + 0.01),
        lambda h: torch.asin((h / 9 + 0.01).clamp(-1 + 1e-6, 1 - 1e-6)),
    ),
    "inverse_at_one, acosh": (
        lambda h: torch.acosh(1.0001 + h.pow(2) * 1e-4),
        lambda h: torch.acosh((1.0001 + h.pow(2) * 1e-4).clamp(min=1 + 1e-6)),
    ),
    "log_of_probability, 1 - p": (
        lambda h: torch.log(1 - torch.sigmoid(h)),
        lambda h: functional.logsigmoid(-h),
    ),
    "log_of_probability, log1p": (
        lambda h: torch.log1p(-torch.sigmoid(h)),
        lambda h: functional.logsigmoid(-h),
    ),
    "division_by_count": (
        lambda h: h.sum() / (torch.arange(6) > 2).sum(),
        lambda h: h.sum() / (torch.arange(6) > 2).sum().clamp(min=1),
    ),
    "near_singularity, atan2": (
        lambda h: torch.atan2(h[:, 0] * TINY_ROW[:, 0], h[:, 1] * TINY_ROW[:, 0]),
        lambda h: torch.atan2(h[1:, 0], h[1:, 1]),
    ),
    "near_singularity, angle": (
        lambda h: torch.complex(h[:, 0] * TINY_ROW[:, 0], h[:, 1] * TINY_ROW[:, 0]).angle(),
        lambda h: torch.complex(h[1:, 0], h[1:, 1]).angle(),
    ),
    "near_singularity, weight norm": (
        lambda h: torch._weight_norm(h * TINY_ROW, torch.ones(6, 1), 0),
        lambda h: torch._weight_norm(h, torch.ones(6, 1), 0),
    ),
    "near_singularity, tan": (
        lambda h: torch.tan(1.5707963 - h.abs() * (TINY + 1e-7)),
        lambda h: torch.tan(0.5 - h.abs() * (TINY + 1e-7) * 0.1),
    ),
    "near_singularity, clamped at 0": (
        lambda h: (h + 9).clamp(min=0).log(),
        lambda h: (h + 9).clamp(min=1e-4).log(),
    ),
    "near_singularity, a number": (lambda h: h / 1e-12, lambda h: (h * 1e-12) / 1e-12),
    "near_singularity, counts by log": (
        lambda h: torch.xlogy(torch.ones(6, 4, dtype=torch.long), h.abs() * TINY),
        lambda h: torch.xlogy(torch.ones(6, 4, dtype=torch.long), (h.abs() * TINY).clamp(min=1e-4)),
    ),
    "near_overflow": (lambda h: (h * 0 + 80).exp().log(), lambda h: torch.logsumexp(h * 0 + 80, 1)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_remedy_of_each_other_kind(name):
    wrong, right = OTHERWISE[name]
    (risk,) = check(wrong).risks
    assert risk.kind == name.partition(",")[0]
    assert risk.source.startswith("test_risky_programs.py:")
    assert re.search(r"\d", risk.message)
    assert check(right).risks == ()


@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.float16, 1e-4), (torch.bfloat16, 1e-6), (torch.float64, 1e-12)]
)
def test_how_much_is_bearable_depends_on_the_type(dtype, bad):
    formula = lambda h, eps: (h * ZERO_ROW.to(dtype)) / (norm(h * ZERO_ROW.to(dtype)) + eps)  # noqa: E731
    (risk,) = check(lambda h: formula(h, bad), dtype=dtype).risks
    assert risk.kind == "near_singularity"
    better = float(re.search(r"1e-\d+", risk.remedy[0])[0])
    assert check(lambda h: formula(h, better), dtype=dtype).ok
    assert check(lambda h: functional.layer_norm(h * ZERO_ROW.to(dtype), (4,)), dtype=dtype).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_clamp_of_an_arc_that_the_type_can_hold(dtype):
    (risk,) = (
        check(lambda h: torch.acos(h / 9), dtype=dtype).risks
        or check(lambda h: torch.acos(h / 9 + 0.01), dtype=dtype).risks
    )
    step = float(re.search(r"1 - (1e-\d+)", risk.remedy[0])[1])
    assert check(lambda h: torch.acos((h / 9).clamp(-1 + step, 1 - step)), dtype=dtype).ok
    assert not check(lambda h: torch.acos((h / 9).clamp(-1 + 1e-7, 1 - 1e-7)), dtype=dtype).ok


def test_under_autocast_and_compiled_and_frozen_and_tied():
    formula, eps = NEAR["a row of zeros, eps in the divisor"]

    def forward(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return formula(model(x), 1e-6).float().sum()

    found = {
        "autocast": preflight(nn.Linear(4, 4), torch.randn(6, 4), forward),
        "compiled": check(lambda h: formula(h, eps), model=torch.compile(nn.Linear(4, 4), backend="eager")),
    }
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    found["frozen"] = check(lambda h: formula(h, eps), model=frozen)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    found["tied"] = check(lambda h: formula(h, eps), model=tied)
    for report in found.values():
        assert [risk.kind for risk in report.risks] == ["near_singularity"]


def test_what_no_gradient_comes_back_to_is_no_alarm():
    """A mask, a selection and a loss that leaves them out; the same without the mask is one."""
    divided = lambda h: h / (h.detach() * 0 + TINY)  # noqa: E731
    assert not check(divided).ok
    assert check(lambda h: divided(h) * ZERO).ok
    assert check(lambda h: torch.where(ZERO > 0, divided(h), h)).ok
    assert check(lambda h: divided(h)[:, 1:]).ok
    assert check(lambda h: h + divided(h).detach()).ok


def test_what_does_not_drown_the_gradient_is_no_alarm():
    """The same elements, weighted by less than what their derivative has more."""
    weight = torch.tensor([1e-12, 1.0, 1.0, 1.0])
    assert check(lambda h: h / (h.detach() * 0 + TINY) * weight).ok
    small = lambda h: (h / (h.detach() * 0 + TINY)).sum() * 1e-12  # noqa: E731
    assert not check(small).ok
    assert check(lambda h: small(h) + h.sum()).ok  # what else there is is as large


class Noisy(nn.Module):
    """A loss that a second pass changes if it leaves anything behind."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.kept = []

    def forward(self, x):
        h = self.drop(self.norm(self.linear(x)))
        out = h * ZERO_ROW
        return (out / (norm(out) + 1e-12) - 1).pow(2).mean()


def test_the_second_pass_leaves_nothing_behind():
    torch.manual_seed(0)
    model, batch = Noisy(), torch.randn(6, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (preflight(model, batch, lambda m, x: m(x)) for _ in range(2))
    assert [risk.kind for risk in first.risks] == ["near_singularity"]
    assert first.risks == second.risks
    assert first.loss == second.loss
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_graph_that_the_program_keeps_is_let_go(monkeypatch):
    hooks, release = [], Watcher.release

    def released(self):
        hooks.append(len(self._hooks))
        release(self)
        assert self._hooks == []

    monkeypatch.setattr(Watcher, "release", released)
    assert not check(lambda h: h / (h.detach() * 0 + TINY)).ok
    assert hooks == [1, 1]  # of the step, and of the step without those elements


def test_a_judgement_that_fails_is_counted_and_harms_nothing(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such operator on this device")

    monkeypatch.setattr("gradsentinel.risks.effect.Effect.on", broken)
    report = check(lambda h: h / (h.detach() * 0 + TINY))
    assert report.risks == ()
    assert report.unjudged == 1
    monkeypatch.undo()
    monkeypatch.setattr(Watcher, "settle", broken)
    report = check(lambda h: h / (h.detach() * 0 + TINY))
    assert [risk.kind for risk in report.risks] == ["near_singularity"]
    assert report.unjudged == 1


def test_the_report_of_a_near_singularity():
    report = check(lambda h: NEAR["layer norm"][0](h, 1e-12))
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    (risk,) = data["risks"]
    assert risk["kind"] == "near_singularity"
    assert "layer_norm with eps=1e-12 divides 1 of 6" in risk["message"]
    assert "eps=1e-5" in risk["remedy"][0]
    assert risk["code"].startswith('"layer norm": (')
    assert "multiplied by 1e+06" in str(report)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(report)
    assert "multiplied by 1e+06" in console.file.getvalue()
