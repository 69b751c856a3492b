"""Bad records keep their names: by index in incidents, messages and `gradsentinel show`; sizes stay."""

# ruff: noqa: PLC0415 - a framework takes seconds to import, and only some tests need it

import pytest
import torch
from drivers import hf, pl
from drivers.bare import forget_accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training import Recorder, Task, quiet
from typer.testing import CliRunner

from gradsentinel import NanCallback
from gradsentinel.cli import app
from loops import seed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
BAD = 13
SIZE = 22


class Sizes(Recorder):
    """Hears of each batch once, however often it is computed."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def on_batch(self, event):
        super().on_batch(event)
        self.sizes.append(len(event.batch["x"]))


class Records(Dataset):
    """Without ids of their own; one is bad."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SIZE, 4, generator=generator)
        self.x[BAD, 1] = float("nan")

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index, :1]}


def net():
    seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def with_lightning(folder, record, loader, epochs, batch=4):
    import lightning.pytorch

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    given = pl.native(folder, record, NanCallback())
    pl.fit(Task(), given, module=Module(), loader=loader, max_epochs=epochs)


def with_hugging_face(folder, record, loader, epochs, batch=4):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, y):
            return {"loss": loss_of(self.net, {"x": x, "y": y})}

    from transformers import Trainer, TrainingArguments

    forget_accelerator()
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(
            str(folder / "out"),
            per_device_train_batch_size=batch,
            num_train_epochs=epochs,
            dataloader_drop_last=loader.drop_last,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=loader.dataset,
        callbacks=hf.native(folder, record, NanCallback()),
    )
    with quiet():
        trainer.train()


def with_fabric(folder, record, loader, epochs, batch=4):
    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    tool, model = Fabric(accelerator="cpu", devices=1), net()
    model, optimizer = tool.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with quiet():
        drawn = tool.setup_dataloaders(loader)
    loop(
        prepare(tool, model, optimizer, callbacks=[record, NanCallback()], run_dir=folder),
        tool,
        model,
        optimizer,
        drawn,
        epochs,
    )


def with_accelerate(folder, record, loader, epochs, batch=4):
    from accelerate import Accelerator

    from gradsentinel.integrations.accelerate import prepare

    forget_accelerator()
    tool, model = Accelerator(cpu=True), net()
    model, optimizer, drawn = tool.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    loop(
        prepare(tool, model, optimizer, callbacks=[record, NanCallback()], run_dir=folder),
        tool,
        model,
        optimizer,
        drawn,
        epochs,
    )


def loop(sentinel, tool, model, optimizer, loader, epochs):
    with sentinel:
        for _ in range(epochs):
            for batch in sentinel.steps(loader):
                tool.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()


DRIVERS = [with_lightning, with_hugging_face, with_fabric, with_accelerate]


@pytest.mark.parametrize("train", DRIVERS)
@pytest.mark.parametrize(("batch", "drop_last"), [(4, False), (4, True), (2, True)])
def test_a_bad_record_is_named_by_its_index_and_costs_no_batch_its_size(tmp_path, train, batch, drop_last):
    seed(0)
    record = Sizes()
    loader = DataLoader(Records(), batch_size=batch, shuffle=True, drop_last=drop_last)
    train(tmp_path, record, loader, 4, batch)
    whole, rest = divmod(SIZE, batch)
    assert record.sizes == ([batch] * whole + ([rest] if rest and not drop_last else [])) * 4
    (incident,) = record.run.incidents
    assert [sample.id for sample in incident.samples] == [BAD]
    assert f"id {BAD}" in incident.message
    assert f"id {BAD}" in incident.diagnosis.remedy[0]
    (entry,) = record.run.skipped.entries
    assert [part.bad_indices() for part in entry.parts] == [(BAD,)]
    shown = CliRunner().invoke(app, ["show", str(tmp_path), incident.id])
    assert shown.exit_code == 0, shown.output
    assert f"id {BAD}" in shown.output


@pytest.mark.parametrize("train", [with_fabric, with_accelerate])
def test_the_users_loader_is_as_it_was_when_the_loop_is_closed(tmp_path, train):
    loader = DataLoader(Records(), batch_size=4, shuffle=True)
    kind = type(loader.batch_sampler)
    train(tmp_path, Recorder(), loader, 1)
    assert type(loader.batch_sampler) is kind


@pytest.mark.parametrize("rows", [1, 2], ids=["packed", "in pairs"])
def test_rows_that_are_no_records_are_given_no_index(tmp_path, rows):
    def collate(records):
        x = torch.stack([one["x"] for one in records])
        x = x.reshape(1, -1) if rows == 1 else torch.cat([x, x])
        return {"x": x, "y": x[:, :1]}

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.weight * x.sum(1, keepdim=True)

    from lightning.fabric import Fabric

    from gradsentinel.integrations.lightning.fabric import prepare

    record, tool, model = Recorder(), Fabric(accelerator="cpu", devices=1), Sum()
    model, optimizer = tool.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    loader = DataLoader(Records(), batch_size=4, collate_fn=collate)
    loop(
        prepare(tool, model, optimizer, callbacks=[record, NanCallback()], run_dir=tmp_path),
        tool,
        model,
        optimizer,
        loader,
        1,
    )
    (incident,) = record.run.incidents
    assert incident.samples
    assert {sample.id for sample in incident.samples} == {None}
    (entry,) = record.run.skipped.entries
    assert [part.bad_indices() for part in entry.parts] == [()]
