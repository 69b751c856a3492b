"""Two ranks log the same of a step that was bad on one of them, whether it was healed or dropped."""

# ruff: noqa: PLC0415 - what a rank needs of a framework is imported there

import math
import os
import warnings
from pathlib import Path

import pytest
from drivers.pl import Lightning
from ranks import run_ranks
from training import Task, Trouble

from gradsentinel import NanCallback, Retry
from loops import seed

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
NAN = float("nan")
BAD = 3  # of rank 1


def fit(rank: int, folder: Path, trouble: Trouble, given: list | None) -> list[float]:
    import lightning.pytorch

    task = Task(random=True, trouble=trouble)

    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = task.net()
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = task.loss(self.net, batch)
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(float(self.trainer.callback_metrics["loss"]))

        def on_train_epoch_end(self):
            self.seen.append(float(self.trainer.callback_metrics["loss_epoch"]))

        def configure_optimizers(self):
            return task.optimizer(self.net)

    seed(rank)
    driver = Lightning()
    _, trainer = driver.trainer(
        task, driver.settings(folder, given), devices=2, strategy="ddp", use_distributed_sampler=False
    )
    module = Module()
    trainer.fit(module, task.loader())
    return module.seen


def train(rank: int, folder: Path) -> dict[str, list[float]]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        NODE_RANK="0",
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="x",
    )
    warnings.simplefilter("ignore")

    def trouble(*, transient: bool = True) -> Trouble:
        return Trouble(loss={BAD: NAN} if rank == 1 else {}, transient=transient)

    return {
        "alone": fit(rank, folder / "alone", Trouble(), None),
        "healed": fit(rank, folder / "healed", trouble(), [NanCallback(), Retry()]),
        "dropped": fit(rank, folder / "dropped", trouble(transient=False), [NanCallback()]),
    }


def test_ranks_agree_on_what_was_logged(tmp_path):
    one, two = run_ranks(lambda rank: train(rank, tmp_path), 2, tmp_path)
    assert one == two
    assert one["healed"] == one["alone"]
    assert all(map(math.isfinite, one["dropped"]))
    assert len(one["dropped"]) == len(one["alone"])
    assert one["dropped"] != one["alone"]
