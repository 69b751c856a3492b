"""Beside Lightning's own callbacks, in either order: they do what they did; a dropped step does not count."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
import torch
from drivers.pl import fit, native, state_of
from test_adapter_left_out import module_of
from training import Recorder, Task, Trouble

from gradsentinel import NanCallback, Retry, Rollback
from loops import differences

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def neighbours(folder):
    from lightning.pytorch import callbacks

    return [
        callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2),
        callbacks.EarlyStopping("loss", patience=1, mode="max", check_on_train_epoch_end=True),
        callbacks.EMAWeightAveraging(decay=0.5),
        callbacks.LearningRateMonitor(),
        callbacks.Timer(),
        callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    ]


def run(folder, task, ours, *, first, only=None):
    from lightning.pytorch.loggers import CSVLogger

    module = module_of(task)
    plain = type(module).training_step

    def training_step(self, batch, batch_idx):
        loss = plain(self, batch, batch_idx)
        self.log("loss", loss.detach(), on_epoch=True)
        return loss

    type(module).training_step = training_step
    theirs = neighbours(folder / "checkpoints")
    trainer = fit(
        Task(),
        [*ours, *theirs] if first else [*theirs, *ours],
        module=module,
        loader=task.loader(),
        max_epochs=3,
        enable_checkpointing=True,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    average = next(one for one in theirs if hasattr(one, "_average_model"))
    return trainer, average._average_model


@pytest.mark.parametrize("first", [True, False], ids=["before them", "behind them"])
def test_all_of_them_end_as_they_do_alone(tmp_path, first):
    alone, mean = run(tmp_path / "alone", Task(), [], first=first)
    ours = native(tmp_path / "run", Recorder(), NanCallback(), Retry(), Rollback(every=2, confirm_after=1))
    watched, watched_mean = run(tmp_path / "watched", Task(), ours, first=first)
    assert differences(state_of(alone), state_of(watched)) == []
    assert differences(mean.state_dict(), watched_mean.state_dict()) == []
    assert alone.global_step == watched.global_step
    assert alone.should_stop == watched.should_stop
    assert names(tmp_path / "alone") == names(tmp_path / "watched")


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize("first", [True, False], ids=["before them", "behind them"])
def test_an_average_takes_no_part_in_a_dropped_step(tmp_path, first):
    record = Recorder()
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    _, mean = run(tmp_path / "spoilt", spoilt, native(tmp_path / "run", record, NanCallback()), first=first)
    assert record.run.incidents
    assert all(torch.isfinite(value).all() for value in mean.state_dict().values())


def test_weights_that_are_averaged_at_the_end_are_those_of_the_steps_that_were_made(tmp_path):
    """StochasticWeightAveraging changes the schedule and swaps the weights when training ends."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def train(name, task, given, *, first):
        swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
        module = module_of(task)
        module.configure_optimizers = lambda: task.optimizer(module.net)
        module.net.norm = torch.nn.Identity()
        callbacks = [*given, swa] if first else [swa, *given]
        return fit(Task(), callbacks, module=module, loader=task.loader(), max_epochs=3, limit_val_batches=0)

    alone = train("alone", Task(), [], first=True)
    for first in (True, False):
        given = native(tmp_path / str(first), Recorder(), NanCallback(), Rollback(every=2))
        watched = train("watched", Task(), given, first=first)
        assert differences(state_of(alone), state_of(watched)) == []
