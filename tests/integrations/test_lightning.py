"""Lightning: callbacks of the same names, and everything that a Trainer may be told to do."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import json
from pathlib import Path

import pytest
import torch
from drivers.pl import fit, native, state_of
from torch import nn
from training import Recorder, Task, Trouble, quiet

from gradsentinel import (
    Action,
    ConfigurationError,
    Kind,
    NanCallback,
    Outcome,
    Retry,
    Rollback,
)
from loops import Net, differences, seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


def test_a_trainer_takes_them_literally_in_any_order_and_keeps_its_own(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradsentinel.integrations.lightning import NanCallback, Rollback

    for given in ([NanCallback(), Rollback()], [Rollback(), NanCallback()]):
        task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
        keep = ModelCheckpoint(dirpath=tmp_path / str(id(given)), save_top_k=-1, every_n_train_steps=2)
        trainer = fit(task, [keep, *given], enable_checkpointing=True, default_root_dir=tmp_path)
        assert trainer.callbacks[-1] is keep
        assert trainer.global_step == 6
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5
        assert given[0].callback is not given[1].callback
        assert len(list((tmp_path / str(id(given))).glob("*.ckpt"))) == 3


def test_state_keys_tell_settings_apart_and_attributes_are_those_inside():
    from gradsentinel.integrations.lightning import MagnitudeCallback, Rollback

    one, two = MagnitudeCallback(max_global_norm=1.0), MagnitudeCallback(max_global_norm=2.0)
    assert one.state_key != two.state_key
    assert one.state_key == MagnitudeCallback(max_global_norm=1.0).state_key
    assert (one.max_global_norm, Rollback().known_good_steps) == (1.0, ())
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = Rollback().nonsense
    with pytest.raises(ConfigurationError, match="every=0"):
        Rollback(every=0)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_they_are_callbacks_of_both_packages(package):
    import importlib

    from gradsentinel.integrations.lightning import NanCallback

    base = importlib.import_module(package).Callback
    assert isinstance(NanCallback(), base)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16-mixed"},
        {"gradient_clip_algorithm": "value"},
        {"limit_train_batches": 4},
        {"overfit_batches": 2, "max_epochs": 2},
        {"max_steps": 3, "max_epochs": -1},
        {"limit_val_batches": 0, "max_epochs": 2},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_healthy_run_is_untouched_however_the_trainer_is_set(tmp_path, settings):
    def run(given):
        seed(5)
        return fit(Task(count=5, random=True), given, **settings)

    alone = run([])
    draws = torch.rand(2)
    watched = run(native(tmp_path, Recorder(), NanCallback(), Rollback(every=2, confirm_after=1), Retry()))
    assert torch.equal(draws, torch.rand(2))
    assert differences(state_of(alone), state_of(watched)) == []
    assert alone.global_step == watched.global_step > 0


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16-mixed"}, {"gradient_clip_algorithm": "value"}], ids=str
)
def test_a_dropped_step_changes_nothing_however_the_trainer_is_set(tmp_path, settings):
    spoilt = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    dropped = fit(spoilt, native(tmp_path, Recorder(), NanCallback()), **settings)
    without = fit(Task(without=(2,)), [], **settings)
    assert differences(state_of(dropped), state_of(without)) == []


def with_scaler(scale: float):
    from lightning.pytorch.plugins.precision import MixedPrecision

    class OnCpu(MixedPrecision):
        """fp16 scaling with fp32 arithmetic: CPUs have the one and not the other."""

        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    return OnCpu("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


@pytest.mark.parametrize("scale", [2.0**4, 2.0**127], ids=["found", "searching"])
def test_a_gradscaler_is_left_to_its_search_and_the_run_untouched(tmp_path, scale):
    def run(given):
        return fit(Task(count=8, accumulate=2), given, plugins=[with_scaler(scale)])

    alone, watched = run([]), run(native(tmp_path, Recorder(), NanCallback(), Retry()))
    assert differences(state_of(alone), state_of(watched)) == []
    scalers = [one.precision_plugin.scaler for one in (alone, watched)]
    assert scalers[0].state_dict() == scalers[1].state_dict()


def test_under_fp16_the_loss_is_judged_unscaled_and_a_nan_step_retried(tmp_path):
    record = Recorder()
    alone = fit(Task(count=8, accumulate=2), [], plugins=[with_scaler(16.0)])
    spoilt = Task(count=8, accumulate=2, trouble=Trouble(loss={5: NAN}))
    result = fit(spoilt, native(tmp_path, record, NanCallback(), Retry()), plugins=[with_scaler(16.0)])
    assert differences(state_of(alone), state_of(result)) == []
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    plain = Task(count=8, accumulate=2)
    first = float(plain.loss(plain.net(), next(iter(plain.loader()))).detach())
    assert record.losses[0] == pytest.approx(first, rel=0.3)  # about one, and not sixteen times that


def test_a_persistent_nan_under_fp16_is_dropped_and_the_schedule_waits(tmp_path):
    spoilt = Task(count=6, trouble=Trouble(loss={2: NAN}, transient=False))
    record = Recorder()
    trainer = fit(spoilt, native(tmp_path, record, NanCallback()), plugins=[with_scaler(16.0)])
    assert record.applied == [True, True, False, True, True, True]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 5


def gan(task: Task):
    import lightning.pytorch as pl

    class Gan(pl.LightningModule):
        """Two players on the same batch, each with a scheduler of its own."""

        def __init__(self):
            super().__init__()
            seed(0)
            self.automatic_optimization = False
            self.one, self.two = Net(), Net()

        def training_step(self, batch, batch_idx):
            for index, net in enumerate((self.one, self.two)):
                optimizer = self.optimizers()[index]
                loss = nn.functional.cross_entropy(net(batch["x"]), batch["y"])
                if index == 1:
                    loss = task.trouble.strike(int(batch["number"][0]), net, loss)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self):
            pair = [task.optimizer(self.one), task.optimizer(self.two)]
            return pair, [task.scheduler(one) for one in pair]

    return Gan()


def test_of_two_optimizers_only_the_bad_step_of_one_is_dropped(tmp_path):
    def run(task, given):
        return fit(Task(max_norm=None), given, module=gan(task), accumulate_grad_batches=1)

    healthy, watched = run(Task(), []), run(Task(), native(tmp_path / "h", NanCallback(), Rollback(every=2)))
    assert differences(state_of(healthy), state_of(watched)) == []
    record = Recorder()
    spoilt = run(
        Task(trouble=Trouble(loss={2: NAN}, transient=False)), native(tmp_path / "s", record, NanCallback())
    )
    ours, theirs = spoilt.lightning_module.state_dict(), healthy.lightning_module.state_dict()
    assert [
        name for name in ours if name.startswith("one.") and not torch.equal(ours[name], theirs[name])
    ] == []
    assert [one.scheduler.last_epoch for one in spoilt.lr_scheduler_configs] == [6, 5]
    assert record.applied.count(False) == 1
    assert (spoilt.global_step, len(record.applied)) == (12, 12)
    assert all(torch.isfinite(value).all() for value in ours.values())


def test_a_run_goes_on_from_a_checkpoint_with_its_counters_and_budgets(tmp_path):
    path = tmp_path / "half.ckpt"
    whole = fit(Task(count=6), [], max_epochs=2)
    record = Recorder()
    first = fit(
        Task(trouble=Trouble(loss={2: NAN})),
        native(tmp_path / "a", record, NanCallback(), Rollback()),
        max_epochs=1,
    )
    first.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert [key for key in saved["callbacks"] if key.startswith("gradsentinel")] == ["gradsentinel.Rollback"]
    assert saved["gradsentinel"]["callbacks"]["Skip"] == {"spent": [2]}  # which nobody has put in the list

    again = Recorder()
    order = native(tmp_path / "b", NanCallback(), again)  # in another order, and without the Rollback
    resumed = fit(Task(), order, max_epochs=2, path=path)
    assert again.run.step == again.run.iteration == 12
    assert len(again.applied) == 6
    assert resumed.global_step == whole.global_step == 12
    skip = next(one for one in again.run.remember() if one == "Skip")
    assert again.run.remember()[skip] == {"spent": [2]}


def test_a_healthy_run_resumed_ends_as_one_that_was_never_interrupted(tmp_path):
    whole = fit(Task(), [], max_epochs=2)
    first = fit(Task(), native(tmp_path / "a", NanCallback(), Rollback(every=2)), max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(
        Task(),
        native(tmp_path / "b", NanCallback(), Rollback(every=2)),
        max_epochs=2,
        path=tmp_path / "half.ckpt",
    )
    assert differences(whole.lightning_module.state_dict(), resumed.lightning_module.state_dict()) == []


def test_a_fit_without_training_leaves_nothing_behind(tmp_path):
    trainer = fit(Task(), native(tmp_path, NanCallback()), limit_train_batches=0)
    assert trainer.global_step == 0
    assert "process_dataloader" not in vars(trainer.strategy)
    assert not tmp_path.joinpath("incidents").exists()


def test_fit_twice_goes_on_with_fresh_callbacks(tmp_path):
    record = Recorder()
    given = native(tmp_path, record, NanCallback(), Rollback(every=2, confirm_after=1))
    task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    trainer = fit(task, given)
    trainer.fit_loop.max_epochs = 2
    with quiet():
        trainer.fit(trainer.lightning_module, task.loader())
    second = given[0].callback
    assert second is not record
    assert (len(record.applied), len(second.applied)) == (6, 6)
    assert second.run.step == 12
    assert [one.step for one in second.run.incidents] == [8]
    assert "optimizer_step" not in vars(trainer.strategy)


def test_an_average_of_the_weights_stands_still_with_a_dropped_step_and_is_rolled_back(tmp_path):
    from lightning.pytorch.callbacks import WeightAveraging

    def run(task, before, after, folder):
        average = WeightAveraging()
        given = [*(native(folder, *before) if before else []), average, *after]
        trainer = fit(task, given)
        return average._average_model, trainer

    dropped, _ = run(
        Task(trouble=Trouble(loss={2: NAN}, transient=False)), [Recorder(), NanCallback()], [], tmp_path / "a"
    )
    without, _ = run(Task(without=(2,)), [], [], tmp_path / "b")
    assert differences(dropped.state_dict(), without.state_dict()) == []

    record = Recorder()
    task = Task(trouble=Trouble(loss={4: NAN}, transient=False))
    nan = NanCallback(action=Action.ROLLBACK)
    back, trainer = run(task, [record, nan, Rollback(every=2, confirm_after=1)], [], tmp_path / "c")
    shorter, _ = run(Task(without=(2, 3, 4)), [], [], tmp_path / "d")
    assert record.run.incidents[0].outcome is Outcome.ROLLED_BACK
    assert differences(back.state_dict(), shorter.state_dict()) == []
    assert vars(trainer.callbacks[-1]).get("on_train_batch_end") is None


def test_events_go_into_the_files_of_lightnings_own_tensorboard_logger(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gradsentinel.integrations.lightning import NanCallback, TensorBoardCallback

    board = TensorBoardLogger(tmp_path, name="board")
    task = Task(trouble=Trouble(loss={2: NAN}, transient=False))
    with quiet():
        fit(task, [TensorBoardCallback(), NanCallback()], logger=board, log_every_n_steps=1)
    assert len(list(Path(board.log_dir).rglob("events.out.tfevents.*"))) == 1
    read = EventAccumulator(board.log_dir)
    read.Reload()
    tags = read.Tags()
    assert {"loss", "gradsentinel/grad_norm", "gradsentinel/skipped"} <= set(tags["scalars"])
    assert "gradsentinel/incident/text_summary" in tags["tensors"]
    incident = next((Path(board.log_dir) / "gradsentinel" / "incidents").iterdir())
    assert json.loads((incident / "incident.json").read_text())["outcome"] == "skipped"


def test_a_step_that_is_computed_again_logs_and_counts_once(tmp_path):
    import lightning.pytorch as pl
    from torchmetrics import MeanMetric

    class Counting(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.net()
            self.mean = MeanMetric()
            self.steps = []

        def training_step(self, batch, batch_idx):
            loss = task.loss(self.net, batch)
            self.steps.append(batch_idx)
            self.mean.update(1.0)
            self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
            return {"loss": loss}

        def configure_optimizers(self):
            return task.optimizer(self.net)

    task = Task(accumulate=2, trouble=Trouble(loss={3: NAN}))
    module = Counting()
    record = Recorder()
    trainer = fit(task, native(tmp_path, record, NanCallback(), Retry()), module=module)
    assert [one.outcome for one in record.run.incidents] == [Outcome.RETRIED]
    assert module.steps[:6] == [0, 1, 2, 3, 2, 3]  # each with the number of its batch
    assert float(module.mean.weight) == 6
    assert float(trainer.callback_metrics["sum"]) == sum(range(6))
    assert "log" not in vars(module)


def test_a_module_that_clips_by_itself_is_judged_before_that(tmp_path):
    import lightning.pytorch as pl

    class Clips(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.net()

        def training_step(self, batch, batch_idx):
            return task.loss(self.net, batch)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

        def configure_optimizers(self):
            return task.optimizer(self.net)

    task = Task(max_norm=None, trouble=Trouble(gradient={2: NAN}, transient=False))
    record = Recorder()
    fit(task, native(tmp_path, record, NanCallback()), module=Clips())
    (incident,) = record.run.incidents
    assert [tensor.name for tensor in incident.tensors] == ["net.head.weight"]
    assert incident.kind is Kind.NONFINITE_GRADIENT


def test_finite_gradients_whose_squares_overflow_are_clipped_and_not_zeroed(tmp_path):
    task = Task(trouble=Trouble(loss={2: 1e22}, transient=False))
    record = Recorder()
    fit(task, native(tmp_path, record, NanCallback()))
    assert record.run.incidents == []
    assert record.applied == [True] * 6
    assert record.states[1] != record.states[2]
