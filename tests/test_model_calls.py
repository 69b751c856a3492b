"""What the loop gives to the model is kept by reference, for the step in flight, and harms nothing else."""

import copy
import gc
import io
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel import NanCallback, Sentinel
from gradsentinel.again.model_calls import UNKNOWN, ModelCalls, calls_of
from gradsentinel.host import TorchHost


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return model(x).pow(2).mean()


def hooks_on(model):
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
        )
    )


@pytest.fixture
def watch(run_dir):
    """Make a sentinel around a model."""
    made = []

    def make(model, forward=loss_of, **more):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append(
            Sentinel(model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, forward=forward, **more)
        )
        return made[-1]

    yield make
    for sentinel in made:
        sentinel.close()


def record_of(calls, number=0):
    record = calls.of(number)
    assert record is not None
    return record


# -- when there are hooks ----------------------------------------------------------------------------


def test_hooks_are_there_from_the_batch_to_its_backward_pass_only(watch):
    model = network()
    sentinel = watch(model)
    calls = sentinel._watch.run.scene.calls
    assert hooks_on(model) == 0
    for x in sentinel.steps(batches()):
        assert hooks_on(model) == 3
        loss = loss_of(model, x)
        (call,) = record_of(calls).calls
        sentinel.backward(loss)
        assert hooks_on(model) == 0
        assert [value for _, value, _ in call.given] == [x]
        sentinel.step()
        assert calls.of(0) is None
        assert hooks_on(model) == 0


def test_a_loop_that_ends_in_the_middle_leaves_no_hook(watch):
    model = network()
    sentinel = watch(model)
    for _ in sentinel.steps(batches()):
        break
    gc.collect()
    assert hooks_on(model) == 0


def test_without_forward_there_are_none(watch):
    model = network()
    sentinel = watch(model, forward=None)
    assert sentinel._watch.run.scene.calls is None
    for _ in sentinel.steps(batches(1)):
        assert hooks_on(model) == 0


def test_a_step_that_is_settled_late_is_compared_with_nothing(run_dir):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Sentinel(model, optimizer, run_dir=run_dir, forward=loss_of, guard="device") as sentinel:
        assert sentinel._watch.run.scene.calls is None


def test_ours_are_first_and_last_in_line_and_those_of_others_stay(watch):
    model, seen = network(), []
    model.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    model.register_forward_hook(lambda _m, _a, out: seen.append(out) or out * 3)
    sentinel = watch(model)
    for x in sentinel.steps(batches(1)):
        out = model(x)
        (call,) = record_of(sentinel._watch.run.scene.calls).calls
        assert call.given[0][1] is x
        assert call.made[0][1].data_ptr() == out.data_ptr()
        sentinel.backward(out.mean())
        sentinel.step()
    assert hooks_on(model) == 2
    assert len(seen) == 1


# -- what is kept ------------------------------------------------------------------------------------


class Both(NamedTuple):
    scores: torch.Tensor
    scale: float


@dataclass
class Given:
    x: torch.Tensor
    names: tuple[str, ...]


class Forms(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, given, *, mask=None, thing=None):
        return {"both": Both(self.lin(given.x), 2.0), "rest": [mask, None]}


def test_containers_are_taken_apart_and_strangers_are_unknown():
    model, x, mask = Forms(), batches(1)[0], torch.ones(6)
    calls = ModelCalls([("", model)])
    calls.listen(0)
    model(Given(x, ("a", "b")), mask=mask, thing=object())
    (call,) = record_of(calls).calls
    given = {path: value for path, value, _ in call.given}
    assert given == {
        (0, "x"): x,
        (0, "names", 0): "a",
        (0, "names", 1): "b",
        ("mask",): mask,
        ("thing",): UNKNOWN,
    }
    assert [path for path, _, _ in call.made] == [
        ("both", "scores"),
        ("both", "scale"),
        ("rest", 0),
        ("rest", 1),
    ]
    calls.forget()


class Marker:
    """Is held by a node of the graph."""


class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        marker = Marker()
        self.marker = weakref.ref(marker)
        return Marks.apply(self.net(x), marker)


def test_no_graph_is_kept_and_no_copy_made():
    model, x = Marked(), batches(1)[0].requires_grad_()
    calls = ModelCalls([("", model)])
    calls.listen(0)
    out = model(x)
    memory = out.data_ptr()
    (call,) = record_of(calls).calls
    assert not call.given[0][1].requires_grad
    assert not call.made[0][1].requires_grad
    assert (call.given[0][1].data_ptr(), call.made[0][1].data_ptr()) == (x.data_ptr(), memory)
    assert model.marker() is not None
    del out
    gc.collect()
    assert model.marker() is None
    calls.forget()


def test_no_more_memory_is_kept_than_the_bound_says(monkeypatch):
    monkeypatch.setenv("GRADSENTINEL_BUFFERS", "passed=200")
    model, (x, *_) = network(), batches(1)
    calls = ModelCalls([("", model)])
    for number in range(2):
        calls.listen(number)
        out = model(x)
        kept = weakref.ref(out)
        calls.stop()
    values = [value for n in range(2) for call in record_of(calls, n).calls for _, value, _ in call.given]
    assert values == [x, UNKNOWN]
    del out
    assert kept() is None
    calls.forget()
    calls.listen(0)
    model(x)
    assert record_of(calls).calls[0].given[0][1] is x
    calls.forget()


def test_more_calls_than_can_be_told_apart_are_no_longer_noted():
    model, (x, *_) = network(), batches(1)
    calls = ModelCalls([("", model)])
    calls.listen(0)
    for _ in range(70):
        model(x)
    record = record_of(calls)
    assert len(record.calls) == 64
    assert "more than 64 times" in record.lost
    calls.forget()


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("no")


def test_a_call_that_raises_has_not_returned():
    both = {"a": Raises(), "b": network()}
    calls = ModelCalls(list(both.items()))
    calls.listen(0)
    with pytest.raises(RuntimeError, match="no"):
        both["a"](1)
    both["b"](batches(1)[0])
    first, second = record_of(calls).calls
    assert (first.name, first.made) == ("a", None)
    assert (second.name, len(second.made)) == ("b", 1)
    calls.forget()


class Dispatches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Intercepts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Dispatches, Intercepts])
def test_a_mode_of_the_programs_own_sees_nothing_of_it(kind):
    model, x = network(), batches(1)[0].requires_grad_()
    with kind() as plain:
        model(x)
    calls = ModelCalls([("", model)])
    calls.listen(0)
    with kind() as watched:
        model(x)
    assert watched.seen == plain.seen
    (call,) = record_of(calls).calls
    assert call.modes == (kind,)
    assert [value for _, value, _ in call.given] == [UNKNOWN]
    calls.forget()


class Hostile(dict):
    def items(self):
        raise RuntimeError("not like this")


@pytest.mark.expects_swallowed
def test_what_cannot_be_looked_into_stops_no_run(caplog):
    class Reads(nn.Module):
        def forward(self, given):
            return given["x"] * 2

    model, (x, *_) = Reads(), batches(1)
    calls = ModelCalls([("", model)])
    calls.listen(0)
    assert torch.equal(model(Hostile(x=x)), x * 2)
    assert "cannot be looked at any more" in caplog.text
    assert calls.of(0) is None
    calls.listen(1)
    assert hooks_on(model) == 0


# -- copies of the model -----------------------------------------------------------------------------


def test_a_copy_is_not_heard_of():
    model, (x, *_) = network(), batches(1)
    calls = ModelCalls([("", model)])
    calls.listen(0)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = model(x)
    for other in (twin, loaded, copy.copy(model)):
        assert torch.equal(other(x), expected)
    assert len(record_of(calls).calls) == 1
    calls.forget()
    assert torch.equal(twin(x), expected)


deprecated = pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]+` is deprecated:DeprecationWarning")


@deprecated
def test_a_traced_and_an_exported_model_have_no_part_of_it():
    model, (x, *_) = network(), batches(1)
    calls = ModelCalls([("", model)])
    plain = torch.jit.trace(model, x, check_trace=False)
    program = torch.export.export(model, (x,))
    calls.listen(0)
    traced = torch.jit.trace(model, x, check_trace=False)
    exported = torch.export.export(model, (x,))
    assert [n.kind() for n in traced.graph.nodes()] == [n.kind() for n in plain.graph.nodes()]
    assert str(exported.graph) == str(program.graph)
    assert record_of(calls).calls == []
    calls.forget()


def compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def test_a_compiled_model_is_left_alone(watch):
    model = compiled(network())
    assert watch(model)._watch.run.scene.calls is None


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x):
        return self.lin(x).tanh()


def test_a_model_that_is_compiled_in_place_is_left_alone(watch):
    model = Small()
    sentinel = watch(model)
    model.compile(backend="eager", fullgraph=True)
    for x in sentinel.steps(batches(1)):
        assert hooks_on(model) == 0
        sentinel.backward(loss_of(model, x))
        assert "compiled" in record_of(sentinel._watch.run.scene.calls).lost
        sentinel.step()


def test_a_step_that_is_compiled_as_a_whole_runs_in_one_graph(watch):
    model, counts = network(), []

    def backend(graph, _inputs):
        counts.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(loss_of, backend=backend, fullgraph=True)(copy.deepcopy(model), batches(1)[0])
    torch._dynamo.reset()
    step = torch.compile(loss_of, backend=backend, fullgraph=True)
    sentinel = watch(model)
    for x in sentinel.steps(batches(4)):
        sentinel.backward(step(model, x))
        assert record_of(sentinel._watch.run.scene.calls).calls == []
        sentinel.step()
    plain, watched = counts  # compiled once, whether there are hooks or not
    assert plain == watched
    torch._dynamo.reset()


@deprecated
def test_a_scripted_model_is_left_alone():
    model = torch.jit.script(network())
    host = TorchHost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert calls_of(host, model, loss_of) is None


@deprecated
def test_a_watched_model_can_be_scripted_between_steps(watch):
    model = network()
    sentinel = watch(model)
    for x in sentinel.steps(batches(2)):
        sentinel.backward(loss_of(model, x))
        sentinel.step()
        assert torch.equal(torch.jit.script(model)(x), model(x))


# -- and the run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_healthy_run_is_the_same_bit_for_bit(accumulate, run_dir):
    ends = []
    for forward in (None, lambda model, b: functional.mse_loss(model(b), b[:, :2])):
        model = nn.Sequential(network(), nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(3)
        with Sentinel(model, optimizer, run_dir=run_dir / str(forward is None), forward=forward) as sentinel:
            for b in sentinel.steps(batches(6), accumulate=accumulate):
                sentinel.backward(functional.mse_loss(model(b), b[:, :2]))
                sentinel.step(max_norm=1.0)
        assert sentinel.incidents == ()
        ends.append([*model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_what_a_step_returned_is_gone_before_the_optimizer_runs(watch):
    model = network()
    sentinel = watch(model)
    kept = []
    for optimizer in sentinel.host.optimizers:
        optimizer.register_step_pre_hook(lambda *_: kept.append(sentinel._watch.run.scene.calls.of(0)))
    for x in sentinel.steps(batches(2)):
        sentinel.backward(loss_of(model, x))
        sentinel.step()
    assert kept == [None, None]
