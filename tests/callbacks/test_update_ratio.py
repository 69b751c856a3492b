"""UpdateRatioCallback: updates as large as the weights, and weights that updates do not move."""

import pytest
import torch
from torch import nn

from gradsentinel import (
    Action,
    BeforeClip,
    ConfigurationError,
    Finding,
    Kind,
    Rollback,
    Sentinel,
    SpikeCallback,
    UpdateRatioCallback,
)


def train(run_dir, model, optimizer, callback, *others, steps=60, change=lambda step: None):
    with Sentinel(model, optimizer, callbacks=[callback, *others], run_dir=run_dir) as sentinel:
        for step in sentinel.steps(range(steps)):
            change(step)
            x = torch.randn(8, 6, dtype=next(model.parameters()).dtype)
            sentinel.backward(model(x).square().mean())
            sentinel.step()
    return sentinel


def plain(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6, dtype=dtype))


def told(sentinel):
    return [(i.step, str(i.kind), {t.name for t in i.tensors}) for i in sentinel.incidents]


def test_a_healthy_run_is_quiet(run_dir):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert told(train(run_dir, model, optimizer, UpdateRatioCallback(every=1, warmup=0))) == []


def test_an_update_as_large_as_the_weight(run_dir):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def leap(step):
        optimizer.param_groups[0]["lr"] = 10.0 if step == 40 else 1e-3

    callback = UpdateRatioCallback(every=10, warmup=10)
    sentinel = train(run_dir, model, optimizer, callback, change=leap)
    assert told(sentinel) == [(41, "magnitude", {"0.weight", "1.weight"})]
    assert "step 40 changed" in sentinel.incidents[0].message
    assert all(ratio > 1 for ratio in sentinel.incidents[0].details["ratios"].values())


def test_the_ratio_is_the_true_one(run_dir):
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept = {}

    def remember(step):
        kept[step] = model.weight.detach().clone()

    sentinel = train(
        run_dir,
        model,
        optimizer,
        UpdateRatioCallback(every=5, warmup=0, max_ratio=1e-3),
        steps=3,
        change=remember,
    )
    ratio = float((kept[1] - kept[0]).norm() / kept[0].norm())
    assert sentinel.incidents[0].details["ratios"]["weight"] == pytest.approx(ratio, rel=1e-5)


def test_what_begins_at_zero_is_no_alarm(run_dir):
    model = plain()
    nn.init.zeros_(model[1].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert told(train(run_dir, model, optimizer, UpdateRatioCallback(every=1, warmup=30), steps=60)) == []


def test_weights_that_rounding_keeps_where_they_are(run_dir):
    """bfloat16 has eight bits: an update of a thousandth of the weight is none."""
    model = plain(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sentinel = train(run_dir, model, optimizer, UpdateRatioCallback(every=5, warmup=0))
    assert told(sentinel) == [
        (11, "stagnation", {"0.weight", "1.weight"})
    ]  # the third sample, one step later
    assert sentinel.incidents[0].diagnosis.cause == "precision"


class Attention(nn.Module):
    """The bias of its keys adds the same to all scores of a query, which the softmax takes out again."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        return scores.softmax(-1) @ self.value(x)


class Shift(nn.Module):
    """A bias in a module of its own."""

    def __init__(self, shape):
        super().__init__()
        self.bias = nn.Parameter(torch.full(shape, 0.3))

    def forward(self, x):
        return x + self.bias


def convolutions(norm):
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3), norm(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 64, 4),
    )  # fmt: skip


CANCELLED = {
    "a convolution before BatchNorm": (
        lambda: convolutions(nn.BatchNorm2d),
        (16, 1, 12, 12),
        {"0.bias", "3.bias"},
    ),
    "a convolution before InstanceNorm": (
        lambda: convolutions(nn.InstanceNorm2d),
        (16, 1, 12, 12),
        {"0.bias", "3.bias"},
    ),
    "a linear layer before BatchNorm": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
        (64, 16),
        {"0.bias"},
    ),
    "keys before a softmax": (Attention, (8, 6, 16), {"key.bias"}),
    "a bias alone": (
        lambda: nn.Sequential(
            nn.Linear(16, 32, bias=False), Shift((1, 32)), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        ),
        (64, 16),
        {"1.bias"},
    ),
}


def learn(run_dir, make, shape, *, rate, dtype=torch.float32, steps=40, **settings):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3)
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    callback = UpdateRatioCallback(every=2, warmup=0, max_ratio=1e9, **settings)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for _ in sentinel.steps(range(steps)):
            out = model(torch.randn(shape, dtype=dtype))
            sentinel.backward((out - torch.randn_like(out)).square().mean())
            sentinel.step()
    return {tensor.name for incident in sentinel.incidents for tensor in incident.tensors}


@pytest.mark.parametrize("name", CANCELLED)
def test_a_bias_that_the_next_layer_cancels_is_left_alone(tmp_path, name):
    make, shape, cancelled = CANCELLED[name]
    for dtype in (torch.float32, torch.bfloat16):
        for rate in (0.1, 0.01, 1e-3, 1e-4):
            still = learn(tmp_path / f"{dtype}-{rate}", make, shape, rate=rate, dtype=dtype)
            assert not still & cancelled, (dtype, rate)


def test_a_bias_that_matters_and_stands_still_is_told(run_dir):
    """In bfloat16 all of them stand still, alone in their module or not; a cancelled one is not named."""
    make, shape, _ = CANCELLED["a linear layer before BatchNorm"]
    still = learn(run_dir, make, shape, rate=1e-7, dtype=torch.bfloat16)
    assert {"0.weight", "1.weight", "1.bias", "3.weight"} <= still
    assert "0.bias" not in still


def test_weights_that_stand_still_one_after_the_other_are_all_told(run_dir):
    model = plain()
    rates = [1e-3, 1e-3]
    groups = [{"params": [layer.weight], "lr": 1e-3} for layer in model]
    optimizer = torch.optim.SGD(groups)

    def change(step):
        rates[:] = [1e-30 if step >= 20 else 1e-3, 1e-30 if step >= 40 else 1e-3]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    callback = UpdateRatioCallback(every=5, warmup=0)
    assert told(train(run_dir, model, optimizer, callback, steps=80, change=change)) == [
        (31, "stagnation", {"0.weight"}),
        (51, "stagnation", {"1.weight"}),
    ]


@pytest.mark.parametrize("why", ["no rate", "no gradient", "dropped"])
def test_weights_that_stand_still_for_a_good_reason(run_dir, why):
    model = plain()
    rate = 0.0 if why == "no rate" else 1e-2
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    callback = UpdateRatioCallback(every=1, warmup=0)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        if why == "dropped":
            always = torch.tensor(True)
            sentinel.on(BeforeClip, lambda event: Finding(kind=Kind.CUSTOM, value=always, action=Action.SKIP))
        for _ in sentinel.steps(range(8)):
            sentinel.backward(model(torch.randn(8, 6)).square().mean() * (0 if why == "no gradient" else 1))
            sentinel.step()
    assert "stagnation" not in {str(incident.kind) for incident in sentinel.incidents}


def test_all_weights_are_looked_at_within_the_bound(run_dir):
    model = nn.Sequential(nn.Linear(6, 30), nn.Linear(30, 6), nn.Linear(6, 3))
    total = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    callback = UpdateRatioCallback(every=2, warmup=0, max_elements=70)
    seen, largest = [], []
    take = callback._take

    def watched(run, step):
        sample = take(run, step)
        seen.append({(part.name, place) for part in sample.parts for place in range(part.begin, part.end)})
        largest.append(sum(part.before.numel() for part in sample.parts))
        return sample

    callback._take = watched
    bound = 2 * (-(-total // 70) + 1)
    train(run_dir, model, optimizer, callback, steps=bound)
    assert len(set().union(*seen)) == total
    assert max(largest) <= 70


def test_two_optimizers_and_odd_parameters(run_dir):
    torch.manual_seed(0)
    model = nn.Module()
    model.table = nn.Embedding(20, 4, sparse=True)
    model.phase = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    model.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.odd = nn.Parameter(torch.randn(6, 4).T)
    first = torch.optim.SGD(model.table.parameters(), lr=1e-2)
    second = torch.optim.Adam([model.phase, model.odd, model.empty], lr=1e-2)
    callback = UpdateRatioCallback(every=1, warmup=0)
    with Sentinel(model, [first, second], callbacks=[callback], run_dir=run_dir) as sentinel:
        for number in sentinel.steps(range(20)):
            rows = model.table(torch.randint(0, 20, (8,)))
            loss = (rows @ model.phase.abs()).square().mean() + model.odd.square().sum() + model.empty.sum()
            sentinel.backward(loss)
            sentinel.step(optimizer=[first, second][number % 2] if number > 10 else None)
    assert told(sentinel) == []


def test_a_rollback_between_is_no_update(run_dir):
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    callback = UpdateRatioCallback(every=1, warmup=0, max_ratio=0.5)
    keep, spiky = Rollback(every=5, confirm_after=2), SpikeCallback(action="rollback")
    with Sentinel(model, optimizer, callbacks=[callback, spiky, keep], run_dir=run_dir) as sentinel:
        for number in sentinel.steps(range(60)):
            sentinel.backward(model(torch.randn(8, 6)).square().mean() * (100 if number == 40 else 1))
            sentinel.step()
    assert [str(incident.outcome) for incident in sentinel.incidents] == ["rolled_back"]


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"max_ratio": 0}, {"max_elements": 0}, {"warmup": -1}, {"still_after": 0}]
)
def test_settings_that_cannot_work(wrong):
    with pytest.raises(ConfigurationError):
        UpdateRatioCallback(**wrong)
