"""What a module logs is what its steps came to: in the lines of loggers, in epoch means, and for monitors."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import math

import pytest
import torch
from drivers.pl import fit, native
from training import Recorder, Task, Trouble

from gradsentinel import NanCallback, Outcome, Retry
from loops import differences, seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def module_of(task, *, manual=False, late=False):
    """Logs the loss at both levels, and has a torchmetric that adds in place."""
    import lightning.pytorch
    import torchmetrics

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.net()
            self.automatic_optimization = not manual
            self.mean = torchmetrics.MeanMetric(nan_strategy="ignore")
            self.sum = torchmetrics.SumMetric(nan_strategy="disable")
            self.epochs, self.seen, self.outputs = [], [], []

        def training_step(self, batch, batch_idx):
            loss = task.loss(self.net, batch)
            if not late:
                self.told(loss)
            if not manual:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if late:
                self.told(loss)
            return loss

        def told(self, loss):
            self.mean(loss)
            self.sum(loss)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log_dict({"mean": self.mean, "sum": self.sum}, on_step=False, on_epoch=True)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(float(self.trainer.callback_metrics.get("loss", -1.0)))
            self.outputs.append(float(outputs["loss"]) if outputs else None)

        def on_train_epoch_end(self):
            names = ("loss_epoch", "mean", "sum")
            self.epochs.append([float(self.trainer.callback_metrics[name]) for name in names])

        def configure_optimizers(self):
            optimizer = task.optimizer(self.net)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"}]

    return Module()


class Lines:
    """The lines that a logger was given, by their step."""

    def __new__(cls):
        from lightning.pytorch.loggers import Logger

        class Kept(Logger):
            name, version = "kept", 0

            def __init__(self):
                super().__init__()
                self.losses = []

            def log_metrics(self, metrics, step=None):
                if "loss_step" in metrics:
                    self.losses.append(metrics["loss_step"])

            def log_hyperparams(self, params):
                pass

        return Kept()


def run(task, given, *, manual=False, late=False, **settings):
    from lightning.pytorch.callbacks import EarlyStopping

    seed(5)
    stop = EarlyStopping("loss_epoch", patience=9, check_on_train_epoch_end=True)
    lines = Lines()
    module = module_of(task, manual=manual, late=late)
    clip = {} if manual else {"gradient_clip_val": task.max_norm}
    trainer = fit(
        Task(accumulate=1 if manual else task.accumulate, max_norm=None if manual else task.max_norm),
        [stop, *given],
        module=module,
        loader=task.loader(),
        max_epochs=3,
        logger=lines,
        log_every_n_steps=1,
        default_root_dir="unused",
        **clip,
        **settings,
    )
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return module, lines.losses, (trainer.current_epoch, rate)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_healed_step_leaves_no_trace_in_the_log(tmp_path, accumulate, precision):
    alone, lines, end = run(Task(accumulate=accumulate, random=True), [], precision=precision)
    record = Recorder()
    spoilt = Task(accumulate=accumulate, random=True, trouble=Trouble(loss={2: NAN}))
    given = native(tmp_path, record, NanCallback(), Retry())
    healed, told, ended = run(spoilt, given, precision=precision)
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert healed.epochs == alone.epochs
    assert told == lines
    assert ended == end
    if accumulate == 1:
        assert healed.seen == alone.seen
        assert healed.outputs == alone.outputs
    assert differences(healed.net.state_dict(), alone.net.state_dict()) == []


@pytest.mark.parametrize("late", [False, True])
def test_nor_in_manual_optimization(tmp_path, late):
    alone, lines, end = run(Task(random=True), [], manual=True, late=late)
    record = Recorder()
    spoilt = Task(random=True, trouble=Trouble(loss={2: NAN}))
    healed, told, ended = run(
        spoilt, native(tmp_path, record, NanCallback(), Retry()), manual=True, late=late
    )
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert (healed.epochs, told, ended) == (alone.epochs, lines, end)
    assert healed.seen == alone.seen


@pytest.mark.parametrize("manual", [False, True])
def test_a_dropped_step_is_in_no_mean_and_ends_no_run_but_is_shown(tmp_path, manual):
    record = Recorder()
    spoilt = Task(trouble=Trouble(loss={5: NAN}, transient=False))  # the last one of an epoch
    dropped, told, ended = run(spoilt, native(tmp_path, record, NanCallback()), manual=manual)
    assert [one.step for one in record.run.incidents] == [5, 11, 17]  # in each epoch
    assert ended[0] == 3
    assert math.isnan(told[5])
    made = record.losses[:5]
    mean, metric, total = dropped.epochs[0]
    assert mean == pytest.approx(sum(made) / 5, rel=1e-5)
    assert metric == pytest.approx(sum(made) / 5, rel=1e-5)
    assert total == pytest.approx(sum(made), rel=1e-5)
    assert dropped.seen[5] == dropped.seen[4]
    assert all(map(math.isfinite, dropped.seen))
    assert all(math.isfinite(value) for values in dropped.epochs for value in values)


def test_the_first_step_of_a_run_may_be_the_one_that_is_dropped(tmp_path):
    record = Recorder()
    spoilt = Task(trouble=Trouble(loss={0: NAN}, transient=False))
    dropped, told, ended = run(spoilt, native(tmp_path, record, NanCallback()))
    assert math.isnan(told[0])
    assert dropped.seen[0] == -1.0  # nothing to be monitored yet
    assert dropped.epochs[0][0] == pytest.approx(sum(record.losses[1:6]) / 5, rel=1e-5)
    assert ended[0] == 3
