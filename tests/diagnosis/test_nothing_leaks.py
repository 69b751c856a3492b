"""A step that is run again leaves the run as it was, bit for bit."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsentinel import NanCallback, Sentinel
from gradsentinel.diagnosis.replay import Replay
from gradsentinel.diagnosis.trace import Trace


class Meter:
    """Counts, as an object of the user's own."""

    def __init__(self):
        self.count, self.total, self.past = 0, torch.zeros(2), [[0]]


class Slim:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Untidy(nn.Module):
    """Has everything that a forward pass may leave traces in."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        self.inside = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.history = []
        self.cache = torch.zeros(4)
        self.meter, self.slim = Meter(), Slim()
        self.nested = {"a": [0, {"b": {1}}], "t": (torch.zeros(2), deque([1], maxlen=3))}
        self.array = np.zeros(3)
        self.drawn = torch.Generator().manual_seed(1)
        self.dice, self.numpy_dice = random.Random(1), np.random.default_rng(1)
        self.average = nn.Parameter(torch.ones(4))
        self.writes = True

    def _leave_traces(self):
        self.meter.count += 1
        self.meter.total += 1
        self.meter.past[0].append(self.meter.count)
        self.slim.count += 1
        self.nested["a"][0] += 1
        self.nested["a"][1]["b"].add(self.calls)
        self.nested["t"][0].add_(1)
        self.nested["t"][1].append(self.calls)
        self.array += 1
        torch.rand(2, generator=self.drawn)
        self.dice.random()
        self.numpy_dice.random()
        if self.writes:  # a codebook, an average: written where autograd does not look
            self.frozen.data.mul_(0.9)
            self.average.data.add_(0.1)

    def forward(self, x):
        self._leave_traces()
        self.calls += 1
        self.history.append(self.calls)
        self.late = "set in forward"
        self.cache.add_(1)
        self.seen = self.seen + 1
        x.add_(random.random() + np.random.rand())  # noqa: NPY002 - the global generator is meant
        h = self.inside(x)
        if self.how != "plain":
            h = checkpoint(torch.tanh, h, use_reentrant=self.how == "reentrant")
        self.dropout.train(not self.dropout.training)
        self.dropout.train(not self.dropout.training)
        return self.out(self.dropout(self.norm(h * self.frozen.clone() + self.average.clone())))


def belongings(model: Untidy) -> tuple:
    """What the model holds beside parameters and buffers, with the identity of its objects."""
    nested = model.nested
    return (
        (model.meter.count, model.meter.total.clone(), copy.deepcopy(model.meter.past), model.slim.count),
        (copy.deepcopy(nested), id(nested["a"][1]["b"]), id(nested["t"][0]), id(model.meter.past[0])),
        (model.array.tolist(), id(model.array), model.drawn.get_state(), model.dice.getstate()),
        repr(model.numpy_dice.bit_generator.state),
    )


def state(sentinel: Sentinel, model: Untidy) -> dict:
    bits = {
        f"parameter {n}": (id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()
    }
    bits |= {f"grad {n}": (id(p.grad), copy.deepcopy(p.grad)) for n, p in model.named_parameters()}
    bits |= {f"buffer {n}": (id(b), b.clone()) for n, b in model.named_buffers()}
    bits |= {f"hooks {n}": _hooks(m) for n, m in model.named_modules()}
    bits |= {f"training {n}": m.training for n, m in model.named_modules()}
    bits |= {
        f"post hooks {n}": list(p._post_accumulate_grad_hooks or ()) for n, p in model.named_parameters()
    }
    global_hooks = torch.nn.modules.module
    bits["global hooks"] = (
        list(global_hooks._global_forward_pre_hooks),
        list(global_hooks._global_forward_hooks),
    )
    bits["plain"] = (model.calls, list(model.history), model.late, model.cache.clone(), id(model.cache))
    bits["belongings"] = belongings(model)
    bits["random"] = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    bits["grad mode"] = torch.is_grad_enabled()
    bits["autocast"] = torch.is_autocast_enabled("cpu")
    bits["optimizer"] = copy.deepcopy(sentinel.host.optimizers[0].state_dict())
    bits["scaler"] = copy.deepcopy(sentinel.host.scaler.state_dict()) if sentinel.host.scaler else None
    bits["modes"] = len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
    return bits


def _hooks(module: nn.Module) -> list:
    return [
        list(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("how", ["plain", "saved", "reentrant"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_replay_leaves_no_trace(how, traced, scaled, sentinel_for):
    model = Untidy(how)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    fired = []

    def forward(model, batch):
        return model(batch["x"]).pow(2).mean() + batch["bad"].sum()

    def clone(batch):
        return {name: tensor.detach().clone() for name, tensor in batch.items()}

    optimizer = torch.optim.Adam(model.parameters())
    sentinel = sentinel_for(model, forward, NanCallback(), optimizer=optimizer, scaler=scaler)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    batches = [{"x": torch.randn(8, 4), "bad": torch.zeros(1)} for _ in range(4)]
    run = sentinel._watch.run
    for batch in sentinel.steps(batches, accumulate=2):
        sentinel.backward(forward(model, {**batch, "x": batch["x"].clone()}))
        fired.clear()
        before, given = state(sentinel, model), clone(batch)
        replay = Replay(run)
        with replay.sheltered():
            for microbatch in run.scene.microbatches:
                mode = Trace(run.host.modules(), run.host.named_parameters()) if traced else None
                computed = replay.compute(microbatch, mode=mode)
                assert computed.gradients.keys() == {
                    n for n, p in model.named_parameters() if p.requires_grad
                }
        after = state(sentinel, model)
        changed = [name for name in before if not same(before[name], after[name])]
        assert changed == []
        assert after.keys() == before.keys()
        assert same(given, batch)
        assert fired == [], "a hook on accumulated gradients ran"
        sentinel.step()


def test_a_replay_computes_what_the_run_computed(sentinel_for):
    """Dropout, three random generators and BatchNorm come out alike: the gradients are the same bits."""
    model = Untidy()
    model.writes = False  # what the loop's own forward pass wrote into weights is in them by now
    sentinel = sentinel_for(model, lambda model, batch: model(batch).pow(2).mean())
    run = sentinel._watch.run
    for batch in sentinel.steps([torch.randn(8, 4) for _ in range(3)]):
        loss = model(batch.clone()).pow(2).mean()
        sentinel.backward(loss)
        replay = Replay(run)
        with replay.sheltered():
            computed = replay.compute(run.scene.microbatches[0])
        assert torch.equal(computed.loss, loss)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(computed.gradients[name], parameter.grad), name
        sentinel.step()


def test_a_healthy_run_with_incidents_ends_as_one_without_diagnosis(run_dir):
    """The same run, with and without forward=, ends with the same bits: the diagnosis changed nothing."""
    ends = []
    for number, known in enumerate((False, True)):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        model = Untidy()

        def forward(model, batch):
            return (model(batch["x"].clone()) * batch["weight"]).sqrt().mean()

        with Sentinel(
            model,
            torch.optim.Adam(model.parameters(), lr=1e-2),
            callbacks=[NanCallback()],
            run_dir=run_dir / str(number),
            forward=forward if known else None,
        ) as sentinel:
            for step, batch in enumerate(
                sentinel.steps([{"x": torch.randn(8, 4), "weight": torch.ones(8, 1)} for _ in range(6)])
            ):
                loss = forward(model, batch) if step in (2, 4) else model(batch["x"].clone()).pow(2).mean()
                sentinel.backward(loss)
                sentinel.step()
            assert len(sentinel.incidents) >= 1
        ends.append([t.clone() for t in model.state_dict().values()] + [torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_error_in_the_forward_pass_leaves_the_run_as_it_was(sentinel_for):
    model = Untidy()
    sentinel = sentinel_for(model, lambda model, batch: model(batch["nothing"]))
    run = sentinel._watch.run
    for batch in sentinel.steps([torch.randn(8, 4)]):
        sentinel.backward(model(batch.clone()).pow(2).mean())
        before = state(sentinel, model)
        replay = Replay(run)
        with pytest.raises(Exception, match=r"nothing|indices|string"), replay.sheltered():
            replay.compute(run.scene.microbatches[0])
        after = state(sentinel, model)
        assert [name for name in before if not same(before[name], after[name])] == []
        sentinel.step()
