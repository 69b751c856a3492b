"""Warned before a value overflows, at no cost between the samples, and silent in a healthy run."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional

from gradsentinel import (
    Action,
    ConfigurationError,
    HeadroomCallback,
    Kind,
    NanCallback,
    Sentinel,
    Skip,
    TensorBoardCallback,
)
from gradsentinel.callbacks.peaks import ACTIVATION, GRADIENT, LOGITS, PRODUCT
from gradsentinel.demo.model import CharGPT
from loops import build, differences, finish, generators, make_batches, train_by_hand, train_watched


@pytest.fixture(autouse=True)
def nothing_compiled(request, monkeypatch):
    """Other tests of this process may have compiled something."""
    if "compiled" not in request.node.name:
        monkeypatch.setattr("gradsentinel.callbacks.peaks.anything_compiled", lambda: False)


class Attention(nn.Module):
    """Single-head attention whose scores grow with `factor`, in the dtype of its input."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.fused = fused
        self.factor = 1.0

    def forward(self, x):
        query, key = self.query(x) * self.factor, self.key(x)
        if self.fused:
            heads = [t.view(2, 5, 2, 8).transpose(1, 2) for t in (query, key, x)]
            return functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 5, 16)
        scores = query @ key.transpose(-2, -1) / 4
        return scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.attn = Attention(fused=fused)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.attn(x)).float().square().mean()


def train(model, callback, run_dir, *, steps, before=None, autocast=None, more=(), scaler=None, watch=None):
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    batches = [torch.randn(2, 5, 16) for _ in range(steps)]
    callbacks = [callback, *more]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, scaler=scaler) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches)):
            if before is not None:
                before(number)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(batch)
            sentinel.backward(loss)
            if watch is not None:
                watch(number)
            sentinel.step()
    return sentinel


def test_growing_attention_logits_are_announced_before_they_overflow(run_dir):
    """Logits grow for hundreds of steps before they kill a float16 run."""
    model = Model()
    doubling = 12

    def grow(number):
        model.attn.factor = 20.0 * 2.0 ** (number / doubling)

    callback = HeadroomCallback(every=20, horizon=100)
    sentinel = train(
        model,
        callback,
        run_dir,
        steps=160,
        before=grow,
        autocast=torch.float16,
        more=[NanCallback(), Skip(max_skips=100)],
    )
    first = sentinel.incidents[0]
    fatal = next(i for i in sentinel.incidents if i.action > Action.WARN)
    assert (first.kind, first.action, first.diagnosis.module) == (Kind.MAGNITUDE, Action.WARN, "attn")
    assert first.diagnosis.cause == "precision"
    assert first.step < fatal.step - doubling
    promised = int(first.message.split("about ")[1].split(" steps")[0])
    assert first.step + promised == pytest.approx(fatal.step, abs=2.5 * doubling)
    assert "attn" in first.message
    assert any("query" in line or "float32" in line for line in first.diagnosis.remedy)


@pytest.mark.parametrize(
    ("value", "dtype", "warned"),
    [
        (40000.0, torch.float16, True),
        (-40000.0, torch.float16, True),
        (20000.0, torch.float16, False),
        (40000.0, torch.float32, False),
        (40000.0, torch.bfloat16, False),
        (2e38, torch.bfloat16, True),
    ],
)
def test_little_headroom_is_told_at_once(value, dtype, warned, run_dir):
    class Large(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0 + value

    model = nn.Sequential(Large(16, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with Sentinel(model, optimizer, callbacks=[HeadroomCallback()], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(2, 16, dtype=dtype) for _ in range(3)]):
            sentinel.backward((model(batch) * 1e-6).float().sum() * 1e-34)
            sentinel.step()
    assert [i.kind for i in sentinel.incidents] == [Kind.MAGNITUDE] * warned
    if warned:
        (incident,) = sentinel.incidents
        assert incident.action is Action.WARN
        assert incident.where == "0"
    assert sentinel.applied_steps == 3


def sites_of(callback):
    return {(forecast.site.name, forecast.site.what): forecast for forecast in callback.forecasts()}


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_measured_and_how_large_it_was(fused, run_dir):
    model = Model(fused=fused)
    callback = HeadroomCallback(every=2)
    seen = {}

    def keep(module, args, output):
        seen[module] = float(output.detach().abs().max())

    model.attn.query.register_forward_hook(keep)
    model.head.register_forward_hook(keep)
    last = {}
    train(model, callback, run_dir, steps=3, watch=lambda number: last.update(seen))
    found = sites_of(callback)
    assert found["attn.query", ACTIVATION].value == pytest.approx(last[model.attn.query])
    assert found["head", ACTIVATION].value == pytest.approx(last[model.head])
    assert found["head", GRADIENT].value > 0
    assert found["attn", LOGITS].value > 0
    assert (("attn", PRODUCT) in found) is not fused
    assert ("", ACTIVATION) in found
    if fused:  # a bound: the longest query times the longest key
        assert found["attn", LOGITS].value >= 0.2


def test_under_autocast_the_type_it_computes_in_is_the_limit(run_dir):
    model = Model()
    callback = HeadroomCallback(every=1)
    train(model, callback, run_dir, steps=2, autocast=torch.float16)
    found = sites_of(callback)
    assert found["attn", LOGITS].site.dtype is torch.float16  # autocast softens softmax to float32
    assert found["attn", PRODUCT].site.dtype is torch.float16
    assert found["attn.query", ACTIVATION].site.limit == 65504


def test_hooks_are_on_the_modules_in_sampled_steps_only(run_dir):
    model = Model()
    counts = []

    def count(number):
        modules = list(model.modules())
        counts.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules))

    train(model, HeadroomCallback(every=4), run_dir, steps=10, before=count)
    assert [bool(number) for number in counts] == [step % 4 == 0 for step in range(10)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_evaluation_between_the_steps_is_not_measured(run_dir):
    model = Model()

    def evaluate(number):
        with torch.no_grad():
            model(torch.randn(2, 5, 16) * 1e6)

    callback = HeadroomCallback(every=1)
    train(model, callback, run_dir, steps=3, before=evaluate)
    assert sites_of(callback)["attn.query", ACTIVATION].value < 1e3


def test_the_sample_rate_rises_when_little_is_left(run_dir):
    model = Model()
    with torch.no_grad():
        model.attn.key.weight.mul_(2000)
    callback = HeadroomCallback(every=20)
    train(model, callback, run_dir, steps=30, autocast=torch.float16)
    trend = callback._trends[sites_of(callback)["attn.key", ACTIVATION].site]
    steps = [step for step, _ in trend.samples]
    assert min(b - a for a, b in itertools.pairwise(steps)) == 2


def test_the_curves_are_in_tensorboard(run_dir):
    model = Model()
    more = [TensorBoardCallback()]
    callback = HeadroomCallback(every=3, show=4)
    train(model, callback, run_dir, steps=10, more=more)
    found = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    found.Reload()
    names = [tag for tag in found.Tags()["scalars"] if tag.startswith("gradsentinel/headroom/")]
    assert {"gradsentinel/headroom/activation", "gradsentinel/headroom/logits"} <= set(names)
    assert [event.step for event in found.Scalars("gradsentinel/headroom/activation")] == [0, 3, 6, 9]
    single = [name for name in names if name.count("/") > 2]
    assert len(single) >= 4
    smallest = min(found.Scalars(name)[-1].value for name in names if "overflow_in" not in name)
    assert smallest == pytest.approx(callback.forecasts()[0].doublings, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"autocast": torch.float16, "scale": 2.0**10},
        {"autocast": torch.bfloat16, "accumulate": 3},
        {"optimizer": "adamw-fused", "two_optimizers": True, "ema": True},
    ],
)
def test_a_healthy_run_is_bit_identical(settings, run_dir):
    batches = make_batches(12)
    reference = build(random=True, max_norm=1.0, **settings)
    train_by_hand(reference, batches)
    expected = {**reference.state(), "losses": reference.losses, "generators": generators()}
    watched = build(random=True, max_norm=1.0, **settings)
    callback = HeadroomCallback(every=2)
    with watched.sentinel([callback], run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
    assert sentinel.incidents == ()
    assert callback.forecasts()
    found = {**watched.state(), "losses": watched.losses, "generators": generators()}
    assert differences(found, expected) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_transformer_is_bit_identical_with_recomputation_too(checkpointed, run_dir):
    def train_it(callbacks):
        torch.manual_seed(0)
        model = CharGPT(vocab=11, width=16, heads=2, layers=2, context=8, dropout=0.1)
        if checkpointed:
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda *a, inner=inner: torch.utils.checkpoint.checkpoint(
                    inner, *a, use_reentrant=False
                )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        data = torch.Generator().manual_seed(1)
        with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
            for ids in sentinel.steps([torch.randint(11, (4, 8), generator=data) for _ in range(6)]):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(ids, ids.roll(-1, 1)).loss
                sentinel.backward(loss)
                sentinel.step(max_norm=1.0)
        assert sentinel.incidents == ()
        return model.state_dict()

    callback = HeadroomCallback(every=1)
    assert differences(train_it([NanCallback(), callback]), train_it([NanCallback()])) == []
    assert callback._trends[callback.forecasts()[0].site].samples
    assert ("blocks.0.attn", PRODUCT) in sites_of(callback)


def test_gradients_under_a_scaler_are_shown_and_not_judged(run_dir):
    """The scaler drives them towards the limit on purpose."""
    model = Model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=1000)
    callback = HeadroomCallback(every=1, least_headroom=16)
    sentinel = train(model, callback, run_dir, steps=6, autocast=torch.float16, scaler=scaler)
    gradient = min(f.doublings for f in callback.forecasts() if f.site.what == GRADIENT)
    assert gradient < math.log2(16)
    assert sentinel.incidents == ()


def test_values_that_are_not_finite_do_not_enter(run_dir):
    model = Model()
    callback = HeadroomCallback(every=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with Sentinel(model, optimizer, callbacks=[NanCallback(), callback], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(2, 5, 16) for _ in range(6)])):
            loss = model(batch * (float("nan") if number == 2 else float("inf") if number == 3 else 1.0))
            sentinel.backward(loss)
            sentinel.step()
    assert all(math.isfinite(forecast.value) for forecast in callback.forecasts())
    steps = [step for step, _ in callback._trends[callback.forecasts()[0].site].samples]
    assert 2 not in steps
    assert 3 not in steps


def test_growth_that_is_far_from_the_limit_or_not_sure_is_no_alarm(run_dir):
    model = Model()

    def grow(number):  # as in the first steps of many runs
        model.attn.factor = 0.01 * 2.0 ** (number / 3) if number < 20 else 1.0

    sentinel = train(model, HeadroomCallback(every=2), run_dir, steps=40, before=grow, autocast=torch.float16)
    assert sentinel.incidents == ()


class Everything(nn.Module):
    """Outputs of many kinds: nested, integer, complex, empty, sparse, views, written in place, none."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.nothing = Nothing()
        self.norm = nn.LayerNorm(4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        out = self.act(self.norm(out) * 1)
        out = out * 1
        out += 1
        return {
            "out": [out, out.argmax(-1)],
            "z": torch.view_as_complex(h.view(1, -1, 2)),
            "e": self.nothing(x),
        }


class Nothing(nn.Module):
    def forward(self, x):
        return x[:0], None, x.to_sparse()


def test_outputs_of_every_kind(run_dir):
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    callback = HeadroomCallback(every=1)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(3, 2, 4) for _ in range(3)]):
            sentinel.backward(model(batch)["out"][0].sum() + model(batch)["z"].abs().sum())
            sentinel.step()
    assert sentinel.incidents == ()
    assert {("lstm:[0]", ACTIVATION), ("lstm:[1][0]", ACTIVATION)} <= sites_of(callback).keys()


def test_a_loop_without_steps(run_dir):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    callback = HeadroomCallback(every=2)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for _ in range(5):
            model(torch.randn(2, 5, 16)).backward()
            sentinel.step()
    trend = callback._trends[sites_of(callback)["attn.query", ACTIVATION].site]
    assert [step for step, _ in trend.samples] == [0, 2, 4]


def test_a_forward_pass_that_raises_leaves_nothing_behind(run_dir):
    class Fragile(Model):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("no")
            return super().forward(x)

    model = Fragile()
    callback = HeadroomCallback(every=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for number, batch in enumerate(sentinel.steps([torch.randn(2, 5, 16) for _ in range(4)])):
            if number == 2:
                with pytest.raises(ValueError, match="no"):
                    model(torch.randn(3, 5, 16))
            sentinel.backward(model(batch))
            sentinel.step()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert sentinel.incidents == ()


@pytest.mark.expects_swallowed
def test_a_failure_in_a_hook_never_reaches_the_model(run_dir, monkeypatch):
    monkeypatch.setattr("gradsentinel.callbacks.peaks.is_plain", lambda tensor: 1 / 0)
    model = Model()
    sentinel = train(model, HeadroomCallback(every=1), run_dir, steps=4)
    assert [i.kind for i in sentinel.incidents] == [Kind.CALLBACK_ERROR]
    assert sentinel.applied_steps == 4
    assert not any(m._forward_hooks for m in model.modules())


# torch's compiler imports its own deprecated parts
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("what", ["model", "function"])
def test_where_something_is_compiled_nothing_is_measured(what, run_dir, caplog):
    model = Model()
    if what == "model":
        model = torch.compile(model, backend="eager")
    else:
        torch.compile(torch.sin, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    callback = HeadroomCallback(every=1)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir) as sentinel:
        for batch in sentinel.steps([torch.randn(2, 5, 16) for _ in range(3)]):
            sentinel.backward(model(batch))
            sentinel.step()
    assert callback.forecasts() == []
    assert sentinel.incidents == ()
    assert len([r for r in caplog.records if "torch.compile is in use" in r.getMessage()]) == 1


def test_the_samples_survive_a_restart(run_dir):
    model = Model()
    callback = HeadroomCallback(every=2, window=4)
    train(model, callback, run_dir, steps=9, autocast=torch.float16)
    again = HeadroomCallback(every=2, window=4)
    again.load_state_dict(callback.state_dict())
    assert again.forecasts() == callback.forecasts()
    assert again._next == callback._next


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every"),
        ({"horizon": 0}, "horizon"),
        ({"window": 2}, "window"),
        ({"least_headroom": 0.5}, "least_headroom"),
        ({"show": -1}, "show"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        HeadroomCallback(**settings)
