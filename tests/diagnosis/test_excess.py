"""Gradients that are finite and far too large, and the same when the step is run again."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradsentinel import Kind, MagnitudeCallback, NanCallback, Retry, Rollback, Sentinel, SpikeCallback
from gradsentinel.diagnosis.lone_weight import find_lone_weight
from gradsentinel.faults import FaultPlan, FlipBit


def forward(model, batch):
    return (model(batch["x"]) - batch["y"]).pow(2).mean()


@pytest.fixture
def incidents_of(run_dir):
    def run(model, batches, *callbacks, before=lambda step: None, plan=None, limit=1e6):
        plan = plan or FaultPlan([])
        with (
            Sentinel(
                model,
                torch.optim.SGD(model.parameters(), lr=0.01),
                callbacks=[
                    NanCallback(),
                    MagnitudeCallback(max_global_norm=limit, action="skip"),
                    *callbacks,
                ],
                run_dir=run_dir,
                forward=forward,
            ) as sentinel,
            plan.attach(model),
        ):
            for step, batch in enumerate(sentinel.steps(plan.batches(batches))):
                before(step)
                sentinel.backward(forward(model, batch))
                sentinel.step()
        return sentinel.incidents

    return run


def records(count):
    return [
        {"x": torch.randn(8, 6), "y": torch.randn(8, 4), "id": [f"r{n}-{i}" for i in range(8)]}
        for n in range(count)
    ]


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def test_a_record_on_another_scale_is_named(incidents_of):
    batches = records(3)
    batches[2]["y"][5] *= 1e9
    (incident,) = incidents_of(net(), batches)
    found = incident.diagnosis
    assert (found.cause, found.phase) == ("data", "input")
    assert [(s.position, s.id, s.field) for s in incident.samples] == [(5, "r2-5", "y")]
    assert "the gradient norm is" in found.evidence[0]
    assert any("reaches" in text and "in y" in text for text in found.evidence)
    assert "r2-5" in found.remedy[0]


@pytest.mark.parametrize("known", [True, False])
def test_a_weight_of_which_a_bit_was_flipped(known, incidents_of):
    """The one weight that a known-good state shows to have jumped alone; without one nobody can tell."""
    plan = FaultPlan([FlipBit(steps=(4,), target="parameter", name="2.weight", bit=28, index=(1, 3))])
    callbacks = [Rollback(every=1, confirm_after=1, after=9)] if known else []
    model = net()
    model[2].weight.data[1, 3] = 2.5  # with this bit flipped it is 2**32 times as large
    incident, *_ = incidents_of(model, records(5), *callbacks, plan=plan)
    found = incident.diagnosis
    assert found.module == "2"
    assert "2.weight[1, 3]" in found.evidence[0]
    if known:
        assert (found.cause, found.confidence) == ("hardware", 0.7)
        assert "2**32 times as much" in found.evidence[0]
        assert "roll back" in found.remedy[0]
    else:
        assert found.cause == "unknown"
        assert "a flipped bit leaves a weight like that" in found.evidence[1]


def test_a_flipped_bit_that_makes_the_loss_overflow(incidents_of):
    """The operator that overflows is innocent, and so are data, precision and learning rate."""
    plan = FaultPlan([FlipBit(steps=(4,), target="parameter", name="2.weight", bit=30, index=(1, 3))])
    model = net()
    model[2].weight.data[1, 3] = 0.25
    incident, *_ = incidents_of(model, records(5), Rollback(every=1, confirm_after=1, after=9), plan=plan)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.module) == ("hardware", "forward", "")
    assert found.op == "aten.pow.Tensor_Scalar"
    assert "2.weight[1, 3]" in found.evidence[1]
    assert "2**128 times as much" in found.evidence[1]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "no memory, two steps": lambda p: torch.optim.SGD(p, lr=0.05),
}


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["embedding", "one-hot"])
def test_one_huge_gradient_of_one_row_is_no_flipped_bit(which, kind, run_dir):
    """A corrupt count moves the weight of one item, as it should, and its neighbours stay as they were."""
    items = 40

    def weights(model, item):
        return model(functional.one_hot(item, items).float()) if kind == "one-hot" else model(item)

    def loss(model, batch):
        return functional.poisson_nll_loss(weights(model, batch["item"])[:, 0], batch["count"])

    model = nn.Linear(items, 1, bias=False) if kind == "one-hot" else nn.Embedding(items, 1)
    nn.init.uniform_(model.weight, -0.2, 0.2)
    batches = [{"item": torch.randperm(30)[:6], "count": torch.randint(1, 4, (6,)).float()} for _ in range(9)]
    batches[6]["item"][0] = batches[7]["item"][0] = 35
    batches[6]["count"][0] = 1e10
    every = 2 if "two" in which else 1
    optimizer = OPTIMIZERS[which](model.parameters())
    with Sentinel(
        model,
        optimizer,
        callbacks=[NanCallback(), Rollback(every=every, confirm_after=1)],
        run_dir=run_dir,
        forward=loss,
    ) as sentinel:
        for batch in sentinel.steps(batches):
            sentinel.backward(loss(model, batch))
            sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause in ("unknown", "optimizer", "data")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_that_cannot_have_moved_it_leaves_the_device(optimizer, run_dir):
    """It divides by its own moments, so that a step is a few learning rates long at most."""
    model = net()
    model[2].weight.data[1, 3] = 0.25
    plan = FaultPlan([FlipBit(steps=(4,), target="parameter", name="2.weight", bit=30, index=(1, 3))])
    with (
        Sentinel(
            model,
            optimizer(model.parameters(), lr=1e-3),
            callbacks=[NanCallback(), Rollback(every=2, confirm_after=1, after=9)],
            run_dir=run_dir,
            forward=forward,
        ) as sentinel,
        plan.attach(model),
    ):
        for batch in sentinel.steps(plan.batches(records(5))):
            sentinel.backward(forward(model, batch))
            sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause == "hardware"
    assert "can have moved it by" in "; ".join(found.evidence)


def test_a_training_that_diverges_is_no_flipped_bit(incidents_of):
    """Many weights grow: that is the learning rate, not the device."""

    def diverge(step):
        if step == 3:
            model[2].weight.data.mul_(1e5)

    model = net()
    incident, *_ = incidents_of(
        model, records(4), Rollback(every=1, confirm_after=1, after=9), before=diverge
    )
    assert incident.diagnosis.cause != "hardware"


def test_a_step_that_is_as_large_as_ever_is_not_explained(incidents_of):
    (incident,) = incidents_of(net(), records(1), limit=1e-6)
    found = incident.diagnosis
    assert (found.cause, found.confidence) == ("unknown", 0.0)
    assert "the same values, bit for bit" in found.evidence[0]


class FakeRun:
    """What `find_lone_weight` reads of a run."""

    def __init__(self, **parameters):
        self.host = self
        self.known_good = None
        self._named = parameters

    def named_parameters(self):
        return iter(self._named.items())


def spike(*places, size=16):
    weights = torch.linspace(-1, 1, size)
    for place in places:
        weights[place] = 3e30
    return weights


def test_only_a_single_weight_counts():
    assert find_lone_weight(FakeRun(w=spike(3))).index == (3,)
    assert find_lone_weight(FakeRun(w=spike())) is None
    assert find_lone_weight(FakeRun(w=spike(3, 4))) is None
    assert find_lone_weight(FakeRun(v=spike(3), w=spike(4))) is None
    assert find_lone_weight(FakeRun(w=spike(3, size=5))) is None, "too few neighbours to tell what is usual"
    assert find_lone_weight(FakeRun(w=torch.tensor(3e30))) is None
    assert find_lone_weight(FakeRun(w=torch.empty(0))) is None
    assert (
        find_lone_weight(FakeRun(w=torch.ones(20, dtype=torch.int64), v=torch.ones(9, device="meta"))) is None
    )
    assert find_lone_weight(FakeRun(w=torch.eye(9).to_sparse())) is None
    assert find_lone_weight(FakeRun(w=spike(3).bfloat16())).name == "w"


# -- spikes ------------------------------------------------------------------------------------------


def spike_in(run_dir, batches, *, before=lambda step, model: None, more=()):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callbacks = [NanCallback(), SpikeCallback(), Retry(), *more]
    with Sentinel(model, optimizer, callbacks=callbacks, run_dir=run_dir, forward=forward) as sentinel:
        for step, batch in enumerate(sentinel.steps(batches)):
            before(step, model)
            sentinel.backward(forward(model, batch))
            sentinel.step(max_norm=1.0)
    return sentinel.incidents


def learnable(count):
    """Records that a linear model can learn, so that another rule stands out."""
    torch.manual_seed(1)
    truth = torch.randn(6, 4)
    found = []
    for _ in range(count):
        x = torch.randn(8, 6)
        found.append({"x": x, "y": x @ truth})
    return found


def test_a_batch_that_the_same_weights_do_not_spoil_is_to_blame(run_dir):
    batches = learnable(60)
    batches[50]["y"] = batches[50]["y"].flip(0) * 4  # labels of other records
    (incident,) = spike_in(run_dir, batches)
    assert (incident.step, incident.kind, incident.outcome.value) == (50, Kind.SPIKE, "reported")
    found = incident.diagnosis
    assert (found.cause, found.phase, incident.microbatch) == ("data", "input", 0)
    assert "with the batch of the last healthy step and the same weights the loss is" in found.evidence[0]


def test_weights_that_spoil_a_healthy_batch_too_are_to_blame(run_dir):
    def shake(step, model):
        if step == 50:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(2.0 * torch.randn(parameter.shape))

    incident, *_ = spike_in(run_dir, learnable(60), before=shake, more=[Rollback(every=5, confirm_after=2)])
    assert (incident.step, incident.kind) == (50, Kind.SPIKE)
    found = incident.diagnosis
    assert (found.cause, found.phase) == ("optimizer", "optimizer")
    assert "and the weights of step" in found.evidence[1]


def test_nothing_is_blamed_for_a_spike_in_every_batch_and_state(run_dir):
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.times = net(), 1.0

        def forward(self, x):
            return self.inner(x) * self.times

    torch.manual_seed(0)
    model = Once()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = [NanCallback(), SpikeCallback(), Retry(), Rollback(every=5, confirm_after=2)]
    with Sentinel(model, optimizer, callbacks=watch, run_dir=run_dir, forward=forward) as sentinel:
        for step, batch in enumerate(sentinel.steps(learnable(60))):
            model.times = 30.0 if step == 50 else 1.0
            sentinel.backward(forward(model, batch))
            sentinel.step(max_norm=1.0)
    (incident,) = sentinel.incidents
    assert incident.diagnosis.cause == "unknown"


def test_a_loss_scale_next_to_nothing_is_named(run_dir):
    """Its inverse is infinite, and so is what gradients are multiplied by."""
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = [NanCallback(), SpikeCallback(), Retry()]
    with Sentinel(
        model, optimizer, callbacks=watch, run_dir=run_dir, forward=forward, scaler=scaler
    ) as sentinel:
        for step, batch in enumerate(sentinel.steps(learnable(30))):
            if step == 25:
                scaler._scale.fill_(2.0**-140)
            sentinel.backward(forward(model, batch))
            sentinel.step(max_norm=1.0)
            if step == 25:
                scaler._scale.fill_(1024.0)
    (incident,) = sentinel.incidents
    assert incident.step == 25
    assert not sentinel.applied or sentinel.applied_steps == 29
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("precision", "backward")
    assert "infinite in float32" in incident.diagnosis.evidence[0]
