"""Bad records are named by their index and left out from then on, through the framework's own loaders."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
import torch
from drivers import hf, pl
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from training import BATCH, Recorder, Task, quiet

from gradsentinel import NanCallback, Rollback, SkipBatches
from loops import differences, seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NAN = float("nan")


class WholeBatchBad(Task):
    """Every record of the second micro-batch is bad, so that nothing of it is left."""

    def data(self):
        data = super().data()
        for record in data.records:
            if int(record["number"]) == 1:
                record["x"] = record["x"] * NAN
        return data


def module_of(task: Task):
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.net()
            self.drawn, self.validated = [], []

        def training_step(self, batch, batch_idx):
            self.drawn.append((self.current_epoch, batch_idx, int(batch["number"][0]), len(batch["x"])))
            return task.loss(self.net, batch)

        def validation_step(self, batch, batch_idx):
            self.validated.append(self.current_epoch)

        def val_dataloader(self):
            return Task(count=1).loader()

        def configure_optimizers(self):
            optimizer = task.optimizer(self.net)
            return [optimizer], [{"scheduler": task.scheduler(optimizer), "interval": "epoch"}]

    return Module()


def fit(folder, task, *, epochs=3, loader=None, accumulate=1, **settings):
    record, module = Recorder(), module_of(task)
    trainer = pl.fit(
        Task(accumulate=accumulate),
        pl.native(folder, record, NanCallback()),
        module=module,
        loader=task.loader() if loader is None else loader,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        **settings,
    )
    return trainer, module, record


@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_leaves_a_bad_record_out_and_keeps_the_size_of_its_batch(tmp_path, workers):
    task = Task(count=5, bad=(1,))
    loader = DataLoader(task.data(), batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)
    _, module, record = fit(tmp_path, task, loader=loader)
    assert len(record.run.incidents) == 1
    (entry,) = record.run.skipped.entries
    assert [part.bad_indices() for part in entry.parts] == [(1 * BATCH + 3,)]
    sizes = [size for _, _, number, size in module.drawn if number == 1]
    assert sizes == [8, 8, 8]
    assert record.applied == [True, False] + [True] * 13
    assert module.validated == [0, 1, 2]
    assert not isinstance(loader.batch_sampler, SkipBatches)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 5 + 4 + 4), (2, 3 + 2 + 2)])
def test_an_epoch_of_lightning_that_is_shorter_for_it_ends_like_any_other(tmp_path, accumulate, steps):
    trainer, module, record = fit(tmp_path, WholeBatchBad(count=5), accumulate=accumulate)
    assert len(record.run.incidents) == 1
    assert [number for epoch, _, number, _ in module.drawn if epoch == 2] == [0, 2, 3, 4]
    assert module.validated == [0, 1, 2]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert (trainer.global_step, len(record.applied)) == (steps, steps)
    assert all(record.applied[3:])


def test_in_a_new_process_lightning_leaves_it_out_from_the_first_epoch_on(tmp_path):
    fit(tmp_path, WholeBatchBad(count=5), epochs=1)
    _, module, record = fit(tmp_path, WholeBatchBad(count=5), epochs=1)
    assert record.run.incidents == []
    assert [number for _, _, number, _ in module.drawn] == [0, 2, 3, 4]


def test_wherever_a_shuffle_puts_it_and_through_a_sampler_of_ones_own(tmp_path):
    task = Task(bad=(1,))
    data = task.data()
    order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    own = SkipBatches(BatchSampler(order, BATCH, drop_last=True))
    for name, loader in (
        ("own", DataLoader(data, batch_sampler=own)),
        ("plain", DataLoader(data, batch_size=BATCH, shuffle=True)),
    ):
        _, _, record = fit(tmp_path / name, task, loader=loader, use_distributed_sampler=False)
        assert len(record.run.incidents) == 1, name
        (entry,) = record.run.skipped.entries
        assert [part.bad_indices() for part in entry.parts] == [(1 * BATCH + 3,)]


def test_a_loader_without_indices_is_left_as_it_is_and_drops_it_again(tmp_path):
    task = Task(count=4, bad=(1,))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(task.data().records)

    _, module, record = fit(tmp_path, task, loader=DataLoader(Stream(), batch_size=BATCH), epochs=2)
    assert [one.step for one in record.run.incidents] == [1, 5]
    assert len(module.drawn) == 8


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_with_the_trainer_of_hugging_face_too(tmp_path, shuffled, workers):
    record = Recorder()
    trainer = hf.hf_trainer(
        Task(count=5, bad=(1,)),
        tmp_path,
        hf.native(tmp_path / "run", record, NanCallback()),
        shuffled=shuffled,
        num_train_epochs=3,
        dataloader_num_workers=workers,
    )
    with quiet():
        trainer.train()
    assert len(record.run.incidents) == 1
    (entry,) = record.run.skipped.entries
    assert [part.bad_indices() for part in entry.parts] == [(1 * BATCH + 3,)]
    assert trainer.state.global_step == 15
    loader = trainer.callback_handler.train_dataloader
    assert not isinstance(loader.batch_sampler, SkipBatches)


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 5 + 4 + 4), (2, 3 + 2 + 2), (4, 2 + 1 + 1)])
def test_no_window_of_hugging_face_is_left_half_full(tmp_path, accumulate, steps):
    """Gradients of a last window that is never stepped would go into the next epoch's first step."""

    def run(name, task, given):
        settings = {"num_train_epochs": 3, "lr_scheduler_type": "constant"}
        return hf.train(task, tmp_path / name, given, **settings)

    record = Recorder()
    task = WholeBatchBad(count=5, accumulate=accumulate)
    trainer = run("spoilt", task, hf.native(tmp_path / "run", record, NanCallback()))
    assert len(record.run.incidents) == 1
    assert trainer.state.global_step == len(record.applied) == steps
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_new_process_of_hugging_face_leaves_it_out_from_the_first_epoch_on(tmp_path):
    for expected in (1, 0):
        record = Recorder()
        trainer = hf.train(
            WholeBatchBad(count=5), tmp_path, hf.native(tmp_path / "run", record, NanCallback())
        )
        assert len(record.run.incidents) == expected
        assert trainer.state.global_step == 4 + expected


def test_a_healthy_shuffled_run_is_drawn_in_the_same_order(tmp_path):
    def run(name, watched):
        seed(3)
        given = hf.native(tmp_path / name, Recorder(), NanCallback(), Rollback(every=2)) if watched else []
        trainer = hf.hf_trainer(
            Task(random=True), tmp_path / f"{name}-out", given, shuffled=True, num_train_epochs=2
        )
        with quiet():
            trainer.train()
        return trainer.model.state_dict()

    assert differences(run("alone", watched=False), run("watched", watched=True)) == []


def test_a_trainer_that_goes_on_in_an_epoch_which_left_a_batch_out_begins_where_it_was(tmp_path):
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    first, second = Recorder(), Recorder()
    whole = hf.train(
        WholeBatchBad(random=True), tmp_path, hf.native(tmp_path / "run", first, NanCallback()), **settings
    )
    assert len(first.losses) == 6 + 5
    resumed = hf.train(
        WholeBatchBad(random=True),
        tmp_path,
        hf.native(tmp_path / "run", second, NanCallback()),
        resume=str(tmp_path / "trainer" / "checkpoint-9"),
        **settings,
    )
    assert second.losses == first.losses[9:]
    assert differences(whole.model.state_dict(), resumed.model.state_dict()) == []
