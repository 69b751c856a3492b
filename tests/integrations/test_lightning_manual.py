"""Manual optimization: a step is computed again as far as it can be known how the module makes it."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
import torch
from drivers.pl import fit, native, state_of
from test_lightning import with_scaler
from torch import nn
from training import Recorder, Task, Trouble

from gradsentinel import NanCallback, Outcome, Retry
from loops import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def module_of(task: Task, step):
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.net = task.net()
            self.count = 0

        def training_step(self, batch, batch_idx):
            step(self, batch, batch_idx)

        def configure_optimizers(self):
            return task.optimizer(self.net)

    return Module()


def run(folder, task, step, *callbacks, **settings):
    record = Recorder()
    given = native(folder, record, NanCallback(), *callbacks) if callbacks else []
    trainer = fit(Task(max_norm=None), given, module=module_of(task, step), loader=task.loader(), **settings)
    return state_of(trainer), record


def plain(task):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(task.loss(module.net, batch))
        module.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()
        module.untoggle_optimizer(optimizer)

    return step


def careless(task):
    """Handles errors of its own, and counts windows in an attribute before the backward pass."""

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        module.count += 1
        if module.count % 3 == 1:
            optimizer.zero_grad()
        try:
            module.manual_backward(task.loss(module.net, batch) / 3)
        except Exception as error:
            raise AssertionError from error
        if module.count % 3 == 0:
            optimizer.step()

    return step


@pytest.mark.parametrize("make", [plain, careless])
def test_a_transient_fault_leaves_no_trace_however_the_step_is_written(tmp_path, make):
    alone, _ = run(tmp_path / "a", *with_step(make, Task(random=True)))
    spoilt = Task(random=True, trouble=Trouble(loss={4: NAN}))
    retried, record = run(tmp_path / "b", *with_step(make, spoilt), Retry())
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert differences(alone, retried) == []


def with_step(make, task):
    return task, make(task)


def test_with_a_gradscaler_too(tmp_path):
    alone, _ = run(tmp_path / "a", *with_step(scaled, Task(random=True)), plugins=[with_scaler(16.0)])
    spoilt = Task(random=True, trouble=Trouble(loss={2: NAN}))
    retried, record = run(tmp_path / "b", *with_step(scaled, spoilt), Retry(), plugins=[with_scaler(16.0)])
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert differences(alone, retried) == []


def scaled(task):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(task.loss(module.net, batch))
        optimizer.step()

    return step


def two_backward_passes(task):
    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(task.loss(module.net, batch))
        module.manual_backward(nn.functional.mse_loss(module.net(batch["x"]), torch.zeros(8, 4)))
        optimizer.step()

    return step


def test_a_step_of_two_backward_passes_is_handed_over_and_says_why(tmp_path):
    spoilt = Task(trouble=Trouble(loss={2: NAN}))
    _, record = run(tmp_path, *with_step(two_backward_passes, spoilt), Retry())
    (incident,) = record.run.incidents
    assert incident.outcome is Outcome.SKIPPED
    assert any("exactly one backward pass" in note for note in incident.notes)


def two_steps(task):
    """The second on the same batch, as when a policy is trained for several rounds."""

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()
        for number in range(2):
            optimizer.zero_grad()
            module.count = number
            loss = nn.functional.cross_entropy(module.net(batch["x"]), batch["y"]) * (1 + number)
            if task.trouble.loss and batch_idx == 3 and number == task.trouble.loss["in"]:
                if not task.trouble.seen:
                    loss = loss * NAN
                task.trouble.seen.add(number)
            module.manual_backward(loss)
            optimizer.step()

    return step


@pytest.mark.parametrize(("number", "outcome"), [(0, Outcome.RETRIED), (1, Outcome.SKIPPED)])
def test_of_two_steps_on_one_batch_the_first_can_be_computed_again(tmp_path, number, outcome):
    spoilt = Task(trouble=Trouble(loss={"in": number}))
    _, record = run(tmp_path, *with_step(two_steps, spoilt), Retry())
    (incident,) = record.run.incidents
    assert (incident.step, incident.outcome) == (2 * 3 + number, outcome)
    assert len(record.applied) == 12
    if number:
        assert any("has made a step on this batch before" in note for note in incident.notes)
