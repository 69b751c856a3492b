"""A step that is fine when run again: the device is blamed only if the replay has shown what it repeats."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradsentinel import Action, Detector, Finding, Kind, NanCallback, Sentinel
from gradsentinel.again.scene import MicroBatch
from gradsentinel.events import RecoveryEvent
from gradsentinel.faults import FaultPlan, FlipBit, PoisonActivation

NAN = float("nan")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def records(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(4, (8,), generator=generator)}
        for _ in range(count)
    ]


def loss_of(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.fixture
def incident_of(run_dir):
    """Run steps of a loop of one's own; step 2 is the odd one. Returns its incident."""

    def run(odd: Callable[..., None], *, forward: Any = loss_of, model: Any = None, accumulate: int = 1):
        model = net() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Sentinel(
            model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, forward=forward
        ) as sentinel:
            for number, batch in enumerate(sentinel.steps(records(4 * accumulate), accumulate=accumulate)):
                if number == 2 * accumulate:
                    odd(sentinel, model, batch)
                else:
                    sentinel.backward(forward(model, batch))
                sentinel.step()
        (incident,) = sentinel.incidents
        return incident

    return run


# -- loops that compute something else than forward= -------------------------------------------------


def augmented(sentinel, model, batch):
    sentinel.backward(loss_of(model, {**batch, "x": batch["x"] / batch["x"].new_zeros(6)}))


def spoilt_in_place(sentinel, model, batch):
    kept = batch["x"].clone()
    batch["x"][3] = NAN
    loss = loss_of(model, {**batch, "x": batch["x"].clone()})
    batch["x"].copy_(kept)
    sentinel.backward(loss)


def further_term(sentinel, model, batch):
    """Of value 0, and with a derivative that is not finite: the loss is the same to the last bit."""
    penalty = (model[3].weight * 0).pow(2).sum().sqrt()
    sentinel.backward(loss_of(model, batch) + penalty)


def further_term_of_no_gradient(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch) + torch.log(-model[3].bias.detach().abs()).sum())


def another_backward_pass(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    (model[0].weight * 0).abs().sqrt().sum().backward()


def two_losses(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    sentinel.backward((model[0].weight * 0).abs().sqrt().sum())


def rebound(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 0


def rebound_in_part(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    mask = torch.ones(16, 1)
    mask[5] = math.inf
    model[0].weight.grad = model[0].weight.grad * mask


def rebound_one(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    model[2].bias.grad = model[2].bias.grad * NAN


def written_in_place(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    model[3].weight.grad[1, 2] = NAN


def divided_unseen(sentinel, model, batch):
    """Written through `.data`, which no version of the tensor counts."""
    sentinel.backward(loss_of(model, batch))
    model[0].weight.grad.data[5].div_(0)


def divided_detached(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    model[0].weight.grad.data.detach()[5, 1] = NAN


def divided_in_numpy(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch))
    model[0].weight.grad.numpy()[[2, 5]] = NAN


def hooked_activation(sentinel, model, batch):
    """A hook on an activation that the loop alone registers: singular where a channel gets no gradient."""
    hidden = model[2](model[1](model[0](batch["x"])))
    seen = model[3](hidden * torch.ones(16).index_fill(0, torch.tensor([4]), 0))
    hidden.register_hook(lambda g: torch.where(g.norm(dim=0) == 0, g / g.norm(dim=0), g))
    sentinel.backward(functional.cross_entropy(seen, batch["y"]))


def scaled_by_hand(sentinel, model, batch):
    sentinel.backward(loss_of(model, batch), gradient=torch.tensor(1e38) * 10)


def other_dtype(sentinel, model, batch):
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, {**batch, "x": batch["x"] * 1e6})
    sentinel.backward(loss)


LOOPS = [
    further_term, further_term_of_no_gradient, another_backward_pass, two_losses,
    rebound, rebound_in_part, rebound_one, written_in_place, scaled_by_hand, other_dtype,
    divided_unseen, divided_detached, divided_in_numpy, hooked_activation,
]  # fmt: skip


@pytest.mark.parametrize("odd", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_that_computes_something_else_is_no_broken_device(odd, incident_of):
    found = incident_of(odd).diagnosis
    assert found.cause == "unknown", found.evidence
    assert found.evidence[1].startswith("run again from the same batch")
    assert found.remedy


@pytest.mark.parametrize(
    ("odd", "records"),
    [(augmented, []), (spoilt_in_place, [3])],
    ids=lambda loop: getattr(loop, "__name__", ""),
)
def test_a_loop_that_makes_bad_values_of_the_batch_is_no_broken_device(odd, records, incident_of):
    """What it gave to the model is known: given that, the model computes what the loop got."""
    incident = incident_of(odd)
    found = incident.diagnosis
    assert (found.cause, found.phase, found.confidence) == ("data", "input", 0.7), found.evidence
    assert [sample.position for sample in incident.samples] == records
    assert "made between the batch and the model" in found.evidence[0]
    assert "it is innocent" in found.evidence[2]
    assert "inside forward=" in found.remedy[0]


def test_a_model_in_another_mode(incident_of):
    def in_training(sentinel, model, batch):
        model.train()
        loss = loss_of(model, batch)
        model.eval()
        sentinel.backward(loss * torch.where(torch.tensor(loss.item() < 1e9), NAN, 1.0))

    def forward(model, batch):
        model.eval()
        return loss_of(model, batch)

    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    assert incident_of(in_training, model=model, forward=forward).diagnosis.cause == "unknown"


def test_a_closure_that_has_moved_on(incident_of):
    weight = [1.0]

    def forward(model, batch):
        return loss_of(model, batch) * weight[0]

    def stale(sentinel, model, batch):
        weight[0] = NAN
        loss = forward(model, batch)
        weight[0] = 1.0
        sentinel.backward(loss)

    assert incident_of(stale, forward=forward).diagnosis.cause == "unknown"


def test_a_loss_that_differs_in_its_last_bit(incident_of):
    """The gradients are NaN, the loss is finite and nearly what the replay's is: not the same computation."""

    def nearly(sentinel, model, batch):
        loss = loss_of(model, batch)
        model[3].weight.register_hook(spoil_once())
        sentinel.backward(loss * (1 + 2**-20))

    found = incident_of(nearly).diagnosis
    assert found.cause == "unknown"
    assert "forward= is not what the loop computes" in found.evidence[0]


def test_a_batch_that_was_written_to(incident_of, monkeypatch):
    """As noted when it was handed out: the replay begins with what is left of it."""
    monkeypatch.setattr(MicroBatch, "written", property(lambda self: self.index == 0))

    def odd(sentinel, model, batch):
        model[3].weight.register_hook(spoil_once())
        sentinel.backward(loss_of(model, batch))

    found = incident_of(odd).diagnosis
    assert found.cause == "unknown"
    assert "wrote to the batch" in found.evidence[0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 4)

    def forward(self, x):
        return self.lin(x) * 2


def test_a_batch_that_the_step_itself_spoils(sentinel_for):
    """Division in place: the NaN is in the batch when it is looked at, and the record is not to blame."""

    def forward(model, batch):
        batch["x"].div_(batch["x"].abs().amax(1, keepdim=True))
        return model(batch["x"]).pow(2).mean()

    model = nn.Linear(6, 4)
    sentinel = sentinel_for(model, forward)
    sentinel._watch.run.scene.notes_writes = True
    batch = records(1)[0]
    batch["x"][3] = 0
    for given in sentinel.steps([batch]):
        sentinel.backward(forward(model, given))
        sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause == "unknown"
    assert "wrote to its own batch" in found.evidence[0]


def test_a_step_that_was_over_when_it_was_looked_at(run_dir):
    """guard="device" finds out later: the weights have moved on, and the gradients are another step's."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Sentinel(
        model, optimizer, callbacks=[NanCallback()], run_dir=run_dir, forward=loss_of, guard="device"
    ) as sentinel:
        for number, batch in enumerate(sentinel.steps(records(5))):
            handle = model[2].register_forward_hook(
                lambda module, args, output: output.register_hook(spoil_once()) and None
            )
            if number != 2:
                handle.remove()
            sentinel.backward(loss_of(model, batch))
            handle.remove()
            sentinel.step()
    (incident,) = sentinel.incidents
    assert incident.diagnosis.cause == "unknown"
    assert "with the weights of now" in incident.diagnosis.evidence[1]


def test_compiled_code_that_is_fine_when_run_again(incident_of):
    """The replay runs eagerly: it is no witness of what the compiled code did."""
    model = Scaled()
    model.compile(backend="eager")

    def odd(sentinel, model, batch):
        model.lin.weight.register_hook(spoil_once())
        sentinel.backward(loss_of(model, batch))

    found = incident_of(odd, model=model).diagnosis
    assert found.cause == "unknown"
    assert "compiled" in found.evidence[0]


def test_compiled_code_that_is_wrong_again(incident_of):
    """Eagerly all is fine, and the compiled code is not: the compiler is to blame."""

    def miscompile(graph, _inputs):
        def run(*args):
            out = graph(*args)
            return tuple(part * NAN for part in out)

        return run

    model = Scaled()
    broken = []
    model.compile(backend=lambda graph, inputs: miscompile(graph, inputs) if broken else graph)

    def odd(sentinel, model, batch):
        broken.append(True)
        torch._dynamo.reset()
        sentinel.backward(loss_of(model, batch))
        sentinel.on(RecoveryEvent, mend)

    def mend(event):
        broken.clear()
        torch._dynamo.reset()

    found = incident_of(odd, model=model).diagnosis
    assert (found.cause, found.confidence) == ("operator", 0.9)
    assert "compiler" in found.evidence[0]


def test_not_enough_time_to_run_all_of_it_again(run_dir):
    model = net()
    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[NanCallback()],
        run_dir=run_dir,
        forward=loss_of,
        diagnosis_budget=1e-9,
    ) as sentinel:
        for batch in sentinel.steps(records(3), accumulate=3):
            sentinel.backward(loss_of(model, batch))
            if model[3].weight.grad is not None:
                model[3].weight.grad = model[3].weight.grad * NAN
            sentinel.step()
    found = sentinel.incidents[0].diagnosis
    assert found.cause == "unknown"
    assert "diagnosis_budget" in found.evidence[0]


# -- and a broken device -------------------------------------------------------------------------------


def spoil_once(value=NAN, index=(1, 2)):
    """A hook that spoils one element of a gradient the first time."""
    fired = []

    def hook(gradient):
        if fired:
            return gradient
        fired.append(True)
        return gradient.index_put([torch.tensor(i) for i in index], torch.tensor(value))

    return hook


@pytest.mark.parametrize("value", [NAN, math.inf])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_element_of_an_activations_gradient(value, accumulate, incident_of):
    """The loss is the same again: a hook that only the loop has does the same as a failing device."""

    def struck(sentinel, model, batch):
        handle = model[2].register_forward_hook(
            lambda module, args, output: output.register_hook(spoil_once(value)) and None
        )
        sentinel.backward(loss_of(model, batch))
        handle.remove()

    found = incident_of(struck, accumulate=accumulate).diagnosis
    assert (found.cause, found.phase) == ("unknown", "backward")
    assert "or a failing device" in found.evidence[0]
    assert "test the device" in found.remedy[0]


@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.float32, 1.0), (torch.float64, 1.0), (torch.float32, 1.5)]
)
def test_one_bit_that_a_division_by_zero_changes_is_no_flipped_one(dtype, weight, run_dir):
    """1 and Inf differ in one bit, 1.5 and NaN, too: only bits that no arithmetic makes are a proof."""
    model = nn.Linear(3, 1, bias=False).to(dtype)
    torch.nn.init.ones_(model.weight)

    def forward(model, batch):
        return model(batch).sum()

    with Sentinel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[NanCallback()],
        run_dir=run_dir,
        forward=forward,
    ) as sentinel:
        for batch in sentinel.steps([torch.tensor([[3.0, weight, 5.0]], dtype=dtype)]):
            sentinel.backward(forward(model, batch))
            model.weight.grad.data[0, 1] = math.inf if weight == 1.0 else NAN
            sentinel.step()
    assert sentinel.incidents[0].diagnosis.cause == "unknown"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_element_of_an_activation(accumulate, run_dir):
    """The loss is NaN, but not every gradient is: what is finite is the same again."""
    model = net()
    plan = FaultPlan([PoisonActivation(steps=(2,), module="0", index=(1, 3))])
    with (
        Sentinel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            callbacks=[NanCallback()],
            run_dir=run_dir,
            forward=loss_of,
        ) as sentinel,
        plan.attach(model),
    ):
        batches = plan.batches(records(4 * accumulate), accumulate=accumulate)
        for batch in sentinel.steps(batches, accumulate=accumulate):
            sentinel.backward(loss_of(model, batch))
            sentinel.step()
    (incident,) = sentinel.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.phase) == ("hardware", "forward")


def test_nothing_finite_is_left_to_show_it(incident_of):
    """The same fault where everything depends on everything: an honest "unknown"."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Softmax(dim=0))

    def struck(sentinel, model, batch):
        handle = model[1].register_forward_hook(lambda module, args, output: output * NAN)
        sentinel.backward(loss_of(model, batch))
        handle.remove()

    found = incident_of(struck, model=model).diagnosis
    assert found.cause == "unknown"
    assert "nothing finite is left" in found.evidence[0]


def test_what_comes_back_at_the_same_place_is_no_accident(run_dir):
    model = net()
    plan = FaultPlan([PoisonActivation(steps=(2, 4), module="0", index=(1, 3))])
    with (
        Sentinel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            callbacks=[NanCallback()],
            run_dir=run_dir,
            forward=loss_of,
        ) as sentinel,
        plan.attach(model),
    ):
        for batch in sentinel.steps(plan.batches(records(6))):
            sentinel.backward(loss_of(model, batch))
            sentinel.step()
    first, second = (incident.diagnosis for incident in sentinel.incidents)
    assert first.cause == "hardware"
    assert second.cause == "unknown"
    assert "came back" in second.evidence[0]


class Loud(Detector):
    def on_before_clip(self, event):
        return Finding(
            kind=Kind.MAGNITUDE, value=torch.tensor(event.step == 1), action=Action.SKIP, message="loud"
        )


def test_one_flipped_bit_is_told_from_arithmetic_that_changes_one_bit(run_dir):
    """Doubling an element changes one bit, too; a flipped bit of the exponent is no ordinary factor."""
    answers = []
    for factor in (2.0, None):
        model = net()
        plan = FaultPlan([] if factor else [FlipBit(steps=(1,), target="gradient", name="3.weight", bit=30)])
        with (
            Sentinel(
                model,
                torch.optim.SGD(model.parameters(), lr=0.01),
                callbacks=[NanCallback(), Loud()],
                run_dir=run_dir / str(factor),
                forward=loss_of,
            ) as sentinel,
            plan.attach(model),
        ):
            for number, batch in enumerate(sentinel.steps(plan.batches(records(2)))):
                sentinel.backward(loss_of(model, batch))
                if number == 1 and factor is not None:
                    model[3].weight.grad[1, 2] *= factor
                sentinel.step()
        answers.append(sentinel.incidents[-1].diagnosis)
    doubled, flipped = answers
    assert doubled.cause == "unknown"
    assert (flipped.cause, flipped.confidence) == ("hardware", 0.95)
