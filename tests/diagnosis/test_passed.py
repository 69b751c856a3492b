"""What the loop gave to the model, and got back, against what a replay gives and gets."""

import json

import pytest
import torch
from broken_kernels import Failing
from failures import normal, puts
from failures_seventeenth import loss_of, network, pairs
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradsentinel import MagnitudeCallback, NanCallback, Sentinel
from gradsentinel.again.model_calls import ModelCalls
from gradsentinel.diagnosis.boundary import _elements, compare_calls
from gradsentinel.faults import FaultPlan, FlipBit, PoisonActivation, PoisonGradient

NAN = float("nan")
addmm = "aten.addmm.default"


@pytest.fixture
def struck(run_dir):
    """Run three steps, the second one on a device that fails, and return the incident."""

    def run(model, forward=loss_of, *, loop=None, device=None, plan=None, batches=None, **more):
        loop = loop or forward
        modules = nn.ModuleList(model.values()) if isinstance(model, dict) else model
        optimizer = torch.optim.SGD(modules.parameters(), lr=0.01)
        callbacks = more.pop("callbacks", [NanCallback()])
        plan = plan or FaultPlan([])
        with (
            plan.attach(modules),
            Sentinel(
                model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=forward, **more
            ) as sentinel,
        ):
            for step, b in enumerate(sentinel.steps(plan.batches(batches or [pairs() for _ in range(3)]))):
                if step == 1 and device is not None:
                    with device:
                        loss = loop(model, b)
                else:
                    loss = loop(model, b)
                sentinel.backward(loss)
                sentinel.step()
        (incident,) = sentinel.incidents
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules.modules())
        return incident

    return run


def test_the_part_of_the_model_that_was_called_is_named(struck):
    """Nobody can call a ModuleDict: what it holds is called."""
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 1)})

    def forward(model, b):
        return functional.mse_loss(model["down"](model["up"](b["x"]).relu()), b["y"])

    found = struck(model, forward, device=Failing(addmm, puts((3, 1), NAN))).diagnosis
    assert (found.cause, found.phase, found.module) == ("hardware", "forward", "up")
    assert "record 3, element [3, 1]: nan instead of" in found.evidence[0]


def test_of_several_models_the_first_that_differs_counts(struck):
    """What the second one was given is another one because the first one returned it."""
    model = {"g": nn.Linear(4, 4), "d": network()}

    def forward(model, b):
        return functional.mse_loss(model["d"](model["g"](b["x"])), b["y"])

    found = struck(model, forward, device=Failing(addmm, puts((5, 2), NAN))).diagnosis
    assert (found.cause, found.module) == ("hardware", "g")


def test_an_evaluation_in_between_is_no_part_of_the_step(struck):
    def loop(model, b):
        with torch.no_grad():
            model(b["x"] * 2)
        return loss_of(model, b)

    found = struck(network(), loop=loop, device=Failing(addmm, puts((2, 0), NAN), call=5)).diagnosis
    assert (found.cause, found.confidence) == ("hardware", 0.7)


def test_a_model_that_is_computed_again_in_the_backward_pass(struck):
    def forward(model, b):
        return functional.mse_loss(checkpoint(model, b["x"], use_reentrant=False), b["y"])

    found = struck(network(), forward, device=Failing(addmm, puts((2, 0), NAN), call=2)).diagnosis
    assert (found.cause, found.confidence) == ("hardware", 0.7)


def test_what_is_too_large_to_be_kept_is_not_known(struck, monkeypatch):
    monkeypatch.setenv("GRADSENTINEL_BUFFERS", "passed=10")
    found = struck(network(), device=Failing(addmm, puts((2, 2), NAN), call=1)).diagnosis
    assert found.cause == "unknown"
    assert "bad values in y that the loop alone gave to the model" in found.evidence[0]
    assert "argument 0 of the model is nothing that can be compared, or too large" in found.evidence[2]


def test_a_loop_that_calls_parts_of_the_model_tells_nothing(struck):
    def by_parts(model, b):
        return functional.mse_loss(model[4](model[:4](b["x"])), b["y"])

    found = struck(network(), by_parts, device=Failing(addmm, puts((2, 2), NAN), call=1)).diagnosis
    assert found.cause == "unknown"
    assert "did not call the model as a whole" in found.evidence[2]


def test_a_spike_of_one_record_is_the_devices(struck):
    """The loss is finite and another one: the records beside it show that it was the same model."""
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]
    found = struck(network(), callbacks=watch, device=Failing(addmm, puts((1, 0), 1e15), call=2)).diagnosis
    assert (found.cause, found.phase, found.confidence) == ("hardware", "forward", 0.7)
    assert "1e+15 instead of" in found.evidence[0]


def test_a_spike_of_a_record_that_the_loop_has_changed(struck):
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]

    def loop(model, b):
        larger = 1e15 if loop.step == 1 else 1.0
        loop.step += 1
        return loss_of(model, {**b, "x": b["x"] * torch.tensor([[1.0], [1], [larger], [1], [1], [1]])})

    loop.step = 0
    model = nn.Linear(4, 1)
    found = struck(model, callbacks=watch, loop=loop).diagnosis
    assert found.cause == "unknown"
    assert "argument 0, record 2" in found.evidence[0]
    assert "it is innocent" in found.evidence[2]


@pytest.mark.parametrize("module", ["0", "1", "2", "3", None])
def test_a_fault_of_a_drill_leaves_what_a_device_leaves(module, struck):
    plan = FaultPlan([PoisonActivation(steps=(1,), module=module)], seed=2)
    incident = struck(network(), plan=plan)
    assert len(plan.log) == 1
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("hardware", "forward")


def test_a_flipped_bit_of_a_drill(struck):
    plan = FaultPlan([FlipBit(steps=(1,), target="activation", name="4", bit=30, index=(3, 0))], seed=2)
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]
    incident = struck(network(), plan=plan, callbacks=watch)
    assert incident.diagnosis.cause == "hardware"
    assert "record 3" in incident.diagnosis.evidence[0]


def test_a_gradient_of_a_drill_says_where_to_look(struck):
    plan = FaultPlan([PoisonGradient(steps=(1,), parameter="4.bias")], seed=2)
    found = struck(network(), plan=plan).diagnosis
    assert (found.cause, found.phase, found.module) == ("unknown", "backward", "")
    assert "element 0 of 4.bias differs: nan" in found.evidence[0]
    assert "in the backward pass or later" in found.evidence[2]
    assert "test the device" in found.remedy[0]


def test_a_batch_that_the_loop_has_spoilt_is_not_left_out_for_good(struck, run_dir):
    """As it was loaded it is sound: the next time, the augmentation may draw something else."""

    def loop(model, b):
        keep = torch.ones(6, 1)
        keep[4] = loop.step != 1
        loop.step += 1
        return loss_of(model, {**b, "x": b["x"] / keep})

    loop.step = 0
    incident = struck(network(), loop=loop)
    assert incident.diagnosis.cause == "data"
    assert incident.details["made_by_the_loop"] is True
    assert [sample.position for sample in incident.samples] == [4]
    (entry,) = json.loads((run_dir / "skipped-batches.json").read_text("utf-8"))["batches"]
    assert (entry["cause"], entry["for_good"]) == ("data", False)


def swaps_weights(model):
    """As an evaluation with averaged weights does."""
    for parameter in model.parameters():
        kept = parameter.data.clone()
        parameter.data.mul_(0.5)
        parameter.data.copy_(kept)


@pytest.mark.parametrize("words", [False, True])
def test_weights_that_a_step_writes_to_matter_where_records_have_their_own(words, struck):
    """The other records show that it was the same model, unless each record has weights of its own."""

    def loop(model, b):
        swaps_weights(model)
        return forward(model, b)

    def forward(model, b):
        return functional.cross_entropy(model(b["words"] if words else b["x"]), b["y"])

    batch = {"x": normal(), "words": torch.arange(12).view(6, 2), "y": torch.arange(6) % 3}
    first = nn.EmbeddingBag(12, 4) if words else nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Linear(4, 3))
    device = Failing(addmm, puts((3, 1), NAN), call=0 if words else 1)
    found = struck(model, forward, loop=loop, device=device, batches=[batch] * 3).diagnosis
    assert found.cause == ("unknown" if words else "hardware")
    assert ("writes to weights" in found.evidence[0]) is words


def test_a_hook_on_accumulated_gradients_makes_nothing_of_an_output(struck):
    model = network()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None if p.grad.mul_(1) is p.grad else p)
    found = struck(model, device=Failing(addmm, puts((2, 2), NAN), call=1)).diagnosis
    assert found.cause == "hardware"


# -- the comparison ----------------------------------------------------------------------------------


def called(model, *calls, then=None):
    heard = ModelCalls([("", model)])
    heard.listen(0)
    for args in calls:
        model(*args)
    heard.stop()
    record = heard.of(0)
    if then is not None:
        then()
    return record


class Same(nn.Module):
    """Returns what it is told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *_):
        return self.answer


def compared(one, other, size=6, given=1.0):
    return compare_calls(called(Same(one), (given,)), called(Same(other), (given,)), [size])


def changed(tensor, index, value):
    copy = tensor.clone()
    copy[index] = value
    return copy


def test_a_record_is_told_by_the_size_of_the_batch():
    good = normal() + 3
    found = compared(changed(good, (2, 1), NAN), good).made
    assert (found.records, found.size, found.odd, found.alike) == ((2,), 6, 1, 20)
    assert found.confined
    assert found.bad
    flat = compared(changed(good, (2, 1), NAN), good, size=3).made
    assert (flat.records, flat.size) == ((1,), 3)  # two rows of each record
    turned = compared(changed(good, (2, 1), NAN).T[None], good.T[None]).made
    assert not turned.confined  # the last dimension is none of records
    column = compared(changed(good, (slice(None), 1), NAN), good).made
    assert not column.confined


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_any_type_is_compared_bit_for_bit(dtype):
    good = (normal() + 3).to(dtype)
    assert compared(good, good.clone()).same
    found = compared(changed(good.float() if dtype.itemsize == 1 else good, (4, 0), 0.5).to(dtype), good).made
    assert found.records == (4,)
    assert not found.bad


def test_nan_is_the_same_as_nan_and_zero_as_minus_zero():
    one, other = torch.tensor([[NAN], [0.0]]), torch.tensor([[-NAN], [-0.0]])
    assert compared(one, other, size=2).same


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (torch.ones(6, 2), torch.ones(6, 2, dtype=torch.float64), "float32, shape [6, 2] instead of float64"),
        (torch.ones(6, 2), torch.ones(6, 3), "shape [6, 2] instead of float32, shape [6, 3]"),
        ({"a": 1}, {"b": 1}, ""),
        (True, 1, "True instead of 1"),
    ],
    ids=["type", "shape", "form", "number"],
)
def test_what_is_no_tensor_of_the_same_form_differs(one, other, text):
    found = compared(one, other).made
    assert text in found.first
    assert not found.confined


def test_numbers_that_are_not_finite_are_compared_too():
    assert compared((NAN, 1, "a", None), (NAN, 1, "a", None)).same


def test_a_part_that_has_all_its_records_damaged_outweighs_the_others():
    good = normal() + 3
    one = (changed(good, (2, 1), NAN), good * NAN)
    assert not compared(one, (good, good)).made.confined
    loss = torch.tensor(1.0)
    assert compared((one[0], loss * NAN), (good, loss)).made.confined


def test_what_was_written_to_afterwards_is_not_known():
    x = normal()
    loop = called(nn.Identity(), (x,), then=lambda: x.add_(1))
    assert "was written to after" in compare_calls(loop, called(nn.Identity(), (x,)), [6]).unknown


def test_what_was_returned_and_written_to_is_neither_the_same_nor_another():
    x, good = normal(), normal() + 3
    loop = called(Same(good), (x,), then=good.relu_)
    found = compare_calls(loop, called(Same(good.clone()), (x,)), [6])
    assert found.made is None
    assert not found.same


def test_calls_that_do_not_fit_are_not_known():
    x, model = normal(), nn.Identity()
    one, two, none = called(model, (x,)), called(model, (x,), (x,)), called(model)
    assert "called the model 2 times, forward= 1 times" in compare_calls(two, one, [6]).unknown
    assert "as a whole" in compare_calls(none, one, [6]).unknown
    assert "as a whole" in compare_calls(None, one, [6]).unknown


def test_arguments_of_other_names_are_not_known():
    x = normal()

    class Named(nn.Module):
        def forward(self, x):
            return x * 2

    heard = ModelCalls([("", named := Named())])
    heard.listen(0)
    named(x=x)
    heard.stop()
    found = compare_calls(heard.of(0), called(named, (x,)), [6])
    assert "with other arguments" in found.unknown
    assert found.given is None


def test_tensors_that_cannot_be_compared_prove_nothing():
    model = nn.Identity()
    sparse = torch.eye(6).to_sparse()
    found = compare_calls(called(model, (sparse,)), called(model, (sparse,)), [6])
    assert found.unknown
    assert not found.same


def _flip(tensor, index, bit):
    bits = tensor.view(torch.int32).view(-1)
    bits[index] ^= 1 << bit


@pytest.mark.parametrize("through", [lambda out: out.detach(), lambda out: out.data])
def test_one_flipped_bit_of_what_the_model_returned(through, struck):
    """No arithmetic makes it, so it does not matter how it got there."""

    def loop(model, b):
        loop.calls += 1
        out = model(b["x"])
        if loop.calls == 2:
            with torch.no_grad():
                _flip(through(out), 3, 30)
        return functional.mse_loss(out, b["y"])

    loop.calls = 0
    watch = [NanCallback(), MagnitudeCallback(max_global_norm=1e3, action="skip")]
    found = struck(network(), loop=loop, callbacks=watch).diagnosis
    assert (found.cause, found.confidence, found.phase) == ("hardware", 0.95, "forward")
    assert "in one bit (30)" in found.evidence[0]


@pytest.mark.parametrize("change", [lambda v: v * 2, lambda v: -v, lambda v: v / 0, lambda v: v * 3e20])
def test_one_element_that_arithmetic_changes_is_no_flipped_bit(change, struck):
    def loop(model, b):
        loop.calls += 1
        out = model(b["x"])
        if loop.calls == 2:
            with torch.no_grad():
                alias = out.detach().view(-1)
                alias[3] = change(alias[3])
        return functional.mse_loss(out, b["y"]) * (1 if loop.calls != 2 else NAN)

    loop.calls = 0
    assert struck(network(), loop=loop).diagnosis.cause != "hardware"


def _changes_weights(model):
    model.weight = model.bias = None


TRAININGS = {"another": _changes_weights, "one more": lambda model: setattr(model, "bias", 1)}
"""What a program may do elsewhere, in a training of its own."""


def _trainings(struck):
    for name in list(TRAININGS)[:1]:  # as a program that tries one after the other does
        if name == "none of them":
            TRAININGS[name](None)
        return struck(network(), device=Failing(addmm, puts((3, 1), NAN)))
    return None


def test_what_a_program_does_in_other_trainings_is_no_part_of_this_one(struck):
    """The function that holds the loop is called by one that could call others: not within a step."""
    found = _trainings(struck).diagnosis
    assert (found.cause, found.confidence) == ("hardware", 0.7)


def test_one_other_element_of_float8_is_compared_like_any():
    """It has no arithmetic that would tell a flipped bit, and none is looked for."""
    one, other = (torch.tensor([1.0, 2.0, value]).to(torch.float8_e4m3fn) for value in (4.0, 448.0))
    difference = _elements("it", other, one, ())
    assert (difference.odd, difference.flipped) == (1, None)
