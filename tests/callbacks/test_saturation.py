"""Overflows on a device that makes the largest finite number of them; healthy runs are left alone."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from gradsentinel import ConfigurationError, Kind, NanCallback, SaturationCallback, Sentinel
from loops import build, differences, finish, generators, make_batches, train_by_hand, train_watched

LARGEST = torch.finfo(torch.float16).max


@pytest.fixture(autouse=True)
def nothing_compiled(request, monkeypatch):
    """Other tests of this process may have compiled something."""
    if "compiled" not in request.node.name:
        monkeypatch.setattr("gradsentinel.callbacks.peaks.anything_compiled", lambda: False)


class Saturating(TorchDispatchMode):
    """Computes as an Ascend device without INF/NAN mode does: overflow is +-65504, NaN is 0."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result
        in_place = any(r.alias_info is not None for r in returns)

        def fix(x):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            return x.nan_to_num_(0.0) if in_place else torch.nan_to_num(x, 0.0)

        return tree_map(fix, result)


class Model(nn.Module):
    """Two layers in float16; the first one's outputs overflow where `huge` is set."""

    def __init__(self, *, huge: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.fc2 = nn.Linear(8, 1)
        self.half()
        if huge:
            with torch.no_grad():
                self.fc1.weight.mul_(3e4)

    def forward(self, x):
        return self.fc2(self.fc1(x))


def run_steps(model, callback, run_dir, batches, *, mode=contextlib.nullcontext, spoil=None, scaler=None):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Sentinel(model, optimizer, callbacks=[callback], run_dir=run_dir, scaler=scaler) as sentinel:
        for number, batch in enumerate(sentinel.steps(batches)):
            with mode():
                loss = model(batch).float().square().mean()
                if spoil is not None:
                    loss = spoil(number, loss)
                sentinel.backward(loss)
            sentinel.step()
    return sentinel


def half_batches(count, scale=1.0):
    return [torch.randn(4, 8).half() * scale for _ in range(count)]


def test_outputs_that_saturate_are_found_in_the_first_step(run_dir):
    """Case 29: no gradient is at the end of the range, only the output of fc1 is."""
    model = Model(huge=True)
    before = [p.clone() for p in model.parameters()]
    mean = lambda number, loss: loss * 1e-12  # noqa: E731 - gradients far from the end
    sentinel = run_steps(
        model, SaturationCallback(), run_dir, half_batches(1, 30), mode=Saturating, spoil=mean
    )
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome.value) == (0, Kind.SATURATION, "skipped")
    assert incident.diagnosis.cause == "precision"
    assert incident.diagnosis.phase == "forward"
    assert incident.diagnosis.module == incident.where == "fc1"
    assert "fc1" in incident.message
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_gradients_that_saturate_are_counted(run_dir):
    model = Model()
    callback = SaturationCallback(activations_every=0)

    def spoil(number, loss):
        if number == 2:
            model.fc2.weight.register_hook(lambda g: torch.full_like(g, float("inf")).nan_to_num())
        return loss

    sentinel = run_steps(model, callback, run_dir, half_batches(4), spoil=spoil)
    first = sentinel.incidents[0]
    assert (first.step, first.kind) == (2, Kind.SATURATION)
    assert [tensor.name for tensor in first.tensors] == ["fc2.weight"]
    assert first.details["saturated"] == {"fc2.weight": 8}
    assert first.diagnosis.module == "fc2"
    assert "clamp" in " ".join(first.diagnosis.evidence)  # this device makes infinities


@pytest.mark.parametrize(
    ("value", "elements", "found"),
    [
        (LARGEST, 1, True),
        (-LARGEST, 1, True),
        (LARGEST - 200, 2, True),
        (LARGEST - 200, 1, False),  # one large gradient is just that
        (60000.0, 8, False),
        (float("inf"), 8, False),  # another detector's business
        (float("nan"), 8, False),
    ],
)
def test_what_counts_as_saturated(value, elements, found, run_dir):
    model = Model()

    def put(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[:elements] = value
        return gradient

    model.fc2.weight.register_hook(put)
    sentinel = run_steps(model, SaturationCallback(action="warn"), run_dir, half_batches(1))
    assert [i.kind for i in sentinel.incidents] == [Kind.SATURATION] * found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_other_types_have_other_ends(dtype, run_dir):
    model = Model().to(dtype)
    largest = torch.finfo(dtype).max
    wanted = iter([largest, LARGEST])
    model.fc2.bias.register_hook(lambda g: torch.full_like(g, next(wanted)))
    batches = [x.to(dtype) for x in half_batches(2)]
    sentinel = run_steps(model, SaturationCallback(action="warn", activations_every=0), run_dir, batches)
    assert [i.step for i in sentinel.incidents] == [0]  # 65504 is a size like any other here


class AutocastModel(nn.Module):
    """float32 parameters whose gradients autocast computes in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            return self.fc(x)


def test_with_a_scaler_the_scaled_gradient_counts_and_the_scale_comes_down(run_dir):
    """found_inf stays 0 on such a device: alone, the scaler would raise its scale for ever."""
    model = AutocastModel()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    sentinel = run_steps(
        model,
        SaturationCallback(activations_every=0),
        run_dir,
        [torch.randn(16, 8) * 8 for _ in range(14)],
        mode=Saturating,
        scaler=scaler,
    )
    kinds = {incident.kind for incident in sentinel.incidents}
    assert kinds == {Kind.SATURATION}
    assert scaler.get_scale() == 2.0 ** (20 - len(sentinel.incidents))
    assert sentinel.applied_steps == 14 - len(sentinel.incidents) > 0


def test_accumulated_gradients_are_looked_at_after_each_micro_batch(run_dir):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    number = iter(range(100))

    def spoil(gradient):
        return torch.full_like(gradient, LARGEST if next(number) == 1 else -20000.0)

    model.fc2.weight.register_hook(spoil)
    callbacks = [SaturationCallback(activations_every=0)]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(half_batches(3), accumulate=3):
            sentinel.backward(model(batch).float().mean())
            sentinel.step()
    # -20000 + 65504 = 45504, and 25504 in the end: only the sums are seen, and none is at the end
    assert sentinel.incidents == ()


class Flag:
    """A device's overflow flag."""

    def __init__(self, at):
        self.at, self.asked = at, 0

    def __call__(self):
        self.asked += 1
        return torch.tensor(self.asked - 1 == self.at)


def test_the_flag_of_the_device_drops_the_step(run_dir):
    flag = Flag(at=2)
    sentinel = run_steps(Model(), SaturationCallback(overflow_flag=flag), run_dir, half_batches(4))
    (incident,) = sentinel.incidents
    assert (incident.step, incident.kind, incident.outcome.value) == (2, Kind.SATURATION, "skipped")
    assert "flag" in incident.message
    assert flag.asked == 4
    assert sentinel.applied_steps == 3


def test_an_integer_flag_and_none_will_do(run_dir):
    answers = iter([None, torch.tensor(0), torch.tensor(3, dtype=torch.int32)])
    callback = SaturationCallback(overflow_flag=lambda: next(answers))
    assert [i.step for i in run_steps(Model(), callback, run_dir, half_batches(3)).incidents] == [2]


def test_a_loop_that_runs_its_own_backward_pass(run_dir):
    model = Model()
    model.fc2.weight.register_hook(lambda g: torch.full_like(g, LARGEST))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Sentinel(model, optimizer, callbacks=[SaturationCallback()], run_dir=run_dir) as sentinel:
        model(half_batches(1)[0]).float().mean().backward()
        sentinel.step()
    assert [i.kind for i in sentinel.incidents] == [Kind.SATURATION]


class Masked(nn.Module):
    """Puts out scores whose masked places hold the lowest number, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8).half()

    def forward(self, x):
        scores = self.fc(x)
        return scores.masked_fill(torch.arange(8) > 4, torch.finfo(scores.dtype).min)


def test_masks_at_the_lower_end_are_no_overflow(run_dir):
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    callbacks = [SaturationCallback(activations_every=1), NanCallback()]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for batch in sentinel.steps(half_batches(3)):
            sentinel.backward(model(batch).float().softmax(-1)[..., 0].mean())
            sentinel.step()
    assert sentinel.incidents == ()


def test_after_an_alarm_every_step_is_looked_at(run_dir):
    model = Model()
    calls = []
    model.fc1.register_forward_hook(lambda m, i, o: calls.append(len(m._forward_hooks)))
    callback = SaturationCallback(activations_every=1000, overflow_flag=Flag(at=2))
    run_steps(model, callback, run_dir, half_batches(6))
    assert calls == [2, 1, 1, 2, 2, 2]  # the first step, and those after the alarm
    assert not model.fc2._forward_hooks


@pytest.mark.parametrize("settings", [{}, {"autocast": torch.float16, "scale": 2.0**10}, {"accumulate": 3}])
def test_a_healthy_run_is_bit_identical(settings, run_dir):
    batches = make_batches(12)
    reference = build(random=True, max_norm=1.0, **settings)
    train_by_hand(reference, batches)
    expected = {**reference.state(), "losses": reference.losses, "generators": generators()}
    watched = build(random=True, max_norm=1.0, **settings)
    callbacks = [SaturationCallback(activations_every=2)]
    with watched.sentinel(callbacks, run_dir=run_dir) as sentinel:
        finish(train_watched(watched, sentinel, batches))
    assert sentinel.incidents == ()
    found = {**watched.state(), "losses": watched.losses, "generators": generators()}
    assert differences(found, expected) == []
    assert not any(module._forward_hooks for module in watched.model.modules())


class Odd(nn.Module):
    """Outputs and gradients of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=True)
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.lstm = nn.LSTM(4, 4)

    def forward(self, ids):
        out, (h, _) = self.lstm(self.table(ids))
        return {
            "loss": out.sum() + h.sum() + (self.complex * out[0, 0]).abs().sum() + self.empty.sum(),
            "ids": ids,
        }


@pytest.mark.parametrize("value", [None, float("inf"), float("nan")])
def test_odd_parameters_and_outputs(value, run_dir):
    model = Odd()
    dense = [p for name, p in model.named_parameters() if name != "table.weight" and p.requires_grad]
    optimizers = [torch.optim.SGD(dense, 1e-3), torch.optim.SparseAdam([model.table.weight])]
    callbacks = [SaturationCallback(activations_every=1)]
    with Sentinel(model, optimizers, callbacks=callbacks, run_dir=run_dir) as sentinel:
        for ids in sentinel.steps([torch.randint(16, (3, 2)) for _ in range(3)]):
            loss = model(ids)["loss"]
            sentinel.backward(loss if value is None else loss * value)
            sentinel.step()
    assert sentinel.incidents == ()


@pytest.mark.expects_swallowed
@pytest.mark.parametrize("every", [1, 2], ids=["in the callback too", "in the hooks"])
def test_a_failure_switches_the_callback_off_and_not_the_model(every, run_dir, monkeypatch):
    monkeypatch.setattr(torch, "aminmax", lambda *a, **k: 1 / 0)
    model = Model()
    sentinel = run_steps(
        model, SaturationCallback(activations_every=1, every=every), run_dir, half_batches(3)
    )
    assert [i.kind for i in sentinel.incidents] == [Kind.CALLBACK_ERROR]
    assert sentinel.applied_steps == 3
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"action": "continue"}, "do nothing"),
        ({"action": "explode"}, "unknown action"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "fraction"),
        ({"every": 0}, "every"),
        ({"activations_every": -1}, "activations_every"),
        ({"overflow_flag": 3}, "overflow_flag"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        SaturationCallback(**settings)
