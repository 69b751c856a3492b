"""One dry step lists what can go wrong, is silent about healthy models, and leaves all as it was."""

from __future__ import annotations

import copy
import io
import json
import random

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradsentinel import ConfigurationError, preflight
from gradsentinel.demo.model import CharGPT
from loops import differences, generators

INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min


def check(loss, batch=None, *, model=None, **settings):
    """Run preflight on a linear layer of 4 by 4 and a loss of its output."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4) if model is None else model
    batch = torch.randn(6, 4) if batch is None else batch
    return preflight(model, batch, lambda m, x: loss(m(x)), **settings)


def kinds(report):
    return [risk.kind for risk in report.risks]


# -- healthy -------------------------------------------------------------------------------------------


def causal(h):
    scores = h @ h.T
    return torch.softmax(scores.masked_fill(torch.triu(torch.ones(6, 6), 1).bool(), -INF), -1) @ h


def mean_pooling(h):
    mask = torch.tensor([1, 1, 1, 0, 0, 0])
    return (h * mask[:, None]).sum(0) / mask.sum().clamp(min=1)


HEALTHY = {
    # the benign set of case 28: infinities on purpose, or made and masked inside of kernels
    "causal": causal,
    "added mask": lambda h: torch.softmax(h @ h.T + torch.full((6, 6), -INF).triu(1), -1) @ h,
    "fused attention": lambda h: functional.scaled_dot_product_attention(
        h[None, None], h[None, None], h[None, None], is_causal=True
    ),
    "norm at 0": lambda h: (h * torch.tensor([[0.0], *[[1.0]] * 5])).norm(dim=1),
    "running minimum": lambda h: torch.minimum(torch.full((6,), INF), h.pow(2).sum(1)),
    "logsumexp": lambda h: torch.logsumexp(h[:4].masked_fill(torch.eye(4).bool(), -INF), 1),
    "root of relu": lambda h: (torch.relu(h) + 0).pow(0.5),
    "top k": lambda h: torch.softmax(
        torch.where(h < h.topk(2, 1).values[:, -1:], torch.full_like(h, -INF), h), 1
    ),
    "atan2 at 0": lambda h: torch.atan2(h * 0, h * 0) + h,
    "deviation with eps": lambda h: ((h - h).var(1) + 1e-6).sqrt() + h.sum(1),
    "max pooling": lambda h: functional.max_pool1d(h[None], 3, padding=1),
    # and further ones
    "unselected logarithm": lambda h: torch.where(h > 0, torch.log(h), h),
    "rms norm by hand": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "normalised": functional.normalize,
    "binary cross-entropy": lambda h: functional.binary_cross_entropy(torch.sigmoid(h), torch.ones(6, 4)),
    "kl": lambda h: functional.kl_div(functional.log_softmax(h, -1), torch.softmax(h, -1).detach()),
    "clamped logarithm": lambda h: torch.softmax(h, -1).clamp(min=1e-9).log(),
    "distances": lambda h: torch.cdist(h, h + 1) + functional.pairwise_distance(h, h + 1),
    "mean pooling": mean_pooling,
    "clamped angle": lambda h: torch.acos(functional.cosine_similarity(h, h + 1).clamp(-0.999, 0.999)),
    "exponent": lambda h: h.exp(),
    "finite mask": lambda h: torch.softmax((h @ h.T).masked_fill(torch.eye(6).bool(), LOWEST), -1),
    "masked padding": lambda h: functional.cross_entropy(h, torch.tensor([0, 1, -100, 3, -100, 2])),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_formulas_raise_no_alarm(name):
    point = torch.zeros(1, requires_grad=True)
    if name == "atan2 at 0" and not torch.autograd.grad(torch.atan2(point, point), point)[0].isfinite():
        pytest.skip("in this torch (2.6) the derivative of atan2 at 0 is NaN")
    report = check(lambda h: HEALTHY[name](h).pow(2).mean())
    assert report.risks == ()
    assert report.ok
    assert bool(report)
    assert report.operators > 5


class ResidualBlock(nn.Module):
    def __init__(self, enter: int, leave: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(enter, leave, 3, padding=1, bias=False), nn.BatchNorm2d(leave)
        self.second, self.norm2 = nn.Conv2d(leave, leave, 3, padding=1, bias=False), nn.BatchNorm2d(leave)
        self.short = nn.Conv2d(enter, leave, 1)

    def forward(self, x):
        inner = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.norm2(self.second(inner)) + self.short(x))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def gpt(dtype=None):
    model = CharGPT(vocab=20, width=16, heads=2, layers=2, context=8, dropout=0.1)
    tokens = torch.randint(20, (4, 8))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "weight": torch.ones(4), "id": list("abcd")}

    def forward(model, batch):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return model(**batch).loss

    return model, batch, forward


def transformer():
    pad = torch.zeros(3, 6, dtype=torch.bool)
    pad[0, 4:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    forward = lambda m, b: m(  # noqa: E731
        *b, tgt_mask=mask, src_key_padding_mask=pad, memory_key_padding_mask=pad, tgt_is_causal=True
    )
    batch = (torch.randn(3, 6, 16), torch.randn(3, 6, 16))
    return (
        nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        batch,
        lambda m, b: forward(m, b).square().mean(),
    )


def images():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(ResidualBlock(8, 16), ResidualBlock(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(16, 5)),
    )
    batch = (torch.rand(4, 3, 16, 16), torch.randint(5, (4,)))
    return model, batch, lambda m, b: functional.cross_entropy(m(b[0]), b[1])


def tags():
    tokens = torch.randint(10, (3, 7))
    loss = lambda m, x: functional.cross_entropy(  # noqa: E731
        m(x).transpose(1, 2), x.masked_fill(x == 0, -100)
    )
    return Tagger(), tokens, loss


MODELS = {
    "gpt": gpt,
    "gpt, float16": lambda: gpt(torch.float16),
    "gpt, bfloat16": lambda: gpt(torch.bfloat16),
    "transformer": transformer,
    "images": images,
    "tags": tags,
}


# of nn.Transformer's own fast path
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", MODELS)
def test_healthy_models_raise_no_alarm(name):
    model, batch, forward = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    report = preflight(model, batch, forward, optimizer=optimizer)
    assert report.risks == ()
    assert report.loss == pytest.approx(report.loss)
    assert report.parameters == len(list(model.parameters()))
    assert report.unjudged == 0


# -- what is found -------------------------------------------------------------------------------------


def distance(h):
    return (h[:3] - h[3:]).pow(2).sum(1).sqrt()


def hidden_root(h):
    return torch.where(h > 0, torch.sqrt(h), h)


def masked_row(h):
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[1] = True
    weights = torch.softmax((h @ h.T).masked_fill(mask, -INF), -1)
    return (weights @ h)[[0, 2, 3, 4, 5]]


def two_masks(h):
    mask = torch.full((6, 6), LOWEST).triu(1)
    return torch.softmax(h @ h.T + mask + mask, -1)


FOUND = {
    "root_at_zero": distance,
    "nonfinite_gradient": hidden_root,
    "nonfinite_loss": lambda h: h / (h.sum() * 0),
    "log_of_probability": lambda h: torch.log(torch.softmax(h, -1))[:, 0],
    "division_by_count": lambda h: h.sum() / (torch.arange(6) > 2).sum(),
    "inverse_at_one": lambda h: torch.acos(functional.cosine_similarity(h, h + 1)),
    "near_overflow": lambda h: (h * 0 + 80).exp().log(),
    "near_singularity": lambda h: torch.log(torch.sigmoid(h) * 1e-32),
    "masked_row": lambda h: masked_row(h.detach()).sum() + h,
    "mask_overflow": two_masks,
    "large_gradient": lambda h: h * 1e18,
}


@pytest.mark.parametrize("kind", FOUND)
def test_each_risk_is_found_at_its_line_with_a_remedy(kind):
    report = check(lambda h: FOUND[kind](h).sum())
    assert kind in kinds(report)
    risk = next(risk for risk in report.risks if risk.kind == kind)
    assert risk.remedy
    assert all(risk.remedy)
    if kind != "large_gradient":
        assert risk.source is not None
        assert risk.source.startswith("test_preflight.py:")
        assert risk.op is not None
    assert not report.ok


def test_what_has_happened_is_told_from_what_can_happen():
    pairs = torch.randn(6, 4)
    possible = check(lambda h: distance(h).sum(), pairs)
    assert [(risk.kind, risk.certain) for risk in possible.risks] == [("root_at_zero", False)]
    pairs[5] = pairs[2]  # case 01: a duplicated pair
    happened = check(lambda h: distance(h).sum(), pairs)
    assert [(risk.kind, risk.certain) for risk in happened.risks] == [("nonfinite_gradient", True)]
    (risk,) = happened.risks
    assert risk.source == possible.risks[0].source
    assert "SqrtBackward0" in " ".join(risk.evidence)
    assert "eps under the root" in risk.remedy[0]


def test_an_unselected_branch_is_found_only_where_it_does_harm():
    """Case 02: of three formulas one is harmless."""
    assert check(lambda h: torch.where(h > 0, torch.log(h), h).sum()).ok
    (risk,) = check(lambda h: hidden_root(h).sum()).risks
    assert "mask the input" in risk.remedy[0]
    (risk,) = check(lambda h: torch.where(h < -1e9, torch.exp(h + 200), h).sum()).risks
    assert risk.op == "aten.exp.default"


@pytest.mark.parametrize("weights", [True, False])
def test_a_fully_masked_row_of_attention(weights):
    """Case 03: the fused kernel is safe."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    pad = torch.zeros(3, 4, dtype=torch.bool)
    pad[1] = True

    def forward(model, x):
        out, _ = model(x, x, x, key_padding_mask=pad, need_weights=weights)
        return out[[0, 2]].pow(2).mean()

    report = preflight(attention, torch.randn(3, 4, 8), forward)
    assert report.ok is not weights
    if weights:
        assert report.risks[0].op == "aten._softmax.default"


class Scores(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        with torch.no_grad():
            self.query.weight.mul_(factor)

    def forward(self, x):
        query = self.query(x)
        return torch.softmax(torch.bmm(query, query.transpose(1, 2)) / 4, -1)


@pytest.mark.parametrize(
    ("factor", "expected"), [(1, []), (40, ["near_overflow"]), (400, ["nonfinite_loss"])]
)
def test_attention_scores_in_float16(factor, expected):
    """Case 23: found when they overflow, and told when they are about to."""
    torch.manual_seed(0)
    model = nn.Sequential(Scores(factor))

    def forward(model, x):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return out.float().pow(2).mean()

    report = preflight(model, torch.randn(2, 5, 16), forward)
    assert kinds(report) == expected
    if expected:
        assert report.risks[0].module == "0"
        assert report.risks[0].op == "aten.bmm.default"


def test_constants_that_are_zero_in_their_type():
    model = nn.Linear(4, 4).half()
    batch = torch.randn(6, 4).half()
    norm = lambda h: h.norm(dim=1, keepdim=True)  # noqa: E731
    assert kinds(check(lambda h: (h / (norm(h) + 1e-8)).float().mean(), batch, model=model)) == [
        "vanishing_eps"
    ]
    assert kinds(check(lambda h: (h / norm(h).clamp(min=1e-8)).float().mean(), batch, model=model)) == [
        "vanishing_eps"
    ]
    assert check(lambda h: (h / (norm(h) + 1e-4)).float().mean(), batch, model=model).ok
    assert check(lambda h: (h / (norm(h) + 1e-8)).mean()).ok


def test_an_eps_of_the_optimizer_that_is_zero():
    """Case 14."""
    model = nn.Linear(4, 4).half()
    batch = torch.randn(6, 4).half()
    loss = lambda h: h.float().mean()  # noqa: E731
    bad, good = (torch.optim.Adam(model.parameters(), eps=eps) for eps in (1e-8, 1e-4))
    (risk,) = check(loss, batch, model=model, optimizer=bad).risks
    assert risk.kind == "optimizer_setting"
    assert "eps=1e-08 is 0 in float16" in risk.message
    assert check(loss, batch, model=model, optimizer=good).ok


def test_sums_and_losses_in_sixteen_bits():
    model = nn.Linear(4, 4).bfloat16()
    report = check(lambda h: h.sum(), torch.randn(1024, 4).bfloat16(), model=model)
    assert set(kinds(report)) == {"narrow_reduction", "narrow_loss"}
    assert "4096 terms" in report.risks[0].message + report.risks[1].message
    assert check(lambda h: h.float().sum(), torch.randn(1024, 4).bfloat16(), model=model).ok


class Neglected(nn.Module):
    """Half of it is not used, one parameter was never written, one buffer is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fresh = nn.Parameter(torch.full((3,), 1e20))
        self.bad = nn.Parameter(torch.tensor([1.0, NAN]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("stale", torch.tensor([NAN]))

    def forward(self, x):
        return self.used(x)


def test_parameters_buffers_and_what_gets_no_gradient():
    model = Neglected()
    report = check(lambda h: h.mean(), model=model, optimizer=torch.optim.SGD(model.used.parameters(), 0.1))
    found = {risk.kind: risk for risk in report.risks}
    assert found.keys() == {
        *("nonfinite_parameter", "nonfinite_buffer", "uninitialised_parameter", "no_gradient", "not_stepped"),
    }
    unused = {"unused.weight", "unused.bias", "fresh", "bad"}
    assert set(found["no_gradient"].names) == set(found["not_stepped"].names) == unused
    assert "stale" in found["nonfinite_buffer"].message
    assert "bad holds 1 non-finite of 2" in found["nonfinite_parameter"].message


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (lambda m, x: m(x), "not_run", "a tensor with one element"),
        (lambda m, x: None, "not_run", "must return the loss"),
        (None, "not_run", "returns no loss"),
        (lambda m, x: m(x).mean().detach(), "no_gradient", "depends on no parameter"),
        (lambda m, x: m(x.reshape(3, 8)).mean(), "raises", "RuntimeError"),
    ],
)
def test_a_step_that_cannot_be_made(forward, kind, words):
    (risk,) = preflight(nn.Linear(4, 4), torch.randn(6, 4), forward).risks
    assert (risk.kind, risk.certain) == (kind, True)
    assert words in risk.message
    assert kind != "raises" or risk.source.startswith("test_preflight.py:")


def test_numbers_that_cannot_be_looked_up_are_named():
    model = nn.Embedding(5, 4)
    batch = {"input_ids": torch.tensor([[1, 2], [0, 7]])}
    report = preflight(model, batch, lambda m, b: m(b["input_ids"]).mean())
    assert kinds(report) == ["raises", "bad_batch"]
    assert "input_ids[1, 1] is 7, outside 0 to 4" in report.risks[1].message


def test_a_nan_in_the_batch_is_blamed_on_the_data():
    batch = torch.randn(6, 4)
    batch[2, 1] = NAN
    (risk,) = check(lambda h: h.mean(), batch).risks
    assert risk.kind == "nonfinite_loss"
    assert "batch" in " ".join(risk.evidence)


@pytest.mark.parametrize("model", [nn.LazyLinear(4), nn.Linear(4, 4, device="meta")], ids=["lazy", "meta"])
# of torch: lazy modules are a feature under development
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_model_that_holds_nothing_yet_is_not_touched(model):
    report = preflight(model, torch.randn(6, 4), lambda m, x: m(x).mean())
    assert kinds(report) == ["not_initialised"]
    assert report.loss is None
    assert torch.nn.parameter.is_lazy(model.weight) or model.weight.device.type == "meta"


def test_the_same_risk_in_every_layer_is_told_once():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return h / h.pow(2).sum(-1, keepdim=True).sqrt()

    model = nn.Sequential(*(Layer() for _ in range(5)))
    (risk,) = check(lambda h: h.sum(), model=model).risks
    assert risk.kind == "root_at_zero"
    assert risk.names == tuple(str(number) for number in range(5))
    assert "0, 1, 2 and 2 more" in str(check(lambda h: h.sum(), model=model))


# -- left as it was ------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Changes whatever a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.count, self.history, self.cache = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.history.append(self.count)
        self.cache = x.sum()
        x.mul_(1.5)
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - the global one
        return self.drop(self.norm(self.linear(x))) * noise


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("poison", [1.0, NAN], ids=["healthy", "traced"])
def test_everything_is_as_it_was(training, poison):
    model = Busy().train(training)
    model.linear.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(6, 4)
    model(batch.clone()).sum().backward()
    optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    fired = []
    model.linear.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))

    def everything():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            "flags": [(m.training, [p.requires_grad for p in m.parameters()]) for m in model.modules()],
            "plain": [model.count, list(model.history), model.cache],
            "batch": batch,
            "generators": generators(),
            "hooks": [
                [
                    len(getattr(m, name))
                    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
                ]
                for m in model.modules()
            ],
            "grad mode": torch.is_grad_enabled(),
        }

    before = copy.deepcopy(everything())
    versions = [p._version for p in model.parameters()]
    report = preflight(model, batch, lambda m, x: m(x).sum() * poison, optimizer=optimizer)
    assert report.ok is (poison == 1.0)
    assert differences(before, everything()) == []
    assert [p._version for p in model.parameters()] == versions
    assert {name: p.grad for name, p in model.named_parameters()} == gradients or all(
        p.grad is gradients[name] for name, p in model.named_parameters()
    )
    assert fired == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_models_of_every_kind():
    pair = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)}
    assert preflight(pair, torch.randn(3, 4), lambda m, x: m["b"](m["a"](x)).mean()).ok
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert preflight(tied, torch.randn(3, 4), lambda m, x: m(x).mean()).ok
    sparse = nn.EmbeddingBag(10, 4, sparse=True)
    assert preflight(sparse, torch.randint(10, (3, 4)), lambda m, x: m(x).pow(2).mean()).ok
    waves = nn.ParameterDict({"w": nn.Parameter(torch.randn(4, dtype=torch.complex64))})
    assert preflight(waves, torch.randn(3, 4), lambda m, x: (m["w"] * x).abs().mean()).ok
    with pytest.raises(ConfigurationError, match="no parameter"):
        preflight(nn.ReLU(), torch.randn(3))
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Module"):
        preflight(torch.randn(3), torch.randn(3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_either_kind(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(model, x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).mean()

    assert preflight(model, torch.randn(6, 4), forward).risks == ()
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_returns_its_own_loss_needs_no_forward():
    model, batch, _ = gpt()
    assert preflight(model, batch).loss == pytest.approx(3.0, abs=0.3)


# -- the report ----------------------------------------------------------------------------------------


def test_the_report_as_text_as_data_and_on_a_terminal():
    report = check(lambda h: (distance(h) + torch.log(torch.softmax(h, -1))[:3, 0]).sum())
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["ok"] is False
    assert [risk["kind"] for risk in data["risks"]] == ["root_at_zero", "log_of_probability"]
    assert {"message", "remedy", "module", "op", "source", "code"} <= data["risks"][0].keys()
    assert "preflight: 2 risk(s)" in str(report)
    assert "test_preflight.py:" in str(report)
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(report)
    shown = console.file.getvalue()
    assert "log_softmax" in shown
    assert max(len(line) for line in shown.splitlines()) <= 60
    healthy = check(lambda h: h.mean())
    assert str(healthy).startswith("preflight: nothing found")
    assert json.loads(json.dumps(healthy.as_dict()))["risks"] == []


def test_the_package_offers_it():
    import gradsentinel  # noqa: PLC0415 - as a user writes it
    from gradsentinel.risks.preflight import preflight as same  # noqa: PLC0415

    assert gradsentinel.preflight is same
